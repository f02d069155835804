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
from windlass.cli.simulation_signals import ending_at_signals
from windlass.model.errors import BadInput
from windlass.model.fleet import FleetConfig
from windlass.model.fleet_changes import with_changes
from windlass.simulator.engine import World
from windlass.simulator.past import FleetPast, simulated_settings
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
    settings do. Exit code 1 if no settings hold the goal on both parts.
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
        # Measured boots are not drawn then.
        "boot_steps": None if boot_s is None and boot_sigma is None else (),
    }
    options: dict[str, Any] = {name: value for name, value in measured.items() if value is not None}
    past: FleetPast | None = None
    base = FleetConfig(provider="local")
    if trace is None:
        loaded = load(config, data_dir).config
        fleet, base = chosen_fleet(loaded, fleet)
        past = await read_past(loaded, fleet, base, since)
    # From here on nothing waits, and the event loop would not see a signal.
    with ending_at_signals():
        limits = {"poll_interval_s": interval_s, "max_workers": max_workers}
        if past is not None:
            task_trace, world = past.trace, replace(past.world, **options)
            limits["concurrency"] = slots
        else:
            assert trace is not None  # noqa: S101 - without one there is a past
            task_trace, world = read_trace(trace), World(**options)
            limits = {
                "poll_interval_s": interval_s or 10.0,
                "max_workers": max_workers or math.ceil(peak_concurrency(task_trace) / world.slots),
                "concurrency": world.slots,
            }
        given = [f"{name}={value}" for name, value in limits.items() if value is not None]
        base = with_changes(simulated_settings(base, world), given)
        with progress("searching", sum(1 for _ in candidates(world.boot_s, p95_wait_s, price))) as advance:
            tuned = search(task_trace, base, world, p95_wait_s=p95_wait_s, price=price, advance=advance)
    section = fleet_section(fleet or "default", tuned.settings)
    if output is not None:
        write_output(output, section, is_new=True)
    if as_json:
        print_json(
            {
                "settings": tuned.settings,
                "is_goal_held": tuned.is_held,
                "is_goal_held_searched": tuned.is_held_searched,
                "is_goal_held_checked": tuned.is_held_checked,
                "problem": tuned.problem,
                "searched": tuned.searched.to_plain(),
                "checked": tuned.checked.to_plain(),
            }
        )
        return int(not tuned.is_held)
    rows = []
    for part, result, is_held in (
        ("chosen on", tuned.searched, tuned.is_held_searched),
        ("checked on", tuned.checked, tuned.is_held_checked),
    ):
        goal_text = () if p95_wait_s is None else ("held" if is_held else "missed",)
        rows.append((part, *goal_text, *table_rows([result])[0][1:]))
    print_table(rows, "part", *(() if p95_wait_s is None else ("goal",)), *HEADINGS[1:], right=HEADINGS[1:])
    if tuned.problem is not None:
        print(tuned.problem)
    print(f"\n{section}", end="")
    return int(not tuned.is_held)
