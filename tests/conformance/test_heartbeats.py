"""Heartbeats: lost claims, progress, vitals."""

from typing import Any
from uuid import uuid4

import pytest

from support.queue_actions import add, claim_one, claimed, codes, complete, fail, held, register, status_of, task_of
from support.stores import AnyStore
from windlass.model.errors import BadInput
from windlass.model.task import Claim, Finished, NewTask, TaskStatus
from windlass.model.worker import HeldClaim, WorkerStatus
from windlass.policy.backoff import RETRY_FIRST_S


async def test_heartbeat_stores_vitals(store: AnyStore, clock: Any) -> None:
    await register(store, "w1", pid=1)
    clock.advance(5)
    vitals = {"pid": 42, "vram_total_mb": 80_000, "vram_used_mb": 1_000, "gpu": "H200"}
    pulse = await store.heartbeat("w1", (), vitals)
    assert (pulse.status, pulse.is_paused, pulse.lost) == (WorkerStatus.ACTIVE, False, frozenset())
    await store.heartbeat("w1", (), {"vram_used_mb": 2_000, "load": 0.5})
    worker = await store.worker("w1")
    assert worker is not None
    assert (worker.last_heartbeat, worker.pid) == (clock(), 42)
    assert (worker.vram_total_mb, worker.vram_used_mb) == (80_000, 2_000)
    assert worker.metadata == {"gpu": "H200", "load": 0.5}


async def test_invalid_vitals_are_refused(store: AnyStore) -> None:
    await register(store, "w1")
    deep: Any = 1
    for _ in range(20):
        deep = [deep]
    for vitals in (
        {"pid": "many"},
        {"pid": True},
        {"vram_total_mb": 10**400},
        {"vram_used_mb": {"gpu": 1}},
        {"load": float("nan")},
        {"load": deep},
    ):
        with pytest.raises(BadInput):
            await store.heartbeat("w1", (), vitals)
    worker = await store.worker("w1")
    assert worker is not None
    assert worker.last_heartbeat is None
    await store.heartbeat("w1", (), {"load": deep[0]})


async def test_heartbeat_reply_has_pause_and_status(store: AnyStore) -> None:
    await register(store, "w1")
    await store.set_paused(["w1"], True)
    assert (await store.heartbeat("w1")).is_paused
    await store.set_terminating(["w1"], "enough")
    pulse = await store.heartbeat("w1")
    assert (pulse.status, pulse.is_paused) == (WorkerStatus.TERMINATING, True)


async def test_heartbeat_reply_has_lost_claims(store: AnyStore) -> None:
    await register(store, "w1")
    for _ in range(4):
        await add(store)
    kept, released, cancelled, finished = await store.claim("w1", ("q",), 4)
    await store.release("w1", released.task_id, released.token, "released")
    await store.cancel_task(cancelled.task_id, "not wanted")
    await complete(store, finished)
    stranger = HeldClaim(999_999_999, uuid4())
    pulse = await store.heartbeat("w1", [held(kept), held(released), held(cancelled), held(finished), stranger])
    assert pulse.lost == {released.token, cancelled.token, finished.token, stranger.token}


async def test_heartbeat_stores_progress(store: AnyStore) -> None:
    claim = await claimed(store)
    await store.heartbeat("w1", [held(claim, 0.25, "frame 1 of 4")])
    task = await task_of(store, claim)
    assert (task.progress, task.progress_note) == (0.25, "frame 1 of 4")
    await store.heartbeat("w1", [held(claim)])
    assert (await task_of(store, claim)).progress == 0.25
    await store.heartbeat("w1", [held(claim, 0.15)])
    task = await task_of(store, claim)
    assert task.progress == 0.15, "not 0.15000000596046448"
    assert task.progress_note is None


async def test_complete_task_has_progress_one(store: AnyStore) -> None:
    await register(store, "w1")
    for finish in (complete, complete_in_a_batch):
        await add(store)
        claim = await claim_one(store)
        await store.heartbeat("w1", [held(claim, 0.9, "frame 30 of 30")])
        assert not await finish(store, claim)
        task = await task_of(store, claim)
        assert (task.progress, task.progress_note) == (1.0, "frame 30 of 30")


