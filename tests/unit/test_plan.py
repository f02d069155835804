"""Decisions of one plan: order of the stages, state transitions, drains, manual workers and shutdown."""

from dataclasses import replace
from typing import Any

import pytest

from support.snapshots import (
    GPU,
    LAGGING_LIST,
    LOCAL,
    ago,
    apply,
    fleet,
    kinds,
    machine,
    machines_of,
    of_kind,
    only,
    snapshot,
    task,
    with_state,
    worker,
)
from windlass.model.action import (
    Delete,
    Drain,
    Fail,
    FailSlot,
    Plan,
    Promote,
    RaiseAlert,
    Requeue,
    Spawn,
)
from windlass.model.cost import Spending
from windlass.model.fleet import FleetConfig
from windlass.model.machine import ProviderTraits
from windlass.model.node import NodeState, NodeView
from windlass.model.snapshot import RunningView, SlotView, Snapshot
from windlass.policy.plan import plan


def alerts(planned: Plan) -> list[str]:
    return [alert.code for alert in of_kind(planned.actions, RaiseAlert)]


# -------------------------------------------------------------------------------------------------- order of the stages


def test_provider_change_stops_every_later_stage() -> None:
    """hold_on_provider_change comes first: its total hold stops failures, deletions and spawns alike."""
    silent_elsewhere = worker("a", heartbeat=999, provider="hetzner")
    failed = worker("b", 1, "error", provider="local")
    planned = plan(snapshot(silent_elsewhere, failed, queued=9), LOCAL)
    assert kinds(planned) == ["alert"]


def test_failure_counts_for_its_slot_and_its_machine_in_the_same_plan() -> None:
    """fail_slots and delete_failed come after fail_workers and read its failures."""
    slots = (SlotView(0, False, tuple(ago(n) for n in range(5))),)
    planned = plan(snapshot(worker(heartbeat=999), slots=slots), LOCAL)
    assert kinds(planned) == ["fail", "fail_slot", "delete", "alert"]


def test_spent_budget_stops_spawning_in_the_same_plan() -> None:
    """apply_budget comes before scale."""
    spending = (Spending("EUR", 0, 5_000_000, 0),)
    planned = plan(snapshot(queued=9, spending=spending), fleet(budget_per_day=5))
    assert of_kind(planned.actions, Spawn) == []
    assert planned.hold is not None
    assert planned.hold.code == "BUDGET"


def test_tasks_of_a_failed_worker_count_as_demand_in_the_same_plan() -> None:
    """scale comes after the failures and deletions: it wants a worker for their tasks, which the next cycle spawns."""
    planned = plan(snapshot(worker(heartbeat=999, running=(task(),))), LOCAL)
    assert kinds(planned) == ["fail", "delete"]
    assert planned.is_cut_short
    idle = plan(snapshot(worker(heartbeat=999)), LOCAL)
    assert (kinds(idle), idle.is_cut_short) == (["fail", "delete"], False)


def test_machine_of_a_draining_worker_is_not_prepared() -> None:
    """prepare_machines comes after scale, which may drain the worker."""
    traits = ProviderTraits(has_prepare_step=True)
    booting = worker(status="spawning", heartbeat=None, created=5)
    assert kinds(plan(snapshot(booting, traits=traits), LOCAL)) == ["prepare"]
    assert kinds(plan(snapshot(booting, traits=traits, is_shutting_down=True), LOCAL)) == ["drain"]


