"""How many may be connected, and for how long without asking anything or taking the answer.

Whoever connects may say nothing, or half a request, or never read what was asked for, and needs no token for it. So: a
request's header arrives within seconds and its body within a minute or so, and what was answered is taken, or the
connection is cut; one address gets no more than its share; and where there is no room left, whoever has gone longest
without a whole request makes room for the one who comes. So many connections never use up the files that this process
may open: the database, the machines and the log need some too.
"""

import asyncio
import resource
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
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
# What is raised to, if the system allows as much; beyond this nobody gains, and some programs loop over all of them.
MAX_FILES = 16_384
# What an honest caller sends and takes, at the least: in a second of a body, and in each `answer_s` of an answer.
BODY_BYTES_PER_S = 64 * 1024
TAKEN_BYTES = 64 * 1024
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """For how long a connection may keep us waiting."""

    # From the connection, or from the first byte of a further request, to the end of the header.
    header_s: float = 10.0
    # From there to the end of the body, whether or not anybody reads it, and more while an answer waits for a body that
    # comes at a fair pace: longer than the application itself waits for it, which can say so (guard.BODY_TIMEOUT_S).
    body_s: float = 90.0
    # Until some more is taken of what was sent, when more is there than the system keeps for it.
    answer_s: float = 30.0


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


class ConnectionTracker:
    """Everybody who is connected, and among them, longest first, those of whom no whole request is under way."""

    def __init__(self, limit: int, patience: Timeouts | None = None) -> None:
        self.patience = patience or Timeouts()
        self._limit = limit
        self._limit_of_address = max(1, int(limit * SHARE_OF_ADDRESS))
        self._all: dict[TimedConnection, str] = {}
        self._of_address: Counter[str] = Counter()
        self._without_request: dict[TimedConnection, None] = {}

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

    def add(self, connection: "TimedConnection", address: str) -> None:
        self._all[connection] = address
        self._of_address[address] += 1
        self._without_request[connection] = None

    def remove(self, connection: "TimedConnection") -> None:
        address = self._all.pop(connection, None)
        self._without_request.pop(connection, None)
        if address is not None:
            self._of_address[address] -= 1
            if not self._of_address[address]:
                del self._of_address[address]  # of all addresses there are, few are here

    def note(self, connection: "TimedConnection", *, has_request: bool) -> None:
        if has_request:
            self._without_request.pop(connection, None)
        elif connection in self._all:
            self._without_request.setdefault(connection)


class TimedConnection(H11Protocol):
    """uvicorn's, which waits for a request, and for somebody to read its answer, for ever, and takes whoever comes."""

    def __init__(
        self,
        everybody: ConnectionTracker,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._everybody = everybody
        self._patience = everybody.patience
        # What is being waited for, and after which request.
        self._awaited: tuple[str, object] | None = None
        self._not_arrived: asyncio.TimerHandle | None = None
        self._received_bytes = 0
        self._not_taken: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        if not self._everybody.has_room_for(address):
            transport.abort()
            return
        self._everybody.add(self, address)
        self._await("header", self._patience.header_s, self.cut)

    def connection_lost(self, exc: Exception | None) -> None:
        self._everybody.remove(self)
        self._await_nothing()
        self._stop_expecting_to_be_read()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received_bytes += len(data)
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_to_be_read()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():  # who closes waits for the rest too
            self._stop_expecting_to_be_read()

    def cut(self) -> None:
        """Without waiting until it has read what was sent."""
        self.transport.abort()

    def _look(self) -> None:
        """What is there of a request by now, and what is to be waited for."""
        state = self.conn.their_state
        self._everybody.note(self, has_request=state not in (h11.IDLE, h11.SEND_BODY))
        if self.transport.is_closing():
            self._await_nothing()
            self._expect_to_be_read()
        elif state is h11.SEND_BODY:
            self._await("body", self._patience.body_s, self._check_pace)
        elif state is not h11.IDLE:
            self._await_nothing()
        elif self.cycle is None or self.conn.trailing_data[0]:
            self._await("header", self._patience.header_s, self.cut)
        else:
            # uvicorn counts this too, but not after a body that came later than its answer.
            self._await("request", self.timeout_keep_alive, self._take_leave)

    def _await(self, what: str, wait_s: float, then: Callable[[], None]) -> None:
        # Once for each header and each body: a byte now and then gains no time.
        if self._awaited != (what, self.cycle):
            self._await_nothing()
            self._awaited = (what, self.cycle)
            self._received_bytes = 0
            self._not_arrived = self.loop.call_later(wait_s, then)

    def _await_nothing(self) -> None:
        self._awaited = None
        if self._not_arrived is not None:
            self._not_arrived.cancel()
            self._not_arrived = None

    def _check_pace(self) -> None:
        """The time for a body is over. What came since is worth some more, but not once it was answered: nobody reads
        it then, and nobody says how long it may be."""
        received_bytes, self._received_bytes = self._received_bytes, 0
        if self.cycle.response_complete or received_bytes < BODY_BYTES_PER_S:
            self.cut()
        else:
            self._not_arrived = self.loop.call_later(received_bytes / BODY_BYTES_PER_S, self._check_pace)

    def _take_leave(self) -> None:
        self.transport.close()
        self._expect_to_be_read()

    def _expect_to_be_read(self) -> None:
        if self._not_taken is None:
            left_bytes = self.transport.get_write_buffer_size()
            self._not_taken = self.loop.call_later(self._patience.answer_s, self._check_taken, left_bytes)

    def _check_taken(self, left_bytes_before: int) -> None:
        self._not_taken = None
        left_bytes = self.transport.get_write_buffer_size()
        if left_bytes and left_bytes_before - left_bytes < TAKEN_BYTES:
            self.cut()
        elif left_bytes:
            self._expect_to_be_read()

    def _stop_expecting_to_be_read(self) -> None:
        if self._not_taken is not None:
            self._not_taken.cancel()
            self._not_taken = None
