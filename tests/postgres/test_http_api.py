"""The JSON API over a real PostgreSQL: who may, what each route answers, live change, and what nobody may see."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from datetime import timedelta
from decimal import Decimal
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator
from structlog.testing import capture_logs

from support.api_fixture import CHANCE, FLEET, SECRET, URL, Bed, bed_of
from windlass.model.auth import API_PREFIX, LINK_PREFIX, SESSION_PREFIX, Role, csrf_token, new_token
from windlass.model.errors import DatabaseUnavailable
from windlass.model.task import Finished, new_task
from windlass.model.worker import Registration, WorkerKind
from windlass.ports.http import max_body_bytes
from windlass.server import auth as gate_module
from windlass.server import event_stream as live_module
from windlass.server.auth import CSRF_HEADER, session_cookie
from windlass.server.cpu_executor import SerialExecutor
from windlass.server.errors import ApiError
from windlass.server.event_stream import EventStream, OverviewFeed
from windlass.server.server import listen, serving
from windlass.server.session import new_link
from windlass.store import dashboard_queries as reading
from windlass.store.connect import connected
from windlass.store.log_sink import LogSink, PostgresLogStore
from windlass.wiring import http_server as wire_face

API = "/api/v1"
COOKIE = session_cookie(httpx.URL(URL).netloc.decode())


@pytest.fixture
async def bed(dsn: str, clock: Any) -> AsyncIterator[Bed]:
    async with bed_of(dsn, clock) as bed:
        yield bed


def problem_of(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["detail"].endswith(".")
    return answer.status_code, problem["code"]


async def hire(bed: Bed, tasks: int = 2) -> list[str]:
    """Workers for so many tasks, active."""
    for number in range(tasks):
        await bed.store.enqueue(new_task("a", {"number": number}))
    await bed.run_cycle()
    ids = [worker.id for worker in await bed.store.workers()]
    for worker_id in ids:
        await bed.store.register(Registration(worker_id, ("a",), fleet="gpus"))
        await bed.store.heartbeat(worker_id, (), {"vram_total_mb": 100, "vram_used_mb": 25})
    await bed.run_cycle()
    return ids


# -------------------------------------------------------------------------------------------------------------- who may


async def test_without_tokens_whoever_is_on_the_host_may_look_and_nobody_else(bed: Bed) -> None:
    assert (await bed.here.get(f"{API}/overview")).status_code == 200
    assert problem_of(await bed.elsewhere.get(f"{API}/overview")) == (401, "UNAUTHORIZED")
    # A page elsewhere may have got its own name to mean this host.
    assert problem_of(await bed.here.get(f"{API}/overview", headers={"Host": "evil.example"})) == (401, "UNAUTHORIZED")
    for name in ("localhost:8080", "[::1]:8080", "127.0.0.1"):
        assert (await bed.here.get(f"{API}/overview", headers={"Host": name})).status_code == 200


async def test_a_page_of_elsewhere_sees_nothing_through_a_browser_on_this_host(bed: Bed) -> None:
    crossing = {"Sec-Fetch-Site": "cross-site"}
    assert problem_of(await bed.here.get(f"{API}/overview", headers=crossing)) == (401, "UNAUTHORIZED")
    for origin in ("none", "same-origin"):
        assert (await bed.here.get(f"{API}/overview", headers={"Sec-Fetch-Site": origin})).status_code == 200
    # Whoever is let in by more than being here is let in from there too.
    assert (await bed.here.get(await new_link(bed.store, ""), headers=crossing)).status_code == 200
    headers = await bed.token(Role.VIEWER)
    assert (await bed.here.get(f"{API}/overview", headers=headers | crossing)).status_code == 200


@pytest.mark.parametrize("header", ["X-Forwarded-For", "X-Forwarded-Proto", "X-Real-IP", "Forwarded", "Via"])
async def test_what_a_proxy_on_this_host_passes_on_is_not_from_this_host(bed: Bed, header: str) -> None:
    passed_on = {header: "127.0.0.1", "Host": "localhost"}
    assert problem_of(await bed.here.get(f"{API}/overview", headers=passed_on)) == (401, "UNAUTHORIZED")
    token = await bed.token(Role.VIEWER)
    assert (await bed.here.get(f"{API}/overview", headers=passed_on | token)).status_code == 200


async def test_where_a_request_came_from_is_told_by_a_proxy_on_this_host(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "192.0.2.0/24")  # not ours to heed
    addresses = []

    async def note(scope: Any, receive: Any, send: Any) -> None:
        addresses.append(scope["client"][0])
        await bed.app(scope, receive, send)

    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with serving(note, listener), httpx.AsyncClient(trust_env=False) as client:
        await client.get(f"{url}/healthz", headers={"X-Forwarded-For": "198.51.100.7"})
        # Whom the proxy itself heard it from counts, not what they said of others.
        await client.get(f"{url}/healthz", headers={"X-Forwarded-For": "203.0.113.9, 192.0.2.1"})
    assert addresses == ["198.51.100.7", "192.0.2.1"]


async def test_writing_always_needs_a_token(bed: Bed) -> None:
    for path in ("/tasks", "/pause", "/fleets/gpus/pause", "/workers/w/terminate", "/tasks/1/retry"):
        assert problem_of(await bed.here.post(API + path, json={"queue": "a"})) == (401, "UNAUTHORIZED")
    assert problem_of(await bed.here.post("/api/web/worker/restart")) == (401, "UNAUTHORIZED")


async def test_with_a_token_made_looking_needs_one_too(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = await bed.token(Role.VIEWER)
    assert (await bed.elsewhere.get(f"{API}/overview", headers=headers)).status_code == 200
    assert problem_of(await bed.here.get(f"{API}/overview")) == (401, "UNAUTHORIZED")
    assert problem_of(await bed.here.get("/metrics")) == (401, "UNAUTHORIZED")
    assert (await bed.here.get("/healthz")).status_code == 200


@pytest.mark.parametrize(
    ("role", "looks", "enqueues", "pauses"),
    [
        (Role.VIEWER, 200, 403, 403),
        (Role.PRODUCER, 200, 201, 403),
        (Role.OPERATOR, 200, 201, 200),
        (Role.WORKER, 403, 403, 403),
    ],
)
async def test_what_each_role_may(bed: Bed, role: Role, looks: int, enqueues: int, pauses: int) -> None:
    headers = await bed.token(role)
    client = bed.client("192.0.2.7", **headers)
    assert (await client.get(f"{API}/status")).status_code == looks
    assert (await client.post(f"{API}/tasks", json={"queue": "a"})).status_code == enqueues
    assert (await client.post(f"{API}/pause")).status_code == pauses
    assert (await client.get(f"{API}/stream?x", headers={"Last-Event-ID": "x"})).status_code in (400, 403)
    await client.aclose()


async def test_a_link_lets_one_browser_in_and_its_pages_prove_themselves(bed: Bed) -> None:
    link = await new_link(bed.store, "http://127.0.0.1:1")
    browser = bed.client("192.0.2.7")
    welcome = await browser.get(link)
    cookie = welcome.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert (await bed.client("192.0.2.8").get(link)).status_code == 410
    without = await bed.client("192.0.2.8").get(link.partition("?")[0])
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
    await browser.aclose()


async def test_whoever_keeps_coming_with_made_up_links_is_told_to_wait_and_a_good_link_still_lets_in(bed: Bed) -> None:
    flood, browser = bed.client("192.0.2.66"), bed.client("192.0.2.66")
    made_up = [new_token(LINK_PREFIX, CHANCE) for _ in range(gate_module.MAX_FAILURES + 5)]
    answers = [await flood.get("/login", params={"key": key}) for key in made_up]
    assert {problem_of(answer) for answer in answers} == {(410, "GONE"), (429, "TOO_MANY")}
    assert [answer.status_code for answer in answers[: gate_module.MAX_FAILURES]] == [410] * gate_module.MAX_FAILURES
    assert "links" in answers[-1].json()["detail"]
    # The same count as that of wrong tokens.
    wrong = {"Authorization": f"Bearer {new_token(API_PREFIX, CHANCE)}"}
    assert problem_of(await flood.get(f"{API}/status", headers=wrong)) == (429, "TOO_MANY")
    assert (await browser.get(await new_link(bed.store, ""))).status_code == 200
    for client in (flood, browser):
        await client.aclose()


@pytest.mark.parametrize(
    ("base_url", "asked_by", "is_secure"),
    [
        pytest.param("https://windlass.example", "http://127.0.0.1:1", True, id="through a proxy that does not say so"),
        pytest.param("http://127.0.0.1:1", "http://127.0.0.1:1", False, id="without https"),
        pytest.param("http://127.0.0.1:1", "https://windlass.example", True, id="by https all the way"),
    ],
)
async def test_a_session_that_began_by_https_is_sent_by_https_alone(
    bed: Bed, base_url: str, asked_by: str, is_secure: bool
) -> None:
    link = await new_link(bed.store, base_url)
    assert link.startswith(f"{base_url}/login?")
    welcome = await bed.elsewhere.get(link.replace(base_url, asked_by))
    assert ("; Secure" in welcome.headers["set-cookie"]) == is_secure


async def test_browsers_find_an_icon_on_their_way_in(bed: Bed) -> None:
    icon = await bed.elsewhere.get("/favicon.ico")
    assert (icon.status_code, icon.headers["content-type"]) == (200, "image/svg+xml")
    welcome = await bed.elsewhere.get(await new_link(bed.store, ""))
    assert 'rel="icon" href="/favicon.ico"' in welcome.text


async def test_a_viewers_link_lets_a_browser_look_and_not_act(bed: Bed) -> None:
    browser = bed.client("192.0.2.7")
    await browser.get(await new_link(bed.store, "http://127.0.0.1:1", Role.VIEWER))
    csrf = csrf_token(browser.cookies[COOKIE])
    page = await browser.get("/")
    assert page.status_code == 200
    assert "read only" in page.text
    assert "Sign out" in page.text
    for path in (f"{API}/tasks", f"{API}/pause"):
        refused = await browser.post(path, json={"queue": "a"}, headers={CSRF_HEADER: csrf})
        assert problem_of(refused) == (403, "FORBIDDEN")
    assert (await browser.post("/fleets/default/pause", content=f"csrf={csrf}&is_confirmed=yes")).status_code == 403
    (session,) = await bed.store.sessions()
    assert await bed.store.revoke_session(session.id)
    assert problem_of(await browser.post(f"{API}/pause", headers={CSRF_HEADER: csrf})) == (401, "UNAUTHORIZED")
    assert problem_of(await browser.get(f"{API}/overview")) == (401, "UNAUTHORIZED")
    await browser.aclose()


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
def test_a_session_is_of_one_port(host: str, name: str) -> None:
    assert session_cookie(host) == name


async def test_two_on_one_host_do_not_log_each_other_out(bed: Bed, dsn: str) -> None:
    browser = bed.client("192.0.2.7")
    for port in (8080, 8081):
        assert (await browser.get(await new_link(bed.store, f"http://127.0.0.1:{port}"))).status_code == 200
    for port in (8080, 8081):
        assert (await browser.get(f"http://127.0.0.1:{port}{API}/overview")).status_code == 200
    csrf = csrf_token(browser.cookies["windlass_session_8081"])
    await browser.post("http://127.0.0.1:8081/logout", content=f"csrf={csrf}")
    assert problem_of(await browser.get(f"http://127.0.0.1:8081{API}/overview")) == (401, "UNAUTHORIZED")
    assert (await browser.get(f"http://127.0.0.1:8080{API}/overview")).status_code == 200
    await browser.aclose()


@pytest.fixture
def few_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few a second that 200 requests are a flood on the slowest machine."""
    monkeypatch.setattr(gate_module, "MAX_SESSION_LOOKUPS_PER_S", 10.0)


