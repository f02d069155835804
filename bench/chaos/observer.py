"""Watches the installation from outside: heartbeats, machines, cycles and completions, by the monotonic clock.

Ages of heartbeats are measured here, and not by the database's clock, which faults change.
"""

import asyncio
import bisect
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime

import asyncpg

from bench.chaos.installation import FLEET, LOCAL_WORKERS, SERVERS, ChaosInstallation

HEARTBEATS_INTERVAL_S = 0.2
MACHINES_INTERVAL_S = 0.7
QUERY_TIMEOUT_S = 5.0
RECOVERY_INTERVAL_S = 0.1
# A heartbeat that was sent before a fault may be seen this much later.
IN_FLIGHT_S = 0.5

LIVE_WORKERS = """
select id, queues[1] as queue, last_heartbeat, fleet, slot from windlass.workers
where status in ('spawning', 'active', 'terminating', 'error')
"""
PROGRESS = """
select
  (select (c.id, c.repeats)::text from windlass.cycles c order by c.id desc limit 1) as cycle,
  (select coalesce(max(id), 0) from audit.transitions) as transition
"""
COMPLETED_SINCE = "select distinct queue from audit.transitions where id > $1 and after = 'complete'"


@dataclass
class Recovery:
    """Seconds until each part worked again. None: not within the limit."""

    parts: dict[str, float | None] = field(default_factory=dict)

    @property
    def total_s(self) -> float | None:
        seconds = [value for value in self.parts.values() if value is not None]
        return max(seconds) if len(seconds) == len(self.parts) else None


class Observer:
    def __init__(self, installation: ChaosInstallation) -> None:
        self._installation = installation
        self._last: dict[str, datetime] = {}
        self._queue_of: dict[str, str] = {}
        # When a new heartbeat of a worker was seen, oldest first.
        self.heartbeats: dict[str, list[float]] = {}
        self.most_rows = 0
        self.most_machines = 0
        self.samples = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_heartbeats())
            group.create_task(self._watch_machines())

    async def _watch_heartbeats(self) -> None:
        while True:
            with suppress(OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
                rows = await self._fetch(LIVE_WORKERS)
                now = time.monotonic()
                for row in rows:
                    worker_id, at = row["id"], row["last_heartbeat"]
                    self._queue_of[worker_id] = row["queue"] or ""
                    if at is not None and at != self._last.get(worker_id):
                        self._last[worker_id] = at
                        self.heartbeats.setdefault(worker_id, []).append(now)
                self.most_rows = max(self.most_rows, sum(r["fleet"] == FLEET and r["slot"] is not None for r in rows))
            await asyncio.sleep(HEARTBEATS_INTERVAL_S)

    async def _watch_machines(self) -> None:
        before = 0
        while True:
            count = len(await asyncio.to_thread(self._installation.local_workers))
            # Two samples: a process table is read while it changes.
            self.most_machines = max(self.most_machines, min(before, count))
            before = count
            self.samples += 1
            await asyncio.sleep(MACHINES_INTERVAL_S)

    def silence_s(self, worker_id: str, at: float) -> float:
        """For how long no new heartbeat of the worker had been seen at this moment."""
        seen = self.heartbeats.get(worker_id, [])
        position = bisect.bisect_right(seen, at)
        return at - seen[position - 1] if position else float("inf")

    async def recovery(self, since: float, limit_s: float) -> Recovery:
        """Wait until tasks complete in every queue, a cycle ends, and all workers and processes are there again."""
        found = Recovery(dict.fromkeys(("completions", "cycle", "workers", "processes")))
        before: asyncpg.Record | None = None
        while time.monotonic() < since + limit_s and found.total_s is None:
            with suppress(OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
                if before is None:
                    (before,) = await self._fetch(PROGRESS)
                for part in await self._working_parts(before, since):
                    if found.parts[part] is None:
                        found.parts[part] = time.monotonic() - since
            await asyncio.sleep(RECOVERY_INTERVAL_S)
        return found

    async def _working_parts(self, before: asyncpg.Record, since: float) -> list[str]:
        (now,) = await self._fetch(PROGRESS)
        completed = {row["queue"] for row in await self._fetch(COMPLETED_SINCE, before["transition"])}
        is_ready = await self._installation.is_ready()
        works = {
            "completions": completed >= set(self._installation.queues),
            "cycle": now["cycle"] != before["cycle"],
            "workers": self._have_all_workers(since + IN_FLIGHT_S),
            "processes": is_ready and len(self._installation.up_processes()) == 1 + SERVERS,
        }
        return [part for part, works_again in works.items() if works_again]

    def _have_all_workers(self, since: float) -> bool:
        counts: dict[str, int] = {}
        for worker_id, seen in self.heartbeats.items():
            if seen[-1] > since:
                queue = self._queue_of[worker_id]
                counts[queue] = counts.get(queue, 0) + 1
        names = [name.split("-")[0] for name in self._installation.external_workers]
        wanted = {FLEET: LOCAL_WORKERS, **{queue: names.count(queue) for queue in names}}
        return all(counts.get(queue, 0) >= count for queue, count in wanted.items())

    async def _fetch(self, sql: str, *arguments: object) -> list[asyncpg.Record]:
        async with asyncio.timeout(QUERY_TIMEOUT_S):
            connection = await asyncpg.connect(self._installation.dsn)
        try:
            return list(await connection.fetch(sql, *arguments, timeout=QUERY_TIMEOUT_S))
        finally:
            connection.terminate()
