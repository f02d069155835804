"""One cycle's decisions, stage by stage: promotion, health, clean-up, drain, reconciliation, and the brakes on them."""

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


def test_tasks_of_a_failed_worker_are_spawned_for_in_the_same_plan() -> None:
    """scale comes after the failures and deletions: their tasks are queued again and their slots are free."""
    planned = plan(snapshot(worker(heartbeat=999, running=(task(),))), LOCAL)
    assert kinds(planned) == ["fail", "delete", "spawn"]


def test_machine_of_a_draining_worker_is_not_prepared() -> None:
    """prepare_machines comes after scale, which may drain the worker."""
    traits = ProviderTraits(has_prepare_step=True)
    booting = worker(status="spawning", heartbeat=None, created=5)
    assert kinds(plan(snapshot(booting, traits=traits), LOCAL)) == ["prepare"]
    assert kinds(plan(snapshot(booting, traits=traits, is_shutting_down=True), LOCAL)) == ["drain"]


# ---------------------------------------------------------------------------------- 000 and 002: the state transitions


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        pytest.param(
            snapshot(worker(status="spawning", vram_mb=1), queued=1), ["promote"], id="spawning -> active: heard of"
        ),
        pytest.param(
            snapshot(worker(status="spawning", heartbeat=None), queued=1), [], id="spawning: not heard of yet"
        ),
        pytest.param(
            snapshot(worker(status="spawning", heartbeat=None, created=601)),
            ["fail", "delete"],
            id="spawning -> error: time-out; cleaned up in the same cycle",
        ),
        pytest.param(
            snapshot(worker(heartbeat=601)), ["fail", "delete"], id="active -> error: health check failure; cleaned up"
        ),
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
            id="terminating: may finish until its deadline",
        ),
        pytest.param(
            snapshot(worker(status="terminating", terminating=600, running=(task(),))),
            ["delete", "spawn"],
            id="terminating -> terminated: grace period expired; its task needs somebody",
        ),
        pytest.param(snapshot(worker(status="error", heartbeat=None)), ["delete"], id="error -> terminated: clean-up"),
    ],
)
def test_transitions(seen: Snapshot, expected: list[str]) -> None:
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
        pytest.param(snapshot(worker(), machines=()), ["fail", "delete"], id="healthy -> crashed: its process is gone"),
        pytest.param(
            snapshot(worker(status="terminating", terminating=29, running=(task(),))), [], id="stopping: 30 s to finish"
        ),
        pytest.param(
            snapshot(worker(status="terminating", terminating=30, running=(task(),))),
            ["delete", "spawn"],
            id="stopping for 30 s: ended",
        ),
        pytest.param(
            snapshot(worker(heartbeat=31), queued=1, slots=(SlotView(0, False, (ago(60),) * 3),)),
            ["fail", "delete", "spawn", "alert"],
            id="crashed -> starting: restarted; four crashes in five minutes are told",
        ),
        pytest.param(
            snapshot(worker(heartbeat=31), queued=1, slots=(SlotView(0, False, (ago(60),) * 5),), launches=()),
            ["fail", "fail_slot", "delete", "spawn", "alert"],
            id="crashed -> failed: five restarts in five minutes; another slot takes over",
        ),
        pytest.param(
            snapshot(slots=(SlotView(0, True),), state={"alerts": {"SLOT_FAILED 0": ago(60)}}),
            [],
            id="failed: permanent until a person intervenes",
        ),
    ],
)
def test_transitions_of_a_process(seen: Snapshot, expected: list[str]) -> None:
    assert kinds(plan(seen, LOCAL)) == expected


# -------------------------------------------------------------------------------------------------- health and requeue


def test_a_broken_worker_fails_with_its_code_and_its_machine_is_deleted() -> None:
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


def test_tasks_of_workers_that_are_no_longer_live_are_requeued_and_somebody_is_hired_for_them() -> None:
    planned = plan(snapshot(orphaned=("long-gone",)), LOCAL)
    assert kinds(planned) == ["requeue", "spawn"]
    assert only(planned, Requeue).worker_id == "long-gone"


def test_a_worker_that_is_heard_and_broken_at_once_is_not_promoted() -> None:
    assert kinds(plan(snapshot(worker(status="spawning", created=301, vram_mb=0)), GPU)) == ["fail", "delete"]


def test_five_restarts_are_granted_and_the_sixth_break_fails_the_slot() -> None:
    config = fleet(max_workers=1)
    for restarts, is_failed in ((4, False), (5, True)):
        seen = snapshot(worker(heartbeat=31), queued=1, slots=(SlotView(0, False, (ago(10),) * restarts),))
        assert bool(of_kind(plan(seen, config).actions, FailSlot)) is is_failed


def test_a_slot_that_broke_too_often_is_failed_even_if_nobody_saw_the_last_time() -> None:
    seen = snapshot(slots=(SlotView(3, False, (ago(10),) * 6),))
    assert only(plan(seen, LOCAL), FailSlot).slot == 3


