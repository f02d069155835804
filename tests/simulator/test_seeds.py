"""Random worlds: every promise holds in each of them, at every moment, and all come to rest.

`WINDLASS_SEEDS=5000 pytest -n 2 tests/simulator/test_seeds.py` runs more; `WINDLASS_FIRST_SEED` says where to begin.
A seed that breaks a promise prints its story, and `python -m windlass.simulator --seed N` tells it again.
"""

import os
import subprocess
import sys

import pytest

from windlass.simulator.invariants import InvariantViolation
from windlass.simulator.scenario import draw_scenario
from windlass.simulator.simulation import Simulation

SEEDS = int(os.environ.get("WINDLASS_SEEDS", "0")) or 200
FIRST = int(os.environ.get("WINDLASS_FIRST_SEED", "0"))
# Small enough that two workers finish at about the same time.
CHUNK = 10


@pytest.mark.parametrize("first", range(FIRST, FIRST + SEEDS, CHUNK))
def test_every_promise_holds_in_every_world(first: int) -> None:
    for seed in range(first, min(first + CHUNK, FIRST + SEEDS)):
        Simulation(draw_scenario(seed)).run()


def test_together_the_seeds_see_trouble_of_every_kind() -> None:
    """A bed in which nothing happens proves nothing."""
    late = machines = takeovers = 0
    told = ""
    for seed in range(40):
        report = Simulation(draw_scenario(seed)).run()
        late += report.late_results
        machines += report.machines
        takeovers += report.takeovers
        told += report.trace.text(limit=None)
    assert late > 0
    assert machines > 100
    assert takeovers > 100
    for trouble in (
        "times_out_after_taking_effect",
        "takes_effect_late_s",
        "fails_without_effect",
        "NoCapacity",
        "Throttled",
        "Refused",
        "a fault in the adapter",
        "never_answers",
        "stale_by_s",
        "answer_delay_s",
        "crashes",
        "vanishes with its machine",
        "stands still",
        "never_joins=True",
        "ignores_drain=True",
        "lost its claim",
        "is killed",
        "the database is away",
        "will get no answer, nor arrive",
        "lost lease during cycle",
        "person",
    ):
        assert trouble in told, f"in 40 seeds nobody met: {trouble}"


def test_a_seed_tells_the_same_story_in_every_process() -> None:
    def trace(hash_seed: str) -> str:
        told = subprocess.run(
            [sys.executable, "-m", "windlass.simulator", "--seed", "9"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return told.stdout

    first, second = trace("1"), trace("2")
    assert first == second
    assert len(first.splitlines()) > 50


def test_a_broken_promise_prints_its_story_and_how_to_see_it_again() -> None:
    simulation = Simulation(draw_scenario(9))

    def break_it(_: Simulation) -> None:
        simulation.trace.add("somebody", "does something wrong")
        simulation.checker.on_violation("the first promise")

    simulation.on_ready = break_it
    with pytest.raises(InvariantViolation) as caught:
        simulation.run()
    text = str(caught.value)
    assert text.startswith("the first promise\n")
    assert "somebody       does something wrong" in text
    assert "replay: python -m windlass.simulator --seed 9" in text
