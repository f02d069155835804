"""Queues, failed attempts, budgets, selected tasks and pages of fleets over HTTP."""

import re
from typing import Any

import pytest

from support.api_fixture import API, SECRET, ApiFixture, problem_of
from windlass.model.auth import Role
from windlass.model.task import TaskStatus, new_task
from windlass.model.worker import Registration
from windlass.store.connection import connected


async def fail_task(api: ApiFixture, queue: str = "a", error: str = "RuntimeError: CUDA error") -> int:
    """A task that failed on worker `w` and stays failed."""
    await api.store.register(Registration("w", (queue,)))
    task_id = await api.store.enqueue(new_task(queue, {"prompt": "a lighthouse"}, max_attempts=1))
    (claim,) = await api.store.claim("w", [queue])
    await api.store.fail("w", claim.task_id, claim.token, error)
    return task_id


async def test_queue_names_what_serves_it(api: ApiFixture) -> None:
    await api.run_cycle()
    await api.store.enqueue(new_task("nosuch"))
    viewer = await api.client_as(Role.VIEWER)
    queues = {queue["name"]: queue for queue in (await viewer.get(f"{API}/queues")).json()}
    assert (queues["a"]["fleets"], queues["a"]["is_served"]) == (["gpus"], True)
    assert (queues["nosuch"]["fleets"], queues["nosuch"]["workers"], queues["nosuch"]["is_served"]) == ([], 0, False)
    assert queues["nosuch"]["work"]["queued"] == 1
    assert (await viewer.get(f"{API}/queues/nosuch")).json() == queues["nosuch"]
    assert problem_of(await viewer.get(f"{API}/queues/never-used")) == (404, "NOT_FOUND")


async def test_unserved_queue_is_on_the_overview_and_has_a_page(api: ApiFixture) -> None:
    await api.run_cycle()
    browser = await api.browser()
    assert "nosuch" not in (await browser.get("/")).text
    await api.store.enqueue(new_task("nosuch"))
    api.feed.mark_changed()
    overview = (await browser.get("/")).text
    assert "No fleet and no worker serves queue nosuch, which has 1 task." in overview
    assert "not served" in (await browser.get("/queues")).text
    page = (await browser.get("/queues/nosuch")).text
    assert "No fleet and no worker serves this queue." in page
    assert "windlass worker --queue nosuch" in page
    assert (await browser.get("/queues/never-used", headers={"Accept": "text/html"})).status_code == 404


async def test_failed_attempts_are_listed_with_their_worker(api: ApiFixture) -> None:
    task_id = await fail_task(api)
    await fail_task(api, error="ValueError: bad seed")
    viewer, browser = await api.client_as(Role.VIEWER), await api.browser()
    items = (await viewer.get(f"{API}/errors", params={"search": "cuda", "since_s": 3_600})).json()["items"]
    assert [(item["task_id"], item["worker_id"], item["queue"]) for item in items] == [(task_id, "w", "a")]
    assert problem_of(await viewer.get(f"{API}/errors", params={"since_s": 0})) == (400, "BAD_INPUT")
    page = (await browser.get("/errors", params={"search": "cuda", "range": "7d"})).text
    assert "1 failed attempt of 1 task in the last 7 days." in page
    assert "RuntimeError: CUDA error" in page
    assert "bad seed" not in page
    refused = await browser.get("/errors", params={"range": "1y"}, headers={"Accept": "text/html"})
    assert refused.status_code == 400


@pytest.mark.parametrize("name", ["status", "which"])
async def test_status_in_the_address_filters_the_list_or_is_refused(api: ApiFixture, name: str) -> None:
    failed, queued = await fail_task(api), await api.store.enqueue(new_task("a"))
    browser = await api.browser()
    page = (await browser.get("/tasks", params={name: "failed"})).text
    assert f'id="task-{failed}"' in page
    assert f'id="task-{queued}"' not in page
    refused = await browser.get("/tasks", params={name: "bogus"}, headers={"Accept": "text/html"})
    assert refused.status_code == 400
    assert f"query.{name}: must be" in refused.text


