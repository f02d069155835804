"""Growth of the shared volume: the storage settings as a table, and the alerts."""

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
        pytest.param(seen(1000, 850), {}, None, id="85 % used is fine"),
        pytest.param(seen(1000, 851), {}, 1050, id="more than 85 % used"),
        pytest.param(seen(100, 50), {}, None, id="50 GB free is fine"),
        pytest.param(seen(100, 51), {}, 150, id="less than 50 GB free"),
        pytest.param(seen(100, 107), {}, 150, id="one step per check"),
        pytest.param(seen(100, 51), {"storage_min_free_gb": 10}, None, id="lower storage_min_free_gb"),
        pytest.param(seen(100, 51), {"storage_expansion_increment_gb": 7}, 107, id="larger increment"),
        pytest.param(seen(4090, 4080), {}, 4096, id="up to the largest size"),
        pytest.param(seen(None, 99), {}, None, id="not checked in this cycle"),
        pytest.param(seen(100, None), {}, None, id="not measured"),
        pytest.param(seen(100, 99, measured=3601), {}, None, id="measured long ago"),
    ],
)
def test_volume_grows_one_step_when_nearly_full(at: Snapshot, settings: dict[str, Any], grown_to: int | None) -> None:
    config = fleet(GPU, **settings)
    planned = plan(at, config)
    assert [action.size_gb for action in of_kind(planned.actions, GrowVolume)] == ([grown_to] if grown_to else [])
    if grown_to is not None and at.storage is not None and at.storage.used_bytes < 100 * 10**9 and not settings:
        assert not plan(apply(planned, at, config), config).actions


@pytest.mark.parametrize("used_gb", [108, 2_000, -1])
def test_implausible_measurement_raises_alert_without_resize(used_gb: float) -> None:
    (alert,) = plan(seen(100, used_gb), GPU).actions
    assert isinstance(alert, RaiseAlert)
    assert alert.code == "STORAGE_IMPLAUSIBLE"
    assert alert.reason == (
        f"network volume v1 has 100 GB, but worker w0 measured {used_gb} GB used; it is not resized"
    )


def test_volume_at_largest_size_raises_alert_hourly() -> None:
    full = seen(4096, 4090)
    (alert,) = plan(full, GPU).actions
    assert isinstance(alert, RaiseAlert)
    assert alert.code == "STORAGE_FULL"
    assert alert.reason == ("network volume v1 is at its largest size: 4090 of 4096 GB used (100 %), 6 GB free")
    alerted = {"alerts": {"STORAGE_FULL v1": ago(300)}}
    # Between two checks the alert stays open.
    between = plan(seen(None, 4090, state=alerted), GPU)
    assert between.planner_state.alerts == alerted["alerts"]
    assert not plan(seen(4096, 4090, state=alerted), GPU).actions
    assert plan(seen(4096, 100, state=alerted), GPU).planner_state.alerts == {}


def test_failed_resize_raises_alert_and_is_repeated() -> None:
    asked = VolumeResize("v1", 150, NOW)
    assert plan(seen(100, 60), GPU).planner_state.storage.resize == asked
    planned = plan(seen(100, 60, state={"resize": VolumeResize("v1", 150, ago(300))}), GPU)
    (alert,) = of_kind(planned.actions, RaiseAlert)
    assert alert.code == "STORAGE_NOT_GROWN"
    assert "150 GB requested at 11:55:00 UTC, it has 100 GB" in alert.reason
    assert len(of_kind(planned.actions, GrowVolume)) == 1
    # It grew and is nearly full again: no alert.
    again = plan(seen(150, 140, state={"resize": VolumeResize("v1", 150, ago(300))}), GPU)
    assert not of_kind(again.actions, RaiseAlert)


def looks(first: Snapshot, count: int) -> list[list[str]]:
    """Alerts of each check."""
    alerted = []
    for _ in range(count):
        planned = plan(first, GPU)
        alerted.append([alert.code for alert in of_kind(planned.actions, RaiseAlert)])
        first = replace(first, planner_state=planned.planner_state)
    return alerted


def blind(active_s: float | None, **what: Any) -> Snapshot:
    workers = () if active_s is None else (worker(created=9000, activated=active_s, claimed=5, vram_mb=24_000),)
    return snapshot(*workers, **what)


@pytest.mark.parametrize(
    ("at", "is_alerted"),
    [
        pytest.param(blind(10, volume_problem="not found (404)"), True, id="provider error"),
        pytest.param(blind(None, volume_problem="not found (404)"), False, id="provider error without workers"),
        pytest.param(blind(1800, volume=Volume("v1", 100)), True, id="no measurement"),
        pytest.param(blind(1799, volume=Volume("v1", 100)), False, id="no time to measure yet"),
        pytest.param(blind(1800), False, id="not checked"),
    ],
)
def test_unknown_usage_raises_alert_after_three_checks(at: Snapshot, is_alerted: bool) -> None:
    assert looks(at, 4) == [[], [], ["STORAGE_UNKNOWN"] if is_alerted else [], []]


def test_successful_check_resets_unknown_checks() -> None:
    at = blind(1800, volume_problem="not found (404)", state={"unknown_checks": 2})
    assert plan(replace(at, volume_problem=None), GPU).planner_state.storage.unknown_checks == 2
    use = StorageUse("w0", 10**9, ago(5))
    known = plan(replace(at, volume_problem=None, volume=Volume("v1", 100), storage=use), GPU).planner_state
    assert (known.storage.unknown_checks, known.storage.checked_in_cycle) == (0, 1)
