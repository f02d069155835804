"""One store call waits for many polls, and no poll misses a signal."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from windlass.model.errors import DatabaseUnavailable
from windlass.server import long_poll as module
from windlass.server.long_poll import LongPollHub

LIMIT_S = 20.0
FOREVER_S = 3600.0


class WaitingStore:
    """A store whose wait_for_work returns when the test says so."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.answers: asyncio.Queue[Exception | None] = asyncio.Queue()

    async def wait_for_work(self, queues: Sequence[str], _timeout_s: float) -> None:
        self.calls.append(tuple(queues))
        answer = await self.answers.get()
        if answer is not None:
            raise answer

    def signal_work(self) -> None:
        self.answers.put_nowait(None)


@pytest.fixture
async def store() -> WaitingStore:
    return WaitingStore()


@pytest.fixture
async def hub(store: WaitingStore) -> AsyncIterator[LongPollHub]:
    hub = LongPollHub(store.wait_for_work)
    yield hub
    await hub.close()


async def run_tasks() -> None:
    """Let all runnable tasks run."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_first_poll_is_answered_at_once(hub: LongPollHub) -> None:
    assert await asyncio.wait_for(hub.wait(("a",), FOREVER_S, None), LIMIT_S)
    assert await asyncio.wait_for(hub.wait(("a",), FOREVER_S, "of-another-process.3"), LIMIT_S)


async def test_poll_with_cursor_of_another_process_waits_without_tasks(store: WaitingStore) -> None:
    # Behind a load balancer each poll may reach another process. An immediate answer would make workers poll in a loop.
    has_tasks = False

    async def ask_store(_queues: Sequence[str]) -> bool:
        return has_tasks

    hub = LongPollHub(store.wait_for_work, ask_store)
    await hub.wait(("a",), 0, None)
    waiting = asyncio.create_task(hub.wait(("a",), FOREVER_S, "of-another-process.3"))
    await run_tasks()
    assert not waiting.done()
    store.signal_work()
    assert await asyncio.wait_for(waiting, LIMIT_S)
    has_tasks = True
    assert await asyncio.wait_for(hub.wait(("a",), FOREVER_S, "of-another-process.3"), LIMIT_S)
    await hub.close()


async def test_signal_is_kept_while_the_store_is_asked_for_tasks(
    store: WaitingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def ask_store(_queues: Sequence[str]) -> bool:
        asked.set()
        await answer.wait()
        return False

    hub = LongPollHub(store.wait_for_work, ask_store)
    await hub.wait(("a",), 0, None)
    polling = asyncio.create_task(hub.wait(("a",), FOREVER_S, "of-another-process.3"))
    await asyncio.wait_for(asked.wait(), LIMIT_S)
    monkeypatch.setattr(module, "SIGNAL_LINGER_S", -1.0)
    store.signal_work()
    await run_tasks()
    assert store.calls == [("a",), ("a",)]
    answer.set()
    await asyncio.wait_for(polling, LIMIT_S)
    await hub.close()


async def test_polls_with_unknown_cursors_share_one_question(store: WaitingStore) -> None:
    asked, answer = list[tuple[str, ...]](), asyncio.Event()

    async def ask_store(queues: Sequence[str]) -> bool:
        asked.append(tuple(queues))
        await answer.wait()
        return False

    hub = LongPollHub(store.wait_for_work, ask_store)
    await hub.wait(("a",), 0, None)
    polls = [asyncio.create_task(hub.wait(("a",), FOREVER_S, f"of-another-process.{n}")) for n in range(50)]
    await run_tasks()
    store.signal_work()
    await run_tasks()
    # The question began before the signal, so its answer says nothing about the work that was signalled.
    polls.append(asyncio.create_task(hub.wait(("a",), FOREVER_S, "of-another-process.50")))
    await run_tasks()
    answer.set()
    assert len(set(await asyncio.wait_for(asyncio.gather(*polls), LIMIT_S))) == 1
    assert asked == [("a",)]
    waiting = asyncio.create_task(hub.wait(("a",), FOREVER_S, "of-another-process.51"))
    await run_tasks()
    assert (len(asked), waiting.done()) == (2, False)
    await hub.close()
    await asyncio.wait_for(waiting, LIMIT_S)


async def test_polls_of_the_same_queues_share_one_store_call(hub: LongPollHub, store: WaitingStore) -> None:
    cursor = await hub.wait(("b", "a"), 0, None)
    waiting = [asyncio.create_task(hub.wait(("a", "b"), FOREVER_S, cursor)) for _ in range(50)]
    await run_tasks()
    assert store.calls == [("a", "b")]
    assert not any(task.done() for task in waiting)
    store.signal_work()
    assert len({await asyncio.wait_for(task, LIMIT_S) for task in waiting}) == 1


async def test_signal_between_two_polls_is_not_missed(hub: LongPollHub, store: WaitingStore) -> None:
    cursor = await hub.wait(("a",), 0, None)
    store.signal_work()
    await run_tasks()
    first = await asyncio.wait_for(hub.wait(("a",), FOREVER_S, cursor), LIMIT_S)
    # A worker whose response was lost polls with the old cursor again.
    assert await asyncio.wait_for(hub.wait(("a",), FOREVER_S, cursor), LIMIT_S) == first
    assert first != cursor


async def test_poll_ends_at_its_timeout(hub: LongPollHub) -> None:
    cursor = await hub.wait(("a",), 0, None)
    assert await asyncio.wait_for(hub.wait(("a",), 0.01, cursor), LIMIT_S) == cursor


async def test_each_set_of_queues_has_its_own_signal(hub: LongPollHub, store: WaitingStore) -> None:
    await hub.wait(("a",), 0, None)
    await hub.wait(("b",), 0, None)
    await run_tasks()
    assert store.calls == [("a",), ("b",)]


@pytest.mark.parametrize("error", [DatabaseUnavailable("unavailable"), RuntimeError("a defect")])
async def test_signal_survives_errors_of_the_store(
    hub: LongPollHub, store: WaitingStore, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(module, "RETRY_PAUSE_S", 0.0)
    cursor = await hub.wait(("a",), 0, None)
    store.answers.put_nowait(error)
    await asyncio.wait_for(hub.wait(("a",), FOREVER_S, cursor), LIMIT_S)
    await run_tasks()
    assert store.calls == [("a",), ("a",)]


async def test_signal_without_polls_is_removed(
    hub: LongPollHub, store: WaitingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    cursor = await hub.wait(("a",), 0, None)
    await run_tasks()
    monkeypatch.setattr(module, "SIGNAL_LINGER_S", -1.0)
    store.signal_work()
    await run_tasks()
    assert store.calls == [("a",)]
    # The next poll creates a new signal and is answered at once.
    assert await asyncio.wait_for(hub.wait(("a",), FOREVER_S, cursor), LIMIT_S) != cursor


async def test_closing_answers_all_polls(hub: LongPollHub) -> None:
    cursor = await hub.wait(("a",), 0, None)
    waiting = asyncio.create_task(hub.wait(("a",), FOREVER_S, cursor))
    await run_tasks()
    await hub.close()
    await asyncio.wait_for(waiting, LIMIT_S)
    await asyncio.wait_for(hub.wait(("a",), 0.01, cursor), LIMIT_S)


async def test_number_of_signals_is_limited(hub: LongPollHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SIGNALS", 1)
    await hub.wait(("a",), 0, None)
    assert await asyncio.wait_for(hub.wait(("b",), 0.01, None), LIMIT_S) == ""
