"""`windlass simulate`: what a policy would have cost, and how long tasks would have waited."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from windlass.cli.fleet_history import Since, chosen_fleet, read_past
from windlass.cli.options import AsJson, ConfigFile, DataDir, command, load
from windlass.cli.output import print_json, print_table, progress
from windlass.cli.simulation_options import (
    Billing,
    BootTime,
    Interval,
    MaxWorkers,
    Slots,
    TraceFile,
    billing_unit_s,
    check_finite,
    check_limits,
    check_output,
    check_policy_option,
    check_settings,
    write_output,
)
from windlass.model.errors import BadInput
from windlass.model.fleet import FleetConfig
from windlass.model.fleet_changes import with_changes
from windlass.model.money import with_currency
from windlass.simulator.engine import ClaimOrder, World
from windlass.simulator.measures import RunResult
from windlass.simulator.past import FleetPast, shadow_requests, simulated_settings
from windlass.simulator.report import HEADINGS, html_report, table_rows
from windlass.simulator.runs import WINDLASS_POLICIES, RunRequest, billed_by, peak_concurrency, run_policy
from windlass.simulator.trace import GeneratorSettings, Trace, generate, read_trace

MAX_RUNS = 50


@command
async def simulate(
    trace: TraceFile = None,
    generator: Annotated[
        str | None,
        typer.Option("--generate", help="Make a trace: poisson, bursts, diurnal or spikes.", metavar="KIND"),
    ] = None,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policy", help="Policy or baseline; several are compared. name:key=value changes a setting of one run."
        ),
    ] = None,
    slots: Slots = None,
    boot_s: BootTime = None,
    boot_sigma: Annotated[
        float | None,
        typer.Option("--boot-sigma", help="Spread of boot times: sigma of a lognormal (0).", min=0.0, max=3.0),
    ] = None,
    billing: Billing = None,
    interval_s: Interval = None,
    min_workers: Annotated[int | None, typer.Option("--min", help="Minimum number of machines (0).", min=0)] = None,
    max_workers: MaxWorkers = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change one setting of the fleet, for all runs.", metavar="NAME=VALUE"),
    ] = None,
    fleet: Annotated[
        str | None,
        typer.Option("--fleet", help="This fleet's settings; without a trace also its own history.", metavar="NAME"),
    ] = None,
    since: Since = "7d",
    is_shadow: Annotated[
        bool, typer.Option("--shadow", help="Compare the running settings with two alternatives on the history.")
    ] = False,
    claims: Annotated[
        ClaimOrder | None, typer.Option("--claims", help="Which free worker claims (default: as in production).")
    ] = None,
    crashes: Annotated[float | None, typer.Option("--crashes", help="Crashes per machine hour (0).", min=0.0)] = None,
    refused: Annotated[
        float | None, typer.Option("--refused", help="Share of create calls that are refused (0).", min=0.0, max=0.99)
    ] = None,
    tasks: Annotated[int, typer.Option("--tasks", help="Tasks of a generated trace.", min=1, max=1_000_000)] = 10_000,
    days: Annotated[float, typer.Option("--days", help="Length of a generated trace.", min=0.001)] = 7.0,
    duration_s: Annotated[float, typer.Option("--duration", help="Mean duration in it.", min=0.001)] = 60.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of everything random.")] = 1,
    report: Annotated[
        Path | None, typer.Option("--report", help="Write an HTML report with charts.", metavar="FILE")
    ] = None,
    is_full: Annotated[
        bool, typer.Option("--full", help="Through the full plan() in every cycle: slower, same result.")
    ] = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a scaling policy on a trace of tasks: cost, waits and machines.

    Without --trace and --generate it reads the history of the fleet from the database: its tasks, boots, billing,
    refusals and crashes. Options replace what it found.
    """
    check_finite(
        {
            "--boot": boot_s,
            "--boot-sigma": boot_sigma,
            "--interval": interval_s,
            "--crashes": crashes,
            "--refused": refused,
            "--days": days,
            "--duration": duration_s,
        }
    )
    check_limits(min_workers, max_workers)
    check_policy_option(changes or ())
    if report is not None:
        check_output(report)
    if trace is not None and generator is not None:
        raise BadInput("pass a trace file with --trace, or make one with --generate, not both.")
    unit_s = billing_unit_s(billing)
    measured: dict[str, Any] = {
        "slots": slots,
        "boot_s": boot_s,
        "boot_sigma": boot_sigma if boot_sigma is not None or boot_s is None else 0.0,
        "billing_unit_s": unit_s,
        "crashes_per_hour": crashes,
        "refused_share": refused,
        "seed": seed,
    }
    options = {name: value for name, value in measured.items() if value is not None}
    given = [
        f"{name}={value}"
        for name, value in (
            ("concurrency", slots),
            ("poll_interval_s", interval_s),
            ("min_workers", min_workers),
            ("max_workers", max_workers),
        )
        if value is not None
    ]
    past: FleetPast | None = None
    if trace is None and generator is None:
        loaded = load(config, data_dir).config
        name, base = chosen_fleet(loaded, fleet)
        past = await read_past(loaded, name, base, since, seed)
        task_trace, world = past.trace, replace(past.world, **options)
        base = simulated_settings(base, world)
    else:
        if is_shadow:
            raise BadInput("--shadow compares on a fleet's own history: leave out --trace and --generate.")
        made = GeneratorSettings(tasks=tasks, days=days, duration_s=duration_s, seed=seed)
        task_trace = read_trace(trace) if trace is not None else generate(generator or "", made)
        base = FleetConfig(provider="local")
        if fleet is not None:
            base = chosen_fleet(load(config, data_dir).config, fleet)[1]
            task_trace = _of_fleet(task_trace, fleet, base)
        world = World(**options)
        most = max_workers or math.ceil(peak_concurrency(task_trace) / world.slots)
        given = [
            f"concurrency={world.slots}",
            f"poll_interval_s={interval_s or 10.0}",
            f"min_workers={min_workers or 0}",
            f"max_workers={max(most, min_workers or 0)}",
            # A simulated boot may take longer than the default limit of this host's processes.
            f"spawn_timeout_s={max(600.0, 20 * world.boot_s)}",
        ]
    given += changes or ()
    names = list(policies or ([] if is_shadow else [base.policy if past is not None else "adaptive"]))
    if len(names) > MAX_RUNS:
        raise BadInput(f"--policy is given {len(names)} times: at most {MAX_RUNS} runs are compared.")
    requests = shadow_requests(with_changes(base, given), world, has_charts=report is not None) if is_shadow else []
    requests += [_request(name, base, given, world, claims, is_full, report is not None) for name in names]
    check_settings(requests, [*([()] * (len(requests) - len(names))), *map(_own_changes, names)], changes or ())
    if is_shadow and (claims is not None or is_full):
        requests = [replace(request, claim_order=claims, is_full=is_full) for request in requests]
    results = _run_all(requests, task_trace, is_quiet=as_json)
    if report is not None:
        notes = [
            f"{len(task_trace.arrivals)} tasks over {task_trace.span_s / 86400:.2f} days, {world.slots} slots per "
            f"machine, boot {world.boot_s:g} s, billed by the {billed_by(world.billing_unit_s)}, "
            f"cycles of {requests[0].config.poll_interval_s:g} s, seed {seed}.",
            *(past.notes[1:] if past is not None else ()),
        ]
        write_output(report, html_report(f"Simulation of {task_trace.name}", notes, results))
    _print_results(results, past, as_json=as_json)


