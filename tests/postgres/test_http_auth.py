"""Authentication and limits of the whole application: tokens, sessions, CORS, rate limits and timeouts."""

import asyncio
from typing import Any

import httpx
import pytest

from support.api_fixture import API, COOKIE, RNG, ApiFixture, open_api, problem_of
from support.queue_sql import eventually, is_blocked
from windlass.model.auth import (
    API_PREFIX,
    LINK_PREFIX,
    SESSION_PREFIX,
    Role,
    TokenCaller,
    WorkerCaller,
    csrf_token,
    new_token,
)
from windlass.model.errors import BadInput
from windlass.model.worker import Registration, WorkerStatus
from windlass.ports.http import max_body_bytes
from windlass.server import auth, rate_limit
from windlass.server.auth import CSRF_HEADER, session_cookie
from windlass.server.routes.login import create_login_link
from windlass.server.server import listen, serving
from windlass.store.connection import connected
from windlass.wiring import http_server

WAITING_FOR_LOCK = """
select count(*) from pg_locks
where not granted and database = (select oid from pg_database where datname = current_database())
"""

SELF_REGISTER = """
select windlass_internal.self_register_worker($1, $2, 'same', 'default', '{q}', 1, 30, 'host', 1, 'version', 'start')
"""


async def test_without_tokens_only_localhost_may_read(api: ApiFixture) -> None:
    assert (await api.localhost.get(f"{API}/overview")).status_code == 200
    assert problem_of(await api.remote.get(f"{API}/overview")) == (401, "UNAUTHORIZED")
    # With DNS rebinding, a page of another site reaches this host under its own name.
    rebound = await api.localhost.get(f"{API}/overview", headers={"Host": "evil.example"})
    assert problem_of(rebound) == (401, "UNAUTHORIZED")
    for name in ("localhost:8080", "[::1]:8080", "127.0.0.1"):
        assert (await api.localhost.get(f"{API}/overview", headers={"Host": name})).status_code == 200


async def test_cross_site_page_cannot_read_through_local_browser(api: ApiFixture) -> None:
    crossing = {"Sec-Fetch-Site": "cross-site"}
    assert problem_of(await api.localhost.get(f"{API}/overview", headers=crossing)) == (401, "UNAUTHORIZED")
    for origin in ("none", "same-origin"):
        assert (await api.localhost.get(f"{API}/overview", headers={"Sec-Fetch-Site": origin})).status_code == 200
    # A login link and a token work across sites.
    assert (await api.localhost.get(await create_login_link(api.store, ""), headers=crossing)).status_code == 200
    headers = await api.auth_headers(Role.VIEWER)
    assert (await api.localhost.get(f"{API}/overview", headers=headers | crossing)).status_code == 200


PROXY_HEADERS = (
    *("X-Forwarded-For", "X-Forwarded-Proto", "X-Real-IP", "Forwarded", "Via", "CF-Connecting-IP", "True-Client-IP"),
    *("X-Client-IP", "Fly-Client-IP", "X-Envoy-External-Address", "X-Cluster-Client-IP", "X-Forwarded-Server"),
    *("X-Original-Host", "X-Original-Forwarded-For", "Fastly-Client-IP", "X-Amzn-Trace-Id", "CDN-Loop"),
)


@pytest.mark.parametrize("header", PROXY_HEADERS)
async def test_request_through_local_proxy_is_not_from_localhost(api: ApiFixture, header: str) -> None:
    passed_on = {header: "127.0.0.1", "Host": "localhost"}
    assert problem_of(await api.localhost.get(f"{API}/overview", headers=passed_on)) == (401, "UNAUTHORIZED")
    token = await api.auth_headers(Role.VIEWER)
    assert (await api.localhost.get(f"{API}/overview", headers=passed_on | token)).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1:80@evil.com", "localhost:1.evil.com", "[::1].evil.com", "[::1]evil", "localhost:x", "a b", "a/b"),
        *("localhost:123456", "[localhost]", "127.0.0.1:80:80", "user@localhost", "localhost,evil.com", "[::1]:"),
    ],
)
async def test_malformed_host_header_is_refused(api: ApiFixture, host: str) -> None:
    assert problem_of(await api.localhost.get(f"{API}/overview", headers={"Host": host})) == (400, "BAD_INPUT")


