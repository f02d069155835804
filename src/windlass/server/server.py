"""Runs the application with uvicorn inside an event loop that belongs to the caller.

The port is bound before anything else starts, so that a port in use is reported at once. Signal handling stays with the
caller. On shutdown, running requests get GRACE_S to finish, then their connections are closed.
"""

import asyncio
import contextlib
import errno
import functools
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager
from typing import cast

import structlog
import uvicorn
from starlette.types import ASGIApp

from windlass.model.errors import BadInput
from windlass.server.connections import PROXIES, ConnectionTracker, LimitedConnection, connection_limit, mark_responses
from windlass.server.port_holder import describe_port_holder
from windlass.server.tls import ReloadingTls
from windlass.server.tls_acceptor import accept_tls_connections

BACKLOG = 2_048
# Longer than workers keep an idle connection, so that workers close it and no request meets a closed connection.
KEEP_ALIVE_S = 75
# Time for running requests at shutdown.
GRACE_S = 5
START_TIMEOUT_S = 10.0
# Log lines of uvicorn and asyncio per window. Bad requests must not fill the disk.
MAX_LINES = 20
LINES_WINDOW_S = 60.0
log = structlog.get_logger(__name__)


def listen(host: str, port: int) -> socket.socket:
    """Bind the port. Raises BadInput if it cannot be bound."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        # asyncio disables Nagle's algorithm (40 ms per response) only on sockets with an explicit protocol.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        # str(error) would repeat the address.
        why = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror
        holder = describe_port_holder(port) if error.errno == errno.EADDRINUSE else None
        if holder is not None:
            raise BadInput(
                f"cannot listen on {host} port {port}: {holder} listens there. Stop it, or choose another --port."
            ) from None
        raise BadInput(f"cannot listen on {host} port {port} ({why}): choose another with --host and --port.") from None
    return listener


@asynccontextmanager
async def serving(
    app: ASGIApp, listener: socket.socket, *, tls: ReloadingTls | None = None
) -> AsyncIterator[ConnectionTracker]:
    """Serve the application until the context exits, with `tls` over HTTPS. Several processes may share a listener."""
    for name, event in (("uvicorn", "report http server problem"), ("asyncio", "report event loop problem")):
        logger = logging.getLogger(name)
        logger.setLevel(logging.WARNING)
        logger.propagate = False
        if not logger.handlers:
            logger.addHandler(_StructlogHandler(event))
    tracker = ConnectionTracker(connection_limit())
    config = uvicorn.Config(
        mark_responses(app),
        http=cast(type[asyncio.Protocol], functools.partial(LimitedConnection, tracker)),
        # The application has background tasks of its own.
        lifespan="auto",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        # Trust X-Forwarded-For only from a proxy on this host.
        forwarded_allow_ips=list(PROXIES),
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = _Server(config)
    # uvicorn would count connections after their TLS handshake only, so with TLS they are accepted here.
    task = asyncio.create_task(server.serve([] if tls is not None else [listener]))
    tls_tasks: list[asyncio.Task[None]] = []
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not server.started:
                if task.done():
                    task.result()
                    raise RuntimeError("the HTTP server ended before it had started")
                await asyncio.sleep(0.01)
        if tls is not None:
            new_connection = functools.partial(
                LimitedConnection, tracker, config, server.server_state, server.lifespan.state
            )
            accept = accept_tls_connections(listener, tls.context, tracker, new_connection)
            tls_tasks = [asyncio.create_task(tls.watch()), asyncio.create_task(accept)]
        host, port = listener.getsockname()[:2]
        log.info("started server", host=host, port=port, tls=tls is not None)
        yield tracker
    finally:
        for each in tls_tasks:
            each.cancel()
        await asyncio.gather(*tls_tasks, return_exceptions=True)
        if tls is not None:
            listener.close()
        server.should_exit = True
        await asyncio.gather(task, return_exceptions=True)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _StructlogHandler(logging.Handler):
    """Passes log records of libraries to structlog, at most MAX_LINES per window."""

    def __init__(self, event: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._event = event
        self._clock = clock
        self._window_started = float("-inf")
        self._lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        if self._clock() >= self._window_started + LINES_WINDOW_S:
            dropped = max(0, self._lines - MAX_LINES)
            self._window_started, self._lines = self._clock(), 0
            if dropped:
                log.warning("drop log lines", logger_name=record.name, lines=dropped)
        self._lines += 1
        if self._lines <= MAX_LINES:
            fields = {"message": record.getMessage(), "logger_name": record.name}
            error = {"exc_info": record.exc_info} if record.exc_info else {}
            log.log(record.levelno, self._event, **fields, **error)
