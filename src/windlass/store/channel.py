"""Watches a notification channel on a connection of its own, and reports whether notifications arrive.

A listening connection can be dead without an error, so it is tested with a notification to itself before it counts as
listening, and regularly after that. A caller that relies on notifications learns at once that the connection is closed,
and within TEST_INTERVAL_S + TEST_TIMEOUT_S that it is dead.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import asyncpg

from windlass.store.connection import CUT_OFF, connect, receives_notifications

TEST_INTERVAL_S = 10.0
TEST_TIMEOUT_S = 5.0
RETRY_PAUSE_S = 1.0


async def watch_channel(
    dsn: str,
    channel: str,
    on_notification: Callable[[str], None],
    set_listening: Callable[[bool], None],
    *,
    is_possible: bool,
) -> None:
    """Run until cancelled. `is_possible`: False behind a transaction-mode pooler, where nothing would arrive."""
    set_listening(False)
    if not is_possible:
        await asyncio.Event().wait()
    while True:
        connection: Any = None
        is_closed = asyncio.Event()

        def on_closed(_connection: object, is_closed: asyncio.Event = is_closed) -> None:
            is_closed.set()
            set_listening(False)

        try:
            connection = await connect(dsn, timeout_s=TEST_TIMEOUT_S, command_timeout_s=TEST_TIMEOUT_S)
            connection.add_termination_listener(on_closed)
            await connection.add_listener(channel, lambda *message: on_notification(str(message[3])))
            if await receives_notifications(connection, TEST_TIMEOUT_S):
                set_listening(True)
                while not is_closed.is_set():
                    try:
                        async with asyncio.timeout(TEST_INTERVAL_S):
                            await is_closed.wait()
                    except TimeoutError:
                        if not await receives_notifications(connection, TEST_TIMEOUT_S):
                            break
        except (*CUT_OFF, asyncpg.PostgresError):
            pass  # other calls report that the database is unavailable
        finally:
            set_listening(False)
            if connection is not None:
                connection.terminate()
        await asyncio.sleep(RETRY_PAUSE_S)
