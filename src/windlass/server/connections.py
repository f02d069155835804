"""Limits on connections and slow clients, by subclassing uvicorn's HTTP protocol.

A client without a token can connect and then send nothing, send half a request, or never read its response. So a header
must arrive within seconds and a body within about a minute, and responses must be read, or the connection is closed.
One address gets at most a share of the connections. When all are in use, the connection that has been without a
complete request for longest is closed for a new one. The limit always leaves open files for the database, machines and
logs.
"""

import asyncio
import resource
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
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


class ConnectionTracker:
    """All open connections, and those without a complete request, longest first."""

    def __init__(self, limit: int, timeouts: Timeouts | None = None) -> None:
        self.timeouts = timeouts or Timeouts()
        self._limit = limit
        self._limit_per_address = max(1, int(limit * SHARE_PER_ADDRESS))
        self._all: dict[TimedConnection, str] = {}
        self._per_address: Counter[str] = Counter()
        self._without_request: dict[TimedConnection, None] = {}

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

    def add(self, connection: "TimedConnection", address: str) -> None:
        self._all[connection] = address
        self._per_address[address] += 1
        self._without_request[connection] = None

    def remove(self, connection: "TimedConnection") -> None:
        address = self._all.pop(connection, None)
        self._without_request.pop(connection, None)
        if address is not None:
            self._per_address[address] -= 1
            if not self._per_address[address]:
                del self._per_address[address]

    def set_has_request(self, connection: "TimedConnection", has_request: bool) -> None:
        if has_request:
            self._without_request.pop(connection, None)
        elif connection in self._all:
            self._without_request.setdefault(connection)


class TimedConnection(H11Protocol):
    """uvicorn's H11 protocol with header, body and write timeouts and a connection limit."""

    def __init__(
        self,
        tracker: ConnectionTracker,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._tracker = tracker
        self._timeouts = tracker.timeouts
        # What is awaited ("header", "body", "request"), and after which request.
        self._awaited: tuple[str, object] | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._received_bytes = 0
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        if not self._tracker.make_room(address):
            transport.abort()
            return
        self._tracker.add(self, address)
        self._start_read_timer("header", self._timeouts.header_s, self.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._tracker.remove(self)
        self._stop_read_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received_bytes += len(data)
        super().data_received(data)
        self._update_timers()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_timers()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_write_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():  # while closing, the rest must be read too
            self._stop_write_timer()

    def abort(self) -> None:
        """Close without waiting for the client to read what was sent."""
        self.transport.abort()

    def _update_timers(self) -> None:
        state = self.conn.their_state
        self._tracker.set_has_request(self, state not in (h11.IDLE, h11.SEND_BODY))
        if self.transport.is_closing():
            self._stop_read_timer()
            self._start_write_timer()
        elif state is h11.SEND_BODY:
            self._start_read_timer("body", self._timeouts.body_s, self._check_body_rate)
        elif state is not h11.IDLE:
            self._stop_read_timer()
        elif self.cycle is None or self.conn.trailing_data[0]:
            self._start_read_timer("header", self._timeouts.header_s, self.abort)
        else:
            # uvicorn has this timeout too, but not after a body that arrived later than its response.
            self._start_read_timer("request", self.timeout_keep_alive, self._close)

    def _start_read_timer(self, what: str, timeout_s: float, on_timeout: Callable[[], None]) -> None:
        # Once per header and body: single bytes do not extend the time.
        if self._awaited != (what, self.cycle):
            self._stop_read_timer()
            self._awaited = (what, self.cycle)
            self._received_bytes = 0
            self._read_timer = self.loop.call_later(timeout_s, on_timeout)

    def _stop_read_timer(self) -> None:
        self._awaited = None
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _check_body_rate(self) -> None:
        """Grant more time for the bytes received, unless the response is complete: then the body is read by no one, and
        its length has no limit."""
        received_bytes, self._received_bytes = self._received_bytes, 0
        if self.cycle.response_complete or received_bytes < MIN_BODY_BYTES_PER_S:
            self.abort()
        else:
            self._read_timer = self.loop.call_later(received_bytes / MIN_BODY_BYTES_PER_S, self._check_body_rate)

    def _close(self) -> None:
        self.transport.close()
        self._start_write_timer()

    def _start_write_timer(self) -> None:
        if self._write_timer is None:
            unread_bytes = self.transport.get_write_buffer_size()
            self._write_timer = self.loop.call_later(self._timeouts.response_s, self._check_progress, unread_bytes)

    def _check_progress(self, unread_bytes_before: int) -> None:
        self._write_timer = None
        unread_bytes = self.transport.get_write_buffer_size()
        if unread_bytes and unread_bytes_before - unread_bytes < MIN_RESPONSE_PROGRESS_BYTES:
            self.abort()
        elif unread_bytes:
            self._start_write_timer()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
