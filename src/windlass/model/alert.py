"""What is the matter, and what a person is told of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from windlass.model.cycle import Fleet


class Severity(StrEnum):
    WARNING = "warning"  # somebody should look, today
    CRITICAL = "critical"  # work does not get done, or money is spent for nothing, now


@dataclass(frozen=True, slots=True)
class Alert:
    """Something that is the matter now. `key` tells it from others of the same code: "SLOT_FAILED 3"."""

    # None: it concerns all fleets.
    fleet: str | None
    key: str
    code: str
    severity: Severity
    reason: str


@dataclass(frozen=True, slots=True)
class FleetAlertInputs:
    """A fleet, as far as it may be the matter."""

    fleet: Fleet
    # What its last plan had to tell: key to reason.
    told: Mapping[str, str]
    # Workers that were made, lately, and did not come to work.
    provisioning_timeouts: tuple[str, ...] = ()
    # Of the provider's calls, how many of a kind went wrong in a row: call to count.
    provider_errors: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class AlertInputs:
    """All that alerts are judged by."""

    now: datetime
    # For how long nobody has led; None while somebody does, or where nobody ever did.
    leaderless_s: float | None
    fleets: tuple[FleetAlertInputs, ...]
    # Queue to how many of its tasks were given up in the last hour; cancelled ones were not.
    dead_letters: Mapping[str, int]
    # What people were told is the matter, and not yet that it is over.
    open: tuple[Alert, ...] = ()
    # Since when it has been looked, while that is short: a fleet without a cycle since then may get one yet.
    settling_since: datetime | None = None

    @property
    def is_led(self) -> bool:
        return self.leaderless_s is None


class MessageKind(StrEnum):
    FIRING = "firing"
    RESOLVED = "resolved"


@dataclass(frozen=True, slots=True)
class Message:
    """What one receiver is told of one alert. It may come twice, with the same id."""

    id: int
    notifier: str
    kind: MessageKind
    # This one included.
    attempts: int
    alert_id: int
    fleet: str | None
    code: str
    severity: Severity
    reason: str
    since: datetime
    resolved_at: datetime | None

    @property
    def title(self) -> str:
        what = "resolved" if self.kind is MessageKind.RESOLVED else self.severity.value
        return f"[{what}] {self.code}" + (f" in fleet {self.fleet}" if self.fleet is not None else "")
