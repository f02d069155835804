"""Prometheus metrics: gauges that are loaded with each scrape, and counters of this process.

Labels are fleets, queues, statuses and codes, so the number of series does not grow with workers or tasks. Money is in
units of its currency, time in seconds.
"""

import collections
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from windlass.model.money import MICROS
from windlass.model.overview import FleetMetrics, FleetOverview, Overview
from windlass.policy.scale.clear_time import clears_in_s
from windlass.ports.queries import QueryStore
from windlass.server.event_stream import OverviewFeed

# A cycle takes milliseconds. One that takes longer than a lease is an incident.
_CYCLE_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# A process starts in a second, a server in a minute or two, a pod with a large image in a quarter of an hour.
_BOOT_BUCKETS = (1.0, 5.0, 15.0, 30.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0, 900.0, 1200.0, 1800.0, 3600.0)
# Provider calls and their outcomes, as control/summary.py counts them.
_CALLS = ("create", "delete", "grow", "list", "prepare")
_CALL_OUTCOMES = ("error", "ok", "refused")
_MESSAGE_OUTCOMES = ("delivered", "failed", "refused", "retrying")
# Producers choose queue names freely. Above this number the smallest queues share one series.
MAX_QUEUES = 200
OTHER_QUEUES = "(others)"


class CycleSummary(Protocol):
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


class Metrics:
    def __init__(self, overview_feed: OverviewFeed, store: QueryStore) -> None:
        self._overview_feed = overview_feed
        self._store = store
        self._counters = registry = CollectorRegistry()
        self._cycles = Counter("windlass_cycles", "Cycles run by this process.", ["fleet", "role"], registry=registry)
        self._cycle_s = Histogram(
            "windlass_cycle_seconds", "Duration of a cycle.", ["fleet"], registry=registry, buckets=_CYCLE_BUCKETS
        )
        self._actions = Counter("windlass_actions", "Actions of cycles.", ["fleet", "action"], registry=registry)
        self._failures = Counter("windlass_worker_failures", "Workers that failed.", ["fleet"], registry=registry)
        self._calls = Counter(
            "windlass_provider_calls", "Calls to providers.", ["fleet", "call", "outcome"], registry=registry
        )
        self._boots = Histogram(
            "windlass_boot_phase_seconds",
            "Time from the request of a machine to each phase of its boot, as this process saw it.",
            ["fleet", "phase"],
            registry=registry,
            buckets=_BOOT_BUCKETS,
        )
        # Worker and phase of the boots that were observed, per fleet. None before the first scrape.
        self._observed_boots: dict[str, set[tuple[str, str]]] | None = None
        self._messages = Counter(
            "windlass_alert_messages", "Alert messages to notifiers.", ["notifier", "outcome"], registry=registry
        )
        self._dropped = Counter(
            "windlass_log_lines_dropped", "Log lines not written to the database.", registry=registry
        )

    def start_at_zero(self, fleets: Iterable[str], notifiers: Iterable[str] = ()) -> None:
        """Create the series of these fleets and notifiers. PromQL's increase() ignores the first value of a series."""
        for fleet in fleets:
            self._failures.labels(fleet)
            for call in _CALLS:
                for outcome in _CALL_OUTCOMES:
                    self._calls.labels(fleet, call, outcome)
        for notifier in notifiers:
            for outcome in _MESSAGE_OUTCOMES:
                self._messages.labels(notifier, outcome)

    def record_cycle(self, summary: CycleSummary) -> None:
        fleet = summary.fleet
        self._cycles.labels(fleet, "leader" if summary.is_leader else "standby").inc()
        if not summary.is_leader:
            return
        self._cycle_s.labels(fleet).observe(summary.duration_s)
        actions = summary.actions or {}
        for action, count in actions.items():
            self._actions.labels(fleet, action).inc(count)
        self._failures.labels(fleet).inc(actions.get("workers_failed", 0))
        for call, outcome, count in summary.provider_calls:
            self._calls.labels(fleet, call, outcome).inc(count)

    def record_message(self, notifier: str, outcome: str) -> None:
        self._messages.labels(notifier, outcome).inc()

    def record_dropped_lines(self, count: int) -> None:
        self._dropped.inc(count)

    async def render(self) -> bytes:
        """The text format of Prometheus. Raises DatabaseUnavailable."""
        overview, measures = await self._overview_feed.overview(), await self._store.fleet_metrics()
        self.start_at_zero(each.fleet.name for each in overview.fleets)
        self._observe_boots(measures)
        gauges = CollectorRegistry()
        families = [_worker_gauge(overview, measures), *_fleet_gauges(overview), *_queue_gauges(overview)]
        gauges.register(_Collected([*families, *_measure_gauges(measures, overview)]))
        return bytes(generate_latest(gauges) + generate_latest(self._counters))

    def _observe_boots(self, measures: Iterable[FleetMetrics]) -> None:
        """Count each phase of each worker once. Those before the first scrape of this process are not counted."""
        before, self._observed_boots = self._observed_boots, {}
        for measure in measures:
            seen = self._observed_boots[measure.fleet] = {(boot.worker_id, boot.phase) for boot in measure.boots}
            known = seen if before is None else before.get(measure.fleet, set())
            for boot in measure.boots:
                if (boot.worker_id, boot.phase) not in known:
                    self._boots.labels(measure.fleet, boot.phase).observe(boot.seconds)


