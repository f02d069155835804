"""The failure-rate guard, and whole days of a fleet: what a bad image costs, and what a constant load does."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from support.snapshots import (
    GPU,
    LOCAL,
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
from windlass.model.action import Drain, Fail, RaiseAlert, Spawn
from windlass.model.fleet import FleetConfig
from windlass.model.snapshot import FailureRateState, LaunchRecord, RecentFailure, Snapshot, WorkerView
from windlass.policy.plan import plan


def launches(failed: int, of: int, age: float = 100) -> tuple[LaunchRecord, ...]:
    return tuple(LaunchRecord(ago(age), n < failed) for n in range(of))


def tripped(until: float, trips: int = 1) -> dict[str, Any]:
    """The guard tripped, and its pause ends (negative: ended) so many seconds from now."""
    return {"failure_rate": FailureRateState(trips=trips, until=ago(-until), judged_until=ago(300 - until))}


@pytest.mark.parametrize(
    ("failed", "of", "is_held"),
    [
        pytest.param(4, 4, False, id="four hirings say nothing"),
        pytest.param(4, 5, False, id="four of five is exactly the rate that is allowed"),
        pytest.param(5, 5, True, id="five of five is too many"),
        pytest.param(9, 11, True, id="nine of eleven is above 0.8"),
        pytest.param(0, 9, False, id="all is well"),
    ],
)
def test_a_fleet_whose_hirings_mostly_fail_hires_nobody(failed: int, of: int, is_held: bool) -> None:
    planned = plan(snapshot(queued=1, launches=launches(failed, of)), LOCAL)
    if is_held:
        assert kinds(planned) == ["alert"]
        assert planned.hold is not None
        assert planned.hold.code == "FAILURE_RATE"
        assert planned.hold.reason == f"failure rate {failed} of {of} in 5 min; no spawns until 12:05:00 UTC"
        assert planned.decision.startswith("hold: ")
        assert not planned.hold.is_total
    else:
        assert kinds(planned) == ["spawn"]


def test_what_breaks_in_this_very_plan_counts() -> None:
    views = [worker(f"w{n}", n, created=100, heartbeat=None, status="spawning") for n in range(5)]
    planned = plan(snapshot(*views, queued=5, launches=launches(0, 5)), LOCAL)
    assert set(kinds(planned)) == {"fail", "delete", "alert"}
    assert planned.hold is not None
    assert "5 workers in a row failed before they proved to work, last " in planned.hold.reason


def test_the_hold_says_why_the_last_one_broke() -> None:
    failure = RecentFailure(
        "w1", "MACHINE_GONE", "Its process exited with code 2; its log ends: cannot find nope in app.", NOW
    )
    for state, what in (({}, "failure rate 5 of 5 in 5 min"), (tripped(until=10), "workers keep failing")):
        planned = plan(snapshot(queued=5, launches=launches(5, 5), last_failure=failure, state=state), LOCAL)
        assert planned.hold is not None
        why = "last MACHINE_GONE (Its process exited with code 2; its log ends: cannot find nope in app); "
        assert planned.hold.reason.startswith(f"{what}, {why}no spawns until "), planned.hold.reason
        assert "cannot find nope in app" in of_kind(planned.actions, RaiseAlert)[0].reason


def test_while_the_guard_holds_even_the_minimum_waits() -> None:
    planned = plan(snapshot(queued=9, state=tripped(until=10)), fleet(min_workers=2))
    assert kinds(planned) == ["alert"]
    assert "until 12:00:10 UTC" in planned.decision


def test_the_guard_lets_nobody_be_hired_but_still_lets_idle_workers_go() -> None:
    planned = plan(snapshot(worker(), idle=100, state=tripped(until=10) | {"alerts": {"FAILURE_RATE": NOW}}), LOCAL)
    assert kinds(planned) == ["drain"]


def test_a_person_may_try_one_worker_while_the_guard_holds() -> None:
    told = tripped(until=100) | {"alerts": {"FAILURE_RATE": NOW}}
    planned = plan(snapshot(queued=9, requested=3, state=told), LOCAL)
    assert [spawn.reason for spawn in of_kind(planned.actions, Spawn)] == ["3 requested by a person"]
    starting = worker(status="spawning", created=5, heartbeat=None)
    assert plan(snapshot(starting, queued=9, requested=2, state=told), LOCAL).actions == ()


def test_after_the_pause_one_worker_at_a_time_is_hired_as_a_probe() -> None:
    probing = tripped(until=-1)
    planned = plan(snapshot(queued=9, state=probing), LOCAL)
    assert kinds(planned) == ["spawn"]
    assert "one probe at a time" in planned.decision
    starting = worker(status="spawning", created=0.5, heartbeat=None)
    assert plan(snapshot(starting, queued=9, state=probing), LOCAL).actions == ()


def test_a_probe_that_breaks_doubles_the_pause() -> None:
    probe = worker(status="spawning", created=50, heartbeat=None)
    guarded = tripped(until=-60, trips=2)
    planned = plan(snapshot(probe, queued=9, state=guarded), LOCAL)
    assert kinds(planned) == ["fail", "delete", "alert"]
    assert planned.planner_state.failure_rate.trips == 3
    assert planned.planner_state.failure_rate.until == NOW + timedelta(seconds=1200)


def test_the_pause_grows_to_an_hour_and_no_further() -> None:
    probe = worker(status="spawning", created=50, heartbeat=None)
    planned = plan(snapshot(probe, queued=9, state=tripped(until=-60, trips=10_000)), LOCAL)
    assert planned.planner_state.failure_rate.until == NOW + timedelta(hours=1)


@pytest.mark.parametrize(
    ("probe", "is_over", "hired"),
    [
        pytest.param(worker(created=50, activated=40, claimed=30), True, 3, id="it has done a task"),
        pytest.param(
            worker(created=50, activated=40, claimed=5, running=(task(started=5),)), False, 0, id="it is at its first"
        ),
        pytest.param(worker(created=50, activated=40), False, 0, id="it was only heard of"),
        pytest.param(
            worker(created=9000, activated=8000, claimed=30), False, 1, id="it was hired long before the trouble"
        ),
    ],
)
def test_a_probe_that_works_ends_the_alarm(probe: WorkerView, is_over: bool, hired: int) -> None:
    planned = plan(snapshot(probe, queued=9, state=tripped(until=-60)), LOCAL)
    assert (planned.planner_state.failure_rate.trips == 0) is is_over
    assert len(of_kind(planned.actions, Spawn)) == hired


def test_a_hold_is_lifted_as_soon_as_somebody_proves_it_wrong() -> None:
    probe = worker(created=50, activated=40, claimed=30)
    planned = plan(snapshot(probe, queued=9, launches=launches(5, 5, age=290), state=tripped(until=240)), LOCAL)
    assert planned.hold is None
    assert of_kind(planned.actions, Spawn)


def test_workers_hired_before_the_trip_that_break_after_it_do_not_trip_it_again() -> None:
    late = worker(status="spawning", created=9000, heartbeat=None)
    planned = plan(snapshot(late, queued=9, state=tripped(until=-60)), LOCAL)
    assert planned.planner_state.failure_rate.trips == 1
    assert planned.planner_state.failure_rate.failed_starts == 0


def test_a_restart_by_hand_lifts_the_hold_and_forgets_what_led_to_it() -> None:
    """With the default settings: five workers in a row break, and a person mends what was wrong."""
    doomed = snapshot(
        *(worker(f"w{n}", n, created=50, heartbeat=None, status="spawning") for n in range(4)),
        queued=9,
        launches=launches(1, 5, age=50),
        state={"failure_rate": FailureRateState(failed_starts=1, last_failure_at=ago(60))},
    )
    held = plan(doomed, LOCAL)
    assert held.hold is not None
    assert held.hold.code == "FAILURE_RATE"
    seen = apply(held, doomed, LOCAL)
    assert plan(seen, LOCAL).hold is not None
    mended = replace(seen, reset_at=NOW + timedelta(seconds=1), now=NOW + timedelta(seconds=2))
    planned = plan(mended, LOCAL)
    assert planned.hold is None
    assert kinds(planned) == ["spawn"] * 4, "as many as are needed, and no probe"
    again = plan(replace(apply(planned, mended, LOCAL), now=NOW + timedelta(seconds=90)), LOCAL)
    assert again.planner_state.failure_rate.failed_starts == 4, "what breaks after it counts anew"


def test_with_the_default_settings_the_guard_acts_before_a_slot_is_failed() -> None:
    """A handler that cannot be imported: its process is gone at once. One slot would fail with its sixth break."""
    world = Clockwork(LOCAL, snapshot(queued=1), exits_at_once)
    for _ in range(20):
        world.cycle()
    assert world.spawns() == LOCAL.min_spawns_for_rate
    assert world.plans[-1].hold is not None
    assert not any(slot.is_failed for slot in world.seen.slots)


# ------------------------------------------------------------------------------------------------------- whole days

HOURS = 6


def never_heard(view: WorkerView, _now: datetime) -> WorkerView | None:
    return view


def exits_at_once(_view: WorkerView, _now: datetime) -> WorkerView | None:
    return None


# Heard of a moment before each cycle: Clockwork gives tasks to those that speak in the very moment.
def without_gpu(view: WorkerView, now: datetime) -> WorkerView | None:
    return replace(view, last_heartbeat=now - timedelta(seconds=1), vram_total_mb=0, vram_at=now)


def never_claims(view: WorkerView, now: datetime) -> WorkerView | None:
    return replace(view, last_heartbeat=now - timedelta(seconds=1), vram_total_mb=1, vram_at=now)


def dies_of_its_first_task(view: WorkerView, now: datetime) -> WorkerView | None:
    return None if view.running else beating(view, now)


BAD_IMAGES = {
    "never heard of": never_heard,
    "exits at once": exits_at_once,
    "sees no GPU": without_gpu,
    "never claims": never_claims,
    "dies of its first task": dies_of_its_first_task,
}


@pytest.mark.parametrize("live", BAD_IMAGES.values(), ids=BAD_IMAGES.keys())
@pytest.mark.parametrize(
    ("base", "max_workers"),
    [
        pytest.param(GPU, 1, id="one GPU"),
        pytest.param(GPU, 4, id="fewer GPUs than the guard needs breaks"),
        pytest.param(GPU, 10, id="ten GPUs"),
        pytest.param(LOCAL, 4, id="four processes"),
    ],
)
def test_a_bad_image_costs_a_bounded_number_of_launches(base: FleetConfig, live: Any, max_workers: int) -> None:
    config = fleet(base, has_gpu=True, max_workers=max_workers, max_restarts=100)
    world = Clockwork(config, snapshot(queued=10_000), live)
    while world.seen.now < NOW + timedelta(hours=HOURS):
        world.cycle()
    # A guard's worth of breaks, those on their way when it trips, four doublings of the pause, one probe an hour.
    assert world.spawns() <= config.min_spawns_for_rate + max_workers + 4 + HOURS
    tripped_at = next(n for n, planned in enumerate(world.plans) if planned.hold is not None)
    assert world.plans[-1].hold is not None or world.seen.planner_state.failure_rate.trips > 3
    assert sum(len(of_kind(planned.actions, Spawn)) for planned in world.plans[tripped_at:]) <= 4 + HOURS
    told = [
        alert
        for planned in world.plans
        for alert in of_kind(planned.actions, RaiseAlert)
        if alert.code == "FAILURE_RATE"
    ]
    assert 1 <= len(told) <= 2 * (4 + HOURS), "a person is told, but not in every cycle"


def test_when_the_image_is_mended_the_fleet_is_back_within_two_pauses() -> None:
    config = fleet(LOCAL, max_workers=5)
    world = Clockwork(config, snapshot(queued=50), never_heard)
    while world.seen.now < NOW + timedelta(hours=2):
        world.cycle()
    assert world.seen.planner_state.failure_rate.trips > 0
    world.live = beating
    while world.seen.now < NOW + timedelta(hours=4):
        world.cycle()
    assert world.seen.planner_state.failure_rate == FailureRateState(
        judged_until=world.seen.planner_state.failure_rate.judged_until
    )
    assert sum(view.last_heartbeat is not None for view in world.seen.workers) == 5
    assert world.plans[-1].actions == ()


def test_a_slot_that_keeps_breaking_is_given_up_after_five_restarts_in_five_minutes() -> None:
    config = fleet(LOCAL, max_workers=1, min_spawns_for_rate=1000)
    world = Clockwork(config, snapshot(queued=5), exits_at_once)
    for _ in range(100):
        world.cycle()
    assert world.spawns() == 6
    assert world.plans[-1].decision.endswith("; no free slot")


@pytest.mark.parametrize("policy", ["threshold", "buffered", "clear-time"])
@pytest.mark.parametrize("tasks", [0, 1, 2, 7, 40])
@pytest.mark.parametrize("settings", [{}, {"min_workers": 2}, {"idle_buffer": 2}, {"concurrency": 3}], ids=str)
def test_a_constant_load_gives_no_actions_after_convergence(policy: str, tasks: int, settings: dict[str, Any]) -> None:
    config = fleet(policy=policy, max_workers=8, stuck_timeout_s=1e8, **settings)
    world = Clockwork(config, snapshot(queued=tasks), beating)
    for _ in range(60):
        world.cycle()
    assert [planned for planned in world.plans[-50:] if planned.actions] == []
    hired = any(of_kind(planned.actions, Spawn) for planned in world.plans)
    let_go = any(of_kind(planned.actions, Drain) for planned in world.plans)
    assert not let_go or not hired or policy == "clear-time"
    if tasks:
        assert len(world.seen.workers) >= 1


@pytest.mark.parametrize("policy", ["threshold", "buffered", "clear-time"])
def test_when_the_work_is_done_everybody_goes_and_nobody_comes_back(policy: str) -> None:
    config = fleet(policy=policy, max_workers=8)
    idle = [worker(f"w{n}", n, claimed=50) for n in range(8)]
    world = Clockwork(config, snapshot(*idle), beating)
    for _ in range(20):
        world.cycle()
    assert world.seen.workers == ()
    assert world.spawns() == 0


def test_a_database_that_was_away_for_a_minute_costs_nobody_their_task() -> None:
    """Promise 10: the task at hand finishes, though the first cycle comes before the first heartbeat."""
    busy = [worker(f"w{n}", n, claimed=50, running=(task(n),)) for n in range(2)]
    world = Clockwork(LOCAL, snapshot(*busy), beating)
    world.cycle()
    world.live = lambda view, _now: view
    world.cycle(after_s=65)
    world.cycle(after_s=1)
    world.live = beating
    world.cycle(after_s=4)
    world.cycle()
    assert [kinds(planned) for planned in world.plans] == [[], [], ["alert"], [], []]


def test_orchestrators_that_come_back_to_the_truly_dead_replace_them_two_beats_later() -> None:
    seen = snapshot(worker(heartbeat=900, claimed=950, running=(task(),)), state={"planned_at": ago(900)})
    world = Clockwork(LOCAL, seen, lambda view, now: view if view.id == "w0" else beating(view, now))
    for _ in range(3):
        world.cycle()
    assert [kinds(planned) for planned in world.plans] == [["alert"], ["fail", "delete", "spawn"], ["promote"]]


def test_a_paused_fleet_is_left_as_it_is_and_goes_on_when_it_is_resumed() -> None:
    views = [worker(f"w{n}", n, is_paused=True) for n in range(2)]
    world = Clockwork(LOCAL, snapshot(*views, queued=5, is_paused=True), beating)
    for _ in range(50):
        world.cycle()
    assert all(planned.actions == () for planned in world.plans)
    world.seen = resume(world.seen)
    for _ in range(20):
        world.cycle()
    assert not any(of_kind(planned.actions, Fail) for planned in world.plans), "nobody is blamed for the pause"
    assert world.seen.queue.running == 4


def resume(seen: Snapshot) -> Snapshot:
    return replace(seen, is_paused=False, workers=tuple(replace(view, is_paused=False) for view in seen.workers))


def test_a_stray_that_cannot_be_deleted_never_lets_the_fleet_bill_more_than_its_maximum() -> None:
    config = fleet(LOCAL, max_workers=3)
    seen = snapshot(queued=9, machines=(machine("nobody"),))
    planned = plan(seen, config)
    assert kinds(planned) == ["spawn", "spawn", "delete_orphan"]
    assert kinds(plan(apply(planned, seen, config), config)) == ["spawn"]
