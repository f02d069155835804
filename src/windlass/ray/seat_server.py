"""TCP server of a dispatcher, to which seats connect from their nodes.

Each of Ray's processes has one connection for all its seats; wire_protocol.py has the messages. A seat starts nothing
without an answer, and exits if it gets no message for a while: so the server pings every PING_INTERVAL_S. A dispatcher
that is gone or cut off has been replaced, and its seats must free their resources.
"""

import asyncio
import contextlib
import json
from functools import partial
from uuid import UUID

import structlog

from windlass.ray.seat_pool import SeatPool
from windlass.ray.wire_protocol import (
    MAX_ERROR_BYTES,
    MAX_HEADER_BYTES,
    MAX_OUTPUT_BYTES,
    PING,
    body_size,
    decode_outcome,
    encode_run,
)

PING_INTERVAL_S = 2.5
# A connection is unidentified until it names a seat of this dispatcher, which seats do at once.
UNIDENTIFIED_TIMEOUT_S = 30.0
MAX_UNIDENTIFIED = 1000
SKIP_CHUNK_BYTES = 1 << 16
log = structlog.get_logger(__name__)


class SeatServer:
    def __init__(self, pool: SeatPool, max_result_bytes: int) -> None:
        self._pool = pool
        self._max_body_bytes = max(max_result_bytes, MAX_ERROR_BYTES)
        self._server: asyncio.Server | None = None
        self._pinging: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._unidentified: set[asyncio.StreamWriter] = set()

    async def open(self, host: str) -> tuple[str, int]:
        """Listen on a free port. Returns the address."""
        self._server = await asyncio.start_server(self._accept, host, 0, limit=MAX_HEADER_BYTES)
        self._pinging = asyncio.create_task(self._ping())
        port: int = self._server.sockets[0].getsockname()[1]
        return host, port

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._pinging is not None:
            self._pinging.cancel()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            for writer in self._writers:
                writer.write(PING)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        if connection is not None:
            self._connections.add(connection)
            connection.add_done_callback(self._connections.discard)
        self._writers.add(writer)
        self._unidentified.add(writer)
        closed = (ConnectionError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError)
        try:
            with contextlib.suppress(*closed):
                if len(self._unidentified) <= MAX_UNIDENTIFIED:
                    async with asyncio.timeout(UNIDENTIFIED_TIMEOUT_S) as timeout:
                        await self._serve(reader, writer, timeout)
        except (ValueError, KeyError, TypeError) as error:
            log.warning("reject connection", peer=writer.get_extra_info("peername"), error=str(error))
        finally:
            self._writers.discard(writer)
            self._unidentified.discard(writer)
            writer.close()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout: asyncio.Timeout
    ) -> None:
        # The seat that the process runs. None once the seat has to exit: the next one may be another dispatcher's.
        current_seat: str | None = None

        def disconnect(seat_id: str) -> None:
            if current_seat == seat_id:
                writer.transport.abort()

        while line := await reader.readline():
            header = json.loads(line)
            seat_id = header["seat"]
            if writer in self._unidentified and self._pool.has_seat(seat_id):
                self._unidentified.discard(writer)
                timeout.reschedule(None)
            body = None
            max_bytes = MAX_OUTPUT_BYTES if "output" in header else self._max_body_bytes
            if (size := body_size(header, max_bytes)) is not None:
                if writer in self._unidentified:
                    await _skip(reader, size)
                else:
                    body = await reader.readexactly(size)
            if "loading" in header:
                self._pool.on_loading(seat_id, header["loading"])
                continue
            if "progress" in header:
                token = UUID(header["progress"])
                self._pool.on_progress(seat_id, token, float(header["fraction"]), header["note"])
                continue
            if "output" in header:
                self._pool.on_output(seat_id, UUID(header["output"]), body or b"", int(header["dropped"]))
                continue
            if "finished" in header:
                token = UUID(header["finished"])
                claim = await self._pool.on_finished(seat_id, token, decode_outcome(header, body))
            else:
                current_seat = seat_id
                claim = await self._pool.on_started(seat_id, header["started"], partial(disconnect, seat_id))
            if claim is None:
                current_seat = None
            writer.write(encode_run(claim))
            await writer.drain()


async def _skip(reader: asyncio.StreamReader, size: int) -> None:
    """Read a body without keeping it in memory."""
    while size > 0:
        chunk = await reader.read(min(size, SKIP_CHUNK_BYTES))
        if not chunk:
            raise asyncio.IncompleteReadError(b"", size)
        size -= len(chunk)
