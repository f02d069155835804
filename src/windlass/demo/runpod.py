"""The arc of `windlass demo --on runpod`: GPU pods of an emulated Runpod, prepared over SSH.

A real `windlass up` speaks to the emulated REST API on loopback and to a real OpenSSH server in each pod. A burst
arrives and pods are hired. One of them says that it is ready and never takes a task; one loses its GPU; one gets stuck
in a task; one is asked to end in the middle of another and finishes it first. Those that break are replaced, by GPUs of
the second choice, since the first is sold out by then. Meanwhile the volume that they share grows. When the queue is
empty they are let go, and every second that was paid is in our ledger.
"""

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import asyncssh

from windlass.demo.cloud_machines import WORK_S, burst, free_port, our_costs, shown
from windlass.demo.environment import (
    QUERIES,
    DemoEnvironment,
    DemoFailed,
    DemoNarrator,
    DemoPlace,
    DemoScenario,
    Tell,
    guarded_place,
    played,
)
from windlass.demo.runpod_report import NO_GPU, NOT_CLAIMING, STUCK, PodLine, RunpodReport
from windlass.model.errors import BadInput
from windlass.wiring import stores
from windlass_emulators.http import Emulator
from windlass_emulators.runpod import RunpodEmulator, RunpodEmulatorSettings
from windlass_emulators.runpod.pod_host import RealPodHost, find_sshd
from windlass_emulators.serve import serving

GPUS = ("NVIDIA L40S", "NVIDIA RTX A5000")
PLACE = "EU-RO-1"
# What is yours to change for real pods stands first.
TOML = """\
# RUNPOD_API_KEY is in the environment, and nowhere else.
runpod_endpoint = "{endpoint}"  # the emulator; leave it out for the real one
runpod_ssh_key_file = '{key_file}'
data_dir = '{data_dir}'

[api]
port = {port}  # where pods find the control plane

[control]
lease_s = 10

[fleets.{fleet}]
provider = "runpod"
queues = ["{queue}"]
handler = "{handler}"
min_workers = 0
max_workers = {max_workers}
auto_start_worker = true
# Short, so that everything happens while one watches; leave these out too.
poll_interval_s = 1
heartbeat_interval_s = 1
heartbeat_timeout_s = 20
not_claiming_timeout_s = 5
gpu_not_detected_timeout_s = 3
stuck_timeout_s = 6
stop_timeout_s = 10
min_scaling_interval_s = 0
spawn_grace_s = 0
scale_down_grace_s = 1
idle_timeout_s = 3
storage_check_interval_cycles = 5

[fleets.{fleet}.runpod]
choices = ["{first}@SECURE/{place}", "{second}@SECURE/{place}"]
image = "runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404"
network_volume_id = "{volume}"

[fleets.{fleet}.runpod.ssh]
start_command = "bash /workspace/start.sh"
start_watch_s = 0.5
"""
# In the volume. Its first pod runs something that only looks like a worker.
START = """\
echo started >> starts
pod=$(dirname "$PWD")
if mkdir first 2> /dev/null; then
  exec "$pod/opt/windlass/bin/python" -m windlass.demo.stuck_worker "$pod/etc/windlass/join.json"
fi
exec windlass worker --join "$pod/etc/windlass/join.json"
"""
VOLUME_GB, USED_GB = 100, 90.0
# So much later a pod runs and can be logged into.
PROVISIONING_S, STARTING_S, RUNTIME_S = 0.5, 1.0, 0.5
# Which task gets stuck, and the shares of the work after which a pod loses its GPU and one is asked to end.
STUCK_NUMBER = 2
LOSE_AT, DRAIN_AT = 1 / 10, 3 / 10
# If all is done before all of that has happened: work for longer than any patience here.
MORE_TASKS_PER_WORKER = 15
# A worker's share of the tasks twice over, and the time of three boots one after another and all patience with them.
RUN_TIMEOUT_S = 120.0
TOLD = {
    "MACHINE_PREPARED": "{worker}: looked over, and its program started over SSH",
    "PREPARATION_FAILED": "{worker}: {reason}",
    "WORKER_ACTIVATED": "{worker} is ready for work, over HTTP",
    "WORKER_ERROR": "{worker} is broken: {reason}",
    "TASK_REQUEUED": "task {task} goes back to the queue after {attempt}",
    "WORKER_TERMINATING": "{worker} is let go: {reason}",
    "WORKER_DEREGISTERED": "{worker} has finished what it had, and leaves",
    "WORKER_TERMINATED": "{worker}: its pod is deleted ({reason})",
    "VOLUME_GROWN": "the network volume grows: {reason}",
    "MACHINE_REFUSED": "{reason}",
    "MACHINE_NOT_DELETED": "{reason}",
    "ALERT": "{reason}",
}


