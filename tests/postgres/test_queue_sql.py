"""What only a real PostgreSQL can show: concurrency, transactions, notifications, plans, poolers, lost connections.

Everything here runs over the PostgreSQL that Windlass brings along and over the system's own.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import asyncpg
import pytest

from support.postgres_servers import transaction_pooler
from support.stores import PostgresStores
from windlass.model.errors import BadInput, DatabaseUnavailable, SchemaMismatch, TooSlow
from windlass.model.task import Claim, Finished, NewTask, TaskStatus
from windlass.model.worker import HeldClaim, Registration, WorkerStatus
from windlass.operations import retry_failed_tasks
from windlass.policy.backoff import retry_delay_s
from windlass.store import listener
from windlass.store import tasks as postgres
from windlass.store.doctor_checks import check_may_control
from windlass.store.export_sql import GRANTS
from windlass.store.tasks import enqueue_on

# Far beyond what anything here takes, even on a busy machine.
LIMIT_S = 30.0
POLL_S = 0.01


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        connection.terminate()


@asynccontextmanager
async def connections(dsn: str, count: int) -> AsyncIterator[list[Any]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(connected(dsn)) for _ in range(count)]


@pytest.fixture
async def connection(each_dsn: str) -> AsyncIterator[Any]:
    async with connected(each_dsn) as connection:
        yield connection


@pytest.fixture
async def other(each_dsn: str) -> AsyncIterator[Any]:
    async with connected(each_dsn) as connection:
        yield connection


@pytest.fixture
async def store(each_dsn: str) -> AsyncIterator[PostgresStores]:
    async with PostgresStores(each_dsn) as store:
        yield store


async def eventually(is_so: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not await is_so():
        assert time.monotonic() < deadline, f"{what} did not happen within {LIMIT_S:g} s"
        await asyncio.sleep(POLL_S)


async def is_blocked(eye: Any, count: int = 1) -> bool:
    """Whether that many sessions of this database wait for a lock."""
    waiting = await eye.fetchval(
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    )
    return bool(waiting == count)


async def register(store: PostgresStores, *worker_ids: str) -> None:
    for worker_id in worker_ids:
        await store.register(Registration(worker_id, ("q",)))


async def claim_all(connection: Any, worker_id: str, limit: int) -> list[int]:
    taken: list[int] = []
    while rows := await connection.fetch("select * from windlass.claim_tasks($1, '{q}', $2)", worker_id, limit):
        taken += [row["task_id"] for row in rows]
    return taken


# ------------------------------------------------------------------------------------------------------ concurrency


async def test_concurrent_claims_never_hand_out_a_task_twice(each_dsn: str) -> None:
    count, crew = 400, 8
    async with connections(each_dsn, crew) as crowd:
        await crowd[0].execute("insert into windlass.tasks (queue) select 'q' from generate_series(1, $1)", count)
        for number in range(crew):
            await crowd[0].execute("select windlass.register_worker($1)", f"w{number}")
        taken = await asyncio.gather(
            *(claim_all(crowd[number], f"w{number}", 1 + number % 3) for number in range(crew))
        )
        assert Counter(id_ for ids in taken for id_ in ids).most_common(1)[0][1] == 1
        assert sum(map(len, taken)) == count
        rows = await crowd[0].fetch("select worker_id, count(distinct claim_token) as n from windlass.tasks group by 1")
        assert {row["worker_id"]: row["n"] for row in rows} == {f"w{n}": len(ids) for n, ids in enumerate(taken) if ids}


async def test_tasks_that_fall_due_under_concurrent_claims_are_handed_out_once(each_dsn: str) -> None:
    async with connections(each_dsn, 6) as crowd:
        await crowd[0].execute("select windlass.register_worker('w')")
        await crowd[0].execute(
            "insert into windlass.tasks (queue, run_after)"
            " select 'q', now() - interval '1 s' from generate_series(1, 120)"
        )
        taken = await asyncio.gather(*(claim_all(connection, "w", 2) for connection in crowd))
        ids = [id_ for ids in taken for id_ in ids]
        # A row that another claim was just making ready may be passed over, but it is not lost.
        ids += await claim_all(crowd[0], "w", 10)
        assert len(ids) == len(set(ids)) == 120


async def test_two_that_finish_the_same_claim_at_once_both_hear_that_it_is_accepted(store: PostgresStores) -> None:
    """The first answer was lost on its way and the caller asked again: one completion, no late result."""
    await register(store, "w1")
    await store.enqueue(NewTask("q"))
    (claim,) = await store.claim("w1", ("q",))
    done = [Finished(claim.task_id, claim.token, "1")]
    turns = await asyncio.gather(*(store.finish_and_claim("w1", done, (), 0) for _ in range(4)))
    assert [turn.lost for turn in turns] == [[], [], [], []]
    worker = await store.worker("w1")
    assert worker is not None
    assert worker.late_results == 0


async def test_concurrent_enqueueing_with_one_key_gives_one_task(each_dsn: str) -> None:
    async with connections(each_dsn, 8) as crowd:
        ids = await asyncio.gather(
            *(connection.fetchval("select windlass.enqueue('q', p_unique_key => 'k')") for connection in crowd)
        )
        assert len(set(ids)) == 1
        assert await crowd[0].fetchval("select count(*) from windlass.tasks") == 1


@pytest.mark.parametrize("is_committed", [True, False])
async def test_a_key_waits_for_the_transaction_that_took_it(
    connection: Any, other: Any, store: PostgresStores, is_committed: bool
) -> None:
    transaction = connection.transaction()
    await transaction.start()
    first = await enqueue_on(connection, NewTask("q", unique_key="k"))
    second = asyncio.create_task(store.enqueue(NewTask("q", unique_key="k")))
    await eventually(lambda: is_blocked(other), "the second enqueueing waits")
    await (transaction.commit() if is_committed else transaction.rollback())
    assert (await asyncio.wait_for(second, LIMIT_S) == first) is is_committed
    assert len(await store.tasks()) == 1


async def test_a_heartbeat_waits_for_nobody_who_holds_a_task(connection: Any, store: PostgresStores) -> None:
    """Else a long transaction over a task would make its worker look dead."""
    await register(store, "w1")
    await store.enqueue_many([NewTask("q"), NewTask("q")])
    reported, forgotten = await store.claim("w1", ("q",), 2)
    await connection.execute("update windlass.tasks set started_at = now() - interval '1 hour'")
    async with connection.transaction():
        await connection.execute("select from windlass.tasks for update")
        held = [HeldClaim(reported.task_id, reported.token, 0.5, "half")]
        pulse = await asyncio.wait_for(store.heartbeat("w1", held), LIMIT_S)
        assert pulse.lost == frozenset()
    await store.heartbeat("w1", held)
    by_id = {task.id: task for task in await store.tasks()}
    assert by_id[reported.task_id].progress == 0.5
    assert by_id[forgotten.task_id].status is TaskStatus.QUEUED


async def test_a_claim_that_commits_after_its_worker_left_is_taken_back(connection: Any, store: PostgresStores) -> None:
    await register(store, "leaver", "judge")
    await store.enqueue_many([NewTask("q"), NewTask("q", max_attempts=1)])
    await store.claim("leaver", ("q",))
    async with connection.transaction():
        late = await connection.fetchrow("select * from windlass.claim_tasks('leaver', '{q}')")
        await store.deregister("leaver", "done")
    task = await store.task(late["task_id"])
    assert task is not None
    assert (task.status, task.worker_id) == (TaskStatus.RUNNING, "leaver")
    (recovery,) = await store.recover_lost_workers("judge")
    assert (recovery.worker_id, recovery.tasks_requeued, recovery.tasks_failed) == ("leaver", 0, 1)
    assert await store.recover_lost_workers("judge") == []
    assert {task.status for task in await store.tasks()} == {TaskStatus.QUEUED, TaskStatus.FAILED}


async def test_a_worker_leaves_without_waiting_for_who_holds_one_of_its_tasks(
    connection: Any, store: PostgresStores
) -> None:
    """Whoever finishes a task may want its worker's row next, and that is locked by who leaves."""
    await register(store, "leaver", "judge")
    await store.enqueue_many([NewTask("q")] * 2)
    locked, free = await store.claim("leaver", ("q",), 2)
    async with connection.transaction():
        await connection.execute("select from windlass.tasks where id = $1 for update", locked.task_id)
        await asyncio.wait_for(store.deregister("leaver", "done"), LIMIT_S)
        await connection.execute("update windlass.workers set late_results = 1 where id = 'leaver'")
    assert {task.id: task.status for task in await store.tasks()} == {
        locked.task_id: TaskStatus.RUNNING,
        free.task_id: TaskStatus.QUEUED,
    }
    (recovery,) = await store.recover_lost_workers("judge")
    assert (recovery.worker_id, recovery.tasks_requeued) == ("leaver", 1)


