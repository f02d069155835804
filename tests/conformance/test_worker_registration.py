"""Registering, deregistering, pausing and draining workers."""

import math
from typing import Any

import pytest

from support.queue_actions import add, claim_one, claimed, codes, complete, register, status_of, task_of
from support.stores import AnyStore
from windlass.model.errors import BadInput
from windlass.model.task import TaskStatus
from windlass.model.worker import Registration, WorkerKind, WorkerStatus


async def test_unmanaged_worker_is_active_at_once(store: AnyStore, clock: Any) -> None:
    registration = Registration(
        "w1", ("q", "r"), fleet="cpus", concurrency=3, lease_s=12.5, host="box", pid=7, version="1"
    )
    assert await store.register(registration) is WorkerStatus.ACTIVE
    worker = await store.worker("w1")
    assert worker is not None
    assert (worker.status, worker.slot, worker.fleet, worker.queues) == (WorkerStatus.ACTIVE, None, "cpus", ("q", "r"))
    assert (worker.concurrency, worker.lease_s) == (3, 12.5)
    assert (worker.host, worker.pid, worker.version) == ("box", 7, "1")
    assert (worker.created_at, worker.activated_at, worker.last_heartbeat) == (clock(), clock(), None)
    (event,) = await store.events(worker_id="w1")
    assert (event.code, event.fleet) == ("WORKER_REGISTERED", "cpus")
    assert event.reason == "registered on box, serving q, r"


async def test_spawned_worker_keeps_its_row_when_it_registers(store: AnyStore, spawn_worker: Any, clock: Any) -> None:
    await spawn_worker("h1", "gpus", 3)
    spawned_at = clock()
    clock.advance(40)
    registration = Registration(
        "h1", ("r",), fleet="elsewhere", host="pod", concurrency=7, lease_s=86_400, kind=WorkerKind.DISPATCHER
    )
    assert await store.register(registration) is WorkerStatus.SPAWNING
    worker = await store.worker("h1")
    assert worker is not None
    assert (worker.fleet, worker.slot, worker.status) == ("gpus", 3, WorkerStatus.SPAWNING)
    assert (worker.queues, worker.host, worker.created_at) == (("q",), "pod", spawned_at)
    assert (worker.concurrency, worker.lease_s, worker.kind) == (1, 30.0, WorkerKind.WORKER)
    (event,) = await store.events(worker_id="h1")
    assert event.fleet == "gpus"


async def test_registered_worker_keeps_its_kind(store: AnyStore) -> None:
    await register(store, "w1")
    await store.register(Registration("w1", ("q",), kind=WorkerKind.DISPATCHER))
    worker = await store.worker("w1")
    assert worker is not None
    assert worker.kind is WorkerKind.WORKER


async def test_repeated_registration_updates_worker(store: AnyStore, clock: Any) -> None:
    await register(store, "w1", pid=1)
    created_at = clock()
    await store.heartbeat("w1")
    clock.advance(10)
    assert await store.register(Registration("w1", ("r",), pid=2)) is WorkerStatus.ACTIVE
    worker = await store.worker("w1")
    assert worker is not None
    assert (worker.queues, worker.pid, worker.created_at, worker.last_heartbeat) == (
        ("r",),
        2,
        created_at,
        created_at,
    )


@pytest.mark.parametrize("is_managed", [False, True], ids=["started by hand", "spawned"])
@pytest.mark.parametrize(
    "starts", [("one", "two", "three"), (None, None, None)], ids=["starts with an id", "starts without an id"]
)
async def test_task_that_kills_restarting_worker_becomes_failed(
    store: AnyStore, spawn_worker: Any, clock: Any, starts: tuple[str | None, ...], is_managed: bool
) -> None:
    if is_managed:
        await spawn_worker("w1", "gpus", 0)
    poison = await add(store, max_attempts=2)
    for start_id, (attempts, status) in zip(
        starts, [(0, TaskStatus.QUEUED), (1, TaskStatus.QUEUED), (2, TaskStatus.FAILED)], strict=True
    ):
        # In a container, host and pid are the same again.
        await register(store, "w1", host="pod", pid=1, start_id=start_id)
        task = await task_of(store, poison)
        assert (task.attempts, task.status) == (attempts, status)
        await store.heartbeat("w1")
        await store.claim("w1", ("q",))
        clock.advance(10)
    assert (task.worker_id, task.error_code, task.error) == ("w1", "WORKER_LOST", "its worker restarted")
    assert await codes(store, task_id=poison) == ["TASK_REQUEUED", "TASK_FAILED"]


async def test_repeated_registration_keeps_claims(store: AnyStore) -> None:
    claim = await claimed(store)
    await register(store, "w1")
    assert await complete(store, claim) == []


