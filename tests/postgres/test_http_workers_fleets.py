"""Routes and pages about workers and fleets."""

from typing import Any

import pytest

from support.api_fixture import API, SECRET, ApiFixture, problem_of
from support.stores import PostgresStores
from windlass.model.auth import Role
from windlass.model.worker import Registration, WorkerKind
from windlass.store.log_sink import LogSink


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
    assert (await operator.get(f"{API}/workers/{first}/log")).json() == {"lines": [f"{first} says hello"]}
    explanation = (await operator.get(f"{API}/explain/{second}")).json()
    assert "requested over the API" in " ".join(explanation["answer"])


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


async def test_page_of_remote_worker_shows_log_lines_from_database(api: ApiFixture, dsn: str) -> None:
    await api.store.register(Registration("far", ("a",), fleet="clouds"))
    assert "This host has no log of worker far." in (await api.localhost.get("/workers/far")).text
    async with PostgresStores(dsn) as logs:
        sink = LogSink(logs)
        sink.take({"level": "warning", "event": "machine refused", "worker_id": "far", "code": "NO_CAPACITY"})
        await sink.write()
    page = (await api.localhost.get("/workers/far")).text
    assert "warning machine refused code=NO_CAPACITY" in page
    assert "from the database, last" in page


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
