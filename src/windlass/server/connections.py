"""Limits on connections and slow clients, in front of uvicorn's HTTP protocol.

A client without a token can connect and then send nothing, send half a request, or never read its response. So a header
must arrive within seconds and a body within about a minute, and responses must be read, or the connection is closed.
One address gets at most a share of the connections. When all are in use, the connection that has been without a
complete request for longest is closed for a new one. The limit always leaves open files for the database, machines and
logs.

A LimitedConnection stands between the transport and uvicorn's protocol. It follows the requests with a parser of its
own, the same that uvicorn uses, so that both agree where a request ends. Bytes that the parser refuses, headers that
are too large and forms that proxies read in different ways never reach uvicorn. The application marks the end of each
response (`mark_responses`).
"""

import asyncio
import logging
import resource
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

import httptools
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

# A worker keeps about two connections, so this is far more than a fleet needs.
MAX_CONNECTIONS = 5_000
# Open files reserved for database connections, worker processes and their logs.
RESERVED_FILES = 512
# Share of the connections that one address may use. Many workers may share an address.
SHARE_PER_ADDRESS = 0.5
# A proxy on this host connects for all its clients, who are not known before the header is read. It has no share limit.
PROXIES = ("127.0.0.1", "::1")
# The process raises its own file limit up to this. Some programs loop over all possible files, so it is not higher.
MAX_FILES = 16_384
# Minimum rate of a request body, and minimum progress of a response per `response_s`.
MIN_BODY_BYTES_PER_S = 64 * 1024
MIN_RESPONSE_PROGRESS_BYTES = 64 * 1024
# Request line and headers together. Our largest header is a session cookie of some hundred bytes.
MAX_HEADER_BYTES = 16 * 1024
# Requests that a client may send before it has read the response to the first. Each occupies memory; no Windlass client
# sends more than one.
MAX_PIPELINED = 8
# Key of the connection in the state of a request.
_CONNECTION = "connection"
# uvicorn's logger, which `serving` limits to a few lines per minute.
_log = logging.getLogger("uvicorn.error")


@dataclass(frozen=True, slots=True)
class Timeouts:
    # From the connection, or from the first byte of a further request, to the end of the header.
    header_s: float = 10.0
    # From there to the end of the body. A body at MIN_BODY_BYTES_PER_S gets more time while its response is pending.
    # Longer than middleware.BODY_TIMEOUT_S, which can still answer with 408.
    body_s: float = 90.0
    # Until the client has read some more of a response that exceeds the system's buffers.
    response_s: float = 30.0


def raise_file_limit() -> None:
    """Raise the limit on open files for this process and its children, up to MAX_FILES."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connection_limit() -> int:
    """How many connections may be open at once. With a low file limit, at most half of the files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, soft - RESERVED_FILES if soft >= 2 * RESERVED_FILES else soft // 2))


class Connection(Protocol):
    def abort(self) -> None:
        """Close at once."""


class ConnectionTracker:
    """All open connections, and those without a complete request, longest first."""

    def __init__(self, limit: int, timeouts: Timeouts | None = None) -> None:
        self.timeouts = timeouts or Timeouts()
        self._limit = limit
        self._limit_per_address = max(1, int(limit * SHARE_PER_ADDRESS))
        # Responses since the start, for metrics.
        self.responses = 0
        self._all: dict[Connection, str] = {}
        self._per_address: Counter[str] = Counter()
        self._without_request: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self._all)

    def make_room(self, address: str) -> bool:
        """Whether a connection from this address may be added. Closes another connection if all are in use."""
        if self._per_address[address] >= self._limit_per_address and address not in PROXIES:
            return False
        if len(self._all) < self._limit:
            return True
        longest = next(iter(self._without_request), None)
        if longest is None:
            return False
        self.remove(longest)
        longest.abort()
        return True

    def add(self, connection: Connection, address: str) -> None:
        self._all[connection] = address
        self._per_address[address] += 1
        self._without_request[connection] = None

    def remove(self, connection: Connection) -> None:
        address = self._all.pop(connection, None)
        self._without_request.pop(connection, None)
        if address is not None:
            self._per_address[address] -= 1
            if not self._per_address[address]:
                del self._per_address[address]

    def set_has_request(self, connection: Connection, has_request: bool) -> None:
        if has_request:
            self._without_request.pop(connection, None)
        elif connection in self._all:
            self._without_request.setdefault(connection)