async def test_revoking_last_token_does_not_open_reading_again(api: ApiFixture) -> None:
    assert (await api.localhost.get(f"{API}/overview")).status_code == 200
    await api.auth_headers(Role.VIEWER)
    (token,) = await api.store.tokens()
    await api.store.revoke_token(token.name)
    for _ in range(2):
        assert problem_of(await api.localhost.get(f"{API}/overview")) == (401, "UNAUTHORIZED")


async def test_token_of_terminated_worker_ends_at_once(api: ApiFixture) -> None:
    worker = await api.join_worker()
    assert (await worker.get("/internal/worker/order")).status_code == 200
    (worker_id,) = [each.id for each in await api.store.workers()]
    # Terminate it like `windlass terminate --force`. The machine still exists: the fleet has not deleted it yet.
    assert await api.store.terminate_worker(worker_id, "stolen")
    assert problem_of(await worker.get("/internal/worker/order")) == (410, "GONE")
    assert problem_of(await worker.post("/internal/worker/claim", json={"queues": ["a"]})) == (410, "GONE")


async def test_two_workers_cannot_self_register_one_name_at_once(api: ApiFixture, dsn: str) -> None:
    api_token, first, second = b"a" * 32, b"b" * 32, b"c" * 32
    await api.store.create_token("anywhere", Role.WORKER, api_token)
    async with connected(dsn, "registering") as connection, connected(dsn, "observing") as observer:
        async with connection.transaction():
            status = await connection.fetchval(SELF_REGISTER, api_token, first)
            other = asyncio.create_task(api.store.self_register(api_token, second, Registration("same", ("q",))))
            await eventually(lambda: is_blocked(observer), "the second registration waits for the first")
        with pytest.raises(BadInput, match="a worker same exists already"):
            await other
    assert status == WorkerStatus.ACTIVE
    assert await api.store.authenticate(first) == WorkerCaller("same", "default", ("q",), has_terminated=False)


async def test_client_address_is_taken_from_local_proxy_only(api: ApiFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "192.0.2.0/24")  # a setting of uvicorn that must be ignored
    addresses = []

    async def record(scope: Any, receive: Any, send: Any) -> None:
        addresses.append(scope["client"][0])
        await api.app(scope, receive, send)

    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with serving(record, listener), httpx.AsyncClient(trust_env=False) as client:
        await client.get(f"{url}/healthz", headers={"X-Forwarded-For": "198.51.100.7"})
        # The last address was added by the proxy. Earlier ones may be made up by the client.
        await client.get(f"{url}/healthz", headers={"X-Forwarded-For": "203.0.113.9, 192.0.2.1"})
    assert addresses == ["198.51.100.7", "192.0.2.1"]


async def test_writing_always_needs_a_token(api: ApiFixture) -> None:
    for path in ("/tasks", "/pause", "/fleets/gpus/pause", "/workers/w/terminate", "/tasks/1/retry"):
        assert problem_of(await api.localhost.post(API + path, json={"queue": "a"})) == (401, "UNAUTHORIZED")
    assert problem_of(await api.localhost.post("/api/web/worker/restart")) == (401, "UNAUTHORIZED")


