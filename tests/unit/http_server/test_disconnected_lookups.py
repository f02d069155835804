"""Lookups of callers whose connection to a real server has closed."""

import asyncio
from typing import Any

import httpx
import pytest

from support.control_planes import bearer, open_control_plane
from support.worker_harness import until
from windlass.model.auth import WORKER_PREFIX, hash_of
from windlass.ports import http
from windlass.server.identity_lookups import MAX_LOOKUPS
from windlass.server.server import listen, serving

LIMIT_S = 30.0


async def test_clients_that_left_are_not_looked_up_after_an_outage(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    no_limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with (
        open_control_plane(clock) as plane,
        serving(plane.app, listener) as tracker,
        httpx.AsyncClient(base_url=url, limits=no_limits, timeout=LIMIT_S, trust_env=False) as client,
    ):
        gate, lookups, authenticate = asyncio.Event(), list[bytes](), plane.store.authenticate

        async def hang(token_hash: bytes) -> Any:
            lookups.append(token_hash)
            await gate.wait()
            return await authenticate(token_hash)

        token = await plane.join()
        monkeypatch.setattr(plane.store, "authenticate", hang)
        queue = plane.app.admission.authenticator._machine_lookups

        def post(sent: str) -> "asyncio.Task[httpx.Response]":
            return asyncio.create_task(client.post(http.HEARTBEAT, json={}, headers=bearer(sent)))

        made_up = [f"{WORKER_PREFIX}{number:064x}" for number in range(MAX_LOOKUPS + 20)]
        calls = [post(each) for each in made_up[:MAX_LOOKUPS]]
        await until(lambda: len(lookups) == MAX_LOOKUPS, "lookups hang", LIMIT_S)
        calls += [post(each) for each in made_up[MAX_LOOKUPS:]]
        await until(lambda: len(queue._waiting) == 20, "others wait", LIMIT_S)
        for each in calls:
            each.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await until(lambda: len(tracker) == 0, "their connections are closed", LIMIT_S)
        live = post(token)
        await until(lambda: len(queue._waiting) == 21, "a worker waits", LIMIT_S)
        gate.set()
        assert (await live).status_code == 200
        assert lookups == [hash_of(each) for each in (*made_up[:MAX_LOOKUPS], token)]