async def test_a_task_that_somebody_has_locked_holds_up_no_recovery(connection: Any, store: PostgresStores) -> None:
    await register(store, "lost", "gone", "judge")
    await store.enqueue_many([NewTask("q")] * 4)
    locked, *_ = await store.claim("lost", ("q",), 3)
    await store.claim("gone", ("q",))
    await connection.execute(
        "update windlass.workers set last_heartbeat = now() - interval '1 hour' where id in ('lost', 'gone')"
    )
    await connection.execute(
        "update windlass.workers set last_heartbeat = now(), heartbeat_gapless_since = now() - interval '1 hour'"
        " where id = 'judge'"
    )
    async with connection.transaction():
        await connection.execute("select from windlass.tasks where id = $1 for update", locked.task_id)
        recovered = await asyncio.wait_for(store.recover_lost_workers("judge"), LIMIT_S)
        assert [(r.worker_id, r.tasks_requeued) for r in recovered] == [("gone", 1), ("lost", 2)]
        assert await store.recover_lost_workers("judge") == []
    recovered = await store.recover_lost_workers("judge")
    assert [(r.worker_id, r.tasks_requeued) for r in recovered] == [("lost", 1)]
    assert {task.status for task in await store.tasks()} == {TaskStatus.QUEUED}


async def test_a_deadlock_is_answered_like_a_broken_connection_and_asking_again_is_safe(
    connection: Any, other: Any, store: PostgresStores
) -> None:
    await register(store, "w1")
    await store.enqueue_many([NewTask("q"), NewTask("q")])
    first, second = await store.claim("w1", ("q",), 2)
    done = [Finished(claim.task_id, claim.token, None) for claim in (first, second)]
    # Of two that wait for each other, the one whose patience ends first gives way.
    await connection.execute("set deadlock_timeout = '1h'")
    async with connection.transaction():
        await connection.execute("select from windlass.tasks where id = $1 for update", second.task_id)
        finishing = asyncio.create_task(store.finish_and_claim("w1", done, (), 0))
        await eventually(lambda: is_blocked(other), "finishing waits for the second task")
        await connection.execute("select from windlass.tasks where id = $1 for update", first.task_id)
        with pytest.raises(DatabaseUnavailable, match=r"\(deadlock detected\): try again\.$"):
            await finishing
    turn = await store.finish_and_claim("w1", done, (), 0)
    assert turn.lost == []
    assert {task.status for task in await store.tasks()} == {TaskStatus.COMPLETE}


async def test_producers_that_bring_the_same_keys_in_another_order_all_succeed(
    connection: Any, other: Any, store: PostgresStores
) -> None:
    # Of two that wait for each other, the one whose patience ends first gives way.
    await connection.execute("set deadlock_timeout = '1h'")
    async with connection.transaction():
        await enqueue_on(connection, NewTask("q", unique_key="b"))
        enqueueing = asyncio.create_task(store.enqueue_many([NewTask("q", unique_key=key) for key in "cab"]))
        await eventually(lambda: is_blocked(other), "enqueueing waits for the key that is taken")
        await asyncio.wait_for(enqueue_on(connection, NewTask("q", unique_key="a")), LIMIT_S)
    assert await asyncio.wait_for(enqueueing, LIMIT_S) == 1
    assert [task.unique_key for task in await store.tasks()] == ["c", "a", "b"]


async def test_a_slot_holds_one_live_worker(connection: Any) -> None:
    await connection.execute("insert into windlass.fleets (name) values ('gpus')")
    await connection.execute("insert into windlass.slots (fleet, slot) values ('gpus', 0)")
    hire = "insert into windlass.workers (id, fleet, slot, status) values ($1, 'gpus', 0, 'spawning')"
    await connection.execute(hire, "h1")
    with pytest.raises(asyncpg.UniqueViolationError):
        await connection.execute(hire, "h2")
    await connection.execute("update windlass.workers set status = 'terminated' where id = 'h1'")
    await connection.execute(hire, "h2")


async def test_a_heartbeat_with_thousands_of_claims_takes_no_time_to_speak_of(
    connection: Any, store: PostgresStores
) -> None:
    """Looking each up in a list of all would take 16 million comparisons, which is half a minute."""
    count = 4_000
    await register(store, "w1")
    await store.enqueue_many([NewTask("q")] * count)
    claims = await store.claim("w1", ("q",), count)
    await connection.execute("update windlass.tasks set started_at = now() - interval '1 hour'")
    held = [HeldClaim(claim.task_id, claim.token, 0.5, "half") for claim in claims[:-1]]
    began = time.monotonic()
    pulse = await store.heartbeat("w1", held)
    assert time.monotonic() - began < 5
    assert pulse.lost == frozenset()
    statuses = await connection.fetch("select status, progress, count(*) from windlass.tasks group by 1, 2 order by 1")
    assert [tuple(row) for row in statuses] == [("queued", None, 1), ("running", 0.5, count - 1)]


# ---------------------------------------------------------------------------------------------------------- retention

FINISHED_LONG_AGO = """
insert into windlass.tasks (queue, status, finished_at)
select case n % 2 when 0 then 'q' else 'r' end, case n % 3 when 0 then 'failed' else 'complete' end,
  now() - make_interval(secs => 7200 + n)
from generate_series(1, $1) as n
"""
SWEEP = "select windlass.sweep(3600, 3600, 3600, 3600, 3600, 3600, 10)"


async def test_a_round_of_sweeping_is_bounded_and_there_is_one_at_a_time(connection: Any, other: Any) -> None:
    await connection.execute(FINISHED_LONG_AGO, 45)
    async with connection.transaction():
        assert await connection.fetchval(SWEEP) == 20
        assert await other.fetchval(SWEEP) == 0
    assert await other.fetchval(SWEEP) == 15
    assert await other.fetchval(SWEEP) == 10
    assert await connection.fetchval(SWEEP) == 0


