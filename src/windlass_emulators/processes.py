"""Runs machines as local processes, each in a folder that is its disk, and leaves none behind.

A program leads its own session. It is stopped by SIGTERM and, STOP_GRACE_S later, by SIGKILL to all its descendants.
If the emulator dies, even by SIGKILL, a watchdog kills the program: a shell that waits on a pipe from the emulator. A
program that watches the emulator itself gets that pipe as its standard input. Only a process that created its own
session and lost its parent escapes.

One thread watches all machines. Public methods only change the wanted state or send a signal.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

# Between SIGTERM and SIGKILL. A real machine loses power at once; a drained worker has deregistered before.
STOP_GRACE_S = 3.0
# From SIGKILL to the end of the process. Only uninterruptible I/O takes longer.
KILL_TIMEOUT_S = 10.0
# Interval of checks for ended processes and due restarts: far below any heartbeat timeout.
WATCH_INTERVAL_S = 0.05
# systemd's StartLimitBurst and StartLimitIntervalSec.
MAX_STARTS, START_WINDOW_S = 5, 10.0
# A larger log is emptied, so that a machine cannot fill the disk.
MAX_LOG_BYTES = 8 * 1024 * 1024
LOG_CHECK_INTERVAL_S = 1.0
# Rounds of killing descendants. A program that forks faster than this escapes them.
_MAX_KILL_ROUNDS = 5

# Variables that machines inherit from the emulator: paths of programs and certificates, locale. None of them configures
# Windlass. PYTHONPATH stands for the code that a real machine's bootstrap installs.
_INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "TMPDIR")
# Service managers and terminals signal all processes of the emulator. The watchdog ignores those signals, because the
# machine may ignore them too. There is no `--` before the group: Debian's shell would kill nothing.
_WATCHDOG = 'trap "" HUP INT TERM; read -r word || kill -KILL "-$1"'

MachineId = int | str


@dataclass(frozen=True, slots=True)
class MachineProgram:
    command: Sequence[str]
    directory: Path
    environment: Mapping[str, str]
    restarts_on_success: bool = False
    restarts_on_failure: bool = False
    restart_s: float = 0.0
    # The program ends itself and its descendants when its standard input closes.
    watches_emulator: bool = False
    # File descriptors that the program inherits.
    files: tuple[int, ...] = ()


@dataclass(slots=True)
class EmulatedMachine:
    name: str
    folder: Path
    # The program, or None. Called at every start because the disk may have changed. Raises OSError.
    program: Callable[[], MachineProgram | None]
    current: MachineProgram | None = None
    process: "subprocess.Popen[bytes] | None" = None
    watchdog: "subprocess.Popen[bytes] | None" = None
    is_wanted: bool = False
    # Deadlines on the monotonic clock.
    start_at: float | None = None
    kill_at: float | None = None
    recent_starts: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_STARTS))

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def log(self) -> Path:
        return self.folder / "machine.log"

    def note(self, text: str) -> None:
        with contextlib.suppress(OSError), self.log.open("a") as log:
            log.write(f"windlass-emulator: {text}\n")


class Processes:
    """A context manager. Closing it stops all machines and deletes the folder if it is temporary."""

    def __init__(self, folder: Path | None = None, stop_grace_s: float = STOP_GRACE_S) -> None:
        self._is_temporary = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="windlass-emulator-"))
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._stop_grace_s = stop_grace_s
        self._machines: dict[MachineId, EmulatedMachine] = {}
        # Erased machines whose processes have not ended yet.
        self._erased: list[EmulatedMachine] = []
        self._lock = threading.RLock()
        self._is_closing = threading.Event()
        self._next_log_check = 0.0
        self._watcher = threading.Thread(target=self._watch, name="windlass-machines", daemon=True)
        self._watcher.start()

    # ------------------------------------------------------------------------------------------------ MachineHost

    def stop(self, machine_id: MachineId, *, is_sudden: bool = False) -> None:
        with self._lock:
            if machine := self._machines.get(machine_id):
                self._stop(machine, 0.0 if is_sudden else self._stop_grace_s)

    def erase(self, machine_id: MachineId) -> None:
        with self._lock:
            machine = self._machines.pop(machine_id, None)
            if machine is None:
                return
            self._stop(machine, self._stop_grace_s)
            self._erased.append(machine)
            self._clear_erased()

    def is_running(self, machine_id: MachineId) -> bool:
        with self._lock:
            machine = self._machines.get(machine_id)
            return machine is not None and machine.process is not None and not _has_ended(machine.process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._is_closing.set()
        self._watcher.join()
        with self._lock:
            machines = [*self._machines.values(), *self._erased]
            for machine in machines:
                self._stop(machine, self._stop_grace_s)
            for machine in machines:
                self._wait_gone(machine)
            self._machines.clear()
            self._erased.clear()
        if self._is_temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    # --------------------------------------------------------------------------------------------- for subclasses

    def _prepare(self, machine_id: MachineId, name: str) -> EmulatedMachine:
        """Create a machine with an empty disk. It does not run."""
        folder = self.folder / str(machine_id)
        for erased in [each for each in self._erased if each.folder == folder]:
            self._kill(erased)
            self._wait_gone(erased)
            self._erased.remove(erased)
        # With --dir, a machine of an earlier emulator may have had the same id.
        shutil.rmtree(folder, ignore_errors=True)
        machine = EmulatedMachine(name, folder, lambda: None)
        machine.root.mkdir(mode=0o700, parents=True)
        self._machines[machine_id] = machine
        return machine

    def _start(self, machine: EmulatedMachine) -> None:
        if machine.is_wanted:
            return
        self._kill_now(machine)
        machine.is_wanted = True
        machine.recent_starts.clear()
        self._spawn(machine)

    def _kill_now(self, machine: EmulatedMachine) -> None:
        """Kill a program that is still stopping, so that a machine that is switched on again was off before."""
        if machine.process is not None:
            self._kill(machine)
            self._wait_gone(machine)

    # ---------------------------------------------------------------------------------------------- processes

    def _spawn(self, machine: EmulatedMachine) -> None:
        machine.start_at = None
        now = time.monotonic()
        starts = machine.recent_starts
        if len(starts) == MAX_STARTS and now - starts[0] < START_WINDOW_S:
            machine.note(f"start limit reached: {MAX_STARTS} starts in {START_WINDOW_S:g} s")
            return
        try:
            machine.current = machine.program()
            if machine.current is None:
                return
            starts.append(now)
            with machine.log.open("ab") as log:
                machine.process = _start_process(machine.current, log.fileno())
            if not machine.current.watches_emulator:
                machine.watchdog = _start_watchdog(machine.process.pid)
        except OSError as error:
            what = machine.current.command[0] if machine.current else "its program"
            machine.note(f"cannot start {what} ({error})")
            if machine.process is not None:
                self._kill(machine)

    def _stop(self, machine: EmulatedMachine, grace_s: float) -> None:
        machine.is_wanted = False
        machine.start_at = None
        if machine.process is None:
            return
        if grace_s <= 0:
            self._kill(machine)
        elif machine.kill_at is None:
            machine.kill_at = time.monotonic() + grace_s
            _signal_group(machine.process, signal.SIGTERM)

    def _kill(self, machine: EmulatedMachine) -> None:
        process = machine.process
        if process is None:
            return
        # A machine that loses power stops as a whole: no process in it may notice and report that another one ended.
        _signal_group(process, signal.SIGSTOP)
        # Descendants first: while the leader lives, it adopts orphans if it is a subreaper.
        for _ in range(_MAX_KILL_ROUNDS):
            descendants = _descendants(process.pid)
            for descendant in descendants:
                with contextlib.suppress(psutil.Error):
                    descendant.kill()
            if not descendants:
                break
        _signal_group(process, signal.SIGKILL)

    def _wait_gone(self, machine: EmulatedMachine) -> None:
        """Wait for the end of the process, through its grace period, at most until the kill timeout."""
        deadline = time.monotonic() + self._stop_grace_s + KILL_TIMEOUT_S
        while machine.process is not None and time.monotonic() < deadline:
            self._check(machine)
            if machine.process is not None:
                time.sleep(WATCH_INTERVAL_S / 5)

    # ----------------------------------------------------------------------------------------------- watching

    def _watch(self) -> None:
        while not self._is_closing.wait(WATCH_INTERVAL_S):
            with self._lock:
                for machine in (*self._machines.values(), *self._erased):
                    self._check(machine)
                self._clear_erased()
                if time.monotonic() >= self._next_log_check:
                    self._next_log_check = time.monotonic() + LOG_CHECK_INTERVAL_S
                    self._empty_large_logs()

    def _check(self, machine: EmulatedMachine) -> None:
        now = time.monotonic()
        if machine.process is not None and _has_ended(machine.process):
            self._reap(machine)
        elif machine.kill_at is not None and now >= machine.kill_at:
            self._kill(machine)
        if machine.start_at is not None and now >= machine.start_at:
            self._spawn(machine)

    def _reap(self, machine: EmulatedMachine) -> None:
        process, program = machine.process, machine.current
        if process is None or program is None:
            return
        # Kill the rest of its process group before the pid can be reused.
        _signal_group(process, signal.SIGKILL)
        returncode = process.wait()
        _stop_watchdog(machine.watchdog)
        if process.stdin is not None:
            process.stdin.close()
        machine.process = machine.watchdog = machine.kill_at = None
        if machine.is_wanted:
            machine.note(f"{program.command[0]} ended with {returncode}")
            if program.restarts_on_success if returncode == 0 else program.restarts_on_failure:
                machine.start_at = time.monotonic() + program.restart_s

    def _clear_erased(self) -> None:
        for machine in [each for each in self._erased if each.process is None]:
            # The log is kept for diagnosis.
            shutil.rmtree(machine.root, ignore_errors=True)
            self._erased.remove(machine)

    def _empty_large_logs(self) -> None:
        for machine in self._machines.values():
            with contextlib.suppress(OSError):
                # All writers append, so the file can be emptied while they write.
                if machine.log.stat().st_size > MAX_LOG_BYTES:
                    os.truncate(machine.log, 0)


def bare_environment(root: Path) -> dict[str, str]:
    """The environment of every machine. It has no database address or token of the emulator: a worker that works here
    must not depend on them."""
    environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    # If the emulator runs from a checkout, its machines run the same code.
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in dict.fromkeys(paths) if path)
    environment["HOME"] = str(root / "root")
    return environment


def _start_process(program: MachineProgram, output: int) -> "subprocess.Popen[bytes]":
    program.directory.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        list(program.command),
        cwd=program.directory,
        env=dict(program.environment),
        stdin=subprocess.PIPE if program.watches_emulator else subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        pass_fds=program.files,
    )


def _start_watchdog(pid: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        ["/bin/sh", "-c", _WATCHDOG, "windlass-watchdog", str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _stop_watchdog(watchdog: "subprocess.Popen[bytes] | None") -> None:
    if watchdog is not None:
        # Killed before its pipe closes: otherwise it would kill a process group whose id may have been reused.
        watchdog.kill()
        watchdog.wait()
        if watchdog.stdin is not None:
            watchdog.stdin.close()


def _has_ended(process: "subprocess.Popen[bytes]") -> bool:
    """Without reaping the process, so that its pid is not reused."""
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:
        return True


def _signal_group(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    # The process has not been reaped, so this pid is still its own.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return [each for each in psutil.Process(pid).children(recursive=True) if each.status() != psutil.STATUS_ZOMBIE]
    except psutil.Error:
        return []
