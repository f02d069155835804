"""Plans for machines: unanswered creates, missing machines, orphans, mass silence and shrunk lists."""

from dataclasses import replace
from typing import Any

import pytest

from support.snapshots import (
    LAGGING_LIST,
    LOCAL,
    NOW,
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
    Adopt,
    Delete,
    DeleteOrphan,
    Drain,
    Fail,
    RaiseAlert,
    RecordPrice,
)
from windlass.model.cost import Bill, Tariff
from windlass.model.machine import Machine, ProviderTraits
from windlass.model.snapshot import ProviderRefusal, Snapshot
from windlass.policy.plan import plan

# ------------------------------------------------------------------------------------------------------ reconciliation


def test_unanswered_create_is_adopted_and_duplicates_deleted() -> None:
    unanswered = worker(status="spawning", heartbeat=None, machine_id=None, created=20, creation="ambiguous")
    listed = (machine("w0", id_="second", created=5), machine("w0", id_="first", created=9))
    planned = plan(snapshot(unanswered, machines=listed, queued=1, traits=LAGGING_LIST), LOCAL)
    assert planned.actions == (
        Adopt("w0", "first", "found for an unanswered create call"),
        DeleteOrphan("second", "w0", "duplicate of first"),
    )


def test_missing_price_is_taken_from_machine_list() -> None:
    listed = machine("w0", price_micros_per_hour=6_400, currency="EUR")
    planned = plan(snapshot(worker(), machines=(listed,), traits=LAGGING_LIST), LOCAL)
    assert planned.actions == (RecordPrice("w0", "m-w0", "price of its machine is known now"),)
    known = replace(worker(), bill=Bill(Tariff(6_400, "EUR"), ago(100)))
    assert plan(snapshot(known, machines=(listed,), traits=LAGGING_LIST), LOCAL).actions == ()


def test_unanswered_create_keeps_its_slot() -> None:
    unanswered = worker(status="spawning", heartbeat=None, machine_id=None, created=119, creation="ambiguous")
    config = fleet(max_workers=1, spawn_timeout_s=600)
    for machines in (None, ()):
        assert plan(snapshot(unanswered, machines=machines, queued=9, traits=LAGGING_LIST), config).actions == ()


def test_unanswered_create_without_machine_is_no_restart() -> None:
    unanswered = worker(status="spawning", heartbeat=None, machine_id=None, created=120, creation="ambiguous")
    planned = plan(snapshot(unanswered, queued=1, machines=(), traits=LAGGING_LIST), fleet(spawn_timeout_s=600))
    assert kinds(planned) == ["delete"]
    assert only(planned, Delete).code == "NO_MACHINE_ID"


def test_failed_worker_with_unknown_machine_waits_for_list() -> None:
    broken = worker(status="error", heartbeat=None, machine_id=None, created=500)
    assert plan(snapshot(broken, machines=None, traits=LAGGING_LIST), LOCAL).actions == ()
    assert only(plan(snapshot(broken, machines=(), traits=LAGGING_LIST), LOCAL), Delete).machine_id is None
    found = plan(snapshot(broken, machines=(machine("w0", id_="there"),), traits=LAGGING_LIST), LOCAL)
    assert only(found, Delete).machine_id == "there"
    assert only(found, Adopt).machine_id == "there", "it is billed until it is deleted"


@pytest.mark.parametrize(("asked_s", "is_alerted"), [(299, False), (300, True)])
def test_machine_that_is_not_deleted_raises_alert(asked_s: float, is_alerted: bool) -> None:
    broken = worker(status="error", code="X", reason="broken")
    first = plan(snapshot(broken, traits=LAGGING_LIST), LOCAL)
    assert first.planner_state.machines.deleting_since == {"m-w0": NOW}
    again = plan(snapshot(broken, traits=LAGGING_LIST, state={"deleting_since": {"m-w0": ago(asked_s)}}), LOCAL)
    assert [alert.code for alert in of_kind(again.actions, RaiseAlert)] == ["NOT_DELETED"] * is_alerted
    # A machine that lost its tags is in no list and is still billed.
    unlisted = snapshot(broken, machines=(), traits=LAGGING_LIST, state={"deleting_since": {"m-w0": ago(asked_s)}})
    assert [alert.code for alert in of_kind(plan(unlisted, LOCAL).actions, RaiseAlert)] == ["NOT_DELETED"] * is_alerted
    gone = plan(snapshot(machines=(), traits=LAGGING_LIST, state={"deleting_since": {"m-w0": ago(900)}}), LOCAL)
    assert gone.planner_state.machines.deleting_since == {}