def test_slots_are_not_listed_to_find_the_few_that_are_wanted() -> None:
    # As many as nobody can list; settings themselves go no further than a hundred thousand.
    endless = LOCAL.model_copy(update={"max_workers": 10**11})
    planned = plan(snapshot(worker("w0", 0), worker("w2", 2), queued=5), endless)
    assert [spawn.slot for spawn in of_kind(planned.actions, Spawn)] == [1, 3, 4]


def test_a_failed_slot_stays_empty_until_a_person_says_so() -> None:
    seen = snapshot(queued=5, slots=(SlotView(0, True),))
    assert kinds(plan(seen, fleet(max_workers=1))) == ["alert"]


def test_vram_gone_quiet_is_told_once_and_fails_nobody() -> None:
    seen = snapshot(worker(vram_mb=1, vram=121, running=(task(),)))
    planned = plan(seen, GPU)
    assert planned.actions == (
        RaiseAlert("VRAM_STALE", "worker w0 has not reported its GPU memory for over 120 s", "w0"),
    )
    assert plan(apply(planned, seen, GPU), GPU).actions == ()


def test_what_lasts_is_told_again_every_hour_and_what_is_over_is_forgotten() -> None:
    seen = snapshot(worker(vram_mb=1, vram=121, running=(task(),)))
    recent, old = [replace(seen.planner_state, alerts={"VRAM_STALE w0": ago(age)}) for age in (3599, 3600)]
    assert plan(replace(seen, planner_state=recent), GPU).actions == ()
    assert alerts(plan(replace(seen, planner_state=old), GPU)) == ["VRAM_STALE"]
    well = snapshot(worker(vram_mb=1, running=(task(),)), state={"alerts": {"VRAM_STALE w0": ago(10)}})
    assert plan(well, GPU).planner_state.alerts == {}


def test_when_every_process_crashed_at_once_a_person_is_told() -> None:
    views = [worker(f"w{n}", n) for n in range(3)]
    planned = plan(snapshot(*views, machines=()), LOCAL)
    assert alerts(planned) == ["ALL_CRASHED"]
    assert len(of_kind(planned.actions, Fail)) == 3, "that they are gone is certain: nothing holds this up"


def test_a_provider_that_does_not_list_for_three_cycles_is_told_of() -> None:
    for since, expected in ((29, []), (30, ["LIST_UNKNOWN"])):
        seen = snapshot(worker(running=(task(),)), machines=None, state={"unlisted_since": ago(since)})
        assert alerts(plan(seen, LOCAL)) == expected


# ------------------------------------------------------------------------------------------------------------ draining


def test_a_worker_just_told_to_leave_is_not_ended_before_a_claim_under_way_would_show() -> None:
    assert plan(snapshot(worker(status="terminating", terminating=0.4)), LOCAL).actions == ()
    assert kinds(plan(snapshot(worker(status="terminating", terminating=0.5)), LOCAL)) == ["delete"]


@pytest.mark.parametrize(
    ("seen", "code"),
    [
        pytest.param(
            snapshot(worker(status="terminating", terminating=0, running=(task(),)), machines=()),
            "DRAINED",
            id="its machine is gone",
        ),
        pytest.param(
            snapshot(
                worker(status="terminating", terminating=0, running=(task(),)), machines=(machine("w0", "exited"),)
            ),
            "DRAINED",
            id="its process has ended",
        ),
        pytest.param(
            snapshot(worker(status="terminating", terminating=5, heartbeat=31, running=(task(),))),
            "DRAIN_STALE",
            id="it fell silent over its last task: nobody waits for the deadline of a dead worker",
        ),
        pytest.param(
            snapshot(worker(status="terminating", terminating=30, running=(task(),)), machines=None),
            "DRAIN_TIMEOUT",
            id="its time is up, and no list is needed to end a machine whose id is known",
        ),
    ],
)
def test_what_ends_a_worker_that_is_draining(seen: Snapshot, code: str) -> None:
    assert only(plan(seen, LOCAL), Delete).code == code


def test_a_node_that_others_still_use_is_neither_spared_nor_ended_before_its_time_is_up() -> None:
    """It runs tasks and actors of a handler elsewhere: no task of the queue is its own."""
    ray = fleet(provider="ray-local", engine="ray", idle_timeout_s=0, scale_down_grace_s=0, stop_timeout_s=30)
    used, unused = (NodeView(NodeState.ALIVE, ago(50), ago(1), "n", {"CPU": 2.0}, {"CPU": n}) for n in (1.0, 0.0))
    for node, is_spared in ((used, False), (unused, True)):
        resting = worker(node=node, claimed=60)
        drains = of_kind(plan(snapshot(resting, state={"idle_since": {"w0": ago(50)}}), ray).actions, Drain)
        assert bool(drains) is is_spared
    for node, waited, codes in ((used, 29, []), (used, 30, ["DRAIN_TIMEOUT"]), (unused, 1, ["DRAINED"])):
        leaving = snapshot(worker(status="terminating", terminating=waited, node=node))
        assert [delete.code for delete in of_kind(plan(leaving, ray).actions, Delete)] == codes


