"""`windlass demo --on runpod`: workers are GPU pods of an emulated Runpod, prepared over SSH.

`windlass up` calls the emulated REST API on loopback, and a real OpenSSH server in each pod. A burst of tasks arrives
and pods are spawned. One pod never claims a task, one loses its GPU, one hangs in a task: they fail and are replaced,
with GPUs of the second choice, because the first has no capacity by then. One pod is drained while it runs a task, and
finishes it. Meanwhile the shared network volume grows. At the end the bill and our ledger must be equal.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import asyncssh

from windlass.demo.environment import QUERIES, DemoEnvironment, DemoPlace, KilledWorker, PrintLine
from windlass.demo.report import DemoBill, DemoReport, MachineBill
from windlass.demo.scenario import DemoScenario, ledger_costs, workers_by_machine
from windlass.model.errors import BadInput
from windlass.model.money import with_currency
from windlass.wiring import stores
from windlass_emulators.http import Emulator
from windlass_emulators.http_server import serving
from windlass_emulators.runpod import RunpodEmulator, RunpodEmulatorSettings
from windlass_emulators.runpod.pod_host import RealPodHost, find_sshd

GPUS = ("NVIDIA L40S", "NVIDIA RTX A5000")
DATA_CENTER = "EU-RO-1"
# A script in the volume. The first pod runs a program that only looks like a worker.
START_SCRIPT = """\
echo started >> starts
pod=$(dirname "$PWD")
if mkdir first 2> /dev/null; then
  exec "$pod/opt/windlass/bin/python" -m windlass.demo.stuck_worker "$pod/etc/windlass/join.json"
fi
exec windlass worker --join "$pod/etc/windlass/join.json"
"""
VOLUME_GB, USED_GB = 100, 90.0
PROVISIONING_S, STARTING_S, RUNTIME_S = 0.5, 1.0, 0.5
# Number of the task that hangs in its first attempt.
STUCK_NUMBER = 2
# Shares of complete tasks at which a pod loses its GPU, and at which one is drained.
LOSE_GPU_AT, DRAIN_AT = 1 / 10, 3 / 10
# Tasks per pod that are added if all are complete before all faults have happened.
MORE_TASKS_PER_WORKER = 15
# The error code of each fault.
NO_GPU, NOT_CLAIMING, STUCK = FAULTS = ("GPU_NOT_DETECTED", "GPU_READY_NOT_CLAIMING", "STUCK_TASK")


class RunpodDemo(DemoScenario):
    """`wrap` may put a proxy in front of the emulator, which a test uses to check every request."""

    toml_head = """\
# RUNPOD_API_KEY is set in the environment.
runpod_endpoint = "{endpoint}"  # the emulator; remove it for the real API
runpod_ssh_key_file = '{key_file}'
"""
    toml_tail = """\
provider = "runpod"
policy = "buffered"
auto_start_worker = true
# Short intervals for the demo; remove these too.
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
image = "example/worker:1"  # it brings Windlass, and waits until its worker is started over SSH
args = "sleep infinity"
network_volume_id = "{volume}"

