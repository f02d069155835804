"""Runs user code in a process group with limits, and kills the whole group at the end.

Each process leads its own session. When it exits or is killed, its descendants are killed too. If the worker dies, even
by SIGKILL, a guard (a shell that waits on a pipe) does the same: an orphan would hold the GPU that the next worker
needs. A descendant escapes only if it made its own session and lost its parent, or, for the guard on systems without
/proc, if it left the process group.

Output is forwarded to our standard error and counted, and memory is measured. A process that exceeds a limit is killed
and `limit_failure` names the cause. The end of the output is kept for error messages.
"""

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import psutil

from windlass.model.worker_log import AttemptKey
from windlass.worker.executor import AttemptFailure
from windlass.worker.handler_user import HandlerUser
from windlass.worker.nonblocking_stderr import standard_error

# Output of one attempt before it is killed: enough for any log, too little to fill a disk.
MAX_OUTPUT_BYTES = 64 * 1024 * 1024
# Kept of the output for the error message: enough for the stacks that a crashing Python process prints.
TAIL_BYTES = 64 * 1024
MEMORY_CHECK_INTERVAL_S = 0.5
# Time for a killed process to disappear. Only uninterruptible I/O takes longer.
KILL_TIMEOUT_S = 10.0
# Time to read the rest of the output after exit. An escaped descendant may hold the pipe open forever.
OUTPUT_TIMEOUT_S = 0.5
# Interval for checking whether the event loop has read an attempt's output: it needs one iteration per 256 KiB.
OUTPUT_READ_INTERVAL_S = 0.001
# Interval for checking whether our standard error can take more output.
OUTPUT_CHECK_INTERVAL_S = 0.02
# Interval for checking whether killed processes are gone: after microseconds, or a second if they had much memory.
EXIT_CHECK_INTERVAL_S = 0.01

_STDIN, _STDOUT = 0, 1
# The guard ignores SIGTERM, which service managers send to all processes of a worker, because the handler may, too.
# It stops each process it finds, so that none can fork or react to another's end during the search, which goes by
# session and by parent. It uses shell builtins only and starts no process. In each of the 20 rounds the process table
# may be in the worst order for one generation, and few process trees have more than five. There is no `--` before the
# group, because Debian's shell takes that for a number and kills nothing.
_GUARD = r"""
trap "" HUP INT TERM
read -r word && exit
leader=$1 family=" $1 " rounds=20
kill -STOP "-$leader"
while [ $rounds -gt 0 ]; do
  rounds=$((rounds - 1)) has_grown=
  for stat in /proc/[0-9]*/stat; do
    read -r line < "$stat" || continue
    pid=${line%% *}
    case $family in *" $pid "*) continue ;; esac
    set -- ${line##*") "}
    parent=$2 session=$4
    case $family in *" $parent "*) ;; *) [ "$session" = "$leader" ] || continue ;; esac
    kill -STOP "$pid"
    family="$family$pid " has_grown=yes
  done
  [ "$has_grown" ] || break
done
kill -KILL "-$leader"
kill -KILL $family
"""


