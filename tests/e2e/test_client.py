"""The Python client, async and sync, with a real worker."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from inspect import isclass, isfunction, signature
from pathlib import Path
from typing import Any, cast

import asyncpg
import pytest

import windlass
from support.command_line import CommandLine
from windlass import Client, NewTask, SyncClient, TaskFailed, TaskStatus, WindlassError, new_task
from windlass.model.errors import BadInput, DatabaseUnavailable

TIMEOUT_S = 30.0
EXAMPLES = Path(__file__).parents[2] / "examples"
HANDLERS = """
from windlass import DoNotRetry, RunningTask

def double(task: RunningTask) -> int:
    if task.payload is None:
        raise DoNotRetry("no payload")
    return 2 * task.payload
"""


@pytest.fixture(autouse=True)
def no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
async def test_result_is_returned(dsn: str) -> None:
    async with Client(dsn) as client:
        task_id = await client.enqueue("numbers", 21)
        assert await client.result(task_id, timeout_s=TIMEOUT_S) == 42
        task = await client.task(task_id)
        assert task is not None
        assert (task.status, task.result, task.payload, task.progress) == (TaskStatus.COMPLETE, 42, 21, 1.0)


@pytest.mark.usefixtures("worker")
def test_result_is_returned_without_async(dsn: str) -> None:
    with SyncClient(dsn) as client:
        task_id = client.enqueue("numbers", 21)
        assert client.result(task_id, timeout_s=TIMEOUT_S) == 42


@pytest.mark.usefixtures("worker")
async def test_failed_task_raises_task_failed(dsn: str) -> None:
    async with Client(dsn) as client:
        task_id = await client.enqueue("numbers", None)
        with pytest.raises(TaskFailed, match="no payload") as caught:
            await client.result(task_id, timeout_s=TIMEOUT_S)
        assert (caught.value.task.id, caught.value.task.error_code) == (task_id, "DO_NOT_RETRY")


async def test_unparsable_result_is_an_error_and_its_text_is_available(dsn: str) -> None:
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
            with pytest.raises(WindlassError, match=f"Python cannot parse the result of task {task_id}"):
                await client.result(task_id, timeout_s=TIMEOUT_S)
            task = await client.task(task_id)
            assert task is not None
            assert task.result_text == result
    await connection.close()


async def test_result_times_out(dsn: str) -> None:
    async with Client(dsn) as client:
        task_id = await client.enqueue("unserved")
        message = f"task {task_id} is still queued after 0.05 s. Run `windlass explain {task_id}` to see why."
        with pytest.raises(TimeoutError, match=re.escape(message)):
            await client.result(task_id, timeout_s=0.05)
        with pytest.raises(BadInput, match="task 404 not found"):
            await client.result(404)


async def test_task_is_part_of_the_callers_transaction(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    async with Client(dsn) as client:
        transaction = connection.transaction()
        await transaction.start()
        rolled_back = await client.enqueue("q", {"order": 1}, connection=connection)
        assert await client.task(rolled_back) is None  # not visible to others before the commit
        await transaction.rollback()
        assert await client.task(rolled_back) is None
        async with connection.transaction():
            kept = await client.enqueue("q", {"order": 2}, connection=connection)
        task = await client.task(kept)
        assert task is not None
        assert task.payload == {"order": 2}
    await connection.close()


async def test_json_codec_of_the_caller_does_not_encode_twice(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    await connection.set_type_codec("jsonb", encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
    await Client(dsn).enqueue("q", {"a": [1, "x"]}, connection=connection)
    assert await connection.fetchval("select payload from windlass.tasks") == {"a": [1, "x"]}
    await connection.close()


async def test_unique_key_makes_enqueue_repeatable(dsn: str) -> None:
    async with Client(dsn) as client:
        first = await client.enqueue("q", 1, unique_key="order-7")
        assert await client.enqueue("q", 2, unique_key="order-7") == first
        assert await client.enqueue("another", 2, unique_key="order-7") != first


async def test_enqueue_many_adds_all_or_none(dsn: str) -> None:
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


def test_threads_share_a_sync_client(dsn: str) -> None:
    with SyncClient(dsn) as client, ThreadPoolExecutor(8) as threads:
        ids = list(threads.map(lambda n: client.enqueue("q", n), range(100)))
        assert len(set(ids)) == 100
        assert client.enqueue_many([new_task("q")]) == 1
        assert client.cancel(ids[0])
        assert client.retry(ids[0])
        task = client.task(ids[0])
        assert task is not None
        assert task.status is TaskStatus.QUEUED


async def test_closed_client_is_an_error(dsn: str) -> None:
    with pytest.raises(WindlassError, match="inside `async with"):
        await Client(dsn).enqueue("q")
    closed = SyncClient(dsn)
    with pytest.raises(WindlassError, match="inside `with"):
        closed.enqueue("q")
    with closed:
        pass
    with pytest.raises(WindlassError, match="inside `with"):
        closed.enqueue("q")


def test_failed_open_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(DatabaseUnavailable, match=r"127\.0\.0\.1:1"), SyncClient("postgresql://u:pw@127.0.0.1:1/d"):
        pass
    assert threading.active_count() == before


async def test_invalid_payload_is_refused_without_a_connection(dsn: str) -> None:
    with pytest.raises(BadInput, match="cannot be written as JSON"):
        await Client(dsn).enqueue("q", {1, 2})


@pytest.mark.parametrize("name", windlass.__all__)
def test_public_names_can_be_imported(name: str) -> None:
    assert getattr(windlass, name) is not None


def test_package_imports_nothing_slow() -> None:
    program = "import sys, windlass; print(*(set(sys.modules) & {'asyncpg', 'pydantic', 'asyncio', 'typer'}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_client_imports_neither_worker_nor_embedded_server() -> None:
    unneeded = {"windlass.worker.lifecycle", "windlass.store.embedded", "structlog", "rich", "typer", "psutil"}
    program = f"import sys; from windlass import Client; Client; print(*(set(sys.modules) & {unneeded}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("name", ["hello", "hello_async"])
def test_example_prints_its_greeting(dsn: str, name: str) -> None:
    program = CommandLine(EXAMPLES, {"DATABASE_URL": dsn})
    with program.start("worker", "-q", "greetings", "--handler", f"{name}:greet", stderr=subprocess.DEVNULL) as process:
        done = subprocess.run(
            [sys.executable, f"{name}.py", "Ada"],
            cwd=EXAMPLES,
            env=program.environment(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        process.terminate()
    assert (done.stdout, done.stderr) == ("Hello, Ada!\n", "")


async def test_payload_limit_applies_to_enqueue_many(dsn: str, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("task_id", ["1", 0, -1, 2**63, True, None])
async def test_invalid_task_id_is_refused(dsn: str, task_id: Any) -> None:
    async with windlass.Client(dsn) as client:
        with pytest.raises(windlass.BadInput, match="is not the id of a task"):
            await client.task(task_id)
        with pytest.raises(windlass.BadInput, match="is not the id of a task"):
            await client.cancel(task_id)


async def test_run_after_may_be_a_timedelta(dsn: str) -> None:
    async with windlass.Client(dsn) as client:
        task_id = await client.enqueue("later", run_after=timedelta(hours=1))
        task = await client.task(task_id)
        assert task is not None
        assert task.run_after is not None
        assert timedelta(minutes=50) < task.run_after - task.created_at < timedelta(minutes=70)
        for run_after in (timedelta.max, "tomorrow", 5):
            with pytest.raises(windlass.BadInput, match="run_after is"):
                await client.enqueue("later", run_after=cast(Any, run_after))


def test_all_public_names_are_listed_and_documented() -> None:
    assert set(windlass.__all__) <= set(dir(windlass))
    assert {"BadInput", "DatabaseUnavailable", "Client", "TaskFailed"} <= set(dir(windlass))
    for name in windlass.__all__:
        assert getattr(windlass, name).__doc__, name
    for client in (windlass.Client, windlass.SyncClient):
        for name in ("enqueue", "enqueue_many", "task", "result", "retry", "cancel"):
            assert getattr(client, name).__doc__, f"{client.__name__}.{name}"


@pytest.mark.parametrize("name", windlass.__all__)
def test_public_members_are_documented_with_their_own_parameters(name: str) -> None:
    home = getattr(windlass, name)
    members = {each: member for each, member in vars(home).items() if not each.startswith("_")} if isclass(home) else {}
    known = {each for function in vars(windlass.Client).values() for each in parameters(function)}
    for each, member in {**members, name: home}.items():
        if callable(member) or isinstance(member, property):
            assert member.__doc__, f"{name}.{each}"
        if isfunction(member):
            named = known & set(re.findall(r"`(\w+)`", member.__doc__ or ""))
            assert named <= parameters(member), f"{name}.{each}"


def parameters(function: Any) -> set[str]:
    return set(signature(function).parameters) if isfunction(function) else set()