async def test_selected_tasks_are_retried_and_cancelled(api: ApiFixture) -> None:
    failed = [await fail_task(api) for _ in range(2)]
    queued = await api.store.enqueue(new_task("a"))
    operator = await api.client_as(Role.OPERATOR)
    result = (await operator.post(f"{API}/tasks/retry", json={"task_ids": [*failed, queued]})).json()
    assert (result["changed"], result["outcome"]) == (2, "done")
    assert result["message"].startswith("2 tasks requeued, 1 left as they are")
    assert problem_of(await operator.post(f"{API}/tasks/retry", json={"task_ids": [queued]})) == (409, "CONFLICT")
    assert problem_of(await operator.post(f"{API}/tasks/cancel", json={"task_ids": []})) == (400, "BAD_INPUT")
    # A form sends one field per ticked row. Without JavaScript, a page asks first and sends them again.
    browser = await api.browser()
    page = (await browser.get("/tasks")).text
    csrf = re.findall(r'name="csrf" value="([^"]+)"', page)[0]
    fields: list[tuple[str, Any]] = [("csrf", csrf), ("back", "/tasks"), ("question", "Sure?"), ("button", "Cancel")]
    form = "&".join(f"{name}={value}" for name, value in [*fields, *(("id", task_id) for task_id in failed)])
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    asked = await browser.post("/tasks/cancel", content=form, headers=headers)
    (ids,) = re.findall(r'name="id" value="([^"]+)"', asked.text)
    assert (await api.store.task(failed[0])).status is TaskStatus.QUEUED  # type: ignore[union-attr]
    form = f"csrf={csrf}&back=/tasks&is_confirmed=yes&id={ids}"
    assert (await browser.post("/tasks/cancel", content=form, headers=headers)).status_code == 303
    assert {(await api.store.task(task_id)).error_code for task_id in failed} == {"CANCELLED"}  # type: ignore[union-attr]
    none = await browser.post("/tasks/cancel", content=f"csrf={csrf}&is_confirmed=yes", headers=headers)
    assert none.status_code == 400
    assert "select at least one" in none.text


async def test_fleet_page_shows_masked_settings_and_decisions(api: ApiFixture) -> None:
    await api.spawn_active_workers()
    browser = await api.browser()
    for chosen in ("", "?range=15m", "?range=7d"):
        response = await browser.get(f"/fleets/gpus{chosen}")
        assert response.status_code == 200
        assert SECRET not in response.text
    page = response.text
    assert "<h2>Places</h2>" not in page, "no machine is rented"
    async with connected(api.dsn, "placing machines") as connection:
        await connection.execute(
            "update windlass.workers set machine_id = id, place = 'EU-RO-1',"
            " code = case when slot = 0 then 'MACHINE_GONE' end, activated_at = null,"
            " running_at = created_at + (10 + 20 * slot) * interval '1 second',"
            " first_claimed_at = case when slot = 0 then created_at + interval '95 seconds' end"
            " where slot is not null"
        )
    places = (await browser.get("/fleets/gpus")).text.partition("<h2>Places</h2>")[2].partition("</table>")[0]
    boots = (await browser.get("/fleets/gpus")).text.partition("<h2>Boot times</h2>")[2].partition("</table>")[0]
    rows = re.findall(r"<tr><td><abbr [^>]*>([^<]+)</abbr></td>(.*?)</tr>", boots)
    assert {label: re.findall(r">([^<>]+)</td>", cells) for label, cells in rows} == {
        "Running": ["2", "20 s", "29 s", "30 s"],
        "First claim": ["1", "1.6 min", "1.6 min", "1.6 min"],
    }
    assert re.search(r">EU-RO-1</td>.*<td class=\"number\">1 \(50 %\)</td>", places), places
    assert "app:work" in page
    assert re.search(r"<strong>spawn \d</strong>", page)
    assert (await browser.get("/fleets/unknown", headers={"Accept": "text/html"})).status_code == 404
    assert (await browser.get("/fleets")).headers["location"] == "/"
    viewer = await api.client_as(Role.VIEWER)
    assert (await viewer.get(f"{API}/fleets/gpus/budgets")).json() == []


async def test_cycles_show_changes_and_all_on_request(api: ApiFixture) -> None:
    await api.run_cycle()
    for _ in range(5):
        # Above max_workers: the decision changes in its numbers only.
        for _ in range(2):
            await api.store.enqueue(new_task("a"))
        await api.run_cycle()
    viewer, browser = await api.client_as(Role.VIEWER), await api.browser()
    everything = (await viewer.get(f"{API}/cycles")).json()["items"]
    changes = (await viewer.get(f"{API}/cycles", params={"changes": "true"})).json()["items"]
    assert 0 < len(changes) < len(everything)
    page, all_cycles = (await browser.get("/cycles")).text, (await browser.get("/cycles?all=yes")).text
    assert page.count('id="cycle-') == len(changes)
    assert all_cycles.count('id="cycle-') == len(everything)
    assert "chart-gpus-workers" in (await browser.get("/cycles?fleet=gpus&range=24h")).text
