"""Runs all configured fleets from start-up to shutdown.

Each fleet is one FleetTask. `stop` shuts the fleets down if this process leads: workers finish their tasks within
their time limit, then their machines are deleted. A standby only ends. `reconfigure` applies a changed configuration
between cycles: a fleet that left it is shut down, however long that takes, and one that returns keeps running.

Besides the fleets it runs three services: it wakes idle fleets when a task arrives, applies retention, and shuts down
unconfigured fleets (control/unconfigured_fleets.py).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

import structlog

from windlass.control.cycle import FleetCycle
from windlass.control.fleet_task import FleetTask, LastCycle
from windlass.control.summary import Summary
from windlass.control.unconfigured_fleets import OrchestratorStore, UnconfiguredFleets
from windlass.model.errors import DatabaseUnavailable, WindlassError
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.ports.provider import Provider

# A burst of tasks wakes an idle fleet once, not once per task.
WAKE_INTERVAL_S = 0.5
# Longest wait for one notification of new tasks, and the pause after a failure.
WAKE_WAIT_S = 60.0
# Retention deletes a little at a time, all day.
SWEEP_INTERVAL_S = 60.0
# Limit for a cycle that was requested by hand: cycles wait only seconds for their provider.
CYCLE_TIMEOUT_S = 60.0
# Limit of a shutdown, beyond the workers' stop_timeout_s: for the cycles that notice and the processes that end,
SHUTDOWN_MARGIN_S = 15.0
# and per machine, because clouds accept about one deletion per second.
SHUTDOWN_PER_MACHINE_S = 2.0
log = structlog.get_logger(__name__)


def shutdown_limit_s(fleet: FleetConfig, workers: int) -> float:
    """The longest time that the shutdown of a fleet takes. Machines that are left after it stay, and are billed."""
    return fleet.stop_timeout_s + SHUTDOWN_MARGIN_S + workers * SHUTDOWN_PER_MACHINE_S


class Orchestrator:
    """`candidate` identifies this process in leases, as in every cycle that `make_cycle` returns."""

    def __init__(
        self,
        store: OrchestratorStore,
        candidate: Candidate,
        make_cycle: Callable[[str, FleetConfig], FleetCycle],
        make_provider: Callable[[str, FleetConfig], Provider],
        on_summary: Callable[[Summary], None],
    ) -> None:
        self._store = store
        self._make_cycle = make_cycle
        self._make_provider = make_provider
        self._on_summary = on_summary
        # Including those that are ended and still wait for calls in flight.
        self._tasks: list[FleetTask] = []
        self._group: asyncio.TaskGroup | None = None
        self._services: set[asyncio.Task[None]] = set()
        self._unconfigured = UnconfiguredFleets(
            store, candidate, self._running, make_cycle, lambda cycle: self._add(cycle).shut_down(), self.stop
        )
        self._is_stopping = asyncio.Event()
        self._is_reconfigured = False
        # Queues of idle fleets that are watched for tasks, and whether there are others by now.
        self._watched_queues: set[str] = set()
        self._has_new_idle_queues = asyncio.Event()
        # Fleets that wake() will wake.
        self._waking: set[str] = set()
        # Set by the next summary, which replaces it by a new event.
        self._next_summary = asyncio.Event()

    async def run(self, fleets: Mapping[str, FleetConfig], *, stops_when_empty: bool = False) -> None:
        """Run these fleets until stopped.

        `stops_when_empty`: no fleet is configured; also end when all unconfigured fleets are shut down.
        """
        # A reload during start-up has replaced the fleets already; a stop during start-up starts none.
        if not self._is_reconfigured and not self._is_stopping.is_set():
            self._unconfigured.stops_when_empty = stops_when_empty
            # Before the task group: an error here must not be wrapped, and no fleet runs yet.
            for cycle in [self._make_cycle(name, config) for name, config in fleets.items()]:
                self._add(cycle)
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self._is_stopping.wait())
                for task in self._tasks:
                    self._start(task)
                for service in (self._wake_idle_fleets(), self._sweep(), self._unconfigured.run()):
                    self._start_service(service)
        finally:
            for running in self._services:
                running.cancel()
        with suppress(DatabaseUnavailable):
            await self._unconfigured.resign()

    def reconfigure(
        self, fleets: Mapping[str, FleetConfig], *, has_new_accounts: bool = False, stops_when_empty: bool = False
    ) -> None:
        """Apply a configuration from the next cycle on: change, start and shut down fleets.

        `has_new_accounts`: also fleets that did not change get a new provider. `stops_when_empty`: as in run(). Raises
        what `make_provider` raises, and WindlassError while stopping; then nothing has changed.
        """
        if self._is_stopping.is_set():
            raise WindlassError("configuration not applied: the orchestrator is stopping")
        running = self._running()
        # Make everything before anything changes: an error must not leave half of the configuration applied.
        new: dict[str, FleetCycle] = {}
        providers: dict[str, Provider] = {}
        try:
            for name, config in fleets.items():
                if name not in running:
                    new[name] = self._make_cycle(name, config)
                elif has_new_accounts or running[name].config != config:
                    providers[name] = self._make_provider(name, config)
        except BaseException:
            unused: list[FleetCycle | Provider] = [*new.values(), *providers.values()]
            for made in unused:
                self._start_service(made.close())
            raise
        self._is_reconfigured = True
        self._unconfigured.stops_when_empty = stops_when_empty
        changes: dict[str, list[str]] = {"new": list(new)} if new else {}
        for name in fleets.keys() & running.keys():
            running[name].resume()
        for name, provider in providers.items():
            old, config = running[name].config, fleets[name]
            changed = [key for key in FleetConfig.model_fields if getattr(old, key) != getattr(config, key)]
            if changed:
                changes.setdefault("changed", []).append(f"{name} ({', '.join(changed)})")
            running[name].reconfigure(config, provider)
        for cycle in new.values():
            self._add(cycle)
        for name in sorted(running.keys() - fleets.keys()):
            # Without a time limit: workers left running would belong to no fleet, and cost money.
            running[name].shut_down()
            changes.setdefault("removed", []).append(name)
        log.info("reloaded configuration", **changes)
        for task in self._running().values():
            task.wake()

    def stop(self, *, keeps_workers: bool = False) -> None:
        """Shut down all fleets, then end. Called again: end now, and leave the workers to the next start.

        With `keeps_workers`, or on standby: end after the current cycle and leave the workers running.
        """
        if self._is_stopping.is_set():
            for task in self._tasks:
                task.stop_now()
            return
        self._is_stopping.set()
        self._unconfigured.stop()
        running = self._running()
        if keeps_workers or all(task.is_standby for task in running.values()):
            for task in self._tasks:
                task.stop()
            return
        for name, task in running.items():
            workers = task.last.summary.managed_workers if task.last is not None else None
            limit_s = shutdown_limit_s(task.config, workers or 0)
            hint = "stop again (Ctrl-C) to end now and leave the workers to the next start"
            log.info("shut down fleet", fleet=name, workers=workers, limit_s=limit_s, hint=hint)
            task.shut_down(limit_s)

    @property
    def fleets(self) -> tuple[str, ...]:
        """Names of the fleets that run here."""
        return tuple(self._running())

    def fleet(self, name: str) -> FleetConfig | None:
        """The current settings of a fleet; None if it does not run here."""
        task = self._running().get(name)
        return task.config if task is not None else None

    def last_cycles(self) -> Mapping[str, LastCycle]:
        """The last cycle of each fleet that runs here."""
        return {name: task.last for name, task in self._running().items() if task.last is not None}

    async def cycle_now(self) -> list[Summary]:
        """Run one cycle of every fleet that begins after this call. Raises TimeoutError, DatabaseUnavailable."""
        asked_at, asked_at_by_database = asyncio.get_running_loop().time(), await self._store.now()
        for task in self._running().values():
            task.wake()
        async with asyncio.timeout(CYCLE_TIMEOUT_S):
            while not all(
                task.last is not None and _began_after(task.last, asked_at, asked_at_by_database)
                for task in self._running().values()
            ):
                await self._next_summary.wait()
        return [last.summary for last in self.last_cycles().values()]

    def wake(self, fleet: str) -> None:
        """Start the next cycle of a fleet soon, if it runs here. A hint that anyone may send: not more often than idle
        fleets are woken.
        """
        task = self._running().get(fleet)
        if task is None or fleet in self._waking:
            return
        loop = asyncio.get_running_loop()
        next_at = task.last.at + WAKE_INTERVAL_S if task.last is not None else 0.0

        def wake() -> None:
            self._waking.discard(fleet)
            task.wake()

        self._waking.add(fleet)
        loop.call_later(max(0.0, next_at - loop.time()), wake)

    def _running(self) -> dict[str, FleetTask]:
        return {task.name: task for task in self._tasks if not task.is_ended}

    def _add(self, cycle: FleetCycle) -> FleetTask:
        task = FleetTask(cycle, lambda summary: self._receive(task, summary))
        self._tasks.append(task)
        if self._group is not None:
            self._start(task)
        return task

    def _start(self, task: FleetTask) -> None:
        if self._group is not None:
            task.start(self._group).add_done_callback(lambda _: self._tasks.remove(task))

    def _start_service(self, work: Awaitable[None]) -> None:
        service = asyncio.ensure_future(work)
        self._services.add(service)
        service.add_done_callback(self._services.discard)

    def _receive(self, task: FleetTask, summary: Summary) -> None:
        if not self._watched_queues.issuperset(task.idle_queues):
            self._has_new_idle_queues.set()
        arrived, self._next_summary = self._next_summary, asyncio.Event()
        arrived.set()
        self._on_summary(summary)

    async def _wake_idle_fleets(self) -> None:
        """Wake an idle fleet when a task arrives, so that the task does not wait for the next cycle."""
        while True:
            try:
                await self._wait_for_tasks()
                idle = {name: task for name, task in self._running().items() if task.idle_queues}
                queues = {queue for task in idle.values() for queue in task.idle_queues}
                # Notifications are hints: check before waking.
                filled = await self._store.queues_with_tasks(sorted(queues))
                for task in idle.values():
                    if not filled.isdisjoint(task.idle_queues):
                        task.wake()
            except Exception as error:
                if not isinstance(error, WindlassError):
                    log.exception("wake idle fleets failed")
                await asyncio.sleep(WAKE_WAIT_S)
            await asyncio.sleep(WAKE_INTERVAL_S)

    async def _wait_for_tasks(self) -> None:
        """Until a task may have arrived in a queue of an idle fleet, or the set of those queues has changed."""
        self._watched_queues = {queue for task in self._running().values() for queue in task.idle_queues}
        hints: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._has_new_idle_queues.wait())]
        if self._watched_queues:
            watch = self._store.wait_for_work(sorted(self._watched_queues), WAKE_WAIT_S)
            hints.append(asyncio.ensure_future(watch))
        try:
            done, _ = await asyncio.wait(hints, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for hint in hints:
                hint.cancel()
        self._has_new_idle_queues.clear()
        for hint in done:
            hint.result()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            try:
                await self._store.sweep()
            except DatabaseUnavailable:
                continue  # the cycles log it
            except Exception:
                # The next sweep must run, or finished rows are kept forever.
                log.exception("apply retention failed")


def _began_after(last: LastCycle, asked_at: float, asked_at_by_database: datetime) -> bool:
    """A standby's cycle that could not ask the database has no timestamp."""
    if not last.summary.timestamp:
        return last.at > asked_at
    return datetime.fromisoformat(last.summary.timestamp) >= asked_at_by_database
