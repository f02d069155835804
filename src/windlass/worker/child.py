"""The child process: loads the handler once, then runs one attempt after another and stays warm.

It has no part in the queue: no connection to the database, no token, only a socket to its parent. Its environment is
the parent's, with what the user put there; a DATABASE_URL among it is the handler's to use. Whatever goes wrong inside
is answered as FAILED; if the process itself dies, its parent sees the socket close. A copy of it that a handler forked
and that falls out of the handler ends at once and says nothing.
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
from windlass.worker import child_protocol as frames
from windlass.worker.attempt import run_handler
from windlass.worker.executor import AttemptSuccess, Outcome, unreadable_payload
from windlass.worker.handler import Handler, ReportProgress, RunningTask, load_handler

# From the parent's end to our own. Others end us before, with all that was started here: if we were first, what made a
# session of its own would have no parent any more by which it is found.
END_DELAY_S = 0.5
# More often than this nobody looks; a handler that reports every iteration costs itself nothing.
PROGRESS_INTERVAL_S = 0.1


class Child:
    def __init__(self, sock: socket.socket, handler: Handler, max_result_bytes: int, runner: asyncio.Runner) -> None:
        self._sock = sock
        # Buffered: a frame is mostly read in one call.
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
            kind, body = self._attempt(frame[1])
            if os.getpid() != self._pid:
                os._exit(0)
            self._send(kind, body)

    def _attempt(self, described: bytes) -> tuple[int, bytes]:
        outcome = self._outcome(described)
        if isinstance(outcome, AttemptSuccess):
            return frames.RESULT, (outcome.result or "null").encode()
        return frames.FAILED, json.dumps(asdict(outcome)).encode()

    def _outcome(self, described: bytes) -> Outcome:
        try:
            given: dict[str, Any] = json.loads(described)
        except (ValueError, RecursionError) as error:
            # All but the payload is the parent's own writing.
            return unreadable_payload(error)
        task = RunningTask(**given, _report=self._progress_reporter(given["claim_token"]))
        return run_handler(self._handler, task, self._max_result_bytes, self._wait_for)

    def _wait_for(self, result: Any) -> Any:
        return self._runner.run(_awaited(result))

    def _progress_reporter(self, claim_token: str) -> ReportProgress:
        sent_at = 0.0

        def report(fraction: float, note: str | None) -> None:
            nonlocal sent_at
            now = time.monotonic()
            if now - sent_at >= PROGRESS_INTERVAL_S or fraction >= 1.0:
                sent_at = now
                # With its token: a thread that outlives its attempt must not speak for the next one.
                self._send(frames.PROGRESS, json.dumps([claim_token, fraction, note]).encode())

        return report

    def _send(self, kind: int, body: bytes = b"") -> None:
        with self._send_lock:
            self._sock.sendall(frames.pack(kind, body))


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _be_first_to_go() -> None:
    """When memory runs out, the kernel should end this process and not the parent that keeps the heartbeat."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123
            file.write("800")
    except OSError:
        pass  # not Linux, or not allowed: then the kernel chooses


def _leave_signals_to_the_parent() -> None:
    """Ctrl-C reaches all processes of a terminal, a service manager's SIGTERM all of a service; the parent decides
    whether the attempt may finish. What a handler forks or executes obeys them as usual."""
    numbers = {signal.SIGINT, signal.SIGTERM}
    mask_before_fork = threading.local()

    def pass_over(_number: int, _frame: object) -> None:
        pass

    # A signal that comes for the copy waits until the copy obeys.
    def hold_back() -> None:
        mask_before_fork.value = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def let_through() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask_before_fork.value)

    def obey() -> None:
        for number in numbers:
            if signal.getsignal(number) is pass_over:
                signal.signal(number, signal.SIG_DFL)
        let_through()

    # Not SIG_IGN, which would be handed down to what a handler executes.
    for number in numbers:
        signal.signal(number, pass_over)
    os.register_at_fork(before=hold_back, after_in_parent=let_through, after_in_child=obey)


def main() -> None:
    socket_fd, spec, max_result_bytes = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    _leave_signals_to_the_parent()
    faulthandler.enable()
    _be_first_to_go()
    # When the parent is gone, so is the reason to exist.
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
                time.sleep(END_DELAY_S)


if __name__ == "__main__":
    main()
