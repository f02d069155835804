"""Records outcomes of provider calls. A late outcome, or one about another machine, changes nothing."""

from dataclasses import asdict
from typing import assert_never

from support.memory_store.ledger import close_bill, open_bill
from support.memory_store.tables import Tables
from support.memory_store.workers import MemoryWorker
from windlass.model.machine import MachineState
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


def record_outcome(tables: Tables, fleet: str, outcome: Outcome) -> None:  # noqa: PLR0912 - one for each kind
    add_event = tables.event_log.add
    match outcome:
        case Created():
            _created(tables, outcome)
        case CreationUnclear(worker_id, reason):
            worker = tables.workers.get(worker_id)
            if worker is not None and worker.spawned.creation is None:
                worker.spawned.creation = "ambiguous"
            add_event("MACHINE_AMBIGUOUS", reason, fleet=fleet, worker_id=worker_id)
        case CreationRefused():
            _refused(tables, fleet, outcome)
        case Deleted():
            _deleted(tables, fleet, outcome)
        case NotDeleted(worker_id, reason):
            add_event("MACHINE_NOT_DELETED", reason, fleet=fleet, worker_id=worker_id)
        case OrphanDeleted():
            _orphan_deleted(tables, fleet, outcome)
        case HostKeySeen(worker_id, machine_id, host_key):
            worker = tables.workers.get(worker_id)
            if worker is not None and worker.spawned.machine_id == machine_id:
                if worker.spawned.host_key is None:
                    worker.spawned.reachable_at = worker.spawned.reachable_at or tables.now()
                worker.spawned.host_key = worker.spawned.host_key or host_key
        case Prepared() | PreparationFailed():
            _preparation_ended(tables, fleet, outcome)
        case PreparationUnclear(worker_id, reason):
            add_event("PREPARATION_UNCLEAR", reason, fleet=fleet, worker_id=worker_id)
        case VolumeGrown(volume_id, size_gb, reason):
            add_event("VOLUME_GROWN", reason, fleet=fleet, detail={"volume_id": volume_id, "size_gb": size_gb})
        case VolumeNotGrown(volume_id, size_gb, reason):
            add_event("VOLUME_NOT_GROWN", reason, fleet=fleet, detail={"volume_id": volume_id, "size_gb": size_gb})
        case _:
            assert_never(outcome)


def _created(tables: Tables, outcome: Created) -> None:
    worker, machine, now = tables.workers.get(outcome.worker_id), outcome.machine, tables.now()
    if worker is not None and worker.slot is not None and worker.spawned.machine_id in (None, machine.id):
        spawned = worker.spawned
        spawned.machine_id, spawned.creation = machine.id, "created"
        spawned.instance_type, spawned.place = machine.instance_type, machine.place
        spawned.machine_at = spawned.machine_at or now
        spawned.machine_created_at = machine.created_at
        spawned.address = machine.address or spawned.address
        spawned.machine_host = machine.host or spawned.machine_host
        if machine.state is MachineState.RUNNING:
            spawned.running_at = spawned.running_at or now
        if machine.misplaced is not None:
            spawned.prepare_code, spawned.prepare_reason = "MISPLACED", machine.misplaced
        if outcome.is_prepared:
            spawned.prepared_at = spawned.prepared_at or now
        open_bill(worker, machine, outcome.billing_unit_s, now)


def _refused(tables: Tables, fleet: str, outcome: CreationRefused) -> None:
    worker, code = tables.workers.not_terminated.get(outcome.worker_id), outcome.code
    if worker is not None and worker.spawned.machine_id is None:
        worker.code, worker.reason = code, outcome.reason
        worker.spawned.creation, worker.spawned.failed_at = "refused", tables.now() if code == "REFUSED" else None
        tables.terminate(worker)
        tables.event_log.add("MACHINE_REFUSED", outcome.reason, fleet=fleet, worker_id=worker.id, detail={"code": code})


def _deleted(tables: Tables, fleet: str, outcome: Deleted) -> None:
    worker, now = tables.workers.not_terminated.get(outcome.worker_id), tables.now()
    if worker is not None and worker.spawned.machine_id in (None, outcome.machine_id):
        if outcome.priced is not None:
            open_bill(worker, outcome.priced, outcome.billing_unit_s, now)
        close_bill(worker, outcome.ended_at or now, now)
        worker.set_end_reason(outcome.code, outcome.reason)
        tables.worker_logs.set_boot(worker, outcome.boot_log, now)
        tables.terminate(worker)
        if outcome.machine_state is not None:
            machine = {"state": str(outcome.machine_state), "note": outcome.machine_note}
            found = {name: value for name, value in machine.items() if value is not None}
            tables.diagnostics[worker.id]["machine"] = found
        if outcome.machine_exit is not None:
            parts = asdict(outcome.machine_exit)
            tables.diagnostics[worker.id]["exit"] = {name: value for name, value in parts.items() if value is not None}
        tables.requeue_tasks_of(worker.id, outcome.code, outcome.reason)
        tables.event_log.add("WORKER_TERMINATED", outcome.reason, fleet=fleet, worker_id=worker.id)


def _orphan_deleted(tables: Tables, fleet: str, outcome: OrphanDeleted) -> None:
    """Add a terminated worker row for the machine, so that its bill is settled like any other."""
    machine, now = outcome.machine, tables.now()
    tables.event_log.add("ORPHAN_DELETED", outcome.reason, fleet=fleet, worker_id=machine.name)
    worker_id = f"orphan-{machine.id}"
    if machine.price_micros_per_hour is None or worker_id in tables.workers.rows:
        return
    row = MemoryWorker(
        worker_id, fleet, None, WorkerStatus.TERMINATING, created_at=machine.created_at or now, code="ORPHAN",
        reason=f"machine of {machine.name}: {outcome.reason}",
    )  # fmt: skip
    tables.workers.add(row)
    row.spawned.machine_id, row.spawned.machine_at = machine.id, now
    open_bill(row, machine, outcome.billing_unit_s, now)
    close_bill(row, outcome.ended_at or now, now)
    row.spawned.settle_at = now
    tables.terminate(row)


def _preparation_ended(tables: Tables, fleet: str, outcome: Prepared | PreparationFailed) -> None:
    worker, add_event = tables.workers.get(outcome.worker_id), tables.event_log.add
    if worker is None or worker.spawned.machine_id != outcome.machine_id or worker.spawned.prepared_at is not None:
        return
    spawned = worker.spawned
    if isinstance(outcome, Prepared):
        spawned.prepared_at = tables.now()
        add_event("MACHINE_PREPARED", "worker program started", fleet=fleet, worker_id=worker.id)
    elif worker.status is WorkerStatus.SPAWNING and spawned.prepare_code is None and worker.last_heartbeat is None:
        spawned.prepare_code, spawned.prepare_reason = outcome.code, outcome.reason
        tables.worker_logs.set_boot(worker, outcome.output, tables.now())
        detail = {"code": outcome.code, "output": outcome.output}
        add_event("PREPARATION_FAILED", outcome.reason, fleet=fleet, worker_id=worker.id, detail=detail)
    else:
        return
    spawned.host_key = spawned.host_key or outcome.host_key