@dataclass(frozen=True, slots=True)
class RunpodCloud:
    emulator: RunpodEmulator
    host: RealPodHost
    address: str
    volume_id: str

    @property
    def volume_gb(self) -> int:
        return self.emulator.account.volumes[self.volume_id].size_gb


@contextmanager
def emulated(folder: Path, front: Callable[[Emulator], Emulator]) -> Iterator[RunpodCloud]:
    """Runpod on a free port of loopback, with pods that live in this folder and end with it."""
    if find_sshd() is None:
        raise BadInput("pods are prepared over SSH, and this host has no OpenSSH server: install openssh-server.")
    # More than Runpod allows: cycles are a second apart here.
    settings = RunpodEmulatorSettings(
        PROVISIONING_S, STARTING_S, RUNTIME_S, requests_per_minute=1_000, requests_per_hour=10_000
    )
    with RealPodHost(folder) as host:
        emulator = RunpodEmulator(lambda: datetime.now(UTC), settings, host)
        body = json.dumps({"name": "models", "size": VOLUME_GB, "dataCenter": PLACE}).encode()
        made = emulator.handle("POST", "/v2/network-volumes", [], {"Authorization": "Bearer any"}, body)
        volume_id = str(json.loads(made.body)["id"])
        (host.volume_folder(volume_id) / "start.sh").write_text(START)
        emulator.fill_volume(volume_id, USED_GB)
        with serving(front(emulator)) as address:
            yield RunpodCloud(emulator, host, address, volume_id)


