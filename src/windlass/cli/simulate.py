"""`windlass simulate`: what a policy would have cost, and how long tasks would have waited."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from windlass.cli.fleet_history import Since, chosen_fleet, read_past
from windlass.cli.options import AsJson, ConfigFile, DataDir, command, load
from windlass.cli.output import progress
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
    check_limits,
    check_output,
    check_policy_option,
    check_settings,
)
from windlass.cli.simulation_results import FleetSimulation, print_simulations, write_report
from windlass.cli.simulation_signals import ending_at_signals
from windlass.model.errors import BadInput
from windlass.model.fleet import FleetConfig
from windlass.model.fleet_changes import with_changes
from windlass.simulator.engine import ClaimOrder, World
from windlass.simulator.past import FleetPast, assumed_past, shadow_requests, simulated_settings
from windlass.simulator.runs import WINDLASS_POLICIES, RunRequest, peak_concurrency, run_policy
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
    boot_sigma: BootSigma = None,
    billing: Billing = None,
    interval_s: Interval = None,
    min_workers: Annotated[int | None, typer.Option("--min", help="Minimum number of machines (0).", min=0)] = None,
    max_workers: MaxWorkers = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change one setting of the fleet, for all runs.", metavar="NAME=VALUE"),
    ] = None,
    fleets: Annotated[
        list[str] | None,
        typer.Option(
            "--fleet",
            help="This fleet's settings, where no option replaces them; without a trace also its own history. Several"
            " without a common queue are added up.",
            metavar="NAME",
        ),
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
    refusals and crashes. Options replace what it found. Several fleets are simulated one by one and added up.
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
    _check_combination(trace, generator, fleets or (), policies or (), is_shadow=is_shadow)
    measured: dict[str, Any] = {
        "slots": slots,
        "boot_s": boot_s,
        "boot_sigma": boot_sigma if boot_sigma is not None or boot_s is None else 0.0,
        # Measured boots are not drawn then.
        "boot_steps": None if boot_s is None and boot_sigma is None else (),
        "billing_unit_s": billing_unit_s(billing),
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
    names = list(dict.fromkeys(fleets or ()))
    has_past = trace is None and generator is None
    made = GeneratorSettings(tasks=tasks, days=days, duration_s=duration_s, seed=seed)
    loaded = load(config, data_dir).config if has_past or names else None
    chosen = dict(chosen_fleet(loaded, name) for name in names or (None,)) if loaded is not None else {}
    pasts: dict[str, FleetPast] = {}
    if loaded is not None and has_past:
        _check_queues(chosen)
        pasts = {name: await read_past(loaded, name, base, since, seed) for name, base in chosen.items()}

    def simulation_of_fleet(name: str) -> FleetSimulation:
        past, base = pasts[name], chosen[name]
        return simulation_of(name, past.trace, replace(past.world, **options), base, given, past)

    def simulation_of_trace(trace: Trace) -> FleetSimulation:
        world = World(**options)
        most = max_workers or math.ceil(peak_concurrency(trace) / world.slots)
        settings = [
            f"concurrency={world.slots}",
            f"poll_interval_s={interval_s or 10.0}",
            f"min_workers={min_workers or 0}",
            f"max_workers={max(most, min_workers or 0)}",
        ]
        return simulation_of("", trace, world, FleetConfig(provider="local"), settings, None)

    def simulation_of(
        name: str, trace: Trace, world: World, base: FleetConfig, settings: list[str], past: FleetPast | None
    ) -> FleetSimulation:
        base, settings = simulated_settings(base, world), [*settings, *(changes or ())]
        runs = list(policies or ([] if is_shadow else [base.policy if past is not None else "adaptive"]))
        # The waits of all tasks are kept with the charts. A total needs them.
        has_charts = report is not None or len(chosen) > 1
        requests = [_request(run, base, settings, world, claims, is_full, has_charts) for run in runs]
        if len(chosen) > 1 and not policies:
            # Fleets with different policies have one total, as with --shadow.
            requests = [replace(each, label=f"running: {each.policy}") for each in requests]
        own = [_own_changes(run) for run in runs]
        if is_shadow:
            shadows = shadow_requests(with_changes(base, settings), world, has_charts=has_charts)
            requests = [replace(each, claim_order=claims, is_full=is_full) for each in shadows] + requests
            own = [[] for _ in shadows] + own
        check_settings(requests, own, changes or ())
        return FleetSimulation(name, trace, past, requests)

    # From here on nothing waits, and the event loop would not see a signal.
    with ending_at_signals():
        if not has_past:
            whole = read_trace(trace) if trace is not None else generate(generator or "", made)
            _check_queues(chosen, whole)
            pasts = {name: assumed_past(base, _of_fleet(whole, name, base), seed) for name, base in chosen.items()}
        simulations = [simulation_of_fleet(name) for name in chosen] if chosen else [simulation_of_trace(whole)]
        _run_all(simulations, is_quiet=as_json)
        if report is not None:
            write_report(report, simulations, seed)
        print_simulations(simulations, as_json=as_json)


def _check_combination(
    trace: Path | None, generator: str | None, fleets: Sequence[str], policies: Sequence[str], *, is_shadow: bool
) -> None:
    if trace is not None and generator is not None:
        raise BadInput("pass a trace file with --trace, or make one with --generate, not both.")
    if is_shadow and (trace is not None or generator is not None):
        raise BadInput("--shadow compares on a fleet's own history: leave out --trace and --generate.")
    if generator is not None and len(set(fleets)) > 1:
        raise BadInput("a generated trace has no queues that several fleets could serve: pass one --fleet.")
    if len(policies) > MAX_RUNS:
        raise BadInput(f"--policy is given {len(policies)} times: at most {MAX_RUNS} runs are compared.")


def _check_queues(fleets: Mapping[str, FleetConfig], trace: Trace | None = None) -> None:
    """BadInput if tasks cannot be assigned to one fleet each."""
    if len(fleets) > 1 and trace is not None and not trace.queues:
        raise BadInput("the trace has no column queue that divides its tasks among fleets: pass one --fleet.")
    owners: dict[str, str] = {}
    for name, settings in fleets.items():
        for queue in settings.queues:
            if queue in owners:
                raise BadInput(
                    f"fleets {owners[queue]} and {name} both serve queue {queue}: who claims its tasks is not "
                    "simulated. Simulate them one at a time, each with all tasks of its queues."
                )
            owners[queue] = name


def _of_fleet(trace: Trace, fleet: str, settings: FleetConfig) -> Trace:
    """Its tasks in the fleet's queues, where it names queues."""
    found = trace.of_queues(settings.queues) if trace.queues else trace
    if not found.arrivals:
        raise BadInput(f"the trace has no task in the queues of fleet {fleet}: {', '.join(settings.queues)}.")
    return found


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


def _run_all(simulations: Sequence[FleetSimulation], *, is_quiet: bool) -> None:
    """One run after another, with a progress bar in the traces' time."""
    if is_quiet:
        for each in simulations:
            each.results = [run_policy(request, each.trace) for request in each.requests]
        return
    spans = [max(1, int(each.trace.span_s)) for each in simulations]
    total = sum(span * len(each.requests) for span, each in zip(spans, simulations, strict=True))
    with progress("simulating", total) as advance:
        for span, each in zip(spans, simulations, strict=True):
            for request in each.requests:
                done = 0

                def report(now: float, span: int = span) -> None:
                    nonlocal done
                    step = min(span, int(now)) - done
                    if step > span // 100:
                        advance(step)
                        done += step

                each.results.append(run_policy(request, each.trace, report))
                advance(span - done)
