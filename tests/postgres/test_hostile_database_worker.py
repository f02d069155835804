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
