"""`windlass tune`: the cheapest settings of `adaptive` that hold a goal, chosen on one part of a trace."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from windlass.cli.fleet_history import Since, chosen_fleet, read_past
from windlass.cli.options import AsJson, ConfigFile, DataDir, command, load
from windlass.cli.output import print_json, print_table, progress
from windlass.cli.simulation_options import (
    Billing,
    BootSigma,
    BootTime,
    Interval,
    MaxWorkers,
    Slots,
    TraceFile,
    billing_unit_s,
    check_finite,
    check_output,
    write_output,
)
from windlass.model.errors import BadInput
from windlass.model.fleet import FleetConfig
from windlass.model.fleet_changes import with_changes
from windlass.simulator.engine import World
from windlass.simulator.past import simulated_settings
from windlass.simulator.report import HEADINGS, table_rows
from windlass.simulator.runs import peak_concurrency
from windlass.simulator.trace import read_trace
from windlass.simulator.tuning import candidates, fleet_section
from windlass.simulator.tuning import tune as search

_GOAL = re.compile(r"p95_wait=(\d+(?:\.\d+)?)s?")


@command
async def tune(
    trace: TraceFile = None,
    slo: Annotated[
        str | None, typer.Option("--slo", help="The goal that must hold, for example p95_wait=60s.", metavar="GOAL")
    ] = None,
    price: Annotated[
        float | None,
        typer.Option("--price-of-waiting", help="What a second of waiting is worth, in machine seconds.", min=0.0),
    ] = None,
    slots: Slots = None,
    boot_s: BootTime = None,
    boot_sigma: BootSigma = None,
    billing: Billing = None,
    interval_s: Interval = None,
    max_workers: MaxWorkers = None,
    fleet: Annotated[
        str | None,
        typer.Option("--fleet", help="Name of the fleet section; without --trace, whose history.", metavar="NAME"),
    ] = None,
    since: Since = "30d",
    output: Annotated[
        Path | None, typer.Option("--write", help="Write the fleet section to this new file.", metavar="FILE")
    ] = None,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> int:
    """Search settings for the least cost that holds a goal, on part of a trace.

    Without --trace it searches on the fleet's own history. The rest of it, which the search has not seen, shows how the
    settings do. Exit code 1 if no settings hold the goal.
    """
    check_finite({"--price-of-waiting": price, "--boot": boot_s, "--boot-sigma": boot_sigma, "--interval": interval_s})
    if output is not None:
        check_output(output, is_new=True)
    if (slo is None) == (price is None):
        raise BadInput("pass a goal with --slo p95_wait=60s, or a price with --price-of-waiting.")
    goal = _GOAL.fullmatch(slo) if slo is not None else None
    if slo is not None and goal is None:
        raise BadInput(f"--slo is {slo[:60]!r}: write p95_wait=60s.")
    p95_wait_s = float(goal.group(1)) if goal is not None else None
    measured = {
        "slots": slots,
        "boot_s": boot_s,
        "billing_unit_s": billing_unit_s(billing),
        "boot_sigma": boot_sigma if boot_sigma is not None or boot_s is None else 0.0,
    }
    options: dict[str, Any] = {name: value for name, value in measured.items() if value is not None}
    if trace is None:
        loaded = load(config, data_dir).config
        fleet, base = chosen_fleet(loaded, fleet)
        past = await read_past(loaded, fleet, base, since)
        task_trace, world = past.trace, replace(past.world, **options)
        base = simulated_settings(base, world)
        limits = (("concurrency", slots), ("poll_interval_s", interval_s), ("max_workers", max_workers))
        base = with_changes(base, [f"{name}={value}" for name, value in limits if value is not None])
    else:
        task_trace, world = read_trace(trace), World(**options)
        most = max_workers or math.ceil(peak_concurrency(task_trace) / world.slots)
        cycle_s = interval_s or 10.0
        given = (f"concurrency={world.slots}", f"poll_interval_s={cycle_s}", f"max_workers={most}")
        base = with_changes(FleetConfig(provider="local"), (*given, "spawn_timeout_s=3600"))
    with progress("searching", sum(1 for _ in candidates(world.boot_s, p95_wait_s, price))) as advance:
        tuned = search(task_trace, base, world, p95_wait_s=p95_wait_s, price=price, advance=advance)
    section = fleet_section(fleet or "default", tuned.settings)
    if output is not None:
        write_output(output, section, is_new=True)
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
