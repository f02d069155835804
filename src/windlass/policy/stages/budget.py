"""The budget: warn when most of it is spent, and when all of it is, hire nobody or let everybody go."""

from windlass.model.action import Action
from windlass.policy.budget import affordable, budgets
from windlass.policy.planning_context import PlanningContext

CODE = "BUDGET"
CONSEQUENCES = {
    "warn": "nothing is done about it",
    "stop-spawning": "nobody is hired",
    "drain": "nobody is hired, and everybody is let go when what is paid is used up",
}


def keep_budget(context: PlanningContext) -> list[Action]:
    """Whom to let go is the scaling's to choose; here is decided whether."""
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
    context.affordable = affordable(context.snapshot, context.fleet, found)
    if not found:
        if context.affordable == 0:
            context.hold(CODE, "what its machines cost is not known, and so not whether there is room for another")
        return alerts
    worst = found[0]
    if worst.is_spent:
        context.hold(CODE, str(worst))
        context.over_budget = str(worst) if action == "drain" else None
    elif context.affordable == 0:
        context.hold(CODE, f"{worst}, which leaves too little for another worker")
    return alerts