async def test_ended_worker_cannot_register_again(store: AnyStore) -> None:
    await register(store, "w1")
    await store.deregister("w1", "done")
    assert await store.register(Registration("w1", ("q",))) is WorkerStatus.TERMINATED
    assert await codes(store, worker_id="w1") == ["WORKER_REGISTERED", "WORKER_DEREGISTERED"]


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(Registration("w1", ("q",), fleet="no name"), id="a fleet's name that is none"),
        pytest.param(Registration("w1", ("q",), concurrency=0), id="no concurrency"),
        pytest.param(Registration("w1", ("q",), lease_s=0), id="no lease"),
        pytest.param(Registration("w1", ("q",), lease_s=math.inf), id="a lease without end"),
        pytest.param(Registration("w1", ("q",), lease_s=1e300), id="a lease that no interval can hold"),
        pytest.param(Registration("w1", ("q",), lease_s=86_401), id="a lease of more than a day"),
        pytest.param(Registration("w1", ("q",), lease_s=0.5), id="a lease of less than a second"),
        pytest.param(Registration("w1", ("q",), concurrency=10_001), id="too much concurrency"),
        pytest.param(Registration("w1", ("<q>",)), id="a queue's name that is none"),
    ],
)
async def test_invalid_registration_is_refused(store: AnyStore, bad: Registration) -> None:
    with pytest.raises(BadInput):
        await store.register(bad)
    assert await store.workers(include_terminated=True) == []


async def test_tasks_of_deregistered_worker_are_requeued(store: AnyStore, clock: Any) -> None:
    await register(store, "w1", "w2")
    ids = [await add(store), await add(store)]
    claims = await store.claim("w1", ("q",), 2)
    clock.advance(1)
    await store.deregister("w1", "going home")
    worker = await store.worker("w1")
    assert worker is not None
    assert (worker.status, worker.terminated_at) == (WorkerStatus.TERMINATED, clock())
    assert (worker.code, worker.reason) == ("DEREGISTERED", "going home")
    again = await store.claim("w2", ("q",), 2)
    assert [(claim.task_id, claim.attempt) for claim in again] == [(task_id, 1) for task_id in ids]
    assert await complete(store, claims[0]) == [claims[0].token]


async def test_deregistered_spawned_worker_is_terminated_by_control_loop(store: AnyStore, spawn_worker: Any) -> None:
    await spawn_worker("h1", "gpus", 0)
    await add(store)
    claim = await claim_one(store, "h1")
    await store.deregister("h1", "going home")
    worker = await store.worker("h1")
    assert worker is not None
    assert (worker.status, worker.terminated_at) == (WorkerStatus.TERMINATING, None)
    assert (worker.code, worker.reason) == ("DEREGISTERED", "going home")
    assert await status_of(store, claim) is TaskStatus.QUEUED
    assert await store.claim("h1", ("q",)) == []


async def test_repeated_or_unknown_deregistration_does_nothing(store: AnyStore) -> None:
    await register(store, "w1")
    await store.deregister("w1", "first")
    await store.deregister("w1", "second")
    await store.deregister("unknown", "third")
    assert await codes(store, worker_id="w1") == ["WORKER_REGISTERED", "WORKER_DEREGISTERED"]
    assert await codes(store, worker_id="unknown") == []


async def test_terminating_worker_keeps_its_reason_on_deregistration(store: AnyStore) -> None:
    await register(store, "w1")
    await store.set_terminating(["w1"], "too expensive")
    await store.deregister("w1", "drained")
    worker = await store.worker("w1")
    assert worker is not None
    assert (worker.code, worker.reason) == ("MANUAL", "too expensive")


async def test_set_paused_counts_changed_workers(store: AnyStore) -> None:
    await register(store, "w1", "w2", "w3")
    await store.deregister("w3", "done")
    assert await store.set_paused(["w1", "w2", "w3", "unknown", "w1"], True) == 2
    assert await store.set_paused(["w1", "w2"], True) == 0
    assert await store.set_paused(["w2"], False) == 1
    assert [(worker.id, worker.is_paused) for worker in await store.workers()] == [("w1", True), ("w2", False)]
    assert await codes(store, worker_id="w2") == ["WORKER_REGISTERED", "WORKER_PAUSED", "WORKER_RESUMED"]


async def test_set_terminating_counts_changed_workers(store: AnyStore) -> None:
    await register(store, "w1", "w2", "w3")
    await store.deregister("w3", "done")
    assert await store.set_terminating(["w1", "w2", "w3", "unknown", "w1"], "enough") == 2
    assert await store.set_terminating(["w1"], "again") == 0
    worker = await store.worker("w1")
    assert worker is not None
    assert (worker.status, worker.code, worker.reason) == (WorkerStatus.TERMINATING, "MANUAL", "enough")
    assert await codes(store, worker_id="w1") == ["WORKER_REGISTERED", "WORKER_TERMINATING"]
