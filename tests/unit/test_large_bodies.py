"""Large bodies of workers: counted before they are decoded, few at the same time, decoded in one thread."""

import asyncio
import gzip
import json
import threading
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import httpx
import pytest

from support.control_planes import InMemoryControlPlane, bearer, open_control_plane
from windlass.model.errors import BadInput
from windlass.model.task import MAX_PAYLOAD_BYTES_LIMIT
from windlass.model.worker_log import MAX_CALL_LINES, MAX_CHUNKS
from windlass.ports import http
from windlass.server import worker_calls
from windlass.server.errors import ApiError
from windlass.server.rate_limit import MAX_CALLS_PER_WORKER, MAX_LARGE_PER_WORKER, MAX_OPEN_CALLS_PER_WORKER
from windlass.server.request_body import MAX_BUFFERED_BYTES, decode_body
from windlass.server.route_table import MAX_SMALL_BODY_BYTES

LIMIT_S = 30.0


def finish_body(count: int) -> bytes:
    results = [{"task_id": number, "token": str(uuid4()), "result": "1"} for number in range(count)]
    return json.dumps({"finished": results}).encode()


def heartbeat_body(count: int) -> bytes:
    claims = [{"task_id": number, "token": str(uuid4())} for number in range(count)]
    return json.dumps({"claims": claims}).encode()


@pytest.fixture
async def plane(clock: Any) -> AsyncIterator[InMemoryControlPlane]:
    async with open_control_plane(clock) as plane:
        yield plane


def logs_body(*chunks: dict[str, Any]) -> bytes:
    return json.dumps({"batch_id": str(uuid4()), "chunks": chunks}).encode()


LARGE_CALLS = [
    pytest.param("finish", finish_body(http.MAX_FINISHED + 1), "at most 1,000 results", id="results"),
    pytest.param("finish", b'{"finished": [' + b"1," * 1_000_000 + b"1]}", "at most 1,000 results", id="numbers"),
    pytest.param(
        "finish", json.dumps({"queues": ["q"] * 20_000}).encode(), "65,536 bytes besides its results", id="queues"
    ),
    pytest.param("finish", b" " * 70_000 + b"{}", "65,536 bytes besides its results", id="spaces"),
    pytest.param("logs", logs_body(*[{"lines": ["a" * 400]}] * (MAX_CHUNKS + 1)), "at most 200 chunks", id="chunks"),
    pytest.param("logs", logs_body({"lines": ["a"] * 50_000}), "at most 20,000 lines", id="lines"),
    pytest.param(
        "logs", logs_body({"lines": ["a"] * 50_000}).replace(b", ", b"\t\n,"), "at most 20,000 lines", id="spaced lines"
    ),
    pytest.param("logs", logs_body({"lines": [], "ages_ms": [1] * 100_000}), "at most 20,000 ages", id="ages"),
]


@pytest.mark.parametrize(("call", "body", "reason"), LARGE_CALLS)
def test_h4_items_are_counted_before_they_are_decoded(
    monkeypatch: pytest.MonkeyPatch, call: str, body: bytes, reason: str
) -> None:
    decoded: list[int] = []
    monkeypatch.setattr(worker_calls, f"_decode_{call}", lambda body: decoded.append(len(body)))
    with pytest.raises((BadInput, ApiError), match=reason):
        getattr(worker_calls, f"_{call}_call")(body)
    assert decoded == []


def test_output_may_have_as_many_lines_as_allowed() -> None:
    """Each line looks like the text between two lines."""
    lines = [","] * MAX_CALL_LINES
    chunk = {"lines": lines, "ages_ms": [0] * len(lines)}
    assert worker_calls._logs_call(logs_body(chunk)).chunks[0].lines == tuple(lines)
    with pytest.raises(BadInput, match="20,000 lines, not 20,001"):
        worker_calls._logs_call(logs_body(chunk, {"lines": ["a"]}))
    with pytest.raises(BadInput, match="one of ages_ms for each"):
        worker_calls._logs_call(logs_body({"lines": ["a"], "ages_ms": [0, 0]}))


