"""A small HTTP/1.1 client for the calls of one worker to its control plane.

Connections are kept alive between requests, at most MAX_CONNECTIONS, with one request at a time on each. A request on a
kept connection that closes before any byte of the response is repeated once on a new connection: every call to a
control plane may be repeated. Time and size of a response are bounded. A request that fails or is cancelled closes its
connection. Does not follow redirects, and uses no proxy: a proxy in the environment is meant for the handler.
"""

import asyncio
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

CONNECT_TIMEOUT_S = 10.0
# An address that does not answer delays the next address of the host by this time (RFC 8305).
NEXT_ADDRESS_DELAY_S = 0.25
# Shorter than the control plane's own limit, so that it never closes a connection that a request is about to use.
KEEP_ALIVE_S = 30.0
# The loop, the wait for work, and a reserve.
MAX_CONNECTIONS = 4
# Time for a large request is added to its time limit: slower lines are not supported.
MIN_BYTES_PER_S = 32 << 10
# Larger than any reply of a control plane apart from its body.
MAX_HEAD_BYTES = 64 << 10
# Larger bodies are sent without being copied behind their head.
MAX_JOINED_BYTES = 64 << 10


class NoResponse(Exception):
    """The server sent no valid response in time. It may have handled the request."""


class ConnectionEnded(NoResponse):
    """The connection closed before the first byte of the response."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes

    def header(self, name: str) -> str:
        """The first value of a header, or "". `name` is in lower case."""
        return next((value.decode("latin-1") for key, value in self.headers if key.lower() == name.encode()), "")


class HttpClient:
    """Requests to one server, with the same headers on each. Belongs to one event loop."""

    def __init__(
        self, url: str, headers: Mapping[str, str], tls: ssl.SSLContext | bool, *, max_response_bytes: int
    ) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._path = parts.path.rstrip("/")
        self._tls = tls
        self._headers = {"Host": parts.netloc.encode("idna").decode(), "User-Agent": "windlass-worker", **headers}
        self._max_response_bytes = max_response_bytes
        # The last one was used last.
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._is_closed = False
        self._encode_headers()

    def set_header(self, name: str, value: str) -> None:
        self._headers[name] = value
        self._encode_headers()

    def _encode_headers(self) -> None:
        self._encoded_headers = "".join(f"{name}: {value}\r\n" for name, value in self._headers.items())

    async def request(
        self, method: str, path: str, body: bytes | None, timeout_s: float, encoding: str | None = None
    ) -> HttpResponse:
        """Raises NoResponse or OSError. `encoding`: that of the body, for the header Content-Encoding."""
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._encoded_headers}"
        if encoding is not None:
            head += f"Content-Encoding: {encoding}\r\n"
        if method != "GET":
            head += f"Content-Length: {len(body or b'')}\r\n"
        message = (head + "\r\n").encode("latin-1"), body or b""
        timeout_s += len(message[1]) / MIN_BYTES_PER_S
        async with self._slots:
            kept = self._take_idle()
            if kept is not None:
                try:
                    return await self._exchange(kept, message, timeout_s)
                except ConnectionEnded:
                    pass  # the server closed it while it was idle
            return await self._exchange(await self._connect(), message, timeout_s)

    async def close(self) -> None:
        self._is_closed = True
        for connection in [*self._idle, *self._busy]:
            connection.abort("the client was closed")
        self._idle.clear()
        # Transports close their sockets in the next iteration of the event loop.
        await asyncio.sleep(0)

    def _take_idle(self) -> "_Connection | None":
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and now - connection.idle_since < KEEP_ALIVE_S:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> "_Connection":
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self._max_response_bytes, self._forget),
                    self._host,
                    self._port,
                    ssl=self._tls or None,
                    happy_eyeballs_delay=NEXT_ADDRESS_DELAY_S,
                )
        except TimeoutError:
            raise NoResponse(f"no connection within {CONNECT_TIMEOUT_S:g} s") from None
        return connection

    def _forget(self, connection: "_Connection") -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    async def _exchange(
        self, connection: "_Connection", message: tuple[bytes, bytes], timeout_s: float
    ) -> HttpResponse:
        self._busy.add(connection)
        try:
            response = await connection.send(message, timeout_s)
        except BaseException:
            # Abort when cancelled, too: the response would be read as that of the next request.
            connection.abort()
            raise
        finally:
            self._busy.discard(connection)
        if connection.is_open and not self._is_closed:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.abort()
        return response


class _Connection(asyncio.Protocol):
    """Sends one request at a time and parses its response. Methods named `on_` are called by the parser."""

    def __init__(self, max_response_bytes: int, on_lost: "Callable[[_Connection], None]") -> None:
        self.is_open = True
        self.idle_since = 0.0
        self._max_bytes = max_response_bytes + MAX_HEAD_BYTES
        self._on_lost = on_lost
        self._pending: asyncio.Future[HttpResponse] | None = None

    def send(self, message: tuple[bytes, bytes], timeout_s: float) -> asyncio.Future[HttpResponse]:
        loop = asyncio.get_running_loop()
        self._pending = pending = loop.create_future()
        self._timer = loop.call_later(timeout_s, self._time_out, timeout_s)
        self._parser = httptools.HttpResponseParser(self)
        self._received_bytes = 0
        self._has_head = False
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._response: HttpResponse | None = None
        head, body = message
        if not self.is_open:
            self._fail(ConnectionEnded("the connection was closed"))
        elif len(body) <= MAX_JOINED_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)
        return pending

    def abort(self, why: str = "the connection was closed") -> None:
        """Close at once. A pending request fails."""
        self._fail(NoResponse(why))
        self.is_open = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._pending is None:
            self.abort()  # a response without a request
            return
        self._received_bytes += len(data)
        if self._received_bytes > self._max_bytes:
            self.abort(f"the response has more than {self._max_bytes:,} bytes")
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._response is None:
                self.abort(f"the response is not HTTP: {error}")
                return
            self.is_open = False
        if self._response is not None:
            self._finish(self._response)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._on_lost(self)
        if self._pending is None:
            return
        if not self._received_bytes:
            self._fail(ConnectionEnded(str(error) if error else "the server closed the connection without an answer"))
        elif self._has_head and error is None and self._ends_with_connection():
            self._finish(self._make_response())
        else:
            self._fail(NoResponse("the connection was closed in the middle of the response"))

    def on_message_begin(self) -> None:
        if self._response is not None:
            self.is_open = False  # more than one response to a request

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._response is not None:
            return
        if self._parser.get_status_code() < 200:
            # An informational response; the final one follows.
            self._has_head = False
            self._headers.clear()
            return
        self._response = self._make_response()
        if not self._parser.should_keep_alive():
            self.is_open = False

    def _make_response(self) -> HttpResponse:
        return HttpResponse(self._parser.get_status_code(), self._headers, b"".join(self._body))

    def _ends_with_connection(self) -> bool:
        """Whether the body has no stated length, so that the end of the connection ends it."""
        names = {name.lower() for name, _ in self._headers}
        return not names & {b"content-length", b"transfer-encoding"}

    def _time_out(self, timeout_s: float) -> None:
        self.abort(f"no answer within {timeout_s:g} s")

    def _finish(self, response: HttpResponse) -> None:
        if pending := self._take_pending():
            pending.set_result(response)

    def _fail(self, error: NoResponse) -> None:
        if pending := self._take_pending():
            pending.set_exception(error)

    def _take_pending(self) -> asyncio.Future[HttpResponse] | None:
        """The request that waits for its response, once. None if it was cancelled."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        self._timer.cancel()
        return None if pending.done() else pending
