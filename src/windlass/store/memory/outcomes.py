"""What providers did, written down. One that came too late, or is about another machine, changes nothing."""

from typing import assert_never

from windlass.model.outcome import (
    Created,
    CreationRefused,
    CreationUnclear,
    Deleted,
    HostKeySeen,
    NotDeleted,
    OrphanDeleted,
    Outcome,
    PreparationFailed,
    PreparationUnclear,
    Prepared,
    VolumeGrown,
    VolumeNotGrown,
)
from windlass.model.worker import WorkerStatus
from windlass.store.memory.ledger import close_bill, open_bill
from windlass.store.memory.tables import Tables
from windlass.store.memory.workers import MemoryWorker


def record_outcome(tables: Tables, fleet: str, outcome: Outcome) -> None:  # noqa: PLR0912 - one for each kind
    note = tables.journal.note
    match outcome:
        case Created():
            _created(tables, outcome)
        case CreationUnclear(worker_id, reason):
            worker = tables.workers.get(worker_id)
            if worker is not None and worker.hired.creation is None:
                worker.hired.creation = "ambiguous"
            note("MACHINE_AMBIGUOUS", reason, fleet=fleet, worker_id=worker_id)
        case CreationRefused():
            _refused(tables, fleet, outcome)
        case Deleted():
            _deleted(tables, fleet, outcome)
        case NotDeleted(worker_id, reason):
            note("MACHINE_NOT_DELETED", reason, fleet=fleet, worker_id=worker_id)
        case OrphanDeleted():
            _orphan_deleted(tables, fleet, outcome)
        case HostKeySeen(worker_id, machine_id, host_key):
            worker = tables.workers.get(worker_id)
            if worker is not None and worker.hired.machine_id == machine_id:
                worker.hired.host_key = worker.hired.host_key or host_key
        case Prepared() | PreparationFailed():
            _prepared_or_not(tables, fleet, outcome)
        case PreparationUnclear(worker_id, reason):
            note("PREPARATION_UNCLEAR", reason, fleet=fleet, worker_id=worker_id)
        case VolumeGrown(volume_id, size_gb, reason):
            note("VOLUME_GROWN", reason, fleet=fleet, detail={"volume_id": volume_id, "size_gb": size_gb})
        case VolumeNotGrown(volume_id, size_gb, reason):
            note("VOLUME_NOT_GROWN", reason, fleet=fleet, detail={"volume_id": volume_id, "size_gb": size_gb})
        case _:
            assert_never(outcome)


def _created(tables: Tables, outcome: Created) -> None:
    worker, machine, now = tables.workers.get(outcome.worker_id), outcome.machine, tables.now()
    if worker is not None and worker.hired.machine_id in (None, machine.id):
        hired = worker.hired
        hired.machine_id, hired.creation = machine.id, "created"
        hired.instance_type, hired.place = machine.instance_type, machine.place
        hired.machine_at = hired.machine_at or now
        if outcome.is_prepared:
            hired.prepared_at = hired.prepared_at or now
        open_bill(worker, machine, outcome.billing_unit_s, now)


def _refused(tables: Tables, fleet: str, outcome: CreationRefused) -> None:
    worker, code = tables.workers.not_terminated.get(outcome.worker_id), outcome.code
    if worker is not None and worker.hired.machine_id is None:
        worker.code, worker.reason = code, outcome.reason
        worker.hired.creation, worker.hired.failed_at = "refused", tables.now() if code == "REFUSED" else None
        tables.terminate(worker)
        tables.journal.note("MACHINE_REFUSED", outcome.reason, fleet=fleet, worker_id=worker.id, detail={"code": code})


def _deleted(tables: Tables, fleet: str, outcome: Deleted) -> None:
    worker, now = tables.workers.not_terminated.get(outcome.worker_id), tables.now()
    if worker is not None and worker.hired.machine_id in (None, outcome.machine_id):
        close_bill(worker, outcome.ended_at or now, now)
        worker.explain_end(outcome.code, outcome.reason)
        tables.terminate(worker)
        tables.requeue_tasks_of(worker.id, outcome.code, outcome.reason)
        tables.journal.note("WORKER_TERMINATED", outcome.reason, fleet=fleet, worker_id=worker.id)


def _orphan_deleted(tables: Tables, fleet: str, outcome: OrphanDeleted) -> None:
    """Somebody pays for it too: it gets a row, so that its bill is settled like any other."""
    machine, now = outcome.machine, tables.now()
    tables.journal.note("ORPHAN_DELETED", outcome.reason, fleet=fleet, worker_id=machine.name)
    worker_id = f"orphan-{machine.id}"
    if machine.price_micros_per_hour is None or worker_id in tables.workers.rows:
        return
    row = MemoryWorker(
        worker_id, fleet, None, WorkerStatus.TERMINATING, created_at=machine.created_at or now, code="ORPHAN",
        reason=f"machine of {machine.name}: {outcome.reason}",
    )  # fmt: skip
    tables.workers.add(row)
    row.hired.machine_id, row.hired.machine_at = machine.id, now
    open_bill(row, machine, outcome.billing_unit_s, now)
    close_bill(row, outcome.ended_at or now, now)
    row.hired.settle_at = now
    tables.terminate(row)


def _prepared_or_not(tables: Tables, fleet: str, outcome: Prepared | PreparationFailed) -> None:
    worker, note = tables.workers.get(outcome.worker_id), tables.journal.note
    if worker is None or worker.hired.machine_id != outcome.machine_id or worker.hired.prepared_at is not None:
        return
    hired = worker.hired
    if isinstance(outcome, Prepared):
        hired.prepared_at = tables.now()
        note("MACHINE_PREPARED", "worker program started", fleet=fleet, worker_id=worker.id)
    elif worker.status is WorkerStatus.SPAWNING and hired.prepare_code is None and worker.last_heartbeat is None:
        hired.prepare_code, hired.prepare_reason = outcome.code, outcome.reason
        detail = {"code": outcome.code, "output": outcome.output}
        note("PREPARATION_FAILED", outcome.reason, fleet=fleet, worker_id=worker.id, detail=detail)
    else:
        return
    hired.host_key = hired.host_key or outcome.host_key
