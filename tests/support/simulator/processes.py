"""Simulated processes: groups of tasks that are killed or frozen together.

Killing a process cancels its tasks at whatever they await. Calls that they then attempt from a `finally` block are
refused. Requests that were already sent still take effect (network.py).
A frozen process stops at its next checkpoint and continues from there, unaware of the pause, when it is thawed.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any

_current: ContextVar["SimulatedProcess | None"] = ContextVar("process", default=None)


def track_processes(loop: asyncio.AbstractEventLoop) -> None:
    """Make every new task belong to the process of the task that started it."""
    loop.set_task_factory(_make_task)  # type: ignore[arg-type] # typeshed wants a Future of one particular type


def _make_task(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, Any],
    context: Context | None = None,
    **options: Any,  # newer Pythons pass the name here
) -> asyncio.Task[Any]:
    context = copy_context() if context is None else context
    process = context.get(_current)
    if process is not None and process.steps_left is not None:
        coroutine = CountedCoroutine(coroutine, process)
    task = asyncio.Task(coroutine, loop=loop, context=context, **options)
    if process is not None:
        process.own(task)
    return task


def start_detached(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start a task that belongs to no process: it continues when the process that started it is killed."""
    context = copy_context()
    context.run(_current.set, None)
    return asyncio.get_running_loop().create_task(coroutine, context=context)


class CountedCoroutine(Coroutine[Any, Any, Any]):
    """Forwards to a coroutine and counts each await at which it suspends, so that a process can die at any of them."""

    def __init__(self, inner: Coroutine[Any, Any, Any], process: "SimulatedProcess") -> None:
        self._inner = inner
        self._process = process

    def send(self, value: Any) -> Any:
        awaited = self._inner.send(value)
        self._process.step()
        return awaited

    def throw(self, *error: Any) -> Any:
        awaited = self._inner.throw(*error)
        self._process.step()
        return awaited

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Any:
        return self._inner.__await__()


class SimulatedProcess:
    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        # The process dies when its tasks have suspended this many times. None: never.
        self.steps_left: int | None = None
        self.on_last_step: Callable[[], None] = lambda: None
        # A dict keeps the order in which tasks started, so that a kill cancels them in the same order in every run.
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._thawed = asyncio.Event()
        self._thawed.set()

    def start(self, main: Coroutine[Any, Any, Any]) -> None:
        context = copy_context()
        context.run(_current.set, self)
        asyncio.get_running_loop().create_task(main, context=context).add_done_callback(self._report_error)

    def own(self, task: asyncio.Task[Any]) -> None:
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    def _report_error(self, main: asyncio.Task[Any]) -> None:
        error = None if main.cancelled() else main.exception()
        if error is not None and not self.is_dead:
            context = {"message": f"{self.name} failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)

    def step(self) -> None:
        """One of its tasks suspends at an await."""
        if self.steps_left is not None and self.steps_left > 0:
            self.steps_left -= 1
            if self.steps_left == 0 and not self.is_dead:
                self.on_last_step()

    def kill(self) -> None:
        self.is_dead = True
        for task in list(self._tasks):
            task.cancel()

    def freeze(self) -> None:
        self._thawed.clear()

    def thaw(self) -> None:
        self._thawed.set()

    @property
    def is_frozen(self) -> bool:
        return not self._thawed.is_set()

    async def checkpoint(self) -> None:
        """Wait while frozen; raise if dead. Simulated code awaits this before every external effect."""
        if self.is_dead:
            raise asyncio.CancelledError
        await self._thawed.wait()