async def complete_in_a_batch(store: AnyStore, claim: Claim) -> list[Any]:
    return (await store.finish_and_claim("w1", [Finished(claim.task_id, claim.token, None)], (), 0)).lost


async def test_progress_note_may_be_any_text(store: AnyStore) -> None:
    claim = await claimed(store)
    await store.heartbeat("w1", [held(claim, 0.5, "NUL \x00, half a pair \udc80" + "x" * 600)])
    note = (await task_of(store, claim)).progress_note or ""
    assert note.startswith("NUL \\0, half a pair \\udc80x")
    assert len(note) == 500


async def test_progress_of_lost_claim_is_ignored(store: AnyStore) -> None:
    old = await claimed(store)
    await store.release("w1", old.task_id, old.token, "released")
    await register(store, "w2")
    new = await claim_one(store, "w2")
    await store.heartbeat("w1", [held(old, 0.9, "almost")])
    assert (await task_of(store, new)).progress is None


async def test_progress_is_reset_for_each_attempt(store: AnyStore, clock: Any) -> None:
    claim = await claimed(store)
    await store.heartbeat("w1", [held(claim, 0.9, "almost")])
    await fail(store, claim, jitter=0)
    clock.advance(RETRY_FIRST_S)
    await claim_one(store)
    task = await task_of(store, claim)
    assert (task.progress, task.progress_note) == (None, None)


async def test_heartbeat_of_terminated_worker_changes_nothing(store: AnyStore, clock: Any) -> None:
    claim = await claimed(store)
    await store.deregister("w1", "done")
    before = await store.worker("w1")
    clock.advance(1)
    pulse = await store.heartbeat("w1", [held(claim, 0.5)], {"pid": 99})
    assert (pulse.status, pulse.is_paused, pulse.lost) == (WorkerStatus.TERMINATED, False, {claim.token})
    assert await store.worker("w1") == before
    assert (await task_of(store, claim)).progress is None


async def test_heartbeat_of_unknown_worker_has_no_status(store: AnyStore) -> None:
    token = uuid4()
    pulse = await store.heartbeat("unknown", [HeldClaim(1, token)])
    assert (pulse.status, pulse.is_paused, pulse.lost) == (None, False, {token})
    assert await store.worker("unknown") is None


async def test_unreceived_claim_is_released_after_a_lease(store: AnyStore, clock: Any) -> None:
    await register(store, "w1", lease_s=30)
    ids = [await add(store), await add(store)]
    received, _never_received = await store.claim("w1", ("q",), 2)
    clock.advance(30)
    await store.heartbeat("w1", [held(received)])
    assert await status_of(store, ids[1]) is TaskStatus.RUNNING
    clock.advance(0.000001)
    await store.heartbeat("w1", [held(received)])
    assert await status_of(store, ids[0]) is TaskStatus.RUNNING
    task = await task_of(store, ids[1])
    assert (task.status, task.attempts) == (TaskStatus.QUEUED, 0)
    assert await codes(store, task_id=ids[1]) == ["TASK_RELEASED"]


async def test_heartbeat_of_many_claims_releases_only_the_unnamed_one(store: AnyStore, clock: Any) -> None:
    """Over HTTP such a heartbeat takes several calls. Claims of one task, and all tasks between two calls, count."""
    await register(store, "w1", concurrency=1_500)
    await store.enqueue_many([NewTask("q")] * 1_000)
    claims = await store.claim("w1", ("q",), 1_000)
    unnamed = {claims[0].task_id, claims[382].task_id, claims[500].task_id, claims[-1].task_id}
    named = [claim for claim in claims if claim.task_id not in unnamed]
    clock.advance(31)
    made_up = [HeldClaim(claim.task_id, uuid4()) for claim in named[:500]]
    notes = [held(claim, 0.5, "\x01" * 500) for claim in named[:30]]
    reply = await store.heartbeat("w1", [*notes, *map(held, named[30:]), *made_up], {"load": 1})
    assert (reply.status, reply.lost) == (WorkerStatus.ACTIVE, {claim.token for claim in made_up})
    assert {task.id for task in await store.tasks(status=TaskStatus.QUEUED)} == unnamed
    worker = await store.worker("w1")
    assert worker is not None
    assert worker.metadata == {"load": 1}
