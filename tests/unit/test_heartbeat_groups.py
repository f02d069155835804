"""How a server groups heartbeats: bounded, and each caller with its own reply or error."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any
from uuid import uuid4

import pytest

from windlass.model.errors import BadInput, DatabaseUnavailable
from windlass.model.worker import HeartbeatReply, HeartbeatReport, HeldClaim, WorkerStatus
from windlass.server import heartbeat_groups
from windlass.server.errors import ApiError
from windlass.server.heartbeat_groups import MAX_GROUP_CLAIMS, MAX_GROUP_HEARTBEATS, HeartbeatGroups

ACTIVE = HeartbeatReply(WorkerStatus.ACTIVE, False, frozenset())
LIMIT_S = 30.0
DELAY_S = 0.001


class RecordingStore:
    """Records groups of worker ids. While `gate` is cleared, statements wait."""

    def __init__(self) -> None:
        self.groups: list[list[str]] = []
        self.alone: list[str] = []
        self.invalid: set[str] = set()
        self.locked: set[str] = set()
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.lock = asyncio.Event()

    async def heartbeat_many(
        self, heartbeats: Sequence[HeartbeatReport], *, waits: bool = False
    ) -> list[HeartbeatReply | None]:
        if waits:
            self.alone += [each.worker_id for each in heartbeats]
            await self.lock.wait()
            return [ACTIVE]
        self.groups.append([each.worker_id for each in heartbeats])
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        if any(each.worker_id in self.invalid for each in heartbeats):
            raise BadInput("one of them is invalid.")
        return [
            None
            if each.worker_id in self.locked
            else HeartbeatReply(WorkerStatus.ACTIVE, False, frozenset(claim.token for claim in each.claims))
            for each in heartbeats
        ]


def groups_of(store: Any, delay_s: float = DELAY_S) -> HeartbeatGroups:
    return HeartbeatGroups(store, delay_s=delay_s)


async def send(groups: HeartbeatGroups, worker_ids: Iterable[str]) -> list[Any]:
    beats = (groups.heartbeat(HeartbeatReport(worker_id)) for worker_id in worker_ids)
    async with asyncio.timeout(LIMIT_S):
        return await asyncio.gather(*beats, return_exceptions=True)


async def until(condition: Any) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0)


async def test_heartbeats_of_many_workers_take_one_statement() -> None:
    store = RecordingStore()
    names = [f"w{number}" for number in range(50)]
    assert await send(groups_of(store), names) == [ACTIVE] * 50
    assert store.groups == [names]


async def test_each_caller_gets_the_reply_of_its_worker() -> None:
    groups, tokens = groups_of(RecordingStore()), {f"w{number}": uuid4() for number in range(5)}
    beats = [groups.heartbeat(HeartbeatReport(name, [HeldClaim(1, token)])) for name, token in tokens.items()]
    replies = await asyncio.gather(*beats)
    assert [reply.lost for reply in replies] == [{token} for token in tokens.values()]


async def test_invalid_heartbeat_fails_alone() -> None:
    store = RecordingStore()
    store.invalid = {"w3"}
    replies = await send(groups_of(store), [f"w{number}" for number in range(16)])
    assert [number for number, reply in enumerate(replies) if isinstance(reply, BadInput)] == [3]
    assert [reply for number, reply in enumerate(replies) if number != 3] == [ACTIVE] * 15
    # Halves, not one statement for each.
    assert len(store.groups) == 9


async def test_group_without_answer_fails_for_every_caller() -> None:
    store = RecordingStore()
    store.error = DatabaseUnavailable("sending heartbeats: no answer.")
    groups = groups_of(store)
    assert await send(groups, ["w1", "w2"]) == [store.error, store.error]
    store.error = None
    assert await send(groups, ["w1", "w2"]) == [ACTIVE, ACTIVE]


async def test_locked_worker_does_not_delay_the_others() -> None:
    store = RecordingStore()
    store.locked = {"w1", "w2", "w3"}
    groups = groups_of(store)
    waiting = [asyncio.create_task(groups.heartbeat(HeartbeatReport(name))) for name in ("w1", "w2", "w3")]
    await until(lambda: len(store.alone) == heartbeat_groups.MAX_ALONE)
    assert await send(groups, ["w4", "w5"]) == [ACTIVE, ACTIVE]
    assert not any(task.done() for task in waiting)
    store.lock.set()
    assert await asyncio.gather(*waiting) == [ACTIVE] * 3
    assert store.alone == ["w1", "w2", "w3"]


async def test_groups_are_bounded_by_heartbeats_and_claims() -> None:
    store = RecordingStore()
    groups = groups_of(store, delay_s=LIMIT_S)
    count = 2 * MAX_GROUP_HEARTBEATS  # full groups do not wait
    assert await send(groups, [f"w{number}" for number in range(count)]) == [ACTIVE] * count
    assert [len(group) for group in store.groups] == [MAX_GROUP_HEARTBEATS] * 2

    groups, store.groups = groups_of(store), []
    many = [HeldClaim(number, uuid4()) for number in range(MAX_GROUP_CLAIMS - 1)]
    beats = [groups.heartbeat(HeartbeatReport(name, many)) for name in ("w1", "w2")]
    await asyncio.gather(*beats, groups.heartbeat(HeartbeatReport("w3", many[:1])))
    assert store.groups == [["w1"], ["w2", "w3"]]


async def test_slow_statements_let_the_next_groups_grow() -> None:
    store = RecordingStore()
    store.gate.clear()
    groups = groups_of(store)
    names = [f"w{number}" for number in range(heartbeat_groups.MAX_GROUPS + 100)]
    tasks = []
    for name in names[: heartbeat_groups.MAX_GROUPS]:
        tasks.append(asyncio.create_task(groups.heartbeat(HeartbeatReport(name))))
        await until(lambda: len(store.groups) == len(tasks))
    tasks += [
        asyncio.create_task(groups.heartbeat(HeartbeatReport(name))) for name in names[heartbeat_groups.MAX_GROUPS :]
    ]
    await asyncio.sleep(0)  # now all wait for their group
    await asyncio.sleep(2 * DELAY_S)  # the loop runs timers in order, and theirs is due before this one
    assert len(store.groups) == heartbeat_groups.MAX_GROUPS
    store.gate.set()
    assert await asyncio.gather(*tasks) == [ACTIVE] * len(names)
    assert [len(group) for group in store.groups] == [1] * heartbeat_groups.MAX_GROUPS + [100]


async def test_worker_has_one_heartbeat_in_the_database_at_a_time() -> None:
    """Otherwise one token with large heartbeats occupies every statement."""
    store = RecordingStore()
    store.gate.clear()
    groups = groups_of(store)
    repeated = [asyncio.create_task(groups.heartbeat(HeartbeatReport("w1"))) for _ in range(3)]
    await until(lambda: store.groups)
    other = asyncio.create_task(groups.heartbeat(HeartbeatReport("w2")))
    await until(lambda: len(store.groups) == 2)
    assert store.groups == [["w1"], ["w2"]]
    store.gate.set()
    assert await asyncio.gather(*repeated, other) == [ACTIVE] * 4
    assert store.groups == [["w1"], ["w2"], ["w1"], ["w1"]]


async def test_heartbeat_of_disconnected_client_is_not_sent() -> None:
    store = RecordingStore()
    groups = groups_of(store)
    gone = asyncio.create_task(groups.heartbeat(HeartbeatReport("w1")))
    await asyncio.sleep(0)
    gone.cancel()
    assert await send(groups, ["w2"]) == [ACTIVE]
    assert store.groups == [["w2"]]


async def test_too_many_pending_heartbeats_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_groups, "MAX_PENDING", 2)
    store = RecordingStore()
    store.gate.clear()
    groups = groups_of(store)
    waiting = [asyncio.create_task(groups.heartbeat(HeartbeatReport(name))) for name in ("w1", "w2")]
    await until(lambda: store.groups)
    with pytest.raises(ApiError) as refused:
        await groups.heartbeat(HeartbeatReport("w3"))
    assert refused.value.status_code == 503
    store.gate.set()
    assert await asyncio.gather(*waiting) == [ACTIVE, ACTIVE]