def test_orphaned_machine_is_deleted_after_grace() -> None:
    orphan = machine("unknown")
    first = plan(snapshot(machines=(orphan,), traits=LAGGING_LIST), LOCAL)
    assert first.actions == ()
    assert first.planner_state.orphans.orphan_since == {"m-unknown": NOW}
    for since, expected in ((59, []), (60, ["delete_orphan"])):
        seen = snapshot(machines=(orphan,), traits=LAGGING_LIST, state={"orphan_since": {"m-unknown": ago(since)}})
        assert kinds(plan(seen, LOCAL)) == expected


def test_orphaned_machines_count_towards_max_workers() -> None:
    config = fleet(max_workers=2)
    for machines in ((machine("unknown"),), None):
        seen = snapshot(queued=9, machines=machines, traits=LAGGING_LIST, state={"orphan_since": {"m-unknown": ago(5)}})
        assert kinds(plan(seen, config)) == ["spawn"]
    ended = snapshot(queued=9, machines=(machine("unknown", "exited"),), traits=LAGGING_LIST)
    assert kinds(plan(ended, config)) == ["spawn", "spawn"], "one that has exited is not billed"


def test_worker_without_a_slot_on_a_machine_of_the_fleet_drains() -> None:
    """A failover lost its row, and it registered again."""
    views = [worker("w0", None, running=(task(1),)), worker("w1", None), worker("by-hand", None)]
    seen = snapshot(*views, machines=(machine("w0"), machine("w1")), traits=LAGGING_LIST)
    planned = plan(seen, fleet(max_changes_per_cycle=1))
    assert [(drain.worker_id, drain.code) for drain in of_kind(planned.actions, Drain)] == [("w0", "NO_SLOT")]
    assert planned.is_cut_short
    planned = plan(seen, LOCAL)
    assert [drain.worker_id for drain in of_kind(planned.actions, Drain)] == ["w0", "w1"]
    assert planned.planner_state.orphans.orphan_since == {"m-w0": NOW, "m-w1": NOW}
    assert kinds(plan(replace(seen, is_shutting_down=True), LOCAL)) == ["drain", "drain"]


@pytest.mark.parametrize(
    ("drained", "tasks", "ended"),
    [
        pytest.param(10, (), ["DRAINED"], id="no task"),
        pytest.param(10, (task(1),), [], id="busy"),
        pytest.param(61, (task(1),), ["DRAIN_TIMEOUT"], id="busy for too long"),
    ],
)
def test_drained_worker_without_a_slot_leaves_an_orphan(drained: float, tasks: Any, ended: list[str]) -> None:
    view = worker("w0", None, "terminating", terminating=drained, running=tasks)
    state = {"orphan_since": {"m-w0": ago(600)}}
    seen = snapshot(view, machines=(machine("w0"),), traits=LAGGING_LIST, state=state)
    planned = plan(seen, fleet(stop_timeout_s=60))
    assert [(each.machine_id, each.code) for each in of_kind(planned.actions, Delete)] == [(None, c) for c in ended]
    assert of_kind(planned.actions, DeleteOrphan) == []
    gone = plan(snapshot(machines=(machine("w0"),), traits=LAGGING_LIST, state=state), LOCAL)
    assert kinds(gone) == ["delete_orphan"]


def test_machine_of_a_worker_without_a_slot_counts_towards_max_workers() -> None:
    view = worker("w0", None, "terminating", terminating=1, running=(task(1),))
    seen = snapshot(view, queued=9, machines=(machine("w0"),), traits=LAGGING_LIST)
    assert kinds(plan(seen, fleet(max_workers=2))) == ["spawn"]


def test_missing_machine_is_replaced_after_absence_grace() -> None:
    view = worker(heartbeat=20, running=(task(),))
    for since, expected in ((None, []), (59, []), (60, ["fail", "delete"])):
        state = {} if since is None else {"missing_since": {"w0": ago(since)}}
        assert kinds(plan(snapshot(view, machines=(), traits=LAGGING_LIST, state=state), LOCAL)) == expected


