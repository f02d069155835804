"""The failure-rate hold, and long runs of a fleet: what a bad image costs, and constant load."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from support.snapshots import (
    GPU,
    LOCAL,
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
from windlass.model.action import Drain, Fail, FailSlot, RaiseAlert, Spawn
from windlass.model.fleet import FleetConfig
from windlass.model.machine import Machine, MachineState, ProviderTraits
from windlass.model.snapshot import FailureRateState, LaunchRecord, RecentFailure, Snapshot, WorkerView
from windlass.model.worker import WorkerStatus
from windlass.policy.plan import plan


def launches(failed: int, of: int, age: float = 100) -> tuple[LaunchRecord, ...]:
    return tuple(LaunchRecord(ago(age), n < failed) for n in range(of))


def tripped(until: float, trips: int = 1) -> dict[str, Any]:
    """The hold tripped and ends this many seconds from now. Negative: it has ended."""
    return {"failure_rate": FailureRateState(trips=trips, until=ago(-until), judged_until=ago(300 - until))}


@pytest.mark.parametrize(
    ("failed", "of", "is_held"),
    [
        pytest.param(4, 4, False, id="four spawns are too few"),
        pytest.param(4, 5, False, id="four of five is allowed"),
        pytest.param(5, 5, True, id="five of five is too many"),
        pytest.param(9, 11, True, id="nine of eleven is above 0.8"),
        pytest.param(0, 9, False, id="no failures"),
    ],
)
def test_high_failure_rate_holds_spawning(failed: int, of: int, is_held: bool) -> None:
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


def test_failures_of_this_plan_count() -> None:
    views = [worker(f"w{n}", n, created=100, heartbeat=None, status="spawning") for n in range(5)]
    planned = plan(snapshot(*views, queued=5, launches=launches(0, 5)), LOCAL)
    assert set(kinds(planned)) == {"fail", "delete", "alert"}
    assert planned.hold is not None
    assert "5 workers in a row failed before they proved to work, last " in planned.hold.reason


def test_hold_names_the_last_failure() -> None:
    failure = RecentFailure(
        "w1", "MACHINE_GONE", "Its process exited with code 2; its log ends: cannot find nope in app.", NOW
    )
    for state, what in (({}, "failure rate 5 of 5 in 5 min"), (tripped(until=10), "workers keep failing")):
        planned = plan(snapshot(queued=5, launches=launches(5, 5), last_failure=failure, state=state), LOCAL)
        assert planned.hold is not None
        why = "last MACHINE_GONE (Its process exited with code 2; its log ends: cannot find nope in app); "
        assert planned.hold.reason.startswith(f"{what}, {why}no spawns until "), planned.hold.reason
        assert "cannot find nope in app" in of_kind(planned.actions, RaiseAlert)[0].reason


def test_failure_rate_hold_applies_to_minimum() -> None:
    planned = plan(snapshot(queued=9, state=tripped(until=10)), fleet(min_workers=2))
    assert kinds(planned) == ["alert"]
    assert "until 12:00:10 UTC" in planned.decision


def test_idle_workers_drain_under_failure_rate_hold() -> None:
    planned = plan(snapshot(worker(), idle=100, state=tripped(until=10) | {"alerts": {"FAILURE_RATE": NOW}}), LOCAL)
    assert kinds(planned) == ["drain"]


def test_request_spawns_one_probe_under_failure_rate_hold() -> None:
    alerted = tripped(until=100) | {"alerts": {"FAILURE_RATE": NOW}}
    planned = plan(snapshot(queued=9, requested=3, state=alerted), LOCAL)
    assert [spawn.reason for spawn in of_kind(planned.actions, Spawn)] == ["3 requested by a person"]
    starting = worker(status="spawning", created=5, heartbeat=None)
    assert plan(snapshot(starting, queued=9, requested=2, state=alerted), LOCAL).actions == ()


def test_one_probe_at_a_time_after_the_hold() -> None:
    probing = tripped(until=-1)
    planned = plan(snapshot(queued=9, state=probing), LOCAL)
    assert kinds(planned) == ["spawn"]
    assert "one probe at a time" in planned.decision
    starting = worker(status="spawning", created=0.5, heartbeat=None)
    assert plan(snapshot(starting, queued=9, state=probing), LOCAL).actions == ()


def test_failed_probe_doubles_the_hold() -> None:
    probe = worker(status="spawning", created=50, heartbeat=None)
    guarded = tripped(until=-60, trips=2)
    planned = plan(snapshot(probe, queued=9, state=guarded), LOCAL)
    assert kinds(planned) == ["fail", "delete", "alert"]
    assert planned.planner_state.failure_rate.trips == 3
    assert planned.planner_state.failure_rate.until == NOW + timedelta(seconds=1200)


def test_hold_is_at_most_one_hour() -> None:
    probe = worker(status="spawning", created=50, heartbeat=None)
    planned = plan(snapshot(probe, queued=9, state=tripped(until=-60, trips=10_000)), LOCAL)
    assert planned.planner_state.failure_rate.until == NOW + timedelta(hours=1)


@pytest.mark.parametrize(
    ("probe", "is_reset", "spawned"),
    [
        pytest.param(worker(created=50, activated=40, claimed=30), True, 3, id="completed a task"),
        pytest.param(
            worker(created=50, activated=40, claimed=5, running=(task(started=5),)), False, 0, id="runs its first task"
        ),
        pytest.param(worker(created=50, activated=40), False, 0, id="only sent a heartbeat"),
        pytest.param(worker(created=9000, activated=8000, claimed=30), False, 1, id="spawned long before the failures"),
    ],
)
def test_proven_probe_resets_failure_rate(probe: WorkerView, is_reset: bool, spawned: int) -> None:
    planned = plan(snapshot(probe, queued=9, state=tripped(until=-60)), LOCAL)
    assert (planned.planner_state.failure_rate.trips == 0) is is_reset
    assert len(of_kind(planned.actions, Spawn)) == spawned


def test_proven_worker_lifts_the_hold() -> None:
    probe = worker(created=50, activated=40, claimed=30)
    planned = plan(snapshot(probe, queued=9, launches=launches(5, 5, age=290), state=tripped(until=240)), LOCAL)
    assert planned.hold is None
    assert of_kind(planned.actions, Spawn)


def test_workers_spawned_before_the_trip_do_not_trip_again() -> None:
    late = worker(status="spawning", created=9000, heartbeat=None)
    planned = plan(snapshot(late, queued=9, state=tripped(until=-60)), LOCAL)
    assert planned.planner_state.failure_rate.trips == 1
    assert planned.planner_state.failure_rate.failed_starts == 0


def test_restart_resets_failure_rate() -> None:
    """With default settings: five workers in a row fail, and a person fixes the cause."""
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
    restarted = replace(seen, reset_at=NOW + timedelta(seconds=1), now=NOW + timedelta(seconds=2))
    planned = plan(restarted, LOCAL)
    assert planned.hold is None
    assert kinds(planned) == ["spawn"] * 4, "as many as needed, not one probe"
    again = plan(replace(apply(planned, restarted, LOCAL), now=NOW + timedelta(seconds=90)), LOCAL)
    assert again.planner_state.failure_rate.failed_starts == 4, "later failures count anew"


@pytest.mark.parametrize("is_proven", [True, False], ids=["with tasks done", "that never worked"])
def test_killed_workers_hold_spawning_only_if_unproven(is_proven: bool) -> None:
    """Six workers of the last minutes are killed together."""
    killed = [worker(f"w{n}", n, created=100, claimed=90 if is_proven else None) for n in range(6)]
    seen = snapshot(*killed, queued=500, machines=(), launches=launches(0, 6))
    config = fleet(max_workers=6)
    planned = plan(seen, config)
    assert [fail.is_proven for fail in of_kind(planned.actions, Fail)] == [is_proven] * 6
    assert (planned.hold is None) is is_proven
    following = plan(apply(planned, seen, config), config)
    assert len(of_kind(following.actions, Spawn)) == (6 if is_proven else 0)


def on_host(host: str, number: int) -> tuple[WorkerView, Machine]:
    """A pod that starts on this host."""
    view = worker(f"w{number}", number, created=20, machine_at=20, heartbeat=None, status="spawning")
    return view, Machine(f"m-{view.id}", view.id, MachineState.RUNNING, host=host)


def test_avoided_hosts_do_not_count_as_failures_of_the_image() -> None:
    pods, there = zip(*(on_host("8.8.4.4", n) for n in range(4)), strict=True)
    before = {"failure_rate": FailureRateState(failed_starts=4, last_failure_at=ago(60))}
    avoided = {"machines": there, "avoided_hosts": ("8.8.4.4",)}
    planned = plan(snapshot(*pods, queued=9, launches=launches(4, 8), state=before, **avoided), fleet(max_workers=9))
    assert {fail.code for fail in of_kind(planned.actions, Fail)} == {"HOST_AVOIDED"}
    rate = planned.planner_state.failure_rate
    assert (rate.failed_starts, rate.avoided_starts) == (4, 4)
    assert planned.hold is None


def test_machines_on_avoided_hosts_cost_bounded_launches() -> None:
    """The provider has room on bad hosts only. Once it has other hosts, the fleet recovers by itself."""
    config = fleet(min_workers=1, max_workers=2, max_restarts=100)
    world = FleetSimulation(config, snapshot(queued=9, avoided_hosts=("8.8.4.4",)), without_heartbeat)

    def cycle(host: str) -> None:
        listed = tuple(replace(each, host=host) for each in world.seen.machines or ())
        world.seen = replace(world.seen, machines=listed)
        world.cycle()

    while world.seen.now < NOW + timedelta(hours=HOURS):
        cycle("8.8.4.4")
    first = next(planned.hold for planned in world.plans if planned.hold is not None)
    assert first.code == "FAILURE_RATE"
    # Five, and one more that was spawned in the same cycle as the fifth.
    assert first.reason.startswith("6 machines in a row were on avoided hosts, last HOST_AVOIDED (")
    # The bound is that of a bad image.
    assert config.min_spawns_for_rate <= world.spawns() <= config.min_spawns_for_rate + 2 + 4 + HOURS
    world.live = beating
    while world.seen.now < NOW + timedelta(hours=HOURS + 2):
        cycle("8.8.8.8")
    assert sum(view.last_heartbeat is not None for view in world.seen.workers) == 2
    assert world.plans[-1].hold is None


# Traits of the provider `local`: its machines are processes of this host.
PROCESSES = ProviderTraits(host="here")


def test_restart_loop_fails_the_slot_of_a_local_fleet_of_one() -> None:
    """A handler that cannot be imported: its process exits at once. The fleet has just started."""
    config = fleet(max_workers=1, min_workers=1)
    world = FleetSimulation(config, snapshot(traits=PROCESSES), exits_at_once)
    for _ in range(100):
        world.cycle(after_s=1)
    assert world.spawns() == config.max_restarts + 1
    assert [slot.is_failed for slot in world.seen.slots] == [True]
    assert all(planned.hold is None for planned in world.plans)
    assert "SLOT_FAILED" in {a.code for planned in world.plans for a in of_kind(planned.actions, RaiseAlert)}


def test_failed_slot_of_a_local_fleet_leaves_other_slots_alone() -> None:
    """Workers of slot 0 die at once. Then the worker of slot 1 is killed: it is replaced in its slot."""
    killed_after = NOW + timedelta(seconds=100)

    def live(view: WorkerView, now: datetime) -> WorkerView | None:
        is_killed = view.slot == 1 and now >= killed_after > view.created_at
        return None if view.slot == 0 or is_killed else beating(view, now)

    world = FleetSimulation(fleet(max_workers=3, min_workers=3), snapshot(traits=PROCESSES), live)
    while world.seen.now < killed_after + timedelta(seconds=10):
        world.cycle(after_s=1)
    assert [slot.slot for slot in world.seen.slots if slot.is_failed] == [0]
    assert all(planned.hold is None for planned in world.plans)
    replaced = [view for view in world.seen.workers if view.slot == 1]
    assert [view.status for view in replaced] == [WorkerStatus.ACTIVE]
    assert replaced[0].created_at > killed_after


def test_failure_rate_of_a_local_fleet_acts_after_a_slot_has_failed() -> None:
    """A bad handler in a large fleet: not every slot is tried until it fails."""
    config = fleet(max_workers=40, min_workers=1)
    world = FleetSimulation(config, snapshot(traits=PROCESSES), exits_at_once)
    for _ in range(200):
        world.cycle(after_s=1)
    held = next(n for n, planned in enumerate(world.plans) if planned.hold is not None)
    failed = next(n for n, planned in enumerate(world.plans) if of_kind(planned.actions, FailSlot))
    assert failed < held
    assert world.spawns() == config.max_restarts + 1 + config.min_spawns_for_rate


def test_slow_failures_of_a_local_fleet_hold_spawning_in_the_end() -> None:
    """Each worker fails late enough that no slot exceeds its restarts within the window."""
    config = fleet(max_workers=1, min_workers=1, spawn_timeout_s=90)
    world = FleetSimulation(config, snapshot(traits=PROCESSES), without_heartbeat)
    while world.seen.now < NOW + timedelta(seconds=800):
        world.cycle()
    assert world.spawns() == config.max_restarts + 1
    assert not any(slot.is_failed for slot in world.seen.slots)
    assert world.plans[-1].hold is not None


# ------------------------------------------------------------------------------------------------------- long runs

HOURS = 6


def without_heartbeat(view: WorkerView, _now: datetime) -> WorkerView | None:
    return view


def exits_at_once(_view: WorkerView, _now: datetime) -> WorkerView | None:
    return None


# Heartbeats shortly before each cycle: FleetSimulation gives tasks to workers with a heartbeat at the same moment.
def without_gpu(view: WorkerView, now: datetime) -> WorkerView | None:
    return replace(view, last_heartbeat=now - timedelta(seconds=1), vram_total_mb=0, vram_at=now)


def never_claims(view: WorkerView, now: datetime) -> WorkerView | None:
    return replace(view, last_heartbeat=now - timedelta(seconds=1), vram_total_mb=1, vram_at=now)


def dies_of_its_first_task(view: WorkerView, now: datetime) -> WorkerView | None:
    return None if view.running else beating(view, now)


BAD_IMAGES = {
    "no heartbeat": without_heartbeat,
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
        pytest.param(GPU, 4, id="fewer GPUs than min_spawns_for_rate"),
        pytest.param(GPU, 10, id="ten GPUs"),
        pytest.param(LOCAL, 4, id="four processes"),
    ],
)
def test_bad_image_costs_bounded_launches(base: FleetConfig, live: Any, max_workers: int) -> None:
    config = fleet(base, has_gpu=True, max_workers=max_workers, max_restarts=100)
    world = FleetSimulation(config, snapshot(queued=10_000), live)
    while world.seen.now < NOW + timedelta(hours=HOURS):
        world.cycle()
    # Failures until the hold trips, starting workers, four doublings of the hold, then one probe per hour.
    assert world.spawns() <= config.min_spawns_for_rate + max_workers + 4 + HOURS
    tripped_at = next(n for n, planned in enumerate(world.plans) if planned.hold is not None)
    assert world.plans[-1].hold is not None or world.seen.planner_state.failure_rate.trips > 3
    assert sum(len(of_kind(planned.actions, Spawn)) for planned in world.plans[tripped_at:]) <= 4 + HOURS
    alerted = [
        alert
        for planned in world.plans
        for alert in of_kind(planned.actions, RaiseAlert)
        if alert.code == "FAILURE_RATE"
    ]
    assert 1 <= len(alerted) <= 2 * (4 + HOURS), "a person is alerted, but not in every cycle"


def test_fixed_image_recovers_within_two_holds() -> None:
    config = fleet(LOCAL, max_workers=5)
    world = FleetSimulation(config, snapshot(queued=50), without_heartbeat)
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


def test_slot_fails_after_five_restarts_in_five_minutes() -> None:
    config = fleet(LOCAL, max_workers=1, min_spawns_for_rate=1000)
    world = FleetSimulation(config, snapshot(queued=5), exits_at_once)
    for _ in range(100):
        world.cycle()
    assert world.spawns() == 6
    assert world.plans[-1].decision.endswith("; no free slot")


@pytest.mark.parametrize("policy", ["threshold", "buffered", "clear-time"])
@pytest.mark.parametrize("tasks", [0, 1, 2, 7, 40])
@pytest.mark.parametrize("settings", [{}, {"min_workers": 2}, {"idle_buffer": 2}, {"concurrency": 3}], ids=str)
def test_constant_load_converges_to_no_actions(policy: str, tasks: int, settings: dict[str, Any]) -> None:
    config = fleet(policy=policy, max_workers=8, stuck_timeout_s=1e8, **settings)
    world = FleetSimulation(config, snapshot(queued=tasks), beating)
    for _ in range(60):
        world.cycle()
    assert [planned for planned in world.plans[-50:] if planned.actions] == []
    spawned = any(of_kind(planned.actions, Spawn) for planned in world.plans)
    drained_ids = any(of_kind(planned.actions, Drain) for planned in world.plans)
    assert not drained_ids or not spawned or policy == "clear-time"
    if tasks:
        assert len(world.seen.workers) >= 1


@pytest.mark.parametrize("policy", ["threshold", "buffered", "clear-time"])
def test_finished_work_drains_the_fleet_for_good(policy: str) -> None:
    config = fleet(policy=policy, max_workers=8)
    idle = [worker(f"w{n}", n, claimed=50) for n in range(8)]
    world = FleetSimulation(config, snapshot(*idle), beating)
    for _ in range(20):
        world.cycle()
    assert world.seen.workers == ()
    assert world.spawns() == 0


def test_database_outage_of_a_minute_fails_no_worker() -> None:
    """Running tasks finish, although the first cycle comes before the first heartbeat."""
    busy = [worker(f"w{n}", n, claimed=50, running=(task(n),)) for n in range(2)]
    world = FleetSimulation(LOCAL, snapshot(*busy), beating)
    world.cycle()
    world.live = lambda view, _now: view
    world.cycle(after_s=65)
    world.cycle(after_s=1)
    world.live = beating
    world.cycle(after_s=4)
    world.cycle()
    assert [kinds(planned) for planned in world.plans] == [[], [], ["alert"], [], []]


def test_dead_worker_is_replaced_one_heartbeat_timeout_after_outage() -> None:
    seen = snapshot(worker(heartbeat=900, claimed=950, running=(task(),)), state={"planned_at": ago(900)})
    world = FleetSimulation(LOCAL, seen, lambda view, now: view if view.id == "w0" else beating(view, now))
    for _ in range(6):
        world.cycle()
    # The replacement is spawned by the cycle after the deletion.
    planned_kinds = [kinds(planned) for planned in world.plans]
    assert planned_kinds == [["alert"], [], [], ["fail", "delete"], ["spawn"], ["promote"]]


def test_paused_fleet_is_unchanged_and_resumes() -> None:
    views = [worker(f"w{n}", n, is_paused=True) for n in range(2)]
    world = FleetSimulation(LOCAL, snapshot(*views, queued=5, is_paused=True), beating)
    for _ in range(50):
        world.cycle()
    assert all(planned.actions == () for planned in world.plans)
    world.seen = resume(world.seen)
    for _ in range(20):
        world.cycle()
    assert not any(of_kind(planned.actions, Fail) for planned in world.plans), "no worker fails because of the pause"
    assert world.seen.queue.running == 4


def resume(seen: Snapshot) -> Snapshot:
    return replace(seen, is_paused=False, workers=tuple(replace(view, is_paused=False) for view in seen.workers))


def test_undeletable_orphan_keeps_fleet_below_maximum() -> None:
    config = fleet(LOCAL, max_workers=3)
    seen = snapshot(queued=9, machines=(machine("unknown"),))
    planned = plan(seen, config)
    assert kinds(planned) == ["spawn", "spawn", "delete_orphan"]
    assert kinds(plan(apply(planned, seen, config), config)) == ["spawn"]
