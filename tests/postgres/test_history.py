"""The history that simulations read: complete and exact while tasks and workers are deleted, compact, and bounded."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from support.queue_sql import RoleDsn, connected
from support.stores import PostgresStores
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.model.snapshot import QueueView
from windlass.model.task import TaskStatus

BEGIN = datetime(2025, 1, 1, tzinfo=UTC)
# Task n of $1 arrives at second 7 n, starts 1 s later and runs n % 60 s. A tenth fails; a third is in queue r.
FINISHED = """
insert into windlass.tasks (queue, status, created_at, started_at, finished_at)
select case n % 3 when 0 then 'r' else 'q' end, case n % 10 when 0 then 'failed' else 'complete' end,
  timestamptz '2025-01-01 00:00Z' + make_interval(secs => 7 * n),
  timestamptz '2025-01-01 00:00Z' + make_interval(secs => 7 * n + 1),
  timestamptz '2025-01-01 00:00Z' + make_interval(secs => 7 * n + 1 + n % 60)
from generate_series(1, $1) as n
"""
WORKER = """
insert into windlass.workers (id, fleet, slot, status, created_at, activated_at, terminated_at, failed_at, creation,
  price_micros_per_hour, currency, billing_unit_s)
values ($1, 'gpu', $2, 'terminated', $3, $4, $5, $6, $7, 500000, 'EUR', 3600)
"""


async def seconds_and_durations(store: PostgresStores, *queues: str, limit: int = 100_000) -> list[tuple[float, float]]:
    found = await store.task_history(queues, BEGIN, BEGIN + timedelta(days=365), limit)
    return list(zip(found.arrivals_s, found.durations_s, strict=True))


async def test_deleted_tasks_stay_in_the_history_exactly_once(connection: Any, store: PostgresStores) -> None:
    await connection.execute(FINISHED, 3_000)
    expected = sorted((7.0 * n, float(n % 60)) for n in range(1, 3_001) if n % 3)
    assert await seconds_and_durations(store, "q") == expected
    # Retention in small rounds, a purge by a person, the owner's own statement: part after part.
    for _ in range(3):
        assert await connection.fetchval("select windlass.sweep(0, 1e9, 1e9, 1e9, 1e9, 1e9, 300)") == 300
        assert await seconds_and_durations(store, "q") == expected
    assert await store.purge("q", [TaskStatus.FAILED], 0) == 200
    assert await seconds_and_durations(store, "q") == expected
    await connection.execute("delete from windlass.tasks where id % 2 = 0")
    assert await seconds_and_durations(store, "q") == expected
    await connection.execute("delete from windlass.tasks")
    assert await seconds_and_durations(store, "q") == expected
    assert len(await seconds_and_durations(store, "q", "r")) == 3_000
    # Rows are filled up, not one per deleted batch.
    rows = await connection.fetch("select queue, tasks from windlass.task_history")
    assert sum(row["tasks"] for row in rows) == 3_000
    assert len(rows) <= 12
    assert all(row["tasks"] <= 1_000 for row in rows)


async def test_history_takes_arrival_of_the_last_attempt(connection: Any, store: PostgresStores) -> None:
    await connection.execute(
        "insert into windlass.tasks (queue, status, attempts, created_at, ready_at, started_at, finished_at) values"
        " ('q', 'complete', 2, $1, $2, $3, $4)",
        *(BEGIN + timedelta(seconds=second) for second in (0, 100, 130, 175.25)),
    )
    # Neither had an attempt, so neither has a duration.
    await connection.execute("insert into windlass.tasks (queue, created_at) values ('q', $1)", BEGIN)
    await connection.execute(
        "insert into windlass.tasks (queue, status, created_at, finished_at) values ('q', 'failed', $1, $1)", BEGIN
    )
    assert await seconds_and_durations(store, "q") == [(100.0, 45.25)]
    await connection.execute("delete from windlass.tasks")
    assert await seconds_and_durations(store, "q") == [(100.0, 45.25)]


async def test_history_is_cut_to_the_newest_tasks(connection: Any, store: PostgresStores) -> None:
    await connection.execute(FINISHED, 100)
    await connection.execute("delete from windlass.tasks where id % 2 = 0")
    found = await store.task_history(["q", "r"], BEGIN, BEGIN + timedelta(days=1), 30)
    assert list(found.arrivals_s) == [7.0 * n for n in range(71, 101)]
    assert found.is_cut
    assert set(found.queues) == {"q", "r"}


async def test_rolled_back_delete_leaves_no_history(connection: Any, store: PostgresStores) -> None:
    await connection.execute(FINISHED, 10)
    transaction = connection.transaction()
    await transaction.start()
    await connection.execute("delete from windlass.tasks")
    await transaction.rollback()
    assert await connection.fetchval("select count(*) from windlass.task_history") == 0
    assert len(await seconds_and_durations(store, "q", "r")) == 10


async def test_two_sessions_delete_at_the_same_time(
    connection: Any, second_connection: Any, store: PostgresStores
) -> None:
    await connection.execute(FINISHED, 200)
    await connection.execute("delete from windlass.tasks where id % 4 = 0")
    async with connection.transaction():
        await connection.execute("delete from windlass.tasks where id % 4 = 1")
        # Not blocked by the row that the first session is appending to.
        await second_connection.execute("set lock_timeout = '30s'")
        await second_connection.execute("delete from windlass.tasks where id % 4 = 2")
    assert len(await seconds_and_durations(store, "q", "r")) == 200


async def test_machines_stay_in_the_history_after_their_workers(connection: Any, store: PostgresStores) -> None:
    await connection.execute("insert into windlass.fleets (name) values ('gpu'), ('other')")
    await connection.execute("insert into windlass.slots (fleet, slot) select 'gpu', n from generate_series(0, 4) n")
    at = [BEGIN + timedelta(seconds=second) for second in (0, 90, 3600)]
    await connection.execute(WORKER, "served", 0, *at, None, "created")
    await connection.execute(WORKER, "crashed", 1, *at, at[2], "created")
    await connection.execute(WORKER, "refused", 2, at[1], None, at[1], at[1], "refused")
    await connection.execute(WORKER, "cancelled", 3, at[0] - timedelta(seconds=60), None, at[1], None, "created")
    await connection.execute(
        "update windlass.workers set code = 'START_CANCELLED', terminating_at = $1 where id = 'cancelled'", at[0]
    )
    before = await store.machine_history("gpu", BEGIN - timedelta(days=1), BEGIN + timedelta(days=1), 100)
    await connection.execute("delete from windlass.workers where id <> 'refused'")
    after = await store.machine_history("gpu", BEGIN - timedelta(days=1), BEGIN + timedelta(days=1), 100)
    key = lambda machine: (machine.requested_at, machine.is_crashed)  # noqa: E731
    assert sorted(before, key=key) == sorted(after, key=key)
    cancelled, served, crashed, refused = sorted(after, key=key)
    assert (cancelled.boot_s, cancelled.cancelled_s, cancelled.lived_s) == (None, 60.0, 150.0)
    assert served.cancelled_s is None
    assert (served.boot_s, served.lived_s, served.is_crashed, served.is_refused) == (90.0, 3600.0, False, False)
    assert (served.price_micros_per_hour, served.currency, served.billing_unit_s) == (500_000, "EUR", 3600)
    assert crashed.is_crashed
    assert refused.is_refused
    assert refused.boot_s is None
    assert await store.machine_history("other", BEGIN, BEGIN + timedelta(days=1), 100) == []


async def test_history_is_kept_for_its_own_retention(connection: Any, store: PostgresStores) -> None:
    """Tasks and workers are purged at once here, their history after 35 days."""
    await connection.execute("insert into windlass.fleets (name) values ('gpu')")
    await connection.execute("insert into windlass.slots (fleet, slot) values ('gpu', 0), ('gpu', 1)")
    now = await connection.fetchval("select windlass.now()")
    for number, days in enumerate((40, 30)):
        at = now - timedelta(days=days)
        await connection.execute(
            "insert into windlass.tasks (queue, status, created_at, started_at, finished_at)"
            " values ('q', 'complete', $1, $1, $1)",
            at,
        )
        await connection.execute("delete from windlass.tasks")
        # A row of its own for each: a full one is never appended to.
        await connection.execute("update windlass.task_history set tasks = 1000")
        await connection.execute(WORKER, f"w{number}", number, at, at, at, None, "created")
    await connection.execute("delete from windlass.workers")
    assert await store.sweep() == 2
    since = now - timedelta(days=60)
    assert len((await store.task_history(["q"], since, now, 100)).arrivals_s) == 1
    assert len(await store.machine_history("gpu", since, now, 100)) == 1
    assert await store.sweep() == 0


async def test_history_is_bounded_by_a_number_of_tasks(connection: Any, store: PostgresStores) -> None:
    await connection.execute(FINISHED, 6_000)
    await connection.execute("delete from windlass.tasks")
    deleted = await connection.fetchval("select windlass_internal.sweep_history(1e9, 2500, 100)")
    assert deleted > 0
    assert await connection.fetchval("select sum(tasks) from windlass.task_history") <= 2_500


async def test_a_million_tasks_take_at_most_14_mb(connection: Any) -> None:
    """Measured on 100,000 tasks with random arrivals and durations, which compress least."""
    await connection.execute(
        """
        insert into windlass.tasks (queue, status, created_at, started_at, finished_at)
        select 'q', 'complete', b.at, b.at, b.at + make_interval(secs => exp(random() * 8))
        from (
          select timestamptz '2025-01-01 00:00Z' + make_interval(secs => n * 6 + random() * 6) as at
          from generate_series(1, 100000) as n
        ) as b
        """
    )
    for _ in range(100):
        await connection.fetchval("select windlass.sweep(0, 0, 0, 0, 0, 0, 1000)")
    assert await connection.fetchval("select sum(tasks) from windlass.task_history") == 100_000
    size = await connection.fetchval("select pg_total_relation_size('windlass.task_history')")
    print(f"{size / 100_000:.1f} bytes per task")
    assert size <= 1_400_000


async def test_workers_read_no_history(connection: Any, role_dsn: RoleDsn) -> None:
    async with connected(role_dsn("hand")) as worker:
        for statement in (
            "select * from windlass.task_history",
            "select * from windlass_internal.read_task_history('{q}', now(), now(), 1)",
            "select windlass_internal.sweep_history(0, 0)",
        ):
            try:
                await worker.execute(statement)
            except Exception as error:
                assert "permission denied" in str(error)
            else:
                raise AssertionError(statement)


async def observed_queue(store: PostgresStores, *queues: str) -> QueueView:
    fleet = FleetConfig(queues=queues)
    seen = await store.observe(Candidate("ann", 60.0), "gpu", fleet)
    assert seen is not None
    return seen[1].queue


async def test_quiet_fleet_knows_the_durations_and_boots_of_deleted_rows(
    connection: Any, store: PostgresStores
) -> None:
    """Not as soon as 8 newer ones are known: the past is used for as long as it is all there is."""
    await connection.execute("insert into windlass.fleets (name) values ('gpu')")
    await connection.execute("insert into windlass.slots (fleet, slot) values ('gpu', 0)")
    begin = datetime.now(UTC) - timedelta(days=20)
    for number in range(3):
        at = begin + timedelta(minutes=number)
        await connection.execute(WORKER, f"w{number}", 0, at, at + timedelta(seconds=90 + number), at, None, "created")
    await connection.execute("delete from windlass.workers")
    await connection.execute(FINISHED, 3_000)
    await connection.execute("delete from windlass.tasks")
    assert (await observed_queue(store, "none")).durations_s == ()

    queue = await observed_queue(store, "q")
    # The newest 200 of queue q, 0 to 59 s each.
    assert len(queue.durations_s) == 200
    newest = [float(n % 60) for n in range(3_000, 0, -1) if n % 3][:200]
    assert list(queue.durations_s) == sorted(newest)
    assert queue.duration_mean_s == pytest.approx(sum(newest) / 200)
    assert queue.boots_s == (90.0, 91.0, 92.0)

    finished = (
        "insert into windlass.tasks (queue, status, created_at, started_at, finished_at)"
        " select 'q', 'complete', now(), now() - interval '500 s', now() from generate_series(1, $1)"
    )
    await connection.execute(finished, 7)
    queue = await observed_queue(store, "q")
    assert (len(queue.durations_s), queue.durations_s[-7:]) == (200, (500.0,) * 7)
    await connection.execute(finished, 1)
    queue = await observed_queue(store, "q")
    assert queue.durations_s == (500.0,) * 8
    assert queue.duration_mean_s == 500.0


async def test_quiet_queue_of_a_busy_fleet_knows_its_deleted_durations(connection: Any, store: PostgresStores) -> None:
    await connection.execute(FINISHED, 300)
    await connection.execute("delete from windlass.tasks where queue = 'r'")
    await connection.execute("insert into windlass.tasks (queue) values ('q'), ('r')")
    each = {queue.name: queue for queue in (await observed_queue(store, "q", "r")).each}
    assert {name: len(queue.durations_s) for name, queue in each.items()} == {"q": 100, "r": 100}
    assert each["r"].duration_mean_s == pytest.approx(sum(n % 60 for n in range(3, 301, 3)) / 100)


async def test_history_of_other_queues_costs_a_cycle_nothing(connection: Any) -> None:
    """Rows of task_history are read by index, at most two of each queue."""
    for number in range(40):
        await connection.execute(FINISHED, 3_000)
        await connection.execute("update windlass.tasks set queue = $1 where queue = 'r'", f"r{number}")
        await connection.execute("delete from windlass.tasks")
    await connection.execute("analyze windlass.task_history; set enable_seqscan = off")
    reads = (
        "select seq_scan, idx_tup_fetch from pg_stat_xact_user_tables"
        " where schemaname = 'windlass' and relname = 'task_history'"
    )
    async with connection.transaction():
        before = await connection.fetchrow(reads)
        found = await connection.fetch("select * from windlass_internal.remembered_durations('{r7,q,none}', 200)")
        after = await connection.fetchrow(reads)
    assert len(found) == 200
    assert after["seq_scan"] == before["seq_scan"]
    assert 0 < after["idx_tup_fetch"] - before["idx_tup_fetch"] <= 4
