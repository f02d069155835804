"""Every route of the API as callers that are limited to other queues and fleets, expired, or revoked."""

import re
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from support.api_fixture import API, RNG, ApiFixture
from windlass.model.auth import API_PREFIX, Role, TokenScope, hash_of, new_token
from windlass.model.task import new_task
from windlass.model.worker import Registration

SECRET = "only-of-queue-a"
ROLES = (Role.VIEWER, Role.PRODUCER, Role.OPERATOR, Role.ADMIN)
# Bodies that are valid, so that a refusal is about the caller.
BODIES: dict[str, Any] = {
    "/tasks": {"queue": "a"},
    "/tasks/retry": {"task_ids": [1]},
    "/tasks/cancel": {"task_ids": [1]},
    "/tasks/retry-failed": {"queue": "a"},
    "/tokens": {"name": "mine", "role": "admin"},
}


async def token_client(api: ApiFixture, role: Role, scope: TokenScope, ttl_s: float | None = None) -> httpx.AsyncClient:
    token = new_token(API_PREFIX, RNG)
    await api.store.create_token(f"limited-{token[-6:]}", role, hash_of(token), scope=scope, ttl_s=ttl_s)
    return api.client("192.0.2.7", Authorization=f"Bearer {token}")


async def calls_of(api: ApiFixture) -> list[tuple[str, str, Any]]:
    """Every route, with ids of the queue `a`, the fleet `gpus`, its worker and the task."""
    task_id = await api.store.enqueue(new_task("a", {"text": SECRET}, max_attempts=1))
    await api.run_cycle()
    await api.store.register(Registration("secret-worker", ("a",), fleet="gpus"))
    (claim,) = await api.store.claim("secret-worker", ["a"])
    await api.store.fail("secret-worker", claim.task_id, claim.token, SECRET, retry=False)
    values = {"task_id": task_id, "worker_id": "secret-worker", "fleet": "gpus", "queue": "a", "cycle_id": 1}
    description = (await (await api.client_as(Role.ADMIN)).get(f"{API}/openapi.json")).json()
    calls = []
    for path, methods in description["paths"].items():
        if path.endswith("/stream") or "/internal/" in path or not path.startswith(API):
            continue
        filled = re.sub(r"\{(\w+)\}", lambda found: quote(str(values.get(found[1], "gpus"))), path)
        body = BODIES.get(path.removeprefix(API), {})
        calls += [(method.upper(), filled, body if method != "get" else None) for method in methods]
    assert len(calls) > 35
    return calls


async def state_of(api: ApiFixture) -> tuple[Any, ...]:
    tokens = [(token.name, token.revoked_at) for token in await api.store.tokens()]
    tasks = [(task.id, task.queue, task.status) for task in await api.store.tasks()]
    workers = [(worker.id, worker.status, worker.is_paused) for worker in await api.store.workers()]
    fleets = [(fleet.name, fleet.is_paused) for fleet in await api.store.fleets()]
    return tokens, tasks, workers, fleets


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "scope",
    [
        pytest.param(TokenScope(queues=frozenset({"b"})), id="another queue"),
        pytest.param(TokenScope(fleets=frozenset({"other"})), id="another fleet"),
    ],
)
async def test_limited_token_reaches_nothing_outside_its_scope(api: ApiFixture, role: Role, scope: TokenScope) -> None:
    calls = await calls_of(api)
    client = await token_client(api, role, scope)
    before = await state_of(api)
    for method, path, body in calls:
        response = await client.request(method, path, json=body)
        assert response.status_code < 500, (method, path)
        shown = response.text
        assert SECRET not in shown, (method, path, shown[:300])
        # An error may repeat the id that it was given.
        assert response.status_code >= 400 or "secret-worker" not in shown, (method, path, shown[:300])
        if method != "GET":
            assert response.status_code >= 400 or response.json().get("changed") == 0, (method, path, shown[:300])
    assert await state_of(api) == before


@pytest.mark.parametrize("ending", ["expired", "revoked"])
async def test_ended_token_reaches_nothing(api: ApiFixture, clock: Any, ending: str) -> None:
    calls = await calls_of(api)
    client = await token_client(api, Role.ADMIN, TokenScope(), ttl_s=60)
    assert (await client.get(f"{API}/tasks")).status_code == 200
    if ending == "expired":
        clock.advance(timedelta(seconds=61).total_seconds())
    else:
        await api.store.revoke_token(next(t.name for t in await api.store.tokens() if t.name.startswith("limited-")))
    before = await state_of(api)
    for method, path, body in calls:
        response = await client.request(method, path, json=body)
        assert response.status_code in (401, 429) or path.endswith(("/openapi.json", "/docs")), (method, path)
        assert SECRET not in response.text
    assert await state_of(api) == before
