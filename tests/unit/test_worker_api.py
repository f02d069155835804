"""The worker protocol, authentication of machines, request limits, health and the wheel, over the memory store."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import httpx
import pytest
from structlog.testing import capture_logs

from support.control_planes import SECRET, TTL_S, WHEEL, InMemoryControlPlane, bearer, open_control_plane
from windlass.model.auth import JOIN_PREFIX, WORKER_PREFIX, Role
from windlass.model.config import ApiConfig
from windlass.model.errors import BadInput, ControlPlaneUnavailable, DatabaseUnavailable, TokenRefused, UnknownWorker
from windlass.model.task import Finished, TaskStatus, new_task
from windlass.model.worker import HeldClaim, Registration, WorkerStatus
from windlass.ports.http import max_body_bytes
from windlass.server import rate_limit
from windlass.server.context import LoopHealth
from windlass.server.middleware import AdmissionMiddleware
from windlass.wiring.http_server import is_open_to_localhost, warn_of_open_reading
from windlass.worker import http_transport

TOKEN, OTHER_TOKEN = f"{WORKER_PREFIX}{'1' * 64}", f"{WORKER_PREFIX}{'2' * 64}"
DATABASE_URL = "postgresql://u:hunter2@db.internal:5432"


@pytest.fixture
async def plane(clock: Any) -> AsyncIterator[InMemoryControlPlane]:
    async with open_control_plane(clock) as plane:
        yield plane


def error_of(response: httpx.Response) -> tuple[int, str]:
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["status"] == response.status_code
    assert problem["detail"].endswith(".")
    assert "\n" not in problem["detail"]
    return response.status_code, problem["code"]


# -------------------------------------------------------------------------------------------------------- activation


async def test_activation_returns_the_work_order(plane: InMemoryControlPlane) -> None:
    response = await plane.activate(await plane.spawn_worker(), TOKEN)
    assert response.status_code == 200
    assert response.json() == {
        "worker_id": "w0",
        "fleet": "gpus",
        "queues": ["a", "b"],
        "concurrency": 3,
        "heartbeat_interval_s": 7,
        "lease_s": 70,
        "drain_timeout_s": 33,
        "max_payload_bytes": 10_000,
        "version": "1.0",
        "handler": "app:work",
        "exec": None,
        "is_inline": False,
        "chdir": "/srv/app",
        "needs_gpu": False,
        "storage_path": None,
        "timeout_s": 99,
        "memory_limit_mb": 512,
        "redact": [],
        "sends_output": True,
        "output_bytes_per_s": 32_768,
        "output_bytes_per_attempt": 1 << 20,
        "env": {"API_KEY": SECRET},
        "ray": None,
    }


async def test_activation_can_be_repeated_with_the_same_tokens(plane: InMemoryControlPlane, clock: Any) -> None:
    join_token = await plane.spawn_worker()
    first = await plane.activate(join_token, TOKEN)
    clock.advance(10 * TTL_S)
    assert (await plane.activate(join_token, TOKEN)).json() == first.json()
    assert error_of(await plane.activate(join_token, OTHER_TOKEN)) == (410, "GONE")
    assert error_of(await plane.get("/internal/worker/order", OTHER_TOKEN)) == (401, "UNAUTHORIZED")


async def test_expired_join_token_is_refused(plane: InMemoryControlPlane, clock: Any) -> None:
    join_token = await plane.spawn_worker()
    clock.advance(TTL_S)
    response = await plane.activate(join_token, TOKEN)
    assert error_of(response) == (410, "GONE")
    assert "expired" in response.text


async def test_machine_of_terminated_worker_cannot_activate(plane: InMemoryControlPlane) -> None:
    join_token = await plane.spawn_worker()
    await plane.terminate_worker()
    assert error_of(await plane.activate(join_token, TOKEN)) == (410, "GONE")


async def test_join_token_is_valid_for_its_own_worker_only(plane: InMemoryControlPlane) -> None:
    join_token = await plane.spawn_worker("w0", 0)
    await plane.spawn_worker("w1", 1)
    assert error_of(await plane.activate(join_token, TOKEN, "w1")) == (403, "FORBIDDEN")
    assert error_of(await plane.activate(f"{JOIN_PREFIX}{'0' * 64}", TOKEN)) == (401, "UNAUTHORIZED")


async def test_join_token_does_not_allow_worker_calls(plane: InMemoryControlPlane) -> None:
    join_token = await plane.spawn_worker()
    assert error_of(await plane.post("/internal/worker/claim", join_token, {"queues": ["a"]})) == (403, "FORBIDDEN")
    assert error_of(await plane.get("/internal/worker/order", join_token)) == (403, "FORBIDDEN")


@pytest.mark.parametrize("weak", ["", "short", "wlw_short", f"{JOIN_PREFIX}{'1' * 64}"])
async def test_weak_worker_token_is_refused(plane: InMemoryControlPlane, weak: str) -> None:
    assert error_of(await plane.activate(await plane.spawn_worker(), weak)) == (400, "BAD_INPUT")


async def test_restarted_worker_gets_its_order_with_current_settings(plane: InMemoryControlPlane) -> None:
    token = await plane.join()
    plane.control.fleets["gpus"] = plane.control.fleets["gpus"].model_copy(update={"concurrency": 5, "queues": ("c",)})
    order = (await plane.get("/internal/worker/order", token)).json()
    # Its queues are those it was spawned for.
    assert (order["concurrency"], order["queues"]) == (5, ["a", "b"])


async def test_work_order_of_fleet_run_elsewhere_is_unavailable(plane: InMemoryControlPlane) -> None:
    token = await plane.join()
    del plane.control.fleets["gpus"]
    assert error_of(await plane.get("/internal/worker/order", token)) == (503, "UNAVAILABLE")


# --------------------------------------------------------------------------------------------------- permissions


async def test_internal_paths_need_a_token(plane: InMemoryControlPlane) -> None:
    for method, path in [("POST", "/internal/cycle"), ("GET", "/internal/wheel"), ("POST", "/internal/worker/claim")]:
        response = await plane.client.request(method, path)
        assert error_of(response) == (401, "UNAUTHORIZED")
        assert response.headers["www-authenticate"] == "Bearer"
    for header in ("Basic abc", "Bearer", "Bearer ", f"Token {TOKEN}"):
        response = await plane.client.post("/internal/cycle", headers={"Authorization": header})
        assert error_of(response) == (401, "UNAUTHORIZED")


async def test_token_is_checked_before_the_body_is_read(plane: InMemoryControlPlane) -> None:
    response = await plane.client.post("/internal/worker/claim", content=b"{", headers=bearer(TOKEN))
    assert error_of(response) == (401, "UNAUTHORIZED")


async def test_worker_may_use_only_its_own_queues(plane: InMemoryControlPlane) -> None:
    token = await plane.join()
    for path, body in {
        "claim": {"limit": 1},
        "finish": {"limit": 1},
        "next-run-after": {},
        "wait": {"timeout_s": 0},
        "register": {"worker_id": "w0"},
    }.items():
        response = await plane.post(f"/internal/worker/{path}", token, {**body, "queues": ["a", "secrets"]})
        assert error_of(response) == (403, "FORBIDDEN"), path
        assert "serves a, b, not secrets" in response.text
        assert (await plane.post(f"/internal/worker/{path}", token, {**body, "queues": ["b"]})).is_success, path


async def test_worker_identity_comes_from_its_token(plane: InMemoryControlPlane) -> None:
    token = await plane.join("w0", 0)
    await plane.join("w1", 1)
    await plane.post("/internal/worker/heartbeat", token, {"worker_id": "w1", "vitals": {"pid": 7}})
    pids = {worker.id: worker.pid for worker in await plane.store.workers()}
    assert pids == {"w0": 7, "w1": None}
    async with plane.transport(token, "w0") as transport:
        with pytest.raises(UnknownWorker):
            await transport.claim("w1", ("a",))


@pytest.mark.parametrize(
    ("role", "status"), [(Role.OPERATOR, 200), (Role.VIEWER, 403), (Role.PRODUCER, 403), (Role.WORKER, 403)]
)
async def test_only_operators_may_request_a_cycle(plane: InMemoryControlPlane, role: Role, status: int) -> None:
    response = await plane.post("/internal/cycle", await plane.api_token(role))
    assert response.status_code == status
    assert plane.control.cycles_requested == (status == 200)
    if status == 200:
        assert response.json() == [{"fleet": "gpus", "decision": "nothing to do"}]


async def test_worker_may_not_request_a_cycle(plane: InMemoryControlPlane) -> None:
    assert error_of(await plane.post("/internal/cycle", await plane.join())) == (403, "FORBIDDEN")


async def test_revoked_token_is_refused(plane: InMemoryControlPlane) -> None:
    token = await plane.api_token(Role.OPERATOR)
    assert (await plane.post("/internal/cycle", token)).status_code == 200
    await plane.store.revoke_token("a-operator")
    assert error_of(await plane.post("/internal/cycle", token)) == (401, "UNAUTHORIZED")


async def test_cycle_that_times_out_is_unavailable(clock: Any) -> None:
    async with open_control_plane(clock) as plane:
        plane.control.cycle_summaries = None
        response = await plane.post("/internal/cycle", await plane.api_token(Role.OPERATOR))
        assert error_of(response) == (503, "UNAVAILABLE")


async def test_wrong_tokens_are_limited_and_valid_tokens_are_not(plane: InMemoryControlPlane) -> None:
    good = await plane.join()
    responses = [
        await plane.post("/internal/cycle", f"{WORKER_PREFIX}{n:064x}") for n in range(rate_limit.MAX_FAILURES + 5)
    ]
    statuses = [response.status_code for response in responses]
    assert statuses[: rate_limit.MAX_FAILURES] == [401] * rate_limit.MAX_FAILURES
    assert statuses[-1] == 429
    assert int(responses[-1].headers["retry-after"]) > 0
    assert error_of(responses[-1]) == (429, "TOO_MANY")
    assert (await plane.get("/internal/worker/order", good)).status_code == 200
    assert (await plane.post("/internal/cycle", await plane.api_token(Role.OPERATOR))).status_code == 200


# -------------------------------------------------------------------------------------------- worker calls


async def test_worker_over_http_completes_a_task(plane: InMemoryControlPlane) -> None:
    async with plane.transport(await plane.join()) as transport:
        assert await transport.register(Registration("w0", ("a",), pid=1)) is WorkerStatus.SPAWNING
        task_id = await plane.store.enqueue(new_task("a", {"n": 1}))
        (claim,) = await transport.claim("w0", ("a",))
        assert json.loads(claim.payload) == {"n": 1}
        result = await transport.finish_and_claim("w0", [Finished(claim.task_id, claim.token, '"done"')], ("a",), 1)
        assert (result.claims, result.lost) == ([], [])
        task = await plane.store.task(task_id)
        assert task is not None
        assert (task.status, task.worker_id) == (TaskStatus.COMPLETE, "w0")


async def test_every_call_tells_a_terminated_worker_so(plane: InMemoryControlPlane) -> None:
    token = await plane.join()
    claim = HeldClaim(1, uuid4())
    await plane.terminate_worker()
    async with plane.transport(token) as transport:
        reply = await transport.heartbeat("w0", [claim])
        assert (reply.status, reply.lost) == (None, {claim.token})
        assert await transport.register(Registration("w0", ("a",))) is WorkerStatus.TERMINATED
        await transport.deregister("w0", "done")
        for call in (transport.claim("w0", ("a",)), transport.wait_for_work(("a",), 1), transport.order()):
            with pytest.raises(TokenRefused, match="w0 has terminated"):
                await call


async def test_store_checks_workers_whose_token_is_cached(plane: InMemoryControlPlane) -> None:
    plane.app.admission.authenticator.cache.set_listening(True)
    token = await plane.join()
    async with plane.transport(token) as transport:
        await transport.register(Registration("w0", ("a",)))
        await plane.store.enqueue(new_task("a"))
        await plane.terminate_worker()
        with pytest.raises(UnknownWorker, match="has terminated"):
            await transport.claim("w0", ("a",))
        assert (await transport.heartbeat("w0")).status is WorkerStatus.TERMINATED


async def test_unknown_token_ends_the_worker(plane: InMemoryControlPlane) -> None:
    async with plane.transport(OTHER_TOKEN) as transport:
        assert (await transport.heartbeat("w0")).status is None
        with pytest.raises(TokenRefused):
            await transport.finish_and_claim("w0", [], ("a",), 1)


async def test_unavailable_database_is_503_without_its_address(plane: InMemoryControlPlane) -> None:
    token = await plane.join()
    plane.store.error = DatabaseUnavailable(f"claiming: the database at {DATABASE_URL} cannot be reached.")
    for path, body in [("claim", {"queues": ["a"]}), ("order", None)]:
        method = "GET" if body is None else "POST"
        response = await plane.client.request(method, f"/internal/worker/{path}", headers=bearer(token), json=body)
        assert error_of(response) == (503, "UNAVAILABLE")
        assert int(response.headers["retry-after"]) >= 1
        assert "db.internal" not in response.text
    async with plane.transport(token) as transport:
        with pytest.raises(ControlPlaneUnavailable) as refusal:
            await transport.claim("w0", ("a",))
        assert isinstance(refusal.value, DatabaseUnavailable)


async def test_defect_is_answered_with_500_and_logged(plane: InMemoryControlPlane) -> None:
    token = await plane.join()
    plane.store.error = ZeroDivisionError("a bug")
    with capture_logs() as logs:
        response = await plane.post("/internal/worker/claim", token, {"queues": ["a"]})
    assert error_of(response) == (500, "DEFECT")
    assert "ZeroDivisionError" not in response.text
    assert [line["event"] for line in logs] == ["handle request failed", "handle request"]
    # Captured, because formatting the traceback takes longer than all other tests here.
    with capture_logs():
        async with plane.transport(token) as transport:
            with pytest.raises(ControlPlaneUnavailable):
                await transport.claim("w0", ("a",))


# ------------------------------------------------------------------------------------------------------------ limits


@pytest.fixture
def stopped_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time passes for the rate limits, however slow the machine is."""
    defaults = AdmissionMiddleware.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "clock", lambda: 0.0)


