"""Tells people what is the matter, and when it is over. Beside the cycles, never in them.

Every few seconds it looks, judges (policy/alerts.py) and writes down what began and what ended, with a message to each
receiver in the same transaction. Then it sends what is due. Several orchestrators may do the same at the same time:
each alert begins once, and each message is taken by one of them. A receiver that does not answer is tried again with
growing pauses and given up after MAX_ATTEMPTS; it delays no other.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import structlog

from windlass.control.summary import Summary
from windlass.model.alert import Message, Watched
from windlass.model.errors import DatabaseUnavailable, WindlassError
from windlass.policy.alerts import firing
from windlass.policy.backoff import retry_delay_s
from windlass.ports.alarm import AlarmStore, NotDelivered, Receiver

LOOK_INTERVAL_S = 5.0
# What has not been seen for this long is over. Longer than a cause takes that comes and goes with every other cycle.
RESOLVE_AFTER_S = 60.0
# Longer than any receiver takes: then a message is anybody's again.
MESSAGE_LEASE_S = 120.0
SEND_TIMEOUT_S = 60.0
# With the pauses of retry_delay_s that is about two hours: long enough for a receiver to be mended.
MAX_ATTEMPTS = 14
MAX_AT_ONCE = 20
MAX_ERROR_CHARACTERS = 300
log = structlog.get_logger(__name__)


class Alarm:
    """`on_message` hears of every message sent, by receiver: delivered, failed or given_up."""

    def __init__(
        self,
        store: AlarmStore,
        receivers: Iterable[Receiver],
        *,
        dead_letters_allowed: int,
        ignored: Sequence[str] = (),
        on_message: Callable[[str, str], None] = lambda _receiver, _outcome: None,
        rng: random.Random | None = None,
        resolve_after_s: float = RESOLVE_AFTER_S,
    ) -> None:
        self._store = store
        self._receivers = {receiver.name: receiver for receiver in receivers}
        self._dead_letters_allowed = dead_letters_allowed
        self._ignored = frozenset(ignored)
        self._on_message = on_message
        self._rng = rng or random.Random()  # noqa: S311
        self._resolve_after_s = resolve_after_s
        # By fleet and call: how many went wrong in a row.
        self._errors: dict[str, dict[str, int]] = {}
        self._under_way: set[asyncio.Task[None]] = set()

    def note(self, summary: Summary) -> None:
        """A cycle was: what its provider answered is known only here."""
        if summary.is_leader:
            streaks = self._errors.setdefault(summary.fleet, {})
            for call, outcome, count in summary.provider_calls:
                streaks[call] = streaks.get(call, 0) + count if outcome == "error" else 0

    async def run(self) -> None:
        """Until cancelled."""
        try:
            await self._go_on()
        finally:
            for sending in self._under_way:
                sending.cancel()
            await asyncio.gather(*self._under_way, return_exceptions=True)

    async def _go_on(self) -> None:
        while True:
            try:
                await self.look()
                await self.send_due(is_waited_for=False)
            except DatabaseUnavailable as error:
                log.warning("nobody is told anything: the database is away", error=str(error))
            except Exception:
                log.exception("looking for what is the matter failed")
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def look(self) -> None:
        """Write down what is the matter now, and what is over."""
        watched = _with_errors(await self._store.watch(), self._errors)
        problems = [
            problem for problem in firing(watched, self._dead_letters_allowed) if problem.code not in self._ignored
        ]
        changes = await self._store.note_alerts(problems, tuple(self._receivers), self._resolve_after_s)
        for kind, fleet, code, reason in changes:
            log.warning(f"alert {kind}", fleet=fleet, code=code, reason=reason)

    async def send_due(self, *, is_waited_for: bool = True) -> int:
        """Send what is due, all at once. Returns how many messages that were."""
        room = MAX_AT_ONCE - len(self._under_way)
        if not self._receivers or room <= 0:
            return 0
        messages = await self._store.take_messages(tuple(self._receivers), MESSAGE_LEASE_S, room)
        sendings = [asyncio.create_task(self._send(message)) for message in messages]
        for sending in sendings:
            self._under_way.add(sending)
            sending.add_done_callback(self._under_way.discard)
        if is_waited_for:
            await asyncio.gather(*sendings)
        return len(messages)

    async def _send(self, message: Message) -> None:
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._receivers[message.receiver].send(message)
        except (NotDelivered, TimeoutError) as error:
            await self._put_off(message, str(error) or f"no answer within {SEND_TIMEOUT_S:g} s")
        except Exception as error:
            # A receiver's own fault must not keep the others from being told; what it holds may be a secret.
            log.exception("a receiver failed", receiver=message.receiver)
            await self._put_off(message, type(error).__name__)
        else:
            self._on_message(message.receiver, "delivered")
            await self._write_down(self._store.message_delivered(message.id))

    async def _put_off(self, message: Message, why: str) -> None:
        is_last = message.attempts >= MAX_ATTEMPTS
        self._on_message(message.receiver, "given_up" if is_last else "failed")
        log.warning(
            "message given up" if is_last else "message not delivered, trying again",
            receiver=message.receiver,
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


def _with_errors(watched: Watched, errors: Mapping[str, Mapping[str, int]]) -> Watched:
    fleets = tuple(replace(fleet, provider_errors=errors.get(fleet.fleet.name)) for fleet in watched.fleets)
    return replace(watched, fleets=fleets)
