"""Derived worker states: lifecycle, failure codes and reasons, idle time, machine presence.

The failure table starts from the original GPU orchestrator's, with those of the local and Hetzner fleets added.
"""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

from support.snapshots import GPU, LOCAL, NOW, ago, fleet, machine, snapshot, task, worker
from windlass.model.fleet import FleetConfig
from windlass.model.machine import Machine
from windlass.model.node import NodeState, NodeView
from windlass.model.snapshot import WorkerView
from windlass.policy.planning_context import build_context
from windlass.policy.worker_state import Lifecycle, Presence, WorkerState, derive_worker_state

ALL_CODES = {
    "STALE_HEARTBEAT_ACTIVE_TASK",
    "STALE_HEARTBEAT_TASKS_QUEUED",
    "STALE_HEARTBEAT_IDLE",
    "GPU_NOT_DETECTED",
    "GPU_READY_NOT_CLAIMING",
    "STARTUP_NEVER_READY",
    "SPAWNING_TIMEOUT",
    "NO_HEARTBEAT",
    "NO_MACHINE_ID",
    "STUCK_TASK",
    "MACHINE_GONE",
    "NODE_NOT_JOINED",
    "NODE_DEAD",
}

RUNNING = machine("w0")
RAY = fleet(provider="ray-local", engine="ray", spawn_timeout_s=60, heartbeat_timeout_s=30)


def node(state: str, reported: float = 1, since: float = 1, **rest: Any) -> NodeView:
    return NodeView(NodeState(state), ago(since), ago(reported), **rest)


@dataclass(frozen=True)
class Case:
    """A worker in its situation, and the expected state."""

    description: str
    worker: WorkerView
    lifecycle: Lifecycle
    code: str | None = None
    reason: str | None = None
    queued: int = 0
    presence: Presence = Presence.PRESENT
    machine: Machine | None = RUNNING
    fleet: FleetConfig = GPU
    unclaimed: float | None = None
    flags: dict[str, Any] = field(default_factory=dict)

    def derive(self) -> WorkerState:
        return derive_worker_state(
            self.worker,
            self.machine,
            self.presence,
            self.fleet,
            NOW,
            self.queued,
            unclaimed_since=None if self.unclaimed is None else ago(self.unclaimed),
        )


def check(case: Case) -> None:
    state = case.derive()
    assert state.lifecycle is case.lifecycle
    assert state.code == case.code
    assert state.reason == case.reason
    assert state.should_terminate is (case.code is not None)
    assert {name: getattr(state, name) for name in case.flags} == case.flags


def table(*cases: Case) -> Any:
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.description) for case in cases])


