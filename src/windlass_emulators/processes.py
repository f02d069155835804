"""Machines as real processes of this host, each in a folder that is its disk: started, watched, and never left behind.

A program leads its own session. It is ended by SIGTERM and, STOP_GRACE_S later, by SIGKILL to everything it started.
When the emulator dies, even by SIGKILL, a guard, a shell waiting on a pipe, kills it; a program that guards itself gets
that pipe as its standard input instead. Out of reach is only what made a session of its own and has lost its parent.

One thread watches all machines; every public call only changes what is wanted, or sends a signal.
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

# Between the word and the deed. A real machine is cut off at once; a worker should have said good-bye long before.
STOP_GRACE_S = 3.0
# From SIGKILL to the kernel's word that the process is gone. Longer only in uninterruptible I/O.
KILL_TIMEOUT_S = 10.0
# How soon an end or a due restart is noticed: much sooner than any worker is missed.
WATCH_INTERVAL_S = 0.05
# systemd's StartLimitBurst and StartLimitIntervalSec.
MAX_STARTS, START_WINDOW_S = 5, 10.0
# Some ten thousand lines; then the log begins anew, so that a chatty machine cannot fill the disk.
MAX_LOG_BYTES = 8 * 1024 * 1024
LOG_CHECK_INTERVAL_S = 1.0
# Whoever forks faster than this is not stopped by looking for its children.
_MAX_KILL_ROUNDS = 5

# Taken over from the emulator: where programs and certificates are and how text is written, nothing that means
# something to Windlass. PYTHONPATH stands for the code that a real machine's bootstrap installs.
_INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "TMPDIR")
# Service managers and terminals signal all of an emulator's processes. The guard must outlast that: the machine may.
# Without `--` before the group: Debian's shell takes that for a number and kills nothing.
_GUARD = 'trap "" HUP INT TERM; read -r word || kill -KILL "-$1"'

MachineId = int | str


@dataclass(frozen=True, slots=True)
class MachineProgram:
    command: Sequence[str]
    directory: Path
    environment: Mapping[str, str]
    restarts_on_success: bool = False
    restarts_on_failure: bool = False
    restart_s: float = 0.0
    # It ends itself and all it has started when its standard input ends.
    guards_itself: bool = False
    # Open files it is to have, by the same numbers.
    files: tuple[int, ...] = ()


@dataclass(slots=True)
class EmulatedMachine:
    name: str
    folder: Path
    # What to start now, or None for nothing. Asked at every start: the disk may have changed. Raises OSError.
    program: Callable[[], MachineProgram | None]
    current: MachineProgram | None = None
    process: "subprocess.Popen[bytes] | None" = None
    guard: "subprocess.Popen[bytes] | None" = None
    is_wanted: bool = False
    # On the monotonic clock.
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
    """A context manager: when it closes, nothing of its machines runs, and a folder it made itself is gone."""

    def __init__(self, folder: Path | None = None, stop_grace_s: float = STOP_GRACE_S) -> None:
        self._is_temporary = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="windlass-emulator-"))
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._stop_grace_s = stop_grace_s
        self._machines: dict[MachineId, EmulatedMachine] = {}
        # Erased, and not gone yet.
        self._leaving: list[EmulatedMachine] = []
        self._lock = threading.RLock()
        self._is_closing = threading.Event()
        self._next_log_check = 0.0
        self._watcher = threading.Thread(target=self._watch, name="windlass-machines", daemon=True)
        self._watcher.start()

    # ------------------------------------------------------------------------------------------- the contract

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
            self._leaving.append(machine)
            self._forget_gone()

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
            everybody = [*self._machines.values(), *self._leaving]
            for machine in everybody:
                self._stop(machine, self._stop_grace_s)
            for machine in everybody:
                self._wait_gone(machine)
            self._machines.clear()
            self._leaving.clear()
        if self._is_temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    # ------------------------------------------------------------------------------------- for those who know disks

    def _prepare(self, machine_id: MachineId, name: str) -> EmulatedMachine:
        """A machine with an empty disk. Nothing runs in it."""
        folder = self.folder / str(machine_id)
        for erased in [each for each in self._leaving if each.folder == folder]:
            self._kill(erased)
            self._wait_gone(erased)
            self._leaving.remove(erased)
        # A folder that was kept from an earlier emulator, whose numbers were the same, holds somebody else's disk.
        shutil.rmtree(folder, ignore_errors=True)
        machine = EmulatedMachine(name, folder, lambda: None)
        machine.root.mkdir(mode=0o700, parents=True)
        self._machines[machine_id] = machine
        return machine

    def _start(self, machine: EmulatedMachine) -> None:
        """No effect if it runs."""
        if machine.is_wanted:
            return
        self._end_now(machine)
        machine.is_wanted = True
        machine.recent_starts.clear()
        self._spawn(machine)

    def _end_now(self, machine: EmulatedMachine) -> None:
        """If it is still on its way down from before: a machine that is switched on again has been off."""
        if machine.process is not None:
            self._kill(machine)
            self._wait_gone(machine)

    # ---------------------------------------------------------------------------------------------- processes

    def _spawn(self, machine: EmulatedMachine) -> None:
        machine.start_at = None
        now = time.monotonic()
        starts = machine.recent_starts
        if len(starts) == MAX_STARTS and now - starts[0] < START_WINDOW_S:
            machine.note(f"started {MAX_STARTS} times in {START_WINDOW_S:g} s: not again, as systemd would say")
            return
        try:
            machine.current = machine.program()
            if machine.current is None:
                return
            starts.append(now)
            with machine.log.open("ab") as log:
                machine.process = _start_process(machine.current, log.fileno())
            if not machine.current.guards_itself:
                machine.guard = _guard(machine.process.pid)
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
        # A machine that loses its power loses it everywhere: nobody in it may see, and report, that another is gone.
        _signal_group(process, signal.SIGSTOP)
        # Its children first: while it lives, those that lose their parent become its own, if it has asked for that.
        for _ in range(_MAX_KILL_ROUNDS):
            descendants = _descendants(process.pid)
            for descendant in descendants:
                with contextlib.suppress(psutil.Error):
                    descendant.kill()
            if not descendants:
                break
        _signal_group(process, signal.SIGKILL)

    def _wait_gone(self, machine: EmulatedMachine) -> None:
        """Until its grace is over and it is gone, or the kernel keeps it against all signals."""
        deadline = time.monotonic() + self._stop_grace_s + KILL_TIMEOUT_S
        while machine.process is not None and time.monotonic() < deadline:
            self._look_at(machine)
            if machine.process is not None:
                time.sleep(WATCH_INTERVAL_S / 5)

    # ----------------------------------------------------------------------------------------------- watching

    def _watch(self) -> None:
        while not self._is_closing.wait(WATCH_INTERVAL_S):
            with self._lock:
                for machine in (*self._machines.values(), *self._leaving):
                    self._look_at(machine)
                self._forget_gone()
                if time.monotonic() >= self._next_log_check:
                    self._next_log_check = time.monotonic() + LOG_CHECK_INTERVAL_S
                    self._shorten_logs()

    def _look_at(self, machine: EmulatedMachine) -> None:
        now = time.monotonic()
        if machine.process is not None and _has_ended(machine.process):
            self._bury(machine)
        elif machine.kill_at is not None and now >= machine.kill_at:
            self._kill(machine)
        if machine.start_at is not None and now >= machine.start_at:
            self._spawn(machine)

    def _bury(self, machine: EmulatedMachine) -> None:
        process, program = machine.process, machine.current
        if process is None or program is None:
            return
        # Before its number is given back: whatever it left behind in its group is still findable by it.
        _signal_group(process, signal.SIGKILL)
        returncode = process.wait()
        _dismiss(machine.guard)
        if process.stdin is not None:
            process.stdin.close()
        machine.process = machine.guard = machine.kill_at = None
        if machine.is_wanted:
            machine.note(f"{program.command[0]} ended with {returncode}")
            if program.restarts_on_success if returncode == 0 else program.restarts_on_failure:
                machine.start_at = time.monotonic() + program.restart_s

    def _forget_gone(self) -> None:
        for machine in [each for each in self._leaving if each.process is None]:
            self._clear_disk(machine)
            self._leaving.remove(machine)

    def _clear_disk(self, machine: EmulatedMachine) -> None:
        """Of an erased machine. Its log stays for whoever asks why."""
        shutil.rmtree(machine.root, ignore_errors=True)

    def _shorten_logs(self) -> None:
        for machine in self._machines.values():
            with contextlib.suppress(OSError):
                # Everybody appends to it, so it can be emptied under their hands.
                if machine.log.stat().st_size > MAX_LOG_BYTES:
                    os.truncate(machine.log, 0)


def bare_environment(root: Path) -> dict[str, str]:
    """What every machine has: nothing that the emulator's own environment holds, database addresses and tokens least of
    all, can make a worker work that would not work in the cloud."""
    environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    # The emulator may run from a checkout: its machines run the same code.
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
        stdin=subprocess.PIPE if program.guards_itself else subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        pass_fds=program.files,
    )


def _guard(pid: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, "windlass-guard", str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _dismiss(guard: "subprocess.Popen[bytes] | None") -> None:
    if guard is not None:
        # Killed before its pipe closes: it must not kill a group whose number may be somebody else's by then.
        guard.kill()
        guard.wait()
        if guard.stdin is not None:
            guard.stdin.close()


def _has_ended(process: "subprocess.Popen[bytes]") -> bool:
    """Without taking note of it, so that its number stays its own."""
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:
        return True


def _signal_group(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    # It has not been waited for, so this number is its own.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return [each for each in psutil.Process(pid).children(recursive=True) if each.status() != psutil.STATUS_ZOMBIE]
    except psutil.Error:
        return []
