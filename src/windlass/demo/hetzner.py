"""`windlass demo --on hetzner`: workers are servers of an emulated Hetzner Cloud, billed by the hour.

`windlass up` calls the emulated API on loopback through Hetzner's own SDK. A burst of tasks arrives and servers are
created. Each boots from its cloud-init document as a process of this host, joins with a one-time token and works over
HTTP. One server crashes and is replaced. When the queue is empty, idle servers are kept for the rest of their billed
hour and deleted shortly before the next one. An hour lasts a minute here.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from windlass.demo.environment import QUERIES, DemoEnvironment, DemoPlace, KilledWorker, PrintLine
from windlass.demo.report import DemoBill, DemoReport, MachineBill
from windlass.demo.scenario import DemoScenario, ledger_costs, workers_by_machine
from windlass_emulators.hetzner import HetznerEmulator, HetznerEmulatorSettings
from windlass_emulators.http import Emulator
from windlass_emulators.http_server import serving
from windlass_emulators.process_host import ProcessHost

BOOT_S = 3.0
# Share of complete tasks at which a server crashes: early, so that its replacement has work.
CRASH_AT = 1 / 10
# Time after a crash until requests of its worker that were on their way have arrived.
CRASH_SETTLES_S = 0.5
# Tasks that arrive when all servers are idle, and run in hours that are billed already.
SECOND_BURST = 8
CRASHED, HOUR_ENDED = "CRASHED", "BILLING_HOUR_END"
# An idle server is deleted after this share of its hour, never before.
KEPT_SHARE = 0.8


class HetznerDemo(DemoScenario):
    """`wrap` may put a proxy in front of the emulator, which a test uses to check every request."""

    toml_head = """\
# HETZNER_API_TOKEN is set in the environment.
hetzner_endpoint = "{endpoint}"  # the emulator; remove it for the real API
"""
    toml_tail = """\
provider = "hetzner"
policy = "clear-time"
concurrency = 1
clear_time_s = 5
# Short intervals for the demo; remove these too.
poll_interval_s = 1
heartbeat_interval_s = 1
heartbeat_timeout_s = 8
stop_timeout_s = 10