class _Collected:
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _gauge(name: str, help_: str, labels: tuple[str, ...], values: Iterable[tuple[Any, ...]]) -> GaugeMetricFamily:
    """`values`: tuples of the labels and then the value. A value of None is left out."""
    family = GaugeMetricFamily(f"windlass_{name}", help_, labels=labels)
    for *names, value in values:
        if value is not None:
            family.add_metric([str(each) for each in names], value)
    return family


def _worker_gauge(seen: Overview, measures: Iterable[FleetMetrics]) -> Metric:
    terminated = {measure.fleet: measure.terminated for measure in measures}
    counts = [
        (f.fleet.name, status, count)
        for f in seen.fleets
        for status, count in (*f.workers.items(), ("terminated", terminated.get(f.fleet.name)))
    ]
    return _gauge("workers", "Workers by status. Terminated ones until they are purged.", ("fleet", "status"), counts)


def _fleet_gauges(seen: Overview) -> list[Metric]:
    fleets = seen.fleets
    open_alerts = [*seen.alerts, *(alert for f in fleets for alert in f.alerts)]
    alerts = collections.Counter((alert.fleet or "", alert.code, alert.severity) for alert in open_alerts)

    def each(name: str, help_: str, value: Callable[[FleetOverview], float | None]) -> GaugeMetricFamily:
        return _gauge(name, help_, ("fleet",), ((f.fleet.name, value(f)) for f in fleets))

    return [
        each("workers_paused", "Paused workers.", lambda f: f.paused),
        each("workers_silent", "Active workers without a heartbeat for longer than their lease.", lambda f: f.silent),
        each("workers_idle", "Active workers that can start a task and have none.", lambda f: f.idle),
        each("slots_free", "Tasks that active workers could start now.", lambda f: f.free_slots),
        each(
            "queue_clear_seconds",
            "Time to run all queued tasks on the free slots, at the median duration. Absent if unknown.",
            _queue_clear_s,
        ),
        each("workers_min", "Minimum number of workers.", lambda f: f.fleet.min_workers),
        each("workers_max", "Maximum number of workers.", lambda f: f.fleet.max_workers),
        each("fleet_paused", "1 if the fleet is paused.", lambda f: int(f.fleet.is_paused)),
        each(
            "fleet_unattended_seconds",
            "Time without a cycle beyond the expected interval. 0 if cycles run as expected.",
            lambda f: f.fleet.without_orchestrator_s(seen.at) or 0,
        ),
        each("last_cycle_age_seconds", "Time since the last cycle.", lambda f: _last_cycle_age_s(f, seen)),
        _gauge(
            "fleet_hold",
            "1 while the fleet is on hold.",
            ("fleet", "code"),
            ((f.fleet.name, f.fleet.hold.code, 1) for f in fleets if f.fleet.hold is not None),
        ),
        _gauge(
            "cost_per_hour",
            "Price per hour of the current machines.",
            ("fleet", "currency"),
            ((f.fleet.name, burn.currency, burn.micros_per_hour / MICROS) for f in fleets for burn in f.burn),
        ),
        _gauge(
            "alerts_firing",
            "Open alerts.",
            ("fleet", "code", "severity"),
            ((*labels, count) for labels, count in alerts.items()),
        ),
        _gauge("has_leader", "1 if an orchestrator holds the leader lease.", (), ((int(seen.leader is not None),),)),
    ]


def _queue_clear_s(each: FleetOverview) -> float | None:
    work = each.work
    left_s = clears_in_s(work.queued, each.free_slots, work.duration_p50_s)
    return left_s if isfinite(left_s) else None


