"""The Python client for producers: enqueues tasks, and reads their state and results.

    async with windlass.Client() as client:
        task_id = await client.enqueue("renders", {"prompt": "a lighthouse"})
        result = await client.result(task_id, timeout_s=60)

Without a URL the client uses DATABASE_URL, windlass.toml or the embedded PostgreSQL, like the command line.
`SyncClient` is the same without async. Errors are WindlassError, with a message that says what to do. After
DatabaseUnavailable the operation may have taken effect; with a `unique_key` it is safe to repeat. On a connection of
your own, errors of asyncpg are raised unchanged.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterable, Coroutine, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from windlass.config_loader import load_config
from windlass.model.codec import PayloadCodec, open_sealed, payload_context, result_context, seal
from windlass.model.errors import BadInput, WindlassError
from windlass.model.event import check_reason
from windlass.model.task import MAX_TASK_ID, NewTask, Task, TaskStatus, TaskSummary, check_payload_size, new_task
from windlass.operations import task_not_found
from windlass.store.tasks import enqueue_on
from windlass.wiring import stores
from windlass.wiring.stores import CommandStore

RESULT_POLL_MIN_S = 0.02
RESULT_POLL_MAX_S = 1.0
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ClientTask(TaskSummary):
    """The state of a task. `payload` and `result` are Python objects, parsed when they are read."""

    payload_text: str
    result_text: str | None
    codec: PayloadCodec | None = field(default=None, repr=False, compare=False)

    @property
    def payload(self) -> Any:
        """What was enqueued, decrypted if the client has a codec."""
        payload = _read(self.id, self.payload_text, "payload")
        if self.codec is None:
            return payload
        return open_sealed(payload, self.codec, payload_context(self.queue), f"the payload of task {self.id}")

    @property
    def result(self) -> Any:
        """What the handler returned. None until the task is complete."""
        return _read_result(self.id, self.result_text, self.codec)


class TaskFailed(WindlassError):
    """The task whose result was awaited has failed permanently. `task` has all its fields."""

    def __init__(self, task: ClientTask) -> None:
        super().__init__(f"task {task.id} failed ({task.error_code}): {task.error}")
        self.task = task


class ClientConnection(Protocol):
    """The part of an asyncpg connection that is used."""

    async def fetchval(self, query: str, *args: Any) -> Any: ...


class Client:
    """Enqueues tasks and reads their state and results. Use it as `async with windlass.Client() as client:`."""

    def __init__(
        self,
        database_url: str | None = None,
        *,
        data_dir: str | Path | None = None,
        config: str | Path | None = None,
        codec: PayloadCodec | None = None,
    ) -> None:
        """`data_dir` selects the embedded PostgreSQL in that folder. `config` replaces windlass.toml.

        `codec` encrypts payloads before they are sent and decrypts results. Handlers need the same one
        (`windlass.sealed`).
        """
        self._codec = codec
        given = {"database_url": database_url, "data_dir": data_dir}
        file = Path(config) if config is not None else None
        self._config = load_config(file, given, overrides_from="the arguments of Client", has_fleets=False).config
        self._open = AsyncExitStack()
        self._store: CommandStore | None = None

    async def __aenter__(self) -> Self:
        self._store = await self._open.enter_async_context(stores.store(self._config, is_contract_sufficient=True))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    async def enqueue(
        self,
        queue: str,
        payload: Any = None,
        *,
        priority: int = 0,
        run_after: datetime | timedelta | None = None,
        max_attempts: int = 3,
        timeout_s: float | None = None,
        unique_key: str | None = None,
        connection: ClientConnection | None = None,
    ) -> int:
        """Add a task and return its id. If the queue has a task with this unique key, return its id and add nothing.

        `payload` is any JSON value. Tasks with a higher `priority` run first. `run_after` is the earliest start: a
        datetime with a time zone, or a timedelta from now. `timeout_s` limits each attempt.

        `connection` is your own asyncpg connection to the same database. The task is then a part of its transaction,
        and exists if that commits. Errors of asyncpg are raised unchanged.
        """
        task = new_task(
            queue,
            payload if self._codec is None else self._seal(queue, payload),
            priority=priority,
            run_after=run_after,
            max_attempts=max_attempts,
            timeout_s=timeout_s,
            unique_key=unique_key,
            max_payload_bytes=self._config.max_payload_bytes,
        )
        if connection is not None:
            return await enqueue_on(connection, task)
        return await self._opened.enqueue(task)

    async def enqueue_many(self, tasks: Iterable[NewTask] | AsyncIterable[NewTask]) -> int:
        """Add many tasks, created with `new_task`: either all or none. Returns how many were new."""
        if isinstance(tasks, AsyncIterable):
            return await self._opened.enqueue_many(self._checked(task) async for task in tasks)
        return await self._opened.enqueue_many(map(self._checked, tasks))

    def _checked(self, task: NewTask) -> NewTask:
        limit = self._config.max_payload_bytes
        if self._codec is not None:
            task = task._replace(payload=json.dumps(self._seal(task.queue, json.loads(task.payload))))
        return check_payload_size(task, limit)

    def _seal(self, queue: str, payload: Any) -> Any:
        if self._codec is None:
            return payload
        try:
            return seal(payload, self._codec, payload_context(queue))
        except (TypeError, ValueError, RecursionError) as error:
            raise BadInput(f"the payload cannot be encrypted ({type(error).__name__}): use values of JSON.") from None

    async def task(self, task_id: int) -> ClientTask | None:
        """The current state of a task. None if it is unknown, or already purged."""
        task = await self._opened.task(_check_id(task_id))
        return _client_task(task, self._codec) if task is not None else None

    async def result(self, task_id: int, timeout_s: float | None = None) -> Any:
        """Wait until the task is complete and return its result.

        Raises TaskFailed if it failed, TimeoutError if it is unfinished (it keeps running), and WindlassError if Python
        cannot parse the result, because it is nested too deeply or has numbers that are too long.
        """
        status = None
        try:
            async with asyncio.timeout(timeout_s):
                pause_s = RESULT_POLL_MIN_S
                while True:
                    task = await self._opened.task(_check_id(task_id))
                    if task is None:
                        raise BadInput(f"{task_not_found(task_id)}.")
                    status = task.status
                    if status is TaskStatus.COMPLETE:
                        return _read_result(task_id, task.result, self._codec)
                    if status is TaskStatus.FAILED:
                        raise TaskFailed(_client_task(task, self._codec))
                    await asyncio.sleep(pause_s)
                    pause_s = min(pause_s * 2, RESULT_POLL_MAX_S)
        except TimeoutError:
            state = f"is still {status}" if status is not None else "could not be read"
            raise TimeoutError(
                f"task {task_id} {state} after {timeout_s:g} s. Run `windlass explain {task_id}` to see why."
            ) from None

    async def retry(self, task_id: int) -> bool:
        """Requeue a failed or retrying task. Returns False if it is neither."""
        return await self._opened.retry_task(_check_id(task_id))

    async def cancel(self, task_id: int, reason: str = "cancelled by its producer") -> bool:
        """Fail an unfinished task. Returns False if it is finished already. Raises BadInput for an empty reason."""
        check_reason(reason, "reason")
        return await self._opened.cancel_task(_check_id(task_id), reason)

    @property
    def _opened(self) -> CommandStore:
        if self._store is None:
            raise WindlassError("the client is not open: use it inside `async with windlass.Client() as client:`.")
        return self._store


def _check_id(task_id: int) -> int:
    if not isinstance(task_id, int) or isinstance(task_id, bool) or not 1 <= task_id <= MAX_TASK_ID:
        raise BadInput(f"{task_id!r} is not the id of a task: use the number that `enqueue` returned.")
    return task_id


def _client_task(task: Task, codec: PayloadCodec | None) -> ClientTask:
    summary = {each.name: getattr(task, each.name) for each in fields(TaskSummary)}
    return ClientTask(**summary, payload_text=task.payload, result_text=task.result, codec=codec)


def _read_result(task_id: int, text: str | None, codec: PayloadCodec | None) -> Any:
    result = _read(task_id, text, "result")
    if codec is None or text is None:
        return result
    return open_sealed(result, codec, result_context(task_id), f"the result of task {task_id}")


def _read(task_id: int, text: str | None, what: str) -> Any:
    try:
        return json.loads(text) if text is not None else None
    except (ValueError, RecursionError) as error:
        raise WindlassError(
            f"Python cannot parse the {what} of task {task_id} ({error}). `task({task_id}).{what}_text` has its text."
        ) from None


class SyncClient:
    """`Client` for code without an event loop. Threads may share it."""

    def __init__(
        self,
        database_url: str | None = None,
        *,
        data_dir: str | Path | None = None,
        config: str | Path | None = None,
        codec: PayloadCodec | None = None,
    ) -> None:
        self._client = Client(database_url, data_dir=data_dir, config=config, codec=codec)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="windlass-client", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._wait(self._client.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._wait(self._client.__aexit__())
        finally:
            self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def enqueue(
        self,
        queue: str,
        payload: Any = None,
        *,
        priority: int = 0,
        run_after: datetime | timedelta | None = None,
        max_attempts: int = 3,
        timeout_s: float | None = None,
        unique_key: str | None = None,
    ) -> int:
        """Add a task and return its id. If the queue has a task with this unique key, return its id and add nothing.

        `payload` is any JSON value. Tasks with a higher `priority` run first. `run_after` is the earliest start: a
        datetime with a time zone, or a timedelta from now. `timeout_s` limits each attempt.

        To enqueue in a transaction of your own, call the SQL function windlass.enqueue() in it.
        """
        return self._wait(
            self._client.enqueue(
                queue,
                payload,
                priority=priority,
                run_after=run_after,
                max_attempts=max_attempts,
                timeout_s=timeout_s,
                unique_key=unique_key,
            )
        )

    def enqueue_many(self, tasks: Iterable[NewTask]) -> int:
        return self._wait(self._client.enqueue_many(tasks))

    def task(self, task_id: int) -> ClientTask | None:
        return self._wait(self._client.task(task_id))

    def result(self, task_id: int, timeout_s: float | None = None) -> Any:
        return self._wait(self._client.result(task_id, timeout_s))

    def retry(self, task_id: int) -> bool:
        return self._wait(self._client.retry(task_id))

    def cancel(self, task_id: int, reason: str = "cancelled by its producer") -> bool:
        return self._wait(self._client.cancel(task_id, reason))

    def _wait(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        if not self._thread.is_alive():
            coroutine.close()
            raise WindlassError("the client is not open: use it inside `with windlass.SyncClient() as client:`.")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C: the result is not needed any more
            raise


for _name in ("enqueue_many", "task", "result", "retry", "cancel"):
    getattr(SyncClient, _name).__doc__ = getattr(Client, _name).__doc__
