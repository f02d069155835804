"""Scaling policies with their formulas and examples, and the limits of every policy."""

from math import ceil
from typing import Any

import pytest

from support.snapshots import (
    NOW,
    FleetSimulation,
    ago,
    apply,
    beating,
    fleet,
    kinds,
    machine,
    of_kind,
    snapshot,
    task,
    worker,
)
from windlass.model.action import Delete, Drain, Plan, Spawn
from windlass.model.fleet import FleetConfig
from windlass.model.snapshot import MAX_QUEUED, QueueView, SlotView, Snapshot, WorkerView
from windlass.policy.plan import plan
from windlass.policy.scale import POLICIES, Demand, ScalingDecision
from windlass.policy.worker_state import Presence, WorkerState, derive_worker_state

THRESHOLD = fleet(policy="threshold", min_workers=2, max_workers=10, tasks_per_worker=3)
BUFFERED = fleet(policy="buffered", min_workers=0, max_workers=10)
CLEAR_TIME = fleet(policy="clear-time", min_workers=0, max_workers=50, concurrency=2, clear_time_s=300)


def state(view: WorkerView, config: FleetConfig) -> WorkerState:
    return derive_worker_state(view, None, Presence.UNKNOWN, config, NOW, 0, idle_since=ago(100))


def decide(
    config: FleetConfig, queued: int, idle: int = 0, busy: int = 0, booting: int = 0, p50: float | None = 60
) -> ScalingDecision:
    """The policy's decision for this many workers. Busy ones have no free slot."""
    full = tuple(task(n) for n in range(config.concurrency))
    active = [worker(f"i{n}", n, concurrency=config.concurrency) for n in range(idle)]
    active += [worker(f"b{n}", n, concurrency=config.concurrency, running=full) for n in range(busy)]
    starting = [worker(f"s{n}", n, "spawning", heartbeat=None) for n in range(booting)]
    demand = Demand(
        queue=QueueView(queued=queued, duration_p50_s=p50),
        active=tuple(state(view, config) for view in active),
        booting=tuple(state(view, config) for view in starting),
        fleet=config,
    )
    return POLICIES[config.policy](demand)


def cases(*rows: tuple[str, dict[str, Any], int, int]) -> Any:
    """Rows of: id, the fleet's situation, spawned workers, spare workers."""
    return pytest.mark.parametrize(("situation", "spawn", "spare"), [pytest.param(*row[1:], id=row[0]) for row in rows])


# ---------------------------------------------------------------------------------------------------------- threshold


@cases(
    ("queue empty, no workers", {"queued": 0}, 0, 0),
    ("tasks but no workers always scales, to the minimum", {"queued": 10}, 2, 0),
    ("at most 3 for each is fine", {"queued": 6, "busy": 2}, 0, 0),
    ("7 for 2 workers is above 3 each: ceil(7 / 3) = 3 wanted", {"queued": 7, "busy": 2}, 1, 0),
    ("15 queued for 5 active", {"queued": 15, "busy": 5}, 0, 0),
    ("31 for 5 workers: ceil(31 / 3) = 11 wanted", {"queued": 31, "busy": 5}, 6, 0),
    ("spawning workers count as capacity", {"queued": 31, "busy": 5, "booting": 6}, 0, 0),
    ("only spawning workers are capacity too", {"queued": 6, "booting": 2}, 0, 0),
    ("all idle: all are spare, the minimum is applied elsewhere", {"queued": 0, "idle": 5}, 0, 5),
    ("an idle worker that a queued task will occupy is not spare", {"queued": 2, "idle": 5}, 0, 3),
    ("busy workers are never spare", {"queued": 0, "busy": 5}, 0, 0),
)
def test_threshold(situation: dict[str, Any], spawn: int, spare: int) -> None:
    answer = decide(THRESHOLD, **situation)
    assert (answer.spawn, len(answer.spare)) == (spawn, spare)


def test_threshold_with_minimum_zero_spawns_first_worker() -> None:
    assert decide(fleet(THRESHOLD, min_workers=0), queued=1).spawn == 1


@pytest.mark.parametrize("capacity", range(1, 12))
@pytest.mark.parametrize("queued", [0, 1, 2, 3, 5, 8, 13, 21, 34])
def test_threshold_matches_original_gpu_orchestrator(queued: int, capacity: int) -> None:
    should_scale_up = queued / capacity > THRESHOLD.tasks_per_worker
    needed = max(0, max(THRESHOLD.min_workers, ceil(queued / THRESHOLD.tasks_per_worker)) - capacity)
    assert decide(THRESHOLD, queued=queued, busy=capacity).spawn == (needed if should_scale_up else 0)


