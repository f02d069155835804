"""Every route decides on a request by its header, before a byte of the body is read."""

import asyncio
import threading
from typing import Any

import pytest
from fastapi.routing import iter_route_contexts
from pydantic import TypeAdapter

from support.api_fixture import API, ApiFixture, open_api
from support.worker_harness import until
from windlass.model.auth import Role
from windlass.ports import http
from windlass.server.request_body import decode_body
from windlass.server.route_table import MAX_ANONYMOUS_BODY_BYTES, MAX_SMALL_BODY_BYTES, Access, RouteEntry
from windlass.store.connection import connected

WRITES = ("POST", "PUT", "PATCH", "DELETE")
# Routes without a caller: the body carries the secret.
WITHOUT_CALLER = (Access.OPEN, Access.ANYONE)
# Answered without FastAPI, by decoders that stop at the first error.
WORKER_CALLS = (http.CLAIM, http.FINISH, http.HEARTBEAT, http.LOGS)


@pytest.fixture(autouse=True)
def _unlimited_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are refused by every route in turn."""
    monkeypatch.setattr("windlass.server.middleware.MAX_REFUSALS_PER_S", 1e6)


async def status_without_body(api: ApiFixture, route: RouteEntry, headers: dict[str, str]) -> int:
    """Status of a request whose body never arrives. Fails if the server asks for the body first."""
    statuses: list[int] = []

    async def receive() -> Any:
        assert statuses, f"{route.method} {route.path} asked for its body before it was authorised"
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    given = {"host": "127.0.0.1", "content-length": "40000", "content-type": "application/json", **headers}
    path = route.path.replace("{", "").replace("}", "")
    scope = {
        **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": ""},
        **{"method": route.method, "path": path, "raw_path": path.encode(), "query_string": b""},
        "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
        "client": ("192.0.2.7", 4711),
        "server": ("127.0.0.1", 80),
        "state": {},
    }
    await api.app(scope, receive, send)
    return statuses[0]


def routes_that_write(api: ApiFixture) -> list[RouteEntry]:
    routes = [
        route for route in api.app.admission.routes if route.method in WRITES and route.access not in WITHOUT_CALLER
    ]
    assert len(routes) > 30
    return routes


async def test_c1_no_route_reads_a_body_without_a_token(api: ApiFixture) -> None:
    for route in routes_that_write(api):
        assert await status_without_body(api, route, {}) == 401, route


async def test_c1_no_route_reads_a_body_of_the_wrong_role(api: ApiFixture) -> None:
    headers = await api.auth_headers(Role.VIEWER)
    for route in routes_that_write(api):
        assert await status_without_body(api, route, headers) == 403, route


async def test_bodies_are_small_but_of_enqueue_finish_and_logs(api: ApiFixture) -> None:
    large = {route.path for route in api.app.admission.routes if route.max_body_bytes > MAX_SMALL_BODY_BYTES}
    assert large == {"/api/v1/tasks", http.FINISH, http.LOGS}
    anonymous = [route for route in api.app.admission.routes if route.access is Access.ANYONE]
    assert anonymous
    assert all(route.max_body_bytes <= MAX_ANONYMOUS_BODY_BYTES for route in anonymous)


async def test_h1_large_body_is_decoded_outside_the_event_loop() -> None:
    def decode(_content: bytes) -> int:
        return threading.get_ident()

    assert await decode_body(decode, b" " * MAX_SMALL_BODY_BYTES) == threading.get_ident()
    assert await decode_body(decode, b" " * (MAX_SMALL_BODY_BYTES + 1)) != threading.get_ident()


def wrong_body(schema: dict[str, Any], definitions: dict[str, Any]) -> Any:
    """A value of this form whose lists have thousands of wrong items, and which has thousands of unknown fields."""
    schema = definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if schema.get("type") == "array":
        return [[]] * 3_000
    if "properties" in schema:
        known = {name: wrong_body(each, definitions) for name, each in schema["properties"].items()}
        return {**{f"x{number}": 0 for number in range(2_000)}, **known}
    return None


async def test_h4_validation_describes_few_of_many_errors(api: ApiFixture) -> None:
    """Describing 20,000 errors took 80 ms of the event loop, for a body of 64 KiB."""
    with_lists = 0
    for route in iter_route_contexts(api.app.api.routes):
        field = getattr(route, "body_field", None)
        if field is None or route.path in WORKER_CALLS:
            continue
        schema = TypeAdapter(field.field_info.annotation).json_schema()
        body = wrong_body(schema, schema.get("$defs", {}))
        with_lists += "array" in str(schema)
        _, errors = field.validate(body, {}, loc=("body",))
        assert len(errors) < 30, route.path
    assert with_lists >= 4


async def test_m2_open_paths_are_exact_and_limited(dsn: str) -> None:
    async with open_api(dsn, rate_limit=0.5) as api:
        for path in ("/healthzz", "/healthz/", "/readyz.", "/static/", "/static/missing.js"):
            assert (await api.remote.get(path)).status_code == 404, path
        statuses = [(await api.remote.get("/healthz")).status_code for _ in range(10)]
        assert statuses[0] == 200
        assert statuses[-1] == 429


@pytest.mark.parametrize("is_notified", [True, False])
async def test_revoked_token_is_refused_at_once(api: ApiFixture, is_notified: bool) -> None:
    """With notifications identities are cached, and without them they are not."""
    cache = api.app.admission.authenticator.cache
    watching = asyncio.create_task(api.store.watch_revocations(cache.set_listening, cache.revoke))
    try:
        if is_notified:
            await until(lambda: cache.is_listening, "notifications arrive")
        else:
            watching.cancel()
        client = api.client("192.0.2.7", **await api.auth_headers(Role.OPERATOR))
        assert (await client.get(f"{API}/status")).status_code == 200
        (token,) = await api.store.tokens()
        generation = cache.generation
        await api.store.revoke_token(token.name)
        if is_notified:
            await until(lambda: cache.generation > generation, "the revocation was notified")
        assert (await client.get(f"{API}/status")).status_code == 401
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


@pytest.mark.parametrize("cause", ["terminate", "failed", "terminated"])
async def test_l2_cached_token_ends_with_its_worker(api: ApiFixture, cause: str) -> None:
    """A worker's identity was believed for five seconds after its end, and so its fleet's environment was readable."""
    cache = api.app.admission.authenticator.cache
    watching = asyncio.create_task(api.store.watch_revocations(cache.set_listening, cache.revoke))
    try:
        await until(lambda: cache.is_listening, "notifications arrive")
        worker = await api.join_worker()
        (worker_id,) = [each.id for each in await api.store.workers()]
        assert (await worker.get(http.ORDER)).status_code == 200
        assert cache._entries
        if cause == "terminate":
            assert await api.store.terminate_worker(worker_id, "stolen")
        else:
            async with connected(api.dsn, "ending a worker") as connection:
                ends = "update windlass.workers set status = $2 where id = $1"
                await connection.execute(ends, worker_id, {"failed": "error"}.get(cause, cause))
        await until(lambda: not cache._entries, "the end was notified")
        response = await worker.get(http.ORDER)
        assert (response.status_code, response.json()["code"]) == (410, "GONE")
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