async def test_calls_with_as_many_items_as_allowed_are_accepted(plane: InMemoryControlPlane) -> None:
    headers = bearer(await plane.join())
    finished = await plane.client.post(http.FINISH, content=finish_body(http.MAX_FINISHED), headers=headers)
    assert (finished.status_code, len(finished.json()["lost"])) == (200, http.MAX_FINISHED)
    beat = await plane.client.post(http.HEARTBEAT, content=heartbeat_body(http.MAX_HELD_CLAIMS), headers=headers)
    assert (beat.status_code, len(beat.json()["lost"])) == (200, http.MAX_HELD_CLAIMS)
    beat = await plane.client.post(http.HEARTBEAT, content=heartbeat_body(http.MAX_HELD_CLAIMS + 1), headers=headers)
    assert (beat.status_code, beat.json()["code"]) == (400, "BAD_INPUT")
    assert "at most 500 claims, not 501" in beat.json()["detail"]


async def test_compressed_body_reserves_no_more_than_it_can_become(clock: Any) -> None:
    headers = {"content-encoding": "gzip"}
    async with open_control_plane(clock, max_payload_bytes=MAX_BUFFERED_BYTES) as plane:
        small = gzip.compress(finish_body(10))
        response = await plane.client.post(http.FINISH, content=small, headers=bearer(await plane.join()) | headers)
        assert (response.status_code, len(response.json()["lost"])) == (200, 10)
    # With the largest limit that can be configured, a compressed result of the maximum size fits too.
    assert http.max_body_bytes(MAX_PAYLOAD_BYTES_LIMIT) + MAX_PAYLOAD_BYTES_LIMIT < MAX_BUFFERED_BYTES


async def test_h4_one_worker_sends_few_large_bodies_at_a_time(plane: InMemoryControlPlane) -> None:
    token, other = await plane.join(), await plane.join("w1", 1)
    started, gate = asyncio.Semaphore(0), asyncio.Event()

    async def slow_body() -> AsyncIterator[bytes]:
        started.release()
        await gate.wait()
        yield b"{}"

    def post(token: str) -> "asyncio.Task[httpx.Response]":
        # Without a length, so that it counts as large.
        return asyncio.create_task(plane.client.post(http.FINISH, content=slow_body(), headers=bearer(token)))

    async with asyncio.timeout(LIMIT_S):
        held = [post(token) for _ in range(MAX_LARGE_PER_WORKER)]
        for _ in held:
            await started.acquire()
        refused = await post(token)
        assert (refused.status_code, refused.json()["code"]) == (429, "TOO_MANY")
        others = post(other)
        await started.acquire()
        gate.set()
        assert {response.status_code for response in await asyncio.gather(*held, others)} == {200}
        assert (await post(token)).status_code == 200  # those before have ended


async def test_h4_calls_of_one_worker_take_turns(plane: InMemoryControlPlane) -> None:
    """Others wait unread: sixteen connections of one worker delayed every heartbeat by two seconds."""
    token, other = await plane.join(), await plane.join("w1", 1)
    started, gate = 0, asyncio.Event()

    async def slow_body() -> AsyncIterator[bytes]:
        nonlocal started
        started += 1
        await gate.wait()
        yield b"{}"

    def post(path: str, token: str) -> "asyncio.Task[httpx.Response]":
        headers = {**bearer(token), "Content-Length": "2"}
        return asyncio.create_task(plane.client.post(path, content=slow_body(), headers=headers))

    async with asyncio.timeout(LIMIT_S):
        held = [post(http.HEARTBEAT, token) for _ in range(MAX_CALLS_PER_WORKER)]
        waiting = MAX_OPEN_CALLS_PER_WORKER - MAX_CALLS_PER_WORKER - 1  # besides the wait for work
        held += [post(http.REGISTER, token) for _ in range(waiting)]
        while started < MAX_CALLS_PER_WORKER:
            await asyncio.sleep(0)
        cancelled = held.pop()
        cancelled.cancel()
        wait = {"queues": ["a"], "timeout_s": 0}
        assert (await plane.post(http.WAIT, token, wait)).status_code == 200
        assert (await plane.post(http.HEARTBEAT, other)).status_code == 200
        assert started == MAX_CALLS_PER_WORKER
        gate.set()
        statuses = [response.status_code for response in await asyncio.gather(*held)]
    assert statuses == [200] * MAX_CALLS_PER_WORKER + [400] * (waiting - 1)
    assert plane.app.admission.worker_turns._turns == {}


async def test_large_bodies_are_decoded_one_after_another() -> None:
    """Decoding holds the interpreter lock: several threads would starve the event loop."""
    threads: set[int] = set()

    def decode(_content: bytes) -> None:
        threads.add(threading.get_ident())

    content = b" " * (MAX_SMALL_BODY_BYTES + 1)
    await asyncio.gather(*(decode_body(decode, content) for _ in range(20)))
    assert len(threads) == 1
    assert threading.get_ident() not in threads
