"""The adaptive policy: forward look, idle timeouts by rank, floor, decisions in words, and no flapping."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.snapshots import NOW, ago, worker
from support.snapshots import snapshot as seen_snapshot
from windlass.model.action import Drain, Spawn
from windlass.model.adaptive import AdaptiveMemory, ArrivalRecord
from windlass.model.fleet import FleetConfig
from windlass.model.machine import ProviderTraits
from windlass.model.snapshot import PlannerState, QueueView, RunningView, ScalingState, WorkerView
from windlass.policy.plan import plan
from windlass.policy.scale.adaptive import DUE_TOLERANCE_S, decide
from windlass.policy.scale.adaptive_boot import BootEstimate
from windlass.policy.scale.adaptive_keep import cheapest_timeout_s, cheapest_workers, floor_of_workers
from windlass.policy.scale.adaptive_load import FleetLoad, IdleWorker, count_overdue
from windlass.policy.scale.adaptive_spawn import MAX_PLAYED
from windlass.simulator.engine import SimulatedFleet, SimulatedMachine, World
from windlass.simulator.fast_path import AdaptiveController
from windlass.simulator.runs import RunRequest, run_policy
from windlass.simulator.trace import GENERATORS, GeneratorSettings, Trace, generate


def load(**values: Any) -> FleetLoad:
    durations = values.pop("durations", (30.0,) * 20)
    boot_s = values.pop("boot_s", 120.0)
    given: dict[str, Any] = {
        "now": 1000.0,
        "slots": 1,
        "queued": 0,
        "arrived": values.get("queued", 0),
        "oldest_queued_age_s": 0.0,
        "busy": 0,
        "running_ages_s": (),
        "idle": (),
        "starting_ages_s": (),
        "durations_s": durations,
        "duration_mean_s": sum(durations) / len(durations) if durations else None,
        "boots": BootEstimate(boot_s, boot_s),
    }
    return FleetLoad(**(given | values))


def test_idle_timeout_in_words_is_the_one_that_drains() -> None:
    """Processes of this host are kept for at least 30 s, however fast they start."""
    for idle_s, drained in ((29.0, ()), (31.0, (0,))):
        decision = decide(load(idle=(IdleWorker(idle_s),), is_free=True, boot_s=1.0), AdaptiveMemory(), None, None)
        assert (decision.timeout_s, decision.drain) == (30.0, drained)


def spawned(**values: Any) -> int:
    return decide(load(**values), AdaptiveMemory(), None, None).spawn


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param({"queued": 1}, 1, id="a first task spawns one worker"),
        pytest.param({"queued": 1, "starting_ages_s": (60.0,)}, 0, id="a starting worker will take it"),
        pytest.param(
            {"queued": 3, "busy": 1, "running_ages_s": (5.0,)}, 0, id="a running worker takes all three in time"
        ),
        pytest.param(
            {"queued": 20, "busy": 1, "running_ages_s": (5.0,)}, 16, id="a longer queue needs more before its goal"
        ),
        pytest.param(
            {"queued": 2, "busy": 2, "running_ages_s": (5.0, 9.0), "durations": (3600.0,) * 9},
            2,
            id="tasks of an hour do not end before a boot",
        ),
        pytest.param({"queued": 100, "durations": ()}, 1, id="without a known duration the first worker comes alone"),
        pytest.param(
            {"queued": 100, "durations": (), "starting_ages_s": (9.0, 5.0)}, 2, id="and then the number doubles"
        ),
        pytest.param({"queued": 4, "durations": (300.0,) * 5, "slots": 2}, 2, id="two slots halve the workers"),
        pytest.param({"queued": 9, "durations": (), "is_free": True, "boot_s": 1.0}, 9, id="processes cost nothing"),
    ],
)
def test_spawns_only_what_would_miss_the_goal(values: dict[str, Any], expected: int) -> None:
    assert spawned(**values) == expected


def spawned_for_lost_backlog(**values: Any) -> int:
    """A task that has missed its goal, and a burst behind it."""
    records = (ArrivalRecord(700.0, 1, 0.0), ArrivalRecord(985.0, 1, 0.0), ArrivalRecord(997.0, 199, 0.0))
    memory = AdaptiveMemory(at=997.0, arrivals=records)
    given: dict[str, Any] = {"queued": 200, "arrived": 0, "oldest_queued_age_s": 15.0, "slots": 2, "boot_s": 90.0}
    given |= {"durations": (20.0,) * 50, "billing_unit_s": 3600, "max_workers": 1000}
    return decide(load(**(given | values)), memory, None, None).spawn


def test_lost_backlog_gets_fewer_workers_where_each_costs_an_hour() -> None:
    assert spawned_for_lost_backlog(billing_unit_s=1) == 100
    hourly = spawned_for_lost_backlog()
    assert 45 <= hourly <= 55
    # No more are needed when they start.
    assert spawned_for_lost_backlog(starting_ages_s=(30.0,) * hourly) == 0


def test_lost_backlog_of_long_tasks_has_a_worker_for_each() -> None:
    assert spawned_for_lost_backlog(durations=(600.0,) * 50) == 100


def test_lost_task_behind_an_endless_one_gets_a_worker() -> None:
    """A worker whose task runs longer than all others clears nothing, however short the queue is."""
    endless: dict[str, Any] = {"busy": 1, "running_ages_s": (7200.0,), "slots": 1}
    assert spawned_for_lost_backlog(queued=1, **endless) == 1


def test_longer_goal_needs_fewer_workers() -> None:
    given = load(queued=40, busy=1, running_ages_s=(1.0,))
    short, long = (decide(given, AdaptiveMemory(), goal_s, None).spawn for goal_s in (130.0, 600.0))
    assert 0 < long < short


def test_tasks_that_outlive_the_known_ones_are_not_hidden_by_them() -> None:
    """In a bag of long tasks, tasks that fail within seconds are the first that are complete."""
    given = load(queued=6, busy=20, running_ages_s=(600.0,) * 20, durations=(5.0,) * 12)
    assert decide(given, AdaptiveMemory(), None, None).spawn == 6
    seen = count_overdue(given)
    # 12 of 5 s, and 20 that run as long again.
    assert seen.durations_s == (5.0,) * 12 + (1200.0,) * 20
    assert seen.duration_mean_s == pytest.approx((12 * 5 + 20 * 1200) / 32)


def test_known_outliers_do_not_hide_overdue_tasks() -> None:
    given = load(queued=6, busy=20, running_ages_s=(600.0,) * 20, durations=(*(5.0,) * 198, 9000.0, 9000.0))
    assert decide(given, AdaptiveMemory(), None, None).spawn == 6


def test_running_tasks_of_usual_age_change_nothing() -> None:
    given = load(busy=3, running_ages_s=(1.0, 20.0, 30.0))
    assert count_overdue(given) is given


def test_bag_of_long_tasks_after_short_failures_starts_in_time() -> None:
    """A third of the tasks fail at once, the others run for hours."""
    arrivals = tuple(40.0 * number for number in range(300))
    trace = Trace("bag", arrivals, tuple(4.0 if number % 3 else 9000.0 for number in range(300)))
    result = run_policy(RunRequest("adaptive", FleetConfig(policy="adaptive", max_workers=500), World()), trace)
    assert result.wait_p95_s <= 130.0


@pytest.mark.parametrize(
    ("gaps", "restart_s", "expected"),
    [
        pytest.param((20.0,) * 8, 100.0, 30.0, id="short gaps are kept"),
        pytest.param((900.0,) * 8, 100.0, 0.0, id="long gaps are cut at once"),
        pytest.param((15.0,) * 8 + (900.0,), 100.0, 25.0, id="one long gap among short ones is cut after them"),
    ],
)
def test_timeout_is_the_cheapest_of_the_last_gaps(gaps: tuple[float, ...], restart_s: float, expected: float) -> None:
    assert cheapest_timeout_s(gaps, restart_s) == expected


def test_idle_worker_drains_after_the_timeout_of_its_rank() -> None:
    memory = AdaptiveMemory(at=990.0, machines=2, timeouts={1: 300.0, 2: 50.0})
    idle = (IdleWorker(60.0), IdleWorker(60.0))
    decision = decide(load(idle=idle), memory, None, None)
    assert decision.drain == (1,)
    # The first rank has 240 s left.
    assert decision.valid_until == pytest.approx(1240.0, abs=DUE_TOLERANCE_S)


@pytest.mark.parametrize(
    ("queued", "slots", "drained"),
    [
        pytest.param(0, 1, 180, id="without a queued task all idle workers drain"),
        pytest.param(1, 1, 179, id="a queued task keeps one"),
        pytest.param(5, 2, 177, id="five tasks for two slots keep three"),
        pytest.param(180, 1, 0, id="a task for each keeps all"),
    ],
)
def test_queued_tasks_keep_only_the_workers_they_need(queued: int, slots: int, drained: int) -> None:
    given = load(
        queued=queued, slots=slots, busy=20, running_ages_s=(5.0,) * 20 * slots, idle=[IdleWorker(5000.0)] * 180
    )
    decision = decide(given, AdaptiveMemory(), None, None)
    assert decision.spawn == 0
    # The least recently used first; the most recently used stay.
    assert decision.drain == tuple(range(179, 179 - drained, -1))


def test_billed_worker_drains_only_at_the_end_of_its_period() -> None:
    idle = (IdleWorker(900.0, 50.0, 60.0), IdleWorker(900.0, 2000.0, 60.0), IdleWorker(900.0, 300.0, 310.0))
    given = load(idle=idle, billing_unit_s=3600)
    assert decide(given, AdaptiveMemory(), None, None).drain == (2, 0)


def test_floor_keeps_workers_for_a_steady_load() -> None:
    records = tuple(ArrivalRecord(float(at), 30, at * 20.0) for at in range(0, 1000, 10))
    memory = AdaptiveMemory(at=1000.0, machines=20, machine_s=20_000.0, arrivals=records)
    given = load(durations=(3.0,) * 50)
    assert 9 <= floor_of_workers(given, memory, 130.0, 1.5) <= 12
    # After a silence longer than any before, nothing is kept.
    assert floor_of_workers(replace(given, now=1200.0), memory, 130.0, 1.5) == 0


def test_priced_floor_serves_a_steady_load_with_little_waiting() -> None:
    records = tuple(ArrivalRecord(float(at), 30, at * 9.0) for at in range(0, 1000, 10))
    memory = AdaptiveMemory(at=1000.0, machines=9, machine_s=9000.0, arrivals=records)
    given = load(durations=(3.0,) * 50, queued=30, busy=9, running_ages_s=(1.0,) * 9)
    cheap, dear = (cheapest_workers(given, memory, price, 2.0) for price in (0.01, 10.0))
    assert 9 <= cheap < dear
    assert decide(given, memory, None, 10.0).spawn >= dear - 9
    # Tasks longer than a boot have a worker each, and after a long silence nothing is kept.
    assert cheapest_workers(replace(given, durations_s=(300.0,) * 5, duration_mean_s=300.0), memory, 10.0, 2.0) == 0
    assert cheapest_workers(replace(given, now=1200.0), memory, 10.0, 2.0) == 0


def test_priced_floor_of_hourly_workers_needs_an_hour_of_waiting_for_each() -> None:
    records = tuple(ArrivalRecord(float(at), 30, at * 9.0) for at in range(0, 1000, 10))
    memory = AdaptiveMemory(at=1000.0, machines=9, machine_s=9000.0, arrivals=records)
    idle_s = {"queued": 30, "busy": 9, "running_ages_s": (1.0,) * 9}
    hourly, second = load(durations=(3.0,) * 50, billing_unit_s=3600, **idle_s), load(durations=(3.0,) * 50, **idle_s)
    for price in (0.1, 1.0, 10.0):
        assert 9 <= cheapest_workers(hourly, memory, price, 2.0) <= cheapest_workers(second, memory, price, 2.0)
    # A price that is worth an hour of each further worker spawns them; without a price the goal alone decides.
    assert decide(hourly, memory, None, 10.0).spawn > decide(hourly, memory, None, None).spawn


def test_work_per_cycle_is_bounded() -> None:
    given = load(
        queued=1_000_000, busy=1000, running_ages_s=(10.0,) * 1000, durations=(30.0,) * 200, max_workers=100_000
    )
    decision = decide(given, AdaptiveMemory(), None, None)
    assert 0 < decision.spawn <= MAX_PLAYED
    assert len(decision.memory.unneeded_since) <= 64


def test_memory_survives_storage_as_json() -> None:
    from pydantic import TypeAdapter

    memory = AdaptiveMemory(5.0, 2, 9.0, (ArrivalRecord(1.0, 2, 3.0),), {3: 1.0}, {1: (4.0, 5.0)}, {1: 7.0})
    adapter = TypeAdapter(PlannerState)
    state = PlannerState(scaling=ScalingState(adaptive=memory))
    assert adapter.validate_json(adapter.dump_json(state)) == state


def test_memory_from_before_the_clock_was_set_back_is_dropped() -> None:
    records = (ArrivalRecord(4590.0, 5, 100.0),)
    memory = AdaptiveMemory(4600.0, 3, 900.0, records, {1: 4500.0}, {1: (20.0,)}, {1: 30.0})
    given = load(queued=1)
    assert decide(given, memory, None, None) == decide(given, AdaptiveMemory(), None, None)


def test_small_step_of_the_clock_learns_no_negative_gap() -> None:
    memory = AdaptiveMemory(1000.5, 1, 900.0, unneeded_since={1: 1000.5}, timeouts={2: 30.0})
    learned = decide(load(busy=1, running_ages_s=(0.0,)), memory, None, None).memory
    assert learned.gaps == {1: (0.0,)}
    assert learned.timeouts[2] == 30.0


def test_decision_is_one_sentence_with_its_numbers() -> None:
    config = FleetConfig(policy="adaptive", max_workers=9)
    queue = QueueView(queued=2, durations_s=(600.0,) * 5, duration_mean_s=600.0, arrived=2, boots_s=(120.0,))
    snapshot = replace(seen_snapshot(), queue=queue)
    planned = plan(snapshot, config)
    assert planned.decision == "spawn 2: 2 queued, 0 busy, tasks of 600 s, boot 120 s, goal 130 s"
    assert sum(isinstance(action, Spawn) for action in planned.actions) == 2
    full = plan(snapshot, FleetConfig(policy="adaptive", max_workers=1))
    assert full.decision.startswith("spawn 0 of 2") or "max_workers 1" in full.decision


def decision_of(memory: AdaptiveMemory, queue: QueueView, *workers: WorkerView, unit_s: int = 1, **values: Any) -> str:
    state = PlannerState(scaling=ScalingState(adaptive=memory))
    seen = replace(
        seen_snapshot(*workers), queue=queue, planner_state=state, traits=ProviderTraits(billing_unit_s=unit_s)
    )
    config = FleetConfig(policy="adaptive", max_workers=1000, max_changes_per_cycle=1000, **values)
    return plan(seen, config).decision


def test_decision_says_if_a_lost_backlog_set_the_number() -> None:
    at = NOW.timestamp()
    records = (ArrivalRecord(at - 300, 1, 0.0), ArrivalRecord(at - 15, 1, 0.0), ArrivalRecord(at - 3, 199, 0.0))
    memory = AdaptiveMemory(at=at - 3, arrivals=records)
    queue = QueueView(queued=200, oldest_queued_age_s=15.0, durations_s=(20.0,) * 50, duration_mean_s=20.0)
    queue = replace(queue, boots_s=(90.0,))
    text = "200 queued, 0 busy, tasks of 20 s, boot 90 s, goal 100 s"
    assert decision_of(memory, queue, concurrency=2) == f"spawn 100: {text}"
    found = decision_of(memory, queue, concurrency=2, unit_s=3600)
    assert found == f"spawn 50: {text}, missed by the oldest: 50 more cost least, not 100"


def test_decision_says_if_the_price_of_waiting_set_the_number() -> None:
    at = NOW.timestamp()
    records = tuple(ArrivalRecord(at - 1000 + seconds, 30, seconds * 9.0) for seconds in range(0, 1000, 10))
    memory = AdaptiveMemory(at=at - 10, machines=9, machine_s=9000.0, arrivals=records)
    durations = {"durations_s": (3.0,) * 50, "duration_mean_s": 3.0, "boots_s": (120.0,) * 9}
    queue = QueueView(queued=30, running=9, oldest_queued_age_s=5.0, arrived=30, **durations)
    busy = [worker(f"w{n}", n, created=500, running=(RunningView(n, ago(1), None),)) for n in range(9)]
    text = "30 queued, 9 busy, tasks of 3 s, boot 120 s, goal 130 s"
    assert decision_of(memory, queue, *busy) == f"no change: {text}"
    found = decision_of(memory, queue, *busy, price_of_waiting=10.0)
    assert found == f"spawn 14: {text}, price_of_waiting 10: 23 workers cost least, not 9"


def test_idle_worker_of_a_rented_fleet_drains_through_plan() -> None:
    idle = seen_snapshot(worker("w0", created=2000), idle=500)
    planned = plan(replace(idle, queue=QueueView(boots_s=(120.0,))), FleetConfig(policy="adaptive"))
    assert [action.code for action in planned.actions if isinstance(action, Drain)] == ["IDLE"]


class CountingFleet(SimulatedFleet):
    """Counts the spawns that follow a drain within one boot, and remembers when something changed."""

    def __init__(self, trace: Trace, world: World = World()) -> None:
        super().__init__(trace, world)
        self.drained_at: list[float] = []
        self.soon = 0
        self.changed_at: list[float] = []

    def spawn(self, count: int) -> int:
        recent = [at for at in self.drained_at if self.now - at < self.world.boot_s]
        self.soon += min(count, len(recent))
        # Each drain is followed by one spawn at most.
        self.drained_at = recent[count:]
        self.changed_at.append(self.now)
        return super().spawn(count)

    def drain(self, machine: SimulatedMachine) -> None:
        self.drained_at.append(self.now)
        self.changed_at.append(self.now)
        super().drain(machine)


@pytest.mark.parametrize("kind", GENERATORS)
def test_most_spawns_follow_no_drain_within_one_boot(kind: str) -> None:
    """Arrivals at random restart some workers soon, whatever the timeout; most drains last: 3 to 34 %."""
    fleet = CountingFleet(generate(kind, GeneratorSettings(tasks=1500, days=1.0, duration_s=40.0)))
    fleet.run(AdaptiveController(FleetConfig(policy="adaptive", max_workers=500)))
    assert fleet.soon <= 0.345 * fleet.started


BY_SECOND, BY_HOUR = World(), World(slots=2, boot_s=90.0, billing_unit_s=3600)


@pytest.mark.parametrize(
    ("world", "every_s", "tasks", "duration_s"),
    [
        *(
            (BY_SECOND, *steady)
            for steady in ((10, 1, 25.0), (10, 1, 95.0), (2, 1, 7.3), (60, 1, 300.0), (7, 1, 700.0))
        ),
        *((BY_HOUR, *steady) for steady in ((10, 1, 25.0), (10, 1, 95.0), (2, 1, 7.3), (60, 1, 300.0), (7, 1, 700.0))),
        # All workers are idle in between. By the hour, they would drain at the end of it.
        (BY_SECOND, 60, 1, 10.0),
        (BY_SECOND, 50, 8, 20.0),
    ],
)
def test_steady_load_changes_no_worker_after_convergence(
    world: World, every_s: int, tasks: int, duration_s: float
) -> None:
    """No spawn and no drain from the second billing hour on until the last task arrives, ten hours after the first."""
    arrivals = tuple(float(at) for at in range(0, 36_000, every_s) for _ in range(tasks))
    fleet = CountingFleet(Trace("steady", arrivals, (duration_s,) * len(arrivals)), world)
    fleet.run(AdaptiveController(FleetConfig(policy="adaptive", max_workers=500, concurrency=world.slots)))
    converged_s = 7200.0
    assert fleet.changed_at[0] == 0.0
    assert [at for at in fleet.changed_at if converged_s <= at <= arrivals[-1]] == []
    late = [wait_s for at, wait_s in zip(arrivals, fleet.waits, strict=True) if at >= converged_s]
    assert max(late) <= world.boot_s + 10.0


@given(
    queued=st.integers(0, 50),
    busy=st.integers(0, 5),
    idle=st.lists(st.floats(0, 5000), max_size=5),
    starting=st.lists(st.floats(0, 500), max_size=5),
    durations=st.lists(st.floats(0.1, 5000), max_size=20),
    price=st.sampled_from((None, 0.0, 1.0, 50.0)),
)
def test_never_spawns_and_drains_at_once(
    queued: int,
    busy: int,
    idle: list[float],
    starting: list[float],
    durations: list[float],
    price: float | None,
) -> None:
    given = load(
        queued=queued,
        busy=busy,
        running_ages_s=(7.0,) * busy,
        idle=[IdleWorker(idle_s) for idle_s in sorted(idle)],
        starting_ages_s=starting,
        durations=tuple(sorted(durations)),
    )
    memory = AdaptiveMemory()
    for step in range(3):
        decision = decide(replace(given, now=1000.0 + 10 * step), memory, None, price)
        assert not (decision.spawn and decision.drain)
        assert len(set(decision.drain)) == len(decision.drain) <= len(idle)
        assert decision == decide(replace(given, now=1000.0 + 10 * step), memory, None, price)
        memory = decision.memory