async def test_purging_in_many_rounds_deletes_exactly_what_it_should(
    connection: Any, store: PostgresStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "PURGE_BATCH", 7)
    await connection.execute(FINISHED_LONG_AGO, 300)
    assert await store.purge("q", [TaskStatus.COMPLETE], 7200 + 150) == 50
    assert await store.purge("q", [TaskStatus.COMPLETE, TaskStatus.FAILED], 0) == 100
    assert await store.purge(None, [TaskStatus.FAILED], 0) == 50
    left = await connection.fetch("select distinct queue, status from windlass.tasks")
    assert [tuple(row) for row in left] == [("r", "complete")]


# ------------------------------------------------------------------------------------------------------ transactions


async def test_a_task_enqueued_in_a_transaction_appears_when_it_commits(connection: Any, store: PostgresStores) -> None:
    await register(store, "w1")
    async with connection.transaction():
        task_id = await enqueue_on(connection, NewTask("q"))
        assert await store.task(task_id) is None
        assert await store.claim("w1", ("q",)) == []
    assert [claim.task_id for claim in await store.claim("w1", ("q",))] == [task_id]


async def test_a_task_enqueued_in_a_transaction_vanishes_when_it_is_rolled_back(
    connection: Any, store: PostgresStores
) -> None:
    transaction = connection.transaction()
    await transaction.start()
    task_id = await enqueue_on(connection, NewTask("q", unique_key="k"))
    await transaction.rollback()
    assert await store.task(task_id) is None
    assert await store.enqueue(NewTask("q", unique_key="k")) != task_id


@pytest.mark.parametrize(
    "what",
    [
        "p_run_after => 'infinity'",
        "p_run_after => '-infinity'",
        "p_run_after => '20000-01-01'",
        "p_run_after => '0044-03-15 BC'",
        "p_timeout_s => 'NaN'",
        "p_timeout_s => 'infinity'",
    ],
)
async def test_a_time_that_not_everybody_could_read_is_refused_in_sql_too(connection: Any, what: str) -> None:
    with pytest.raises(asyncpg.CheckViolationError):
        await connection.execute(f"select windlass.enqueue('q', {what})")


async def test_the_last_time_that_is_accepted_can_be_read(connection: Any, store: PostgresStores) -> None:
    last = await connection.fetchval("select windlass.enqueue('q', p_run_after => '9998-12-31 23:59:59+00')")
    first = await connection.fetchval("select windlass.enqueue('r', p_run_after => '0002-01-01 00:00+00')")
    assert {task.id for task in await store.task_summaries()} == {first, last}
    due = await store.next_run_after(["q"])
    assert due is not None
    assert due.year == 9998


async def test_a_payload_beyond_the_callers_limit_is_refused_in_sql_too(connection: Any) -> None:
    with pytest.raises(asyncpg.ProgramLimitExceededError, match="has 12 bytes and at most 10 are accepted"):
        await connection.fetchval(
            "select windlass.enqueue('q', to_jsonb('0123456789'::text), p_max_payload_bytes => 10)"
        )


# ------------------------------------------------------------------------------------------------------ notifications


async def plain_insert(connection: Any) -> None:
    await connection.execute("insert into windlass.tasks (queue, payload) values ('q', '{\"by\": \"insert\"}')")


async def copy(connection: Any) -> None:
    await connection.copy_records_to_table("tasks", schema_name="windlass", records=[("q",)] * 3, columns=["queue"])


async def enqueue_in_sql(connection: Any) -> None:
    await connection.execute("select windlass.enqueue('q')")


async def retry(connection: Any) -> None:
    task_id = await connection.fetchval(
        "insert into windlass.tasks (queue, status) values ('other', 'failed') returning id"
    )
    await connection.execute("update windlass.tasks set queue = 'q' where id = $1", task_id)
    assert await connection.fetchval("select windlass.retry_task($1)", task_id)


async def lose_a_worker(connection: Any) -> None:
    await connection.execute(
        "insert into windlass.tasks (queue, status, worker_id, claim_token, started_at)"
        " values ('other', 'running', 'gone', gen_random_uuid(), now())"
    )
    await connection.execute("update windlass.tasks set queue = 'q'")
    await connection.execute("select windlass.recover_lost_workers('anybody')")


@pytest.mark.parametrize("arrive", [plain_insert, copy, enqueue_in_sql, retry, lose_a_worker])
async def test_work_wakes_who_waits_for_it_however_it_arrives(
    connection: Any, store: PostgresStores, arrive: Callable[[Any], Awaitable[None]]
) -> None:
    # The first wait opens the listener and returns at once: something may have come before.
    await asyncio.wait_for(store.wait_for_work(("q",), 3600), LIMIT_S)
    waiting = asyncio.create_task(store.wait_for_work(("q", "unused"), 3600))
    await arrive(connection)
    await asyncio.wait_for(waiting, LIMIT_S)
    await register(store, "w1")
    assert await store.claim("w1", ("q",)) != []


async def test_a_listener_whose_connection_died_goes_on_by_polling(
    connection: Any, store: PostgresStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "POLL_WITHOUT_LISTEN_S", POLL_S)
    await asyncio.wait_for(store.wait_for_work(("q",), 3600), LIMIT_S)
    ended = "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and pid <> $1"
    await connection.fetch(ended, await connection.fetchval("select pg_backend_pid()"))
    listening = store.database.listener._connection

    async def is_noticed() -> bool:
        return bool(listening.is_closed())

    await eventually(is_noticed, "the end of the connection is noticed")
    await asyncio.wait_for(store.wait_for_work(("q",), 3600), LIMIT_S)


# --------------------------------------------------------------------------------------------------------------- time


async def test_the_time_is_the_callers_statement_unless_a_test_sets_it(connection: Any) -> None:
    async with connection.transaction():
        first = await connection.fetchval("select windlass.now()")
        assert await connection.fetchval("select windlass.now()") > first
        assert abs(first - datetime.now(UTC)) < timedelta(seconds=LIMIT_S)
    await connection.execute("set windlass.now = '2030-01-01T12:00:00Z'")
    task_id = await connection.fetchval("select windlass.enqueue('q')")
    created_at = await connection.fetchval("select created_at from windlass.tasks where id = $1", task_id)
    assert created_at == datetime(2030, 1, 1, 12, tzinfo=UTC)
    await connection.execute("reset windlass.now")
    assert abs(await connection.fetchval("select windlass.now()") - datetime.now(UTC)) < timedelta(seconds=LIMIT_S)


async def test_the_back_off_in_sql_is_that_of_the_policy(connection: Any) -> None:
    cases = [(attempts, jitter) for attempts in (-1, 0, *range(1, 13), 31, 10_000) for jitter in (0.0, 0.1, 1 / 3, 1.0)]
    rows = await connection.fetch(
        "select windlass_internal.retry_delay_s(c.attempts, c.jitter)"
        " from unnest($1::integer[], $2::double precision[]) as c (attempts, jitter)",
        [attempts for attempts, _ in cases],
        [jitter for _, jitter in cases],
    )
    assert [row[0] for row in rows] == [retry_delay_s(*case) for case in cases]


# -------------------------------------------------------------------------------------------------------------- plans

