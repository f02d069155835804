"""Tuning: settings are chosen on one part of a trace and checked on the other."""

import pytest

from windlass.model.errors import BadInput
from windlass.model.fleet import FleetConfig
from windlass.simulator.engine import World
from windlass.simulator.trace import GeneratorSettings, Trace, generate
from windlass.simulator.tuning import candidates, fleet_section, tune

# Days of simulated time.
pytestmark = pytest.mark.slow

BASE = FleetConfig(max_workers=100, spawn_timeout_s=3600.0)


def test_chosen_settings_hold_the_goal_and_are_checked_on_unseen_tasks() -> None:
    trace = generate("poisson", GeneratorSettings(tasks=600, days=0.5, duration_s=40.0))
    tuned = tune(trace, BASE, World(), p95_wait_s=130.0, price=None)
    assert tuned.is_held
    assert tuned.searched.wait_p95_s <= 130.0
    assert tuned.searched.tasks + tuned.checked.tasks == 600


def test_goal_that_no_settings_hold_is_reported_as_missed() -> None:
    trace = generate("spikes", GeneratorSettings(tasks=200, days=0.5, duration_s=600.0))
    tuned = tune(trace, BASE, World(), p95_wait_s=1.0, price=None)
    assert not tuned.is_held_searched
    assert not tuned.is_held
    assert tuned.problem == "no settings hold a p95 wait of 1 s; these come closest."


def test_goal_that_the_unseen_part_misses_is_reported_as_missed() -> None:
    """Single tasks while settings are chosen, then more tasks than five machines complete."""
    calm = [400.0 * number for number in range(70)]
    rush = [calm[-1] + 2.0 * number for number in range(1, 400)]
    trace = Trace("t", (*calm, *rush, 40_000.0), (30.0,) * 470)
    base = BASE.model_copy(update={"max_workers": 5})
    tuned = tune(trace, base, World(), p95_wait_s=130.0, price=None)
    assert tuned.searched.wait_p95_s <= 130.0 < tuned.checked.wait_p95_s
    assert (tuned.is_held_searched, tuned.is_held_checked, tuned.is_held) == (True, False, False)
    assert tuned.problem is not None
    assert f"p95 wait {tuned.checked.wait_p95_s:.0f} s, goal 130 s" in tuned.problem


def test_price_without_a_goal_misses_nothing() -> None:
    trace = generate("poisson", GeneratorSettings(tasks=100, days=0.1, duration_s=40.0))
    tuned = tune(trace, BASE, World(), p95_wait_s=None, price=1.0)
    assert (tuned.is_held, tuned.problem) == (True, None)


def test_higher_price_of_waiting_never_waits_longer_on_the_searched_part() -> None:
    trace = generate("bursts", GeneratorSettings(tasks=400, days=0.5, duration_s=40.0))
    cheap, dear = (tune(trace, BASE, World(), p95_wait_s=None, price=price) for price in (0.25, 20.0))
    assert dear.searched.wait_total_s <= cheap.searched.wait_total_s


def test_trace_without_a_second_part_is_bad_input() -> None:
    with pytest.raises(BadInput, match="too short"):
        tune(Trace("t", (0.0,), (1.0,)), BASE, World(), p95_wait_s=10.0, price=None)


def test_section_is_valid_for_every_candidate() -> None:
    for settings in candidates(120.0, 60.0, None):
        FleetConfig(policy="adaptive", **settings)
    assert fleet_section("a", {"wait_goal_s": 60.0}) == '[fleets.a]\npolicy = "adaptive"\nwait_goal_s = 60\n'