LIFECYCLES = (
    Case(
        "spawning without a machine in the list is waiting for its pod",
        worker(status="spawning", heartbeat=None),
        Lifecycle.SPAWNING_POD_PENDING,
        machine=None,
        presence=Presence.UNKNOWN,
        flags={"is_booting": True, "should_promote": False, "has_heartbeat": False},
    ),
    Case(
        "spawning with a machine that boots is waiting for its pod",
        worker(status="spawning", heartbeat=None),
        Lifecycle.SPAWNING_POD_PENDING,
        machine=machine("w0", "booting"),
    ),
    Case(
        "spawning with a machine that runs is waiting for its script",
        worker(status="spawning", heartbeat=None),
        Lifecycle.SPAWNING_SCRIPT_PENDING,
    ),
    Case(
        "spawning with its program started has no heartbeat yet",
        worker(status="spawning", heartbeat=None, prepared=10),
        Lifecycle.SPAWNING_SCRIPT_RUNNING,
    ),
    Case(
        "active without any heartbeat counts as starting",
        worker(heartbeat=None),
        Lifecycle.SPAWNING_POD_PENDING,
        machine=None,
        presence=Presence.UNKNOWN,
    ),
    Case(
        "a node without a report is joining",
        worker(status="spawning", created=5),
        Lifecycle.NODE_JOINING,
        fleet=RAY,
        flags={"is_booting": True, "should_promote": False},
    ),
    Case(
        "a node that Ray does not know is joining",
        worker(status="spawning", created=5, node=node("absent")),
        Lifecycle.NODE_JOINING,
        fleet=RAY,
        flags={"is_booting": True, "should_promote": False},
    ),
    Case(
        "a node that Ray lists as alive is ready",
        worker(status="spawning", node=node("alive", total={"CPU": 2})),
        Lifecycle.ACTIVE_READY,
        fleet=RAY,
        flags={"is_booting": False, "should_promote": True, "is_healthy": True},
    ),
    Case(
        "a node with Ray work of others is not idle",
        worker(node=node("alive", total={"CPU": 2}, used={"CPU": 1.0, "memory": 0.0})),
        Lifecycle.ACTIVE_READY,
        fleet=RAY,
        flags={"has_active_task": True, "idle_s": None},
    ),
    Case(
        "a node without usage is idle",
        worker(node=node("alive", total={"CPU": 2}, used={"CPU": 0.0})),
        Lifecycle.ACTIVE_READY,
        fleet=RAY,
        flags={"has_active_task": False, "idle_s": 0.0},
    ),
    Case(
        "an old usage report does not count",
        worker(node=node("alive", reported=31, total={"CPU": 2}, used={"CPU": 1.0})),
        Lifecycle.ACTIVE_READY,
        fleet=RAY,
        flags={"has_active_task": False},
    ),
    Case(
        "a node without a GPU in Ray has none, whatever the worker reports",
        worker(node=node("alive", total={"CPU": 2}), vram_mb=24_000),
        Lifecycle.ACTIVE_GPU_NOT_DETECTED,
        fleet=fleet(RAY, has_gpu=True),
    ),
    Case(
        "an old report of a dead node is no failure",
        worker(node=node("dead", reported=31)),
        Lifecycle.NODE_DEAD,
        fleet=RAY,
    ),
    Case(
        "an old report of an absent node is no failure",
        worker(status="spawning", created=90, node=node("absent", reported=31, since=90)),
        Lifecycle.NODE_JOINING,
        fleet=RAY,
    ),
    Case(
        "the time to join counts from the first heartbeat",
        worker(status="spawning", created=300, node=node("absent", since=60)),
        Lifecycle.NODE_JOINING,
        fleet=RAY,
    ),
    Case(
        "not claiming is no failure while the dispatcher does not report",
        worker(created=700, node=node("alive", reported=650, since=690, total={"CPU": 2})),
        Lifecycle.ACTIVE_READY,
        fleet=RAY,
        queued=5,
        unclaimed=640,
        flags={"unclaimed_since": None},
    ),
    Case(
        "an old report of a missing GPU is no failure",
        worker(created=900, node=node("alive", reported=650, since=690, total={"CPU": 2})),
        Lifecycle.ACTIVE_GPU_NOT_DETECTED,
        fleet=fleet(RAY, has_gpu=True),
    ),
    Case(
        "heartbeat without a GPU report is initializing",
        worker(),
        Lifecycle.ACTIVE_INITIALIZING,
        flags={"is_booting": True, "is_healthy": False},
    ),
    Case(
        "zero GPU memory is no GPU",
        worker(vram_mb=0),
        Lifecycle.ACTIVE_GPU_NOT_DETECTED,
        flags={"is_healthy": False},
    ),
    Case(
        "GPU memory is ready",
        worker(vram_mb=24_000),
        Lifecycle.ACTIVE_READY,
        flags={"is_healthy": True, "is_booting": False, "is_stale": False},
    ),
    Case(
        "without a GPU in the fleet a heartbeat is ready",
        worker(),
        Lifecycle.ACTIVE_READY,
        fleet=LOCAL,
        flags={"is_healthy": True},
    ),
    Case(
        "a spawning worker with a heartbeat is promoted",
        worker(status="spawning", vram_mb=24_000),
        Lifecycle.ACTIVE_READY,
        flags={"should_promote": True},
    ),
    Case(
        "terminating stays terminating, however silent",
        worker(status="terminating", heartbeat=9999, terminating=50),
        Lifecycle.TERMINATING,
        flags={"is_stale": True},
    ),
    Case("error", worker(status="error", heartbeat=9999), Lifecycle.ERROR, flags={"is_stale": False}),
    Case("terminated", worker(status="terminated"), Lifecycle.TERMINATED),
    Case(
        "times in the future are no failure",
        worker(created=-50, heartbeat=-50, vram_mb=24_000, running=(task(started=-50),)),
        Lifecycle.ACTIVE_READY,
        flags={"is_healthy": True},
    ),
)


