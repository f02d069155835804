"""Evaluates alert conditions and sends notifications, in a background task separate from the cycles.

Every few seconds it evaluates the rules in policy/alerts.py and records alerts that fired or resolved, with one outbox
message per notifier in the same transaction; then it sends due messages. Any number of orchestrators may run it: the
database ensures that each alert fires once and each message has one sender. A failing notifier is retried with back-off
up to MAX_ATTEMPTS and never delays the others.

After a start or an outage, evaluation waits for the next cycle of each fleet: open alerts stay open, and conditions
caused only by our own absence do not fire.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
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

# A streak of provider errors is forgotten this long after the last one: longer than a refusal keeps cycles from
# calling again, short enough that a fleet without demand does not seem broken.
STREAK_TTL_S = 900.0
# Time for each fleet's first cycle after evaluation starts: as long as a slow cycle may take while there is a leader.
SETTLING_S = SLOW_CYCLE_S
# A longer gap between two evaluations was an outage of the database, this process or its host: settle again.
OUTAGE_S = 30.0
SWEEP_INTERVAL_S = 300.0
# Longer than any notifier takes. After that another sender may take the message.
MESSAGE_LEASE_S = 120.0
SEND_TIMEOUT_S = 60.0
# With the delays of retry_delay_s about two hours: enough time to repair a receiver.
MAX_ATTEMPTS = 14
# Messages in flight per notifier: one that does not answer has no more than these waiting, and never delays the others.
MAX_CONCURRENT_SENDS = 10
MAX_ERROR_CHARACTERS = 300
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ErrorStreak:
    """Consecutive errors of one kind of provider call. `last_at`: by `clock`."""

    count: int
    last_at: float


class AlertManager:
    """`on_message` receives the notifier and the outcome of every message: delivered, retrying or failed; and refused
    once per recipient that a partly delivered message did not reach. `settling_s` is 0 for a process whose cycles have
    run before it evaluates."""

    def __init__(
        self,
        store: AlertStore,
        notifiers: Iterable[Notifier],
        *,
        failed_tasks_allowed: int,
        leader_grace_s: float,
        ignored: Sequence[str] = (),
        settling_s: float = SETTLING_S,
        on_message: Callable[[str, str], None] = lambda _notifier, _outcome: None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._notifiers = {notifier.name: notifier for notifier in notifiers}
        self._failed_tasks_allowed = failed_tasks_allowed
        self._leader_grace_s = leader_grace_s
        self._ignored = frozenset(ignored)
        self._settling_s = settling_s
        self._on_message = on_message
        self._rng = rng or random.Random()  # noqa: S311
        self._clock = clock
        # By fleet and call, for the fleets that this process leads.
        self._streaks: dict[str, dict[str, ErrorStreak]] = {}
        # Start of the current series of evaluations, and the last one, by the database's clock.
        self._since: datetime | None = None
        self._evaluated_at: datetime | None = None
        self._swept_at = float("-inf")
        self._sending: dict[str, set[asyncio.Task[None]]] = {name: set() for name in self._notifiers}

    def record_cycle(self, summary: Summary) -> None:
        """Record the results of a cycle's provider calls, which are known only in this process."""
        if not summary.is_leader:
            # The new leader calls the provider and knows better.
            self._streaks.pop(summary.fleet, None)
            return
        streaks = self._streaks.setdefault(summary.fleet, {})
        # Sorted by outcome: "ok" comes after "error", so a success ends the errors of its own cycle.
        for call, outcome, count in summary.provider_calls:
            before = streaks.pop(call, None)
            if outcome == "error":
                streaks[call] = ErrorStreak(count + (before.count if before is not None else 0), self._clock())

    async def run(self) -> None:
        """Evaluate and send until cancelled."""
        try:
            while True:
                await self._evaluate_and_send(is_awaited=False)
                await asyncio.sleep(EVALUATION_INTERVAL_S)
        finally:
            sending = [task for tasks in self._sending.values() for task in tasks]
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)

    async def run_once(self, limit_s: float) -> None:
        """Evaluate once and send due messages, for a process that ends afterwards. Raises nothing.

        Messages that were not delivered in time are sent by the next process.
        """
        try:
            async with asyncio.timeout(limit_s):
                await self._evaluate_and_send(is_awaited=True)
        except TimeoutError:
            log.warning("send alerts timed out", limit_s=limit_s)

    async def _evaluate_and_send(self, *, is_awaited: bool) -> None:
        try:
            await self.evaluate()
            while await self.send_due(is_awaited=is_awaited) and is_awaited:
                pass
            if self._clock() - self._swept_at >= SWEEP_INTERVAL_S:
                await self._store.sweep_alerts()
                self._swept_at = self._clock()
        except DatabaseUnavailable as error:
            log.warning("evaluate alerts failed", error=str(error))
        except Exception:
            log.exception("evaluate alerts failed")

    async def evaluate(self) -> None:
        """Record which alerts fire now and which are resolved."""
        inputs = await self._store.alert_inputs()
        settling_since = self._settling_since(inputs)
        counted_from = self._clock() - STREAK_TTL_S
        errors = {
            name: {call: streak.count for call, streak in streaks.items() if streak.last_at > counted_from}
            for name, streaks in self._streaks.items()
        }
        fleets = tuple(replace(fleet, provider_errors=errors.get(fleet.fleet.name)) for fleet in inputs.fleets)
        inputs = replace(inputs, fleets=fleets, settling_since=settling_since)
        alerts = evaluate_alerts(inputs, self._failed_tasks_allowed, self._leader_grace_s)
        alerts = [alert for alert in alerts if alert.code not in self._ignored]
        changes = await self._store.record_alerts(alerts, tuple(self._notifiers), RESOLVE_AFTER_S)
        for kind, fleet, code, reason in changes:
            log.warning("change alert", kind=kind, fleet=fleet, code=code, reason=reason)

    def _settling_since(self, inputs: AlertInputs) -> datetime | None:
        """The start of evaluation after a start or an outage; None once `settling_s` has passed since."""
        now, last = inputs.now, self._evaluated_at
        if self._since is None or last is None or (now - last).total_seconds() > OUTAGE_S:
            self._since = now
        self._evaluated_at = now
        if (now - self._since).total_seconds() >= self._settling_s:
            return None
        if last is None:
            self._resume_streaks(inputs)
        return self._since

    def _resume_streaks(self, inputs: AlertInputs) -> None:
        """Continue the error streaks that an earlier process alerted on, until a call succeeds."""
        for alert in inputs.open:
            if alert.code == "PROVIDER_ERRORS" and alert.fleet is not None:
                call = alert.key.removeprefix(alert.code).lstrip()
                self._streaks.setdefault(alert.fleet, {}).setdefault(
                    call, ErrorStreak(PROVIDER_ERRORS_TO_ALERT, self._clock())
                )

    async def send_due(self, *, is_awaited: bool = True) -> int:
        """Start to send all due messages, and wait for them if `is_awaited`. Returns their number."""
        started: list[asyncio.Task[None]] = []
        for name, sending in self._sending.items():
            if len(sending) < MAX_CONCURRENT_SENDS:
                limit = MAX_CONCURRENT_SENDS - len(sending)
                for message in await self._store.take_messages((name,), MESSAGE_LEASE_S, limit):
                    task = asyncio.create_task(self._send(message))
                    sending.add(task)
                    task.add_done_callback(sending.discard)
                    started.append(task)
        if is_awaited:
            await asyncio.gather(*started)
        return len(started)

    async def _send(self, message: Message) -> None:
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._notifiers[message.notifier].send(message)
        except DeliveredInPart as part:
            log.warning("deliver message in part", notifier=message.notifier, code=message.code, error=str(part))
            for _ in range(part.refused):
                self._on_message(message.notifier, "refused")
        except (NotDelivered, TimeoutError) as error:
            await self._schedule_retry(message, str(error) or f"no answer within {SEND_TIMEOUT_S:g} s")
            return
        except Exception as error:
            # A defect of one notifier must not stop the others. The error's text may hold a secret.
            log.exception("send message failed", notifier=message.notifier)
            await self._schedule_retry(message, type(error).__name__)
            return
        self._on_message(message.notifier, "delivered")
        await self._record(self._store.message_delivered(message.id))

    async def _schedule_retry(self, message: Message, problem: str) -> None:
        is_last = message.attempts >= MAX_ATTEMPTS
        self._on_message(message.notifier, "failed" if is_last else "retrying")
        retry_in_s = None if is_last else retry_delay_s(message.attempts, self._rng.random())
        log.warning(
            "send message failed",
            notifier=message.notifier,
            code=message.code,
            attempts=message.attempts,
            retry_in_s=retry_in_s,
            error=problem,
        )
        await self._record(self._store.message_failed(message.id, problem[:MAX_ERROR_CHARACTERS], retry_in_s))

    async def _record(self, write: Awaitable[None]) -> None:
        try:
            await write
        except WindlassError as error:
            # The message is due again when its lease expires.
            log.warning("record message outcome failed", error=str(error))
