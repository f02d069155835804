"""The control loop as a daemon: every fleet in its own rhythm, one cycle at a time.

A cycle that takes longer than its interval delays the next one; cycles never pile up. What a provider takes long over
goes on beside them, and its end starts a cycle. A database that is away is tried again with growing pauses; workers do
not notice. Nor does one fleet notice another's trouble: a cycle that fails in a way nobody foresaw is logged and tried
again. Whoever stands by looks again when the lease it saw runs out, so a leader that dies is replaced within one lease.
The lease is renewed by each cycle and, between cycles that are far apart, by nobody: it then runs out, which harms no
one, since nothing is decided between cycles.

A fleet that is wound down leaves when its last worker and its last machine have (one that no worker has is ended, too,
but not at once), or when somebody else leads: it is then not ours to end.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

import structlog

from windlass.control.cycle import CLOSE_TIMEOUT_S, PATIENCE_S, FleetCycle
from windlass.control.summary import Summary
from windlass.model.errors import DatabaseUnavailable
from windlass.policy.backoff import reconnect_delay_s

# After a cycle that changed something, the next one comes this soon, to see what became of it.
FOLLOW_UP_S = 1.0
# While a fleet is wound down, cycles come so many times as often: somebody waits for its end.
WINDING_DOWN_PACE = 10
# Whoever stands by looks when the lease runs out; below this, looking again would be spinning.
STANDBY_MIN_S = 0.05
# At the end, for calls that are under way. What becomes of them later is found out by whoever leads next.
SETTLE_TIMEOUT_S = 15.0
# For whoever does not want to wait.
HURRIED_CLOSE_S = 3.0
log = structlog.get_logger(__name__)


class Daemon:
    """`on_summary` is told of every cycle. `wake` starts one before its time. `rng` spreads what is tried again."""

    def __init__(
        self, fleets: Iterable[FleetCycle], on_summary: Callable[[Summary], None], rng: random.Random | None = None
    ) -> None:
        self._fleets = {fleet.name: fleet for fleet in fleets}
        self._on_summary = on_summary
        self._rng = rng or random.Random()  # noqa: S311
        self._wakers = {name: asyncio.Event() for name in self._fleets}
        self._stopping = asyncio.Event()
        self._close_timeout_s = CLOSE_TIMEOUT_S
        self._group: asyncio.TaskGroup | None = None
        self._keepers: set[asyncio.Task[None]] = set()

    @property
    def fleets(self) -> Mapping[str, FleetCycle]:
        return self._fleets

    def wake(self) -> None:
        for waker in self._wakers.values():
            waker.set()

    def wake_fleet(self, name: str) -> None:
        self._wakers[name].set()

    def stop(self) -> None:
        """End after the cycles that are under way."""
        self._stopping.set()
        self.wake()

    def stop_at_once(self) -> None:
        """End in the middle of whatever is under way, as a crash would: the next start repairs it."""
        self._stopping.set()
        self._close_timeout_s = HURRIED_CLOSE_S
        for keeper in self._keepers:
            keeper.cancel()

    def add(self, fleet: FleetCycle) -> None:
        """One more, while running."""
        self._fleets[fleet.name] = fleet
        self._wakers[fleet.name] = asyncio.Event()
        if self._group is not None:
            self._start(self._group, fleet)

    def remove(self, name: str) -> None:
        """Run no more cycles of this fleet. Its workers go on."""
        del self._fleets[name]
        self._wakers[name].set()

    def wind_down(self, name: str) -> None:
        """Let everybody of this fleet go; when its last worker is gone, and its last machine, so is the fleet."""
        self._fleets[name].is_shutting_down = True
        self._wakers[name].set()

    async def run(self, until: Coroutine[Any, Any, None] | None = None) -> None:
        """Until stopped, or until every fleet has been wound down or removed; and until `until` is over, before which
        there may be more to come."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            if until is not None:
                self._begin(group, until)
            for fleet in tuple(self._fleets.values()):
                self._start(group, fleet)

    def _start(self, group: asyncio.TaskGroup, fleet: FleetCycle) -> None:
        self._begin(group, self._keep(fleet, self._wakers[fleet.name]))

    def _begin(self, group: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> None:
        keeper = group.create_task(work)
        self._keepers.add(keeper)
        keeper.add_done_callback(self._keepers.discard)

    async def _keep(self, fleet: FleetCycle, waker: asyncio.Event) -> None:
        fleet.on_settled = waker.set
        try:
            await self._turn(fleet, waker)
            with contextlib.suppress(DatabaseUnavailable, TimeoutError):
                async with asyncio.timeout(SETTLE_TIMEOUT_S):
                    await fleet.settle()
        finally:
            fleet.abandon()
            await fleet.close(self._close_timeout_s)

    async def _turn(self, fleet: FleetCycle, waker: asyncio.Event) -> None:
        failures = 0
        loop = asyncio.get_running_loop()
        while self._fleets.get(fleet.name) is fleet and not self._stopping.is_set():
            started = loop.time()
            waker.clear()
            try:
                # Not longer than an interval: what is due in the next cycle (before an hour ends) must not wait.
                summary = await fleet.run(min(PATIENCE_S, fleet.config.poll_interval_s))
            except DatabaseUnavailable as error:
                failures += 1
                pause_s = reconnect_delay_s(failures, self._rng.random())
                log.warning(
                    "no cycle: the database is away, or refuses", fleet=fleet.name, error=str(error), failures=failures
                )
            except Exception:
                failures += 1
                pause_s = reconnect_delay_s(failures, self._rng.random())
                log.exception("a cycle failed", fleet=fleet.name, failures=failures)
            else:
                failures = 0
                self._on_summary(summary)
                if fleet.is_shutting_down and (not summary.is_leader or (summary.hired, summary.machines) == (0, 0)):
                    self._forget(fleet)
                    return
                pause_s = max(0.0, started + _interval_s(fleet, summary) - loop.time())
            await self._pause(waker, pause_s)

    def _forget(self, fleet: FleetCycle) -> None:
        if self._fleets.get(fleet.name) is fleet:
            del self._fleets[fleet.name]

    async def _pause(self, waker: asyncio.Event, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await waker.wait()
        except TimeoutError:
            return


def _interval_s(fleet: FleetCycle, summary: Summary) -> float:
    """From the start of this cycle to the start of the next."""
    interval_s = fleet.config.poll_interval_s
    if summary.standby_s is not None:
        return min(interval_s, max(summary.standby_s, STANDBY_MIN_S))
    if any((summary.actions or {}).values()):
        return min(FOLLOW_UP_S, interval_s)
    if fleet.is_shutting_down:
        return min(max(FOLLOW_UP_S, interval_s / WINDING_DOWN_PACE), interval_s)
    return interval_s
