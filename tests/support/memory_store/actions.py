"""Applies the actions of a plan that need no provider."""

from typing import assert_never

from support.memory_store.ledger import open_bill
from support.memory_store.tables import Tables
from windlass.model.action import (
    Action,
    Adopt,
    Delete,
    DeleteOrphan,
    Drain,
    Fail,
    FailSlot,
    GrowVolume,
    Prepare,
    Promote,
    RaiseAlert,
    RecordEvent,
    RecordMachine,
    RecordPrice,
    Requeue,
    Spawn,
)
from windlass.model.machine import Machine, MachineState
from windlass.model.snapshot import Snapshot
from windlass.model.worker import WorkerStatus


def apply_action(tables: Tables, action: Action, snapshot: Snapshot) -> int:  # noqa: PLR0912 - one for each kind
    """Returns how many tasks it requeued."""
    fleet = snapshot.fleet
    match action:
        case Fail(worker_id, code, reason, evidence, refund, is_proven):
            return tables.fail_worker(
                worker_id, code, reason, counts=True, evidence=evidence, attempt_refund=refund, is_proven=is_proven
            )
        case Requeue(worker_id, reason):
            return tables.requeue_tasks_of(worker_id, "WORKER_LOST", reason)
        case Promote():
            _promote(tables, action)
        case Drain():
            _drain(tables, fleet, action)
        case Adopt():
            _adopt(tables, action, snapshot)
        case RecordPrice():
            _price(tables, action, snapshot)
        case RecordMachine():
            _record_machine(tables, action)
        case Prepare():
            _prepare(tables, fleet, action)
        case FailSlot(number, reason):
            slot = tables.fleets[fleet].slots.get(number)
            if slot is not None:
                slot.is_failed = True
            tables.event_log.add("SLOT_FAILED", reason, fleet=fleet, detail={"slot": number})
        case RaiseAlert(code, reason, worker_id, about):
            detail = {"code": code} | ({"about": about} if about else {})
            tables.event_log.add("ALERT", reason, fleet=fleet, worker_id=worker_id, detail=detail)
        case RecordEvent(code, reason):
            tables.event_log.add(code, reason, fleet=fleet)
        case Delete() | DeleteOrphan() | Spawn() | GrowVolume():
            pass  # recorded with its outcome, after the provider call
        case _:
            assert_never(action)
    return 0


def _promote(tables: Tables, action: Promote) -> None:
    worker = tables.workers.among((WorkerStatus.SPAWNING,), action.worker_id)
    if worker is not None:
        tables.promote(worker, action.reason)


def _record_machine(tables: Tables, action: RecordMachine) -> None:
    worker = tables.workers.get(action.worker_id)
    if worker is not None and worker.spawned.machine_id == action.machine_id:
        spawned = worker.spawned
        spawned.address = action.address or spawned.address
        spawned.machine_host = action.machine_host or spawned.machine_host
        if action.is_running:
            spawned.running_at = spawned.running_at or tables.now()


def _prepare(tables: Tables, fleet: str, action: Prepare) -> None:
    worker = tables.workers.among((WorkerStatus.SPAWNING,), action.worker_id)
    if worker is not None and worker.spawned.preparing_at is None:
        worker.spawned.preparing_at = tables.now()
        tables.event_log.add("MACHINE_PREPARING", action.reason, fleet=fleet, worker_id=worker.id)


def _drain(tables: Tables, fleet: str, action: Drain) -> None:
    worker = tables.workers.get(action.worker_id)
    if worker is not None and worker.is_staying:
        worker.move(WorkerStatus.TERMINATING)
        worker.spawned.terminating_at = tables.now()
        worker.code, worker.reason = action.code, action.reason
        tables.event_log.add("WORKER_TERMINATING", action.reason, fleet=fleet, worker_id=worker.id)


def _adopt(tables: Tables, action: Adopt, snapshot: Snapshot) -> None:
    worker = tables.workers.get(action.worker_id)
    if worker is not None and worker.spawned.machine_id is None:
        spawned, now = worker.spawned, tables.now()
        spawned.machine_id, spawned.machine_at, spawned.creation = action.machine_id, now, "created"
        if action.is_prepared:
            spawned.prepared_at = spawned.prepared_at or now
        if (machine := _listed(snapshot, action.machine_id)) is not None:
            spawned.instance_type, spawned.place = machine.instance_type, machine.place
            spawned.machine_created_at = machine.created_at
            spawned.address, spawned.machine_host = machine.address, machine.host
            spawned.running_at = now if machine.state is MachineState.RUNNING else None
            if machine.misplaced is not None:
                spawned.prepare_code, spawned.prepare_reason = "MISPLACED", machine.misplaced
        _price(tables, action, snapshot)
        tables.event_log.add("MACHINE_ADOPTED", action.reason, fleet=snapshot.fleet, worker_id=worker.id)


def _price(tables: Tables, action: Adopt | RecordPrice, snapshot: Snapshot) -> None:
    if (machine := _listed(snapshot, action.machine_id)) is not None:
        open_bill(tables.workers.get(action.worker_id), machine, snapshot.traits.billing_unit_s, tables.now())


def _listed(snapshot: Snapshot, machine_id: str) -> Machine | None:
    return next((machine for machine in snapshot.machines or () if machine.id == machine_id), None)
