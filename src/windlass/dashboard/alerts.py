"""The list of what needs attention: open alerts, and fleet conditions that no alert covers yet."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from urllib.parse import quote

from windlass.dashboard.filters import counted, duration
from windlass.model.alert import Severity, advice_on
from windlass.model.overview import FleetOverview, OpenAlert, Overview
from windlass.operations import OTHER_ACCOUNT
from windlass.policy.alerts import EVALUATION_INTERVAL_S, RESOLVE_AFTER_S

# Advice for codes without advice of their own.
DEFAULT_ADVICE = "it resolves when the cause is gone"
# Codes whose condition ends with a restart of the fleet.
RESOLVED_BY_RESTART = ("FAILURE_RATE", "SLOT_FAILED", OTHER_ACCOUNT)
# Alerts are evaluated at every interval. One that three evaluations did not confirm may be outdated.
CONFIRMED_WITHIN = timedelta(seconds=3 * EVALUATION_INTERVAL_S)
UNCONFIRMED = f"Not confirmed since then. It resolves after {RESOLVE_AFTER_S:g} s without confirmation"
FAILED_LABEL = "View failed tasks"
RETRY_ADVICE = "Review the errors, fix the cause, then retry."
FAILED_TASKS = "/tasks?status=failed"
UNSERVED_ADVICE = "Add the queue to a fleet in windlass.toml, start `windlass worker`, or cancel the tasks."
# Queues that are named one by one.
MAX_UNSERVED_ITEMS = 3


@dataclass(frozen=True, slots=True)
class AttentionItem:
    id: str
    is_critical: bool
    what: str
    advice: str
    since: datetime | None = None
    link: str | None = None
    link_label: str = "View workers"
    # The fleet to restart, where that resolves it.
    restart_fleet: str | None = None
    # The restart abandons machines that may still be billed.
    abandons_machines: bool = False
    # Its runbook is linked.
    code: str | None = None


def attention_items(overview: Overview) -> list[AttentionItem]:
    """Critical items first. A condition that an alert covers is not listed twice."""
    return sorted(_items(overview), key=lambda item: not item.is_critical)


def fleet_items(overview: Overview, fleet: str) -> list[AttentionItem]:
    """Items that concern this fleet or all fleets. Failed tasks of other queues are left out."""
    own = tuple(each for each in overview.fleets if each.fleet.name == fleet)
    alerts = tuple(alert for alert in overview.alerts if alert.code != "DEAD_LETTERS")
    return attention_items(replace(overview, fleets=own, alerts=alerts, queues={}))


def _items(overview: Overview) -> Iterator[AttentionItem]:
    codes = _confirmed_codes(overview.alerts, overview.at)
    for alert in overview.alerts:
        yield _alert_item(alert, overview.at)
    if overview.leader is None and overview.fleets and "NO_LEADER" not in codes:
        yield AttentionItem(
            "no-leader", True, "No orchestrator runs the control loop.", _advice("NO_LEADER"), code="NO_LEADER"
        )
    for each in overview.fleets:
        fleet_codes = codes | _confirmed_codes(each.alerts, overview.at)
        for alert in each.alerts:
            yield _alert_item(alert, overview.at)
        yield from _fleet_items(each, fleet_codes)
        without_s = each.fleet.without_orchestrator_s(overview.at)
        if without_s is not None and overview.leader is not None and "UNATTENDED" not in fleet_codes:
            what = f"Fleet {each.fleet.name} has had no cycle for {duration(without_s)}."
            yield AttentionItem(f"unattended-{each.fleet.name}", True, what, _advice("UNATTENDED"), code="UNATTENDED")
    yield from _queue_items(overview)


def _queue_items(overview: Overview) -> Iterator[AttentionItem]:
    """Queues with tasks that nothing serves."""
    unserved = {}
    for queue in map(overview.queue, overview.queues):
        tasks = queue.work.queued + queue.work.scheduled + queue.work.retrying
        if tasks and not queue.is_served:
            unserved[queue.name] = tasks
    if len(unserved) > MAX_UNSERVED_ITEMS:
        names = ", ".join(list(unserved)[:MAX_UNSERVED_ITEMS])
        what = f"No fleet and no worker serves {len(unserved)} queues with tasks ({names}, ...)."
        yield AttentionItem("unserved", False, what, UNSERVED_ADVICE, None, "/queues", "View queues")
        return
    for name, tasks in unserved.items():
        what = f"No fleet and no worker serves queue {name}, which has {counted(tasks, 'task')}."
        yield AttentionItem(
            f"unserved-{name}", False, what, UNSERVED_ADVICE, None, f"/queues/{quote(name, safe='')}", "View queue"
        )


def _fleet_items(overview: FleetOverview, codes: set[str]) -> Iterator[AttentionItem]:
    """Conditions of a fleet that none of these alert codes covers."""
    fleet = overview.fleet
    link = f"/workers?fleet={fleet.name}"
    if fleet.hold is not None and fleet.hold.code not in codes:
        yield AttentionItem(
            f"hold-{fleet.name}",
            True,
            f"Fleet {fleet.name} is on hold: {_with_full_stop(fleet.hold.reason)}",
            _advice(fleet.hold.code, fleet.name),
            fleet.hold.since,
            link,
            restart_fleet=fleet.name if fleet.hold.code in RESOLVED_BY_RESTART else None,
            abandons_machines=fleet.hold.code == OTHER_ACCOUNT,
            code=fleet.hold.code,
        )
    if fleet.failed_slots and "SLOT_FAILED" not in codes:
        stays = "stays" if len(fleet.failed_slots) == 1 else "stay"
        what = (
            f"{counted(len(fleet.failed_slots), 'slot')} of fleet {fleet.name} reached max_restarts and {stays} empty."
        )
        yield AttentionItem(
            f"slots-{fleet.name}",
            True,
            what,
            _advice("SLOT_FAILED", fleet.name),
            None,
            link,
            restart_fleet=fleet.name,
            code="SLOT_FAILED",
        )
    if overview.silent:
        its, leases, replaced = ("their", "their leases", "the workers are replaced")
        if overview.silent == 1:
            its, leases, replaced = ("its", "its lease", "the worker is replaced")
        what = f"{counted(overview.silent, 'worker')} of fleet {fleet.name} sent no heartbeat within {leases}."
        advice = f"No action needed: {its} tasks are requeued and {replaced}."
        if overview.by_hand:
            advice = f"{its.capitalize()} tasks are requeued. A worker that was started by hand is not replaced."
        yield AttentionItem(f"silent-{fleet.name}", False, what, advice, None, link)
    if fleet.is_paused:
        what = f"Fleet {fleet.name} is paused: its workers claim no tasks and no workers are spawned."
        yield AttentionItem(f"paused-{fleet.name}", False, what, "Resume the fleet to continue.")
    if overview.work.dead and "DEAD_LETTERS" not in codes:
        what = f"{counted(overview.work.dead, 'failed task')} in the queues of fleet {fleet.name}."
        yield AttentionItem(
            f"failed-{fleet.name}", False, what, RETRY_ADVICE, None, FAILED_TASKS, FAILED_LABEL, code="DEAD_LETTERS"
        )


def _confirmed_codes(alerts: Sequence[OpenAlert], now: datetime) -> set[str]:
    return {alert.code for alert in alerts if now - alert.seen_at <= CONFIRMED_WITHIN}


def _alert_item(alert: OpenAlert, now: datetime) -> AttentionItem:
    is_about_tasks = alert.code == "DEAD_LETTERS"
    what = f"Fleet {alert.fleet}: {alert.reason}" if alert.fleet is not None else alert.reason
    what = _with_full_stop(what[:1].upper() + what[1:])
    link = f"/workers?fleet={alert.fleet}" if alert.fleet is not None else None
    if now - alert.seen_at > CONFIRMED_WITHIN:
        until = f"Until {alert.seen_at:%H:%M:%S} UTC: {what}"
        return AttentionItem(
            f"alert-{alert.id}", False, until, _with_full_stop(UNCONFIRMED), None, link, code=alert.code
        )
    return AttentionItem(
        f"alert-{alert.id}",
        alert.severity == Severity.CRITICAL,
        what,
        RETRY_ADVICE if is_about_tasks else _advice(alert.code, alert.fleet),
        alert.since,
        FAILED_TASKS if is_about_tasks else link,
        FAILED_LABEL if is_about_tasks else "View workers",
        restart_fleet=alert.fleet if alert.code in RESOLVED_BY_RESTART else None,
        abandons_machines=alert.code == OTHER_ACCOUNT,
        code=alert.code,
    )


def _advice(code: str, fleet: str | None = None) -> str:
    advice = advice_on(code, fleet) or DEFAULT_ADVICE
    return _with_full_stop(advice[:1].upper() + advice[1:])


def _with_full_stop(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."
