"""Processes, counters and requested cycles over PostgreSQL. Implements ports/processes.py."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any
from uuid import UUID

from windlass.model.counters import CounterValue
from windlass.model.masked_values import masked_json
from windlass.model.process import PROCESS_TTL_S, ProcessKind, ProcessRecord, RayHeadAddress
from windlass.ports.processes import CYCLE_REQUEST_TTL_S, MAX_CYCLE_REQUESTS
from windlass.store.channel import watch_channel
from windlass.store.database import DatabaseStore
from windlass.store.queries import read_queries

QUERIES = read_queries("windlass.store", "process_queries.sql")
CYCLE_REQUEST_CHANNEL = "windlass_cycle_requests"
# Rows of `counters`.
MAX_COUNTERS = 20_000


class PostgresProcessQueries(DatabaseStore):
    async def processes(self) -> list[ProcessRecord]:
        rows = await self._database.fetch("listing processes", QUERIES["processes"], PROCESS_TTL_S)
        return [_process(row) for row in rows]


class PostgresProcessStore(PostgresProcessQueries):
    async def record_process(self, process: ProcessRecord) -> None:
        p = process
        ray_head = json.dumps(asdict(p.ray_head)) if p.ray_head is not None else None
        about = (p.id, p.kind, p.number, p.host, p.pid, p.version, p.url, ray_head, json.dumps(dict(p.gauges)))
        await self._database.call("recording a process", "windlass_internal.record_process", *about)

    async def remove_process(self, process_id: UUID) -> None:
        await self._database.call("removing a process", "windlass_internal.remove_process", process_id)

    async def release_leases(self, holder: str) -> None:
        await self._database.call("releasing leases", "windlass_internal.release_leases", holder)

    async def add_counters(self, increments: Sequence[CounterValue]) -> None:
        if increments:
            rows = json.dumps([asdict(increment) for increment in increments])
            await self._database.call("adding to counters", "windlass_internal.add_counters", rows)

    async def counters(self) -> list[CounterValue]:
        rows = await self._database.fetch("reading counters", QUERIES["counters"], MAX_COUNTERS)
        return [CounterValue(row["name"], tuple(row["labels"]), row["value"]) for row in rows]

    async def request_cycle(self) -> int | None:
        request_id: int | None = await self._database.call(
            "requesting a cycle", "windlass_internal.request_cycle", MAX_CYCLE_REQUESTS, CYCLE_REQUEST_TTL_S
        )
        return request_id

    async def cycle_answer(self, request_id: int) -> list[dict[str, Any]] | None:
        answer = await self._database.fetchval("waiting for a cycle", QUERIES["cycle_answer"], request_id)
        return json.loads(answer) if answer is not None else None

    async def withdraw_cycle_request(self, request_id: int) -> None:
        await self._database.call("withdrawing a request", "windlass_internal.withdraw_cycle_request", request_id)

    async def open_cycle_requests(self) -> list[int]:
        query = QUERIES["open_cycle_requests"]
        rows = await self._database.fetch("reading requests for cycles", query, CYCLE_REQUEST_TTL_S)
        return [row["id"] for row in rows]

    async def answer_cycle_requests(self, request_ids: Sequence[int], summaries: Sequence[Mapping[str, Any]]) -> None:
        answer = masked_json(json.dumps, [dict(summary) for summary in summaries])
        function = "windlass_internal.answer_cycle_requests"
        await self._database.call("answering requests for cycles", function, list(request_ids), answer)

    async def watch_cycle_requests(
        self, set_listening: Callable[[bool], None], on_request: Callable[[str], None]
    ) -> None:
        await watch_channel(
            self._database.dsn,
            CYCLE_REQUEST_CHANNEL,
            on_request,
            set_listening,
            is_possible=not self._database.is_pooled,
        )

    async def last_actions(self) -> Mapping[str, Mapping[str, int]]:
        rows = await self._database.fetch("reading the last actions", QUERIES["last_actions"])
        return {row["fleet"]: json.loads(row["actions"] or "{}") for row in rows}


def _process(row: Any) -> ProcessRecord:
    ray_head = json.loads(row["ray_head"]) if row["ray_head"] is not None else None
    return ProcessRecord(
        **{
            **row,
            "kind": ProcessKind(row["kind"]),
            "ray_head": RayHeadAddress(**ray_head) if ray_head is not None else None,
            "gauges": json.loads(row["gauges"]),
        }
    )
