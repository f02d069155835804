"""Routes and pages about workers and fleets."""

from typing import Any
from uuid import uuid4

import pytest

from support.api_fixture import API, COOKIE, SECRET, ApiFixture, problem_of
from windlass.model.auth import Role, TokenScope, csrf_token
from windlass.model.task import new_task
from windlass.model.worker import Registration, WorkerKind
from windlass.model.worker_log import LogChunk
from windlass.store.connection import connected


async def test_worker_is_listed_paused_restarted_and_terminated(api: ApiFixture, clock: Any) -> None:
    first, second = sorted(await api.spawn_active_workers())
    operator = await api.client_as(Role.OPERATOR)
    clock.advance(10)
    page = (await operator.get(f"{API}/workers", params={"limit": 1})).json()
    assert page["items"][0]["id"] == first
    assert page["items"][0]["meter"]["micros_per_hour"] == 360_000
    assert page["items"][0]["heartbeat_age_s"] == 10
    (other,) = (await operator.get(f"{API}/workers", params={"limit": 1, "cursor": page["next_cursor"]})).json()[
        "items"
    ]
    assert other["id"] == second
    paused = (await operator.post(f"{API}/workers/{first}/pause")).json()
    assert paused == {"outcome": "done", "message": f"worker {first} paused", "changed": 1}
    assert (await operator.get(f"{API}/workers/{first}")).json()["is_paused"]
    assert (await operator.post(f"{API}/workers/{first}/resume")).json()["changed"] == 1
    assert (await operator.post(f"{API}/workers/{first}/restart")).json()["changed"] == 1
    assert (await operator.get(f"{API}/workers/{first}")).json()["status"] == "terminating"
    terminated = await operator.post(f"{API}/workers/{second}/terminate", json={"force": True})
    assert terminated.json()["changed"] == 1
    assert problem_of(await operator.post(f"{API}/workers/{second}/pause")) == (409, "CONFLICT")
    assert problem_of(await operator.post(f"{API}/workers/unknown/pause")) == (404, "NOT_FOUND")
    log = (await operator.get(f"{API}/workers/{first}/logs")).json()
    assert ([line["text"] for line in log["lines"]], log["cursor"]) == ([f"{first} says hello"], 0)
    explanation = (await operator.get(f"{API}/explain/{second}")).json()
    assert "requested over the API" in " ".join(explanation["answer"])


async def test_overview_and_page_of_a_fleet_show_what_was_done(api: ApiFixture) -> None:
    for _ in range(2):
        await api.store.enqueue(new_task("a"))
    await api.run_cycle()

    async def done() -> list[str]:
        (fleet,) = (await api.localhost.get(f"{API}/overview")).json()["fleets"]
        found: list[str] = fleet["done"]
        return found

    assert await done() == ["spawned 2"]
    for path in ("/", "/fleets/gpus"):
        assert '<span class="soft">(spawned 2)</span>' in (await api.localhost.get(path)).text
    async with connected(api.dsn, "changing what was done") as connection:
        await connection.execute(
            """update windlass.cycles set summary = '{"workers_spawned": 1, "creations_refused": {"NO_CAPACITY": 1}}'"""
        )
    api.feed.mark_changed()
    assert await done() == ["spawned 1 of 2", "1 refused: no capacity"]


