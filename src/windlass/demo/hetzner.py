"""The arc of `windlass demo --on hetzner`: servers of an emulated Hetzner Cloud, paid by the hour.

A real `windlass up` speaks to the emulated API on loopback through the vendor's own SDK. A burst arrives, servers are
created; each boots from its cloud-init document as a process of this host, joins by its token and works over HTTP. One
is crashed and replaced. When the queue is empty, servers that are idle are kept for what is paid and deleted shortly
before another hour of theirs would begin. An hour lasts a minute, so that one can see it end.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

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
from windlass.demo.hetzner_report import CRASHED, HetznerReport, ServerLine
from windlass_emulators.hetzner import HetznerEmulator, HetznerEmulatorSettings
from windlass_emulators.http import Emulator
from windlass_emulators.process_host import ProcessHost
from windlass_emulators.serve import serving

# What is yours to change for real servers stands first.
TOML = """\
# HETZNER_API_TOKEN is in the environment, and nowhere else.
hetzner_endpoint = "{endpoint}"  # the emulator; leave it out for the real one
data_dir = '{data_dir}'

[api]
port = {port}  # where servers find the control plane

[control]
lease_s = 10

[fleets.{fleet}]
provider = "hetzner"
queues = ["{queue}"]
handler = "{handler}"
concurrency = 1
max_workers = {max_workers}
clear_time_s = 5
# Short, so that everything happens while one watches; leave these out too.
poll_interval_s = 1
heartbeat_interval_s = 1
heartbeat_timeout_s = 8
stop_timeout_s = 10

