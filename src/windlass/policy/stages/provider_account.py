"""Holds everything while the fleet's machines belong to another provider or account than the configured one.

A provider that is asked about a machine of another account answers that it does not exist. Windlass would then close
the worker's row while the machine is still billed, and create new machines in the wrong account.
"""

from windlass.model.action import Action, RaiseAlert
from windlass.model.snapshot import Hold
from windlass.model.worker import WorkerStatus
from windlass.policy.planning_context import PlanningContext
from windlass.policy.worker_state import WorkerState

OTHER_PROVIDER, OTHER_ACCOUNT = "OTHER_PROVIDER", "OTHER_ACCOUNT"
# The key changed, and no list has shown yet whether it belongs to another account.
KEY_CHANGED = "KEY_CHANGED"
# A machine that a person abandoned by `windlass restart`.
ABANDONED = "ABANDONED"
# Machines named in one message. The rest are counted.
MAX_NAMED = 3
# Both kinds of machine are processes of this host.
_SAME_MACHINES = {"ray-local": "local"}


def hold_on_provider_change(context: PlanningContext) -> list[Action]:
    """All machines of a fleet come from one provider. Hold everything until machines of a former one are gone."""
    provider = context.fleet.provider
    kind = _SAME_MACHINES.get(provider, provider)
    providers = [s.worker.provider for s in context.states.values() if s.is_managed and s.worker.provider is not None]
    others = [name for name in providers if _SAME_MACHINES.get(name, name) != kind]
    if not others:
        return _hold_on_account_change(context)
    former = " and ".join(sorted(set(others)))
    why = f"provider is {provider}, but {len(others)} workers run on machines of {former}"
    context.hold(OTHER_PROVIDER, why, is_total=True)
    return context.alert(OTHER_PROVIDER, f"{why}; no action is taken")


def _hold_on_account_change(context: PlanningContext) -> list[Action]:
    """A changed key is accepted once it lists a machine of the fleet, if no machine can exist that was created with the
    former key, or when a person abandons those machines. Missing heartbeats prove nothing: a silent machine is billed.
    """
    key_hash, known = context.snapshot.traits.key_hash, context.planner_state.account.key_hash
    if context.own:
        context.remember_in("account", own_listed_at=context.now)
    if key_hash == known:
        return _hold_if_live_workers_unlisted(context)
    # Includes workers whose create call has no answer: their machines may exist.
    created = [s for s in context.states.values() if s.is_managed and s.worker.creation != "refused"]
    if known is None or context.own or not created:
        context.remember_in("account", key_hash=key_hash)
        return _hold_if_live_workers_unlisted(context)
    changed = f"the key for {context.fleet.provider} changed"
    if context.snapshot.machines is None:
        # A separate code until a list confirms it: only then may a person abandon the machines.
        code = OTHER_ACCOUNT if _previous_hold(context) is not None else KEY_CHANGED
        why = f"{changed}, and the fleet's machines ({_machine_names(created)}) cannot be listed with the new one yet"
        context.hold(code, why, is_total=True)
        context.keep_alerts(OTHER_ACCOUNT)
        return []
    if _are_abandoned(context, created):
        context.remember_in("account", key_hash=key_hash)
        return _abandon_machines(context, created)
    return _hold_account(
        context, f"{changed}, and the new one lists none of the fleet's machines ({_machine_names(created)})"
    )


def _hold_if_live_workers_unlisted(context: PlanningContext) -> list[Action]:
    """Workers send heartbeats, but no machine of the fleet is listed: the key belongs to another account.

    A worker that was missing while others were listed was missing in the right account and does not count.
    """
    account, missing = context.planner_state.account, context.planner_state.machines.missing_since
    grace_s, is_unlisted = context.snapshot.traits.absence_grace_s, context.snapshot.machines is None
    # Without a list, only a hold that a list caused goes on.
    if grace_s == 0 or context.own or (is_unlisted and _previous_hold(context) is None):
        return []
    live = [
        state
        for state in context.states.values()
        if state.worker.id in missing
        and context.age_s(missing[state.worker.id]) >= grace_s
        and context.has_recent_heartbeat(state.worker)
        and (account.own_listed_at is None or missing[state.worker.id] > account.own_listed_at)
        and (account.abandoned_at is None or state.worker.created_at >= account.abandoned_at)
    ]
    if not live:
        return []
    if not is_unlisted and _are_abandoned(context, live):
        return _abandon_machines(context, live)
    listed = f"{context.fleet.provider} lists none of the fleet's machines ({_machine_names(live)})"
    return _hold_account(context, f"{listed}, but {len(live)} of its workers send heartbeats")


def _hold_account(context: PlanningContext, why: str) -> list[Action]:
    fix = f"restore the key that created them, or abandon them with `windlass restart {context.snapshot.fleet}`"
    context.hold(OTHER_ACCOUNT, f"{why}: {fix}", is_total=True)
    return context.alert(OTHER_ACCOUNT, f"{why}; no action is taken until you {fix}")


def _are_abandoned(context: PlanningContext, states: list[WorkerState]) -> bool:
    """A person restarted the whole fleet after the hold reported that the machines are not listed.

    A restart of one slot or worker does not count: it may have other reasons.
    """
    hold, restarted_at = _previous_hold(context), context.snapshot.restarted_at
    is_restarted = hold is not None and restarted_at is not None and restarted_at >= hold.since
    # A restart is recorded for the fleet first, then for each worker: this snapshot may be from in between.
    return is_restarted and not any(s.worker.status in (WorkerStatus.SPAWNING, WorkerStatus.ACTIVE) for s in states)


def _previous_hold(context: PlanningContext) -> Hold | None:
    """The previous cycle's OTHER_ACCOUNT hold, which began when a list showed no machine of the fleet."""
    before = context.snapshot.planner_state.hold
    return before if before is not None and before.code == OTHER_ACCOUNT else None


def _abandon_machines(context: PlanningContext, states: list[WorkerState]) -> list[Action]:
    """From now on the workers' rows close as if their machines were gone. One alert per machine remains as a record;
    it never resolves, because Windlass cannot learn when such a machine is deleted."""
    # Their bills end now, not when they were first missing: they existed until now as far as is known.
    context.remember_in("account", abandoned_at=context.now)
    context.remember_in("machines", missing_since={})
    return [
        RaiseAlert(
            ABANDONED,
            f"{state.worker.machine_id or f'the machine created as {state.worker.id}'} was abandoned by hand: the key "
            f"for {context.fleet.provider} does not list it, and its former account may still be charged",
            state.worker.id,
        )
        for state in states
    ]


def _machine_names(states: list[WorkerState]) -> str:
    """Machine ids as in the provider's console, or names where no id is known."""
    names = sorted(state.worker.machine_id or state.worker.id for state in states)
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
