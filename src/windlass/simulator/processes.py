"""Processes of the simulated world: tasks that live and die together.

A process that is killed does nothing more: its tasks are cancelled at whatever they await, and what they might still
call from a `finally` is refused. What it had sent stays sent (see link.py). One that is frozen stands still at the next
gate and goes on, none the wiser, when it is thawed.
"""

import asyncio
from collections.abc import Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any

_current: ContextVar["SimulatedProcess | None"] = ContextVar("process", default=None)


def track_processes(loop: asyncio.AbstractEventLoop) -> None:
    """From now on every task belongs to the process of whoever starts it."""
    loop.set_task_factory(_make_task)  # type: ignore[arg-type] # typeshed wants a Future of one particular type


def _make_task(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, Any],
    context: Context | None = None,
    **options: Any,  # newer Pythons pass the name here
) -> asyncio.Task[Any]:
    context = copy_context() if context is None else context
    task = asyncio.Task(coroutine, loop=loop, context=context, **options)
    process = context.get(_current)
    if process is not None:
        process.own(task)
    return task


def start_detached(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A task of the world itself: it outlives whoever started it."""
    context = copy_context()
    context.run(_current.set, None)
    return asyncio.get_running_loop().create_task(coroutine, context=context)


class SimulatedProcess:
    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        # In the order of their start, so that a kill is the same in every run.
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._thawed = asyncio.Event()
        self._thawed.set()

    def start(self, main: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        context = copy_context()
        context.run(_current.set, self)
        task = asyncio.get_running_loop().create_task(main, context=context)
        task.add_done_callback(self._ended)
        return task

    def own(self, task: asyncio.Task[Any]) -> None:
        self._tasks[task] = None
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)

    def _ended(self, main: asyncio.Task[Any]) -> None:
        problem = None if main.cancelled() else main.exception()
        if problem is not None and not self.is_dead:
            context = {"message": f"{self.name} ended with an error", "exception": problem}
            asyncio.get_running_loop().call_exception_handler(context)

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
        """Where it can be stopped: passed before everything it does to the outside."""
        if self.is_dead:
            raise asyncio.CancelledError
        await self._thawed.wait()