async def test_worker_page_shows_own_tasks_and_is_static_when_terminated(
    api: ApiFixture, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = sorted(await api.spawn_active_workers())
    (claim,) = await api.store.claim(first, ["a"], 1)
    (other,) = await api.store.claim(second, ["a"], 1)

    async def fail() -> Any:
        raise AssertionError("the tasks of all workers were read")

    monkeypatch.setattr(api.store, "running_tasks", fail)
    page = (await api.localhost.get(f"/workers/{first}")).text
    assert f"/tasks/{claim.task_id}" in page
    assert f"/tasks/{other.task_id}" not in page
    assert "data-stream" in page
    await api.store.terminate_worker(first, "by hand")
    for _ in range(3):
        clock.advance(5)
        await api.run_cycle()
    assert (await api.store.worker(first)).status == "terminated"  # type: ignore[union-attr]
    ended = (await api.localhost.get(f"/workers/{first}")).text
    assert "data-stream" not in ended
    assert "by hand" in ended


async def test_output_and_diagnostics_outlive_a_remote_worker(api: ApiFixture) -> None:
    await api.store.register(Registration("far", ("a",), fleet="clouds"))
    assert "No output is known." in (await api.localhost.get("/workers/far")).text
    await api.store.enqueue(new_task("a", None))
    (claim,) = await api.store.claim("far", ["a"], 1)
    chunks = [LogChunk(("<b>rendering</b>",), (1_500,), claim.task_id, 1), LogChunk(("registered worker",), dropped=7)]
    await api.store.append_logs("far", uuid4(), chunks)
    await api.store.heartbeat("far", (), {"load": 0.5})
    await api.store.fail("far", claim.task_id, claim.token, "it broke", code="MEMORY_LIMIT")
    await api.store.deregister("far", "drained")
    viewer = await api.client_as(Role.VIEWER)
    page = (await viewer.get("/workers/far")).text
    assert f"[task {claim.task_id}] &lt;b&gt;rendering" in page
    assert "[7 lines dropped" in page
    assert "load 0.5" in page
    assert "Last failed attempt" in page and "MEMORY_LIMIT" in page
    assert "rendering" in (await viewer.get(f"/tasks/{claim.task_id}")).text
    log = (await viewer.get(f"{API}/workers/far/logs")).json()
    assert next((line["text"], line["task_id"], line["dropped"]) for line in log["lines"]) == (
        "<b>rendering</b>", claim.task_id, 0,
    )  # fmt: skip
    assert log["lines"][1]["dropped"] == 7
    assert (await viewer.get(f"{API}/workers/far/logs", params={"after": log["cursor"]})).json()["lines"] == []
    own = (await viewer.get(f"{API}/tasks/{claim.task_id}/logs", params={"attempt": 1})).json()
    assert [line["text"] for line in own["lines"]] == ["<b>rendering</b>"]
    assert (await viewer.get(f"{API}/tasks/{claim.task_id}/logs", params={"attempt": 2})).json()["lines"] == []
    metadata = (await viewer.get(f"{API}/workers/far")).json()["metadata"]
    assert metadata["diagnostics"]["last_lines"] == ["<b>rendering</b>", "registered worker"]
    assert metadata["diagnostics"]["last_error"]["code"] == "MEMORY_LIMIT"
    assert metadata["diagnostics"]["last_heartbeat"]
    assert problem_of(await viewer.get(f"{API}/tasks/999999/logs")) == (404, "NOT_FOUND")


async def test_output_respects_roles_and_scopes(api: ApiFixture) -> None:
    await api.store.register(Registration("far", ("a",), fleet="clouds"))
    await api.store.enqueue(new_task("a", None))
    (claim,) = await api.store.claim("far", ["a"], 1)
    await api.store.append_logs("far", uuid4(), [LogChunk(("text",), (), claim.task_id, 1)])
    paths = (f"{API}/workers/far/logs", f"{API}/tasks/{claim.task_id}/logs")
    producer = await api.client_as(Role.PRODUCER)
    assert [problem_of(await producer.get(path))[0] for path in paths] == [403, 403]
    limited = await api.client_as(Role.VIEWER, TokenScope(frozenset({"other"}), frozenset({"other"})))
    assert [problem_of(await limited.get(path))[0] for path in paths] == [404, 404]


async def test_workers_page_links_the_ray_dashboard(api: ApiFixture) -> None:
    await api.spawn_active_workers()
    for name, url in (("d1", "http://127.0.0.1:8265"), ("d2", "javascript:alert(1)")):
        await api.store.register(Registration(name, ("a",), fleet="gpus", kind=WorkerKind.DISPATCHER))
        await api.store.heartbeat(name, (), {"ray_dashboard": url})
    page = (await api.localhost.get("/workers")).text
    assert 'href="http://127.0.0.1:8265"' in page
    assert "javascript:" not in page


async def test_fleet_is_paused_resumed_restarted_and_spawned(api: ApiFixture) -> None:
    await api.spawn_active_workers()
    operator = await api.client_as(Role.OPERATOR)
    assert (await operator.post(f"{API}/fleets/gpus/pause")).json()["changed"] == 2
    shown = (await operator.get(f"{API}/fleets/gpus")).json()
    assert shown["fleet"]["is_paused"]
    assert shown["settings"]["max_workers"] == 3
    # Environment values and passwords in URLs are masked.
    assert shown["settings"]["env"] == {"API_KEY": "********"}
    assert shown["settings"]["bootstrap"]["requirements"] == [
        "--extra-index-url https://app:********@pypi.example/simple"
    ]
    assert (await operator.post(f"{API}/resume")).json()["changed"] == 2
    asked = (await operator.post(f"{API}/fleets/gpus/spawn", json={"count": 5})).json()
    assert {name: asked[name] for name in ("fleet", "asked", "granted", "requested", "max_workers")} == {
        "fleet": "gpus", "asked": 5, "granted": 1, "requested": 1, "max_workers": 3,
    }  # fmt: skip
    assert (await operator.post(f"{API}/fleets/gpus/restart", json={"slot": 0})).json()["changed"] == 1
    assert problem_of(await operator.post(f"{API}/fleets/gpus/restart", json={"slot": 77})) == (400, "BAD_INPUT")
    assert problem_of(await operator.post(f"{API}/fleets/unknown/pause")) == (404, "NOT_FOUND")
    assert SECRET not in (await operator.get(f"{API}/fleets")).text


async def test_fleet_is_deployed_and_the_deploy_aborted(api: ApiFixture) -> None:
    api.control.versions.fingerprint = "111111111111"
    await api.spawn_active_workers()
    operator, viewer = await api.client_as(Role.OPERATOR), await api.client_as(Role.VIEWER)
    path = f"{API}/fleets/gpus/deploy"
    before = (await viewer.get(path)).json()
    assert (before["fingerprint"], before["changed"], before["workers"]) == ("111111111111", 0, 2)
    assert before["rollout"] is None
    assert problem_of(await viewer.post(path)) == (403, "FORBIDDEN")
    assert problem_of(await viewer.post(f"{path}/abort")) == (403, "FORBIDDEN")
    for body in ({"surge": 1, "max_unavailable": 1}, {"surge": 4}, {"surge": -1}, {"surge": 10_001}):
        assert problem_of(await operator.post(path, json=body)) == (400, "BAD_INPUT"), body
    assert (await operator.post(f"{path}/abort")).json()["message"] == "fleet gpus has no rollout to abort"
    assert problem_of(await viewer.get(f"{API}/fleets/unknown/deploy")) == (404, "NOT_FOUND")

    api.control.versions.fingerprint = "222222222222"
    asked = (await operator.post(path, json={"surge": 1, "is_immediate": True})).json()
    assert asked["message"] == f"deploy {asked['request_id']} of fleet gpus requested for 2 workers"
    await api.run_cycle()
    report = (await viewer.get(path)).json()
    assert (report["fingerprint"], report["changed"], report["workers"]) == ("222222222222", 2, 3)
    rollout = report["rollout"]
    assert (rollout["id"], rollout["status"], rollout["surge"]) == (asked["request_id"], "running", 1)
    assert (await operator.post(f"{path}/abort")).json()["message"] == "rollout of fleet gpus is aborted"
    await api.run_cycle()
    assert (await viewer.get(path)).json()["rollout"]["status"] == "aborted"


async def test_dashboard_buttons_deploy_a_fleet_and_abort_the_deploy(api: ApiFixture) -> None:
    api.control.versions.fingerprint = "111111111111"
    await api.spawn_active_workers()
    browser = await api.browser()
    form = {"csrf": csrf_token(browser.cookies[COOKIE]), "is_confirmed": "yes", "back": "/fleets/gpus"}
    deploy, abort = 'action="/fleets/gpus/deploy"', 'action="/fleets/gpus/deploy/abort"'
    page = (await browser.get("/fleets/gpus")).text
    assert (deploy in page, abort in page) == (True, False)
    api.control.versions.fingerprint = "222222222222"
    assert (await browser.post("/fleets/gpus/deploy", data=form)).headers["location"] == "/fleets/gpus"
    await api.run_cycle()
    page = (await browser.get("/fleets/gpus")).text
    assert (deploy in page, abort in page) == (False, True)
    assert "2 of 3 on the old version, deploying 222222222222" in page
    await browser.post("/fleets/gpus/deploy/abort", data=form)
    assert "Rollout of fleet gpus is aborted." in (await browser.get("/fleets/gpus")).text
    await api.run_cycle()
    page = (await browser.get("/fleets/gpus")).text
    assert (deploy in page, abort in page) == (True, False)
    # A viewer has no buttons.
    watching = await api.browser(role=Role.VIEWER)
    assert deploy not in (await watching.get("/fleets/gpus")).text
