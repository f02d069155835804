"""Processes that run what users wrote: a group of their own, limits that are kept, a sure end.

Every such process leads its own session. When it ends or is ended, whatever it forked ends with it. A guard, a shell
waiting on a pipe, does the same when the worker itself dies, even by SIGKILL: an orphan would hold the GPU that its
successor needs. Out of reach is only what made a session of its own and has lost its parent; and, for the guard where
there is no /proc, whatever left the process group.

Output is passed on to our standard error, as far as somebody reads that, and counted; memory is measured. A process
that takes too much of either is ended, and `breach` says why. The last of the output is kept for the error message.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import psutil

from windlass.worker.executor import AttemptFailure
from windlass.worker.nonblocking_stderr import standard_error

# Passed on per attempt before the attempt is ended: enough for any log, too little to fill a disk.
MAX_OUTPUT_BYTES = 64 * 1024 * 1024
# Kept of the output for the error message.
TAIL_BYTES = 2_000
MEMORY_CHECK_INTERVAL_S = 0.5
# From SIGKILL to the kernel's word that the process is gone. Longer only in uninterruptible I/O.
KILL_TIMEOUT_S = 10.0
# Something that escaped may hold a pipe open for ever; the last words are read long before.
LAST_WORDS_TIMEOUT_S = 0.5
# Between two looks whether killed processes are gone, which takes them microseconds, or a second with much memory.
OUTPUT_CHECK_INTERVAL_S = 0.02
GONE_CHECK_INTERVAL_S = 0.01

_STDIN, _STDOUT = 0, 1
# Service managers send SIGTERM to all processes of a worker. The guard must outlast that: the handler may.
# Stopped, none of them forks, or collects or answers for another's end, while the others are looked for in the process
# table: by session, and by parent. That is written with what a shell has itself, so that nothing is started for it.
# Twenty rounds: in each the table may be in the worst order for one generation, and few families have more than five.
# Without `--` before the group: Debian's shell takes that for a number and kills nothing.
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
    """One process with all it forked. asyncio's own Process does not say that it has exited while a pipe is open."""

    def __init__(
        self,
        memory_limit_bytes: int | None,
        max_answer_bytes: int | None,
        max_output_bytes: float | None = None,
        *,
        is_passed_on: bool = True,
    ) -> None:
        self.returncode: int | None = None
        self.breach: AttemptFailure | None = None
        # Standard output, where it is an answer and not for people.
        self.answer = bytearray()
        self._memory_limit_bytes = memory_limit_bytes
        self._max_answer_bytes = max_answer_bytes
        self._max_output_bytes = MAX_OUTPUT_BYTES if max_output_bytes is None else max_output_bytes
        self._is_passed_on = is_passed_on
        self._attempts = 0
        self._tail = b""
        self._output_bytes = 0
        self._on_exit: Callable[[], object] | None = None
        self._exited = asyncio.Event()
        self._closed = asyncio.Event()
        self._transport: asyncio.SubprocessTransport | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._memory_watch: asyncio.Task[None] | None = None

    @property
    def _started(self) -> asyncio.SubprocessTransport:
        if self._transport is None:
            raise AssertionError("only start_group() makes one, and it starts it")
        return self._transport

    @property
    def pid(self) -> int:
        return self._started.get_pid()

    @property
    def is_usable(self) -> bool:
        return self.returncode is None and self.breach is None

    def watch_over(self) -> None:
        """From now on it keeps its limits and does not survive us."""
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
        """Write to standard input and close it. A process need not read it."""
        pipe = cast("asyncio.WriteTransport | None", self._started.get_pipe_transport(_STDIN))
        if pipe is not None:
            pipe.write(data)
            pipe.close()

    def begin_attempt(self) -> None:
        self._attempts += 1
        self._output_bytes = 0
        self._tail = b""

    def tail(self) -> str:
        return self._tail.decode(errors="replace").strip()

    def kill(self) -> None:
        """SIGKILL to everything. Safe to repeat, and after the process is gone."""
        if self.returncode is None:
            # Those that made a session of their own are found by their descent, as long as their parents live. But the
            # first to die is the process itself: it should not see its own die, and answer for that.
            descendants = _descendants(self.pid)
            self._kill_session()
            for process in descendants:
                with contextlib.suppress(psutil.Error):
                    process.kill()

    async def wait(self) -> int:
        """The exit code of the process, negative for a signal. Output is read to its end, or for a moment more."""
        await self._exited.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_TIMEOUT_S):
                await self._closed.wait()
        if self.returncode is None:
            raise AssertionError("it has exited")
        return self.returncode

    async def end(self) -> None:
        """Kill it and wait until it is gone. Happens to its end even if the caller is cancelled."""
        await asyncio.shield(asyncio.create_task(self._end()))

    async def _end(self) -> None:
        self.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await self.wait()
                # What it forked may hold a GPU for a moment longer.
                while self._session():  # noqa: ASYNC110 - nobody tells of processes that are not our children
                    await asyncio.sleep(GONE_CHECK_INTERVAL_S)
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

    # --------------------------------------------------------------------------------------- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # By its role, not by its class: those of another event loop (uvloop, which Ray installs) have other ancestors.
        self._transport = cast("asyncio.SubprocessTransport", transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == _STDOUT and self._max_answer_bytes is not None:
            self.answer += data
            if len(self.answer) > self._max_answer_bytes:
                self._end_for("BAD_RESULT", f"the result has more than {self._max_answer_bytes:,} bytes")
        else:
            self._pass_on(data)
            if self._is_passed_on and standard_error.is_behind:
                self._hold_back(fd)

    def _hold_back(self, fd: int) -> None:
        """It prints faster than our own output is read: it waits, as it would if it had that for itself."""
        pipe = cast("asyncio.ReadTransport | None", self._started.get_pipe_transport(fd))
        if pipe is not None and not pipe.is_closing():
            pipe.pause_reading()
            asyncio.get_running_loop().call_later(OUTPUT_CHECK_INTERVAL_S, self._go_on, pipe)

    def _go_on(self, pipe: asyncio.ReadTransport) -> None:
        if pipe.is_closing():
            return
        if standard_error.is_behind:
            asyncio.get_running_loop().call_later(OUTPUT_CHECK_INTERVAL_S, self._go_on, pipe)
        else:
            pipe.resume_reading()

    def process_exited(self) -> None:
        self.returncode = self._started.get_returncode()
        # At once, while its number cannot have become somebody else's.
        self._kill_session()
        self._stop_watching()
        self._exited.set()
        if self._on_exit is not None:
            self._on_exit()

    def connection_lost(self, _error: Exception | None) -> None:
        self._closed.set()

    # -------------------------------------------------------------------------------------------------- limits

    def _end_for(self, code: str, error: str) -> None:
        if self.breach is None:
            self.breach = AttemptFailure(code, error)
            self.kill()

    def _pass_on(self, data: bytes) -> None:
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        self._output_bytes += len(data)
        if self._output_bytes > self._max_output_bytes:
            self._end_for("OUTPUT_LIMIT", f"more than {MAX_OUTPUT_BYTES >> 20} MiB were printed in one attempt")
            return
        if self._is_passed_on:
            standard_error.write(data)

    async def _watch_memory(self, limit_bytes: int) -> None:
        while True:
            await asyncio.sleep(MEMORY_CHECK_INTERVAL_S)
            attempt = self._attempts
            used_bytes = await asyncio.to_thread(self._memory_bytes, _rss_bytes)
            if used_bytes > limit_bytes:
                # Forked processes share pages, and each counts all of them: now look closer, which takes longer.
                used_bytes = await asyncio.to_thread(self._memory_bytes, _fair_share_bytes)
            # An attempt that has just begun does not answer for the one before it.
            if used_bytes > limit_bytes and attempt == self._attempts:
                error = f"{used_bytes >> 20:,} MiB of memory were used and {limit_bytes >> 20:,} MiB are allowed"
                self._end_for("MEMORY_LIMIT", error)

    def _memory_bytes(self, measure: Callable[[psutil.Process], int]) -> int:
        total = 0
        for pid in self._session():
            with contextlib.suppress(psutil.Error):
                total += measure(psutil.Process(pid))
        return total

    def _session(self) -> list[int]:
        """All its living processes, whoever is their parent by now: a quick look at each process of the machine."""
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
    max_output_bytes: float | None = None,
    is_passed_on: bool = True,
) -> ProcessGroup:
    """Start a process that leads its own session. With `max_answer_bytes` its standard output is its answer and it
    reads standard input; otherwise both its streams are output. Raises OSError."""
    has_answer = max_answer_bytes is not None
    _, group = await asyncio.get_running_loop().subprocess_exec(
        lambda: ProcessGroup(memory_limit_bytes, max_answer_bytes, max_output_bytes, is_passed_on=is_passed_on),
        *command,
        stdin=subprocess.PIPE if has_answer else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if has_answer else subprocess.STDOUT,
        pass_fds=pass_fds,
        env=env,
        start_new_session=True,
    )
    try:
        group.watch_over()
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


def _fair_share_bytes(process: psutil.Process) -> int:
    memory = process.memory_full_info()
    # Only Linux knows how many share a page; elsewhere those that are shared are left out.
    return int(getattr(memory, "pss", memory.uss))


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
