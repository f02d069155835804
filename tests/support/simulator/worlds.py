"""The named worlds of the simulator, and how a seed of one is checked, shrunk and replayed.

plain     a simulated cloud with free machines
billed    a simulated cloud that bills by periods of 5 to 60 minutes
runpod    the real provider over the emulated Runpod
hetzner   the real provider over the emulated Hetzner Cloud, with its bill
runtime   plain, and the programs on the machines are the real worker runtime; every second seed has rare faults
storm     each of the other worlds in turn, with the rare faults of storms.py
"""

import shlex
from collections.abc import Callable
from dataclasses import replace

from support.hetzner_histories import HetznerHistory, hetzner_scenario
from support.runpod_histories import RunpodHistory, runpod_scenario
from support.simulator.coverage import Coverage
from support.simulator.decisions import FaultDecisions
from support.simulator.invariants import InvariantViolation
from support.simulator.runtime_workers import RuntimeWorker
from support.simulator.scenario import Scenario, add_storm, draw_billed_scenario, draw_policies, draw_scenario
from support.simulator.shrinking import Injection, Shrinker, run_once
from support.simulator.simulation import Simulation
from support.simulator.trace import shorten


def runtime_scenario(seed: int) -> Scenario:
    scenario = draw_scenario(seed)
    return add_storm(scenario) if seed % 2 else scenario


def runtime_simulation(scenario: Scenario) -> Simulation:
    return Simulation(scenario, worker_type=RuntimeWorker)


_Scenarios = tuple[Callable[[int], Scenario], Callable[[Scenario], Simulation]]
_CALM: dict[str, _Scenarios] = {
    "plain": (draw_scenario, Simulation),
    "billed": (draw_billed_scenario, Simulation),
    "runpod": (runpod_scenario, RunpodHistory),
    "hetzner": (hetzner_scenario, HetznerHistory),
    "runtime": (runtime_scenario, runtime_simulation),
}
# Most seeds of the storm are of the cheapest world, which has the most faults per second.
_STORMS = ("plain", "billed", "plain", "runpod", "plain", "hetzner")
WORLDS = (*_CALM, "storm")


def make_simulation(world: str, seed: int, injection: Injection = Injection()) -> Simulation:
    name = _STORMS[seed % len(_STORMS)] if world == "storm" else world
    draw, simulation_type = _CALM[name]
    scenario = draw_policies(draw(seed))
    scenario = add_storm(scenario) if world == "storm" else scenario
    if injection.until_s is not None:
        scenario = replace(scenario, faults_end_s=injection.until_s)
    simulation = simulation_type(scenario)
    simulation.replay = replay_command(world, seed, injection)
    if injection.only is not None:
        simulation.decisions = FaultDecisions(frozenset(injection.only))
    return simulation


def replay_command(world: str, seed: int, injection: Injection = Injection()) -> str:
    command = f"PYTHONPATH=tests python -m support.simulator --world {world} --seed {seed}"
    if injection.until_s is not None:
        command += f" --until {injection.until_s:g}"
    if injection.only is not None:
        command += f" --only {shlex.quote(','.join(injection.only))}"
    return command


def check_seed(world: str, seed: int) -> Simulation:
    """Run a seed. Raises InvariantViolation with the trace of the shrunk run and the commands that replay both."""
    simulation = make_simulation(world, seed)
    try:
        simulation.run()
    except InvariantViolation as violation:
        raise InvariantViolation(describe_failure(world, seed)) from violation
    return simulation


def describe_failure(world: str, seed: int) -> str:
    """Repeat a failing seed, shrink it, and describe the smallest run that breaks the same promise."""

    def make(injection: Injection) -> Simulation:
        return make_simulation(world, seed, injection)

    failed = run_once(make, Injection())
    if failed is None:
        return f"{world} {seed} failed once and not again: the simulation is not deterministic"
    shrinker = Shrinker(make)
    smallest = shrinker.shrink(failed)
    return (
        f"{failed.problem}\n\n{shorten(smallest.trace)}\n\n{smallest.problem}\n"
        f"shrunk from {len(failed.keys)} to {len(smallest.keys)} decisions in {shrinker.runs} runs: "
        f"{', '.join(smallest.keys)}\n"
        f"replay the shrunk run: {replay_command(world, seed, smallest.injection)}\n"
        f"replay the whole seed: {replay_command(world, seed)}\n"
    )


def failure_of(world: str, seed: int) -> tuple[str | None, Coverage]:
    """The report of a broken seed, or None, and what the seed covered."""
    simulation = make_simulation(world, seed)
    try:
        simulation.run()
    except InvariantViolation:
        return describe_failure(world, seed), simulation.coverage
    return None, simulation.coverage


__all__ = ["WORLDS", "check_seed", "failure_of", "make_simulation", "replay_command"]