@table(*LIFECYCLES)
def test_lifecycle(case: Case) -> None:
    check(case)


TERMINATIONS = (
    Case(
        "never joined its Ray cluster within spawn_timeout_s",
        worker(status="spawning", created=90, node=node("absent", since=61)),
        Lifecycle.NODE_JOINING,
        "NODE_NOT_JOINED",
        "Booted, but never joined its Ray cluster (61s)",
        fleet=RAY,
    ),
    Case(
        "Ray declared its node dead",
        worker(node=node("dead", note="missed its health checks")),
        Lifecycle.NODE_DEAD,
        "NODE_DEAD",
        "Its Ray node is dead: missed its health checks",
        fleet=RAY,
    ),
    # ---- the original GPU orchestrator's table
    Case(
        "a stale heartbeat with an active task",
        worker(heartbeat=601, running=(task(),)),
        Lifecycle.ACTIVE_STALE,
        "STALE_HEARTBEAT_ACTIVE_TASK",
        "Stale heartbeat with active tasks (601s old)",
        queued=3,
        flags={"is_stale": True, "has_active_task": True},
    ),
    Case(
        "a heartbeat that expired with tasks queued",
        worker(heartbeat=601),
        Lifecycle.ACTIVE_STALE,
        "STALE_HEARTBEAT_TASKS_QUEUED",
        "Heartbeat expired with tasks queued (601s old)",
        queued=1,
        flags={"is_stale": True},
    ),
    Case(
        "stale and idle with an empty queue fails too, because it is billed",
        worker(heartbeat=601),
        Lifecycle.ACTIVE_STALE,
        "STALE_HEARTBEAT_IDLE",
        "Heartbeat expired while idle (601s old)",
    ),
    Case("a heartbeat exactly at its limit is recent", worker(heartbeat=600, vram_mb=1), Lifecycle.ACTIVE_READY),
    Case(
        "no GPU after the timeout",
        worker(created=301, vram_mb=0),
        Lifecycle.ACTIVE_GPU_NOT_DETECTED,
        "GPU_NOT_DETECTED",
        "GPU not detected (VRAM=0) after 301s",
    ),
    Case("no GPU before the timeout", worker(created=300, vram_mb=0), Lifecycle.ACTIVE_GPU_NOT_DETECTED),
    Case(
        "the GPU timeout counts from the start of the program",
        worker(created=9000, prepared=200, vram_mb=0),
        Lifecycle.ACTIVE_GPU_NOT_DETECTED,
    ),
    Case(
        "one report without GPU memory is no failure",
        worker(created=7200, claimed=7000, running=(task(),), vram_mb=0, vram_lost=1),
        Lifecycle.ACTIVE_GPU_NOT_DETECTED,
    ),
    Case(
        "a lost GPU has the whole timeout to come back",
        worker(created=7200, vram_mb=0, vram_lost=300),
        Lifecycle.ACTIVE_GPU_NOT_DETECTED,
    ),
    Case(
        "a lost GPU fails after the timeout since it was lost",
        worker(created=7200, claimed=7000, vram_mb=0, vram_lost=301),
        Lifecycle.ACTIVE_GPU_NOT_DETECTED,
        "GPU_NOT_DETECTED",
        "GPU not detected (VRAM=0) after 301s",
    ),
    Case(
        "ready and never claimed while tasks are queued",
        worker(created=500, vram_mb=24_000),
        Lifecycle.ACTIVE_READY,
        "GPU_READY_NOT_CLAIMING",
        "GPU ready but never claimed tasks (181s)",
        queued=1,
        unclaimed=181,
        flags={"is_healthy": False},
    ),
    Case(
        "an hour of readiness does not excuse not claiming",
        worker(created=3600, vram_mb=24_000),
        Lifecycle.ACTIVE_READY,
        "GPU_READY_NOT_CLAIMING",
        "GPU ready but never claimed tasks (181s)",
        queued=1,
        unclaimed=181,
        flags={"is_proven": False},
    ),
    Case(
        "without a GPU: ready and never claimed while tasks are queued",
        worker(created=500),
        Lifecycle.ACTIVE_READY,
        "GPU_READY_NOT_CLAIMING",
        "Ready but never claimed tasks (181s)",
        queued=1,
        unclaimed=181,
        fleet=LOCAL,
    ),
    Case(
        "the first task has just arrived",
        worker(created=3600, vram_mb=24_000),
        Lifecycle.ACTIVE_READY,
        queued=1,
        flags={"unclaimed_since": NOW},
    ),
    Case(
        "resumed after a pause of an hour",
        worker(created=3600, vram_mb=24_000, is_paused=True),
        Lifecycle.ACTIVE_READY,
        queued=1,
        unclaimed=3600,
        flags={"unclaimed_since": None},
    ),
    Case(
        "a worker that has claimed before",
        worker(created=500, claimed=400, vram_mb=24_000),
        Lifecycle.ACTIVE_READY,
        queued=1,
        unclaimed=400,
    ),
    Case(
        "no GPU report while tasks are queued",
        worker(created=601),
        Lifecycle.ACTIVE_INITIALIZING,
        "STARTUP_NEVER_READY",
        "Never initialized after startup grace period (601s)",
        queued=1,
        unclaimed=21,
    ),
    Case(
        "no GPU report, but the task has just arrived",
        worker(created=601),
        Lifecycle.ACTIVE_INITIALIZING,
        queued=1,
        unclaimed=20,
    ),
    Case(
        "no GPU report within the grace",
        worker(created=600),
        Lifecycle.ACTIVE_INITIALIZING,
        queued=1,
        unclaimed=500,
    ),
    Case("no GPU report with an empty queue", worker(created=601), Lifecycle.ACTIVE_INITIALIZING),
    Case(
        "no GPU report in twice the grace, with an empty queue",
        worker(created=1201),
        Lifecycle.ACTIVE_INITIALIZING,
        "STARTUP_NEVER_READY",
        "Never initialized after startup grace period (1201s)",
    ),
    Case(
        "no GPU report in twice the grace, but it has claimed",
        worker(created=1201, claimed=900),
        Lifecycle.ACTIVE_INITIALIZING,
    ),
    Case(
        "spawning timeout",
        worker(status="spawning", created=601, heartbeat=None, prepared=10),
        Lifecycle.SPAWNING_SCRIPT_RUNNING,
        "SPAWNING_TIMEOUT",
        "Spawning timeout (601s)",
    ),
    Case(
        "within the spawning timeout",
        worker(status="spawning", created=600, heartbeat=None),
        Lifecycle.SPAWNING_SCRIPT_PENDING,
    ),
    # ---- general failures
    Case(
        "no heartbeat received with tasks queued",
        worker(created=9000, activated=601, heartbeat=None),
        Lifecycle.SPAWNING_SCRIPT_PENDING,
        "NO_HEARTBEAT",
        "No heartbeat received with tasks queued (601s after it registered)",
        queued=1,
    ),
    Case(
        "no heartbeat received with nothing queued",
        worker(activated=601, heartbeat=None),
        Lifecycle.SPAWNING_SCRIPT_PENDING,
        "NO_HEARTBEAT",
        "No heartbeat received (601s after it registered)",
    ),
    Case(
        "a long boot is not silence: silence counts from registration",
        worker(created=9000, activated=10, heartbeat=None),
        Lifecycle.SPAWNING_SCRIPT_PENDING,
    ),
    Case(
        "a stuck task",
        worker(vram_mb=1, running=(task(7, started=1201),)),
        Lifecycle.ACTIVE_READY,
        "STUCK_TASK",
        "Stuck task 7 (1201s)",
    ),
    Case(
        "a task with its own timeout has a margin",
        worker(vram_mb=1, running=(task(7, started=3659, timeout_s=3600),)),
        Lifecycle.ACTIVE_READY,
    ),
    Case(
        "a worker that exceeds its task's timeout and margin is stuck",
        worker(vram_mb=1, running=(task(6), task(7, started=121, timeout_s=60))),
        Lifecycle.ACTIVE_READY,
        "STUCK_TASK",
        "Stuck task 7 (121s)",
    ),
    Case(
        "no machine id",
        worker(status="spawning", heartbeat=None, machine_id=None, created=130),
        Lifecycle.SPAWNING_POD_PENDING,
        "NO_MACHINE_ID",
        "No machine id, and no machine appeared for it (130s)",
        machine=None,
        presence=Presence.NEVER,
    ),
    # ---- local processes
    Case(
        "starting for more than 30 s is crashed",
        worker(status="spawning", created=31, heartbeat=None),
        Lifecycle.SPAWNING_SCRIPT_PENDING,
        "SPAWNING_TIMEOUT",
        "Spawning timeout (31s)",
        fleet=LOCAL,
    ),
    Case(
        "healthy, then silent for more than 30 s, is crashed",
        worker(heartbeat=31),
        Lifecycle.ACTIVE_STALE,
        "STALE_HEARTBEAT_IDLE",
        "Heartbeat expired while idle (31s old)",
        fleet=LOCAL,
    ),
    Case(
        "an exited process is crashed although its heartbeat is recent",
        worker(heartbeat=1, running=(task(),)),
        Lifecycle.CRASHED,
        "MACHINE_GONE",
        "Killed by SIGKILL",
        fleet=LOCAL,
        machine=machine("w0", "exited", note="killed by SIGKILL"),
        presence=Presence.EXITED,
        flags={"is_stale": False, "is_healthy": False},
    ),
    Case(
        "a pid that refers to no process is crashed although its heartbeat is recent",
        worker(heartbeat=1),
        Lifecycle.CRASHED,
        "MACHINE_GONE",
        "Its machine is gone",
        fleet=LOCAL,
        machine=None,
        presence=Presence.MISSING,
    ),
    Case(
        "a process that exits before its first heartbeat is crashed at once",
        worker(status="spawning", created=1, heartbeat=None),
        Lifecycle.CRASHED,
        "MACHINE_GONE",
        "Exit code 1",
        fleet=LOCAL,
        machine=machine("w0", "exited", note="exit code 1"),
        presence=Presence.EXITED,
    ),
    # ---- Hetzner: heartbeat and boot 120 s
    Case(
        "dead after 120 s without a heartbeat",
        worker(heartbeat=121, running=(task(),)),
        Lifecycle.ACTIVE_STALE,
        "STALE_HEARTBEAT_ACTIVE_TASK",
        "Stale heartbeat with active tasks (121s old)",
        fleet=fleet(heartbeat_timeout_s=120, spawn_timeout_s=120),
    ),
    Case(
        "no heartbeat after 120 s",
        worker(status="spawning", created=121, heartbeat=None),
        Lifecycle.SPAWNING_SCRIPT_PENDING,
        "SPAWNING_TIMEOUT",
        "Spawning timeout (121s)",
        fleet=fleet(heartbeat_timeout_s=120, spawn_timeout_s=120),
    ),
)


