"""The tables and plots of docs/policies.md: every policy and baseline on a folder of traces.

    python -m bench.policies results --traces FOLDER --images docs/images
    python -m bench.policies own-policies --traces FOLDER        `threshold`, `buffered` and `clear-time`
    python -m bench.policies boots --traces FOLDER               random boots, three seeds
    python -m bench.policies hold-out --traces FOLDER            constants chosen without the trace that is scored
    python -m bench.policies others --traces FOLDER              shifted, thinned, scaled and resampled traces
    python -m bench.policies loads                               twelve generated loads
    python -m bench.policies each --traces FOLDER                `adaptive` on each trace of a folder
    python -m bench.policies paths --traces FOLDER               fast path against full path, on whole traces
    python -m bench.policies speed                               100,000 tasks over 14 days, both paths

bench/traces.md describes the traces. R has one slot, boots of 120 s and bills by the second. H has two slots, boots of
90 s and bills by the hour. A score is the geometric mean over the traces. One process. `own-policies` and `paths` run
the full plan() in every cycle and take about half an hour of processor time each; the others take one to three minutes.
"""

import argparse
import importlib
import json
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import exp, log
from pathlib import Path
from typing import Any

from bench.figures import table
from windlass.model.fleet import FleetConfig
from windlass.policy.scale import adaptive_load
from windlass.simulator.baselines import BASELINES
from windlass.simulator.charts import pareto_chart
from windlass.simulator.engine import World
from windlass.simulator.measures import RunResult
from windlass.simulator.runs import OPTIMUM, WINDLASS_POLICIES, RunRequest, peak_concurrency, run_policy
from windlass.simulator.trace import GENERATORS, GeneratorSettings, Trace, generate, read_trace

WORLDS = {"R": World(), "H": World(slots=2, boot_s=90.0, billing_unit_s=3600)}
BILLING = {"R": "second", "H": "hour"}
# The package exports the function of the same name.
adaptive = importlib.import_module("windlass.policy.scale.adaptive")
GOAL_MARGIN_S = 10.0
# Never reached by `adaptive`. The others may have as many machines as run all tasks at once: the default of `simulate`.
MAX_WORKERS = 1000
NO_PRICE: dict[str, Any] = {}
PRICE: dict[str, Any] = {"price_of_waiting": 1.0}
# The shared traces, in the order of the table, and their columns.
SHARED = {
    "genai_image_a": "image",
    "llm_code": "code",
    "gpu_jobs_a": "GPU jobs",
    "grid_spikes_a": "grid",
    "hpc_mixed": "HPC",
}
SIGMA = 0.5
BOOT_SEEDS = (1, 2, 3)
# Constants that `hold-out` chooses. Each is tried with all values of the others.
HELD_OUT: dict[str, dict[tuple[Any, str], tuple[float, ...]]] = {
    "R": {
        (adaptive_load, "ASSUMED_DURATION_S"): (5.0, 10.0, 20.0, 40.0),
        (adaptive, "RESTART_BOOTS"): (0.6, 0.8, 1.0),
    },
    "R, price": {
        (adaptive_load, "ASSUMED_DURATION_WITH_PRICE_S"): (5.0, 15.0, 30.0),
        (adaptive, "TASKS_PER_RESTART"): (1.0, 2.0, 3.0),
    },
    "H": {
        (adaptive_load, "ASSUMED_DURATION_LONG_UNIT_S"): (4.0, 8.0, 12.0, 20.0),
        (adaptive, "LATE_SLACK_LONG_UNIT_S"): (0.0, 30.0, 60.0),
    },
}