@pytest.mark.parametrize(("known_s", "is_missed"), [(62, True), (61, True), (60, False), (5, False)])
def test_lagging_list_cannot_miss_new_machines(known_s: float, is_missed: bool) -> None:
    """Otherwise a machine that appears late in lists would be missing before it ever appeared."""
    seen = snapshot(worker(machine_at=known_s), machines=(), listed_at=ago(1), traits=LAGGING_LIST)
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


def test_after_outage_silent_workers_get_one_more_timeout() -> None:
    """During a database outage no heartbeat arrives. The first cycle after it must not fail workers for that."""
    first = plan(silent(1, 1, state={"planned_at": ago(60)}), LOCAL)
    assert [alert.code for alert in first.actions] == ["WAS_AWAY"], "an alert and no other action"
    assert first.hold is not None
    assert first.hold.code == "WAS_AWAY"
    back = plan(silent(0, 1, state={"planned_at": ago(1), "mass_silence_since": ago(3)}), LOCAL)
    assert (back.actions, back.hold) == ((), None)
    for since, failed in ((29, 0), (30, 1)):
        planned = plan(silent(1, 1, state={"planned_at": ago(1), "mass_silence_since": ago(since)}), LOCAL)
        assert len(of_kind(planned.actions, Fail)) == failed


def test_worker_whose_heartbeat_becomes_stale_just_after_an_outage_is_kept() -> None:
    """Its last heartbeat was 29 s old in the first cycle after the outage. The next one is about to arrive."""
    view = worker(heartbeat=29, running=(task(1),))
    first = plan(snapshot(view, state={"planned_at": ago(27)}), LOCAL)
    assert (first.actions, first.hold, first.planner_state.health.outage_ended_at) == ((), None, NOW)
    for ended_s, code in ((2, "WAS_AWAY"), (30, None)):
        planned = plan(silent(1, 1, state={"planned_at": ago(2), "outage_ended_at": ago(ended_s)}), LOCAL)
        assert (planned.hold.code if planned.hold is not None else None) == code


def test_slow_cron_cycles_still_detect_dead_workers() -> None:
    """`windlass cycle` from cron, once a minute."""
    first = plan(silent(1, 1, state={"planned_at": ago(60)}), LOCAL)
    later = {"planned_at": ago(60), "mass_silence_since": ago(60), "gaps_s": (60.0, 60.0)}
    assert (kinds(first), kinds(plan(silent(1, 1, state=later), LOCAL))) == (["alert"], ["fail", "delete"])


def test_time_without_cycles_is_no_waiting_for_silent_workers() -> None:
    """An hour passed without a cycle, or the clock was set forward by an hour, while all workers were silent."""
    state = {"planned_at": ago(3600), "mass_silence_since": ago(3605)}
    planned = plan(silent(4, 4, state=state), fleet(max_workers=20))
    assert planned.hold is not None
    assert planned.hold.code == "TOO_MANY_DEAD"
    since = planned.planner_state.health.mass_silence_since
    assert since is not None
    assert since >= ago(5 + fleet().poll_interval_s), "what was waited before, and one interval"


def test_total_hold_overrides_spawn_hold() -> None:
    """A network failure: the list shrinks and workers fall silent in the same cycle."""
    views = [worker(f"w{n}", n, heartbeat=31) for n in range(4)]
    planned = plan(snapshot(*views, machines=(), traits=LAGGING_LIST, queued=5), LOCAL)
    assert planned.hold is not None
    assert planned.hold.code == "TOO_MANY_DEAD"
    assert [alert.code for alert in planned.actions] == ["LIST_SHRANK", "TOO_MANY_DEAD"]


def test_shrunk_list_holds_spawning_for_triple_grace() -> None:
    views = [worker(f"w{n}", n, heartbeat=20, running=(task(n),)) for n in range(4)]
    config = fleet(max_workers=20)
    for since, failed in ((60, 0), (179, 0), (180, 4)):
        state = {"missing_since": {f"w{n}": ago(since) for n in range(4)}}
        planned = plan(snapshot(*views, machines=(), traits=LAGGING_LIST, queued=5, state=state), config)
        assert len(of_kind(planned.actions, Fail)) == failed
        if not failed:
            assert [alert.code for alert in planned.actions] == ["LIST_SHRANK"]
            assert planned.hold is not None
            assert planned.hold.code == "LIST_SHRANK"
            assert "would spawn" in planned.decision