[fleets.{fleet}.runpod.ssh]
start_command = "bash /workspace/start.sh"
start_watch_s = 0.5
"""
    prints_toml = True
    machines = "pods"
    work_s = (0.4, 0.5, 0.6)
    # Three boots one after another, and all timeouts.
    base_time_limit_s = 300.0
    secrets: ClassVar[Mapping[str, str]] = {"RUNPOD_API_KEY": "any"}
    # Set by `open_cloud`.
    emulator: RunpodEmulator
    host: RealPodHost
    address: str
    volume_id: str

    def __init__(
        self,
        task_count: int,
        max_workers: int,
        print_line: PrintLine,
        *,
        wrap: Callable[[Emulator], Emulator] = lambda emulator: emulator,
    ) -> None:
        super().__init__(task_count, max_workers, print_line)
        self._wrap = wrap
        self._is_sold_out = False
        self._worker_without_gpu: str | None = None
        self._drained: KilledWorker | None = None

    @contextmanager
    def open_cloud(self, folder: Path) -> Iterator[None]:
        if find_sshd() is None:
            raise BadInput("sshd not found: pods are prepared over SSH. Install openssh-server.")
        # Higher limits than Runpod's, because cycles are one second apart here.
        settings = RunpodEmulatorSettings(
            PROVISIONING_S, STARTING_S, RUNTIME_S, requests_per_minute=1_000, requests_per_hour=10_000
        )
        with RealPodHost(folder) as self.host:
            self.emulator = RunpodEmulator(lambda: datetime.now(UTC), settings, self.host)
            body = json.dumps({"name": "models", "size": VOLUME_GB, "dataCenter": DATA_CENTER}).encode()
            made = self.emulator.handle("POST", "/v2/network-volumes", [], {"Authorization": "Bearer any"}, body)
            self.volume_id = str(json.loads(made.body)["id"])
            (self.host.volume_folder(self.volume_id) / "start.sh").write_text(START_SCRIPT)
            self.emulator.fill_volume(self.volume_id, USED_GB)
            with serving(self._wrap(self.emulator)) as self.address:
                self.print_line(f"emulated Runpod at {self.address}/v2, with emulated GPUs")
                yield

    def config_values(self, place: DemoPlace) -> dict[str, object]:
        key_file = place.folder / "id_ed25519"
        asyncssh.generate_private_key("ssh-ed25519").write_private_key(key_file)
        return {
            "endpoint": f"{self.address}/v2",
            "key_file": key_file,
            "first": GPUS[0],
            "second": GPUS[1],
            "place": DATA_CENTER,
            "volume": self.volume_id,
        }

    async def advance(self, environment: DemoEnvironment, progress: Any) -> bool:
        complete_share = progress["complete"] / self.task_count
        self.emulator.settle()
        pods = self.emulator.account.pods
        if not progress["enqueued"]:
            if progress["cycles"]:
                await self.enqueue(environment, self.task_count, is_stuck=[STUCK_NUMBER])
                self.print_line(f"{self.task_count} tasks enqueued; one of them hangs in its first attempt")
        elif not self._is_sold_out and len(pods) >= self.max_workers:
            self._is_sold_out = True
            # The catalog still lists it as available.
            self.emulator.faults.no_capacity(GPUS[0], is_announced=False)
            self.print_line(f"FAULT: no more capacity for {GPUS[0]}")
        elif not progress["unfinished"] and not await self._have_all_faults_happened(environment):
            more = MORE_TASKS_PER_WORKER * self.max_workers
            await self.enqueue(environment, more)
            self.narrator.add_tasks(more)
            self.print_line(f"all tasks are complete before the last fault; {more} more tasks enqueued")
        elif self._worker_without_gpu is None and complete_share >= LOSE_GPU_AT:
            chosen = await environment.database.fetchrow(QUERIES["worker_to_kill"])
            if chosen is not None and chosen["machine_id"] is not None:
                self._worker_without_gpu = chosen["id"]
                self.emulator.lose_gpus(chosen["machine_id"])
                self.print_line(
                    f"FAULT: pod {chosen['machine_id']} of {chosen['id']} lost its GPU; heartbeats continue"
                )
        elif self._worker_without_gpu is not None and self._drained is None and complete_share >= DRAIN_AT:
            await self._drain_busy_worker(environment)
        elif not progress["unfinished"] and not progress["workers"] and not pods:
            self.print_line("the queue is empty, and all pods are deleted")
            return True
        return False

    async def _have_all_faults_happened(self, environment: DemoEnvironment) -> bool:
        codes = await environment.database.fetchval(QUERIES["worker_error_codes"])
        return self._drained is not None and set(FAULTS) <= set(codes)

    async def _drain_busy_worker(self, environment: DemoEnvironment) -> None:
        async with stores.store(environment.config) as store:
            chosen = await environment.database.fetchrow(QUERIES["worker_to_drain"], self._worker_without_gpu)
            if chosen is None or not await store.set_terminating([chosen["id"]], "drained by the demo"):
                return
            # It claims no more tasks, so its current task is the one that it must finish.
            task_id = await environment.database.fetchval(QUERIES["running_task"], chosen["id"])
        # A worker between two tasks has none. Then another one is drained.
        if task_id is not None:
            self._drained = KilledWorker(chosen["id"], task_id, await environment.now())
            self.print_line(f"{chosen['id']} drained by hand while it runs task {task_id}")

    async def read_details(self, environment: DemoEnvironment) -> dict[str, Any]:
        database, drained = environment.database, self._drained
        stuck = await database.fetchrow(QUERIES["first_stuck_task"])
        if stuck is not None:
            self.killed = KilledWorker(stuck["worker_id"], stuck["task_id"], stuck["at"])
        starts = self.host.volume_folder(self.volume_id) / "starts"
        bill = self.emulator.bill()
        return {
            # Programs that were started over SSH: counted by the pods, and by events in the database.
            "starts": len(starts.read_text().splitlines()) if starts.exists() else 0,
            "prepared": await database.fetchval(QUERIES["count_prepared_machines"]),
            "drained_worker_id": drained and drained.worker_id,
            "drained_task_id": drained and drained.task_id,
            "drained_completed_by": drained and await database.fetchval(QUERIES["completing_worker"], drained.task_id),
            "volume_gb": VOLUME_GB,
            "volume_grown_gb": self.emulator.account.volumes[self.volume_id].size_gb,
            # Storage belongs to no worker, and is not in our ledger.
            "volume_micros": bill["total_micros"] - bill["pods_micros"],
        }

    async def read_bill(self, environment: DemoEnvironment) -> DemoBill:
        bill, costs = self.emulator.bill(), await ledger_costs(environment)
        workers = await workers_by_machine(environment)
        machines = [
            MachineBill(
                machine_id=line["id"],
                worker_id=(worker := workers.get(line["id"])) and worker["worker_id"],
                gpu=next((gpu for gpu in GPUS if gpu in line["what"]), line["what"]),
                terminated_as=worker and worker["code"],
                lifetime_s=line["seconds"],
                hours=None,
                bill_micros=line["micros"],
                ledger_micros=costs.get(worker["worker_id"], 0) if worker else 0,
            )
            for line in bill["pods"]
        ]
        return DemoBill(
            machines,
            bill["pods_micros"],
            sum(costs.values()),
            bill["currency"],
            len(self.emulator.requests),
            len(self.emulator.account.pods),
        )

    def checks(self, report: DemoReport) -> dict[str, bool]:
        pods = report.bill.machines if report.bill is not None else []
        terminated_as = [pod.terminated_as for pod in pods]
        details = report.details
        starts, prepared = details["starts"], details["prepared"]
        drained, grown_gb = details["drained_worker_id"], details["volume_grown_gb"]
        return {
            **{f"no pod was terminated with {code}": code in terminated_as for code in FAULTS},
            f"{starts} programs were started over SSH, {prepared} recorded": starts == prepared > 0,
            f"no pod has the second choice, {GPUS[1]}": set(GPUS) == {pod.gpu for pod in pods},
            "no worker was drained while it ran a task": drained is not None,
            "the drained worker did not finish its task": details["drained_completed_by"] == drained,
            f"the network volume has {grown_gb} GB and did not grow": grown_gb > VOLUME_GB,
        }

    def lines(self, report: DemoReport) -> list[tuple[str, str]]:
        pods = report.bill.machines if report.bill is not None else []
        details = report.details
        failures = ", ".join(f"{code} {sum(pod.terminated_as == code for pod in pods)}" for code in FAULTS)
        storage = with_currency(details["volume_micros"], report.bill.currency) if report.bill is not None else ""
        return [
            ("pods", f"{len(pods)} created, {details['starts']} programs started over SSH"),
            ("failed pods", failures),
            (
                f"drained at task {details['drained_task_id']}",
                f"{details['drained_worker_id']}, completed by {details['drained_completed_by'] or 'no worker'}",
            ),
            (
                "network volume",
                f"{VOLUME_GB} GB, grown to {details['volume_grown_gb']} GB; {storage}, not in the ledger",
            ),
        ]
