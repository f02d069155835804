"""The Python API: what a producer writes, async and not, with a real worker at the other end."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import asyncpg
import pytest

import windlass
from support.command_line import CommandLine
from windlass import Client, NewTask, SyncClient, TaskFailed, TaskStatus, WindlassError, new_task
from windlass.model.errors import BadInput, DatabaseUnavailable

LIMIT_S = 30.0
EXAMPLES = Path(__file__).parents[2] / "examples"
HANDLERS = """
from windlass import DoNotRetry, RunningTask

def double(task: RunningTask) -> int:
    if task.payload is None:
        raise DoNotRetry("there is nothing to double")
    return 2 * task.payload
"""


@pytest.fixture(autouse=True)
def plain_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATABASE_URL", raising=False)


@pytest.fixture
def worker(tmp_path: Path, dsn: str) -> Iterator[None]:
    (tmp_path / "app.py").write_text(HANDLERS)
    program = CommandLine(tmp_path, {"DATABASE_URL": dsn})
    with program.start("worker", "-q", "numbers", "--handler", "app:double", stderr=subprocess.DEVNULL) as process:
        yield
        process.terminate()


@pytest.mark.usefixtures("worker")
async def test_a_result_comes_back(dsn: str) -> None:
    async with Client(dsn) as client:
        task_id = await client.enqueue("numbers", 21)
        assert await client.result(task_id, timeout_s=LIMIT_S) == 42
        task = await client.task(task_id)
        assert task is not None
        assert (task.status, task.result) == (TaskStatus.COMPLETE, "42")


@pytest.mark.usefixtures("worker")
def test_a_result_comes_back_without_async(dsn: str) -> None:
    with SyncClient(dsn) as client:
        task_id = client.enqueue("numbers", 21)
        assert client.result(task_id, timeout_s=LIMIT_S) == 42


@pytest.mark.usefixtures("worker")
async def test_waiting_for_a_task_that_fails_raises_what_happened(dsn: str) -> None:
    async with Client(dsn) as client:
        task_id = await client.enqueue("numbers", None)
        with pytest.raises(TaskFailed, match="there is nothing to double") as caught:
            await client.result(task_id, timeout_s=LIMIT_S)
        assert (caught.value.task.id, caught.value.task.error_code) == (task_id, "DO_NOT_RETRY")


async def test_a_result_that_python_does_not_read_is_named_and_its_text_is_to_be_had(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    async with Client(dsn) as client:
        for result in ("[" * 3_000 + "]" * 3_000, "9" * 5_000):
            task_id = await client.enqueue("q")
            await connection.execute(
                "update windlass.tasks set status = 'complete', finished_at = now(), result = $2::text::jsonb"
                " where id = $1",
                task_id,
                result,
            )
            with pytest.raises(WindlassError, match=f"the result of task {task_id} is JSON that Python does not read"):
                await client.result(task_id, timeout_s=LIMIT_S)
            task = await client.task(task_id)
            assert task is not None
            assert task.result == result
    await connection.close()


async def test_waiting_ends_with_its_time(dsn: str) -> None:
    async with Client(dsn) as client:
        task_id = await client.enqueue("nobody-serves-this")
        says = f"task {task_id} is still queued after 0.05 s: `windlass explain {task_id}` says why."
        with pytest.raises(TimeoutError, match=re.escape(says)):
            await client.result(task_id, timeout_s=0.05)
        with pytest.raises(BadInput, match="there is no task 404"):
            await client.result(404)


async def test_a_task_is_part_of_the_callers_own_transaction(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    async with Client(dsn) as client:
        undone = connection.transaction()
        await undone.start()
        forgotten = await client.enqueue("q", {"order": 1}, connection=connection)
        assert await client.task(forgotten) is None  # not for others, before it is committed
        await undone.rollback()
        assert await client.task(forgotten) is None
        async with connection.transaction():
            kept = await client.enqueue("q", {"order": 2}, connection=connection)
        task = await client.task(kept)
        assert task is not None
        assert json.loads(task.payload) == {"order": 2}
    await connection.close()


async def test_a_json_codec_on_the_callers_connection_does_not_encode_twice(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    await connection.set_type_codec("jsonb", encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
    await Client(dsn).enqueue("q", {"a": [1, "x"]}, connection=connection)
    assert await connection.fetchval("select payload from windlass.tasks") == {"a": [1, "x"]}
    await connection.close()


async def test_a_key_makes_enqueueing_again_safe(dsn: str) -> None:
    async with Client(dsn) as client:
        first = await client.enqueue("q", 1, unique_key="order-7")
        assert await client.enqueue("q", 2, unique_key="order-7") == first
        assert await client.enqueue("another", 2, unique_key="order-7") != first


async def test_many_are_added_at_once_or_not_at_all(dsn: str) -> None:
    async with Client(dsn) as client:
        assert await client.enqueue_many(new_task("q", n) for n in range(1_000)) == 1_000

        async def broken() -> AsyncIterator[NewTask]:
            yield new_task("q", 1)
            raise LookupError

        with pytest.raises(LookupError):
            await client.enqueue_many(broken())
        assert await client.task(1_001) is None


async def test_tasks_are_cancelled_and_retried(dsn: str) -> None:
    async with Client(dsn) as client:
        task_id = await client.enqueue("q")
        assert not await client.retry(task_id)
        with pytest.raises(BadInput, match="reason is empty"):
            await client.cancel(task_id, " ")
        assert await client.cancel(task_id)
        assert not await client.cancel(task_id)
        with pytest.raises(TaskFailed, match=r"CANCELLED\): cancelled by its producer"):
            await client.result(task_id)
        assert await client.retry(task_id)
        task = await client.task(task_id)
        assert task is not None
        assert task.status is TaskStatus.QUEUED


def test_one_client_serves_many_threads(dsn: str) -> None:
    with SyncClient(dsn) as client, ThreadPoolExecutor(8) as threads:
        ids = list(threads.map(lambda n: client.enqueue("q", n), range(100)))
        assert len(set(ids)) == 100
        assert client.enqueue_many([new_task("q")]) == 1
        assert client.cancel(ids[0])
        assert client.retry(ids[0])
        task = client.task(ids[0])
        assert task is not None
        assert task.status is TaskStatus.QUEUED


async def test_a_client_that_is_not_open_says_how_to_open_it(dsn: str) -> None:
    with pytest.raises(WindlassError, match="inside `async with"):
        await Client(dsn).enqueue("q")
    closed = SyncClient(dsn)
    with pytest.raises(WindlassError, match="inside `with"):
        closed.enqueue("q")
    with closed:
        pass
    with pytest.raises(WindlassError, match="inside `with"):
        closed.enqueue("q")


def test_a_client_that_cannot_open_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    with pytest.raises(DatabaseUnavailable, match=r"127\.0\.0\.1:1"), SyncClient("postgresql://u:pw@127.0.0.1:1/d"):
        pass
    assert threading.active_count() == before


async def test_what_cannot_be_a_task_is_refused_before_the_database_is_asked(dsn: str) -> None:
    with pytest.raises(BadInput, match="cannot be written as JSON"):
        await Client(dsn).enqueue("q", {1, 2})


@pytest.mark.parametrize("name", windlass.__all__)
def test_everything_promised_can_be_imported(name: str) -> None:
    assert getattr(windlass, name) is not None


def test_the_package_itself_loads_nothing() -> None:
    program = "import sys, windlass; print(*(set(sys.modules) & {'asyncpg', 'pydantic', 'asyncio', 'typer'}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_producer_with_an_address_loads_neither_worker_nor_embedded_server() -> None:
    unneeded = {"windlass.worker.lifecycle", "windlass.store.embedded", "structlog", "rich", "typer", "psutil"}
    program = f"import sys; from windlass import Client; Client; print(*(set(sys.modules) & {unneeded}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("name", ["hello", "hello_async"])
def test_the_example_does_what_it_says(dsn: str, name: str) -> None:
    program = CommandLine(EXAMPLES, {"DATABASE_URL": dsn})
    with program.start("worker", "-q", "greetings", "--handler", f"{name}:greet", stderr=subprocess.DEVNULL) as process:
        done = subprocess.run(
            [sys.executable, f"{name}.py", "Ada"],
            cwd=EXAMPLES,
            env=program.environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        process.terminate()
    assert (done.stdout, done.stderr) == ("Hello, Ada!\n", "")


async def test_the_limit_on_payloads_holds_for_many_as_for_one(dsn: str, tmp_path: Path) -> None:
    (tmp_path / "windlass.toml").write_text("max_payload_bytes = 10")
    fits, too_large = new_task("numbers", "x" * 8), new_task("numbers", "\u00fc" * 8)

    async def stream() -> AsyncIterator[NewTask]:
        for task in (fits, too_large):
            yield task

    async with Client(dsn) as client:
        assert await client.enqueue_many([fits]) == 1
        for many in ([fits, too_large], stream()):
            with pytest.raises(BadInput, match="the payload has 18 bytes and at most 10 are accepted"):
                await client.enqueue_many(many)
        with pytest.raises(BadInput, match="the payload has 18 bytes"):
            await client.enqueue("numbers", "\u00fc" * 8)
    connection = await asyncpg.connect(dsn)
    assert await connection.fetchval("select count(*) from windlass.tasks") == 1
    await connection.close()
