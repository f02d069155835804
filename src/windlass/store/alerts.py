"""What telling people needs of PostgreSQL: the functions of migrations/0009_faces.sql, the queries of alarm.sql."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from windlass.model.alert import Alert, AlertInputs, FleetAlertInputs, Message, MessageKind, Severity
from windlass.model.task import storable
from windlass.store.control import PostgresControlStore
from windlass.store.queries import read_queries

if TYPE_CHECKING:
    from windlass.ports.alerts import AlertStore

QUERIES = read_queries("windlass.store", "alerts.sql")
# A cause is told again every hour: its words are found in what was told since.
TOLD_S = 7_500.0
MAX_TOLD = 2_000
# Whoever did not come to work within this time is still worth a word.
TIMEOUTS_S = 600.0
MAX_TIMEOUTS = 100
DEAD_LETTERS_S = 3_600.0
MAX_DEAD_LETTERS = 10_000
MAX_OPEN = 10_000


class PostgresAlertStore(PostgresControlStore):
    async def alert_inputs(self) -> AlertInputs:
        fleets = await self.fleets()
        async with self._connection("looking for what is the matter") as connection:
            moment = await connection.fetchrow(QUERIES["leaderless_time"])
            causes = await connection.fetch(QUERIES["planner_alerts"])
            told = await connection.fetch(QUERIES["alert_reasons"], TOLD_S, MAX_TOLD)
            timeouts = await connection.fetch(QUERIES["provisioning_timeouts"], TIMEOUTS_S, MAX_TIMEOUTS)
            dead = await connection.fetch(QUERIES["dead_letters"], DEAD_LETTERS_S, MAX_DEAD_LETTERS)
            rows = await connection.fetch(QUERIES["open_alerts"], MAX_OPEN)
        already = tuple(Alert(**{**row, "severity": Severity(row["severity"])}) for row in rows)
        # Newest last, so that the newest words stay. Of a fleet without cycles they are those that people have.
        words = {(alert.fleet, alert.key): alert.reason for alert in already}
        words |= {(row["fleet"], row["key"]): row["reason"] for row in told}
        by_fleet: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for row in causes:
            by_fleet[row["fleet"]][row["key"]] = words.get((row["fleet"], row["key"]), "see the fleet's last decision")
        return AlertInputs(
            now=moment["now"],
            leaderless_s=moment["leaderless_s"],
            fleets=tuple(
                FleetAlertInputs(
                    fleet,
                    by_fleet[fleet.name],
                    tuple(row["id"] for row in timeouts if row["fleet"] == fleet.name),
                )
                # One that only workers started by hand belong to has no plan.
                for fleet in fleets
                if fleet.planned_at is not None
            ),
            dead_letters={row["queue"]: row["count"] for row in dead},
            open=already,
        )

    async def record_alerts(
        self, firing: Sequence[Alert], notifiers: Sequence[str], resolve_after_s: float
    ) -> list[tuple[str, str | None, str, str]]:
        plain = [{**asdict(problem), "reason": storable(problem.reason)} for problem in firing]
        async with self._connection("writing alerts down") as connection:
            rows = await connection.fetch(
                "select * from windlass_internal.record_alerts($1, $2, $3)",
                json.dumps(plain),
                list(notifiers),
                resolve_after_s,
            )
        return [tuple(row) for row in rows]

    async def take_messages(self, notifiers: Sequence[str], lease_s: float, limit: int) -> list[Message]:
        async with self._connection("taking messages") as connection:
            rows = await connection.fetch(
                "select * from windlass_internal.claim_messages($1, $2, $3)", list(notifiers), lease_s, limit
            )
        return [
            Message(**{**row, "kind": MessageKind(row["kind"]), "severity": Severity(row["severity"])}) for row in rows
        ]

    async def message_delivered(self, message_id: int) -> None:
        async with self._connection("noting a delivery") as connection:
            await connection.execute("select windlass_internal.mark_message_delivered($1)", message_id)

    async def message_failed(self, message_id: int, error: str, retry_in_s: float | None) -> None:
        async with self._connection("noting a delivery") as connection:
            await connection.execute(QUERIES["mark_message_failed"], message_id, storable(error), retry_in_s)

    async def sweep_alerts(self) -> int:
        return await self._sweep_all("select windlass_internal.sweep_alerts($1, $2)", self._retention.events_s)


if TYPE_CHECKING:
    # mypy compares every signature with the contract's.
    _: type[AlertStore] = PostgresAlertStore
