"""Prometheus metrics, all from the database: every server of an installation reports the same values.

Gauges are loaded with each scrape. Counters are the sums that all processes have added (model/counters.py), so they
survive restarts. Labels are fleets, queues, statuses and codes, so the number of series does not grow with workers or
tasks. Money is in units of its currency, time in seconds.
"""

import collections
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from math import isfinite
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from windlass.model.counters import COUNTERS, HISTOGRAMS, CounterValue
from windlass.model.money import MICROS
from windlass.model.overview import FleetMetrics, FleetOverview, Overview
from windlass.model.process import ProcessKind, ProcessRecord
from windlass.policy.scale.clear_time import clears_in_s
from windlass.ports.processes import ProcessStore
from windlass.ports.queries import QueryStore
from windlass.server.event_stream import OverviewFeed

# Producers choose queue names freely. Above this number the smallest queues share one series.
MAX_QUEUES = 200
OTHER_QUEUES = "(others)"


class MetricsStore(QueryStore, ProcessStore, Protocol):
    """The store methods behind metrics."""


class Metrics:
    def __init__(self, overview_feed: OverviewFeed, store: MetricsStore) -> None:
        self._overview_feed = overview_feed
        self._store = store

    async def render(self) -> bytes:
        """The text format of Prometheus. Raises DatabaseUnavailable."""
        overview, measures = await self._overview_feed.overview(), await self._store.fleet_metrics()
        families = [_worker_gauge(overview, measures), *_fleet_gauges(overview), *_queue_gauges(overview)]
        families += _measure_gauges(measures, overview)
        families += _process_gauges(await self._store.processes())
        families += _counters(await self._store.counters())
        registry = CollectorRegistry()
        registry.register(_Collected(families))
        return bytes(generate_latest(registry))


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


def _process_gauges(processes: Sequence[ProcessRecord]) -> list[Metric]:
    """Only of live processes. Labels name the place of a process, not its pid, so a restart creates no series."""

    def each(name: str, help_: str, gauge: str) -> GaugeMetricFamily:
        labels = ("kind", "host", "number")
        # Newest first: the successor of a process that died has the same labels.
        values = {(p.kind, p.host, p.number): p.gauges.get(gauge) for p in reversed(processes)}
        return _gauge(name, help_, labels, ((*key, value) for key, value in values.items()))

    counts = collections.Counter(process.kind for process in processes)
    return [
        _gauge("processes", "Live processes.", ("kind",), ((kind, counts[kind]) for kind in ProcessKind)),
        each("process_memory_bytes", "Resident memory of a process.", "memory_bytes"),
        each("process_connections", "Open HTTP connections of a server process.", "connections"),
    ]


def _counters(values: Iterable[CounterValue]) -> list[Metric]:
    by_name: dict[str, dict[tuple[str, ...], float]] = collections.defaultdict(dict)
    for each in values:
        by_name[each.name][each.labels] = each.value
    families: list[Metric] = []
    for counter in COUNTERS:
        family = CounterMetricFamily(counter.name, counter.help, labels=counter.labels)
        for labels, value in by_name[counter.name].items():
            if len(labels) == len(counter.labels):
                family.add_metric(labels, value)
        families.append(family)
    for each_histogram in HISTOGRAMS:
        family_of_buckets = HistogramMetricFamily(
            each_histogram.name, each_histogram.help, labels=each_histogram.labels
        )
        buckets = by_name[each_histogram.bucket_counter.name]
        for labels, total in by_name[each_histogram.sum_counter.name].items():
            names = each_histogram.bucket_names
            counts = accumulate(buckets.get((*labels, name), 0.0) for name in names)
            family_of_buckets.add_metric(labels, list(zip(names, counts, strict=True)), total)
        families.append(family_of_buckets)
    return families
