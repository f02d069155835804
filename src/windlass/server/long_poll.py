"""Long polling for work: one store call waits on behalf of all workers that serve the same queues.

Each set of queues has a signal with a counter. A waiting worker sends the cursor of its last answer; if the signal
fired since then, the answer is immediate, so no signal is missed between two polls or with a lost response. A signal is
a hint: it also fires without new work. A signal without waiting workers is removed after a while.

A cursor of another server process, behind a load balancer or before a restart, tells nothing about this signal. Then
the store is asked once for all of them whether there are tasks, and only if there are, the answer is immediate.
"""

import asyncio
import contextlib
import functools
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence

import structlog

from windlass.model.errors import WindlassError

# Length of one store call. The signal fires when it ends, with or without work.
STORE_WAIT_S = 30.0
# A signal is removed this long after its last poll. Longer than any pause of a worker between two polls.
SIGNAL_LINGER_S = 60.0
# Pause before the store is asked again after it failed.
RETRY_PAUSE_S = 2.0
# A fleet needs one signal. Above the limit polls are answered after NO_SIGNAL_WAIT_S.
MAX_SIGNALS = 1_000
NO_SIGNAL_WAIT_S = 1.0
log = structlog.get_logger(__name__)

WaitForWork = Callable[[Sequence[str], float], Awaitable[None]]
HasTasks = Callable[[Sequence[str]], Awaitable[bool]]


class LongPollHub:
    """`has_tasks`: whether there is a queued task in one of these queues. Without it, unknown cursors do not wait."""

    def __init__(self, wait_for_work: WaitForWork, has_tasks: HasTasks | None = None) -> None:
        self._wait_for_work = wait_for_work
        self._has_tasks = has_tasks
        self._signals: dict[tuple[str, ...], _PollSignal] = {}
        self._is_closed = False

    async def wait(self, queues: Sequence[str], timeout_s: float, cursor: str | None) -> str:
        """Wait until the signal has fired since `cursor`, or until the timeout. Returns the cursor of the next poll."""
        names = tuple(sorted(set(queues)))
        signal = self._signals.get(names)
        if signal is None:
            if self._is_closed or len(self._signals) >= MAX_SIGNALS:
                await asyncio.sleep(min(timeout_s, NO_SIGNAL_WAIT_S))
                return ""
            signal = self._signals[names] = _PollSignal()
            signal.task = asyncio.create_task(self._watch(names, signal))
        elif cursor and not signal.knows(cursor) and self._has_tasks is not None:
            # Counted as waiting, so that the signal is not removed meanwhile.
            signal.waiting += 1
            try:
                cursor = await signal.ask(functools.partial(self._has_tasks, names))
            except WindlassError:
                pass  # answered at once
            finally:
                signal.waiting -= 1
        return await signal.wait(timeout_s, cursor)

    async def close(self) -> None:
        """Answer all waiting polls at once. Later polls do not wait."""
        self._is_closed = True
        signals, self._signals = self._signals, {}
        for signal in signals.values():
            signal.close()
        await asyncio.gather(*(signal.task for signal in signals.values() if signal.task), return_exceptions=True)

    async def _watch(self, names: tuple[str, ...], signal: "_PollSignal") -> None:
        while time.monotonic() - signal.last_poll_at < SIGNAL_LINGER_S or signal.waiting:
            try:
                await self._wait_for_work(names, STORE_WAIT_S)
            except WindlassError as error:
                log.warning("wait for work failed", queues=names, error=str(error))
                await asyncio.sleep(RETRY_PAUSE_S)
            except Exception:
                # A defect. Without this loop the polls of these queues would wait for their timeouts.
                log.exception("wait for work failed", queues=names)
                await asyncio.sleep(RETRY_PAUSE_S)
            signal.fire()
        self._signals.pop(names, None)


class _PollSignal:
    def __init__(self) -> None:
        # Part of the cursor, so that a cursor of another signal or an earlier server process is recognised as old.
        self._name = secrets.token_hex(4)
        self._count = 0
        self._fired = asyncio.Event()
        self.waiting = 0
        self.last_poll_at = time.monotonic()
        self.task: asyncio.Task[None] | None = None
        # The question for tasks that is being answered.
        self._question: asyncio.Future[str | None] | None = None

    @property
    def cursor(self) -> str:
        return f"{self._name}.{self._count}"

    def knows(self, cursor: str) -> bool:
        return cursor.startswith(f"{self._name}.")

    async def ask(self, has_tasks: Callable[[], Awaitable[bool]]) -> str | None:
        """The cursor from which a poll may wait, or None if there are tasks.

        Polls share one question: after the end of a server, thousands of workers bring its cursors at once.
        """
        if self._question is None:
            self._question = asyncio.ensure_future(self._ask(has_tasks))
            self._question.add_done_callback(self._end_question)
        return await asyncio.shield(self._question)

    async def _ask(self, has_tasks: Callable[[], Awaitable[bool]]) -> str | None:
        # Taken before the question: a signal that fires meanwhile is not missed.
        current = self.cursor
        return None if await has_tasks() else current

    def _end_question(self, question: "asyncio.Future[str | None]") -> None:
        self._question = None
        if not question.cancelled():
            question.exception()  # all polls may be gone; an unread exception would be logged by asyncio

    async def wait(self, timeout_s: float, cursor: str | None) -> str:
        self.waiting += 1
        try:
            if cursor == self.cursor:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        await self._fired.wait()
        finally:
            self.waiting -= 1
            self.last_poll_at = time.monotonic()
        return self.cursor

    def fire(self) -> None:
        self._count += 1
        fired, self._fired = self._fired, asyncio.Event()
        fired.set()

    def close(self) -> None:
        if self.task is not None:
            self.task.cancel()
        self.fire()
