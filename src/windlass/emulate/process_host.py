"""Machines as real processes of this host, each in a folder that is its disk.

A machine's first boot writes the files of its user_data under `<folder>/<server id>/root` and never outside it; every
boot starts the unit among them with paths mapped into that root, its output in `<folder>/<server id>/machine.log`.
`/opt/windlass/bin/windlass` is this very program. A machine gets a bare environment, as a real one would: nothing that
the emulator's own environment holds, database addresses and tokens least of all, can make a worker work that would not
work in the cloud.

A program leads its own session. It is ended by SIGTERM and, STOP_GRACE_S later, by SIGKILL to everything it started;
`Restart=` is honoured, within systemd's own limit. A guard, a shell waiting on a pipe, kills it when the emulator dies,
even by SIGKILL. Out of reach is only what made a session of its own and has lost its parent.

One thread watches all machines; every public call only changes what is wanted, or sends a signal.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from windlass.emulate.cloud_init import Disk, File, Unit, Unusable, inside, read_user_data

# Between the word and the deed. A real server is cut off at once; a worker should have said good-bye long before.
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

# Where the bootstrap puts them on a real machine, and what they are here.
_PROGRAMS = {
    "/opt/windlass/bin/windlass": (sys.executable, "-m", "windlass"),
    "/opt/windlass/bin/python": (sys.executable,),
    "/opt/windlass/bin/python3": (sys.executable,),
}
# Taken over from the emulator: where programs and certificates are and how text is written, nothing that means
# something to Windlass. PYTHONPATH stands for the code that a real machine's bootstrap installs.
_INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "TMPDIR")
# Service managers and terminals signal all of an emulator's processes. The guard must outlast that: the machine may.
# Without `--` before the group: Debian's shell takes that for a number and kills nothing.
_GUARD = 'trap "" HUP INT TERM; read -r word || kill -KILL "-$1"'


@dataclass(slots=True)
class _Machine:
    name: str
    folder: Path
    unit: Unit | None
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


class ProcessHost:
    """A context manager: when it closes, nothing of its machines runs, and a folder it made itself is gone."""

    def __init__(self, folder: Path | None = None, stop_grace_s: float = STOP_GRACE_S) -> None:
        self._is_temporary = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="windlass-emulator-"))
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._stop_grace_s = stop_grace_s
        self._machines: dict[int, _Machine] = {}
        self._lock = threading.RLock()
        self._is_closing = threading.Event()
        self._next_log_check = 0.0
        self._watcher = threading.Thread(target=self._watch, name="windlass-machines", daemon=True)
        self._watcher.start()

    # ------------------------------------------------------------------------------------------- the contract

    def start(self, server_id: int, name: str, user_data: str) -> None:
        with self._lock:
            machine = self._machines.get(server_id) or self._install(server_id, name, user_data)
            if machine.is_wanted:
                return
            if machine.process is not None:
                # Still on its way down from before: a machine that is switched on again has been off.
                self._kill(machine)
                self._wait_gone(machine)
            machine.is_wanted = True
            machine.recent_starts.clear()
            self._spawn(machine)

    def stop(self, server_id: int, *, is_sudden: bool = False) -> None:
        with self._lock:
            if machine := self._machines.get(server_id):
                self._stop(machine, 0.0 if is_sudden else self._stop_grace_s)

    def erase(self, server_id: int) -> None:
        with self._lock:
            machine = self._machines.pop(server_id, None)
            if machine is None:
                return
            self._stop(machine, self._stop_grace_s)
            # Until its process is gone it is looked after under a number that no server has.
            if machine.process is not None:
                self._machines[-server_id] = machine
            else:
                shutil.rmtree(machine.root, ignore_errors=True)

    def is_running(self, server_id: int) -> bool:
        with self._lock:
            machine = self._machines.get(server_id)
            return machine is not None and machine.process is not None and not _has_ended(machine.process)

    def __enter__(self) -> "ProcessHost":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._is_closing.set()
        self._watcher.join()
        with self._lock:
            for machine in self._machines.values():
                self._stop(machine, self._stop_grace_s)
            for machine in self._machines.values():
                self._wait_gone(machine)
            self._machines.clear()
        if self._is_temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    # --------------------------------------------------------------------------------------------- first boot

    def _install(self, server_id: int, name: str, user_data: str) -> _Machine:
        machine = _Machine(name, self.folder / str(server_id), None)
        if (erased := self._machines.pop(-server_id, None)) is not None:
            self._kill(erased)
            self._wait_gone(erased)
        # A folder that was kept from an earlier emulator, whose numbers were the same, holds somebody else's disk.
        shutil.rmtree(machine.folder, ignore_errors=True)
        machine.root.mkdir(mode=0o700, parents=True)
        try:
            disk: Disk = read_user_data(user_data)
            for file in disk.files:
                _write(machine.root, file)
            machine.unit = disk.unit
            if disk.unit is None:
                _note(machine, "there is no systemd unit in user_data: nothing runs here")
        except (Unusable, OSError) as error:
            _note(machine, f"{error}: nothing runs here")
        self._machines[server_id] = machine
        return machine

    # ---------------------------------------------------------------------------------------------- processes

    def _spawn(self, machine: _Machine) -> None:
        machine.start_at = None
        if machine.unit is None:
            return
        now = time.monotonic()
        starts = machine.recent_starts
        if len(starts) == MAX_STARTS and now - starts[0] < START_WINDOW_S:
            _note(machine, f"started {MAX_STARTS} times in {START_WINDOW_S:g} s: not again, as systemd would say")
            return
        starts.append(now)
        try:
            with machine.log.open("ab") as log:
                machine.process = _start(machine.root, machine.unit, log.fileno())
            machine.guard = _guard(machine.process.pid)
        except OSError as error:
            _note(machine, f"cannot start {machine.unit.command[0]} ({error})")
            if machine.process is not None:
                self._kill(machine)

    def _stop(self, machine: _Machine, grace_s: float) -> None:
        machine.is_wanted = False
        machine.start_at = None
        if machine.process is None:
            return
        if grace_s <= 0:
            self._kill(machine)
        elif machine.kill_at is None:
            machine.kill_at = time.monotonic() + grace_s
            _signal_group(machine.process, signal.SIGTERM)

    def _kill(self, machine: _Machine) -> None:
        process = machine.process
        if process is None:
            return
        descendants = _descendants(process.pid)
        _signal_group(process, signal.SIGKILL)
        for descendant in descendants:
            with contextlib.suppress(psutil.Error):
                descendant.kill()

    def _wait_gone(self, machine: _Machine) -> None:
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
                for server_id, machine in list(self._machines.items()):
                    self._look_at(machine)
                    if server_id < 0 and machine.process is None:
                        shutil.rmtree(machine.root, ignore_errors=True)
                        del self._machines[server_id]
                if time.monotonic() >= self._next_log_check:
                    self._next_log_check = time.monotonic() + LOG_CHECK_INTERVAL_S
                    self._shorten_logs()

    def _look_at(self, machine: _Machine) -> None:
        now = time.monotonic()
        if machine.process is not None and _has_ended(machine.process):
            self._bury(machine)
        elif machine.kill_at is not None and now >= machine.kill_at:
            self._kill(machine)
        if machine.start_at is not None and now >= machine.start_at:
            self._spawn(machine)

    def _bury(self, machine: _Machine) -> None:
        process, unit = machine.process, machine.unit
        if process is None or unit is None:
            return
        # Before its number is given back: whatever it left behind in its group is still findable by it.
        _signal_group(process, signal.SIGKILL)
        returncode = process.wait()
        _dismiss(machine.guard)
        machine.process = machine.guard = machine.kill_at = None
        if machine.is_wanted:
            _note(machine, f"{unit.command[0]} ended with {returncode}")
            if unit.restarts_on_success if returncode == 0 else unit.restarts_on_failure:
                machine.start_at = time.monotonic() + unit.restart_s

    def _shorten_logs(self) -> None:
        for machine in self._machines.values():
            with contextlib.suppress(OSError):
                # Everybody appends to it, so it can be emptied under their hands.
                if machine.log.stat().st_size > MAX_LOG_BYTES:
                    os.truncate(machine.log, 0)


def _write(root: Path, file: File) -> None:
    path = root / file.path.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if file.is_appended else os.O_TRUNC)
    # Closed to others from the first byte on: join tokens are among these files.
    with os.fdopen(os.open(path, flags, 0o600), "wb") as out:
        out.write(file.content)
    # Ours to read and write whatever it says: on a real machine root may do so anyway.
    path.chmod(file.mode & 0o700 | 0o600)


def _start(root: Path, unit: Unit, output: int) -> "subprocess.Popen[bytes]":
    directory = root / unit.working_directory.lstrip("/")
    directory.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        mapped_command(root, unit.command),
        cwd=directory,
        env=_environment(root, unit),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


def mapped_command(root: Path, command: tuple[str, ...]) -> list[str]:
    """As it would run with this root: paths that exist under it are those, others are this host's."""
    program, *arguments = command
    mapped = _PROGRAMS.get(program) or (_mapped(root, program),)
    return [*mapped, *(_mapped(root, word) for word in arguments)]


def _mapped(root: Path, word: str) -> str:
    # Also as in --join=/etc/windlass/join.json.
    option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    if not value.startswith("/"):
        return word
    path = root / inside(value).lstrip("/")
    return f"{option}{equals}{path}" if path.exists() else word


def _environment(root: Path, unit: Unit) -> dict[str, str]:
    environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    # The emulator may run from a checkout: its machines run the same code.
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in dict.fromkeys(paths) if path)
    environment["HOME"] = str(root / "root")
    environment.update({name: _mapped(root, value) for name, value in unit.environment.items()})
    for path in unit.environment_files:
        environment.update(_read_environment_file(root / inside(path).lstrip("/")))
    return environment


def _read_environment_file(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = [line.partition("=") for line in lines if not line.lstrip().startswith(("#", ";"))]
    return {name.strip(): value.strip().strip("\"'") for name, equals, value in pairs if equals}


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
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _note(machine: _Machine, text: str) -> None:
    with contextlib.suppress(OSError), machine.log.open("a") as log:
        log.write(f"windlass-emulator: {text}\n")
