"""adaptive where boots vary: more workers start than tasks need, the others are cancelled, and the estimate is fair."""

import random
from collections import deque
from dataclasses import replace

import pytest

from support.snapshots import NOW, ago, of_kind, worker
from support.snapshots import snapshot as seen_snapshot
from windlass.model.action import Drain, Spawn
from windlass.model.adaptive import AdaptiveMemory
from windlass.model.fleet import FleetConfig
from windlass.model.machine import ProviderTraits
from windlass.model.snapshot import PlannerState, QueueView, RunningView, ScalingState
from windlass.policy.plan import plan
from windlass.policy.scale.adaptive import decide
from windlass.policy.scale.adaptive_boot import (
    LATE_SHARE,
    MAX_STARTS_PER_WORKER,
    BootEstimate,
    estimate_boots,
    in_time_share,
    ready_in_time,
    starts_for,
)
from windlass.policy.scale.adaptive_load import FleetLoad, robust_mean_s
from windlass.simulator.engine import World
from windlass.simulator.runs import RunRequest, run_policy
from windlass.simulator.trace import GeneratorSettings, generate

# Half of the boots take a minute, the others two minutes and a half.
VARYING = tuple([60.0] * 12 + [150.0] * 8)


def load(*, queued: int = 0, starting: tuple[float, ...] = (), boots: tuple[float, ...] = VARYING) -> FleetLoad:
    return FleetLoad(
        now=1000.0,
        slots=1,
        queued=queued,
        arrived=queued,
        oldest_queued_age_s=0.0,
        busy=0,
        running_ages_s=(),
        idle=(),
        starting_ages_s=starting,
        durations_s=(3600.0,) * 20,
        duration_mean_s=3600.0,
        boots=estimate_boots(boots, (), 60.0),
        max_cancelled=10,
    )


def test_boots_without_spread_start_one_worker_per_task() -> None:
    assert decide(load(queued=5, boots=(120.0,) * 50), AdaptiveMemory(), None, None).spawn == 5


def test_varying_boots_start_more_workers_than_tasks() -> None:
    # 60 % of the boots are in time: two starts miss with 16 %, three with 6.4 %. A fourth is one too many.
    decision = decide(load(queued=1), AdaptiveMemory(), None, None)
    assert (decision.spawn, decision.in_time, decision.memory.extra_starts) == (3, 0.6, 2)
    again = decide(load(queued=1, starting=(10.0,) * 3), decision.memory, None, None)
    assert (again.spawn, again.cancel) == (0, 0)


@pytest.mark.parametrize("queued", [1, 2, 7, 30])
@pytest.mark.parametrize("max_workers", [4, 500])
def test_starts_are_bounded_by_the_need_and_by_max_workers(queued: int, max_workers: int) -> None:
    half = tuple([60.0] * 11 + [150.0] * 9)
    memory, started = AdaptiveMemory(), 0
    for cycle in range(5):
        # Tasks that arrived in the first cycle still wait, and no worker is ready.
        seen = replace(load(queued=queued, starting=(10.0 * cycle,) * started, boots=half), max_workers=max_workers)
        seen = replace(seen, now=1000.0 + 10 * cycle, arrived=0 if cycle else queued, oldest_queued_age_s=10.0 * cycle)
        decision = decide(seen, memory, None, None)
        memory, started = decision.memory, min(max_workers, started + decision.spawn)
    assert started == min(max_workers, starts_for(queued, 0.55))
    assert queued < started <= MAX_STARTS_PER_WORKER * queued or started == max_workers


def test_extra_starts_are_cancelled_when_a_worker_is_ready() -> None:
    memory = AdaptiveMemory(at=990.0, machines=4, extra_starts=3)
    served = replace(load(starting=(62.0, 62.0, 61.0)), busy=1, running_ages_s=(2.0,))
    decision = decide(served, memory, None, None)
    assert (decision.cancel, decision.memory.extra_starts) == (3, 0)
    assert decision.memory.cancelled_boots_s == (62.0, 62.0, 61.0)


