"""The cycles of one fleet, one after another, until the fleet is shut down or the task is stopped.

A cycle that takes longer than its interval delays the next one; cycles never overlap. Provider calls that outlast a
cycle continue in the background, and their end starts a cycle. While the database is unavailable cycles are retried
with back-off; any other error is logged and retried the same way. No error of a cycle, of a listener or of the end
leaves the task, so one fleet never stops another.

A standby runs its next cycle when the lease that it saw expires: a dead leader is replaced within one lease. The lease
is renewed by cycles only. If they are far apart it expires in between, which is harmless because nothing is decided
between cycles.

A fleet that shuts down ends when its last managed worker and its last billed machine are gone, or when another
orchestrator leads.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from windlass.control.cycle import FleetCycle
from windlass.control.provider_in_use import CLOSE_TIMEOUT_S
from windlass.control.summary import Summary
from windlass.model.errors import DatabaseUnavailable
from windlass.model.fleet import FleetConfig
from windlass.ports.provider import Provider
from windlass.retry import Backoff

# A cycle that changed something is followed by the next one this soon, which spawns replacements and sees the effects.
FOLLOW_UP_S = 1.0
# A cycle waits this long for the provider calls that it started; later cycles record the rest. Well below a lease.
CALL_WAIT_S = 5.0
# While a fleet shuts down, its poll interval is divided by this: an operator waits for the end.
SHUTDOWN_SPEED_UP = 10
# Shortest interval of a standby, so that a lease about to expire does not cause a busy loop.
STANDBY_MIN_S = 0.05
# Limit for provider calls in flight when the task ends. The next leader finds the effects of the others.
SETTLE_TIMEOUT_S = 15.0
# Limit for closing providers when the task must end now.
HURRIED_CLOSE_S = 3.0
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LastCycle:
    """The newest cycle of a fleet. `at`: when it ended, by the loop's clock."""

    summary: Summary
    at: float


class FleetTask:
    """State and loop of one fleet. `on_summary` receives every cycle's summary. `rng` spreads retries."""

    def __init__(
        self, cycle: FleetCycle, on_summary: Callable[[Summary], None], rng: random.Random | None = None
    ) -> None:
        self.name = cycle.name
        self._cycle = cycle
        self._on_summary = on_summary
        self._backoff = Backoff(rng)
        self._is_stopped = False
        self._is_shutting_down = False
        self._is_ended = False
        self._shutdown_timer: asyncio.TimerHandle | None = None
        self._runner: asyncio.Task[None] | None = None
        self._close_timeout_s = CLOSE_TIMEOUT_S
        self._last: LastCycle | None = None
        # Queues to watch for the first task: set while the fleet has no managed worker and nothing is queued. A fleet
        # that saw tasks and spawned no worker, because of a hold or a limit, would decide the same again.
        self._idle_queues: tuple[str, ...] = ()

    @property
    def config(self) -> FleetConfig:
        return self._cycle.config

    @property
    def last(self) -> LastCycle | None:
        return self._last

    @property
    def is_standby(self) -> bool:
        """The last cycle found another leader."""
        return self._last is not None and not self._last.summary.is_leader

    @property
    def is_ended(self) -> bool:
        """The fleet is shut down, or its shutdown timed out: it counts as running no longer."""
        return self._is_ended

    @property
    def idle_queues(self) -> tuple[str, ...]:
        return self._idle_queues

    def start(self, group: asyncio.TaskGroup) -> asyncio.Task[None]:
        self._runner = group.create_task(self.run())
        return self._runner

    def wake(self) -> None:
        """Run the next cycle now."""
        self._idle_queues = ()
        self._cycle.wake()

    def reconfigure(self, config: FleetConfig, provider: Provider) -> None:
        self._cycle.reconfigure(config, provider)

    def shut_down(self, limit_s: float | None = None) -> None:
        """Drain all workers and end when they and their machines are gone; after `limit_s` leave the rest running."""
        self._is_shutting_down = True
        if limit_s is not None:
            self._shutdown_timer = asyncio.get_running_loop().call_later(limit_s, self._time_out_shutdown)
        self.wake()

    def resume(self) -> None:
        """Cancel a shutdown. Workers that drain already still end; others are spawned."""
        self._is_shutting_down = False

    def stop(self) -> None:
        """End after the current cycle. Workers keep running."""
        self._is_stopped = True
        self.wake()

    def stop_now(self) -> None:
        """End in the middle of the current cycle, as in a crash: the next start repairs it."""
        self._is_stopped = True
        self._close_timeout_s = HURRIED_CLOSE_S
        if self._runner is not None:
            self._runner.cancel()

    async def run(self) -> None:
        try:
            await self._run_cycles()
            await self._settle()
        finally:
            if self._shutdown_timer is not None:
                self._shutdown_timer.cancel()
            self._cycle.abandon()
            await self._cycle.close(self._close_timeout_s)

    async def _settle(self) -> None:
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                await self._cycle.settle()
        except (DatabaseUnavailable, TimeoutError):
            pass  # the next leader finds the effects
        except Exception:
            log.exception("record outcomes failed", fleet=self.name)

    async def _run_cycles(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._is_stopped:
            started = loop.time()
            self._cycle.clear_wake()
            is_shutting_down = self._is_shutting_down
            try:
                # At most one interval: the next cycle may have a deadline, such as the end of a billing hour.
                wait_s = min(CALL_WAIT_S, self.config.poll_interval_s)
                summary = await self._cycle.run(wait_s, is_shutting_down=is_shutting_down)
            except Exception as error:
                pause_s = self._backoff.next_delay_s()
                report = log.warning if isinstance(error, DatabaseUnavailable) else log.exception
                report("run cycle failed", fleet=self.name, error=str(error), failures=self._backoff.failures)
            else:
                self._backoff.reset()
                self._record(summary)
                # A cycle that began before the shutdown may have spawned workers after it counted them.
                is_empty = is_shutting_down and (summary.managed_workers, summary.billed_machines) == (0, 0)
                if self._is_shutting_down and (is_empty or not summary.is_leader):
                    self._is_ended = True
                    return
                pause_s = max(0.0, started + self._interval_s(summary) - loop.time())
            await self._cycle.wait_for_wake(pause_s)

    def _record(self, summary: Summary) -> None:
        has_no_demand = summary.managed_workers == 0 and not (summary.status or {}).get("queued_tasks")
        self._idle_queues = self.config.queues if has_no_demand and not self._is_shutting_down else ()
        self._last = LastCycle(summary, asyncio.get_running_loop().time())
        try:
            self._on_summary(summary)
        except Exception:
            log.exception("handle summary failed", fleet=self.name)

    def _interval_s(self, summary: Summary) -> float:
        """Time from the start of this cycle to the start of the next."""
        interval_s = self.config.poll_interval_s
        if summary.standby_s is not None:
            return min(interval_s, max(summary.standby_s, STANDBY_MIN_S))
        if any((summary.actions or {}).values()):
            return min(FOLLOW_UP_S, interval_s)
        if self._is_shutting_down:
            return min(max(FOLLOW_UP_S, interval_s / SHUTDOWN_SPEED_UP), interval_s)
        return interval_s

    def _time_out_shutdown(self) -> None:
        if not self._is_ended:
            log.error("shut down fleet timed out", fleet=self.name, hint="workers keep running until the next start")
            self._is_ended = True
            self.stop()
