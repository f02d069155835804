"""Rows of PostgreSQL to values of the model, for the stores that read the same tables."""

import json
from datetime import datetime
from functools import cache, lru_cache
from typing import Any

from pydantic import TypeAdapter

from windlass.model.action import actions_from_plain
from windlass.model.cost import Bill, PricePart, Tariff
from windlass.model.cycle import Cycle, CycleDetail, Fleet
from windlass.model.event import Event
from windlass.model.node import NodeState, NodeView
from windlass.model.rollout import Rollout
from windlass.model.snapshot import Hold, Snapshot
from windlass.model.task import PROGRESS_DIGITS, TaskStatus
from windlass.model.worker import WorkerKind, WorkerStatus

_BILL_COLUMNS = (
    *("price_micros_per_hour", "currency", "billing_unit_s", "price_parts"),
    *("billed_since", "billed_until", "settled_until"),
)


@cache
def snapshot_adapter() -> TypeAdapter[Snapshot]:
    """Built on first use: building it takes longer than most commands."""
    return TypeAdapter(Snapshot)


@cache
def _hold_adapter() -> TypeAdapter[Hold | None]:
    return TypeAdapter(Hold | None)


@cache
def _rollout_adapter() -> TypeAdapter[Rollout]:
    return TypeAdapter(Rollout)


def event_of(row: Any) -> Event:
    detail = json.loads(row["detail"]) if row["detail"] is not None else None
    return Event(**{**row, "detail": detail})


def task_fields(row: Any) -> dict[str, Any]:
    """The fields of a Task, or of a type with some of them."""
    progress = row["progress"]
    # Stored as `real`: 0.15 would read as 0.15000000596046448.
    rounded = round(progress, PROGRESS_DIGITS) if progress is not None else None
    return {**row, "status": TaskStatus(row["status"]), "progress": rounded}


def worker_fields(row: Any) -> dict[str, Any]:
    """Arguments for Worker, and for types derived from it."""
    return {name: value for name, value in row.items() if name not in _BILL_COLUMNS and name != "paused"} | {
        "is_paused": row["paused"],
        "bill": bill_of(row, until=row["billed_until"]),
        "queues": tuple(row["queues"]),
        "status": WorkerStatus(row["status"]),
        "metadata": json.loads(row["metadata"]),
        "kind": WorkerKind(row["kind"]),
        "node": node_view(row["node"]),
    }


def node_view(text: str | None) -> NodeView | None:
    if text is None:
        return None
    view = json.loads(text)
    times = {name: datetime.fromisoformat(view[name]) for name in ("since", "at")}
    return NodeView(**{**view, **times, "state": NodeState(view["state"])})


def fleet_of(row: Any) -> Fleet:
    return Fleet(
        **{name: value for name, value in row.items() if name != "paused"}
        | {
            "is_paused": row["paused"],
            "queues": tuple(row["queues"]),
            "hold": _hold_adapter().validate_json(row["hold"]) if row["hold"] is not None else None,
            "failed_slots": tuple(row["failed_slots"]),
            "rollout": _rollout_adapter().validate_json(row["rollout"]) if row["rollout"] is not None else None,
        }
    )


def cycle_of(row: Any) -> Cycle:
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


def cycle_detail_of(row: Any) -> CycleDetail | None:
    return CycleDetail(cycle_of(row), snapshot_adapter().validate_json(row["snapshot"])) if row is not None else None


def bill_of(row: Any, *, until: datetime | None = None) -> Bill | None:
    """None for a worker without a price."""
    if row["billed_since"] is None:
        return None
    tariff = Tariff(
        row["price_micros_per_hour"], row["currency"], row["billing_unit_s"], price_parts_of(row["price_parts"])
    )
    return Bill(tariff, row["billed_since"], until, row["settled_until"])


@lru_cache(maxsize=1000)
def price_parts_of(text: str) -> tuple[PricePart, ...]:
    """Cached: there are few prices, and thousands of workers in every cycle."""
    return tuple(PricePart(*part) for part in json.loads(text))