@table(*TERMINATIONS)
def test_failure_codes_and_reasons(case: Case) -> None:
    check(case)


def test_every_failure_code_has_a_case() -> None:
    assert {case.code for case in TERMINATIONS if case.code} == ALL_CODES


def test_every_lifecycle_has_a_case() -> None:
    assert {case.lifecycle for case in (*LIFECYCLES, *TERMINATIONS)} == set(Lifecycle)


@pytest.mark.parametrize(
    ("view", "is_promoted"),
    [
        pytest.param(worker(status="spawning", heartbeat=89), True, id="initializing, heartbeat 89 s ago"),
        pytest.param(worker(status="spawning", heartbeat=89, vram_mb=0), True, id="no GPU yet, heartbeat 89 s ago"),
        pytest.param(worker(status="spawning", heartbeat=89, vram_mb=1), True, id="ready, heartbeat 89 s ago"),
        pytest.param(worker(status="spawning", heartbeat=90, vram_mb=1), False, id="heartbeat three cycles ago"),
        pytest.param(worker(status="spawning", heartbeat=None), False, id="no heartbeat"),
        pytest.param(worker(status="active", heartbeat=1, vram_mb=1), False, id="active already"),
        pytest.param(worker(status="terminating", heartbeat=1), False, id="terminating"),
    ],
)
def test_recent_heartbeat_promotes_spawning_worker(view: WorkerView, is_promoted: bool) -> None:
    state = derive_worker_state(view, machine("w0"), Presence.PRESENT, GPU, NOW, 0)
    assert state.should_promote is is_promoted


