"""What stands before every handler, in virtual time."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse

from windlass.api.guard import BODY_TIMEOUT_S, Guard
from windlass.sim.loop import run

SCOPE: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": []}


async def take(scope: Any, receive: Any, send: Any) -> None:
    body = await Request(scope, receive).body()
    await PlainTextResponse(f"{len(body)} bytes")(scope, receive, send)


def test_a_body_that_comes_in_pieces_has_one_time_limit() -> None:
    async def answered(piece_every_s: float, pieces: int) -> tuple[int, float]:
        left, status = pieces, 0

        async def receive() -> dict[str, Any]:
            nonlocal left
            await asyncio.sleep(piece_every_s)
            left -= 1
            return {"type": "http.request", "body": b"x", "more_body": left > 0}

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)

        began = asyncio.get_running_loop().time()
        await Guard(take, max_body_bytes=1_000)(SCOPE, receive, send)
        return status, asyncio.get_running_loop().time() - began

    async def both() -> None:
        assert await answered(BODY_TIMEOUT_S / 10, 9) == (200, BODY_TIMEOUT_S * 0.9)
        assert await answered(BODY_TIMEOUT_S / 10, 900) == (408, BODY_TIMEOUT_S)

    run(both())
