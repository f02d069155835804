"""What is the matter, given what is seen. Pure.

Most of it the plan itself finds out and keeps in its memory while it lasts (slots, limits, budgets, silence). Here it
is put together with what no plan can know: that there was none, what providers answered, what became of tasks.
"""

from collections.abc import Container, Iterator, Mapping
from datetime import datetime

from windlass.model.alert import Alert, AlertInputs, FleetAlertInputs, Severity
from windlass.model.cycle import Fleet
from windlass.model.snapshot import Hold

# It is looked so often, and what has not been seen for so long is over: longer than a cause takes that comes and
# goes with every other cycle.
LOOK_INTERVAL_S = 5.0
RESOLVE_AFTER_S = 60.0
# Errors of one kind of call in a row.
PROVIDER_ERRORS = 3
# Of one code in one fleet, or in all queues, told apart; more are told as one: who hears of a thousand hears nothing.
MAX_APART = 3
# Codes of the plan that cannot wait until tomorrow. What holds a fleet back entirely is always one of them.
CRITICAL = frozenset(
    {
        "ALL_CRASHED",
        "BUDGET",
        "DENIED",
        "ENGINE_SILENT",
        "FAILURE_RATE",
        "INVALID_REQUEST",
        "LIMIT_REACHED",
        "LIST_SHRANK",
        "NOT_DELETED",
        "NO_LEADER",
        "OTHER_ACCOUNT",
        "OTHER_PROVIDER",
        "PROVIDER_ERRORS",
        "SLOT_FAILED",
        "STORAGE_FULL",
        "TOO_MANY_DEAD",
        "TOO_MANY_ORPHANS",
    }
)

# What to do first; docs/operations.md has the rest, under the same names.
ADVICE = {
    "ALL_CRASHED": "look at the log of one of them: a bad release, image or host breaks all at once",
    "BUDGET": "raise the budget of the fleet, or wait for the next hour, day or month",
    "BUDGET_NEAR": "see `windlass cost`, and raise the budget in time if the work is worth it",
    "CHOICE_REFUSED": "see whether the account may have it, or take it off the fleet's list: others may cost more",
    "DEAD_LETTERS": "see `windlass tasks list --status failed`; mend the cause, then `windlass tasks retry`",
    "DENIED": "the provider does not take our token: make a new one with the right to read and write",
    "ENGINE_SILENT": "see whether `windlass up` runs with this fleet, and whether Ray's head answers",
    "FAILURE_RATE": "see why workers break (`windlass explain FLEET`), mend it, then `windlass restart FLEET`",
    "INVALID_REQUEST": "the provider refuses what is asked for: correct the fleet's settings",
    "KEY_CHANGED": "see whether the provider's API answers, and whether the new key is good: nothing is touched before",
    "LIMIT_REACHED": "add funds if the balance is spent; else have the account's limit raised, or lower max_workers",
    "LIST_SHRANK": "look at the provider's console: are the machines gone, or only the list short?",
    "LIST_UNKNOWN": "see whether the provider's API answers, and whether the token is still good",
    "NEAR_MAX": "raise max_workers, and the account's limit, if the queue is to go on growing",
    "NOT_DELETED": "it goes on costing money: see what the provider answered, and delete it by hand",
    "NO_CAPACITY": "add other types or places to the fleet's list, or wait",
    "NO_LEADER": "start `windlass up`; if it runs, look at its log and at the database",
    "OTHER_ACCOUNT": "put the key back that rented its machines, or give them up with `windlass restart FLEET`: "
    "they may still be charged",
    "OTHER_PROVIDER": "put the fleet's former provider back until they are gone, or give the new one another fleet",
    "PROVIDER_ERRORS": "see the provider's status page, and the log for what it answered",
    "PROVIDER_PAUSE": "wait until its pause is over; if it comes again, see who else uses the account's key so often",
    "PROVISIONING_TIMEOUT": "see the machine's console or log: it was made and never came to work",
    "SLOT_FAILED": "look at the log of its last worker, mend the cause, then `windlass restart FLEET`",
    "SLOT_RESTARTS": "look at the log of its last worker before its restarts are used up",
    "STORAGE_DOUBTED": "see whether volume_path is where the network volume is mounted on that worker's machine",
    "STORAGE_FULL": "delete what is no longer needed from the network volume, or move the fleet to a new one",
    "STORAGE_NOT_GROWN": "see in the provider's console why the network volume does not grow: balance, limit, rights",
    "STORAGE_UNKNOWN": "see whether the key may read the network volume, and whether workers have it at volume_path",
    "TASKS_FAILING": "look at the errors of its last tasks: is it this worker, the tasks, or the handler everywhere?",
    "TOO_MANY_DEAD": "see whether workers can reach the database: they fell silent together",
    "TOO_MANY_ORPHANS": "see whether this is the right database: machines of ours are unknown to it",
    "UNATTENDED": "see whether the windlass.toml of whoever leads has this fleet; left out, it is wound down",
    "VRAM_STALE": "look at the worker: its GPU has stopped to answer",
    "WAS_AWAY": "nothing: whoever lives is heard within two heartbeats",
}