# ---------------------------------------------------------------------------------------------------- state transitions


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        pytest.param(
            snapshot(worker(status="spawning", vram_mb=1), queued=1), ["promote"], id="spawning -> active: heartbeat"
        ),
        pytest.param(
            snapshot(worker(status="spawning", heartbeat=None), queued=1), [], id="spawning: no heartbeat yet"
        ),
        pytest.param(
            snapshot(worker(status="spawning", heartbeat=None, created=601)),
            ["fail", "delete"],
            id="spawning -> error: timeout, deleted in the same cycle",
        ),
        pytest.param(snapshot(worker(heartbeat=601)), ["fail", "delete"], id="active -> error: failed and deleted"),
        pytest.param(
            snapshot(worker(vram_mb=1), idle=30), ["drain"], id="active -> terminating: idle and above the minimum"
        ),
        pytest.param(
            snapshot(worker(status="terminating", terminating=1)),
            ["delete"],
            id="terminating -> terminated: no running tasks",
        ),
        pytest.param(
            snapshot(worker(status="terminating", terminating=599, running=(task(),))),
            [],
            id="terminating: finishes until its deadline",
        ),
        pytest.param(
            snapshot(worker(status="terminating", terminating=600, running=(task(),))),
            ["delete", "spawn"],
            id="terminating -> terminated: deadline passed, its task needs a worker",
        ),
        pytest.param(snapshot(worker(status="error", heartbeat=None)), ["delete"], id="error -> terminated: deleted"),
    ],
)
def test_lifecycle_transitions(seen: Snapshot, expected: list[str]) -> None:
    assert kinds(plan(seen, GPU)) == expected


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        pytest.param(snapshot(worker(status="spawning")), ["promote"], id="starting -> healthy: the first heartbeat"),
        pytest.param(
            snapshot(worker(status="spawning", created=31, heartbeat=None)),
            ["fail", "delete"],
            id="starting -> crashed: 30 s without a heartbeat",
        ),
        pytest.param(snapshot(worker(heartbeat=31)), ["fail", "delete"], id="healthy -> crashed: missed heartbeats"),
        pytest.param(snapshot(worker(), machines=()), ["fail", "delete"], id="healthy -> crashed: process gone"),
        pytest.param(
            snapshot(worker(status="terminating", terminating=29, running=(task(),))), [], id="stopping: 30 s to finish"
        ),
        pytest.param(
            snapshot(worker(status="terminating", terminating=30, running=(task(),))),
            ["delete", "spawn"],
            id="stopping for 30 s: deleted",
        ),
        pytest.param(
            snapshot(worker(heartbeat=31), queued=1, slots=(SlotView(0, False, (ago(60),) * 3),)),
            ["fail", "delete", "alert"],
            id="crashed -> starting: four crashes in five minutes raise an alert",
        ),
        pytest.param(
            snapshot(worker(heartbeat=31), queued=1, slots=(SlotView(0, False, (ago(60),) * 5),), launches=()),
            ["fail", "fail_slot", "delete", "spawn", "alert"],
            id="crashed -> failed: another slot takes over after five restarts",
        ),
        pytest.param(
            snapshot(slots=(SlotView(0, True),), state={"alerts": {"SLOT_FAILED 0": ago(60)}}),
            [],
            id="failed: permanent until a restart",
        ),
    ],
)
def test_local_process_transitions(seen: Snapshot, expected: list[str]) -> None:
    assert kinds(plan(seen, LOCAL)) == expected


# -------------------------------------------------------------------------------------------------- health and requeue


def test_failed_worker_gets_code_and_its_machine_is_deleted() -> None:
    planned = plan(snapshot(worker(heartbeat=601, running=(task(7),))), GPU)
    assert planned.actions[:2] == (
        Fail("w0", "STALE_HEARTBEAT_ACTIVE_TASK", "Stale heartbeat with active tasks (601s old)"),
        Delete(
            "w0",
            "m-w0",
            "STALE_HEARTBEAT_ACTIVE_TASK",
            "failed: Stale heartbeat with active tasks (601s old)",
        ),
    )


def test_tasks_of_dead_workers_are_requeued_and_spawned_for() -> None:
    planned = plan(snapshot(orphaned=("long-gone",)), LOCAL)
    assert kinds(planned) == ["requeue", "spawn"]
    assert only(planned, Requeue).worker_id == "long-gone"


def test_failing_worker_is_not_promoted() -> None:
    assert kinds(plan(snapshot(worker(status="spawning", created=301, vram_mb=0)), GPU)) == ["fail", "delete"]


def test_sixth_failure_in_window_fails_the_slot() -> None:
    config = fleet(max_workers=1)
    for restarts, is_failed in ((4, False), (5, True)):
        seen = snapshot(worker(heartbeat=31), queued=1, slots=(SlotView(0, False, (ago(10),) * restarts),))
        assert bool(of_kind(plan(seen, config).actions, FailSlot)) is is_failed


