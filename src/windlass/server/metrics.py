"""What Prometheus reads: how things stand, looked up when it asks, and what this process has counted since it started.

Labels are fleets, queues, statuses and codes: their number does not grow with workers or tasks. Money is in units of
its currency, time in seconds.
"""

from collections import Counter as Tally
from collections.abc import Awaitable, Callable, Iterable, Mapping
from math import isfinite
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from windlass.model.money import MICROS
from windlass.model.overview import FleetMetrics, FleetOverview, Overview
from windlass.policy.scale.clear_time import clears_in_s

# A cycle takes milliseconds; what takes longer than a lease is an incident.
_CYCLE_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# What is asked of providers, and how it goes: see control/summary.py.
_CALLS = ("create", "delete", "grow", "list", "prepare")
_CALL_OUTCOMES = ("error", "ok", "refused")
_MESSAGE_OUTCOMES = ("delivered", "failed", "given_up", "refused")
# Queues are named by whoever enqueues. Beyond so many the rest are counted together.
MAX_QUEUES = 200
OTHERS = "(others)"


class Metrics:
    def __init__(
        self, overview: Callable[[], Awaitable[Overview]], measures: Callable[[], Awaitable[list[FleetMetrics]]]
    ) -> None:
        self._overview = overview
        self._measures = measures
        self._counted = registry = CollectorRegistry()
        self._cycles = Counter("windlass_cycles", "Cycles run here.", ["fleet", "role"], registry=registry)
        self._cycle_s = Histogram(
            "windlass_cycle_seconds", "What a cycle took.", ["fleet"], registry=registry, buckets=_CYCLE_BUCKETS
        )
        self._actions = Counter("windlass_actions", "What cycles did.", ["fleet", "action"], registry=registry)
        self._crashes = Counter("windlass_worker_crashes", "Workers found broken.", ["fleet"], registry=registry)
        self._calls = Counter(
            "windlass_provider_calls", "Calls of providers.", ["fleet", "call", "outcome"], registry=registry
        )
        self._messages = Counter(
            "windlass_alert_messages", "Messages about alerts.", ["receiver", "outcome"], registry=registry
        )
        self._dropped = Counter(
            "windlass_log_lines_dropped", "Log lines not written to the database.", registry=registry
        )

    def expect(self, fleets: Iterable[str], notifiers: Iterable[str] = ()) -> None:
        """Counters of these begin at zero now: increase() does not see what a counter begins with."""
        for fleet in fleets:
            self._crashes.labels(fleet)
            for call in _CALLS:
                for outcome in _CALL_OUTCOMES:
                    self._calls.labels(fleet, call, outcome)
        for notifier in notifiers:
            for outcome in _MESSAGE_OUTCOMES:
                self._messages.labels(notifier, outcome)

    def record_cycle(
        self,
        fleet: str,
        *,
        is_leader: bool,
        duration_s: float,
        actions: Mapping[str, int],
        provider_calls: Iterable[tuple[str, str, int]],
    ) -> None:
        self._cycles.labels(fleet, "leader" if is_leader else "standby").inc()
        if not is_leader:
            return
        self._cycle_s.labels(fleet).observe(duration_s)
        for action, count in actions.items():
            self._actions.labels(fleet, action).inc(count)
        self._crashes.labels(fleet).inc(actions.get("workers_failed", 0))
        for call, outcome, count in provider_calls:
            self._calls.labels(fleet, call, outcome).inc(count)

    def record_message(self, notifier: str, outcome: str) -> None:
        self._messages.labels(notifier, outcome).inc()

    def record_dropped_lines(self, count: int) -> None:
        self._dropped.inc(count)

    async def read(self) -> bytes:
        """Raises DatabaseUnavailable: then Prometheus knows that much."""
        overview, measures = await self._overview(), await self._measures()
        self.expect(standing.fleet.name for standing in overview.fleets)
        shown = CollectorRegistry()
        families = [_workers(overview, measures), *_of_fleets(overview), *_of_queues(overview)]
        shown.register(_Collected([*families, *_measured(measures, overview)]))
        return bytes(generate_latest(shown) + generate_latest(self._counted))


