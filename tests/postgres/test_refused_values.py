"""What callers read when the database refuses a value: our words, never its own."""

import re
from dataclasses import replace
from typing import Any

import asyncpg
import pytest

from support.api_fixture import API, RNG, ApiFixture, problem_of
from support.stores import PostgresStores
from windlass.model.auth import API_PREFIX, WORKER_PREFIX, Role, hash_of, new_token
from windlass.model.errors import BadInput
from windlass.model.task import NewTask
from windlass.model.worker import Registration

DATABASE_WORDS = re.compile(r"constraint|\$\d|int32|int64|violates|domain|relation|column|jsonb|numeric|duplicate key")


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        (NewTask("no name"), "a name must have at most 63 letters"),
        (NewTask("q", priority=2**31), "a number or time is out of range"),
        (NewTask("q", unique_key="k" * 201), "a unique key must have 1 to 200 characters"),
        (NewTask("q", max_attempts=0), "."),
        (NewTask("q", payload="{"), "a value is not valid JSON"),
        (NewTask("q", payload='"\\ud800"'), "."),
        (NewTask("q", payload="1" + "0" * 200_000), "out of range|cannot be stored|not valid JSON"),
    ],
)
async def test_refused_task_is_explained_in_our_words(dsn: str, task: NewTask, sentence: str) -> None:
    async with PostgresStores(dsn) as store:
        with pytest.raises(BadInput, match=sentence) as refused:
            await store.enqueue(task)
    assert DATABASE_WORDS.search(str(refused.value)) is None, refused.value


async def test_token_of_another_worker_is_refused_in_our_words(api: ApiFixture) -> None:
    token, api_token = new_token(WORKER_PREFIX, RNG), new_token(API_PREFIX, RNG)
    await api.store.create_token("machines", Role.WORKER, hash_of(api_token))
    machine = api.client("192.0.2.9", Authorization=f"Bearer {api_token}")

    async def register(worker_id: str, **more: Any) -> Any:
        registration = {"worker_id": worker_id, "queues": ["a"], "lease_s": 30.0, **more}
        return await machine.post("/internal/workers", json={"token": token, "registration": registration})

    assert (await register("one")).status_code == 200
    same_token = await register("two")
    assert problem_of(same_token) == (400, "BAD_INPUT")
    assert "this token is used by another worker already" in same_token.json()["detail"]
    out_of_range = await register("one", pid=2**40)
    assert out_of_range.status_code == 400
    assert DATABASE_WORDS.search(out_of_range.json()["detail"]) is None


async def test_own_mistake_is_a_server_error_without_details(api: ApiFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    enqueue = api.store.enqueue

    async def broken(task: NewTask) -> int:
        async with api.store.database.connection("enqueueing a task") as connection:
            await connection.execute("insert into windlass.slots (fleet, slot) values ('unknown', 0)")
        return await enqueue(task)

    monkeypatch.setattr(api.store, "enqueue", broken)
    client = await api.client_as(Role.PRODUCER)
    response = await client.post(f"{API}/tasks", json={"queue": "a"})
    assert problem_of(response) == (500, "DEFECT")
    assert DATABASE_WORDS.search(response.json()["detail"]) is None


async def test_sentences_of_our_functions_are_kept(dsn: str) -> None:
    async with PostgresStores(dsn) as store:
        with pytest.raises(BadInput, match=r"fleet nowhere not found"):
            await store.pause_fleet("nowhere", True)
        with pytest.raises(BadInput) as refused:
            await store.register(replace(Registration("w", ("q",)), lease_s=float("nan")))
    assert DATABASE_WORDS.search(str(refused.value)) is None, refused.value
    assert not isinstance(refused.value, asyncpg.PostgresError)
