"""Committing plans and granting intents."""

from dataclasses import replace

from support.control_actions import (
    ControlStores,
    Leader,
    VirtualClock,
    events,
    intent,
    machine,
)
from windlass.model.action import (
    Adopt,
    Delete,
    DeleteOrphan,
    Drain,
    Fail,
    FailSlot,
    Prepare,
    Promote,
    RaiseAlert,
    Spawn,
)
from windlass.model.fleet import FleetConfig
from windlass.model.machine import ProviderTraits
from windlass.model.outcome import (
    Created,
    Deleted,
    HostKeySeen,
    Intent,
    PreparationFailed,
    PreparationUnclear,
    Prepared,
)
from windlass.model.task import Finished, NewTask, TaskStatus
from windlass.model.worker import Registration, WorkerStatus


async def test_promote_activates_spawning_worker_once(store: ControlStores, clock: VirtualClock, ann: Leader) -> None:
    await ann.spawn_worker(0)
    clock.advance(3)
    await ann.commit(Promote("w0", "first heartbeat"))
    worker = await store.worker("w0")
    assert (worker.status, worker.activated_at) == (WorkerStatus.ACTIVE, clock())
    activated_at = clock()
    clock.advance(3)
    await ann.commit(Promote("w0", "first heartbeat"), Promote("unknown", "first heartbeat"))
    assert (await store.worker("w0")).activated_at == activated_at
    assert await events(store, "w0") == ["WORKER_SPAWNED", "WORKER_ACTIVATED"]


