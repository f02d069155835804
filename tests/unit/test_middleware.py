"""Limits of request bodies and of refused requests, in virtual time, and decompression."""

import asyncio
import gzip
import os
import resource
from collections import Counter
from typing import Any, cast

import pytest

from support.simulator.loop import run
from windlass.ports import http
from windlass.server.connections import MIN_BODY_BYTES_PER_S
from windlass.server.errors import ApiError
from windlass.server.middleware import LATE_REFUSAL_S, MAX_LATE_REFUSALS, AdmissionMiddleware
from windlass.server.request_body import BODY_TIMEOUT_S, BodyReader, BufferedBytes, inflate
from windlass.server.route_table import MAX_SMALL_BODY_BYTES, RouteTable

CHUNKED = {b"transfer-encoding": b"chunked"}


def body_of(
    pieces: list[bytes],
    headers: dict[bytes, bytes] | None = None,
    buffered: BufferedBytes | None = None,
    caller: str = "",
) -> BodyReader:
    left = list(pieces)

    async def receive() -> dict[str, Any]:
        piece = left.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(left)}

    body = BodyReader(receive, CHUNKED if headers is None else headers, buffered=buffered or BufferedBytes())
    body.caller = caller
    return body


async def content_of(body: BodyReader, max_bytes: int) -> bytes:
    body.set_limit(max_bytes)
    await body.read()
    message = await body.receive()
    assert not message["more_body"]
    return bytes(message["body"])


def test_body_timeout_is_extended_by_bytes_at_the_minimum_rate() -> None:
    async def send_body(piece_every_s: float, pieces: int, piece: bytes = b"x") -> tuple[int, float]:
        left = pieces

        async def receive() -> dict[str, Any]:
            nonlocal left
            await asyncio.sleep(piece_every_s)
            left -= 1
            return {"type": "http.request", "body": piece, "more_body": left > 0}

        began = asyncio.get_running_loop().time()
        body, status = BodyReader(receive, CHUNKED, buffered=BufferedBytes()), 200
        try:
            await content_of(body, 100 << 20)
        except ApiError as error:
            status = error.status_code
        body.release()
        return status, asyncio.get_running_loop().time() - began

    async def check() -> None:
        assert await send_body(BODY_TIMEOUT_S / 10, 9) == (200, BODY_TIMEOUT_S * 0.9)
        status, took_s = await send_body(BODY_TIMEOUT_S / 10, 900)
        assert (status, took_s) == (408, pytest.approx(BODY_TIMEOUT_S, abs=0.1))
        # Ten minutes at the minimum rate, and at half of it.
        assert (await send_body(1.0, 600, b"x" * MIN_BODY_BYTES_PER_S))[0] == 200
        status, took_s = await send_body(1.0, 600, b"x" * (MIN_BODY_BYTES_PER_S // 2))
        assert (status, took_s) == (408, pytest.approx(2 * BODY_TIMEOUT_S, abs=1.0))

    run(check())


async def test_body_above_limit_is_refused_by_header_or_while_read() -> None:
    announced = body_of([b"x" * 11], {b"content-length": b"11"})
    with pytest.raises(ApiError, match="more than 10 bytes") as error:
        announced.set_limit(10)
    assert error.value.status_code == 413
    with pytest.raises(ApiError, match="more than 10 bytes"):
        await content_of(body_of([b"x" * 6, b"x" * 6]), 10)
    assert await content_of(body_of([b"x" * 5, b"x" * 5]), 10) == b"x" * 10


async def test_large_bodies_share_a_total_and_small_ones_pass() -> None:
    buffered = BufferedBytes(1_000_000)
    first = body_of([b"x" * 400_000], buffered=buffered, caller="a")
    second = body_of([b"x" * 200_000, b"x" * 200_000], buffered=buffered, caller="b")
    for body in (first, second):
        await content_of(body, 6 << 20)
    assert buffered.used == 800_000
    with pytest.raises(ApiError, match="at the same time: retry") as error:
        await content_of(body_of([b"x" * 300_000], buffered=buffered, caller="c"), 6 << 20)
    assert (error.value.status_code, error.value.headers) == (503, {"Retry-After": "1"})
    small = body_of([b"small"], buffered=buffered, caller="c")
    assert await content_of(small, 6 << 20) == b"small"
    assert buffered.used == 800_005
    for body in (first, second, small):
        body.release()
    assert buffered.used == 0


async def test_small_bodies_count_in_the_total_and_have_a_reserve() -> None:
    buffered = BufferedBytes(1_000_000, small_reserve=50_000)
    many = [body_of([b"x" * 50_000], buffered=buffered, caller=f"worker {number}") for number in range(19)]
    for body in many:
        await content_of(body, MAX_SMALL_BODY_BYTES)
    # Their bytes leave less to large bodies, and the reserve to further small ones.
    with pytest.raises(ApiError, match="too many large requests at the same time"):
        await content_of(body_of([b"x" * 70_000], buffered=buffered, caller="a"), 6 << 20)
    last = body_of([b"x" * 50_000, b"x" * 10_000], buffered=buffered, caller="a")
    assert len(await content_of(last, MAX_SMALL_BODY_BYTES)) == 60_000
    with pytest.raises(ApiError, match="too many requests at the same time") as error:
        await content_of(body_of([b"x" * 50_000], buffered=buffered, caller="b"), MAX_SMALL_BODY_BYTES)
    assert (error.value.status_code, error.value.headers) == (503, {"Retry-After": "1"})
    for body in (*many, last):
        body.release()
    assert (buffered.used, buffered._held) == (0, Counter())


async def test_one_caller_cannot_hold_all_memory_for_large_bodies() -> None:
    buffered = BufferedBytes(1_000_000)
    first = body_of([b"x" * 400_000], buffered=buffered, caller="token:cron")
    await content_of(first, 6 << 20)
    with pytest.raises(ApiError, match="of this caller at the same time: retry") as error:
        await content_of(body_of([b"x" * 400_000], buffered=buffered, caller="token:cron"), 6 << 20)
    assert error.value.status_code == 503
    await content_of(body_of([b"x" * 400_000], buffered=buffered, caller="worker w1"), 6 << 20)
    first.release()
    await content_of(body_of([b"x" * 400_000], buffered=buffered, caller="token:cron"), 6 << 20)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param(gzip.compress(os.urandom(3 << 20)), 200, id="within the limits"),
        pytest.param(gzip.compress(b"[" * (3 << 20)), 413, id="compressed too much"),
        pytest.param(gzip.compress(b"[" * (1 << 20)), 200, id="small enough for any ratio"),
        pytest.param(gzip.compress(os.urandom(5 << 20)), 413, id="too large"),
        pytest.param(gzip.compress(b"x" * 1000)[:-9], 400, id="incomplete"),
        pytest.param(gzip.compress(b"x") + b"y", 400, id="with more data"),
        pytest.param(b"{}", 400, id="not compressed"),
        pytest.param(b"", 400, id="empty"),
    ],
)
async def test_compressed_body_is_inflated_within_limits(body: bytes, status: int) -> None:
    buffered = BufferedBytes()
    request = body_of([body[:100], body[100:]], CHUNKED | {b"content-encoding": b"gzip"}, buffered)
    try:
        assert await content_of(request, 4 << 20) == gzip.decompress(body)
        seen = 200
    except ApiError as error:
        seen = error.status_code
    assert seen == status
    request.release()
    assert buffered.used == 0