@pytest.mark.usefixtures("stopped_limits")
async def test_h4_requests_of_one_worker_are_limited(clock: Any) -> None:
    async with open_control_plane(clock, worker_rate_limit=8.0) as plane:
        token, other = await plane.join(), await plane.join("w1", 1)
        with capture_logs() as logs:
            calls = [await plane.post("/internal/worker/heartbeat", token) for _ in range(30)]
        assert calls[0].status_code == 200
        assert error_of(calls[-1]) == (429, "TOO_MANY")
        assert [(line["status"], line["caller"]) for line in logs] == [(429, "worker w0")]
        assert (await plane.post("/internal/worker/heartbeat", other)).status_code == 200


@pytest.mark.parametrize("form", ["announced", "chunked", "compressed"])
@pytest.mark.usefixtures("stopped_limits")
async def test_h4_large_requests_of_a_worker_count_more(clock: Any, form: str) -> None:
    async with open_control_plane(clock, worker_rate_limit=32.0) as plane:
        headers = bearer(await plane.join())
        results = [{"task_id": n, "token": str(uuid4()), "result": '"' + "x" * 5_000 + '"'} for n in range(100)]
        body = json.dumps({"finished": results}).encode()

        async def chunks() -> AsyncIterator[bytes]:
            yield body

        def post() -> Any:
            content: Any = {"announced": body, "chunked": chunks(), "compressed": gzip.compress(body)}[form]
            encoding = {"Content-Encoding": "gzip"} if form == "compressed" else {}
            return plane.client.post("/internal/worker/finish", content=content, headers={**headers, **encoding})

        calls = [await post() for _ in range(20)]
        assert calls[0].status_code == 200
        # Half a megabyte counts as 17 calls of the 32.
        assert sum(call.status_code == 200 for call in calls) <= 3


