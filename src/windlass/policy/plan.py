"""What to do: `plan(snapshot, fleet)`. Pure; planning again after these actions gives none.

Unless it was cut short: what a cap left for later is planned next. Nothing is alerted twice within the hour.

The stages of a cycle stand here in order. Each is a function from the draft so far to actions, and whoever asks why a
worker was ended, or nobody hired, opens the stage of that name.
"""

from collections.abc import Callable

from windlass.model.action import Action, Plan
from windlass.model.fleet import FleetConfig
from windlass.model.snapshot import Snapshot
from windlass.policy import stages
from windlass.policy.planning_context import PlanningContext, begin

DemoEnvironment = Callable[[PlanningContext], list[Action]]

STAGES: tuple[DemoEnvironment, ...] = (
    stages.keep_provider,
    stages.promote,
    stages.brake,
    stages.doubt_strays,
    stages.find_machines,
    stages.fail_broken,
    stages.fail_slots,
    stages.requeue_orphans,
    stages.clean_up,
    stages.end_drained,
    stages.keep_budget,
    stages.scale,
    stages.end_strays,
    stages.prepare,
    stages.grow_storage,
    stages.warn,
)


def plan(snapshot: Snapshot, fleet: FleetConfig) -> Plan:
    """Everything this cycle should do, in order."""
    context = begin(snapshot, fleet)
    for stage in STAGES:
        context.actions += stage(context)
    next_plan_in_s = None if snapshot.is_shutting_down else context.pace_s
    context.remember_in("cadence", planned_at=snapshot.now, next_plan_in_s=next_plan_in_s)
    context.remember(alerts=context.alerts)
    return Plan(tuple(context.actions), context.planner_state, context.decision, context.is_cut_short)
