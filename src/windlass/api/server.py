"""The application on a port, inside a loop that is not the server's own.

The port is taken before anything else is done, so that one in use is known at once. Signals are the loop's owner's.
Closing tells everybody who waits, lets requests under way end, and cuts off what is left.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager

import structlog
import uvicorn
from starlette.types import ASGIApp

from windlass.model.errors import BadInput

BACKLOG = 2_048
# Connections at once, those that only wait included: far beyond a fleet, far below what a host has files for.
MAX_CONNECTIONS = 5_000
# Longer than workers keep an idle connection: it is then they who close it, and none is closed under a request.
KEEP_ALIVE_S = 75
# Whose word is taken on where a request came from: a proxy's on this host. Anybody else could say anything.
PROXIES = ("127.0.0.1", "::1")
# For requests under way when the server ends.
GRACE_S = 5
START_TIMEOUT_S = 10.0
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
    server = _Server(
        uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
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
    def emit(self, record: logging.LogRecord) -> None:
        log.warning("http server", message=record.getMessage(), severity=record.levelname)


def _pass_on_logs() -> None:
    theirs = logging.getLogger("uvicorn")
    theirs.setLevel(logging.WARNING)
    theirs.propagate = False
    if not theirs.handlers:
        theirs.addHandler(_ToOurLog())