@pytest.mark.parametrize("is_announced", [True, False])
async def test_too_large_body_is_refused(plane: InMemoryControlPlane, is_announced: bool) -> None:
    token = await plane.join()
    size = max_body_bytes(10_000) + 1

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(size // 65_536 + 1):
            yield b" " * 65_536

    content: Any = b" " * size if is_announced else pieces()
    response = await plane.client.post("/internal/worker/claim", content=content, headers=bearer(token))
    assert error_of(response) == (413, "TOO_LARGE")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'{"queues": 1}', b'{"queues": ["a"], "limit": "many"}', b"\xff", b"[" * 60_000],
    ids=["empty", "half", "list", "null", "queues not a list", "limit not a number", "not UTF-8", "too deep"],
)
async def test_invalid_body_is_refused(plane: InMemoryControlPlane, body: bytes) -> None:
    token = await plane.join()
    response = await plane.client.post("/internal/worker/claim", content=body, headers=bearer(token))
    assert error_of(response) == (400, "BAD_INPUT")


async def test_too_large_result_fails_only_its_own_attempt(plane: InMemoryControlPlane) -> None:
    async with plane.transport(await plane.join()) as transport:
        await transport.register(Registration("w0", ("a",)))
        await plane.store.enqueue_many([new_task("a"), new_task("a")])
        small, large = await transport.claim("w0", ("a",), 2)
        with pytest.raises(BadInput, match=r"has 10,002 bytes; the limit is 10,000"):
            await transport.finish_and_claim(
                "w0", [Finished(large.task_id, large.token, json.dumps("x" * 10_000))], ("a",), 1
            )
        result = await transport.finish_and_claim("w0", [Finished(small.task_id, small.token, "1")], ("a",), 1)
        assert result.lost == []


