"""A failing seed is shrunk to a small run that breaks the same promise and replays exactly."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from support.memory_store.tables import Tables
from support.simulator import simulation
from support.simulator.invariants import InvariantViolation
from support.simulator.shrinking import Injection, Shrinker, run_once
from support.simulator.simulation import Simulation
from support.simulator.trace import Trace
from support.simulator.worlds import WORLDS, check_seed, make_simulation, replay_command

TESTS = Path(__file__).parents[1]
# A world and a seed in which a worker fails while it holds a task.
WORLD, SEED = "plain", 2


@pytest.fixture
def planted_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks of a failed worker are not requeued, so that promise 1 breaks."""
    monkeypatch.setattr(Tables, "requeue_tasks_of", lambda *_: 0)
    # A lost task is lost after ten minutes as well as after four hours.
    monkeypatch.setattr(simulation, "REST_LIMIT_S", 600.0)


def make(injection: Injection) -> Simulation:
    return make_simulation(WORLD, SEED, injection)


@pytest.mark.usefixtures("planted_defect")
def test_planted_defect_is_shrunk_to_a_few_decisions() -> None:
    failed = run_once(make, Injection())
    assert failed is not None
    assert failed.signature == "promise 1 broken"
    shrinker = Shrinker(make)
    smallest = shrinker.shrink(failed)
    assert smallest.signature == failed.signature
    assert len(failed.keys) > 20
    # A batch of tasks, and the fault of the worker that claims one of them.
    assert len(smallest.keys) <= 3
    assert any(key.startswith("producer/") for key in smallest.keys)
    assert len(smallest.trace) < len(failed.trace)
    again = run_once(make, smallest.injection)
    assert again == smallest


@pytest.mark.usefixtures("planted_defect")
def test_failing_seed_prints_shrunk_trace_and_replay_commands() -> None:
    with pytest.raises(InvariantViolation) as caught:
        check_seed(WORLD, SEED)
    text = str(caught.value)
    assert text.startswith("promise 1 broken: ")
    assert re.search(r"shrunk from \d+ to [1-3] decisions in \d+ runs: ", text)
    assert f"replay the whole seed: {replay_command(WORLD, SEED)}\n" in text
    assert re.search(r"replay the shrunk run: .* --until [\d.]+ --only \S+\n", text)


def test_printed_command_replays_the_same_trace() -> None:
    simulation = make_simulation("storm", 4)
    simulation.run()
    keys = tuple(decision.key for decision in simulation.decisions.taken)[:40]
    injection = Injection(keys, until_s=200.0)
    shortened = make_simulation("storm", 4, injection)
    shortened.run()
    # A history of a vendor, whose policy is drawn: the line that a violation prints names the same run.
    vendor = make_simulation("hetzner", 2261)
    vendor.trace = Trace()
    assert vendor.failure_report("x").endswith(f"\nreplay: {replay_command('hetzner', 2261)}\n")
    command = replay_command("storm", 4, injection).removeprefix("PYTHONPATH=tests python ")
    process = subprocess.run(
        [sys.executable, *shlex.split(command)],
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert process.stdout == f"{shortened.trace.text(limit=None)}\n\nstorm 4: every invariant held\n"


@pytest.mark.parametrize("world", WORLDS)
def test_run_without_decisions_has_no_faults_and_no_tasks(world: str) -> None:
    simulation = make_simulation(world, 5, Injection((), until_s=60.0))
    report = simulation.run()
    assert report.tasks == 0
    assert simulation.decisions.taken == []
    assert not simulation.coverage.pairs


@pytest.mark.usefixtures("planted_defect")
def test_limited_shrinking_returns_a_failing_run() -> None:
    failed = run_once(make, Injection())
    assert failed is not None
    assert Shrinker(make, max_runs=0).shrink(failed) == failed