def _last_cycle_age_s(each: FleetOverview, seen: Overview) -> float | None:
    planned_at = each.fleet.planned_at
    return max(0.0, (seen.at - planned_at).total_seconds()) if planned_at is not None else None


def _queue_gauges(seen: Overview) -> list[Metric]:
    largest = sorted(seen.queues, key=lambda name: (-seen.queues[name].queued - seen.queues[name].running, name))
    shown = [(name, seen.queues[name]) for name in sorted(largest[:MAX_QUEUES])]
    rest = [seen.queues[name] for name in largest[MAX_QUEUES:]]

    def each(name: str, help_: str, field: str) -> GaugeMetricFamily:
        values = [(queue, getattr(work, field)) for queue, work in shown]
        if rest:
            values.append((OTHER_QUEUES, sum(getattr(work, field) for work in rest)))
        return _gauge(name, help_, ("queue",), values)

    return [
        each("tasks_queued", "Tasks that can run now.", "queued"),
        each("tasks_scheduled", "Tasks with a run_after in the future.", "scheduled"),
        each("tasks_retrying", "Tasks that failed and will be retried.", "retrying"),
        each("tasks_running", "Running tasks.", "running"),
        each("tasks_failed", "Tasks that failed permanently.", "dead"),
        each("tasks_completed_per_minute", "Throughput of the last minutes.", "completed_per_minute"),
        _gauge(
            "oldest_queued_seconds",
            "Waiting time of the oldest queued task.",
            ("queue",),
            ((queue, work.oldest_queued_age_s or 0.0) for queue, work in shown),
        ),
        _gauge(
            "task_wait_seconds",
            "Time from ready to claimed, of recent tasks.",
            ("queue", "quantile"),
            (
                (queue, quantile, value)
                for queue, work in shown
                for quantile, value in (("0.5", work.wait_p50_s), ("0.95", work.wait_p95_s))
            ),
        ),
        _gauge(
            "task_duration_seconds",
            "Time from claimed to complete, of recent tasks.",
            ("queue", "quantile"),
            ((queue, "0.5", work.duration_p50_s) for queue, work in shown),
        ),
    ]


def _measure_gauges(measures: list[FleetMetrics], seen: Overview) -> list[Metric]:
    names = {each.fleet.name for each in seen.fleets}
    measures = [measure for measure in measures if measure.fleet in names]
    machines = {(f.fleet.name, burn.currency): burn.machines for f in seen.fleets for burn in f.burn}

    def each(name: str, help_: str, field: str) -> GaugeMetricFamily:
        return _gauge(name, help_, ("fleet",), ((m.fleet, getattr(m, field)) for m in measures))

    return [
        each(
            "provisioning_success_ratio",
            "Share of the last 50 workers that became active.",
            "provisioning_success_ratio",
        ),
        each("provisioning_seconds", "Mean time from spawn to active, last 50 workers.", "provisioning_mean_s"),
        _gauge(
            "boot_seconds",
            "Time from the request of a machine to each phase of its boot, last 200 workers.",
            ("fleet", "phase", "quantile"),
            (
                (m.fleet, boot.phase, quantile, value)
                for m in measures
                for boot in m.boot_quantiles
                for quantile, value in (("0.5", boot.p50_s), ("0.95", boot.p95_s), ("0.99", boot.p99_s))
            ),
        ),
        each("worker_restarts", "Restarts counted against the slots.", "restarts"),
        each("slots_failed", "Slots that reached max_restarts.", "failed_slots"),
        each("since_last_failure_seconds", "Time since a worker failed.", "since_last_crash_s"),
        _gauge(
            "worker_cost",
            "Mean cost so far of the current machines.",
            ("fleet", "currency"),
            (
                (m.fleet, currency, micros / MICROS / max(1, machines.get((m.fleet, currency), 1)))
                for m in measures
                for currency, micros in m.machine_costs
            ),
        ),
        _gauge(
            "spent_last_day",
            "Settled cost of the last day, by kind.",
            ("fleet", "currency", "kind"),
            (
                (m.fleet, currency, kind, micros / MICROS)
                for m in measures
                for currency, *parts in m.spent
                for kind, micros in zip(("task", "boot", "idle", "tail"), parts, strict=True)
            ),
        ),
        _gauge(
            "billed_time_used_ratio",
            "Share of the settled cost of the last day that was spent on tasks.",
            ("fleet", "currency"),
            (
                (m.fleet, currency, parts[0] / sum(parts) if sum(parts) else None)
                for m in measures
                for currency, *parts in m.spent
            ),
        ),
    ]