def test_inflating_stops_at_the_limit() -> None:
    bomb = gzip.compress(b"0" * (256 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ApiError, match="more than 6,291,456 bytes|compressed more than"):
        inflate(bomb, http.max_body_bytes(1 << 20))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


async def test_compressed_body_is_refused_on_other_routes() -> None:
    with pytest.raises(ApiError, match="Content-Encoding"):
        body_of([], {b"content-encoding": b"gzip"}).set_limit(64 * 1024)
    with pytest.raises(ApiError, match="Content-Encoding"):
        body_of([], {b"content-encoding": b"br"}).set_limit(6 << 20)


async def send_unknown_path(middleware: AdmissionMiddleware, address: str) -> tuple[int, float, bool]:
    """Announce a large body for a path that does not exist: status, when it was sent, and whether the body was read."""
    loop, statuses, is_read = asyncio.get_running_loop(), list[tuple[int, float]](), False

    async def receive() -> dict[str, Any]:
        nonlocal is_read
        is_read = True
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append((message["status"], loop.time()))

    scope = {
        **{"type": "http", "method": "POST", "path": "/nothing", "query_string": b"", "client": (address, 4711)},
        "headers": [(b"content-length", b"6000000")],
    }
    await middleware(scope, receive, send)
    return *statuses[0], is_read


def outcomes(replies: list[tuple[int, float, bool]], began: float) -> Counter[tuple[int, str, bool]]:
    return Counter((status, "at once" if sent_at == began else "late", is_read) for status, sent_at, is_read in replies)


def test_caller_that_is_refused_all_the_time_is_answered_late(monkeypatch: pytest.MonkeyPatch) -> None:
    # Exact in binary, so that exactly as many fit.
    allowed = 64
    monkeypatch.setattr("windlass.server.middleware.MAX_REFUSALS_PER_S", float(allowed))

    async def check() -> None:
        loop = asyncio.get_running_loop()
        middleware = AdmissionMiddleware(
            cast(Any, None), RouteTable([]), cast(Any, None), rate_limit=1.0, worker_rate_limit=1.0, clock=loop.time
        )
        began = loop.time()
        replies = await asyncio.gather(*(send_unknown_path(middleware, "192.0.2.7") for _ in range(allowed + 100)))
        late = {sent_at for status, sent_at, _ in replies if status == 429}
        assert len(late) > 1
        assert all(0.5 * LATE_REFUSAL_S <= sent_at - began <= 1.5 * LATE_REFUSAL_S for sent_at in late)
        # The rest of a body is dropped only for those within the limit.
        assert outcomes(replies, began) == {(404, "at once", True): allowed, (429, "late", False): 100}
        assert await send_unknown_path(middleware, "192.0.2.8") == (404, loop.time(), True)
        # Requests that wait are limited, too.
        began = loop.time()
        replies = await asyncio.gather(
            *(send_unknown_path(middleware, "192.0.2.9") for _ in range(allowed + MAX_LATE_REFUSALS + 7))
        )
        assert outcomes(replies, began) == {
            (404, "at once", True): allowed,
            (429, "late", False): MAX_LATE_REFUSALS,
            (429, "at once", False): 7,
        }
        assert middleware.late_refusals == 0

    run(check())
