"""Heartbeats of many workers in one call: the same outcome as one call for each."""

from typing import Any
from uuid import uuid4

import pytest

from support.queue_actions import add, claimed, codes, held, register, status_of, task_of
from support.stores import AnyStore
from windlass.model.errors import BadInput
from windlass.model.task import TaskStatus
from windlass.model.worker import MAX_METADATA_BYTES, HeartbeatReply, HeartbeatReport, HeldClaim, WorkerStatus

# Workers send single heartbeats. A server makes the groups, so the suites over HTTP cover them too.
directly = pytest.mark.parametrize("store", ["memory", "postgres"], indirect=True)


@directly
async def test_each_worker_of_a_group_gets_its_own_reply(store: AnyStore, clock: Any) -> None:
    await register(store, "w1", "w2", "w3", "w4")
    for _ in range(3):
        await add(store)
    kept, lost = await store.claim("w1", ("q",), 2)
    (others,) = await store.claim("w2", ("q",), 1)
    await store.release("w1", lost.task_id, lost.token, "given back")
    await store.set_paused(["w2"], True)
    await store.set_terminating(["w3"], "enough")
    await store.deregister("w4", "done")
    clock.advance(5)
    ended, unknown = HeldClaim(7, uuid4()), HeldClaim(8, uuid4())
    replies = await store.heartbeat_many(
        [
            HeartbeatReport("w4", [ended]),
            HeartbeatReport("w1", [held(kept, 0.5, "half"), held(lost, 0.9)], {"load": 1}),
            HeartbeatReport("unknown", [unknown]),
            HeartbeatReport("w2", [held(others), held(kept)]),
            HeartbeatReport("w3"),
        ]
    )
    assert replies == [
        HeartbeatReply(WorkerStatus.TERMINATED, False, frozenset({ended.token})),
        HeartbeatReply(WorkerStatus.ACTIVE, False, frozenset({lost.token})),
        HeartbeatReply(None, False, frozenset({unknown.token})),
        HeartbeatReply(WorkerStatus.ACTIVE, True, frozenset({kept.token})),
        HeartbeatReply(WorkerStatus.TERMINATING, False, frozenset()),
    ]
    assert (await task_of(store, kept)).progress == 0.5
    assert (await task_of(store, lost)).progress is None
    seen = {name: await store.worker(name) for name in ("w1", "w2", "w3", "w4")}
    assert {name: worker and worker.last_heartbeat for name, worker in seen.items()} == {
        "w1": clock(),
        "w2": clock(),
        "w3": clock(),
        "w4": None,
    }
    assert seen["w1"] is not None
    assert seen["w1"].metadata == {"load": 1}


@directly
async def test_group_with_an_invalid_heartbeat_records_none(store: AnyStore) -> None:
    await register(store, "w1", "w2")
    with pytest.raises(BadInput):
        await store.heartbeat_many([HeartbeatReport("w1"), HeartbeatReport("w2", (), {"pid": "many"})])
    worker = await store.worker("w1")
    assert worker is not None
    assert worker.last_heartbeat is None


@directly
async def test_group_releases_unreceived_claims_by_lease(store: AnyStore, clock: Any) -> None:
    await register(store, "w1", lease_s=30)
    await register(store, "w2", lease_s=60)
    for _ in range(3):
        await add(store)
    received, unreceived = await store.claim("w1", ("q",), 2)
    (recent,) = await store.claim("w2", ("q",), 1)
    clock.advance(31)
    await store.heartbeat_many([HeartbeatReport("w2"), HeartbeatReport("w1", [held(received)])])
    statuses = [await status_of(store, claim) for claim in (received, unreceived, recent)]
    assert statuses == [TaskStatus.RUNNING, TaskStatus.QUEUED, TaskStatus.RUNNING]
    assert await codes(store, task_id=unreceived.task_id) == ["TASK_RELEASED"]


@directly
async def test_report_about_some_tasks_releases_no_others(store: AnyStore, clock: Any) -> None:
    await register(store, "w1")
    for _ in range(4):
        await add(store)
    claims = await store.claim("w1", ("q",), 4)
    clock.advance(31)
    first, last = claims[1].task_id, claims[2].task_id
    await store.heartbeat_many([HeartbeatReport("w1", [held(claims[2])], {}, first, last)])
    statuses = [await status_of(store, claim) for claim in claims]
    assert statuses == [TaskStatus.RUNNING, TaskStatus.QUEUED, TaskStatus.RUNNING, TaskStatus.RUNNING]


@directly
async def test_empty_group_is_answered(store: AnyStore) -> None:
    assert await store.heartbeat_many([]) == []


async def test_worker_metadata_keeps_only_the_last_report_above_4_kib(store: AnyStore) -> None:
    """M1: reports under ever new names made the metadata of a worker grow without end."""
    await claimed(store)
    for number in range(8):
        await store.heartbeat("w1", (), {f"report {number}": "x" * (MAX_METADATA_BYTES - 100), "pid": number})
    worker = await store.worker("w1")
    assert worker is not None
    assert list(worker.metadata) == ["report 7"]
    assert worker.pid == 7


async def test_vitals_of_more_than_4_kib_are_refused(store: AnyStore) -> None:
    """M1: eight heartbeats of 6 MB were stored."""
    await register(store, "w1")
    with pytest.raises(BadInput, match="vitals have"):
        await store.heartbeat("w1", (), {"report": "x" * MAX_METADATA_BYTES})
    worker = await store.worker("w1")
    assert worker is not None
    assert (worker.metadata, worker.last_heartbeat) == ({}, None)
