"""A whole host's worth of fleets, from start to good night.

Fleets are run until told to stop. A stop lets the workers finish and leave, within their time, if it is us who lead;
whoever stands by just leaves. A changed configuration is taken over between cycles: a fleet that is left out of it is
wound down, however long that takes, and one that is put back stays. So is a fleet that is missing from the
configuration at the start and that nobody runs, by the settings of its last cycle; but only after a while, in which a
mistake shows. Where none is configured at all that is all there is to do, and when it is done we end.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Protocol

import structlog

from windlass.control.cycle import FleetCycle
from windlass.control.daemon import Daemon
from windlass.control.summary import Summary
from windlass.model.errors import DatabaseUnavailable, WindlassError
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate, Standby
from windlass.ports.control import ControlStore, Operations
from windlass.ports.provider import Provider
from windlass.ports.store import Store

# A burst wakes a fleet without workers once, not once a task.
WAKE_INTERVAL_S = 0.5
LOOK_OUT_S = 60.0
# Retention is applied in small bites all day.
SWEEP_INTERVAL_S = 60.0
# How often we look for fleets that are not configured here and not over, and for how long they are only told of:
# whoever started us with the wrong file has that long to notice.
FORGOTTEN_LOOK_S = 60.0
FORGOTTEN_GRACE_S = 300.0
# How often a person is told of a fleet that nobody here can wind down.
FORGOTTEN_TOLD_S = 3600.0
# The lease that we hold while we have no fleet to lead for: somebody is there, and the lead itself is free for whoever
# has one, if only for a single cycle.
CARETAKER = "caretaker"
# A cycle that was asked for ends within this time: it waits for its provider no longer than a few seconds.
CYCLE_TIMEOUT_S = 60.0
# Beyond a worker's own time to stop: for the cycles that notice and the processes that end.
STOP_MARGIN_S = 15.0
# And for each machine: clouds let us delete about one a second.
END_S = 2.0
log = structlog.get_logger(__name__)


class OrchestratorStore(Store, ControlStore, Operations, Protocol):
    """What running a host needs of the store beyond its cycles."""


@dataclass(frozen=True, slots=True)
class LastCycle:
    """The last cycle of a fleet, and when we heard of it by the loop's clock."""

    summary: Summary
    at: float


@dataclass(slots=True)
class UnconfiguredFleet:
    """A fleet that is not configured here, and not over. By the loop's clock: since when, without a break, we have had
    the say and seen nobody run it, and when a person was last told that we cannot wind it down."""

    is_told: bool = False
    since: float | None = None
    stuck_at: float | None = None


