"""Serves an emulator over HTTP, on loopback only.

A client can run programs on this host, because user_data is one. Therefore the server listens on 127.0.0.1 only and
refuses requests for any other host name: a web page whose name resolves to loopback cannot use it.

A request without an answer (NoAnswer) is held in silence and then disconnected. A background task settles the
emulator, so that machines boot on time without requests.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime

import uvicorn
from starlette import responses
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from windlass_emulators.http import Emulator, NoAnswer, Response, json_response

LOOPBACK = "127.0.0.1"
_OWN_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
# Scheduled changes happen at most this late.
# A stream that its client does not close.
MAX_STREAM_S = 60.0
MAX_SETTLE_INTERVAL_S = 0.25
MIN_SETTLE_INTERVAL_S = 0.01
# Far above the largest valid request.
MAX_BODY_BYTES = 4 * 1024 * 1024
STOP_TIMEOUT_S = 10.0
# Connections that are held in silence delay the shutdown by at most this.
SHUTDOWN_TIMEOUT_S = 1

_TRANSPORT = "windlass.transport"
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]


class _AbortableProtocol(H11Protocol):
    """Passes the transport to the application, which ASGI gives no other way to disconnect a client."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, _TRANSPORT: transport}


class _Disconnect(responses.Response):
    """Stays silent until the client disconnects or `held_s` have passed, then aborts the connection."""

    def __init__(self, held_s: float) -> None:
        super().__init__()
        self._held_s = held_s

    async def __call__(self, scope: Scope, receive: Receive, _: Send) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._held_s):
                await receive()
        scope["state"][_TRANSPORT].abort()
        # uvicorn must notice the disconnect before it sees that there was no response.
        await receive()


def make_app(emulator: Emulator) -> Starlette:
    """The emulator as an ASGI application. `handle` never waits, so it runs in the event loop."""

    async def keep_settling() -> None:
        while True:
            emulator.settle()
            due = emulator.next_due()
            wait_s = MAX_SETTLE_INTERVAL_S if due is None else (due - datetime.now(UTC)).total_seconds()
            await asyncio.sleep(min(MAX_SETTLE_INTERVAL_S, max(MIN_SETTLE_INTERVAL_S, wait_s)))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        settling = asyncio.create_task(keep_settling())
        yield
        settling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await settling

    async def respond(request: Request) -> responses.Response:
        body = b""
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    break
            answer = _handle(emulator, request, body)
        except (NoAnswer, ClientDisconnect) as silence:
            return _Disconnect(silence.held_s if isinstance(silence, NoAnswer) else 0.0)
        if answer.is_held_open:
            return responses.StreamingResponse(_held_open(answer.body), answer.status, dict(answer.headers))
        return responses.Response(answer.body, answer.status, dict(answer.headers))

    return Starlette(routes=[Route("/{path:path}", respond, methods=_METHODS)], lifespan=lifespan)


async def _held_open(body: bytes) -> AsyncIterator[bytes]:
    yield body
    await asyncio.sleep(MAX_STREAM_S)


def _handle(emulator: Emulator, request: Request, body: bytes) -> Response:
    host = request.headers.get("host", LOOPBACK)
    if host not in _OWN_NAMES and host.rpartition(":")[0] not in _OWN_NAMES:
        return _refusal(403, "forbidden", f"use the address {LOOPBACK}")
    if len(body) > MAX_BODY_BYTES:
        return _refusal(413, "json_error", f"the body has more than {MAX_BODY_BYTES} bytes")
    # A web page can send a POST here, but not one with the type JSON or an Authorization header.
    is_json = request.headers.get("content-type", "").startswith("application/json")
    if body and "authorization" not in request.headers and not is_json:
        return _refusal(415, "json_error", "send JSON with Content-Type: application/json")
    query = request.query_params.multi_items()
    return emulator.handle(request.method, request.scope["path"], query, dict(request.headers), body)


def _refusal(status: int, code: str, message: str) -> Response:
    return json_response(status, {"error": {"code": code, "message": message, "details": None}})


def make_server(emulator: Emulator) -> uvicorn.Server:
    config = uvicorn.Config(
        make_app(emulator),
        http=_AbortableProtocol,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        # uvicorn's date is up to a second late. An emulator sends the date of its own clock.
        date_header=False,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
    )
    return uvicorn.Server(config)


def listen(port: int) -> socket.socket:
    """On loopback. Port 0 takes any free port. Raises OSError."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def serving(emulator: Emulator, listener: socket.socket | None = None) -> Iterator[str]:
    """Serve the emulator from a thread. Yields its address, such as http://127.0.0.1:4711.

    Without a listener it takes any free port.
    """
    listener = listener or listen(0)
    server = make_server(emulator)
    # The socket listens already: a client that connects before the thread runs waits for it.
    thread = threading.Thread(target=server.run, args=([listener],), name="windlass-emulator", daemon=True)
    thread.start()
    try:
        yield f"http://{LOOPBACK}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(STOP_TIMEOUT_S)
        listener.close()