def test_slot_over_its_restart_limit_fails_without_new_failure() -> None:
    seen = snapshot(slots=(SlotView(3, False, (ago(10),) * 6),))
    assert only(plan(seen, LOCAL), FailSlot).slot == 3


def test_huge_max_workers_does_not_slow_slot_search() -> None:
    # Far more slots than can be listed. Settings allow at most a hundred thousand.
    endless = LOCAL.model_copy(update={"max_workers": 10**11})
    planned = plan(snapshot(worker("w0", 0), worker("w2", 2), queued=5), endless)
    assert [spawn.slot for spawn in of_kind(planned.actions, Spawn)] == [1, 3, 4]


def test_failed_slot_stays_empty() -> None:
    seen = snapshot(queued=5, slots=(SlotView(0, True),))
    assert kinds(plan(seen, fleet(max_workers=1))) == ["alert"]


def test_stale_vram_report_raises_one_alert_only() -> None:
    seen = snapshot(worker(vram_mb=1, vram=121, running=(task(),)))
    planned = plan(seen, GPU)
    assert planned.actions == (
        RaiseAlert("VRAM_STALE", "worker w0 has not reported its GPU memory for over 120 s", "w0"),
    )
    assert plan(apply(planned, seen, GPU), GPU).actions == ()


def test_alert_repeats_hourly_and_is_dropped_when_resolved() -> None:
    seen = snapshot(worker(vram_mb=1, vram=121, running=(task(),)))
    recent, old = [replace(seen.planner_state, alerts={"VRAM_STALE w0": ago(age)}) for age in (3599, 3600)]
    assert plan(replace(seen, planner_state=recent), GPU).actions == ()
    assert alerts(plan(replace(seen, planner_state=old), GPU)) == ["VRAM_STALE"]
    well = snapshot(worker(vram_mb=1, running=(task(),)), state={"alerts": {"VRAM_STALE w0": ago(10)}})
    assert plan(well, GPU).planner_state.alerts == {}


RENTED = ProviderTraits(is_remote=True)
HOURS_6 = 6 * 3600


def long_task_alerts(
    running: RunningView,
    config: FleetConfig = LOCAL,
    traits: ProviderTraits = RENTED,
    durations_s: tuple[float, ...] = (),
) -> list[RaiseAlert]:
    seen = snapshot(worker(created=10**6, running=(running,)), traits=traits)
    planned = plan(replace(seen, queue=replace(seen.queue, durations_s=durations_s)), config)
    assert of_kind(planned.actions, Fail) == []
    return of_kind(planned.actions, RaiseAlert)


def test_long_task_on_a_rented_machine_raises_one_alert() -> None:
    (alert,) = long_task_alerts(task(7, started=HOURS_6 + 1))
    assert (alert.code, alert.worker_id, alert.about) == ("TASK_LONG", "w0", "7")
    assert alert.reason == "task 7 has been running on worker w0 since 2026-03-01 05:59 UTC"
    assert long_task_alerts(task(7, started=HOURS_6)) == []
    seen = snapshot(worker(created=10**6, running=(task(7, started=HOURS_6 + 1),)), traits=RENTED)
    again = apply(plan(seen, LOCAL), seen, LOCAL)
    assert plan(again, LOCAL).actions == ()
    ended = replace(again, workers=(worker(created=10**6, running=(task(8),)),))
    assert plan(ended, LOCAL).planner_state.alerts == {}, "it resolves with its task"


def test_long_task_is_judged_by_recent_durations() -> None:
    # One task of 200 took much longer than the others: it alone does not raise the limit.
    usual = (*[3600.0] * 199, 90_000.0)
    assert long_task_alerts(task(started=36_000), durations_s=usual) == []
    assert [alert.code for alert in long_task_alerts(task(started=36_001), durations_s=usual)] == ["TASK_LONG"]
    assert long_task_alerts(task(started=HOURS_6), durations_s=(5.0,)) == [], "never before six hours"


