"""`redact` of a fleet: where a viewer and the pages could meet a private part of a payload, and do not."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest

from support.api_fixture import API, ApiFixture, open_api
from windlass.model.auth import Role
from windlass.model.event import Event
from windlass.model.payload_privacy import privacy_of
from windlass.model.redaction import HIDDEN
from windlass.model.task import new_task
from windlass.model.worker import HeldClaim, Registration
from windlass.model.worker_log import LogChunk

PRIVATE = "a very private prompt"
PAYLOAD = {"prompt": PRIVATE, "size": 3}
LIMIT_S = 30.0
QUOTING = f"ValueError: cannot render {PRIVATE!r}"


@pytest.fixture
async def api(dsn: str) -> AsyncIterator[ApiFixture]:
    """A worker `w` that was started by hand, so that nothing was removed from what its handler reported."""
    async with open_api(dsn, payload_privacy=lambda: privacy_of([(("a",), ("$.prompt",))])) as api:
        await api.store.register(Registration("w", ("a", "b"), fleet="gpus"))
        yield api


async def fail_task(api: ApiFixture, queue: str = "a", **settings: Any) -> int:
    task_id = await api.store.enqueue(new_task(queue, PAYLOAD, **settings))
    (claim,) = await api.store.claim("w", [queue])
    await api.store.fail("w", task_id, claim.token, QUOTING, retry=False)
    return task_id


async def run_task(api: ApiFixture) -> int:
    """A task that runs and reports its prompt as its progress."""
    task_id = await api.store.enqueue(new_task("a", PAYLOAD))
    (claim,) = await api.store.claim("w", ["a"])
    await api.store.heartbeat("w", [HeldClaim(task_id, claim.token, 0.5, f"drawing {PRIVATE}")])
    return task_id


@pytest.mark.parametrize("role", [Role.VIEWER, Role.OPERATOR])
async def test_events_hide_private_parts_from_viewers(api: ApiFixture, role: Role) -> None:
    await fail_task(api)
    other = await fail_task(api, "b")
    events = (await (await api.client_as(role)).get(f"{API}/events", params={"code": "TASK_FAILED"})).json()["items"]
    assert [event["task_id"] for event in events][:1] == [other]
    assert PRIVATE in events[0]["reason"]
    is_hidden = role is Role.VIEWER
    assert (PRIVATE not in str(events[1])) is is_hidden
    if is_hidden:
        assert events[1]["reason"] == f"attempt 1 of 3: {HIDDEN}"
        assert events[1]["detail"]["error_code"] == "HANDLER_ERROR"


async def test_event_of_a_purged_task_is_hidden(api: ApiFixture) -> None:
    """The queue of a purged task is not known any more. It may have been a private one."""
    task_id = await fail_task(api)
    await api.store.database.execute("deleting a task", "delete from windlass.tasks where id = $1", task_id)
    viewer = await api.client_as(Role.VIEWER)
    for path in ("/events", "/errors"):
        listed = await viewer.get(f"{API}{path}")
        assert f'"task_id":{task_id}' in listed.text
        assert PRIVATE not in listed.text


async def test_event_stream_hides_private_parts(api: ApiFixture) -> None:
    await fail_task(api)
    # Everyone receives the same stream, the dashboard of an operator too.
    listener = await api.feed.listen(0)
    messages = listener.messages()
    missed = await anext(messages)
    assert "TASK_FAILED" in missed
    assert PRIVATE not in missed
    later = await fail_task(api)
    api.feed.mark_changed()
    async with asyncio.timeout(LIMIT_S):
        while f'"task_id":{later}' not in (message := await anext(messages)).replace(" ", ""):
            assert PRIVATE not in message
    assert PRIVATE not in message
    listener.end()


async def test_explanation_of_a_worker_hides_private_parts(api: ApiFixture) -> None:
    await fail_task(api)
    viewer, operator = await api.client_as(Role.VIEWER), await api.client_as(Role.OPERATOR)
    explained = (await viewer.get(f"{API}/explain/w")).text
    assert "TASK_FAILED" in explained or "attempt 1 of 3" in explained
    assert PRIVATE not in explained
    assert PRIVATE in (await operator.get(f"{API}/explain/w")).text


async def test_progress_notes_hide_private_parts(api: ApiFixture) -> None:
    task_id = await run_task(api)
    viewer, browser = await api.client_as(Role.VIEWER), await api.browser()
    for path in ("/tasks", f"/tasks/{task_id}", f"/explain/{task_id}", "/workers", "/workers/w"):
        shown = await viewer.get(f"{API}{path}")
        assert shown.status_code == 200
        assert PRIVATE not in shown.text, path
    assert PRIVATE in (await (await api.client_as(Role.OPERATOR)).get(f"{API}/tasks/{task_id}")).text
    for path in ("/", "/tasks", "/tasks?status=running", f"/tasks/{task_id}", "/workers", "/workers/w"):
        page = await browser.get(path)
        assert page.status_code == 200
        assert PRIVATE not in page.text, path


async def test_pages_hide_private_parts_of_events(api: ApiFixture) -> None:
    await fail_task(api)
    await api.run_cycle()
    browser = await api.browser()
    for path in ("/", "/fleets/gpus", "/workers/w", "/queues/a", "/errors", "/cycles"):
        page = await browser.get(path)
        assert page.status_code == 200, path
        assert PRIVATE not in page.text, path


async def test_output_of_workers_with_private_queues_needs_an_operator(api: ApiFixture) -> None:
    await api.store.append_logs("w", uuid4(), [LogChunk(("w says hello",), (0,))])
    viewer, operator = await api.client_as(Role.VIEWER), await api.client_as(Role.OPERATOR)
    refused = await viewer.get(f"{API}/workers/w/logs")
    assert refused.status_code == 403
    assert "needs the role operator" in refused.json()["detail"]
    (line,) = (await operator.get(f"{API}/workers/w/logs")).json()["lines"]
    assert line["text"] == "w says hello"
    assert "w says hello" not in (await (await api.browser(role=Role.VIEWER)).get("/workers/w")).text
    assert "w says hello" in (await (await api.browser()).get("/workers/w")).text


def test_events_of_other_kinds_stay_readable() -> None:
    privacy = privacy_of([(("a",), ("$.prompt",))])
    for code, task_id in (("TASK_CANCELLED", 5), ("WORKER_LOST", None)):
        event = Event(1, None, code, "no heartbeat", "gpus", "w", task_id, {"judge": "o"}, queue="a")  # type: ignore[arg-type]
        assert privacy.redact_event(event) == event
