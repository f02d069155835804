"""The control loop's store over PostgreSQL: a few calls per cycle, whatever the number of workers.

Implements ports/control.py. tests/support/memory_store/control.py has the same contract; tests/conformance runs one
suite over both.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from pydantic import TypeAdapter

from windlass.model.action import Action, Plan, actions_to_plain
from windlass.model.cost import BillingAccount, Settlement
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate, Standby
from windlass.model.machine import Machine, Volume
from windlass.model.masked_values import masked_json
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
from windlass.model.redaction import without_known_secrets
from windlass.model.snapshot import PlannerState, RunningView, Snapshot, WorkerView
from windlass.model.task import storable
from windlass.model.worker import WorkerStatus
from windlass.store.costs import read_accounts
from windlass.store.database import SETTLE_ROWS_LIMIT_S, Database
from windlass.store.leases import PostgresLeaseStore, lease_required, standby_of
from windlass.store.rows import bill_of, node_view, snapshot_adapter

_PLANNER_STATE = TypeAdapter(PlannerState)
_MACHINE = TypeAdapter(Machine)
_PLAIN: TypeAdapter[Any] = TypeAdapter(Any)
# ISO 4217 "no currency": a price in an unknown currency is never added to another.
NO_CURRENCY = "XXX"
# The snapshot of a fleet with more workers is some hundred kilobytes: to write it takes longer than to plan.
LARGE_SNAPSHOT_WORKERS = 500
_STATUSES = {str(status): status for status in WorkerStatus}
# Stored and passed to SQL as literals, so that renaming a class changes no data.
_OUTCOME_KINDS: dict[type[Any], str] = {
    Created: "created",
    CreationUnclear: "ambiguous",
    CreationRefused: "refused",
    Deleted: "deleted",
    NotDeleted: "not_deleted",
    OrphanDeleted: "orphan_deleted",
    HostKeySeen: "host_key_seen",
    Prepared: "prepared",
    PreparationFailed: "preparation_failed",
    PreparationUnclear: "preparation_unclear",
    VolumeGrown: "volume_grown",
    VolumeNotGrown: "volume_not_grown",
}


class PostgresControlStore(PostgresLeaseStore):
    def __init__(self, database: Database) -> None:
        super().__init__(database)
        # Fleet to the decision of its last plan, as far as this store wrote it.
        self._decided: dict[str, str] = {}

    async def instance_id(self) -> str:
        return str(await self._database.call("reading the instance id", "windlass_internal.instance_id"))

    async def observe(self, candidate: Candidate, fleet: str, config: FleetConfig) -> tuple[int, Snapshot] | Standby:
        header, *workers = await self._database.call_rows(
            "observing the fleet",
            "windlass_internal.observe",
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
            return standby_of(observed)
        snapshot = snapshot_adapter().validate_python(observed["snapshot"])
        return observed["term"], replace(snapshot, workers=_worker_views(workers))

    async def commit_plan(
        self, candidate: Candidate, term: int, snapshot: Snapshot, plan: Plan, intents: Sequence[Intent]
    ) -> Committed:
        # A cycle that repeats the last decision without actions is only counted, so its snapshot, which may be large,
        # need not travel. Neither does that of a large fleet while nothing but the numbers of the decision changes: it
        # would take half of the cycle's time. The database asks for the snapshot (cycle_id null) if it stores it.
        is_large = len(snapshot.workers) > LARGE_SNAPSHOT_WORKERS
        has_changed = not is_large and self._decided.get(snapshot.fleet) != plan.decision
        is_stored = bool(plan.actions or intents) or has_changed
        written = await self._commit_plan(candidate, term, snapshot, plan, intents, is_stored=is_stored)
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
        with lease_required():
            text = await self._database.call(
                "committing the plan",
                "windlass_internal.commit_plan",
                candidate.lease,
                candidate.holder,
                term,
                snapshot.fleet,
                masked_json(_snapshot_to_json, snapshot) if is_stored else None,
                masked_json(_actions_to_json, plan.actions),
                masked_json(_state_to_json, plan.planner_state),
                without_known_secrets(plan.decision),
                masked_json(_intents_to_json, intents),
            )
        written: dict[str, Any] = json.loads(text)
        return written

    async def record_outcomes(
        self, fleet: str, cycle_id: int, outcomes: Sequence[Outcome], summary: dict[str, Any] | None
    ) -> None:
        await self._database.call(
            "recording the outcomes",
            "windlass_internal.record_outcomes",
            fleet,
            cycle_id,
            masked_json(_outcomes_to_json, outcomes),
            masked_json(json.dumps, summary) if summary is not None else None,
        )

    async def record_volume(self, fleet: str, volume: Volume) -> None:
        price, currency = volume.price_micros_per_hour, volume.currency or NO_CURRENCY
        function = "windlass_internal.record_volume"
        await self._database.call("recording a volume", function, fleet, volume.id, volume.size_gb, price, currency)

    async def accounts_to_settle(self, fleet: str, limit: int) -> list[BillingAccount]:
        return await read_accounts(self._database, fleet, None, limit, is_due=True)

    async def settle(self, settlements: Sequence[Settlement]) -> int:
        plain = _PLAIN.dump_json([_settlement_to_plain(settlement) for settlement in settlements]).decode()
        return int(await self._database.call("settling accounts", "windlass_internal.settle_accounts", plain))

    async def settle_rows(self) -> int:
        function = "windlass_internal.settle_rows"
        return int(await self._database.call_within(SETTLE_ROWS_LIMIT_S, "settling rows of adopted tables", function))


def _worker_views(rows: Sequence[Any]) -> tuple[WorkerView, ...]:
    """A worker has one row per running task; its rows are adjacent."""
    # By position, in the order of the fields: faster, and there may be thousands of rows in every cycle.
    views: list[WorkerView] = []
    for row in rows:
        _, worker_id, slot, status, *known = row
        running = () if known[-4] is None else (RunningView(*known[-4:]),)
        if views and views[-1].id == worker_id:
            views[-1].running += running
            continue
        fields: list[Any] = [
            worker_id,
            slot,
            _STATUSES[status],
            *known[:16],
            running,
            *known[16:19],
            bill_of(row),
            *known[25:28],
            node_view(known[28]),
            *known[29:39],
        ]
        views.append(WorkerView(*fields))
    return tuple(views)


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


def _snapshot_to_json(snapshot: Snapshot) -> str:
    return snapshot_adapter().dump_json(snapshot).decode()


def _actions_to_json(actions: Sequence[Action]) -> str:
    return json.dumps(actions_to_plain(actions))


def _state_to_json(state: PlannerState) -> str:
    return _PLANNER_STATE.dump_json(state).decode()


def _intents_to_json(intents: Sequence[Intent]) -> str:
    return json.dumps(list(map(_intent_to_plain, intents)))


def _outcomes_to_json(outcomes: Sequence[Outcome]) -> str:
    return json.dumps(list(map(_outcome_to_plain, outcomes)))


def _intent_to_plain(intent: Intent) -> dict[str, Any]:
    plain = asdict(intent)
    return plain | {
        name: plain[name].hex() if plain[name] is not None else None for name in ("join_token_hash", "secret_hash")
    }


def _outcome_to_plain(outcome: Outcome) -> dict[str, Any]:
    # Texts of vendors and machines: one that cannot be stored would keep all outcomes from being recorded.
    texts = {key: storable(value) if isinstance(value, str) else value for key, value in asdict(outcome).items()}
    plain: dict[str, Any] = _PLAIN.dump_python(texts, mode="json")
    if isinstance(outcome, Created | OrphanDeleted):
        plain["machine"] = _MACHINE.dump_python(outcome.machine, mode="json")
    if isinstance(outcome, Deleted) and outcome.priced is not None:
        plain["priced"] = _MACHINE.dump_python(outcome.priced, mode="json")
    return {"kind": _OUTCOME_KINDS[type(outcome)], **plain}
