"""Wakes an idle worker when tasks arrive: LISTEN on a connection of its own.

A notification is a hint. A listening connection can be dead without saying so (a pooler that drops it, a network that
swallows it), so it is proven with a notification to itself when it opens and again and again while it waits. Where it
cannot be proven, waiting turns into polling.

Many may wait at once. What arrives wakes all whom it concerns, and whoever asks for the same queues again hears of all
that arrived since it asked last.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import asyncpg

from windlass.store.connect import connect

CHANNEL = "windlass_tasks"
# Without notifications an idle worker looks this often: one cheap index probe.
POLL_WITHOUT_LISTEN_S = 1.0
# How old the last proof that notifications arrive may be.
PROOF_VALID_S = 60.0
PROOF_TIMEOUT_S = 5.0
# After a failed attempt to listen, the next one waits this long; polling goes on meanwhile.
RETRY_AFTER_S = 30.0
# Names of queues and sets of them that are remembered. Beyond that all is forgotten, and the next wait of each ends at
# once: a hint too many.
MAX_REMEMBERED = 10_000


class Listener:
    def __init__(self, dsn: str, *, is_possible: bool) -> None:
        self._dsn = dsn
        self._is_possible = is_possible
        self._connection: Any = None
        self._proven_at = float("-inf")
        self._tried_at = float("-inf")
        # One proof or connection at a time, however many wait.
        self._checking = asyncio.Lock()
        # Arrivals are numbered. The last one of each queue, and the last one that each set of queues was told of.
        self._arrivals = 0
        self._latest: dict[str, int] = {}
        self._told: dict[tuple[str, ...], int] = {}
        # Set by the next arrival, which puts a new one here.
        self._arrival = asyncio.Event()

    async def wait(self, queues: Sequence[str], timeout_s: float) -> None:
        """Until a notification for one of these queues has come since the last call for them, or the time is up."""
        async with self._checking:
            is_listening = await self._is_listening()
        if not is_listening:
            await asyncio.sleep(min(timeout_s, POLL_WITHOUT_LISTEN_S))
            return
        deadline = time.monotonic() + timeout_s
        wanted = tuple(queues)
        while not self._take(wanted):
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return
            try:
                async with asyncio.timeout(remaining_s):
                    await self._arrival.wait()
            except TimeoutError:
                return

    async def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.terminate()

    def _take(self, queues: tuple[str, ...]) -> bool:
        """Whether something arrived for these queues that they were not told of. The empty name stands for any."""
        latest = max(self._latest.get(queue, 0) for queue in ("", *queues))
        is_news = latest > self._told.get(queues, 0)
        self._told[queues] = self._arrivals
        return is_news

    def _on_notification(self, _connection: object, _pid: int, _channel: str, queue: object) -> None:
        self._note_arrival(str(queue))

    def _note_arrival(self, queue: str) -> None:
        if len(self._latest) + len(self._told) > MAX_REMEMBERED:
            self._latest.clear()
            self._told.clear()
            queue = ""
        self._arrivals += 1
        self._latest[queue] = self._arrivals
        arrival, self._arrival = self._arrival, asyncio.Event()
        arrival.set()

    async def _is_listening(self) -> bool:
        if not self._is_possible:
            return False
        if self._connection is not None and not self._connection.is_closed():
            if time.monotonic() - self._proven_at < PROOF_VALID_S:
                return True
            if await self._prove():
                return True
        await self.close()
        if time.monotonic() - self._tried_at < RETRY_AFTER_S:
            return False
        self._tried_at = time.monotonic()
        return await self._open()

    async def _open(self) -> bool:
        connection: Any = None
        try:
            connection = await connect(self._dsn, timeout_s=PROOF_TIMEOUT_S, command_timeout_s=PROOF_TIMEOUT_S)
            await connection.add_listener(CHANNEL, self._on_notification)
            # Not before: whoever is cancelled on the way must not leave one behind that hears only its own proofs.
            self._connection, connection = connection, None
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
            return False
        finally:
            if connection is not None:
                connection.terminate()
        # What was announced before we listened is found by one more look.
        self._note_arrival("")
        return await self._prove()

    async def _prove(self) -> bool:
        """Send a notification to ourselves and see it arrive."""
        channel = f"windlass_proof_{uuid4().hex}"
        seen = asyncio.Event()

        def on_notification(*_: object) -> None:
            seen.set()

        try:
            await self._connection.add_listener(channel, on_notification)
            await self._connection.execute(f"notify {channel}")
            async with asyncio.timeout(PROOF_TIMEOUT_S):
                await seen.wait()
            await self._connection.remove_listener(channel, on_notification)
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
            await self.close()
            return False
        self._proven_at = time.monotonic()
        return True
