"""The result of a demo: numbers from the database and the vendor's bill, and the checks that they must pass."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from windlass.model.money import with_currency
from windlass.model.text_format import duration


@dataclass(frozen=True, slots=True)
class MachineBill:
    """One machine on the vendor's bill, with the cost of its worker in our ledger."""

    machine_id: str
    # None: the machine belongs to no worker.
    worker_id: str | None
    gpu: str | None
    terminated_as: str | None
    lifetime_s: float
    # None if the vendor bills by the second.
    hours: int | None
    bill_micros: int
    ledger_micros: int


@dataclass(frozen=True, slots=True)
class DemoBill:
    machines: list[MachineBill]
    total_micros: int
    ledger_micros: int
    currency: str
    # Calls of the vendor's API.
    requests: int
    machines_left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    enqueued: int
    complete: int
    accepted_once: int
    accepted_twice: int
    attempts: int
    lost_attempts: int
    wait_p50_s: float | None
    wait_p95_s: float | None
    workers_spawned: int
    workers_left: int
    failed_tasks: list[int]
    # The worker that was killed, and the task that it was running.
    killed_worker_id: str | None
    killed_task_id: int | None
    noticed_after_s: float | None
    completed_by: str | None
    worker_ended_as: str | None
    took_s: float
    min_workers: int = 0
    # The task that kills every worker that runs it, if the scenario has one.
    poisonous_task_id: int | None = None
    bill: DemoBill | None = None
    # Values of this scenario only, for JSON.
    details: Mapping[str, Any] = field(default_factory=dict)
    # Checks and lines of this scenario only.
    extra_checks: Mapping[str, bool] = field(default_factory=dict)
    extra_lines: Sequence[tuple[str, str]] = ()

    def problems(self) -> list[str]:
        """The checks that failed, each as a sentence."""
        return [problem for problem, is_passed in self._checks().items() if not is_passed]

    def _checks(self) -> dict[str, bool]:
        """Each check, by the problem to report if it fails."""
        expected_dead = [self.poisonous_task_id] if self.poisonous_task_id is not None else []
        expected = self.enqueued - len(expected_dead)
        checks = {
            f"{self.complete} of {expected} tasks are complete": self.complete == expected,
            f"failed tasks are {self.failed_tasks}, expected {expected_dead}": self.failed_tasks == expected_dead,
            f"{self.accepted_twice} tasks were completed more than once": self.accepted_twice == 0,
            f"{self.accepted_once} tasks were completed exactly once": self.accepted_once == self.complete,
            f"{self.attempts} attempts do not add up": self.attempts == self.accepted_once + self.lost_attempts,
            "no worker was killed": self.killed_worker_id is not None,
            "the killed worker was not terminated": self.worker_ended_as is not None,
            "the task of the killed worker was not completed by another worker": self.completed_by
            not in (None, self.killed_worker_id),
            f"{self.workers_left} workers are left, expected {self.min_workers}": self.workers_left == self.min_workers,
        }
        if self.bill is not None:
            different = [one.machine_id for one in self.bill.machines if one.bill_micros != one.ledger_micros]
            checks |= {
                f"bill and ledger differ for the machines {', '.join(different)}": not different,
                f"the bill is {self.bill.total_micros} micros, the ledger {self.bill.ledger_micros}": (
                    self.bill.total_micros == self.bill.ledger_micros
                ),
                f"{self.bill.machines_left} machines are left": self.bill.machines_left == 0,
            }
        return {**checks, **self.extra_checks}

    def lines(self) -> list[tuple[str, str]]:
        lost = self.enqueued - self.complete - len(self.failed_tasks)
        failed = f"{len(self.failed_tasks)} failed, " if self.failed_tasks else ""
        lines = [
            ("tasks", f"{self.enqueued} enqueued, {self.complete} complete, {failed}{lost} lost"),
            ("results", f"{self.accepted_once} accepted once, {self.accepted_twice} twice"),
            ("attempts", f"{self.attempts}, of which {self.lost_attempts} were lost with their worker"),
            ("time in queue", f"p50 {duration(self.wait_p50_s)}, p95 {duration(self.wait_p95_s)}"),
            ("workers", f"{self.workers_spawned} spawned, {self.workers_left} left (minimum {self.min_workers})"),
            ("killed worker", f"{self.killed_worker_id}, terminated with {self.worker_ended_as}"),
            (
                f"its task {self.killed_task_id}",
                f"requeued after {duration(self.noticed_after_s)}, completed by {self.completed_by or 'no worker'}",
            ),
            *self.extra_lines,
        ]
        if self.bill is not None:
            for name, micros in (("vendor's bill", self.bill.total_micros), ("our ledger", self.bill.ledger_micros)):
                lines.append((name, f"{with_currency(micros, self.bill.currency)} ({micros:,} micros)"))
            lines.append(("API requests", str(self.bill.requests)))
        return [*lines, ("duration", f"{self.took_s:.0f} s")]

    def machine_table(self) -> tuple[list[list[object]], list[str]]:
        """Rows and headings of the bill, without columns that are empty."""
        machines = self.bill.machines if self.bill is not None else []
        columns: dict[str, list[object]] = {
            "machine": [one.machine_id for one in machines],
            "worker": [one.worker_id for one in machines],
            "GPU": [one.gpu for one in machines],
            "terminated with": [one.terminated_as for one in machines],
            "lifetime": [duration(one.lifetime_s) for one in machines],
            "hours": [one.hours for one in machines],
            "bill (micros)": [f"{one.bill_micros:,}" for one in machines],
            "ledger (micros)": [f"{one.ledger_micros:,}" for one in machines],
        }
        used = {name: values for name, values in columns.items() if any(value is not None for value in values)}
        return [list(row) for row in zip(*used.values(), strict=True)], list(used)

    def as_dict(self) -> dict[str, Any]:
        values = asdict(self)
        for name in ("extra_checks", "extra_lines"):
            del values[name]
        return {**values, **values.pop("details")}
