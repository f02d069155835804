"""Preparation: starting the worker's program on a machine that runs."""

import pytest

from support.snapshots import ago, fleet, kinds, machine, of_kind, snapshot, worker
from windlass.model.action import Adopt, Fail, Prepare
from windlass.model.machine import ProviderTraits
from windlass.model.snapshot import Hold, Snapshot, WorkerView
from windlass.policy.plan import plan
from windlass.policy.planning_context import build_context
from windlass.policy.worker_state import Lifecycle

PREPARING = ProviderTraits(60, 120, 60, is_remote=True, has_prepare_step=True)
FLEET = fleet(min_workers=0, max_workers=4)


def new(**rest: object) -> WorkerView:
    return worker("w0", **{"status": "spawning", "heartbeat": None, "created": 5.0, **rest})  # type: ignore[arg-type]


def seen(view: WorkerView, state: str = "running", **rest: object) -> Snapshot:
    return snapshot(view, machines=(machine("w0", state),), **{"traits": PREPARING, "queued": 1, **rest})  # type: ignore[arg-type]


def test_running_machine_is_prepared() -> None:
    planned = plan(seen(new()), FLEET)
    assert of_kind(planned.actions, Prepare) == [Prepare("w0", "m-w0", "its machine is running")]


@pytest.mark.parametrize(
    "snap",
    [
        pytest.param(seen(new(), "booting"), id="not running"),
        pytest.param(seen(new(prepared=1)), id="already prepared"),
        pytest.param(seen(new(), preparing=("w0",)), id="preparation in progress"),
        pytest.param(seen(new(heartbeat=1)), id="has a heartbeat"),
        pytest.param(seen(new(status="terminating", terminating=1)), id="terminating"),
        pytest.param(seen(new(prepare_code="DISK_FULL")), id="preparation failed"),
        pytest.param(seen(new(created=5000)), id="spawn timeout"),
        pytest.param(
            seen(new(), traits=ProviderTraits(60, 120, 60, is_remote=True)), id="provider without a prepare step"
        ),
        pytest.param(seen(new(), is_shutting_down=True), id="fleet shuts down"),
    ],
)
def test_other_machines_are_not_prepared(snap: Snapshot) -> None:
    assert of_kind(plan(snap, FLEET).actions, Prepare) == []


def test_adopted_machine_is_prepared_at_once() -> None:
    planned = plan(seen(new(machine_id=None)), FLEET)
    assert [type(action) for action in planned.actions if isinstance(action, Adopt | Prepare)] == [Adopt, Prepare]


def test_preparation_of_another_orchestrator_is_restarted() -> None:
    planned = plan(seen(new(progress_at=ago(3))), FLEET)
    assert len(of_kind(planned.actions, Prepare)) == 1


@pytest.mark.parametrize(
    "code",
    [
        "SSH_UNREACHABLE", "SSH_HOST_KEY_CHANGED", "STORAGE_NOT_MOUNTED", "GPU_NOT_DETECTED", "DISK_FULL",
        "JOIN_DATA_MISSING", "JOIN_DATA_INVALID", "PYTHON_MISSING", "VENV_FAILED", "WHEEL_UNAVAILABLE",
        "INSTALL_FAILED", "REQUIREMENTS_FAILED", "DEPENDENCY_MISSING", "START_SCRIPT_FAILED",
    ],
)  # fmt: skip
def test_failed_preparation_fails_worker_with_its_code(code: str) -> None:
    planned = plan(seen(new(prepare_code=code, prepare_reason="that is how it is")), FLEET)
    assert of_kind(planned.actions, Fail) == [Fail("w0", code, "that is how it is")]
    assert "delete" in kinds(planned)
    assert planned.planner_state.failure_rate.failed_starts == 1


def test_total_hold_stops_preparation() -> None:
    silent = [worker(f"s{n}", n + 1, heartbeat=5000, created=9000) for n in range(3)]
    snap = snapshot(new(), *silent, traits=PREPARING)
    planned = plan(snap, FLEET)
    assert isinstance(planned.hold, Hold)
    assert planned.hold.is_total
    assert of_kind(planned.actions, Prepare) == []


def test_lifecycle_follows_preparation() -> None:
    for view, state, lifecycle in (
        (new(), "booting", Lifecycle.SPAWNING_POD_PENDING),
        (new(), "running", Lifecycle.SPAWNING_SCRIPT_PENDING),
        (new(prepared=1), "running", Lifecycle.SPAWNING_SCRIPT_RUNNING),
    ):
        assert build_context(seen(view, state), FLEET).states["w0"].lifecycle is lifecycle
