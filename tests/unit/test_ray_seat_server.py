"""The connection between seats and their dispatcher: messages, server, and the process of a seat."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import pytest

from support.ray_builders import make_claim
from windlass.model.task import Claim
from windlass.model.worker_log import LogChunk
from windlass.ray import seat_process, wire_protocol
from windlass.ray.seat_process import DispatcherConnection, SeatJob, make_attempt_runner, run_seat
from windlass.ray.seat_server import SeatServer
from windlass.worker.executor import AttemptFailure, AttemptSuccess, Outcome

# ---------------------------------------------------------------------------------------------------- wire protocol


@pytest.mark.parametrize(
    "outcome",
    [
        AttemptSuccess(None),
        AttemptSuccess("null"),
        AttemptSuccess('{"say": "Gr\u00fc\u00dfe"}'),
        AttemptFailure("TIMEOUT", "too\nlate"),
        AttemptFailure("X", "", retry=False),
    ],
    ids=["no result", "result null", "result with umlauts", "error with a line break", "empty error, no retry"],
)
def test_outcome_survives_encoding(outcome: Outcome) -> None:
    line, _, body = wire_protocol.encode_finished("s", uuid4(), outcome).partition(b"\n")
    header = json.loads(line)
    size = wire_protocol.body_size(header, 100)
    assert size == (None if outcome == AttemptSuccess(None) else len(body))
    assert wire_protocol.decode_outcome(header, None if size is None else body) == outcome


def test_claim_survives_encoding() -> None:
    claim = make_claim({"text": "\n" * 10})
    line, _, body = wire_protocol.encode_run(claim).partition(b"\n")
    assert wire_protocol.decode_run(json.loads(line), body) == claim
    assert wire_protocol.decode_run(json.loads(wire_protocol.encode_run(None)), None) is None


def test_long_error_is_cut() -> None:
    failure = AttemptFailure("X", "\u00e9" * wire_protocol.MAX_ERROR_BYTES)
    line, _, body = wire_protocol.encode_finished("s", uuid4(), failure).partition(b"\n")
    assert len(body) == wire_protocol.MAX_ERROR_BYTES
    assert wire_protocol.decode_outcome(json.loads(line), body).error.startswith("\u00e9")  # type: ignore[union-attr]


@pytest.mark.parametrize("size", [11, -1, "10", 1.5])
def test_invalid_body_size_is_rejected(size: object) -> None:
    with pytest.raises(ValueError, match="is not between 0 and 10"):
        wire_protocol.body_size({"size": size}, 10)


# ------------------------------------------------------------------------------------------------------ seat server


class RecordingPool:
    """Knows the seat `s` on node `n`, hands out claims, and records messages."""

    def __init__(self, *claims: Claim) -> None:
        self.claims = list(claims)
        self.received: list[Any] = []

    def has_seat(self, seat_id: str) -> bool:
        return seat_id == "s"

    def on_loading(self, *loading: str) -> None:
        self.received.append(loading)

    async def on_started(self, seat_id: str, node_id: str, disconnect: Callable[[], None]) -> Claim | None:
        self.disconnect = disconnect
        return self.claims.pop(0) if (seat_id, node_id) == ("s", "n") else None

    async def on_finished(self, seat_id: str, token: UUID, outcome: Outcome) -> Claim | None:
        self.received.append((seat_id, token, outcome))
        return self.claims.pop(0) if self.claims else None

    def on_progress(self, *progress: Any) -> None:
        self.received.append(progress)

    def on_output(self, *output: Any) -> None:
        self.received.append(output)


@asynccontextmanager
async def running_server(pool: RecordingPool, max_result_bytes: int) -> AsyncIterator[tuple[str, int]]:
    server = SeatServer(pool, max_result_bytes)  # type: ignore[arg-type]
    try:
        yield await server.open("127.0.0.1")
    finally:
        await server.close()


async def read_run(reader: asyncio.StreamReader) -> Claim | None:
    header = json.loads(await reader.readline())
    return wire_protocol.decode_run(header, await reader.readexactly(header["size"]) if "size" in header else None)


async def assert_closed(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), 10) == b""


async def test_server_passes_claims_and_outcomes_and_drops_bad_connections() -> None:
    first, second = make_claim({}), make_claim("x" * wire_protocol.MAX_HEADER_BYTES)
    result = json.dumps("y" * 10 * wire_protocol.MAX_HEADER_BYTES)
    pool = RecordingPool(first, second)
    async with running_server(pool, len(result)) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(wire_protocol.encode_started("unknown", "n"))
        assert await read_run(reader) is None
        writer.write(wire_protocol.encode_loading("s", "n") + wire_protocol.encode_started("s", "n"))
        assert await read_run(reader) == first
        writer.write(wire_protocol.encode_progress("s", first.token, 0.5, "half"))
        writer.write(wire_protocol.encode_output("s", first.token, LogChunk(("a", "b"), dropped=3)))
        writer.write(wire_protocol.encode_finished("s", first.token, AttemptSuccess(result)))
        assert await read_run(reader) == second
        # An invalid message, or one with too large a body, closes its own connection only.
        too_large = wire_protocol.encode_finished("s", first.token, AttemptSuccess("9" * (1 << 20)))
        for message in (b"GET / HTTP/1.1\r\n\r\n", too_large):
            bad_reader, bad_writer = await asyncio.open_connection(*address)
            bad_writer.write(message)
            await assert_closed(bad_reader)
            bad_writer.close()
        writer.write(wire_protocol.encode_finished("s", second.token, AttemptFailure("X", "why")))
        assert await read_run(reader) is None
        assert pool.received == [
            ("s", "n"),
            ("s", first.token, 0.5, "half"),
            ("s", first.token, b"a\nb\n", 3),
            ("s", first.token, AttemptSuccess(result)),
            ("s", second.token, AttemptFailure("X", "why")),
        ]
        writer.close()


async def test_unidentified_connections_are_limited_and_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.ray.seat_server.MAX_UNIDENTIFIED", 2)
    monkeypatch.setattr("windlass.ray.seat_server.UNIDENTIFIED_TIMEOUT_S", 2.0)
    result = AttemptSuccess("9" * (1 << 20))
    async with running_server(RecordingPool(make_claim({})), 1 << 20) as address:
        connections = [await asyncio.open_connection(*address)]
        reader, writer = connections[0]
        try:
            writer.write(wire_protocol.encode_started("s", "n"))
            await reader.readuntil(b"\n{}")
            connections += [await asyncio.open_connection(*address) for _ in range(5)]
            connections[1][1].write(wire_protocol.encode_finished("x", uuid4(), result))
            assert await read_run(connections[1][0]) is None
            # An incomplete message does not extend the time limit.
            connections[2][1].write(wire_protocol.encode_finished("x", uuid4(), result)[:-1])
            for other, _ in connections[1:]:
                await assert_closed(other)
            # The identified connection still works.
            writer.write(wire_protocol.encode_progress("s", uuid4(), 0.5, None))
            writer.write(wire_protocol.encode_started("another", "n"))
            assert await read_run(reader) is None
        finally:
            for _, each in connections:
                each.close()


@pytest.mark.parametrize("is_running", [True, False], ids=["the seat runs an attempt", "the seat has to exit"])
async def test_server_disconnects_only_a_process_that_still_runs_the_seat(is_running: bool) -> None:
    claim = make_claim({})
    pool = RecordingPool(claim)
    async with running_server(pool, 1000) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(wire_protocol.encode_started("s", "n"))
        await reader.readuntil(b"\n{}")
        if not is_running:
            writer.write(wire_protocol.encode_finished("s", claim.token, AttemptSuccess("1")))
            assert await read_run(reader) is None
        pool.disconnect()
        if is_running:
            await assert_closed(reader)
        else:
            # The process may run another seat by now.
            writer.write(wire_protocol.encode_started("another", "n"))
            assert await read_run(reader) is None
        writer.close()


# ----------------------------------------------------------------------------------------------------- seat process


@pytest.mark.parametrize("end", [-1, -50, 30], ids=["at the payload's end", "in the payload", "in the header"])
def test_truncated_claim_is_not_run_and_the_process_exits(monkeypatch: pytest.MonkeyPatch, end: int) -> None:
    message, exited = wire_protocol.encode_run(make_claim("x" * 100)), threading.Event()
    monkeypatch.setattr("windlass.ray.seat_process.os._exit", lambda _code: exited.set())
    monkeypatch.setattr(seat_process, "NEXT_CLAIM_TIMEOUT_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = DispatcherConnection(server.getsockname())
        peer, _ = server.accept()
        with peer:
            peer.sendall(message[:end])
        assert exited.wait(10)
        with pytest.raises(TimeoutError):
            connection.next_claim()
        connection.close()


def test_seat_reports_that_it_loads_the_handler_only_the_first_time() -> None:
    expected = [
        [wire_protocol.encode_loading("0", "n"), wire_protocol.encode_started("0", "n")],
        [wire_protocol.encode_started("1", "n")],
    ]
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as process:
        # A handler that no other test loads.
        job = SeatJob(server.getsockname(), "textwrap:dedent", None, 1000)
        try:
            for number, messages in enumerate(expected):
                seat_exit = process.submit(run_seat, str(number), job, "n")
                if not number:
                    peer, _ = server.accept()
                    received = peer.makefile("rb")
                assert [received.readline() for _ in messages] == messages
                peer.sendall(wire_protocol.encode_run(None))
                assert seat_exit.result(10) is None
        finally:
            seat_process.disconnect(job.server)
        received.close()
        peer.close()


def test_payload_that_python_cannot_parse_fails_its_attempt() -> None:
    job = SeatJob(("127.0.0.1", 1), "json:dumps", None, 1000)
    unreadable = replace(make_claim({}), payload="[" * 200_000 + "]" * 200_000)
    outcome = make_attempt_runner(job)(unreadable, lambda _fraction, _note: None)
    assert isinstance(outcome, AttemptFailure)
    assert (outcome.code, outcome.retry) == ("BAD_PAYLOAD", False)
