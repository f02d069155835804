"""The application on a port, inside a loop that is not the server's own.

The port is taken before anything else is done, so that one in use is known at once. Signals are the loop's owner's.
Closing tells everybody who waits, lets requests under way end, and cuts off what is left.
"""

import asyncio
import contextlib
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
from windlass.server.connections import PROXIES, ConnectionTracker, TimedConnection, room_for_connections

BACKLOG = 2_048
# Longer than workers keep an idle connection: it is then they who close it, and none is closed under a request.
KEEP_ALIVE_S = 75
# For requests under way when the server ends.
GRACE_S = 5
START_TIMEOUT_S = 10.0
# Lines of the server's and the loop's own a minute: whoever sends nonsense must not fill the disk with it.
MAX_LINES = 20
LINES_WINDOW_S = 60.0
log = structlog.get_logger(__name__)


def listen(host: str, port: int) -> socket.socket:
    """Take the port. Raises BadInput if that cannot be."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        # With its protocol named: asyncio turns Nagle's delay off only then, and that delay is 40 ms an answer.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        # The system's own words: Python's have the address once more.
        why = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror
        raise BadInput(f"cannot listen on {host} port {port} ({why}): choose another with --host and --port.") from None
    return listener


@asynccontextmanager
async def serving(app: ASGIApp, listener: socket.socket) -> AsyncIterator[None]:
    """The application answers for as long as this is open."""
    _pass_on_logs()
    everybody = ConnectionTracker(room_for_connections())
    server = _Server(
        uvicorn.Config(
            app,
            http=cast(type[asyncio.Protocol], functools.partial(TimedConnection, everybody)),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            # Whose word is taken on where a request came from: anybody else could say anything.
            forwarded_allow_ips=list(PROXIES),
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
    )
    task = asyncio.create_task(server.serve([listener]))
    try:
        await _until_started(server, task)
        host, port = listener.getsockname()[:2]
        log.info("listening", host=host, port=port)
        yield
    finally:
        server.should_exit = True
        await asyncio.gather(task, return_exceptions=True)


async def _until_started(server: uvicorn.Server, task: "asyncio.Task[None]") -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while not server.started:
            if task.done():
                task.result()
                raise RuntimeError("the HTTP server ended before it had started")
            await asyncio.sleep(0.01)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _ToOurLog(logging.Handler):
    """What others log by themselves, as lines of ours that say what it is about, and no more of them than anybody
    reads."""

    def __init__(self, about: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._about = about
        self._clock = clock
        self._since = float("-inf")
        self._lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        if self._clock() >= self._since + LINES_WINDOW_S:
            left_out = max(0, self._lines - MAX_LINES)
            self._since, self._lines = self._clock(), 0
            if left_out:
                log.warning("lines left out", of=record.name, lines=left_out)
        self._lines += 1
        if self._lines <= MAX_LINES:
            fields = {"message": record.getMessage(), "of": record.name}
            error = {"exc_info": record.exc_info} if record.exc_info else {}
            log.log(record.levelno, self._about, **fields, **error)


def _pass_on_logs() -> None:
    for name, about in (("uvicorn", "http server"), ("asyncio", "event loop")):
        theirs = logging.getLogger(name)
        theirs.setLevel(logging.WARNING)
        theirs.propagate = False
        if not theirs.handlers:
            theirs.addHandler(_ToOurLog(about))
