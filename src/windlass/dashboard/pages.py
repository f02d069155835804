"""Each page, from what was read for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from re import compile as pattern
from typing import Any

from windlass.cost.report import Forecast, Meter, read_meter
from windlass.dashboard.alerts import AttentionItem, attention
from windlass.dashboard.attempts import attempts_of
from windlass.dashboard.charts import KINDS, Chart, day_bars, fleet_charts
from windlass.dashboard.filters import MAX_JSON_CHARACTERS, count, counted, indented_json
from windlass.dashboard.render import PageContext, query, render
from windlass.dashboard.replay import ReplayOption, ReplayResult
from windlass.dashboard.slots import SlotMap
from windlass.model.action import ACTION_KINDS, DeleteOrphan, FailSlot, RaiseAlert, Spawn, actions_to_plain
from windlass.model.cost import Cost
from windlass.model.cycle import Cycle, CycleDetail
from windlass.model.event import Event
from windlass.model.listing import Page, TaskDetail, TaskRow, WorkerRow
from windlass.model.overview import Burn, FleetOverview, Overview, Sample, Work
from windlass.model.task import TaskSummary
from windlass.model.worker import WorkerStatus
from windlass.policy.billing import LONG_UNIT_S

# By its `which` in the address, and what its tab is called.
TASK_LISTS = (
    (None, "All"),
    ("queued", "Waiting"),
    ("running", "Running"),
    ("scheduled", "Scheduled"),
    ("error", "Retrying"),
    ("complete", "Complete"),
    ("failed", "Dead letters"),
)
# How decisions begin that are worth a colour.
_HIRING = ("spawn", "waiting to spawn")
_NUMBER = pattern(r"\d[\d,.]*")


# ------------------------------------------------------------------------------------------------------------- overview


@dataclass(frozen=True, slots=True)
class FleetCard:
    standing: FleetOverview
    charts: list[Chart]
    state: str
    state_words: str
    decision_head: str
    decision_rest: str
    # Its head without numbers: what is worth telling whoever does not see the page, when it becomes another.
    decision_kind: str


def overview_page(
    setting: PageContext, overview: Overview, histories: Mapping[str, Sequence[Sample]], events: Sequence[Event]
) -> str:
    matters = attention(overview)
    total = _in_all(overview)
    workers = sum(sum(standing.workers.values()) for standing in overview.fleets)
    return render(
        "overview.html",
        setting,
        here="overview",
        summary=_summary(total, workers, matters),
        cards=[_card(standing, histories.get(standing.fleet.name, ()), overview.at) for standing in overview.fleets],
        matters=matters,
        total=total,
        workers=workers,
        burns=_burns(overview),
        events=events,
    )


def _summary(total: Work, workers: int, matters: Sequence[AttentionItem]) -> str:
    work = f"{count(total.queued)} waiting, {count(total.running)} running" if total.queued + total.running else "Idle"
    bad = sum(matter.is_bad for matter in matters)
    return f"{work}, {counted(workers, 'worker')}" + (f"; {counted(bad, 'thing')} to look at." if bad else ".")


def _in_all(overview: Overview) -> Work:
    """All queues together. Waits and durations are those of the busiest: medians cannot be added."""
    works = list(overview.queues.values())
    busiest = max(works, key=lambda work: work.completed_per_minute, default=Work())
    return Work(
        queued=sum(work.queued for work in works),
        scheduled=sum(work.scheduled for work in works),
        retrying=sum(work.retrying for work in works),
        running=sum(work.running for work in works),
        dead=sum(work.dead for work in works),
        oldest_queued_age_s=max(
            (work.oldest_queued_age_s for work in works if work.oldest_queued_age_s is not None), default=None
        ),
        wait_p50_s=busiest.wait_p50_s,
        wait_p95_s=max((work.wait_p95_s for work in works if work.wait_p95_s is not None), default=None),
        duration_p50_s=busiest.duration_p50_s,
        completed_per_minute=sum(work.completed_per_minute for work in works),
    )


def _burns(overview: Overview) -> list[Burn]:
    found: dict[str, Burn] = {}
    for burn in (burn for standing in overview.fleets for burn in standing.burn):
        before = found.get(burn.currency, Burn(burn.currency, 0, 0))
        found[burn.currency] = Burn(
            burn.currency, before.micros_per_hour + burn.micros_per_hour, before.machines + burn.machines
        )
    return [found[currency] for currency in sorted(found)]


def _card(standing: FleetOverview, samples: Sequence[Sample], now: datetime) -> FleetCard:
    fleet = standing.fleet
    head, rest = decision_parts(standing.decision or "")
    if fleet.without_orchestrator_s(now) is not None:
        state, words = "unattended", "nobody runs it"
    elif fleet.hold is not None:
        state, words = "held", "on hold"
    elif fleet.is_paused:
        state, words = "paused", "paused"
    elif fleet.planned_at is None:
        state, words = "queued", "by hand"
    elif head.startswith(_HIRING):
        state, words = "hiring", "hiring"
    else:
        state, words = "steady", "running"
    kind = " ".join(_NUMBER.sub("", head).split()) or "no cycle yet"
    return FleetCard(standing, fleet_charts(standing, now, samples), state, words, head, rest, kind)


def decision_parts(decision: str) -> tuple[str, str]:
    """`hiring 3: 41 waiting` as what is decided, and why."""
    head, colon, rest = decision.partition(":")
    return head, colon + rest


# -------------------------------------------------------------------------------------------------------------- workers


@dataclass(frozen=True, slots=True)
class WorkerLine:
    worker: WorkerRow
    meter: Meter | None
    # Paid in units that are worth watching.
    is_by_hour: bool
    vram_share: float
    since: datetime


def worker_line(worker: WorkerRow, now: datetime) -> WorkerLine:
    since = {
        WorkerStatus.ACTIVE: worker.activated_at,
        WorkerStatus.TERMINATING: worker.terminating_at,
        WorkerStatus.TERMINATED: worker.terminated_at,
    }.get(worker.status)
    return WorkerLine(
        worker,
        read_meter(worker.bill, now) if worker.bill is not None else None,
        worker.bill is not None and worker.bill.tariff.unit_s >= LONG_UNIT_S,
        (worker.vram_used_mb or 0) / worker.vram_total_mb if worker.vram_total_mb else 0.0,
        since or worker.created_at,
    )


def workers_page(
    setting: PageContext,
    page: Page[WorkerRow],
    *,
    fleets: Sequence[str],
    maps: Sequence[SlotMap],
    counts: Mapping[WorkerStatus, int],
    ray_dashboards: Mapping[str, str],
    fleet: str | None,
    is_ended: bool,
    is_first: bool,
) -> str:
    parts = [f"{count(number)} {status}" for status, number in counts.items() if number]
    return render(
        "workers.html",
        setting,
        here="workers",
        rows=[worker_line(worker, setting.now) for worker in page.rows],
        next_url=_next_url("/workers", page, fleet=fleet, ended="yes" if is_ended else None),
        fleets=fleets,
        maps=maps,
        ray_dashboards=ray_dashboards,
        summary=", ".join(parts) or "Nobody is there.",
        fleet=fleet,
        is_ended=is_ended,
        is_first=is_first,
    )


def worker_page(
    setting: PageContext,
    worker: WorkerRow,
    *,
    answer: Sequence[str],
    history: Sequence[tuple[datetime, str]],
    tasks: Sequence[TaskSummary],
    log: Sequence[str] | None,
    log_problem: str | None,
    ray_dashboard: str | None,
) -> str:
    """`log` None: there is none to be had here, because of `log_problem`. With both, it is what others said of it."""
    return render(
        "worker.html",
        setting,
        here="workers",
        worker=worker,
        row=worker_line(worker, setting.now),
        answer=answer,
        # That it was hired is told with its reason by an event, for as long as that is kept.
        history=[line for line in history if line[1] != "hired" or not _is_hiring_told(history)],
        tasks=tasks,
        log=log,
        log_problem=log_problem and log_problem[:1].upper() + log_problem[1:],
        ray_dashboard=ray_dashboard,
    )


def _is_hiring_told(history: Sequence[tuple[datetime, str]]) -> bool:
    return any(text.startswith("WORKER_SPAWNED") for _, text in history)


# ---------------------------------------------------------------------------------------------------------------- tasks


def tasks_page(
    setting: PageContext,
    page: Page[TaskRow],
    *,
    queues: Sequence[str],
    has_more_queues: bool,
    queue: str | None,
    which: str | None,
    search: str | None,
    histories: Mapping[int, Sequence[Event]],
    is_first: bool,
    is_cut_short: bool = False,
) -> str:
    """`is_cut_short`: there may be more on this page, had it been looked for longer."""
    name = dict(TASK_LISTS)[which].lower()
    what = {"all": "Newest first", "waiting": "In the order in which they will be claimed"}.get(name, f"List: {name}")
    where = f", queue {queue}" if queue else ""
    return render(
        "tasks.html",
        setting,
        here="tasks",
        rows=[(row, waited_s(row)) for row in page.rows],
        next_url=_next_url("/tasks", page, queue=queue, which=which, search=search),
        lists=TASK_LISTS,
        queues=queues,
        has_more_queues=has_more_queues,
        queue=queue,
        which=which,
        search=search,
        histories={task_id: _history(events) for task_id, events in histories.items()},
        is_cut_short=is_cut_short,
        summary=f"{what}{where}{f', matching “{search}”' if search else ''}.",
        is_first=is_first,
    )


def waited_s(task: TaskRow | TaskDetail) -> float | None:
    """From when it could have begun until it began. Of the first attempt only: a later one waited for other reasons."""
    # Begun before it was ready: it is ready for its second one.
    if task.attempts != 1 or task.started_at is None or task.started_at < task.ready_at:
        return None
    return (task.started_at - task.ready_at).total_seconds()


def _history(events: Sequence[Event]) -> tuple[int, list[tuple[datetime, str]]]:
    """How many attempts there were, and everything that happened."""
    attempts = sum(event.detail is not None and "attempt" in event.detail for event in events)
    return attempts, [(event.at, f"{event.code}: {event.reason}") for event in events]


def task_page(
    setting: PageContext,
    task: TaskDetail,
    *,
    answer: Sequence[str],
    history: Sequence[tuple[datetime, str]],
    events: Sequence[Event],
    cost: Cost | None,
) -> str:
    return render(
        "task.html",
        setting,
        here="tasks",
        task=task,
        waited_s=waited_s(task),
        answer=answer,
        history=history,
        attempts=attempts_of(task, events),
        texts=[
            (name, indented_json(text), _left_out(text))
            for name, text in (("Payload", task.payload), ("Result", task.result))
            if text is not None
        ],
        cost=cost,
    )


def _left_out(text: str) -> str | None:
    if len(text) <= MAX_JSON_CHARACTERS:
        return None
    return f"The first {count(MAX_JSON_CHARACTERS)} of {len(text):,} characters."


# ------------------------------------------------------------------------------------------------------------ decisions


@dataclass(frozen=True, slots=True)
class CycleLine:
    cycle: Cycle
    head: str
    rest: str
    did: str


def decisions_page(
    setting: PageContext, page: Page[Cycle], *, fleets: Sequence[str], fleet: str | None, is_first: bool
) -> str:
    return render(
        "decisions.html",
        setting,
        here="decisions",
        rows=[CycleLine(cycle, *decision_parts(cycle.decision), did=_did(cycle)) for cycle in page.rows],
        next_url=_next_url("/decisions", page, fleet=fleet),
        fleets=fleets,
        fleet=fleet,
        is_first=is_first,
    )


def _did(cycle: Cycle) -> str:
    counts: dict[str, int] = {}
    for action in cycle.actions:
        name = ACTION_KINDS[type(action)]
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{name} {number}" for name, number in counts.items())


def decision_page(
    setting: PageContext,
    found: CycleDetail,
    *,
    knobs: Sequence[ReplayOption] | None,
    again: ReplayResult | None,
    problem: str | None,
) -> str:
    snapshot = found.snapshot
    head, rest = decision_parts(found.cycle.decision)
    seen = {status: sum(w.status is status for w in snapshot.workers) for status in WorkerStatus}
    return render(
        "decision.html",
        setting,
        here="decisions",
        cycle=found.cycle,
        snapshot=snapshot,
        head=head,
        rest=rest,
        actions=[{**action, "target": _target(action)} for action in _with_worker(found.cycle)],
        seen={status: number for status, number in seen.items() if number},
        hold=snapshot.planner_state.hold,
        settings=knobs,
        again=again,
        problem=problem,
    )


def _with_worker(cycle: Cycle) -> list[dict[str, Any]]:
    return [{"worker_id": None, "code": None, **action} for action in actions_to_plain(cycle.actions)]


def _target(action: Mapping[str, Any]) -> str:
    match action["kind"]:
        case Spawn.__name__ | FailSlot.__name__:
            return f"slot {action['slot']}"
        case DeleteOrphan.__name__:
            return str(action["name"])
        case RaiseAlert.__name__:
            return "a person"
    return ""


# ----------------------------------------------------------------------------------------------------------------- cost


@dataclass(frozen=True, slots=True)
class BudgetView:
    fleet: str
    period: str
    currency: str
    spent_micros: int
    limit_micros: int
    then: str

    @property
    def share(self) -> float:
        return self.spent_micros / self.limit_micros

    @property
    def weight(self) -> str:
        return "bad" if self.share >= 1 else "warn" if self.share >= 0.8 else ""


def cost_page(
    setting: PageContext,
    *,
    since: datetime,
    chosen_days: int,
    fleet: str | None,
    days: Sequence[str],
    by_day: Sequence[Cost],
    by_fleet: Sequence[Cost],
    by_queue: Sequence[Cost],
    totals: Sequence[Cost],
    forecasts: Sequence[Forecast],
    budgets: Sequence[BudgetView],
) -> str:
    tables = (("By fleet", "Fleet", by_fleet), ("By queue", "Queue", by_queue), ("By day", "Day", by_day))
    return render(
        "cost.html",
        setting,
        here="cost",
        since=since,
        chosen_days=chosen_days,
        fleet=fleet,
        drawings=day_bars(days, by_day) if len(days) > 1 else [],
        kinds=[str(kind) for kind in KINDS],
        tables=[(title, heading, costs) for title, heading, costs in tables if costs],
        totals=totals,
        forecasts=forecasts,
        budgets=budgets,
    )


# --------------------------------------------------------------------------------------------------------------- others


def confirm_page(
    setting: PageContext, *, path: str, ask: str, words: str, verb: str, back_to: str, fields: Mapping[str, str]
) -> str:
    return render("confirm.html", setting, path=path, ask=ask, words=words, verb=verb, back_to=back_to, fields=fields)


def problem_page(setting: PageContext, title: str, sentence: str) -> str:
    return render("problem.html", setting, title=title, sentence=sentence)


def _next_url(path: str, page: Page[Any], **parameters: Any) -> str | None:
    return query({**parameters, "cursor": page.next_cursor}, path) if page.next_cursor is not None else None
