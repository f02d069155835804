"""JSON routes over all subjects, error responses, and the OpenAPI examples."""

from typing import Any

from jsonschema import Draft202012Validator

from support.api_fixture import API, ApiFixture, problem_of
from windlass.model.auth import Role


async def test_status_has_the_form_of_a_cycle_summary(api: ApiFixture) -> None:
    await api.spawn_active_workers()
    status = (await api.localhost.get(f"{API}/status")).json()
    assert status["actions"] == {
        "workers_promoted": 2, "workers_failed": 0, "workers_spawned": 0, "workers_terminated": 0, "tasks_reset": 0,
    }  # fmt: skip
    assert status["status"] == {
        "queued_tasks": 2, "running_tasks": 0, "spawning_workers": 0, "active_workers": 2, "terminating_workers": 0,
        "total_workers": 2,
    }  # fmt: skip


async def test_health_routes_answer_head_requests(api: ApiFixture) -> None:
    assert (await api.remote.head("/healthz")).status_code == 200
    await api.run_cycle()
    assert (await api.remote.head("/readyz")).status_code == (await api.remote.get("/readyz")).status_code


async def test_supervisor_routes_keep_their_json(api: ApiFixture) -> None:
    await api.spawn_active_workers(1)
    (component,) = (await api.localhost.get("/api/web/worker/status")).json()
    assert set(component) == {
        "component", "status", "error_message", "pid", "current_job", "restart_count", "last_seen",
    }  # fmt: skip
    assert (component["component"], component["status"]) == ("worker:a:0", "healthy")
    restarted = await api.remote.post("/api/web/worker/restart", headers=await api.auth_headers(Role.OPERATOR))
    assert restarted.json() == {"status": "success", "message": "1 worker drain, 0 failed slots freed."}


async def test_cost_events_alerts_logs_and_history(api: ApiFixture, clock: Any) -> None:
    await api.spawn_active_workers()
    clock.advance(1800)
    report = (await api.localhost.get(f"{API}/cost", params={"by": "fleet"})).json()
    assert report["costs"][0]["key"] == "gpus"
    assert report["costs"][0]["is_estimate"]
    assert report["forecasts"][0]["workers"] == 2
    assert problem_of(await api.localhost.get(f"{API}/cost", params={"since": "0001-01-01T00:00:00Z"})) == (
        400,
        "BAD_INPUT",
    )
    events = (await api.localhost.get(f"{API}/events", params={"fleet": "gpus", "code": "WORKER_SPAWNED"})).json()
    assert len(events["items"]) == 2
    await api.store.take_samples(await api.store.overview())
    assert len((await api.localhost.get(f"{API}/fleets/gpus/history")).json()) == 1
    assert (await api.localhost.get(f"{API}/alerts")).json() == {"items": [], "next_cursor": None}
    assert (await api.localhost.get(f"{API}/logs")).json() == {"items": [], "next_cursor": None}


async def test_invalid_requests_name_the_field_and_the_rule(api: ApiFixture) -> None:
    headers = await api.auth_headers(Role.OPERATOR)
    for body in (
        {},
        {"queue": "no spaces"},
        {"queue": "a", "unknown": 1},
        {"queue": "a", "payload": "x" * 20_000},
        [1],
    ):
        refused = await api.remote.post(f"{API}/tasks", json=body, headers=headers)
        assert problem_of(refused) == (400, "BAD_INPUT"), body
    for content, sentence in (
        ('{"queue": "a"}', "the body must be a JSON object, sent with Content-Type: application/json."),
        ("{", "invalid request: body: not valid JSON."),
        ("{}", "invalid request: body.queue: required field is missing."),
        (
            '{"queue": "a", "priority": "x"}',
            "invalid request: body.priority: this is not a whole number.",
        ),
    ):
        kind = {} if sentence.startswith("the body") else {"Content-Type": "application/json"}
        refused = await api.remote.post(f"{API}/tasks", content=content, headers=headers | kind)
        assert refused.json()["detail"] == sentence
    for path in (
        "tasks?limit=0",
        "tasks?cursor=nonsense",
        "tasks?status=odd",
        "workers?status=x",
        "tasks/0",
        "tasks/x",
    ):
        assert problem_of(await api.remote.get(f"{API}/{path}", headers=headers)) == (400, "BAD_INPUT"), path
    assert problem_of(await api.remote.get(f"{API}/nothing", headers=headers)) == (404, "NOT_FOUND")
    refused = await api.remote.delete(f"{API}/tasks", headers=headers)
    assert refused.status_code == 405
    assert "GET" in refused.headers["allow"]


async def test_nul_in_an_address_is_refused(api: ApiFixture) -> None:
    for path in (
        f"{API}/explain/%00",
        f"{API}/explain/a%00b",
        f"{API}/fleets/%00",
        f"{API}/fleets/%00/history",
        f"{API}/workers/%00",
        f"{API}/workers/w%00/logs",
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
        refused = await api.localhost.get(path)
        assert problem_of(refused) == (400, "BAD_INPUT"), path
        sentence = "the address contains a NUL character (%00)."
        assert refused.json()["detail"] == sentence, path


async def test_every_example_matches_its_schema(api: ApiFixture) -> None:
    description = (await api.localhost.get(f"{API}/openapi.json")).json()
    seen = 0
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            for status, response in operation["responses"].items():
                for kind, content in response.get("content", {}).items():
                    if content["schema"] == {"$ref": "#/components/schemas/Problem"}:
                        continue  # the Problem schema has the example
                    assert "example" in content, f"{method} {path} {status} {kind}"
                    seen += 1
                    schema = content["schema"] | {"components": description["components"]}
                    problems = [error.message for error in Draft202012Validator(schema).iter_errors(content["example"])]
                    assert problems == [], f"{method} {path} {status}"
    assert seen > 50
    assert "example" in description["components"]["schemas"]["Problem"]
    # The 503 response has an example of its own.
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
    # Probes need no token.
    is_open = {path for path, methods in description["paths"].items() if methods.get("get", {}).get("security") == []}
    assert is_open == {"/healthz", "/readyz"}
