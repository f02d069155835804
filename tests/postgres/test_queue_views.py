"""The documented views: their columns, and their values for a small fleet."""

import json
from typing import Any

import pytest

from support.queue_sql import register
from support.stores import PostgresStores
from windlass.model.task import Claim, Finished, NewTask
from windlass.model.worker import HeldClaim, Registration

VIEWS = {
    "queue_depth": "queue queued scheduled retrying running oldest_queued_age_s",
    "orchestrator_status": (
        "at queued_tasks running_tasks delayed_tasks oldest_queued_age_s completed_last_hour failed_last_hour"
        " spawning_workers active_workers terminating_workers error_workers total_workers stale_workers"
    ),
    "worker_counts": "fleet spawning active terminating error terminated terminated_last_hour",
    "terminations": "worker_id fleet slot created_at activated_at terminated_at lifetime_s code reason",
    "processing_rate": "queue minute completed failed",
    "active_workers_health": (
        "worker_id fleet slot status paused created_at last_heartbeat heartbeat_age_s is_stale vram_total_mb"
        " vram_used_mb vram_used_percent vram_age_s running_tasks oldest_task_id oldest_task_age_s"
    ),
    "boot_phases": (
        "worker_id fleet provider place status code boot_step requested_at running_at reachable_at joined_at"
        " first_claimed_at running_s reachable_s joined_s first_claim_s"
    ),
    "boot_times": "fleet phase count p50_s p95_s p99_s",
    "machine_hosts": "fleet place host machines lost failed_checks last_used_at",
    "worker_performance": (
        "worker_id fleet status completed_tasks failed_attempts success_percent duration_p50_s duration_mean_s"
        " late_results uptime_s"
    ),
    "recent_errors": "id at code reason fleet worker_id task_id detail",
    "cost_estimates": "worker_id fleet instance_type currency price_micros_per_hour runtime_s cost_micros",
    "daily_costs": "day fleet currency task_micros boot_micros idle_micros tail_micros total_micros",
    "task_costs": "task_id queue currency cost_micros",
    # The columns of the original supervisor's health table.
    "health": "component last_seen status pid current_job details_json restart_count last_restart created_at",
}


async def test_views_have_documented_columns(connection: Any) -> None:
    for view, columns in VIEWS.items():
        statement = await connection.prepare(f"select * from windlass.{view}")  # noqa: S608
        assert [attribute.name for attribute in statement.get_attributes()] == columns.split()


async def test_terminated_workers_are_counted_with_their_reasons(connection: Any, clock: Any) -> None:
    await connection.execute("insert into windlass.fleets (name) values ('gpus')")
    await connection.execute("insert into windlass.slots (fleet, slot) select 'gpus', generate_series(0, 100)")
    await connection.execute(
        """
        insert into windlass.workers
          (id, fleet, slot, status, instance_type, created_at, activated_at, terminated_at, code, reason)
        select 'w' || n, 'gpus', n, case when n = 0 then 'active' else 'terminated' end, 'H200',
          $1::timestamptz - interval '2 hours', $1::timestamptz - interval '2 hours' + n * interval '1 s',
          case when n > 0 then $1::timestamptz - n * interval '1 s' end,
          case when n > 0 then 'IDLE' end, case when n > 0 then 'idle 31 s' end
        from generate_series(0, 100) as n
        """,
        clock(),
    )
    (counts,) = await rows_of(connection, clock, "worker_counts")
    assert (counts["active"], counts["terminated"], counts["terminated_last_hour"]) == (1, 100, 100)
    newest, *_ = await rows_of(connection, clock, "terminations", "terminated_at desc")
    assert (newest["worker_id"], newest["code"], newest["reason"], float(newest["lifetime_s"])) == (
        *("w1", "IDLE", "idle 31 s"),
        7199.0,
    )