def firing(watched: AlertInputs, dead_letters_allowed: int, leader_grace_s: float) -> list[Alert]:
    """Everything that is the matter, in a stable order. `dead_letters_allowed`: in an hour, of a queue.
    `leader_grace_s`: for a restart, or for another to take over."""
    found = [problem for fleet in watched.fleets for problem in _of_fleet(fleet, watched)]
    found += _of_all(watched, dead_letters_allowed, leader_grace_s)
    return sorted(found, key=lambda problem: (problem.fleet or "", problem.key))


def _of_all(watched: AlertInputs, dead_letters_allowed: int, leader_grace_s: float) -> Iterator[Alert]:
    open_keys = {alert.key for alert in watched.open if alert.fleet is None}
    is_leaderless = watched.leaderless_s is not None and watched.leaderless_s >= leader_grace_s
    is_missed = any(not _is_over(seen.fleet, watched.now) for seen in watched.fleets)
    # Whoever has just begun to look may lead in a moment.
    if is_leaderless and is_missed and (watched.settling_since is None or "NO_LEADER" in open_keys):
        yield _firing(None, "NO_LEADER", "", "no orchestrator leads: nobody is hired, healed or let go")
    given_up: dict[str, str] = {}
    for queue, count in sorted(watched.dead_letters.items()):
        if count > dead_letters_allowed:
            what = "1 task was" if count == 1 else f"{count} tasks were"
            given_up[queue] = f"{what} given up in queue {queue} within an hour"
    yield from _told(None, "DEAD_LETTERS", given_up, open_keys)


def _of_fleet(seen: FleetAlertInputs, watched: AlertInputs) -> Iterator[Alert]:
    name = seen.fleet.name
    already = [alert for alert in watched.open if alert.fleet == name]
    if _is_awaited(seen.fleet, watched.settling_since):
        # Its first cycle will say what became of it; until then nothing is over, and nothing new.
        yield from already
    elif not _is_over(seen.fleet, watched.now):
        without_orchestrator_s = seen.fleet.without_orchestrator_s(watched.now)
        if without_orchestrator_s is not None and watched.is_led:
            yield _firing(name, "UNATTENDED", "", f"fleet {name} has had no cycle for {without_orchestrator_s:.0f} s")
        # Also where that is long ago: nobody has seen that it is over.
        yield from _last_known(seen, {alert.key for alert in already})


def _is_awaited(fleet: Fleet, settling_since: datetime | None) -> bool:
    """Whether it has had no cycle since somebody began to look, just now."""
    return settling_since is not None and fleet.planned_at is not None and fleet.planned_at <= settling_since


def _is_over(fleet: Fleet, now: datetime) -> bool:
    """It was wound down: its last plan was to be the last."""
    return fleet.next_plan_in_s is None and fleet.without_orchestrator_s(now) is not None


def _last_known(seen: FleetAlertInputs, open_keys: Container[str]) -> Iterator[Alert]:
    name = seen.fleet.name
    by_code: dict[str, dict[str, str]] = {}
    for key, reason in seen.told.items():
        code, _, about = key.partition(" ")
        by_code.setdefault(code, {})[about] = reason
    for code, reasons in by_code.items():
        yield from _told(name, code, reasons, open_keys)
    hold = seen.fleet.hold
    if hold is not None and hold.code not in by_code:
        yield _held(name, hold)
    for call, count in sorted((seen.provider_errors or {}).items()):
        if count >= PROVIDER_ERRORS:
            what = "storage" if call == "grow" else "machines"
            yield _firing(name, "PROVIDER_ERRORS", call, f"{count} calls in a row to {call} {what} went wrong")
    if seen.provisioning_timeouts:
        who = ", ".join(seen.provisioning_timeouts[:3])
        count = len(seen.provisioning_timeouts)
        what = f"{who} was" if count == 1 else f"{count} workers ({who}{', ...' if count > 3 else ''}) were"
        yield _firing(name, "PROVISIONING_TIMEOUT", "", f"{what} made and never came to work")


def _told(fleet: str | None, code: str, reasons: Mapping[str, str], open_keys: Container[str]) -> Iterator[Alert]:
    """`reasons`: by what each is about. `open_keys`: of what people were told already.

    Those that were told apart end one by one, also when there are more by then. Those that were told as one end as one,
    with the last of them.
    """
    is_one = len(reasons) > MAX_APART or code in open_keys
    for about, reason in reasons.items():
        if not is_one or (about and f"{code} {about}" in open_keys):
            yield _firing(fleet, code, about, reason)
    if reasons and is_one:
        yield _firing(fleet, code, "", _in_one(reasons))


def _in_one(reasons: Mapping[str, str]) -> str:
    # Slot 2 before slot 10.
    first = sorted(reasons, key=lambda about: (len(about), about))[:MAX_APART]
    if first == [""]:
        return reasons[""]
    what = "1 is left" if len(reasons) == 1 else f"{len(reasons)} at once"
    return f"{what} ({', '.join(first)}{', ...' if len(reasons) > MAX_APART else ''}): {reasons[first[0]]}"


def _held(fleet: str, hold: Hold) -> Alert:
    severity = Severity.CRITICAL if hold.is_total or hold.code in CRITICAL else Severity.WARNING
    return Alert(fleet, hold.code, hold.code, severity, hold.reason)


def _firing(fleet: str | None, code: str, about: str, reason: str) -> Alert:
    severity = Severity.CRITICAL if code in CRITICAL else Severity.WARNING
    return Alert(fleet, f"{code} {about}".rstrip(), code, severity, reason)
