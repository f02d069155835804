"""The arc of `windlass demo`: workers as processes of this host.

A real `windlass up` with real worker processes on a real PostgreSQL: a burst of tasks arrives, workers are hired, one
is killed, one task kills whoever runs it, the queue empties, the fleet shrinks.
"""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

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
from windlass.demo.local_report import ATTEMPTS, MIN_WORKERS, LocalReport
from windlass.model.task import new_task

# All intervals are short, so that everything happens while one watches.
TOML = """\
data_dir = '{data_dir}'

[api]
port = 0  # any that is free: for the dashboard

[control]
lease_s = 10

[fleets.{fleet}]
queues = ["{queue}"]
handler = "{handler}"
min_workers = {min_workers}
max_workers = {max_workers}
poll_interval_s = 0.5
heartbeat_interval_s = 0.5
heartbeat_timeout_s = 10
idle_timeout_s = 3
stop_timeout_s = 10
"""
WORK_S = (0.2, 0.3, 0.4)
# The worker is killed when this share is done; the poison comes a little later.
KILL_AT = 1 / 4
POISON_AT = 1 / 2
# Two workers' worth of tasks, and half a minute for everything else; twice that for a busy machine.
RUN_TIMEOUT_S = 60.0
RUN_TIMEOUT_PER_TASK_S = 0.2
TOLD = {
    "WORKER_ACTIVATED": "{worker} is ready for work",
    "WORKER_ERROR": "{worker} is broken: {reason}",
    "TASK_REQUEUED": "task {task} goes back to the queue after {attempt}",
    "TASK_FAILED": "task {task} is given up after {attempt} and kept as a dead letter, with its history",
    "WORKER_TERMINATING": "{worker} is let go: {reason}",
    "SLOT_FAILED": "{reason}",
}


class LocalDemo:
    def __init__(self, task_count: int, max_workers: int, tell: Tell) -> None:
        self._task_count = task_count
        self._max_workers = max_workers
        self._tell = tell
        self._teller = DemoNarrator(tell, TOLD, task_count)
        self._killed: DemoFailed | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[tuple[LocalReport, DemoPlace]]:
        """The report and where it is, when all is done and everything still runs. Afterwards it is gone."""
        async with guarded_place() as place:
            scene = DemoScenario(
                place.filled_in(TOML, min_workers=MIN_WORKERS, max_workers=self._max_workers),
                f"{MIN_WORKERS} to {self._max_workers} workers, as processes here",
                RUN_TIMEOUT_S + RUN_TIMEOUT_PER_TASK_S * self._task_count,
            )
            async with played(place, scene, self._teller, self._go_on) as stage:
                yield await self._report(stage), place

    async def _enqueue(self, stage: DemoEnvironment) -> None:
        poison = round(POISON_AT * self._task_count)
        tasks = [
            new_task(
                QUEUE,
                {"number": number, "work_s": WORK_S[number % len(WORK_S)], "is_poisonous": number == poison},
                max_attempts=ATTEMPTS,
            )
            for number in range(self._task_count)
        ]
        await stage.enqueue(tasks)
        self._tell(f"a burst of {self._task_count} tasks arrives; one of them kills every worker that runs it")

    async def _go_on(self, stage: DemoEnvironment, standing: Any) -> bool:
        """It is over when the queue is empty and the fleet back at its minimum."""
        if not standing["enqueued"]:
            if standing["ready"] >= MIN_WORKERS:
                await self._enqueue(stage)
        elif self._killed is None and standing["complete"] >= KILL_AT * self._task_count:
            await self._kill_one_at_work(stage)
        elif not standing["unfinished"] and standing["workers"] == MIN_WORKERS:
            self._tell(f"the queue is empty and the fleet back at its minimum of {MIN_WORKERS}")
            return True
        return False

    async def _kill_one_at_work(self, stage: DemoEnvironment) -> None:
        chosen = await stage.database.fetchrow(QUERIES["at_work"])
        if chosen is None:
            return
        # Stopped first, so that what we then see of it is still true when it is killed.
        os.kill(chosen["pid"], signal.SIGSTOP)
        again = await stage.database.fetchrow(QUERIES["at_work"])
        if again != chosen:
            os.kill(chosen["pid"], signal.SIGCONT)
            return
        os.kill(chosen["pid"], signal.SIGKILL)
        self._killed = DemoFailed(chosen["id"], chosen["task_id"], await stage.now())
        self._tell(f"WE KILL {chosen['id']} with SIGKILL, in the middle of task {chosen['task_id']}")

    async def _report(self, stage: DemoEnvironment) -> LocalReport:
        poison: dict[str, Any] = dict(await stage.database.fetchrow(QUERIES["poison"]))
        return LocalReport(**await stage.tasks_report(self._killed), **poison, took_s=self._teller.took_s)