def run(
    policy: str, setting: str, trace: Trace, world: World | None = None, *, is_full: bool = False, **settings: Any
) -> RunResult:
    world = world or WORLDS[setting]
    most = MAX_WORKERS if policy == "adaptive" else max(1, -(-peak_concurrency(trace) // world.slots))
    chosen = policy if policy in WINDLASS_POLICIES else "adaptive"
    values: dict[str, Any] = {
        "policy": chosen,
        "max_workers": most,
        "concurrency": world.slots,
        "spawn_timeout_s": 3600.0,
    } | settings
    config = FleetConfig(**values)
    return run_policy(RunRequest(policy, config, world, is_full=is_full), trace)


def mean(values: Iterable[float]) -> float:
    """Geometric."""
    logs = [log(value) for value in values]
    return exp(sum(logs) / len(logs))


def is_held(result: RunResult, setting: str) -> bool:
    return result.wait_p95_s <= WORLDS[setting].boot_s + GOAL_MARGIN_S


def wait_text(seconds: float) -> str:
    return f"{seconds / 86400:.0f} d" if seconds >= 2 * 86400 else f"{seconds:.0f} s"


def scores(results: Sequence[RunResult], setting: str) -> list[str]:
    """Cells: cost, goal held, J, and cost with p95 wait of each trace."""
    held = sum(is_held(result, setting) for result in results)
    return [
        f"{mean(result.cost_ratio for result in results):.3f}",
        f"{held} of {len(results)}",
        f"{mean(result.joint_ratio for result in results):.2f}",
        *(f"{result.cost_ratio:.2f}, {wait_text(result.wait_p95_s)}" for result in results),
    ]


def shared_traces(folder: Path) -> list[Trace]:
    return [read_trace(folder / f"{name}.csv.gz") for name in SHARED]


# ------------------------------------------------------------------------------------------------------------ results

Row = tuple[str, str, dict[str, Any]]
ROWS: tuple[Row, ...] = (
    ("`adaptive`", "adaptive", {}),
    ("`adaptive`, `price_of_waiting = 1`", "adaptive", PRICE),
    *((f"`{name}`", name, {}) for name in BASELINES),
    ("`optimum`", OPTIMUM, {}),
)
# Through the full plan() in every cycle: a hundred times as slow as the rows above.
OWN_ROWS = tuple((f"`{name}`", name, dict[str, Any]()) for name in WINDLASS_POLICIES if name != "adaptive")


def results(folder: Path, chosen: Sequence[Row], settings_of: Sequence[str], images: Path | None) -> None:
    traces = shared_traces(folder)
    rows = []
    for setting in settings_of:
        world, points = WORLDS[setting], list[tuple[str, float, float]]()
        for label, policy, settings in chosen:
            found = [run(policy, setting, trace, **settings) for trace in traces]
            rows.append([setting, label, *scores(found, setting)])
            print(" | ".join(rows[-1]), flush=True)
            if sum(is_held(result, setting) for result in found) >= len(found) - 1 and not policy.startswith("fixed"):
                wait_s = mean(max(1.0, result.wait_p95_s) for result in found)
                points.append((label.replace("`", ""), wait_s, mean(result.cost_ratio for result in found)))
        if images is not None:
            title = f"Cost against wait, billed by the {BILLING[setting]}"
            chart = pareto_chart(points, f"p95 wait in seconds, geometric mean; boots of {world.boot_s:.0f} s", title)
            (images / f"policies-per-{BILLING[setting]}.svg").write_text(chart + "\n")
    print("\n" + table(["setting", "policy", "cost", "goal held", "J", *SHARED.values()], rows))


def boots(folder: Path) -> None:
    """`adaptive` where boots vary."""
    traces, rows = shared_traces(folder), []
    for setting, world in WORLDS.items():
        for (label, policy, settings), seed in product(ROWS[:2], BOOT_SEEDS):
            varied = replace(world, boot_sigma=SIGMA, seed=seed)
            found = [run(policy, setting, trace, varied, **settings) for trace in traces]
            rows.append([setting, label, str(seed), *scores(found, setting)])
    print(table(["setting", "policy", "seed", "cost", "goal held", "J", *SHARED.values()], rows))


# ------------------------------------------------------------------------------------------------------ other traces


def hold_out(folder: Path) -> None:
    """Constants are chosen on all traces but one (goal held first, then the score) and scored on that one."""
    traces, rows = shared_traces(folder), []
    for setting, constants, price, score in (
        ("R", "R", NO_PRICE, "cost_ratio"),
        ("R", "R, price", PRICE, "joint_ratio"),
        ("H", "H", NO_PRICE, "cost_ratio"),
        ("H", "H", PRICE, "joint_ratio"),
    ):
        tried: list[tuple[tuple[float, ...], list[RunResult]]] = []
        for values in product(*HELD_OUT[constants].values()):
            before = [getattr(module, name) for module, name in HELD_OUT[constants]]
            _set_constants(constants, values)
            tried.append((values, [run("adaptive", setting, trace, **price) for trace in traces]))
            _set_constants(constants, before)
        chosen: list[RunResult] = []
        for number in range(len(traces)):
            others = [(found[:number] + found[number + 1 :], found[number]) for _, found in tried]
            chosen.append(min(others, key=lambda each: _rank(each[0], setting, score))[1])
        everywhere = [mean(getattr(result, score) for result in found) for _, found in tried]
        rows.append(
            [
                setting,
                ("J" if score == "joint_ratio" else "cost") + (", `price_of_waiting = 1`" if price else ""),
                *(f"{getattr(result, score):.2f}" for result in chosen),
                f"{mean(getattr(result, score) for result in chosen):.3f}",
                f"{sum(is_held(result, setting) for result in chosen)} of {len(chosen)}",
                f"{min(everywhere):.3f} to {max(everywhere):.3f}",
            ]
        )
    print(table(["setting", "score", *SHARED.values(), "mean, left out", "goal held", "range"], rows))


def _set_constants(constants: str, values: Sequence[float]) -> None:
    for (module, name), value in zip(HELD_OUT[constants], values, strict=True):
        setattr(module, name, value)


def _rank(found: Sequence[RunResult], setting: str, score: str) -> tuple[int, float]:
    late = sum(not is_held(result, setting) for result in found)
    return late, mean(getattr(result, score) for result in found)


def other_traces(traces: Sequence[Trace]) -> Iterator[Trace]:
    """Seven variants of each trace, and one of each generator."""
    for trace in traces:
        source = random.Random(trace.name)
        tasks = list(zip(trace.arrivals, trace.durations, strict=True))
        durations = list(trace.durations)
        source.shuffle(durations)
        yield _named(trace, "second half", [task for task in tasks if task[0] >= trace.span_s / 2])
        yield _named(trace, "a third of the tasks", [task for task in tasks if source.random() < 1 / 3])
        yield _named(trace, "twice as fast", [(at / 2, duration_s) for at, duration_s in tasks])
        yield _named(trace, "three times as long", [(at, 3 * duration_s) for at, duration_s in tasks])
        yield _named(trace, "a third as long", [(at, duration_s / 3) for at, duration_s in tasks])
        yield _named(trace, "durations shuffled", list(zip(trace.arrivals, durations, strict=True)))
        yield _named(trace, "blocks resampled", _resampled(tasks, trace.span_s, source))
    for kind in GENERATORS:
        yield generate(kind, GeneratorSettings(tasks=5000, days=7.0, duration_s=120.0, seed=11))


# Kind, tasks, days and mean duration.
LOADS = (
    ("poisson", 6000, 0.1, 4.0),
    ("diurnal", 8000, 1.0, 10.0),
    ("spikes", 4000, 1.0, 15.0),
    ("bursts", 6000, 0.3, 8.0),
    ("poisson", 3000, 1.0, 60.0),
    ("diurnal", 5000, 3.0, 45.0),
    ("bursts", 4000, 5.0, 30.0),
    ("spikes", 3000, 4.0, 60.0),
    ("poisson", 2000, 5.0, 300.0),
    ("bursts", 3000, 10.0, 900.0),
    ("diurnal", 3000, 10.0, 1500.0),
    ("spikes", 2000, 10.0, 400.0),
)


def generated_loads() -> Iterator[Trace]:
    for number, (kind, tasks, days, duration_s) in enumerate(LOADS):
        settings = GeneratorSettings(tasks=tasks, days=days, duration_s=duration_s, seed=50 + number)
        yield replace(generate(kind, settings), name=f"{kind}, {duration_s:g} s")


def _named(trace: Trace, variant: str, tasks: list[tuple[float, float]]) -> Trace:
    tasks.sort()
    first = tasks[0][0]
    arrivals, durations = tuple(at - first for at, _ in tasks), tuple(duration_s for _, duration_s in tasks)
    return Trace(f"{trace.name}, {variant}", arrivals, durations)


def _resampled(tasks: list[tuple[float, float]], span_s: float, source: random.Random) -> list[tuple[float, float]]:
    """Draw as many blocks as the trace has, with replacement."""
    blocks = 24
    length_s = span_s / blocks
    found: list[tuple[float, float]] = []
    for number in range(blocks):
        drawn = source.randrange(blocks)
        begins, ends = drawn * length_s, (drawn + 1) * length_s
        found += [(at - begins + number * length_s, duration_s) for at, duration_s in tasks if begins <= at < ends]
    return found


def each(traces: Sequence[Trace]) -> None:
    """`adaptive` on each trace and their means: cost without a price, and J with one."""
    rows, all_found = [], dict[tuple[str, bool], list[RunResult]]()
    for trace in traces:
        cells = [trace.name]
        for setting, is_priced in product(WORLDS, (False, True)):
            result = run("adaptive", setting, trace, **(PRICE if is_priced else NO_PRICE))
            all_found.setdefault((setting, is_priced), []).append(result)
            score = result.joint_ratio if is_priced else result.cost_ratio
            cells.append(f"{score:.3f}, {wait_text(result.wait_p95_s)}{'' if is_held(result, setting) else ' late'}")
        rows.append(cells)
    means, held = ["mean"], ["goal held"]
    for (setting, is_priced), found in all_found.items():
        means.append(f"{mean(result.joint_ratio if is_priced else result.cost_ratio for result in found):.3f}")
        held.append(f"{sum(is_held(result, setting) for result in found)} of {len(found)}")
    print(table(["trace", "R: cost", "R: J with price", "H: cost", "H: J with price"], [*rows, means, held]))


# -------------------------------------------------------------------------------------------------------------- paths


def paths(folder: Path) -> None:
    """Every result of the fast path again through the full plan(), in every cycle of the whole trace."""
    different = 0
    for trace, setting, sigma, price in product(shared_traces(folder), WORLDS, (0.0, SIGMA), (NO_PRICE, PRICE)):
        world = replace(WORLDS[setting], boot_sigma=sigma)
        fast, full = (
            json.dumps(run("adaptive", setting, trace, world, is_full=is_full, **price).to_plain())
            for is_full in (False, True)
        )
        different += fast != full
        words = f"{trace.name} {setting}{' random boots' if sigma else ''}{' price' if price else ''}"
        print(f"{'equal    ' if fast == full else 'DIFFERENT'} {words}", flush=True)
    print(f"{different} different")


def speed() -> None:
    trace = generate("diurnal", GeneratorSettings(tasks=100_000, days=14.0, duration_s=60.0))
    for is_full in (False, True):
        begins = time.process_time()
        run("adaptive", "R", trace, is_full=is_full)
        print(
            f"{'full' if is_full else 'fast'} path: {time.process_time() - begins:.1f} s of processor time", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "part", choices=("results", "own-policies", "boots", "hold-out", "others", "loads", "each", "paths", "speed")
    )
    parser.add_argument("--traces", type=Path, default=Path("traces"), help="folder of traces (see bench/traces.md)")
    parser.add_argument("--settings", nargs="*", choices=tuple(WORLDS), default=tuple(WORLDS))
    parser.add_argument("--images", type=Path, help="write the plots of `results` to this folder")
    arguments = parser.parse_args()
    folder: Path = arguments.traces
    match arguments.part:
        case "results":
            results(folder, ROWS, arguments.settings, arguments.images)
        case "own-policies":
            results(folder, OWN_ROWS, arguments.settings, None)
        case "boots":
            boots(folder)
        case "hold-out":
            hold_out(folder)
        case "others":
            each(list(other_traces(shared_traces(folder))))
        case "loads":
            each(list(generated_loads()))
        case "each":
            each([read_trace(path) for path in sorted(folder.glob("*.csv*"))])
        case "paths":
            paths(folder)
        case "speed":
            speed()


if __name__ == "__main__":
    main()
