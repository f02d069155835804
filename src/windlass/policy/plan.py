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
from windlass.policy.draft import Draft, begin

Stage = Callable[[Draft], list[Action]]

STAGES: tuple[Stage, ...] = (
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
    draft = begin(snapshot, fleet)
    for stage in STAGES:
        draft.actions += stage(draft)
    next_plan_in_s = None if snapshot.is_winding_down else draft.pace_s
    draft.remember(planned_at=snapshot.now, next_plan_in_s=next_plan_in_s, alerts=draft.alerts)
    return Plan(tuple(draft.actions), draft.memory, draft.decision, draft.is_cut_short)