def has_left(scope: Scope) -> bool:
    """Whether the client of this request has disconnected, as far as its connection is a LimitedConnection."""
    connection = scope.get("state", {}).get(_CONNECTION)
    return connection is not None and bool(connection.is_closing)


def mark_responses(app: ASGIApp) -> ASGIApp:
    """The application, which reports to its connection when the response to a request is complete."""

    async def marked(scope: Scope, receive: Receive, send: Send) -> None:
        connection = scope.get("state", {}).get(_CONNECTION)
        try:
            await app(scope, receive, send)
        finally:
            if connection is not None:
                connection.on_response_complete()

    return marked


class _Refused(Exception):
    """A request that is valid for the parser and still refused."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class LimitedConnection(asyncio.Protocol):
    """Passes a connection on to uvicorn's protocol, within the limits of this module."""

    def __init__(
        self,
        tracker: ConnectionTracker,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        replaces: Connection | None = None,
    ) -> None:
        """`replaces`: the TLS handshake whose place in the tracker this connection takes."""
        self._loop = _loop or asyncio.get_running_loop()
        self._replaces = replaces
        self._inner = HttpToolsProtocol(config, server_state, {**app_state, _CONNECTION: self}, self._loop)
        self._keep_alive_s = config.timeout_keep_alive
        self._tracker = tracker
        self._timeouts = tracker.timeouts
        self._parser: Any = httptools.HttpRequestParser(self)
        # Requests whose first byte, header and last byte were received, and those whose response is complete.
        self._begun = 0
        self._with_header = 0
        self._received = 0
        self._answered = 0
        # Size of the header that is being received.
        self._header_bytes = 0
        self._hosts = 0
        self._transfer_encoding: bytes | None = None
        self._refused: _Refused | None = None
        # What is awaited ("header", "body", "request"), and of which request.
        self._awaited: tuple[str, int] | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._received_bytes = 0
        self._write_timer: asyncio.TimerHandle | None = None

    # ---------------------------------------------------------------------------------------- events of the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._inner.connection_made(transport)
        if self._replaces is not None:
            self._tracker.remove(self._replaces)
            self._replaces = None
        address = self._inner.client[0] if self._inner.client else ""
        if not self._tracker.make_room(address):
            transport.abort()
            return
        self._tracker.add(self, address)
        self._start_read_timer("header", self._timeouts.header_s, self.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._tracker.remove(self)
        self._stop_read_timer()
        self._stop_write_timer()
        self._inner.connection_lost(exc)
        self._parser = None  # it refers to this object

    def data_received(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        self._received_bytes += len(data)
        try:
            self._feed(data)
        except (httptools.HttpParserError, _Refused) as error:
            self._refuse(self._refused or error)
        else:
            self._inner.data_received(data)
        self._update_timers()

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            return  # uvicorn answers without the upgrade
        if self._begun > self._with_header:
            self._count_header(len(data))

    def eof_received(self) -> None:
        self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()
        self._start_write_timer()

    def resume_writing(self) -> None:
        self._inner.resume_writing()
        if not self._transport.is_closing():  # while closing, the rest must be read too
            self._stop_write_timer()

    # ------------------------------------------------------------------------------------------- events of the parser

    def on_message_begin(self) -> None:
        self._begun += 1
        self._header_bytes = 0
        self._hosts = 0
        self._transfer_encoding = None
        if self._begun - self._answered > MAX_PIPELINED:
            raise self._refusal(HTTPStatus.BAD_REQUEST, "too many requests before the first response")

    def on_url(self, url: bytes) -> None:
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value) + 4)
        # Most names have another length, and are not compared.
        if len(name) == 4 and name.lower() == b"host":
            self._hosts += 1
        elif len(name) == 17 and name.lower() == b"transfer-encoding":
            self._transfer_encoding = value.lower()

    def on_headers_complete(self) -> None:
        """Refuse what servers and proxies read in different ways, as far as the parser accepts it."""
        self._with_header += 1
        version = self._parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise self._refusal(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, f"HTTP/{version}")
        if self._hosts > 1 or (self._hosts == 0 and version == "1.1"):
            raise self._refusal(HTTPStatus.BAD_REQUEST, f"{self._hosts} Host headers")
        if self._transfer_encoding is not None and (self._transfer_encoding != b"chunked" or version == "1.0"):
            raise self._refusal(HTTPStatus.BAD_REQUEST, "a transfer encoding other than chunked")

    def on_message_complete(self) -> None:
        self._received += 1

    # ---------------------------------------------------------------------------------------- events of the application

    def on_response_complete(self) -> None:
        self._answered += 1
        self._tracker.responses += 1
        if self._begun == self._answered == self._received and not self._transport.is_closing():
            # The usual case, in short: uvicorn's own timeout runs until the next request.
            self._tracker.set_has_request(self, False)
        else:
            self._update_timers()

    @property
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def abort(self) -> None:
        """Close without waiting for the client to read what was sent."""
        self._transport.abort()

    # -------------------------------------------------------------------------------------------------------- refusals

    def _count_header(self, size_bytes: int) -> None:
        self._header_bytes += size_bytes
        if self._header_bytes > MAX_HEADER_BYTES:
            raise self._refusal(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"a header of more than {MAX_HEADER_BYTES:,} bytes"
            )

    def _refusal(self, status: HTTPStatus, reason: str) -> _Refused:
        # The parser raises an error of its own for every error in a callback.
        self._refused = _Refused(status, reason)
        return self._refused

    def _refuse(self, error: Exception) -> None:
        _log.warning("refuse request: %s", error)
        if self._received > self._answered:
            self.abort()  # a response would be mixed with that of the running request
            return
        status = error.status if isinstance(error, _Refused) else HTTPStatus.BAD_REQUEST
        lines = (
            f"HTTP/1.1 {status.value} {status.phrase}",
            "content-length: 0",
            "connection: close",
        )
        self._transport.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        self._transport.close()

    # ---------------------------------------------------------------------------------------------------------- timers

    def _update_timers(self) -> None:
        is_running = self._received > self._answered
        self._tracker.set_has_request(self, is_running)
        if self._transport.is_closing():
            self._stop_read_timer()
            self._start_write_timer()
        elif self._with_header > self._received:
            self._start_read_timer("body", self._timeouts.body_s, self._check_body_rate)
        elif is_running:
            self._stop_read_timer()
        elif self._begun > self._with_header or self._begun == 0:
            self._start_read_timer("header", self._timeouts.header_s, self.abort)
        else:
            # uvicorn starts this timeout with the response, but not after bytes that arrived later.
            self._start_read_timer("request", self._keep_alive_s, self._close)

    def _start_read_timer(self, what: str, timeout_s: float, on_timeout: Callable[[], None]) -> None:
        # Once per header and body: single bytes do not extend the time.
        if self._awaited != (what, self._begun):
            self._stop_read_timer()
            self._awaited = (what, self._begun)
            self._received_bytes = 0
            self._read_timer = self._loop.call_later(timeout_s, on_timeout)

    def _stop_read_timer(self) -> None:
        self._awaited = None
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _check_body_rate(self) -> None:
        """Grant more time for the bytes received, unless the response is complete: then the body is read by no one, and
        its length has no limit."""
        received_bytes, self._received_bytes = self._received_bytes, 0
        if self._answered >= self._with_header or received_bytes < MIN_BODY_BYTES_PER_S:
            self.abort()
        else:
            self._read_timer = self._loop.call_later(received_bytes / MIN_BODY_BYTES_PER_S, self._check_body_rate)

    def _close(self) -> None:
        self._transport.close()
        self._start_write_timer()

    def _start_write_timer(self) -> None:
        if self._write_timer is None:
            unread_bytes = self._transport.get_write_buffer_size()
            self._write_timer = self._loop.call_later(self._timeouts.response_s, self._check_progress, unread_bytes)

    def _check_progress(self, unread_bytes_before: int) -> None:
        self._write_timer = None
        unread_bytes = self._transport.get_write_buffer_size()
        if unread_bytes and unread_bytes_before - unread_bytes < MIN_RESPONSE_PROGRESS_BYTES:
            self.abort()
        elif unread_bytes:
            self._start_write_timer()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