def test_what_a_lost_dispatcher_held_is_not_counted_twice() -> None:
    """It waited all along: whoever is hired for it was wanted before."""
    ray = fleet(provider="ray-local", engine="ray", max_workers=10, policy="clear-time", heartbeat_timeout_s=30)
    lost = worker("d", None, heartbeat=31, running=(task(1), task(2)))
    planned = plan(snapshot(lost, queued=2), ray)
    assert [fail.worker_id for fail in of_kind(planned.actions, Fail)] == ["d"]
    assert len(of_kind(planned.actions, Spawn)) == 2


def test_a_terminating_worker_without_a_machine_id_is_ended_when_a_list_settles_it() -> None:
    leaving = worker(status="terminating", terminating=5, machine_id=None, created=50, heartbeat=None)
    assert plan(snapshot(leaving, machines=None, traits=CLOUD), LOCAL).actions == ()
    assert plan(snapshot(leaving, machines=(), traits=CLOUD), LOCAL).actions == (), "its machine may still appear"
    found = plan(snapshot(leaving, machines=(machine("w0", id_="late"),), traits=CLOUD), LOCAL)
    assert only(found, Delete).machine_id == "late"
    over = plan(snapshot(replace(leaving, created_at=ago(120)), machines=(), traits=CLOUD), LOCAL)
    assert only(over, Delete).machine_id is None


# ------------------------------------------------------------------------------------------------------ reconciliation


def test_an_unanswered_creation_is_adopted_when_its_machine_is_found_and_doubles_are_deleted() -> None:
    unanswered = worker(status="spawning", heartbeat=None, machine_id=None, created=20, creation="ambiguous")
    listed = (machine("w0", id_="second", created=5), machine("w0", id_="first", created=9))
    planned = plan(snapshot(unanswered, machines=listed, queued=1, traits=CLOUD), LOCAL)
    assert planned.actions == (
        Adopt("w0", "first", "found for an unanswered create call"),
        DeleteOrphan("second", "w0", "duplicate of first"),
    )


def test_a_price_that_was_not_known_when_the_machine_was_made_is_taken_from_the_list() -> None:
    listed = machine("w0", price_micros_per_hour=6_400, currency="EUR")
    planned = plan(snapshot(worker(), machines=(listed,), traits=CLOUD), LOCAL)
    assert planned.actions == (RecordPrice("w0", "m-w0", "price of its machine is known now"),)
    known = replace(worker(), bill=Bill(Tariff(6_400, "EUR"), ago(100)))
    assert plan(snapshot(known, machines=(listed,), traits=CLOUD), LOCAL).actions == ()


def test_an_unanswered_creation_keeps_its_slot_until_a_list_settles_it() -> None:
    unanswered = worker(status="spawning", heartbeat=None, machine_id=None, created=119, creation="ambiguous")
    config = fleet(max_workers=1, spawn_timeout_s=600)
    for machines in (None, ()):
        assert plan(snapshot(unanswered, machines=machines, queued=9, traits=CLOUD), config).actions == ()


def test_an_unanswered_creation_without_a_machine_frees_its_slot_and_counts_as_no_restart() -> None:
    unanswered = worker(status="spawning", heartbeat=None, machine_id=None, created=120, creation="ambiguous")
    planned = plan(snapshot(unanswered, queued=1, machines=(), traits=CLOUD), fleet(spawn_timeout_s=600))
    assert kinds(planned) == ["delete", "spawn"]
    assert only(planned, Delete).code == "NO_MACHINE_ID"


def test_a_broken_worker_whose_machine_is_not_known_waits_for_a_list() -> None:
    broken = worker(status="error", heartbeat=None, machine_id=None, created=500)
    assert plan(snapshot(broken, machines=None, traits=CLOUD), LOCAL).actions == ()
    assert only(plan(snapshot(broken, machines=(), traits=CLOUD), LOCAL), Delete).machine_id is None
    found = plan(snapshot(broken, machines=(machine("w0", id_="there"),), traits=CLOUD), LOCAL)
    assert only(found, Delete).machine_id == "there"
    assert only(found, Adopt).machine_id == "there", "it is paid for until it is gone"