async def test_large_batch_is_finished_in_several_requests(clock: Any) -> None:
    async with open_control_plane(clock, max_payload_bytes=1 << 20) as plane:
        async with plane.transport(await plane.join()) as transport:
            await transport.register(Registration("w0", ("a",)))
            await plane.store.enqueue_many(new_task("a") for _ in range(20))
            claims = await transport.claim("w0", ("a",), 20)
            lost = Finished(999, uuid4(), json.dumps('"' * 400_000))
            done = [lost, *(Finished(c.task_id, c.token, json.dumps('"' * 400_000)) for c in claims)]
            result = await transport.finish_and_claim("w0", done, ("a",), 1)
        assert result.lost == [lost.token]
        assert {task.status for task in await plane.store.tasks()} == {TaskStatus.COMPLETE}


async def test_compressed_result_arrives_exactly(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compressed: list[bytes | None] = []

    def compress(body: bytes) -> bytes | None:
        compressed.append(compress_body(body))
        return compressed[-1]

    compress_body = http_transport.compress_body
    monkeypatch.setattr(http_transport, "compress_body", compress)
    async with open_control_plane(clock, max_payload_bytes=1 << 20) as plane:
        async with plane.transport(await plane.join()) as transport:
            await transport.register(Registration("w0", ("a",)))
            task_id = await plane.store.enqueue(new_task("a"))
            (claim,) = await transport.claim("w0", ("a",))
            result = json.dumps([f"entry {n}" for n in range(20_000)])
            await transport.finish_and_claim("w0", [Finished(task_id, claim.token, result)], ("a",), 0)
        task = await plane.store.task(task_id)
    assert task is not None
    assert task.result is not None
    assert json.loads(task.result) == json.loads(result)
    assert [body is not None and len(body) < len(result) / 3 for body in compressed] == [True]


async def test_security_headers_are_on_every_response(plane: InMemoryControlPlane) -> None:
    for path in ("/healthz", "/internal/cycle", "/unknown"):
        headers = (await plane.client.get(path)).headers
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"


async def test_log_lines_contain_no_secrets(plane: InMemoryControlPlane) -> None:
    with capture_logs() as logs:
        join_token = await plane.spawn_worker()
        await plane.activate(join_token, TOKEN)
        await plane.activate(join_token, OTHER_TOKEN)
        await plane.activate(join_token, "weak")
        await plane.client.get(f"/internal/wheel?token={TOKEN}", headers=bearer(TOKEN))
        plane.store.error = ZeroDivisionError("a bug")
        await plane.post("/internal/worker/claim", TOKEN, {"queues": ["a"]})
    assert [line["event"] for line in logs if line["event"] == "handle request"] == ["handle request"] * 5
    for secret in (join_token, TOKEN, OTHER_TOKEN, "weak", SECRET):
        assert secret not in repr(logs)


@pytest.mark.parametrize(
    ("settings", "is_open"),
    [
        pytest.param({}, False, id="unless it is asked for"),
        pytest.param({"open_reading": True}, True, id="loopback address"),
        pytest.param({"open_reading": True, "host": "10.0.0.2"}, False, id="network address"),
        pytest.param({"open_reading": True, "url": "https://windlass.example"}, False, id="behind a proxy"),
    ],
)
def test_reading_without_token_is_allowed_on_loopback_only(settings: dict[str, Any], is_open: bool) -> None:
    api = ApiConfig(port=8080, **settings)
    assert is_open_to_localhost(api) is is_open
    with capture_logs() as logs:
        warn_of_open_reading(api)
    assert [line["event"] for line in logs] == ["answer reads without login"] * is_open


# -------------------------------------------------------------------------------------------------- health and wheel


async def test_health_route_answers(plane: InMemoryControlPlane) -> None:
    assert (await plane.client.get("/healthz")).json() == {"status": "ok", "version": "1.0"}


async def test_ready_while_database_answers_and_loop_runs(plane: InMemoryControlPlane) -> None:
    response = await plane.client.get("/readyz")
    assert response.status_code == 200
    assert response.json() == {
        "is_ready": True,
        "has_database": True,
        "has_leader": True,
        "has_control_loop": True,
        "fleets": {"gpus": {"is_running": True, "last_cycle_age_s": 1.0}},
    }


@pytest.mark.parametrize(
    "loops",
    [
        pytest.param({}, id="no fleet"),
        pytest.param({"gpus": LoopHealth(last_cycle_age_s=600.0, is_running=False)}, id="loop stuck"),
        pytest.param({"gpus": LoopHealth(last_cycle_age_s=None, is_running=False)}, id="no cycle yet"),
    ],
)
async def test_server_without_control_loop_is_ready(plane: InMemoryControlPlane, loops: dict[str, LoopHealth]) -> None:
    # Workers claim and finish tasks without it, so a load balancer must not take the server away from them.
    plane.control.loops, plane.control.has_leader = loops, False
    response = await plane.client.get("/readyz")
    found = response.json()
    assert (response.status_code, found["is_ready"]) == (200, True)
    assert (found["has_control_loop"], found["has_leader"]) == (False, False)


async def test_concurrent_probes_ask_the_database_once(
    plane: InMemoryControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = 0

    async def now() -> None:
        nonlocal queries
        queries += 1
        await asyncio.sleep(0)

    monkeypatch.setattr(plane.store, "now", now)
    responses = await asyncio.gather(*(plane.client.get("/readyz") for _ in range(50)))
    assert {response.status_code for response in responses} == {200}
    assert queries == 1


async def test_not_ready_without_database(plane: InMemoryControlPlane) -> None:
    plane.store.error = DatabaseUnavailable(DATABASE_URL)
    response = await plane.client.get("/readyz")
    assert (response.status_code, response.json()["is_ready"]) == (503, False)
    assert SECRET not in response.text


async def test_machine_downloads_the_wheel_with_either_token(plane: InMemoryControlPlane, clock: Any) -> None:
    join_token = await plane.spawn_worker("w0", 0)
    for token in (join_token, await plane.join("w1", 1)):
        wheel = (await plane.get("/internal/wheel", token)).json()
        assert wheel == {"filename": WHEEL.filename, "version": "1.0", "sha256": "abc"}
        assert (await plane.get(f"/internal/wheel/{wheel['filename']}", token)).content == WHEEL.content
        assert error_of(await plane.get("/internal/wheel/another.whl", token)) == (404, "NOT_FOUND")
    clock.advance(TTL_S)
    assert error_of(await plane.get("/internal/wheel", join_token)) == (410, "GONE")
    operator = await plane.api_token(Role.OPERATOR)
    assert error_of(await plane.get("/internal/wheel", operator)) == (403, "FORBIDDEN")


async def test_program_without_package_has_no_wheel(clock: Any) -> None:
    async with open_control_plane(clock, wheel=None) as plane:
        assert error_of(await plane.get("/internal/wheel", await plane.join())) == (404, "NOT_FOUND")