def test_requested_worker_that_starts_is_not_cancelled() -> None:
    assert decide(load(starting=(20.0,)), AdaptiveMemory(at=990.0, machines=1), None, None).cancel == 0


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"billing_unit_s": 3600}, id="a start costs a billing hour"),
        pytest.param({"is_free": True}, id="processes of this host"),
        pytest.param({"durations_s": (30.0,) * 20, "duration_mean_s": 30.0}, id="tasks shorter than a boot"),
    ],
)
def test_no_extra_start(change: dict[str, object]) -> None:
    assert decide(replace(load(queued=1), **change), AdaptiveMemory(), None, None).spawn == 1


@pytest.mark.parametrize("share", [0.5, 0.6, 0.75, 0.9])
def test_starts_leave_few_tasks_late(share: float) -> None:
    source = random.Random(1)  # noqa: S311
    for tasks in (1, 2, 5, 12, 40):
        starts = starts_for(tasks, share)
        ready = [sum(source.random() < share for _ in range(starts)) for _ in range(2000)]
        is_bounded = starts == MAX_STARTS_PER_WORKER * tasks
        late = sum(max(0, tasks - count) for count in ready) / (2000 * tasks)
        assert late <= (0.5**MAX_STARTS_PER_WORKER if is_bounded else LATE_SHARE) + 0.02
        assert ready_in_time(starts, share) >= tasks > ready_in_time(starts - 1, share) - 1


def test_cancelled_starts_do_not_bias_the_estimate() -> None:
    """Only the first of three starts has ended: their plain median would be too short."""
    source = random.Random(1)  # noqa: S311
    boots, cancelled = list[float](), list[float]()
    for _ in range(2000):
        times = sorted(source.lognormvariate(4.7, 0.5) for _ in range(3))
        boots.append(times[0])
        cancelled += [times[0], times[0]]
    estimate = estimate_boots(sorted(boots), cancelled, 60.0)
    assert estimate.median_s == pytest.approx(110.0, rel=0.05)
    assert sorted(boots)[1000] < 80.0
    assert estimate.share_within(110.0) == pytest.approx(0.5, abs=0.05)


def test_cancelled_starts_expire_with_the_boots_beside_them() -> None:
    """A smaller image boots in a minute. Its boots must not look slow because of starts of the larger image."""
    slow = [80.0 + 3.4 * number for number in range(50)]
    ages_s = tuple(sorted(80.0 + 1.7 * number for number in range(100)))
    memory = AdaptiveMemory(at=990.0, boots=50, cancelled_boots_s=ages_s, cancelled_at_boot=(50,) * 100)
    boots = deque(slow, maxlen=50)
    for number in range(50):
        assert memory.cancelled_boots_s == ages_s
        boots.append(62.0 + 0.1 * (number % 20))
        served = replace(load(boots=tuple(sorted(boots))), now=1000.0 + 600 * number, booted=1)
        memory = decide(served, memory, None, None).memory
    assert memory.cancelled_boots_s == memory.cancelled_at_boot == ()
    estimate = estimate_boots(sorted(boots), memory.cancelled_boots_s, 60.0)
    assert estimate.median_s == pytest.approx(63.0, abs=0.5)
    decision = decide(replace(load(queued=1), boots=estimate, now=40_000.0), memory, None, None)
    assert (round(decision.goal_s), decision.spawn) == (73, 1)


def test_cancelled_starts_stay_while_boots_beside_them_are_known() -> None:
    """Starts of a release that did not number them stay, too."""
    memory = AdaptiveMemory(at=990.0, boots=3, cancelled_boots_s=(90.0, 95.0, 99.0), cancelled_at_boot=(2,))
    for number in range(1, 20):
        memory = decide(replace(load(), now=1000.0 + number, booted=1), memory, None, None).memory
        # 20 boots are known: two starts were cancelled before any of them was counted, one after two of them.
        assert len(memory.cancelled_boots_s) == (3 if number < 17 else 1 if number < 19 else 0)
        assert len(memory.cancelled_at_boot) == len(memory.cancelled_boots_s)