# ----------------------------------------------------------------------------------------------------------- buffered


@cases(
    ("queue empty, no workers", {"queued": 0}, 0, 0),
    ("one worker per queued task", {"queued": 4}, 4, 0),
    ("in addition to busy workers", {"queued": 4, "busy": 3}, 4, 0),
    ("idle workers count", {"queued": 4, "busy": 3, "idle": 1}, 3, 0),
    ("starting workers count", {"queued": 4, "booting": 4}, 0, 0),
    ("never more than the maximum", {"queued": 1000, "busy": 3}, 7, 0),
    (
        "idle ones that waiting tasks will fill are not spare, however many are starting",
        {"queued": 2, "idle": 2, "booting": 3},
        0,
        0,
    ),
    ("unneeded idle workers are spare", {"queued": 0, "busy": 3, "idle": 2}, 0, 2),
    ("9 needed of 10 is nine tenths: the tenth is spare", {"queued": 0, "busy": 9, "idle": 1}, 0, 1),
)
def test_buffered(situation: dict[str, Any], spawn: int, spare: int) -> None:
    answer = decide(BUFFERED, **situation)
    assert (answer.spawn, len(answer.spare)) == (spawn, spare)


@cases(
    ("the buffer is spawned with an empty queue", {"queued": 0}, 2, 0),
    ("the buffer exists", {"queued": 0, "idle": 2}, 0, 0),
    ("in addition to busy workers", {"queued": 0, "busy": 3, "idle": 1}, 1, 0),
    ("in addition to queued tasks", {"queued": 3, "idle": 2}, 3, 0),
    ("beyond the buffer is spare", {"queued": 0, "busy": 1, "idle": 4}, 0, 2),
)
def test_buffered_keeps_idle_buffer(situation: dict[str, Any], spawn: int, spare: int) -> None:
    answer = decide(fleet(BUFFERED, idle_buffer=2), **situation)
    assert (answer.spawn, len(answer.spare)) == (spawn, spare)


@pytest.mark.parametrize(
    ("settings", "situation", "spawn", "spare"),
    [
        pytest.param({"scale_up_multiplier": 1.5}, {"queued": 4}, 6, 0, id="one and a half workers for each task"),
        pytest.param({"scale_up_multiplier": 0.5}, {"queued": 5}, 3, 0, id="a worker for every other task"),
        pytest.param({"scale_up_multiplier": 0.1}, {"queued": 1}, 1, 0, id="at least one worker for a task"),
        pytest.param({"max_workers": 40}, {"queued": 0, "busy": 19, "idle": 1}, 0, 0, id="19 of 20 is within a tenth"),
        pytest.param({"max_workers": 40}, {"queued": 0, "busy": 18, "idle": 2}, 0, 2, id="18 of 20 is not"),
        pytest.param({"scale_down_multiplier": 0.5}, {"queued": 0, "busy": 3, "idle": 2}, 0, 0, id="above half"),
        pytest.param({"scale_down_multiplier": 0.5}, {"queued": 0, "busy": 3, "idle": 3}, 0, 3, id="at half"),
        pytest.param({"min_workers": 3}, {"queued": 0, "idle": 5}, 0, 2, id="the minimum is needed"),
        pytest.param({"concurrency": 4}, {"queued": 9}, 3, 0, id="four tasks to a worker"),
        pytest.param(
            {"concurrency": 4}, {"queued": 9, "busy": 2}, 3, 0, id="in addition to eight tasks on two workers"
        ),
    ],
)
def test_buffered_settings(settings: dict[str, Any], situation: dict[str, Any], spawn: int, spare: int) -> None:
    answer = decide(fleet(BUFFERED, **settings), **situation)
    assert (answer.spawn, len(answer.spare)) == (spawn, spare)


def test_buffered_uses_free_slots_of_busy_workers() -> None:
    config = fleet(BUFFERED, concurrency=4)
    half = state(worker(concurrency=4, running=(task(1), task(2))), config)
    demand = Demand(QueueView(queued=2), (half,), (), config)
    assert POLICIES["buffered"](demand).spawn == 0


# --------------------------------------------------------------------------------------------------------- clear-time


