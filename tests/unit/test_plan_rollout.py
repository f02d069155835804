"""Rollouts: which workers are replaced, when, and what a failing version does."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.snapshots import (
    FleetSimulation,
    ago,
    apply,
    beating,
    fleet,
    machine,
    machines_of,
    of_kind,
    only,
    snapshot,
    task,
    with_state,
    worker,
)
from support.strategies import Scenario, scenarios
from windlass.model.action import Delete, Drain, Fail, Plan, RaiseAlert, RecordEvent, Spawn
from windlass.model.fleet import FleetConfig
from windlass.model.machine import ProviderTraits
from windlass.model.rollout import DeployRequest, Rollout, RolloutStatus, WorkingVersion
from windlass.model.snapshot import FailureRateState, FailureStreak, ProviderRefusal, Snapshot, WorkerView
from windlass.policy.plan import plan
from windlass.policy.planning_context import build_context
from windlass.policy.stages.rollout import replace_workers

FOUR = fleet(min_workers=4, max_workers=6, heartbeat_interval_s=5)
FULL = fleet(min_workers=4, max_workers=4, heartbeat_interval_s=5)
HOURLY = ProviderTraits(billing_unit_s=3600, is_remote=True)


def old(number: int, **rest: Any) -> WorkerView:
    return worker(f"w{number}", number, claimed=rest.pop("claimed", 90), fingerprint="old", **rest)


def new(slot: int, **rest: Any) -> WorkerView:
    return worker(f"n{slot}", slot, created=rest.pop("created", 60), fingerprint="new", **rest)


def rollout(**changes: Any) -> Rollout:
    return Rollout(**{"id": 1, "target": "new", "surge": 1, "max_unavailable": 0, "is_immediate": False,
                      "started_at": ago(80), "changed_at": ago(60)} | changes)  # fmt: skip


def seen(*workers: WorkerView, **rest: Any) -> Snapshot:
    state = {"rollout": rest.pop("rollout", None), "fingerprint": "new"}
    request = rest.pop("deploy", DeployRequest(1, surge=1))
    return snapshot(*workers, fingerprint="new", deploy=request, state=state, **rest)


def rollout_of(planned: Plan) -> Rollout:
    assert planned.planner_state.rollout is not None
    return planned.planner_state.rollout


def drained(planned: Plan) -> list[str]:
    return [drain.worker_id for drain in of_kind(planned.actions, Drain)]


FOUR_OLD = tuple(old(n) for n in range(4))


def test_request_begins_with_a_new_worker_in_a_free_slot() -> None:
    planned = plan(seen(*FOUR_OLD), FOUR)
    assert only(planned, RecordEvent).code == "DEPLOY_STARTED"
    assert only(planned, Spawn).slot == 4
    assert only(planned, Spawn).cause == "deploy"
    assert rollout_of(planned).surged == (4,)
    assert planned.decision == "spawn 1: version new, 4 of 4 on the old version"


@pytest.mark.parametrize(
    ("canary", "queued", "is_proof"),
    [
        pytest.param({"claimed": 30}, 0, True, id="finished its first task"),
        pytest.param({"claimed": 30}, 9, True, id="finished its first task, others are queued"),
        pytest.param({"claimed": 30, "running": (task(7, started=10),)}, 0, True, id="runs its second task"),
        pytest.param({"claimed": 30, "running": (task(7, started=30),)}, 0, False, id="runs its first task"),
        pytest.param({"claimed": 55, "failing_since": ago(20)}, 0, False, id="its last task failed"),
        pytest.param({}, 0, True, id="ready for two heartbeats, no task is queued"),
        pytest.param({"created": 30, "activated": 20, "others": 1}, 0, False, id="ready, while others get all tasks"),
        pytest.param({"created": 90, "activated": 70, "others": 1}, 0, True, id="ready for a minute, others get tasks"),
        pytest.param({}, 3, False, id="ready, and has claimed none of the queued tasks"),
        pytest.param({"created": 6, "activated": 4}, 0, False, id="ready for less than two heartbeats"),
        pytest.param({"status": "spawning", "heartbeat": None, "created": 10}, 0, False, id="no heartbeat yet"),
    ],
)
def test_old_worker_drains_only_after_the_new_one_passed(canary: dict[str, Any], queued: int, is_proof: bool) -> None:
    busy = [old(n, running=(task(n),)) for n in range(canary.pop("others", 0))]
    others = (*busy, *FOUR_OLD[len(busy) :])
    planned = plan(seen(*others, new(4, **canary), queued=queued, rollout=rollout(surged=(4,))), FULL_AND_ONE)
    assert len(drained(planned)) == is_proof
    assert all(drain.code == "DEPLOY" for drain in of_kind(planned.actions, Drain))
    assert len(rollout_of(planned).surged) == (not is_proof)


FULL_AND_ONE = fleet(min_workers=4, max_workers=5, heartbeat_interval_s=5)


def test_idle_worker_drains_before_a_busy_one() -> None:
    busy = [old(n, running=(task(n),)) for n in range(3)]
    planned = plan(seen(*busy, old(3), new(4, claimed=30), rollout=rollout(surged=(4,))), FOUR)
    assert drained(planned) == ["w3"]


def test_full_fleet_replaces_one_worker_at_a_time() -> None:
    """Without flags: no slot is free, so one old worker drains first, and its slot is filled."""
    first = plan(seen(*FOUR_OLD, deploy=DeployRequest(1)), FULL)
    assert len(drained(first)) == 1
    assert rollout_of(first).owed == 1
    after = apply(first, seen(*FOUR_OLD), FULL)
    assert drained(plan(after, FULL)) == [], "only one is missing at a time"


def test_surge_waits_for_a_free_slot_and_never_exceeds_max() -> None:
    planned = plan(seen(*FOUR_OLD), FULL)
    assert not of_kind(planned.actions, Spawn)
    assert not drained(planned)
    assert "no free slot" in planned.decision


def test_max_unavailable_counts_replacements_that_have_not_passed() -> None:
    workers = (*FOUR_OLD[:2], new(2, status="spawning", heartbeat=None, created=10))
    state = rollout(surge=0, max_unavailable=2, replacing=(2,))
    planned = plan(seen(*workers, rollout=state), FULL_3)
    assert len(drained(planned)) == 1
    assert rollout_of(planned).owed == 1


FULL_3 = fleet(min_workers=0, max_workers=3, heartbeat_interval_s=5)


def test_worker_that_the_policy_spawned_must_pass_first() -> None:
    """It took the last slot. Otherwise an old worker would drain for a version that may not work."""
    state = rollout(surge=1, max_unavailable=1)
    on_trial = seen(*FOUR_OLD, new(4, status="spawning", heartbeat=None, created=10), queued=3, rollout=state)
    assert drained(plan(on_trial, FULL_AND_ONE)) == []
    passed = seen(*FOUR_OLD, new(4, claimed=30), queued=3, rollout=state)
    assert len(drained(plan(passed, FULL_AND_ONE))) == 1


def test_refused_replacement_is_owed_again() -> None:
    planned = plan(seen(*FOUR_OLD[:3], rollout=rollout(surge=0, max_unavailable=1, replacing=(3,))), FULL)
    assert only(planned, Spawn).slot == 3
    assert rollout_of(planned).replacing == (3,)


def test_policy_spawn_counts_as_the_replacement() -> None:
    state = rollout(surge=0, max_unavailable=1, owed=1)
    planned = plan(seen(*FOUR_OLD[:3], queued=50, rollout=state), FULL)
    assert len(of_kind(planned.actions, Spawn)) == 1
    assert (rollout_of(planned).owed, rollout_of(planned).replacing) == (0, (3,))


def test_rollout_is_complete_when_no_old_worker_is_left() -> None:
    planned = plan(seen(*(new(n, claimed=30) for n in range(4)), rollout=rollout()), FOUR)
    assert only(planned, RecordEvent).code == "DEPLOY_COMPLETE"
    assert rollout_of(planned).status is RolloutStatus.COMPLETE


def test_hand_started_workers_are_not_replaced() -> None:
    manual = worker("mine", None)
    planned = plan(seen(manual, *(new(n, claimed=30) for n in range(4)), rollout=rollout()), FOUR)
    assert rollout_of(planned).status is RolloutStatus.COMPLETE
    assert not drained(planned)


# ------------------------------------------------------------------------------------------------------ bad versions


def crashed(slot: int) -> WorkerView:
    return new(slot, status="error", code="MACHINE_GONE", reason="its process exited with code 1")


def test_second_worker_that_fails_rejects_the_version() -> None:
    one = plan(seen(*FOUR_OLD, crashed(4), rollout=rollout(surged=(4,))), FOUR)
    assert rollout_of(one).is_running
    assert rollout_of(one).failed == ("n4",)
    two = plan(seen(*FOUR_OLD, crashed(4), crashed(5), rollout=rollout_of(one)), FOUR)
    assert only(two, RecordEvent).code == "DEPLOY_ROLLED_BACK"
    assert two.hold is not None
    assert two.hold.code == "VERSION_REJECTED"
    assert any(alert.code == "VERSION_REJECTED" for alert in of_kind(two.actions, RaiseAlert))
    assert not of_kind(two.actions, Spawn)
    assert not drained(two), "the old workers stay"


def test_failed_worker_is_counted_once() -> None:
    planned = plan(seen(*FOUR_OLD, crashed(4), rollout=rollout(failed=("n4",))), FOUR)
    assert rollout_of(planned).failed == ("n4",)
    assert rollout_of(planned).is_running


def test_machine_that_the_vendor_took_does_not_reject() -> None:
    gone = [replace(crashed(n), id=f"n{n}") for n in (4, 5)]
    planned = plan(seen(*FOUR_OLD, *gone, rollout=rollout(), traits=ProviderTraits(is_remote=True)), FOUR)
    assert rollout_of(planned).is_running


def failed_on(host: str | None, slot: int, code: str) -> WorkerView:
    return new(slot, status="error", code=code, reason="its check failed", machine_host=host)


def test_avoided_host_never_counts_against_a_version() -> None:
    """Pods that land on a host which this fleet avoids, one after another."""
    pods = [failed_on("8.8.4.4", n, "HOST_AVOIDED") for n in range(4, 6)]
    planned = plan(seen(*FOUR_OLD, *pods, rollout=rollout()), FOUR)
    assert rollout_of(planned).is_running
    assert (rollout_of(planned).failed, rollout_of(planned).failed_hosts) == ((), ())


@pytest.mark.parametrize("code", ["GPU_NOT_DETECTED", "STORAGE_NOT_MOUNTED"])
@pytest.mark.parametrize(
    ("hosts", "is_rejected"),
    [
        pytest.param(("8.8.4.4", "8.8.4.4"), False, id="twice on one host"),
        pytest.param(("8.8.4.4", "8.8.8.8"), True, id="on two hosts"),
        pytest.param((None, None), True, id="on unknown hosts"),
        pytest.param(("8.8.4.4", None), False, id="once on a known host"),
    ],
)
def test_failed_check_of_a_host_counts_on_a_second_host(
    code: str, hosts: tuple[str | None, str | None], is_rejected: bool
) -> None:
    first, second = (failed_on(host, slot, code) for slot, host in zip((4, 5), hosts, strict=True))
    one = plan(seen(*FOUR_OLD, first, rollout=rollout(surged=(4,))), FOUR)
    assert rollout_of(one).is_running
    # The first is still being deleted.
    two = plan(seen(*FOUR_OLD, first, second, rollout=rollout_of(one)), FOUR)
    assert rollout_of(two).is_running is not is_rejected
    # Its row is closed.
    two = plan(seen(*FOUR_OLD, second, rollout=rollout_of(one)), FOUR)
    assert rollout_of(two).is_running is not is_rejected


def test_host_of_a_check_that_fails_in_this_plan_is_known_from_the_list() -> None:
    pods = [
        new(n, status="spawning", heartbeat=None, prepare_code="GPU_NOT_DETECTED", prepare_reason="no GPU answers")
        for n in (4, 5)
    ]
    there = (*machines_of(FOUR_OLD), *(machine(pod.id, host="8.8.4.4") for pod in pods))
    planned = plan(seen(*FOUR_OLD, *pods, rollout=rollout(), machines=there), FOUR)
    assert {fail.worker_id for fail in of_kind(planned.actions, Fail)} == {"n4", "n5"}
    assert rollout_of(planned).failed_hosts == ("8.8.4.4",)
    assert rollout_of(planned).is_running


def test_tasks_that_fail_only_on_the_new_worker_reject() -> None:
    failing = new(4, claimed=50, failing_since=ago(40))
    streak = FailureStreak("n4", ago(40), (1, 2, 3))
    planned = plan(seen(*FOUR_OLD, failing, rollout=rollout(surged=(4,)), failure_streaks=(streak,)), FOUR)
    assert rollout_of(planned).status is RolloutStatus.ROLLED_BACK
    assert "3 different tasks in a row failed on n4" in (rollout_of(planned).reason or "")


def test_tasks_that_fail_everywhere_do_not_reject() -> None:
    failing = new(4, claimed=50, failing_since=ago(40))
    streak = FailureStreak("n4", ago(40), (1, 2, 3), failed_elsewhere=(1, 2, 3))
    planned = plan(seen(*FOUR_OLD, failing, rollout=rollout(surged=(4,)), failure_streaks=(streak,)), FOUR)
    assert rollout_of(planned).is_running


def test_settings_that_the_provider_refuses_reject() -> None:
    refusal = ProviderRefusal("INVALID_REQUEST", "image not found", ago(10))
    planned = plan(seen(*FOUR_OLD, rollout=rollout(surged=(4,)), refusal=refusal), FOUR)
    assert rollout_of(planned).status is RolloutStatus.ROLLED_BACK
    assert not drained(planned)


def test_rollback_drains_new_workers_that_never_worked() -> None:
    state = rollout(status=RolloutStatus.ROLLED_BACK, ended_at=ago(1), reason="it crashes")
    worked, starting = new(4, claimed=30), new(5, status="spawning", heartbeat=None, created=10)
    planned = plan(seen(*FOUR_OLD, worked, starting, rollout=state), FOUR)
    assert drained(planned) == ["n5"]
    assert only(planned, Drain).code == "ROLLBACK"


def test_rejected_version_spawns_nothing_until_it_changes() -> None:
    state = rollout(status=RolloutStatus.ROLLED_BACK, ended_at=ago(1), reason="it crashes")
    held = plan(seen(*FOUR_OLD[:2], queued=50, rollout=state), FOUR)
    assert not of_kind(held.actions, Spawn)
    fixed = plan(replace(seen(*FOUR_OLD[:2], queued=50, rollout=state), fingerprint="fixed"), FOUR)
    assert of_kind(fixed.actions, Spawn)


@pytest.mark.parametrize("policy", ["threshold", "buffered", "adaptive"])
@pytest.mark.parametrize("restored", [False, True])
def test_rejected_version_keeps_workers_that_cannot_be_spawned(policy: str, restored: bool) -> None:
    config = fleet(policy=policy, min_workers=0, max_workers=4, heartbeat_interval_s=5)
    state = rollout(status=RolloutStatus.ROLLED_BACK, started_at=ago(600), ended_at=ago(500), reason="it crashes")
    idle = seen(*(old(number, created=4000) for number in range(4)), rollout=state)
    planner_state = idle.planner_state
    health = replace(planner_state.health, idle_since={f"w{number}": ago(400) for number in range(4)})
    scaling = replace(planner_state.scaling, over_capacity_since=ago(400))
    idle = replace(idle, planner_state=replace(planner_state, health=health, scaling=scaling))
    if restored:
        idle = replace(idle, fingerprint="old", rejected="new")
    planned = plan(idle, config)
    assert bool(drained(planned)) is restored
    assert (planned.hold is None) is restored
    assert [alert.code for alert in of_kind(planned.actions, RaiseAlert)] == ["VERSION_REJECTED"]


def test_rollback_names_the_settings_that_changed() -> None:
    working = WorkingVersion("old", '{"handler": "a:b", "runpod": {"image": "x:1"}, "env": "1"}')
    asked = seen(*FOUR_OLD, deploy=DeployRequest(1))
    asked = replace(asked, version_settings='{"handler": "a:b", "runpod": {"image": "x:2"}, "code": "2", "env": "1"}')
    asked = replace(asked, planner_state=replace(asked.planner_state, working=working))
    begun = rollout_of(plan(asked, FOUR))
    assert begun.changes == ("code", "runpod.image")
    rejected = replace(begun, status=RolloutStatus.ROLLED_BACK, ended_at=ago(1), reason="it crashes")
    planned = plan(seen(*FOUR_OLD, rollout=rejected), FOUR)
    assert only(planned, RaiseAlert).reason == "version new was rolled back: it crashes; changed: code, runpod.image"


@pytest.mark.parametrize("by", ["deploy", "restart"])
def test_person_may_try_a_rejected_version_again(by: str) -> None:
    state = rollout(status=RolloutStatus.ROLLED_BACK, ended_at=ago(10), reason="it crashes")
    asked: dict[str, Any] = {"deploy": DeployRequest(2)} if by == "deploy" else {"reset_at": ago(1)}
    planned = plan(seen(*FOUR_OLD[:2], queued=50, rollout=state, **asked), FOUR)
    assert planned.hold is None
    assert of_kind(planned.actions, Spawn)


def test_abort_drains_the_surge_and_keeps_the_rest() -> None:
    asked = DeployRequest(1, surge=1, is_aborted=True)
    workers = (*FOUR_OLD[:3], new(3, claimed=30), new(4))
    planned = plan(seen(*workers, deploy=asked, rollout=rollout(surged=(4,))), FOUR)
    assert only(planned, RecordEvent).code == "DEPLOY_ABORTED"
    assert drained(planned) == ["n4"]
    assert planned.hold is None
    assert not plan(apply(planned, seen(*workers, deploy=asked), FOUR), FOUR).actions


def test_abort_of_an_unseen_request_stops_the_running_rollout() -> None:
    """Settings changed, and a second deploy was aborted before any cycle saw it."""
    asked = DeployRequest(2, is_aborted=True)
    first = plan(seen(*FOUR_OLD, deploy=asked, rollout=rollout(target="former", surged=(4,))), FOUR)
    assert only(first, RecordEvent).code == "DEPLOY_ABORTED"
    assert not of_kind(first.actions, Spawn)
    after = apply(first, seen(*FOUR_OLD, deploy=asked), FOUR)
    assert not plan(after, FOUR).actions
    deployed = plan(replace(after, deploy=DeployRequest(3)), FOUR)
    assert (rollout_of(deployed).id, rollout_of(deployed).target) == (3, "new")


@pytest.mark.parametrize("before", [None, rollout(target="old", status=RolloutStatus.COMPLETE, ended_at=ago(50))])
def test_unseen_aborted_request_does_not_block_watching(before: Rollout | None) -> None:
    asked = DeployRequest(2, is_aborted=True)
    first = plan(replace(seen(*FOUR_OLD, deploy=asked, rollout=before), is_watching=True), FOUR)
    assert only(first, RecordEvent).code == "DEPLOY_STARTED"
    assert len(of_kind(first.actions, Spawn)) == 1
    second = plan(apply(first, replace(seen(*FOUR_OLD, deploy=asked), is_watching=True), FOUR), FOUR)
    assert rollout_of(second).is_running, "the abort belongs to the request, not to what began later"
    assert not of_kind(second.actions, Spawn)


def test_watching_fleet_rolls_out_the_change_after_an_abort() -> None:
    asked = DeployRequest(1, surge=1, is_aborted=True)
    watched = replace(seen(*FOUR_OLD, deploy=asked, rollout=rollout()), is_watching=True)
    aborted = plan(watched, FOUR)
    assert rollout_of(aborted).status is RolloutStatus.ABORTED
    same = apply(aborted, watched, FOUR)
    assert not plan(same, FOUR).actions, "the aborted version is not tried again"
    begun = plan(replace(same, fingerprint="fixed"), FOUR)
    assert only(begun, RecordEvent).code == "DEPLOY_STARTED"
    following = plan(apply(begun, replace(same, fingerprint="fixed"), FOUR), FOUR)
    assert (rollout_of(following).target, rollout_of(following).is_running) == ("fixed", True)


@pytest.mark.parametrize("current", ["other", None])
def test_rollout_takes_no_step_while_another_version_is_current(current: str | None) -> None:
    state = replace(seen(*FOUR_OLD, new(4, claimed=30), rollout=rollout(surged=(4,), owed=1)), fingerprint=current)
    context = build_context(state, FOUR)
    assert replace_workers(context, list(context.states.values()), {}) == []
    context = build_context(replace(state, fingerprint="new"), FOUR)
    assert replace_workers(context, list(context.states.values()), {})


def test_changed_code_restarts_the_rollout_with_the_newest_version() -> None:
    planned = plan(replace(seen(*FOUR_OLD, new(4), rollout=rollout(surged=(4,))), fingerprint="newer"), FOUR)
    assert rollout_of(planned).target == "newer"
    assert "changed again" in only(planned, RecordEvent).reason


def test_watching_fleet_rolls_out_a_change_by_itself() -> None:
    planned = plan(replace(seen(*FOUR_OLD, deploy=None), is_watching=True), FOUR)
    assert only(planned, RecordEvent).code == "DEPLOY_STARTED"
    assert rollout_of(planned).is_immediate
    quiet = plan(seen(*FOUR_OLD, deploy=None), FOUR)
    assert not quiet.actions


def test_unknown_version_changes_nothing() -> None:
    planned = plan(replace(seen(*FOUR_OLD, new(4, claimed=30), rollout=rollout(surged=(4,))), fingerprint=None), FOUR)
    assert not of_kind(planned.actions, Drain)
    assert rollout_of(planned).is_running


@pytest.mark.parametrize("why", ["paused", "hold"])
def test_paused_or_held_fleet_waits(why: str) -> None:
    state = seen(*FOUR_OLD, new(4, claimed=30), rollout=rollout(surged=(4,)))
    if why == "paused":
        state = replace(state, is_paused=True)
    else:
        rate = FailureRateState(trips=1, until=ago(-100), judged_until=ago(30))
        state = replace(state, planner_state=with_state(state.planner_state, failure_rate=rate))
    assert not drained(plan(state, FOUR))


def test_rollout_without_progress_raises_an_alert() -> None:
    late = rollout(started_at=ago(4000), changed_at=ago(2000))
    planned = plan(seen(*FOUR_OLD, rollout=late), FULL)
    assert [alert.code for alert in of_kind(planned.actions, RaiseAlert)] == ["DEPLOY_STALLED"]


# ------------------------------------------------------------------------------------------------------ billed hours


def hourly(number: int, minutes: float) -> WorkerView:
    return old(number, created=minutes * 60, machine_at=minutes * 60, claimed=minutes * 60 - 60)


@pytest.mark.parametrize(
    ("minutes", "changes", "is_drained"),
    [
        pytest.param(1, {}, False, id="a billed hour that has just begun is used up"),
        pytest.param(59, {}, True, id="its hour ends in a minute"),
        pytest.param(1, {"is_immediate": True}, True, id="--now does not wait"),
        pytest.param(61, {"started_at": ago(3700)}, True, id="an hour after the deploy no hour is waited for"),
    ],
)
def test_billed_hours_are_used_up(minutes: float, changes: dict[str, Any], is_drained: bool) -> None:
    canary = new(4, claimed=30)
    state = rollout(surged=(4,), **changes)
    workers = [hourly(n, minutes) for n in range(4)]
    planned = plan(seen(*workers, canary, rollout=state, traits=HOURLY), fleet(FOUR, poll_interval_s=10))
    assert bool(drained(planned)) is is_drained
    if not is_drained:
        assert "billing periods end" in planned.decision


def test_one_new_machine_starts_at_once_however_long_hours_last() -> None:
    planned = plan(seen(*(hourly(n, 1) for n in range(4)), traits=HOURLY), FOUR)
    assert len(of_kind(planned.actions, Spawn)) == 1


# -------------------------------------------------------------------------------------------------------- properties

derandomized = settings(max_examples=150, derandomize=True, deadline=None, database=None)


@st.composite
def rollout_scenarios(draw: st.DrawFn) -> Scenario:
    scene = draw(scenarios())
    versions = st.sampled_from(("old", "new", None))
    workers = tuple(replace(view, fingerprint=draw(versions)) for view in scene.snapshot.workers)
    surge, unavailable = draw(st.sampled_from(((1, 0), (2, 0), (0, 1), (0, 3), (1, 1))))
    slots = st.lists(st.integers(0, scene.fleet.max_workers - 1), unique=True, max_size=2).map(tuple)
    begun = Rollout(
        1, "new", surge, unavailable, draw(st.booleans()), ago(800.5), status=draw(st.sampled_from(RolloutStatus)),
        surged=draw(slots), replacing=draw(slots), owed=draw(st.integers(0, 2)), ended_at=ago(5.5), reason="it crashes",
        changed_at=ago(800.5),
    )  # fmt: skip
    state = with_state(scene.snapshot.planner_state, rollout=draw(st.sampled_from((None, begun, begun))))
    request = draw(st.sampled_from((None, DeployRequest(1, surge, unavailable), DeployRequest(2), DeployRequest(3, 1))))
    seen = replace(
        scene.snapshot, workers=workers, planner_state=state, deploy=request, fingerprint=draw(versions),
        is_watching=draw(st.booleans()),
    )  # fmt: skip
    return Scenario(seen, scene.fleet)


@derandomized
@given(rollout_scenarios())
def test_rollout_keeps_the_limits_of_every_plan(scene: Scenario) -> None:
    planned = plan(scene.snapshot, scene.fleet)
    spawns, drains = of_kind(planned.actions, Spawn), of_kind(planned.actions, Drain)
    held = {view.slot for view in scene.snapshot.workers if view.slot is not None}
    assert not (spawns and drains)
    assert len(spawns) <= scene.fleet.max_changes_per_cycle
    assert all(0 <= spawn.slot < scene.fleet.max_workers and spawn.slot not in held for spawn in spawns)
    assert not spawns or len(held) + len(spawns) <= scene.fleet.max_workers + len(of_kind(planned.actions, Delete))
    assert len({spawn.slot for spawn in spawns}) == len(spawns)
    if planned.hold is not None and not scene.snapshot.requested:
        assert not spawns
    if (planned.hold is not None and planned.hold.is_total) or scene.snapshot.is_paused:
        assert not [drain for drain in drains if drain.code == "DEPLOY"]
    ended = {action.worker_id for action in planned.actions if isinstance(action, Fail | Delete)}
    assert not ended & {drain.worker_id for drain in drains}
    targets = {view.id: view for view in scene.snapshot.workers}
    for drain in drains:
        if drain.code == "DEPLOY":
            assert targets[drain.worker_id].fingerprint != scene.snapshot.fingerprint, "a new worker is replaced"
            assert targets[drain.worker_id].slot is not None
    assert plan(scene.snapshot, scene.fleet) == planned


@derandomized
@given(rollout_scenarios())
def test_plan_of_a_rollout_is_idempotent(scene: Scenario) -> None:
    first = plan(scene.snapshot, scene.fleet)
    second = plan(apply(first, scene.snapshot, scene.fleet), scene.fleet)
    # The step after a spawn is a drain, and the other way round; each needs another cycle, so the plan says so.
    if not first.is_cut_short:
        ours = [a for a in second.actions if isinstance(a, Spawn) or getattr(a, "code", "") in ("DEPLOY", "ROLLBACK")]
        assert ours == []
    else:
        assert all(event.code != "DEPLOY_STARTED" for event in of_kind(second.actions, RecordEvent))


@settings(derandomized, max_examples=40)
@given(st.integers(1, 5), st.integers(0, 2), st.sampled_from(((1, 0), (2, 0), (0, 1), (0, 2), (0, 0))), st.booleans())
def test_every_rollout_ends_and_keeps_its_availability(
    count: int, spare: int, how: tuple[int, int], is_bad: bool
) -> None:
    surge, unavailable = how
    config = FleetConfig(policy="buffered", min_workers=count, max_workers=count + spare, heartbeat_interval_s=5)

    def live(view: WorkerView, now: datetime) -> WorkerView:
        if is_bad and view.fingerprint == "new" and view.status.value == "active":
            return replace(view, last_heartbeat=now - timedelta(seconds=9999))
        return beating(view, now)

    workers = tuple(old(n) for n in range(count))
    world = FleetSimulation(config, seen(*workers, deploy=DeployRequest(1, surge, unavailable)), live)
    lowest = count
    for _ in range(60):
        world.cycle()
        views = world.seen.workers
        assert len([v for v in views if v.slot is not None]) <= config.max_workers
        up = sum(v.status.value == "active" and v.last_heartbeat is not None for v in views)
        lowest = min(lowest, up)
    ended = world.plans[-1].planner_state.rollout
    assert ended is not None
    if is_bad:
        olds = [v for v in world.seen.workers if v.fingerprint == "old" and v.status.value == "active"]
        allowed = unavailable or (1 if spare == 0 and not surge else 0)
        assert len(olds) >= count - allowed
        assert ended.status is not RolloutStatus.COMPLETE
    elif surge and spare == 0:
        assert ended.is_running, "a surge needs a free slot"
    else:
        assert ended.status is RolloutStatus.COMPLETE
        assert all(v.fingerprint == "new" for v in world.seen.workers)
        allowed = unavailable or (1 if spare == 0 else 0)
        assert lowest >= count - allowed, "more workers were missing than allowed"
