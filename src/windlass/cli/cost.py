"""`windlass cost`: what machines cost, what for, how much was wasted, and a forecast for the month.

Settled amounts are exact. Amounts that are not settled yet (about the last hour of live workers) are estimates, marked
with ~.
"""

from dataclasses import asdict
from datetime import timedelta
from typing import Annotated, Any

import typer

from windlass.cli.fleets import check_fleet_is_known
from windlass.cli.options import AsJson, ConfigFile, DataDir, FleetFilter, command, load
from windlass.cli.output import print_json, print_table
from windlass.cli.times import parse_when
from windlass.cost.queries import MAX_ROWS, CostReport, build_report
from windlass.cost.report import By
from windlass.model.cost import ChargeKind, Cost
from windlass.model.errors import BadInput
from windlass.model.money import amount, with_currency
from windlass.model.plural import plural
from windlass.wiring import stores

DEFAULT_ROWS = 50
KINDS = (ChargeKind.TASK, ChargeKind.BOOT, ChargeKind.IDLE, ChargeKind.TAIL, ChargeKind.AHEAD)


@command
async def cost(
    by: Annotated[By, typer.Option("--by", help="Group amounts by this.")] = By.DAY,
    since: Annotated[
        str, typer.Option(help="Start of the period: 12h or 30d ago, or 2030-01-31T00:00Z.", metavar="TIME")
    ] = "30d",
    is_spread: Annotated[
        bool,
        typer.Option("--spread", help="With --by task: spread boot, idle and tail over the tasks of the billing hour."),
    ] = False,
    fleet: FleetFilter = None,
    limit: Annotated[
        int, typer.Option(min=1, max=MAX_ROWS, help="Maximum number of rows.", metavar="N")
    ] = DEFAULT_ROWS,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show the cost of machines by day, fleet, queue, worker or task.

    The columns say what the time was used for: tasks, boot, idle, and tail (billed after the machine was deleted).
    """
    if is_spread and by is not By.TASK:
        raise BadInput("--spread needs --by task: it divides the cost of boot, idle and tail among tasks.")
    when = parse_when(since, "--since")
    async with stores.store(load(config, data_dir).config, may_create=False) as store:
        if fleet is not None:
            await check_fleet_is_known(store, fleet)
        now = await store.now()
        begins = now - when if isinstance(when, timedelta) else when
        report = await build_report(store, by, begins, now, fleet, limit, is_spread=is_spread)
    if as_json:
        print_json(
            {
                "by": report.by,
                "since": report.since,
                "costs": [plain_cost(cost) for cost in report.costs],
                "total": [plain_cost(cost) for cost in report.total],
                "volumes": report.volumes,
                "sums": [{**asdict(one), "total_micros": one.total_micros} for one in report.sums],
                "forecast": [{**asdict(one), "month_micros": one.month_micros} for one in report.forecasts],
            }
        )
    else:
        _print_report(report)


def _print_report(report: CostReport) -> None:
    if not report.costs:
        print(f"no costs since {report.since:%Y-%m-%d %H:%M} UTC (only machines with a price have costs)")
        _print_volumes(report)
        return
    kinds = KINDS if any(cost.ahead_micros for cost in report.costs) else KINDS[:-1]
    numbers = (*(str(kind) for kind in kinds), "total", "wasted")
    rows = [_row(cost.key or "(none)", cost, kinds) for cost in report.costs]
    rows += [_row("total", cost, kinds) for cost in report.total]
    print_table(rows, str(report.by), "currency", *numbers, right=numbers)
    for forecast in report.forecasts:
        line = f"this month: {with_currency(forecast.spent_micros, forecast.currency)} so far"
        if forecast.workers:
            line += (
                f", {with_currency(forecast.month_micros, forecast.currency)} at month end with "
                f"{plural(forecast.workers, 'worker')} at {amount(forecast.burn_micros_per_hour)} per hour"
            )
        else:
            line += ", no billed workers now"
        print(line)
    _print_volumes(report)


def _print_volumes(report: CostReport) -> None:
    """Volumes belong to no worker, so they are not in the table. One that fleets share has one line."""
    since = f"since {report.since:%Y-%m-%d %H:%M} UTC"
    for volume in report.volumes:
        fleets = f"fleet{'s' if len(volume.fleets) > 1 else ''} {', '.join(volume.fleets)}"
        print(
            f"volume {volume.volume_id} of {fleets}: {volume.size_gb} GB, "
            f"{with_currency(volume.amount_micros, volume.currency)} {since}, "
            f"{with_currency(volume.month_micros, volume.currency)} per month"
        )
    for one in report.sums if report.volumes else ():
        mark = "~" if one.is_estimate else ""
        print(f"machines and volumes: {mark}{with_currency(one.total_micros, one.currency)} {since}")


def _row(name: str, cost: Cost, kinds: tuple[ChargeKind, ...]) -> tuple[object, ...]:
    amounts = [getattr(cost, f"{kind}_micros") for kind in kinds]
    wasted = cost.wasted_share
    return (
        name,
        cost.currency,
        *(amount(micros) if micros else None for micros in amounts),
        f"{'~' if cost.is_estimate else ''}{amount(cost.total_micros)}",
        None if wasted is None else f"{wasted:.0%}",
    )


def plain_cost(cost: Cost) -> dict[str, Any]:
    return {**asdict(cost), "total_micros": cost.total_micros, "wasted_share": cost.wasted_share}