class RunpodDemo:
    """`front`: what stands before the emulator. A test puts a judge there."""

    def __init__(
        self,
        task_count: int,
        max_workers: int,
        tell: Tell,
        *,
        front: Callable[[Emulator], Emulator] = lambda emulator: emulator,
    ) -> None:
        self._task_count = task_count
        self._max_workers = max_workers
        self._tell = tell
        self._front = front
        self._teller = DemoNarrator(tell, TOLD, task_count)
        self._is_sold_out = False
        self._gpu_lost_by: str | None = None
        self._drained: DemoFailed | None = None
        self.cloud: RunpodCloud | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[tuple[RunpodReport, DemoPlace]]:
        """The report and where it is, when all is done and everything still runs. Afterwards it is gone."""
        async with guarded_place() as place:
            with emulated(place.folder / "machines", self._front) as self.cloud:
                self._tell(f"Runpod, emulated, at {self.cloud.address}/v2: pods with GPUs that only seem to be there")
                scene = self._scene(place, self.cloud)
                self._tell(shown(scene.toml))
                async with played(place, scene, self._teller, partial(self._go_on, self.cloud)) as stage:
                    yield await self._report(stage, self.cloud), place

    def _scene(self, place: DemoPlace, cloud: RunpodCloud) -> DemoScenario:
        key_file = place.folder / "id_ed25519"
        asyncssh.generate_private_key("ssh-ed25519").write_private_key(key_file)
        toml = place.filled_in(
            TOML,
            endpoint=f"{cloud.address}/v2",
            key_file=key_file,
            port=free_port(),
            max_workers=self._max_workers,
            first=GPUS[0],
            second=GPUS[1],
            place=PLACE,
            volume=cloud.volume_id,
        )
        what = f"up to {self._max_workers} pods, hired when there is work"
        limit_s = RUN_TIMEOUT_S + 2 * self._task_count * max(WORK_S) / self._max_workers
        return DemoScenario(toml, what, limit_s, {"RUNPOD_API_KEY": "any"})

    async def _go_on(self, cloud: RunpodCloud, stage: DemoEnvironment, standing: Any) -> bool:
        """It is over when the queue is empty and every pod is gone."""
        done = standing["complete"] / self._task_count
        cloud.emulator.settle()
        if not standing["enqueued"]:
            if standing["cycles"]:
                await stage.enqueue(burst(self._task_count, stuck={STUCK_NUMBER}))
                self._tell(f"a burst of {self._task_count} tasks arrives; one of them gets stuck when first tried")
        elif not self._is_sold_out and len(cloud.emulator.account.pods) >= self._max_workers:
            self._is_sold_out = True
            # The catalog does not know yet.
            cloud.emulator.faults.no_capacity(GPUS[0], is_announced=False)
            self._tell(f"from now on there is no {GPUS[0]} to be had")
        elif not standing["unfinished"] and not await self._is_shown(stage):
            more = MORE_TASKS_PER_WORKER * self._max_workers
            await stage.enqueue(burst(more))
            self._teller.expect(more)
            self._tell(f"they were quick, and there is more to see: {more} more tasks arrive")
        elif self._gpu_lost_by is None and done >= LOSE_AT:
            await self._take_gpu(stage, cloud)
        elif self._gpu_lost_by is not None and self._drained is None and done >= DRAIN_AT:
            await self._ask_one_to_end(stage)
        elif not standing["unfinished"] and not standing["workers"] and not cloud.emulator.account.pods:
            self._tell("the queue is empty and every pod is gone")
            return True
        return False

    async def _is_shown(self, stage: DemoEnvironment) -> bool:
        broken = await stage.database.fetchval(QUERIES["broken"])
        return self._drained is not None and {NO_GPU, NOT_CLAIMING, STUCK} <= set(broken)

    async def _take_gpu(self, stage: DemoEnvironment, cloud: RunpodCloud) -> None:
        chosen = await stage.database.fetchrow(QUERIES["at_work"])
        if chosen is not None and chosen["machine_id"] is not None:
            self._gpu_lost_by = chosen["id"]
            cloud.emulator.lose_gpus(chosen["machine_id"])
            self._tell(f"WE TAKE THE GPU of pod {chosen['machine_id']} of {chosen['id']}. It goes on beating")

    async def _ask_one_to_end(self, stage: DemoEnvironment) -> None:
        async with stores.store(stage.config) as store:
            chosen = await stage.database.fetchrow(QUERIES["just_begun"], self._gpu_lost_by)
            if chosen is None or not await store.set_terminating([chosen["id"]], "asked to end by hand"):
                return
            # What it has now it is to finish: it claims nothing any more.
            task_id = await stage.database.fetchval(QUERIES["held"], chosen["id"])
        # Between two tasks it had none: then another one is asked.
        if task_id is not None:
            self._drained = DemoFailed(chosen["id"], task_id, await stage.now())
            self._tell(f"WE ASK {chosen['id']} to end, in the middle of task {task_id}")

    # -------------------------------------------------------------------------------------------------------- report

    async def _report(self, stage: DemoEnvironment, cloud: RunpodCloud) -> RunpodReport:
        bill = cloud.emulator.bill()
        pods = await self._pods(stage, bill)
        stuck = await stage.database.fetchrow(QUERIES["stuck"])
        lost = DemoFailed(stuck["worker_id"], stuck["task_id"], stuck["at"]) if stuck is not None else None
        drained = self._drained
        starts = cloud.host.volume_folder(cloud.volume_id) / "starts"
        return RunpodReport(
            **await stage.tasks_report(lost),
            pods=pods,
            pods_left=len(cloud.emulator.account.pods),
            starts=len(starts.read_text().splitlines()) if starts.exists() else 0,
            prepared=await stage.database.fetchval(QUERIES["prepared"]),
            drained_worker_id=drained.worker_id if drained is not None else None,
            drained_task_id=drained.task_id if drained is not None else None,
            drained_completed_by=await stage.database.fetchval(QUERIES["completed_by"], drained.task_id)
            if drained is not None
            else None,
            volume_gb=VOLUME_GB,
            volume_grown_gb=cloud.volume_gb,
            volume_micros=bill["total_micros"] - bill["pods_micros"],
            bill_micros=bill["pods_micros"],
            ledger_micros=sum((await our_costs(stage)).values()),
            currency=bill["currency"],
            gpus=GPUS,
            requests=len(cloud.emulator.requests),
            took_s=self._teller.took_s,
        )

    async def _pods(self, stage: DemoEnvironment, bill: dict[str, Any]) -> list[PodLine]:
        """Line by line: what the emulator bills for each, and what our ledger has for its worker."""
        workers = {row["machine_id"]: row for row in await stage.database.fetch(QUERIES["machines"])}
        ours = await our_costs(stage)
        return [
            PodLine(
                pod_id=line["id"],
                worker_id=(worker := workers.get(line["id"])) and worker["worker_id"],
                gpu=next((gpu for gpu in GPUS if gpu in line["what"]), line["what"]),
                ended_as=worker and worker["code"],
                seconds=line["seconds"],
                bill_micros=line["micros"],
                ledger_micros=ours.get(worker["worker_id"], 0) if worker else 0,
            )
            for line in bill["pods"]
        ]
