"""Routes and pages about tasks."""

import pytest

from support.api_fixture import API, COOKIE, ApiFixture, open_api, problem_of
from windlass.model.auth import Role, csrf_token
from windlass.model.payload_privacy import privacy_of
from windlass.model.redaction import HIDDEN
from windlass.model.task import Finished, new_task
from windlass.model.worker import Registration
from windlass.store.connection import connected


async def test_task_is_enqueued_failed_retried_and_cancelled(api: ApiFixture) -> None:
    operator = await api.client_as(Role.OPERATOR)
    body = {"queue": "a", "payload": {"n": 1}, "unique_key": "k", "max_attempts": 1}
    created = await operator.post(f"{API}/tasks", json=body)
    again = await operator.post(f"{API}/tasks", json=body)
    assert (created.status_code, again.status_code) == (201, 200)
    task_id = created.json()["task_id"]
    assert (again.json()["task_id"], again.json()["outcome"]) == (task_id, "unchanged")
    await api.store.register(Registration("hand", ("a",)))
    (claim,) = await api.store.claim("hand", ["a"])
    await api.store.fail("hand", task_id, claim.token, "ValueError: broken")
    shown = (await operator.get(f"{API}/tasks/{task_id}")).json()
    assert (shown["status"], shown["payload"]) == ("failed", {"n": 1})
    assert [event["code"] for event in shown["events"]] == ["TASK_FAILED"]
    assert "failed permanently" in shown["answer"][0]
    (found,) = (await operator.get(f"{API}/tasks", params={"status": "failed", "search": "broken"})).json()["items"]
    assert found["id"] == task_id
    assert (await operator.post(f"{API}/tasks/{task_id}/retry")).json()["outcome"] == "done"
    assert problem_of(await operator.post(f"{API}/tasks/{task_id}/retry")) == (409, "CONFLICT")
    cancelled = await operator.post(f"{API}/tasks/{task_id}/cancel", json={"reason": "no need"})
    assert cancelled.json()["changed"] == 1
    assert problem_of(await operator.post(f"{API}/tasks/99/cancel")) == (404, "NOT_FOUND")
    for reason in ("", "  "):
        without_reason = await operator.post(f"{API}/tasks/{task_id}/cancel", json={"reason": reason})
        assert problem_of(without_reason) == (400, "BAD_INPUT")
    nothing_to_retry = await operator.post(f"{API}/tasks/retry-failed", json={"queue": "a"})
    assert (nothing_to_retry.json()["outcome"], nothing_to_retry.json()["changed"]) == ("unchanged", 0)


async def test_task_page_cuts_payload_and_is_static_when_complete(api: ApiFixture) -> None:
    task_id = await api.store.enqueue(new_task("a", "begin " + "\N{PILE OF POO}" * 200_000))
    await api.store.register(Registration("hand", ("a",)))
    (claim,) = await api.store.claim("hand", ["a"])
    page = (await api.localhost.get(f"/tasks/{task_id}")).text
    assert "data-stream" in page
    assert "The first 64,000 of 200,008 characters." in page
    assert len(page) < 100_000
    await api.store.finish_and_claim("hand", [Finished(task_id, claim.token, '{"ok": true}')], (), 0)
    for encoding in ("gzip", "identity"):
        done = await api.localhost.get(f"/tasks/{task_id}", headers={"Accept-Encoding": encoding})
        assert "data-stream" not in done.text
        assert "&#34;ok&#34;: true" in done.text


DEEP = 3_000


ODD_PAYLOADS = {
    "nested deeply": "[" * DEEP + "]" * DEEP,
    "nested less deeply": '{"a": ' * 850 + "1" + "}" * 850,
    "a number of 5,000 digits": "9" * 5_000,
    "a number close to zero": f"0.{'0' * 399}1",
}


@pytest.mark.parametrize("payload", ODD_PAYLOADS.values(), ids=ODD_PAYLOADS)
async def test_any_stored_payload_is_returned_unchanged(api: ApiFixture, dsn: str, payload: str) -> None:
    async with connected(dsn, "enqueueing") as connection:
        task_id = await connection.fetchval("select windlass.enqueue('a', $1::text::jsonb)", payload)
        await connection.execute("update windlass.tasks set result = payload where id = $1", task_id)
    response = await api.localhost.get(f"{API}/tasks/{task_id}")
    assert response.status_code == 200
    assert response.text.endswith(f',"payload":{payload},"result":{payload}}}')
    page = await api.localhost.get(f"/tasks/{task_id}")
    assert page.status_code == 200
    assert payload[:2_000].replace("}", "")[-100:].replace('"', "&#34;") in page.text


