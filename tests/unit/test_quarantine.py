"""Quarantine: when a failure streak is the fault of the worker."""

from dataclasses import replace
from typing import Any

import pytest

from support.snapshots import GPU, LOCAL, NOW, ago, fleet, of_kind, snapshot, task, worker
from windlass.model.action import AttemptRefund, Delete, Fail, RaiseAlert, Spawn
from windlass.model.snapshot import FailureStreak
from windlass.policy.plan import plan
from windlass.policy.quarantine import quarantine_reason

# Three tasks failed on it within a minute, while three other workers completed 40 and failed one attempt.
DEAD = FailureStreak("w0", ago(60), (11, 12, 13), {12: "w1"}, (), others=3, others_completed=40, others_failed=1)


@pytest.mark.parametrize(
    ("changes", "settings", "is_at_fault"),
    [
        pytest.param({}, {}, True, id="three in a row fail here and hardly any elsewhere"),
        pytest.param(
            {"completed_by": {}}, {}, True, id="the failed tasks were not retried yet, other tasks are the comparison"
        ),
        pytest.param({"failed": (11, 12)}, {}, False, id="two are too few"),
        pytest.param({"failed": (11, 12)}, {"quarantine_min_failures": 2}, False, id="two may be chance"),
        pytest.param(
            {"failed": (11, 12)},
            {"quarantine_min_failures": 2, "quarantine_max_chance": 0.01},
            True,
            id="two are enough if configured",
        ),
        pytest.param({"others": 0, "others_completed": 0, "others_failed": 0}, {}, False, id="no comparison"),
        pytest.param(
            {"others_completed": 8, "others_failed": 0}, {}, False, id="three may be chance with eight successes"
        ),
        pytest.param(
            {"others_completed": 9, "others_failed": 0}, {}, True, id="three are no chance with nine successes"
        ),
        pytest.param(
            {"others_completed": 20, "others_failed": 20}, {}, False, id="half of all attempts fail everywhere"
        ),
        pytest.param(
            {"others_completed": 20, "others_failed": 20, "failed": tuple(range(10))},
            {},
            True,
            id="half fail everywhere, but ten in a row do not",
        ),
        pytest.param({"failed_elsewhere": (13,)}, {}, False, id="a task that also fails elsewhere is at fault itself"),
        pytest.param(
            {"failed": (11, 12, 13, 14), "failed_elsewhere": (13,)},
            {},
            True,
            id="one bad task does not excuse the others",
        ),
    ],
)
def test_quarantine_decision(changes: dict[str, Any], settings: dict[str, Any], is_at_fault: bool) -> None:
    assert (quarantine_reason(replace(DEAD, **changes), fleet(GPU, **settings)) is not None) is is_at_fault


def test_quarantine_reason_states_the_evidence() -> None:
    assert quarantine_reason(DEAD, LOCAL) == (
        "3 different tasks in a row failed on it (newest: 11, 12, 13); "
        "other workers have completed 1 of them since (12 by w1); "
        "in the same time 3 other workers completed 40 tasks and failed 1 attempt"
    )


def test_worker_at_fault_is_quarantined_and_replaced() -> None:
    views = (
        worker("w0", 0, claimed=90, running=(task(20),)),
        *(worker(f"w{n}", n, claimed=90, running=(task(n),)) for n in (1, 2, 3)),
    )
    planned = plan(snapshot(*views, queued=5, failure_streaks=(DEAD,)), LOCAL)
    (failed,) = of_kind(planned.actions, Fail)
    assert (failed.worker_id, failed.code, failed.evidence) == ("w0", "QUARANTINED", DEAD)
    assert failed.attempt_refund == AttemptRefund(DEAD.since)
    assert [delete.worker_id for delete in of_kind(planned.actions, Delete)] == ["w0"]
    # The replacement is spawned by the next cycle, once the worker is gone.
    assert of_kind(planned.actions, Spawn) == []
    following = plan(snapshot(*views[1:], queued=6), LOCAL)
    assert [spawn.slot for spawn in of_kind(following.actions, Spawn)] == [0]


def test_quarantined_worker_is_not_proven() -> None:
    view = worker("w0", 0, claimed=90)
    planned = plan(snapshot(view, failure_streaks=(DEAD,)), fleet(min_spawns_for_rate=1))
    assert planned.hold is not None
    assert planned.hold.code == "FAILURE_RATE"