def test_suspect_list_does_not_settle_unanswered_create() -> None:
    views = [worker(f"w{n}", n, heartbeat=20, running=(task(n),)) for n in range(4)]
    unanswered = worker("w9", 9, "spawning", heartbeat=None, machine_id=None, created=500, creation="ambiguous")
    seen = snapshot(*views, unanswered, machines=(), traits=LAGGING_LIST)
    assert kinds(plan(seen, fleet(max_workers=20, spawn_timeout_s=600))) == ["alert"]


def test_terminating_workers_do_not_make_a_list_suspect() -> None:
    views = [worker(f"w{n}", n, "terminating", terminating=5, heartbeat=20) for n in range(4)]
    planned = plan(snapshot(*views, machines=(), traits=LAGGING_LIST), LOCAL)
    assert planned.hold is None


@pytest.mark.parametrize(("drained_s", "failed"), [(5, 0), (90, 2)])
def test_drain_does_not_make_a_suspect_list_credible(drained_s: float, failed: int) -> None:
    """A worker that was missing before it drained still counts. The machine of another one may be deleted."""
    views = [worker(f"w{n}", n, heartbeat=20, running=(task(n),)) for n in range(2)]
    drained = worker("w2", 2, "terminating", terminating=drained_s, heartbeat=20)
    state = {"missing_since": {f"w{n}": ago(80) for n in range(3)}}
    planned = plan(snapshot(*views, drained, machines=(), traits=LAGGING_LIST, state=state), LOCAL)
    assert len(of_kind(planned.actions, Fail)) == failed


def test_drain_does_not_make_a_list_suspect() -> None:
    """Three of six are missing, which is no majority, and all drain."""
    views = [worker(f"w{n}", n, "terminating", terminating=5, heartbeat=5, running=(task(n),)) for n in range(6)]
    listed = tuple(machine(f"w{n}") for n in range(3, 6))
    state = {"missing_since": {f"w{n}": ago(20) for n in range(3)}}
    assert plan(snapshot(*views, machines=listed, traits=LAGGING_LIST, state=state), LOCAL).hold is None


def test_hold_keeps_its_start_time() -> None:
    first = plan(silent(4, 4), LOCAL)
    again = plan(replace(silent(4, 4), now=NOW, planner_state=with_state(first.planner_state, planned_at=NOW)), LOCAL)
    assert first.hold is not None
    assert again.hold is not None
    assert again.hold.since == first.hold.since == NOW


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


# ----------------------------------------------------------------------------------------------------------- placement


def test_excluded_place_drains_active_workers_and_fails_none() -> None:
    """A person edited the data centers of a fleet with running tasks."""
    views = [worker(f"w{n}", n, created=900, running=(task(n),) if n != 1 else ()) for n in range(4)]
    listed = tuple(machine(view.id, misplaced="It is in US-KS-2") for view in views)
    config = fleet(max_workers=4, max_changes_per_cycle=3)
    seen = snapshot(*views, machines=listed, queued=9)
    planned = plan(seen, config)
    drains = of_kind(planned.actions, Drain)
    assert [drain.worker_id for drain in drains] == ["w1", "w0", "w2"], "without a task first, no more than the limit"
    assert {(drain.code, drain.reason) for drain in drains} == {("MISPLACED", "It is in US-KS-2")}
    assert planned.decision == "drain 3 of 4 misplaced: It is in US-KS-2"
    rest = plan(apply(planned, seen, config), config)
    assert [drain.worker_id for drain in of_kind(rest.actions, Drain)] == ["w3"]
    assert of_kind((*planned.actions, *rest.actions), Fail) == []


def test_misplaced_spawning_worker_fails_at_once() -> None:
    view = worker(status="spawning", heartbeat=None, created=5)
    planned = plan(snapshot(view, machines=(machine("w0", misplaced="It is in US-KS-2"),), queued=1), LOCAL)
    assert [fail.code for fail in of_kind(planned.actions, Fail)] == ["MISPLACED"]


def test_misplaced_worker_drains_although_spawning_is_on_hold() -> None:
    refusal = ProviderRefusal("DENIED", "no right", NOW)
    listed = (machine("w0", misplaced="It is in US-KS-2"),)
    seen = snapshot(worker(running=(task(),)), machines=listed, queued=9, refusal=refusal)
    planned = plan(seen, fleet(max_workers=4))
    assert planned.hold is not None
    assert [drain.code for drain in of_kind(planned.actions, Drain)] == ["MISPLACED"]
