"""How many may be connected, and for how long without asking anything.

Whoever connects may say nothing, or half a request, for ever, and needs no token for it. So: a request's header arrives
within seconds or its connection is cut; one address gets no more than its share; and where there is no room left,
whoever has waited longest without a request makes room for the one who comes. So many connections never use up the
files that this process may open: the database, the machines and the log need some too.
"""

import asyncio
import resource
from collections import Counter
from typing import Any

import h11
import structlog
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

# Far beyond a fleet: a worker keeps about two.
MAX_CONNECTIONS = 5_000
# Files for everything else: database connections, workers' processes and their logs.
FILES_KEPT = 512
# Of one address: many workers may share one, so it is a share, and the others keep the rest.
SHARE_OF_ADDRESS = 0.5
# A proxy on this host connects for everybody; who is behind it is not known before the header is read.
PROXIES = ("127.0.0.1", "::1")
# From the connection, or from the first byte of a further request, to the end of the header.
HEADER_TIMEOUT_S = 10.0
# What is raised to, if the system allows as much; beyond this nobody gains, and some programs loop over all of them.
MAX_FILES = 16_384
log = structlog.get_logger(__name__)


def raise_file_limit() -> None:
    """Let this process, and what it starts, open as many files as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def room_for_connections() -> int:
    """As many as may be open at once; at most half of a small limit's files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, soft - FILES_KEPT if soft >= 2 * FILES_KEPT else soft // 2))


class Connections:
    """Everybody who is connected, and among them, longest first, those who have no request under way."""

    def __init__(self, limit: int, header_timeout_s: float = HEADER_TIMEOUT_S) -> None:
        self.header_timeout_s = header_timeout_s
        self._limit = limit
        self._limit_of_address = max(1, int(limit * SHARE_OF_ADDRESS))
        self._all: dict[Connection, str] = {}
        self._of_address: Counter[str] = Counter()
        self._without_request: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self._all)

    def has_room_for(self, address: str) -> bool:
        """After making some, where that can be."""
        if self._of_address[address] >= self._limit_of_address and address not in PROXIES:
            return False
        if len(self._all) < self._limit:
            return True
        longest = next(iter(self._without_request), None)
        if longest is None:
            return False
        self.remove(longest)
        longest.cut()
        return True

    def add(self, connection: "Connection", address: str) -> None:
        self._all[connection] = address
        self._of_address[address] += 1
        self._without_request[connection] = None

    def remove(self, connection: "Connection") -> None:
        address = self._all.pop(connection, None)
        self._without_request.pop(connection, None)
        if address is not None:
            self._of_address -= Counter([address])

    def note(self, connection: "Connection", *, has_request: bool) -> None:
        if has_request:
            self._without_request.pop(connection, None)
        elif connection in self._all:
            self._without_request.setdefault(connection)


class Connection(H11Protocol):
    """uvicorn's, which waits for a header for ever, and takes whoever comes."""

    def __init__(
        self,
        everybody: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._everybody = everybody
        self._cut_later: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        if not self._everybody.has_room_for(address):
            transport.abort()
            return
        self._everybody.add(self, address)
        self._expect_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._everybody.remove(self)
        self._stop_expecting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        has_request = self.conn.their_state is not h11.IDLE
        self._everybody.note(self, has_request=has_request)
        if has_request:
            self._stop_expecting()
        elif not self.transport.is_closing():
            self._expect_header()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._everybody.note(self, has_request=self.conn.their_state is not h11.IDLE)

    def cut(self) -> None:
        """Without waiting until it has read what was sent."""
        self.transport.abort()

    def _expect_header(self) -> None:
        # Once for each header: a byte now and then gains no time.
        if self._cut_later is None:
            self._cut_later = self.loop.call_later(self._everybody.header_timeout_s, self.cut)

    def _stop_expecting(self) -> None:
        if self._cut_later is not None:
            self._cut_later.cancel()
            self._cut_later = None
