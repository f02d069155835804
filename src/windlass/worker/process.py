"""Processes that run what users wrote: a group of their own, watched output, a sure end.

Every such process leads its own session, so that ending it ends whatever it forked. A guard, a shell waiting on a
pipe, kills that group when the worker itself dies, even by SIGKILL: an orphan would hold the GPU that its
successor needs. Output is passed on and counted; the last of it is kept for the error message.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import psutil

# Passed on per attempt before the attempt is ended: enough for any log, too little to fill a disk.
MAX_OUTPUT_BYTES = 64 * 1024 * 1024
# Kept of the output for the error message.
TAIL_BYTES = 2_000
READ_CHUNK_BYTES = 1 << 16
# From SIGKILL to the kernel's word that the process is gone. Longer only in uninterruptible I/O.
KILL_TIMEOUT_S = 10.0

Stream = TypeVar("Stream")

_GUARD = 'read -r word || kill -KILL -- "-$1"'


class Group:
    """One running process group."""

    def __init__(self, process: asyncio.subprocess.Process, guard: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._guard = guard
        self._tail = bytearray()
        self._output_bytes = 0
        self._relay: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stdin(self) -> asyncio.StreamWriter:
        return _present(self._process.stdin)

    @property
    def stdout(self) -> asyncio.StreamReader:
        return _present(self._process.stdout)

    @property
    def stderr(self) -> asyncio.StreamReader:
        return _present(self._process.stderr)

    def relay_output(self, stream: asyncio.StreamReader, on_flood: Callable[[], None]) -> None:
        """Pass the output on to our own standard error, and call `on_flood` when an attempt's limit is passed."""
        self._relay = asyncio.create_task(self._pass_on(stream, on_flood))

    def begin_attempt(self) -> None:
        self._output_bytes = 0
        self._tail.clear()

    def tail(self) -> str:
        return self._tail.decode(errors="replace").strip()

    def rss_bytes(self) -> int:
        """Memory of the process and everything it started; 0 once it is gone."""
        total = 0
        with contextlib.suppress(psutil.Error):
            leader = psutil.Process(self.pid)
            total = leader.memory_info().rss
            for descendant in leader.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    total += descendant.memory_info().rss
        return total

    def kill(self) -> None:
        """SIGKILL to the whole group. Safe to repeat, and after the process is gone."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def wait(self) -> int:
        """The exit code of the process, negative for a signal. Output is read to its end, or for a moment more."""
        returncode = await self._process.wait()
        if self._relay is not None:
            # Something it forked may hold the pipe open for ever; the last words have been read long before.
            await asyncio.wait([self._relay], timeout=0.5)
            self._relay.cancel()
        return returncode

    async def end(self) -> None:
        """Kill the group, wait until it is gone, dismiss the guard."""
        self.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), KILL_TIMEOUT_S)
        # The leader is gone; what it forked shares its group and goes too.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._dismiss_guard()

    def _dismiss_guard(self) -> None:
        if self._guard.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._guard.stdin.write(b"done\n")
                self._guard.stdin.close()
            self._guard.wait(KILL_TIMEOUT_S)

    async def _pass_on(self, stream: asyncio.StreamReader, on_flood: Callable[[], None]) -> None:
        while chunk := await stream.read(READ_CHUNK_BYTES):
            self._tail = (self._tail + chunk)[-TAIL_BYTES:]
            self._output_bytes += len(chunk)
            if self._output_bytes <= MAX_OUTPUT_BYTES:
                sys.stderr.buffer.write(chunk)
                sys.stderr.flush()
            else:
                on_flood()


async def start_group(
    command: Sequence[str],
    *,
    pass_fds: Sequence[int] = (),
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    is_piped: bool = False,
) -> Group:
    """Start a process that leads its own session. `is_piped`: stdin and stdout are ours, stderr is its output;
    otherwise both streams are its output."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=subprocess.PIPE if is_piped else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if is_piped else subprocess.STDOUT,
        pass_fds=pass_fds,
        cwd=cwd,
        env=env,
        start_new_session=True,
    )
    guard = subprocess.Popen(  # noqa: ASYNC220 - a fork of a shell, not a wait
        ["/bin/sh", "-c", _GUARD, "windlass-guard", str(process.pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    return Group(process, guard)


def _present(stream: Stream | None) -> Stream:
    if stream is None:
        raise AssertionError("this stream was not asked to be a pipe")
    return stream


def describe_exit(returncode: int) -> str:
    """How a process ended, in words."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