@pytest.mark.parametrize(
    ("view", "idle_since", "idle_s"),
    [
        pytest.param(worker(idle_s=40.0, heartbeat=3), 1, 43, id="reported idle time plus the time since"),
        pytest.param(worker(idle_s=0.0, heartbeat=3), 500, 0, id="busy at its last heartbeat"),
        pytest.param(worker(), 25, 25, id="not reported: idle since cycles saw it"),
        pytest.param(worker(), None, 0, id="seen idle for the first time"),
        pytest.param(worker(heartbeat=None), 7, 7, id="no heartbeat"),
        pytest.param(worker(idle_s=1.0, heartbeat=-30), 1, 0, id="heartbeat in the future"),
        pytest.param(worker(running=(task(),), idle_s=9.0), 500, None, id="busy"),
    ],
)
def test_idle_time(view: WorkerView, idle_since: float | None, idle_s: float | None) -> None:
    since = None if idle_since is None else ago(idle_since)
    state = derive_worker_state(view, machine("w0"), Presence.PRESENT, LOCAL, NOW, 0, idle_since=since)
    assert state.idle_s == idle_s


def test_old_vram_report_is_stale_but_no_failure() -> None:
    state = derive_worker_state(worker(vram_mb=1, vram=121), machine("w0"), Presence.PRESENT, GPU, NOW, 5)
    assert state.is_vram_stale
    assert state.is_healthy


