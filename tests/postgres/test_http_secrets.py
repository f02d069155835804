"""Known secrets in the API, the event stream and pages: hidden in texts, without damage to anything else."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from support.api_fixture import API, ApiFixture
from support.known_secrets import known_secrets
from windlass.model.auth import Role
from windlass.model.redaction import HIDDEN
from windlass.model.task import new_task
from windlass.model.worker import Registration
from windlass.store.processes import PostgresProcessStore

# A password that is the name of the product, a number that is a price, parts of keys, the name of a fleet and a state.
ORDINARY = ("windlass", "360000", "worker", "worker_id", "reason", "active", "queued")
STRONG = "pa55/w\"o'rd é"


@pytest.fixture(autouse=True)
def _secrets() -> Iterator[None]:
    with known_secrets(*ORDINARY, STRONG):
        yield


async def failed_task(api: ApiFixture) -> int:
    task_id = await api.store.enqueue(new_task("a", {"password": STRONG}, max_attempts=1, priority=1))
    await api.store.register(Registration("worker-by-hand", ("a",)))
    (claim,) = await api.store.claim("worker-by-hand", ["a"])
    await api.store.fail("worker-by-hand", task_id, claim.token, f"ValueError: no login as windlass with {STRONG}")
    return task_id


async def test_task_hides_secrets_except_in_payload_and_result(api: ApiFixture) -> None:
    task_id = await failed_task(api)
    administrator = await api.client_as(Role.ADMIN)
    task = (await administrator.get(f"{API}/tasks/{task_id}")).json()
    assert task["payload"] == {"password": STRONG}
    assert task["error"] == f"ValueError: no login as {HIDDEN} with {HIDDEN}"
    assert (task["id"], task["worker_id"], task["queue"]) == (task_id, "worker-by-hand", "a")
    assert [event["code"] for event in task["events"]] == ["TASK_FAILED"]
    assert STRONG not in json.dumps([task["events"], task["answer"]], ensure_ascii=False).replace('\\"', '"')


async def test_lists_keep_keys_numbers_and_states(api: ApiFixture) -> None:
    ids = await api.spawn_active_workers()
    await failed_task(api)
    administrator = await api.client_as(Role.ADMIN)
    workers = (await administrator.get(f"{API}/workers", params={"fleet": "gpus"})).json()["items"]
    assert {(worker["id"], worker["status"]) for worker in workers} == {(worker_id, "active") for worker_id in ids}
    assert {worker["meter"]["micros_per_hour"] for worker in workers} == {360_000}
    fleets = {each["fleet"]["name"]: each for each in (await administrator.get(f"{API}/fleets")).json()}
    assert fleets["gpus"]["workers"]["active"] == 2
    stream = "".join([message async for message in _first(api)])
    overview = json.loads(re.findall("event: overview\ndata: (.*)\n", stream)[0])
    assert [burn["micros_per_hour"] for each in overview["fleets"] for burn in each["burn"]] == [2 * 360_000]


async def _first(api: ApiFixture) -> Any:
    messages = (await api.feed.listen(None)).messages()
    yield await anext(messages)
    await messages.aclose()


async def test_requested_cycle_is_masked_in_its_response_and_row(
    api: ApiFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = {"fleet": "worker", "actions": {"workers_spawned": 360_000}, "decision": f"hold: {STRONG}"}
    shown = {**summary, "decision": f"hold: {HIDDEN}"}

    async def run_cycle() -> list[dict[str, Any]]:
        return [summary]

    monkeypatch.setattr(api.control, "run_cycle", run_cycle)
    operator = await api.client_as(Role.OPERATOR)
    assert (await operator.post("/internal/cycle")).json() == [shown]
    processes: PostgresProcessStore = api.store
    request_id = await processes.request_cycle()
    assert request_id is not None
    await processes.answer_cycle_requests([request_id], [summary])
    assert await processes.cycle_answer(request_id) == [shown]


async def test_pages_hide_secrets_and_keep_links_and_markup(api: ApiFixture) -> None:
    ids = await api.spawn_active_workers()
    task_id = await failed_task(api)
    browser = await api.browser(role=Role.ADMIN)
    paths = ("/", "/queues", "/queues/a", "/workers", f"/workers/{ids[0]}", "/tasks", f"/tasks/{task_id}", "/cycles")
    pages = {}
    for path in (*paths, "/tasks?status=failed", "/errors", "/cost", "/fleets/gpus", "/access", "/runbooks"):
        response = await browser.get(path)
        assert response.status_code == 200, path
        pages[path] = response.text
        for file in re.findall(r'(?:href|src)="(/static/[^"?]*)', response.text):
            assert (await browser.get(file)).status_code == 200, file
        assert f'<a href="/workers"{" aria-current=" if path.startswith("/workers") else ">"}' in response.text
        assert "pa55" not in response.text
    assert f"no login as {HIDDEN} with {HIDDEN}" in pages[f"/tasks/{task_id}"]
    assert f'href="/workers/{ids[0]}"' in pages["/workers"]
    assert 'data-state="active"' in pages[f"/workers/{ids[0]}"]
    assert "<option selected>a</option>" in (await browser.get("/tasks?queue=a")).text
    for chart in re.findall('data-series="([^"]*)"', pages["/"]):
        json.loads(chart.replace("&#34;", '"'))
