"""Runs handlers in child processes that stay alive between attempts: the default.

The parent never runs user code. A child that dies, exceeds its time, memory or output limit is killed with every
process it forked. The attempt fails with a code for the cause, and the next attempt gets a new child.
"""

import asyncio
import contextlib
import json
import os
import socket
import sys

from windlass.model.error_text import LAST_OUTPUT
from windlass.model.errors import HandlerNotFound
from windlass.model.task import MAX_PAYLOAD_BYTES, Claim
from windlass.model.worker_log import AttemptKey
from windlass.worker import child_protocol as frames
from windlass.worker.crash_report import read_crash
from windlass.worker.executor import AttemptFailure, AttemptSuccess, Outcome, timeout_failure
from windlass.worker.handler import ReportProgress
from windlass.worker.handler_user import HandlerUser
from windlass.worker.process import OUTPUT_TIMEOUT_S, ProcessGroup, describe_exit, start_group

# Importing a large framework and loading a model takes minutes; an import that hangs must still end.
START_TIMEOUT_S = 600.0
# Time between the closed socket and the exit of a dying child. A child that lives longer closed the socket itself.
EXIT_TIMEOUT_S = 1.0
# Most results fit into one read.
READ_BYTES = 1 << 16


class IsolatedExecutor:
    def __init__(
        self,
        handler: str,
        *,
        concurrency: int = 1,
        memory_limit_bytes: int | None = None,
        max_result_bytes: int = MAX_PAYLOAD_BYTES,
        run_as: HandlerUser | None = None,
    ) -> None:
        """`memory_limit_bytes` applies to each child together with its descendants. `run_as`: the children's user."""
        self._children = [_Child(handler, memory_limit_bytes, max_result_bytes, run_as) for _ in range(concurrency)]
        self._free = list(self._children)

    @property
    def child_pids(self) -> list[int]:
        """Process ids of the children that can take an attempt."""
        return [pid for child in self._children if (pid := child.usable_pid) is not None]

    async def start(self) -> None:
        try:
            async with asyncio.TaskGroup() as starting:
                for child in self._children:
                    starting.create_task(child.start())
        except BaseExceptionGroup as errors:
            # All children run the same code, so the first error is enough.
            raise errors.exceptions[0] from None

    async def run(self, claim: Claim, report: ReportProgress) -> Outcome:
        child = self._free.pop()
        try:
            return await child.run(claim, report)
        finally:
            self._free.append(child)

    async def close(self) -> None:
        await asyncio.gather(*(child.close() for child in self._children))


class _Link(asyncio.BufferedProtocol):
    """Splits the bytes from the child into frames. None in the queue: the connection is closed.

    It has its own buffer because asyncio would allocate and free 256 KiB for every read.
    """

    def __init__(self) -> None:
        self.frames: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue()
        self.is_lost = False
        self._read_buffer = bytearray(READ_BYTES)
        self._buffer = bytearray()
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def get_buffer(self, _size_hint: int) -> bytearray:
        return self._read_buffer

    def buffer_updated(self, length: int) -> None:
        self._buffer += self._read_buffer[:length]
        while len(self._buffer) >= frames.HEADER.size:
            length, kind = frames.HEADER.unpack_from(self._buffer)
            end = frames.HEADER.size + length
            if length > frames.MAX_FRAME_BYTES and self._transport is not None:
                self._transport.close()  # not our frame: a handler wrote to the socket
                return
            if len(self._buffer) < end:
                return
            self.frames.put_nowait((kind, bytes(self._buffer[frames.HEADER.size : end])))
            del self._buffer[:end]

    def connection_lost(self, _error: Exception | None) -> None:
        self.is_lost = True
        self.frames.put_nowait(None)


