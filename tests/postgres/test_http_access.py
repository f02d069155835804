"""Roles, scopes and actors over HTTP: what each token reaches, and which actor events name."""

from typing import Any

import httpx
import pytest

from support.api_fixture import API, RNG, ApiFixture, problem_of
from support.api_fixture import COOKIE as SESSION_COOKIE
from windlass.model.auth import API_PREFIX, EVERYTHING, Role, TokenScope, csrf_token, hash_of, new_token
from windlass.model.task import new_task
from windlass.server.auth import CSRF_HEADER
from windlass.server.routes.login import create_login_link


async def client_with(api: ApiFixture, name: str, role: Role, scope: TokenScope = EVERYTHING) -> httpx.AsyncClient:
    token = new_token(API_PREFIX, RNG)
    await api.store.create_token(name, role, hash_of(token), scope=scope)
    return api.client("192.0.2.7", Authorization=f"Bearer {token}")


async def token_id(api: ApiFixture, name: str) -> int:
    return next(token.id for token in await api.store.tokens() if token.name == name)


async def test_reused_token_name_does_not_open_tasks_of_the_revoked_one(api: ApiFixture) -> None:
    former = await client_with(api, "shop", Role.PRODUCER)
    task_id = (await former.post(f"{API}/tasks", json={"queue": "a", "payload": "private"})).json()["task_id"]
    assert (await former.get(f"{API}/tasks/{task_id}")).json()["payload"] == "private"
    assert await api.store.revoke_token("shop")
    latter = await client_with(api, "shop", Role.PRODUCER)
    assert problem_of(await latter.get(f"{API}/tasks/{task_id}")) == (404, "NOT_FOUND")
    own = (await latter.post(f"{API}/tasks", json={"queue": "a"})).json()["task_id"]
    assert (await latter.get(f"{API}/tasks/{own}")).status_code == 200


async def test_producer_reads_only_the_tasks_it_enqueued(api: ApiFixture) -> None:
    shop, other = await client_with(api, "shop", Role.PRODUCER), await client_with(api, "other", Role.PRODUCER)
    mine = (await shop.post(f"{API}/tasks", json={"queue": "a", "payload": {"n": 1}})).json()["task_id"]
    foreign = await api.store.enqueue(new_task("a", "secret"))
    task = (await shop.get(f"{API}/tasks/{mine}")).json()
    assert (task["payload"], task["status"], task["owner"]) == (
        {"n": 1},
        "queued",
        f"token:shop#{await token_id(api, 'shop')}",
    )
    # Explanations and events name workers and fleets.
    assert (task["events"], task["answer"], task["cost"]) == ([], [], None)
    assert problem_of(await shop.get(f"{API}/tasks/{foreign}")) == (404, "NOT_FOUND")
    assert problem_of(await other.get(f"{API}/tasks/{mine}")) == (404, "NOT_FOUND")
    for path in ("/tasks", "/overview", "/workers", "/events", "/fleets", "/audit", "/tokens", "/stream"):
        assert problem_of(await shop.get(API + path)) == (403, "FORBIDDEN"), path
    for path in ("/", "/tasks", f"/tasks/{mine}", "/metrics"):
        assert (await shop.get(path)).status_code == 403, path
    assert problem_of(await shop.post(f"{API}/tasks/{mine}/cancel")) == (403, "FORBIDDEN")


async def test_token_limited_to_queue_cannot_touch_other_queues(api: ApiFixture) -> None:
    limited = await client_with(api, "limited", Role.OPERATOR, TokenScope(queues=frozenset({"a"})))
    inside, outside = await api.store.enqueue(new_task("a")), await api.store.enqueue(new_task("b"))
    assert (await limited.post(f"{API}/tasks", json={"queue": "a"})).status_code == 201
    assert problem_of(await limited.post(f"{API}/tasks", json={"queue": "b"})) == (403, "FORBIDDEN")
    assert {task["queue"] for task in (await limited.get(f"{API}/tasks")).json()["items"]} == {"a"}
    assert problem_of(await limited.get(f"{API}/tasks", params={"queue": "b"})) == (403, "FORBIDDEN")
    assert (await limited.get(f"{API}/tasks/{inside}")).status_code == 200
    for method, path in (("GET", ""), ("POST", "/cancel"), ("POST", "/retry")):
        found = await limited.request(method, f"{API}/tasks/{outside}{path}")
        assert problem_of(found) == (404, "NOT_FOUND"), path
    assert (await limited.post(f"{API}/tasks/{inside}/cancel")).status_code == 200
    assert problem_of(await limited.post(f"{API}/tasks/retry-failed", json={"queue": "b"})) == (403, "FORBIDDEN")
    # Fleets were not granted, and nothing that concerns the whole installation.
    for method, path in (
        *(("GET", path) for path in ("/overview", "/status", "/events", "/cost", "/alerts", "/stream", "/logs")),
        *(("GET", path) for path in ("/workers", "/fleets/gpus", "/fleets/gpus/history", "/audit")),
        *(("POST", path) for path in ("/pause", "/restart", "/fleets/gpus/pause", "/fleets/gpus/spawn")),
    ):
        assert problem_of(await limited.request(method, API + path)) == (403, "FORBIDDEN"), path
    assert (await limited.get(f"{API}/fleets")).json() == []
    assert (await limited.get("/")).status_code == 403
    # Runbooks concern everyone.
    page = await limited.get("/runbooks")
    assert (page.status_code, 'id="WORKER_LOST"' in page.text) == (200, True)
    assert (await api.remote.get("/runbooks")).status_code == 401
    for code in ("HANDLER_ERROR", "handler_error"):
        redirected = await limited.get(f"/runbooks/{code}")
        assert (redirected.status_code, redirected.headers["location"]) == (303, "/runbooks#HANDLER_ERROR")
    unknown = await limited.get("/runbooks/NOSUCH", headers={"Accept": "text/html"})
    assert (unknown.status_code, "No runbook has this code: /runbooks lists all codes" in unknown.text) == (404, True)
    assert (await api.remote.get("/runbooks/HANDLER_ERROR")).status_code == 401


