"""What the JSON API answers with and takes, where the ports' own values do not say it as callers want it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Annotated, Any, Generic, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, JsonValue, StringConstraints, TypeAdapter

from windlass.cost.queries import CostReport
from windlass.cost.report import By, Forecast, Meter, read_meter
from windlass.model.action import actions_to_plain
from windlass.model.cost import Cost
from windlass.model.cycle import Cycle, Explanation
from windlass.model.event import Event
from windlass.model.fleet import FleetConfig
from windlass.model.listing import Page, WorkerRow
from windlass.model.overview import FleetOverview
from windlass.model.redaction import shown_settings
from windlass.model.task import Task

Item = TypeVar("Item")
Shape = TypeVar("Shape")


def _extended(kind: type[Shape], value: Any, **more: Any) -> Shape:
    return kind(**{field.name: getattr(value, field.name) for field in fields(value)}, **more)


# ------------------------------------------------------------------------------------------------------------- answers


@dataclass(frozen=True, slots=True)
class PageResponse(Generic[Item]):
    """A page. `next_cursor` goes into the next request; null at the end. A page of a search may be empty before it."""

    items: list[Item]
    next_cursor: str | None


@dataclass(frozen=True, slots=True)
class Health:
    status: str
    version: str


@dataclass(frozen=True, slots=True)
class FleetReadiness:
    is_leader: bool
    last_cycle_age_s: float


@dataclass(frozen=True, slots=True)
class Readiness:
    is_ready: bool
    has_database: bool
    is_leader: bool
    fleets: Mapping[str, FleetReadiness]


@dataclass(frozen=True, slots=True)
class WheelResponse:
    filename: str
    version: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Status:
    """How everything stands, in the form of a cycle's summary."""

    timestamp: datetime
    actions: Mapping[str, int]
    status: Mapping[str, int]
    fleets: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResponse(WorkerRow):
    # What its machine costs; null where it has no price.
    meter: Meter | None


