"""Runs a demo: starts everything, injects faults as the work proceeds, prints what happens, and reports the result.

A scenario is a subclass that holds its data (configuration, messages, time limit) and implements `advance`, which
takes the next step when it is due. Everything that a demo starts is stopped and deleted afterwards (see cleanup.py).
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import psutil

from windlass.cost.queries import build_report
from windlass.cost.report import By
from windlass.demo.environment import (
    FLEET,
    HANDLER,
    POLL_INTERVAL_S,
    QUERIES,
    QUEUE,
    DemoEnvironment,
    DemoNarrator,
    DemoPlace,
    KilledWorker,
    PrintLine,
    free_port,
    start_environment,
    temporary_place,
)
from windlass.demo.report import DemoBill, DemoReport
from windlass.model.task import new_task
from windlass.wiring import stores

MAX_COST_ROWS = 1000


# windlass.toml of every scenario, which adds its own lines at the start and to the fleet. All intervals are short, so
# that everything happens within a few minutes.
TOML = """\
{head}data_dir = '{data_dir}'

[api]
port = {port}  # dashboard and remote workers

[control]
lease_s = 10

[fleets.{fleet}]
queues = ["{queue}"]
handler = "{handler}"
min_workers = {min_workers}
max_workers = {max_workers}
{tail}"""
# The line that is printed for an event.
MESSAGES = {
    "MACHINE_PREPARED": "{worker}: pod checked, and its program started over SSH",
    "PREPARATION_FAILED": "{worker}: {reason}",
    "WORKER_JOINED": "{worker}: machine booted and joined with its token",
    "WORKER_ACTIVATED": "{worker} is active",
    "WORKER_ERROR": "{worker} failed: {reason}",
    "WORKER_TERMINATING": "{worker} drains: {reason}",
    "WORKER_TERMINATED": "{worker} terminated: {reason}",
    "TASK_REQUEUED": "task {task} requeued after {attempt}",
    "TASK_ERROR": "task {task} will be retried: {reason}",
    "TASK_FAILED": "task {task} failed permanently after {attempt}; it stays in the database with its history",
    "SLOT_FAILED": "{reason}",
    "VOLUME_GROWN": "network volume grown: {reason}",
    "MACHINE_REFUSED": "{reason}",
    "MACHINE_NOT_DELETED": "{reason}",
    "ALERT": "{reason}",
}


class DemoScenario(ABC):
    # Lines of windlass.toml, with placeholders that `config_values` fills in.
    toml_head: ClassVar[str] = ""
    toml_tail: ClassVar[str]
    # Whether to print the file: that of a cloud scenario can be used for the real cloud.
    prints_toml: ClassVar[bool] = False
    # What `windlass up` runs.
    machines: ClassVar[str]
    # Durations of tasks.
    work_s: ClassVar[tuple[float, ...]]
    # For everything except the tasks themselves, on a machine that is six times overloaded.
    base_time_limit_s: ClassVar[float]
    max_attempts: ClassVar[int] = 3
    min_workers: ClassVar[int] = 0
    # How long a result of a suspended worker may still be on its way to the database.
    delivery_s: ClassVar[float] = 0.0
    # Variables for `windlass up`.
    secrets: ClassVar[Mapping[str, str]] = {}

    def __init__(self, task_count: int, max_workers: int, print_line: PrintLine) -> None:
        self.task_count = task_count
        self.max_workers = max_workers
        self.print_line = print_line
        self.narrator = DemoNarrator(print_line, MESSAGES, task_count)
        self.killed: KilledWorker | None = None

    @property
    def time_limit_s(self) -> float:
        return self.base_time_limit_s + 2 * self.task_count * max(self.work_s) / self.max_workers

    @abstractmethod
    async def advance(self, environment: DemoEnvironment, progress: Any) -> bool:
        """Take the next step if it is due. Returns whether the demo is complete."""

    @contextmanager
    def open_cloud(self, folder: Path) -> Iterator[None]:  # noqa: ARG002
        """Serve the emulated cloud, if the scenario has one."""
        yield

    def config_values(self, place: DemoPlace) -> dict[str, object]:  # noqa: ARG002
        return {}

    def render_toml(self, place: DemoPlace) -> str:
        limits = {"min_workers": self.min_workers, "max_workers": self.max_workers}
        values = {"port": free_port(), **limits, **self.config_values(place)}
        head, tail = (text.format(fleet=FLEET, **values) for text in (self.toml_head, self.toml_tail))
        names = {"data_dir": place.data_dir, "fleet": FLEET, "queue": QUEUE, "handler": HANDLER}
        return TOML.format(head=head, tail=tail, **names, **values)

    async def read_bill(self, environment: DemoEnvironment) -> DemoBill | None:  # noqa: ARG002
        return None

    async def read_details(self, environment: DemoEnvironment) -> dict[str, Any]:  # noqa: ARG002
        """Values for the report that only this scenario has."""
        return {}

    def checks(self, report: DemoReport) -> dict[str, bool]:  # noqa: ARG002
        """Each check of this scenario, by the problem to report if it fails."""
        return {}

    def lines(self, report: DemoReport) -> list[tuple[str, str]]:  # noqa: ARG002
        return []

    @asynccontextmanager
    async def run(self) -> AsyncIterator[tuple[DemoReport, DemoPlace]]:
        """Yield the report and the place when the demo is complete, or its time is up, and everything still runs."""
        async with temporary_place() as place:
            with self.open_cloud(place.folder / "machines"):
                toml = self.render_toml(place)
                if self.prints_toml:
                    lines = "".join(f"         {line}\n" for line in toml.splitlines())
                    self.print_line(f"configuration:\n\n{lines}")
                description = f"{self.min_workers} to {self.max_workers} {self.machines}"
                started = start_environment(place, toml, description, self.secrets, self.print_line)
                async with started as environment:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self.time_limit_s):
                            await self._follow(environment)
                    yield await self._report(environment), place

    async def _follow(self, environment: DemoEnvironment) -> None:
        while True:
            progress = await environment.read_progress()
            await self.narrator.print_news(environment, progress)
            if await self.advance(environment, progress):
                return
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _report(self, environment: DemoEnvironment) -> DemoReport:
        details = await self.read_details(environment)
        killed = self.killed
        report = DemoReport(
            **await environment.database.fetchrow(QUERIES["final_counts"]),
            **await environment.database.fetchrow(
                QUERIES["recovery_of_killed_worker"],
                *((killed.worker_id, killed.task_id, killed.at) if killed else (None, None, None)),
            ),
            took_s=self.narrator.took_s,
            min_workers=self.min_workers,
            poisonous_task_id=details.pop("poisonous_task_id", None),
            bill=await self.read_bill(environment),
            details=details,
        )
        return replace(report, extra_checks=self.checks(report), extra_lines=self.lines(report))

    def processes_to_kill(self, pid: int) -> list[psutil.Process]:
        """The processes of a worker whose process id is `pid`. Empty if it has exited."""
        return [psutil.Process(pid)]

    async def kill_busy_worker(self, environment: DemoEnvironment) -> None:
        chosen = await environment.database.fetchrow(QUERIES["worker_to_kill"])
        processes = self.processes_to_kill(chosen["pid"]) if chosen is not None else []
        if not processes:
            return
        # Suspended first, so that the task it runs is the same at the second query and at the kill.
        _apply(processes, psutil.Process.suspend)
        await asyncio.sleep(self.delivery_s)
        confirmed = await environment.database.fetchrow(QUERIES["worker_to_kill"])
        if confirmed is None or confirmed["id"] != chosen["id"]:
            _apply(processes, psutil.Process.resume)
            return
        chosen = confirmed
        _apply(processes, psutil.Process.kill)
        self.killed = KilledWorker(chosen["id"], chosen["task_id"], await environment.now())
        self.print_line(f"FAULT: {chosen['id']} killed with SIGKILL while it runs task {chosen['task_id']}")

    async def enqueue(self, environment: DemoEnvironment, count: int, **special: Collection[int]) -> None:
        """`special`: a flag of the payload to the numbers of the tasks that have it."""
        flags = {"is_poisonous": (), "is_stuck": (), **special}
        tasks = [
            new_task(
                QUEUE,
                {
                    "number": number,
                    "work_s": self.work_s[number % len(self.work_s)],
                    **{flag: number in numbers for flag, numbers in flags.items()},
                },
                max_attempts=self.max_attempts,
            )
            for number in range(count)
        ]
        async with stores.store(environment.config) as store:
            await store.enqueue_many(tasks)


def _apply(processes: list[psutil.Process], function: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            function(process)


async def ledger_costs(environment: DemoEnvironment) -> dict[str, int]:
    """Micros by worker. The cost of deleted machines is exact, even before their accounts are settled."""
    async with stores.store(environment.config) as store:
        now = await store.now()
        report = await build_report(store, By.WORKER, now - timedelta(hours=2), now, FLEET, MAX_COST_ROWS)
    return {str(cost.key): cost.total_micros for cost in report.costs}


async def workers_by_machine(environment: DemoEnvironment) -> dict[str, Any]:
    return {row["machine_id"]: row for row in await environment.database.fetch(QUERIES["machine_workers"])}
