"""Decisions of one plan: promotion, failures, drains, orphans, holds and provider accounts."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from support.snapshots import (
    GPU,
    LOCAL,
    NOW,
    ago,
    apply,
    fleet,
    kinds,
    machine,
    machines_of,
    of_kind,
    snapshot,
    task,
    with_state,
    worker,
)
from windlass.model.action import (
    Action,
    Adopt,
    Delete,
    DeleteOrphan,
    Drain,
    Fail,
    FailSlot,
    Plan,
    Promote,
    RaiseAlert,
    RecordPrice,
    Requeue,
    Spawn,
)
from windlass.model.cost import Bill, Spending, Tariff
from windlass.model.fleet import FleetConfig
from windlass.model.machine import Machine, ProviderTraits
from windlass.model.node import NodeState, NodeView
from windlass.model.snapshot import Hold, RunningView, SlotView, Snapshot
from windlass.model.worker import WorkerStatus
from windlass.policy.plan import plan

CLOUD = ProviderTraits(absence_grace_s=60, creation_lateness_s=120, orphan_grace_s=60)


def only(planned: Plan, kind: type[Action]) -> Any:
    (action,) = of_kind(planned.actions, kind)
    return action


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
    assert plan(snapshot(leaving, machines=None, traits=CLOUD), LOCAL).actions == ()
    assert plan(snapshot(leaving, machines=(), traits=CLOUD), LOCAL).actions == (), "its machine may still appear"
    found = plan(snapshot(leaving, machines=(machine("w0", id_="late"),), traits=CLOUD), LOCAL)
    assert only(found, Delete).machine_id == "late"
    over = plan(snapshot(replace(leaving, created_at=ago(120)), machines=(), traits=CLOUD), LOCAL)
    assert only(over, Delete).machine_id is None


# ------------------------------------------------------------------------------------------------------ reconciliation


def test_unanswered_create_is_adopted_and_duplicates_deleted() -> None:
    unanswered = worker(status="spawning", heartbeat=None, machine_id=None, created=20, creation="ambiguous")
    listed = (machine("w0", id_="second", created=5), machine("w0", id_="first", created=9))
    planned = plan(snapshot(unanswered, machines=listed, queued=1, traits=CLOUD), LOCAL)
    assert planned.actions == (
        Adopt("w0", "first", "found for an unanswered create call"),
        DeleteOrphan("second", "w0", "duplicate of first"),
    )


def test_missing_price_is_taken_from_machine_list() -> None:
    listed = machine("w0", price_micros_per_hour=6_400, currency="EUR")
    planned = plan(snapshot(worker(), machines=(listed,), traits=CLOUD), LOCAL)
    assert planned.actions == (RecordPrice("w0", "m-w0", "price of its machine is known now"),)
    known = replace(worker(), bill=Bill(Tariff(6_400, "EUR"), ago(100)))
    assert plan(snapshot(known, machines=(listed,), traits=CLOUD), LOCAL).actions == ()


def test_unanswered_create_keeps_its_slot() -> None:
    unanswered = worker(status="spawning", heartbeat=None, machine_id=None, created=119, creation="ambiguous")
    config = fleet(max_workers=1, spawn_timeout_s=600)
    for machines in (None, ()):
        assert plan(snapshot(unanswered, machines=machines, queued=9, traits=CLOUD), config).actions == ()


def test_unanswered_create_without_machine_is_no_restart() -> None:
    unanswered = worker(status="spawning", heartbeat=None, machine_id=None, created=120, creation="ambiguous")
    planned = plan(snapshot(unanswered, queued=1, machines=(), traits=CLOUD), fleet(spawn_timeout_s=600))
    assert kinds(planned) == ["delete"]
    assert only(planned, Delete).code == "NO_MACHINE_ID"


def test_failed_worker_with_unknown_machine_waits_for_list() -> None:
    broken = worker(status="error", heartbeat=None, machine_id=None, created=500)
    assert plan(snapshot(broken, machines=None, traits=CLOUD), LOCAL).actions == ()
    assert only(plan(snapshot(broken, machines=(), traits=CLOUD), LOCAL), Delete).machine_id is None
    found = plan(snapshot(broken, machines=(machine("w0", id_="there"),), traits=CLOUD), LOCAL)
    assert only(found, Delete).machine_id == "there"
    assert only(found, Adopt).machine_id == "there", "it is billed until it is deleted"


@pytest.mark.parametrize(("asked_s", "is_alerted"), [(299, False), (300, True)])
def test_machine_that_is_not_deleted_raises_alert(asked_s: float, is_alerted: bool) -> None:
    broken = worker(status="error", code="X", reason="broken")
    first = plan(snapshot(broken, traits=CLOUD), LOCAL)
    assert first.planner_state.machines.deleting_since == {"m-w0": NOW}
    again = plan(snapshot(broken, traits=CLOUD, state={"deleting_since": {"m-w0": ago(asked_s)}}), LOCAL)
    assert [alert.code for alert in of_kind(again.actions, RaiseAlert)] == ["NOT_DELETED"] * is_alerted
    # A machine that lost its tags is in no list and is still billed.
    unlisted = snapshot(broken, machines=(), traits=CLOUD, state={"deleting_since": {"m-w0": ago(asked_s)}})
    assert [alert.code for alert in of_kind(plan(unlisted, LOCAL).actions, RaiseAlert)] == ["NOT_DELETED"] * is_alerted
    gone = plan(snapshot(machines=(), traits=CLOUD, state={"deleting_since": {"m-w0": ago(900)}}), LOCAL)
    assert gone.planner_state.machines.deleting_since == {}


def test_orphaned_machine_is_deleted_after_grace() -> None:
    orphan = machine("unknown")
    first = plan(snapshot(machines=(orphan,), traits=CLOUD), LOCAL)
    assert first.actions == ()
    assert first.planner_state.orphans.orphan_since == {"m-unknown": NOW}
    for since, expected in ((59, []), (60, ["delete_orphan"])):
        seen = snapshot(machines=(orphan,), traits=CLOUD, state={"orphan_since": {"m-unknown": ago(since)}})
        assert kinds(plan(seen, LOCAL)) == expected


def test_orphaned_machines_count_towards_max_workers() -> None:
    config = fleet(max_workers=2)
    for machines in ((machine("unknown"),), None):
        seen = snapshot(queued=9, machines=machines, traits=CLOUD, state={"orphan_since": {"m-unknown": ago(5)}})
        assert kinds(plan(seen, config)) == ["spawn"]
    ended = snapshot(queued=9, machines=(machine("unknown", "exited"),), traits=CLOUD)
    assert kinds(plan(ended, config)) == ["spawn", "spawn"], "one that has exited is not billed"


def test_missing_machine_is_replaced_after_absence_grace() -> None:
    view = worker(heartbeat=20, running=(task(),))
    for since, expected in ((None, []), (59, []), (60, ["fail", "delete"])):
        state = {} if since is None else {"missing_since": {"w0": ago(since)}}
        assert kinds(plan(snapshot(view, machines=(), traits=CLOUD, state=state), LOCAL)) == expected


@pytest.mark.parametrize(("known_s", "is_missed"), [(62, True), (61, True), (60, False), (5, False)])
def test_lagging_list_cannot_miss_new_machines(known_s: float, is_missed: bool) -> None:
    """Otherwise a machine that appears late in lists would be missing before it ever appeared."""
    seen = snapshot(worker(machine_at=known_s), machines=(), listed_at=ago(1), traits=CLOUD)
    assert ("w0" in plan(seen, LOCAL).planner_state.machines.missing_since) is is_missed


def test_no_list_means_no_machine_is_missing() -> None:
    views = [worker("w0", 0, running=(task(),)), worker("w1", 1, "spawning", created=5, heartbeat=None)]
    seen = snapshot(*views, machines=None, state={"missing_since": {"w0": ago(900), "w1": ago(900)}})
    assert plan(seen, LOCAL).actions == ()


# ---------------------------------------------------------------------------------------- mass silence and shrunk lists


def silent(count: int, of: int, **rest: Any) -> Snapshot:
    views = [worker(f"w{n}", n, heartbeat=31 if n < count else 1, running=(task(n),)) for n in range(of)]
    return snapshot(*views, **rest)


@pytest.mark.parametrize(
    ("count", "of", "is_held"),
    [
        pytest.param(1, 1, False, id="one of one is an ordinary failure"),
        pytest.param(2, 2, False, id="two of two are ordinary failures"),
        pytest.param(3, 6, False, id="half are too few"),
        pytest.param(3, 5, True, id="three, and more than half"),
        pytest.param(4, 4, True, id="all of them"),
    ],
)
def test_mass_silence_holds_all_actions(count: int, of: int, is_held: bool) -> None:
    planned = plan(silent(count, of, queued=3), fleet(max_workers=20))
    if is_held:
        assert kinds(planned) == ["alert"]
        assert planned.hold is not None
        assert (planned.hold.code, planned.hold.is_total) == ("TOO_MANY_DEAD", True)
        assert planned.decision == f"hold: {count} of {of} workers fell silent at once"
    else:
        assert len(of_kind(planned.actions, Fail)) == count


def test_mass_silence_hold_ends() -> None:
    config = fleet(max_workers=20)
    beating_again = plan(silent(0, 4, state={"mass_silence_since": ago(10)}), config)
    assert (beating_again.actions, beating_again.hold, beating_again.planner_state.health.mass_silence_since) == (
        (),
        None,
        None,
    )
    for since, failed in ((29, 0), (30, 4)):
        planned = plan(silent(4, 4, state={"mass_silence_since": ago(since)}), config)
        assert len(of_kind(planned.actions, Fail)) == failed


def test_after_outage_silent_workers_get_two_heartbeats() -> None:
    """During a database outage no heartbeat arrives. The first cycle after it must not fail workers for that."""
    first = plan(silent(1, 1, state={"planned_at": ago(60)}), LOCAL)
    assert [alert.code for alert in first.actions] == ["WAS_AWAY"], "an alert and no other action"
    assert first.hold is not None
    assert first.hold.code == "WAS_AWAY"
    back = plan(silent(0, 1, state={"planned_at": ago(1), "mass_silence_since": ago(3)}), LOCAL)
    assert (back.actions, back.hold) == ((), None)
    for since, failed in ((9, 0), (10, 1)):
        planned = plan(silent(1, 1, state={"planned_at": ago(1), "mass_silence_since": ago(since)}), LOCAL)
        assert len(of_kind(planned.actions, Fail)) == failed


def test_slow_cron_cycles_still_detect_dead_workers() -> None:
    """`windlass cycle` from cron, once a minute."""
    first = plan(silent(1, 1, state={"planned_at": ago(60)}), LOCAL)
    second = plan(silent(1, 1, state={"planned_at": ago(60), "mass_silence_since": ago(60)}), LOCAL)
    assert (kinds(first), kinds(second)) == (["alert"], ["fail", "delete"])


def test_total_hold_overrides_spawn_hold() -> None:
    """A network failure: the list shrinks and workers fall silent in the same cycle."""
    views = [worker(f"w{n}", n, heartbeat=31) for n in range(4)]
    planned = plan(snapshot(*views, machines=(), traits=CLOUD, queued=5), LOCAL)
    assert planned.hold is not None
    assert planned.hold.code == "TOO_MANY_DEAD"
    assert [alert.code for alert in planned.actions] == ["LIST_SHRANK", "TOO_MANY_DEAD"]


def test_shrunk_list_holds_spawning_for_triple_grace() -> None:
    views = [worker(f"w{n}", n, heartbeat=20, running=(task(n),)) for n in range(4)]
    config = fleet(max_workers=20)
    for since, failed in ((60, 0), (179, 0), (180, 4)):
        state = {"missing_since": {f"w{n}": ago(since) for n in range(4)}}
        planned = plan(snapshot(*views, machines=(), traits=CLOUD, queued=5, state=state), config)
        assert len(of_kind(planned.actions, Fail)) == failed
        if not failed:
            assert [alert.code for alert in planned.actions] == ["LIST_SHRANK"]
            assert planned.hold is not None
            assert planned.hold.code == "LIST_SHRANK"
            assert "would spawn" in planned.decision


def test_suspect_list_does_not_settle_unanswered_create() -> None:
    views = [worker(f"w{n}", n, heartbeat=20, running=(task(n),)) for n in range(4)]
    unanswered = worker("w9", 9, "spawning", heartbeat=None, machine_id=None, created=500, creation="ambiguous")
    seen = snapshot(*views, unanswered, machines=(), traits=CLOUD)
    assert kinds(plan(seen, fleet(max_workers=20, spawn_timeout_s=600))) == ["alert"]


def test_terminating_workers_do_not_make_a_list_suspect() -> None:
    views = [worker(f"w{n}", n, "terminating", terminating=5, heartbeat=20) for n in range(4)]
    planned = plan(snapshot(*views, machines=(), traits=CLOUD), LOCAL)
    assert planned.hold is None


def test_hold_keeps_its_start_time() -> None:
    first = plan(silent(4, 4), LOCAL)
    again = plan(replace(silent(4, 4), now=NOW, planner_state=with_state(first.planner_state, planned_at=NOW)), LOCAL)
    assert first.hold is not None
    assert again.hold is not None
    assert again.hold.since == first.hold.since == NOW


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


def test_machine_named_like_manual_worker_is_left_alone() -> None:
    assert plan(snapshot(worker("h", None), machines=(machine("h"),)), LOCAL).actions == ()


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


# -------------------------------------------------------------------------------------------------------------- orphans


def orphans(count: int) -> tuple[Machine, ...]:
    return tuple(machine(f"unknown-{n}") for n in range(count))


@pytest.mark.parametrize(
    ("count", "own", "ended"),
    [
        pytest.param(2, 0, 2, id="two orphans"),
        pytest.param(3, 3, 3, id="half are orphans"),
        pytest.param(3, 2, 0, id="three orphans, and more than half"),
        pytest.param(9, 0, 0, id="all of them"),
    ],
)
def test_orphans_are_deleted_unless_most_machines_are_orphaned(count: int, own: int, ended: int) -> None:
    views = [worker(f"w{n}", n, running=(task(n),)) for n in range(own)]
    planned = plan(snapshot(*views, machines=(*machines_of(views), *orphans(count))), fleet(max_workers=20))
    assert len(of_kind(planned.actions, DeleteOrphan)) == ended
    if not ended:
        assert planned.hold is not None
        assert (planned.hold.code, planned.hold.is_total) == ("TOO_MANY_ORPHANS", False)
        assert "they are deleted at 13:00:00 UTC" in only(planned, RaiseAlert).reason


def test_exited_orphans_cause_no_hold() -> None:
    """Exited processes stay listed for a while after their rows are closed."""
    exited = tuple(machine(f"unknown-{n}", "exited") for n in range(5))
    planned = plan(snapshot(machines=exited), LOCAL)
    assert (planned.hold, len(of_kind(planned.actions, DeleteOrphan))) == (None, 5)


@pytest.mark.parametrize(
    ("held", "reset", "ended"),
    [
        pytest.param(3599, None, 0, id="within the hour"),
        pytest.param(3600, None, 4, id="after the hour"),
        pytest.param(100, 99, 4, id="restarted by a person"),
        pytest.param(100, 101, 0, id="restarted before the hold"),
    ],
)
def test_held_orphans_are_deleted_after_an_hour_or_restart(held: float, reset: float | None, ended: int) -> None:
    state = {"orphans_held_since": ago(held), "alerts": {"TOO_MANY_ORPHANS": NOW}}
    restarted_at = None if reset is None else ago(reset)
    # The restart of one slot does not release orphans.
    seen = snapshot(machines=orphans(4), state=state, restarted_at=restarted_at, reset_at=ago(0))
    planned = plan(seen, LOCAL)
    assert len(planned.actions) == ended


def test_orphan_deletions_per_cycle_are_limited() -> None:
    busy = [worker(f"w{n}", n, running=(task(n),)) for n in range(8)]
    config = fleet(max_workers=20, max_changes_per_cycle=3)
    seen = snapshot(*busy, machines=(*machines_of(busy), *orphans(7)))
    left = []
    for _ in range(4):
        planned = plan(seen, config)
        left.append((len(planned.actions), planned.is_cut_short))
        seen = apply(planned, seen, config)
    assert left == [(3, True), (3, True), (1, False), (0, False)]


# ---------------------------------------------------------------------------------------------------------- other hosts


def test_processes_on_other_hosts_are_never_missing() -> None:
    here = ProviderTraits(host="here")
    views = (worker("a", 0, machine_id="there/7-1"), worker("b", 1, machine_id="here/8-1", created=200))
    planned = plan(snapshot(*views, machines=(), traits=here), LOCAL)
    assert [(fail.worker_id, fail.code) for fail in of_kind(planned.actions, Fail)] == [("b", "MACHINE_GONE")]
    silent_there = replace(views[0], last_heartbeat=ago(31))
    planned = plan(snapshot(silent_there, machines=(), traits=here), LOCAL)
    assert only(planned, Delete).machine_id == "there/7-1"


# ------------------------------------------------------------------------------------------ providers and accounts


@pytest.mark.parametrize(
    ("before", "now", "is_held"),
    [("runpod", "hetzner", True), ("hetzner", "local", True), ("local", "ray-local", False), ("local", "local", False)],
)
def test_workers_of_former_provider_hold_all_actions(before: str, now: str, is_held: bool) -> None:
    views = (
        worker("a", 0, "error", provider=before),
        worker("b", 1, "terminating", terminating=50, provider=before),
        worker("c", 2, created=200, heartbeat=700, provider=before),
    )
    engine = {"engine": "ray"} if now == "ray-local" else {}
    planned = plan(snapshot(*views, machines=(), queued=9), fleet(provider=now, handler="a:b", **engine))
    if not is_held:
        assert planned.hold is None
        assert of_kind(planned.actions, Delete)
        return
    assert planned.hold is not None
    assert (planned.hold.code, planned.hold.is_total) == ("OTHER_PROVIDER", True)
    assert f"provider is {now}, but 3 workers run on machines of {before}" in only(planned, RaiseAlert).reason


def test_live_workers_without_listed_machines_hold_all_actions() -> None:
    lagging = ProviderTraits(absence_grace_s=60, is_remote=True)
    views = (worker("a", 0, created=900), worker("b", 1, "terminating", created=900, terminating=50, heartbeat=40))
    state = {"missing_since": {"a": ago(60), "b": ago(60)}}
    planned = plan(snapshot(*views, machines=(), traits=lagging, state=state), GPU)
    assert planned.hold is not None
    assert (planned.hold.code, planned.hold.is_total) == ("OTHER_ACCOUNT", True)
    assert (
        "local lists none of the fleet's machines (m-a), but 1 of its workers send heartbeats"
        in only(planned, RaiseAlert).reason
    )
    # A listed machine proves the account.
    again = plan(snapshot(*views, machines=machines_of(views[:1]), traits=lagging, state=state), GPU)
    assert again.hold is None
    assert [delete.worker_id for delete in of_kind(again.actions, Delete)] == ["b"]
    # Within the absence grace there is no hold.
    state = {"missing_since": {"a": ago(59), "b": ago(59)}}
    assert plan(snapshot(*views, machines=(), traits=lagging, state=state), GPU).hold is None


@pytest.mark.parametrize("code", ["LIST_SHRANK", "TOO_MANY_ORPHANS", "OTHER_ACCOUNT"])
def test_list_holds_persist_while_no_list_is_available(code: str) -> None:
    """A failing provider may return short lists and no lists in turn."""
    cloud = ProviderTraits(absence_grace_s=60, is_remote=True)
    busy = [worker(f"w{n}", n, created=900, running=(task(n),)) for n in range(4)]
    idle = worker("i", 0, "terminating", created=900, terminating=50)
    listed = {
        "LIST_SHRANK": snapshot(*busy, machines=(), traits=cloud, queued=9),
        "TOO_MANY_ORPHANS": snapshot(machines=orphans(4), queued=9),
        "OTHER_ACCOUNT": snapshot(idle, machines=(), traits=cloud, state={"missing_since": {"i": ago(60)}}),
    }[code]
    config = fleet(max_workers=20)
    first = plan(listed, config)
    assert first.hold is not None
    assert first.hold.code == code
    unlisted = replace(listed, machines=None, planner_state=first.planner_state)
    for _ in range(3):
        planned = plan(unlisted, config)
        assert planned.hold is not None
        assert (planned.hold.code, planned.hold.is_total) == (code, first.hold.is_total)
        assert kinds(planned) == []
        unlisted = replace(unlisted, planner_state=planned.planner_state)
    assert kinds(plan(replace(listed, planner_state=unlisted.planner_state), config)) == []  # alerted already


def test_orphan_hold_ends_without_a_list() -> None:
    state = {"orphans_held_since": ago(3600)}
    assert plan(snapshot(machines=None, state=state), LOCAL).hold is None


def test_one_missing_machine_is_no_account_change_without_list() -> None:
    cloud = ProviderTraits(absence_grace_s=60, is_remote=True)
    views = (worker("a", 0, created=900), worker("b", 1, created=900))
    state = {"missing_since": {"a": ago(90)}}
    assert plan(snapshot(*views, machines=None, traits=cloud, state=state), GPU).hold is None


def test_changed_key_holds_until_it_lists_a_machine() -> None:
    cloud = ProviderTraits(absence_grace_s=60, is_remote=True, key_hash="new")
    booting = worker("a", 0, "spawning", created=5, heartbeat=None)
    state = {"key_hash": "old"}
    seen = snapshot(booting, machines=(), traits=cloud, queued=9, state=state)
    planned = plan(seen, fleet(max_workers=9))
    assert planned.hold is not None
    assert (planned.hold.code, planned.hold.is_total) == ("OTHER_ACCOUNT", True)
    assert "changed, and the new one lists none of the fleet's machines (m-a)" in only(planned, RaiseAlert).reason
    assert (kinds(planned), planned.planner_state.account.key_hash) == (["alert"], "old")
    # Without a list the account is unknown: no alert yet.
    unlisted = plan(replace(seen, machines=None), fleet(max_workers=9))
    assert unlisted.hold is not None
    assert (unlisted.hold.code, unlisted.hold.is_total, kinds(unlisted)) == ("KEY_CHANGED", True, [])
    # An unanswered create call may have created a machine.
    unanswered = worker("a", 0, "spawning", created=5, heartbeat=None, machine_id=None)
    assert plan(replace(seen, workers=(unanswered,)), fleet(max_workers=9)).planner_state.account.key_hash == "old"
    # The key is accepted if it lists a machine, or if no machine can exist.
    refused = worker("a", 0, "spawning", created=5, heartbeat=None, machine_id=None, creation="refused")
    for known in (
        replace(seen, machines=machines_of((booting,))),
        replace(seen, workers=()),
        replace(seen, workers=(refused,)),
    ):
        taken_over = plan(known, fleet(max_workers=9))
        assert (taken_over.hold, taken_over.planner_state.account.key_hash) == (None, "new")
        assert of_kind(taken_over.actions, Spawn)


def test_one_missing_machine_is_no_account_change() -> None:
    cloud = ProviderTraits(absence_grace_s=60, is_remote=True, key_hash="same")
    unlisted = worker("a", 0, created=900, heartbeat=1)
    state: dict[str, Any] = {"key_hash": "same", "missing_since": {"a": ago(90)}}
    seen = snapshot(unlisted, machines=(), traits=cloud, state=state | {"own_listed_at": ago(80)})
    assert plan(seen, fleet()).hold is None
    # Machines that are missing since the last list of any machine do count.
    seen = snapshot(unlisted, machines=(), traits=cloud, state=state | {"own_listed_at": ago(100)})
    hold = plan(seen, fleet()).hold
    assert hold is not None
    assert hold.code == "OTHER_ACCOUNT"
    # A list with a machine of the fleet proves the key.
    both = snapshot(unlisted, worker("b", 1), machines=machines_of((worker("b", 1),)), traits=cloud, state=state)
    assert plan(both, fleet()).planner_state.account.own_listed_at == NOW


@pytest.mark.parametrize("is_key_new", [True, False], ids=["key changed", "live workers unlisted"])
def test_fleet_restart_abandons_machines_of_other_account(is_key_new: bool) -> None:
    cloud = ProviderTraits(absence_grace_s=60, is_remote=True, key_hash="new")
    leaving = [worker(f"w{n}", n, "terminating", created=900, terminating=5, heartbeat=1) for n in range(5)]
    state = {
        "key_hash": "old" if is_key_new else "new",
        "missing_since": {view.id: ago(9000) for view in leaving},
        "hold": Hold("OTHER_ACCOUNT", "they are not listed", ago(9000), is_total=True),
    }
    seen = snapshot(*leaving, machines=(), traits=cloud, state=state, queued=9)
    held = plan(seen, fleet(max_workers=9))
    assert held.hold is not None
    assert "lists none of the fleet's machines (m-w0, m-w1, m-w2 and 2 more)" in held.hold.reason
    assert held.planner_state.account.key_hash == state["key_hash"]
    # No abandonment: restarted before the hold, only a slot, not all workers yet, or without a list.
    staying = (replace(leaving[0], status=WorkerStatus.ACTIVE, terminating_at=None), *leaving[1:])
    for other in (
        replace(seen, restarted_at=ago(9001)),
        replace(seen, reset_at=ago(5), restarted_at=ago(9001)),
        replace(seen, restarted_at=ago(5), workers=staying),
        replace(seen, restarted_at=ago(5), machines=None),
    ):
        still = plan(other, fleet(max_workers=9))
        assert still.hold is not None
        assert (still.hold.code, of_kind(still.actions, Delete)) == ("OTHER_ACCOUNT", [])
    abandoned = plan(replace(seen, restarted_at=ago(5)), fleet(max_workers=9))
    assert (abandoned.hold, abandoned.planner_state.account.key_hash) == (None, "new")
    assert len(of_kind(abandoned.actions, Delete)) == 5
    left = [alert for alert in of_kind(abandoned.actions, RaiseAlert) if alert.code == "ABANDONED"]
    assert [alert.worker_id for alert in left] == [view.id for view in leaving]
    assert left[0].reason == (
        "m-w0 was abandoned by hand: the key for local does not list it, and its former account may still be charged"
    )
    # No second hold for workers that take time to terminate.
    state_then = abandoned.planner_state
    for after_s in (10, 600):
        now = NOW + timedelta(seconds=after_s)
        live = tuple(replace(view, last_heartbeat=now, running=(task(n),)) for n, view in enumerate(leaving))
        later = replace(seen, now=now, planner_state=state_then, restarted_at=ago(5), workers=live)
        planned = plan(later, fleet(max_workers=9, stop_timeout_s=9999))
        assert planned.hold is None
        state_then = planned.planner_state


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
