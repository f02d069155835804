"""A fleet's past as a trace and a world, and the alternatives that it is compared with."""

import math
import random
from datetime import UTC, datetime, timedelta
from statistics import NormalDist

import pytest

from windlass.model.errors import BadInput
from windlass.model.fleet import FleetConfig
from windlass.model.history import MachineRecord, TaskHistory
from windlass.simulator.engine import World
from windlass.simulator.past import fleet_past, shadow_requests
from windlass.simulator.runs import run_policy

BEGIN = datetime(2025, 1, 1, tzinfo=UTC)
TASKS = TaskHistory(BEGIN, [100.0, 160.0, 400.0], [10.0, 20.0, 30.0], ["q", "r", "q"])
HETZNER = FleetConfig(provider="hetzner", queues=("q", "r"), concurrency=2, max_workers=5)
LOCAL = FleetConfig(provider="local", queues=("q",))


def machine(boot_s: float | None, lived_s: float = 3600.0, **changes: object) -> MachineRecord:
    return MachineRecord(BEGIN, boot_s, lived_s, **changes)  # type: ignore[arg-type]


def test_trace_begins_with_the_first_task() -> None:
    past = fleet_past("gpu", HETZNER, TASKS, [])
    assert past.trace.arrivals == (0.0, 60.0, 300.0)
    assert past.trace.durations == (10.0, 20.0, 30.0)
    assert past.trace.queues == ("q", "r", "q")


def test_history_that_is_read_later_gives_the_same_trace() -> None:
    """Arrivals count from the beginning of the history, which moves with the clock."""
    arrivals = [100.0 + 10.0 * number for number in range(50)]
    first, later = (
        fleet_past("gpu", HETZNER, TaskHistory(BEGIN, [at - moved_s for at in arrivals], [1.0] * 50, ["q"] * 50), [])
        for moved_s in (0.0, 0.123457)
    )
    assert first.trace == later.trace


def test_world_has_measured_boots_refusals_crashes_and_billing() -> None:
    machines = [
        machine(100.0, 3700.0, price_micros_per_hour=10_000, currency="EUR", billing_unit_s=3600),
        machine(100.0, 3700.0, is_crashed=True, price_micros_per_hour=5_000, currency="EUR", billing_unit_s=3600),
        machine(130.0, 3730.0),
        machine(None, 0.0, is_refused=True),
    ]
    past = fleet_past("gpu", HETZNER, TASKS, machines)
    world = past.world
    assert (world.slots, world.boot_s, world.boot_sigma, world.billing_unit_s) == (2, 110.0, 0.0, 3600)
    assert world.refused_share == 0.25
    assert world.crashes_per_hour == pytest.approx(1 / 3)
    assert not world.is_free
    assert past.cost_micros(7200.0) == 20_000
    assert any("refused 1 of 4" in note for note in past.notes)


def test_spread_of_boots_needs_several_boots() -> None:
    boots = (50.0, 100.0, 200.0, 100.0, 50.0, 200.0)
    spread = fleet_past("gpu", HETZNER, TASKS, [machine(boot_s) for boot_s in boots]).world
    assert spread.boot_sigma == pytest.approx(0.566, abs=0.001)
    assert spread.boot_s == pytest.approx(116.67, abs=0.01)


def test_cancelled_starts_count_as_boots_that_take_longer() -> None:
    """Machines start in pairs, and the slower one of each pair is cancelled when the other is ready."""
    boots = [math.exp(4.5 + 0.6 * NormalDist().inv_cdf((number + 0.5) / 40)) for number in range(40)]
    complete = fleet_past("gpu", HETZNER, TASKS, [machine(boot_s) for boot_s in boots]).world
    random.Random(1).shuffle(boots)  # noqa: S311
    faster = [min(pair) for pair in zip(boots[::2], boots[1::2], strict=True)]
    seen = [machine(boot_s) for boot_s in faster]
    cancelled = [machine(None, boot_s + 11.0, cancelled_s=boot_s) for boot_s in faster]
    ignored, counted = (fleet_past("gpu", HETZNER, TASKS, found).world for found in (seen, seen + cancelled))
    assert ignored.boot_s < 0.8 * complete.boot_s
    assert counted.boot_s == pytest.approx(complete.boot_s, rel=0.15)
    assert abs(counted.boot_sigma - complete.boot_sigma) < abs(ignored.boot_sigma - complete.boot_sigma)


