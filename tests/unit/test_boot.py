"""How long a machine may take to start: progress counts, measured boots replace the default, billed hours are used."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from support.snapshots import NOW, ago, fleet, snapshot, worker
from windlass.model.action import Delete, Drain, Fail, RaiseAlert, RecordMachine, Spawn
from windlass.model.cost import Bill, Tariff
from windlass.model.fleet import FleetConfig
from windlass.model.machine import Machine, MachineState, ProviderTraits
from windlass.model.runpod import RunpodSettings
from windlass.model.snapshot import BootTimes
from windlass.policy.boot import boot_limit
from windlass.policy.plan import plan

POD = FleetConfig(provider="runpod", handler="a:b", runpod=RunpodSettings(image="i:1"))
SERVER = FleetConfig(provider="hetzner", handler="a:b")
HOURLY = ProviderTraits(is_remote=True, billing_unit_s=3600)
BY_SECOND = ProviderTraits(is_remote=True)


def machine(state: MachineState, **rest: Any) -> Machine:
    return Machine("m-w0", "w0", state, **rest)


def of_kind(actions: Any, *kinds: type[Any]) -> list[Any]:
    return [action for action in actions if isinstance(action, kinds)]


@pytest.mark.parametrize(
    ("config", "boots", "stall_s", "total_s"),
    [
        (POD, BootTimes(), 900, 1800),
        (SERVER, BootTimes(), 600, 1200),
        (SERVER, BootTimes(2, 400.0, 400.0), 600, 1200),
        (SERVER, BootTimes(3, 300.0, 400.0), 800, 1600),
        (SERVER, BootTimes(50, 60.0, 80.0), 300, 1200),
        (POD, BootTimes(50, 700.0, 800.0), 1600, 3200),
        # A boot that ended during an outage of ten hours.
        (SERVER, BootTimes(3, 60.0, 36_000.0), 1800, 3600),
        (POD, BootTimes(3, 60.0, 36_000.0), 2700, 5400),
        (FleetConfig(handler="a:b"), BootTimes(3, 0.5, 36_000.0), 90, 180),
        (fleet(SERVER, spawn_timeout_s=90), BootTimes(50, 400.0, 400.0), 90, 180),
        (FleetConfig(handler="a:b"), BootTimes(50, 0.5, 0.9), 30, 60),
    ],
)
def test_measured_boots_replace_the_default(
    config: FleetConfig, boots: BootTimes, stall_s: float, total_s: float
) -> None:
    limit = boot_limit(config, boots)
    assert (limit.stall_s, limit.total_s) == (stall_s, total_s)


def failures(view: Any, found: Machine, config: FleetConfig, traits: ProviderTraits = BY_SECOND) -> list[Fail]:
    planned = plan(snapshot(view, machines=(found,), traits=traits, queued=1), config)
    return of_kind(planned.actions, Fail)


def test_pod_that_pulls_a_large_image_is_not_failed() -> None:
    """Defect 3 of the cloud review: pods were deleted 602 s after their creation, in the middle of a pull."""
    pulling = worker(status="spawning", heartbeat=None, created=900, machine_at=900, running_at=None)
    assert failures(pulling, machine(MachineState.BOOTING), POD) == []
    endless = worker(status="spawning", heartbeat=None, created=1801, machine_at=1801, running_at=None)
    assert [fail.code for fail in failures(endless, machine(MachineState.BOOTING), POD)] == ["SPAWNING_TIMEOUT"]


def test_progress_begins_the_timeout_again() -> None:
    running = machine(MachineState.RUNNING)
    spawning = {"status": "spawning", "heartbeat": None, "created": 1000.0, "machine_at": 1000.0}
    stalled = worker(**spawning, running_at=ago(901), progress_at=ago(901))
    assert [fail.reason for fail in failures(stalled, running, POD)] == [
        "Spawning timeout (1000s, no progress for 901s)"
    ]
    assert failures(worker(**spawning, running_at=ago(901), progress_at=ago(5)), running, POD) == []
    assert failures(worker(**spawning, running_at=ago(5)), running, POD) == []
    assert failures(worker(**spawning, running_at=None), running, POD) == [], "it has just begun to run"


def late_server(age_s: float, **rest: Any) -> Any:
    bill = Bill(Tariff(6_000, "EUR", 3600), ago(age_s))
    return worker(status="spawning", heartbeat=None, created=age_s, machine_at=age_s, bill=bill, **rest)


def test_late_server_is_kept_until_its_billed_hour_ends() -> None:
    """Defect 2 of the cloud review: ten servers were deleted at 122 s, each after one billed hour."""
    running = machine(MachineState.RUNNING)
    config = fleet(SERVER, max_workers=1)
    for age_s in (1300, 2500, 3000):
        late = plan(
            snapshot(late_server(age_s, running_at=ago(age_s)), machines=(running,), traits=HOURLY, queued=1), config
        )
        assert of_kind(late.actions, Fail, Delete, Drain, Spawn) == []
        assert [alert.code for alert in of_kind(late.actions, RaiseAlert) if alert.code != "NEAR_MAX"] == [
            "MACHINES_LATE"
        ]
    assert [f.code for f in failures(late_server(3560, running_at=ago(3560)), running, config, HOURLY)] == [
        "SPAWNING_TIMEOUT"
    ]
    assert [f.code for f in failures(late_server(3700, running_at=ago(3700)), running, config, HOURLY)] == [
        "SPAWNING_TIMEOUT"
    ]


def test_server_whose_boot_failed_is_deleted_although_its_hour_runs() -> None:
    running = machine(MachineState.RUNNING)
    for age_s in (90, 1300):
        failed = late_server(age_s, running_at=ago(age_s), prepare_code="BOOT_FAILED", prepare_reason="Its boot failed")
        planned = plan(snapshot(failed, machines=(running,), traits=HOURLY, queued=1), fleet(SERVER, max_workers=2))
        assert [(fail.code, fail.reason) for fail in of_kind(planned.actions, Fail)] == [
            ("BOOT_FAILED", "Its boot failed")
        ]
        assert len(of_kind(planned.actions, Delete)) == 1


def test_slow_server_is_neither_late_nor_replaced_for_twice_the_timeout() -> None:
    running = machine(MachineState.RUNNING)
    seen = snapshot(late_server(1100, running_at=ago(1100)), machines=(running,), traits=HOURLY, queued=1)
    assert of_kind(plan(seen, fleet(SERVER, max_workers=2)).actions, Spawn, Fail, RaiseAlert) == []


def test_late_server_is_replaced_where_slots_are_free() -> None:
    running = machine(MachineState.RUNNING)
    seen = snapshot(late_server(1300, running_at=ago(1300)), machines=(running,), traits=HOURLY, queued=1)
    planned = plan(seen, fleet(SERVER, max_workers=2))
    assert [spawn.slot for spawn in of_kind(planned.actions, Spawn)] == [1]


@pytest.mark.parametrize("policy", ["threshold", "adaptive"])
def test_late_server_does_not_count_for_the_minimum(policy: str) -> None:
    """The idle worker drained for it, and the next cycle spawned another."""
    idle = replace(worker("w1", 1, created=3550), bill=Bill(Tariff(6_000, "EUR", 3600), ago(3550)))
    late = late_server(1300, running_at=ago(1300))
    machines = (machine(MachineState.RUNNING), Machine("m-w1", "w1", MachineState.RUNNING))
    config = fleet(SERVER, policy=policy, max_workers=2, min_workers=1)
    seen = snapshot(late, idle, machines=machines, traits=HOURLY, idle=900)
    assert of_kind(plan(seen, config).actions, Drain, Spawn) == []
    assert of_kind(plan(seen, fleet(config, min_workers=0)).actions, Drain) != []


def test_many_late_servers_hold_the_fleet() -> None:
    views = [late_server(1300, running_at=ago(1300), slot=n, id_=f"w{n}") for n in range(5)]
    machines = tuple(Machine(f"m-w{n}", f"w{n}", MachineState.RUNNING) for n in range(5))
    planned = plan(snapshot(*views, machines=machines, traits=HOURLY, queued=50), SERVER)
    assert of_kind(planned.actions, Spawn, Fail) == []
    assert planned.planner_state.hold is not None
    assert planned.planner_state.hold.code == "MACHINES_LATE"


def test_running_machine_and_its_address_are_recorded_once() -> None:
    found = machine(MachineState.RUNNING, address="203.0.113.7", host="203.0.113.7")
    spawning = {"status": "spawning", "heartbeat": None, "created": 60.0, "machine_at": 60.0}
    planned = plan(snapshot(worker(**spawning, running_at=None), machines=(found,), traits=BY_SECOND), POD)
    assert of_kind(planned.actions, RecordMachine) == [
        RecordMachine("w0", "m-w0", "its machine is running", True, "203.0.113.7", "203.0.113.7")
    ]
    known = worker(**spawning, running_at=NOW - timedelta(seconds=9), address="203.0.113.7", machine_host="203.0.113.7")
    assert of_kind(plan(snapshot(known, machines=(found,), traits=BY_SECOND), POD).actions, RecordMachine) == []
