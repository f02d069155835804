"""The seat as it runs on a node: a Ray task that runs attempts one after another.

It connects to the seat server of its dispatcher, receives an attempt, runs it in this process, reports the outcome and
receives the next one, or the instruction to exit. The seat pool decides for how long a seat gets attempts.

The process belongs to Ray and stays warm for the next seat, with the loaded handler and its module state. A handler may
use Ray itself; its tasks and actors need resources of their own. An attempt is cancelled, or ended at its time limit,
by killing this process. The process also exits by itself after SILENCE_TIMEOUT_S without a message from its
dispatcher: another dispatcher has taken over by then and needs the resources.
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
from windlass.model.task import Claim, parse_json
from windlass.model.worker_log import LogChunk
from windlass.ray import wire_protocol
from windlass.ray.seat_output import SeatOutput
from windlass.worker.attempt import run_handler
from windlass.worker.command import CommandExecutor
from windlass.worker.executor import AttemptFailure, Outcome, bad_payload_failure
from windlass.worker.handler import Handler, ReportProgress, RunningTask, load_handler
from windlass.worker.output_buffer import OutputLimits

CONNECT_TIMEOUT_S = 10.0
# Longer than a dispatcher's lease and several of its pings.
SILENCE_TIMEOUT_S = 15.0
# The dispatcher answers after the database has recorded the placement.
NEXT_CLAIM_TIMEOUT_S = 60.0
PROGRESS_INTERVAL_S = 0.1

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class SeatJob:
    """What all seats of a dispatcher have in common. `server` is the address of its seat server."""

    server: Address
    handler: str | None
    command: str | None
    max_result_bytes: int
    # None: what attempts print is not sent.
    output: OutputLimits | None = None


@dataclass(frozen=True, slots=True)
class DispatcherUnreachable:
    """The dispatcher did not answer. If the seat had an attempt, it has not begun."""

    reason: str


@dataclass(frozen=True, slots=True)
class NodeUnusable:
    """The node cannot run attempts. If the seat had one, it has not begun."""

    reason: str
    node_id: str


# Why a seat exited. None: the dispatcher had no more attempts for it.
SeatExit = DispatcherUnreachable | NodeUnusable | None


class DispatcherConnection:
    """The connection of this process to a seat server. Its end is the end of the process, unless close() was called."""

    def __init__(self, server: Address) -> None:
        self._socket = socket.create_connection(server, CONNECT_TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(SILENCE_TIMEOUT_S)
        self._lock = threading.Lock()
        self._claims: queue.SimpleQueue[Claim | None] = queue.SimpleQueue()
        self._is_closed = False
        threading.Thread(target=self._read, name="windlass-dispatcher", daemon=True).start()

    def send(self, message: bytes) -> None:
        with self._lock:
            self._socket.sendall(message)

    def next_claim(self) -> Claim | None:
        """The answer to the last message. After a TimeoutError the answer may still come, so close the connection."""
        try:
            return self._claims.get(timeout=NEXT_CLAIM_TIMEOUT_S)
        except queue.Empty:
            raise TimeoutError(f"no answer within {NEXT_CLAIM_TIMEOUT_S:g} s") from None

    def _read(self) -> None:
        with contextlib.suppress(OSError), self._socket.makefile("rb") as stream:
            # A broken connection may end inside a message, which must not be run.
            while (line := stream.readline()).endswith(b"\n"):
                header = json.loads(line)
                body = stream.read(header["size"]) if "size" in header else None
                if body is not None and len(body) < header["size"]:
                    break
                if "run" in header:
                    self._claims.put(wire_protocol.decode_run(header, body))
        if not self._is_closed:
            print("windlass: lost connection to the dispatcher, exiting", file=sys.stderr)  # noqa: T201
            os._exit(1)

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


# State of this process, which runs one seat after another.
_connections: dict[Address, DispatcherConnection] = {}
_handlers: dict[str, Handler] = {}
_outputs: dict[OutputLimits, SeatOutput] = {}
_runner: asyncio.Runner | None = None


def make_remote_function() -> Callable[[bytes], Any]:
    """The function that Ray runs for a pickled (seat id, SeatJob). It returns a SeatExit.

    Ray sends it by value, so it also runs on nodes without Windlass. There it returns the node id and the error.
    """

    def windlass_seat(pickled: bytes) -> Any:
        # The function runs on a node, and so must its imports.
        import pickle

        import ray

        node_id = ray.get_runtime_context().get_node_id()
        try:
            from windlass.ray.seat_process import run_seat

            seat_id, job = pickle.loads(pickled)  # noqa: S301 - from our dispatcher, through Ray
        except Exception as error:
            return node_id, f"{type(error).__name__}: {error}"
        return run_seat(seat_id, job, node_id)

    return windlass_seat


def run_seat(seat_id: str, job: SeatJob, node_id: str) -> SeatExit:
    try:
        connection = _connect(job.server)
        if job.command is None and job.handler is not None and job.handler not in _handlers:
            connection.send(wire_protocol.encode_loading(seat_id, node_id))
        # Loaded before a task is requested: imports must not count towards the time limit of a task.
        run = make_attempt_runner(job)
        connection.send(wire_protocol.encode_started(seat_id, node_id))
        claim = connection.next_claim()
    except HandlerNotFound as error:
        return NodeUnusable(str(error), node_id)
    except OSError as error:
        return _disconnect_after(error, job.server)
    output = _output_of(job)
    while claim is not None:
        if output is not None:
            output.begin(claim, _make_output_sender(connection, seat_id, claim.token))
        try:
            outcome = run(claim, _make_reporter(connection, seat_id, claim.token))
        except HandlerNotFound as error:
            return NodeUnusable(str(error), node_id)
        finally:
            if output is not None:
                output.end()
        # If this raises, the outcome is lost and Ray reports a failed seat.
        connection.send(wire_protocol.encode_finished(seat_id, claim.token, outcome))
        try:
            claim = connection.next_claim()
        except TimeoutError as error:
            return _disconnect_after(error, job.server)
    return None


def _connect(server: Address) -> DispatcherConnection:
    if server not in _connections:
        # A new dispatcher has a new seat server. The connection to the old one is useless.
        for old in list(_connections):
            disconnect(old)
        _connections[server] = DispatcherConnection(server)
    return _connections[server]


def disconnect(server: Address) -> None:
    connection = _connections.pop(server, None)
    if connection is not None:
        connection.close()


def _disconnect_after(error: OSError, server: Address) -> DispatcherUnreachable:
    disconnect(server)
    return DispatcherUnreachable(f"cannot reach the dispatcher at {server[0]}:{server[1]} ({error})")


def make_attempt_runner(job: SeatJob) -> Callable[[Claim, ReportProgress], Outcome]:
    """The function that runs an attempt. Both it and this raise HandlerNotFound."""
    if job.command is not None:
        # Looked up for each seat: a command may be installed or removed while this process lives.
        command = CommandExecutor(job.command, max_result_bytes=job.max_result_bytes)
        _event_loop().run(command.start())
        return lambda claim, report: _event_loop().run(command.run(claim, report))
    if job.handler is None:
        return lambda _claim, _report: AttemptFailure("HANDLER_ERROR", "no handler and no command is set", retry=False)
    if job.handler not in _handlers:
        _handlers[job.handler] = load_handler(job.handler)
    handler = _handlers[job.handler]

    async def wait_for(awaitable: Any) -> Any:
        return await awaitable

    def run(claim: Claim, report: ReportProgress) -> Outcome:
        try:
            payload = parse_json(claim.payload)
        except ValueError as error:
            return bad_payload_failure(error)
        task = RunningTask(
            id=claim.task_id,
            queue=claim.queue,
            payload=payload,
            attempt=claim.attempt,
            max_attempts=claim.max_attempts,
            claim_token=str(claim.token),
            _report=report,
        )
        return run_handler(handler, task, job.max_result_bytes, lambda result: _event_loop().run(wait_for(result)))

    return run


def _event_loop() -> asyncio.Runner:
    global _runner  # noqa: PLW0603 - one loop for the life of this process, as in a worker's child process
    if _runner is None:
        _runner = asyncio.Runner()
    return _runner


def _output_of(job: SeatJob) -> SeatOutput | None:
    if job.output is None:
        return None
    if job.output not in _outputs:
        _outputs[job.output] = SeatOutput(job.output)
    return _outputs[job.output]


def _make_output_sender(connection: DispatcherConnection, seat_id: str, token: UUID) -> Callable[[LogChunk], None]:
    return lambda chunk: connection.send(wire_protocol.encode_output(seat_id, token, chunk))


def _make_reporter(connection: DispatcherConnection, seat_id: str, token: UUID) -> ReportProgress:
    sent_at = 0.0

    def report(fraction: float, note: str | None) -> None:
        nonlocal sent_at
        now = time.monotonic()
        if now - sent_at >= PROGRESS_INTERVAL_S or fraction >= 1.0:
            sent_at = now
            # A lost connection ends the process elsewhere. It must not raise in the handler.
            with contextlib.suppress(OSError):
                connection.send(wire_protocol.encode_progress(seat_id, token, fraction, note))

    return report