@pytest.mark.parametrize(("asked_s", "is_told"), [(299, False), (300, True)])
def test_a_machine_that_does_not_go_is_told_of(asked_s: float, is_told: bool) -> None:
    broken = worker(status="error", code="X", reason="broken")
    first = plan(snapshot(broken, traits=CLOUD), LOCAL)
    assert first.planner_state.machines.deleting_since == {"m-w0": NOW}
    again = plan(snapshot(broken, traits=CLOUD, state={"deleting_since": {"m-w0": ago(asked_s)}}), LOCAL)
    assert [alert.code for alert in of_kind(again.actions, RaiseAlert)] == ["NOT_DELETED"] * is_told
    # One that has lost our tags is in no list, and is paid for all the same.
    unlisted = snapshot(broken, machines=(), traits=CLOUD, state={"deleting_since": {"m-w0": ago(asked_s)}})
    assert [alert.code for alert in of_kind(plan(unlisted, LOCAL).actions, RaiseAlert)] == ["NOT_DELETED"] * is_told
    gone = plan(snapshot(machines=(), traits=CLOUD, state={"deleting_since": {"m-w0": ago(900)}}), LOCAL)
    assert gone.planner_state.machines.deleting_since == {}


def test_a_machine_of_ours_without_a_worker_is_deleted_after_its_grace() -> None:
    orphan = machine("nobody")
    first = plan(snapshot(machines=(orphan,), traits=CLOUD), LOCAL)
    assert first.actions == ()
    assert first.planner_state.orphans.orphan_since == {"m-nobody": NOW}
    for since, expected in ((59, []), (60, ["delete_orphan"])):
        seen = snapshot(machines=(orphan,), traits=CLOUD, state={"orphan_since": {"m-nobody": ago(since)}})
        assert kinds(plan(seen, LOCAL)) == expected


def test_strays_take_up_room_until_they_are_gone() -> None:
    config = fleet(max_workers=2)
    for machines in ((machine("nobody"),), None):
        seen = snapshot(queued=9, machines=machines, traits=CLOUD, state={"orphan_since": {"m-nobody": ago(5)}})
        assert kinds(plan(seen, config)) == ["spawn"]
    ended = snapshot(queued=9, machines=(machine("nobody", "exited"),), traits=CLOUD)
    assert kinds(plan(ended, config)) == ["spawn", "spawn"], "one that has exited is not billed"


def test_a_machine_missing_from_a_lagging_list_is_waited_for_and_then_its_worker_is_replaced() -> None:
    view = worker(heartbeat=20, running=(task(),))
    for since, expected in ((None, []), (59, []), (60, ["fail", "delete", "spawn"])):
        state = {} if since is None else {"missing_since": {"w0": ago(since)}}
        assert kinds(plan(snapshot(view, machines=(), traits=CLOUD, state=state), LOCAL)) == expected


@pytest.mark.parametrize(("known_s", "is_missed"), [(62, True), (61, True), (60, False), (5, False)])
def test_a_list_that_may_be_old_cannot_lack_what_is_younger(known_s: float, is_missed: bool) -> None:
    """Or the end of a machine that comes late into the lists, and vanishes, would be put before its end."""
    seen = snapshot(worker(machine_at=known_s), machines=(), listed_at=ago(1), traits=CLOUD)
    assert ("w0" in plan(seen, LOCAL).planner_state.machines.missing_since) is is_missed


def test_without_a_list_nothing_is_concluded_from_absence() -> None:
    views = [worker("w0", 0, running=(task(),)), worker("w1", 1, "spawning", created=5, heartbeat=None)]
    seen = snapshot(*views, machines=None, state={"missing_since": {"w0": ago(900), "w1": ago(900)}})
    assert plan(seen, LOCAL).actions == ()


# ----------------------------------------------------------------------------------------------------------- the brake


def silent(count: int, of: int, **rest: Any) -> Snapshot:
    views = [worker(f"w{n}", n, heartbeat=31 if n < count else 1, running=(task(n),)) for n in range(of)]
    return snapshot(*views, **rest)


@pytest.mark.parametrize(
    ("count", "of", "is_held"),
    [
        pytest.param(1, 1, False, id="one of one is a misfortune"),
        pytest.param(2, 2, False, id="so are two of two"),
        pytest.param(3, 6, False, id="half are not too many"),
        pytest.param(3, 5, True, id="more than half, and three, look like our own blindness"),
        pytest.param(4, 4, True, id="so do all of them"),
    ],
)
def test_when_too_many_fall_silent_at_once_nothing_is_touched(count: int, of: int, is_held: bool) -> None:
    planned = plan(silent(count, of, queued=3), fleet(max_workers=20))
    if is_held:
        assert kinds(planned) == ["alert"]
        assert planned.hold is not None
        assert (planned.hold.code, planned.hold.is_total) == ("TOO_MANY_DEAD", True)
        assert planned.decision == f"hold: {count} of {of} workers fell silent at once"
    else:
        assert len(of_kind(planned.actions, Fail)) == count