def test_long_task_with_a_limit_or_on_an_own_machine_raises_no_alert() -> None:
    assert long_task_alerts(task(started=HOURS_6 + 1, timeout_s=10**6)) == []
    assert long_task_alerts(task(started=HOURS_6 + 1), fleet(stuck_timeout_s=10**6)) == []
    assert long_task_alerts(task(started=HOURS_6 + 1), traits=ProviderTraits()) == []


def test_all_workers_crashed_raises_alert() -> None:
    views = [worker(f"w{n}", n) for n in range(3)]
    planned = plan(snapshot(*views, machines=()), LOCAL)
    assert alerts(planned) == ["ALL_CRASHED"]
    assert len(of_kind(planned.actions, Fail)) == 3, "that they are gone is certain: nothing holds this up"


def test_three_cycles_without_machine_list_raise_alert() -> None:
    for since, expected in ((29, []), (30, ["LIST_UNKNOWN"])):
        seen = snapshot(worker(running=(task(),)), machines=None, state={"unlisted_since": ago(since)})
        assert alerts(plan(seen, LOCAL)) == expected


# ------------------------------------------------------------------------------------------------------------ draining


def test_draining_worker_gets_time_for_a_claim_in_progress() -> None:
    assert plan(snapshot(worker(status="terminating", terminating=0.4)), LOCAL).actions == ()
    assert kinds(plan(snapshot(worker(status="terminating", terminating=0.5)), LOCAL)) == ["delete"]


@pytest.mark.parametrize(
    ("seen", "code"),
    [
        pytest.param(
            snapshot(worker(status="terminating", terminating=0, running=(task(),)), machines=()),
            "DRAINED",
            id="machine gone",
        ),
        pytest.param(
            snapshot(
                worker(status="terminating", terminating=0, running=(task(),)), machines=(machine("w0", "exited"),)
            ),
            "DRAINED",
            id="process exited",
        ),
        pytest.param(
            snapshot(worker(status="terminating", terminating=5, heartbeat=31, running=(task(),))),
            "DRAIN_STALE",
            id="silent: a dead worker gets no deadline",
        ),
        pytest.param(
            snapshot(worker(status="terminating", terminating=30, running=(task(),)), machines=None),
            "DRAIN_TIMEOUT",
            id="deadline passed, also without a list",
        ),
    ],
)
def test_drain_end_codes(seen: Snapshot, code: str) -> None:
    assert only(plan(seen, LOCAL), Delete).code == code


def test_ray_node_used_by_others_counts_as_busy() -> None:
    """The node runs Ray tasks that Windlass did not place."""
    ray = fleet(provider="ray-local", engine="ray", idle_timeout_s=0, scale_down_grace_s=0, stop_timeout_s=30)
    used, unused = (NodeView(NodeState.ALIVE, ago(50), ago(1), "n", {"CPU": 2.0}, {"CPU": n}) for n in (1.0, 0.0))
    for node, is_spared in ((used, False), (unused, True)):
        resting = worker(node=node, claimed=60)
        drains = of_kind(plan(snapshot(resting, state={"idle_since": {"w0": ago(50)}}), ray).actions, Drain)
        assert bool(drains) is is_spared
    for node, waited, codes in ((used, 29, []), (used, 30, ["DRAIN_TIMEOUT"]), (unused, 1, ["DRAINED"])):
        leaving = snapshot(worker(status="terminating", terminating=waited, node=node))
        assert [delete.code for delete in of_kind(plan(leaving, ray).actions, Delete)] == codes


def test_tasks_of_lost_dispatcher_are_not_counted_twice() -> None:
    """Its unplaced tasks counted as queued before."""
    ray = fleet(provider="ray-local", engine="ray", max_workers=10, policy="clear-time", heartbeat_timeout_s=30)
    lost = worker("d", None, heartbeat=31, running=(task(1), task(2)))
    planned = plan(snapshot(lost, queued=2), ray)
    assert [fail.worker_id for fail in of_kind(planned.actions, Fail)] == ["d"]
    assert len(of_kind(planned.actions, Spawn)) == 2


