"""A stolen database worker: values in its own calls that would hurt others. The schema bounds them."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from support.queue_sql import RoleDsn, connected

SECRET = "wld_" + "1" * 64
DAY_S = 86_400
Claiming = Callable[[], Awaitable[tuple[int, UUID]]]


@pytest.fixture
async def sql(role_dsn: RoleDsn, connection: Any) -> AsyncIterator[Any]:
    """The connection of worker `w1`, which has registered for queue q. The queue has a few tasks."""
    await connection.execute("select windlass.enqueue('q') from generate_series(1, 3)")
    async with connected(role_dsn("hand")) as sql:
        await sql.execute("select windlass.register_worker('w1', p_queues => '{q}', p_secret => $1)", SECRET)
        yield sql


@pytest.fixture
def claim(sql: Any) -> Claiming:
    async def claim() -> tuple[int, UUID]:
        row = await sql.fetchrow("select * from windlass.claim_task('w1', '{q}', $1)", SECRET)
        return row["task_id"], row["token"]

    return claim


@pytest.mark.parametrize("delay_s", [1e9, float("inf"), float("nan"), 1e300])
async def test_released_task_waits_a_day_at_most(sql: Any, claim: Claiming, connection: Any, delay_s: float) -> None:
    release = "select windlass.release_task('w1', $1, $2, 'not now', $3, $4)"
    task_id, token = await claim()
    assert await sql.fetchval(release, task_id, token, delay_s, SECRET)
    waits = "select extract(epoch from run_after - now())::float8 from windlass.tasks where id = $1"
    assert DAY_S - 600 < await connection.fetchval(waits, task_id) <= DAY_S


@pytest.mark.parametrize("jitter", [-1e9, -1e300, float("nan"), float("inf"), 5.0])
async def test_worker_does_not_choose_the_delay_of_a_retry(
    sql: Any, claim: Claiming, connection: Any, jitter: float
) -> None:
    fail = "select windlass.fail_task('w1', $1, $2, 'failed', p_jitter => $3, p_secret => $4)"
    task_id, token = await claim()
    assert await sql.fetchval(fail, task_id, token, jitter, SECRET) == "error"
    waits = "select extract(epoch from run_after - finished_at)::float8 from windlass.tasks where id = $1"
    assert 2.5 <= await connection.fetchval(waits, task_id) <= 5


async def test_result_is_limited(sql: Any, claim: Claiming, connection: Any) -> None:
    complete = "select windlass.complete_task('w1', $1, $2, to_jsonb(repeat('x', $3)), $4)"
    task_id, token = await claim()
    with pytest.raises(asyncpg.CheckViolationError, match="tasks_result_check"):
        await sql.fetchval(complete, task_id, token, 70_000_000, SECRET)
    assert await sql.fetchval(complete, task_id, token, 1_000_000, SECRET)


@pytest.mark.parametrize("worker_id", ["a\nb", "\x1b[2J", "", "w" * 201])
async def test_id_of_a_worker_has_no_control_characters(sql: Any, worker_id: str) -> None:
    with pytest.raises(asyncpg.InvalidParameterValueError, match="without control characters"):
        await sql.execute("select windlass.register_worker($1, p_queues => '{q}', p_secret => $2)", worker_id, SECRET)


@pytest.mark.parametrize("worker_id", ["nobody", "fleet-production-7", "\x1b[2Jevil", "w" * 200_000])
async def test_result_of_an_unknown_worker_leaves_no_trace(sql: Any, connection: Any, worker_id: str) -> None:
    before = await connection.fetchval("select count(*) from windlass.events")
    token = "gen_random_uuid()"
    assert not await sql.fetchval(f"select windlass.complete_task($1, 1, {token}, null, $2)", worker_id, SECRET)
    assert not await sql.fetchval(f"select windlass.fail_task($1, 1, {token}, 'e', p_secret => $2)", worker_id, SECRET)
    assert not await sql.fetchval(
        f"select windlass.release_task($1, 1, {token}, 'r', p_secret => $2)", worker_id, SECRET
    )
    finish = f"select count(*) from windlass.finish_and_claim($1, '{{1}}', array[{token}], '{{1}}', '{{q}}', 0, $2)"  # noqa: S608
    await sql.fetchval(finish, worker_id, SECRET)
    await sql.execute("select windlass.deregister_worker($1, 'bye', $2)", worker_id, SECRET)
    assert await connection.fetchval("select count(*) from windlass.events") == before


@pytest.mark.parametrize("setting", ["p_host", "p_version", "p_start_id"])
async def test_registration_has_no_control_characters(sql: Any, setting: str) -> None:
    with pytest.raises(asyncpg.InvalidParameterValueError, match="without control characters"):
        await sql.execute(
            f"select windlass.register_worker('w2', p_queues => '{{q}}', {setting} => $1, p_secret => $2)",
            "host\x1b[2J",
            SECRET,
        )


async def test_reasons_of_a_worker_have_no_control_characters(sql: Any, claim: Claiming, connection: Any) -> None:
    task_id, token = await claim()
    await sql.fetchval("select windlass.release_task('w1', $1, $2, E'not\x1b[2J now', 1, $3)", task_id, token, SECRET)
    task_id, token = await claim()
    with pytest.raises(asyncpg.CheckViolationError, match="error_code"):
        fail = "select windlass.fail_task('w1', $1, $2, 'e', E'CODE\x1b[2J', p_secret => $3)"
        await sql.fetchval(fail, task_id, token, SECRET)
    fail = "select windlass.fail_task('w1', $1, $2, E'first\x1b[2J line\n\tsecond', p_secret => $3)"
    await sql.fetchval(fail, task_id, token, SECRET)
    await sql.execute("select windlass.deregister_worker('w1', E'bye\x1b[2J', $1)", SECRET)
    reasons = [row["reason"] for row in await connection.fetch("select reason from windlass.events order by id")]
    reasons.append(await connection.fetchval("select reason from windlass.workers where id = 'w1'"))
    assert not any("\x1b" in reason for reason in reasons)
    assert reasons[-1] == "bye?[2J"


async def test_number_of_dropped_lines_cannot_overflow(sql: Any, connection: Any) -> None:
    chunk = '{"lines": ["x"], "dropped": 9223372036854775807}'
    for _ in range(2):
        await sql.execute("select windlass.append_logs('w1', gen_random_uuid(), $1, $2)", f"[{chunk}, {chunk}]", SECRET)
    assert await connection.fetchval("select dropped_lines from windlass.worker_log_totals") == 4_000_000_000


async def test_long_note_of_progress_is_cut(sql: Any, claim: Claiming, connection: Any) -> None:
    task_id, token = await claim()
    claims = f'[{{"task_id": {task_id}, "token": "{token}", "progress": 0.5, "note": "{"n" * 600}"}}]'
    await sql.execute("select from windlass.heartbeat('w1', $1, '{}', $2)", claims, SECRET)
    assert await connection.fetchval("select length(progress_note) from windlass.tasks where id = $1", task_id) == 500