[fleets.{fleet}.hetzner]
billing_hour_s = {hour_s}  # the emulator's hours; a real one has 3600 s
choices = ["cx23@nbg1", "cx23@fsn1"]
"""
BOOT_S = 3.0
# One server is crashed when this share is done: early, so that there is enough left for the one that replaces it.
CRASH_AT = 1 / 10
# From a crash until nothing that its worker had sent is still on its way.
CRASH_SETTLES_S = 0.5
# Some tasks arrive when everybody is idle: for those who are paid anyway.
SECOND_BURST = 8
# A worker's share of the tasks twice over, the hour of whoever came last and another one, and a minute for the rest.
RUN_TIMEOUT_S = 60.0
TOLD = {
    "WORKER_JOINED": "{worker}: its server has booted and joined by its token",
    "WORKER_ACTIVATED": "{worker} is ready for work, over HTTP",
    "WORKER_ERROR": "{worker} is broken: {reason}",
    "TASK_REQUEUED": "task {task} goes back to the queue after {attempt}",
    "WORKER_TERMINATING": "{worker} is let go: {reason}",
    "WORKER_TERMINATED": "{worker}: its server is deleted ({reason})",
    "MACHINE_REFUSED": "{reason}",
    "MACHINE_NOT_DELETED": "{reason}",
    "ALERT": "{reason}",
}


@dataclass(frozen=True, slots=True)
class HetznerCloud:
    emulator: HetznerEmulator
    address: str


@contextmanager
def emulated(folder: Path, hour_s: int, front: Callable[[Emulator], Emulator]) -> Iterator[HetznerCloud]:
    """Hetzner on a free port of loopback, with machines that live in this folder and end with it."""
    settings = HetznerEmulatorSettings(boot_s=BOOT_S, billing_hour_s=hour_s)
    with ProcessHost(folder) as host:
        emulator = HetznerEmulator(lambda: datetime.now(UTC), settings, host)
        with serving(front(emulator)) as address:
            yield HetznerCloud(emulator, address)


class HetznerDemo:
    """`front`: what stands before the emulator. A test puts a judge there."""

    def __init__(
        self,
        task_count: int,
        max_workers: int,
        tell: Tell,
        *,
        hour_s: int,
        front: Callable[[Emulator], Emulator] = lambda emulator: emulator,
    ) -> None:
        self._task_count = task_count
        self._max_workers = max_workers
        self._hour_s = hour_s
        self._tell = tell
        self._front = front
        self._teller = DemoNarrator(tell, TOLD, task_count)
        self._crashed_ids: set[int] = set()
        self._lost: DemoFailed | None = None
        self._has_come_again = False
        self.cloud: HetznerCloud | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[tuple[HetznerReport, DemoPlace]]:
        """The report and where it is, when all is done and everything still runs. Afterwards it is gone."""
        async with guarded_place() as place:
            with emulated(place.folder / "machines", self._hour_s, self._front) as self.cloud:
                self._tell(f"Hetzner Cloud, emulated, at {self.cloud.address}/v1: an hour lasts {self._hour_s} s there")
                scene = self._scene(place, self.cloud)
                self._tell(shown(scene.toml))
                async with played(place, scene, self._teller, partial(self._go_on, self.cloud)) as stage:
                    yield await self._report(stage, self.cloud), place

    def _scene(self, place: DemoPlace, cloud: HetznerCloud) -> DemoScenario:
        toml = place.filled_in(
            TOML,
            endpoint=f"{cloud.address}/v1",
            port=free_port(),
            max_workers=self._max_workers,
            hour_s=self._hour_s,
        )
        what = f"up to {self._max_workers} servers, created when there is work"
        limit_s = RUN_TIMEOUT_S + 2 * self._task_count * max(WORK_S) / self._max_workers + 3 * self._hour_s
        return DemoScenario(toml, what, limit_s, {"HETZNER_API_TOKEN": "any"})

    async def _go_on(self, cloud: HetznerCloud, stage: DemoEnvironment, standing: Any) -> bool:
        """It is over when the queue is empty and every server is gone."""
        if not standing["enqueued"]:
            if standing["cycles"]:
                await stage.enqueue(burst(self._task_count))
                self._tell(f"a burst of {self._task_count} tasks arrives, and there is nobody to do them")
        elif self._lost is None and standing["complete"] >= CRASH_AT * self._task_count:
            await self._crash_one_at_work(stage, cloud)
        elif not standing["unfinished"] and not self._has_come_again:
            self._has_come_again = True
            await stage.enqueue(burst(SECOND_BURST))
            self._teller.expect(SECOND_BURST)
            self._tell(f"the queue is empty; {SECOND_BURST} more tasks arrive, for whoever is idle and paid anyway")
        elif not standing["unfinished"] and not standing["workers"] and not cloud.emulator.project.servers:
            self._tell("the queue is empty and every server is gone, each before another hour of it began")
            return True
        return False

    async def _crash_one_at_work(self, stage: DemoEnvironment, cloud: HetznerCloud) -> None:
        chosen = await stage.database.fetchrow(QUERIES["at_work"])
        if chosen is None or chosen["machine_id"] is None:
            return
        server_id, crashed_at = int(chosen["machine_id"]), await stage.now()
        cloud.emulator.crash(server_id)
        self._crashed_ids.add(server_id)
        self._tell(f"WE CRASH the server {server_id} of {chosen['id']}. The API goes on calling it `running`, and paid")
        await asyncio.sleep(CRASH_SETTLES_S)
        task_id = await stage.database.fetchval(QUERIES["held"], chosen["id"])
        # Between two tasks it lost none: then the next one is crashed too.
        if task_id is not None:
            self._lost = DemoFailed(chosen["id"], task_id, crashed_at)

    # -------------------------------------------------------------------------------------------------------- report

    async def _report(self, stage: DemoEnvironment, cloud: HetznerCloud) -> HetznerReport:
        bill = cloud.emulator.bill()
        return HetznerReport(
            **await stage.tasks_report(self._lost),
            servers=await self._servers(stage, bill),
            servers_left=len(cloud.emulator.project.servers),
            addresses_left=len(cloud.emulator.project.primary_ips),
            bill_micros=bill["total_micros"],
            ledger_micros=sum((await our_costs(stage)).values()),
            currency=bill["currency"],
            hour_s=self._hour_s,
            requests=len(cloud.emulator.requests),
            took_s=self._teller.took_s,
        )

    async def _servers(self, stage: DemoEnvironment, bill: dict[str, Any]) -> list[ServerLine]:
        """Line by line: what the emulator bills for each, and what our ledger has for its worker."""
        workers = {int(row["machine_id"]): row for row in await stage.database.fetch(QUERIES["machines"])}
        ours = await our_costs(stage)
        lines = []
        for line in bill["servers"]:
            worker = workers.get(line["id"])
            ended = datetime.fromisoformat(line["deleted"] or bill["now"])
            lived: timedelta = ended - datetime.fromisoformat(line["created"])
            code = worker["code"] if worker else None
            lines.append(
                ServerLine(
                    server_id=line["id"],
                    worker_id=worker["worker_id"] if worker else None,
                    ended_as=CRASHED if line["id"] in self._crashed_ids else code,
                    lived_s=lived.total_seconds(),
                    hours=line["hours"],
                    bill_micros=line["micros"],
                    ledger_micros=ours.get(worker["worker_id"], 0) if worker else 0,
                )
            )
        return lines
