"""The arc of `windlass demo --on ray`: a Ray cluster on this host, whose nodes are hired for a burst.

A real `windlass up` with a Ray head and a dispatcher of its own: a burst of tasks arrives, raylets are hired and join,
Ray places the tasks on them, one node is killed in the middle, everything completes once, the nodes are released.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil

from windlass.demo.environment import (
    QUERIES,
    QUEUE,
    DemoEnvironment,
    DemoFailed,
    DemoNarrator,
    DemoPlace,
    DemoScenario,
    Tell,
    guarded_place,
    played,
)
from windlass.demo.report import DemoReport
from windlass.model.task import new_task

TOML = """\
data_dir = '{data_dir}'

[api]
port = 0  # any that is free: for the dashboard

[control]
lease_s = 10

[fleets.{fleet}]
provider = "ray-local"
queues = ["{queue}"]
handler = "{handler}"
concurrency = {concurrency}
min_workers = 0
max_workers = {max_workers}
poll_interval_s = 0.5
heartbeat_interval_s = 1
heartbeat_timeout_s = 15
spawn_timeout_s = 60
idle_timeout_s = 3
stop_timeout_s = 15
"""
# Tasks that each node runs at the same time.
CONCURRENCY = 2
WORK_S = (0.3, 0.4, 0.5)
# The node is killed when this share is done.
KILL_AT = 1 / 4
# A head and some nodes of Ray take a busy machine their time.
RUN_TIMEOUT_S = 150.0
RUN_TIMEOUT_PER_TASK_S = 0.4
TOLD = {
    "WORKER_REGISTERED": "{worker} has booted: {reason}",
    "WORKER_ERROR": "{worker} is broken: {reason}",
    "TASK_REQUEUED": "task {task} goes back to the queue after {attempt}",
    "TASK_ERROR": "task {task} will be tried again after {reason}",
    "WORKER_TERMINATING": "{worker} is let go: {reason}; its node is drained first",
    "SLOT_FAILED": "{reason}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RayReport(DemoReport):
    nodes_at_work: int

    def promises(self) -> dict[str, bool]:
        return {
            f"{self.complete} of {self.enqueued} tasks are complete": self.complete == self.enqueued,
            **DemoReport.promises(self),
            f"{self.workers_left} nodes are left": self.workers_left == 0,
            f"tasks ran on {self.nodes_at_work} nodes only": self.nodes_at_work > 1,
        }

    def lines(self) -> list[tuple[str, str]]:
        return [
            *DemoReport.lines(self),
            ("nodes", f"{self.workers_spawned} hired in all, tasks on {self.nodes_at_work}, {self.workers_left} left"),
            ("killed by SIGKILL", f"the raylet of {self.killed_worker_id}, ended as {self.worker_ended_as}"),
            self.recovery(),
            ("took", f"{self.took_s:.0f} s"),
        ]


class RayDemo:
    def __init__(self, task_count: int, max_workers: int, tell: Tell) -> None:
        self._task_count = task_count
        self._max_workers = max_workers
        self._tell = tell
        self._teller = DemoNarrator(tell, TOLD, task_count)
        self._killed: DemoFailed | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[tuple[RayReport, DemoPlace]]:
        """The report and where it is, when all is done and everything still runs. Afterwards it is gone."""
        async with guarded_place() as place:
            scene = DemoScenario(
                place.filled_in(TOML, concurrency=CONCURRENCY, max_workers=self._max_workers),
                f"a Ray head, a dispatcher, and up to {self._max_workers} nodes as processes here",
                RUN_TIMEOUT_S + RUN_TIMEOUT_PER_TASK_S * self._task_count,
            )
            async with played(place, scene, self._teller, self._go_on) as stage:
                yield await self._report(stage), place

    async def _go_on(self, stage: DemoEnvironment, standing: Any) -> bool:
        """It is over when the queue is empty and every node is released."""
        if not standing["enqueued"]:
            if standing["dispatchers"]:
                await self._enqueue(stage)
        elif self._killed is None and standing["complete"] >= KILL_AT * self._task_count:
            await self._kill_a_node_at_work(stage)
        elif not standing["unfinished"] and not standing["workers"]:
            self._tell("the queue is empty and every node is released")
            return True
        return False

    async def _enqueue(self, stage: DemoEnvironment) -> None:
        self._tell("the Ray head is there, and a dispatcher")
        await stage.enqueue(
            [
                new_task(QUEUE, {"number": number, "work_s": WORK_S[number % len(WORK_S)], "is_poisonous": False})
                for number in range(self._task_count)
            ]
        )
        self._tell(f"a burst of {self._task_count} tasks arrives")

    async def _kill_a_node_at_work(self, stage: DemoEnvironment) -> None:
        chosen = await stage.database.fetchrow(QUERIES["at_work"])
        raylet = _raylet(chosen["pid"]) if chosen is not None else None
        if raylet is None:
            return
        # Stopped first, with all that it runs, so that what we then see of it is still true when it is killed.
        stopped = [raylet, *raylet.children(recursive=True)]
        _to_all(stopped, psutil.Process.suspend)
        again = await stage.database.fetchrow(QUERIES["at_work"])
        if again != chosen:
            _to_all(stopped, psutil.Process.resume)
            return
        _to_all(stopped, psutil.Process.kill)
        self._killed = DemoFailed(chosen["id"], chosen["task_id"], await stage.now())
        self._tell(f"WE KILL the raylet of {chosen['id']} with SIGKILL, in the middle of task {chosen['task_id']}")

    async def _report(self, stage: DemoEnvironment) -> RayReport:
        nodes: int = await stage.database.fetchval(QUERIES["nodes_at_work"])
        report = await stage.tasks_report(self._killed)
        return RayReport(**report, nodes_at_work=nodes, took_s=self._teller.took_s)


def _raylet(pid: int) -> psutil.Process | None:
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            if child.name() == "raylet":
                return child
    return None


def _to_all(processes: list[psutil.Process], function: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            function(process)