async def test_token_limited_to_fleet_cannot_touch_other_fleets(api: ApiFixture) -> None:
    (worker_id, *_) = await api.spawn_active_workers()
    inside = await client_with(api, "inside", Role.OPERATOR, TokenScope(fleets=frozenset({"gpus"})))
    outside = await client_with(api, "outside", Role.OPERATOR, TokenScope(fleets=frozenset({"cpus"})))
    assert [fleet["fleet"]["name"] for fleet in (await inside.get(f"{API}/fleets")).json()] == ["gpus"]
    assert (await outside.get(f"{API}/fleets")).json() == []
    for path in (f"/workers/{worker_id}", "/fleets/gpus", "/workers?fleet=gpus"):
        assert (await inside.get(API + path)).status_code == 200, path
        assert (await outside.get(API + path)).status_code in (403, 404), path
    assert (await inside.get(f"{API}/workers")).json()["items"]
    for path in (f"/workers/{worker_id}/pause", "/fleets/gpus/pause"):
        assert (await outside.post(API + path)).status_code in (403, 404), path
        assert (await inside.post(API + path)).status_code == 200, path
    assert problem_of(await inside.get(f"{API}/tasks")) == (403, "FORBIDDEN")


async def test_worker_token_registers_for_its_queues_only(api: ApiFixture) -> None:
    workers = await client_with(api, "machines", Role.WORKER, TokenScope(queues=frozenset({"a"})))

    async def register(name: str, queue: str) -> httpx.Response:
        token = new_token("wlw_", RNG)
        registration = {"worker_id": name, "queues": [queue], "lease_s": 30.0}
        return await workers.post("/internal/workers", json={"token": token, "registration": registration})

    assert problem_of(await register("one", "b")) == (403, "FORBIDDEN")
    assert (await register("two", "a")).status_code == 200


async def test_events_name_the_token_and_the_person_of_a_session(api: ApiFixture) -> None:
    ops = await client_with(api, "ops", Role.OPERATOR)
    browser = api.client("192.0.2.8")
    await browser.get(await create_login_link(api.store, "", Role.OPERATOR, "ann"))
    csrf = csrf_token(browser.cookies[SESSION_COOKIE])
    first, second = await api.store.enqueue(new_task("a")), await api.store.enqueue(new_task("a"))
    await ops.post(f"{API}/tasks/{first}/cancel")
    form = {"csrf": csrf, "is_confirmed": "yes", "back": "/"}
    assert (await browser.post(f"/tasks/{second}/cancel", data=form)).status_code == 303
    await api.store.cancel_task(await api.store.enqueue(new_task("a")), "by a program")
    ops_token = f"token:ops#{await token_id(api, 'ops')}"
    events = (await ops.get(f"{API}/events", params={"code": "TASK_CANCELLED"})).json()["items"]
    assert [(event["task_id"], event["actor"]) for event in events[1:]] == [
        (second, "session:ann"),
        (first, ops_token),
    ]
    assert events[0]["actor"] is None
    # A request without effect on others does not name its actor in their events.
    assert [event.actor for event in await api.store.events(task_id=first)] == [ops_token]
    audit = (await ops.get(f"{API}/audit", params={"limit": 2})).json()
    assert [event["actor"] for event in audit["items"]] == ["session:ann", ops_token]
    page = (await browser.get("/audit")).text
    assert "session:ann" in page
    assert ops_token in page
    # The reason does not claim a person.
    await ops.post(f"{API}/tasks/{first}/retry")
    (event,) = (await ops.get(f"{API}/events", params={"code": "TASK_RETRIED"})).json()["items"]
    assert (event["reason"], event["actor"]) == ("retried on request", ops_token)


