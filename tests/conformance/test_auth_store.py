"""The contract of ports/auth.py, over memory and over PostgreSQL in the same virtual time."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from random import Random, SystemRandom
from typing import Any
from uuid import uuid4

import pytest

from support.asgi_server import serve_asgi
from support.http_transport_fixture import worker_api_context
from support.memory_store.stores import MemoryStores
from support.provider_fixtures import RETENTION, empty_tables
from support.stores import PostgresStores
from windlass.model.action import Fail, Plan
from windlass.model.actor import acting_as
from windlass.model.auth import (
    API_PREFIX,
    JOIN_PREFIX,
    RATE_TTL_S,
    WORKER_PREFIX,
    Activation,
    JoinCaller,
    Role,
    Session,
    TokenCaller,
    TokenScope,
    WorkerCaller,
    hash_of,
    is_token,
    new_token,
    session_id,
)
from windlass.model.errors import BadInput
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.model.outcome import Deleted, Intent
from windlass.model.snapshot import PlannerState
from windlass.model.task import new_task
from windlass.model.worker import RecoveredTasks, Registration, WorkerStatus
from windlass.policy.plan import plan
from windlass.server.app import make_app
from windlass.server.long_poll import LongPollHub
from windlass.store.connection import connected
from windlass.worker.bootstrap import fetch_wheel
from windlass.worker.self_registration import SelfRegisteredTransport, new_self_registration

Stores = MemoryStores | PostgresStores
ANN = Candidate("ann", ttl_s=3600.0)
FLEET = FleetConfig(queues=("a", "b"), max_workers=4)
TTL_S = 120.0
JOIN, OTHER_JOIN = hash_of("join"), hash_of("another join")
TOKEN, OTHER_TOKEN = hash_of("token"), hash_of("another token")


@pytest.fixture(params=["memory", "postgres"])
async def store(request: pytest.FixtureRequest, clock: Any) -> AsyncIterator[Stores]:
    if request.param == "memory":
        yield MemoryStores(clock, RETENTION, Random(1))  # noqa: S311
        return
    dsn = request.getfixturevalue("shared_dsn")
    await empty_tables(dsn)
    async with PostgresStores(dsn, retention=RETENTION, virtual_now=clock) as postgres:
        yield postgres


async def spawn_worker(store: Stores, worker_id: str = "w0", slot: int = 0, join: bytes | None = JOIN) -> None:
    observed = await store.observe(ANN, "gpus", FLEET)
    assert isinstance(observed, tuple)
    term, snapshot = observed
    intent = Intent(
        worker_id, slot, "wanted", 30.0, join_token_hash=join, join_ttl_s=TTL_S if join is not None else None
    )
    committed = await store.commit_plan(ANN, term, snapshot, Plan((), PlannerState(), "x"), [intent])
    assert committed.granted == {worker_id}


async def end(store: Stores, worker_id: str = "w0") -> None:
    observed = await store.observe(ANN, "gpus", FLEET)
    assert isinstance(observed, tuple)
    await store.record_outcomes("gpus", 0, [Deleted(worker_id, None, "IDLE", "idle")], None)


def test_token_has_256_random_bits_after_its_prefix() -> None:
    tokens = {new_token(JOIN_PREFIX, SystemRandom()) for _ in range(100)}
    assert len(tokens) == 100
    assert all(is_token(token, JOIN_PREFIX) and not is_token(token, WORKER_PREFIX) for token in tokens)
    for text in ("", JOIN_PREFIX, f"{JOIN_PREFIX}{'g' * 64}", f"{JOIN_PREFIX}{'0' * 65}", f"{JOIN_PREFIX}{'0' * 64}\n"):
        assert not is_token(text, JOIN_PREFIX)


async def test_join_token_identifies_machine_until_it_expires(store: Stores, clock: Any) -> None:
    await spawn_worker(store)
    expected = JoinCaller("w0", "gpus", ("a", "b"), has_terminated=False, is_expired=False)
    assert await store.authenticate(JOIN) == expected
    clock.advance(TTL_S - 0.000001)
    assert await store.authenticate(JOIN) == expected
    clock.advance(0.000001)
    caller = await store.authenticate(JOIN)
    assert isinstance(caller, JoinCaller)
    assert caller.is_expired


async def test_worker_spawned_without_join_token_cannot_join(store: Stores) -> None:
    await spawn_worker(store, join=None)
    assert await store.authenticate(JOIN) is None
    assert await store.activate("w0", JOIN, TOKEN) is Activation.UNKNOWN


async def test_join_token_is_exchanged_for_worker_token(store: Stores) -> None:
    await spawn_worker(store)
    assert await store.activate("w0", JOIN, TOKEN) is Activation.ACTIVATED
    assert await store.authenticate(TOKEN) == WorkerCaller("w0", "gpus", ("a", "b"), has_terminated=False)
    worker = await store.worker("w0")
    assert worker is not None
    # Only its own heartbeat proves that it runs.
    assert (worker.status, worker.last_heartbeat) == (WorkerStatus.SPAWNING, None)
    assert [event.code for event in await store.events(worker_id="w0")] == ["WORKER_SPAWNED", "WORKER_JOINED"]


async def test_start_failure_of_machine_reaches_next_cycle(store: Stores) -> None:
    await spawn_worker(store)
    await store.activate("w0", JOIN, TOKEN)
    for reason in ("no module app", "said again"):
        await store.cannot_start("w0", "HANDLER_NOT_FOUND", reason)
    observed = await store.observe(ANN, "gpus", FLEET)
    assert isinstance(observed, tuple)
    (worker,) = observed[1].workers
    assert (worker.prepare_code, worker.prepare_reason) == ("HANDLER_NOT_FOUND", "no module app")
    (event,) = [event for event in await store.events(worker_id="w0") if event.code == "WORKER_NOT_STARTED"]
    assert (event.reason, event.detail) == ("no module app", {"code": "HANDLER_NOT_FOUND"})


async def test_boot_steps_prove_progress_until_the_first_heartbeat(store: Stores, clock: Any) -> None:
    await spawn_worker(store)
    clock.advance(30)
    await store.report_boot_step("w0", "creating the Python environment")
    first = await store.now()
    clock.advance(20)
    await store.report_boot_step("w0", "installing windlass")
    await store.report_boot_step("unknown", "installing windlass")
    observed = await store.observe(ANN, "gpus", FLEET)
    assert isinstance(observed, tuple)
    assert observed[1].workers[0].progress_at == await store.now()
    worker = await store.worker("w0")
    assert worker is not None
    assert (worker.boot_step, worker.reachable_at, worker.joined_at) == ("installing windlass", first, None)
    clock.advance(5)
    await store.activate("w0", JOIN, TOKEN)
    await store.heartbeat("w0")
    await store.report_boot_step("w0", "too late")
    joined = await store.worker("w0")
    assert joined is not None
    assert (joined.boot_step, joined.reachable_at) == ("installing windlass", first)
    assert joined.joined_at == await store.now()


async def test_booting_machine_reports_steps_with_its_join_token(store: Stores, tmp_path: Path) -> None:
    """By the program that cloud-init runs, which knows only the join file."""
    token = new_token(JOIN_PREFIX, SystemRandom())
    await spawn_worker(store, join=hash_of(token))
    await spawn_worker(store, "w1", slot=1, join=OTHER_JOIN)
    app = make_app(worker_api_context(store, store, LongPollHub(store.wait_for_work)))
    async with serve_asgi(app) as url:
        for worker_id, is_accepted in (("w0", True), ("w1", False)):
            file = tmp_path / f"{worker_id}.json"
            file.write_text(json.dumps({"worker_id": worker_id, "url": url, "join_token": token}))
            program = (sys.executable, fetch_wheel.__file__, str(file), "--step", "pulling images: \u00fcber 20 GB")
            process = await asyncio.create_subprocess_exec(*program)
            assert (await process.wait() == 0) is is_accepted
    found = await store.worker("w0")
    assert found is not None and found.boot_step == "pulling images: ?ber 20 GB"
    other = await store.worker("w1")
    assert other is not None and other.boot_step is None


async def test_machine_whose_boot_failed_fails_its_worker_at_once(store: Stores, tmp_path: Path) -> None:
    token = new_token(JOIN_PREFIX, SystemRandom())
    await spawn_worker(store, join=hash_of(token))
    app = make_app(worker_api_context(store, store, LongPollHub(store.wait_for_work)))
    output = tmp_path / "cloud-init-output.log"
    output.write_text("ERROR: no matching distribution")
    async with serve_asgi(app) as url:
        file = tmp_path / "join.json"
        file.write_text(json.dumps({"worker_id": "w0", "url": url, "join_token": token}))
        options = ("--step", "failed while installing windlass", "--failed", "--output", str(output))
        process = await asyncio.create_subprocess_exec(sys.executable, fetch_wheel.__file__, str(file), *options)
        assert await process.wait() == 0
    observed = await store.observe(ANN, "gpus", FLEET)
    assert isinstance(observed, tuple)
    (fail,) = [action for action in plan(observed[1], FLEET).actions if isinstance(action, Fail)]
    assert (fail.code, fail.reason, fail.is_proven) == (
        "BOOT_FAILED", "Its boot failed while installing windlass", False
    )  # fmt: skip
    assert [line.text for line in (await store.worker_log("w0", 10)).lines] == ["ERROR: no matching distribution"]


async def test_start_failure_is_ignored_after_heartbeat(store: Stores) -> None:
    await spawn_worker(store)
    await store.heartbeat("w0")
    await store.register(Registration(worker_id="by-hand", queues=("a",), fleet="gpus", concurrency=1, lease_s=30.0))
    for worker_id in ("w0", "by-hand", "unknown"):
        await store.cannot_start(worker_id, "HANDLER_NOT_FOUND", "no module app")
    observed = await store.observe(ANN, "gpus", FLEET)
    assert isinstance(observed, tuple)
    assert {worker.id: worker.prepare_code for worker in observed[1].workers} == {"w0": None, "by-hand": None}
    assert "WORKER_NOT_STARTED" not in [event.code for event in await store.events(limit=1000)]


async def test_join_token_exchange_is_repeatable_while_worker_lives(store: Stores, clock: Any) -> None:
    await spawn_worker(store)
    await store.activate("w0", JOIN, TOKEN)
    clock.advance(10 * TTL_S)
    assert await store.activate("w0", JOIN, TOKEN) is Activation.ACTIVATED
    assert [event.code for event in await store.events(worker_id="w0")] == ["WORKER_SPAWNED", "WORKER_JOINED"]
    await end(store)
    assert await store.activate("w0", JOIN, TOKEN) is Activation.ENDED


async def test_join_token_is_used_once(store: Stores) -> None:
    await spawn_worker(store)
    await store.activate("w0", JOIN, TOKEN)
    assert await store.activate("w0", JOIN, OTHER_TOKEN) is Activation.USED
    assert await store.authenticate(OTHER_TOKEN) is None


async def test_expired_join_token_is_refused(store: Stores, clock: Any) -> None:
    await spawn_worker(store)
    clock.advance(TTL_S)
    assert await store.activate("w0", JOIN, TOKEN) is Activation.EXPIRED
    assert await store.authenticate(TOKEN) is None


async def test_machine_in_the_wrong_place_cannot_join(store: Stores) -> None:
    await spawn_worker(store)
    await store.cannot_start("w0", "MISPLACED", "it is in another country")
    assert await store.activate("w0", JOIN, TOKEN) is Activation.ENDED
    assert await store.authenticate(TOKEN) is None


async def test_join_token_is_bound_to_its_worker(store: Stores) -> None:
    await spawn_worker(store, "w0", 0, JOIN)
    await spawn_worker(store, "w1", 1, OTHER_JOIN)
    assert await store.activate("w1", JOIN, TOKEN) is Activation.UNKNOWN
    assert await store.activate("unknown", JOIN, TOKEN) is Activation.UNKNOWN
    assert await store.authenticate(TOKEN) is None


async def test_worker_token_ends_with_its_worker(store: Stores) -> None:
    await spawn_worker(store)
    await store.activate("w0", JOIN, TOKEN)
    await store.terminate_worker("w0", "by hand")
    caller = await store.authenticate(TOKEN)
    assert isinstance(caller, WorkerCaller)
    # At once, although its machine is not deleted yet: the fleet's environment is behind this token.
    assert caller.has_terminated
    assert await store.activate("w0", JOIN, TOKEN) is Activation.ENDED
    await end(store)
    for token in (TOKEN, JOIN):
        caller = await store.authenticate(token)
        assert isinstance(caller, WorkerCaller | JoinCaller)
        assert caller.has_terminated


async def test_tokens_of_purged_worker_are_unknown(store: Stores, clock: Any) -> None:
    await spawn_worker(store)
    await store.activate("w0", JOIN, TOKEN)
    await end(store)
    clock.advance(10_801)
    await store.sweep()
    assert await store.authenticate(TOKEN) is None
    assert await store.authenticate(JOIN) is None


async def test_api_token_is_valid_until_revoked(store: Stores, clock: Any) -> None:
    created = await store.create_token("cron", Role.OPERATOR, TOKEN)
    assert (created.name, created.role, created.created_at) == ("cron", Role.OPERATOR, clock())
    assert (created.last_used_at, created.revoked_at) == (None, None)
    assert await store.authenticate(TOKEN) == TokenCaller("cron", Role.OPERATOR, token_id=created.id)
    assert await store.authenticate(OTHER_TOKEN) is None
    clock.advance(1)
    assert await store.revoke_token("cron")
    assert await store.authenticate(TOKEN) is None
    assert not await store.revoke_token("cron")
    assert not await store.revoke_token("unknown")
    (token,) = await store.tokens()
    assert token.revoked_at == clock()


async def test_api_token_expires_and_gives_its_name_free(store: Stores, clock: Any) -> None:
    scope = TokenScope(frozenset({"a", "b"}), frozenset({"gpus"}))
    created = await store.create_token("cron", Role.OPERATOR, TOKEN, scope=scope, ttl_s=60)
    assert (created.scope, created.expires_at) == (scope, clock() + timedelta(seconds=60))
    clock.advance(59)
    caller = await store.authenticate(TOKEN)
    assert caller == TokenCaller("cron", Role.OPERATOR, scope, token_id=created.id)
    assert caller.valid_for_s == 1
    with pytest.raises(BadInput, match="a token cron exists already"):
        await store.create_token("cron", Role.OPERATOR, OTHER_TOKEN)
    clock.advance(1)
    assert await store.authenticate(TOKEN) is None
    assert (await store.tokens())[0].status(clock()) == "expired"
    unlimited = await store.create_token("cron", Role.OPERATOR, OTHER_TOKEN, ttl_s=None)
    assert unlimited.expires_at is None
    clock.advance(10 * 365 * 86_400)
    caller = await store.authenticate(OTHER_TOKEN)
    assert caller == TokenCaller("cron", Role.OPERATOR, token_id=unlimited.id)
    # Tasks and events tell tokens of one name apart.
    assert caller.actor == f"token:cron#{unlimited.id}" != f"token:cron#{created.id}"


async def test_expired_api_token_ends_its_self_registered_workers(store: Stores, clock: Any) -> None:
    await store.create_token("anywhere", Role.WORKER, hash_of(API), ttl_s=60)
    await store.self_register(hash_of(API), TOKEN, MINE)
    clock.advance(60)
    caller = await store.authenticate(TOKEN)
    assert isinstance(caller, WorkerCaller)
    assert caller.has_terminated
    assert await store.self_register(hash_of(API), OTHER_TOKEN, replace(MINE, worker_id="other")) is None


async def test_last_use_of_api_token_is_recorded_to_the_minute(store: Stores, clock: Any) -> None:
    first = clock()
    await store.create_token("cron", Role.VIEWER, TOKEN)
    for advance_s, noted in ((0, first), (60, first), (0.000001, None)):
        clock.advance(advance_s)
        await store.authenticate(TOKEN)
        (token,) = await store.tokens()
        assert token.last_used_at == (noted if noted is not None else clock())


async def test_name_of_revoked_token_can_be_reused(store: Stores) -> None:
    await store.create_token("cron", Role.VIEWER, TOKEN)
    with pytest.raises(BadInput, match="a token cron exists already"):
        await store.create_token("cron", Role.OPERATOR, OTHER_TOKEN)
    assert await store.authenticate(OTHER_TOKEN) is None
    await store.revoke_token("cron")
    await store.create_token("cron", Role.OPERATOR, OTHER_TOKEN)
    assert [(token.role, token.revoked_at is None) for token in await store.tokens()] == [
        (Role.OPERATOR, True),
        (Role.VIEWER, False),
    ]


async def test_invalid_token_name_is_refused(store: Stores) -> None:
    with pytest.raises(BadInput):
        await store.create_token("no name", Role.VIEWER, hash_of(new_token(API_PREFIX, SystemRandom())))


# ------------------------------------------------------------------------------------- self-registered workers

API = f"{API_PREFIX}{'a' * 64}"
MINE = Registration("mine", ("a", "b"), lease_s=30.0)


async def test_self_registered_worker_is_known_by_its_token(store: Stores) -> None:
    await store.create_token("anywhere", Role.WORKER, hash_of(API))
    for _ in range(2):  # the first answer may be lost
        assert await store.self_register(hash_of(API), TOKEN, MINE) is WorkerStatus.ACTIVE
    assert await store.authenticate(TOKEN) == WorkerCaller("mine", "default", ("a", "b"), has_terminated=False)
    worker = await store.worker("mine")
    assert worker is not None
    assert (worker.fleet, worker.slot, worker.status) == ("default", None, WorkerStatus.ACTIVE)
    await store.deregister("mine", "drained")
    caller = await store.authenticate(TOKEN)
    assert isinstance(caller, WorkerCaller)
    assert caller.has_terminated


async def test_revoking_api_token_ends_its_self_registered_workers(store: Stores) -> None:
    await store.create_token("anywhere", Role.WORKER, hash_of(API))
    await store.self_register(hash_of(API), TOKEN, MINE)
    await store.revoke_token("anywhere")
    caller = await store.authenticate(TOKEN)
    assert isinstance(caller, WorkerCaller)
    assert caller.has_terminated
    assert await store.self_register(hash_of(API), TOKEN, MINE) is None


async def test_self_registration_needs_worker_role_and_free_name(store: Stores) -> None:
    await store.create_token("ops", Role.OPERATOR, OTHER_TOKEN)
    assert await store.self_register(OTHER_TOKEN, TOKEN, MINE) is None
    assert await store.worker("mine") is None
    await store.create_token("anywhere", Role.WORKER, hash_of(API))
    await spawn_worker(store, "w0")
    await store.register(MINE)
    for name in ("w0", "mine"):
        with pytest.raises(BadInput, match=f"a worker {name} exists already"):
            await store.self_register(hash_of(API), TOKEN, replace(MINE, worker_id=name))
    assert await store.authenticate(TOKEN) is None


async def test_self_registered_workers_recover_lost_peers(store: Stores, clock: Any) -> None:
    await store.create_token("anywhere", Role.WORKER, hash_of(API))
    long_poll_hub = LongPollHub(store.wait_for_work)
    app = make_app(worker_api_context(store, store, long_poll_hub))
    async with serve_asgi(app) as url:
        enlistments = [new_self_registration(url, API, False) for _ in range(2)]
        async with SelfRegisteredTransport(enlistments[0]) as one, SelfRegisteredTransport(enlistments[1]) as other:
            await one.register(MINE)
            await other.register(replace(MINE, worker_id="other"))
            task_id = await store.enqueue(new_task("a", 1))
            (claim,) = await other.claim("other", ["a"])
            assert claim.task_id == task_id
            # The heartbeat uses its own transport.
            async with SelfRegisteredTransport(enlistments[0]) as heart:
                for _ in range(8):
                    await heart.heartbeat("mine")
                    clock.advance(5)
                await heart.heartbeat("mine")
            assert await one.run_maintenance("mine") == [RecoveredTasks("other", 1, 0)]
            assert (await other.heartbeat("other")).status is not WorkerStatus.ACTIVE
            # After it was declared lost, it registers under a new name.
            assert await other.register(replace(MINE, worker_id="again")) is WorkerStatus.ACTIVE
            with pytest.raises(BadInput, match="not c"):
                await other.claim("again", ["c"])
    await long_poll_hub.close()


# ------------------------------------------------------------------------------------------------------------- sessions

LINK, SESSION, OTHER_SESSION = hash_of("link"), hash_of("session"), hash_of("another session")


@pytest.mark.parametrize("role", [Role.VIEWER, Role.OPERATOR, Role.ADMIN])
async def test_link_opens_one_session_with_its_role(store: Stores, role: Role) -> None:
    await store.create_link(LINK, role, 60)
    assert await store.session(LINK) is None
    assert await store.open_session(LINK, SESSION, 60)
    assert not await store.open_session(LINK, OTHER_SESSION, 60)
    assert not await store.open_session(SESSION, OTHER_SESSION, 60)
    assert await store.session(SESSION) == TokenCaller("dashboard", role, kind="session")
    assert await store.session(OTHER_SESSION) is None
    await store.end_session(SESSION)
    assert await store.session(SESSION) is None


async def test_links_and_sessions_expire(store: Stores, clock: Any) -> None:
    await store.create_link(LINK, Role.OPERATOR, 60)
    clock.advance(60)
    assert not await store.open_session(LINK, SESSION, 60)
    await store.create_link(OTHER_JOIN, Role.OPERATOR, 60)
    assert await store.open_session(OTHER_JOIN, SESSION, 60)
    clock.advance(60)
    assert await store.session(SESSION) is None
    assert await store.sessions() == []
    assert not await store.revoke_session(session_id(SESSION))


async def test_sessions_and_unused_links_are_listed_and_revoked(store: Stores, clock: Any) -> None:
    opened_at = clock()
    await store.create_link(LINK, Role.VIEWER, 60)
    assert await store.open_session(LINK, SESSION, 600)
    clock.advance(1)
    await store.create_link(OTHER_JOIN, Role.OPERATOR, 60)
    link = Session(session_id(OTHER_JOIN), Role.OPERATOR, True, clock(), clock() + timedelta(seconds=60))
    browser = Session(session_id(SESSION), Role.VIEWER, False, opened_at, opened_at + timedelta(seconds=600))
    assert await store.sessions() == [link, browser]
    assert await store.revoke_session(browser.id)
    assert await store.revoke_session(link.id)
    assert not await store.revoke_session(link.id)
    assert await store.session(SESSION) is None
    assert not await store.open_session(OTHER_JOIN, OTHER_SESSION, 60)


async def test_revoking_last_token_does_not_forget_that_one_existed(store: Stores) -> None:
    assert not await store.had_tokens()
    await store.create_token("ann", Role.VIEWER, TOKEN)
    assert await store.had_tokens()
    await store.revoke_token("ann")
    assert await store.had_tokens()


async def test_session_of_identity_provider_names_its_person(store: Stores) -> None:
    await store.create_session(SESSION, Role.VIEWER, 60, "ann@example.com")
    caller = await store.session(SESSION)
    assert caller == TokenCaller("ann@example.com", Role.VIEWER, kind="session")
    assert caller.valid_for_s == 60
    (event,) = (await store.audit_page()).rows
    assert (event.code, event.actor) == ("SESSION_OPENED", "session:ann@example.com")


async def test_login_links_and_logouts_are_in_the_audit_list(store: Stores) -> None:
    with acting_as("user:root@here"):
        await store.create_link(LINK, Role.ADMIN, 60, "ann@example.com")
    assert await store.open_session(LINK, SESSION, 60)
    await store.end_session(SESSION)
    await store.end_session(SESSION)
    page = await store.audit_page()
    assert [(event.code, event.actor, event.reason) for event in page.rows] == [
        ("SESSION_ENDED", "session:ann@example.com", "logged out"),
        ("SESSION_OPENED", "session:ann@example.com", "logged in by a link, role admin"),
        ("LINK_CREATED", "user:root@here", "login link for ann@example.com created, role admin"),
    ]
    detail = page.rows[-1].detail or {}
    assert (detail["person"], detail["role"]) == ("ann@example.com", "admin")


async def test_audit_list_has_who_did_what_newest_first(store: Stores) -> None:
    with acting_as("user:root@here"):
        await store.create_token("cron", Role.VIEWER, TOKEN)
        failed = await store.enqueue(new_task("a", 1))
    with acting_as("token:ops#7"):
        await store.cancel_task(failed, "no longer needed")
        await store.revoke_token("cron")
    await store.cancel_task(await store.enqueue(new_task("a", 2)), "without an actor")
    page = await store.audit_page()
    assert [(event.code, event.actor) for event in page.rows] == [
        ("TOKEN_REVOKED", "token:ops#7"),
        ("TASK_CANCELLED", "token:ops#7"),
        ("TOKEN_CREATED", "user:root@here"),
    ]
    assert [event.code for event in (await store.audit_page(actor="user:root@here")).rows] == ["TOKEN_CREATED"]
    # By the name of a token: all tokens that had it.
    for actor, expected in (("token:ops", 2), ("token:ops#7", 2), ("token:ops#8", 0), ("token:op", 0)):
        assert len((await store.audit_page(actor=actor)).rows) == expected, actor
    first = await store.audit_page(limit=2)
    assert [event.code for event in first.rows] == ["TOKEN_REVOKED", "TASK_CANCELLED"]
    assert [event.code for event in (await store.audit_page(limit=2, cursor=first.next_cursor)).rows] == [
        "TOKEN_CREATED"
    ]
    (token,) = await store.tokens()
    assert token.created_by == "user:root@here"
    task = await store.task(failed)
    assert task is not None
    assert task.owner == "user:root@here"


async def test_rates_of_callers_are_summed_over_servers(store: Stores) -> None:
    one, other = uuid4(), uuid4()
    assert await store.share_rates(one, {("request", "a"): 10.0}) == {("request", "a"): 10.0}
    shared = await store.share_rates(other, {("request", "a"): 5.0, ("worker", "a"): 1.0, ("request", "b"): 2.0})
    assert shared == {("request", "a"): 15.0, ("worker", "a"): 1.0, ("request", "b"): 2.0}
    # The last rates of a server replace its earlier ones.
    assert await store.share_rates(one, {("request", "a"): 20.0}) == {("request", "a"): 25.0}
    assert await store.share_rates(one, {}) == {}
    assert await store.share_rates(other, {("request", "a"): 5.0}) == {("request", "a"): 5.0}


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
async def test_rates_of_an_ended_server_expire(store: Stores, shared_dsn: str) -> None:
    ended, survivor = uuid4(), uuid4()
    await store.share_rates(ended, {("request", "c"): 10.0})
    assert await store.share_rates(survivor, {("request", "c"): 3.0}) == {("request", "c"): 13.0}
    async with connected(shared_dsn, "ageing the rates of a server") as connection:
        await connection.execute(
            "update windlass.caller_rates set recorded_at = recorded_at - make_interval(secs => $1)"
            " where server_id = $2",
            RATE_TTL_S,
            ended,
        )
    assert await store.share_rates(survivor, {("request", "c"): 3.0}) == {("request", "c"): 3.0}