def test_the_brake_is_released_when_they_are_heard_again_or_have_been_silent_too_long() -> None:
    config = fleet(max_workers=20)
    heard_again = plan(silent(0, 4, state={"mass_silence_since": ago(10)}), config)
    assert (heard_again.actions, heard_again.hold, heard_again.planner_state.health.mass_silence_since) == (
        (),
        None,
        None,
    )
    for since, failed in ((29, 0), (30, 4)):
        planned = plan(silent(4, 4, state={"mass_silence_since": ago(since)}), config)
        assert len(of_kind(planned.actions, Fail)) == failed


def test_after_a_gap_in_the_cycles_the_silent_get_two_beats_to_be_heard() -> None:
    """The database was away: nobody could be heard, and the first cycle after it must not condemn them for that."""
    first = plan(silent(1, 1, state={"planned_at": ago(60)}), LOCAL)
    assert [alert.code for alert in first.actions] == ["WAS_AWAY"], "nothing is done, and a person told"
    assert first.hold is not None
    assert first.hold.code == "WAS_AWAY"
    back = plan(silent(0, 1, state={"planned_at": ago(1), "mass_silence_since": ago(3)}), LOCAL)
    assert (back.actions, back.hold) == ((), None)
    for since, failed in ((9, 0), (10, 1)):
        planned = plan(silent(1, 1, state={"planned_at": ago(1), "mass_silence_since": ago(since)}), LOCAL)
        assert len(of_kind(planned.actions, Fail)) == failed


def test_cycles_farther_apart_than_heartbeats_may_be_still_find_the_dead() -> None:
    """`windlass cycle` from cron, once a minute."""
    first = plan(silent(1, 1, state={"planned_at": ago(60)}), LOCAL)
    second = plan(silent(1, 1, state={"planned_at": ago(60), "mass_silence_since": ago(60)}), LOCAL)
    assert (kinds(first), kinds(second)) == (["alert"], ["fail", "delete", "spawn"])


def test_a_total_hold_is_not_hidden_by_a_lesser_one() -> None:
    """The network is gone: the list shrinks and the workers fall silent in the same cycle."""
    views = [worker(f"w{n}", n, heartbeat=31) for n in range(4)]
    planned = plan(snapshot(*views, machines=(), traits=CLOUD, queued=5), LOCAL)
    assert planned.hold is not None
    assert planned.hold.code == "TOO_MANY_DEAD"
    assert [alert.code for alert in planned.actions] == ["LIST_SHRANK", "TOO_MANY_DEAD"]


def test_a_list_that_shrank_sharply_is_doubted_three_times_as_long_and_holds_hiring() -> None:
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


def test_a_list_in_doubt_settles_no_unanswered_creation() -> None:
    views = [worker(f"w{n}", n, heartbeat=20, running=(task(n),)) for n in range(4)]
    unanswered = worker("w9", 9, "spawning", heartbeat=None, machine_id=None, created=500, creation="ambiguous")
    seen = snapshot(*views, unanswered, machines=(), traits=CLOUD)
    assert kinds(plan(seen, fleet(max_workers=20, spawn_timeout_s=600))) == ["alert"]


def test_machines_of_workers_that_were_told_to_leave_do_not_make_a_list_shrink() -> None:
    views = [worker(f"w{n}", n, "terminating", terminating=5, heartbeat=20) for n in range(4)]
    planned = plan(snapshot(*views, machines=(), traits=CLOUD), LOCAL)
    assert planned.hold is None


def test_a_hold_keeps_the_time_it_began() -> None:
    first = plan(silent(4, 4), LOCAL)
    again = plan(replace(silent(4, 4), now=NOW, planner_state=with_state(first.planner_state, planned_at=NOW)), LOCAL)
    assert first.hold is not None
    assert again.hold is not None
    assert again.hold.since == first.hold.since == NOW


# ------------------------------------------------------------------------------------------------------ started by hand


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        pytest.param(snapshot(worker("h", None), idle=9999), [], id="idle for hours"),
        pytest.param(snapshot(worker("h", None, created=9999), queued=3), ["spawn"] * 3, id="never claims"),
        pytest.param(snapshot(worker("h", None, running=(task(started=9999),))), [], id="at one task for hours"),
        pytest.param(snapshot(worker("h", None, is_paused=True)), [], id="paused"),
        pytest.param(
            snapshot(worker("h", None, "terminating", terminating=29)), [], id="told to leave: it does so itself"
        ),
        pytest.param(
            snapshot(worker("h", None, "terminating", terminating=29, running=(task(),))),
            [],
            id="told to leave, at work",
        ),
    ],
)
def test_a_worker_started_by_hand_is_neither_failed_nor_let_go_nor_deleted(seen: Snapshot, expected: list[str]) -> None:
    assert kinds(plan(seen, LOCAL)) == expected