def test_many_boots_are_drawn_as_they_were_measured() -> None:
    """Images that are cached or not: no lognormal distribution has two peaks."""
    boots = [20.0, 21.0, 300.0, 310.0] * 5
    past = fleet_past("gpu", HETZNER, TASKS, [machine(boot_s) for boot_s in boots])
    assert {boot_s for boot_s, _ in past.world.boot_steps} == set(boots)
    assert past.world.boot_steps[-1] == (310.0, pytest.approx(0.0, abs=1e-9))
    assert past.world.boot_s == pytest.approx(162.75)
    assert any("drawn from those that were measured" in note for note in past.notes)
    assert fleet_past("gpu", HETZNER, TASKS, [machine(boot_s) for boot_s in boots[1:]]).world.boot_steps == ()
    first, second = (run_policy(shadow_requests(HETZNER, past.world)[0], past.trace).to_plain() for _ in range(2))
    assert first == second


@pytest.mark.parametrize(("config", "boot_s", "unit_s"), [(HETZNER, 60.0, 3600), (LOCAL, 1.0, 1)])
def test_fleet_without_machines_gets_assumed_boots(config: FleetConfig, boot_s: float, unit_s: int) -> None:
    past = fleet_past("gpu", config, TASKS, [])
    assert (past.world.boot_s, past.world.billing_unit_s, past.price_micros_per_hour) == (boot_s, unit_s, None)
    assert past.world.is_free == config.is_of_this_host
    assert any("assumed" in note for note in past.notes)


def test_fleet_without_tasks_is_refused() -> None:
    with pytest.raises(BadInput, match="no finished task since 2025-01-01"):
        fleet_past("gpu", LOCAL, TaskHistory(BEGIN, [], [], []), [])


@pytest.mark.parametrize(
    ("settings", "unit_s", "labels"),
    [
        ({"policy": "buffered"}, 1, ["running: buffered", "adaptive", "adaptive, price_of_waiting 1"]),
        ({}, 1, ["running: adaptive", "adaptive, price_of_waiting 1", "delayed-off"]),
        ({"price_of_waiting": 1.0}, 1, ["running: adaptive", "adaptive", "delayed-off"]),
        ({"wait_goal_s": 30.0}, 1, ["running: adaptive", "adaptive", "adaptive, price_of_waiting 1"]),
        ({"policy": "clear-time"}, 3600, ["running: clear-time", "adaptive", "hetzner-recycler"]),
        ({}, 3600, ["running: adaptive", "hetzner-recycler", "keda"]),
        ({"price_of_waiting": 1.0}, 3600, ["running: adaptive", "adaptive", "hetzner-recycler"]),
    ],
)
def test_running_settings_are_compared_with_two_others(
    settings: dict[str, object], unit_s: int, labels: list[str]
) -> None:
    config = FleetConfig(queues=("q",), **settings)
    requests = shadow_requests(config, World(billing_unit_s=unit_s))
    assert [request.label for request in requests] == labels
    assert requests[0].config.policy == config.policy
    assert requests[0].config.wait_goal_s == config.wait_goal_s
    for request in requests[1:]:
        assert request.config.max_workers == config.max_workers


def test_alternatives_run_on_the_past_of_a_fleet() -> None:
    arrivals = [float(30 * n) for n in range(100)]
    tasks = TaskHistory(BEGIN + timedelta(hours=1), arrivals, [45.0] * 100, ["q"] * 100)
    past = fleet_past("gpu", HETZNER, tasks, [machine(60.0, billing_unit_s=1)])
    results = [run_policy(request, past.trace) for request in shadow_requests(HETZNER, past.world)]
    assert [result.tasks for result in results] == [100, 100, 100]
    assert all(result.samples and result.machine_seconds_billed > 0 for result in results)
    assert all(result.machines_peak <= 5 for result in results)