class Orchestrator:
    """`candidate`: ourselves, as in every cycle that is made."""

    def __init__(
        self,
        store: OrchestratorStore,
        candidate: Candidate,
        make_cycle: Callable[[str, FleetConfig], FleetCycle],
        make_provider: Callable[[str, FleetConfig], Provider],
        on_summary: Callable[[Summary], None],
    ) -> None:
        self._store = store
        self._candidate = candidate
        self._caretaker = replace(candidate, lease=CARETAKER)
        self._make_cycle = make_cycle
        self._make_provider = make_provider
        self._on_summary = on_summary
        self._daemon = Daemon((), self._note)
        # Fleets whose last cycle saw nobody hired and nothing to do, and their queues: only they are worth waking for a
        # task. Whoever saw one and hired nobody, because of a hold or a limit, would decide the same again.
        self._resting: dict[str, tuple[str, ...]] = {}
        # Set when there is one more of them, or its queues are others.
        self._is_one_resting = asyncio.Event()
        # Fleets whose last cycle found that another orchestrator leads.
        self._standing_by: set[str] = set()
        # When each fleet is given up, once we are about to end.
        self._farewells: list[asyncio.TimerHandle] = []
        self._is_stopping = False
        self._beside: set[asyncio.Task[None]] = set()
        self._heard: dict[str, LastCycle] = {}
        # Fleets that are not configured here, and not over.
        self._forgotten: dict[str, UnconfiguredFleet] = {}
        # That another leads was said, by us who have no cycle that says so.
        self._is_standby_told = False
        # None is configured: what is left of those that were is all there is to do.
        self._is_clearing_up = False
        # Set when nothing more is to come.
        self._is_over = asyncio.Event()
        # Set by the next summary, which puts a new one here.
        self._news = asyncio.Event()

    async def run(self, fleets: Mapping[str, FleetConfig], *, is_clearing_up: bool = False) -> None:
        """Until stopped. `is_clearing_up`: no fleet is configured, not even one whose machines are others'; then also
        until those that are not configured are wound down."""
        self._is_clearing_up = is_clearing_up
        for name, config in fleets.items():
            self._daemon.add(self._make_cycle(name, config))
        for work in (self._wake_for_tasks, self._sweep, self._look_for_the_forgotten):
            self._begin(work())
        try:
            await self._daemon.run(self._until_over())
        finally:
            for task in self._beside:
                task.cancel()
            for timer in self._farewells:
                timer.cancel()
        with suppress(DatabaseUnavailable):
            await self._store.release_lease(self._caretaker)

    async def _until_over(self) -> None:
        await self._is_over.wait()

    def reconfigure(
        self, fleets: Mapping[str, FleetConfig], *, has_new_accounts: bool = False, is_clearing_up: bool = False
    ) -> None:
        """From the next cycle on: changed fleets change, new ones start, those left out are wound down.

        `has_new_accounts`: providers that are made now are others, also of fleets that have not changed.
        `is_clearing_up`: as in run(). Raises what making a provider raises, and WindlassError when we are about to end;
        nothing is changed then.
        """
        if self._is_stopping:
            raise WindlassError("taking a configuration over: it is too late, we are about to end")
        running = self._daemon.fleets
        # All of them before anything is changed: one that cannot be made must not leave us half-way.
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
                self._begin(made.close())
            raise
        self._is_clearing_up = is_clearing_up
        changes: dict[str, list[str]] = {"new": list(new)} if new else {}
        for name in fleets.keys() - new.keys():
            # Whoever was told to leave, while it was left out, does; others are hired.
            running[name].is_shutting_down = False
        for name, provider in providers.items():
            fleet, config = running[name], fleets[name]
            changed = [key for key in FleetConfig.model_fields if getattr(fleet.config, key) != getattr(config, key)]
            if changed:
                changes.setdefault("changed", []).append(f"{name} ({', '.join(changed)})")
            fleet.reconfigure(config, provider)
        for cycle in new.values():
            self._daemon.add(cycle)
        for name in sorted(set(self._daemon.fleets) - set(fleets)):
            # For as long as it takes: whoever it leaves behind would be nobody's, and paid for.
            self._daemon.wind_down(name)
            changes.setdefault("removed", []).append(name)
        log.info("configuration reloaded" if changes else "configuration reloaded: no fleet has changed", **changes)
        self._daemon.wake()

    def stop(self, *, keeps_workers: bool = False) -> None:
        """Let every worker finish and leave, then end. A second time: end at once, and leave them to the next start.

        Leaving workers, or where another orchestrator leads: end after this cycle, and touch nobody.
        """
        if self._is_stopping:
            self._daemon.stop_at_once()
            return
        self._is_stopping = True
        self._is_over.set()
        if keeps_workers or self._daemon.fleets.keys() <= self._standing_by:
            self._daemon.stop()
            return
        for name in tuple(self._daemon.fleets):
            self._shut_down(name)

    def fleet(self, name: str) -> FleetConfig | None:
        """A fleet's settings as they are now; None if it is not run here."""
        running = self._daemon.fleets.get(name)
        return running.config if running is not None else None

    @property
    def fleets(self) -> tuple[str, ...]:
        """The names of those that are run here."""
        return tuple(self._daemon.fleets)

    def heard(self) -> Mapping[str, LastCycle]:
        """The last cycle of each fleet that is run here."""
        return {name: heard for name, heard in self._heard.items() if name in self._daemon.fleets}

    async def cycle_now(self) -> list[Summary]:
        """One cycle of every fleet that begins after this call. Raises TimeoutError, DatabaseUnavailable."""
        loop = asyncio.get_running_loop()
        asked_at, asked_at_by_database = loop.time(), await self._store.now()
        self._daemon.wake()
        async with asyncio.timeout(CYCLE_TIMEOUT_S):
            while not all(
                name in self._heard and _is_after(self._heard[name], asked_at, asked_at_by_database)
                for name in self._daemon.fleets
            ):
                await self._news.wait()
        return [heard.summary for heard in self.heard().values()]

    def _shut_down(self, name: str) -> None:
        """Within the time that its workers have to stop, and its provider may need to end their machines."""
        fleet = self._daemon.fleets[name]
        hired = self._heard[name].summary.hired if name in self._heard else None
        limit_s = fleet.config.stop_timeout_s + STOP_MARGIN_S + (hired or 0) * END_S
        log.info(
            "winding down: waiting for its workers to finish and their machines to end; "
            "told to stop again (Ctrl-C), we leave them to the next start",
            fleet=name,
            workers=hired,
            limit_s=limit_s,
        )
        self._daemon.wind_down(name)
        self._farewells.append(asyncio.get_running_loop().call_later(limit_s, self._give_up, fleet))

    def _give_up(self, fleet: FleetCycle) -> None:
        """Its time is over. What is left of it is no reason to stop, or to keep, any other."""
        if self._daemon.fleets.get(fleet.name) is fleet:
            log.error("some workers are still there; they are left to the next start", fleet=fleet.name)
            self._daemon.remove(fleet.name)

    def _begin(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    def _note(self, summary: Summary) -> None:
        self._note_rest(summary)
        (self._standing_by.discard if summary.is_leader else self._standing_by.add)(summary.fleet)
        self._heard[summary.fleet] = LastCycle(summary, asyncio.get_running_loop().time())
        news, self._news = self._news, asyncio.Event()
        news.set()
        self._on_summary(summary)

    def _note_rest(self, summary: Summary) -> None:
        name, before = summary.fleet, self._resting.pop(summary.fleet, None)
        fleet = self._daemon.fleets.get(name)
        has_nothing_to_do = summary.hired == 0 and not (summary.status or {}).get("queued_tasks")
        if fleet is not None and has_nothing_to_do and not fleet.is_shutting_down:
            self._resting[name] = fleet.config.queues
            if self._resting[name] != before:
                self._is_one_resting.set()

    async def _wake_for_tasks(self) -> None:
        """A task that finds nobody should not wait for the next cycle."""
        while True:
            try:
                await self._until_a_task_may_wait()
                await self._wake_the_resting()
            except WindlassError:
                await asyncio.sleep(LOOK_OUT_S)
            except Exception:
                log.exception("nobody was woken for a task: it waits for the next cycle")
                await asyncio.sleep(LOOK_OUT_S)
            await asyncio.sleep(WAKE_INTERVAL_S)

    async def _until_a_task_may_wait(self) -> None:
        """In a queue of a fleet that rests, these or those that come to rest meanwhile. A hint: look before waking."""
        queues = sorted({queue for queues in self._resting.values() for queue in queues})
        hints: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._is_one_resting.wait())]
        if queues:
            hints.append(asyncio.ensure_future(self._store.wait_for_work(queues, LOOK_OUT_S)))
        try:
            done, _ = await asyncio.wait(hints, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for hint in hints:
                hint.cancel()
        self._is_one_resting.clear()
        for hint in done:
            hint.result()

    async def _wake_the_resting(self) -> None:
        resting = {name: queues for name, queues in self._resting.items() if name in self._daemon.fleets}
        waiting = await self._store.queues_with_tasks(
            sorted({queue for queues in resting.values() for queue in queues})
        )
        for name, queues in resting.items():
            if not waiting.isdisjoint(queues):
                # Until its next cycle says whether it still does.
                self._resting.pop(name, None)
                self._daemon.wake_fleet(name)

    async def _look_for_the_forgotten(self) -> None:
        """Workers of fleets that no configuration here has would be nobody's to let go, and may be paid for; and what
        was the matter with a fleet that nobody runs would never be over."""
        while not self._is_stopping:
            try:
                if await self._has_the_say():
                    await self._attend_to_the_forgotten()
                else:
                    for forgotten in self._forgotten.values():
                        forgotten.since = None
            except DatabaseUnavailable as error:
                if not self._daemon.fleets:  # else the cycles say so
                    log.warning("the database is away", error=str(error))
            except Exception:
                # Whatever is wrong with one look, the next must come: they may be paid for.
                log.exception("it is not known whether there are workers of fleets that are not configured here")
            await asyncio.sleep(self._look_again_s)

    async def _has_the_say(self) -> bool:
        """Whoever leads has it: its file may have them."""
        if self._daemon.fleets:
            return any(heard.summary.is_leader for heard in self.heard().values())
        # There is no cycle that would ask for the lead.
        if not isinstance(await self._store.acquire_lease(self._candidate), Standby):
            await self._store.release_lease(self._candidate)
            await self._store.acquire_lease(self._caretaker)
            return True
        if not self._is_standby_told:
            self._is_standby_told = True
            log.info("standing by: another orchestrator leads")
        return False

    @property
    def _look_again_s(self) -> float:
        if not self._daemon.fleets:
            return min(FORGOTTEN_LOOK_S, self._caretaker.ttl_s / 2)  # which renews our lease
        return FORGOTTEN_LOOK_S if self.heard() else WAKE_INTERVAL_S

    async def _attend_to_the_forgotten(self) -> None:
        hired = Counter(worker.fleet for worker in await self._store.workers() if worker.slot is not None)
        now = await self._store.now()
        planned = [fleet for fleet in await self._store.fleets() if fleet.planned_at is not None]
        # None: somebody runs it, here or elsewhere. Where cycles are far apart, the lead is free in between.
        without_orchestrator_s = {fleet.name: fleet.without_orchestrator_s(now) for fleet in planned}
        # The last plan of one that was wound down was to be the last.
        unfinished = {
            fleet.name for fleet in planned if fleet.next_plan_in_s is not None and without_orchestrator_s[fleet.name]
        }
        names = sorted((hired.keys() | unfinished) - self._daemon.fleets.keys())
        self._forgotten = {name: self._forgotten.get(name, UnconfiguredFleet()) for name in names}
        for name, forgotten in self._forgotten.items():
            await self._attend_to(name, forgotten, hired[name], without_orchestrator_s.get(name, float("inf")))
        is_done = all(not hired[name] and each.stuck_at is not None for name, each in self._forgotten.items())
        if self._is_clearing_up and is_done and not self._daemon.fleets:
            log.info("no fleet is configured here, and nobody is left of any other: there is nothing to do")
            self.stop()

    async def _attend_to(
        self, name: str, forgotten: "UnconfiguredFleet", workers: int, without_orchestrator_s: float | None
    ) -> None:
        now = asyncio.get_running_loop().time()
        if not forgotten.is_told:
            forgotten.is_told = True
            what = "a fleet with workers" if workers else "a fleet that nobody runs"
            in_s = f"{FORGOTTEN_GRACE_S:.0f} s"
            log.error(f"{what} is not configured here", fleet=name, workers=workers, wound_down_in=in_s)
        if without_orchestrator_s is None:
            forgotten.since = None
            return
        if forgotten.since is None:
            forgotten.since = now
        # A cycle between two looks is one, too.
        if min(without_orchestrator_s, now - forgotten.since) < FORGOTTEN_GRACE_S:
            return
        problem = await self._wind_down_forgotten(name)
        if problem is not None and (forgotten.stuck_at is None or now - forgotten.stuck_at >= FORGOTTEN_TOLD_S):
            forgotten.stuck_at = now
            what = "nobody lets the workers of this fleet go" if workers else "nobody winds this fleet down"
            log.error(f"{what}: put it back into the configuration", fleet=name, workers=workers, error=problem)

    async def _wind_down_forgotten(self, name: str) -> str | None:
        """By the settings of its last cycle. Why that cannot be, if it cannot."""
        try:
            cycles = await self._store.cycles(name, 1)
            last = await self._store.cycle(cycles[0].id) if cycles else None
            if last is None or last.snapshot.settings is None:
                return "its last cycle is too long ago, and with it its settings are gone"
            cycle = self._make_cycle(name, last.snapshot.settings)
        except DatabaseUnavailable:
            raise
        except WindlassError as error:
            return str(error)
        except Exception as error:
            # One fleet's trouble, which must not be the others': its cycle may be of a version that wrote it otherwise.
            return f"the settings of its last cycle cannot be read ({type(error).__name__})"
        log.warning("winding down a fleet that is not configured here", fleet=name)
        self._daemon.add(cycle)
        self._daemon.wind_down(name)
        return None

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            try:
                await self._store.sweep()
            except DatabaseUnavailable:
                continue  # the cycles say so
            except Exception:
                # Whatever is wrong with one, the next must come: else all that is finished is kept for ever.
                log.exception("retention was not applied")


def _is_after(heard: LastCycle, asked_at: float, asked_at_by_database: datetime) -> bool:
    """Whether that cycle began after it was asked for. One that stands by has looked at nothing and has no time."""
    if not heard.summary.timestamp:
        return heard.at > asked_at
    return datetime.fromisoformat(heard.summary.timestamp) >= asked_at_by_database
