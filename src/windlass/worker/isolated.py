"""Handlers in warm child processes: the default.

The parent never runs user code. A child that dies, hangs past its time limit, eats too much memory or floods its output
is ended with everything it forked; the attempt fails with a code that says so, and the next attempt gets a new child.
"""

import asyncio
import contextlib
import json
import os
import socket
import sys
from uuid import UUID

from windlass.model.errors import HandlerNotFound, WindlassError
from windlass.model.task import MAX_PAYLOAD_BYTES, Claim
from windlass.worker import frames
from windlass.worker.executor import Abandoned, Failure, Outcome, ReportProgress, Success, time_limit_failure
from windlass.worker.process import MAX_OUTPUT_BYTES, Group, describe_exit, start_group

# Importing a large framework and its model takes minutes; hanging at import must still end.
START_TIMEOUT_S = 600.0
MEMORY_CHECK_INTERVAL_S = 0.5


class IsolatedExecutor:
    def __init__(
        self,
        handler: str,
        *,
        concurrency: int = 1,
        memory_limit_bytes: int | None = None,
        max_result_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> None:
        """`memory_limit_bytes` is for each child with everything it started."""
        self._command = (handler, str(max_result_bytes))
        self._memory_limit_bytes = memory_limit_bytes
        self._children = [_Child(self._command) for _ in range(concurrency)]
        self._free = list(self._children)
        self._memory_watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await asyncio.gather(*(child.start() for child in self._children))
        if self._memory_limit_bytes is not None:
            self._memory_watch = asyncio.create_task(self._watch_memory(self._memory_limit_bytes))

    async def run(self, claim: Claim, report: ReportProgress) -> Outcome:
        child = self._free.pop()
        try:
            return await child.run(claim, report)
        finally:
            self._free.append(child)

    def abort(self, token: UUID, reason: str) -> None:
        for child in self._children:
            if child.token == token:
                child.end_attempt(Abandoned(reason))

    async def close(self) -> None:
        if self._memory_watch is not None:
            self._memory_watch.cancel()
        await asyncio.gather(*(child.close() for child in self._children))

    async def _watch_memory(self, limit_bytes: int) -> None:
        while True:
            await asyncio.sleep(MEMORY_CHECK_INTERVAL_S)
            for child in self._children:
                if child.token is not None and (used := await asyncio.to_thread(child.rss_bytes)) > limit_bytes:
                    child.end_attempt(
                        Failure(
                            "MEMORY_LIMIT",
                            f"the handler used {used >> 20:,} MiB of memory and {limit_bytes >> 20:,} MiB are allowed",
                        )
                    )


class _Link(asyncio.Protocol):
    """Cuts what arrives from the child into frames."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue()
        self.is_lost = False
        self._buffer = bytearray()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= frames.HEADER.size:
            length, kind = frames.HEADER.unpack_from(self._buffer)
            end = frames.HEADER.size + length
            if len(self._buffer) < end:
                return
            self.frames.put_nowait((kind, bytes(self._buffer[frames.HEADER.size : end])))
            del self._buffer[:end]

    def connection_lost(self, _error: Exception | None) -> None:
        self.is_lost = True
        self.frames.put_nowait(None)


class _Child:
    def __init__(self, arguments: tuple[str, str]) -> None:
        self._arguments = arguments
        self._group: Group | None = None
        self._transport: asyncio.Transport | None = None
        self._link = _Link()
        self._verdict: Outcome | None = None
        self.token: UUID | None = None

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "windlass.worker.child", str(theirs.fileno()), *self._arguments]
            self._group = await start_group(command, pass_fds=[theirs.fileno()], env=_child_environment())
        self._group.relay_output(self._group.stdout, self._on_flood)
        loop = asyncio.get_running_loop()
        self._transport, self._link = await loop.create_connection(_Link, sock=ours)
        try:
            first = await asyncio.wait_for(self._link.frames.get(), START_TIMEOUT_S)
        except TimeoutError:
            await self.close()
            raise HandlerNotFound(
                f"{self._arguments[0]} was still being imported after {START_TIMEOUT_S:g} s: what does it wait for?"
            ) from None
        if first is None or first[0] != frames.READY:
            how = first[1].decode() if first is not None else await self._describe_death()
            await self.close()
            raise HandlerNotFound(how)

    async def run(self, claim: Claim, report: ReportProgress) -> Outcome:
        if self._link.is_lost:
            # It died while it had nothing to do: not this attempt's fault.
            await self.close()
        if self._group is None:
            try:
                await self.start()
            except WindlassError as error:
                return Failure("HANDLER_NOT_FOUND", str(error))
        if self._group is None or self._transport is None:
            raise AssertionError("a started child has a process and a socket")
        self.token, self._verdict = claim.token, None
        self._group.begin_attempt()
        try:
            self._transport.write(frames.pack(frames.RUN, _describe(claim)))
            async with asyncio.timeout(claim.timeout_s):
                outcome = await self._answer(report)
        except TimeoutError:
            outcome = time_limit_failure(claim.timeout_s or 0)
            await self.close()
        finally:
            self.token = None
        if self._verdict is not None:
            # It was killed, perhaps in the moment of its answer: the next attempt needs a new one either way.
            await self.close()
        return outcome

    async def _answer(self, report: ReportProgress) -> Outcome:
        while (frame := await self._link.frames.get()) is not None:
            kind, body = frame
            if kind == frames.PROGRESS:
                report(*json.loads(body))
            elif kind == frames.RESULT:
                return Success(body.decode())
            else:
                return Failure(**json.loads(body))
        # The child is gone: by our hand, then the verdict says why, or by its own.
        died = await self._describe_death()
        await self.close()
        return self._verdict or Failure("CHILD_DIED", died)

    def end_attempt(self, verdict: Outcome) -> None:
        """Kill the child in the middle of its attempt; the attempt ends with this verdict."""
        if self._group is not None and self._verdict is None:
            self._verdict = verdict
            self._group.kill()

    def rss_bytes(self) -> int:
        return self._group.rss_bytes() if self._group is not None else 0

    async def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        if self._group is not None:
            group, self._group = self._group, None
            await group.end()

    def _on_flood(self) -> None:
        self.end_attempt(
            Failure("OUTPUT_LIMIT", f"the handler printed more than {MAX_OUTPUT_BYTES >> 20} MiB in one attempt")
        )

    async def _describe_death(self) -> str:
        if self._group is None:
            return "the handler's process is gone"
        # The socket closes before the process has ended; a handler may also have closed it and live on.
        with contextlib.suppress(TimeoutError):
            returncode = await asyncio.wait_for(self._group.wait(), 1.0)
            tail = self._group.tail()
            return f"the handler's process {describe_exit(returncode)}" + (
                f"; it printed last:\n{tail}" if tail else ""
            )
        return "the handler's process closed its connection to the worker"


def _child_environment() -> dict[str, str]:
    # What a handler prints should be seen when it is printed, and survive a crash.
    return {"PYTHONUNBUFFERED": "1", **os.environ}


def _describe(claim: Claim) -> bytes:
    header = json.dumps(
        {
            "id": claim.task_id,
            "queue": claim.queue,
            "attempt": claim.attempt,
            "max_attempts": claim.max_attempts,
            "claim_token": str(claim.token),
        }
    )
    # The payload is JSON already; parsing it here only to print it again would be work for nothing.
    return f'{header[:-1]},"payload":{claim.payload}}}'.encode()
