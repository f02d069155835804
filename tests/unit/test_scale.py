"""How many workers are wanted: the policies, with the seeds' own formulas, examples and edge cases."""

from math import ceil
from typing import Any

import pytest

from support.snapshots import (
    NOW,
    Clockwork,
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
from windlass.model.action import Drain, Plan, Spawn
from windlass.model.fleet import FleetConfig
from windlass.model.snapshot import QueueView, SlotView, Snapshot, WorkerView
from windlass.policy.derive import Presence, WorkerState, derive_worker_state
from windlass.policy.plan import plan
from windlass.policy.scale import POLICIES, Demand, ScalingDecision

THRESHOLD = fleet(policy="threshold", min_workers=2, max_workers=10, tasks_per_worker=3)
BUFFERED = fleet(policy="buffered", min_workers=0, max_workers=10)
CLEAR_TIME = fleet(policy="clear-time", min_workers=0, max_workers=50, concurrency=2, clear_time_s=300)


def state(view: WorkerView, config: FleetConfig) -> WorkerState:
    return derive_worker_state(view, None, Presence.UNKNOWN, config, NOW, 0, idle_since=ago(100))


def wish(
    config: FleetConfig, queued: int, idle: int = 0, busy: int = 0, booting: int = 0, p50: float | None = 60
) -> ScalingDecision:
    """The policy's answer for a fleet of so many workers; busy ones have every place taken."""
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
    """Rows of: sentence, the fleet's situation, how many to hire, how many to spare."""
    return pytest.mark.parametrize(("situation", "spawn", "spare"), [pytest.param(*row[1:], id=row[0]) for row in rows])


# ---------------------------------------------------------------------------------------------------------- threshold


@cases(
    ("nothing waits and nobody is there", {"queued": 0}, 0, 0),
    ("000: tasks but no workers always scales, to the minimum", {"queued": 10}, 2, 0),
    ("000: at most 3 for each is fine", {"queued": 6, "busy": 2}, 0, 0),
    ("000: 7 for 2 workers is above 3 each: ceil(7 / 3) = 3 wanted", {"queued": 7, "busy": 2}, 1, 0),
    ("000: 15 queued for 5 active", {"queued": 15, "busy": 5}, 0, 0),
    ("000: 31 for 5 workers: ceil(31 / 3) = 11 wanted", {"queued": 31, "busy": 5}, 6, 0),
    ("000: spawning workers count as capacity", {"queued": 31, "busy": 5, "booting": 6}, 0, 0),
    ("000: only spawning workers are capacity too", {"queued": 6, "booting": 2}, 0, 0),
    ("000: quiet, everybody idle: all are spare, the minimum is kept elsewhere", {"queued": 0, "idle": 5}, 0, 5),
    ("an idle worker that a waiting task will fill is not spare", {"queued": 2, "idle": 5}, 0, 3),
    ("busy workers are never spare", {"queued": 0, "busy": 5}, 0, 0),
)
def test_threshold(situation: dict[str, Any], spawn: int, spare: int) -> None:
    answer = wish(THRESHOLD, **situation)
    assert (answer.spawn, len(answer.spare)) == (spawn, spare)


def test_threshold_with_a_minimum_of_zero_leaves_zero() -> None:
    assert wish(fleet(THRESHOLD, min_workers=0), queued=1).spawn == 1


@pytest.mark.parametrize("capacity", range(1, 12))
@pytest.mark.parametrize("queued", [0, 1, 2, 3, 5, 8, 13, 21, 34])
def test_threshold_agrees_with_the_seeds_own_functions(queued: int, capacity: int) -> None:
    should_scale_up = queued / capacity > THRESHOLD.tasks_per_worker
    needed = max(0, max(THRESHOLD.min_workers, ceil(queued / THRESHOLD.tasks_per_worker)) - capacity)
    assert wish(THRESHOLD, queued=queued, busy=capacity).spawn == (needed if should_scale_up else 0)


# ----------------------------------------------------------------------------------------------------------- buffered


@cases(
    ("nothing waits and nobody is there", {"queued": 0}, 0, 0),
    ("a worker for every waiting task", {"queued": 4}, 4, 0),
    ("beside those that are at work", {"queued": 4, "busy": 3}, 4, 0),
    ("idle ones take the first", {"queued": 4, "busy": 3, "idle": 1}, 3, 0),
    ("starting ones count: no second hiring for the same task", {"queued": 4, "booting": 4}, 0, 0),
    ("never more than the maximum", {"queued": 1000, "busy": 3}, 7, 0),
    (
        "idle ones that waiting tasks will fill are not spare, however many are starting",
        {"queued": 2, "idle": 2, "booting": 3},
        0,
        0,
    ),
    ("idle ones beyond need are spare", {"queued": 0, "busy": 3, "idle": 2}, 0, 2),
    ("9 needed of 10 is nine tenths: the tenth is spare", {"queued": 0, "busy": 9, "idle": 1}, 0, 1),
)
def test_buffered(situation: dict[str, Any], spawn: int, spare: int) -> None:
    answer = wish(BUFFERED, **situation)
    assert (answer.spawn, len(answer.spare)) == (spawn, spare)


@cases(
    ("an idle buffer is kept with nothing to do", {"queued": 0}, 2, 0),
    ("it is there", {"queued": 0, "idle": 2}, 0, 0),
    ("it comes on top of those at work", {"queued": 0, "busy": 3, "idle": 1}, 1, 0),
    ("and on top of what waits", {"queued": 3, "idle": 2}, 3, 0),
    ("what is beyond it is spare", {"queued": 0, "busy": 1, "idle": 4}, 0, 2),
)
def test_buffered_keeps_machines_idle(situation: dict[str, Any], spawn: int, spare: int) -> None:
    answer = wish(fleet(BUFFERED, idle_buffer=2), **situation)
    assert (answer.spawn, len(answer.spare)) == (spawn, spare)


@pytest.mark.parametrize(
    ("settings", "situation", "spawn", "spare"),
    [
        pytest.param({"scale_up_multiplier": 1.5}, {"queued": 4}, 6, 0, id="one and a half workers for each task"),
        pytest.param({"scale_up_multiplier": 0.5}, {"queued": 5}, 3, 0, id="a worker for every other task"),
        pytest.param({"scale_up_multiplier": 0.1}, {"queued": 1}, 1, 0, id="but any task is worth one"),
        pytest.param({"max_workers": 40}, {"queued": 0, "busy": 19, "idle": 1}, 0, 0, id="19 of 20 is within a tenth"),
        pytest.param({"max_workers": 40}, {"queued": 0, "busy": 18, "idle": 2}, 0, 2, id="18 of 20 is not"),
        pytest.param({"scale_down_multiplier": 0.5}, {"queued": 0, "busy": 3, "idle": 2}, 0, 0, id="above half"),
        pytest.param({"scale_down_multiplier": 0.5}, {"queued": 0, "busy": 3, "idle": 3}, 0, 3, id="at half"),
        pytest.param({"min_workers": 3}, {"queued": 0, "idle": 5}, 0, 2, id="the minimum is needed"),
        pytest.param({"concurrency": 4}, {"queued": 9}, 3, 0, id="four tasks to a worker"),
        pytest.param({"concurrency": 4}, {"queued": 9, "busy": 2}, 3, 0, id="beside eight on two workers"),
    ],
)
def test_buffered_settings(settings: dict[str, Any], situation: dict[str, Any], spawn: int, spare: int) -> None:
    answer = wish(fleet(BUFFERED, **settings), **situation)
    assert (answer.spawn, len(answer.spare)) == (spawn, spare)


def test_buffered_fills_the_places_of_workers_that_are_half_busy_first() -> None:
    config = fleet(BUFFERED, concurrency=4)
    half = state(worker(concurrency=4, running=(task(1), task(2))), config)
    demand = Demand(QueueView(queued=2), (half,), (), config)
    assert POLICIES["buffered"](demand).spawn == 0


# --------------------------------------------------------------------------------------------------------- clear-time


@cases(
    ("AC-4.2.1: as many free slots as queued tasks", {"queued": 4, "idle": 2}, 0, 0),
    ("AC-4.2.2: 50 queued, 10 free, 59 s each clears in 295 s", {"queued": 50, "idle": 5, "p50": 59}, 0, 0),
    ("AC-4.2.3: 50 queued, 10 free slots: (50 - 10) / 2 = 20 workers", {"queued": 50, "idle": 5, "p50": 60}, 20, 0),
    ("the deficit is rounded up", {"queued": 3, "busy": 1}, 2, 0),
    ("DESIGN: no free slot clears nothing, and divides nothing by zero", {"queued": 1, "busy": 3, "p50": 1}, 1, 0),
    ("DESIGN: booting workers are free slots (no ten more each loop)", {"queued": 20, "booting": 10}, 0, 0),
    ("an unknown duration clears nothing", {"queued": 5, "idle": 1, "p50": None}, 2, 0),
    ("a duration of zero clears at once", {"queued": 5, "idle": 1, "p50": 0}, 0, 0),
    ("the spike from 0 to 1000", {"queued": 1000}, 500, 0),
    ("nothing waits: whoever is idle is spare", {"queued": 0, "idle": 3, "busy": 2}, 0, 3),
    ("three tasks will fill two workers", {"queued": 3, "idle": 3}, 0, 1),
)
def test_clear_time(situation: dict[str, Any], spawn: int, spare: int) -> None:
    answer = wish(CLEAR_TIME, **situation)
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
def test_clear_time_says_what_it_knows_and_nothing_that_tasks_which_end_belie(
    situation: dict[str, Any], reason: str
) -> None:
    assert wish(CLEAR_TIME, **situation).reason == reason


# ----------------------------------------------------------------------------------------- limits, whatever the policy


def hired(planned: Plan) -> int:
    return len(of_kind(planned.actions, Spawn))


def let_go(planned: Plan) -> list[str]:
    return [drain.worker_id for drain in of_kind(planned.actions, Drain)]


def idle_fleet(count: int, **rest: Any) -> Snapshot:
    return snapshot(*(worker(f"w{n}", n) for n in range(count)), idle=rest.pop("idle", 100), **rest)


def test_seed_001_wants_20_workers_and_hires_10() -> None:
    ready = [worker(f"w{n}", n, concurrency=2) for n in range(5)]
    planned = plan(snapshot(*ready, queued=50, p50=60), CLEAR_TIME)
    assert hired(planned) == 10
    assert planned.is_cut_short
    assert planned.decision.startswith("spawn 10 of 20: 50 queued, 10 free slots, clears in 300 s, target 25")
    one = plan(snapshot(worker("w0", 0), queued=50, p50=60), CLEAR_TIME)
    assert "50 queued, 1 free slot, clears in" in one.decision


@pytest.mark.parametrize("policy", ["threshold", "buffered", "clear-time"])
def test_a_spike_from_0_to_1000_hires_10_a_cycle_up_to_the_maximum_and_no_more(policy: str) -> None:
    config = fleet(policy=policy, max_workers=25)
    seen, counts = snapshot(queued=1000), []
    for _ in range(6):
        planned = plan(seen, config)
        counts.append(hired(planned))
        seen = apply(planned, seen, config)
    assert max(counts) == 10
    assert sum(counts) == 25
    assert counts[-1] == 0


@pytest.mark.parametrize("policy", ["threshold", "buffered", "clear-time"])
def test_any_waiting_task_is_worth_at_least_one_worker(policy: str) -> None:
    assert hired(plan(snapshot(queued=1), fleet(policy=policy, min_workers=0))) == 1


@pytest.mark.parametrize("policy", ["threshold", "buffered", "clear-time"])
def test_the_minimum_is_kept_with_nothing_to_do(policy: str) -> None:
    config = fleet(policy=policy, min_workers=3)
    assert hired(plan(snapshot(worker("w0", 0)), config)) == 2
    assert let_go(plan(idle_fleet(4), config)) == ["w0"]


@pytest.mark.parametrize("policy", ["threshold", "buffered", "clear-time"])
def test_the_maximum_holds_whatever_waits(policy: str) -> None:
    config = fleet(policy=policy, max_workers=4)
    busy = [worker(f"w{n}", n, running=(task(n),)) for n in range(4)]
    planned = plan(snapshot(*busy, queued=1000), config)
    assert planned.actions == ()
    assert planned.decision.startswith("at max_workers (")


@pytest.mark.parametrize(
    ("scaled_up", "count", "expected"),
    [
        pytest.param(44, 1, 0, id="too soon after the last hiring"),
        pytest.param(45, 1, 3, id="the interval is over"),
        pytest.param(10, 0, 4, id="the first worker does not wait"),
    ],
)
def test_the_interval_between_hirings(scaled_up: float, count: int, expected: int) -> None:
    busy = [worker(f"w{n}", n, running=(task(n),)) for n in range(count)]
    seen = snapshot(*busy, queued=3 + (count == 0), state={"spawned_at": ago(scaled_up)})
    planned = plan(seen, fleet(BUFFERED, min_scaling_interval_s=45))
    assert hired(planned) == expected
    assert expected or planned.decision.startswith("waiting: min_scaling_interval has ")


def test_the_minimum_does_not_wait_for_the_interval() -> None:
    config = fleet(BUFFERED, min_scaling_interval_s=45, min_workers=3)
    assert hired(plan(snapshot(worker(), state={"spawned_at": ago(1)}), config)) == 2


@pytest.mark.parametrize(
    ("over_since", "idle", "other", "expected"),
    [
        pytest.param(60, 30, None, ["w0"], id="too many for long enough, idle for long enough"),
        pytest.param(59, 30, None, [], id="too many for less than the grace"),
        pytest.param(None, 30, None, [], id="too many for the first time"),
        pytest.param(60, 29, None, [], id="idle for less than the time-out"),
        pytest.param(60, 30, ("spawning", None, 400), [], id="somebody is still starting"),
        pytest.param(60, 30, ("active", 1, 179), [], id="somebody was hired lately"),
        pytest.param(60, 30, ("active", 1, 180), ["w0"], id="the last hiring is long ago"),
    ],
)
def test_the_graces_before_somebody_is_let_go(
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
    assert let_go(plan(snapshot(*workers, idle=idle, state=state), config)) == expected


def test_the_longest_idle_goes_first_and_at_most_so_many_at_once() -> None:
    views = [worker(f"w{n}", n, idle_s=100.0 + n) for n in range(5)]
    planned = plan(snapshot(*views), fleet(BUFFERED, max_changes_per_cycle=2, min_workers=1))
    assert let_go(planned) == ["w4", "w3"]
    assert planned.is_cut_short


@pytest.mark.parametrize("policy", ["threshold", "buffered", "clear-time"])
def test_a_busy_worker_is_never_let_go_for_want_of_work(policy: str) -> None:
    busy = [worker(f"w{n}", n, running=(task(n),)) for n in range(4)]
    assert plan(snapshot(*busy, idle=9999), fleet(policy=policy, min_workers=0)).actions == ()


@pytest.mark.parametrize("policy", ["threshold", "buffered", "clear-time"])
def test_a_dead_worker_is_replaced_once_and_in_the_same_cycle(policy: str) -> None:
    """Seed 001 replaced it twice: as a replacement, and for the deficit. It is ordinary scaling."""
    config = fleet(policy=policy)
    seen = snapshot(worker(heartbeat=31, running=(task(),)))
    planned = plan(seen, config)
    assert kinds(planned) == ["fail", "delete", "spawn"]
    assert plan(apply(planned, seen, config), config).actions == ()


# ----------------------------------------------------------------------------------------- who counts, and who does not


def test_a_worker_started_by_hand_is_no_capacity_and_no_reason_to_let_go() -> None:
    by_hand = [worker(f"h{n}", None, claimed=50) for n in range(5)]
    assert hired(plan(snapshot(*by_hand, queued=2, idle=900), BUFFERED)) == 2
    assert plan(snapshot(*by_hand, idle=900), BUFFERED).actions == ()


def test_workers_started_by_hand_use_up_neither_minimum_nor_maximum() -> None:
    by_hand = [worker(f"h{n}", None, running=(task(n),)) for n in range(5)]
    config = fleet(BUFFERED, min_workers=1, max_workers=2)
    assert hired(plan(snapshot(*by_hand), config)) == 1
    assert hired(plan(snapshot(*by_hand, queued=9), config)) == 2


def test_a_paused_worker_is_no_capacity() -> None:
    assert hired(plan(snapshot(worker(is_paused=True), queued=1), BUFFERED)) == 1


def test_a_paused_worker_is_not_let_go_but_counts_towards_the_limits() -> None:
    paused = worker(is_paused=True)
    assert plan(snapshot(paused, idle=9999), BUFFERED).actions == ()
    assert plan(snapshot(paused, queued=5), fleet(BUFFERED, max_workers=1)).actions == ()


def test_a_paused_fleet_hires_nobody_and_lets_nobody_go() -> None:
    seen = idle_fleet(2, is_paused=True)
    assert plan(seen, BUFFERED).actions == ()
    planned = plan(snapshot(queued=9, is_paused=True), fleet(BUFFERED, min_workers=1))
    assert planned.actions == ()
    assert planned.decision.startswith("paused: ")


def test_a_worker_still_initializing_counts_as_capacity_but_is_not_idle() -> None:
    config = fleet(BUFFERED, has_gpu=True)
    assert hired(plan(snapshot(worker(created=50), queued=1), config)) == 0
    assert plan(snapshot(worker(created=50), idle=900), config).actions == ()


def test_a_worker_that_never_speaks_of_its_gpu_is_let_go_like_any_other_when_nothing_waits() -> None:
    assert let_go(plan(snapshot(worker(created=601), idle=900), fleet(BUFFERED, has_gpu=True))) == ["w0"]


def test_workers_on_their_way_out_are_no_capacity_but_keep_their_slots() -> None:
    leaving = worker("w0", 0, "terminating", terminating=5, running=(task(),))
    planned = plan(snapshot(leaving, queued=5), fleet(BUFFERED, max_workers=2))
    assert [spawn.slot for spawn in of_kind(planned.actions, Spawn)] == [1]


# ------------------------------------------------------------------------------------------------------- slots, by hand


def test_failed_slots_lower_the_maximum() -> None:
    slots = (SlotView(0, True), SlotView(2, True))
    planned = plan(snapshot(queued=9, slots=slots, state={"alerts": told(0, 2)}), fleet(BUFFERED, max_workers=4))
    assert [spawn.slot for spawn in of_kind(planned.actions, Spawn)] == [1, 3]


def test_with_every_slot_failed_nobody_is_hired_and_the_decision_says_why() -> None:
    slots = (SlotView(0, True),)
    planned = plan(snapshot(queued=9, slots=slots, state={"alerts": told(0)}), fleet(BUFFERED, max_workers=1))
    assert planned.actions == ()
    assert planned.decision == "waiting to spawn 1: 9 queued, 0 busy, 9 wanted, max_workers 1; no free slot"


def told(*slots: int) -> dict[str, Any]:
    return {f"SLOT_FAILED {slot}": NOW for slot in slots}


def test_workers_asked_for_by_hand_are_hired_whatever_the_policy_thinks() -> None:
    planned = plan(snapshot(requested=2), BUFFERED)
    assert [spawn.reason for spawn in of_kind(planned.actions, Spawn)] == ["2 requested by a person"] * 2
    assert hired(plan(snapshot(requested=2, queued=1), BUFFERED)) == 2, "the one that is needed is among them"


def test_who_was_asked_for_does_not_push_out_who_is_there() -> None:
    seen = snapshot(worker(), idle=900, requested=1)
    planned = plan(seen, BUFFERED)
    assert kinds(planned) == ["spawn"]
    assert plan(apply(planned, seen, BUFFERED), BUFFERED).actions == ()


def test_nobody_is_let_go_while_a_request_only_waits_for_room() -> None:
    seen = snapshot(worker(), idle=900, requested=1, machines=(machine("w0"), machine("nobody")))
    planned = plan(seen, fleet(BUFFERED, max_workers=2))
    assert kinds(planned) == ["delete_orphan"]
    assert "machines that are not deleted yet count towards max_workers" in planned.decision


def test_a_request_that_no_slot_can_take_keeps_nobody_from_going() -> None:
    told_of = {"alerts": told(1)}
    seen = snapshot(worker(), idle=900, requested=1, slots=(SlotView(1, True),), state=told_of)
    assert let_go(plan(seen, fleet(BUFFERED, max_workers=2))) == ["w0"]


def test_nobody_is_let_go_while_a_request_waits_for_a_slot_of_one_who_leaves() -> None:
    leaving = worker("w1", 1, "terminating", terminating=1, running=(task(),))
    seen = snapshot(worker(), leaving, idle=900, requested=1)
    assert plan(seen, fleet(BUFFERED, max_workers=2)).actions == ()


def test_more_requests_than_the_fleet_has_room_for_do_not_hire_and_let_go_in_turns() -> None:
    world = Clockwork(fleet(BUFFERED, max_workers=2), snapshot(requested=5), beating)
    for _ in range(100):
        world.cycle()
    assert world.spawns() == 2


def test_nobody_asks_for_more_than_the_maximum() -> None:
    assert hired(plan(snapshot(requested=9), fleet(BUFFERED, max_workers=2))) == 2


def test_a_fleet_that_was_made_smaller_lets_the_rest_go_idle_first() -> None:
    views = [worker(f"w{n}", n, created=100 - n, running=(task(n),) if n < 4 else ()) for n in range(6)]
    planned = plan(snapshot(*views, idle=0), fleet(BUFFERED, max_workers=3))
    assert let_go(planned) == ["w4", "w5", "w3"], "idle ones, then the newest of the busy"
    assert {drain.code for drain in of_kind(planned.actions, Drain)} == {"OVER_MAX"}


def test_a_fleet_that_was_made_smaller_still_changes_only_so_much_at_once() -> None:
    views = [worker(f"w{n}", n) for n in range(6)]
    assert len(let_go(plan(snapshot(*views), fleet(BUFFERED, max_workers=1, max_changes_per_cycle=2)))) == 2


def test_workers_in_slots_beyond_the_maximum_that_are_leaving_still_take_up_room() -> None:
    """Otherwise a fleet that shrank from 10 to 3 would bill six machines while three drain."""
    leaving = [worker(f"w{n}", n, "terminating", terminating=5, running=(task(n),)) for n in (7, 8, 9)]
    assert hired(plan(snapshot(*leaving, queued=9), fleet(BUFFERED, max_workers=3))) == 0


def test_a_slot_is_filled_again_only_when_its_own_machine_is_gone() -> None:
    """A spawn into another slot would not wait for the deletion: four machines where three are allowed."""
    dead = worker("w9", 9, "error", heartbeat=None)
    live = [worker(f"w{n}", n, running=(task(n),)) for n in (7, 8)]
    planned = plan(snapshot(dead, *live, queued=9), fleet(BUFFERED, max_workers=3))
    assert kinds(planned) == ["delete"]
    assert planned.is_cut_short


def test_a_broken_worker_is_restarted_in_its_own_slot() -> None:
    views = [worker("w0", 0, heartbeat=31), worker("w1", 1, running=(task(),))]
    planned = plan(snapshot(*views, queued=1), BUFFERED)
    assert [spawn.slot for spawn in of_kind(planned.actions, Spawn)] == [0]