def _of_fleet(trace: Trace, fleet: str, settings: FleetConfig) -> Trace:
    """Its tasks in the fleet's queues, where it names queues."""
    found = trace.of_queues(settings.queues) if trace.queues else trace
    if not found.arrivals:
        raise BadInput(f"the trace has no task in the queues of fleet {fleet}: {', '.join(settings.queues)}.")
    return found


def _print_results(results: list[RunResult], past: FleetPast | None, *, as_json: bool) -> None:
    if as_json:
        plain = [result.to_plain() | _cost(past, result) for result in results]
        print_json(plain[0] if len(plain) == 1 else {"runs": plain})
        return
    for note in past.notes if past is not None else ():
        print(note)
    rows, headings = table_rows(results), HEADINGS
    if past is not None and past.currency is not None:
        headings = (*headings, "cost")
        rows = [
            (*row, with_currency(past.cost_micros(result.machine_seconds_billed) or 0, past.currency))
            for row, result in zip(rows, results, strict=True)
        ]
    print_table(rows, *headings, right=headings[1:])


def _cost(past: FleetPast | None, result: RunResult) -> dict[str, Any]:
    if past is None or past.currency is None:
        return {}
    return {"cost_micros": past.cost_micros(result.machine_seconds_billed), "currency": past.currency}


def _request(
    name: str,
    base: FleetConfig,
    given: list[str],
    world: World,
    claims: ClaimOrder | None,
    is_full: bool,
    has_charts: bool,
) -> RunRequest:
    policy, own = name.partition(":")[0], _own_changes(name)
    check_policy_option(own)
    settings = [*given, *own]
    if policy in WINDLASS_POLICIES:
        settings.append(f"policy={policy}")
    return RunRequest(policy, with_changes(base, settings), world, name, claims, is_full, has_charts)


def _own_changes(name: str) -> list[str]:
    """The settings in name:key=value,key=value."""
    own = name.partition(":")[2]
    return own.split(",") if own else []


def _run_all(requests: list[RunRequest], trace: Trace, *, is_quiet: bool) -> list[RunResult]:
    """One run after another, with a progress bar in the trace's time."""
    if is_quiet:
        return [run_policy(request, trace) for request in requests]
    results: list[RunResult] = []
    span = max(1, int(trace.span_s))
    with progress("simulating", span * len(requests)) as advance:
        for request in requests:
            done = 0

            def report(now: float) -> None:
                nonlocal done
                step = min(span, int(now)) - done
                if step > span // 100:
                    advance(step)
                    done += step

            results.append(run_policy(request, trace, report))
            advance(span - done)
    return results
