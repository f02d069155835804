"""The control loop's part of the PostgreSQL store: a few calls a cycle, whatever the number of workers.

store/memory/control.py keeps the same contract; tests/conformance/test_control_store.py runs over both.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import asyncpg
from pydantic import TypeAdapter

from windlass.model.action import Plan, actions_from_plain, actions_to_plain
from windlass.model.cost import Bill, BillingAccount, Charge, ChargeKind, Cost, PricePart, Settlement, Span, Tariff
from windlass.model.cycle import Cycle, CycleDetail, Fleet
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate, LeaseLost, Standby
from windlass.model.machine import Machine
from windlass.model.outcome import (
    Committed,
    Created,
    CreationRefused,
    CreationUnclear,
    Deleted,
    HostKeySeen,
    Intent,
    NotDeleted,
    OrphanDeleted,
    Outcome,
    PreparationFailed,
    PreparationUnclear,
    Prepared,
    VolumeGrown,
    VolumeNotGrown,
)
from windlass.model.snapshot import Hold, PlannerState, RunningView, Snapshot, WorkerView
from windlass.model.worker import WorkerStatus
from windlass.ports.control import MAX_AHEAD
from windlass.store.postgres import PostgresStore, node_view
from windlass.store.queries import read_queries

if TYPE_CHECKING:
    from windlass.ports.control import ControlStore, Operations
    from windlass.ports.costs import Costs


QUERIES = read_queries("windlass.store", "control_queries.sql")
SNAPSHOT = TypeAdapter(Snapshot)
PLANNER_STATE = TypeAdapter(PlannerState)
_HOLD = TypeAdapter(Hold | None)
_MACHINE = TypeAdapter(Machine)
_PLAIN: TypeAdapter[Any] = TypeAdapter(Any)
_STATUSES = {str(status): status for status in WorkerStatus}
# Accounts that are open at the same time: every worker there is, and those that ended a minute ago.
MAX_OPEN_ACCOUNTS = 10_000


_BILL_COLUMNS = (
    "price_micros_per_hour",
    "currency",
    "billing_unit_s",
    "price_parts",
    "billed_since",
    "settled_until",
)


class PostgresControlStore(PostgresStore):
    def __init__(self, dsn: str, **options: Any) -> None:
        super().__init__(dsn, **options)
        # Fleet to what its last plan decided, as far as this store wrote it.
        self._decided: dict[str, str] = {}

    async def instance_id(self) -> str:
        async with self._connection("reading the database's identity") as connection:
            return str(await connection.fetchval("select windlass_internal.instance_id()"))

    async def acquire_lease(self, candidate: Candidate) -> int | Standby:
        async with self._connection("asking for the lead") as connection:
            text = await connection.fetchval(
                "select windlass_internal.acquire_lease($1, $2, $3)", candidate.lease, candidate.holder, candidate.ttl_s
            )
        led = json.loads(text)
        return _standby(led) if led["term"] is None else int(led["term"])

    async def observe(self, candidate: Candidate, fleet: str, config: FleetConfig) -> tuple[int, Snapshot] | Standby:
        async with self._connection("observing the fleet") as connection:
            header, *workers = await connection.fetch(
                "select * from windlass_internal.observe($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
                candidate.lease,
                candidate.holder,
                candidate.ttl_s,
                fleet,
                config.provider,
                list(config.queues),
                config.min_workers,
                config.max_workers,
                config.failure_window_s,
                config.restart_window_s,
                config.quarantine_min_failures,
            )
        observed = json.loads(header["header"])
        if observed["term"] is None:
            return _standby(observed)
        seen = SNAPSHOT.validate_python(observed["snapshot"])
        return observed["term"], replace(seen, workers=_worker_views(workers))

    async def commit_plan(
        self, candidate: Candidate, term: int, snapshot: Snapshot, plan: Plan, intents: Sequence[Intent]
    ) -> Committed:
        # A cycle that decides nothing new is only counted; its snapshot, which may be large, need not travel.
        is_news = bool(plan.actions or intents) or self._decided.get(snapshot.fleet) != plan.decision
        written = await self._commit_plan(candidate, term, snapshot, plan, intents, is_stored=is_news)
        if written["cycle_id"] is None:
            written = await self._commit_plan(candidate, term, snapshot, plan, intents, is_stored=True)
        self._decided[snapshot.fleet] = plan.decision
        return Committed(written["cycle_id"], frozenset(written["granted"]), written["requeued"])

    async def _commit_plan(
        self,
        candidate: Candidate,
        term: int,
        snapshot: Snapshot,
        plan: Plan,
        intents: Sequence[Intent],
        *,
        is_stored: bool,
    ) -> dict[str, Any]:
        try:
            async with self._connection("writing down the plan") as connection:
                text = await connection.fetchval(
                    "select windlass_internal.commit_plan($1, $2, $3, $4, $5, $6, $7, $8, $9)",
                    candidate.lease,
                    candidate.holder,
                    term,
                    snapshot.fleet,
                    SNAPSHOT.dump_json(snapshot).decode() if is_stored else None,
                    json.dumps(actions_to_plain(plan.actions)),
                    PLANNER_STATE.dump_json(plan.planner_state).decode(),
                    plan.decision,
                    json.dumps([_intent_to_plain(intent) for intent in intents]),
                )
        except asyncpg.ObjectNotInPrerequisiteStateError as error:
            raise LeaseLost(str(error)) from None
        written: dict[str, Any] = json.loads(text)
        return written

    async def commit_outcomes(
        self,
        candidate: Candidate,
        term: int,
        fleet: str,
        cycle_id: int,
        outcomes: Sequence[Outcome],
        intents: Sequence[Intent],
        summary: dict[str, Any] | None,
    ) -> frozenset[str]:
        async with self._connection("writing down the outcomes") as connection:
            granted = await connection.fetchval(
                "select windlass_internal.commit_outcomes($1, $2, $3, $4, $5, $6, $7, $8)",
                candidate.lease,
                candidate.holder,
                term,
                fleet,
                cycle_id,
                json.dumps([_outcome_to_plain(outcome) for outcome in outcomes]),
                json.dumps([_intent_to_plain(intent) for intent in intents]),
                json.dumps(summary) if summary is not None else None,
            )
        if granted is None:
            raise LeaseLost(f"the lease {candidate.lease} of term {term} is no longer held by {candidate.holder}")
        return frozenset(granted)

    async def release_lease(self, candidate: Candidate) -> None:
        async with self._connection("giving up the lead") as connection:
            await connection.execute(
                "select windlass_internal.release_lease($1, $2)", candidate.lease, candidate.holder
            )

    # ----------------------------------------------------------------------------------------------- the ledger

    async def accounts_to_settle(self, fleet: str, limit: int) -> list[BillingAccount]:
        return await self._accounts(fleet, None, limit, is_due=True)

    async def open_accounts(self, *, fleet: str | None = None, worker_id: str | None = None) -> list[BillingAccount]:
        return await self._accounts(fleet, worker_id, MAX_OPEN_ACCOUNTS, is_due=False)

    async def _accounts(
        self, fleet: str | None, worker_id: str | None, limit: int, *, is_due: bool
    ) -> list[BillingAccount]:
        async with self._connection("reading open accounts") as connection:
            rows = await connection.fetch(
                "select * from windlass_internal.open_accounts($1, $2, $3, $4)", fleet, worker_id, is_due, limit
            )
        return [_account(row) for row in rows]

    async def settle(self, settlements: Sequence[Settlement]) -> int:
        plain = _PLAIN.dump_json([_settlement_to_plain(settlement) for settlement in settlements]).decode()
        async with self._connection("closing accounts") as connection:
            return int(await connection.fetchval("select windlass_internal.settle_accounts($1)", plain))

    async def costs(self, by: str, since: datetime, *, fleet: str | None = None, limit: int = 1000) -> list[Cost]:
        async with self._connection("reading costs") as connection:
            query = QUERIES["costs_from_spending" if by in ("day", "fleet", "queue") else "costs_from_charges"]
            rows = await connection.fetch(query, by, since, fleet, limit)
        return [Cost(**dict(row)) for row in rows]

    async def charges_of_task(self, task_id: int) -> list[Charge]:
        async with self._connection("reading a task's cost") as connection:
            rows = await connection.fetch(QUERIES["charges_of_task"], task_id)
        return [Charge(**{**row, "kind": ChargeKind(row["kind"])}) for row in rows]

    # ------------------------------------------------------------------------------------------------ by hand

    async def restart_slots(self, fleet: str, slot: int | None = None) -> int:
        async with self._connection("restarting slots") as connection:
            return int(await connection.fetchval("select windlass_internal.restart_slots($1, $2)", fleet, slot))

    async def request_workers(self, fleet: str, count: int) -> int:
        async with self._connection("asking for workers") as connection:
            return int(await connection.fetchval("select windlass_internal.request_workers($1, $2)", fleet, count))

    async def pause_fleet(self, fleet: str, is_paused: bool) -> int:
        async with self._connection("pausing or resuming a fleet") as connection:
            return int(await connection.fetchval("select windlass_internal.pause_fleet($1, $2)", fleet, is_paused))

    async def terminate_worker(self, worker_id: str, reason: str) -> bool:
        async with self._connection("ending a worker") as connection:
            return bool(
                await connection.fetchval("select windlass_internal.terminate_worker($1, $2)", worker_id, reason)
            )

    async def fleets(self) -> list[Fleet]:
        async with self._connection("listing fleets") as connection:
            rows = await connection.fetch(QUERIES["fleets"])
        return [_fleet(row) for row in rows]

    async def cycles(self, fleet: str, limit: int = 20) -> list[Cycle]:
        async with self._connection("listing cycles") as connection:
            rows = await connection.fetch(QUERIES["cycles"], fleet, limit)
        return [_cycle(row) for row in rows]

    async def cycle(self, cycle_id: int) -> CycleDetail | None:
        async with self._connection("reading a cycle") as connection:
            row = await connection.fetchrow(QUERIES["cycle"], cycle_id)
        return CycleDetail(_cycle(row), SNAPSHOT.validate_json(row["snapshot"])) if row is not None else None

    async def last_cycle_with(self, fleet: str, worker_id: str) -> CycleDetail | None:
        async with self._connection("reading a cycle") as connection:
            row = await connection.fetchrow(QUERIES["last_cycle_of_worker"], fleet, worker_id)
        return CycleDetail(_cycle(row), SNAPSHOT.validate_json(row["snapshot"])) if row is not None else None

    async def running_tasks(self) -> dict[str, list[int]]:
        async with self._connection("reading what workers do") as connection:
            rows = await connection.fetch(QUERIES["running_tasks"])
        return {row["worker_id"]: row["task_ids"] for row in rows}

    async def queues_with_tasks(self, queues: Sequence[str]) -> set[str]:
        async with self._connection("looking for tasks that wait") as connection:
            rows = await connection.fetch(QUERIES["queues_with_tasks"], list(queues))
        return {row["name"] for row in rows}

    async def ready_before(self, task_id: int) -> int:
        async with self._connection("counting tasks") as connection:
            count: int = await connection.fetchval(QUERIES["tasks_ahead"], task_id, MAX_AHEAD + 1)
        return count


def _standby(answer: Mapping[str, Any]) -> Standby:
    return Standby(answer["expires_in_s"], datetime.fromisoformat(answer["now"]))


def _worker_views(rows: Sequence[Any]) -> tuple[WorkerView, ...]:
    """The rows of a worker stand together, one for each task it has at hand."""
    # By position, in the order of the fields: there may be thousands, in every cycle.
    views: list[WorkerView] = []
    for row in rows:
        _, worker_id, slot, status, *known = row
        running = () if known[-3] is None else (RunningView(*known[-3:]),)
        if views and views[-1].id == worker_id:
            views[-1].running += running
            continue
        bill = None if row["billed_since"] is None else _bill(row)
        fields: list[Any] = [
            worker_id,
            slot,
            _STATUSES[status],
            *known[:16],
            running,
            *known[16:19],
            bill,
            *known[25:29],
            node_view(known[29]),
            *known[30:32],
        ]
        views.append(WorkerView(*fields))
    return tuple(views)


def _bill(row: Any) -> Bill:
    price, currency, unit_s, parts, since, settled_until = (row[name] for name in _BILL_COLUMNS)
    return Bill(Tariff(price, currency, unit_s, price_parts_of(parts)), since, None, settled_until)


@lru_cache(maxsize=1000)
def price_parts_of(text: str) -> tuple[PricePart, ...]:
    """Few prices, and thousands of workers in every cycle."""
    return tuple(PricePart(*part) for part in json.loads(text))


def _account(row: Any) -> BillingAccount:
    tariff = Tariff(row["price_micros_per_hour"], row["currency"], row["unit_s"], price_parts_of(row["price_parts"]))
    spans = zip(row["task_ids"] or (), row["queues"] or (), row["begun"] or (), row["ended"] or (), strict=True)
    return BillingAccount(
        row["worker_id"],
        row["fleet"],
        Bill(tariff, row["since"], row["until"], row["settled_until"]),
        row["ready_at"],
        tuple(Span(*span) for span in spans),
    )


def _settlement_to_plain(settlement: Settlement) -> dict[str, Any]:
    bill = settlement.account.bill
    return {
        "worker_id": settlement.account.worker_id,
        "was_settled_until": bill.settled_until,
        "billed_until": bill.until,
        "settled_until": settlement.settled_until,
        "settle_at": settlement.settle_at,
        "charges": [asdict(charge) for charge in settlement.charges],
    }


def _fleet(row: Any) -> Fleet:
    return Fleet(
        name=row["name"],
        provider=row["provider"],
        queues=tuple(row["queues"]),
        min_workers=row["min_workers"],
        max_workers=row["max_workers"],
        is_paused=row["paused"],
        requested_workers=row["requested_workers"],
        hold=_HOLD.validate_json(row["hold"]) if row["hold"] is not None else None,
        failed_slots=tuple(row["failed_slots"]),
        created_at=row["created_at"],
        planned_at=row["planned_at"],
        next_plan_in_s=row["next_plan_in_s"],
        is_led=row["is_led"],
    )


def _cycle(row: Any) -> Cycle:
    return Cycle(
        id=row["id"],
        fleet=row["fleet"],
        term=row["term"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        decision=row["decision"],
        actions=actions_from_plain(json.loads(row["plan"])),
        summary=json.loads(row["summary"]) if row["summary"] is not None else None,
        repeats=row["repeats"],
        repeated_at=row["repeated_at"],
    )


def _intent_to_plain(intent: Intent) -> dict[str, Any]:
    join_token_hash = intent.join_token_hash.hex() if intent.join_token_hash is not None else None
    return asdict(intent) | {"join_token_hash": join_token_hash}


def _outcome_to_plain(outcome: Outcome) -> dict[str, Any]:
    match outcome:
        case Created(worker_id, machine, is_prepared, unit_s):
            return {
                "kind": "created",
                "worker_id": worker_id,
                "machine": _MACHINE.dump_python(machine, mode="json"),
                "is_prepared": is_prepared,
                "billing_unit_s": unit_s,
            }
        case CreationUnclear():
            kind = "ambiguous"
        case CreationRefused():
            kind = "refused"
        case Deleted():
            kind = "deleted"
        case NotDeleted():
            kind = "not_deleted"
        case OrphanDeleted(machine, reason, unit_s, ended_at):
            return {
                "kind": "orphan_deleted",
                "machine": _MACHINE.dump_python(machine, mode="json"),
                "reason": reason,
                "billing_unit_s": unit_s,
                "ended_at": ended_at.isoformat() if ended_at is not None else None,
            }
        case HostKeySeen():
            kind = "host_key_seen"
        case Prepared():
            kind = "prepared"
        case PreparationFailed():
            kind = "preparation_failed"
        case PreparationUnclear():
            kind = "preparation_unclear"
        case VolumeGrown():
            kind = "volume_grown"
        case VolumeNotGrown():
            kind = "volume_not_grown"
    return {"kind": kind, **_PLAIN.dump_python(asdict(outcome), mode="json")}


if TYPE_CHECKING:
    # mypy compares every signature with the contracts'.
    _: type[ControlStore] = PostgresControlStore
    __: type[Operations] = PostgresControlStore
    ___: type[Costs] = PostgresControlStore
