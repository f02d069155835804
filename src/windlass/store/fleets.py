"""Fleets, workers, events and cycles over PostgreSQL: reads, and what an operator changes.

Implements ports/fleets.py.
"""

from collections.abc import Sequence

from windlass.model.cycle import Cycle, CycleDetail, Fleet
from windlass.model.event import Event
from windlass.model.listing import HostRecord, Page
from windlass.model.worker import Worker
from windlass.ports.fleets import MAX_AHEAD
from windlass.store.cursors import ID, next_cursor, page_size, read_cursor
from windlass.store.database import DatabaseStore
from windlass.store.queries import read_queries
from windlass.store.rows import cycle_detail_of, cycle_of, event_of, fleet_of, worker_fields

QUERIES = read_queries("windlass.store", "control_queries.sql")
WORKER_QUERIES = read_queries("windlass.store", "queries.sql")


class PostgresFilledQueues(DatabaseStore):
    async def queues_with_tasks(self, queues: Sequence[str]) -> set[str]:
        rows = await self._database.fetch("reading the queues", QUERIES["queues_with_tasks"], list(queues))
        return {row["name"] for row in rows}


class PostgresFleetQueries(PostgresFilledQueues):
    async def fleets(self) -> list[Fleet]:
        return [fleet_of(row) for row in await self._database.fetch("listing fleets", QUERIES["fleets"])]

    async def leader(self) -> str | None:
        holder: str | None = await self._database.fetchval("reading the leader", QUERIES["leader"])
        return holder

    async def worker(self, worker_id: str) -> Worker | None:
        row = await self._database.fetchrow("reading a worker", WORKER_QUERIES["workers"], worker_id, True)
        return Worker(**worker_fields(row)) if row is not None else None

    async def workers(self, *, include_terminated: bool = False) -> list[Worker]:
        rows = await self._database.fetch("listing workers", WORKER_QUERIES["workers"], None, include_terminated)
        return [Worker(**worker_fields(row)) for row in rows]

    async def machine_hosts(self, fleet: str | None = None) -> list[HostRecord]:
        rows = await self._database.fetch("listing hosts", QUERIES["machine_hosts"], fleet)
        return [HostRecord(**dict(row)) for row in rows]

    async def machine_places(self, fleet: str | None = None) -> list[HostRecord]:
        rows = await self._database.fetch("listing places", QUERIES["machine_places"], fleet)
        return [HostRecord(**dict(row)) for row in rows]

    async def events(
        self, *, task_id: int | None = None, worker_id: str | None = None, limit: int = 200
    ) -> list[Event]:
        rows = await self._database.fetch("reading events", WORKER_QUERIES["events"], task_id, worker_id, limit)
        return [event_of(row) for row in reversed(rows)]

    async def may_read_events(self) -> bool:
        """Whether this database user reads more than tasks: the owner and orchestrators do."""
        query = "select has_schema_privilege('windlass_internal', 'usage')"
        return bool(await self._database.fetchval("checking this user's rights", query))

    async def audit_page(self, *, actor: str | None = None, limit: int = 50, cursor: str | None = None) -> Page[Event]:
        limit = page_size(limit)
        (before,) = read_cursor(cursor, ID) or (None,)
        rows = await self._database.fetch("reading the audit list", QUERIES["audit"], actor, before, limit)
        return Page(tuple(map(event_of, rows)), next_cursor(rows, limit, key=("id",)))

    async def cycles(self, fleet: str, limit: int = 20) -> list[Cycle]:
        rows = await self._database.fetch("listing cycles", QUERIES["cycles"], fleet, limit)
        return [cycle_of(row) for row in rows]

    async def cycle(self, cycle_id: int) -> CycleDetail | None:
        return cycle_detail_of(await self._database.fetchrow("reading a cycle", QUERIES["cycle"], cycle_id))

    async def last_cycle_with(self, fleet: str, worker_id: str) -> CycleDetail | None:
        row = await self._database.fetchrow("reading a cycle", QUERIES["last_cycle_of_worker"], fleet, worker_id)
        return cycle_detail_of(row)

    async def running_tasks(self) -> dict[str, list[int]]:
        rows = await self._database.fetch("listing running tasks", QUERIES["running_tasks"])
        return {row["worker_id"]: row["task_ids"] for row in rows}

    async def ready_before(self, task_id: int) -> int:
        count: int = await self._database.fetchval("counting tasks", QUERIES["tasks_ahead"], task_id, MAX_AHEAD + 1)
        return count


class PostgresOperations(DatabaseStore):
    async def restart_slots(self, fleet: str, slot: int | None = None) -> int:
        return int(await self._database.call("restarting slots", "windlass_internal.restart_slots", fleet, slot))

    async def request_workers(self, fleet: str, count: int) -> int:
        return int(await self._database.call("requesting workers", "windlass_internal.request_workers", fleet, count))

    async def request_deploy(self, fleet: str, surge: int, max_unavailable: int, *, is_immediate: bool) -> int:
        function = "windlass_internal.request_deploy"
        arguments = (fleet, surge, max_unavailable, is_immediate)
        return int(await self._database.call("requesting a deploy", function, *arguments))

    async def abort_deploy(self, fleet: str) -> bool:
        return bool(await self._database.call("aborting a deploy", "windlass_internal.abort_deploy", fleet))

    async def pause_fleet(self, fleet: str, is_paused: bool) -> int:
        doing = "pausing or resuming a fleet"
        return int(await self._database.call(doing, "windlass_internal.pause_fleet", fleet, is_paused))

    async def set_paused(self, worker_ids: Sequence[str], is_paused: bool) -> int:
        doing = "pausing or resuming workers"
        count: int = await self._database.call(doing, "windlass_internal.pause_workers", worker_ids, is_paused)
        return count

    async def set_terminating(self, worker_ids: Sequence[str], reason: str) -> int:
        count: int = await self._database.call(
            "draining workers", "windlass_internal.drain_workers", worker_ids, reason
        )
        return count

    async def terminate_worker(self, worker_id: str, reason: str) -> bool:
        doing = "terminating a worker"
        return bool(await self._database.call(doing, "windlass_internal.terminate_worker", worker_id, reason))