FINISHED, RUNNING, SCHEDULED, READY = 20_000, 2_000, 2_000, 200
FILL = f"""
insert into windlass.tasks (queue, status, finished_at, started_at, worker_id, claim_token)
select 'q', case n % 9 when 0 then 'failed' else 'complete' end,
  now() - case n % 9 when 0 then interval '2 hours' else '0' end, now(), 'w', gen_random_uuid()
from generate_series(1, {FINISHED}) as n;
insert into windlass.tasks (queue, status, started_at, worker_id, claim_token)
select 'q', 'running', now(), 'busy', gen_random_uuid() from generate_series(1, {RUNNING}) as n;
insert into windlass.tasks (queue, run_after)
select 'q', now() + interval '1 hour' from generate_series(1, {SCHEDULED});
insert into windlass.tasks (queue, priority)
select case n % 4 when 0 then 'r' else 'q' end, n % 3 from generate_series(1, {READY}) as n;
"""  # noqa: S608


async def one_of_each_call(connection: Any) -> None:
    """A worker's whole repertoire: each claim is used up, so that it can be repeated."""
    claims = await connection.fetch("select * from windlass.claim_tasks('w', '{q}', 2)")
    claims += await connection.fetch("select * from windlass.claim_tasks('w', '{q,r}', 2)")
    held = [{"task_id": c["task_id"], "token": str(c["token"]), "progress": 0.5, "note": "half"} for c in claims]
    await connection.fetch("select * from windlass.heartbeat('w', $1)", json.dumps(held))
    for claim in claims[:1]:
        await connection.fetch("select windlass.fail_task('w', $1, $2, 'it broke')", claim["task_id"], claim["token"])
    for claim in claims[1:2]:
        await connection.fetch("select windlass.release_task('w', $1, $2, 'no')", claim["task_id"], claim["token"])
    for claim in claims[2:3]:
        await connection.fetch("select windlass.complete_task('w', $1, $2)", claim["task_id"], claim["token"])
    rest = claims[3:]
    await connection.fetch(
        "select * from windlass.finish_and_claim('w', $1, $2, $3, '{q}', 0)",
        [claim["task_id"] for claim in rest],
        [claim["token"] for claim in rest],
        [None for _ in rest],
    )
    await connection.fetch("select windlass.next_run_after('{q,r}')")


async def run_maintenance(connection: Any) -> None:
    """Completed tasks are kept for an hour and dead letters for a month: none of those there are is too old."""
    await connection.fetch("select * from windlass.recover_lost_workers('w')")
    await connection.fetch("select windlass.sweep(3600, 2592000, 3600, 3600, 3600, 3600)")


@pytest.mark.parametrize("plans", ["auto", "force_generic_plan"])
async def test_the_cost_of_a_workers_calls_does_not_grow_with_finished_tasks(
    connection: Any, other: Any, plans: str
) -> None:
    """Plans are cached while the table is empty, which is when PostgreSQL would rather scan it."""
    await connection.execute(f"set plan_cache_mode = {plans}")
    await connection.execute("select windlass.register_worker('w'), windlass.register_worker('busy')")
    for _ in range(8):
        await one_of_each_call(connection)
        await run_maintenance(connection)
    await other.execute(FILL)
    async with connection.transaction():
        await one_of_each_call(connection)
        read = await read_so_far(connection)
        await run_maintenance(connection)
        read_for_upkeep = await read_so_far(connection)
    assert read["seq_scan"] == 0
    assert 0 < read["idx_tup_fetch"] < 100
    # Upkeep is rare, and may look at what runs; never at what is finished.
    assert read_for_upkeep["seq_scan"] == 0
    assert read_for_upkeep["idx_tup_fetch"] < 100 + RUNNING


async def read_so_far(connection: Any) -> Any:
    """What the present transaction has read of the tasks."""
    return await connection.fetchrow(
        "select seq_scan, idx_tup_fetch from pg_stat_xact_user_tables"
        " where schemaname = 'windlass' and relname = 'tasks'"
    )


async def test_dead_letters_of_other_queues_are_passed_over_once(connection: Any, each_dsn: str) -> None:
    await connection.execute(
        "insert into windlass.tasks (queue, status, finished_at)"
        " select case when n > 5000 then 'q' else 'r' end, 'failed', now() - interval '1 day' + n * interval '1 s'"
        " from generate_series(1, 5020) as n"
    )
    await connection.execute("vacuum analyze windlass.tasks")
    call = "select max(failed_at) from windlass.retry_failed('q', 10, p_failed_from => $1)"
    first_to = await connection.fetchval(call, None)
    async with connected(each_dsn) as next_round, next_round.transaction():
        second_to = await next_round.fetchval(call, first_to)
        read = await read_so_far(next_round)
    assert second_to - first_to == timedelta(seconds=10)
    assert read["seq_scan"] == 0
    assert read["idx_tup_fetch"] < 100


@pytest.mark.parametrize("plans", ["auto", "force_generic_plan"])
async def test_the_plans_of_a_workers_calls_scan_no_table(connection: Any, other: Any, plans: str) -> None:
    try:
        await connection.execute("load 'auto_explain'")
    except asyncpg.UndefinedFileError:
        pytest.skip("this PostgreSQL comes without auto_explain: its plans are judged by what they read")
    explained: list[str] = []
    connection.add_log_listener(lambda _, message: explained.append(message.message))
    await connection.execute(f"set plan_cache_mode = {plans}")
    await connection.execute("select windlass.register_worker('w'), windlass.register_worker('busy')")
    for _ in range(8):
        await one_of_each_call(connection)
        await run_maintenance(connection)
    await other.execute(FILL)
    await other.execute("analyze windlass.tasks")
    for setting in ("log_min_duration = 0", "log_nested_statements = on", "log_level = notice"):
        await connection.execute(f"set auto_explain.{setting}")
    await one_of_each_call(connection)
    await run_maintenance(connection)

    async def is_explained() -> bool:
        return any("windlass.sweep(" in text for text in explained)

    await eventually(is_explained, "the last plan is reported")
    claims = [text for text in explained if "Index Scan using tasks_ready" in text]
    assert claims
    assert not [text for text in explained if "Seq Scan on tasks" in text]


async def test_the_cost_of_naming_the_queues_does_not_grow_with_the_tasks(connection: Any, other: Any) -> None:
    await other.execute(FILL)
    await other.execute("insert into windlass.tasks (queue) select 'q' from generate_series(1, 20000)")
    await other.execute("insert into windlass.tasks (queue, run_after) values ('later', now())")
    await other.execute("vacuum analyze windlass.tasks")
    async with connection.transaction():
        rows = await connection.fetch(postgres.QUERIES["known_queues"])
        read = await read_so_far(connection)
    assert [row["queue"] for row in rows] == ["later", "q", "r"]
    assert read["seq_scan"] == 0
    assert read["idx_tup_fetch"] < RUNNING + 1_000 + 100


# -------------------------------------------------------------------------------------------------------------- views

VIEWS = {
    "queue_depth": "queue queued scheduled retrying running oldest_queued_age_s",
    "orchestrator_status": (
        "at queued_tasks running_tasks delayed_tasks oldest_queued_age_s completed_last_hour failed_last_hour"
        " spawning_workers active_workers terminating_workers error_workers total_workers stale_workers"
    ),
    "active_workers_health": (
        "worker_id fleet slot status paused created_at last_heartbeat heartbeat_age_s is_stale vram_total_mb"
        " vram_used_mb vram_used_percent vram_age_s running_tasks oldest_task_id oldest_task_age_s"
    ),
    "worker_performance": (
        "worker_id fleet status completed_tasks failed_attempts success_percent duration_p50_s duration_mean_s"
        " late_results uptime_s"
    ),
    "recent_errors": "id at code reason fleet worker_id task_id detail",
    "cost_estimates": "worker_id fleet instance_type currency price_micros_per_hour runtime_s cost_micros",
    "daily_costs": "day fleet currency task_micros boot_micros idle_micros tail_micros total_micros",
    "task_costs": "task_id queue currency cost_micros",
    # Seed 004's health table, column by column.
    "health": "component last_seen status pid current_job details_json restart_count last_restart created_at",
}


