"""Shuts down fleets that are in the database but not in the configuration.

Such a fleet left the configuration while no orchestrator ran. Its workers may cost money, and its alerts would never
resolve. The shutdown uses the settings of the fleet's last cycle. It starts only after GRACE_S during which this
process led without interruption and no orchestrator ran the fleet: an operator who started with the wrong file has
that long to notice. Only the leader acts, because another orchestrator's configuration may include the fleet.

A process without fleets of its own holds the caretaker lease, which shows that an orchestrator is present. It leaves
the leader's lease free, so that a process with fleets, such as one `windlass cycle`, can lead.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from windlass.control.cycle import FleetCycle
from windlass.control.fleet_task import FleetTask
from windlass.model.errors import DatabaseUnavailable, WindlassError
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate, Standby
from windlass.ports.control import ControlStore
from windlass.ports.fleets import FleetQueries
from windlass.ports.tasks import MaintenanceStore
from windlass.ports.transport import WorkSignal

CHECK_INTERVAL_S = 60.0
# Interval until this process has run its first cycle and knows whether it leads.
FIRST_CHECK_INTERVAL_S = 0.5
GRACE_S = 300.0
# Interval between repeats of the error that a fleet cannot be shut down.
BLOCKED_LOG_INTERVAL_S = 3600.0
# Name of the lease held by a process without fleets.
CARETAKER = "caretaker"
log = structlog.get_logger(__name__)


class OrchestratorStore(ControlStore, FleetQueries, MaintenanceStore, WorkSignal, Protocol):
    """The store as the orchestrator uses it, beyond its cycles."""


@dataclass(slots=True)
class UnconfiguredFleet:
    """What is known of one such fleet. Times are by the loop's clock."""

    is_logged: bool = False
    # Since when, without interruption, this process leads and no orchestrator runs the fleet.
    unattended_since: float | None = None
    # When it was last logged that the fleet cannot be shut down.
    blocked_at: float | None = None


class UnconfiguredFleets:
    """`running` returns the fleets that this process runs. `shut_down` starts to shut down a fleet. `on_done` is called
    when `stops_when_empty` is set and there is nothing left to shut down."""

    def __init__(
        self,
        store: OrchestratorStore,
        candidate: Candidate,
        running: Callable[[], Mapping[str, FleetTask]],
        make_cycle: Callable[[str, FleetConfig], FleetCycle],
        shut_down: Callable[[FleetCycle], None],
        on_done: Callable[[], None],
    ) -> None:
        self._store = store
        self._candidate = candidate
        self._caretaker = replace(candidate, lease=CARETAKER)
        self._running = running
        self._make_cycle = make_cycle
        self._shut_down = shut_down
        self._on_done = on_done
        self._fleets: dict[str, UnconfiguredFleet] = {}
        self._is_standby_logged = False
        self._is_stopped = False
        self.stops_when_empty = False

    def stop(self) -> None:
        """Start no further shutdown."""
        self._is_stopped = True

    async def run(self) -> None:
        while not self._is_stopped:
            try:
                if await self._try_to_lead():
                    await self._check()
                else:
                    for fleet in self._fleets.values():
                        fleet.unattended_since = None
            except DatabaseUnavailable as error:
                if not self._running():  # otherwise the cycles log it
                    log.warning("find unconfigured fleets failed", error=str(error))
            except Exception:
                # The next check must run: the workers may cost money.
                log.exception("find unconfigured fleets failed")
            if not self._running():
                await asyncio.sleep(min(CHECK_INTERVAL_S, self._caretaker.ttl_s / 2))  # renews the caretaker lease
            else:
                has_run = any(task.last is not None for task in self._running().values())
                await asyncio.sleep(CHECK_INTERVAL_S if has_run else FIRST_CHECK_INTERVAL_S)

    async def resign(self) -> None:
        """Release the caretaker lease."""
        await self._store.release_lease(self._caretaker)

    async def _try_to_lead(self) -> bool:
        """Whether this process leads. Without fleets of its own it holds the caretaker lease while it does."""
        if running := self._running():
            return any(task.last is not None and task.last.summary.is_leader for task in running.values())
        # No cycle acquires the leader's lease, so try it here and release it at once.
        if not isinstance(await self._store.acquire_lease(self._candidate), Standby):
            await self._store.release_lease(self._candidate)
            await self._store.acquire_lease(self._caretaker)
            return True
        if not self._is_standby_logged:
            self._is_standby_logged = True
            log.info("wait as standby", reason="another orchestrator leads")
        return False

    async def _check(self) -> None:
        workers = Counter(worker.fleet for worker in await self._store.workers() if worker.slot is not None)
        now = await self._store.now()
        planned = [fleet for fleet in await self._store.fleets() if fleet.planned_at is not None]
        # None: an orchestrator runs the fleet. If its cycles are far apart, the leader's lease is free in between.
        without_orchestrator_s = {fleet.name: fleet.without_orchestrator_s(now) for fleet in planned}
        # A fleet that was shut down has no next cycle.
        unfinished = {
            fleet.name for fleet in planned if fleet.next_plan_in_s is not None and without_orchestrator_s[fleet.name]
        }
        names = sorted((workers.keys() | unfinished) - self._running().keys())
        self._fleets = {name: self._fleets.get(name, UnconfiguredFleet()) for name in names}
        for name, fleet in self._fleets.items():
            await self._attend(name, fleet, workers[name], without_orchestrator_s.get(name, float("inf")))
        is_done = all(not workers[name] and fleet.blocked_at is not None for name, fleet in self._fleets.items())
        if self.stops_when_empty and is_done and not self._running():
            log.info("stop orchestrator", reason="no fleet is configured, and no worker of another fleet is left")
            self._on_done()

    async def _attend(
        self, name: str, fleet: UnconfiguredFleet, workers: int, without_orchestrator_s: float | None
    ) -> None:
        now = asyncio.get_running_loop().time()
        if not fleet.is_logged:
            fleet.is_logged = True
            log.error("found unconfigured fleet", fleet=name, workers=workers, shut_down_in_s=GRACE_S)
        if without_orchestrator_s is None:
            fleet.unattended_since = None
            return
        if fleet.unattended_since is None:
            fleet.unattended_since = now
        # A cycle that ran between two checks is visible only in without_orchestrator_s.
        if min(without_orchestrator_s, now - fleet.unattended_since) < GRACE_S:
            return
        try:
            cycle = await self._restore_cycle(name)
        except DatabaseUnavailable:
            raise
        except Exception as error:
            # A problem of one fleet must not stop the others. The settings may come from a version with other fields.
            is_known = isinstance(error, WindlassError)
            problem = str(error) if is_known else f"cannot read its last settings: {type(error).__name__}"
            if fleet.blocked_at is None or now - fleet.blocked_at >= BLOCKED_LOG_INTERVAL_S:
                fleet.blocked_at = now
                hint = "put the fleet back into the configuration"
                log.error("shut down unconfigured fleet failed", fleet=name, workers=workers, error=problem, hint=hint)
            return
        if self._is_stopped:
            await cycle.close()
            return
        log.warning("shut down unconfigured fleet", fleet=name, workers=workers)
        self._shut_down(cycle)

    async def _restore_cycle(self, name: str) -> FleetCycle:
        """A cycle with the settings of the fleet's last one."""
        cycles = await self._store.cycles(name, 1)
        last = await self._store.cycle(cycles[0].id) if cycles else None
        if last is None or last.snapshot.settings is None:
            raise WindlassError("the settings of its last cycle are no longer stored")
        return self._make_cycle(name, last.snapshot.settings)
