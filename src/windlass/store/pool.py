"""A pool of connections to one database, opened on demand and lent to one call at a time.

asyncpg's own pool adds a proxy, a timer and a task to every call, which together took longer than the server takes to
claim a task. A connection returns to the pool only if it is known to be idle. One whose call was cut off (cancelled,
timed out, not answered) is closed, because the server may still be busy with it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

# Firewalls drop connections that are idle for longer, without notice to either end.
MAX_IDLE_S = 300.0


class ConnectionPool:
    def __init__(self, connect: Callable[[], Awaitable[Any]], *, limit: int, timeout_s: float) -> None:
        """`timeout_s` bounds the wait for a connection that others use, and for closing."""
        self._connect = connect
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(limit)
        self._idle: list[tuple[Any, float]] = []
        self._lent: set[Any] = set()

    async def take(self) -> Any:
        """A connection for the caller alone, who must `give_back` or `discard` it."""
        if self._places.locked():
            async with asyncio.timeout(self._timeout_s):
                await self._places.acquire()
        else:
            await self._places.acquire()
        try:
            connection = self._take_idle() or await self._connect()
        except BaseException:
            self._places.release()
            raise
        self._lent.add(connection)
        return connection

    def give_back(self, connection: Any) -> None:
        if connection.is_closed() or connection.is_in_transaction():
            self.discard(connection)
            return
        self._idle.append((connection, time.monotonic()))
        self._lent.discard(connection)
        self._places.release()

    def discard(self, connection: Any) -> None:
        connection.terminate()
        self._lent.discard(connection)
        self._places.release()

    async def close(self) -> None:
        """Close idle connections in order, and abort the others."""
        idle, self._idle = self._idle, []
        for connection in self._lent:
            connection.terminate()
        closing = [connection.close(timeout=self._timeout_s) for connection, _ in idle]
        # Closing a broken connection is no error.
        await asyncio.gather(*closing, return_exceptions=True)

    def _take_idle(self) -> Any | None:
        # The most recently used one, so that surplus connections reach MAX_IDLE_S.
        while self._idle:
            connection, idle_since = self._idle.pop()
            if not connection.is_closed() and time.monotonic() - idle_since < MAX_IDLE_S:
                return connection
            connection.terminate()
        return None