@cases(
    ("as many free slots as queued tasks", {"queued": 4, "idle": 2}, 0, 0),
    ("50 queued, 10 free, 59 s each clears in 295 s", {"queued": 50, "idle": 5, "p50": 59}, 0, 0),
    ("50 queued, 10 free slots: (50 - 10) / 2 = 20 workers", {"queued": 50, "idle": 5, "p50": 60}, 20, 0),
    ("the deficit is rounded up", {"queued": 3, "busy": 1}, 2, 0),
    ("no free slot", {"queued": 1, "busy": 3, "p50": 1}, 1, 0),
    ("starting workers have free slots", {"queued": 20, "booting": 10}, 0, 0),
    ("an unknown duration clears nothing", {"queued": 5, "idle": 1, "p50": None}, 2, 0),
    ("a duration of zero clears at once", {"queued": 5, "idle": 1, "p50": 0}, 0, 0),
    ("the spike from 0 to 1000", {"queued": 1000}, 500, 0),
    ("queue empty: idle workers are spare", {"queued": 0, "idle": 3, "busy": 2}, 0, 3),
    ("three tasks occupy two workers", {"queued": 3, "idle": 3}, 0, 1),
)
def test_clear_time(situation: dict[str, Any], spawn: int, spare: int) -> None:
    answer = decide(CLEAR_TIME, **situation)
    assert (answer.spawn, len(answer.spare)) == (spawn, spare)


@pytest.mark.parametrize(
    ("situation", "reason"),
    [
        ({"queued": 200, "busy": 3, "p50": 1}, "200 queued, 0 free slots, target 103"),
        (
            {"queued": 5, "idle": 1, "p50": None},
            "5 queued, 2 free slots, task duration unknown, target 3",
        ),
    ],
)
def test_clear_time_reason_states_known_numbers(situation: dict[str, Any], reason: str) -> None:
    assert decide(CLEAR_TIME, **situation).reason == reason


# ----------------------------------------------------------------------------------------------- limits of every policy


def spawn_count(planned: Plan) -> int:
    return len(of_kind(planned.actions, Spawn))


def drained_ids(planned: Plan) -> list[str]:
    return [drain.worker_id for drain in of_kind(planned.actions, Drain)]


def idle_fleet(count: int, **rest: Any) -> Snapshot:
    return snapshot(*(worker(f"w{n}", n) for n in range(count)), idle=rest.pop("idle", 100), **rest)


def test_twenty_wanted_workers_are_spawned_ten_per_cycle() -> None:
    ready = [worker(f"w{n}", n, concurrency=2) for n in range(5)]
    planned = plan(snapshot(*ready, queued=50, p50=60), CLEAR_TIME)
    assert spawn_count(planned) == 10
    assert planned.is_cut_short
    assert planned.decision.startswith("spawn 10 of 20: 50 queued, 10 free slots, clears in 300 s, target 25")
    one = plan(snapshot(worker("w0", 0), queued=50, p50=60), CLEAR_TIME)
    assert "50 queued, 1 free slot, clears in" in one.decision


@pytest.mark.parametrize("policy", ["threshold", "buffered", "clear-time"])
def test_spike_spawns_ten_per_cycle_up_to_maximum(policy: str) -> None:
    config = fleet(policy=policy, max_workers=25)
    seen, counts = snapshot(queued=1000), []
    for _ in range(6):
        planned = plan(seen, config)
        counts.append(spawn_count(planned))
        seen = apply(planned, seen, config)
    assert max(counts) == 10
    assert sum(counts) == 25
    assert counts[-1] == 0


@pytest.mark.parametrize("policy", ["threshold", "buffered", "clear-time"])
def test_one_queued_task_spawns_one_worker(policy: str) -> None:
    assert spawn_count(plan(snapshot(queued=1), fleet(policy=policy, min_workers=0))) == 1


@pytest.mark.parametrize("policy", ["threshold", "buffered", "clear-time"])
def test_minimum_is_kept_with_empty_queue(policy: str) -> None:
    config = fleet(policy=policy, min_workers=3)
    assert spawn_count(plan(snapshot(worker("w0", 0)), config)) == 2
    assert drained_ids(plan(idle_fleet(4), config)) == ["w0"]


@pytest.mark.parametrize("policy", ["adaptive", "threshold", "buffered", "clear-time"])
def test_full_fleet_reports_max_workers(policy: str) -> None:
    config = fleet(policy=policy, max_workers=4)
    busy = [worker(f"w{n}", n, running=(task(n),)) for n in range(4)]
    planned = plan(snapshot(*busy, queued=1000), config)
    assert planned.actions == ()
    assert planned.decision.startswith("at max_workers (")