def test_terminating_worker_without_machine_waits_for_list() -> None:
    leaving = worker(status="terminating", terminating=5, machine_id=None, created=50, heartbeat=None)
    assert plan(snapshot(leaving, machines=None, traits=LAGGING_LIST), LOCAL).actions == ()
    assert plan(snapshot(leaving, machines=(), traits=LAGGING_LIST), LOCAL).actions == (), (
        "its machine may still appear"
    )
    found = plan(snapshot(leaving, machines=(machine("w0", id_="late"),), traits=LAGGING_LIST), LOCAL)
    assert only(found, Delete).machine_id == "late"
    over = plan(snapshot(replace(leaving, created_at=ago(120)), machines=(), traits=LAGGING_LIST), LOCAL)
    assert only(over, Delete).machine_id is None


# ------------------------------------------------------------------------------------------------------- manual workers


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        pytest.param(snapshot(worker("h", None), idle=9999), [], id="idle for hours"),
        pytest.param(snapshot(worker("h", None, created=9999), queued=3), ["spawn"] * 3, id="never claims"),
        pytest.param(snapshot(worker("h", None, running=(task(started=9999),))), [], id="one task for hours"),
        pytest.param(snapshot(worker("h", None, is_paused=True)), [], id="paused"),
        pytest.param(
            snapshot(worker("h", None, "terminating", terminating=29)), [], id="draining: it deregisters itself"
        ),
        pytest.param(
            snapshot(worker("h", None, "terminating", terminating=29, running=(task(),))),
            [],
            id="draining and busy",
        ),
    ],
)
def test_manual_worker_is_left_alone(seen: Snapshot, expected: list[str]) -> None:
    assert kinds(plan(seen, LOCAL)) == expected


@pytest.mark.parametrize(
    ("seen", "code"),
    [
        pytest.param(snapshot(worker("h", None, heartbeat=31), machines=None), "STALE_HEARTBEAT_IDLE", id="silent"),
        pytest.param(snapshot(worker("h", None, "error"), machines=None), "ERROR", id="in error"),
        pytest.param(
            snapshot(worker("h", None, "terminating", terminating=30, heartbeat=31)),
            "DRAIN_STALE",
            id="silent while draining",
        ),
        pytest.param(
            snapshot(worker("h", None, "terminating", terminating=31, created=31, heartbeat=None)),
            "DRAIN_STALE",
            id="draining without any heartbeat",
        ),
        pytest.param(
            snapshot(worker("h", None, "terminating", terminating=30, heartbeat=61, lease_s=60.0)),
            "DRAIN_STALE",
            id="silent for longer than its own lease",
        ),
    ],
)
def test_dead_manual_worker_row_is_closed_without_deletion(seen: Snapshot, code: str) -> None:
    deletion = only(plan(seen, LOCAL), Delete)
    assert (deletion.worker_id, deletion.machine_id, deletion.code) == ("h", None, code)


def test_silent_manual_worker_counts_for_no_failure_limit() -> None:
    planned = plan(snapshot(worker("h", None, heartbeat=31, running=(task(),))), LOCAL)
    assert kinds(planned) == ["fail", "delete", "spawn"]
    assert planned.planner_state.failure_rate.failed_starts == 0


def test_machine_of_manual_worker_is_not_deleted_while_the_worker_is_live() -> None:
    """Only a worker whose row was lost has the name of a machine. It drains first."""
    assert kinds(plan(snapshot(worker("h", None), machines=(machine("h"),)), LOCAL)) == ["drain"]


# ---------------------------------------------------------------------------------------------------------- whole plans


def test_every_action_has_a_reason() -> None:
    views = (
        worker("a", 0, heartbeat=31, running=(task(1),)),
        worker("b", 1, "error"),
        worker("c", 2, "spawning"),
        worker("d", 3, "terminating", terminating=5),
    )
    planned = plan(snapshot(*views, queued=9, orphaned=("z",)), LOCAL)
    assert all(action.reason and not action.reason.endswith(".") for action in planned.actions)
    assert isinstance(planned.actions[0], Promote)


def test_one_plan_never_spawns_and_drains() -> None:
    views = [worker(f"w{n}", n) for n in range(3)]
    planned = plan(snapshot(*views, requested=2, idle=900), fleet(max_workers=10))
    assert set(kinds(planned)) == {"spawn"}


