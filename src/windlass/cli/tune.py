"""`windlass tune`: the cheapest settings of `adaptive` that hold a goal, chosen on one part of a trace."""

import math
import re
from pathlib import Path
from typing import Annotated

import typer

from windlass.cli.options import AsJson, command
from windlass.cli.output import print_json, print_table, progress
from windlass.cli.simulate import BILLING_UNITS
from windlass.model.errors import BadInput
from windlass.model.fleet import FleetConfig
from windlass.model.fleet_changes import with_changes
from windlass.simulator.engine import World
from windlass.simulator.report import HEADINGS, table_rows
from windlass.simulator.runs import peak_concurrency
from windlass.simulator.trace import read_trace
from windlass.simulator.tuning import candidates, fleet_section
from windlass.simulator.tuning import tune as search

_GOAL = re.compile(r"p95_wait=(\d+(?:\.\d+)?)s?")


@command
async def tune(
    trace: Annotated[
        Path, typer.Option("--trace", help="CSV file: arrival_s,duration_s[,queue]; .gz works.", metavar="FILE")
    ],
    slo: Annotated[
        str | None, typer.Option("--slo", help="The goal that must hold, for example p95_wait=60s.", metavar="GOAL")
    ] = None,
    price: Annotated[
        float | None,
        typer.Option("--price-of-waiting", help="What a second of waiting is worth, in machine seconds.", min=0.0),
    ] = None,
    slots: Annotated[int, typer.Option("--slots", help="Tasks that a machine runs at once.", min=1, max=10_000)] = 1,
    boot_s: Annotated[float, typer.Option("--boot", help="Seconds from request to ready.", min=0.0)] = 120.0,
    billing: Annotated[str, typer.Option("--billing", help="Billed by the started `second` or `hour`.")] = "second",
    interval_s: Annotated[float, typer.Option("--interval", help="Seconds between cycles.", min=0.05)] = 10.0,
    max_workers: Annotated[
        int | None, typer.Option("--max", help="Maximum number of machines (default: as many as tasks need).", min=1)
    ] = None,
    fleet: Annotated[str, typer.Option("--fleet", help="Name of the fleet section.", metavar="NAME")] = "default",
    output: Annotated[
        Path | None, typer.Option("--write", help="Write the fleet section to this file.", metavar="FILE")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Search settings for the least cost that holds a goal, on part of a trace.

    The rest of the trace, which the search has not seen, shows how the settings do. Exit code 1 if no settings hold the
    goal.
    """
    if billing not in BILLING_UNITS:
        raise BadInput(f"--billing is {billing!r}: write second or hour.")
    if (slo is None) == (price is None):
        raise BadInput("pass a goal with --slo p95_wait=60s, or a price with --price-of-waiting.")
    goal = _GOAL.fullmatch(slo) if slo is not None else None
    if slo is not None and goal is None:
        raise BadInput(f"--slo is {slo[:60]!r}: write p95_wait=60s.")
    p95_wait_s = float(goal.group(1)) if goal is not None else None
    task_trace = read_trace(trace)
    most = max_workers or math.ceil(peak_concurrency(task_trace) / slots)
    given = (f"concurrency={slots}", f"poll_interval_s={interval_s}", f"max_workers={most}", "spawn_timeout_s=3600")
    base = with_changes(FleetConfig(provider="local"), given)
    world = World(slots=slots, boot_s=boot_s, billing_unit_s=BILLING_UNITS[billing])
    with progress("searching", sum(1 for _ in candidates(boot_s, p95_wait_s, price))) as advance:
        tuned = search(task_trace, base, world, p95_wait_s=p95_wait_s, price=price, advance=advance)
    section = fleet_section(fleet, tuned.settings)
    if output is not None:
        output.write_text(section)
    if as_json:
        print_json(
            {
                "settings": tuned.settings,
                "is_goal_held": not tuned.is_missed,
                "searched": tuned.searched.to_plain(),
                "checked": tuned.checked.to_plain(),
            }
        )
        return int(tuned.is_missed)
    rows = [("chosen on", *table_rows([tuned.searched])[0][1:]), ("checked on", *table_rows([tuned.checked])[0][1:])]
    print_table(rows, "part", *HEADINGS[1:], right=HEADINGS[1:])
    if tuned.is_missed:
        print(f"no settings hold a p95 wait of {p95_wait_s:g} s; these come closest:")
    print(f"\n{section}", end="")
    return int(tuned.is_missed)
