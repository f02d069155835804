"""The child process of a worker: loads the handler once, then runs one attempt after another.

It has no database connection and no token, only a socket to its parent, and inherits the parent's environment.
Errors of a handler are answered as FAILED; if the process dies, the parent sees the socket close. A fork of this
process that returns from the handler exits at once without an answer.
"""

import asyncio
import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict
from typing import Any

from windlass.model.errors import HandlerNotFound
from windlass.model.task import parse_json
from windlass.worker import child_protocol as frames
from windlass.worker.attempt import run_handler
from windlass.worker.executor import AttemptSuccess, Outcome, bad_payload_failure
from windlass.worker.handler import Handler, ReportProgress, RunningTask, load_handler

# Delay of our exit after the parent's. The guard kills this process and its descendants meanwhile. If this process
# exited first, descendants with a session of their own would lose the parent by which the guard finds them.
EXIT_DELAY_S = 0.5
# Minimum time between two progress messages, so that a handler may report every iteration.
PROGRESS_INTERVAL_S = 0.1


class Child:
    def __init__(self, sock: socket.socket, handler: Handler, max_result_bytes: int, runner: asyncio.Runner) -> None:
        self._sock = sock
        # Buffered, so that most frames are read in one call.
        self._stream = sock.makefile("rb")
        self._handler = handler
        self._max_result_bytes = max_result_bytes
        self._send_lock = threading.Lock()
        self._runner = runner
        self._pid = os.getpid()

    def serve(self) -> None:
        self._send(frames.READY)
        # Ends when the parent closes the socket.
        while (frame := frames.receive(self._stream)) is not None:
            outcome = self._run(frame[1])
            if os.getpid() != self._pid:
                os._exit(0)
            if isinstance(outcome, AttemptSuccess):
                self._send(frames.RESULT, (outcome.result or "null").encode())
            else:
                self._send(frames.FAILED, json.dumps(asdict(outcome)).encode())

    def _run(self, body: bytes) -> Outcome:
        try:
            fields: dict[str, Any] = parse_json(body.decode())
        except ValueError as error:
            # The parent wrote everything but the payload.
            return bad_payload_failure(error)
        task = RunningTask(**fields, _report=self._progress_reporter(fields["claim_token"]))
        return run_handler(
            self._handler, task, self._max_result_bytes, lambda awaitable: self._runner.run(_wait_for(awaitable))
        )

    def _progress_reporter(self, claim_token: str) -> ReportProgress:
        sent_at = 0.0

        def report(fraction: float, note: str | None) -> None:
            nonlocal sent_at
            now = time.monotonic()
            if now - sent_at >= PROGRESS_INTERVAL_S or fraction >= 1.0:
                sent_at = now
                # The token identifies the attempt: a thread may outlive its attempt and report during the next one.
                self._send(frames.PROGRESS, json.dumps([claim_token, fraction, note]).encode())

        return report

    def _send(self, kind: int, body: bytes = b"") -> None:
        with self._send_lock:
            self._sock.sendall(frames.pack(kind, body))


async def _wait_for(awaitable: Any) -> Any:
    return await awaitable


def _raise_oom_score() -> None:
    """When memory runs out, the kernel should kill this process, not the parent that sends heartbeats."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123
            file.write("800")
    except OSError:
        pass  # not Linux, or not allowed


def _ignore_termination_signals() -> None:
    """Leave SIGINT and SIGTERM to the parent, which decides whether the attempt may finish.

    Ctrl-C reaches all processes of a terminal, and a service manager signals all processes of a service. Processes that
    a handler forks or executes handle both signals as usual.
    """
    numbers = {signal.SIGINT, signal.SIGTERM}
    mask_before_fork = threading.local()

    def ignore(_number: int, _frame: object) -> None:
        pass

    # A signal for the fork stays pending until its default handling is restored.
    def block() -> None:
        mask_before_fork.value = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask_before_fork.value)

    def restore_default() -> None:
        for number in numbers:
            if signal.getsignal(number) is ignore:
                signal.signal(number, signal.SIG_DFL)
        unblock()

    # Not SIG_IGN, which programs that a handler executes would inherit.
    for number in numbers:
        signal.signal(number, ignore)
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=restore_default)


def main() -> None:
    socket_fd, spec, max_result_bytes = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    _ignore_termination_signals()
    faulthandler.enable()
    _raise_oom_score()
    # Socket errors mean that the parent is gone, which ends this process.
    with socket.socket(fileno=socket_fd) as sock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        try:
            handler = load_handler(spec)
        except HandlerNotFound as error:
            sock.sendall(frames.pack(frames.NOT_READY, str(error).encode(errors="backslashreplace")))
            sys.exit(1)
        with asyncio.Runner() as runner:
            try:
                Child(sock, handler, max_result_bytes, runner).serve()
            finally:
                time.sleep(EXIT_DELAY_S)


if __name__ == "__main__":
    main()