[fleets.{fleet}.hetzner]
billing_hour_s = {hour_s}  # of the emulator; a real hour has 3600 s
choices = ["cx23@nbg1", "cx23@fsn1"]
"""
    prints_toml = True
    machines = "servers"
    work_s = (0.4, 0.5, 0.6)
    base_time_limit_s = 300.0
    secrets: ClassVar[Mapping[str, str]] = {"HETZNER_API_TOKEN": "any"}
    # Set by `open_cloud`.
    emulator: HetznerEmulator
    address: str

    def __init__(
        self,
        task_count: int,
        max_workers: int,
        print_line: PrintLine,
        *,
        hour_s: int,
        wrap: Callable[[Emulator], Emulator] = lambda emulator: emulator,
    ) -> None:
        super().__init__(task_count, max_workers, print_line)
        self.hour_s = hour_s
        self._wrap = wrap
        self._crashed_ids: set[int] = set()
        self._has_second_burst = False

    @property
    def time_limit_s(self) -> float:
        return super().time_limit_s + 3 * self.hour_s

    @contextmanager
    def open_cloud(self, folder: Path) -> Iterator[None]:
        settings = HetznerEmulatorSettings(boot_s=BOOT_S, billing_hour_s=self.hour_s)
        with ProcessHost(folder) as host:
            self.emulator = HetznerEmulator(lambda: datetime.now(UTC), settings, host)
            with serving(self._wrap(self.emulator)) as self.address:
                self.print_line(f"emulated Hetzner Cloud at {self.address}/v1, with hours of {self.hour_s} s")
                yield

    def config_values(self, place: DemoPlace) -> dict[str, object]:  # noqa: ARG002
        return {"endpoint": f"{self.address}/v1", "hour_s": self.hour_s}

    async def advance(self, environment: DemoEnvironment, progress: Any) -> bool:
        if not progress["enqueued"]:
            if progress["cycles"]:
                await self.enqueue(environment, self.task_count)
                self.print_line(f"{self.task_count} tasks enqueued; there are no workers yet")
        elif self.killed is None and progress["complete"] >= CRASH_AT * self.task_count:
            await self._crash_busy_server(environment)
        elif not progress["unfinished"] and not self._has_second_burst:
            self._has_second_burst = True
            await self.enqueue(environment, SECOND_BURST)
            self.narrator.add_tasks(SECOND_BURST)
            self.print_line(f"the queue is empty; {SECOND_BURST} more tasks enqueued, for idle servers billed anyway")
        elif not progress["unfinished"] and not progress["workers"] and not self.emulator.project.servers:
            self.print_line("the queue is empty, and each server was deleted before its next hour")
            return True
        return False

    async def _crash_busy_server(self, environment: DemoEnvironment) -> None:
        chosen = await environment.database.fetchrow(QUERIES["worker_to_kill"])
        if chosen is None or chosen["machine_id"] is None:
            return
        server_id, crashed_at = int(chosen["machine_id"]), await environment.now()
        self.emulator.crash(server_id)
        self._crashed_ids.add(server_id)
        self.print_line(f"FAULT: server {server_id} of {chosen['id']} crashed; the API still reports it as `running`")
        await asyncio.sleep(CRASH_SETTLES_S)
        task_id = await environment.database.fetchval(QUERIES["running_task"], chosen["id"])
        # A worker between two tasks has none to lose. Then the next one is crashed too.
        if task_id is not None:
            self.killed = KilledWorker(chosen["id"], task_id, crashed_at)

    async def read_bill(self, environment: DemoEnvironment) -> DemoBill:
        bill, costs = self.emulator.bill(), await ledger_costs(environment)
        workers = await workers_by_machine(environment)
        machines = []
        for line in bill["servers"]:
            worker = workers.get(str(line["id"]))
            lifetime = datetime.fromisoformat(line["deleted"] or bill["now"]) - datetime.fromisoformat(line["created"])
            machines.append(
                MachineBill(
                    machine_id=str(line["id"]),
                    worker_id=worker and worker["worker_id"],
                    gpu=None,
                    terminated_as=CRASHED if line["id"] in self._crashed_ids else worker and worker["code"],
                    lifetime_s=lifetime.total_seconds(),
                    hours=line["hours"],
                    bill_micros=line["micros"],
                    ledger_micros=costs.get(worker["worker_id"], 0) if worker else 0,
                )
            )
        project = self.emulator.project
        return DemoBill(
            machines,
            bill["total_micros"],
            sum(costs.values()),
            bill["currency"],
            len(self.emulator.requests),
            len(project.servers) + len(project.primary_ips),
        )

    def checks(self, report: DemoReport) -> dict[str, bool]:
        servers = report.bill.machines if report.bill is not None else []
        crashed = [one for one in servers if one.terminated_as == CRASHED]
        kept = [one for one in servers if one.terminated_as == HOUR_ENDED]
        unused_s = (1 - KEPT_SHARE) * self.hour_s
        early = [one.machine_id for one in kept if (one.hours or 0) * self.hour_s - one.lifetime_s > unused_s]
        return {
            "no server crashed": bool(crashed),
            "the crashed server was not replaced": len(servers) > max(1, len(crashed)),
            "no server was kept until the end of its billed hour": bool(kept),
            f"servers {', '.join(early)} were deleted long before the end of their billed hour": not early,
        }

    def lines(self, report: DemoReport) -> list[tuple[str, str]]:
        servers = report.bill.machines if report.bill is not None else []
        hours = sum(one.hours or 0 for one in servers)
        return [("servers", f"{len(servers)} created, {len(self._crashed_ids)} crashed, {hours} hours billed")]