def test_stable_fleet_gets_no_actions() -> None:
    views = [worker(f"w{n}", n, claimed=50, running=(task(n),)) for n in range(3)]
    assert plan(snapshot(*views), LOCAL).actions == ()


@pytest.mark.parametrize("config", [LOCAL, GPU], ids=["local", "gpu"])
def test_empty_fleet_with_empty_queue_gets_no_actions(config: FleetConfig) -> None:
    planned = plan(snapshot(machines=machines_of(())), config)
    assert planned.actions == ()
    assert planned.decision == "queue empty, no workers"


@pytest.mark.parametrize("running", [(), (task(),)], ids=["idle", "busy"])
@pytest.mark.parametrize("lease_s", [None, 30.0, 600.0])
def test_draining_manual_worker_has_no_deadline(running: tuple[RunningView, ...], lease_s: float | None) -> None:
    """A person started it, for tasks of any length: only silence ends it."""
    leaving = worker("h", None, "terminating", terminating=9000, created=9999, heartbeat=29, lease_s=lease_s)
    assert plan(snapshot(replace(leaving, running=running)), LOCAL).actions == ()


# ------------------------------------------------------------------------------------------------------------- shutdown


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param({"queued": 9}, id="tasks are queued"),
        pytest.param({"is_paused": True}, id="paused"),
        pytest.param({"requested": 2}, id="workers are requested"),
        pytest.param({"state": {"planned_at": None}}, id="under a total hold"),
    ],
)
def test_shutdown_drains_all_spawned_workers_at_once(seen: dict[str, Any]) -> None:
    views = (
        worker("busy", 0, running=(task(),)),
        worker("idle", 1),
        worker("paused", 2, is_paused=True),
        worker("starting", 3, "spawning", heartbeat=None, created=1),
        worker("silent", 4, "terminating", heartbeat=40, terminating=1),
        worker("hand", None),
    )
    config = fleet(min_workers=2, max_workers=8, max_changes_per_cycle=1)
    planned = plan(snapshot(*views, is_shutting_down=True, **seen), config)
    drains = of_kind(planned.actions, Drain)
    assert [drain.worker_id for drain in drains] == ["busy", "idle", "paused", "starting"]
    assert {drain.code for drain in drains} == {"SHUT_DOWN"}
    assert not of_kind(planned.actions, Spawn)
    assert planned.decision == "shutting down: 5 left, drain 4"


# ------------------------------------------------------------------------------------------------- alerts and cadence


def test_refused_machine_choice_raises_alert_hourly() -> None:
    traits = ProviderTraits(refused_choices=(("L40S in SECURE", "not in your plan (403)"),))
    planned = plan(snapshot(traits=traits), GPU)
    (alert,) = of_kind(planned.actions, RaiseAlert)
    assert (alert.code, alert.about) == ("CHOICE_REFUSED", "L40S in SECURE")
    assert alert.reason.endswith("uses its other choices: not in your plan (403)")
    again = plan(snapshot(traits=traits, state={"alerts": {"CHOICE_REFUSED L40S in SECURE": ago(3599)}}), GPU)
    assert of_kind(again.actions, RaiseAlert) == []


@pytest.mark.parametrize(
    ("gaps_s", "due_in_s"),
    [
        pytest.param((10.0, 10.0), 10.0, id="poll interval"),
        pytest.param((300.0, 290.0), 290.0, id="from cron"),
        pytest.param((10.0, 300.0), 10.0, id="after an outage"),
        pytest.param((300.0,), 10.0, id="a single gap"),
    ],
)
def test_next_plan_is_due_after_the_usual_interval(gaps_s: tuple[float, ...], due_in_s: float) -> None:
    seen = snapshot()
    seen = replace(seen, planner_state=with_state(seen.planner_state, planned_at=ago(1), gaps_s=gaps_s))
    assert plan(seen, fleet(poll_interval_s=10.0)).planner_state.cadence.next_plan_in_s == due_in_s
    assert plan(replace(seen, is_shutting_down=True), fleet()).planner_state.cadence.next_plan_in_s is None