async def test_reading_needs_a_token_once_one_exists(api: ApiFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = await api.auth_headers(Role.VIEWER)
    assert (await api.remote.get(f"{API}/overview", headers=headers)).status_code == 200
    assert problem_of(await api.localhost.get(f"{API}/overview")) == (401, "UNAUTHORIZED")
    assert problem_of(await api.localhost.get("/metrics")) == (401, "UNAUTHORIZED")
    assert (await api.localhost.get("/healthz")).status_code == 200


@pytest.mark.parametrize(
    ("role", "read_status", "enqueue_status", "pause_status"),
    [
        (Role.VIEWER, 200, 403, 403),
        (Role.PRODUCER, 403, 201, 403),
        (Role.OPERATOR, 200, 201, 200),
        (Role.ADMIN, 200, 201, 200),
        (Role.WORKER, 403, 403, 403),
    ],
)
async def test_permissions_of_each_role(
    api: ApiFixture, role: Role, read_status: int, enqueue_status: int, pause_status: int
) -> None:
    headers = await api.auth_headers(role)
    client = api.client("192.0.2.7", **headers)
    assert (await client.get(f"{API}/status")).status_code == read_status
    assert (await client.post(f"{API}/tasks", json={"queue": "a"})).status_code == enqueue_status
    assert (await client.post(f"{API}/pause")).status_code == pause_status
    assert (await client.get(f"{API}/stream?x", headers={"Last-Event-ID": "x"})).status_code in (400, 403)


async def test_login_link_works_once_and_writes_need_csrf_token(api: ApiFixture) -> None:
    link = await create_login_link(api.store, "http://127.0.0.1:1")
    browser = api.client("192.0.2.7")
    welcome = await browser.get(link)
    cookie = welcome.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert (await api.client("192.0.2.8").get(link)).status_code == 410
    without = await api.client("192.0.2.8").get(link.partition("?")[0])
    assert problem_of(without) == (401, "UNAUTHORIZED")
    assert "`windlass tokens link` prints one" in without.json()["detail"]
    assert (await browser.get(f"{API}/overview")).status_code == 200
    refused = await browser.post(f"{API}/tasks", json={"queue": "a"})
    assert problem_of(refused) == (403, "FORBIDDEN")
    csrf = csrf_token(browser.cookies[COOKIE])
    assert (await browser.post(f"{API}/tasks", json={"queue": "a"}, headers={CSRF_HEADER: csrf})).status_code == 201
    assert problem_of(await browser.post("/logout", content=b"csrf=wrong")) == (403, "FORBIDDEN")
    assert (await browser.post("/logout", content=f"csrf={csrf}")).status_code == 303
    browser.cookies.set(COOKIE, cookie.partition("=")[2].partition(";")[0])
    assert problem_of(await browser.get(f"{API}/overview")) == (401, "UNAUTHORIZED")


async def test_made_up_links_are_limited_and_valid_links_are_not(api: ApiFixture) -> None:
    flood, browser = api.client("192.0.2.66"), api.client("192.0.2.66")
    made_up = [new_token(LINK_PREFIX, RNG) for _ in range(rate_limit.MAX_FAILURES + 5)]
    responses = [await flood.get("/login", params={"key": key}) for key in made_up]
    assert {problem_of(response) for response in responses} == {(410, "GONE"), (429, "TOO_MANY")}
    statuses = [response.status_code for response in responses]
    assert statuses[: rate_limit.MAX_FAILURES] == [410] * rate_limit.MAX_FAILURES
    assert "links" in responses[-1].json()["detail"]
    # Wrong tokens and wrong links share one limit.
    wrong = {"Authorization": f"Bearer {new_token(API_PREFIX, RNG)}"}
    assert problem_of(await flood.get(f"{API}/status", headers=wrong)) == (429, "TOO_MANY")
    assert (await browser.get(await create_login_link(api.store, ""))).status_code == 200


@pytest.mark.parametrize(
    ("base_url", "asked_by", "is_secure"),
    [
        pytest.param("https://windlass.example", "http://127.0.0.1:1", True, id="https proxy that does not report it"),
        pytest.param("http://127.0.0.1:1", "http://127.0.0.1:1", False, id="without https"),
        pytest.param("http://127.0.0.1:1", "https://windlass.example", True, id="https"),
    ],
)
async def test_session_cookie_is_secure_when_login_used_https(
    api: ApiFixture, base_url: str, asked_by: str, is_secure: bool
) -> None:
    link = await create_login_link(api.store, base_url)
    assert link.startswith(f"{base_url}/login?")
    welcome = await api.remote.get(link.replace(base_url, asked_by))
    assert ("; Secure" in welcome.headers["set-cookie"]) == is_secure


async def test_login_page_has_an_icon(api: ApiFixture) -> None:
    icon = await api.remote.get("/favicon.ico")
    assert (icon.status_code, icon.headers["content-type"]) == (200, "image/svg+xml")
    welcome = await api.remote.get(await create_login_link(api.store, ""))
    assert 'rel="icon" href="/favicon.ico"' in welcome.text


async def test_error_page_without_a_caller_leads_nowhere(api: ApiFixture) -> None:
    """The overview would be refused too, and the advice on roles is for callers that can read."""
    browser = api.client("192.0.2.7")
    html = {"Accept": "text/html"}
    anonymous = await browser.get("/queues", headers=html)
    assert (anonymous.status_code, "Not logged in" in anonymous.text) == (401, True)
    await browser.get(await create_login_link(api.store, "http://127.0.0.1:1", Role.VIEWER))
    # The caller of an unknown path is not looked up.
    for path, role in (("/queues/nosuch", "read only"), ("/nosuch", "Not found")):
        known = await browser.get(path, headers=html)
        assert known.status_code == 404
        assert role in known.text
        assert '<a href="/">Overview</a>' in known.text
    for part in ("read only", '<a href="/">Overview</a>'):
        assert part not in anonymous.text


async def test_viewer_session_can_read_and_not_write(api: ApiFixture) -> None:
    browser = api.client("192.0.2.7")
    await browser.get(await create_login_link(api.store, "http://127.0.0.1:1", Role.VIEWER))
    csrf = csrf_token(browser.cookies[COOKIE])
    page = await browser.get("/")
    assert page.status_code == 200
    assert "read only" in page.text
    assert "Sign out" in page.text
    for path in (f"{API}/tasks", f"{API}/pause"):
        refused = await browser.post(path, json={"queue": "a"}, headers={CSRF_HEADER: csrf})
        assert problem_of(refused) == (403, "FORBIDDEN")
    assert (await browser.post("/fleets/default/pause", content=f"csrf={csrf}&is_confirmed=yes")).status_code == 403
    (session,) = await api.store.sessions()
    assert await api.store.revoke_session(session.id)
    assert problem_of(await browser.post(f"{API}/pause", headers={CSRF_HEADER: csrf})) == (401, "UNAUTHORIZED")
    assert problem_of(await browser.get(f"{API}/overview")) == (401, "UNAUTHORIZED")


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("127.0.0.1:8080", "windlass_session_8080"),
        ("localhost:8081", "windlass_session_8081"),
        ("[::1]:8080", "windlass_session_8080"),
        ("windlass.example", "windlass_session"),
        ("[::1]", "windlass_session"),
        ("a:b;c", "windlass_session"),
        ("", "windlass_session"),
    ],
)
def test_session_cookie_name_contains_the_port(host: str, name: str) -> None:
    assert session_cookie(host) == name