async def test_failed_worker_requeues_tasks_and_counts_a_restart(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.spawn_worker(0)
    await store.register(Registration("w0", ("a",), fleet="f", concurrency=2))
    again = await store.enqueue(NewTask("a"))
    over = await store.enqueue(NewTask("a", max_attempts=1))
    claims = await store.claim("w0", ("a",), 2)
    committed = await ann.commit(Fail("w0", "CRASHED", "it crashed"))
    assert committed.requeued == 2
    assert (await store.task(again)).status is TaskStatus.QUEUED
    assert (await store.task(over)).status is TaskStatus.FAILED
    worker = await store.worker("w0")
    assert (worker.status, worker.code, worker.reason) == (WorkerStatus.ERROR, "CRASHED", "it crashed")
    turn = await store.finish_and_claim("w0", [Finished(c.task_id, c.token, "1") for c in claims], (), 0)
    assert len(turn.lost) == 2
    snapshot = await ann.observe()
    assert [slot.restarts for slot in snapshot.slots] == [(clock(),)]
    assert [launch.has_failed for launch in snapshot.launches] == [True]
    assert (await ann.commit(Fail("w0", "AGAIN", "again"))).requeued == 0
    assert (await store.worker("w0")).code == "CRASHED"


async def test_proven_worker_that_failed_is_no_failed_launch(store: ControlStores, ann: Leader) -> None:
    await ann.spawn_worker(0, 1)
    await ann.commit(Fail("w0", "CRASHED", "x", is_proven=True), Fail("w1", "CRASHED", "x"))
    snapshot = await ann.observe()
    assert [(launch.slot, launch.has_failed) for launch in snapshot.launches] == [(0, False), (1, True)]
    assert [len(slot.restarts) for slot in snapshot.slots] == [1, 1], "its slot still counts a restart"


async def test_failed_worker_keeps_its_slot(store: ControlStores, ann: Leader) -> None:
    await ann.spawn_worker(0)
    await ann.commit(Fail("w0", "CRASHED", "x"))
    assert (await ann.commit(intents=(intent("again", 0),))).granted == frozenset()


async def test_drain_sets_worker_terminating_with_its_time(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.spawn_worker(0)
    clock.advance(2)
    await ann.commit(Drain("w0", "IDLE", "idle 41 s"))
    drained_at = clock()
    clock.advance(2)
    await ann.commit(Drain("w0", "OTHER", "again"))
    (view,) = (await ann.observe()).workers
    assert (view.status, view.terminating_at, view.code, view.reason) == (
        "terminating", drained_at, "IDLE", "idle 41 s",
    )  # fmt: skip
    assert (await store.heartbeat("w0")).status is WorkerStatus.TERMINATING
    assert await events(store, "w0") == ["WORKER_SPAWNED", "WORKER_TERMINATING"]


async def test_adopt_assigns_listed_machine_to_worker(store: ControlStores, clock: VirtualClock, ann: Leader) -> None:
    await ann.spawn_worker(0)
    await ann.observe()
    ann.snapshot = replace(ann.snapshot, machines=(machine(1), machine(2)), traits=ProviderTraits())
    clock.advance(4)
    await ann.commit(Adopt("w0", "m1", "found"))
    await ann.commit(Adopt("w0", "m2", "found"))
    (view,) = (await ann.observe()).workers
    assert (view.machine_id, view.machine_at, view.creation) == ("m1", clock(), "created")
    assert view.prepared_at == clock()
    worker = await store.worker("w0")
    assert (worker.machine_id, worker.instance_type, worker.place) == ("m1", "tiny", "nbg1")


async def test_adopted_machine_that_needs_preparation_is_unprepared(store: ControlStores, ann: Leader) -> None:
    await ann.spawn_worker(0, 1)
    await ann.report(Created("w0", machine(1), is_prepared=False))
    await ann.commit(Adopt("w1", "m2", "found", is_prepared=False))
    assert [view.prepared_at for view in (await ann.observe()).workers] == [None, None]


async def test_preparation_is_recorded_before_and_after(store: ControlStores, clock: VirtualClock, ann: Leader) -> None:
    await ann.spawn_worker(0)
    await ann.report(Created("w0", machine(1), is_prepared=False))
    began_at = clock()
    await ann.commit(Prepare("w0", "m1", "it runs"))
    clock.advance(5)
    await ann.commit(Prepare("w0", "m1", "it runs"))
    await ann.report(PreparationUnclear("w0", "the connection broke"))
    (view,) = (await ann.observe()).workers
    assert (view.progress_at, view.prepared_at, view.host_key) == (began_at, None, None)
    await ann.report(Prepared("w0", "m2", "not its machine"))
    await ann.report(Prepared("w0", "m1", "ssh-ed25519 AAAA"))
    done_at = clock()
    clock.advance(5)
    await ann.report(Prepared("w0", "m1", "another"), PreparationFailed("w0", "m1", "DISK_FULL", "too late"))
    (view,) = (await ann.observe()).workers
    assert (view.prepared_at, view.prepare_code, view.host_key) == (done_at, None, "ssh-ed25519 AAAA")
    reported = ["WORKER_SPAWNED", "MACHINE_PREPARING", "PREPARATION_UNCLEAR", "MACHINE_PREPARED"]
    assert await events(store, "w0") == reported


async def test_first_host_key_is_stored_before_preparation(store: ControlStores, ann: Leader) -> None:
    await ann.spawn_worker(0)
    await ann.report(Created("w0", machine(1), is_prepared=False))
    before = await events(store, "w0")
    await ann.report(HostKeySeen("w0", "m2", "not its machine"))
    await ann.report(HostKeySeen("w0", "m1", "ssh-ed25519 AAAA"))
    await ann.report(HostKeySeen("w0", "m1", "another"), Prepared("w0", "m1", "another"))
    (view,) = (await ann.observe()).workers
    assert view.host_key == "ssh-ed25519 AAAA"
    assert await events(store, "w0") == [*before, "MACHINE_PREPARED"]


async def test_failed_preparation_records_code_and_output(store: ControlStores, ann: Leader) -> None:
    await ann.spawn_worker(0)
    await ann.report(Created("w0", machine(1), is_prepared=False))
    failed = PreparationFailed("w0", "m1", "GPU_NOT_DETECTED", "no GPU answers", "No devices were found", "key")
    await ann.report(failed)
    await ann.report(replace(failed, code="DISK_FULL"))
    (view,) = (await ann.observe()).workers
    assert (view.status, view.prepared_at) == ("spawning", None)
    assert (view.prepare_code, view.prepare_reason, view.host_key) == ("GPU_NOT_DETECTED", "no GPU answers", "key")
    (event,) = [event for event in await store.events(limit=1000) if event.code == "PREPARATION_FAILED"]
    assert event.detail == {"code": "GPU_NOT_DETECTED", "output": "No devices were found"}


async def test_failed_preparation_is_ignored_after_a_heartbeat(store: ControlStores, ann: Leader) -> None:
    await ann.spawn_worker(0)
    await ann.report(Created("w0", machine(1), is_prepared=False))
    await store.heartbeat("w0")
    await ann.report(PreparationFailed("w0", "m1", "SSH_UNREACHABLE", "no answer"))
    (view,) = (await ann.observe()).workers
    assert view.prepare_code is None


async def test_spawn_event_tells_a_replacement_from_queue_depth(store: ControlStores, ann: Leader) -> None:
    async def causes() -> list[object]:
        events = [event for event in await store.events(limit=1000) if event.code == "WORKER_SPAWNED"]
        return [(event.worker_id, (event.detail or {})["cause"]) for event in events]

    await ann.commit(Spawn(0, "wanted", "min_workers"), intents=(replace(intent("w0", 0), cause="min_workers"),))
    await ann.commit(Fail("w0", "STUCK_TASK", "Stuck task 7"))
    await ann.report(Deleted("w0", None, "STUCK_TASK", "gone"))
    await ann.commit(Spawn(0, "wanted"), intents=(intent("w1", 0),))
    await ann.report(Deleted("w1", None, "IDLE", "gone"))
    await store.terminate_worker("w1", "by hand")
    await ann.commit(Spawn(0, "wanted"), intents=(intent("w2", 0),))
    assert await causes() == [("w0", "min_workers"), ("w1", "worker_replacement"), ("w2", "queue_depth")]


async def test_first_claim_activates_a_spawning_worker(store: ControlStores, clock: VirtualClock, ann: Leader) -> None:
    await ann.spawn_worker(0)
    await store.register(Registration("w0", ("q",), fleet="f"))
    clock.advance(1)
    assert await store.claim("w0", ("q",)) == []
    assert (await store.worker("w0")).status is WorkerStatus.SPAWNING
    await store.enqueue(NewTask("q"))
    clock.advance(1)
    assert len(await store.claim("w0", ("q",))) == 1
    worker = await store.worker("w0")
    assert (worker.status, worker.activated_at) == (WorkerStatus.ACTIVE, clock())
    await ann.commit(Promote("w0", "heartbeat 1 s ago"))
    activated = [event.reason for event in await store.events(worker_id="w0") if event.code == "WORKER_ACTIVATED"]
    assert activated == ["claimed its first task"]


async def test_failed_slot_and_alert_record_events(store: ControlStores, ann: Leader) -> None:
    await ann.spawn_worker(0)
    await ann.commit(FailSlot(0, "too often"), RaiseAlert("SLOT_FAILED", "slot 0 is failed", "w0", "0"))
    reported = {event.code: event for event in await store.events(limit=1000)}
    assert (reported["SLOT_FAILED"].reason, reported["SLOT_FAILED"].detail) == ("too often", {"slot": 0})
    assert (reported["ALERT"].worker_id, reported["ALERT"].detail) == ("w0", {"code": "SLOT_FAILED", "about": "0"})


async def test_provider_actions_change_no_worker_before_outcome(store: ControlStores, ann: Leader) -> None:
    await ann.spawn_worker(0)
    before = await store.workers()
    await ann.commit(Delete("w0", "m0", "X", "x"), DeleteOrphan("m9", "w9", "x"), Spawn(1, "x"))
    assert await store.workers() == before


async def test_intents_are_granted_for_free_slots_below_maximum(store: ControlStores, ann: Leader) -> None:
    committed = await ann.commit(
        intents=(intent("x3", 3), intent("x4", 4), intent("x0", 0), intent("twin", 0), intent("x99", 99))
    )
    assert committed.granted == {"x3", "x0"}
    assert (await ann.commit(intents=(intent("y0", 0), intent("y1", 1)))).granted == {"y1"}


async def test_intent_is_granted_once(store: ControlStores, ann: Leader) -> None:
    await ann.spawn_worker(0)
    await ann.report(Deleted("w0", None, "X", "gone"))
    assert (await ann.commit(intents=(intent("w0", 0),))).granted == frozenset()


async def test_failed_slot_is_not_filled_until_restarted(store: ControlStores, ann: Leader) -> None:
    await ann.spawn_worker(0)
    await ann.commit(FailSlot(0, "too often"))
    await ann.report(Deleted("w0", None, "X", "gone"))
    assert (await ann.commit(intents=(intent("y0", 0),))).granted == frozenset()
    assert await store.restart_slots("f", 0) == 1
    assert (await ann.commit(intents=(intent("y0", 0),))).granted == {"y0"}


async def test_workers_above_lowered_maximum_count(store: ControlStores, ann: Leader) -> None:
    await ann.spawn_worker(1, 2, 3)
    await ann.observe(FleetConfig(queues=("a",), min_workers=0, max_workers=3))
    await ann.report(Deleted("w1", None, "X", "gone"))
    # Two workers are left, one of them in a slot above the maximum: one slot is free.
    assert (await ann.commit(intents=(intent("y0", 0), intent("y1", 1)))).granted == {"y0"}


async def test_spawned_worker_inherits_queues_and_pause_of_fleet(store: ControlStores, ann: Leader) -> None:
    await store.pause_fleet("f", True)
    await ann.commit(intents=(Intent("w0", 0, "wanted", 12.5),))
    worker = await store.worker("w0")
    assert (worker.fleet, worker.slot, worker.status) == ("f", 0, WorkerStatus.SPAWNING)
    assert (worker.queues, worker.is_paused, worker.lease_s) == (("a", "b"), True, 12.5)
    (spawned,) = await store.events(worker_id="w0")
    assert (spawned.code, spawned.reason, spawned.fleet, spawned.detail) == (
        "WORKER_SPAWNED",
        "wanted",
        "f",
        {"slot": 0, "cause": "queue_depth"},
    )


async def test_recorded_deletion_frees_its_slot(store: ControlStores, ann: Leader) -> None:
    await ann.spawn_worker(0, 1)
    await ann.report(Deleted("w0", None, "X", "gone"))
    assert (await ann.commit(intents=(intent("y0", 0), intent("y1", 1)))).granted == {"y0"}
