"""The overview of all fleets and queues, its history and metrics, over PostgreSQL. Part of ports/queries.py."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from windlass.model.cycle import Fleet
from windlass.model.cycle_actions import done_of
from windlass.model.overview import (
    COUNT_LIMIT,
    MAX_POINTS,
    MAX_QUEUES,
    BootPhase,
    BootQuantiles,
    Burn,
    FleetMetrics,
    FleetOverview,
    Leader,
    OpenAlert,
    Overview,
    Sample,
    Work,
)
from windlass.model.worker import WorkerStatus
from windlass.store.database import Database, DatabaseStore
from windlass.store.fleets import PostgresFleetQueries
from windlass.store.queries import read_queries
from windlass.store.tasks import QUERIES as TASK_QUERIES

QUERIES = read_queries("windlass.store", "dashboard_queries.sql")
BOOT_QUERIES = read_queries("windlass.store", "boot_queries.sql")
# Throughput counts this many completed tasks of all queues, not older than RECENT_S. Wait times and durations use this
# many per queue, so that a busy queue does not hide a quiet one.
RECENT_TASKS = 20_000
RECENT_TASKS_OF_QUEUE = 500
RECENT_S = 300.0
# A rate is measured over at least this time: one task that took a moment does not make a high throughput.
MIN_SPAN_S = 30.0
SAMPLE_INTERVAL_S = 5.0
# Charts with longer steps read averages of samples over this time.
AVERAGE_INTERVAL_S = 300.0
_COUNTED = (WorkerStatus.SPAWNING, WorkerStatus.ACTIVE, WorkerStatus.TERMINATING, WorkerStatus.ERROR)


class PostgresOverview(DatabaseStore):
    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._fleet_queries = PostgresFleetQueries(database)

    async def overview(self, configured: frozenset[str] | None = None) -> Overview:
        fleets = await self._fleet_queries.fleets()
        async with self._database.connection("reading the overview") as connection:
            moment = await connection.fetchrow(QUERIES["overview_time"])
            queues, has_more_queues = await overview_queues(connection)
            of_queues, recent_work = await _queue_works(connection, queues)
            serving = dict(map(tuple, await connection.fetch(QUERIES["workers_by_queue"])))
            workers = {row["fleet"]: row for row in await connection.fetch(QUERIES["worker_counts"])}
            burn = await connection.fetch(QUERIES["burn_rates"])
            cycles = {row["fleet"]: row for row in await connection.fetch(QUERIES["last_cycles"])}
            alerts = [OpenAlert(**row) for row in await connection.fetch(QUERIES["open_alerts"])]
            leader = await connection.fetchrow(QUERIES["leader"])
        if configured is not None:
            fleets = _current_fleets(fleets, configured, workers.keys(), moment["at"])
        return Overview(
            at=moment["at"],
            fleets=tuple(
                FleetOverview(
                    fleet=fleet,
                    work=_sum_work([of_queues[name] for name in fleet.queues], recent_work.of(set(fleet.queues))),
                    workers={
                        status: workers[fleet.name][status] if fleet.name in workers else 0 for status in _COUNTED
                    },
                    **{
                        name: workers[fleet.name][name] if fleet.name in workers else 0
                        for name in ("managed", "by_hand", "outdated", "paused", "silent", "idle", "free_slots")
                    },
                    is_configured=configured is not None and fleet.name in configured,
                    decision=cycles[fleet.name]["decision"] if fleet.name in cycles else None,
                    cycle_id=cycles[fleet.name]["id"] if fleet.name in cycles else None,
                    decided_at=cycles[fleet.name]["decided_at"] if fleet.name in cycles else None,
                    done=_done(cycles[fleet.name]) if fleet.name in cycles else (),
                    burn=tuple(
                        Burn(row["currency"], row["micros_per_hour"], row["machines"])
                        for row in burn
                        if row["fleet"] == fleet.name
                    ),
                    alerts=tuple(alert for alert in alerts if alert.fleet == fleet.name),
                )
                for fleet in fleets
            ),
            queues=of_queues,
            alerts=tuple(alert for alert in alerts if alert.fleet is None),
            leader=Leader(**leader) if leader is not None else None,
            last_event_id=moment["last_event_id"],
            has_more_queues=has_more_queues,
            workers_by_queue=serving,
            total=_sum_work(list(of_queues.values()), recent_work.of(of_queues)),
        )

    async def queue_work(self, queue: str) -> Work:
        async with self._database.connection("reading a queue") as connection:
            return (await _queue_works(connection, [queue]))[0][queue]

    async def history(self, fleet: str, since_s: float, points: int = 240) -> list[Sample]:
        step_s = max(SAMPLE_INTERVAL_S, since_s / max(1, min(points, MAX_POINTS)))
        query = "history" if step_s < AVERAGE_INTERVAL_S else "long_history"
        rows = await self._database.fetch("reading the history", QUERIES[query], fleet, since_s, step_s)
        return [Sample(**row) for row in rows[-MAX_POINTS:]]

    async def boot_times(self, fleet: str) -> list[BootQuantiles]:
        rows = await self._database.fetch("reading boot times", BOOT_QUERIES["boot_times"], fleet)
        return [BootQuantiles(*tuple(row)[1:]) for row in rows]

    async def take_samples(self, overview: Overview) -> None:
        rows = []
        for fleet in overview.fleets:
            burn = fleet.burn[0] if fleet.burn else None
            rows.append(
                {
                    "fleet": fleet.fleet.name,
                    "queued": fleet.work.queued,
                    "running": fleet.work.running,
                    **{str(status): count for status, count in fleet.workers.items()},
                    "completed_per_minute": fleet.work.current_per_minute,
                    "wait_p95_s": fleet.work.wait_p95_s,
                    "burn_micros_per_hour": burn.micros_per_hour if burn is not None else None,
                    "currency": burn.currency if burn is not None else None,
                }
            )
        function = "windlass_internal.add_samples"
        await self._database.call("writing samples", function, json.dumps(rows), SAMPLE_INTERVAL_S)

    async def purge_dashboard_rows(self) -> int:
        kept = self._database.retention
        return await self._database.sweep("windlass_internal.sweep_dashboard", kept.samples_s, kept.sample_averages_s)

    async def fleet_metrics(self) -> list[FleetMetrics]:
        async with self._database.connection("reading metrics") as connection:
            rows = await connection.fetch(QUERIES["fleet_metrics"])
            costs = await connection.fetch(QUERIES["machine_costs"])
            spent = await connection.fetch(QUERIES["recent_spending"])
            phases = await connection.fetch(BOOT_QUERIES["boot_phases"])
            quantiles = await connection.fetch(BOOT_QUERIES["boot_times"], None)
        return [
            FleetMetrics(
                **row,
                machine_costs=tuple((c["currency"], c["micros"]) for c in costs if c["fleet"] == row["fleet"]),
                spent=tuple(tuple(s)[1:] for s in spent if s["fleet"] == row["fleet"]),
                boots=tuple(BootPhase(*tuple(p)[1:]) for p in phases if p["fleet"] == row["fleet"]),
                boot_quantiles=tuple(BootQuantiles(*tuple(q)[1:]) for q in quantiles if q["fleet"] == row["fleet"]),
            )
            for row in rows
        ]


def _done(cycle: Any) -> tuple[str, ...]:
    summary = json.loads(cycle["summary"]) if cycle["summary"] is not None else None
    return tuple(done_of(json.loads(cycle["planned"]), summary))


async def overview_queues(connection: Any) -> tuple[list[str], bool]:
    """All queues that are served, the first MAX_QUEUES others with unfinished tasks, and whether there are more."""
    served = {row["queue"] for row in await connection.fetch(QUERIES["fleet_queues"])}
    known = {row["queue"] for row in await connection.fetch(TASK_QUERIES["known_queues"])}
    others = sorted(known - served)
    return sorted([*served, *others[:MAX_QUEUES]]), len(others) > MAX_QUEUES


async def _queue_works(connection: Any, queues: Sequence[str]) -> "tuple[dict[str, Work], _RecentWork]":
    """The counts of each queue, and the recent work of all."""
    counted = await connection.fetch(QUERIES["queue_counts"], queues, COUNT_LIMIT)
    running = dict(map(tuple, await connection.fetch(QUERIES["running_by_queue"])))
    dead = dict(map(tuple, await connection.fetch(QUERIES["failed_by_queue"], COUNT_LIMIT)))
    recent = _RecentWork(
        await connection.fetch(QUERIES["recent_completions"], RECENT_TASKS, RECENT_TASKS_OF_QUEUE, RECENT_S, MIN_SPAN_S)
    )
    works = {
        row["queue"]: Work(
            **{name: value for name, value in row.items() if name != "queue"},
            running=running.get(row["queue"], 0),
            dead=dead.get(row["queue"], 0),
            **recent.of({row["queue"]}),
        )
        for row in counted
    }
    return works, recent


class _RecentWork:
    """Wait times, durations and throughput of the newest completed tasks, for any set of queues."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self._by_queue: defaultdict[str, list[Any]] = defaultdict(list)
        for row in rows:
            self._by_queue[row["queue"]].append(row)

    def of(self, queues: Iterable[str]) -> dict[str, Any]:
        found = [self._by_queue[queue] for queue in queues if queue in self._by_queue]
        # A busy queue has fewer rows than completed tasks; each row then counts for several tasks.
        weighted = [(row, row["completed"] / len(rows)) for rows in found for row in rows]
        waits = sorted((row["wait_s"], weight) for row, weight in weighted if row["wait_s"] is not None)
        return {
            "wait_p50_s": _quantile(waits, 0.5),
            "wait_p95_s": _quantile(waits, 0.95),
            "duration_p50_s": _quantile(sorted((row["duration_s"], weight) for row, weight in weighted), 0.5),
            "completed_per_minute": sum(60.0 * rows[0]["completed"] / rows[0]["span_s"] for rows in found),
            "current_per_minute": sum(60.0 * rows[0]["last_minute"] / min(60.0, rows[0]["span_s"]) for rows in found),
        }


