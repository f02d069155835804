"""Tells people what is the matter, and when it is over. Beside the cycles, never in them.

Every few seconds it looks, judges (policy/alerts.py) and writes down what began and what ended, with a message to each
receiver in the same transaction. Then it sends what is due. Several orchestrators may do the same at the same time:
each alert begins once, and each message is taken by one of them. A receiver that does not answer is tried again with
growing pauses and given up after MAX_ATTEMPTS; it delays no other.

Whoever begins to look, or could not for a while, first waits for the fleets' next cycles: meanwhile what was the matter
goes on, and what only seems so because nobody was there is not told.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import structlog

from windlass.control.summary import Summary
from windlass.model.alert import AlertInputs, Message
from windlass.model.cycle import SLOW_CYCLE_S
from windlass.model.errors import DatabaseUnavailable, DeliveredInPart, NotDelivered, WindlassError
from windlass.policy.alerts import EVALUATION_INTERVAL_S, PROVIDER_ERRORS_TO_ALERT, RESOLVE_AFTER_S, evaluate_alerts
from windlass.policy.backoff import retry_delay_s
from windlass.ports.alerts import AlertStore, Notifier

# Errors in a row that ended with nobody calling again are over after this time: longer than a refusal keeps a cycle
# from asking again, short enough that a fleet without demand does not seem broken.
STREAK_FORGOTTEN_S = 900.0
# So long a fleet has for its first cycle after we begin to look: as long as a slow one may take where somebody leads.
SETTLING_S = SLOW_CYCLE_S
# A pause between two looks that is longer was an absence, of the database, this process or its host: we begin anew.
ABSENCE_S = 30.0
# Retention is applied so often.
SWEEP_INTERVAL_S = 300.0
# Longer than any receiver takes: then a message is anybody's again.
MESSAGE_LEASE_S = 120.0
SEND_TIMEOUT_S = 60.0
# With the pauses of retry_delay_s that is about two hours: long enough for a receiver to be mended.
MAX_ATTEMPTS = 14
# To one receiver: one that does not answer has no more than these waiting for it, and leaves the others theirs.
MAX_AT_ONCE = 10
MAX_ERROR_CHARACTERS = 300
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ErrorStreak:
    """Calls of one kind that went wrong in a row, and when the last of them did."""

    count: int
    last_at: float


class AlertManager:
    """`on_message` hears of every message sent, by receiver: delivered, failed or given_up; and refused, for each of
    those behind a receiver who did not get what the others did. `settling_s`: 0 for whoever begins to look after the
    cycles of this process."""

    def __init__(
        self,
        store: AlertStore,
        notifiers: Iterable[Notifier],
        *,
        dead_letters_allowed: int,
        leader_grace_s: float,
        ignored: Sequence[str] = (),
        settling_s: float = SETTLING_S,
        on_message: Callable[[str, str], None] = lambda _notifier, _outcome: None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._notifiers = {notifier.name: notifier for notifier in notifiers}
        self._dead_letters_allowed = dead_letters_allowed
        self._leader_grace_s = leader_grace_s
        self._ignored = frozenset(ignored)
        self._settling_s = settling_s
        self._on_message = on_message
        self._rng = rng or random.Random()  # noqa: S311
        self._clock = clock
        # By fleet and call, of the fleets that we lead.
        self._streaks: dict[str, dict[str, ErrorStreak]] = {}
        # Since when we have looked without an absence, and when we last did, by the database's clock.
        self._since: datetime | None = None
        self._looked_at: datetime | None = None
        self._swept_at = float("-inf")
        self._under_way: dict[str, set[asyncio.Task[None]]] = {name: set() for name in self._notifiers}

    def note(self, summary: Summary) -> None:
        """A cycle was: what its provider answered is known only here."""
        if not summary.is_leader:
            # Whoever leads now asks the provider, and knows better.
            self._streaks.pop(summary.fleet, None)
            return
        streaks = self._streaks.setdefault(summary.fleet, {})
        # In the order of their outcomes' names: a call that went well ends the errors of its own cycle.
        for call, outcome, count in summary.provider_calls:
            before = streaks.pop(call, None)
            if outcome == "error":
                streaks[call] = ErrorStreak(count + (before.count if before is not None else 0), self._clock())

    async def run(self) -> None:
        """Until cancelled."""
        try:
            await self._go_on()
        finally:
            under_way = [sending for sendings in self._under_way.values() for sending in sendings]
            for sending in under_way:
                sending.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def _go_on(self) -> None:
        while True:
            await self._look_and_send(is_waited_for=False)
            await asyncio.sleep(EVALUATION_INTERVAL_S)

    async def tell_once(self, limit_s: float) -> None:
        """One look, and what is due is sent, for whoever goes away afterwards. Raises nothing. What has not arrived
        within this time is sent by whoever looks next."""
        try:
            async with asyncio.timeout(limit_s):
                await self._look_and_send(is_waited_for=True)
        except TimeoutError:
            log.warning("not everybody could be told in time: the rest is sent next time", limit_s=limit_s)

    async def _look_and_send(self, *, is_waited_for: bool) -> None:
        try:
            await self.look()
            while await self.send_due(is_waited_for=is_waited_for) and is_waited_for:
                pass
            await self._sweep()
        except DatabaseUnavailable as error:
            log.warning("nobody is told anything: the database is away, or refuses", error=str(error))
        except Exception:
            log.exception("looking for what is the matter failed")

    async def _sweep(self) -> None:
        if self._clock() - self._swept_at >= SWEEP_INTERVAL_S:
            await self._store.sweep_alerts()
            self._swept_at = self._clock()

    async def look(self) -> None:
        """Write down what is the matter now, and what is over."""
        watched = await self._store.alert_inputs()
        settling_since = self._note_look(watched)
        watched = replace(_with_errors(watched, self._errors_in_a_row()), settling_since=settling_since)
        found = evaluate_alerts(watched, self._dead_letters_allowed, self._leader_grace_s)
        problems = [problem for problem in found if problem.code not in self._ignored]
        changes = await self._store.record_alerts(problems, tuple(self._notifiers), RESOLVE_AFTER_S)
        for kind, fleet, code, reason in changes:
            log.warning(f"alert {kind}", fleet=fleet, code=code, reason=reason)

    def _note_look(self, watched: AlertInputs) -> datetime | None:
        """Since when we look, if that is not long yet."""
        now, last = watched.now, self._looked_at
        if self._since is None or last is None or (now - last).total_seconds() > ABSENCE_S:
            self._since = now
        self._looked_at = now
        if (now - self._since).total_seconds() >= self._settling_s:
            return None
        if last is None:
            self._take_up(watched)
        return self._since

    def _take_up(self, watched: AlertInputs) -> None:
        """Errors in a row that whoever looked before us told of go on, until a call says otherwise."""
        for alert in watched.open:
            if alert.code == "PROVIDER_ERRORS" and alert.fleet is not None:
                call = alert.key.removeprefix(alert.code).lstrip()
                self._streaks.setdefault(alert.fleet, {}).setdefault(
                    call, ErrorStreak(PROVIDER_ERRORS_TO_ALERT, self._clock())
                )

    def _errors_in_a_row(self) -> dict[str, dict[str, int]]:
        """By fleet and call, those that are not yet forgotten."""
        begins = self._clock() - STREAK_FORGOTTEN_S
        return {
            fleet: {call: streak.count for call, streak in streaks.items() if streak.last_at > begins}
            for fleet, streaks in self._streaks.items()
        }

    async def send_due(self, *, is_waited_for: bool = True) -> int:
        """Send what is due, all at once. Returns how many messages that were."""
        sendings: list[asyncio.Task[None]] = []
        for name, under_way in self._under_way.items():
            if len(under_way) < MAX_AT_ONCE:
                due = await self._store.take_messages((name,), MESSAGE_LEASE_S, MAX_AT_ONCE - len(under_way))
                sendings += [self._begin(message, under_way) for message in due]
        if is_waited_for:
            await asyncio.gather(*sendings)
        return len(sendings)

    def _begin(self, message: Message, under_way: set[asyncio.Task[None]]) -> asyncio.Task[None]:
        sending = asyncio.create_task(self._send(message))
        under_way.add(sending)
        sending.add_done_callback(under_way.discard)
        return sending

    async def _send(self, message: Message) -> None:
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._notifiers[message.notifier].send(message)
        except DeliveredInPart as part:
            log.warning("message delivered in part", notifier=message.notifier, code=message.code, error=str(part))
            for _ in range(part.refused):
                self._on_message(message.notifier, "refused")
            await self._note_delivered(message)
        except (NotDelivered, TimeoutError) as error:
            await self._put_off(message, str(error) or f"no answer within {SEND_TIMEOUT_S:g} s")
        except Exception as error:
            # A receiver's own fault must not keep the others from being told; what it holds may be a secret.
            log.exception("a receiver failed", notifier=message.notifier)
            await self._put_off(message, type(error).__name__)
        else:
            await self._note_delivered(message)

    async def _note_delivered(self, message: Message) -> None:
        self._on_message(message.notifier, "delivered")
        await self._write_down(self._store.message_delivered(message.id))

    async def _put_off(self, message: Message, why: str) -> None:
        is_last = message.attempts >= MAX_ATTEMPTS
        self._on_message(message.notifier, "given_up" if is_last else "failed")
        log.warning(
            "message given up" if is_last else "message not delivered, trying again",
            notifier=message.notifier,
            code=message.code,
            attempts=message.attempts,
            error=why,
        )
        retry_in_s = None if is_last else retry_delay_s(message.attempts, self._rng.random())
        await self._write_down(self._store.message_failed(message.id, why[:MAX_ERROR_CHARACTERS], retry_in_s))

    async def _write_down(self, writing: Awaitable[None]) -> None:
        try:
            await writing
        except WindlassError as error:
            # It is due again when our lease on it is over.
            log.warning("what became of a message is not written down", error=str(error))


def _with_errors(watched: AlertInputs, errors: Mapping[str, Mapping[str, int]]) -> AlertInputs:
    fleets = tuple(replace(fleet, provider_errors=errors.get(fleet.fleet.name)) for fleet in watched.fleets)
    return replace(watched, fleets=fleets)