def worker_shown(row: WorkerRow, now: datetime) -> WorkerResponse:
    return _extended(WorkerResponse, row, meter=read_meter(row.bill, now) if row.bill is not None else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetResponse(FleetOverview):
    """`settings`: as they are run here, without secrets; null if it is not run here."""

    settings: Mapping[str, Any] | None
    # For how long nobody has run it, though somebody should.
    without_orchestrator_s: float | None


def fleet_shown(standing: FleetOverview, settings: FleetConfig | None, now: datetime) -> FleetResponse:
    plain = shown_settings(settings.model_dump(mode="json")) if settings is not None else None
    return _extended(
        FleetResponse, standing, settings=plain, without_orchestrator_s=standing.fleet.without_orchestrator_s(now)
    )


@dataclass(frozen=True, slots=True)
class TaskResponse:
    id: int
    queue: str
    status: str
    priority: int
    attempts: int
    max_attempts: int
    timeout_s: float | None
    run_after: datetime | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    worker_id: str | None
    unique_key: str | None
    progress: float | None
    progress_note: str | None
    error_code: str | None
    error: str | None
    payload: Any
    result: Any
    # What became of its attempts, oldest first.
    events: list[Event]
    # Why it is as it is, in sentences.
    answer: list[str]
    cost: Cost | None


_TASK = TypeAdapter(TaskResponse)


def task_as_json(task: Task, events: list[Event], answer: list[str], cost: Cost | None) -> bytes:
    """A TaskShown. Payload and result stand in it as they are stored: nested as deeply and with numbers as long as
    PostgreSQL takes, which is more than Python reads."""
    plain = {field.name: getattr(task, field.name) for field in fields(task)} | {"payload": None, "result": None}
    shown = TaskResponse(**plain, events=events, answer=answer, cost=cost)
    rest = _TASK.dump_json(shown, exclude={"payload", "result"}).removesuffix(b"}")
    return b'%s,"payload":%s,"result":%s}' % (rest, task.payload.encode(), (task.result or "null").encode())


@dataclass(frozen=True, slots=True)
class CycleResponse:
    id: int
    fleet: str
    term: int
    started_at: datetime
    finished_at: datetime | None
    decision: str
    actions: list[dict[str, Any]]
    summary: Mapping[str, Any] | None
    repeats: int
    repeated_at: datetime | None


def cycle_shown(cycle: Cycle) -> CycleResponse:
    plain = {field.name: getattr(cycle, field.name) for field in fields(cycle)}
    return CycleResponse(**{**plain, "actions": actions_to_plain(cycle.actions)})


@dataclass(frozen=True, slots=True)
class DecisionResponse:
    decision: str
    actions: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ReplayResponse:
    """What a cycle decided, and what it would have decided with these settings."""

    cycle_id: int
    fleet: str
    is_same: bool
    then: DecisionResponse
    again: DecisionResponse


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    at: datetime
    what: str


@dataclass(frozen=True, slots=True)
class ExplanationResponse:
    answer: list[str]
    history: list[HistoryEntry]


def story_shown(story: Explanation) -> ExplanationResponse:
    return ExplanationResponse(story.answer, [HistoryEntry(at, what) for at, what in story.history])


@dataclass(frozen=True, slots=True)
class CostReportResponse:
    by: By
    since: datetime
    costs: list[dict[str, Any]]
    total: list[dict[str, Any]]
    forecasts: list[dict[str, Any]]


def report_shown(report: CostReport) -> CostReportResponse:
    return CostReportResponse(
        report.by,
        report.since,
        [_cost(cost) for cost in report.costs],
        [_cost(cost) for cost in report.total],
        [_forecast(told) for told in report.forecasts],
    )


def _cost(cost: Cost) -> dict[str, Any]:
    plain = {field.name: getattr(cost, field.name) for field in fields(cost)}
    return {**plain, "total_micros": cost.total_micros, "wasted_share": cost.wasted_share}


def _forecast(told: Forecast) -> dict[str, Any]:
    plain = {field.name: getattr(told, field.name) for field in fields(told)}
    return {**plain, "month_micros": told.month_micros}


@dataclass(frozen=True, slots=True)
class EnqueueResponse:
    id: int
    # False: a task with this unique key is there already, and this is it.
    is_new: bool


@dataclass(frozen=True, slots=True)
class ChangeResponse:
    """How many workers, slots or tasks were changed."""

    changed: int


@dataclass(frozen=True, slots=True)
class RequestResponse:
    fleet: str
    # What this call asked for.
    asked: int
    # What it gets of that; less where the fleet has no room.
    granted: int
    # Asked for by anybody and not hired yet.
    requested: int
    max_workers: int


@dataclass(frozen=True, slots=True)
class Component:
    """A worker in the words of a process supervisor."""

    component: str
    status: str
    pid: int | None
    current_job: int | None
    restart_count: int
    last_seen: int


@dataclass(frozen=True, slots=True)
class RestartResponse:
    status: str
    message: str


@dataclass(frozen=True, slots=True)
class LogLinesResponse:
    lines: list[str]


def listed(page: Page[Any], items: list[Any] | None = None) -> PageResponse[Any]:
    return PageResponse(items if items is not None else list(page.rows), page.next_cursor)


# ------------------------------------------------------------------------------------------------------------ requests


class _Body(BaseModel):
    # An unknown field is a typo, and what was meant does not happen.
    model_config = ConfigDict(extra="forbid")


_Integer = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class NewTaskBody(_Body):
    queue: str = Field(description="The queue it goes into.", pattern="^[A-Za-z0-9][A-Za-z0-9_.:-]{0,62}$")
    payload: JsonValue = Field(default=None, description="Anything that JSON can hold.")
    priority: _Integer = Field(default=0, description="Higher ones are claimed first.")
    run_after: AwareDatetime | None = Field(default=None, description="Not before this time.")
    max_attempts: Annotated[int, Field(ge=1, lt=2**31)] = Field(default=3, description="Tries before it is given up.")
    timeout_s: Annotated[float, Field(gt=0, lt=1e9)] | None = Field(default=None, description="For each attempt.")
    unique_key: str | None = Field(default=None, description="A second one with this key is the first one.")


class ReasonBody(_Body):
    reason: Annotated[str, StringConstraints(strip_whitespace=True)] = Field(
        default="by hand", min_length=1, max_length=500, description="Why, for whoever asks later."
    )


class TerminateBody(ReasonBody):
    force: bool = Field(default=False, description="At once; tasks at hand go to others.")


class SpawnBody(_Body):
    count: Annotated[int, Field(ge=1, le=10_000)] = Field(default=1, description="How many more.")


class RestartBody(_Body):
    slot: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(default=None, description="Only this slot.")


class RetryFailedBody(_Body):
    queue: str = Field(description="Whose dead letters.")
    limit: Annotated[int, Field(ge=1, le=1_000)] = Field(default=1_000, description="At most so many, oldest first.")