class _Collected:
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _gauge(name: str, help_: str, labels: tuple[str, ...], values: Iterable[tuple[Any, ...]]) -> GaugeMetricFamily:
    """`values`: the labels, and then the value; one without a value is left out."""
    family = GaugeMetricFamily(f"windlass_{name}", help_, labels=labels)
    for *names, value in values:
        if value is not None:
            family.add_metric([str(each) for each in names], value)
    return family


def _workers(seen: Overview, measures: Iterable[FleetMetrics]) -> Metric:
    ended = {measure.fleet: measure.terminated for measure in measures}
    counts = [
        (f.fleet.name, status, count)
        for f in seen.fleets
        for status, count in (*f.workers.items(), ("terminated", ended.get(f.fleet.name)))
    ]
    return _gauge("workers", "Workers by status; of the terminated, those still known.", ("fleet", "status"), counts)


def _of_fleets(seen: Overview) -> list[Metric]:
    fleets = seen.fleets
    alerts = Tally((a.fleet or "", a.code, a.severity) for a in (*seen.alerts, *(a for f in fleets for a in f.alerts)))

    def each(name: str, help_: str, value: Callable[[FleetOverview], float | None]) -> GaugeMetricFamily:
        return _gauge(name, help_, ("fleet",), ((f.fleet.name, value(f)) for f in fleets))

    return [
        each("workers_paused", "Workers that are paused.", lambda f: f.paused),
        each("workers_silent", "Active workers not heard for longer than their lease.", lambda f: f.silent),
        each("workers_idle", "Active workers that could begin a task and have none.", lambda f: f.idle),
        each("places_free", "Tasks that active workers could begin now.", lambda f: f.free_slots),
        each(
            "queue_clear_seconds",
            "What waits, on the free places, at the median duration; nothing where that is not known.",
            _clears_in_s,
        ),
        each("workers_min", "Never fewer workers than this.", lambda f: f.fleet.min_workers),
        each("workers_max", "Never more workers than this.", lambda f: f.fleet.max_workers),
        each("fleet_paused", "Whether the fleet is paused.", lambda f: int(f.fleet.is_paused)),
        each(
            "fleet_unattended_seconds",
            "No cycle though there should be one.",
            lambda f: f.fleet.without_orchestrator_s(seen.at) or 0,
        ),
        each("last_cycle_age_seconds", "Since the last plan.", lambda f: _age_s(f, seen)),
        _gauge(
            "fleet_hold",
            "Why nobody is hired.",
            ("fleet", "code"),
            ((f.fleet.name, f.fleet.hold.code, 1) for f in fleets if f.fleet.hold is not None),
        ),
        _gauge(
            "burn_per_hour",
            "What the machines that are there cost.",
            ("fleet", "currency"),
            ((f.fleet.name, burn.currency, burn.micros_per_hour / MICROS) for f in fleets for burn in f.burn),
        ),
        _gauge(
            "alerts_firing",
            "What is the matter, and how many times.",
            ("fleet", "code", "severity"),
            ((*labels, count) for labels, count in alerts.items()),
        ),
        _gauge("has_leader", "Whether some orchestrator leads.", (), ((int(seen.leader is not None),),)),
    ]


def _clears_in_s(standing: FleetOverview) -> float | None:
    work = standing.work
    left_s = clears_in_s(work.queued, standing.free_slots, work.duration_p50_s)
    return left_s if isfinite(left_s) else None


def _age_s(standing: FleetOverview, seen: Overview) -> float | None:
    planned_at = standing.fleet.planned_at
    return max(0.0, (seen.at - planned_at).total_seconds()) if planned_at is not None else None