@pytest.mark.parametrize(
    ("view", "is_proven"),
    [
        pytest.param(worker(heartbeat=None), False, id="no heartbeat"),
        pytest.param(worker(created=360), False, id="ready for less than six minutes"),
        pytest.param(worker(created=361), True, id="ready for six minutes"),
        pytest.param(worker(claimed=5, running=(task(started=5),)), False, id="runs its first task"),
        pytest.param(worker(claimed=90, running=(task(started=90),)), True, id="runs its first task for over a minute"),
        pytest.param(worker(claimed=90, heartbeat=40, running=(task(started=90),)), False, id="died within a minute"),
        pytest.param(worker(claimed=5), True, id="completed its first task"),
        pytest.param(worker(claimed=5, running=(task(started=2),)), True, id="runs its second task"),
    ],
)
def test_worker_is_proven_by_work(view: WorkerView, is_proven: bool) -> None:
    assert derive_worker_state(view, None, Presence.UNKNOWN, LOCAL, NOW, 0).is_proven is is_proven


# ------------------------------------------------------------------------------------------------------- manual workers

MANUAL_WORKERS = (
    Case(
        "a manual worker needs no GPU report",
        worker(slot=None, created=9000),
        Lifecycle.ACTIVE_READY,
        queued=5,
        flags={"is_managed": False, "unclaimed_since": None},
    ),
    Case(
        "a manual worker may run a task for any time",
        worker(slot=None, running=(task(started=9999),)),
        Lifecycle.ACTIVE_READY,
    ),
    Case(
        "a silent manual worker fails",
        worker(slot=None, heartbeat=601, running=(task(),)),
        Lifecycle.ACTIVE_STALE,
        "STALE_HEARTBEAT_ACTIVE_TASK",
        "Stale heartbeat with active tasks (601s old)",
    ),
    Case(
        "a manual worker may be silent within its lease",
        worker(slot=None, heartbeat=601, lease_s=900.0),
        Lifecycle.ACTIVE_READY,
    ),
    Case(
        "a manual worker that is silent for longer than its lease fails",
        worker(slot=None, heartbeat=31, lease_s=30.0),
        Lifecycle.ACTIVE_STALE,
        "STALE_HEARTBEAT_IDLE",
        "Heartbeat expired while idle (31s old)",
    ),
)


@table(*MANUAL_WORKERS)
def test_manual_worker_fails_only_by_silence(case: Case) -> None:
    check(case)


# ----------------------------------------------------------------------------------- start times in the planner state


def test_lasting_conditions_keep_their_start() -> None:
    seen = snapshot(worker(), queued=1, idle=90, unclaimed={"w0": ago(50)})
    state = build_context(seen, LOCAL).planner_state
    assert state.health.idle_since == {"w0": NOW - timedelta(seconds=90)}
    assert state.health.unclaimed_since == {"w0": NOW - timedelta(seconds=50)}


def test_ended_conditions_are_dropped() -> None:
    seen = snapshot(worker(running=(task(),)), state={"idle_since": {"w0": ago(9)}, "unclaimed_since": {"w0": ago(9)}})
    state = build_context(seen, LOCAL).planner_state
    assert (state.health.idle_since, state.health.unclaimed_since) == ({}, {})
