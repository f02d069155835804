"""The checks at the end of `make chaos` find each kind of broken promise in the records."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.chaos.promises import Evidence, HandlerRun, read_runs
from bench.chaos.task_stream import Accepted

TASK = 7


def transition(before: str, after: str, attempt: int = 1) -> dict[str, Any]:
    return {"task_id": TASK, "before": before, "after": after, "token": f"t{attempt}", "worker_id": f"w{attempt}"}


def evidence(**changed: Any) -> Evidence:
    """One task that completed in its first attempt, without faults."""
    observer = SimpleNamespace(most_machines=3, most_rows=3, silence_s=lambda _worker, _at: 0.3)
    given: dict[str, Any] = {
        "accepted": Accepted({TASK: "local"}),
        "tasks": {TASK: {"status": "complete", "result": "t1", "attempts": 1}},
        "transitions": [transition("queued", "running"), transition("running", "complete")],
        "runs": [HandlerRun(TASK, "t1", 1.0, 2.0, has_ended=True)],
        "repeated_tokens": [],
        "observer": observer,
    }
    return Evidence(**{**given, **changed})


SECOND_CLAIM = [
    transition("queued", "running"),
    transition("running", "queued"),
    transition("queued", "running", 2),
    transition("running", "complete", 2),
]
SECOND_TASK = {TASK: {"status": "complete", "result": "t2", "attempts": 2}}


def runs_with_second_at(began: float) -> list[HandlerRun]:
    return [HandlerRun(TASK, "t1", 1.0, 5.0), HandlerRun(TASK, "t2", began, began + 1, has_ended=True)]


def test_run_without_faults_breaks_no_promise() -> None:
    assert evidence().broken_promises() == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        pytest.param({"tasks": {}, "transitions": []}, "is lost", id="an accepted task has no row"),
        pytest.param(
            {"tasks": {TASK: {"status": "running", "result": None, "attempts": 1}}, "transitions": []},
            "is running after 1 attempts",
            id="an accepted task does not finish",
        ),
        pytest.param(
            {"accepted": Accepted({TASK: "local"}, {TASK})}, "cannot succeed", id="a task that must fail completes"
        ),
        pytest.param(
            {"transitions": [transition("running", "complete"), transition("complete", "queued")]},
            "changed from complete to queued",
            id="a finished task returns to the queue",
        ),
        pytest.param(
            {"transitions": [transition("running", "complete")] * 2}, "ended 2 times", id="two completions are accepted"
        ),
        pytest.param({"runs": []}, "without a finished run", id="a completion has no run"),
        pytest.param(
            {"tasks": {TASK: {"status": "complete", "result": "t9", "attempts": 1}}},
            "the result of another attempt",
            id="the result is that of another claim",
        ),
        pytest.param({"repeated_tokens": ["t1"]}, "ran more than once", id="one claim runs twice"),
        pytest.param(
            {"transitions": SECOND_CLAIM, "tasks": SECOND_TASK, "runs": runs_with_second_at(3.0)},
            "ran twice at the same time",
            id="runs overlap within the lease",
        ),
        pytest.param(
            {"observer": SimpleNamespace(most_machines=4, most_rows=3, silence_s=lambda _worker, _at: 0.3)},
            "4 machines",
            id="more machines than allowed",
        ),
    ],
)
def test_broken_promise_is_found(changed: dict[str, Any], words: str) -> None:
    (found,) = evidence(**changed).broken_promises()
    assert words in found


def test_overlap_after_a_silent_lease_is_allowed() -> None:
    silent = SimpleNamespace(most_machines=3, most_rows=3, silence_s=lambda _worker, _at: 9.0)
    overlapping = evidence(transitions=SECOND_CLAIM, tasks=SECOND_TASK, runs=runs_with_second_at(3.0), observer=silent)
    assert len(overlapping.overlapping_runs()) == 1
    assert overlapping.broken_promises() == []


def test_record_of_runs_is_read(tmp_path: Path) -> None:
    path = tmp_path / "runs"
    path.write_text("S 1.0 7 1 t1 10\nA 1.5 7 1 t1 10\nS 2.0 7 2 t2 11\nE 2.5 7 2 t2 11\nS 3.0 7 2 t2 12\n")
    runs, repeated = read_runs(path)
    assert (runs[0].token, runs[0].seen_until, runs[0].has_ended) == ("t1", 1.5, False)
    assert repeated == ["t2"]