@pytest.mark.parametrize("spaces", [0, 70_000], ids=["small body", "large body"])
async def test_payload_deeper_than_workers_accept_is_refused(api: ApiFixture, spaces: int) -> None:
    headers = {**await api.auth_headers(Role.PRODUCER), "Content-Type": "application/json"}
    for levels, status in ((900, 201), (901, 400)):
        content = f'{{"queue":"a",{" " * spaces}"payload":{"[" * levels}{"]" * levels}}}'
        response = await api.remote.post(f"{API}/tasks", headers=headers, content=content)
        assert response.status_code == status, response.text
    assert "the payload is nested more than 900 levels deep" in response.text


async def test_retry_form_refuses_invalid_queue_names(api: ApiFixture) -> None:
    browser = await api.browser()
    form = {"csrf": csrf_token(browser.cookies[COOKIE]), "is_confirmed": "yes", "back": "/tasks"}
    assert problem_of(await browser.post("/queues/%E2%82%AC/retry", data=form))[0] == 400
    done = await browser.post("/queues/a/retry", data=form)
    assert done.status_code == 303
    assert "No failed tasks to retry in a." in (await browser.get("/tasks")).text


PRIVATE = "a very private prompt"


async def test_viewers_and_pages_do_not_see_redacted_parts(dsn: str) -> None:
    async with open_api(dsn, payload_privacy=lambda: privacy_of([(("a",), ("$.prompt",))])) as api:
        task_id = await api.store.enqueue(new_task("a", {"prompt": PRIVATE, "size": 3}, max_attempts=1))
        await api.store.register(Registration("w", ("a",)))
        (claim,) = await api.store.claim("w", ["a"])
        await api.store.fail("w", task_id, claim.token, f"ValueError: cannot render {PRIVATE!r}", retry=False)
        viewer, operator = await api.client_as(Role.VIEWER), await api.client_as(Role.OPERATOR)
        seen = await viewer.get(f"{API}/tasks/{task_id}")
        assert seen.json()["payload"] == {"prompt": HIDDEN, "size": 3}
        assert "ValueError" in seen.json()["error"]
        assert PRIVATE not in seen.text
        explained = await viewer.get(f"{API}/explain/{task_id}")
        assert "ValueError" in explained.text
        assert PRIVATE not in explained.text
        assert PRIVATE in (await operator.get(f"{API}/explain/{task_id}")).text
        page = (await (await api.browser()).get(f"/tasks/{task_id}")).text
        assert "size" in page
        assert PRIVATE not in page
        assert (await operator.get(f"{API}/tasks/{task_id}")).json()["payload"]["prompt"] == PRIVATE
        browser = await api.browser()
        for path in ("/tasks", "/tasks?status=failed", "/errors", "/queues/a"):
            listed = await browser.get(path)
            assert listed.status_code == 200
            assert str(task_id) in listed.text
            assert PRIVATE not in listed.text
        assert PRIVATE not in (await viewer.get(f"{API}/tasks")).text + (await viewer.get(f"{API}/errors")).text
        # A search does not tell what a payload contains.
        await api.store.enqueue(new_task("a", {"prompt": "a lighthouse"}))
        assert (await viewer.get(f"{API}/tasks", params={"search": "lighthouse"})).json()["items"] == []


async def test_search_for_errors_does_not_tell_redacted_parts(dsn: str) -> None:
    async with open_api(dsn, payload_privacy=lambda: privacy_of([(("a",), ("$.prompt",))])) as api:
        await api.store.register(Registration("w", ("a", "b")))
        for queue in ("a", "b"):
            task_id = await api.store.enqueue(new_task(queue, {"prompt": PRIVATE}, max_attempts=1))
            (claim,) = await api.store.claim("w", [queue])
            await api.store.fail("w", task_id, claim.token, f"ValueError: {PRIVATE}", retry=False)
        viewer, browser = await api.client_as(Role.VIEWER), await api.browser()

        async def queues_found(search: str) -> list[str]:
            found = (await viewer.get(f"{API}/errors", params={"search": search})).json()["items"]
            return sorted(error["queue"] for error in found)

        assert await queues_found(PRIVATE) == ["b"]
        assert await queues_found("HANDLER_ERROR") == ["a", "b"]
        counted = await api.store.task_error_counts(since_s=3_600, search=PRIVATE, unsearched_queues=["a"])
        assert (counted.errors, counted.tasks) == (1, 1)
        page = await browser.get("/errors", params={"search": PRIVATE, "queue": "a"})
        assert page.status_code == 200
        assert f"/tasks/{task_id - 1}" not in page.text
