"""The JSON API over a real PostgreSQL: who may, what each route answers, live change, and what nobody may see."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from decimal import Decimal
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from face_bed import FLEET, SECRET, Bed, bed_of
from windlass.api import live as live_module
from windlass.api.documented import EXAMPLES
from windlass.api.gate import COOKIE, CSRF_HEADER
from windlass.api.session import new_link
from windlass.model.access import Role, csrf_token
from windlass.model.task import new_task
from windlass.model.worker import Registration, WorkerKind
from windlass.store.log_sink import LogSink, PostgresLogStore

API = "/api/v1"


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
    assert problem_of(await browser.get(f"{API}/overview")) == (401, "UNAUTHORIZED")
    await browser.aclose()


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
    assert asked == {"fleet": "gpus", "granted": 1, "requested": 1, "max_workers": 3}
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
    assert first["actions"][0]["kind"] == "Spawn"
    same = (await bed.here.get(f"{API}/cycles/{first['id']}/replay")).json()
    assert same["is_same"]
    fewer = (await bed.here.get(f"{API}/cycles/{first['id']}/replay", params={"set": ["max_workers=1"]})).json()
    assert (len(fewer["then"]["actions"]), len(fewer["again"]["actions"])) == (2, 1)
    for wrong in ("max_workers", "nonsense=1", "max_workers=-1", "policy=psychic", "min_workers=9"):
        refused = await bed.here.get(f"{API}/cycles/{first['id']}/replay", params={"set": wrong})
        assert problem_of(refused) == (400, "BAD_INPUT"), wrong
    assert problem_of(await bed.here.get(f"{API}/cycles/99")) == (404, "NOT_FOUND")


async def test_costs_events_alerts_and_history(bed: Bed, clock: Any) -> None:
    await hire(bed)
    clock.advance(1800)
    report = (await bed.here.get(f"{API}/cost", params={"by": "fleet"})).json()
    assert report["costs"][0]["key"] == "gpus"
    assert report["costs"][0]["is_estimate"]
    assert report["forecasts"][0]["workers"] == 2
    assert problem_of(await bed.here.get(f"{API}/cost", params={"since": "0001-01-01T00:00:00Z"})) == (400, "BAD_INPUT")
    events = (await bed.here.get(f"{API}/events", params={"fleet": "gpus", "code": "WORKER_HIRED"})).json()
    assert len(events["items"]) == 2
    await bed.store.take_samples(await bed.store.overview())
    assert len((await bed.here.get(f"{API}/fleets/gpus/history")).json()) == 1
    assert (await bed.here.get(f"{API}/alerts")).json() == {"items": [], "next_cursor": None}
    assert (await bed.here.get(f"{API}/logs")).json() == {"items": [], "next_cursor": None}


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


async def test_every_example_is_as_the_description_says(bed: Bed) -> None:
    description = (await bed.here.get(f"{API}/openapi.json")).json()
    seen = 0
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            answers = operation["responses"]
            for status, answer in answers.items():
                content = answer.get("content", {}).get("application/json")
                # One example is enough for an answer that may come with two statuses.
                if content is None or ("example" not in content and status in ("200", "503") and len(answers) > 2):
                    continue
                assert "example" in content, f"{method} {path} {status}"
                seen += 1
                schema = content["schema"] | {"components": description["components"]}
                problems = [error.message for error in Draft202012Validator(schema).iter_errors(content["example"])]
                assert problems == [], f"{method} {path}"
    assert seen > 20
    assert set(EXAMPLES) >= {"problem"}


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


async def test_who_listens_hears_of_a_pause_at_once_and_misses_nothing(dsn: str) -> None:
    async with bed_of(dsn) as bed, asyncio.timeout(30):
        await hire(bed)
        told = messages_of(await bed.live.listen(None))
        kind, overview, _ = await anext(told)
        assert kind == "overview"
        assert not overview["fleets"][0]["fleet"]["is_paused"]
        started = asyncio.get_running_loop().time()
        await bed.elsewhere.post(f"{API}/fleets/gpus/pause", headers=await bed.token(Role.OPERATOR))
        heard = []
        async for kind, data, event_id in told:
            heard.append((kind, data, event_id))
            if kind == "overview" and data["fleets"][0]["fleet"]["is_paused"]:
                break
        assert asyncio.get_running_loop().time() - started < 1.0
        (event,) = [(data, event_id) for kind, data, event_id in heard if kind == "event"]
        assert event[0]["code"] == "FLEET_PAUSED"
        await bed.store.pause_fleet("gpus", False)
        again = messages_of(await bed.live.listen(int(event[1])))
        kind, data, _ = await anext(again)
        assert (kind, data["code"]) == ("event", "FLEET_RESUMED")


async def test_listeners_are_bounded_and_the_slow_are_let_go(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "MAX_LISTENERS", 1)
    monkeypatch.setattr(live_module, "MAX_BEHIND", 1)
    monkeypatch.setattr(live_module, "LOOK_INTERVAL_S", 0.01)
    monkeypatch.setattr(live_module, "FRESH_S", 0.01)
    async with bed_of(dsn) as bed, asyncio.timeout(30):
        stream = await bed.live.listen(None)
        await anext(stream)
        assert problem_of(await bed.here.get(f"{API}/stream")) == (503, "UNAVAILABLE")
        # It reads nothing more until it has been let go: then there is an end to what it reads.
        while not next(iter(bed.live._listeners))._is_let_go:
            await asyncio.sleep(0.01)
        assert [message async for message in stream] == []
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
    await bed.store.end_worker(first, "by hand")
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
