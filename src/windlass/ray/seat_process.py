"""What Ray runs on a node: a seat, in which small attempts run one after another, and a long one alone.

It reports at the gate, is told what to run, runs it in this process, tells what came of it, and hears what is next, or
that it is to end. For how long it gets more is the dispatcher's to say (seats.py).

The process is Ray's, and stays warm for the next seat, with the handler and whatever it keeps in its module. The
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
from uuid import UUID

from windlass.model.errors import HandlerNotFound
from windlass.model.task import Claim
from windlass.ray import wire_protocol as line
from windlass.worker.attempt import run_handler
from windlass.worker.command import CommandExecutor
from windlass.worker.executor import AttemptFailure, Outcome, bad_payload_failure
from windlass.worker.handler import Handler, ReportProgress, RunningTask, load_handler

CONNECT_TIMEOUT_S = 10.0
# Longer than a dispatcher's lease, and some of its pings.
SILENCE_TIMEOUT_S = 15.0
# For the dispatcher's word, which waits for the database's.
ORDERS_TIMEOUT_S = 60.0
# More often than this nobody looks.
PROGRESS_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class Job:
    """What all seats of a fleet have in common. `gate`: where to report."""

    gate: tuple[str, int]
    handler: str | None
    command: str | None
    max_result_bytes: int


@dataclass(frozen=True, slots=True)
class ResultNotDelivered:
    """Nobody could be asked what to run: if it was to run something, that has not begun."""

    why: str


@dataclass(frozen=True, slots=True)
class NoHandler:
    """This node has nothing to run attempts with: if it was to run one, that has not begun."""

    why: str
    node_id: str


# How a seat ends by itself. None: it was told to.
Parting = ResultNotDelivered | NoHandler | None


class _Line:
    """The connection of this process to a gate."""

    def __init__(self, gate: tuple[str, int]) -> None:
        self._socket = socket.create_connection(gate, CONNECT_TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(SILENCE_TIMEOUT_S)
        self._lock = threading.Lock()
        self._orders: queue.SimpleQueue[Claim | None] = queue.SimpleQueue()
        self._is_closed = False
        threading.Thread(target=self._listen, name="windlass-gate", daemon=True).start()

    def say(self, frame: bytes) -> None:
        with self._lock:
            self._socket.sendall(frame)

    def orders(self) -> Claim | None:
        """To what was said last. Raises TimeoutError: then this line is of no more use, for they may still come."""
        try:
            return self._orders.get(timeout=ORDERS_TIMEOUT_S)
        except queue.Empty:
            raise TimeoutError(f"no word for {ORDERS_TIMEOUT_S:g} s") from None

    def _listen(self) -> None:
        with contextlib.suppress(OSError), self._socket.makefile("rb") as stream:
            # A line that was cut ends in the middle of what was said: that is not to be run.
            while (text := stream.readline()).endswith(b"\n"):
                said = json.loads(text)
                body = stream.read(said["size"]) if "size" in said else None
                if body is not None and len(body) < said["size"]:
                    break
                if "run" in said:
                    self._orders.put(line.read_orders(said, body))
        if not self._is_closed:
            print("windlass: the dispatcher of this process is gone, and so is its reason to exist", file=sys.stderr)  # noqa: T201
            os._exit(1)

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


_lines: dict[tuple[str, int], _Line] = {}
_handlers: dict[str, Handler] = {}
_runner: asyncio.Runner | None = None


def portable() -> Callable[[bytes], Any]:
    """What Ray runs for a packed seat. It is sent as it is, so that it runs on nodes without our program too.

    It returns a Parting, or the node's id and why our program is of no use there.
    """

    def windlass_seat(packed: bytes) -> Any:
        import pickle  # noqa: PLC0415 - everything it uses, it finds where it runs

        import ray  # noqa: PLC0415

        try:
            from windlass.ray.seat_process import run_seat  # noqa: PLC0415

            seat_id, job = pickle.loads(packed)  # noqa: S301 - from our dispatcher, by Ray, which pickles all there is
        except Exception as error:
            return ray.get_runtime_context().get_node_id(), f"{type(error).__name__}: {error}"
        return run_seat(seat_id, job)

    return windlass_seat


def run_seat(seat_id: str, job: Job) -> Parting:
    node_id = _node_id()
    try:
        gate_line = _line(job.gate)
        if not _is_loaded(job):
            gate_line.say(line.loading(seat_id, node_id))
        # Loaded before anything is asked for: the time of a task is not to be spent on its handler's imports.
        run = _runner_of(job)
        gate_line.say(line.arrival(seat_id, node_id))
        claim = gate_line.orders()
    except HandlerNotFound as error:
        return NoHandler(str(error), node_id)
    except OSError as error:
        return _not_told(job, error)
    while claim is not None:
        try:
            outcome = run(claim, _reporter(gate_line, seat_id, claim.token))
        except HandlerNotFound as error:
            return NoHandler(str(error), node_id)
        # If this cannot be said the outcome is lost, and Ray says that the seat has failed.
        gate_line.say(line.done(seat_id, claim.token, outcome))
        try:
            claim = gate_line.orders()
        except TimeoutError as error:
            return _not_told(job, error)
    return None


def _not_told(job: Job, error: OSError) -> ResultNotDelivered:
    _hang_up(job.gate)
    return ResultNotDelivered(f"the dispatcher at {job.gate[0]}:{job.gate[1]} could not be asked ({error})")


def _is_loaded(job: Job) -> bool:
    return job.command is not None or job.handler is None or job.handler in _handlers


def _runner_of(job: Job) -> Callable[[Claim, ReportProgress], Outcome]:
    """What runs an attempt; it may raise HandlerNotFound, as this does."""
    if job.command is not None:
        # Looked up for each seat: a command may be installed, or go, while this process lives.
        command = CommandExecutor(job.command, max_result_bytes=job.max_result_bytes)
        _loop().run(command.start())
        return lambda claim, report: _loop().run(command.run(claim, report))
    if job.handler is None:
        return lambda _claim, _report: AttemptFailure(
            "HANDLER_ERROR", "there is neither a handler nor a command to run", retry=False
        )
    handler = _handler(job.handler)

    def run(claim: Claim, report: ReportProgress) -> Outcome:
        try:
            task = _task(claim, report)
        except (ValueError, RecursionError) as error:
            return bad_payload_failure(error)
        return run_handler(handler, task, job.max_result_bytes, lambda result: _loop().run(_awaited(result)))

    return run


def _task(claim: Claim, report: ReportProgress) -> RunningTask:
    return RunningTask(
        id=claim.task_id,
        queue=claim.queue,
        payload=json.loads(claim.payload),
        attempt=claim.attempt,
        max_attempts=claim.max_attempts,
        claim_token=str(claim.token),
        _report=report,
    )


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


def _loop() -> asyncio.Runner:
    global _runner  # noqa: PLW0603 - one loop for the life of this process, as in a worker's child
    if _runner is None:
        _runner = asyncio.Runner()
    return _runner


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _reporter(gate_line: _Line, seat_id: str, token: UUID) -> ReportProgress:
    sent_at = 0.0

    def report(fraction: float, note: str | None) -> None:
        nonlocal sent_at
        now = time.monotonic()
        if now - sent_at >= PROGRESS_INTERVAL_S or fraction >= 1.0:
            sent_at = now
            # Where nobody is there any more, whether the attempt goes on is not ours to say.
            with contextlib.suppress(OSError):
                gate_line.say(line.progress(seat_id, token, fraction, note))

    return report
