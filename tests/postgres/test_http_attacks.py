"""Attacks with credentials of the wrong kind or of another worker, over the whole application and PostgreSQL."""

import json
from datetime import timedelta
from typing import Any

import httpx
import pytest

from support.api_fixture import API, COOKIE, RNG, ApiFixture
from windlass.model.auth import (
    API_PREFIX,
    JOIN_PREFIX,
    LINK_PREFIX,
    SECRET_PREFIX,
    SESSION_PREFIX,
    WORKER_PREFIX,
    Role,
    hash_of,
    new_token,
)
from windlass.model.task import TaskStatus, new_task
from windlass.store.connection import connected

WORKER = "/internal/worker"
BATCH = "00000000-0000-0000-0000-000000000001"


async def machines(api: ApiFixture, count: int) -> list[tuple[str, httpx.AsyncClient]]:
    """Spawned machines that have not joined: the worker's id, and a client with its join token."""
    for _ in range(count):
        await api.store.enqueue(new_task("a"))
    await api.run_cycle()
    found = []
    async with connected(api.dsn, "setting join tokens") as connection:
        for worker in await api.store.workers():
            token = new_token(JOIN_PREFIX, RNG)
            await connection.execute(
                "update windlass.workers set join_token_hash = $2, join_expires_at = $3 where id = $1",
                worker.id,
                hash_of(token),
                await api.store.now() + timedelta(hours=1),
            )
            found.append((worker.id, api.client("192.0.2.9", Authorization=f"Bearer {token}")))
    assert len(found) == count
    return found


async def join(worker_id: str, machine: httpx.AsyncClient) -> str:
    """Exchange the join token. The client is that of the worker afterwards. Returns the worker token."""
    token = new_token(WORKER_PREFIX, RNG)
    (await machine.post(f"/internal/workers/{worker_id}/activate", json={"token": token})).raise_for_status()
    machine.headers["Authorization"] = f"Bearer {token}"
    return token


async def test_worker_cannot_use_claim_token_of_another_over_http(api: ApiFixture) -> None:
    """The thief knows everything about the victim's task: id and claim token."""
    (victim_id, victim), (thief_id, thief) = await machines(api, 2)
    for worker_id, worker in ((victim_id, victim), (thief_id, thief)):
        await join(worker_id, worker)
        # The id in the body is not that of the token, and has no effect.
        registered = await worker.post(f"{WORKER}/register", json={"worker_id": victim_id, "queues": ["a"]})
        assert registered.status_code == 200, registered.text
        assert (await worker.post(f"{WORKER}/heartbeat", json={"claims": []})).status_code == 200
    (claim,) = (await victim.post(f"{WORKER}/claim", json={"queues": ["a"], "limit": 1})).json()
    task_id, token = claim["task_id"], claim["token"]
    before = await api.store.task(task_id)
    assert before is not None
    finished = {"task_id": task_id, "token": token, "result": '"stolen"'}
    chunk = {"lines": ["forged"], "ages_ms": [0], "task_id": task_id, "attempt": 1, "dropped": 0}
    for path, body in (
        ("finish", {"finished": [finished], "queues": ["a"], "limit": 0}),
        ("fail", {"task_id": task_id, "token": token, "error": "stolen", "code": "STOLEN"}),
        ("release", {"task_id": task_id, "token": token, "reason": "stolen"}),
        ("heartbeat", {"claims": [{"task_id": task_id, "token": token, "progress": 0.9, "note": "stolen"}]}),
        ("logs", {"batch_id": BATCH, "chunks": [chunk]}),
        ("maintenance", {}),
    ):
        answer = await thief.post(f"{WORKER}/{path}", json=body)
        assert answer.status_code in (200, 204, 400), (path, answer.text)
    after = await api.store.task(task_id)
    assert after is not None
    assert (after.status, after.worker_id, after.progress, after.progress_note, after.result) == (
        TaskStatus.RUNNING,
        before.worker_id,
        None,
        None,
        None,
    )
    async with connected(api.dsn, "reading output") as connection:
        owners = await connection.fetch("select worker_id, task_id from windlass.worker_logs where body = 'forged'")
    # Output for a task of another worker is stored as the thief's own.
    assert [(row["worker_id"], row["task_id"]) for row in owners] == [(thief_id, None)]
    done = await victim.post(
        f"{WORKER}/finish", json={"finished": [{**finished, "result": "1"}], "queues": ["a"], "limit": 0}
    )
    assert done.status_code == 200
    final = await api.store.task(task_id)
    assert final is not None
    assert (final.status, final.result) == (TaskStatus.COMPLETE, "1")


async def test_token_of_another_worker_cannot_be_taken_over(api: ApiFixture) -> None:
    """A machine chooses its worker token itself. Choosing that of another worker is refused, in our words."""
    (victim_id, victim), (target, machine) = await machines(api, 2)
    stolen = await join(victim_id, victim)
    workers = await api.client_as(Role.WORKER)
    registration = {"worker_id": "mine", "queues": ["a"]}
    for answer in (
        await machine.post(f"/internal/workers/{target}/activate", json={"token": stolen}),
        await workers.post("/internal/workers", json={"token": stolen, "registration": registration}),
    ):
        assert 400 <= answer.status_code < 500, answer.text
        assert not any(word in answer.text for word in ("duplicate", "constraint", "workers_token", "unique"))
    assert (await victim.get(f"{WORKER}/order")).status_code == 200
    # The id of a worker that a fleet spawned belongs to its machine.
    body = {"token": new_token(WORKER_PREFIX, RNG), "registration": {**registration, "worker_id": target}}
    assert (await workers.post("/internal/workers", json=body)).status_code == 400


