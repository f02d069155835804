"""Alert rules: which alerts hold, given AlertInputs. Pure.

Most conditions are found by plans, which keep them in the planner state while they last (slots, limits, budgets,
silence). The rules here add what no plan can know: missing plans, provider errors, failed tasks and rejected rows.
"""

from collections.abc import Container, Iterator, Mapping

from windlass.model.alert import CRITICAL_CODES, Alert, AlertInputs, FleetAlertInputs, Severity
from windlass.model.cycle import Fleet

# Rules are evaluated this often. An alert resolves when its condition was not seen for RESOLVE_AFTER_S, which is longer
# than the gaps of a condition that holds in every other cycle.
EVALUATION_INTERVAL_S = 5.0
RESOLVE_AFTER_S = 60.0
# Consecutive errors of one kind of provider call before an alert fires.
PROVIDER_ERRORS_TO_ALERT = 3
# Separate alerts of one code in one fleet, or over all queues. More become one alert that counts them.
MAX_SEPARATE_ALERTS = 3


def evaluate_alerts(inputs: AlertInputs, failed_tasks_allowed: int, leader_grace_s: float) -> list[Alert]:
    """All alerts that hold, in a stable order.

    `failed_tasks_allowed`: per queue and hour. `leader_grace_s`: time for a restart or for a standby to take over.
    """
    found = [alert for fleet in inputs.fleets for alert in _fleet_alerts(fleet, inputs)]
    found += _global_alerts(inputs, failed_tasks_allowed, leader_grace_s)
    return sorted(found, key=lambda alert: (alert.fleet or "", alert.key))


def _global_alerts(inputs: AlertInputs, failed_tasks_allowed: int, leader_grace_s: float) -> Iterator[Alert]:
    open_keys = {alert.key for alert in inputs.open if alert.fleet is None}
    is_leaderless = inputs.leaderless_s is not None and inputs.leaderless_s >= leader_grace_s
    needs_leader = any(not _is_shut_down(fleet.fleet, inputs) for fleet in inputs.fleets)
    # A process that has just started may become the leader in a moment.
    if is_leaderless and needs_leader and (inputs.settling_since is None or "NO_LEADER" in open_keys):
        yield _alert(None, "NO_LEADER", "", "no orchestrator is the leader: no worker is spawned, replaced or drained")
    failed: dict[str, str] = {}
    for queue, count in sorted(inputs.failed_tasks.items()):
        if count > failed_tasks_allowed:
            tasks = "1 task" if count == 1 else f"{count} tasks"
            failed[queue] = f"{tasks} in queue {queue} failed permanently in the last hour"
    yield from _group_alerts(None, "DEAD_LETTERS", failed, open_keys)
    rejected = {}
    for each in inputs.rejected_rows:
        rows = "1 row" if each.count == 1 else f"{each.count} rows"
        rejected[each.name] = f"{rows} of the adopted table {each.table} cannot be brought in line with the tasks"
    yield from _group_alerts(None, "ROW_REJECTED", rejected, open_keys)


def _fleet_alerts(seen: FleetAlertInputs, inputs: AlertInputs) -> Iterator[Alert]:
    fleet, name = seen.fleet, seen.fleet.name
    open_alerts = [alert for alert in inputs.open if alert.fleet == name]
    since = inputs.settling_since
    if since is not None and fleet.planned_at is not None and fleet.planned_at <= since:
        # No cycle since the evaluation began: open alerts stay open and no new one fires until the first cycle.
        yield from open_alerts
        return
    if _is_shut_down(fleet, inputs):
        return
    without_orchestrator_s = fleet.without_orchestrator_s(inputs.now)
    if without_orchestrator_s is not None and inputs.is_led:
        yield _alert(name, "UNATTENDED", "", f"fleet {name} has had no cycle for {without_orchestrator_s:.0f} s")

    # The last plan counts however old it is: nothing has shown since that its conditions ended.
    by_code: dict[str, dict[str, str]] = {}
    for key, reason in seen.raised.items():
        code, _, about = key.partition(" ")
        by_code.setdefault(code, {})[about] = reason
    open_keys = {alert.key for alert in open_alerts}
    for code, reasons in by_code.items():
        yield from _group_alerts(name, code, reasons, open_keys)
    hold = fleet.hold
    if hold is not None and hold.code not in by_code:
        yield _alert(name, hold.code, "", hold.reason, is_critical=hold.is_total)
    for call, count in sorted((seen.provider_errors or {}).items()):
        if count >= PROVIDER_ERRORS_TO_ALERT:
            what = "storage" if call == "grow" else "machines"
            yield _alert(name, "PROVIDER_ERRORS", call, f"{count} provider calls in a row to {call} {what} failed")
    if seen.provisioning_timeouts:
        names, count = ", ".join(seen.provisioning_timeouts[:3]), len(seen.provisioning_timeouts)
        who = f"worker {names} was" if count == 1 else f"{count} workers ({names}{', ...' if count > 3 else ''}) were"
        yield _alert(name, "PROVISIONING_TIMEOUT", "", f"{who} created and never became ready")


def _is_shut_down(fleet: Fleet, inputs: AlertInputs) -> bool:
    """The last plan was meant to be the last, and no orchestrator plans the fleet."""
    return fleet.next_plan_in_s is None and fleet.without_orchestrator_s(inputs.now) is not None


def _group_alerts(
    fleet: str | None, code: str, reasons: Mapping[str, str], open_keys: Container[str]
) -> Iterator[Alert]:
    """Alerts of one code. `reasons`: what each is about, to its reason.

    Alerts that fired separately resolve one by one, even if there are many by then. A combined alert resolves with the
    last of its conditions.
    """
    is_combined = len(reasons) > MAX_SEPARATE_ALERTS or code in open_keys
    for about, reason in reasons.items():
        if not is_combined or (about and f"{code} {about}" in open_keys):
            yield _alert(fleet, code, about, reason)
    if not reasons or not is_combined:
        return
    # By length first: slot 2 before slot 10.
    first = sorted(reasons, key=lambda about: (len(about), about))[:MAX_SEPARATE_ALERTS]
    reason = reasons[first[0]]
    if first != [""]:
        count = "1 left" if len(reasons) == 1 else f"{len(reasons)} at once"
        more = ", ..." if len(reasons) > MAX_SEPARATE_ALERTS else ""
        reason = f"{count} ({', '.join(first)}{more}): {reason}"
    yield _alert(fleet, code, "", reason)


def _alert(fleet: str | None, code: str, about: str, reason: str, *, is_critical: bool = False) -> Alert:
    severity = Severity.CRITICAL if is_critical or code in CRITICAL_CODES else Severity.WARNING
    return Alert(fleet, f"{code} {about}".rstrip(), code, severity, reason)