@pytest.mark.parametrize(
    ("scaled_up", "count", "expected"),
    [
        pytest.param(44, 1, 0, id="too soon after the last spawn"),
        pytest.param(45, 1, 3, id="interval passed"),
        pytest.param(10, 0, 4, id="the first worker does not wait"),
    ],
)
def test_min_scaling_interval(scaled_up: float, count: int, expected: int) -> None:
    busy = [worker(f"w{n}", n, running=(task(n),)) for n in range(count)]
    seen = snapshot(*busy, queued=3 + (count == 0), state={"spawned_at": ago(scaled_up)})
    planned = plan(seen, fleet(BUFFERED, min_scaling_interval_s=45))
    assert spawn_count(planned) == expected
    assert expected or planned.decision.startswith("waiting: min_scaling_interval has ")


def test_minimum_ignores_scaling_interval() -> None:
    config = fleet(BUFFERED, min_scaling_interval_s=45, min_workers=3)
    assert spawn_count(plan(snapshot(worker(), state={"spawned_at": ago(1)}), config)) == 2


@pytest.mark.parametrize(
    ("over_since", "idle", "other", "expected"),
    [
        pytest.param(60, 30, None, ["w0"], id="over capacity and idle for long enough"),
        pytest.param(59, 30, None, [], id="over capacity for less than the grace"),
        pytest.param(None, 30, None, [], id="over capacity for the first time"),
        pytest.param(60, 29, None, [], id="idle for less than the timeout"),
        pytest.param(60, 30, ("spawning", None, 400), [], id="a worker is starting"),
        pytest.param(60, 30, ("active", 1, 179), [], id="a recent spawn"),
        pytest.param(60, 30, ("active", 1, 180), ["w0"], id="the last spawn is long ago"),
    ],
)
def test_grace_periods_before_draining(
    over_since: float | None, idle: float, other: tuple[str, float | None, float] | None, expected: list[str]
) -> None:
    config = fleet(BUFFERED, scale_down_grace_s=60, spawn_grace_s=180, idle_timeout_s=30, spawn_timeout_s=600)
    workers = [worker("w0", 0, created=500)]
    if other is not None:
        status, heartbeat, created = other
        workers.append(
            worker("w1", 1, status, created=created, heartbeat=heartbeat, running=(task(),)[: bool(heartbeat)])
        )
    state = {} if over_since is None else {"over_capacity_since": ago(over_since)}
    assert drained_ids(plan(snapshot(*workers, idle=idle, state=state), config)) == expected


def test_longest_idle_drains_first_within_change_limit() -> None:
    views = [worker(f"w{n}", n, idle_s=100.0 + n) for n in range(5)]
    planned = plan(snapshot(*views), fleet(BUFFERED, max_changes_per_cycle=2, min_workers=1))
    assert drained_ids(planned) == ["w4", "w3"]
    assert planned.is_cut_short


@pytest.mark.parametrize("policy", ["threshold", "buffered", "clear-time"])
def test_busy_worker_is_not_drained_when_queue_is_empty(policy: str) -> None:
    busy = [worker(f"w{n}", n, running=(task(n),)) for n in range(4)]
    assert plan(snapshot(*busy, idle=9999), fleet(policy=policy, min_workers=0)).actions == ()


@pytest.mark.parametrize("policy", ["threshold", "buffered", "clear-time"])
def test_dead_worker_is_replaced_once_by_next_cycle(policy: str) -> None:
    """Not twice, as a replacement and for the deficit: replacement is ordinary scaling."""
    config = fleet(policy=policy)
    seen = snapshot(worker(heartbeat=31, running=(task(),)))
    planned = plan(seen, config)
    assert kinds(planned) == ["fail", "delete"]
    assert planned.is_cut_short
    seen = apply(planned, seen, config)
    following = plan(seen, config)
    assert kinds(following) == ["spawn"]
    assert plan(apply(following, seen, config), config).actions == ()


# -------------------------------------------------------------------------------------------------- which workers count


def test_manual_worker_is_no_capacity() -> None:
    by_hand = [worker(f"h{n}", None, claimed=50) for n in range(5)]
    assert spawn_count(plan(snapshot(*by_hand, queued=2, idle=900), BUFFERED)) == 2
    assert plan(snapshot(*by_hand, idle=900), BUFFERED).actions == ()


