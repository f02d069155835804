"""The overview page: totals, open alerts, and a card with charts for each fleet."""

from collections.abc import Mapping, Sequence

from windlass.dashboard.alerts import attention_items
from windlass.dashboard.charts import ChartRange
from windlass.dashboard.filters import count, counted
from windlass.dashboard.fleets import fleet_card
from windlass.dashboard.rendering import PageContext, render
from windlass.model.event import Event
from windlass.model.overview import Burn, Overview, Sample


def overview_page(
    page_context: PageContext,
    overview: Overview,
    histories: Mapping[str, Sequence[Sample]],
    events: Sequence[Event],
    chosen: ChartRange | None = None,
) -> str:
    items = attention_items(overview)
    total = overview.total
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
        cards=[fleet_card(each, histories.get(each.fleet.name, ()), overview.at) for each in overview.fleets],
        items=items,
        total=total,
        workers=workers,
        burns=[burns[currency] for currency in sorted(burns)],
        events=events,
        chosen=chosen.value if chosen is not None else None,
    )
