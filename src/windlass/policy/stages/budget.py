"""Applies the fleet's budgets: alerts when one is nearly spent; when one is spent, stops spawning or drains workers."""

from windlass.model.action import Action
from windlass.policy.budget import affordable_spawns, budgets
from windlass.policy.planning_context import PlanningContext

CODE = "BUDGET"
CONSEQUENCES = {
    "warn": "budget_action is warn, so the fleet keeps running",
    "stop-spawning": "no worker is spawned",
    "drain": "no worker is spawned, and each worker drains when its billing period ends",
}


def apply_budget(context: PlanningContext) -> list[Action]:
    """Writes affordable_spawns and over_budget_reason for the scaling stage, which selects the workers."""
    found = budgets(context.snapshot, context.fleet)
    action = context.fleet.budget_action
    alerts: list[Action] = []
    for budget in found:
        if budget.is_spent:
            alerts += context.alert(CODE, f"{budget}: {CONSEQUENCES[action]}", about=budget.when)
        elif budget.is_nearly_spent:
            alerts += context.alert("BUDGET_NEAR", str(budget), about=budget.when)
    if action == "warn":
        return alerts
    context.affordable_spawns = affordable_spawns(context.snapshot, context.fleet, found)
    if not found:
        if context.affordable_spawns == 0:
            context.hold(CODE, "the price of the fleet's machines is unknown, so the budget may not allow another")
    elif found[0].is_spent:
        context.hold(CODE, str(found[0]))
        context.over_budget_reason = str(found[0]) if action == "drain" else None
    elif context.affordable_spawns == 0:
        context.hold(CODE, f"{found[0]}, too little left for another worker")
    return alerts
