"""Adopts machines whose create call was never answered, records prices, and prepares machines that run."""

from windlass.model.action import Action, Adopt, Drain, Prepare, RecordMachine, RecordPrice
from windlass.model.machine import MachineState
from windlass.model.worker import WorkerStatus
from windlass.policy.planning_context import PlanningContext
from windlass.policy.worker_state import Lifecycle


def adopt_machines(context: PlanningContext) -> list[Action]:
    """Adopt listed machines, also for workers that are about to be terminated: they are billed until then."""
    if context.snapshot.machines is None or context.is_stopped:
        return []
    actions: list[Action] = []
    for name, state in context.states.items():
        own = context.machine_of(state.worker)
        if own is None:
            continue
        if state.worker.machine_id is None:
            is_prepared = not context.snapshot.traits.has_prepare_step
            actions.append(Adopt(name, own.id, "found for an unanswered create call", is_prepared))
        elif state.worker.bill is None and own.price_micros_per_hour is not None:
            actions.append(RecordPrice(name, own.id, "price of its machine is known now"))
    return actions


def record_machines(context: PlanningContext) -> list[Action]:
    """Record when machines were first running, and where they are. A process runs when it is created."""
    if context.snapshot.machines is None or context.is_stopped:
        return []
    actions: list[Action] = []
    for name, state in context.states.items():
        own, worker = context.machine_of(state.worker), state.worker
        if own is None or worker.machine_id != own.id or worker.slot is None:
            continue
        is_running = own.state is MachineState.RUNNING
        is_new = is_running and worker.running_at is None
        has_moved = own.address not in (None, worker.address) or own.host not in (None, worker.machine_host)
        if is_new or has_moved:
            why = "its machine is running" if is_new else "the address of its machine is known"
            actions.append(RecordMachine(name, own.id, why, is_running, own.address, own.host))
    return actions


def prepare_machines(context: PlanningContext) -> list[Action]:
    """Start the worker's program on machines that run, where the provider's machines do not start it themselves.

    Preparations that this orchestrator is already running are skipped. After a crash they start again at once.
    """
    if not context.snapshot.traits.has_prepare_step or context.is_stopped:
        return []
    draining = {action.worker_id for action in context.actions if isinstance(action, Drain)}
    leaving = context.deleted_ids | context.failed_ids | draining
    actions: list[Action] = []
    for state in context.states.values():
        worker, own = state.worker, context.machine_of(state.worker)
        is_pending = state.lifecycle is Lifecycle.SPAWNING_SCRIPT_PENDING and worker.status is WorkerStatus.SPAWNING
        is_begun = worker.prepare_code is not None or worker.id in context.snapshot.preparing
        if own is not None and is_pending and not is_begun and worker.id not in leaving:
            actions.append(Prepare(worker.id, own.id, "its machine is running"))
    return actions