class ProcessGroup(asyncio.SubprocessProtocol):
    """A process and its descendants. asyncio's own Process reports no exit while a pipe is open."""

    def __init__(
        self,
        memory_limit_bytes: int | None,
        max_answer_bytes: int | None,
        limits_output: bool = True,
        *,
        forwards_output: bool = True,
    ) -> None:
        self.returncode: int | None = None
        self.limit_failure: AttemptFailure | None = None
        # Standard output, if it is the answer and not log output.
        self.answer = bytearray()
        # Output of the current attempt.
        self.output_bytes = 0
        self._memory_limit_bytes = memory_limit_bytes
        self._max_answer_bytes = max_answer_bytes
        self._limits_output = limits_output
        self._forwards_output = forwards_output
        self._attempts = 0
        self._attempt: AttemptKey | None = None
        self._tail = bytearray()
        self._on_exit: Callable[[], object] | None = None
        self._exited = asyncio.Event()
        self._closed = asyncio.Event()
        self._transport: asyncio.SubprocessTransport | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._memory_watch: asyncio.Task[None] | None = None

    @property
    def _started(self) -> asyncio.SubprocessTransport:
        if self._transport is None:
            raise AssertionError("use start_group()")
        return self._transport

    @property
    def pid(self) -> int:
        return self._started.get_pid()

    @property
    def is_usable(self) -> bool:
        return self.returncode is None and self.limit_failure is None

    def start_watching(self) -> None:
        """Enforce the memory limit and start the guard."""
        if self.returncode is None:
            self._guard = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD, "windlass-guard", str(self.pid)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            if self._memory_limit_bytes is not None:
                self._memory_watch = asyncio.create_task(self._watch_memory(self._memory_limit_bytes))

    def call_on_exit(self, function: Callable[[], object]) -> None:
        self._on_exit = function
        if self.returncode is not None:
            function()

    def write_all(self, data: bytes) -> None:
        """Write to standard input and close it. The process need not read it."""
        pipe = cast("asyncio.WriteTransport | None", self._started.get_pipe_transport(_STDIN))
        if pipe is not None:
            pipe.write(data)
            pipe.close()

    def begin_attempt(self, attempt: AttemptKey | None = None) -> None:
        """Output from now on belongs to this attempt."""
        self._attempts += 1
        self._attempt = attempt
        self.output_bytes = 0
        self._tail.clear()

    async def end_attempt(self) -> None:
        """Read the output that the attempt has printed, at most for OUTPUT_TIMEOUT_S. Later output is not its own."""
        # A descendant that outlives it may go on printing.
        printed_bytes = self.output_bytes + self._unread_bytes()
        deadline = asyncio.get_running_loop().time() + OUTPUT_TIMEOUT_S
        while self.output_bytes < printed_bytes and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(OUTPUT_READ_INTERVAL_S)
        self._attempt = None

    def _unread_bytes(self) -> int:
        """Printed, and not read yet by the event loop. 0 if unknown."""
        pipe = self._started.get_pipe_transport(_STDOUT)
        file = pipe.get_extra_info("pipe") if pipe is not None else None
        if file is None or file.closed:
            return 0
        length = bytearray(4)
        with contextlib.suppress(OSError, ValueError):
            fcntl.ioctl(file.fileno(), termios.FIONREAD, length)
        return int.from_bytes(length, sys.byteorder)

    def tail(self) -> str:
        """The end of the output of this attempt."""
        return self._tail[-TAIL_BYTES:].decode(errors="replace").strip()

    def kill(self) -> None:
        """Send SIGKILL to the process and its descendants. Safe to repeat, also after the process is gone."""
        if self.returncode is None:
            # Descendants with their own session are found through their parents, so they are listed before the kill.
            # The process itself is killed first: it must not see its children die and answer.
            descendants = _descendants(self.pid)
            self._kill_session()
            for process in descendants:
                with contextlib.suppress(psutil.Error):
                    process.kill()

    async def wait(self) -> int:
        """The exit code, negative for a signal. Waits up to OUTPUT_TIMEOUT_S for the rest of the output."""
        await self._exited.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OUTPUT_TIMEOUT_S):
                await self._closed.wait()
        if self.returncode is None:
            raise AssertionError("exited without a return code")
        return self.returncode

    async def end(self) -> None:
        """Kill the group and wait until it is gone. Completes even if the caller is cancelled."""
        await asyncio.shield(asyncio.create_task(self._end()))

    async def _end(self) -> None:
        self.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await self.wait()
                # Descendants may hold a GPU for a moment longer.
                while self._session():  # noqa: ASYNC110 - only children report their exit
                    await asyncio.sleep(EXIT_CHECK_INTERVAL_S)
        self._stop_watching()
        self._started.close()

    def _stop_watching(self) -> None:
        if self._memory_watch is not None:
            self._memory_watch.cancel()
        if self._guard is not None:
            guard, self._guard = self._guard, None
            guard.kill()
            guard.wait()
            if guard.stdin is not None:
                guard.stdin.close()

    # ---------------------------------------------------------------------------- asyncio.SubprocessProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, not isinstance: transports of uvloop, which Ray installs, have other base classes.
        self._transport = cast("asyncio.SubprocessTransport", transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == _STDOUT and self._max_answer_bytes is not None:
            self.answer += data
            if len(self.answer) > self._max_answer_bytes:
                self._fail("BAD_RESULT", f"the result has more than {self._max_answer_bytes:,} bytes")
        else:
            self._forward(data)
            if self._forwards_output and standard_error.is_behind:
                self._pause_reading(fd)

    def _pause_reading(self, fd: int) -> None:
        """Our standard error is read slower than the process prints: let the process block, as on its own pipe."""
        pipe = cast("asyncio.ReadTransport | None", self._started.get_pipe_transport(fd))
        if pipe is not None and not pipe.is_closing():
            pipe.pause_reading()
            asyncio.get_running_loop().call_later(OUTPUT_CHECK_INTERVAL_S, self._resume_reading, pipe)

    def _resume_reading(self, pipe: asyncio.ReadTransport) -> None:
        if pipe.is_closing():
            return
        if standard_error.is_behind:
            asyncio.get_running_loop().call_later(OUTPUT_CHECK_INTERVAL_S, self._resume_reading, pipe)
        else:
            pipe.resume_reading()

    def process_exited(self) -> None:
        self.returncode = self._started.get_returncode()
        # At once, before its process id can be reused.
        self._kill_session()
        self._stop_watching()
        self._exited.set()
        if self._on_exit is not None:
            self._on_exit()

    def connection_lost(self, _error: Exception | None) -> None:
        self._closed.set()

    # -------------------------------------------------------------------------------------------------- limits

    def _fail(self, code: str, error: str) -> None:
        if self.limit_failure is None:
            self.limit_failure = AttemptFailure(code, error)
            self.kill()

    def _forward(self, data: bytes) -> None:
        self._tail += data
        if len(self._tail) > 2 * TAIL_BYTES:
            del self._tail[:-TAIL_BYTES]
        self.output_bytes += len(data)
        if self._limits_output and self.output_bytes > MAX_OUTPUT_BYTES:
            self._fail("OUTPUT_LIMIT", f"the attempt printed more than {MAX_OUTPUT_BYTES >> 20} MiB")
            return
        if self._forwards_output:
            standard_error.write(data, self._attempt)

    async def _watch_memory(self, limit_bytes: int) -> None:
        while True:
            await asyncio.sleep(MEMORY_CHECK_INTERVAL_S)
            attempt = self._attempts
            used_bytes = await asyncio.to_thread(self._memory_bytes, _rss_bytes)
            if used_bytes > limit_bytes:
                # Forked processes share pages, which the fast figure counts several times. Measure exactly.
                used_bytes = await asyncio.to_thread(self._memory_bytes, _proportional_bytes)
            # An attempt that began meanwhile is not responsible.
            if used_bytes > limit_bytes and attempt == self._attempts:
                error = f"the attempt used {used_bytes >> 20:,} MiB of memory; the limit is {limit_bytes >> 20:,} MiB"
                self._fail("MEMORY_LIMIT", error)

    def _memory_bytes(self, measure: Callable[[psutil.Process], int]) -> int:
        total = 0
        for pid in self._session():
            with contextlib.suppress(psutil.Error):
                total += measure(psutil.Process(pid))
        return total

    def _session(self) -> list[int]:
        """The live processes of the session, found by checking every process of the machine."""
        members = []
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(pid) == self.pid and not _is_zombie(pid):
                    members.append(pid)
        return members

    def _kill_session(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        for pid in self._session():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


async def start_group(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    pass_fds: Sequence[int] = (),
    memory_limit_bytes: int | None = None,
    max_answer_bytes: int | None = None,
    limits_output: bool = True,
    forwards_output: bool = True,
    run_as: HandlerUser | None = None,
) -> ProcessGroup:
    """Start a process that leads its own session, as another user if `run_as` is given. Raises OSError.

    With `max_answer_bytes` it reads standard input and its standard output is the answer; otherwise both are output.
    """
    has_answer = max_answer_bytes is not None
    user: dict[str, Any] = {}
    if run_as is not None:
        user = {"user": run_as.uid, "group": run_as.gid, "extra_groups": run_as.groups}
    _, group = await asyncio.get_running_loop().subprocess_exec(
        lambda: ProcessGroup(
            memory_limit_bytes, max_answer_bytes, limits_output=limits_output, forwards_output=forwards_output
        ),
        *command,
        stdin=subprocess.PIPE if has_answer else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if has_answer else subprocess.STDOUT,
        pass_fds=pass_fds,
        env=env if run_as is None else run_as.environment(env),
        **user,
        start_new_session=True,
    )
    try:
        group.start_watching()
    except OSError:
        await group.end()
        raise
    return group


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def _rss_bytes(process: psutil.Process) -> int:
    return int(process.memory_info().rss)


def _proportional_bytes(process: psutil.Process) -> int:
    memory = process.memory_full_info()
    # Only Linux knows how many processes share a page; elsewhere shared pages are not counted.
    return int(getattr(memory, "pss", memory.uss))


def describe_exit(returncode: int) -> str:
    """How a process ended, for an error message."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