@pytest.mark.parametrize("prefix", [SESSION_PREFIX, LINK_PREFIX, SECRET_PREFIX, JOIN_PREFIX, WORKER_PREFIX, API_PREFIX])
async def test_credential_of_one_kind_opens_nothing_as_another(api: ApiFixture, prefix: str) -> None:
    """The secrets of a session, a link and a database worker, sent as bearer tokens, and the reverse as cookies."""
    secret = new_token(prefix, RNG)
    hash_ = hash_of(secret)
    async with connected(api.dsn, "storing the hash") as connection:
        if prefix == SESSION_PREFIX:
            await api.store.create_session(hash_, Role.ADMIN, 3_600, "ann")
        elif prefix == LINK_PREFIX:
            await api.store.create_link(hash_, Role.ADMIN, 3_600)
        elif prefix == API_PREFIX:
            await api.store.create_token("root", Role.ADMIN, hash_)
        else:
            await api.join_worker()
            column = {SECRET_PREFIX: "secret_hash", JOIN_PREFIX: "join_token_hash", WORKER_PREFIX: "token_hash"}[prefix]
            await connection.execute(f"update windlass.workers set {column} = $1", hash_)  # noqa: S608
    bearer = api.client("192.0.2.7", Authorization=f"Bearer {secret}")
    cookie = api.client("192.0.2.7", Cookie=f"{COOKIE}={secret}")
    for path in (f"{API}/tokens", f"{API}/overview", f"{API}/stream", "/", "/audit"):
        if prefix != API_PREFIX:
            assert (await bearer.get(path)).status_code in (401, 403), path
        if prefix != SESSION_PREFIX:
            assert (await cookie.get(path)).status_code == 401, path
    # Machines' paths take no cookie at all, and no token of people.
    for client in (cookie, *([bearer] if prefix != WORKER_PREFIX else [])):
        for path in ("order", "claim", "heartbeat", "finish", "logs"):
            method = "GET" if path == "order" else "POST"
            answer = await client.request(method, f"{WORKER}/{path}", json={"queues": ["a"], "limit": 1})
            assert answer.status_code in (401, 403), (path, answer.text)


async def test_paths_that_only_look_like_others_are_not_reached(api: ApiFixture) -> None:
    worker, producer = await api.join_worker(), await api.client_as(Role.PRODUCER)
    for client in (worker, producer, api.client("192.0.2.7")):
        for path in (
            *("//api/v1/tokens", "/api/v1/tokens/", "/API/v1/tokens", "/api/v1/%74okens", "/api/v1/./tokens"),
            *(
                "/internal/../api/v1/tokens",
                "/static/../api/v1/tokens",
                "/healthz/../api/v1/tokens",
                "/api/v1;x/tokens",
            ),
            *(
                "/healthz/%2e%2e/api/v1/tokens",
                "/static/%2e%2e/%2e%2e/server/auth.py",
                "/api/v1/tokens%00",
                "/internal%2fcycle",
            ),
        ):
            request = client.build_request("GET", "/")
            request.url = request.url.copy_with(raw_path=path.encode())
            for header in ({}, {"X-HTTP-Method-Override": "GET", "X-Original-URL": "/api/v1/tokens"}):
                request.headers.update(header)
                answer = await client.send(request)
                assert answer.status_code in (307, 400, 401, 403, 404, 405, 429), (path, answer.status_code)
                assert "wlt_" not in answer.text
                assert not answer.headers.get("location", "").startswith(("//", "http://evil"))


@pytest.mark.parametrize(
    "cookie",
    [
        "{name}={value}; {name}={real}",
        '{name}="{real}"',
        "{name}_2={real}",
        "windlass_session={real}",
        "{name}={real}x",
    ],
)
async def test_session_cookie_is_read_strictly(api: ApiFixture, cookie: str) -> None:
    """Whatever a cookie looks like: a session is opened by its exact value, or not at all, and never a 5xx."""
    real, value = new_token(SESSION_PREFIX, RNG), new_token(SESSION_PREFIX, RNG)
    await api.store.create_session(hash_of(real), Role.VIEWER, 3_600, "ann")
    browser = api.client("192.0.2.7", Cookie=cookie.format(name=COOKIE, value=value, real=real))
    read = await browser.get(f"{API}/overview")
    assert read.status_code in (200, 401)
    # The last of several cookies of one name counts; quotes are part of the syntax of cookies.
    assert (read.status_code == 200) is cookie.endswith(("; {name}={real}", '{name}="{real}"'))
    assert (await browser.post(f"{API}/pause")).status_code in (401, 403)
    assert (await browser.get(f"{API}/tokens")).status_code in (401, 403)


async def test_work_order_has_no_secret_of_another_fleet_or_of_the_control_plane(api: ApiFixture) -> None:
    worker = await api.join_worker()
    order: Any = (await worker.get(f"{WORKER}/order")).json()
    assert order["env"] == {"API_KEY": "hunter2"}
    text = json.dumps({name: value for name, value in order.items() if name != "env"})
    assert "hunter2" not in text
    assert "postgresql" not in text
