"""When a network volume grows: the STORAGE_* settings as a table, and what a person is told."""

from dataclasses import replace
from typing import Any

import pytest

from support.snapshots import GPU, NOW, ago, apply, fleet, of_kind, snapshot, worker
from windlass.model.action import GrowVolume, RaiseAlert
from windlass.model.machine import Volume
from windlass.model.snapshot import Snapshot, StorageUse, VolumeResize
from windlass.policy.plan import plan


def seen(size_gb: int | None, used_gb: float | None, measured: float = 10, **rest: Any) -> Snapshot:
    return snapshot(
        worker(vram_mb=24_000),
        volume=Volume("v1", size_gb) if size_gb is not None else None,
        storage=StorageUse("w0", int(used_gb * 10**9), ago(measured)) if used_gb is not None else None,
        **rest,
    )


@pytest.mark.parametrize(
    ("at", "settings", "grown_to"),
    [
        pytest.param(seen(500, 400), {}, None, id="80 % used and 100 GB free is fine"),
        pytest.param(seen(1000, 850), {}, None, id="85 % used is fine, and no more"),
        pytest.param(seen(1000, 851), {}, 1050, id="more than that is used"),
        pytest.param(seen(100, 50), {}, None, id="50 GB free is fine, and no less"),
        pytest.param(seen(100, 51), {}, 150, id="less than that is free"),
        pytest.param(seen(100, 107), {}, 150, id="one step for each look, however much is missing"),
        pytest.param(seen(100, 51), {"storage_min_free_gb": 10}, None, id="who needs less free says so"),
        pytest.param(seen(100, 51), {"storage_expansion_increment_gb": 7}, 107, id="by the increment"),
        pytest.param(seen(4090, 4080), {}, 4096, id="up to the largest there is"),
        pytest.param(seen(None, 99), {}, None, id="it was not looked at in this cycle"),
        pytest.param(seen(100, None), {}, None, id="nobody has measured it"),
        pytest.param(seen(100, 99, measured=3601), {}, None, id="what was measured long ago says nothing"),
    ],
)
def test_a_volume_grows_by_one_step_when_little_is_free_or_much_is_used(
    at: Snapshot, settings: dict[str, Any], grown_to: int | None
) -> None:
    config = fleet(GPU, **settings)
    planned = plan(at, config)
    assert [action.size_gb for action in of_kind(planned.actions, GrowVolume)] == ([grown_to] if grown_to else [])
    if grown_to is not None and at.storage is not None and at.storage.used_bytes < 100 * 10**9 and not settings:
        assert not plan(apply(planned, at, config), config).actions


@pytest.mark.parametrize("used_gb", [108, 2_000, -1])
def test_a_measurement_that_cannot_be_true_is_told_of_and_buys_nothing(used_gb: float) -> None:
    (alert,) = plan(seen(100, used_gb), GPU).actions
    assert isinstance(alert, RaiseAlert)
    assert alert.code == "STORAGE_DOUBTED"
    assert alert.reason == (
        f"network volume v1 has 100 GB, but worker w0 measured {used_gb} GB used; it is not resized"
    )


def test_a_volume_that_cannot_grow_any_more_is_told_of_once_an_hour() -> None:
    full = seen(4096, 4090)
    (alert,) = plan(full, GPU).actions
    assert isinstance(alert, RaiseAlert)
    assert alert.code == "STORAGE_FULL"
    assert alert.reason == ("network volume v1 is at its largest size: 4090 of 4096 GB used (100 %), 6 GB free")
    told = {"alerts": {"STORAGE_FULL v1": ago(300)}}
    # Between two looks nothing is known, and what was told is remembered.
    between = plan(seen(None, 4090, state=told), GPU)
    assert between.planner_state.alerts == told["alerts"]
    assert not plan(seen(4096, 4090, state=told), GPU).actions
    assert plan(seen(4096, 100, state=told), GPU).planner_state.alerts == {}


def test_a_volume_that_did_not_grow_when_asked_to_is_told_of_and_asked_again() -> None:
    asked = VolumeResize("v1", 150, NOW)
    assert plan(seen(100, 60), GPU).planner_state.storage.resize == asked
    planned = plan(seen(100, 60, state={"resize": VolumeResize("v1", 150, ago(300))}), GPU)
    (alert,) = of_kind(planned.actions, RaiseAlert)
    assert alert.code == "STORAGE_NOT_GROWN"
    assert "150 GB requested at 11:55:00 UTC, it has 100 GB" in alert.reason
    assert len(of_kind(planned.actions, GrowVolume)) == 1
    # It grew, and is too small again: nothing is wrong.
    again = plan(seen(150, 140, state={"resize": VolumeResize("v1", 150, ago(300))}), GPU)
    assert not of_kind(again.actions, RaiseAlert)


def looks(first: Snapshot, count: int) -> list[list[str]]:
    """What each look after another tells a person."""
    told = []
    for _ in range(count):
        planned = plan(first, GPU)
        told.append([alert.code for alert in of_kind(planned.actions, RaiseAlert)])
        first = replace(first, planner_state=planned.planner_state)
    return told


def blind(active_s: float | None, **what: Any) -> Snapshot:
    workers = () if active_s is None else (worker(created=9000, activated=active_s, claimed=5, vram_mb=24_000),)
    return snapshot(*workers, **what)


@pytest.mark.parametrize(
    ("at", "is_told"),
    [
        pytest.param(blind(10, volume_problem="not found (404)"), True, id="it cannot be seen"),
        pytest.param(blind(None, volume_problem="not found (404)"), False, id="it cannot be seen and nobody uses it"),
        pytest.param(blind(1800, volume=Volume("v1", 100)), True, id="nobody measures it"),
        pytest.param(blind(1799, volume=Volume("v1", 100)), False, id="nobody has had the time to measure it"),
        pytest.param(blind(1800), False, id="it was not looked at"),
    ],
)
def test_how_full_it_is_being_unknown_is_told_after_three_looks(at: Snapshot, is_told: bool) -> None:
    assert looks(at, 4) == [[], [], ["STORAGE_UNKNOWN"] if is_told else [], []]


def test_a_look_that_shows_it_ends_the_blindness_and_those_between_do_not() -> None:
    at = blind(1800, volume_problem="not found (404)", state={"unknown_checks": 2})
    assert plan(replace(at, volume_problem=None), GPU).planner_state.storage.unknown_checks == 2
    use = StorageUse("w0", 10**9, ago(5))
    known = plan(replace(at, volume_problem=None, volume=Volume("v1", 100), storage=use), GPU).planner_state
    assert (known.storage.unknown_checks, known.storage.checked_in_cycle) == (0, 1)