def _of_queues(seen: Overview) -> list[Metric]:
    largest = sorted(seen.queues, key=lambda name: (-seen.queues[name].queued - seen.queues[name].running, name))
    shown = [(name, seen.queues[name]) for name in sorted(largest[:MAX_QUEUES])]
    rest = [seen.queues[name] for name in largest[MAX_QUEUES:]]

    def each(name: str, help_: str, field: str) -> GaugeMetricFamily:
        values = [(queue, getattr(work, field)) for queue, work in shown]
        if rest:
            values.append((OTHERS, sum(getattr(work, field) for work in rest)))
        return _gauge(name, help_, ("queue",), values)

    return [
        each("tasks_queued", "Tasks that could run now.", "queued"),
        each("tasks_scheduled", "Tasks that are not to run before a time.", "scheduled"),
        each("tasks_retrying", "Tasks that failed and will be tried again.", "retrying"),
        each("tasks_running", "Tasks at hand.", "running"),
        each("dead_letters", "Tasks that were given up.", "dead"),
        each("tasks_completed_per_minute", "Throughput of the last minutes.", "completed_per_minute"),
        _gauge(
            "oldest_queued_seconds",
            "How long the head of the queue has waited.",
            ("queue",),
            ((queue, work.oldest_queued_age_s or 0.0) for queue, work in shown),
        ),
        _gauge(
            "task_wait_seconds",
            "From enqueued to claimed, of recent tasks.",
            ("queue", "quantile"),
            (
                (queue, quantile, value)
                for queue, work in shown
                for quantile, value in (("0.5", work.wait_p50_s), ("0.95", work.wait_p95_s))
            ),
        ),
        _gauge(
            "task_duration_seconds",
            "From claimed to complete, of recent tasks.",
            ("queue", "quantile"),
            ((queue, "0.5", work.duration_p50_s) for queue, work in shown),
        ),
    ]


def _measured(measures: list[FleetMetrics], seen: Overview) -> list[Metric]:
    names = {standing.fleet.name for standing in seen.fleets}
    measures = [measure for measure in measures if measure.fleet in names]
    machines = {(f.fleet.name, burn.currency): burn.machines for f in seen.fleets for burn in f.burn}

    def each(name: str, help_: str, field: str) -> GaugeMetricFamily:
        return _gauge(name, help_, ("fleet",), ((m.fleet, getattr(m, field)) for m in measures))

    return [
        each("provisioning_success_ratio", "Of the last fifty hired, those that worked.", "provisioning_success_ratio"),
        each("provisioning_seconds", "From hired to active, the mean of the last fifty.", "provisioning_mean_s"),
        each("worker_restarts", "Restarts of all slots that are remembered.", "restarts"),
        each("slots_failed", "Slots whose restarts are used up.", "failed_slots"),
        each("since_last_crash_seconds", "Since a worker was found broken.", "since_last_crash_s"),
        _gauge(
            "worker_cost",
            "What a machine that is there has cost so far, on average.",
            ("fleet", "currency"),
            (
                (m.fleet, currency, micros / MICROS / max(1, machines.get((m.fleet, currency), 1)))
                for m in measures
                for currency, micros in m.machine_costs
            ),
        ),
        _gauge(
            "spent_last_day",
            "What is settled of the last day, by what it was for.",
            ("fleet", "currency", "kind"),
            (
                (m.fleet, currency, kind, micros / MICROS)
                for m in measures
                for currency, *parts in m.spent
                for kind, micros in zip(("task", "boot", "idle", "tail"), parts, strict=True)
            ),
        ),
        _gauge(
            "paid_time_used_ratio",
            "Of what is settled of the last day, what was for tasks: the utilisation of paid hours.",
            ("fleet", "currency"),
            (
                (m.fleet, currency, parts[0] / sum(parts) if sum(parts) else None)
                for m in measures
                for currency, *parts in m.spent
            ),
        ),
    ]