@pytest.mark.parametrize(
    ("seen", "code"),
    [
        pytest.param(snapshot(worker("h", None, heartbeat=31), machines=None), "STALE_HEARTBEAT_IDLE", id="silent"),
        pytest.param(snapshot(worker("h", None, "error"), machines=None), "ERROR", id="in error"),
        pytest.param(
            snapshot(worker("h", None, "terminating", terminating=30, heartbeat=31)),
            "DRAIN_STALE",
            id="silent, leaving",
        ),
        pytest.param(
            snapshot(worker("h", None, "terminating", terminating=31, created=31, heartbeat=None)),
            "DRAIN_STALE",
            id="told to leave, and never heard",
        ),
        pytest.param(
            snapshot(worker("h", None, "terminating", terminating=30, heartbeat=61, lease_s=60.0)),
            "DRAIN_STALE",
            id="silent for longer than its own lease",
        ),
    ],
)
def test_the_row_of_a_worker_started_by_hand_that_is_over_is_closed_without_touching_a_machine(
    seen: Snapshot, code: str
) -> None:
    deletion = only(plan(seen, LOCAL), Delete)
    assert (deletion.worker_id, deletion.machine_id, deletion.code) == ("h", None, code)


def test_a_silent_worker_started_by_hand_breaks_no_slot_and_counts_against_no_fleet() -> None:
    planned = plan(snapshot(worker("h", None, heartbeat=31, running=(task(),))), LOCAL)
    assert kinds(planned) == ["fail", "delete", "spawn"]
    assert planned.planner_state.failure_rate.failed_starts == 0


def test_a_machine_named_like_a_worker_started_by_hand_is_left_alone() -> None:
    assert plan(snapshot(worker("h", None), machines=(machine("h"),)), LOCAL).actions == ()


# ---------------------------------------------------------------------------------------------------------- in one plan


def test_every_action_prints_as_a_sentence() -> None:
    views = (
        worker("a", 0, heartbeat=31, running=(task(1),)),
        worker("b", 1, "error"),
        worker("c", 2, "spawning"),
        worker("d", 3, "terminating", terminating=5),
    )
    planned = plan(snapshot(*views, queued=9, orphaned=("z",)), LOCAL)
    assert all(action.reason and not action.reason.endswith(".") for action in planned.actions)
    assert isinstance(planned.actions[0], Promote)


def test_nobody_is_hired_and_let_go_in_one_plan() -> None:
    views = [worker(f"w{n}", n) for n in range(3)]
    planned = plan(snapshot(*views, requested=2, idle=900), fleet(max_workers=10))
    assert set(kinds(planned)) == {"spawn"}


def test_a_fleet_at_rest_stays_at_rest() -> None:
    views = [worker(f"w{n}", n, claimed=50, running=(task(n),)) for n in range(3)]
    assert plan(snapshot(*views), LOCAL).actions == ()


@pytest.mark.parametrize("config", [LOCAL, GPU], ids=["local", "gpu"])
def test_an_empty_fleet_with_nothing_to_do_does_nothing(config: FleetConfig) -> None:
    planned = plan(snapshot(machines=machines_of(())), config)
    assert planned.actions == ()
    assert planned.decision == "queue empty, no workers"


@pytest.mark.parametrize("running", [(), (task(),)], ids=["idle", "at work"])
@pytest.mark.parametrize("lease_s", [None, 30.0, 600.0])
def test_a_worker_started_by_hand_that_is_told_to_leave_takes_all_the_time_it_needs(
    running: tuple[RunningView, ...], lease_s: float | None
) -> None:
    """It was started by a person, for tasks of whatever length: only its silence says that it is over."""
    leaving = worker("h", None, "terminating", terminating=9000, created=9999, heartbeat=29, lease_s=lease_s)
    assert plan(snapshot(replace(leaving, running=running)), LOCAL).actions == ()


# -------------------------------------------------------------------------------------------------------- winding down


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param({"queued": 9}, id="though tasks wait"),
        pytest.param({"is_paused": True}, id="though it is paused"),
        pytest.param({"requested": 2}, id="though a person asked for more"),
        pytest.param({"state": {"planned_at": None}}, id="though nothing else is to be touched"),
    ],
)
def test_a_fleet_that_is_wound_down_lets_everybody_hired_go_at_once_and_hires_nobody(seen: dict[str, Any]) -> None:
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


# ------------------------------------------------------------------------------------------------------------- strays


def orphans(count: int) -> tuple[Machine, ...]:
    return tuple(machine(f"nobody-{n}") for n in range(count))


