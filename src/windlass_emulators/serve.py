"""An emulator behind HTTP, on loopback and nowhere else.

Whoever may send requests may have programs run: user_data is one. So it listens on 127.0.0.1 only, and a web page that
was tricked into asking (by a name that resolves to loopback) is refused by the name it asked for.

A request that gets no answer is held in silence and then cut off. Machines boot on time although nobody asks.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator, MutableMapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from windlass_emulators.http import Emulator, NoAnswer, Response, json_response

LOOPBACK = "127.0.0.1"
_OWN_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
# Things happen at most this late, and a request need not wait for them.
MAX_SETTLE_INTERVAL_S = 0.25
MIN_SETTLE_INTERVAL_S = 0.01
# user_data, labels and a name are far below.
MAX_BODY_BYTES = 4 * 1024 * 1024
STOP_TIMEOUT_S = 10.0
# Connections that are held in silence do not delay the end for longer.
SHUTDOWN_TIMEOUT_S = 1

_TRANSPORT = "windlass.transport"
Scope = MutableMapping[str, Any]


class _Cuttable(H11Protocol):
    """Lets the application cut a connection, for which ASGI has no word."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, _TRANSPORT: transport}


class Application:
    """The emulator as an ASGI application. `handle` is quick, so it runs in the loop itself."""

    def __init__(self, emulator: Emulator) -> None:
        self._emulator = emulator

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)

    async def _live(self, receive: Any, send: Any) -> None:
        await receive()
        settling = asyncio.create_task(self._keep_settling())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        settling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await settling
        await send({"type": "lifespan.shutdown.complete"})

    async def _keep_settling(self) -> None:
        while True:
            self._emulator.settle()
            due = self._emulator.next_due()
            wait_s = MAX_SETTLE_INTERVAL_S if due is None else (due - datetime.now(UTC)).total_seconds()
            await asyncio.sleep(min(MAX_SETTLE_INTERVAL_S, max(MIN_SETTLE_INTERVAL_S, wait_s)))

    async def _answer(self, scope: Scope, receive: Any, send: Any) -> None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        body = await _read(receive)
        if body is None:
            return
        try:
            response = self._respond(scope, headers, body)
        except NoAnswer as silence:
            await _stay_silent(silence.held_s, receive)
            scope["state"][_TRANSPORT].abort()
            # uvicorn takes note of the cut before it looks whether there was an answer.
            await receive()
            return
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.headers.items()]
        raw.append((b"content-length", str(len(response.body)).encode()))
        await send({"type": "http.response.start", "status": response.status, "headers": raw})
        await send({"type": "http.response.body", "body": response.body})

    def _respond(self, scope: Scope, headers: dict[str, str], body: bytes) -> Response:
        if headers.get("host", LOOPBACK).rpartition(":")[0] not in _OWN_NAMES and headers.get("host") not in _OWN_NAMES:
            return json_response(403, {"error": {"code": "forbidden", "message": "ask for 127.0.0.1", "details": None}})
        if len(body) > MAX_BODY_BYTES:
            return json_response(413, {"error": {"code": "json_error", "message": "too long", "details": None}})
        # A page of some website can send a POST here, but not one that says it is JSON or carries a token.
        is_json = headers.get("content-type", "").startswith("application/json")
        if body and "authorization" not in headers and not is_json:
            return json_response(415, {"error": {"code": "json_error", "message": "send JSON", "details": None}})
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        return self._emulator.handle(scope["method"], scope["path"], query, headers, body)


async def _read(receive: Any) -> bytes | None:
    """The whole body, or as much of it as shows that it is too long. None: the client has gone."""
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += bytes(message.get("body", b""))
        if not message.get("more_body") or len(body) > MAX_BODY_BYTES:
            return body


async def _stay_silent(held_s: float, receive: Any) -> None:
    """Until the client gives up, or its patience is greater than ours."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(held_s):
            await receive()


def make_server(emulator: Emulator) -> uvicorn.Server:
    config = uvicorn.Config(
        Application(emulator),
        http=_Cuttable,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        # The server's own is up to a second late; an emulator that has a clock says when it was.
        date_header=False,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
    )
    return uvicorn.Server(config)


def listen(port: int) -> socket.socket:
    """On loopback; port 0 takes any that is free. Raises OSError."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def address_of(listener: socket.socket) -> str:
    return f"http://{LOOPBACK}:{listener.getsockname()[1]}"


@contextlib.contextmanager
def serving(emulator: Emulator, listener: socket.socket | None = None) -> Iterator[str]:
    """Serve it from a thread of its own for as long as this is open; gives its address, as in http://127.0.0.1:4711.
    Without a listener of the caller's, on any port that is free."""
    listener = listener or listen(0)
    server = make_server(emulator)
    # It listens already: whoever connects before the thread runs is answered a moment later.
    thread = threading.Thread(target=server.run, args=([listener],), name="windlass-emulator", daemon=True)
    thread.start()
    try:
        yield address_of(listener)
    finally:
        server.should_exit = True
        thread.join(STOP_TIMEOUT_S)
        listener.close()
