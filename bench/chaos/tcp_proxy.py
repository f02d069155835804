"""A TCP proxy on loopback whose connections can be cut, delayed and reset, in place of a network that fails.

A cut keeps all bytes and delivers them when it ends, as TCP does after lost packets. Neither side receives an error:
both have to notice by themselves.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

HOST = "127.0.0.1"
READ_BYTES = 1 << 16


class TcpProxy:
    """`target` returns the port that new connections go to."""

    def __init__(self, target: Callable[[], int]) -> None:
        self._target = target
        self._passes = asyncio.Event()
        self._passes.set()
        self._delay_s = 0.0
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        self._passes.clear()

    def delay(self, seconds: float) -> None:
        """Deliver each piece this much later, in both directions."""
        self._delay_s = seconds

    def restore(self) -> None:
        self._delay_s = 0.0
        self._passes.set()

    def reset(self) -> None:
        """Abort all connections."""
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            await self._passes.wait()
            back_reader, back_writer = await asyncio.open_connection(HOST, self._target())
            self._writers.add(back_writer)
            try:
                await asyncio.gather(self._pump(reader, back_writer), self._pump(back_reader, writer))
            finally:
                self._writers.discard(back_writer)
                back_writer.transport.abort()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(READ_BYTES):
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            await self._passes.wait()
            writer.write(data)
            await writer.drain()
        with suppress(OSError):
            writer.write_eof()
