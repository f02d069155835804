"""One call to the store waits for many workers, and none of them misses anything."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from windlass.model.errors import DatabaseUnavailable
from windlass.server import long_poll as module
from windlass.server.long_poll import LongPollHub

LIMIT_S = 20.0
FOREVER_S = 3600.0


class Street:
    """A store of which only the waiting is seen."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.answers: asyncio.Queue[Exception | None] = asyncio.Queue()

    async def wait_for_work(self, queues: Sequence[str], _timeout_s: float) -> None:
        self.calls.append(tuple(queues))
        answer = await self.answers.get()
        if answer is not None:
            raise answer

    def arrive(self) -> None:
        self.answers.put_nowait(None)


@pytest.fixture
async def street() -> Street:
    return Street()


@pytest.fixture
async def long_poll_hub(street: Street) -> AsyncIterator[LongPollHub]:
    bell = LongPollHub(street.wait_for_work)
    yield bell
    await bell.close()


async def rest() -> None:
    """Until everybody who can go on has done so."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_whoever_comes_first_is_told_to_look_at_once(long_poll_hub: LongPollHub) -> None:
    assert await asyncio.wait_for(long_poll_hub.wait(("a",), FOREVER_S, None), LIMIT_S)
    assert await asyncio.wait_for(long_poll_hub.wait(("a",), FOREVER_S, "of another time.3"), LIMIT_S)


async def test_all_who_wait_are_told_and_the_store_is_asked_once(long_poll_hub: LongPollHub, street: Street) -> None:
    cursor = await long_poll_hub.wait(("b", "a"), 0, None)
    waiting = [asyncio.create_task(long_poll_hub.wait(("a", "b"), FOREVER_S, cursor)) for _ in range(50)]
    await rest()
    assert street.calls == [("a", "b")]
    assert not any(task.done() for task in waiting)
    street.arrive()
    assert len({await asyncio.wait_for(task, LIMIT_S) for task in waiting}) == 1


async def test_what_arrives_between_two_waits_is_not_missed_by_anybody(
    long_poll_hub: LongPollHub, street: Street
) -> None:
    cursor = await long_poll_hub.wait(("a",), 0, None)
    street.arrive()
    await rest()
    first = await asyncio.wait_for(long_poll_hub.wait(("a",), FOREVER_S, cursor), LIMIT_S)
    # One whose answer was lost comes with the old cursor again.
    assert await asyncio.wait_for(long_poll_hub.wait(("a",), FOREVER_S, cursor), LIMIT_S) == first
    assert first != cursor


async def test_waiting_ends_when_the_time_is_up(long_poll_hub: LongPollHub) -> None:
    cursor = await long_poll_hub.wait(("a",), 0, None)
    assert await asyncio.wait_for(long_poll_hub.wait(("a",), 0.01, cursor), LIMIT_S) == cursor


async def test_each_set_of_queues_has_its_own_bell(long_poll_hub: LongPollHub, street: Street) -> None:
    await long_poll_hub.wait(("a",), 0, None)
    await long_poll_hub.wait(("b",), 0, None)
    await rest()
    assert street.calls == [("a",), ("b",)]


async def test_a_bell_survives_a_database_that_is_away(
    long_poll_hub: LongPollHub, street: Street, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    cursor = await long_poll_hub.wait(("a",), 0, None)
    street.answers.put_nowait(DatabaseUnavailable("away"))
    await asyncio.wait_for(long_poll_hub.wait(("a",), FOREVER_S, cursor), LIMIT_S)
    await rest()
    assert street.calls == [("a",), ("a",)]


async def test_a_bell_nobody_listens_to_is_taken_down(
    long_poll_hub: LongPollHub, street: Street, monkeypatch: pytest.MonkeyPatch
) -> None:
    cursor = await long_poll_hub.wait(("a",), 0, None)
    await rest()
    monkeypatch.setattr(module, "LINGER_S", -1.0)
    street.arrive()
    await rest()
    assert street.calls == [("a",)]
    # The next one hangs a new bell, and is told to look.
    assert await asyncio.wait_for(long_poll_hub.wait(("a",), FOREVER_S, cursor), LIMIT_S) != cursor


async def test_closing_tells_everybody(long_poll_hub: LongPollHub) -> None:
    cursor = await long_poll_hub.wait(("a",), 0, None)
    waiting = asyncio.create_task(long_poll_hub.wait(("a",), FOREVER_S, cursor))
    await rest()
    await long_poll_hub.close()
    await asyncio.wait_for(waiting, LIMIT_S)
    await asyncio.wait_for(long_poll_hub.wait(("a",), 0.01, cursor), LIMIT_S)


async def test_there_are_only_so_many_bells(long_poll_hub: LongPollHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BELLS", 1)
    await long_poll_hub.wait(("a",), 0, None)
    assert await asyncio.wait_for(long_poll_hub.wait(("b",), 0.01, None), LIMIT_S) == ""