@pytest.mark.parametrize(
    ("count", "own", "ended"),
    [
        pytest.param(2, 0, 2, id="two are strays"),
        pytest.param(3, 3, 3, id="half of all are strays"),
        pytest.param(3, 2, 0, id="three, and more than half: could it be us who forgot"),
        pytest.param(9, 0, 0, id="all of them"),
    ],
)
def test_machines_without_a_worker_are_ended_unless_they_are_most_of_all(count: int, own: int, ended: int) -> None:
    views = [worker(f"w{n}", n, running=(task(n),)) for n in range(own)]
    planned = plan(snapshot(*views, machines=(*machines_of(views), *orphans(count))), fleet(max_workers=20))
    assert len(of_kind(planned.actions, DeleteOrphan)) == ended
    if not ended:
        assert planned.hold is not None
        assert (planned.hold.code, planned.hold.is_total) == ("TOO_MANY_ORPHANS", False)
        assert "they are deleted at 13:00:00 UTC" in only(planned, RaiseAlert).reason


def test_machines_that_have_exited_are_no_reason_to_doubt() -> None:
    """Processes that left in good order are listed for a while after their rows have ended."""
    exited = tuple(machine(f"nobody-{n}", "exited") for n in range(5))
    planned = plan(snapshot(machines=exited), LOCAL)
    assert (planned.hold, len(of_kind(planned.actions, DeleteOrphan))) == (None, 5)


@pytest.mark.parametrize(
    ("doubted", "reset", "ended"),
    [
        pytest.param(3599, None, 0, id="a person has an hour to look"),
        pytest.param(3600, None, 4, id="what they leave as it is is ended"),
        pytest.param(100, 99, 4, id="a restart by hand says that all is well"),
        pytest.param(100, 101, 0, id="one from before the doubt does not"),
    ],
)
def test_doubted_strays_are_ended_after_an_hour_or_by_hand(doubted: float, reset: float | None, ended: int) -> None:
    state = {"orphans_held_since": ago(doubted), "alerts": {"TOO_MANY_ORPHANS": NOW}}
    restarted_at = None if reset is None else ago(reset)
    # That a slot was restarted says nothing of strays.
    seen = snapshot(machines=orphans(4), state=state, restarted_at=restarted_at, reset_at=ago(0))
    planned = plan(seen, LOCAL)
    assert len(planned.actions) == ended


def test_so_many_strays_are_ended_at_once_and_no_more() -> None:
    busy = [worker(f"w{n}", n, running=(task(n),)) for n in range(8)]
    config = fleet(max_workers=20, max_changes_per_cycle=3)
    seen = snapshot(*busy, machines=(*machines_of(busy), *orphans(7)))
    left = []
    for _ in range(4):
        planned = plan(seen, config)
        left.append((len(planned.actions), planned.is_cut_short))
        seen = apply(planned, seen, config)
    assert left == [(3, True), (3, True), (1, False), (0, False)]


# ---------------------------------------------------------------------------------------------------- on another host


def test_processes_of_another_host_are_judged_by_their_heartbeats_alone() -> None:
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
def test_while_machines_of_another_provider_are_there_nothing_is_touched(before: str, now: str, is_held: bool) -> None:
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


def test_a_provider_that_lists_no_machine_of_those_who_speak_is_another_account() -> None:
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
    # One that is listed: the account is the right one.
    again = plan(snapshot(*views, machines=machines_of(views[:1]), traits=lagging, state=state), GPU)
    assert again.hold is None
    assert [delete.worker_id for delete in of_kind(again.actions, Delete)] == ["b"]
    # So it is while lists may be old.
    state = {"missing_since": {"a": ago(59), "b": ago(59)}}
    assert plan(snapshot(*views, machines=(), traits=lagging, state=state), GPU).hold is None


@pytest.mark.parametrize("code", ["LIST_SHRANK", "TOO_MANY_ORPHANS", "OTHER_ACCOUNT"])
def test_what_a_list_told_us_stops_us_while_the_next_one_cannot_be_had(code: str) -> None:
    """A provider in trouble answers with short lists, and with none, in turn."""
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
    assert kinds(plan(replace(listed, planner_state=unlisted.planner_state), config)) == []  # told already


def test_doubts_about_strays_end_without_a_list_too() -> None:
    state = {"orphans_held_since": ago(3600)}
    assert plan(snapshot(machines=None, state=state), LOCAL).hold is None


def test_one_that_is_not_listed_stops_nothing_while_others_were_and_no_list_can_be_had() -> None:
    cloud = ProviderTraits(absence_grace_s=60, is_remote=True)
    views = (worker("a", 0, created=900), worker("b", 1, created=900))
    state = {"missing_since": {"a": ago(90)}}
    assert plan(snapshot(*views, machines=None, traits=cloud, state=state), GPU).hold is None


