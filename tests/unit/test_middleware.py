"""Body timeouts of the outermost middleware, in virtual time."""

import asyncio
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from windlass.server.connections import MIN_BODY_BYTES_PER_S
from windlass.server.middleware import BODY_TIMEOUT_S, RequestLimits
from windlass.simulator.loop import run

SCOPE: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": []}


async def count_bytes(scope: Any, receive: Any, send: Any) -> None:
    body = await Request(scope, receive).body()
    await PlainTextResponse(f"{len(body)} bytes")(scope, receive, send)


def test_body_timeout_is_extended_by_bytes_at_the_minimum_rate() -> None:
    async def send_body(piece_every_s: float, pieces: int, piece: bytes = b"x") -> tuple[int, float]:
        left, status = pieces, 0

        async def receive() -> dict[str, Any]:
            nonlocal left
            await asyncio.sleep(piece_every_s)
            left -= 1
            return {"type": "http.request", "body": piece, "more_body": left > 0}

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)

        began = asyncio.get_running_loop().time()
        await RequestLimits(count_bytes, max_body_bytes=100 << 20)(SCOPE, receive, send)
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
