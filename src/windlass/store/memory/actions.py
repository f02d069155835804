"""What a plan decided, as far as no provider is needed for it."""

from typing import assert_never

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
    RecordPrice,
    Requeue,
    Spawn,
)
from windlass.model.machine import Machine
from windlass.model.snapshot import Snapshot
from windlass.model.worker import WorkerStatus
from windlass.store.memory.ledger import open_bill
from windlass.store.memory.tables import Tables


def apply_action(tables: Tables, action: Action, snapshot: Snapshot) -> int:
    """How many tasks it took from their workers."""
    fleet = snapshot.fleet
    match action:
        case Fail(worker_id, code, reason, evidence, attempt_refund):
            return tables.fail_worker(
                worker_id, code, reason, counts=True, evidence=evidence, attempt_refund=attempt_refund
            )
        case Requeue(worker_id, reason):
            return tables.requeue_tasks_of(worker_id, "WORKER_LOST", reason)
        case Promote():
            _promote(tables, fleet, action)
        case Drain():
            _drain(tables, fleet, action)
        case Adopt():
            _adopt(tables, action, snapshot)
        case RecordPrice():
            _price(tables, action, snapshot)
        case Prepare():
            _prepare(tables, fleet, action)
        case FailSlot(number, reason):
            slot = tables.fleets[fleet].slots.get(number)
            if slot is not None:
                slot.is_failed = True
            tables.journal.note("SLOT_FAILED", reason, fleet=fleet, detail={"slot": number})
        case RaiseAlert(code, reason, worker_id, about):
            detail = {"code": code} | ({"about": about} if about else {})
            tables.journal.note("ALERT", reason, fleet=fleet, worker_id=worker_id, detail=detail)
        case Delete() | DeleteOrphan() | Spawn() | GrowVolume():
            pass  # the provider's to do first
        case _:
            assert_never(action)
    return 0


def _promote(tables: Tables, fleet: str, action: Promote) -> None:
    worker = tables.workers.among((WorkerStatus.SPAWNING,), action.worker_id)
    if worker is not None:
        worker.move(WorkerStatus.ACTIVE)
        worker.activated_at = tables.now()
        tables.journal.note("WORKER_ACTIVATED", action.reason, fleet=fleet, worker_id=worker.id)


def _prepare(tables: Tables, fleet: str, action: Prepare) -> None:
    worker = tables.workers.among((WorkerStatus.SPAWNING,), action.worker_id)
    if worker is not None and worker.hired.preparing_at is None:
        worker.hired.preparing_at = tables.now()
        tables.journal.note("MACHINE_PREPARING", action.reason, fleet=fleet, worker_id=worker.id)


def _drain(tables: Tables, fleet: str, action: Drain) -> None:
    worker = tables.workers.get(action.worker_id)
    if worker is not None and worker.is_staying:
        worker.move(WorkerStatus.TERMINATING)
        worker.hired.terminating_at = tables.now()
        worker.code, worker.reason = action.code, action.reason
        tables.journal.note("WORKER_TERMINATING", action.reason, fleet=fleet, worker_id=worker.id)


def _adopt(tables: Tables, action: Adopt, snapshot: Snapshot) -> None:
    worker = tables.workers.get(action.worker_id)
    if worker is not None and worker.hired.machine_id is None:
        hired, now = worker.hired, tables.now()
        hired.machine_id, hired.machine_at, hired.creation = action.machine_id, now, "created"
        if action.is_prepared:
            hired.prepared_at = hired.prepared_at or now
        if (machine := _listed(snapshot, action.machine_id)) is not None:
            hired.instance_type, hired.place = machine.instance_type, machine.place
        _price(tables, action, snapshot)
        tables.journal.note("MACHINE_ADOPTED", action.reason, fleet=snapshot.fleet, worker_id=worker.id)


def _price(tables: Tables, action: Adopt | RecordPrice, snapshot: Snapshot) -> None:
    if (machine := _listed(snapshot, action.machine_id)) is not None:
        open_bill(tables.workers.get(action.worker_id), machine, snapshot.traits.billing_unit_s, tables.now())


def _listed(snapshot: Snapshot, machine_id: str) -> Machine | None:
    return next((machine for machine in snapshot.machines or () if machine.id == machine_id), None)