LONELY = replace(DEAD, failed=tuple(range(10)), completed_by={}, others=0, others_completed=0, others_failed=0)


def test_without_comparison_one_trial_per_hour() -> None:
    views = (worker("w0", 0, claimed=90), worker("w1", 1, claimed=90))
    lonely = (LONELY, replace(LONELY, worker_id="w1"))
    planned = plan(snapshot(*views, failure_streaks=lonely), LOCAL)
    (failed,) = of_kind(planned.actions, Fail)
    # Each task gets a refund for a trial once. Otherwise a task that fails everywhere would be retried endlessly.
    assert (failed.worker_id, failed.evidence) == ("w0", LONELY)
    assert failed.attempt_refund == AttemptRefund(LONELY.since, is_trial=True)
    assert failed.reason.endswith("no other worker completed a task in the same time: replaced as a trial")
    # The other worker raises an alert, and no second trial follows within the hour.
    assert [(alert.code, alert.worker_id) for alert in of_kind(planned.actions, RaiseAlert)] == [
        ("TASKS_FAILING", "w1")
    ]
    assert planned.planner_state.health.quarantine_trial_at == NOW
    for tried, failures in ((3599, 0), (3600, 1)):
        again = plan(snapshot(*views, failure_streaks=lonely, state={"quarantine_trial_at": ago(tried)}), LOCAL)
        assert len(of_kind(again.actions, Fail)) == failures


FEW = replace(LONELY, failed=(2, 3, 8), others=1, others_completed=1)


@pytest.mark.parametrize(
    ("suspect", "is_tried"),
    [
        pytest.param(replace(FEW, since=ago(599)), False, id="a success may still come"),
        pytest.param(replace(FEW, since=ago(600)), True, id="small queues have no long streaks"),
        pytest.param(replace(FEW, since=ago(600), failed_elsewhere=(3,)), False, id="some tasks fail elsewhere too"),
    ],
)
def test_short_streak_becomes_a_trial_after_a_while(suspect: FailureStreak, is_tried: bool) -> None:
    planned = plan(snapshot(worker("w0", 0, claimed=90), failure_streaks=(suspect,)), LOCAL)
    assert [action.attempt_refund for action in of_kind(planned.actions, Fail)] == (
        [AttemptRefund(suspect.since, is_trial=True)] if is_tried else []
    )


@pytest.mark.parametrize(
    ("view", "code"),
    [
        (worker("w0", 0, claimed=90, heartbeat=601, vram_mb=1), "STALE_HEARTBEAT_TASKS_QUEUED"),
        (worker("w0", 0, claimed=90, vram_mb=1, running=(task(7, started=1201),)), "STUCK_TASK"),
    ],
)
def test_worker_at_fault_gets_refund_for_any_failure(view: Any, code: str) -> None:
    planned = plan(snapshot(view, queued=5, failure_streaks=(DEAD,)), GPU)
    (failed,) = of_kind(planned.actions, Fail)
    assert (failed.code, failed.evidence, failed.attempt_refund) == (code, DEAD, AttemptRefund(DEAD.since))


@pytest.mark.parametrize("failure_streaks", [(), (LONELY,)], ids=["too few failures", "no comparison"])
def test_missing_gpu_refunds_attempts_without_comparison(
    failure_streaks: tuple[FailureStreak, ...],
) -> None:
    view = replace(worker("w0", 0, created=301, claimed=90, vram_mb=0), failing_since=ago(50))
    (failed,) = of_kind(plan(snapshot(view, failure_streaks=failure_streaks), GPU).actions, Fail)
    assert failed.attempt_refund == AttemptRefund(ago(50))


def test_failing_manual_worker_raises_alert_only() -> None:
    suspect = replace(DEAD, failed=tuple(range(10)))
    planned = plan(snapshot(worker("w0", None), failure_streaks=(suspect,)), LOCAL)
    assert [type(action) for action in planned.actions] == [RaiseAlert]
    assert planned.actions[0].code == "TASKS_FAILING"


def test_draining_worker_is_not_quarantined() -> None:
    view = worker("w0", 0, "terminating", terminating=5, claimed=90, running=(task(20),))
    assert not of_kind(plan(snapshot(view, failure_streaks=(DEAD,)), LOCAL).actions, Fail)
