"""The budget: warn when most of it is spent, and when all of it is, hire nobody or let everybody go."""

from windlass.model.action import Action
from windlass.policy.budget import affordable, budgets
from windlass.policy.draft import Draft

CODE = "BUDGET"
CONSEQUENCES = {
    "warn": "nothing is done about it",
    "stop-spawning": "nobody is hired",
    "drain": "nobody is hired, and everybody is let go when what is paid is used up",
}


def keep_budget(draft: Draft) -> list[Action]:
    """Whom to let go is the scaling's to choose; here is decided whether."""
    found = budgets(draft.snapshot, draft.fleet)
    action = draft.fleet.budget_action
    alerts: list[Action] = []
    for budget in found:
        if budget.is_spent:
            alerts += draft.alert(CODE, f"{budget}: {CONSEQUENCES[action]}", about=budget.when)
        elif budget.is_nearly_spent:
            alerts += draft.alert("BUDGET_NEAR", str(budget), about=budget.when)
    if action == "warn":
        return alerts
    draft.affordable = affordable(draft.snapshot, draft.fleet, found)
    if not found:
        if draft.affordable == 0:
            draft.hold(CODE, "what its machines cost is not known, and so not whether there is room for another")
        return alerts
    worst = found[0]
    if worst.is_spent:
        draft.hold(CODE, str(worst))
        draft.over_budget = str(worst) if action == "drain" else None
    elif draft.affordable == 0:
        draft.hold(CODE, f"{worst}, which leaves too little for another worker")
    return alerts