async def test_two_dashboards_on_one_host_keep_separate_sessions(api: ApiFixture, dsn: str) -> None:
    browser = api.client("192.0.2.7")
    for port in (8080, 8081):
        assert (await browser.get(await create_login_link(api.store, f"http://127.0.0.1:{port}"))).status_code == 200
    for port in (8080, 8081):
        assert (await browser.get(f"http://127.0.0.1:{port}{API}/overview")).status_code == 200
    csrf = csrf_token(browser.cookies["windlass_session_8081"])
    await browser.post("http://127.0.0.1:8081/logout", content=f"csrf={csrf}")
    assert problem_of(await browser.get(f"http://127.0.0.1:8081{API}/overview")) == (401, "UNAUTHORIZED")
    assert (await browser.get(f"http://127.0.0.1:8080{API}/overview")).status_code == 200


@pytest.fixture
def few_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that 200 requests exceed even on a slow machine."""
    monkeypatch.setattr(auth, "MAX_SESSION_LOOKUPS_PER_S", 10.0)


@pytest.mark.usefixtures("few_lookups")
async def test_flood_of_made_up_sessions_is_limited_before_lookup(
    api: ApiFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookups = 0
    look_up = api.store.session

    async def counted(session_hash: bytes) -> TokenCaller | None:
        nonlocal lookups
        lookups += 1
        return await look_up(session_hash)

    monkeypatch.setattr(api.store, "session", counted)
    flood = api.client("192.0.2.66")
    made_up = [new_token(SESSION_PREFIX, RNG) for _ in range(200)]
    responses = [await flood.get(f"{API}/overview", headers={"Cookie": f"{COOKIE}={session}"}) for session in made_up]
    assert {problem_of(response) for response in responses} == {(401, "UNAUTHORIZED"), (429, "TOO_MANY")}
    assert lookups == sum(response.status_code == 401 for response in responses)
    browser = api.client("192.0.2.7")
    api.app.admission.authenticator.cache.set_listening(True)
    await browser.get(await create_login_link(api.store, ""))
    lookups = 0
    responses = await asyncio.gather(*(browser.get(f"{API}/overview") for _ in range(10)))
    responses += [await browser.get(f"{API}/overview") for _ in range(10)]
    assert {response.status_code for response in responses} == {200}
    assert lookups <= 10  # concurrent requests; then the session is cached


async def test_token_is_not_cached_without_notifications(api: ApiFixture) -> None:
    client = api.client("192.0.2.7", **await api.auth_headers(Role.OPERATOR))
    assert (await client.get(f"{API}/status")).status_code == 200
    (token,) = await api.store.tokens()
    await api.store.revoke_token(token.name)
    assert problem_of(await client.get(f"{API}/status")) == (401, "UNAUTHORIZED")


async def test_request_rate_is_limited_per_caller(dsn: str) -> None:
    async with open_api(dsn, rate_limit=5.0) as api:
        responses = [await api.localhost.get(f"{API}/status") for _ in range(10)]
        assert responses[0].status_code == 200
        assert problem_of(responses[-1]) == (429, "TOO_MANY")
        assert responses[-1].headers["retry-after"] == "1"
        assert (await api.localhost.get("/healthz")).status_code == 200


async def test_security_headers_of_api_and_pages(api: ApiFixture) -> None:
    response = await api.localhost.get(f"{API}/status", headers={"Origin": "https://evil.example"})
    assert response.headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in response.headers
    page = await api.localhost.get(await create_login_link(api.store, ""))
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert "unsafe-inline" not in page.headers["content-security-policy"]


async def test_cors_preflight_allows_configured_origins_only(dsn: str) -> None:
    async with open_api(dsn, cors_origins=("https://ops.example",)) as api:
        asks = {"Origin": "https://ops.example", "Access-Control-Request-Method": "GET"}
        allowed = await api.remote.options(f"{API}/status", headers=asks)
        assert allowed.headers["access-control-allow-origin"] == "https://ops.example"
        assert "access-control-allow-credentials" not in allowed.headers
        refused = await api.remote.options(f"{API}/status", headers=asks | {"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in refused.headers


async def test_cors_origin_may_read_error_responses(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_api(dsn, cors_origins=("https://ops.example",), rate_limit=30.0) as api:
        asks = {"Origin": "https://ops.example"}
        may = asks | await api.auth_headers(Role.OPERATOR)
        wrong = asks | {"Authorization": f"Bearer {new_token(API_PREFIX, RNG)}"}
        large = b" " * (max_body_bytes(10_000) + 1)
        responses = {
            200: await api.remote.get(f"{API}/status", headers=may),
            400: await api.remote.get(f"{API}/tasks?limit=0", headers=may),
            401: await api.remote.get(f"{API}/status", headers=wrong),
            404: await api.remote.get(f"{API}/nothing", headers=may),
            413: await api.remote.post(f"{API}/tasks", content=large, headers=may),
        }
        monkeypatch.setattr(api.feed, "overview", None)  # a defect
        responses[500] = await api.remote.get(f"{API}/overview", headers=may)
        many = [await api.remote.get("/login", headers=asks) for _ in range(100)]
        responses[429] = next(response for response in many if response.status_code == 429)
        for status, response in responses.items():
            assert response.status_code == status
            assert response.headers["access-control-allow-origin"] == "https://ops.example", status
            assert response.headers["x-content-type-options"] == "nosniff", status
        elsewhere = await api.remote.get(f"{API}/status", headers=wrong | {"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in elsewhere.headers


async def test_blocked_readers_do_not_delay_workers(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "USER_STATEMENT_TIMEOUT_S", 60.0)
    async with open_api(dsn) as api, connected(dsn, "holding a lock") as connection, asyncio.timeout(60):
        worker = await api.join_worker()
        assert (await api.localhost.get(f"{API}/cycles")).status_code == 200
        async with connection.transaction():
            await connection.execute("lock table windlass.cycles in access exclusive mode")
            connections = range(http_server.USER_CONNECTIONS)
            readers = [asyncio.create_task(api.localhost.get(f"{API}/cycles")) for _ in connections]
            while await connection.fetchval(WAITING_FOR_LOCK) < http_server.USER_CONNECTIONS:
                await asyncio.sleep(0.01)
            assert (await worker.post("/internal/worker/heartbeat", json={})).status_code == 200
            assert (await api.localhost.get("/readyz")).status_code == 200
            assert not any(reader.done() for reader in readers)
        assert {response.status_code for response in await asyncio.gather(*readers)} == {200}


async def test_slow_query_is_cancelled(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "USER_STATEMENT_TIMEOUT_S", 0.5)
    async with open_api(dsn) as api, connected(dsn, "holding a lock") as connection, asyncio.timeout(60):
        assert (await api.localhost.get(f"{API}/cycles")).status_code == 200
        async with connection.transaction():
            await connection.execute("lock table windlass.cycles in access exclusive mode")
            response = await api.localhost.get(f"{API}/cycles")
        assert problem_of(response) == (503, "UNAVAILABLE")
        assert "took too long" in response.text
        assert (await api.localhost.get(f"{API}/cycles")).status_code == 200
