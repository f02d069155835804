"""The first process of an emulated pod. It runs the program and an SSH server per connection.

It is a subreaper: a process in the pod that loses its parent becomes its child, so that it can end all of them.
- SIGTERM: it forwards the signal to all descendants, waits for them, then ends.
- End of standard input (the emulator is gone): it kills all descendants, then ends.
- End of the program: it ends too if there is no SSH; otherwise it stays, like an image that sleeps.

Linux only, standard library only, one thread.
"""

import contextlib
import ctypes
import datetime
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
# The limit of every machine's log.
_MAX_LOG_BYTES = 8 * 1024 * 1024
_MAX_LINE_BYTES = 16 * 1024
# From SIGKILL to the end of all processes.
_KILL_TIMEOUT_S = 10.0
_POLL_S = 0.2


class PodInit:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.selector = selectors.DefaultSelector()
        self.program: subprocess.Popen[bytes] | None = None
        # The program's output pipe. Background processes may write to it after the program has ended.
        self.output = -1
        self.listener: socket.socket | None = None
        self.is_stopping = False
        self.partial = b""

    def run(self) -> int:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.signal(signal.SIGTERM, lambda *_: self._stop())
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        self.selector.register(0, selectors.EVENT_READ, self._end_with_emulator)
        listen_at = self._open_ssh()
        self._start_program()
        while True:
            if self.listener is not None and listen_at is not None and time.monotonic() >= listen_at:
                self.listener.listen(16)
                self.selector.register(self.listener, selectors.EVENT_READ, self._accept)
                listen_at = None
            for key, _ in self.selector.select(_POLL_S):
                key.data()
            self._reap()
            if self._is_finished():
                return 0

    def _is_finished(self) -> bool:
        if self.is_stopping:
            return not descendants()
        return self.program is None and self.settings["ssh"] is None and not descendants()

    # ----------------------------------------------------------------------------------------------- the program

    def _start_program(self) -> None:
        command = self.settings["command"]
        if command is None:
            return
        # stdout is a pipe, so Python would buffer its output.
        environment = {"PYTHONUNBUFFERED": "1", **self.settings["environment"]}
        try:
            self.program = subprocess.Popen(
                command, cwd=self.settings["directory"], env=environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except OSError as error:
            self._log(f"cannot start {command[0]} ({error})")
            return
        if self.program.stdout is not None:
            self.output = os.dup(self.program.stdout.fileno())
            self.program.stdout.close()
            os.set_blocking(self.output, False)
            self.selector.register(self.output, selectors.EVENT_READ, self._read_output)

    def _read_output(self) -> None:
        if self.output < 0:
            return
        try:
            data = os.read(self.output, 65536)
        except BlockingIOError:
            return
        if not data:
            self.selector.unregister(self.output)
            os.close(self.output)
            self.output = -1
        *lines, self.partial = (self.partial + data).split(b"\n")
        if (not data or len(self.partial) > _MAX_LINE_BYTES) and self.partial:
            lines, self.partial = [*lines, self.partial], b""
        for line in lines:
            self._log(line.decode(errors="replace").rstrip("\r"))

    def _log(self, line: str) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        path = self.settings["log"]
        if os.path.exists(path) and os.path.getsize(path) > _MAX_LOG_BYTES:
            os.truncate(path, 0)
        with open(path, "a") as log:
            log.write(f"{now} {line}\n")

    # ------------------------------------------------------------------------------------------------------- SSH

    def _open_ssh(self) -> float | None:
        """When to start listening, on the monotonic clock. Connections are refused until then."""
        ssh = self.settings["ssh"]
        if ssh is None:
            return None
        self.listener = socket.socket(fileno=ssh["fd"])
        return time.monotonic() + float(ssh["after_s"])

    def _accept(self) -> None:
        if self.listener is None:
            return
        connection, _ = self.listener.accept()
        with connection, open(self.settings["ssh"]["log"], "ab") as log:
            number = connection.fileno()
            subprocess.Popen(self.settings["ssh"]["command"], stdin=number, stdout=number, stderr=log)

    # -------------------------------------------------------------------------------------------------------- end

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self.program is not None and pid == self.program.pid:
                self.program.returncode = os.waitstatus_to_exitcode(status)
                self._read_output()
                self._log(f"the program exited with {self.program.returncode}")
                self.program = None

    def _stop(self) -> None:
        self.is_stopping = True
        for pid in descendants():
            send(pid, signal.SIGTERM)

    def _end_with_emulator(self) -> None:
        if os.read(0, 4096):
            return
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while (pids := descendants()) and time.monotonic() < deadline:
            for pid in pids:
                send(pid, signal.SIGKILL)
            self._reap()
            time.sleep(0.01)
        os._exit(0)


def descendants() -> list[int]:
    """All live descendants, parents first."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:
                continue
            if state != b"Z":
                children.setdefault(int(parent), []).append(int(name))
    found, at = [os.getpid()], 0
    while at < len(found):
        found.extend(children.get(found[at], []))
        at += 1
    return found[1:]


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        sys.exit(PodInit(json.load(file)).run())
