"""Alerts and their outbox over PostgreSQL. Implements ports/alerts.py."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict

from windlass.model.alert import (
    Alert,
    AlertInputs,
    FleetAlertInputs,
    Message,
    MessageKind,
    RejectedRows,
    Severity,
)
from windlass.model.task import storable
from windlass.store.database import Database, DatabaseStore
from windlass.store.fleets import PostgresFleetQueries
from windlass.store.queries import read_queries

QUERIES = read_queries("windlass.store", "alerts.sql")
# Persisting conditions raise their alert event every hour, so the current reason is among the events of this period.
REASONS_S = 7_500.0
MAX_REASONS = 2_000
# Provisioning time-outs this recent are reported.
TIMEOUTS_S = 600.0
MAX_TIMEOUTS = 100
FAILED_TASKS_S = 3_600.0
MAX_FAILED_TASKS = 10_000
MAX_REJECTED_ROWS = 10_000
MAX_OPEN = 10_000


class PostgresAlertStore(DatabaseStore):
    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._fleet_queries = PostgresFleetQueries(database)

    async def alert_inputs(self) -> AlertInputs:
        fleets = await self._fleet_queries.fleets()
        async with self._database.connection("reading alert inputs") as connection:
            moment = await connection.fetchrow(QUERIES["leaderless_time"])
            causes = await connection.fetch(QUERIES["planner_alerts"])
            events = await connection.fetch(QUERIES["alert_reasons"], REASONS_S, MAX_REASONS)
            timeouts = await connection.fetch(QUERIES["provisioning_timeouts"], TIMEOUTS_S, MAX_TIMEOUTS)
            dead = await connection.fetch(QUERIES["failed_tasks"], FAILED_TASKS_S, MAX_FAILED_TASKS)
            rejected = await connection.fetch(QUERIES["rejected_rows"], MAX_REJECTED_ROWS)
            rows = await connection.fetch(QUERIES["open_alerts"], MAX_OPEN)
        open_alerts = tuple(Alert(**{**row, "severity": Severity(row["severity"])}) for row in rows)
        # Newest last, so that the newest reason wins. A fleet without recent cycles keeps the reason of its open alert.
        reasons = {(alert.fleet, alert.key): alert.reason for alert in open_alerts}
        reasons |= {(row["fleet"], row["key"]): row["reason"] for row in events}
        by_fleet: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for row in causes:
            by_fleet[row["fleet"]][row["key"]] = reasons.get(
                (row["fleet"], row["key"]), "see the fleet's last decision"
            )
        return AlertInputs(
            now=moment["now"],
            leaderless_s=moment["leaderless_s"],
            fleets=tuple(
                FleetAlertInputs(
                    fleet,
                    by_fleet[fleet.name],
                    tuple(row["id"] for row in timeouts if row["fleet"] == fleet.name),
                )
                # A fleet that only has workers started by hand has no plan.
                for fleet in fleets
                if fleet.planned_at is not None
            ),
            failed_tasks={row["queue"]: row["count"] for row in dead},
            rejected_rows=tuple(RejectedRows(**row) for row in rejected),
            open=open_alerts,
        )

    async def record_alerts(
        self, firing: Sequence[Alert], notifiers: Sequence[str], resolve_after_s: float
    ) -> list[tuple[str, str | None, str, str]]:
        plain = [{**asdict(alert), "reason": storable(alert.reason)} for alert in firing]
        arguments = (json.dumps(plain), list(notifiers), resolve_after_s)
        rows = await self._database.call_rows("recording alerts", "windlass_internal.record_alerts", *arguments)
        return [tuple(row) for row in rows]

    async def take_messages(self, notifiers: Sequence[str], lease_s: float, limit: int) -> list[Message]:
        arguments = (list(notifiers), lease_s, limit)
        rows = await self._database.call_rows("taking messages", "windlass_internal.claim_messages", *arguments)
        return [
            Message(**{**row, "kind": MessageKind(row["kind"]), "severity": Severity(row["severity"])}) for row in rows
        ]

    async def message_delivered(self, message_id: int) -> None:
        await self._database.call("recording a delivery", "windlass_internal.mark_message_delivered", message_id)

    async def message_failed(self, message_id: int, error: str, retry_in_s: float | None) -> None:
        function = "windlass_internal.mark_message_failed"
        await self._database.call("recording a failed delivery", function, message_id, storable(error), retry_in_s)

    async def sweep_alerts(self) -> int:
        return await self._database.sweep("windlass_internal.sweep_alerts", self._database.retention.events_s)
