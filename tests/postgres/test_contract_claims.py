"""Every public function that names a claim, called in plain SQL with an invalid one: no row changes."""

import json
import time
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from support.queue_sql import register
from support.stores import PostgresStores

CLAIM = "select task_id, token from windlass.claim_task($1, array['q'])"
# Each returns true if the claim was accepted.
CALLS = {
    "complete_task": "select windlass.complete_task($1, $2, $3, '1')",
    "fail_task": "select windlass.fail_task($1, $2, $3, 'it broke') is not null",
    "release_task": "select windlass.release_task($1, $2, $3, 'given back')",
    "finish_and_claim": "select not coalesce(bool_or(is_lost), false)"
    " from windlass.finish_and_claim($1, array[$2::bigint], array[$3::uuid], array['1'::jsonb], '{}', 0)",
    "heartbeat": "select $3::uuid <> all (lost) from windlass.heartbeat($1,"
    " jsonb_build_array(jsonb_build_object('task_id', $2::bigint, 'token', $3::uuid, 'progress', 0.5)))",
}
INVALID = ["wrong token", "stale token", "claim of another worker", "repeated by another worker", "finished task"]


@pytest.mark.parametrize("invalid", INVALID)
@pytest.mark.parametrize("call", CALLS)
async def test_invalid_claim_is_refused(connection: Any, store: PostgresStores, call: str, invalid: str) -> None:
    await register(store, "w1", "w2")
    await connection.execute("select windlass.enqueue('q')")
    task_id, token = await connection.fetchrow(CLAIM, "w1")
    worker_id = "w1"
    match invalid:
        case "wrong token":
            token = uuid4()
        case "stale token":
            assert await connection.fetchval(CALLS["release_task"], "w1", task_id, token)
            assert (await connection.fetchrow(CLAIM, "w1"))["task_id"] == task_id
        case "claim of another worker":
            worker_id = "w2"
        case "repeated by another worker":
            assert await connection.fetchval(CALLS["release_task"], "w1", task_id, token)
            assert (await connection.fetchrow(CLAIM, "w2"))["task_id"] == task_id
        case "finished task":
            ends = "fail_task" if call in ("complete_task", "finish_and_claim") else "complete_task"
            assert await connection.fetchval(CALLS[ends], "w1", task_id, token)
    before = await connection.fetchrow("select * from windlass.tasks where id = $1", task_id)
    assert not await connection.fetchval(CALLS[call], worker_id, task_id, token)
    assert await connection.fetchrow("select * from windlass.tasks where id = $1", task_id) == before


@pytest.mark.parametrize("call", CALLS)
async def test_valid_claim_is_accepted(connection: Any, store: PostgresStores, call: str) -> None:
    await register(store, "w1")
    await connection.execute("select windlass.enqueue('q')")
    task_id, token = await connection.fetchrow(CLAIM, "w1")
    before = await connection.fetchrow("select * from windlass.tasks where id = $1", task_id)
    assert await connection.fetchval(CALLS[call], "w1", task_id, token)
    assert await connection.fetchrow("select * from windlass.tasks where id = $1", task_id) != before


async def test_thirty_thousand_made_up_claims_are_an_error_at_once(connection: Any, store: PostgresStores) -> None:
    await register(store, "w1")
    count = 30_000
    ids, tokens = list(range(count)), [uuid4()] * count
    claims = json.dumps([{"task_id": 1, "token": str(tokens[0])}] * count)
    begun = time.process_time(), time.monotonic()
    with pytest.raises(asyncpg.ProgramLimitExceededError, match="at most 1000 results are accepted"):
        await connection.fetch(
            "select windlass.finish_and_claim('w1', $1, $2, $3, '{q}', 1)", ids, tokens, [None] * count
        )
    with pytest.raises(asyncpg.ProgramLimitExceededError, match="names at most 10000 claims"):
        await connection.fetch("select windlass.heartbeat('w1', $1)", claims)
    # The old code took minutes for this.
    assert time.monotonic() - begun[1] < 60
    assert await connection.fetchval("select count(*) from windlass.events where code = 'LATE_RESULT'") == 0


async def test_arrays_of_different_length_are_refused(connection: Any, store: PostgresStores) -> None:
    await register(store, "w1")
    with pytest.raises(asyncpg.InvalidParameterValueError, match="the arrays differ in length"):
        await connection.fetch("select windlass.finish_and_claim('w1', '{1}', '{}', '{}', '{q}', 1)")