async def test_the_views_have_the_promised_columns(connection: Any) -> None:
    for view, columns in VIEWS.items():
        statement = await connection.prepare(f"select * from windlass.{view}")  # noqa: S608
        assert [attribute.name for attribute in statement.get_attributes()] == columns.split()


async def rows_of(connection: Any, clock: Any, view: str, order: str = "1") -> list[dict[str, Any]]:
    await connection.execute("select set_config('windlass.now', $1, false)", clock().isoformat())
    return [dict(row) for row in await connection.fetch(f"select * from windlass.{view} order by {order}")]  # noqa: S608


@pytest.fixture
async def busy(each_dsn: str, connection: Any, clock: Any) -> list[Claim]:
    """w1 has completed one task in 10 s, failed one, and holds two; one waits. w2 has been silent for long."""
    await connection.execute("set windlass.now = '2030-01-01T00:00:00Z'")
    await connection.execute("insert into windlass.fleets (name, queues) values ('gpus', '{q}')")
    await connection.execute("insert into windlass.slots (fleet, slot, restart_count) values ('gpus', 0, 2)")
    await connection.execute(
        "insert into windlass.workers (id, fleet, slot, status, price_micros_per_hour, currency, instance_type)"
        " values ('w1', 'gpus', 0, 'spawning', 3600000, 'EUR', 'H200')"
    )
    async with PostgresStores(each_dsn, virtual_now=clock) as store:
        await store.register(Registration("w1", ("q",), fleet="gpus", concurrency=2, pid=7))
        await connection.execute("select windlass.activate_worker('w1')")
        await register(store, "w2")
        await store.heartbeat("w2")
        await store.enqueue_many(NewTask("q") for _ in range(5))
        done, failed, *held = await store.claim("w1", ("q",), 4)
        clock.advance(10)
        await store.finish_and_claim("w1", [Finished(done.task_id, done.token, None)], (), 0)
        await store.fail("w1", failed.task_id, failed.token, "it broke", jitter=0.0)
        clock.advance(90)
        vitals = {"pid": 42, "vram_total_mb": 1000, "vram_used_mb": 250}
        await store.heartbeat("w1", [HeldClaim(claim.task_id, claim.token) for claim in held], vitals)
        clock.advance(5)
    return [done, failed, *held]


async def test_the_status_view_tells_how_things_stand(connection: Any, clock: Any, busy: list[Claim]) -> None:
    (row,) = await rows_of(connection, clock, "orchestrator_status")
    assert (row["queued_tasks"], row["running_tasks"], row["delayed_tasks"]) == (1, 2, 1)
    assert (row["completed_last_hour"], row["failed_last_hour"], row["oldest_queued_age_s"]) == (1, 0, 105)
    assert (row["active_workers"], row["total_workers"], row["stale_workers"], row["error_workers"]) == (2, 2, 1, 0)


async def test_the_workers_view_tells_how_each_worker_is(connection: Any, clock: Any, busy: list[Claim]) -> None:
    one, two = await rows_of(connection, clock, "active_workers_health")
    assert (one["worker_id"], one["slot"], one["heartbeat_age_s"], one["is_stale"]) == ("w1", 0, 5, False)
    assert (one["vram_used_percent"], one["vram_age_s"]) == (25, 5)
    assert (one["running_tasks"], one["oldest_task_id"], one["oldest_task_age_s"]) == (2, busy[2].task_id, 105)
    assert (two["worker_id"], two["is_stale"], two["running_tasks"]) == ("w2", True, 0)


async def test_the_performance_view_counts_what_became_of_attempts(
    connection: Any, clock: Any, busy: list[Claim]
) -> None:
    one, two = await rows_of(connection, clock, "worker_performance")
    assert (one["completed_tasks"], one["failed_attempts"], one["success_percent"]) == (1, 1, 50)
    assert (one["duration_p50_s"], one["duration_mean_s"], one["uptime_s"]) == (10, 10, 105)
    assert (two["completed_tasks"], two["failed_attempts"], two["success_percent"]) == (0, 0, None)


async def test_the_other_views_tell_queues_errors_and_costs(connection: Any, clock: Any, busy: list[Claim]) -> None:
    (depth,) = await rows_of(connection, clock, "queue_depth")
    assert (depth["queued"], depth["scheduled"], depth["retrying"], depth["running"]) == (1, 0, 1, 2)
    (error,) = await rows_of(connection, clock, "recent_errors")
    assert (error["code"], error["worker_id"], error["task_id"]) == ("TASK_ERROR", "w1", busy[1].task_id)
    (cost,) = await rows_of(connection, clock, "cost_estimates")
    assert (cost["runtime_s"], cost["cost_micros"], cost["currency"]) == (105, 105_000, "EUR")


async def test_the_health_view_is_seed_004s_health_table(connection: Any, clock: Any, busy: list[Claim]) -> None:
    start = int(clock().timestamp()) - 105
    healthy, crashed = await rows_of(connection, clock, "health")
    assert {**healthy, "details_json": json.loads(healthy["details_json"])} == {
        "component": "worker:q:0",
        "last_seen": start + 100,
        "status": "healthy",
        "pid": 42,
        "current_job": busy[2].task_id,
        "details_json": {"queue_type": "q", "batch_size": 2, "paused": False, "error_message": None},
        "restart_count": 2,
        "last_restart": None,
        "created_at": start,
    }
    assert (crashed["component"], crashed["status"], crashed["last_seen"]) == ("worker:q:w2", "crashed", start)


async def test_the_health_view_knows_every_status_of_seed_004(connection: Any, clock: Any, each_dsn: str) -> None:
    await connection.execute("insert into windlass.fleets (name, queues) values ('cpus', '{processing}')")
    await connection.execute(
        "insert into windlass.slots (fleet, slot, status, failed_reason) values ('cpus', 9, 'failed', 'five restarts')"
    )
    async with PostgresStores(each_dsn, virtual_now=clock) as store:
        await register(store, "starting", "healthy", "stopping", "crashed", "left")
        await store.heartbeat("crashed")
        clock.advance(20)
        for worker_id in ("healthy", "stopping"):
            await store.heartbeat(worker_id)
        await store.set_terminating(["stopping"], "enough")
        await store.deregister("left", "done")
        rows = await rows_of(connection, clock, "health")
        assert {row["component"]: row["status"] for row in rows} == {
            "worker:q:starting": "starting",
            "worker:q:healthy": "healthy",
            "worker:q:stopping": "stopping",
            "worker:q:crashed": "healthy",
            "worker:processing:9": "failed",
        }
        clock.advance(11)
        rows = await rows_of(connection, clock, "health")
        by_name = {row["component"]: row for row in rows}
        assert by_name["worker:q:crashed"]["status"] == "crashed"
        assert by_name["worker:q:starting"]["status"] == "crashed"
        assert json.loads(by_name["worker:processing:9"]["details_json"])["error_message"] == "five restarts"


