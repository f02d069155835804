"""Each operation gives the same result through the JSON route, the dashboard form and the supervisor's route."""

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from support.api_fixture import API, COOKIE, ApiFixture
from windlass import operations
from windlass.model.auth import Role, csrf_token
from windlass.model.task import new_task
from windlass.model.worker import Registration
from windlass.operations import OperationOutcome, OperationResult
from windlass.store.connection import connected

Submit = Callable[[str, dict[str, Any]], Awaitable[httpx.Response]]
WORKER_OPERATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "pause": ("pause", {}),
    "resume": ("resume", {}),
    "restart": ("restart", {}),
    "drain": ("terminate", {}),
    "terminate now": ("terminate", {"force": True}),
}
# Forms do not distinguish `done` from `unchanged`.
OUTCOMES = {200: "done", 303: "done", 404: "not_found", 409: "conflict"}


async def surfaces_of(api: ApiFixture) -> dict[str, Submit]:
    """By name, a function that runs an operation by its path."""
    operator, browser = await api.client_as(Role.OPERATOR), await api.browser()
    form = {"csrf": csrf_token(browser.cookies[COOKIE]), "is_confirmed": "yes", "back": "/workers"}

    async def post_form(path: str, fields: dict[str, Any], **headers: str) -> httpx.Response:
        data = {name: "yes" if value is True else value for name, value in fields.items()}
        return await browser.post(path, data=form | data, headers=headers)

    return {
        "JSON route": lambda path, fields: operator.post(f"{API}{path}", json=fields),
        "form": post_form,
        "form of the script": lambda path, fields: post_form(path, fields, Accept="application/json"),
    }


@pytest.mark.parametrize(
    ("status", "expected"),
    [("active", "done"), ("terminating", "done"), ("error", "conflict"), ("unknown", "not_found")],
)
async def test_worker_operation_has_one_outcome_on_every_surface(api: ApiFixture, status: str, expected: str) -> None:
    for surface, submit in (await surfaces_of(api)).items():
        for name, (operation, fields) in WORKER_OPERATIONS.items():
            worker_id = f"{surface}-{name}".replace(" ", "-")
            if status != "unknown":
                await api.store.register(Registration(worker_id, ("a",), fleet="gpus"))
                async with connected(api.dsn, "setting a status") as connection:
                    sql = "update windlass.workers set status = $2 where id = $1"
                    await connection.execute(sql, worker_id, status)
            before = await api.store.worker(worker_id), await api.store.events(worker_id=worker_id)
            response = await submit(f"/workers/{worker_id}/{operation}", fields)
            assert OUTCOMES[response.status_code] == expected, (surface, name)
            if expected != "done":
                assert (await api.store.worker(worker_id), await api.store.events(worker_id=worker_id)) == before


async def test_fleet_operation_has_one_outcome_on_every_surface(api: ApiFixture) -> None:
    await api.run_cycle()
    await api.store.register(Registration("manual", ("a",), fleet="unmanaged"))
    for surface, submit in (await surfaces_of(api)).items():
        for operation in ("pause", "resume", "spawn", "restart", "deploy", "deploy/abort"):
            needs_cycles = operation in ("spawn", "restart", "deploy")
            for fleet, expected in (
                ("gpus", "done"),
                ("unknown", "not_found"),
                ("unmanaged", "conflict" if needs_cycles else "done"),
            ):
                response = await submit(f"/fleets/{fleet}/{operation}", {})
                assert OUTCOMES[response.status_code] == expected, (surface, operation, fleet)


async def test_task_operation_has_one_outcome_on_every_surface(api: ApiFixture) -> None:
    for surface, submit in (await surfaces_of(api)).items():
        task_id = await api.store.enqueue(new_task("a"))
        for path, expected in (
            (f"/tasks/{task_id}/retry", "conflict"),
            (f"/tasks/{task_id}/cancel", "done"),
            (f"/tasks/{task_id}/cancel", "conflict"),
            (f"/tasks/{task_id}/retry", "done"),
            ("/tasks/999/retry", "not_found"),
            ("/tasks/999/cancel", "not_found"),
        ):
            assert OUTCOMES[(await submit(path, {})).status_code] == expected, (surface, path)


async def test_form_shows_the_message_of_the_operation(api: ApiFixture) -> None:
    (worker_id,) = await api.spawn_active_workers(1)
    browser = await api.browser()
    form = {"csrf": csrf_token(browser.cookies[COOKIE]), "is_confirmed": "yes", "back": "/workers"}
    for expected in (f"Worker {worker_id} paused.", f"Worker {worker_id} was already paused."):
        response = await browser.post(f"/workers/{worker_id}/pause", data=form)
        assert response.headers["location"] == "/workers"
        assert expected in (await browser.get("/workers")).text
    by_script = await browser.post(f"/workers/{worker_id}/pause", data=form, headers={"Accept": "application/json"})
    assert by_script.json() == {"message": f"Worker {worker_id} was already paused."}


@pytest.mark.parametrize(
    ("fields", "headers"),
    [
        pytest.param({"csrf": "wrong"}, {}, id="wrong CSRF token"),
        pytest.param({}, {"Origin": "https://evil.example"}, id="other origin"),
        pytest.param({}, {"Sec-Fetch-Site": "cross-site"}, id="other site"),
    ],
)
async def test_forged_form_is_refused_and_changes_nothing(
    api: ApiFixture, fields: dict[str, str], headers: dict[str, str]
) -> None:
    (worker_id,) = await api.spawn_active_workers(1)
    browser = await api.browser()
    form = {"csrf": csrf_token(browser.cookies[COOKIE]), "is_confirmed": "yes", "back": "/workers"} | fields
    response = await browser.post(f"/workers/{worker_id}/pause", data=form, headers=headers)
    assert response.status_code == 403
    worker = await api.store.worker(worker_id)
    assert worker is not None
    assert not worker.is_paused


async def test_form_without_confirmation_asks_and_changes_nothing(api: ApiFixture) -> None:
    (worker_id,) = await api.spawn_active_workers(1)
    browser = await api.browser()
    texts = {"question": "Pause it?", "explanation": "Really.", "button": "Pause"}
    form = {"csrf": csrf_token(browser.cookies[COOKIE]), **texts}
    response = await browser.post(f"/workers/{worker_id}/pause", data=form)
    assert response.status_code == 200
    assert "Pause it?" in response.text
    worker = await api.store.worker(worker_id)
    assert worker is not None
    assert not worker.is_paused


async def test_supervisor_restart_is_the_restart_of_all_fleets(
    api: ApiFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    async def restart_all_fleets(store: Any) -> OperationResult:
        calls.append(store)
        return operations.RestartResult(outcome=OperationOutcome.DONE, message="2 workers drain", changed=2)

    monkeypatch.setattr(operations, "restart_all_fleets", restart_all_fleets)
    operator = await api.client_as(Role.OPERATOR)
    by_json = (await operator.post(f"{API}/restart")).json()
    by_supervisor = (await operator.post("/api/web/worker/restart")).json()
    assert (by_json["message"], by_supervisor["message"]) == ("2 workers drain", "2 workers drain.")
    assert calls == [api.store, api.store]
