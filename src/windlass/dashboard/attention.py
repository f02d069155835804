"""What a person should look at, and what to do about it. Nothing the matter: an empty list."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from windlass.dashboard.words import counted, duration
from windlass.model.record import Fleet
from windlass.ports.reading import FleetStanding, OpenAlert, Overview

CRITICAL = "critical"
# By the code of an alert or a hold. What is not here says all that can be said in its own reason.
ADVICE = {
    "FAILURE_RATE": "Read why the last workers broke, mend it, then restart the fleet: that ends the hold.",
    "BUDGET": "The budget is used up. Raise it in windlass.toml, or wait for the next hour, day or month.",
    "SLOT_FAILED": "Its workers broke again and again. Read the log of the last one, mend it, then restart the fleet.",
    "RESTARTS": "Workers of this fleet keep breaking: read the story of one of them.",
    "ALL_CRASHED": "Every worker of the fleet is broken: read the story of one of them.",
    "NO_LEADER": "Start `windlass up`: without it nobody hires, heals or lets go. Workers go on with what waits.",
    "DEAD_LETTERS": "Look at why they failed, mend it, then retry them.",
    "NEAR_LIMIT": "The fleet is close to its maximum: raise max_workers if more is to be done at once.",
    "PROVIDER_ERRORS": "The provider refuses or does not answer: look at its status and at the key it is called with.",
    "Denied": "The provider refuses our key: check it, and what it may do.",
    "LimitReached": "The provider's own limit is reached: ask it for more, or lower max_workers.",
    "NoCapacity": "The provider has none left: add other types or places to the fleet's list.",
    "InvalidRequest": "The provider does not accept what was asked for: check the fleet's settings.",
}


@dataclass(frozen=True, slots=True)
class Matter:
    """`restarts`: the fleet that a restart would help."""

    id: str
    is_bad: bool
    what: str
    advice: str
    since: datetime | None = None
    link: str | None = None
    restarts: str | None = None


def attention(overview: Overview) -> list[Matter]:
    """The worst first; each thing once, though an alert and a fleet's own state may both tell it."""
    matters = list(_matters(overview))
    return sorted(matters, key=lambda matter: not matter.is_bad)


def _matters(overview: Overview) -> Iterator[Matter]:
    for alert in overview.alerts:
        yield _of_alert(alert, "all fleets")
    if overview.leader is None and overview.fleets and not any(a.code == "NO_LEADER" for a in overview.alerts):
        yield Matter("no-leader", True, "Nobody runs the control loop.", ADVICE["NO_LEADER"])
    for standing in overview.fleets:
        yield from _of_fleet(standing, overview.at, is_led=overview.leader is not None)


def _of_fleet(standing: FleetStanding, now: datetime, *, is_led: bool) -> Iterator[Matter]:
    fleet, told = standing.fleet, {alert.code for alert in standing.alerts}
    for alert in standing.alerts:
        yield _of_alert(alert, fleet.name)
    if fleet.hold is not None and not told & {fleet.hold.code, "HOLD"}:
        yield Matter(
            f"hold-{fleet.name}",
            True,
            f"Fleet {fleet.name} is on hold: {_sentence(fleet.hold.reason)}",
            ADVICE.get(fleet.hold.code, "It goes on by itself when the cause is gone."),
            fleet.hold.since,
            f"/workers?fleet={fleet.name}",
            fleet.name if fleet.hold.code == "FAILURE_RATE" else None,
        )
    if fleet.failed_slots and "SLOT_FAILED" not in told:
        yield Matter(
            f"slots-{fleet.name}",
            True,
            f"{counted(len(fleet.failed_slots), 'slot')} of fleet {fleet.name} failed too often and stay empty.",
            ADVICE["SLOT_FAILED"],
            link=f"/workers?fleet={fleet.name}",
            restarts=fleet.name,
        )
    unattended_s = fleet.unattended_s(now)
    if unattended_s is not None and is_led:
        yield Matter(
            f"unattended-{fleet.name}",
            True,
            f"Nobody has run fleet {fleet.name} for {duration(unattended_s)}, though an orchestrator leads.",
            "See whether its windlass.toml has this fleet.",
        )
    if standing.silent:
        yield Matter(
            f"silent-{fleet.name}",
            False,
            f"{counted(standing.silent, 'worker')} of fleet {fleet.name} fell silent.",
            "Their tasks go to others when their lease is over; they are replaced.",
            link=f"/workers?fleet={fleet.name}",
        )
    yield from _quiet_matters(standing, fleet, told)


def _quiet_matters(standing: FleetStanding, fleet: Fleet, told: set[str]) -> Iterator[Matter]:
    if fleet.is_paused:
        yield Matter(
            f"paused-{fleet.name}",
            False,
            f"Fleet {fleet.name} is paused: its workers claim nothing and nobody is hired.",
            "Resume it when it is to go on.",
        )
    if standing.work.dead and "DEAD_LETTERS" not in told:
        yield Matter(
            f"dead-{fleet.name}",
            False,
            f"{counted(standing.work.dead, 'dead letter')} in the queues of fleet {fleet.name}.",
            ADVICE["DEAD_LETTERS"],
            link="/tasks?which=failed",
        )


def _of_alert(alert: OpenAlert, fleet: str) -> Matter:
    link = "/tasks?which=failed" if alert.code == "DEAD_LETTERS" else f"/workers?fleet={alert.fleet}"
    return Matter(
        f"alert-{alert.id}",
        alert.severity == CRITICAL,
        f"{fleet}: {_sentence(alert.reason)}",
        ADVICE.get(alert.code, "It is closed by itself when the cause is gone."),
        alert.since,
        link if alert.fleet or alert.code == "DEAD_LETTERS" else None,
        alert.fleet if alert.code in ("FAILURE_RATE", "SLOT_FAILED") else None,
    )


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."
