"""Alerts: their inputs, codes with severity and advice, and the messages that notifiers send."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from windlass.model.cycle import Fleet


class Severity(StrEnum):
    WARNING = "warning"  # needs attention today
    CRITICAL = "critical"  # work has stopped, or money is being wasted


# Codes that cannot wait until tomorrow. A total hold is always critical.
CRITICAL_CODES = frozenset(
    {
        "ALL_CRASHED",
        "BUDGET",
        "DENIED",
        "ENGINE_SILENT",
        "FAILURE_RATE",
        "INVALID_REQUEST",
        "LIMIT_REACHED",
        "LIST_SHRANK",
        "MACHINE_LOCKED",
        "NOT_DELETED",
        "NO_LEADER",
        "OTHER_ACCOUNT",
        "OTHER_PROVIDER",
        "PROVIDER_ERRORS",
        "SLOT_FAILED",
        "STORAGE_FULL",
        "TOO_MANY_DEAD",
        "TOO_MANY_ORPHANS",
        "VERSION_REJECTED",
    }
)

# The second sentence of an alert: what to do first. docs/runbooks.md has the rest under the same codes.
# FLEET stands for the name of the fleet.
ADVICE = {
    "ALL_CRASHED": "check the log of one of them: a bad release, image or host fails all at once",
    "BUDGET": "raise the fleet's budget, or wait for the next hour, day or month",
    "BUDGET_NEAR": "check `windlass cost`, and raise the budget in time if the work is worth it",
    "CHOICE_REFUSED": "check whether the account may use it, or remove it from the fleet's list: others may cost more",
    "DEAD_LETTERS": "review `windlass tasks list --status failed`, fix the cause, then run `windlass tasks retry`",
    "DENIED": "create a new token with read and write permission: the provider rejects the current one",
    "DEPLOY_STALLED": "check `windlass deploy FLEET --status`, then free a slot, lift the hold, or abort it",
    "ENGINE_SILENT": "check that `windlass up` runs with this fleet and that Ray's head responds",
    "FAILURE_RATE": "find the cause with `windlass explain FLEET`, fix it, then run `windlass restart FLEET`",
    "INVALID_REQUEST": "correct the fleet's settings: the provider rejects the request",
    "KEY_CHANGED": "check that the provider's API responds and that the new key is valid: no action is taken before",
    "LIMIT_REACHED": "add funds if the balance is used up; otherwise raise the account's limit or lower max_workers",
    "LIST_SHRANK": "check the provider's console: the machines are gone, or the list is incomplete",
    "LIST_UNKNOWN": "check that the provider's API responds and that the token is still valid",
    "MACHINE_LOCKED": "unlock it in the provider's console: it is billed and holds its slot until then",
    "MACHINES_LATE": "check `windlass workers show WORKER`, which names the step of its boot",
    "NEAR_MAX": "raise max_workers, and the account's limit, if the queue will keep growing",
    "NOT_DELETED": "check what the provider answered and delete the machine by hand: it is still billed",
    "NO_CAPACITY": "add other machine types or locations to the fleet's list, or wait",
    "NO_LEADER": "start `windlass up`; if it is running, check its log and the database",
    "OTHER_ACCOUNT": "restore the key that created the machines, or abandon them with `windlass restart FLEET`: "
    "they may still be charged",
    "OTHER_PROVIDER": "restore the fleet's former provider until its machines are gone, or use a new fleet",
    "PROVIDER_ERRORS": "check the provider's status page, and the log for its answers",
    "PROVIDER_PAUSE": "wait until the pause ends; if it comes again, check what else uses the account's key",
    "PROVISIONING_TIMEOUT": "check the machine's console or log: it was created and never became ready",
    "ROW_REJECTED": "see why with `windlass doctor`, fix the rows or the table, then run `windlass doctor --repair`",
    "SLOT_FAILED": "check the log of its last worker, fix the cause, then run `windlass restart FLEET`",
    "SLOT_RESTARTS": "check the log of its last worker before max_restarts is reached",
    "STORAGE_IMPLAUSIBLE": "check that volume_path is where the network volume is mounted on that worker's machine",
    "STORAGE_FULL": "delete files from the network volume, or move the fleet to a new one",
    "STORAGE_NOT_GROWN": "check in the provider's console why the network volume does not grow: balance, limit, rights",
    "STORAGE_UNKNOWN": "check that the key may read the network volume and that workers mount it at volume_path",
    "TASKS_FAILING": "check the errors of its last tasks: the worker, the tasks, or the handler may be at fault",
    "TASK_LONG": "check its worker: if the task hangs, terminate the worker; if not, set a timeout for such tasks",
    "TOO_MANY_DEAD": "check that workers can reach the database: they fell silent together",
    "TOO_MANY_ORPHANS": "check that this is the right database: it does not know these machines",
    "UNATTENDED": "check that the leader's windlass.toml has this fleet; without it, the fleet is shut down",
    "VERSION_REJECTED": "fix the code or settings, then run `windlass deploy FLEET`; no worker of it is spawned before",
    "VRAM_STALE": "check the worker: its GPU stopped responding",
    "WAS_AWAY": "nothing to do: live workers send a heartbeat within its timeout",
}


def advice_on(code: str, fleet: str | None) -> str | None:
    """With the name of the fleet in its commands, so that they can be copied."""
    advice = ADVICE.get(code)
    return advice.replace("FLEET", fleet) if advice is not None and fleet is not None else advice


@dataclass(frozen=True, slots=True)
class Alert:
    """A condition that holds now. `key` distinguishes alerts of the same code: "SLOT_FAILED 3"."""

    # None: all fleets.
    fleet: str | None
    key: str
    code: str
    severity: Severity
    reason: str


@dataclass(frozen=True, slots=True)
class FleetAlertInputs:
    fleet: Fleet
    # Alerts of the fleet's last plan: key to reason.
    raised: Mapping[str, str]
    # Recently created workers that never became ready.
    provisioning_timeouts: tuple[str, ...] = ()
    # Provider call to the number of consecutive errors.
    provider_errors: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class RejectedRows:
    """Rows of an adopted table that cannot become tasks, or that refused the state of their task."""

    # Name of the adoption.
    name: str
    table: str
    count: int


@dataclass(frozen=True, slots=True)
class AlertInputs:
    """Everything that alert rules depend on."""

    now: datetime
    # How long there has been no leader. None: there is one, or there never was.
    leaderless_s: float | None
    fleets: tuple[FleetAlertInputs, ...]
    # Queue to tasks that failed permanently in the last hour, without cancelled ones.
    failed_tasks: Mapping[str, int]
    rejected_rows: tuple[RejectedRows, ...] = ()
    # Alerts that fired and did not resolve yet.
    open: tuple[Alert, ...] = ()
    # Start of the evaluation, while that is recent: a fleet without a cycle since then may get one soon.
    settling_since: datetime | None = None

    @property
    def is_led(self) -> bool:
        return self.leaderless_s is None


class MessageKind(StrEnum):
    FIRING = "firing"
    RESOLVED = "resolved"


@dataclass(frozen=True, slots=True)
class Message:
    """One alert for one notifier. It may be delivered twice, with the same id."""

    id: int
    notifier: str
    kind: MessageKind
    # Delivery attempts, including this one.
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
        state = "resolved" if self.kind is MessageKind.RESOLVED else self.severity.value
        return f"[{state}] {self.code}" + (f" in fleet {self.fleet}" if self.fleet is not None else "")