def test_manual_workers_do_not_count_for_limits() -> None:
    by_hand = [worker(f"h{n}", None, running=(task(n),)) for n in range(5)]
    config = fleet(BUFFERED, min_workers=1, max_workers=2)
    assert spawn_count(plan(snapshot(*by_hand), config)) == 1
    assert spawn_count(plan(snapshot(*by_hand, queued=9), config)) == 2


def test_paused_worker_is_no_capacity() -> None:
    assert spawn_count(plan(snapshot(worker(is_paused=True), queued=1), BUFFERED)) == 1


def test_paused_worker_is_kept_and_counts_for_limits() -> None:
    paused = worker(is_paused=True)
    assert plan(snapshot(paused, idle=9999), BUFFERED).actions == ()
    assert plan(snapshot(paused, queued=5), fleet(BUFFERED, max_workers=1)).actions == ()


def test_paused_fleet_neither_spawns_nor_drains() -> None:
    seen = idle_fleet(2, is_paused=True)
    assert plan(seen, BUFFERED).actions == ()
    planned = plan(snapshot(queued=9, is_paused=True), fleet(BUFFERED, min_workers=1))
    assert planned.actions == ()
    assert planned.decision == "paused: 9 queued, 0 workers"
    paused = snapshot(*(worker(f"w{slot}", slot, is_paused=True) for slot in range(2)), queued=9, is_paused=True)
    assert plan(paused, BUFFERED).decision == "paused: 9 queued, 2 workers"


@pytest.mark.parametrize(
    ("changes", "settings", "cause"),
    [
        ({"queued": 1}, {}, "queue_depth"),
        ({}, {"min_workers": 1}, "min_workers"),
        ({}, {"idle_buffer": 1}, "idle_buffer"),
        ({"requested": 1}, {}, "requested"),
    ],
)
def test_spawn_names_its_cause(changes: dict[str, Any], settings: dict[str, Any], cause: str) -> None:
    (spawn,) = plan(snapshot(**changes), fleet(BUFFERED, **{"min_workers": 0, "idle_buffer": 0, **settings})).actions
    assert isinstance(spawn, Spawn)
    assert spawn.cause == cause


def test_initializing_worker_is_capacity_but_not_idle() -> None:
    config = fleet(BUFFERED, has_gpu=True)
    assert spawn_count(plan(snapshot(worker(created=50), queued=1), config)) == 0
    assert plan(snapshot(worker(created=50), idle=900), config).actions == ()


def test_worker_without_gpu_report_drains_when_idle() -> None:
    assert drained_ids(plan(snapshot(worker(created=601), idle=900), fleet(BUFFERED, has_gpu=True))) == ["w0"]


def test_terminating_workers_are_no_capacity_but_keep_slots() -> None:
    leaving = worker("w0", 0, "terminating", terminating=5, running=(task(),))
    planned = plan(snapshot(leaving, queued=5), fleet(BUFFERED, max_workers=2))
    assert [spawn.slot for spawn in of_kind(planned.actions, Spawn)] == [1]


# --------------------------------------------------------------------------------------------------- slots and requests


def test_failed_slots_lower_the_maximum() -> None:
    slots = (SlotView(0, True), SlotView(2, True))
    planned = plan(
        snapshot(queued=9, slots=slots, state={"alerts": alerted_slots(0, 2)}), fleet(BUFFERED, max_workers=4)
    )
    assert [spawn.slot for spawn in of_kind(planned.actions, Spawn)] == [1, 3]


def test_decision_names_missing_free_slot() -> None:
    slots = (SlotView(0, True),)
    planned = plan(snapshot(queued=9, slots=slots, state={"alerts": alerted_slots(0)}), fleet(BUFFERED, max_workers=1))
    assert planned.actions == ()
    assert planned.decision == "spawn 0 of 1: 9 queued, 0 busy, 9 wanted, max_workers 1; no free slot"


def alerted_slots(*slots: int) -> dict[str, Any]:
    return {f"SLOT_FAILED {slot}": NOW for slot in slots}


def test_requested_workers_are_spawned_despite_policy() -> None:
    planned = plan(snapshot(requested=2), BUFFERED)
    assert [spawn.reason for spawn in of_kind(planned.actions, Spawn)] == ["2 requested by a person"] * 2
    assert spawn_count(plan(snapshot(requested=2, queued=1), BUFFERED)) == 2, "the needed one is among them"


def test_requested_worker_replaces_no_existing_worker() -> None:
    seen = snapshot(worker(), idle=900, requested=1)
    planned = plan(seen, BUFFERED)
    assert kinds(planned) == ["spawn"]
    assert plan(apply(planned, seen, BUFFERED), BUFFERED).actions == ()


