"""Random histories of faults against the emulated Runpod: every promise holds in each, and nothing is left over.

`WINDLASS_SEEDS=1000 pytest -n 2 tests/simulator/test_runpod_histories.py` runs a thousand;
 `WINDLASS_FIRST_SEED`
says where to begin.
"""

import os
from dataclasses import replace

import pytest

from support.runpod_histories import AFTER, NO_ANSWERS, NOT_DELETED, REFUSALS, RunpodHistory, runpod_scenario
from support.simulator.cloud import FaultRates
from support.simulator.scenario import Scenario
from support.simulator.worlds import check_seed

SEEDS = int(os.environ.get("WINDLASS_SEEDS", "0")) or 10
FIRST = int(os.environ.get("WINDLASS_FIRST_SEED", "0"))
# Small enough that two workers finish at about the same time.
CHUNK = 5
# Scenarios with high fault rates to run before a fault that never occurred fails the test.
MAX_ROUGH = 60


@pytest.mark.parametrize("first", range(FIRST, FIRST + SEEDS, CHUNK))
def test_no_leaked_duplicate_or_excess_pods(first: int) -> None:
    for seed in range(first, min(first + CHUNK, FIRST + SEEDS)):
        check_seed("runpod", seed)


def rough(seed: int) -> Scenario:
    """Where every second request fails."""
    scenario = runpod_scenario(seed)
    rates = FaultRates(create_ambiguous=0.3, create_refused=0.3, list_failed=0.3, list_stale=0.3, delete_failed=0.7)
    fleets = {name: replace(fleet_scenario, rates=rates) for name, fleet_scenario in scenario.fleets.items()}
    return replace(scenario, fleets=fleets)


def test_histories_cover_every_kind_of_fault() -> None:
    """A bed in which nothing happens proves nothing. They go on until they have: which one meets what is chance."""
    unanswered = [f"{kind}{after}" for kind in NO_ANSWERS for after in AFTER]
    cloud_faults = {
        "has_no_gpu", "never_has_runtime",
        "list old", "GET silence", "GET 5xx", "GET 429", "POST late", "POST answer lost",
        *(f"POST {kind}" for kind in (*unanswered, *REFUSALS)),
        *(f"DELETE {kind}" for kind in NOT_DELETED),
    }  # fmt: skip
    trace_lines = {
        "crashed with its machine",
        "killed",
        "database       unavailable",
        "create machine refused",
        "create machine unclear",
        "delete machine failed",
        "prepare machine failed",
        "prepare machine unclear",
        "list machines failed",
        "hold: ",
    }
    for seed in range(MAX_ROUGH):
        history = RunpodHistory(rough(seed))
        trace = history.run().trace.text(limit=None)
        trace_lines -= {line for line in trace_lines if line in trace}
        cloud_faults -= history.pods.faults_seen
        if not cloud_faults and not trace_lines:
            return
    pytest.fail(f"not covered: {sorted(cloud_faults | trace_lines)}")