@pytest.mark.usefixtures("few_lookups")
async def test_a_flood_of_made_up_sessions_is_told_to_wait_before_anybody_looks_them_up(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookups = 0
    session_role = bed.store.session_role

    async def counted(session_hash: bytes) -> Role | None:
        nonlocal lookups
        lookups += 1
        return await session_role(session_hash)

    monkeypatch.setattr(bed.store, "session_role", counted)
    flood = bed.client("192.0.2.66")
    made_up = [new_token(SESSION_PREFIX, CHANCE) for _ in range(200)]
    answers = [await flood.get(f"{API}/overview", headers={"Cookie": f"{COOKIE}={session}"}) for session in made_up]
    assert {problem_of(answer) for answer in answers} == {(401, "UNAUTHORIZED"), (429, "TOO_MANY")}
    assert lookups == sum(answer.status_code == 401 for answer in answers)
    browser = bed.client("192.0.2.7")
    await browser.get(await new_link(bed.store, ""))
    lookups = 0
    answers = await asyncio.gather(*(browser.get(f"{API}/overview") for _ in range(10)))
    answers += [await browser.get(f"{API}/overview") for _ in range(10)]
    assert {answer.status_code for answer in answers} == {200}
    assert lookups <= 10  # those that came at once; then it is believed
    for client in (flood, browser):
        await client.aclose()


async def test_a_token_is_believed_for_looking_and_checked_for_whatever_changes_something(bed: Bed) -> None:
    client = bed.client("192.0.2.7", **await bed.token(Role.OPERATOR))
    assert (await client.get(f"{API}/status")).status_code == 200
    (token,) = await bed.store.tokens()
    await bed.store.revoke_token(token.name)
    assert (await client.get(f"{API}/status")).status_code == 200  # for BELIEVED_S
    assert problem_of(await client.post(f"{API}/pause")) == (401, "UNAUTHORIZED")
    assert problem_of(await client.get(f"{API}/status")) == (401, "UNAUTHORIZED")
    await client.aclose()


async def test_who_calls_too_often_is_told_to_wait(dsn: str) -> None:
    async with bed_of(dsn, rate_limit=5.0) as bed:
        answers = [await bed.here.get(f"{API}/status") for _ in range(10)]
        assert answers[0].status_code == 200
        assert problem_of(answers[-1]) == (429, "TOO_MANY")
        assert answers[-1].headers["retry-after"] == "1"
        assert (await bed.here.get("/healthz")).status_code == 200


async def test_headers_forbid_what_a_page_could_do_with_it(bed: Bed) -> None:
    answer = await bed.here.get(f"{API}/status", headers={"Origin": "https://evil.example"})
    assert answer.headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in answer.headers
    page = await bed.here.get(await new_link(bed.store, ""))
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert "unsafe-inline" not in page.headers["content-security-policy"]


async def test_pages_of_configured_origins_may_ask_with_a_token(dsn: str) -> None:
    async with bed_of(dsn, cors_origins=("https://ops.example",)) as bed:
        asks = {"Origin": "https://ops.example", "Access-Control-Request-Method": "GET"}
        allowed = await bed.elsewhere.options(f"{API}/status", headers=asks)
        assert allowed.headers["access-control-allow-origin"] == "https://ops.example"
        assert "access-control-allow-credentials" not in allowed.headers
        refused = await bed.elsewhere.options(f"{API}/status", headers=asks | {"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in refused.headers


async def test_a_page_of_a_configured_origin_may_read_whatever_it_is_answered(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bed_of(dsn, cors_origins=("https://ops.example",), rate_limit=30.0) as bed:
        asks = {"Origin": "https://ops.example"}
        may = asks | await bed.token(Role.OPERATOR)
        wrong = asks | {"Authorization": f"Bearer {new_token(API_PREFIX, CHANCE)}"}
        large = b" " * (max_body_bytes(10_000) + 1)
        answers = {
            200: await bed.elsewhere.get(f"{API}/status", headers=may),
            400: await bed.elsewhere.get(f"{API}/tasks?limit=0", headers=may),
            401: await bed.elsewhere.get(f"{API}/status", headers=wrong),
            404: await bed.elsewhere.get(f"{API}/nothing", headers=may),
            413: await bed.elsewhere.post(f"{API}/tasks", content=large, headers=may),
        }
        monkeypatch.setattr(bed.live, "overview", None)  # a defect
        answers[500] = await bed.elsewhere.get(f"{API}/overview", headers=may)
        crowd = [await bed.elsewhere.get("/login", headers=asks) for _ in range(100)]
        answers[429] = crowd[-1]
        for status, answer in answers.items():
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == "https://ops.example", status
            assert answer.headers["x-content-type-options"] == "nosniff", status
        elsewhere = await bed.elsewhere.get(f"{API}/status", headers=wrong | {"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in elsewhere.headers


async def test_no_crowd_of_readers_silences_a_worker(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_face, "PEOPLES_STATEMENT_TIMEOUT_S", 60.0)
    async with bed_of(dsn) as bed, connected(dsn, "holding a lock") as connection, asyncio.timeout(60):
        worker = await bed.join()
        assert (await bed.here.get(f"{API}/cycles")).status_code == 200
        async with connection.transaction():
            await connection.execute("lock table windlass.cycles in access exclusive mode")
            crowd = [asyncio.create_task(bed.here.get(f"{API}/cycles")) for _ in range(wire_face.PEOPLES_CONNECTIONS)]
            while len(bed.store._connections._lent) < wire_face.PEOPLES_CONNECTIONS:
                await asyncio.sleep(0.01)
            assert (await worker.post("/internal/worker/heartbeat", json={})).status_code == 200
            assert (await bed.here.get("/readyz")).status_code == 200
            assert not any(reader.done() for reader in crowd)
        assert {answer.status_code for answer in await asyncio.gather(*crowd)} == {200}
        await worker.aclose()


async def test_what_takes_too_long_to_read_is_broken_off(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_face, "PEOPLES_STATEMENT_TIMEOUT_S", 0.5)
    async with bed_of(dsn) as bed, connected(dsn, "holding a lock") as connection, asyncio.timeout(60):
        assert (await bed.here.get(f"{API}/cycles")).status_code == 200
        async with connection.transaction():
            await connection.execute("lock table windlass.cycles in access exclusive mode")
            answer = await bed.here.get(f"{API}/cycles")
        assert problem_of(answer) == (503, "UNAVAILABLE")
        assert "takes too long" in answer.text
        assert (await bed.here.get(f"{API}/cycles")).status_code == 200


# ---------------------------------------------------------------------------------------------------- what it answers


async def test_status_has_the_form_of_a_cycles_summary(bed: Bed) -> None:
    await hire(bed)
    status = (await bed.here.get(f"{API}/status")).json()
    assert status["actions"] == {
        "workers_promoted": 2, "workers_failed": 0, "workers_spawned": 0, "workers_terminated": 0, "tasks_reset": 0,
    }  # fmt: skip
    assert status["status"] == {
        "queued_tasks": 2, "running_tasks": 0, "spawning_workers": 0, "active_workers": 2, "terminating_workers": 0,
        "total_workers": 2,
    }  # fmt: skip


async def test_a_task_from_enqueueing_to_its_second_chance(bed: Bed) -> None:
    operator = bed.client("192.0.2.7", **await bed.token(Role.OPERATOR))
    body = {"queue": "a", "payload": {"n": 1}, "unique_key": "k", "max_attempts": 1}
    created = await operator.post(f"{API}/tasks", json=body)
    again = await operator.post(f"{API}/tasks", json=body)
    assert (created.status_code, again.status_code) == (201, 200)
    task_id = created.json()["id"]
    assert again.json() == {"id": task_id, "is_new": False}
    await bed.store.register(Registration("hand", ("a",)))
    (claim,) = await bed.store.claim("hand", ["a"])
    await bed.store.fail("hand", task_id, claim.token, "ValueError: broken")
    shown = (await operator.get(f"{API}/tasks/{task_id}")).json()
    assert (shown["status"], shown["payload"]) == ("failed", {"n": 1})
    assert [event["code"] for event in shown["events"]] == ["TASK_FAILED"]
    assert "dead letter" in shown["answer"][0]
    (found,) = (await operator.get(f"{API}/tasks", params={"status": "failed", "search": "broken"})).json()["items"]
    assert found["id"] == task_id
    assert (await operator.post(f"{API}/tasks/{task_id}/retry")).json() == {"changed": 1}
    assert problem_of(await operator.post(f"{API}/tasks/{task_id}/retry")) == (409, "CONFLICT")
    assert (await operator.post(f"{API}/tasks/{task_id}/cancel", json={"reason": "no need"})).json() == {"changed": 1}
    assert problem_of(await operator.post(f"{API}/tasks/99/cancel")) == (404, "NOT_FOUND")
    for reason in ("", "  "):
        without_a_word = await operator.post(f"{API}/tasks/{task_id}/cancel", json={"reason": reason})
        assert problem_of(without_a_word) == (400, "BAD_INPUT")
    assert (await operator.post(f"{API}/tasks/retry-failed", json={"queue": "a"})).json() == {"changed": 0}
    await operator.aclose()


async def test_workers_are_shown_paused_replaced_and_ended(bed: Bed, clock: Any) -> None:
    first, second = sorted(await hire(bed))
    operator = bed.client("192.0.2.7", **await bed.token(Role.OPERATOR))
    clock.advance(10)
    page = (await operator.get(f"{API}/workers", params={"limit": 1})).json()
    assert page["items"][0]["id"] == first
    assert page["items"][0]["meter"]["micros_per_hour"] == 360_000
    assert page["items"][0]["heartbeat_age_s"] == 10
    (other,) = (await operator.get(f"{API}/workers", params={"limit": 1, "cursor": page["next_cursor"]})).json()[
        "items"
    ]
    assert other["id"] == second
    assert (await operator.post(f"{API}/workers/{first}/pause")).json() == {"changed": 1}
    assert (await operator.get(f"{API}/workers/{first}")).json()["is_paused"]
    assert (await operator.post(f"{API}/workers/{first}/resume")).json() == {"changed": 1}
    assert (await operator.post(f"{API}/workers/{first}/restart")).json() == {"changed": 1}
    assert (await operator.get(f"{API}/workers/{first}")).json()["status"] == "terminating"
    assert (await operator.post(f"{API}/workers/{second}/terminate", json={"force": True})).json() == {"changed": 1}
    assert problem_of(await operator.post(f"{API}/workers/{second}/pause")) == (409, "CONFLICT")
    assert problem_of(await operator.post(f"{API}/workers/nobody/pause")) == (404, "NOT_FOUND")
    assert (await operator.get(f"{API}/workers/{first}/log")).json() == {"lines": [f"{first} says hello"]}
    story = (await operator.get(f"{API}/explain/{second}")).json()
    assert "ended" in story["answer"][0] or "MANUAL" in story["answer"][0]
    await operator.aclose()


async def test_the_page_of_a_task_shows_a_bounded_part_of_its_payload_and_rests_when_it_is_complete(bed: Bed) -> None:
    task_id = await bed.store.enqueue(new_task("a", "begin " + "\N{PILE OF POO}" * 200_000))
    await bed.store.register(Registration("hand", ("a",)))
    (claim,) = await bed.store.claim("hand", ["a"])
    page = (await bed.here.get(f"/tasks/{task_id}")).text
    assert "data-stream" in page
    assert "The first 64,000 of 200,008 characters." in page
    assert len(page) < 100_000
    await bed.store.finish_and_claim("hand", [Finished(task_id, claim.token, '{"ok": true}')], (), 0)
    for encoding in ("gzip", "identity"):
        done = await bed.here.get(f"/tasks/{task_id}", headers={"Accept-Encoding": encoding})
        assert "data-stream" not in done.text
        assert "&#34;ok&#34;: true" in done.text


DEEP = 3_000
ODD_PAYLOADS = {
    "nested deeply": "[" * DEEP + "]" * DEEP,
    "nested less deeply": '{"a": ' * 850 + "1" + "}" * 850,
    "a number of 5,000 digits": "9" * 5_000,
    "a number that is almost nothing": f"0.{'0' * 399}1",
}


@pytest.mark.parametrize("payload", ODD_PAYLOADS.values(), ids=ODD_PAYLOADS)
async def test_whatever_payload_the_database_holds_is_told_as_it_is(bed: Bed, dsn: str, payload: str) -> None:
    async with connected(dsn, "enqueueing") as connection:
        task_id = await connection.fetchval("select windlass.enqueue('a', $1::text::jsonb)", payload)
        await connection.execute("update windlass.tasks set result = payload where id = $1", task_id)
    told = await bed.here.get(f"{API}/tasks/{task_id}")
    assert told.status_code == 200
    assert told.text.endswith(f',"payload":{payload},"result":{payload}}}')
    page = await bed.here.get(f"/tasks/{task_id}")
    assert page.status_code == 200
    assert payload[:2_000].replace("}", "")[-100:].replace('"', "&#34;") in page.text


async def test_a_task_that_never_was_cannot_be_cancelled_or_retried_by_a_button(bed: Bed) -> None:
    browser = bed.client("192.0.2.7")
    await browser.get(await new_link(bed.store, ""))
    form = {"csrf": csrf_token(browser.cookies[COOKIE]), "is_confirmed": "yes"}
    for action_label in ("cancel", "retry"):
        assert problem_of(await browser.post(f"/tasks/99/{action_label}", data=form)) == (404, "NOT_FOUND")
    await browser.aclose()


async def test_a_probe_may_ask_for_the_head_alone(bed: Bed) -> None:
    assert (await bed.elsewhere.head("/healthz")).status_code == 200
    await bed.run_cycle()
    assert (await bed.elsewhere.head("/readyz")).status_code == (await bed.elsewhere.get("/readyz")).status_code


async def test_a_queue_of_no_possible_name_is_said_so(bed: Bed) -> None:
    browser = bed.client("192.0.2.7")
    await browser.get(await new_link(bed.store, ""))
    form = {"csrf": csrf_token(browser.cookies[COOKIE]), "is_confirmed": "yes", "back": "/tasks"}
    assert problem_of(await browser.post("/queues/%E2%82%AC/retry", data=form))[0] == 400
    done = await browser.post("/queues/a/retry", data=form)
    assert done.status_code == 303
    assert "0 dead letters of a are back in the queue." in (await browser.get("/tasks")).text
    await browser.aclose()


async def test_the_page_of_a_worker_reads_its_own_tasks_and_rests_when_it_has_ended(
    bed: Bed, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = sorted(await hire(bed))
    (claim,) = await bed.store.claim(first, ["a"], 1)
    (other,) = await bed.store.claim(second, ["a"], 1)

    async def nobody_elses() -> Any:
        raise AssertionError("the tasks of everybody are read")

    monkeypatch.setattr(bed.store, "running_tasks", nobody_elses)
    page = (await bed.here.get(f"/workers/{first}")).text
    assert f"/tasks/{claim.task_id}" in page
    assert f"/tasks/{other.task_id}" not in page
    assert "data-stream" in page
    await bed.store.terminate_worker(first, "by hand")
    for _ in range(3):
        clock.advance(5)
        await bed.run_cycle()
    assert (await bed.store.worker(first)).status == "terminated"  # type: ignore[union-attr]
    ended = (await bed.here.get(f"/workers/{first}")).text
    assert "data-stream" not in ended
    assert "by hand" in ended


async def test_fleets_are_paused_resumed_restarted_and_given_more(bed: Bed) -> None:
    await hire(bed)
    operator = bed.client("192.0.2.7", **await bed.token(Role.OPERATOR))
    assert (await operator.post(f"{API}/fleets/gpus/pause")).json() == {"changed": 2}
    shown = (await operator.get(f"{API}/fleets/gpus")).json()
    assert shown["fleet"]["is_paused"]
    assert shown["settings"]["max_workers"] == 3
    # What an environment holds, and passwords in addresses, are not for viewers.
    assert shown["settings"]["env"] == {"API_KEY": "********"}
    assert shown["settings"]["bootstrap"]["requirements"] == [
        "--extra-index-url https://app:********@pypi.example/simple"
    ]
    assert (await operator.post(f"{API}/resume")).json() == {"changed": 2}
    asked = (await operator.post(f"{API}/fleets/gpus/spawn", json={"count": 5})).json()
    assert asked == {"fleet": "gpus", "asked": 5, "granted": 1, "requested": 1, "max_workers": 3}
    assert (await operator.post(f"{API}/fleets/gpus/restart", json={"slot": 0})).json() == {"changed": 1}
    assert problem_of(await operator.post(f"{API}/fleets/gpus/restart", json={"slot": 77})) == (400, "BAD_INPUT")
    assert problem_of(await operator.post(f"{API}/fleets/nobody/pause")) == (404, "NOT_FOUND")
    assert SECRET not in (await operator.get(f"{API}/fleets")).text
    await operator.aclose()


async def test_the_supervisors_two_routes_have_its_shapes(bed: Bed) -> None:
    await hire(bed, 1)
    (component,) = (await bed.here.get("/api/web/worker/status")).json()
    assert set(component) == {"component", "status", "pid", "current_job", "restart_count", "last_seen"}
    assert (component["component"], component["status"]) == ("worker:a:0", "healthy")
    restarted = await bed.elsewhere.post("/api/web/worker/restart", headers=await bed.token(Role.OPERATOR))
    assert restarted.json() == {"status": "success", "message": "1 worker asked to leave; the next cycle hires anew."}


async def test_a_cycle_is_decided_again_with_other_settings(bed: Bed) -> None:
    await hire(bed)
    first = (await bed.here.get(f"{API}/cycles")).json()["items"][-1]
    assert first["actions"][0]["kind"] == "spawn"
    same = (await bed.here.get(f"{API}/cycles/{first['id']}/replay")).json()
    assert same["is_same"]
    fewer = (await bed.here.get(f"{API}/cycles/{first['id']}/replay", params={"set": ["max_workers=1"]})).json()
    assert (len(fewer["then"]["actions"]), len(fewer["again"]["actions"])) == (2, 1)
    for wrong in (
        *("max_workers", "nonsense=1", "max_workers=-1", "policy=psychic", "min_workers=9"),
        # More than anybody could count, or wait for.
        *("max_workers=99999999999", "max_changes_per_cycle=100001", "tasks_per_worker=1e-320", "stop_timeout_s=1e300"),
        *("scale_up_multiplier=1e308", "poll_interval_s=inf"),
    ):
        refused = await bed.here.get(f"{API}/cycles/{first['id']}/replay", params={"set": wrong})
        assert problem_of(refused) == (400, "BAD_INPUT"), wrong
    assert problem_of(await bed.here.get(f"{API}/cycles/99")) == (404, "NOT_FOUND")


async def test_deciding_again_is_done_beside_the_loop_one_at_a_time_and_within_a_time() -> None:
    thinking = SerialExecutor(limit_s=0.05)
    begun, may_end = threading.Event(), threading.Event()
    threads = set()

    def long() -> None:
        threads.add(threading.get_ident())
        begun.set()
        may_end.wait(30)

    for _ in range(2):  # the second waits for its turn, which does not come
        with pytest.raises(ApiError, match="too long"):
            await thinking.about(long)
    assert begun.is_set()
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    may_end.set()
    patient = SerialExecutor(limit_s=30)
    assert await asyncio.gather(*(patient.about(lambda number=number: number) for number in range(3))) == [0, 1, 2]  # type: ignore[misc]
    while thinking._turn.locked():
        await asyncio.sleep(0.01)
    assert await thinking.about(lambda: "again") == "again"


async def test_costs_events_alerts_and_history(bed: Bed, clock: Any) -> None:
    await hire(bed)
    clock.advance(1800)
    report = (await bed.here.get(f"{API}/cost", params={"by": "fleet"})).json()
    assert report["costs"][0]["key"] == "gpus"
    assert report["costs"][0]["is_estimate"]
    assert report["forecasts"][0]["workers"] == 2
    assert problem_of(await bed.here.get(f"{API}/cost", params={"since": "0001-01-01T00:00:00Z"})) == (400, "BAD_INPUT")
    events = (await bed.here.get(f"{API}/events", params={"fleet": "gpus", "code": "WORKER_SPAWNED"})).json()
    assert len(events["items"]) == 2
    await bed.store.take_samples(await bed.store.overview())
    assert len((await bed.here.get(f"{API}/fleets/gpus/history")).json()) == 1
    assert (await bed.here.get(f"{API}/alerts")).json() == {"items": [], "next_cursor": None}
    assert (await bed.here.get(f"{API}/logs")).json() == {"items": [], "next_cursor": None}


async def test_the_cost_page_is_one_look_at_sums_for_all_who_watch_it(
    bed: Bed, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hire(bed)
    clock.advance(3700)
    await bed.run_cycle()
    asked: list[Any] = []
    accounts, costs = bed.store.open_accounts, bed.store.costs

    async def counted_accounts(**which: Any) -> Any:
        asked.append("accounts")
        return await accounts(**which)

    async def counted_costs(by: str, *arguments: Any, **which: Any) -> Any:
        asked.append(str(by))
        return await costs(by, *arguments, **which)

    monkeypatch.setattr(bed.store, "open_accounts", counted_accounts)
    monkeypatch.setattr(bed.store, "costs", counted_costs)
    pages = await asyncio.gather(*(bed.here.get("/cost?days=7") for _ in range(5)))
    assert {page.status_code for page in pages} == {200}
    assert "By queue" in pages[0].text
    # Everything, this month, by day and by queue, from the sums of hours: once for the five.
    assert sorted(asked) == ["accounts", "day", "fleet", "fleet", "queue"]
    assert 'data-refresh-ms="10000"' in pages[0].text
    reports = [await bed.here.get(f"{API}/cost", params={"by": "queue"}) for _ in range(3)]
    assert len(asked) == 9
    assert reports[0].json()["costs"] == reports[2].json()["costs"]


async def test_no_day_is_left_out_where_two_currencies_are_paid_in(bed: Bed, clock: Any) -> None:
    async with bed.store._connection("spending") as connection:
        await connection.execute(
            "insert into windlass.spending (fleet, hour, currency, task_micros)"
            " select 'gpus', windlass.now() - day * interval '1 day', currency, 1000000"
            " from generate_series(0, 6) as day, unnest(array['EUR', 'USD']) as currency"
        )
    page = (await bed.here.get("/cost?days=7")).text
    for days_ago in range(7):
        day = f"{clock() - timedelta(days=days_ago):%Y-%m-%d}"
        assert page.count(f'<th scope="row">{day}</th>') == 2


async def test_bad_input_is_one_sentence(bed: Bed) -> None:
    headers = await bed.token(Role.OPERATOR)
    for body in (
        {},
        {"queue": "no spaces"},
        {"queue": "a", "unknown": 1},
        {"queue": "a", "payload": "x" * 20_000},
        [1],
    ):
        refused = await bed.elsewhere.post(f"{API}/tasks", json=body, headers=headers)
        assert problem_of(refused) == (400, "BAD_INPUT"), body
    for content, sentence in (
        ('{"queue": "a"}', "the body is not a JSON object: send one as JSON, with Content-Type: application/json."),
        ("{", "the request is not as expected: body.1: this is not JSON."),
        ("{}", "the request is not as expected: body.queue: this is missing."),
        (
            '{"queue": "a", "priority": "x"}',
            "the request is not as expected: body.priority: this is not a whole number.",
        ),
    ):
        kind = {} if sentence.startswith("the body") else {"Content-Type": "application/json"}
        refused = await bed.elsewhere.post(f"{API}/tasks", content=content, headers=headers | kind)
        assert refused.json()["detail"] == sentence
    for path in (
        "tasks?limit=0",
        "tasks?cursor=nonsense",
        "tasks?status=odd",
        "workers?status=x",
        "tasks/0",
        "tasks/x",
    ):
        assert problem_of(await bed.elsewhere.get(f"{API}/{path}", headers=headers)) == (400, "BAD_INPUT"), path
    assert problem_of(await bed.elsewhere.get(f"{API}/nothing", headers=headers)) == (404, "NOT_FOUND")
    refused = await bed.elsewhere.delete(f"{API}/tasks", headers=headers)
    assert refused.status_code == 405
    assert "GET" in refused.headers["allow"]


async def test_a_nul_in_an_address_is_refused_in_one_sentence(bed: Bed) -> None:
    for path in (
        f"{API}/explain/%00",
        f"{API}/explain/a%00b",
        f"{API}/fleets/%00",
        f"{API}/fleets/%00/history",
        f"{API}/workers/%00",
        f"{API}/workers/w%00/log",
        f"{API}/tasks?search=%00",
        f"{API}/tasks?queue=a%00",
        f"{API}/events?code=%00",
        f"{API}/%00",
        "/workers/%00",
        "/tasks?search=%00",
        "/static/%00.js",
        "/internal/wheel/%00",
        "/%00",
    ):
        refused = await bed.here.get(path)
        assert problem_of(refused) == (400, "BAD_INPUT"), path
        sentence = "the address has a NUL (%00) in it, which no name here can have: leave it out."
        assert refused.json()["detail"] == sentence, path


async def test_every_example_is_as_the_description_says(bed: Bed) -> None:
    description = (await bed.here.get(f"{API}/openapi.json")).json()
    seen = 0
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            for status, answer in operation["responses"].items():
                for kind, content in answer.get("content", {}).items():
                    if content["schema"] == {"$ref": "#/components/schemas/Problem"}:
                        continue  # all alike: its shape has one
                    assert "example" in content, f"{method} {path} {status} {kind}"
                    seen += 1
                    schema = content["schema"] | {"components": description["components"]}
                    problems = [error.message for error in Draft202012Validator(schema).iter_errors(content["example"])]
                    assert problems == [], f"{method} {path} {status}"
    assert seen > 50
    assert "example" in description["components"]["schemas"]["Problem"]
    # Each status has its own.
    assert not description["paths"]["/readyz"]["get"]["responses"]["503"]["content"]["application/json"]["example"][
        "is_ready"
    ]
    bodies = [
        (operation["operationId"], content)
        for methods in description["paths"].values()
        for operation in methods.values()
        for content in operation.get("requestBody", {}).get("content", {}).values()
    ]
    assert len(bodies) >= 16
    for name, content in bodies:
        schema = content["schema"] | {"components": description["components"]}
        assert [error.message for error in Draft202012Validator(schema).iter_errors(content["example"])] == [], name
    # Whoever probes has no token, and needs none.
    is_open = {path for path, methods in description["paths"].items() if methods.get("get", {}).get("security") == []}
    assert is_open == {"/healthz", "/readyz"}


# ----------------------------------------------------------------------------------------------------------------- live


async def messages_of(stream: Any) -> AsyncIterator[tuple[str, Any, str | None]]:
    """Of a stream of server-sent events: kind, data, id."""
    kind, event_id = "", None
    async for part in stream:
        for line in part.splitlines():
            name, _, value = line.partition(": ")
            if name == "event":
                kind = value
            elif name == "id":
                event_id = value
            elif name == "data":
                yield kind, json.loads(value), event_id
                event_id = None


async def test_who_listens_hears_of_a_pause_and_misses_nothing(dsn: str) -> None:
    async with bed_of(dsn) as bed, asyncio.timeout(30):
        await hire(bed)
        told = messages_of((await bed.live.listen(None)).messages())
        kind, overview, _ = await anext(told)
        assert kind == "overview"
        assert not overview["fleets"][0]["fleet"]["is_paused"]
        await bed.elsewhere.post(f"{API}/fleets/gpus/pause", headers=await bed.token(Role.OPERATOR))
        is_seen, event = False, None
        # In either order: one may be read just before the pause is written, and the other just after.
        while not is_seen or event is None:
            kind, data, event_id = await anext(told)
            is_seen |= kind == "overview" and data["fleets"][0]["fleet"]["is_paused"]
            event = (data, event_id) if kind == "event" else event
        assert event[0]["code"] == "FLEET_PAUSED"
        await bed.store.pause_fleet("gpus", False)
        again = messages_of((await bed.live.listen(int(event[1]))).messages())
        kind, data, _ = await anext(again)
        assert (kind, data["code"]) == ("event", "FLEET_RESUMED")


async def heard_until(bed: Bed, listener: Any, last: int) -> list[int]:
    """The ids of the events that it is told of, up to that one; then nobody listens."""
    heard: list[int] = []
    async for kind, _, event_id in messages_of(listener.messages()):
        if kind == "event":
            heard.append(int(event_id or 0))
        if last in heard:
            break
    listener.end()
    while bed.live._watcher is not None:  # it notices that nobody listens
        await asyncio.sleep(0.01)
    return heard


@pytest.mark.parametrize("is_heard_late", [True, False], ids=["heard late", "missed"])
async def test_an_event_that_becomes_visible_after_later_ones_is_told_once(
    dsn: str, monkeypatch: pytest.MonkeyPatch, is_heard_late: bool
) -> None:
    monkeypatch.setattr(live_module, "LOOK_INTERVAL_S", 0.01)
    event = "insert into windlass.events (code, reason) values ('X', 'x') returning id"
    async with (
        bed_of(dsn) as bed,
        connected(dsn, "slowly") as slow,
        connected(dsn, "quickly") as quick,
        asyncio.timeout(30),
    ):
        listener = await bed.live.listen(None)
        transaction = slow.transaction()
        await transaction.start()
        late = await slow.fetchval(event)
        early = await quick.fetchval(event)
        if is_heard_late:
            told = messages_of(listener.messages())
            while (await anext(told))[2] != str(early):
                pass
            await transaction.commit()
            assert await heard_until(bed, listener, late) == [late]
        else:
            assert await heard_until(bed, listener, early) == [early]
            await transaction.commit()
        seen = late if is_heard_late else early
        last = await quick.fetchval(event)
        again = await heard_until(bed, await bed.live.listen(seen), last)
        assert again == ([last] if is_heard_late else [late, last])
        # As it was heard, so it is remembered.
        final = await quick.fetchval(event)
        assert await heard_until(bed, await bed.live.listen(last), final) == [final]
        # Whoever saw none of them hears of them all, and so does whoever was away for longer than is remembered.
        everybody = sorted([late, early, last, final])
        assert sorted(await heard_until(bed, await bed.live.listen(late - 1), final)) == everybody
        bed.live._found.clear()
        assert await heard_until(bed, await bed.live.listen(late - 1), final) == everybody


async def test_who_was_away_for_more_events_than_are_remembered_hears_of_them_all(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"LOOK_INTERVAL_S": 0.01, "LOOK_BACK": 2, "MAX_EVENTS": 20, "MAX_REMEMBERED": 5}.items():
        monkeypatch.setattr(live_module, name, value)
    async with bed_of(dsn) as bed, connected(dsn, "events") as connection, asyncio.timeout(30):
        insert = "insert into windlass.events (code, reason) select 'X', 'x' from generate_series(1, $1) returning id"
        first = await connection.fetchval(insert, 1)
        assert (await bed.live.overview()).last_event_id == first
        await connection.execute(insert.removesuffix(" returning id"), 11)
        listener = await bed.live.listen(first)
        last = await connection.fetchval(insert, 1)
        assert await heard_until(bed, listener, last) == list(range(first + 1, last + 1))


async def test_who_comes_again_hears_of_each_event_once_and_a_newcomer_of_no_old_one(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "LOOK_INTERVAL_S", 0.01)
    async with bed_of(dsn) as bed, asyncio.timeout(30):
        await hire(bed)

        async def happens() -> int:
            await bed.store.pause_fleet("gpus", True)
            await bed.store.pause_fleet("gpus", False)
            return (await bed.store.events_page(limit=1)).rows[0].id

        first = await bed.live.listen(None)
        seen = (await heard_until(bed, first, await happens()))[-1]
        # Nobody listens now.
        await happens()
        again = await bed.live.listen(seen)
        last = await happens()
        assert await heard_until(bed, again, last) == list(range(seen + 1, last + 1))
        since = (await bed.live.overview()).last_event_id
        newcomer = await bed.live.listen(None)
        last = await happens()
        heard = await heard_until(bed, newcomer, last)
        assert heard[0] > since
        assert heard == list(range(heard[0], last + 1))


async def test_listeners_are_bounded_and_those_who_do_not_read_are_let_go(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "MAX_LISTENERS", 2)
    monkeypatch.setattr(live_module, "MAX_LISTENERS_OF_CALLER", 1)
    monkeypatch.setattr(live_module, "MAX_BEHIND", 1)
    monkeypatch.setattr(live_module, "LOOK_INTERVAL_S", 0.01)
    monkeypatch.setattr(live_module, "FRESH_S", 0.01)
    async with bed_of(dsn) as bed, asyncio.timeout(30):
        listener = await bed.live.listen(None, "ann")
        with pytest.raises(ApiError, match="you listen 1 times already"):
            await bed.live.listen(None, "ann")
        sent = 0

        async def send(message: Any) -> None:
            nonlocal sent
            if sent := sent + len(message.get("body", b"")):
                await asyncio.Event().wait()  # the client takes nothing more

        async def receive() -> Any:
            await asyncio.Event().wait()

        stream = EventStream(listener)
        scope = {"type": "http", "asgi": {"spec_version": "2.4"}, "method": "GET", "path": "/", "headers": []}
        # It comes to an end although its message never arrives, and does not count from the moment on it was let go.
        await stream(scope, receive, send)
        assert sent > 0
        assert listener.is_let_go
        assert bed.live.listeners == 0
        monkeypatch.setattr(live_module, "MAX_BEHIND", 10_000)
        await bed.live.listen(None, "ann")
        await bed.live.listen(None, "bob")
        assert problem_of(await bed.here.get(f"{API}/stream")) == (503, "UNAVAILABLE")


@pytest.mark.parametrize("kind", ["a token that is revoked", "a session that ended"])
async def test_who_may_not_look_any_more_hears_nothing_more(
    dsn: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(live_module, "BEAT_S", 0.05)
    monkeypatch.setattr(gate_module, "BELIEVED_S", 0.0)
    listener = listen("127.0.0.1", 0)
    base = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with (
        bed_of(dsn) as bed,
        serving(bed.app, listener),
        httpx.AsyncClient(trust_env=False, timeout=20, base_url=base) as client,
        asyncio.timeout(30),
    ):
        await hire(bed)
        if kind == "a token that is revoked":
            client.headers.update(await bed.token(Role.VIEWER))
        else:
            await client.get(await new_link(bed.store, base))
        async with client.stream("GET", f"{API}/stream") as answer:
            assert answer.status_code == 200
            parts = answer.aiter_text()
            assert "overview" in await anext(parts)
            if kind == "a token that is revoked":
                (token,) = await bed.store.tokens()
                await bed.store.revoke_token(token.name)
            else:
                (session,) = client.cookies.values()
                await client.post("/logout", content=f"csrf={csrf_token(session)}")
            async for _ in parts:  # to its end
                pass
        assert bed.live.listeners == 0


async def test_many_who_ask_at_once_are_answered_from_one_look(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bed_of(dsn) as bed:
        looks = 0
        look = bed.store.overview

        async def counted(*arguments: Any) -> Any:
            nonlocal looks
            looks += 1
            return await look(*arguments)

        monkeypatch.setattr(bed.store, "overview", counted)
        answers = await asyncio.gather(*(bed.here.get(f"{API}/status") for _ in range(50)))
        assert {answer.status_code for answer in answers} == {200}
        assert looks == 1


async def test_however_much_is_changed_looking_takes_its_share_of_the_time_and_no_more() -> None:
    now, looks = 100.0, list[float]()

    class Slow:
        async def overview(self, _configured: Any) -> Any:
            nonlocal now
            looks.append(now)
            now += 0.2
            return len(looks)

    live = OverviewFeed(Slow(), frozenset, clock=lambda: now)  # type: ignore[arg-type]
    await live.overview()
    live.poke()
    assert await live.overview() == 2  # at once
    while now < 200.0:  # and then a hundred times a second
        live.poke()
        assert await live.overview() == len(looks)
        now += 0.01
    assert 0.2 * len(looks) == pytest.approx(0.25 * (100 + live_module.SAVED_UP_S), rel=0.05)


async def test_samples_are_taken_whatever_went_wrong_before(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "SAMPLE_INTERVAL_S", 0.01)
    async with bed_of(dsn) as bed, asyncio.timeout(30):
        await hire(bed)
        troubles = iter([ZeroDivisionError("a defect"), DatabaseUnavailable("it is away")])
        look = bed.live.overview

        async def overview() -> Any:
            if (trouble := next(troubles, None)) is not None:
                raise trouble
            return await look()

        monkeypatch.setattr(bed.live, "overview", overview)
        with capture_logs() as logs:
            sampling = asyncio.create_task(wire_face.take_samples(bed.store, bed.live))
            while not await bed.store.history("gpus", 60):
                await asyncio.sleep(0.01)
                assert not sampling.done()
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
        assert [line["log_level"] for line in logs if line["event"] == "no sample was taken"] == ["error", "warning"]


# ---------------------------------------------------------------------------------------------------------------- pages


async def test_a_budget_of_which_nothing_is_spent_is_shown(bed: Bed) -> None:
    await bed.run_cycle()
    bed.fleets["gpus"] = FLEET.model_copy(update={"budget_per_day": Decimal(10)})
    page = (await bed.here.get("/cost")).text
    assert "per day: 0.00 of 10.00" in page
    assert "Nothing was paid" in page


async def test_of_a_worker_elsewhere_the_page_shows_what_the_database_has_of_it(bed: Bed, dsn: str) -> None:
    await bed.store.register(Registration("far", ("a",), fleet="clouds"))
    assert "there is no log of worker far on this host" in (await bed.here.get("/workers/far")).text.lower()
    async with PostgresLogStore(dsn) as logs:
        sink = LogSink(logs)
        sink.take({"level": "warning", "event": "machine refused", "worker_id": "far", "code": "NO_CAPACITY"})
        await sink.write()
    page = (await bed.here.get("/workers/far")).text
    assert "warning machine refused code=NO_CAPACITY" in page
    assert "logged of it" in page


async def test_rays_own_dashboard_is_linked_where_a_dispatcher_says_where_it_is(bed: Bed) -> None:
    await hire(bed)
    for name, url in (("d1", "http://127.0.0.1:8265"), ("d2", "javascript:alert(1)")):
        await bed.store.register(Registration(name, ("a",), fleet="gpus", kind=WorkerKind.DISPATCHER))
        await bed.store.heartbeat(name, (), {"ray_dashboard": url})
    page = (await bed.here.get("/workers")).text
    assert 'href="http://127.0.0.1:8265"' in page
    assert "javascript:" not in page


# -------------------------------------------------------------------------------------------------------------- metrics


async def test_metrics_have_everything_that_is_watched(bed: Bed, clock: Any) -> None:
    await hire(bed)
    clock.advance(60)
    text = (await bed.here.get("/metrics")).text
    for line in (
        'windlass_workers{fleet="gpus",status="active"} 2.0',
        'windlass_tasks_queued{queue="a"} 2.0',
        'windlass_burn_per_hour{currency="EUR",fleet="gpus"} 0.72',
        'windlass_provisioning_success_ratio{fleet="gpus"} 1.0',
        'windlass_provider_calls_total{call="create",fleet="gpus",outcome="ok"} 2.0',
        'windlass_provider_calls_total{call="list",fleet="gpus",outcome="ok"} 2.0',
        'windlass_actions_total{action="workers_spawned",fleet="gpus"} 2.0',
        'windlass_worker_restarts{fleet="gpus"} 0.0',
        'windlass_slots_failed{fleet="gpus"} 0.0',
        "windlass_has_leader 1.0",
        'windlass_worker_cost{currency="EUR",fleet="gpus"} 0.006',
        'windlass_cycle_seconds_count{fleet="gpus"} 2.0',
        'windlass_workers{fleet="gpus",status="terminated"} 0.0',
    ):
        assert line in text.splitlines(), f"{line}\n{text}"
    assert "gpus-0" not in text  # no label for each worker


async def test_metrics_tell_how_much_room_there_is_and_when_the_queue_is_clear(bed: Bed, clock: Any) -> None:
    async def told() -> dict[str, float]:
        clock.advance(2)
        bed.live.poke()
        lines = (await bed.here.get("/metrics")).text.splitlines()
        names = ("windlass_workers_idle", "windlass_places_free", "windlass_queue_clear_seconds")
        found = (line.split(" ") for line in lines if line.startswith(tuple(f"{name}{{" for name in names)))
        return {name.partition("{")[0].removeprefix("windlass_"): float(value) for name, value in found}

    first, second = await hire(bed)
    # Nobody knows yet how long a task takes.
    assert await told() == {"workers_idle": 2, "places_free": 2}
    (claim,) = await bed.store.claim(first, ["a"], 1)
    assert await told() == {"workers_idle": 1, "places_free": 1}
    clock.advance(10)
    await bed.store.finish_and_claim(first, [Finished(claim.task_id, claim.token, None)], (), 0)
    for _ in range(4):
        await bed.store.enqueue(new_task("a"))
    seen = await told()
    assert (seen["workers_idle"], seen["places_free"]) == (2, 2)
    assert seen["queue_clear_seconds"] == pytest.approx(5 / 2 * 12, abs=0.1)
    # One that is paused takes nothing, and without a free place nothing is known to clear the queue.
    await bed.store.set_paused([second], True)
    assert (await told())["queue_clear_seconds"] == pytest.approx(5 * 12, abs=0.1)
    await bed.store.claim(first, ["a"], 1)
    assert await told() == {"workers_idle": 0, "places_free": 0}
    async with bed.store._connection("emptying the queue") as connection:
        await connection.execute("delete from windlass.tasks where status = 'queued'")
    assert await told() == {"workers_idle": 0, "places_free": 0, "queue_clear_seconds": 0}


async def test_counters_begin_at_zero_so_that_their_first_increase_is_seen(bed: Bed) -> None:
    bed.metrics.expect(["gpus"], ["slack"])
    text = (await bed.here.get("/metrics")).text
    for line in (
        'windlass_provider_calls_total{call="create",fleet="gpus",outcome="error"} 0.0',
        'windlass_worker_crashes_total{fleet="gpus"} 0.0',
        'windlass_alert_messages_total{outcome="given_up",receiver="slack"} 0.0',
    ):
        assert line in text.splitlines(), f"{line}\n{text}"


async def test_several_alerts_of_a_kind_are_one_series_and_workers_that_ended_are_counted(bed: Bed) -> None:
    first, _ = await hire(bed)
    async with bed.store._connection("making alerts") as connection:
        await connection.execute(
            "insert into windlass.alerts (fleet, key, code, severity, reason)"
            " select 'gpus', 'SLOT_FAILED ' || n, 'SLOT_FAILED', 'critical', 'x' from generate_series(1, 2) as n"
        )
    await bed.store.terminate_worker(first, "by hand")
    for _ in range(2):
        await bed.run_cycle()
    lines = (await bed.here.get("/metrics")).text.splitlines()
    firing = [line for line in lines if line.startswith("windlass_alerts_firing{")]
    assert firing == ['windlass_alerts_firing{code="SLOT_FAILED",fleet="gpus",severity="critical"} 2.0']
    assert 'windlass_workers{fleet="gpus",status="terminated"} 1.0' in lines


async def test_crashes_are_counted_and_timed(bed: Bed, clock: Any) -> None:
    await hire(bed)
    clock.advance(timedelta(hours=1).total_seconds())
    await bed.run_cycle()
    clock.advance(31)
    await bed.run_cycle()
    text = (await bed.here.get("/metrics")).text
    assert 'windlass_worker_crashes_total{fleet="gpus"} 2.0' in text
    assert 'windlass_since_last_crash_seconds{fleet="gpus"} 0.0' in text
