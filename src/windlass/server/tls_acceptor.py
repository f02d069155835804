"""Accepts TLS connections, so that the limits of connections.py apply from the first moment.

An event loop's own server creates the protocol of a TLS connection after the handshake: a client that never completes
one would be counted nowhere. Here a connection is counted when it is accepted, has `header_s` for its handshake, and is
closed for a new one like any connection without a complete request. Its protocol takes its place after the handshake.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

import structlog

from windlass.server.connections import ConnectionTracker, LimitedConnection

# Pause after the system could not accept, mostly because no file is free.
ACCEPT_RETRY_S = 1.0
log = structlog.get_logger(__name__)


class TlsHandshake:
    """An accepted connection until its handshake is complete."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def abort(self) -> None:
        """The event loop reads the end of the connection, and closes it."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


async def accept_tls_connections(
    listener: socket.socket,
    context: ssl.SSLContext,
    tracker: ConnectionTracker,
    new_connection: Callable[..., LimitedConnection],
) -> None:
    """Accept until cancelled. `new_connection` gets the handshake whose place it takes as `replaces`."""
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    running: dict[asyncio.Task[None], TlsHandshake] = {}

    async def complete(handshake: TlsHandshake) -> None:
        try:
            # Clients that do not speak TLS are as usual as those that leave: neither is logged.
            with contextlib.suppress(OSError):  # ssl.SSLError is one
                await loop.connect_accepted_socket(
                    lambda: new_connection(replaces=handshake),
                    handshake.connection,
                    ssl=context,
                    ssl_handshake_timeout=tracker.timeouts.header_s,
                )
        except Exception:
            log.exception("handle tls connection failed")
        finally:
            tracker.remove(handshake)

    try:
        while True:
            await asyncio.sleep(0)  # accepting never delays the connections that are open
            try:
                connection, (address, *_) = await loop.sock_accept(listener)
            except ConnectionError:
                continue  # the client has left already
            except OSError as error:
                log.warning("take connection failed", error=str(error))
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            if not tracker.make_room(address):
                connection.close()
                continue
            handshake = TlsHandshake(connection)
            tracker.add(handshake, address)
            task = loop.create_task(complete(handshake))
            running[task] = handshake
            task.add_done_callback(running.pop)
    finally:
        for handshake in running.values():
            handshake.abort()
        await asyncio.gather(*running, return_exceptions=True)
