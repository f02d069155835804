"""The overview page: totals, open alerts, and a card with charts for each fleet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from re import compile as pattern

from windlass.dashboard.alerts import attention_items
from windlass.dashboard.charts import Chart, fleet_charts
from windlass.dashboard.cycles import split_decision
from windlass.dashboard.filters import count, counted
from windlass.dashboard.render import PageContext, render
from windlass.model.event import Event
from windlass.model.overview import Burn, FleetOverview, Overview, Sample, Work

_NUMBER = pattern(r"\d[\d,.]*")


@dataclass(frozen=True, slots=True)
class FleetCard:
    overview: FleetOverview
    charts: list[Chart]
    state: str
    state_label: str
    decision: str
    justification: str
    # The decision without numbers. Screen readers announce it when it changes.
    decision_kind: str


def overview_page(
    page_context: PageContext, overview: Overview, histories: Mapping[str, Sequence[Sample]], events: Sequence[Event]
) -> str:
    items = attention_items(overview)
    total = _total_work(overview)
    workers = sum(sum(each.workers.values()) for each in overview.fleets)
    work = f"{count(total.queued)} queued, {count(total.running)} running" if total.queued + total.running else "Idle"
    critical = sum(item.is_critical for item in items)
    alerts = f"; {counted(critical, 'critical alert')}" if critical else ""
    burns: dict[str, Burn] = {}
    for burn in (burn for each in overview.fleets for burn in each.burn):
        sum_so_far = burns.get(burn.currency, Burn(burn.currency, 0, 0))
        burns[burn.currency] = Burn(
            burn.currency, sum_so_far.micros_per_hour + burn.micros_per_hour, sum_so_far.machines + burn.machines
        )
    return render(
        "overview.html",
        page_context,
        here="overview",
        summary=f"{work}, {counted(workers, 'worker')}{alerts}.",
        cards=[_card(each, histories.get(each.fleet.name, ()), overview.at) for each in overview.fleets],
        items=items,
        total=total,
        workers=workers,
        burns=[burns[currency] for currency in sorted(burns)],
        events=events,
    )


def _total_work(overview: Overview) -> Work:
    """All queues together. Medians cannot be added: wait and duration are those of the queue with most completions."""
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


def _card(overview: FleetOverview, samples: Sequence[Sample], now: datetime) -> FleetCard:
    fleet = overview.fleet
    decision, justification = split_decision(overview.decision or "")
    if fleet.without_orchestrator_s(now) is not None:
        state, label = "unattended", "no orchestrator"
    elif fleet.hold is not None:
        state, label = "hold", "on hold"
    elif fleet.is_paused:
        state, label = "paused", "paused"
    elif fleet.planned_at is None:
        state, label = "queued", "unmanaged"
    elif decision.startswith(("spawn", "waiting to spawn")):
        state, label = "spawning", "spawning"
    else:
        state, label = "steady", "running"
    kind = " ".join(_NUMBER.sub("", decision).split()) or "no cycle yet"
    return FleetCard(overview, fleet_charts(overview, now, samples), state, label, decision, justification, kind)
