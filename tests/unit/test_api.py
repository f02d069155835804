"""The control plane's HTTP face: who gets in, what each may do, and what everybody is told."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import httpx
import pytest
from structlog.testing import capture_logs

from support.control_planes import SECRET, TTL_S, WHEEL, Plane, bearer, plane_of
from windlass.model.auth import JOIN_PREFIX, WORKER_PREFIX, Role
from windlass.model.config import ApiConfig
from windlass.model.errors import BadInput, ControlPlaneUnavailable, DatabaseUnavailable, TokenRefused, UnknownWorker
from windlass.model.task import Finished, TaskStatus, new_task
from windlass.model.worker import HeldClaim, Registration, WorkerStatus
from windlass.ports.http import max_body_bytes
from windlass.server import auth as gate
from windlass.server.context import LoopHealth
from windlass.wiring.http_server import is_reading_open

TOKEN, OTHER_TOKEN = f"{WORKER_PREFIX}{'1' * 64}", f"{WORKER_PREFIX}{'2' * 64}"
NOWHERE = "postgresql://u:hunter2@db.internal:5432"


@pytest.fixture
async def plane(clock: Any) -> AsyncIterator[Plane]:
    async with plane_of(clock) as plane:
        yield plane


def error_of(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["status"] == answer.status_code
    assert problem["detail"].endswith(".")
    assert "\n" not in problem["detail"]
    return answer.status_code, problem["code"]


# -------------------------------------------------------------------------------------------------------- activation


async def test_a_join_token_buys_the_work_order(plane: Plane) -> None:
    answer = await plane.activate(await plane.hire(), TOKEN)
    assert answer.status_code == 200
    assert answer.json() == {
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
        "env": {"API_KEY": SECRET},
        "ray": None,
    }


async def test_an_activation_whose_answer_was_lost_is_repeated_with_the_same_tokens(plane: Plane, clock: Any) -> None:
    join_token = await plane.hire()
    first = await plane.activate(join_token, TOKEN)
    clock.advance(10 * TTL_S)
    assert (await plane.activate(join_token, TOKEN)).json() == first.json()
    assert error_of(await plane.activate(join_token, OTHER_TOKEN)) == (410, "GONE")
    assert error_of(await plane.get("/internal/worker/order", OTHER_TOKEN)) == (401, "UNAUTHORIZED")


async def test_an_expired_join_token_buys_nothing(plane: Plane, clock: Any) -> None:
    join_token = await plane.hire()
    clock.advance(TTL_S)
    answer = await plane.activate(join_token, TOKEN)
    assert error_of(answer) == (410, "GONE")
    assert "expired" in answer.text


async def test_a_machine_whose_worker_has_ended_is_sent_away(plane: Plane) -> None:
    join_token = await plane.hire()
    await plane.end()
    assert error_of(await plane.activate(join_token, TOKEN)) == (410, "GONE")


async def test_a_join_token_is_good_for_its_own_worker_only(plane: Plane) -> None:
    join_token = await plane.hire("w0", 0)
    await plane.hire("w1", 1)
    assert error_of(await plane.activate(join_token, TOKEN, "w1")) == (403, "FORBIDDEN")
    assert error_of(await plane.activate(f"{JOIN_PREFIX}{'0' * 64}", TOKEN)) == (401, "UNAUTHORIZED")


async def test_a_join_token_opens_nothing_that_workers_do(plane: Plane) -> None:
    join_token = await plane.hire()
    assert error_of(await plane.post("/internal/worker/claim", join_token, {"queues": ["a"]})) == (403, "FORBIDDEN")
    assert error_of(await plane.get("/internal/worker/order", join_token)) == (403, "FORBIDDEN")


@pytest.mark.parametrize("weak", ["", "short", "wlw_short", f"{JOIN_PREFIX}{'1' * 64}"])
async def test_a_weak_worker_token_is_not_taken(plane: Plane, weak: str) -> None:
    assert error_of(await plane.activate(await plane.hire(), weak)) == (400, "BAD_INPUT")


async def test_a_restarted_worker_gets_its_order_again_with_the_settings_of_now(plane: Plane) -> None:
    token = await plane.join()
    plane.fleets["gpus"] = plane.fleets["gpus"].model_copy(update={"concurrency": 5, "queues": ("c",)})
    order = (await plane.get("/internal/worker/order", token)).json()
    # It serves what it was hired for.
    assert (order["concurrency"], order["queues"]) == (5, ["a", "b"])


async def test_a_fleet_that_is_not_run_here_has_no_orders_yet(plane: Plane) -> None:
    token = await plane.join()
    del plane.fleets["gpus"]
    assert error_of(await plane.get("/internal/worker/order", token)) == (503, "UNAVAILABLE")


# --------------------------------------------------------------------------------------------------- who may do what


async def test_nothing_internal_is_open_without_a_token(plane: Plane) -> None:
    for method, path in [("POST", "/internal/cycle"), ("GET", "/internal/wheel"), ("POST", "/internal/nowhere")]:
        answer = await plane.client.request(method, path)
        assert error_of(answer) == (401, "UNAUTHORIZED")
        assert answer.headers["www-authenticate"] == "Bearer"
    for header in ("Basic abc", "Bearer", "Bearer ", f"Token {TOKEN}"):
        answer = await plane.client.post("/internal/cycle", headers={"Authorization": header})
        assert error_of(answer) == (401, "UNAUTHORIZED")


async def test_a_token_is_asked_for_before_the_body_is_read(plane: Plane) -> None:
    answer = await plane.client.post("/internal/worker/claim", content=b"{", headers=bearer(TOKEN))
    assert error_of(answer) == (401, "UNAUTHORIZED")


async def test_a_worker_serves_the_queues_it_was_hired_for_and_no_others(plane: Plane) -> None:
    token = await plane.join()
    for path, body in {
        "register": {},
        "claim": {"limit": 1},
        "finish": {"limit": 1},
        "next-run-after": {},
        "wait": {"timeout_s": 0},
    }.items():
        answer = await plane.post(f"/internal/worker/{path}", token, {**body, "queues": ["a", "secrets"]})
        assert error_of(answer) == (403, "FORBIDDEN"), path
        assert "serves a, b, not secrets" in answer.text
        assert (await plane.post(f"/internal/worker/{path}", token, {**body, "queues": ["b"]})).is_success, path


async def test_a_worker_acts_in_its_own_name_whatever_it_says(plane: Plane) -> None:
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
async def test_only_an_operator_may_ask_for_a_cycle(plane: Plane, role: Role, status: int) -> None:
    answer = await plane.post("/internal/cycle", await plane.api_token(role))
    assert answer.status_code == status
    assert plane.cycles == (status == 200)
    if status == 200:
        assert answer.json() == [{"fleet": "gpus", "decision": "nothing to do"}]


async def test_a_worker_may_not_ask_for_a_cycle(plane: Plane) -> None:
    assert error_of(await plane.post("/internal/cycle", await plane.join())) == (403, "FORBIDDEN")


async def test_a_revoked_token_opens_nothing(plane: Plane) -> None:
    token = await plane.api_token(Role.OPERATOR)
    assert (await plane.post("/internal/cycle", token)).status_code == 200
    await plane.store.revoke_token("a-operator")
    assert error_of(await plane.post("/internal/cycle", token)) == (401, "UNAUTHORIZED")


async def test_a_cycle_that_does_not_end_is_said_to(clock: Any) -> None:
    async def never() -> list[dict[str, Any]]:
        raise TimeoutError

    async with plane_of(clock, run_cycle=never) as plane:
        answer = await plane.post("/internal/cycle", await plane.api_token(Role.OPERATOR))
        assert error_of(answer) == (503, "UNAVAILABLE")


async def test_whoever_keeps_coming_with_wrong_tokens_is_told_to_wait_and_others_are_not(plane: Plane) -> None:
    good = await plane.join()
    answers = [await plane.post("/internal/cycle", f"{WORKER_PREFIX}{n:064x}") for n in range(gate.MAX_FAILURES + 5)]
    statuses = [answer.status_code for answer in answers]
    assert statuses[: gate.MAX_FAILURES] == [401] * gate.MAX_FAILURES
    assert statuses[-1] == 429
    assert int(answers[-1].headers["retry-after"]) > 0
    assert error_of(answers[-1]) == (429, "TOO_MANY")
    assert (await plane.get("/internal/worker/order", good)).status_code == 200
    assert (await plane.post("/internal/cycle", await plane.api_token(Role.OPERATOR))).status_code == 200


# -------------------------------------------------------------------------------------------- what workers are told


async def test_a_worker_over_http_does_a_task(plane: Plane) -> None:
    async with plane.transport(await plane.join()) as transport:
        assert await transport.register(Registration("w0", ("a",), pid=1)) is WorkerStatus.SPAWNING
        task_id = await plane.store.enqueue(new_task("a", {"n": 1}))
        (claim,) = await transport.claim("w0", ("a",))
        assert json.loads(claim.payload) == {"n": 1}
        turn = await transport.finish_and_claim("w0", [Finished(claim.task_id, claim.token, '"done"')], ("a",), 1)
        assert (turn.claims, turn.lost) == ([], [])
        task = await plane.store.task(task_id)
        assert task is not None
        assert (task.status, task.worker_id) == (TaskStatus.COMPLETE, "w0")


async def test_a_worker_that_has_ended_learns_so_from_whatever_it_does(plane: Plane) -> None:
    token = await plane.join()
    claim = HeldClaim(1, uuid4())
    await plane.end()
    async with plane.transport(token) as transport:
        pulse = await transport.heartbeat("w0", [claim])
        assert (pulse.status, pulse.lost) == (None, {claim.token})
        assert await transport.register(Registration("w0", ("a",))) is WorkerStatus.TERMINATED
        await transport.deregister("w0", "done")
        for call in (transport.claim("w0", ("a",)), transport.wait_for_work(("a",), 1), transport.order()):
            with pytest.raises(TokenRefused, match="w0 has ended"):
                await call


async def test_a_token_is_believed_for_a_moment_and_the_store_still_judges(plane: Plane) -> None:
    token = await plane.join()
    async with plane.transport(token) as transport:
        await transport.register(Registration("w0", ("a",)))
        await plane.store.enqueue(new_task("a"))
        await plane.end()
        with pytest.raises(UnknownWorker, match="has ended"):
            await transport.claim("w0", ("a",))
        assert (await transport.heartbeat("w0")).status is WorkerStatus.TERMINATED


async def test_a_token_nobody_knows_ends_a_worker_too(plane: Plane) -> None:
    async with plane.transport(OTHER_TOKEN) as transport:
        assert (await transport.heartbeat("w0")).status is None
        with pytest.raises(TokenRefused):
            await transport.finish_and_claim("w0", [], ("a",), 1)


async def test_a_refusal_that_is_not_the_control_planes_own_does_not_end_a_worker() -> None:
    """A proxy's login page, a load balancer's 410, another server on that port."""
    from windlass.worker.http_transport import HttpTransport, WorkerCredentials

    for status, body in [(401, "<html>"), (410, ""), (502, '{"error": "bad gateway"}'), (200, "hello"), (403, "null")]:
        proxy = httpx.MockTransport(lambda _, s=status, b=body: httpx.Response(s, text=b))
        async with HttpTransport(WorkerCredentials("w0", "http://127.0.0.1:1", TOKEN), False, proxy) as transport:
            with pytest.raises(ControlPlaneUnavailable):
                await transport.heartbeat("w0")
            with pytest.raises(ControlPlaneUnavailable):
                await transport.claim("w0", ("a",))


async def test_a_database_that_is_away_means_try_again_and_its_address_is_not_told(plane: Plane) -> None:
    token = await plane.join()
    plane.store.trouble = DatabaseUnavailable(f"claiming: the database at {NOWHERE} cannot be reached.")
    for path, body in [("claim", {"queues": ["a"]}), ("order", None)]:
        method = "GET" if body is None else "POST"
        answer = await plane.client.request(method, f"/internal/worker/{path}", headers=bearer(token), json=body)
        assert error_of(answer) == (503, "UNAVAILABLE")
        assert int(answer.headers["retry-after"]) >= 1
        assert "db.internal" not in answer.text
    async with plane.transport(token) as transport:
        with pytest.raises(ControlPlaneUnavailable) as refusal:
            await transport.claim("w0", ("a",))
        assert isinstance(refusal.value, DatabaseUnavailable)


async def test_a_defect_is_answered_with_a_sentence_and_logged_with_all_there_is(plane: Plane) -> None:
    token = await plane.join()
    plane.store.trouble = ZeroDivisionError("a bug")
    with capture_logs() as logs:
        answer = await plane.post("/internal/worker/claim", token, {"queues": ["a"]})
    assert error_of(answer) == (500, "DEFECT")
    assert "ZeroDivisionError" not in answer.text
    assert [line["event"] for line in logs] == ["a request failed", "request"]
    # Captured: to draw a traceback for nobody takes longer than the rest of this file.
    with capture_logs():
        async with plane.transport(token) as transport:
            with pytest.raises(ControlPlaneUnavailable):
                await transport.claim("w0", ("a",))


# ------------------------------------------------------------------------------------------------------------ limits


@pytest.mark.parametrize("is_announced", [True, False])
async def test_a_body_that_is_too_large_is_refused(plane: Plane, is_announced: bool) -> None:
    token = await plane.join()
    size = max_body_bytes(10_000) + 1

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(size // 65_536 + 1):
            yield b" " * 65_536

    content: Any = b" " * size if is_announced else pieces()
    answer = await plane.client.post("/internal/worker/claim", content=content, headers=bearer(token))
    assert error_of(answer) == (413, "TOO_LARGE")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'{"queues": 1}', b'{"queues": ["a"], "limit": "many"}', b"\xff", b"[" * 100_000],
    ids=["nothing", "half", "a list", "null", "a number", "words", "no text", "too deep"],
)
async def test_a_body_that_is_not_as_expected_is_refused_in_one_sentence(plane: Plane, body: bytes) -> None:
    token = await plane.join()
    answer = await plane.client.post("/internal/worker/claim", content=body, headers=bearer(token))
    assert error_of(answer) == (400, "BAD_INPUT")


async def test_a_result_above_the_limit_is_refused_and_costs_only_its_own_attempt(plane: Plane) -> None:
    async with plane.transport(await plane.join()) as transport:
        await transport.register(Registration("w0", ("a",)))
        await plane.store.enqueue_many([new_task("a"), new_task("a")])
        small, large = await transport.claim("w0", ("a",), 2)
        with pytest.raises(BadInput, match=r"has 10,002 bytes and at most 10,000"):
            await transport.finish_and_claim(
                "w0", [Finished(large.task_id, large.token, json.dumps("x" * 10_000))], ("a",), 1
            )
        turn = await transport.finish_and_claim("w0", [Finished(small.task_id, small.token, "1")], ("a",), 1)
        assert turn.lost == []


async def test_a_batch_that_would_not_fit_into_one_body_is_finished_in_several(clock: Any) -> None:
    async with plane_of(clock, max_payload_bytes=1 << 20) as plane:
        async with plane.transport(await plane.join()) as transport:
            await transport.register(Registration("w0", ("a",)))
            await plane.store.enqueue_many(new_task("a") for _ in range(20))
            claims = await transport.claim("w0", ("a",), 20)
            lost = Finished(999, uuid4(), json.dumps('"' * 400_000))
            done = [lost, *(Finished(c.task_id, c.token, json.dumps('"' * 400_000)) for c in claims)]
            turn = await transport.finish_and_claim("w0", done, ("a",), 1)
        assert turn.lost == [lost.token]
        assert {task.status for task in await plane.store.tasks()} == {TaskStatus.COMPLETE}


async def test_no_answer_is_cached_framed_or_guessed_at(plane: Plane) -> None:
    for path in ("/healthz", "/internal/cycle", "/nowhere"):
        headers = (await plane.client.get(path)).headers
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"


async def test_no_log_line_holds_a_secret(plane: Plane) -> None:
    with capture_logs() as logs:
        join_token = await plane.hire()
        await plane.activate(join_token, TOKEN)
        await plane.activate(join_token, OTHER_TOKEN)
        await plane.activate(join_token, "weak")
        await plane.client.get(f"/internal/wheel?token={TOKEN}", headers=bearer(TOKEN))
        plane.store.trouble = ZeroDivisionError("a bug")
        await plane.post("/internal/worker/claim", TOKEN, {"queues": ["a"]})
    assert [line["event"] for line in logs if line["event"] == "request"] == ["request"] * 5
    for secret in (join_token, TOKEN, OTHER_TOKEN, "weak", SECRET):
        assert secret not in repr(logs)


@pytest.mark.parametrize(
    ("settings", "is_open"),
    [
        pytest.param({}, True, id="on loopback"),
        pytest.param({"host": "10.0.0.2"}, False, id="on a network"),
        pytest.param({"url": "https://windlass.example"}, False, id="behind a proxy"),
    ],
)
def test_reading_without_a_token_is_for_this_host_alone(settings: dict[str, Any], is_open: bool) -> None:
    assert is_reading_open(ApiConfig(port=8080, **settings)) is is_open


# -------------------------------------------------------------------------------------------------- health and wheel


async def test_health_tells_that_the_process_answers(plane: Plane) -> None:
    assert (await plane.client.get("/healthz")).json() == {"status": "ok", "version": "1.0"}


async def test_it_is_ready_while_its_database_answers_and_its_loop_turns(plane: Plane) -> None:
    answer = await plane.client.get("/readyz")
    assert answer.status_code == 200
    assert answer.json() == {
        "is_ready": True,
        "has_database": True,
        "is_leader": True,
        "fleets": {"gpus": {"is_leader": True, "last_cycle_age_s": 1.0}},
    }
    # Standing by is being ready too.
    plane.pulses["gpus"] = LoopHealth(is_leader=False, last_cycle_age_s=60.0, limit_s=60.0)
    answer = await plane.client.get("/readyz")
    assert (answer.status_code, answer.json()["is_leader"]) == (200, False)


async def test_however_many_probe_the_database_is_asked_once(clock: Any) -> None:
    asked = 0

    async def ask() -> None:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)

    async with plane_of(clock, ask_database=ask) as plane:
        answers = await asyncio.gather(*(plane.client.get("/readyz") for _ in range(50)))
    assert {answer.status_code for answer in answers} == {200}
    assert asked == 1


@pytest.mark.parametrize("what", ["database", "loop", "no cycle yet"])
async def test_it_is_not_ready_without(plane: Plane, what: str) -> None:
    if what == "database":
        plane.store.trouble = DatabaseUnavailable(NOWHERE)
    elif what == "loop":
        plane.pulses["gpus"] = LoopHealth(is_leader=True, last_cycle_age_s=60.1, limit_s=60.0)
    else:
        plane.pulses.clear()
    answer = await plane.client.get("/readyz")
    assert (answer.status_code, answer.json()["is_ready"]) == (503, False)
    assert SECRET not in answer.text


async def test_a_machine_gets_the_wheel_with_its_join_token_and_with_its_worker_token(plane: Plane, clock: Any) -> None:
    join_token = await plane.hire("w0", 0)
    for token in (join_token, await plane.join("w1", 1)):
        told = (await plane.get("/internal/wheel", token)).json()
        assert told == {"filename": WHEEL.filename, "version": "1.0", "sha256": "abc"}
        assert (await plane.get(f"/internal/wheel/{told['filename']}", token)).content == WHEEL.content
        assert error_of(await plane.get("/internal/wheel/another.whl", token)) == (404, "NOT_FOUND")
    clock.advance(TTL_S)
    assert error_of(await plane.get("/internal/wheel", join_token)) == (410, "GONE")
    operator = await plane.api_token(Role.OPERATOR)
    assert error_of(await plane.get("/internal/wheel", operator)) == (403, "FORBIDDEN")


async def test_a_program_that_was_not_installed_has_no_wheel(clock: Any) -> None:
    async with plane_of(clock, wheel=lambda: None) as plane:
        assert error_of(await plane.get("/internal/wheel", await plane.join())) == (404, "NOT_FOUND")