async def test_admin_creates_and_revokes_tokens_over_http(api: ApiFixture) -> None:
    admin, operator = await client_with(api, "root", Role.ADMIN), await client_with(api, "ops", Role.OPERATOR)
    body: dict[str, Any] = {"name": "ci", "role": "producer", "queues": ["a"]}
    assert problem_of(await operator.post(f"{API}/tokens", json=body)) == (403, "FORBIDDEN")
    created = await admin.post(f"{API}/tokens", json=body)
    assert created.status_code == 201
    details = created.json()["details"]
    assert (details["name"], details["created_by"]) == ("ci", f"token:root#{await token_id(api, 'root')}")
    assert details["expires_at"] is not None
    ci = api.client("192.0.2.9", Authorization=f"Bearer {created.json()['token']}")
    assert (await ci.post(f"{API}/tasks", json={"queue": "a"})).status_code == 201
    assert problem_of(await admin.post(f"{API}/tokens", json=body)) == (400, "BAD_INPUT")
    listed = (await admin.get(f"{API}/tokens")).text
    assert created.json()["token"] not in listed
    assert (await admin.post(f"{API}/tokens/ci/revoke")).status_code == 200
    assert problem_of(await ci.post(f"{API}/tasks", json={"queue": "a"})) == (401, "UNAUTHORIZED")
    assert problem_of(await admin.post(f"{API}/tokens/ci/revoke")) == (404, "NOT_FOUND")
    never = await admin.post(f"{API}/tokens", json={"name": "cron", "role": "viewer", "expires_in_days": None})
    assert never.json()["details"]["expires_at"] is None


async def test_access_page_shows_a_new_token_once(api: ApiFixture) -> None:
    browser = await api.browser(role=Role.ADMIN)
    csrf = csrf_token(browser.cookies[SESSION_COOKIE])
    form = {"csrf": csrf, "name": "ci", "role": "producer", "queues": "a, b", "fleets": "", "days": "30"}
    refused = await browser.post("/access/tokens", data={**form, "csrf": "wrong"})
    assert refused.status_code == 403
    created = (await browser.post("/access/tokens", data=form)).text
    assert "wlt_" in created
    listed = (await browser.get("/access")).text
    assert "wlt_" not in listed
    assert "queue a, queue b" in listed
    revoked = await browser.post("/access/tokens/ci/revoke", data={"csrf": csrf, "is_confirmed": "yes"})
    assert revoked.status_code == 303
    assert (await (await api.browser(role=Role.OPERATOR)).get("/access")).status_code == 403
    for change in ({"days": "0"}, {"role": "king"}, {"name": "no name"}, {"queues": "<x>"}):
        assert (await browser.post("/access/tokens", data={**form, **change})).status_code == 400, change


async def test_admin_revokes_sessions_over_http_and_on_the_page(api: ApiFixture) -> None:
    admin, operator = await client_with(api, "root", Role.ADMIN), await client_with(api, "ops", Role.OPERATOR)
    browser, other = await api.browser(role=Role.ADMIN), await api.browser(role=Role.VIEWER)
    assert (await other.get(f"{API}/fleets")).status_code == 200
    listed = (await admin.get(f"{API}/sessions")).json()
    (session,) = [each["id"] for each in listed if each["role"] == "viewer"]
    assert problem_of(await operator.post(f"{API}/sessions/{session}/revoke")) == (403, "FORBIDDEN")
    assert f"/access/sessions/{session}/revoke" in (await browser.get("/access")).text
    form = {"csrf": csrf_token(browser.cookies[SESSION_COOKIE]), "is_confirmed": "yes"}
    assert (await browser.post(f"/access/sessions/{session}/revoke", data=form)).status_code == 303
    assert problem_of(await other.get(f"{API}/fleets")) == (401, "UNAUTHORIZED")
    assert problem_of(await admin.post(f"{API}/sessions/{session}/revoke")) == (404, "NOT_FOUND")


@pytest.mark.parametrize("role", [Role.VIEWER, Role.OPERATOR])
async def test_session_cannot_do_more_than_its_role(api: ApiFixture, role: Role) -> None:
    browser = await api.browser(role=role)
    csrf = {CSRF_HEADER: csrf_token(browser.cookies[SESSION_COOKIE])}
    assert problem_of(await browser.get(f"{API}/tokens")) == (403, "FORBIDDEN")
    statuses = {
        "pause": (await browser.post(f"{API}/pause", headers=csrf)).status_code,
        "audit": (await browser.get("/audit")).status_code,
    }
    assert set(statuses.values()) == ({403} if role is Role.VIEWER else {200})