def test_boots_are_counted_once_through_plan() -> None:
    config = FleetConfig(policy="adaptive", spawn_timeout_s=3600.0)
    memory = AdaptiveMemory(at=NOW.timestamp() - 10, boots=7)
    new, old = worker("w0", 0, created=100, activated=5), worker("w1", 1, created=300, activated=200)
    states = seen_snapshot(new, old, worker("w2", 2, "spawning", created=20, heartbeat=None))
    state = PlannerState(scaling=ScalingState(adaptive=memory))
    planned = plan(replace(states, queue=QueueView(boots_s=VARYING), planner_state=state), config)
    learned = planned.planner_state.scaling.adaptive
    assert learned is not None
    assert learned.boots == 8
    again = plan(replace(states, queue=QueueView(boots_s=VARYING), planner_state=planned.planner_state), config)
    assert again.planner_state.scaling.adaptive is not None
    assert again.planner_state.scaling.adaptive.boots == 8


def test_few_boots_and_impossible_goals_start_nothing_extra() -> None:
    estimate = estimate_boots(VARYING, (), 60.0)
    assert in_time_share(estimate, 100.0, 3600.0) == 0.6
    assert in_time_share(replace(estimate, boots=5), 100.0, 3600.0) == 1.0
    assert in_time_share(estimate, 30.0, 3600.0) == 1.0
    assert estimate_boots((), (), 60.0) == BootEstimate(60.0, 60.0)


def test_cancelled_start_is_explained_through_plan() -> None:
    memory = AdaptiveMemory(at=NOW.timestamp() - 10, machines=3, extra_starts=2)
    queue = QueueView(running=1, boots_s=VARYING, durations_s=(3600.0,) * 9, duration_mean_s=3600.0)
    config = FleetConfig(policy="adaptive", spawn_timeout_s=3600.0)
    busy = worker("w0", 0, created=200, running=(RunningView(1, ago(2), None),))
    starting = [worker(f"w{slot}", slot, "spawning", created=62, heartbeat=None) for slot in (1, 2)]
    states = seen_snapshot(busy, *starting)
    state = PlannerState(scaling=ScalingState(adaptive=memory, over_capacity_since=ago(1)))
    planned = plan(replace(states, queue=queue, planner_state=state), config)
    assert [a.code for a in planned.actions if isinstance(a, Drain)] == ["START_CANCELLED"] * 2
    assert planned.decision == "drain 2: starting, another was ready first, 3 workers, 1 needed"


def test_goal_holds_with_random_boots_of_long_tasks() -> None:
    trace = generate("poisson", GeneratorSettings(tasks=600, days=4.0, duration_s=3000.0))
    config = FleetConfig(policy="adaptive", max_workers=200, spawn_timeout_s=3600.0)
    for seed in (1, 2):
        result = run_policy(RunRequest("adaptive", config, World(boot_sigma=0.5, seed=seed)), trace)
        # Five starts for one task would hold 130 s here too; the bound of three costs two seconds.
        assert result.wait_p95_s <= 133.0


def test_refused_spawns_are_not_counted_as_machine_seconds() -> None:
    decision = decide(load(queued=3, boots=(120.0,) * 9), AdaptiveMemory(), None, None)
    assert decision.spawn == 3
    later = replace(load(queued=3, boots=(120.0,) * 9), now=1010.0, arrived=0)
    assert decide(later, decision.memory, None, None).memory.machine_s == 0.0
    started = replace(later, starting_ages_s=(9.0, 9.0))
    assert decide(started, decision.memory, None, None).memory.machine_s == 18.0


def test_one_outlier_does_not_change_the_expected_duration() -> None:
    sample = (10.0,) * 198 + (5000.0, 86_400.0)
    assert robust_mean_s(sample, sum(sample) / 200) == pytest.approx(10.0)
    assert robust_mean_s((5.0, 9.0), 7.0) == 7.0


def test_first_worker_of_a_fleet_billed_by_the_hour_starts_alone() -> None:
    """Without a worker there is no billing period yet, but its start costs one."""
    queue = QueueView(queued=1, arrived=1, durations_s=(3600.0,) * 20, duration_mean_s=3600.0, boots_s=VARYING)
    seen = replace(seen_snapshot(), queue=queue)
    config = FleetConfig(policy="adaptive", max_workers=10)
    hourly = replace(seen, traits=ProviderTraits(billing_unit_s=3600))
    assert len(of_kind(plan(hourly, config).actions, Spawn)) == 1
    assert len(of_kind(plan(seen, config).actions, Spawn)) > 1