async def test_no_two_components_of_the_health_view_have_the_same_name(connection: Any, clock: Any) -> None:
    await connection.execute(
        "insert into windlass.fleets (name, queues) values ('cheap', '{q}'), ('dear', '{q,r}'), ('other', '{r}')"
    )
    await connection.execute(
        "insert into windlass.slots (fleet, slot, status) values"
        " ('cheap', 0, 'ok'), ('dear', 0, 'ok'), ('dear', 1, 'failed'), ('cheap', 1, 'failed'), ('other', 0, 'ok')"
    )
    await connection.execute(
        "insert into windlass.workers (id, fleet, slot, status, queues) values"
        " ('a', 'cheap', 0, 'spawning', '{q}'), ('b', 'dear', 0, 'spawning', '{q,r}'),"
        " ('c', 'other', 0, 'spawning', '{r}')"
    )
    names = [row["component"] for row in await rows_of(connection, clock, "health")]
    assert sorted(names) == [
        "worker:q@cheap:0", "worker:q@cheap:1", "worker:q@dear:0", "worker:q@dear:1", "worker:r:0",
    ]  # fmt: skip
    # The row of a fleet stays when the fleet is no more: what is left of it counts, and then nothing.
    await connection.execute("update windlass.workers set status = 'terminated' where id = 'a'")
    left = [row["component"] for row in await rows_of(connection, clock, "health")]
    assert sorted(left) == ["worker:q@cheap:1", "worker:q@dear:0", "worker:q@dear:1", "worker:r:0"]
    await connection.execute("update windlass.slots set status = 'ok' where fleet = 'cheap'")
    left = [row["component"] for row in await rows_of(connection, clock, "health")]
    assert sorted(left) == ["worker:q:0", "worker:q:1", "worker:r:0"]


async def test_a_machine_that_boots_for_longer_than_its_lease_is_starting(connection: Any, clock: Any) -> None:
    await connection.execute("insert into windlass.fleets (name, queues) values ('cpus', '{q}')")
    await connection.execute("insert into windlass.slots (fleet, slot) values ('cpus', 0)")
    await connection.execute(
        "insert into windlass.workers (id, fleet, slot, status, queues, lease_s, created_at)"
        " values ('a', 'cpus', 0, 'spawning', '{q}', 30, now() - interval '1 hour')"
    )
    (row,) = await rows_of(connection, clock, "health")
    assert row["status"] == "starting"


# ------------------------------------------------------------------------------------------------------------ pgbouncer


@pytest.fixture
def pgbouncer(each_server: Any, each_dsn: str, reachable_path: Path) -> Iterator[str]:
    """With fewer connections to the server than clients."""
    with transaction_pooler(each_server, each_dsn, reachable_path, pool_size=2) as dsn:
        yield dsn


async def work_until_empty(dsn: str, worker_id: str) -> list[int]:
    """One worker's life: register, claim, beat, finish, fail once in a while, leave."""
    finished: list[int] = []
    async with PostgresStores(dsn) as store:
        await store.register(Registration(worker_id, ("q",)))
        claims = await store.claim(worker_id, ("q",), 2)
        while claims:
            pulse = await store.heartbeat(worker_id, [HeldClaim(c.task_id, c.token, 0.5, "half") for c in claims])
            assert (pulse.status, pulse.lost) == (WorkerStatus.ACTIVE, frozenset())
            turn = await store.finish_and_claim(
                worker_id, [Finished(c.task_id, c.token, "1") for c in claims], ("q",), 2
            )
            assert turn.lost == []
            finished += [claim.task_id for claim in claims]
            claims = turn.claims
        await store.deregister(worker_id, "done")
    return finished


async def test_behind_a_transaction_pooler_whole_crews_work(pgbouncer: str, each_dsn: str) -> None:
    async with PostgresStores(each_dsn) as direct, PostgresStores(pgbouncer) as pooled:
        assert (direct.database.is_pooled, pooled.database.is_pooled) == (False, True)
        assert await pooled.enqueue_many([NewTask("q")] * 40) == 40
        assert await pooled.enqueue_many([NewTask("q", unique_key=str(n % 20)) for n in range(40)]) == 20
        done = await asyncio.gather(*(work_until_empty(pgbouncer, f"w{number}") for number in range(6)))
        assert sorted(id_ for ids in done for id_ in ids) == sorted(task.id for task in await pooled.tasks(limit=100))
        assert await direct.finished_since(3600) == {TaskStatus.COMPLETE: 60, TaskStatus.FAILED: 0}
        assert await pooled.purge(None, [TaskStatus.COMPLETE], 0) == 60


async def test_behind_a_transaction_pooler_waiting_is_polling(pgbouncer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "POLL_WITHOUT_LISTEN_S", POLL_S)
    async with PostgresStores(pgbouncer) as store:
        for _ in range(3):
            await asyncio.wait_for(store.wait_for_work(("q",), 3600), LIMIT_S)
            assert store.database.listener._connection is None


async def test_behind_a_transaction_pooler_no_call_holds_its_locks_for_long(pgbouncer: str, each_dsn: str) -> None:
    limits = "select current_setting('lock_timeout'), current_setting('idle_in_transaction_session_timeout')"
    async with PostgresStores(pgbouncer) as pooled, PostgresStores(each_dsn) as direct:
        async with pooled.database.connection("looking") as connection:
            assert tuple(await connection.fetchrow(limits)) == ("20s", "20s")
        async with direct.database.connection("looking") as connection:
            assert tuple(await connection.fetchrow(limits)) == ("0", "0")


async def test_a_statement_that_takes_too_long_is_broken_off_and_said_to_be(pgbouncer: str, each_dsn: str) -> None:
    for dsn in (pgbouncer, each_dsn):
        async with PostgresStores(dsn, max_connections=1, statement_timeout_s=0.1) as store:
            with pytest.raises(TooSlow, match="^sleeping: not done within 0.1 s"):
                async with store.database.connection("sleeping") as connection:
                    await connection.execute("select pg_sleep(20)")
            assert await store.enqueue(NewTask("q")) > 0


async def test_behind_a_transaction_pooler_an_error_does_not_poison_the_next_call(pgbouncer: str) -> None:
    async with PostgresStores(pgbouncer, max_connections=1) as store:
        for bad in (NewTask("no name"), NewTask("q", payload="{")):
            with pytest.raises(BadInput):
                await store.enqueue(bad)
            with pytest.raises(BadInput):
                await store.enqueue_many([NewTask("q", unique_key="u"), bad])
        assert await store.tasks() == []
        assert await store.enqueue(NewTask("q")) > 0


# ----------------------------------------------------------------------------------------------------- lost connections


async def every_call(store: PostgresStores) -> list[BaseException | None]:
    """What each of a worker's calls raises."""
    token = UUID(int=1)
    calls = (
        store.enqueue(NewTask("q")),
        store.enqueue_many([NewTask("q")]),
        store.register(Registration("w1", ("q",))),
        store.claim("w1", ("q",)),
        store.finish_and_claim("w1", [Finished(1, token, None)], ("q",), 1),
        store.fail("w1", 1, token, "it broke"),
        store.release("w1", 1, token, "no"),
        store.heartbeat("w1"),
        store.run_maintenance("w1"),
        store.next_run_after(("q",)),
        store.tasks(),
        store.deregister("w1", "done"),
    )
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    return [outcome if isinstance(outcome, BaseException) else None for outcome in outcomes]