async def test_processing_rate_counts_tasks_per_queue_and_minute(connection: Any, clock: Any) -> None:
    await connection.execute(
        """
        insert into windlass.tasks (queue, status, finished_at)
        select case when n % 2 = 0 then 'a' else 'b' end, case when n < 3 then 'failed' else 'complete' end,
          date_trunc('minute', $1::timestamptz) - (n / 4) * interval '1 minute'
        from generate_series(0, 7) as n
        """,
        clock(),
    )
    rows = await rows_of(connection, clock, "processing_rate", "queue, minute desc")
    assert [(row["queue"], row["completed"], row["failed"]) for row in rows] == [
        ("a", 0, 2),
        ("a", 2, 0),
        ("b", 1, 1),
        ("b", 2, 0),
    ]


async def rows_of(connection: Any, clock: Any, view: str, order: str = "1") -> list[dict[str, Any]]:
    await connection.execute("select set_config('windlass.now', $1, false)", clock().isoformat())
    return [dict(row) for row in await connection.fetch(f"select * from windlass.{view} order by {order}")]  # noqa: S608


@pytest.fixture
async def claims(each_dsn: str, connection: Any, clock: Any) -> list[Claim]:
    """w1 completed one task in 10 s, failed one and runs two; one is queued. w2 has sent no heartbeat for 105 s."""
    await connection.execute("set windlass.now = '2030-01-01T00:00:00Z'")
    await connection.execute("insert into windlass.fleets (name, queues) values ('gpus', '{q}')")
    await connection.execute("insert into windlass.slots (fleet, slot, restart_count) values ('gpus', 0, 2)")
    await connection.execute(
        "insert into windlass.workers (id, fleet, slot, status, queues, concurrency, price_micros_per_hour, currency,"
        " instance_type) values ('w1', 'gpus', 0, 'spawning', '{q}', 2, 3600000, 'EUR', 'H200')"
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
        await store.fail("w1", failed.task_id, failed.token, "failed", jitter=0.0)
        clock.advance(90)
        metadata = {"pid": 42, "vram_total_mb": 1000, "vram_used_mb": 250}
        await store.heartbeat("w1", [HeldClaim(claim.task_id, claim.token) for claim in held], metadata)
        clock.advance(5)
    return [done, failed, *held]


async def test_orchestrator_status_counts_tasks_and_workers(connection: Any, clock: Any, claims: list[Claim]) -> None:
    (row,) = await rows_of(connection, clock, "orchestrator_status")
    assert (row["queued_tasks"], row["running_tasks"], row["delayed_tasks"]) == (1, 2, 1)
    assert (row["completed_last_hour"], row["failed_last_hour"], row["oldest_queued_age_s"]) == (1, 0, 105)
    assert (row["active_workers"], row["total_workers"], row["stale_workers"], row["error_workers"]) == (2, 2, 1, 0)


async def test_active_workers_health_shows_heartbeats_and_tasks(
    connection: Any, clock: Any, claims: list[Claim]
) -> None:
    one, two = await rows_of(connection, clock, "active_workers_health")
    assert (one["worker_id"], one["slot"], one["heartbeat_age_s"], one["is_stale"]) == ("w1", 0, 5, False)
    assert (one["vram_used_percent"], one["vram_age_s"]) == (25, 5)
    assert (one["running_tasks"], one["oldest_task_id"], one["oldest_task_age_s"]) == (2, claims[2].task_id, 105)
    assert (two["worker_id"], two["is_stale"], two["running_tasks"]) == ("w2", True, 0)


async def test_worker_performance_counts_attempt_outcomes(connection: Any, clock: Any, claims: list[Claim]) -> None:
    one, two = await rows_of(connection, clock, "worker_performance")
    assert (one["completed_tasks"], one["failed_attempts"], one["success_percent"]) == (1, 1, 50)
    assert (one["duration_p50_s"], one["duration_mean_s"], one["uptime_s"]) == (10, 10, 105)
    assert (two["completed_tasks"], two["failed_attempts"], two["success_percent"]) == (0, 0, None)


async def test_views_show_queue_depth_errors_and_costs(connection: Any, clock: Any, claims: list[Claim]) -> None:
    (depth,) = await rows_of(connection, clock, "queue_depth")
    assert (depth["queued"], depth["scheduled"], depth["retrying"], depth["running"]) == (1, 0, 1, 2)
    (error,) = await rows_of(connection, clock, "recent_errors")
    assert (error["code"], error["worker_id"], error["task_id"]) == ("TASK_ERROR", "w1", claims[1].task_id)
    (cost,) = await rows_of(connection, clock, "cost_estimates")
    assert (cost["runtime_s"], cost["cost_micros"], cost["currency"]) == (105, 105_000, "EUR")


async def test_health_view_has_values_of_the_original_health_table(
    connection: Any, clock: Any, claims: list[Claim]
) -> None:
    start = int(clock().timestamp()) - 105
    healthy, crashed = await rows_of(connection, clock, "health")
    assert {**healthy, "details_json": json.loads(healthy["details_json"])} == {
        "component": "worker:q:0",
        "last_seen": start + 100,
        "status": "healthy",
        "pid": 42,
        "current_job": claims[2].task_id,
        "details_json": {"queue_type": "q", "batch_size": 2, "paused": False, "error_message": None},
        "restart_count": 2,
        "last_restart": None,
        "created_at": start,
    }
    assert (crashed["component"], crashed["status"], crashed["last_seen"]) == ("worker:q:w2", "crashed", start)


async def test_health_view_uses_every_status_of_the_original(connection: Any, clock: Any, each_dsn: str) -> None:
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


async def test_health_view_component_names_are_unique(connection: Any, clock: Any) -> None:
    await connection.execute(
        "insert into windlass.fleets (name, queues) values ('cheap', '{q}'), ('costly', '{q,r}'), ('other', '{r}')"
    )
    await connection.execute(
        "insert into windlass.slots (fleet, slot, status) values"
        " ('cheap', 0, 'ok'), ('costly', 0, 'ok'), ('costly', 1, 'failed'), ('cheap', 1, 'failed'), ('other', 0, 'ok')"
    )
    await connection.execute(
        "insert into windlass.workers (id, fleet, slot, status, queues) values"
        " ('a', 'cheap', 0, 'spawning', '{q}'), ('b', 'costly', 0, 'spawning', '{q,r}'),"
        " ('c', 'other', 0, 'spawning', '{r}')"
    )
    names = [row["component"] for row in await rows_of(connection, clock, "health")]
    assert sorted(names) == [
        "worker:q@cheap:0", "worker:q@cheap:1", "worker:q@costly:0", "worker:q@costly:1", "worker:r:0",
    ]  # fmt: skip
    # A fleet without live workers and failed slots no longer makes names ambiguous, although its row remains.
    await connection.execute("update windlass.workers set status = 'terminated' where id = 'a'")
    left = [row["component"] for row in await rows_of(connection, clock, "health")]
    assert sorted(left) == ["worker:q@cheap:1", "worker:q@costly:0", "worker:q@costly:1", "worker:r:0"]
    await connection.execute("update windlass.slots set status = 'ok' where fleet = 'cheap'")
    left = [row["component"] for row in await rows_of(connection, clock, "health")]
    assert sorted(left) == ["worker:q:0", "worker:q:1", "worker:r:0"]


async def test_health_view_shows_slots_without_their_worker(connection: Any, clock: Any) -> None:
    """A fleet has as many empty slots as min_workers lacks, for any reason.

    It has one while it is held or has tasks without a worker, and none after it was shut down.
    """
    planned = {"cadence": {"next_plan_in_s": 10}}
    await connection.execute(
        "insert into windlass.fleets (name, queues, min_workers, max_workers, planner_state) values"
        " ('new', '{a}', 2, 4, $1), ('crashing', '{b}', 2, 4, $1), ('held', '{c}', 0, 4, $2), ('ended', '{d}', 1, 1,"
        " $3), ('twin', '{a}', 1, 1, $1), ('full', '{e}', 1, 2, $1), ('broke', '{f}', 0, 4, $4),"
        " ('late', '{x,g}', 0, 4, $1), ('later', '{h}', 0, 4, $1), ('served', '{e}', 0, 4, $1)",
        json.dumps(planned),
        json.dumps({**planned, "hold": {"code": "FAILURE_RATE", "reason": "failure rate 5 of 5 in 5 min"}}),
        json.dumps({"cadence": {"next_plan_in_s": None}}),
        json.dumps({**planned, "hold": {"code": "BUDGET", "reason": "budget of 10 EUR a day is spent"}}),
    )
    await connection.execute(
        "select windlass.enqueue(q, '1'::jsonb) from unnest('{d,e,g}'::text[]) as q; "
        "select windlass.enqueue('h', '1'::jsonb, p_run_after => '2100-01-01Z')"
    )
    await connection.execute("update windlass.fleets set paused = true where name = 'twin'")
    await connection.execute(
        "insert into windlass.slots (fleet, slot, restart_count, last_restart_at, status, failed_reason) values"
        " ('crashing', 0, 6, windlass.now(), 'failed', 'six failures'), ('crashing', 1, 3, windlass.now(), 'ok', null),"
        " ('full', 1, 0, null, 'ok', null)"
    )
    await connection.execute(
        "insert into windlass.workers (id, fleet, slot, status, queues, failed_at, terminated_at, reason) values"
        " ('x', 'crashing', 1, 'terminated', '{b}', windlass.now(), windlass.now(), 'exit code 1'),"
        " ('y', 'full', 1, 'spawning', '{e}', null, null, null)"
    )
    rows = await rows_of(connection, clock, "health")
    assert [
        (row["component"], row["status"], row["restart_count"], json.loads(row["details_json"])["error_message"])
        for row in rows
    ] == [
        ("worker:a@new:0", "starting", 0, None),
        ("worker:a@new:1", "starting", 0, None),
        ("worker:a@twin:0", "crashed", 0, "fleet is paused"),
        ("worker:b:0", "failed", 6, "six failures"),
        ("worker:b:1", "crashed", 3, "exit code 1"),
        ("worker:b:2", "starting", 0, None),
        ("worker:c:0", "crashed", 0, "hold: failure rate 5 of 5 in 5 min"),
        ("worker:e:1", "starting", 0, None),
        ("worker:f:0", "crashed", 0, "hold: budget of 10 EUR a day is spent"),
        ("worker:x:0", "starting", 0, None),
    ]
    assert all(row["last_seen"] is not None for row in rows)


async def test_machine_booting_longer_than_its_lease_is_starting(connection: Any, clock: Any) -> None:
    await connection.execute("insert into windlass.fleets (name, queues) values ('cpus', '{q}')")
    await connection.execute("insert into windlass.slots (fleet, slot) values ('cpus', 0)")
    await connection.execute(
        "insert into windlass.workers (id, fleet, slot, status, queues, lease_s, created_at)"
        " values ('a', 'cpus', 0, 'spawning', '{q}', 30, now() - interval '1 hour')"
    )
    (row,) = await rows_of(connection, clock, "health")
    assert row["status"] == "starting"


async def test_boot_times_are_percentiles_of_each_phase(connection: Any) -> None:
    await connection.execute("insert into windlass.fleets (name) values ('gpu')")
    await connection.execute("insert into windlass.slots (fleet, slot) values ('gpu', 0)")
    await connection.execute(
        """
        insert into windlass.workers (
          id, fleet, slot, status, created_at, running_at, reachable_at, joined_at, first_claimed_at, terminated_at)
        select 'w' || n, 'gpu', 0, 'terminated', b.at, b.at + n * interval '1 second', b.at + n * interval '2 seconds',
          b.at + n * interval '3 seconds', null, b.at + interval '1 hour'
        from generate_series(1, 100) as n
        cross join lateral (select timestamptz '2030-01-01T00:00:00Z' + n * interval '1 hour' as at) as b
        """
    )
    rows = {row["phase"]: row for row in await connection.fetch("select * from windlass.boot_times")}
    assert set(rows) == {"running", "reachable", "joined"}, "no worker has claimed a task"
    assert [rows["running"][name] for name in ("count", "p50_s", "p95_s", "p99_s")] == [
        100, 50.5, pytest.approx(95.05), pytest.approx(99.01),
    ]  # fmt: skip
    assert rows["joined"]["p50_s"] == pytest.approx(151.5)
    (phase,) = await connection.fetch("select * from windlass.boot_phases where worker_id = 'w7'")
    assert (float(phase["running_s"]), float(phase["joined_s"]), phase["first_claim_s"]) == (7.0, 21.0, None)
