"""Counters for metrics: what is counted, with which labels, and a buffer between two writes to the database.

Every process counts in a buffer of its own and adds it to the database every few seconds. The database holds the sums,
so they include processes that have ended, and every server reports the same values. A process that is killed loses what
it counted since its last write.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

# Series that one buffer holds. Labels are fleets, notifiers, outcomes and status codes, so this is never reached.
MAX_SERIES = 10_000


@dataclass(frozen=True, slots=True)
class CounterDefinition:
    name: str
    help: str
    labels: tuple[str, ...] = ()


CYCLES = CounterDefinition("windlass_cycles", "Cycles of control processes.", ("fleet", "role"))
ACTIONS = CounterDefinition("windlass_actions", "Actions of cycles.", ("fleet", "action"))
WORKER_FAILURES = CounterDefinition("windlass_worker_failures", "Workers that failed.", ("fleet",))
PROVIDER_CALLS = CounterDefinition("windlass_provider_calls", "Calls to providers.", ("fleet", "call", "outcome"))
ALERT_MESSAGES = CounterDefinition("windlass_alert_messages", "Alert messages to notifiers.", ("notifier", "outcome"))
LOG_LINES_DROPPED = CounterDefinition("windlass_log_lines_dropped", "Log lines not written to the database.")
HTTP_REQUESTS = CounterDefinition("windlass_http_requests", "HTTP requests that were answered.")
HTTP_REFUSALS = CounterDefinition("windlass_http_refusals", "HTTP requests refused with this status.", ("status",))
PROCESS_RESTARTS = CounterDefinition(
    "windlass_process_restarts", "Processes that were replaced: they exited, stalled or used too much memory.",
    ("kind", "reason"),
)  # fmt: skip
COUNTERS = (
    *(CYCLES, ACTIONS, WORKER_FAILURES, PROVIDER_CALLS, ALERT_MESSAGES, LOG_LINES_DROPPED),
    *(HTTP_REQUESTS, HTTP_REFUSALS, PROCESS_RESTARTS),
)


@dataclass(frozen=True, slots=True)
class HistogramDefinition:
    """Stored as counters: one per bucket (not cumulative) with the label `le`, and one for the sum of the values."""

    name: str
    help: str
    labels: tuple[str, ...]
    bounds: tuple[float, ...]

    @property
    def bucket_names(self) -> tuple[str, ...]:
        return (*map(str, self.bounds), "+Inf")

    @property
    def bucket_counter(self) -> CounterDefinition:
        return CounterDefinition(f"{self.name}_bucket", "", (*self.labels, "le"))

    @property
    def sum_counter(self) -> CounterDefinition:
        return CounterDefinition(f"{self.name}_sum", "", self.labels)


# A cycle takes milliseconds. One that takes longer than a lease is an incident.
CYCLE_SECONDS = HistogramDefinition(
    "windlass_cycle_seconds",
    "Duration of a cycle.",
    ("fleet",),
    (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
# A process starts in a second, a server in a minute or two, a pod with a large image in a quarter of an hour.
BOOT_PHASE_SECONDS = HistogramDefinition(
    "windlass_boot_phase_seconds",
    "Time from the request of a machine to each phase of its boot.",
    ("fleet", "phase"),
    (1.0, 5.0, 15.0, 30.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0, 900.0, 1200.0, 1800.0, 3600.0),
)
HISTOGRAMS = (CYCLE_SECONDS, BOOT_PHASE_SECONDS)

# Provider calls and their outcomes, as control/summary.py counts them; outcomes of alert messages.
_CALLS = ("create", "delete", "grow", "list", "prepare")
_CALL_OUTCOMES = ("error", "ok", "refused")
_MESSAGE_OUTCOMES = ("delivered", "failed", "refused", "retrying")


@dataclass(frozen=True, slots=True)
class CounterValue:
    """A value, or an increment, of one series."""

    name: str
    labels: tuple[str, ...]
    value: float


class CountedCycle(Protocol):
    """The part of a cycle's summary that is counted. `provider_calls`: call, outcome, number."""

    @property
    def fleet(self) -> str: ...
    @property
    def is_leader(self) -> bool: ...
    @property
    def duration_s(self) -> float: ...
    @property
    def actions(self) -> Mapping[str, int] | None: ...
    @property
    def provider_calls(self) -> Iterable[tuple[str, str, int]]: ...


class CounterBuffer:
    """Increments since the last write."""

    def __init__(self) -> None:
        self._increments: dict[tuple[str, tuple[str, ...]], float] = {}

    def add(self, counter: CounterDefinition, labels: Sequence[str] = (), amount: float = 1.0) -> None:
        """An amount of 0 creates the series. PromQL's increase() ignores the first value of a series."""
        key = (counter.name, tuple(labels))
        if key in self._increments or len(self._increments) < MAX_SERIES:
            self._increments[key] = self._increments.get(key, 0.0) + amount

    def observe(self, histogram: HistogramDefinition, labels: Sequence[str], value: float) -> None:
        bucket = histogram.bucket_names[bisect_left(histogram.bounds, value)]
        self.add(histogram.bucket_counter, (*labels, bucket))
        self.add(histogram.sum_counter, labels, value)

    def add_cycle(self, summary: CountedCycle) -> None:
        fleet = summary.fleet
        self.add(CYCLES, (fleet, "leader" if summary.is_leader else "standby"))
        if not summary.is_leader:
            return
        self.observe(CYCLE_SECONDS, (fleet,), summary.duration_s)
        actions = summary.actions or {}
        for action, count in actions.items():
            self.add(ACTIONS, (fleet, action), count)
        self.add(WORKER_FAILURES, (fleet,), actions.get("workers_failed", 0))
        for call, outcome, count in summary.provider_calls:
            self.add(PROVIDER_CALLS, (fleet, call, outcome), count)

    def start_at_zero(self, fleets: Iterable[str], notifiers: Iterable[str] = ()) -> None:
        """Create the series of these fleets and notifiers."""
        for fleet in fleets:
            self.add(WORKER_FAILURES, (fleet,), 0)
            for call in _CALLS:
                for outcome in _CALL_OUTCOMES:
                    self.add(PROVIDER_CALLS, (fleet, call, outcome), 0)
        for notifier in notifiers:
            for outcome in _MESSAGE_OUTCOMES:
                self.add(ALERT_MESSAGES, (notifier, outcome), 0)
        for counter in (LOG_LINES_DROPPED, HTTP_REQUESTS):
            self.add(counter, (), 0)

    def take(self) -> list[CounterValue]:
        """The increments, which are then the caller's."""
        taken, self._increments = self._increments, {}
        return [CounterValue(name, labels, value) for (name, labels), value in taken.items()]

    def put_back(self, increments: Iterable[CounterValue]) -> None:
        """After a write that failed."""
        for each in increments:
            key = (each.name, each.labels)
            if key in self._increments or len(self._increments) < MAX_SERIES:
                self._increments[key] = self._increments.get(key, 0.0) + each.value
