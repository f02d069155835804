"""The adaptive policy learns durations of each queue of a fleet."""

from dataclasses import replace

import pytest

from windlass.model.adaptive import AdaptiveMemory
from windlass.model.fleet import FleetConfig
from windlass.model.snapshot import QueueDurations
from windlass.policy.scale.adaptive import LATE_SLACK_S, decide
from windlass.policy.scale.adaptive_boot import BootEstimate
from windlass.policy.scale.adaptive_load import MIN_QUEUE_DURATIONS, FleetLoad
from windlass.simulator.engine import World
from windlass.simulator.measures import RunResult
from windlass.simulator.observation import KEPT_QUEUES, Observation
from windlass.simulator.runs import RunRequest, run_policy
from windlass.simulator.trace import Trace

SHORT_S, LONG_S = 2.0, 1800.0


def queue(name: str, queued: int, duration_s: float, samples: int = 50) -> QueueDurations:
    return QueueDurations(name, queued, (duration_s,) * samples, duration_s if samples else None)


def mixed_load(*queues: QueueDurations, running: tuple[tuple[float, str], ...] = ()) -> FleetLoad:
    """Half of the fleet's recent tasks were short and half were long."""
    queued = sum(each.queued for each in queues)
    return FleetLoad(
        now=1000.0,
        slots=1,
        queued=queued,
        arrived=queued,
        oldest_queued_age_s=0.0,
        busy=len(running),
        running_ages_s=[age_s for age_s, _ in running],
        idle=(),
        starting_ages_s=(),
        durations_s=(SHORT_S,) * 100 + (LONG_S,) * 100,
        duration_mean_s=(SHORT_S + LONG_S) / 2,
        boots=BootEstimate(120.0, 120.0),
        running_queues=[name for _, name in running],
        queues=queues,
    )


def spawned(load: FleetLoad) -> int:
    return decide(load, AdaptiveMemory(), None, None).spawn


def test_short_tasks_of_one_queue_share_a_worker() -> None:
    given = mixed_load(queue("short", 5, SHORT_S))
    assert spawned(given) == 1
    # Without the queues they look like tasks of 15 minutes, and each gets a worker.
    assert spawned(replace(given, queues=())) == 5


def test_task_behind_a_short_running_task_needs_no_worker() -> None:
    given = mixed_load(queue("short", 1, SHORT_S), queue("long", 0, LONG_S), running=((1.0, "short"),))
    assert spawned(given) == 0
    assert spawned(replace(given, running_queues=("long",))) == 1
    assert spawned(replace(given, queues=(), running_queues=())) == 1


def test_long_tasks_still_get_a_worker_each() -> None:
    assert spawned(mixed_load(queue("short", 4, SHORT_S), queue("long", 4, LONG_S))) in {4, 5}


def test_queue_with_few_samples_is_expected_to_be_like_all_queues() -> None:
    few, enough = (mixed_load(queue("new", 5, SHORT_S, n)) for n in (MIN_QUEUE_DURATIONS - 1, MIN_QUEUE_DURATIONS))
    assert spawned(few) == spawned(replace(few, queues=())) == 5
    assert spawned(enough) == 1
    assert spawned(mixed_load(queue("new", 5, SHORT_S, 0))) == 5


def test_queues_without_an_entry_count_with_the_pooled_duration() -> None:
    given = replace(mixed_load(queue("short", 5, SHORT_S)), queued=8, arrived=8)
    assert given.queued_durations_s == [(5, SHORT_S), (3, (SHORT_S + LONG_S) / 2)]


def test_outlier_of_a_queue_does_not_change_its_expected_duration() -> None:
    sample = (SHORT_S,) * 99 + (86_400.0,)
    given = mixed_load(QueueDurations("short", 5, sample, sum(sample) / 100))
    assert given.queued_mean_s == pytest.approx(SHORT_S)


def mixed_trace() -> Trace:
    """A long task every 20 minutes, and batches of 6 short tasks."""
    tasks = [(1200.0 * n, LONG_S, "long") for n in range(60)]
    tasks += [(300.0 + 1700.0 * n + k, SHORT_S, "short") for n in range(42) for k in range(6)]
    return Trace("mixed", *(tuple(column) for column in zip(*sorted(tasks), strict=True)))


def run(trace: Trace, *, is_full: bool = False, **world: float) -> RunResult:
    config = FleetConfig(policy="adaptive", max_workers=100, spawn_timeout_s=3600.0)
    return run_policy(RunRequest("adaptive", config, World(**world), is_full=is_full), trace)


def test_known_queues_waste_fewer_machines_than_pooled_durations() -> None:
    trace = mixed_trace()
    known, pooled = run(trace), run(replace(trace, queues=()))
    assert known.machines_started < 0.75 * pooled.machines_started
    assert known.machine_seconds_billed < pooled.machine_seconds_billed
    # A task that misses its goal of 130 s anyway may start LATE_SLACK_S later.
    assert known.wait_p95_s <= 130.0 + LATE_SLACK_S


@pytest.mark.parametrize("sigma", [0.0, 0.5])
def test_fast_path_equals_full_plan_with_queues(sigma: float) -> None:
    trace = mixed_trace().between(0.0, 20_000.0)
    assert run(trace, boot_sigma=sigma).to_plain() == run(trace, is_full=True, boot_sigma=sigma).to_plain()


def test_trace_of_one_queue_decides_as_without_a_queue() -> None:
    trace = mixed_trace()
    assert run(replace(trace, queues=("a",) * len(trace.arrivals))) == run(replace(trace, queues=()))


def test_number_of_remembered_queues_is_bounded() -> None:
    from windlass.simulator.engine import SimulatedFleet

    tasks = 3 * KEPT_QUEUES
    trace = Trace("many", (0.0,) * tasks, (1.0,) * tasks, tuple(f"q{n:03d}" for n in range(tasks)))
    fleet = SimulatedFleet(trace, World())
    fleet.queue.extend(range(tasks))
    assert len(Observation().each_queue(fleet)) == KEPT_QUEUES


def test_overdue_tasks_count_for_their_own_queue() -> None:
    running = tuple((600.0, "short") for _ in range(20))
    given = mixed_load(queue("short", 6, SHORT_S), queue("long", 0, LONG_S), running=running)
    assert spawned(given) == 6
    assert spawned(replace(given, running_ages_s=[1.0] * 20)) == 0