class _Child:
    def __init__(
        self, handler: str, memory_limit_bytes: int | None, max_result_bytes: int, run_as: HandlerUser | None
    ) -> None:
        self._handler = handler
        self._run_as = run_as
        self._memory_limit_bytes = memory_limit_bytes
        self._max_result_bytes = max_result_bytes
        self._group: ProcessGroup | None = None
        self._transport: asyncio.Transport | None = None
        self._link = _Link()

    @property
    def usable_pid(self) -> int | None:
        group = self._group
        return group.pid if group is not None and group.is_usable and not self._link.is_lost else None

    async def start(self) -> None:
        try:
            await self._start_process()
            async with asyncio.timeout(START_TIMEOUT_S):
                first = await self._link.frames.get()
        except TimeoutError:
            await self.close()
            raise HandlerNotFound(
                f"importing handler {self._handler} took over {START_TIMEOUT_S:g} s. Check what its module waits for."
            ) from None
        except OSError as error:
            await self.close()
            raise HandlerNotFound(
                f"cannot start a process for {self._handler}: {error.strerror}. Check the limits of this machine."
            ) from None
        except BaseException:
            await self.close()
            raise
        if first is None or first[0] != frames.READY:
            reason = (
                first[1].decode() if first else f"cannot import handler {self._handler}: {await self._describe_death()}"
            )
            await self.close()
            raise HandlerNotFound(reason)

    async def run(self, claim: Claim, report: ReportProgress) -> Outcome:
        group, transport = await self._ready()
        group.begin_attempt(AttemptKey(claim.task_id, claim.attempt))
        try:
            transport.write(frames.pack(frames.RUN, _encode(claim)))
            async with asyncio.timeout(claim.timeout_s):
                outcome = await self._answer(claim, report)
        except TimeoutError:
            outcome = timeout_failure(claim.timeout_s or 0)
            await self.close()
        except BaseException:
            await self.close()
            raise
        if outcome is None:
            death = (await self._describe_death()).removeprefix("the handler's process was ")
            outcome = group.limit_failure or AttemptFailure("CHILD_DIED", death)
            await self.close()
        else:
            await group.end_attempt()
        return outcome

    async def _ready(self) -> tuple[ProcessGroup, asyncio.Transport]:
        if self.usable_pid is None:
            # It died between attempts, which is not this attempt's fault.
            await self.close()
            await self.start()
        if self._group is None or self._transport is None:
            raise AssertionError("a started child has no process or socket")
        return self._group, self._transport

    async def _answer(self, claim: Claim, report: ReportProgress) -> Outcome | None:
        """None if the child died."""
        while (frame := await self._link.frames.get()) is not None:
            kind, body = frame
            if kind == frames.RESULT:
                return AttemptSuccess(body.decode())
            if kind == frames.FAILED:
                return AttemptFailure(**json.loads(body))
            token, fraction, note = json.loads(body)
            if token == str(claim.token):
                report(fraction, note)
        return None

    async def close(self) -> None:
        transport, self._transport = self._transport, None
        group, self._group = self._group, None
        if transport is not None:
            transport.abort()
        if group is not None:
            await group.end()

    async def _start_process(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "windlass.worker.child", str(theirs.fileno())]
        try:
            with theirs:
                self._group = await start_group(
                    [*command, self._handler, str(self._max_result_bytes)],
                    # A handler's prints appear at once and survive a crash.
                    env={"PYTHONUNBUFFERED": "1", **os.environ},
                    pass_fds=[theirs.fileno()],
                    memory_limit_bytes=self._memory_limit_bytes,
                    run_as=self._run_as,
                )
            loop = asyncio.get_running_loop()
            self._transport, self._link = await loop.create_connection(_Link, sock=ours)
        except BaseException:
            ours.close()
            raise
        # Usually the socket closes first, but not if an escaped descendant holds its other end.
        on_lost = self._link.connection_lost
        self._group.call_on_exit(lambda: loop.call_later(OUTPUT_TIMEOUT_S, on_lost, None))

    async def _describe_death(self) -> str:
        if self._group is None:
            return "the handler's process is gone"
        if self._group.limit_failure is not None:
            return self._group.limit_failure.error
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                returncode = await self._group.wait()
            crash = read_crash(self._group.tail())
            place = f" in {crash.place}" if crash.place is not None else ""
            output = f"{LAST_OUTPUT}\n{crash.output}" if crash.output else ""
            return f"the handler's process {describe_exit(returncode)}{place}{output}"
        return "the handler's process closed its connection to the worker"


def _encode(claim: Claim) -> bytes:
    # The payload is JSON already, and queue names contain no character that JSON escapes.
    return (
        f'{{"id":{claim.task_id},"queue":"{claim.queue}","attempt":{claim.attempt},'
        f'"max_attempts":{claim.max_attempts},"claim_token":"{claim.token}","payload":{claim.payload}}}'
    ).encode()