async def test_a_server_that_crashes_and_comes_back(each_server: Any, each_dsn: str) -> None:
    """While it is away every call says so in one sentence; afterwards the same store works again."""
    async with PostgresStores(each_dsn) as store, connected(each_dsn) as connection, connected(each_dsn) as eye:
        await register(store, "w1")
        task_id = await store.enqueue(NewTask("q"))
        (claim,) = await store.claim("w1", ("q",))
        await connection.execute("begin; select from windlass.tasks for update")
        under_way = asyncio.create_task(store.cancel_task(task_id, "not wanted"))
        await eventually(lambda: is_blocked(eye), "cancelling waits for the lock")
        each_server.crash()
        try:
            with pytest.raises(DatabaseUnavailable, match="cancelling a task: the database at"):
                await asyncio.wait_for(under_way, LIMIT_S)
            outcomes = await every_call(store)
            assert [type(outcome) for outcome in outcomes] == [DatabaseUnavailable] * len(outcomes)
            with pytest.raises(DatabaseUnavailable, match=r"connecting: .*cannot be reached.*is it running\?"):
                await PostgresStores(each_dsn).__aenter__()
        finally:
            await asyncio.to_thread(each_server.start)

        async def works() -> bool:
            try:
                turn = await store.finish_and_claim("w1", [Finished(claim.task_id, claim.token, "1")], ("q",), 1)
            except DatabaseUnavailable:
                return False
            return turn.lost == []

        await eventually(works, "the store works again")
        assert [task.status for task in await store.tasks()] == [TaskStatus.COMPLETE]


async def test_a_connection_that_breaks_is_replaced(each_dsn: str) -> None:
    async with PostgresStores(each_dsn, max_connections=1) as store, connected(each_dsn) as connection:
        await store.enqueue(NewTask("q"))
        await connection.fetch(
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and pid <> $1",
            await connection.fetchval("select pg_backend_pid()"),
        )

        async def works() -> bool:
            try:
                return bool(await store.enqueue(NewTask("q")))
            except DatabaseUnavailable:
                return False

        await eventually(works, "the store has a new connection")


async def test_connections_say_who_they_are_unless_the_address_does(each_dsn: str) -> None:
    for dsn, name in ((each_dsn, "windlass"), (f"{each_dsn}&application_name=shop", "shop")):
        async with PostgresStores(dsn) as store, store.database.connection("looking") as connection:
            assert await connection.fetchval("select current_setting('application_name')") == name


async def test_a_server_that_became_a_standby_is_away_for_now(each_dsn: str) -> None:
    async with PostgresStores(f"{each_dsn}&default_transaction_read_only=on") as store:
        with pytest.raises(
            DatabaseUnavailable, match=r"could not do it now \(cannot execute INSERT .*\): try again\.$"
        ):
            await store.enqueue(NewTask("q"))


async def test_a_schema_that_changed_under_the_program_is_told_in_a_sentence(connection: Any, each_dsn: str) -> None:
    async with PostgresStores(each_dsn) as store:
        await connection.execute("drop function windlass.retry_task(bigint)")
        with pytest.raises(SchemaMismatch, match=r"is not as this program knows it \(function .*\): see `windlass db"):
            await store.retry_task(1)
        await connection.execute(
            "create function windlass.retry_task(bigint) returns boolean language plpgsql as"
            " 'begin raise exception ''out of order''; end'"
        )
        with pytest.raises(DatabaseUnavailable, match=r"refused \(out of order\): `windlass doctor` looks"):
            await store.retry_task(1)


async def test_a_call_that_is_not_answered_in_time_is_given_up(connection: Any, each_dsn: str) -> None:
    async with PostgresStores(each_dsn, command_timeout_s=0.2) as store:
        await register(store, "w1")
        async with connection.transaction():
            await connection.execute("lock table windlass.tasks")
            with pytest.raises(DatabaseUnavailable, match="did not answer in time"):
                await store.claim("w1", ("q",))


async def test_a_database_that_is_not_there_is_named(each_server: Any) -> None:
    with pytest.raises(DatabaseUnavailable, match='connecting: database "nowhere" does not exist'):
        await PostgresStores(each_server.dsn_of("nowhere")).__aenter__()


@pytest.fixture
def stranger(each_server: Any, each_dsn: str) -> Iterator[str]:
    """The same database for a user to whom nothing was granted."""
    each_server.execute("create role stranger login")
    try:
        yield each_dsn.replace(f"{urlsplit(each_dsn).username}@", "stranger@")
    finally:
        each_server.execute("drop role stranger")


async def test_a_user_without_rights_is_told_so(stranger: str) -> None:
    with pytest.raises(DatabaseUnavailable, match=r"does not allow it \(permission denied .*\): grant it to this user"):
        await PostgresStores(stranger).__aenter__()


# --------------------------------------------------------------------------------------------------------------- rights


@pytest.fixture
async def restricted(each_server: Any, each_dsn: str, connection: Any) -> AsyncIterator[Callable[[str], str]]:
    """The address for a user with one of the roles of `windlass db sql --grants`, applied twice as it may be."""
    await connection.execute(GRANTS)
    await connection.execute(GRANTS)
    await connection.execute("create role shop login in role windlass_producer")
    await connection.execute("create role hand login in role windlass_worker")
    try:
        yield lambda user: each_dsn.replace(f"{urlsplit(each_dsn).username}@", f"{user}@")
    finally:
        await connection.execute("drop owned by windlass_producer, windlass_worker")
        await connection.execute("drop role shop, hand, windlass_producer, windlass_worker")


Restricted = Callable[[str], str]


async def test_whoever_could_not_run_the_control_loop_is_told_so_at_once(each_dsn: str, restricted: Restricted) -> None:
    await check_may_control(each_dsn)
    with pytest.raises(DatabaseUnavailable, match="user hand cannot run the control plane: it lacks .* and .* more"):
        await check_may_control(restricted("hand"))


