"""What Ray runs on a node for each attempt: ask at the gate, run the handler in this process, return what came of it.

The process is Ray's, and stays warm for the next attempt, with the handler and whatever it keeps in its module. The
handler may use Ray itself: tasks and actors of its own run with the cluster's other resources. It is ended from outside
(its time is up, its claim was lost) by ending this process. And the process ends itself when its dispatcher is not
heard of for SILENCE_TIMEOUT_S: another has taken its place, and needs the room that Ray keeps for the old one.
"""

import asyncio
import contextlib
import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from windlass.model.errors import HandlerNotFound
from windlass.model.task import Claim
from windlass.worker.attempt import run_handler
from windlass.worker.command import CommandExecutor
from windlass.worker.executor import Failure, Outcome
from windlass.worker.handler import Handler, ReportProgress, RunningTask, load_handler

CONNECT_TIMEOUT_S = 10.0
# Longer than a dispatcher's lease, and some of its pings.
SILENCE_TIMEOUT_S = 15.0
# For the dispatcher's word, which waits for the database's.
START_TIMEOUT_S = 60.0
# More often than this nobody looks.
PROGRESS_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class Job:
    """What all attempts of a fleet have in common. `gate`: where to ask."""

    gate: tuple[str, int]
    handler: str | None
    command: str | None
    max_result_bytes: int


@dataclass(frozen=True, slots=True)
class NotStarted:
    """It was not to begin, or nobody could be asked."""

    why: str


@dataclass(frozen=True, slots=True)
class NoHandler:
    """This node has nothing to run it with."""

    why: str
    node_id: str


Answer = Outcome | NotStarted | NoHandler


class _Line:
    """The connection of this process to a gate."""

    def __init__(self, gate: tuple[str, int]) -> None:
        self._socket = socket.create_connection(gate, CONNECT_TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(SILENCE_TIMEOUT_S)
        self._lock = threading.Lock()
        self._answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._is_closed = False
        threading.Thread(target=self._listen, name="windlass-gate", daemon=True).start()

    def may_start(self, token: str, node_id: str) -> bool:
        self._send({"start": token, "node": node_id})
        try:
            return self._answers.get(timeout=START_TIMEOUT_S)
        except queue.Empty:
            raise TimeoutError(f"no word for {START_TIMEOUT_S:g} s") from None

    def _listen(self) -> None:
        with contextlib.suppress(OSError), self._socket.makefile("rb") as stream:
            while line := stream.readline():
                said = json.loads(line)
                if "go" in said:
                    self._answers.put(bool(said["go"]))
        if not self._is_closed:
            print("windlass: the dispatcher of this process is gone, and so is its reason to exist", file=sys.stderr)  # noqa: T201
            os._exit(1)

    def tell(self, token: str, fraction: float, note: str | None) -> None:
        # Nobody is there any more: whether the attempt goes on is not ours to say.
        with contextlib.suppress(OSError):
            self._send({"progress": token, "fraction": fraction, "note": note})

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send(self, said: dict[str, Any]) -> None:
        with self._lock:
            self._socket.sendall(json.dumps(said).encode() + b"\n")


_lines: dict[tuple[str, int], _Line] = {}
_handlers: dict[str, Handler] = {}
_runner: asyncio.Runner | None = None


def portable() -> Callable[[bytes], Any]:
    """What Ray runs for a packed claim and job. It is sent as it is, so that it runs on nodes without our program too.

    It returns an Answer, or the node's id and why our program is of no use there.
    """

    def windlass_attempt(packed: bytes) -> Any:
        import pickle  # noqa: PLC0415 - everything it uses, it finds where it runs

        import ray  # noqa: PLC0415

        try:
            from windlass.engine.attempt import run_attempt  # noqa: PLC0415

            claim, job = pickle.loads(packed)  # noqa: S301 - from our dispatcher, by Ray, which pickles all there is
        except Exception as error:
            return ray.get_runtime_context().get_node_id(), f"{type(error).__name__}: {error}"
        return run_attempt(claim, job)

    return windlass_attempt


def run_attempt(claim: Claim, job: Job) -> Answer:
    # Loaded before it is asked for: the time of a task is not to be spent on its handler's imports.
    try:
        handler = _handler(job.handler) if job.handler is not None else None
        command = _command(job) if job.command is not None else None
    except HandlerNotFound as error:
        return NoHandler(str(error), _node_id())
    try:
        line = _line(job.gate)
        if not line.may_start(str(claim.token), _node_id()):
            return NotStarted("")
    except OSError as error:
        _hang_up(job.gate)
        return NotStarted(f"the dispatcher at {job.gate[0]}:{job.gate[1]} could not be asked ({error})")
    report = _reporter(line, str(claim.token))
    if command is not None:
        return _run_command(command, claim, report)
    if handler is None:
        return Failure("HANDLER_ERROR", "there is neither a handler nor a command to run", retry=False)
    task = RunningTask(
        id=claim.task_id,
        queue=claim.queue,
        payload=json.loads(claim.payload),
        attempt=claim.attempt,
        max_attempts=claim.max_attempts,
        claim_token=str(claim.token),
        _report=report,
    )
    return run_handler(handler, task, job.max_result_bytes, lambda result: _loop().run(_awaited(result)))


def _node_id() -> str:
    import ray  # noqa: PLC0415 - in Ray's own processes, where it is loaded

    node_id: str = ray.get_runtime_context().get_node_id()
    return node_id


def _line(gate: tuple[str, int]) -> _Line:
    if gate not in _lines:
        # A new dispatcher has a new gate; the old one's is of no more use.
        for old in list(_lines):
            _hang_up(old)
        _lines[gate] = _Line(gate)
    return _lines[gate]


def _hang_up(gate: tuple[str, int]) -> None:
    line = _lines.pop(gate, None)
    if line is not None:
        line.close()


def _handler(spec: str) -> Handler:
    if spec not in _handlers:
        _handlers[spec] = load_handler(spec)
    return _handlers[spec]


def _command(job: Job) -> CommandExecutor:
    """Looked up for each attempt: a command may be installed, or go, while this process lives."""
    executor = CommandExecutor(job.command or "", max_result_bytes=job.max_result_bytes)
    _loop().run(executor.start())
    return executor


def _run_command(command: CommandExecutor, claim: Claim, report: ReportProgress) -> Answer:
    try:
        return _loop().run(command.run(claim, report))
    except HandlerNotFound as error:
        return NoHandler(str(error), _node_id())


def _loop() -> asyncio.Runner:
    global _runner  # noqa: PLW0603 - one loop for the life of this process, as in a worker's child
    if _runner is None:
        _runner = asyncio.Runner()
    return _runner


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _reporter(line: _Line, token: str) -> ReportProgress:
    sent_at = 0.0

    def report(fraction: float, note: str | None) -> None:
        nonlocal sent_at
        now = time.monotonic()
        if now - sent_at >= PROGRESS_INTERVAL_S or fraction >= 1.0:
            sent_at = now
            line.tell(token, fraction, note)

    return report
