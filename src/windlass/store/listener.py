"""Wakes idle workers when tasks arrive, by LISTEN on a separate connection.

A notification is only a hint, and every user of the database may send one: a flood of them wakes a caller no more than
MAX_WAKES_PER_S times per second.

A listening connection can be dead without an error (dropped by a pooler or a network).
So it is tested with a notification to itself when it opens and regularly while it waits. If a test fails, wait() polls.

Many callers may wait at once. A notification wakes every caller that waits for its queue. A caller that waits for the
same queues again does not miss notifications that arrived between its two calls.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import asyncpg

from windlass.store.connection import CUT_OFF, connect, receives_notifications

CHANNEL = "windlass_tasks"
# Polling interval without notifications. A poll is one cheap index probe.
POLL_WITHOUT_LISTEN_S = 1.0
# A connection is tested again when its last successful test is older than this.
TEST_VALID_S = 60.0
TEST_TIMEOUT_S = 5.0
# Back-off after a failed attempt to listen. Polling continues meanwhile.
RETRY_AFTER_S = 30.0
# Bound on remembered queues and sets of queues. Beyond it all are dropped, and the next wait() of each caller returns
# at once, which costs one unnecessary poll.
MAX_REMEMBERED = 10_000
# Wake-ups of one set of queues: this many per second, after a burst. A worker with one task at a time stays below.
MAX_WAKES_PER_S = 100.0
WAKE_BURST = 500.0


class Listener:
    def __init__(self, dsn: str, *, is_possible: bool) -> None:
        self._dsn = dsn
        self._is_possible = is_possible
        self._connection: Any = None
        self._tested_at = float("-inf")
        self._tried_at = float("-inf")
        # One test or connection attempt at a time, for any number of callers.
        self._checking = asyncio.Lock()
        # Arrivals are numbered: the last one of each queue, and the last one that each set of queues has consumed.
        self._arrivals = 0
        self._latest: dict[str, int] = {}
        self._consumed: dict[tuple[str, ...], int] = {}
        # The wake-ups that each set of queues has left of its burst, and when that was counted.
        self._wakes: dict[tuple[str, ...], tuple[float, float]] = {}
        # The next arrival sets this event and replaces it.
        self._arrival = asyncio.Event()

    async def wait(self, queues: Sequence[str], timeout_s: float) -> None:
        """Return when a notification for one of these queues arrived since the previous call, or after timeout_s."""
        async with self._checking:
            is_listening = await self._ensure_listening()
        if not is_listening:
            await asyncio.sleep(min(timeout_s, POLL_WITHOUT_LISTEN_S))
            return
        deadline = time.monotonic() + timeout_s
        wanted = tuple(queues)
        while not self._consume(wanted):
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return
            try:
                async with asyncio.timeout(remaining_s):
                    await self._arrival.wait()
            except TimeoutError:
                return
        await asyncio.sleep(self._wake_delay_s(wanted))

    async def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.terminate()

    def _consume(self, queues: tuple[str, ...]) -> bool:
        """Consume all arrivals. Returns whether one was new for these queues. The empty name means any queue."""
        latest = max(self._latest.get(queue, 0) for queue in ("", *queues))
        is_new = latest > self._consumed.get(queues, 0)
        self._consumed[queues] = self._arrivals
        return is_new

    def _wake_delay_s(self, queues: tuple[str, ...]) -> float:
        """How long this wake-up must wait: zero, except in a flood."""
        now = time.monotonic()
        left, at = self._wakes.get(queues, (WAKE_BURST, now))
        left = min(WAKE_BURST, left + (now - at) * MAX_WAKES_PER_S) - 1.0
        left = max(left, -MAX_WAKES_PER_S)  # no wake-up waits longer than a second
        self._wakes[queues] = left, now
        return max(0.0, -left / MAX_WAKES_PER_S)

    def _on_notification(self, _connection: object, _pid: int, _channel: str, queue: object) -> None:
        self._record_arrival(str(queue))

    def _record_arrival(self, queue: str) -> None:
        if len(self._latest) + len(self._consumed) > MAX_REMEMBERED:
            self._latest.clear()
            self._consumed.clear()
            self._wakes.clear()
            queue = ""
        self._arrivals += 1
        self._latest[queue] = self._arrivals
        arrival, self._arrival = self._arrival, asyncio.Event()
        arrival.set()

    async def _ensure_listening(self) -> bool:
        if not self._is_possible:
            return False
        if self._connection is not None and not self._connection.is_closed():
            if time.monotonic() - self._tested_at < TEST_VALID_S:
                return True
            if await self._test():
                return True
        await self.close()
        if time.monotonic() - self._tried_at < RETRY_AFTER_S:
            return False
        self._tried_at = time.monotonic()
        return await self._open()

    async def _open(self) -> bool:
        connection: Any = None
        try:
            connection = await connect(self._dsn, timeout_s=TEST_TIMEOUT_S, command_timeout_s=TEST_TIMEOUT_S)
            await connection.add_listener(CHANNEL, self._on_notification)
            # Only now: a cancelled caller must not leave a connection without the listener.
            self._connection, connection = connection, None
        except (*CUT_OFF, asyncpg.PostgresError):
            return False
        finally:
            if connection is not None:
                connection.terminate()
        # Tasks that arrived before LISTEN are found by one more poll.
        self._record_arrival("")
        return await self._test()

    async def _test(self) -> bool:
        is_alive = await receives_notifications(self._connection, TEST_TIMEOUT_S)
        if is_alive:
            self._tested_at = time.monotonic()
        else:
            await self.close()
        return is_alive
