"""Recording outcomes of provider calls, and legal status transitions."""

from dataclasses import replace

import pytest

from support.control_actions import ControlStores, Leader, SetStatus, VirtualClock, events, intent, machine
from windlass.model.action import (
    Action,
    Adopt,
    Drain,
    Fail,
)
from windlass.model.errors import BadInput
from windlass.model.machine import Machine, MachineExit, MachineState
from windlass.model.outcome import (
    Created,
    CreationRefused,
    CreationUnclear,
    Deleted,
    NotDeleted,
    OrphanDeleted,
)
from windlass.model.snapshot import (
    ProviderRefusal,
)
from windlass.model.task import NewTask, TaskStatus
from windlass.model.worker import Registration, WorkerStatus


async def test_created_machine_is_stored_with_its_worker(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.spawn_worker(0)
    clock.advance(2)
    await ann.report(Created("w0", machine(1)))
    known_at = clock()
    clock.advance(2)
    await ann.report(Created("w0", machine(1)), Created("w0", machine(2)), CreationUnclear("w0", "late word"))
    (view,) = (await ann.observe()).workers
    assert (view.machine_id, view.machine_at, view.creation) == ("m1", known_at, "created")
    worker = await store.worker("w0")
    assert (worker.machine_id, worker.instance_type, worker.place) == ("m1", "tiny", "nbg1")


async def test_created_machine_is_not_stored_with_a_worker_without_a_slot(store: ControlStores, ann: Leader) -> None:
    """A failover lost the spawned worker's row, and it registered again."""
    await store.register(Registration("w0", fleet="f", queues=("a",)))
    await ann.report(Created("w0", machine(1)))
    (view,) = (await ann.observe()).workers
    assert (view.slot, view.machine_id, view.bill) == (None, None, None)


async def test_ambiguous_creation_keeps_its_slot(store: ControlStores, ann: Leader) -> None:
    await ann.spawn_worker(0)
    await ann.report(CreationUnclear("w0", "no answer"))
    (view,) = (await ann.observe()).workers
    assert (view.status, view.creation, view.machine_id) == ("spawning", "ambiguous", None)
    assert "MACHINE_AMBIGUOUS" in await events(store, "w0")


@pytest.mark.parametrize(("code", "is_failure"), [("REFUSED", True), ("NO_CAPACITY", False), ("LEASE_LOST", False)])
async def test_refused_creation_terminates_worker(
    store: ControlStores, ann: Leader, code: str, is_failure: bool
) -> None:
    await ann.spawn_worker(0)
    await ann.report(CreationRefused("w0", code, "said no"))
    worker = await store.worker("w0")
    assert (worker.status, worker.code, worker.reason) == (WorkerStatus.TERMINATED, code, "said no")
    snapshot = await ann.observe()
    assert [launch.has_failed for launch in snapshot.launches] == [is_failure]
    assert snapshot.slots == ()
    assert (await ann.commit(intents=(intent("y0", 0),))).granted == {"y0"}


@pytest.mark.parametrize("meanwhile", [Fail("w0", "SPAWNING_TIMEOUT", "x"), Drain("w0", "MANUAL", "x")])
async def test_refusal_terminates_failed_or_draining_worker(
    store: ControlStores, ann: Leader, meanwhile: Action
) -> None:
    await ann.spawn_worker(0)
    await ann.commit(meanwhile)
    await ann.report(CreationRefused("w0", "NO_CAPACITY", "said no"))
    assert (await store.worker("w0")).status is WorkerStatus.TERMINATED


@pytest.mark.parametrize("code", ["LIMIT_REACHED", "DENIED", "INVALID_REQUEST", "NO_CAPACITY", "PROVIDER_PAUSE"])
async def test_fleet_refusal_is_observed_until_next_machine(clock: VirtualClock, ann: Leader, code: str) -> None:
    assert (await ann.observe()).refusal is None
    await ann.spawn_worker(0, 1, 2, 3)
    clock.advance(5)
    refused_at = clock()
    await ann.report(CreationRefused("w0", code, "said no"))
    await ann.report(Created("w1", machine(1, "w1")))  # at the same moment, so it may have come first
    clock.advance(5)
    await ann.report(CreationRefused("w2", "REFUSED", "a plain no is about one machine"))
    assert (await ann.observe()).refusal == ProviderRefusal(code, "said no", refused_at)
    await ann.report(Created("w3", machine(3, "w3")))
    assert (await ann.observe()).refusal is None


async def test_latest_spawned_wins_among_simultaneous_refusals(ann: Leader) -> None:
    await ann.spawn_worker(0, 1)
    await ann.report(CreationRefused("w0", "DENIED", "zero"), CreationRefused("w1", "DENIED", "one"))
    refusal = (await ann.observe()).refusal
    assert refusal is not None
    assert refusal.reason == "one"


async def test_refusal_does_not_terminate_worker_with_machine(store: ControlStores, ann: Leader) -> None:
    await ann.spawn_worker(0)
    await ann.commit(Adopt("w0", "m1", "found"))
    await ann.report(CreationRefused("w0", "REFUSED", "said no"))
    (view,) = (await ann.observe()).workers
    assert (view.status, view.machine_id) == ("spawning", "m1")


async def test_address_of_a_machine_is_that_of_its_worker(store: ControlStores, ann: Leader) -> None:
    await ann.spawn_worker(0)
    await ann.report(Created("w0", replace(machine(1), address="203.0.113.7")))
    assert (await store.worker("w0")).address == "203.0.113.7"
    # A provider may report it later, or without it once more.
    await ann.report(Created("w0", machine(1)))
    assert (await store.worker("w0")).address == "203.0.113.7"


async def test_deleted_machine_terminates_worker_and_requeues_tasks(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.spawn_worker(0)
    task_id = await store.enqueue(NewTask("a"))
    await store.claim("w0", ("a",), 1)
    await ann.commit(Drain("w0", "IDLE", "idle"))
    await ann.report(Deleted("w0", None, "DRAIN_TIMEOUT", "still at work"))
    worker = await store.worker("w0")
    assert (worker.status, worker.terminated_at, worker.code) == (WorkerStatus.TERMINATED, clock(), "IDLE")
    task = await store.task(task_id)
    assert (task.status, task.error_code) == (TaskStatus.QUEUED, "DRAIN_TIMEOUT")
    before = await events(store)
    await ann.report(Deleted("w0", None, "X", "x"), Deleted("unknown", None, "X", "x"))
    assert await events(store) == before


@pytest.mark.parametrize(
    ("ended", "stored"),
    [
        (MachineExit(code=7), {"code": 7}),
        (MachineExit(signal="SIGKILL"), {"signal": "SIGKILL"}),
        (MachineExit(status="ERROR"), {"status": "ERROR"}),
        (None, None),
    ],
    ids=["exit code", "signal", "vendor status", "unknown"],
)
async def test_exit_of_a_machine_is_part_of_the_diagnostics(
    store: ControlStores, ann: Leader, ended: MachineExit | None, stored: object
) -> None:
    await ann.spawn_worker(0)
    await ann.report(
        Deleted("w0", None, "MACHINE_GONE", "gone", machine_state=MachineState.EXITED, machine_note="it is gone",
                machine_exit=ended)
    )  # fmt: skip
    diagnostics = await store.diagnostics("w0")
    assert diagnostics is not None
    assert diagnostics["machine"] == {"state": "exited", "note": "it is gone"}
    assert diagnostics.get("exit") == stored


async def test_text_that_cannot_be_stored_does_not_lose_a_deletion(store: ControlStores, ann: Leader) -> None:
    await ann.spawn_worker(0)
    await ann.report(Deleted("w0", None, "X", "said \0 or \ud800", boot_log="before\0after \udfff"))
    assert (await store.worker("w0")).status is WorkerStatus.TERMINATED
    (entry,) = (await store.worker_log("w0", 10)).lines
    assert entry.text == "before\\0after \\udfff"


@pytest.mark.parametrize(
    ("known", "deleted", "is_over"),
    [
        pytest.param(None, None, True, id="never had one"),
        pytest.param(None, "m1", True, id="found and deleted before it was known"),
        pytest.param("m1", "m1", True, id="its own is gone"),
        pytest.param("m1", None, False, id="got one since it was said to have none"),
        pytest.param("m2", "m1", False, id="has another one"),
    ],
)
async def test_deletion_of_old_machine_keeps_worker_with_a_new_one(
    store: ControlStores, ann: Leader, known: str | None, deleted: str | None, is_over: bool
) -> None:
    """Outcomes are recorded for any reporter: a former leader may report an outdated one."""
    await ann.spawn_worker(0)
    if known is not None:
        await ann.report(Created("w0", machine(int(known[1:]))))
    task_id = await store.enqueue(NewTask("a"))
    await store.claim("w0", ("a",), 1)
    await ann.report(Deleted("w0", deleted, "X", "x"))
    assert ((await store.worker("w0")).status is WorkerStatus.TERMINATED) is is_over
    assert ((await store.task(task_id)).status is TaskStatus.QUEUED) is is_over


async def test_failed_deletions_and_orphans_only_record_events(store: ControlStores, ann: Leader) -> None:
    await ann.spawn_worker(0)
    before = await store.workers()
    await ann.report(NotDeleted("w0", "denied"), OrphanDeleted(Machine("m7", "w7", MachineState.RUNNING), "orphaned"))
    assert await store.workers() == before
    assert await events(store, "w0") == ["WORKER_SPAWNED", "MACHINE_NOT_DELETED"]
    assert await events(store, "w7") == ["ORPHAN_DELETED"]


LIFE = [
    WorkerStatus.SPAWNING,
    WorkerStatus.ACTIVE,
    WorkerStatus.TERMINATING,
    WorkerStatus.ERROR,
    WorkerStatus.TERMINATED,
]


@pytest.mark.parametrize("before", LIFE)
async def test_worker_status_moves_only_forward(
    store: ControlStores, ann: Leader, set_status: SetStatus, before: WorkerStatus
) -> None:
    for number, after in enumerate(LIFE):
        worker_id = f"w{before}{number}"
        await ann.commit(intents=(intent(worker_id, 0),))
        await set_status(worker_id, before)
        if LIFE.index(after) < LIFE.index(before):
            with pytest.raises(BadInput, match=f"cannot change from {before} to {after}"):
                await set_status(worker_id, after)
            assert (await store.worker(worker_id)).status is before
        else:
            await set_status(worker_id, after)
            assert (await store.worker(worker_id)).status is after
        await set_status(worker_id, WorkerStatus.TERMINATED)
