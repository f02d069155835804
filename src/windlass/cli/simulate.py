"""`windlass simulate`: what a policy would have cost, and how long tasks would have waited."""

import math
from pathlib import Path
from typing import Annotated

import typer

from windlass.cli.options import AsJson, ConfigFile, DataDir, command, load
from windlass.cli.output import print_json, print_table, progress
from windlass.model.errors import BadInput
from windlass.model.fleet import FleetConfig
from windlass.model.fleet_changes import with_changes
from windlass.simulator.engine import ClaimOrder, World
from windlass.simulator.measures import RunResult
from windlass.simulator.report import HEADINGS, html_report, table_rows
from windlass.simulator.runs import RunRequest, peak_concurrency, run_policy
from windlass.simulator.trace import GeneratorSettings, Trace, generate, read_trace

BILLING_UNITS = {"second": 1, "hour": 3600}
MAX_RUNS = 50


@command
async def simulate(
    trace: Annotated[
        Path | None, typer.Option("--trace", help="CSV file: arrival_s,duration_s[,queue]; .gz works.", metavar="FILE")
    ] = None,
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
    slots: Annotated[int, typer.Option("--slots", help="Tasks that a machine runs at once.", min=1, max=10_000)] = 1,
    boot_s: Annotated[float, typer.Option("--boot", help="Seconds from request to ready.", min=0.0)] = 120.0,
    boot_sigma: Annotated[
        float, typer.Option("--boot-sigma", help="Spread of boot times: sigma of a lognormal.", min=0.0, max=3.0)
    ] = 0.0,
    billing: Annotated[str, typer.Option("--billing", help="Billed by the started `second` or `hour`.")] = "second",
    interval_s: Annotated[float, typer.Option("--interval", help="Seconds between cycles.", min=0.05)] = 10.0,
    min_workers: Annotated[int, typer.Option("--min", help="Minimum number of machines.", min=0)] = 0,
    max_workers: Annotated[
        int | None, typer.Option("--max", help="Maximum number of machines (default: as many as tasks need).", min=1)
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change one setting of the fleet, for all runs.", metavar="NAME=VALUE"),
    ] = None,
    fleet: Annotated[
        str | None, typer.Option("--fleet", help="Start from this fleet's settings in windlass.toml.", metavar="NAME")
    ] = None,
    claims: Annotated[
        ClaimOrder | None, typer.Option("--claims", help="Which free worker claims (default: as in production).")
    ] = None,
    crashes: Annotated[float, typer.Option("--crashes", help="Crashes per machine hour.", min=0.0)] = 0.0,
    refused: Annotated[
        float, typer.Option("--refused", help="Share of create calls that are refused.", min=0.0, max=0.99)
    ] = 0.0,
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
    """Simulate a scaling policy on a trace of tasks: cost, waits and machines."""
    if billing not in BILLING_UNITS:
        raise BadInput(f"--billing is {billing!r}: write second or hour.")
    if (trace is None) == (generator is None):
        raise BadInput("pass a trace file with --trace, or make one with --generate.")
    if trace is not None:
        task_trace = read_trace(trace)
    else:
        settings = GeneratorSettings(tasks=tasks, days=days, duration_s=duration_s, seed=seed)
        task_trace = generate(generator or "", settings)
    base = FleetConfig(provider="local")
    if fleet is not None:
        fleets = load(config, data_dir).config.fleets
        if fleet not in fleets:
            raise BadInput(f"fleet {fleet!r} not found in the configuration.")
        base = fleets[fleet]
        if task_trace.queues:
            task_trace = task_trace.of_queues(base.queues)
            if not task_trace.arrivals:
                raise BadInput(f"the trace has no task in the queues of fleet {fleet}: {', '.join(base.queues)}.")
    world = World(
        slots=slots,
        boot_s=boot_s,
        boot_sigma=boot_sigma,
        billing_unit_s=BILLING_UNITS[billing],
        crashes_per_hour=crashes,
        refused_share=refused,
        seed=seed,
    )
    most = max_workers or math.ceil(peak_concurrency(task_trace) / slots)
    given = [
        f"concurrency={slots}",
        f"poll_interval_s={interval_s}",
        f"min_workers={min_workers}",
        f"max_workers={max(most, min_workers)}",
        # A simulated boot may take longer than the default limit of this host's processes.
        f"spawn_timeout_s={max(600.0, 20 * boot_s)}",
        *(changes or ()),
    ]
    names = policies or ["adaptive"]
    if len(names) > MAX_RUNS:
        raise BadInput(f"--policy is given {len(names)} times: at most {MAX_RUNS} runs are compared.")
    requests = [_request(name, base, given, world, claims, is_full, report is not None) for name in names]
    results = _run_all(requests, task_trace, is_quiet=as_json)
    if report is not None:
        notes = [
            f"{len(task_trace.arrivals)} tasks over {task_trace.span_s / 86400:.2f} days, {slots} slots per machine, "
            f"boot {boot_s:g} s, billed by the {billing}, cycles of {interval_s:g} s, seed {seed}.",
        ]
        report.write_text(html_report(f"Simulation of {task_trace.name}", notes, results))
    if as_json:
        plain = [result.to_plain() for result in results]
        print_json(plain[0] if len(plain) == 1 else {"runs": plain})
        return
    print_table(table_rows(results), *HEADINGS, right=HEADINGS[1:])


def _request(
    name: str,
    base: FleetConfig,
    given: list[str],
    world: World,
    claims: ClaimOrder | None,
    is_full: bool,
    has_charts: bool,
) -> RunRequest:
    policy, _, own = name.partition(":")
    settings = [*given, *(own.split(",") if own else ())]
    if policy in ("adaptive", "threshold", "buffered", "clear-time"):
        settings.append(f"policy={policy}")
    return RunRequest(policy, with_changes(base, settings), world, name, claims, is_full, has_charts)


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
