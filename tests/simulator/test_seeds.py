"""Random scenarios: every invariant holds at every step, and every fleet comes to rest.

`make histories` runs more of them. `WINDLASS_SEEDS=5000 pytest -n 2 tests/simulator/test_seeds.py` runs those of this
world alone, from `WINDLASS_FIRST_SEED` on.
A violation prints the trace of its seed. `PYTHONPATH=tests python -m support.simulator --seed N` replays it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.simulator.invariants import InvariantViolation
from support.simulator.simulation import Simulation
from support.simulator.worlds import check_seed, make_simulation

# These seeds together contain every kind of fault.
WITH_EVERY_FAULT = range(40)
SEEDS = int(os.environ.get("WINDLASS_SEEDS", "0")) or 20
FIRST = int(os.environ.get("WINDLASS_FIRST_SEED", "0")) or WITH_EVERY_FAULT.stop
# Seeds per test: small enough that parallel test processes finish at about the same time.
CHUNK = 10


@pytest.mark.parametrize("first", range(FIRST, FIRST + SEEDS, CHUNK))
def test_every_invariant_holds(first: int) -> None:
    for seed in range(first, min(first + CHUNK, FIRST + SEEDS)):
        check_seed("plain", seed)


def test_every_invariant_holds_under_every_kind_of_fault() -> None:
    """Seeds without faults would prove nothing."""
    late = machines = takeovers = 0
    traces = ""
    for seed in WITH_EVERY_FAULT:
        report = check_seed("plain", seed).report
        late += report.late_results
        machines += report.machines
        takeovers += report.takeovers
        traces += report.trace.text(limit=None)
    assert late > 0
    assert machines > 100
    assert takeovers > 100
    for fault in (
        "times_out_after_taking_effect",
        "takes_effect_late_s",
        "fails_without_effect",
        "NoCapacity",
        "Throttled",
        "Refused",
        "adapter bug",
        "never_answers",
        "stale_by_s",
        "answer_delay_s",
        "crashed",
        "crashed with its machine",
        "frozen for",
        "never_joins=True",
        "ignores_drain=True",
        "lost its claim",
        "killed",
        "database       unavailable",
        "request lost",
        "lost lease during cycle",
        "operator",
    ):
        assert fault in traces, f"no seed contains: {fault}"


def test_seed_gives_same_trace_in_every_process() -> None:
    def replay(hash_seed: str) -> str:
        process = subprocess.run(
            [sys.executable, "-m", "support.simulator", "--seed", "9"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parents[1])},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return process.stdout

    first, second = replay("1"), replay("2")
    assert first == second
    assert len(first.splitlines()) > 50


def test_violation_prints_trace_and_replay_command() -> None:
    simulation = make_simulation("plain", 9)

    def violate(_: Simulation) -> None:
        simulation.trace.add("test", "causes a violation")
        simulation.checker.on_violation("promise 3 broken: a test")

    simulation.on_ready = violate
    with pytest.raises(InvariantViolation) as caught:
        simulation.run()
    text = str(caught.value)
    assert text.startswith("promise 3 broken: a test\n")
    assert "test           causes a violation" in text
    assert "replay: PYTHONPATH=tests python -m support.simulator --world plain --seed 9" in text
