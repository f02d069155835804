"""Runs `windlass` in processes that are forked from one which has imported its commands.

A new interpreter needs half a second of a processor until `windlass` begins, a fork a few milliseconds. The forked
process has its own environment, folder, standard streams and exit code, and ends as any program ends.

One server per test process, as a program: `python -m support.forked_programs FD`. It ends when the test process ends.
"""

import array
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO

import windlass

# A request is one datagram: a command line with its environment.
REQUEST_BYTES = 1 << 18
STREAMS = 3
# Commands that are tested as programs of their own: they start processes, or run for long.
UNSHARED = {"up", "serve", "cycle", "worker", "demo", "emulate", "ray", "simulate", "tune"}
# Read by the interpreter when it starts.
READ_AT_START = ("PYTHON", "LC_", "LANG", "TZ")


def can_fork(args: Sequence[str], env: Mapping[str, str]) -> bool:
    names = (name for name, value in env.items() if os.environ.get(name) != value)
    is_changed = any(name.startswith(READ_AT_START) for name in names)
    return bool(args) and args[0] not in UNSHARED and not is_changed and len(json.dumps(args)) < REQUEST_BYTES // 2


def run_forked(
    args: Sequence[str], *, stdin: bytes, folder: Path, env: Mapping[str, str], timeout_s: float
) -> tuple[int, bytes, bytes]:
    """Exit code, standard output and standard error of one command."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin)
        given.seek(0)
        code = _server().run(args, (given, out, err), folder, env, timeout_s)
        out.seek(0)
        err.seek(0)
        return code, out.read(), err.read()


class _Server:
    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.forked_programs", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).parents[1],
                stdin=subprocess.DEVNULL,
            )

    def run(
        self, args: Sequence[str], streams: Sequence[IO[bytes]], folder: Path, env: Mapping[str, str], timeout_s: float
    ) -> int:
        request = json.dumps([list(args), str(folder), dict(env)]).encode()
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                descriptors = array.array("i", [*(stream.fileno() for stream in streams), theirs.fileno()])
                self._ours.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
            deadline = time.monotonic() + timeout_s
            answers = ours.makefile("r")
            ours.settimeout(timeout_s)
            pid = int(answers.readline())
            try:
                ours.settimeout(max(0.01, deadline - time.monotonic()))
                return int(answers.readline())
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(["windlass", *args], timeout_s) from None


@cache
def _server() -> _Server:
    return _Server()


# ------------------------------------------------------------------------------------------------------ the server


def serve(requests: socket.socket) -> list[str] | None:
    """Fork for each request. Returns the command line in the forked process, and None at the end of the server."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        size = (STREAMS + 1) * array.array("i").itemsize
        request, rights, *_ = requests.recvmsg(REQUEST_BYTES, socket.CMSG_LEN(size))
        if not request:
            return None
        descriptors = array.array("i", rights[0][2])
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            return _begin(json.loads(request), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _begin(request: tuple[list[str], str, dict[str, str]], descriptors: Sequence[int]) -> list[str]:
    """Return the command line in a new process; this one waits for it and reports its id and exit code."""
    args, folder, env = request
    *streams, answer = descriptors
    pid = os.fork()
    if pid != 0:
        os.write(answer, b"%d\n" % pid)
        status = os.waitpid(pid, 0)[1]
        os.write(answer, b"%d\n" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for descriptor in descriptors:
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    sys.stdin = _text(0, "rb")
    sys.stdout = _text(1, "wb")
    sys.stderr = _text(2, "wb", errors="backslashreplace", is_line_buffered=True)
    return args


def _text(number: int, mode: str, *, errors: str = "strict", is_line_buffered: bool = False) -> io.TextIOWrapper:
    file = open(number, mode, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(file, encoding="utf-8", errors=errors, line_buffering=is_line_buffered)


def _import_commands() -> None:
    from windlass.cli.app import COMMANDS

    for entries in COMMANDS.values():
        for entry in entries:
            if entry.name not in UNSHARED:
                import_module(f"windlass.cli.{entry.module}")


if __name__ == "__main__":
    _import_commands()
    command_line = serve(socket.socket(fileno=int(sys.argv[1])))
    if command_line is not None:
        sys.argv = [str(Path(windlass.__file__).with_name("__main__.py")), *command_line]
        from windlass.cli.app import main

        main()
