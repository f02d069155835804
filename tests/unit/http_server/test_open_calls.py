"""Calls that one caller keeps open, against a real server with few connections."""

import asyncio
from typing import Any

import httpx
import pytest

from support.control_planes import bearer, open_control_plane
from support.worker_harness import until
from windlass.model.auth import Role
from windlass.ports import http
from windlass.server import server
from windlass.server.long_poll import LongPollHub
from windlass.server.rate_limit import MAX_OPEN_CALLS, MAX_OPEN_CALLS_PER_WORKER
from windlass.server.server import listen, serving

CONNECTIONS = 2 * MAX_OPEN_CALLS_PER_WORKER
LIMIT_S = 30.0


async def test_waits_of_one_worker_leave_connections_to_others(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "connection_limit", lambda: CONNECTIONS)
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    no_limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)

    async def no_work(_queues: Any, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)

    hub = LongPollHub(no_work)
    async with (
        open_control_plane(clock, long_poll_hub=hub) as plane,
        serving(plane.app, listener) as tracker,
        httpx.AsyncClient(base_url=url, limits=no_limits, timeout=LIMIT_S, trust_env=False) as greedy,
        httpx.AsyncClient(base_url=url, timeout=LIMIT_S, trust_env=False) as other,
    ):
        token, other_token = await plane.join(), await plane.join("w1", 1)
        wait = {"queues": ["a"], "timeout_s": http.MAX_WAIT_S}
        wait["cursor"] = (await plane.post(http.WAIT, token, wait)).json()

        def wait_for_work() -> "asyncio.Task[httpx.Response]":
            return asyncio.create_task(greedy.post(http.WAIT, json=wait, headers=bearer(token)))

        waits = [wait_for_work() for _ in range(CONNECTIONS)]
        open_calls = plane.app.admission.open_calls

        def refused() -> list[httpx.Response]:
            return [each.result() for each in waits if each.done() and each.exception() is None]

        await until(
            lambda: len(refused()) == CONNECTIONS - MAX_OPEN_CALLS_PER_WORKER, "the others are refused", LIMIT_S
        )
        assert {(reply.status_code, reply.json()["code"]) for reply in refused()} == {(429, "TOO_MANY")}
        assert len(tracker) == CONNECTIONS
        assert (await other.get("/healthz")).status_code == 200
        assert (await other.post(http.HEARTBEAT, json={}, headers=bearer(other_token))).status_code == 200
        # Their end makes room for others.
        for each in waits:
            each.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        await hub.close()
        await until(lambda: not open_calls._counts, "all calls have ended", LIMIT_S)
        assert (await greedy.post(http.HEARTBEAT, json={}, headers=bearer(token))).status_code == 200


async def test_api_token_has_a_limit_of_open_calls(clock: Any) -> None:
    async with open_control_plane(clock) as plane:
        token, gate = await plane.api_token(Role.WORKER), asyncio.Event()

        async def slow_body() -> Any:
            await gate.wait()
            yield b"{}"

        def post() -> "asyncio.Task[httpx.Response]":
            headers = {**bearer(token), "Content-Length": "2"}
            return asyncio.create_task(plane.client.post(http.SELF_REGISTER, content=slow_body(), headers=headers))

        calls = [post() for _ in range(MAX_OPEN_CALLS + 1)]
        done, _ = await asyncio.wait(calls, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        assert [each.result().status_code for each in done] == [429]
        gate.set()
        replies = await asyncio.gather(*calls)
        assert sum(reply.status_code == 429 for reply in replies) == 1