def test_a_key_that_has_changed_is_on_trial_until_a_machine_is_listed_with_it() -> None:
    cloud = ProviderTraits(absence_grace_s=60, is_remote=True, key_hash="new")
    booting = worker("a", 0, "spawning", created=5, heartbeat=None)
    state = {"key_hash": "old"}
    seen = snapshot(booting, machines=(), traits=cloud, queued=9, state=state)
    planned = plan(seen, fleet(max_workers=9))
    assert planned.hold is not None
    assert (planned.hold.code, planned.hold.is_total) == ("OTHER_ACCOUNT", True)
    assert "changed, and the new one lists none of the fleet's machines (m-a)" in only(planned, RaiseAlert).reason
    assert (kinds(planned), planned.planner_state.account.key_hash) == (["alert"], "old")
    # Without a list nobody knows; there is nothing to tell yet.
    unlisted = plan(replace(seen, machines=None), fleet(max_workers=9))
    assert unlisted.hold is not None
    assert (unlisted.hold.code, unlisted.hold.is_total, kinds(unlisted)) == ("KEY_CHANGED", True, [])
    # A creation without an answer may have made one.
    unanswered = worker("a", 0, "spawning", created=5, heartbeat=None, machine_id=None)
    assert plan(replace(seen, workers=(unanswered,)), fleet(max_workers=9)).planner_state.account.key_hash == "old"
    # One that is listed, or nobody to lose, and it is ours.
    refused = worker("a", 0, "spawning", created=5, heartbeat=None, machine_id=None, creation="refused")
    for known in (
        replace(seen, machines=machines_of((booting,))),
        replace(seen, workers=()),
        replace(seen, workers=(refused,)),
    ):
        taken_over = plan(known, fleet(max_workers=9))
        assert (taken_over.hold, taken_over.planner_state.account.key_hash) == (None, "new")
        assert of_kind(taken_over.actions, Spawn)


def test_one_that_was_missing_beside_others_is_no_sign_of_another_account_when_those_are_gone() -> None:
    cloud = ProviderTraits(absence_grace_s=60, is_remote=True, key_hash="same")
    unlisted = worker("a", 0, created=900, heartbeat=1)
    state: dict[str, Any] = {"key_hash": "same", "missing_since": {"a": ago(90)}}
    seen = snapshot(unlisted, machines=(), traits=cloud, state=state | {"own_listed_at": ago(80)})
    assert plan(seen, fleet()).hold is None
    # But those who were last listed together, and are missing since, are.
    seen = snapshot(unlisted, machines=(), traits=cloud, state=state | {"own_listed_at": ago(100)})
    hold = plan(seen, fleet()).hold
    assert hold is not None
    assert hold.code == "OTHER_ACCOUNT"
    # What lists one is the account's key, now.
    both = snapshot(unlisted, worker("b", 1), machines=machines_of((worker("b", 1),)), traits=cloud, state=state)
    assert plan(both, fleet()).planner_state.account.own_listed_at == NOW


@pytest.mark.parametrize("is_key_new", [True, False], ids=["the key is new", "they are heard, and not listed"])
def test_machines_of_another_account_are_given_up_by_a_person_who_knows_of_them(is_key_new: bool) -> None:
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
    # Said before they were missed, of slots, not to all of them yet, or while no list can be had: nothing is given up.
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
    given_up = plan(replace(seen, restarted_at=ago(5)), fleet(max_workers=9))
    assert (given_up.hold, given_up.planner_state.account.key_hash) == (None, "new")
    assert len(of_kind(given_up.actions, Delete)) == 5
    left = [alert for alert in of_kind(given_up.actions, RaiseAlert) if alert.code == "ABANDONED"]
    assert [alert.worker_id for alert in left] == [view.id for view in leaving]
    assert left[0].reason == (
        "m-w0 was abandoned by hand: the key for local does not list it, and its former account may still be charged"
    )
    # Nobody is asked again for those who take their time to leave.
    memory_then = given_up.planner_state
    for after_s in (10, 600):
        now = NOW + timedelta(seconds=after_s)
        heard = tuple(replace(view, last_heartbeat=now, running=(task(n),)) for n, view in enumerate(leaving))
        later = replace(seen, now=now, planner_state=memory_then, restarted_at=ago(5), workers=heard)
        planned = plan(later, fleet(max_workers=9, stop_timeout_s=9999))
        assert planned.hold is None
        memory_then = planned.planner_state


def test_a_choice_that_the_provider_refuses_is_told_once_an_hour_while_another_is_hired() -> None:
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
        pytest.param((10.0, 10.0), 10.0, id="as often as was meant"),
        pytest.param((300.0, 290.0), 290.0, id="from cron"),
        pytest.param((10.0, 300.0), 10.0, id="after an outage"),
        pytest.param((300.0,), 10.0, id="too few to tell"),
    ],
)
def test_the_next_plan_is_due_when_it_is_usual(gaps_s: tuple[float, ...], due_in_s: float) -> None:
    seen = snapshot()
    seen = replace(seen, planner_state=with_state(seen.planner_state, planned_at=ago(1), gaps_s=gaps_s))
    assert plan(seen, fleet(poll_interval_s=10.0)).planner_state.cadence.next_plan_in_s == due_in_s
    assert plan(replace(seen, is_shutting_down=True), fleet()).planner_state.cadence.next_plan_in_s is None
