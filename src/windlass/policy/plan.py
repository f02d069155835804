"""`plan(snapshot, fleet)`: everything that one cycle should do. Pure.

Planning again after all actions took effect gives no actions, unless `is_cut_short`: then the next cycle continues.
STAGES lists the stages in order. To learn why a worker was terminated open stages/termination.py or
stages/draining.py; to learn why a worker was spawned, or not, open stages/spawning.py.
"""

from collections.abc import Callable

from windlass.model.action import Action, Plan
from windlass.model.fleet import FleetConfig
from windlass.model.snapshot import Snapshot
from windlass.policy import stages
from windlass.policy.planning_context import PlanningContext, build_context

Stage = Callable[[PlanningContext], list[Action]]

# The order matters wherever a stage reads what an earlier one wrote (see the fields of PlanningContext).
STAGES: tuple[Stage, ...] = (
    # First, because its total hold must stop every other stage: machines of another account would look deleted.
    stages.hold_on_provider_change,
    # Before any judgement: a heartbeat makes a worker active even under a hold.
    stages.promote,
    # The remaining holds come before the stages that fail, delete or spawn.
    stages.hold_on_mass_silence,
    stages.hold_on_many_orphans,
    # Before deletions: a machine can be deleted only once its id is known and its price recorded.
    stages.adopt_machines,
    stages.record_machines,
    # Failures first, then their consequences: slots count this plan's failures, deletions read failed_ids.
    stages.fail_workers,
    stages.fail_slots,
    stages.requeue_orphaned_tasks,
    stages.delete_failed,
    stages.delete_drained,
    # Before scaling, which reads how many spawns the budget allows.
    stages.apply_budget,
    # After all failures, which may reject a version; before scaling, which carries the rollout out.
    stages.advance_rollout,
    # After all failures and deletions: their tasks count as queued again and their slots may be free.
    stages.scale,
    # After scaling, which may be cut short too. Orphans count towards max_workers until a list shows them gone.
    stages.delete_orphans,
    # After every stage that fails, drains or deletes a worker: such a worker is not prepared.
    stages.prepare_machines,
    stages.grow_storage,
    # Last: warns about actions of this plan (failed slots, deletions that do not take effect).
    stages.raise_warnings,
)


def plan(snapshot: Snapshot, fleet: FleetConfig) -> Plan:
    context = build_context(snapshot, fleet)
    for stage in STAGES:
        context.actions += stage(context)
    next_plan_in_s = None if snapshot.is_shutting_down else context.cycle_interval_s
    context.remember_in("cadence", planned_at=snapshot.now, next_plan_in_s=next_plan_in_s)
    context.remember(alerts=context.alerts)
    return Plan(tuple(context.actions), context.planner_state, context.decision, context.is_cut_short)
