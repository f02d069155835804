"""What a person should look at, and what to do about it. Nothing the matter: an empty list."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from windlass.dashboard.filters import counted, duration
from windlass.model.alert import ADVICE, Severity
from windlass.model.overview import FleetOverview, OpenAlert, Overview
from windlass.policy.alerts import EVALUATION_INTERVAL_S, RESOLVE_AFTER_S

# The rest of an advice that fits any matter.
IN_GENERAL = "it is over by itself when the cause is gone"
# What a restart of the fleet ends, once the cause is mended, or machines that are not found are given up.
GIVEN_UP_BY_RESTART = "OTHER_ACCOUNT"
MENDED_BY_RESTART = ("FAILURE_RATE", "SLOT_FAILED", GIVEN_UP_BY_RESTART)
# An alert is seen at every look while it lasts; one that was not seen by three of them is no news of now.
SEEN_LATELY = timedelta(seconds=3 * EVALUATION_INTERVAL_S)
NOT_SEEN = f"Not seen any more since then: it counts as over after {RESOLVE_AFTER_S:g} s without it"
RETRY = "see why they failed, mend it, then retry them"


@dataclass(frozen=True, slots=True)
class AttentionItem:
    """`restarts`: the fleet that a restart would help. `gives_up`: at the price of machines that may cost on."""

    id: str
    is_bad: bool
    what: str
    advice: str
    since: datetime | None = None
    link: str | None = None
    restarts: str | None = None
    gives_up: bool = False


def attention(overview: Overview) -> list[AttentionItem]:
    """The worst first; each thing once, though an alert and a fleet's own state may both tell it."""
    matters = list(_matters(overview))
    return sorted(matters, key=lambda matter: not matter.is_bad)


def _matters(overview: Overview) -> Iterator[AttentionItem]:
    told = _told_now(overview.alerts, overview.at)
    for alert in overview.alerts:
        yield _of_alert(alert, overview.at)
    if overview.leader is None and overview.fleets and "NO_LEADER" not in told:
        yield AttentionItem("no-leader", True, "Nobody runs the control loop.", _advice("NO_LEADER"))
    for standing in overview.fleets:
        of_fleet = told | _told_now(standing.alerts, overview.at)
        for alert in standing.alerts:
            yield _of_alert(alert, overview.at)
        yield from _of_fleet(standing, of_fleet)
        without_orchestrator_s = standing.fleet.without_orchestrator_s(overview.at)
        if without_orchestrator_s is not None and overview.leader is not None and "UNATTENDED" not in of_fleet:
            what = f"Nobody has run fleet {standing.fleet.name} for {duration(without_orchestrator_s)}."
            yield AttentionItem(f"unattended-{standing.fleet.name}", True, what, _advice("UNATTENDED"))


def _of_fleet(standing: FleetOverview, told: set[str]) -> Iterator[AttentionItem]:
    """What is the matter with a fleet, and no alert has told (yet)."""
    fleet = standing.fleet
    link = f"/workers?fleet={fleet.name}"
    if fleet.hold is not None and fleet.hold.code not in told:
        what = f"Fleet {fleet.name} is on hold: {_sentence(fleet.hold.reason)}"
        restarts = fleet.name if fleet.hold.code in MENDED_BY_RESTART else None
        gives_up = fleet.hold.code == GIVEN_UP_BY_RESTART
        advice = _advice(fleet.hold.code)
        yield AttentionItem(f"hold-{fleet.name}", True, what, advice, fleet.hold.since, link, restarts, gives_up)
    if fleet.failed_slots and "SLOT_FAILED" not in told:
        what = f"{counted(len(fleet.failed_slots), 'slot')} of fleet {fleet.name} failed too often and stay empty."
        yield AttentionItem(f"slots-{fleet.name}", True, what, _advice("SLOT_FAILED"), None, link, fleet.name)
    if standing.silent:
        what = f"{counted(standing.silent, 'worker')} of fleet {fleet.name} fell silent."
        advice = "Nothing: when their lease is over their tasks go to others, and they are replaced."
        yield AttentionItem(f"silent-{fleet.name}", False, what, advice, None, link)
    if fleet.is_paused:
        what = f"Fleet {fleet.name} is paused: its workers claim nothing and nobody is hired."
        yield AttentionItem(f"paused-{fleet.name}", False, what, "Resume it when it is to go on.")
    if standing.work.dead and "DEAD_LETTERS" not in told:
        what = f"{counted(standing.work.dead, 'dead letter')} in the queues of fleet {fleet.name}."
        yield AttentionItem(f"dead-{fleet.name}", False, what, _as_sentence(RETRY), None, "/tasks?which=failed")


def _told_now(alerts: Sequence[OpenAlert], now: datetime) -> set[str]:
    return {alert.code for alert in alerts if now - alert.seen_at <= SEEN_LATELY}


def _of_alert(alert: OpenAlert, now: datetime) -> AttentionItem:
    is_of_tasks = alert.code == "DEAD_LETTERS"
    where = f"Fleet {alert.fleet}: " if alert.fleet is not None else ""
    what = f"{where}{_sentence(alert.reason)}"
    link = f"/workers?fleet={alert.fleet}" if alert.fleet is not None else None
    if now - alert.seen_at > SEEN_LATELY:
        until = f"Until {alert.seen_at:%H:%M:%S} UTC: {what}"
        return AttentionItem(f"alert-{alert.id}", False, until, _sentence(NOT_SEEN), None, link)
    return AttentionItem(
        f"alert-{alert.id}",
        alert.severity == Severity.CRITICAL,
        what[:1].upper() + what[1:],
        _as_sentence(RETRY) if is_of_tasks else _advice(alert.code),
        alert.since,
        "/tasks?which=failed" if is_of_tasks else link,
        alert.fleet if alert.code in MENDED_BY_RESTART else None,
        alert.code == GIVEN_UP_BY_RESTART,
    )


def _advice(code: str) -> str:
    return _as_sentence(ADVICE.get(code, IN_GENERAL))


def _as_sentence(advice: str) -> str:
    return _sentence(advice[:1].upper() + advice[1:])


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."