def _quantile(weighted: Sequence[tuple[float, float]], share: float) -> float | None:
    """The quantile of sorted (value, weight) pairs, interpolated between neighbours."""
    if not weighted:
        return None
    # The distance between two neighbours is half of their combined weight.
    steps = [(one + other) / 2 for (_, one), (_, other) in pairwise(weighted)]
    left = share * sum(steps)
    for step, ((value, _), (following, _)) in zip(steps, pairwise(weighted), strict=True):
        if left <= step:
            return value + (following - value) * left / step
        left -= step
    return weighted[-1][0]


def _sum_work(parts: Sequence[Work], recent: Mapping[str, Any]) -> Work:
    ages = [part.oldest_queued_age_s for part in parts if part.oldest_queued_age_s is not None]
    return Work(
        queued=sum(part.queued for part in parts),
        scheduled=sum(part.scheduled for part in parts),
        retrying=sum(part.retrying for part in parts),
        running=sum(part.running for part in parts),
        dead=sum(part.dead for part in parts),
        oldest_queued_age_s=max(ages, default=None),
        **recent,
    )


def _current_fleets(
    fleets: list[Fleet], configured: Iterable[str], staffed: Iterable[str], now: datetime
) -> list[Fleet]:
    """Without former fleets: not configured here, without workers, and without a recent cycle."""
    cycling = {fleet.name for fleet in fleets if fleet.planned_at and fleet.without_orchestrator_s(now) is None}
    current = {*configured, *staffed, *cycling}
    return [fleet for fleet in fleets if fleet.name in current]
