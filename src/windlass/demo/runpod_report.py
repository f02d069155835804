"""What `windlass demo --on runpod` promises, and whether it was kept: by the database, and by the vendor's bill."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from windlass.cli.output import duration
from windlass.demo.cloud_report import RentedReport
from windlass.model.money import with_currency

# Why a pod of each kind of trouble is ended.
NO_GPU, NOT_CLAIMING, STUCK = "GPU_NOT_DETECTED", "GPU_READY_NOT_CLAIMING", "STUCK_TASK"


@dataclass(frozen=True, slots=True)
class PodLine:
    pod_id: str
    # None: no worker of ours had it.
    worker_id: str | None
    gpu: str
    ended_as: str | None
    seconds: int
    bill_micros: int
    ledger_micros: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunpodReport(RentedReport):
    pods: list[PodLine]
    pods_left: int
    # How often a program was started over SSH, by the pods' own count, and how often we wrote it down.
    starts: int
    prepared: int
    # The worker that was asked to end in the middle of a task, the task, and who completed that.
    drained_worker_id: str | None
    drained_task_id: int | None
    drained_completed_by: str | None
    volume_gb: int
    volume_grown_gb: int
    # What storage costs is not a worker's, and not in our ledger.
    volume_micros: int
    gpus: tuple[str, str]

    headings: ClassVar[tuple[str, ...]] = ("pod", "worker", "GPU", "ended as", "paid", "bill, micros", "ledger, micros")
    numbers: ClassVar[tuple[str, ...]] = ("paid", "bill, micros", "ledger, micros")

    def machines(self) -> Sequence[PodLine]:
        return self.pods

    def ended_as(self, code: str) -> list[PodLine]:
        return [line for line in self.pods if line.ended_as == code]

    def promises(self) -> dict[str, bool]:
        hired = {line.gpu for line in self.pods}
        return {
            **RentedReport.promises(self),
            **{f"no pod was ended with {code}": bool(self.ended_as(code)) for code in (NO_GPU, NOT_CLAIMING, STUCK)},
            f"{self.starts} programs were started over SSH and {self.prepared} written down": self.starts
            == self.prepared
            > 0,
            f"no pod has the second choice, {self.gpus[1]}": set(self.gpus) == hired,
            "no worker was asked to end in the middle of a task": self.drained_worker_id is not None,
            "the worker that was asked to end did not finish its task": self.drained_completed_by
            == self.drained_worker_id,
            f"the network volume has {self.volume_grown_gb} GB, and had {self.volume_gb}": self.volume_grown_gb
            > self.volume_gb,
            f"{self.pods_left} pods are left": not self.pods_left,
        }

    def lines(self) -> list[tuple[str, str]]:
        troubles = ", ".join(f"{code} {len(self.ended_as(code))}" for code in (NO_GPU, NOT_CLAIMING, STUCK))
        storage = with_currency(self.volume_micros, self.currency)
        return [
            *RentedReport.lines(self),
            (
                "pods",
                f"{len(self.pods)} hired, {len(self.pods) - self.pods_left} deleted, {self.pods_left or 'none'} left",
            ),
            ("started over SSH", f"{self.starts} programs, each once"),
            ("ended as broken", troubles),
            (f"stuck in {self.killed_task_id}", f"{self.killed_worker_id}, ended as {self.worker_ended_as}"),
            self.recovery(),
            (
                "asked to end",
                f"{self.drained_worker_id} at task {self.drained_task_id}, completed by "
                f"{self.drained_completed_by or 'nobody'}",
            ),
            ("network volume", f"grown from {self.volume_gb} to {self.volume_grown_gb} GB; {storage}, in no ledger"),
            *self.money_lines(),
        ]

    def table(self) -> list[tuple[object, ...]]:
        return [
            (
                line.pod_id,
                line.worker_id,
                line.gpu,
                line.ended_as,
                duration(line.seconds),
                f"{line.bill_micros:,}",
                f"{line.ledger_micros:,}",
            )
            for line in self.pods
        ]
