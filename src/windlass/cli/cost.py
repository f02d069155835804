"""`windlass cost`: what was paid, what for, how much of it was wasted, and what the month will come to.

What is settled is exact. What is not (the last hour or so of workers that are there) is estimated and marked with ~.
"""

from dataclasses import asdict
from datetime import timedelta
from typing import Annotated, Any

import typer

from windlass.cli.common import AsJson, ConfigFile, DataDir, command, load
from windlass.cli.fleets import check_fleet_is_known
from windlass.cli.output import print_json, print_table
from windlass.cli.times import parse_when
from windlass.cost.queries import MAX_ROWS, CostReport, build_report
from windlass.cost.report import By, Forecast
from windlass.model.cost import ChargeKind, Cost
from windlass.model.money import amount, with_currency

# As many workers, or tasks, as a person would look at; --limit asks for more.
ROWS_SHOWN = 50
# What was for no queue or no task in particular.
NONE_OF_THEM = "(none)"
KINDS = (ChargeKind.TASK, ChargeKind.BOOT, ChargeKind.IDLE, ChargeKind.TAIL, ChargeKind.AHEAD)


@command
async def cost(
    by: Annotated[By, typer.Option("--by", help="Add it up by this.")] = By.DAY,
    since: Annotated[
        str,
        typer.Option(help="Only what was paid since: 12h, 30d, or 2030-01-31T00:00Z.", metavar="TIME"),
    ] = "30d",
    fleet: Annotated[str | None, typer.Option("--fleet", "-f", help="Only of this fleet.", metavar="NAME")] = None,
    limit: Annotated[int, typer.Option(min=1, max=MAX_ROWS, help="At most so many.", metavar="N")] = ROWS_SHOWN,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show what machines cost, and what that was for: tasks, boot, idleness, and what was paid beyond their end."""
    from windlass.wiring import stores

    when = parse_when(since, "--since")
    async with stores.control_store(load(config, data_dir).config, may_create=False) as store:
        if fleet is not None:
            await check_fleet_is_known(store, fleet)
        now = await store.now()
        report = await build_report(store, by, now - when if isinstance(when, timedelta) else when, now, fleet, limit)
    if as_json:
        print_json(_plain(report))
    else:
        _print(report)


def _print(report: CostReport) -> None:
    if not report.costs:
        print(f"nothing was paid since {report.since:%Y-%m-%d %H:%M} UTC: only machines with a price cost money")
        return
    has_ahead = any(cost.ahead_micros for cost in report.costs)
    kinds = KINDS if has_ahead else KINDS[:-1]
    numbers = (*(str(kind) for kind in kinds), "total", "wasted")
    rows = [_row(cost.key or NONE_OF_THEM, cost, kinds) for cost in report.costs]
    rows += [_row("total", cost, kinds) for cost in report.total]
    print_table(rows, str(report.by), "currency", *numbers, right=numbers)
    for told in report.forecasts:
        print(_sentence(told))


def _row(name: str, cost: Cost, kinds: tuple[ChargeKind, ...]) -> tuple[object, ...]:
    parts = (_shown(getattr(cost, f"{kind}_micros")) for kind in kinds)
    mark = "~" if cost.is_estimate else ""
    wasted = cost.wasted_share
    return (
        name,
        cost.currency,
        *parts,
        f"{mark}{amount(cost.total_micros)}",
        None if wasted is None else f"{wasted:.0%}",
    )


def _shown(micros: int) -> str | None:
    return amount(micros) if micros else None


def _sentence(told: Forecast) -> str:
    spent = with_currency(told.spent_micros, told.currency)
    if not told.workers:
        return f"this month: {spent} so far, and nobody is there that costs money"
    who = "1 worker" if told.workers == 1 else f"{told.workers} workers"
    return (
        f"this month: {spent} so far; {with_currency(told.month_micros, told.currency)} by its end if the {who} there "
        f"{'stays' if told.workers == 1 else 'stay'} at {amount(told.burn_micros_per_hour)} an hour"
    )


def _plain(report: CostReport) -> dict[str, Any]:
    return {
        "by": report.by,
        "since": report.since,
        "costs": [plain_cost(cost) for cost in report.costs],
        "total": [plain_cost(cost) for cost in report.total],
        "forecast": [{**asdict(told), "month_micros": told.month_micros} for told in report.forecasts],
    }


def plain_cost(cost: Cost) -> dict[str, Any]:
    return {**asdict(cost), "total_micros": cost.total_micros, "wasted_share": cost.wasted_share}