def test_no_drain_while_request_waits_for_deletions() -> None:
    seen = snapshot(worker(), idle=900, requested=1, machines=(machine("w0"), machine("unknown")))
    planned = plan(seen, fleet(BUFFERED, max_workers=2))
    assert kinds(planned) == ["delete_orphan"]
    assert "machines that are not deleted yet count towards max_workers" in planned.decision


def test_impossible_request_does_not_block_drains() -> None:
    alerted = {"alerts": alerted_slots(1)}
    seen = snapshot(worker(), idle=900, requested=1, slots=(SlotView(1, True),), state=alerted)
    assert drained_ids(plan(seen, fleet(BUFFERED, max_workers=2))) == ["w0"]


def test_no_drain_while_request_waits_for_a_slot() -> None:
    leaving = worker("w1", 1, "terminating", terminating=1, running=(task(),))
    seen = snapshot(worker(), leaving, idle=900, requested=1)
    assert plan(seen, fleet(BUFFERED, max_workers=2)).actions == ()


def test_excess_requests_do_not_cause_flapping() -> None:
    world = FleetSimulation(fleet(BUFFERED, max_workers=2), snapshot(requested=5), beating)
    for _ in range(100):
        world.cycle()
    assert world.spawns() == 2


def test_requests_are_limited_by_maximum() -> None:
    assert spawn_count(plan(snapshot(requested=9), fleet(BUFFERED, max_workers=2))) == 2


def test_lowered_maximum_drains_idle_workers_first() -> None:
    views = [worker(f"w{n}", n, created=100 - n, running=(task(n),) if n < 4 else ()) for n in range(6)]
    planned = plan(snapshot(*views, idle=0), fleet(BUFFERED, max_workers=3))
    assert drained_ids(planned) == ["w4", "w5", "w3"], "idle ones, then the newest of the busy"
    assert {drain.code for drain in of_kind(planned.actions, Drain)} == {"OVER_MAX"}


def test_lowered_maximum_respects_change_limit() -> None:
    views = [worker(f"w{n}", n) for n in range(6)]
    assert len(drained_ids(plan(snapshot(*views), fleet(BUFFERED, max_workers=1, max_changes_per_cycle=2)))) == 2


def test_draining_workers_above_maximum_take_up_room() -> None:
    """Otherwise a fleet lowered from 10 to 3 would bill six machines while three drain."""
    leaving = [worker(f"w{n}", n, "terminating", terminating=5, running=(task(n),)) for n in (7, 8, 9)]
    assert spawn_count(plan(snapshot(*leaving, queued=9), fleet(BUFFERED, max_workers=3))) == 0


def test_slot_is_refilled_only_after_its_deletion() -> None:
    """A spawn into another slot would not wait for the deletion: four machines where three are allowed."""
    dead = worker("w9", 9, "error", heartbeat=None)
    live = [worker(f"w{n}", n, running=(task(n),)) for n in (7, 8)]
    planned = plan(snapshot(dead, *live, queued=9), fleet(BUFFERED, max_workers=3))
    assert kinds(planned) == ["delete"]
    assert planned.is_cut_short


def test_failed_worker_is_replaced_in_its_slot() -> None:
    views = [worker("w0", 0, heartbeat=31), worker("w1", 1, running=(task(),))]
    planned = plan(snapshot(*views, queued=1), BUFFERED)
    assert [delete.worker_id for delete in of_kind(planned.actions, Delete)] == ["w0"]
    assert of_kind(planned.actions, Spawn) == [], "its slot is reserved until it is gone"
    following = plan(snapshot(views[1], queued=1), BUFFERED)
    assert [spawn.slot for spawn in of_kind(following.actions, Spawn)] == [0]


def test_slow_deletion_does_not_delay_the_replacement() -> None:
    """The slot of a failed worker is reserved for one cycle. If its machine still exists then, another slot is used."""
    views = [worker("w0", 0, status="error", heartbeat=31), worker("w1", 1, running=(task(),))]
    planned = plan(snapshot(*views, queued=1), BUFFERED)
    assert [spawn.slot for spawn in of_kind(planned.actions, Spawn)] == [2]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_reason_says_when_queued_tasks_were_not_all_counted(policy: str) -> None:
    config = fleet(policy=policy, min_workers=0, max_workers=10)
    assert decide(config, MAX_QUEUED - 1).reason.startswith("999999 queued")
    assert decide(config, MAX_QUEUED).reason.startswith("at least 1000000 queued")
