"""A client and a handler with a codec: the database holds no plain text. Uses the codec of examples/encrypted.py."""

import asyncio
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from windlass.client import Client
from windlass.model.codec import CodecError
from windlass.model.task import Finished, new_task
from windlass.model.worker import Registration
from windlass.store.connection import connected
from windlass.worker.attempt import run_handler
from windlass.worker.executor import AttemptSuccess
from windlass.worker.handler import RunningTask

EXAMPLE = Path(__file__).parents[2] / "examples" / "encrypted.py"
TEXT = "for your eyes only"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("APP_PAYLOAD_KEY", "5a" * 32)
    spec = importlib.util.spec_from_file_location("encrypted_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_server_never_has_the_plain_text(dsn: str, example: Any) -> None:
    from support.stores import PostgresStores

    async with Client(dsn, codec=example.codec) as client, Client(dsn) as other, PostgresStores(dsn) as store:
        first = await client.enqueue("letters", {"text": TEXT})
        assert await client.enqueue_many([new_task("letters", {"text": TEXT})]) == 1
        await store.register(Registration("w", ("letters",)))
        claims = await store.claim("w", ["letters"], 2)
        for claim in claims:
            assert TEXT not in claim.payload
            payload = json.loads(claim.payload)
            task = RunningTask(claim.task_id, claim.queue, payload, 1, 3, str(claim.token), lambda *_: None)
            outcome = await asyncio.to_thread(run_handler, example.count_words, task, 10_000, asyncio.run)
            assert isinstance(outcome, AttemptSuccess), outcome
            await store.finish_and_claim("w", [Finished(claim.task_id, claim.token, outcome.result)], [], 0)
        assert await client.result(first, timeout_s=30) == {"words": 4}
        read = await client.task(first)
        assert read is not None
        assert (read.payload, read.result) == ({"text": TEXT}, {"words": 4})
        # Without the codec the sealed value is returned as it is.
        assert "words" not in json.dumps(await other.result(first, timeout_s=30))
        # A result that was moved to another task is noticed.
        async with connected(dsn, "moving a result") as connection:
            dump = await connection.fetchval("select string_agg(t::text, ' ') from windlass.tasks t")
            await connection.execute(
                "update windlass.tasks set result = (select result from windlass.tasks where id <> $1) where id = $1",
                first,
            )
        assert TEXT not in dump
        with pytest.raises(CodecError, match="cannot be decrypted"):
            await client.result(first, timeout_s=30)