async def test_a_producer_needs_no_more_than_its_role(
    restricted: Restricted, connection: Any, store: PostgresStores
) -> None:
    await register(store, "w1")
    async with PostgresStores(restricted("shop")) as shop, connected(restricted("shop")) as sql:
        failed = await shop.enqueue(NewTask("q", '{"n": 1}', max_attempts=1, unique_key="k"))
        assert await shop.enqueue(NewTask("q", unique_key="k")) == failed
        (claim,) = await store.claim("w1", ("q",))
        await store.fail("w1", claim.task_id, claim.token, "it broke")
        assert await shop.retry_task(failed)
        assert await shop.cancel_task(failed, "not wanted")
        assert (await shop.retry_failed("q", await shop.now(), include_cancelled=True)).ids == [failed]
        assert await shop.enqueue_many([NewTask("q")]) == 1
        assert await shop.enqueue_many([NewTask("q", unique_key=key) for key in ("k", "l")]) == 1
        await sql.execute("insert into windlass.tasks (queue, payload) values ('q', '5')")
        tasks = await shop.tasks()
        assert [task.payload for task in tasks] == ["5", "null", "null", '{"n": 1}']
        for refused in (
            "update windlass.tasks set payload = '6'",
            "delete from windlass.tasks",
            "select windlass.register_worker('mine')",
            "select windlass_internal.pause_fleet('default', true)",
            "select windlass_internal.terminate_worker('w1', 'x')",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await sql.execute(refused)


async def test_a_worker_needs_no_more_than_its_role_from_the_first_call_to_the_last(
    restricted: Restricted, connection: Any, store: PostgresStores
) -> None:
    await store.enqueue_many([NewTask("q")] * 6)
    await connection.execute("insert into windlass.fleets (name) values ('gpus')")
    await connection.execute("insert into windlass.slots (fleet, slot) values ('gpus', 0)")
    await connection.execute(
        "insert into windlass.workers (id, fleet, slot, status) values ('h1', 'gpus', 0, 'spawning')"
    )
    async with PostgresStores(restricted("hand")) as hand, connected(restricted("hand")) as sql:
        await register(hand, "w1", "lost", "h1")
        await sql.execute("select windlass.activate_worker('h1')")
        for worker_id in ("lost", "h1"):
            await hand.claim(worker_id, ("q",))
        failed, released, done = await hand.claim("w1", ("q",), 3)
        held = [HeldClaim(claim.task_id, claim.token, 0.5, "half") for claim in (failed, released, done)]
        assert (await hand.heartbeat("w1", held, {"pid": 7})).lost == frozenset()
        assert await hand.fail("w1", failed.task_id, failed.token, "it broke") is TaskStatus.ERROR
        assert await hand.release("w1", released.task_id, released.token, "not now")
        turn = await hand.finish_and_claim("w1", [Finished(done.task_id, done.token, "1")], ("q",), 1)
        assert (len(turn.claims), turn.lost) == (1, [])
        assert await hand.next_run_after(("q",)) is not None
        await asyncio.wait_for(hand.wait_for_work(("q",), 3600), LIMIT_S)
        await connection.execute(
            "update windlass.workers set last_heartbeat = now() - interval '1 hour' where id in ('lost', 'h1')"
        )
        await connection.execute("update windlass.workers set heartbeat_gapless_since = now() - interval '1 hour'")
        await connection.execute(FINISHED_LONG_AGO, 3)
        recovered = await hand.run_maintenance("w1")
        assert [(r.worker_id, r.tasks_requeued) for r in recovered] == [("h1", 1), ("lost", 1)]
        await connection.execute(
            "update windlass.tasks set finished_at = now() - interval '1 year' where worker_id is null"
        )
        assert await hand.sweep() == 3
        await hand.deregister("w1", "done")
        for refused in (
            "select windlass.enqueue('q')",
            "select windlass_internal.pause_fleet('default', true)",
            "delete from windlass.fleets",
            "select windlass_internal.acquire_lease_term('orchestrator', 'me', 60)",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await sql.execute(refused)


@asynccontextmanager
async def stopped_before_it_locks(
    restricted: Restricted, connection: Any, other: Any, call: str
) -> AsyncIterator[None]:
    """Within, a worker's call stands still: it has its view of the tasks, and has locked none of them."""
    # Who reads as neither owner nor superuser is asked to stand still at each row.
    await connection.execute(
        "create function public.stand_still() returns boolean language plpgsql"
        " as 'begin perform pg_advisory_xact_lock_shared(7); return true; end';"
        "create policy stand_still on windlass.tasks using (public.stand_still());"
        "alter table windlass.tasks enable row level security;"
        "select pg_advisory_lock(7)"
    )
    async with connected(restricted("hand")) as hand:
        calling = asyncio.create_task(hand.fetch(call))
        await eventually(lambda: is_blocked(other), "the call stands still")
        yield
        await connection.execute("select pg_advisory_unlock(7)")
        await asyncio.wait_for(calling, LIMIT_S)


async def test_a_heartbeat_gives_back_no_claim_that_was_made_while_it_looked(
    restricted: Restricted, connection: Any, other: Any, store: PostgresStores
) -> None:
    await register(store, "w1")
    await store.enqueue(NewTask("q"))
    (old,) = await store.claim("w1", ("q",))
    await connection.execute("update windlass.tasks set started_at = now() - interval '1 hour'")
    async with stopped_before_it_locks(restricted, connection, other, "select status from windlass.heartbeat('w1')"):
        await store.release("w1", old.task_id, old.token, "not now")
        (new,) = await store.claim("w1", ("q",))
    turn = await store.finish_and_claim("w1", [Finished(new.task_id, new.token, None)], (), 0)
    assert turn.lost == []


async def test_an_acquittal_takes_no_task_that_somebody_began_meanwhile(
    restricted: Restricted, connection: Any, other: Any, store: PostgresStores
) -> None:
    await register(store, "to-blame", "w1")
    await store.enqueue(NewTask("q", max_attempts=2))
    (old,) = await store.claim("to-blame", ("q",))
    await store.fail("to-blame", old.task_id, old.token, "it broke", retry=False)
    # Only the control plane refunds attempts. Here the worker's role does, because a policy stops no owner.
    await connection.execute("grant execute on function windlass_internal.refund_attempts to windlass_worker")
    acquit = "select windlass_internal.refund_attempts('to-blame', '-infinity', false)"
    async with stopped_before_it_locks(restricted, connection, other, acquit):
        await store.retry_task(old.task_id)
        (new,) = await store.claim("w1", ("q",))
    turn = await store.finish_and_claim("w1", [Finished(new.task_id, new.token, None)], (), 0)
    assert turn.lost == []


async def test_a_role_taken_on_for_one_call_is_enough_as_for_supabase_rpc(
    restricted: Restricted, connection: Any
) -> None:
    """PostgREST logs in as a user with no rights of its own and takes on the role of each request."""
    await connection.execute("create role api nologin in role windlass_producer, windlass_worker")
    await connection.execute("create role authenticator login noinherit in role api")
    try:
        async with connected(restricted("authenticator")) as rpc:
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await rpc.execute("select windlass.enqueue('q')")
            async with rpc.transaction():
                await rpc.execute("set local role api")
                call = "select windlass.enqueue(p_queue => 'q', p_payload => '1'::json::jsonb)"
                task_id = await rpc.fetchval(call)
                await rpc.execute("select windlass.register_worker(p_worker_id => 'w', p_queues => '{q}')")
                claim = await rpc.fetchrow("select * from windlass.claim_task(p_worker_id => 'w', p_queues => '{q}')")
                assert claim["task_id"] == task_id
                finish = "select windlass.complete_task(p_worker_id => 'w', p_task_id => $1, p_token => $2)"
                assert await rpc.fetchval(finish, task_id, claim["token"])
    finally:
        await connection.execute("drop role authenticator, api")


async def test_dead_letters_that_somebody_has_locked_are_retried_when_they_are_free(
    store: PostgresStores, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windlass.cli.tasks.PAGE", 1)
    await register(store, "w1")
    ids = [await store.enqueue(NewTask("q", max_attempts=1)) for _ in range(3)]
    for claim in await store.claim("w1", ("q",), 3):
        await store.fail("w1", claim.task_id, claim.token, "it broke")
    retry_failed = store.retry_failed
    async with connected(dsn) as person:
        holding = person.transaction()
        await holding.start()
        await person.execute("select from windlass.tasks where id = $1 for update", ids[0])
        is_held = True

        async def retried(*arguments: Any, **options: Any) -> Any:
            nonlocal is_held
            found = await retry_failed(*arguments, **options)
            if is_held and found.ids == []:
                await holding.rollback()
                is_held = False
            return found

        monkeypatch.setattr(store, "retry_failed", retried)
        assert list((await retry_failed_tasks(store, "q")).task_ids) == ids
