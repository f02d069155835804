"""Where an attempt reports, from the node it was placed on: may it begin, and how far has it come.

Lines of JSON over TCP, one connection for each of Ray's processes, kept for all its attempts. A line names the claim
token, which nobody else can know. Nothing begins without an answer, and nothing goes on without a word every
PING_INTERVAL_S: a dispatcher that is gone, or cut off, has been replaced, and whatever it had placed must make room.

    -> {"start": token, "node": node id}      <- {"go": true} | {"go": false}
    -> {"progress": token, "fraction": 0.5, "note": null}
                                              <- {"ping": true}
"""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from uuid import UUID

import structlog

PING_INTERVAL_S = 2.5
# A note has at most 500 characters, each escaped to at most twelve.
MAX_LINE_BYTES = 1 << 14

MayStart = Callable[[UUID, str], Awaitable[bool]]
OnProgress = Callable[[UUID, float, str | None], None]
log = structlog.get_logger(__name__)


class Gate:
    """`may_start` is asked with the token and the node; `on_progress` is told."""

    def __init__(self, may_start: MayStart, on_progress: OnProgress) -> None:
        self._may_start = may_start
        self._on_progress = on_progress
        self._server: asyncio.Server | None = None
        self._lines: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
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
                writer.write(b'{"ping":true}\n')

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = asyncio.current_task()
        if line is not None:
            self._lines.add(line)
            line.add_done_callback(self._lines.discard)
        self._writers.add(writer)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._serve(reader, writer)
        except (ValueError, KeyError, TypeError) as error:
            log.warning("somebody else called at the gate", error=str(error))
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while text := await reader.readline():
            said = json.loads(text)
            if "start" in said:
                may_go = await self._may_start(UUID(said["start"]), said["node"])
                writer.write(b'{"go":true}\n' if may_go else b'{"go":false}\n')
                await writer.drain()
            else:
                self._on_progress(UUID(said["progress"]), float(said["fraction"]), said["note"])
