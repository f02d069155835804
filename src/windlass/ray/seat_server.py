"""Where seats report, from the nodes they were placed on: here I am, how far I have come, what came of it.

TCP, one connection for each of Ray's processes, kept for all its seats; `line.py` has the words. Nothing begins without
an answer, and nothing goes on without a word every PING_INTERVAL_S: a dispatcher that is gone, or cut off, has been
replaced, and whatever it had placed must make room.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable
from functools import partial
from typing import Protocol
from uuid import UUID

import structlog

from windlass.model.task import Claim
from windlass.ray.wire_protocol import MAX_LINE_BYTES, MAX_WORDS_BYTES, PING, orders, read_outcome, size_of
from windlass.worker.executor import Outcome

PING_INTERVAL_S = 2.5
# A process names its seat as soon as it is there. Whoever has not named one of ours after this time is somebody else.
STRANGER_S = 30.0
MAX_STRANGERS = 1000
PIECE_BYTES = 1 << 16
log = structlog.get_logger(__name__)


class SeatCallbacks(Protocol):
    """Who knows the seats: seats.py. Of one it does not know it wants to hear nothing, and has nothing for it."""

    def knows(self, seat_id: str) -> bool: ...

    def loading(self, seat_id: str, node_id: str) -> None:
        """A seat gets ready on this node, which may take long."""

    async def arrive(self, seat_id: str, node_id: str, hang_up: Callable[[], None]) -> Claim | None:
        """A seat has started. Returns what it is to run; None: nothing. `hang_up` ends its process, if it can be
        reached and has not been told to end."""

    async def finish(self, seat_id: str, token: UUID, outcome: Outcome) -> Claim | None:
        """A seat has run it. Returns what it is to run next; None: nothing."""

    def progress(self, seat_id: str, token: UUID, fraction: float, note: str | None) -> None: ...


class SeatServer:
    def __init__(self, desk: SeatCallbacks, max_result_bytes: int) -> None:
        self._desk = desk
        self._max_body_bytes = max(max_result_bytes, MAX_WORDS_BYTES)
        self._server: asyncio.Server | None = None
        self._lines: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._strangers: set[asyncio.StreamWriter] = set()
        self._pinging: asyncio.Task[None] | None = None

    async def open(self, host: str) -> tuple[str, int]:
        """Listen on any free port. Returns where."""
        self._server = await asyncio.start_server(self._accept, host, 0, limit=MAX_LINE_BYTES)
        self._pinging = asyncio.create_task(self._ping())
        port: int = self._server.sockets[0].getsockname()[1]
        return host, port

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._pinging is not None:
            self._pinging.cancel()
        for line in self._lines:
            line.cancel()
        await asyncio.gather(*self._lines, return_exceptions=True)

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            for writer in self._writers:
                writer.write(PING)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = asyncio.current_task()
        if line is not None:
            self._lines.add(line)
            line.add_done_callback(self._lines.discard)
        self._writers.add(writer)
        self._strangers.add(writer)
        over = (ConnectionError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError)
        try:
            with contextlib.suppress(*over):
                if len(self._strangers) <= MAX_STRANGERS:
                    async with asyncio.timeout(STRANGER_S) as patience:
                        await self._serve(reader, writer, patience)
        except (ValueError, KeyError, TypeError) as error:
            log.warning("somebody else called at the gate", error=str(error))
        finally:
            self._writers.discard(writer)
            self._strangers.discard(writer)
            writer.close()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, patience: asyncio.Timeout
    ) -> None:
        # The seat that its process is busy with; once told to end, it may be anybody's.
        busy_with: str | None = None

        def hang_up_on(seat_id: str) -> None:
            if busy_with == seat_id:
                writer.transport.abort()

        while text := await reader.readline():
            said = json.loads(text)
            seat_id = said["seat"]
            if writer in self._strangers and self._desk.knows(seat_id):
                self._strangers.discard(writer)
                patience.reschedule(None)
            body = None
            if (size := size_of(said, self._max_body_bytes)) is not None:
                if writer in self._strangers:
                    await _pass_over(reader, size)
                else:
                    body = await reader.readexactly(size)
            if "loading" in said:
                self._desk.loading(seat_id, said["loading"])
                continue
            if "progress" in said:
                self._desk.progress(seat_id, UUID(said["progress"]), float(said["fraction"]), said["note"])
                continue
            if "done" in said:
                claim = await self._desk.finish(seat_id, UUID(said["done"]), read_outcome(said, body))
            else:
                busy_with = seat_id
                claim = await self._desk.arrive(seat_id, said["node"], partial(hang_up_on, seat_id))
            if claim is None:
                busy_with = None
            writer.write(orders(claim))
            await writer.drain()


async def _pass_over(reader: asyncio.StreamReader, size: int) -> None:
    """As many bytes, without keeping them."""
    while size > 0:
        piece = await reader.read(min(size, PIECE_BYTES))
        if not piece:
            raise asyncio.IncompleteReadError(b"", size)
        size -= len(piece)
