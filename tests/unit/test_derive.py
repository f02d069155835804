"""What a worker is, row by row as the seeds say it, with the corrections of DESIGN section 11."""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

from support.snapshots import GPU, LOCAL, NOW, ago, fleet, machine, snapshot, task, worker
from windlass.model.fleet import FleetConfig
from windlass.model.machine import Machine, ProviderTraits
from windlass.model.node import NodeState, NodeView
from windlass.model.snapshot import Snapshot, WorkerView
from windlass.policy.derive import Lifecycle, Presence, WorkerState, derive_worker_state
from windlass.policy.planning_context import build_context

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


def node(state: str, said: float = 1, since: float = 1, **rest: Any) -> NodeView:
    return NodeView(NodeState(state), ago(since), ago(said), **rest)


@dataclass(frozen=True)
class Case:
    """A worker, what is around it, and what it must be judged to be."""

    says: str
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
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.says) for case in cases])


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
        "spawning with its script started is not heard of yet",
        worker(status="spawning", heartbeat=None, prepared=10),
        Lifecycle.SPAWNING_SCRIPT_RUNNING,
    ),
    Case(
        "active without any heartbeat counts as on its way",
        worker(heartbeat=None),
        Lifecycle.SPAWNING_POD_PENDING,
        machine=None,
        presence=Presence.UNKNOWN,
    ),
    Case(
        "a node that its engine has never been asked about is joining",
        worker(status="spawning", created=5),
        Lifecycle.NODE_JOINING,
        fleet=RAY,
        flags={"is_booting": True, "should_promote": False},
    ),
    Case(
        "a node that its engine does not know yet is joining",
        worker(status="spawning", created=5, node=node("absent")),
        Lifecycle.NODE_JOINING,
        fleet=RAY,
        flags={"is_booting": True, "should_promote": False},
    ),
    Case(
        "a node that its engine has is ready",
        worker(status="spawning", node=node("alive", total={"CPU": 2})),
        Lifecycle.ACTIVE_READY,
        fleet=RAY,
        flags={"is_booting": False, "should_promote": True, "is_healthy": True},
    ),
    Case(
        "a node that runs what another's handler placed there is not idle",
        worker(node=node("alive", total={"CPU": 2}, used={"CPU": 1.0, "memory": 0.0})),
        Lifecycle.ACTIVE_READY,
        fleet=RAY,
        flags={"has_active_task": True, "idle_s": None},
    ),
    Case(
        "a node of which nothing is in use is idle",
        worker(node=node("alive", total={"CPU": 2}, used={"CPU": 0.0})),
        Lifecycle.ACTIVE_READY,
        fleet=RAY,
        flags={"has_active_task": False, "idle_s": 0.0},
    ),
    Case(
        "what was in use when its engine was last looked at, long ago, is no work",
        worker(node=node("alive", said=31, total={"CPU": 2}, used={"CPU": 1.0})),
        Lifecycle.ACTIVE_READY,
        fleet=RAY,
        flags={"has_active_task": False},
    ),
    Case(
        "a node without the GPU it should have is judged by its engine's word",
        worker(node=node("alive", total={"CPU": 2}), vram_mb=24_000),
        Lifecycle.ACTIVE_GPU_NOT_DETECTED,
        fleet=fleet(RAY, has_gpu=True),
    ),
    Case(
        "a dead node of which nobody has said anything lately is not judged",
        worker(node=node("dead", said=31)),
        Lifecycle.NODE_DEAD,
        fleet=RAY,
    ),
    Case(
        "one that never joined is not judged while nobody looks at its engine",
        worker(status="spawning", created=90, node=node("absent", said=31, since=90)),
        Lifecycle.NODE_JOINING,
        fleet=RAY,
    ),
    Case(
        "one that took long to boot has all its time to join from then on",
        worker(status="spawning", created=300, node=node("absent", since=60)),
        Lifecycle.NODE_JOINING,
        fleet=RAY,
    ),
    Case(
        "one that gets no tasks is not judged while nobody places any",
        worker(created=700, node=node("alive", said=650, since=690, total={"CPU": 2})),
        Lifecycle.ACTIVE_READY,
        fleet=RAY,
        queued=5,
        unclaimed=640,
        flags={"unclaimed_since": None},
    ),
    Case(
        "nor by a GPU that was not there when somebody last looked",
        worker(created=900, node=node("alive", said=650, since=690, total={"CPU": 2})),
        Lifecycle.ACTIVE_GPU_NOT_DETECTED,
        fleet=fleet(RAY, has_gpu=True),
    ),
    Case(
        "heard of, without a word about its GPU, is initializing",
        worker(),
        Lifecycle.ACTIVE_INITIALIZING,
        flags={"is_booting": True, "is_healthy": False},
    ),
    Case(
        "heard of with zero GPU memory has no GPU",
        worker(vram_mb=0),
        Lifecycle.ACTIVE_GPU_NOT_DETECTED,
        flags={"is_healthy": False},
    ),
    Case(
        "heard of with GPU memory is ready",
        worker(vram_mb=24_000),
        Lifecycle.ACTIVE_READY,
        flags={"is_healthy": True, "is_booting": False, "is_stale": False},
    ),
    Case(
        "without a GPU in the fleet a heartbeat is all it takes to be ready",
        worker(),
        Lifecycle.ACTIVE_READY,
        fleet=LOCAL,
        flags={"is_healthy": True},
    ),
    Case(
        "a spawning worker that was heard of is no longer spawning, and is promoted",
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
    Case("an error is an error", worker(status="error", heartbeat=9999), Lifecycle.ERROR, flags={"is_stale": False}),
    Case("what is terminated is terminated", worker(status="terminated"), Lifecycle.TERMINATED),
    Case(
        "ages in the future, from a clock that was set back, condemn nobody",
        worker(created=-50, heartbeat=-50, vram_mb=24_000, running=(task(started=-50),)),
        Lifecycle.ACTIVE_READY,
        flags={"is_healthy": True},
    ),
)


@table(*LIFECYCLES)
def test_the_lifecycle_of_a_worker_follows_from_its_signals(case: Case) -> None:
    check(case)


TERMINATIONS = (
    Case(
        "booted, and never joined its cluster within the time to start",
        worker(status="spawning", created=90, node=node("absent", since=61)),
        Lifecycle.NODE_JOINING,
        "NODE_NOT_JOINED",
        "Booted, but never joined its Ray cluster (61s)",
        fleet=RAY,
    ),
    Case(
        "its engine has given its node up",
        worker(node=node("dead", note="missed its health checks")),
        Lifecycle.NODE_DEAD,
        "NODE_DEAD",
        "Its Ray node is dead: missed its health checks",
        fleet=RAY,
    ),
    # ---- seed 003's rows
    Case(
        "003: a stale heartbeat with an active task",
        worker(heartbeat=601, running=(task(),)),
        Lifecycle.ACTIVE_STALE,
        "STALE_HEARTBEAT_ACTIVE_TASK",
        "Stale heartbeat with active tasks (601s old)",
        queued=3,
        flags={"is_stale": True, "has_active_task": True},
    ),
    Case(
        "000, 003: a heartbeat that expired with tasks queued",
        worker(heartbeat=601),
        Lifecycle.ACTIVE_STALE,
        "STALE_HEARTBEAT_TASKS_QUEUED",
        "Heartbeat expired with tasks queued (601s old)",
        queued=1,
        flags={"is_stale": True},
    ),
    Case(
        "DESIGN: stale and idle with an empty queue is ended too, since it is billed",
        worker(heartbeat=601),
        Lifecycle.ACTIVE_STALE,
        "STALE_HEARTBEAT_IDLE",
        "Heartbeat expired while idle (601s old)",
    ),
    Case("a heartbeat exactly at its limit is still good", worker(heartbeat=600, vram_mb=1), Lifecycle.ACTIVE_READY),
    Case(
        "003: no GPU after its time",
        worker(created=301, vram_mb=0),
        Lifecycle.ACTIVE_GPU_NOT_DETECTED,
        "GPU_NOT_DETECTED",
        "GPU not detected (VRAM=0) after 301s",
    ),
    Case("003: no GPU yet is waited for", worker(created=300, vram_mb=0), Lifecycle.ACTIVE_GPU_NOT_DETECTED),
    Case(
        "003: the time for the GPU is counted from the start of the script",
        worker(created=9000, prepared=200, vram_mb=0),
        Lifecycle.ACTIVE_GPU_NOT_DETECTED,
    ),
    Case(
        "one look at its GPU in vain is nothing, however long it has worked",
        worker(created=7200, claimed=7000, running=(task(),), vram_mb=0, vram_lost=1),
        Lifecycle.ACTIVE_GPU_NOT_DETECTED,
    ),
    Case(
        "a GPU that was there and is gone has its whole time to come back",
        worker(created=7200, vram_mb=0, vram_lost=300),
        Lifecycle.ACTIVE_GPU_NOT_DETECTED,
    ),
    Case(
        "a GPU that was there and has been gone for its time is counted from when it went",
        worker(created=7200, claimed=7000, vram_mb=0, vram_lost=301),
        Lifecycle.ACTIVE_GPU_NOT_DETECTED,
        "GPU_NOT_DETECTED",
        "GPU not detected (VRAM=0) after 301s",
    ),
    Case(
        "003: ready, tasks waiting for it all the while, and never claimed one",
        worker(created=500, vram_mb=24_000),
        Lifecycle.ACTIVE_READY,
        "GPU_READY_NOT_CLAIMING",
        "GPU ready but never claimed tasks (181s)",
        queued=1,
        unclaimed=181,
        flags={"is_healthy": False},
    ),
    Case(
        "003: ready for an hour without a task proves nothing, once it does not claim",
        worker(created=3600, vram_mb=24_000),
        Lifecycle.ACTIVE_READY,
        "GPU_READY_NOT_CLAIMING",
        "GPU ready but never claimed tasks (181s)",
        queued=1,
        unclaimed=181,
        flags={"is_proven": False},
    ),
    Case(
        "003, without a GPU: ready, tasks waiting, and never claimed one",
        worker(created=500),
        Lifecycle.ACTIVE_READY,
        "GPU_READY_NOT_CLAIMING",
        "Ready but never claimed tasks (181s)",
        queued=1,
        unclaimed=181,
        fleet=LOCAL,
    ),
    Case(
        "idle for an hour, and the first task has just arrived: it gets its time to claim",
        worker(created=3600, vram_mb=24_000),
        Lifecycle.ACTIVE_READY,
        queued=1,
        flags={"unclaimed_since": NOW},
    ),
    Case(
        "resumed after an hour's pause: it gets its time to claim",
        worker(created=3600, vram_mb=24_000, is_paused=True),
        Lifecycle.ACTIVE_READY,
        queued=1,
        unclaimed=3600,
        flags={"unclaimed_since": None},
    ),
    Case(
        "one that has ever claimed may rest",
        worker(created=500, claimed=400, vram_mb=24_000),
        Lifecycle.ACTIVE_READY,
        queued=1,
        unclaimed=400,
    ),
    Case(
        "003: never a word about its GPU while tasks wait",
        worker(created=601),
        Lifecycle.ACTIVE_INITIALIZING,
        "STARTUP_NEVER_READY",
        "Never initialized after startup grace period (601s)",
        queued=1,
        unclaimed=21,
    ),
    Case(
        "003: not ready after all its time, but the task came just now: one more beat",
        worker(created=601),
        Lifecycle.ACTIVE_INITIALIZING,
        queued=1,
        unclaimed=20,
    ),
    Case(
        "003: not ready yet is waited for",
        worker(created=600),
        Lifecycle.ACTIVE_INITIALIZING,
        queued=1,
        unclaimed=500,
    ),
    Case("003: not ready, but nothing waits for it", worker(created=601), Lifecycle.ACTIVE_INITIALIZING),
    Case(
        "beyond 003: never a word about its GPU in twice the time, whatever waits: it is paid for",
        worker(created=1201),
        Lifecycle.ACTIVE_INITIALIZING,
        "STARTUP_NEVER_READY",
        "Never initialized after startup grace period (1201s)",
    ),
    Case(
        "not in twice the time either, but it has worked",
        worker(created=1201, claimed=900),
        Lifecycle.ACTIVE_INITIALIZING,
    ),
    Case(
        "003: the spawning time-out counts from hiring",
        worker(status="spawning", created=601, heartbeat=None, prepared=10),
        Lifecycle.SPAWNING_SCRIPT_RUNNING,
        "SPAWNING_TIMEOUT",
        "Spawning timeout (601s)",
    ),
    Case(
        "003: within its time it may spawn",
        worker(status="spawning", created=600, heartbeat=None),
        Lifecycle.SPAWNING_SCRIPT_PENDING,
    ),
    # ---- seed 000's reasons that 003 dropped
    Case(
        "000: no heartbeat received with tasks queued",
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
        "a long boot is not silence: that is counted from when it announced itself",
        worker(created=9000, activated=10, heartbeat=None),
        Lifecycle.SPAWNING_SCRIPT_PENDING,
    ),
    Case(
        "000: a stuck task",
        worker(vram_mb=1, running=(task(7, started=1201),)),
        Lifecycle.ACTIVE_READY,
        "STUCK_TASK",
        "Stuck task 7 (1201s)",
    ),
    Case(
        "a task with a limit of its own may take that long, and a margin",
        worker(vram_mb=1, running=(task(7, started=3659, timeout_s=3600),)),
        Lifecycle.ACTIVE_READY,
    ),
    Case(
        "a worker that does not keep its task's own limit is stuck",
        worker(vram_mb=1, running=(task(6), task(7, started=121, timeout_s=60))),
        Lifecycle.ACTIVE_READY,
        "STUCK_TASK",
        "Stuck task 7 (121s)",
    ),
    Case(
        "000: no machine id",
        worker(status="spawning", heartbeat=None, machine_id=None, created=130),
        Lifecycle.SPAWNING_POD_PENDING,
        "NO_MACHINE_ID",
        "No machine id, and no machine appeared for it (130s)",
        machine=None,
        presence=Presence.NEVER,
    ),
    # ---- seed 004's rows
    Case(
        "004: starting for more than 30 s is crashed",
        worker(status="spawning", created=31, heartbeat=None),
        Lifecycle.SPAWNING_SCRIPT_PENDING,
        "SPAWNING_TIMEOUT",
        "Spawning timeout (31s)",
        fleet=LOCAL,
    ),
    Case(
        "004: healthy, and silent for more than 30 s, is crashed",
        worker(heartbeat=31),
        Lifecycle.ACTIVE_STALE,
        "STALE_HEARTBEAT_IDLE",
        "Heartbeat expired while idle (31s old)",
        fleet=LOCAL,
    ),
    Case(
        "004: a process that is dead is crashed although its heartbeat is recent",
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
        "004: a pid that refers to no process is crashed although its heartbeat is recent",
        worker(heartbeat=1),
        Lifecycle.CRASHED,
        "MACHINE_GONE",
        "Its machine is gone",
        fleet=LOCAL,
        machine=None,
        presence=Presence.MISSING,
    ),
    Case(
        "004: one that died before its first heartbeat is crashed at once",
        worker(status="spawning", created=1, heartbeat=None),
        Lifecycle.CRASHED,
        "MACHINE_GONE",
        "Exit code 1",
        fleet=LOCAL,
        machine=machine("w0", "exited", note="exit code 1"),
        presence=Presence.EXITED,
    ),
    # ---- seed 001's rows (Hetzner: heartbeat and boot 120 s)
    Case(
        "001: dead after 120 s without a heartbeat",
        worker(heartbeat=121, running=(task(),)),
        Lifecycle.ACTIVE_STALE,
        "STALE_HEARTBEAT_ACTIVE_TASK",
        "Stale heartbeat with active tasks (121s old)",
        fleet=fleet(heartbeat_timeout_s=120, spawn_timeout_s=120),
    ),
    Case(
        "001: in limbo, never joined, after 120 s",
        worker(status="spawning", created=121, heartbeat=None),
        Lifecycle.SPAWNING_SCRIPT_PENDING,
        "SPAWNING_TIMEOUT",
        "Spawning timeout (121s)",
        fleet=fleet(heartbeat_timeout_s=120, spawn_timeout_s=120),
    ),
)


@table(*TERMINATIONS)
def test_a_worker_ends_for_the_reason_the_seeds_name(case: Case) -> None:
    check(case)


def test_every_code_has_its_row() -> None:
    assert {case.code for case in TERMINATIONS if case.code} == ALL_CODES


def test_every_lifecycle_has_its_row() -> None:
    assert {case.lifecycle for case in (*LIFECYCLES, *TERMINATIONS)} == set(Lifecycle)


@pytest.mark.parametrize(
    ("view", "is_promoted"),
    [
        pytest.param(worker(status="spawning", heartbeat=89), True, id="initializing, heard of 89 s ago"),
        pytest.param(worker(status="spawning", heartbeat=89, vram_mb=0), True, id="no GPU yet, heard of 89 s ago"),
        pytest.param(worker(status="spawning", heartbeat=89, vram_mb=1), True, id="ready, heard of 89 s ago"),
        pytest.param(worker(status="spawning", heartbeat=90, vram_mb=1), False, id="heard of three cycles ago"),
        pytest.param(worker(status="spawning", heartbeat=None), False, id="never heard of: no heartbeat, no promotion"),
        pytest.param(worker(status="active", heartbeat=1, vram_mb=1), False, id="active already"),
        pytest.param(worker(status="terminating", heartbeat=1), False, id="on its way out"),
    ],
)
def test_only_a_recent_heartbeat_of_its_own_promotes_a_spawning_worker(view: WorkerView, is_promoted: bool) -> None:
    state = derive_worker_state(view, machine("w0"), Presence.PRESENT, GPU, NOW, 0)
    assert state.should_promote is is_promoted


@pytest.mark.parametrize(
    ("view", "idle_since", "idle_s"),
    [
        pytest.param(worker(idle_s=40.0, heartbeat=3), 1, 43, id="its own word, and what passed since"),
        pytest.param(worker(idle_s=0.0, heartbeat=3), 500, 0, id="at work when it last spoke: since when is unknown"),
        pytest.param(worker(), 25, 25, id="no word of its own: since cycles have seen it idle"),
        pytest.param(worker(), None, 0, id="seen idle for the first time"),
        pytest.param(worker(heartbeat=None), 7, 7, id="never heard of"),
        pytest.param(worker(idle_s=1.0, heartbeat=-30), 1, 0, id="a beat from the future"),
        pytest.param(worker(running=(task(),), idle_s=9.0), 500, None, id="at work"),
    ],
)
def test_idle_time(view: WorkerView, idle_since: float | None, idle_s: float | None) -> None:
    since = None if idle_since is None else ago(idle_since)
    state = derive_worker_state(view, machine("w0"), Presence.PRESENT, LOCAL, NOW, 0, idle_since=since)
    assert state.idle_s == idle_s


def test_vram_that_is_not_reported_for_long_is_stale_and_nothing_more() -> None:
    state = derive_worker_state(worker(vram_mb=1, vram=121), machine("w0"), Presence.PRESENT, GPU, NOW, 5)
    assert state.is_vram_stale
    assert state.is_healthy


@pytest.mark.parametrize(
    ("view", "is_proven"),
    [
        pytest.param(worker(heartbeat=None), False, id="never heard of"),
        pytest.param(worker(created=360), False, id="ready, and nothing to claim, for less than six minutes"),
        pytest.param(worker(created=361), True, id="ready, and nothing to claim, for six minutes"),
        pytest.param(worker(claimed=5, running=(task(started=5),)), False, id="at its first task"),
        pytest.param(worker(claimed=90, running=(task(started=90),)), True, id="at its first task for over a minute"),
        pytest.param(worker(claimed=90, heartbeat=40, running=(task(started=90),)), False, id="died within a minute"),
        pytest.param(worker(claimed=5), True, id="through with its first"),
        pytest.param(worker(claimed=5, running=(task(started=2),)), True, id="at its second"),
    ],
)
def test_a_worker_proves_itself_by_working(view: WorkerView, is_proven: bool) -> None:
    assert derive_worker_state(view, None, Presence.UNKNOWN, LOCAL, NOW, 0).is_proven is is_proven


# ------------------------------------------------------------------------------------------------- started by hand

BY_HAND = (
    Case(
        "what it runs on is its own business",
        worker(slot=None, created=9000),
        Lifecycle.ACTIVE_READY,
        queued=5,
        flags={"is_managed": False, "unclaimed_since": None},
    ),
    Case("so is how long its tasks take", worker(slot=None, running=(task(started=9999),)), Lifecycle.ACTIVE_READY),
    Case(
        "its silence takes its tasks from it",
        worker(slot=None, heartbeat=601, running=(task(),)),
        Lifecycle.ACTIVE_STALE,
        "STALE_HEARTBEAT_ACTIVE_TASK",
        "Stale heartbeat with active tasks (601s old)",
    ),
    Case(
        "it may be silent for as long as it said",
        worker(slot=None, heartbeat=601, lease_s=900.0),
        Lifecycle.ACTIVE_READY,
    ),
    Case(
        "and no longer",
        worker(slot=None, heartbeat=31, lease_s=30.0),
        Lifecycle.ACTIVE_STALE,
        "STALE_HEARTBEAT_IDLE",
        "Heartbeat expired while idle (31s old)",
    ),
)


@table(*BY_HAND)
def test_a_worker_started_by_hand_is_judged_by_its_silence_alone(case: Case) -> None:
    check(case)


# -------------------------------------------------------------------------------------- what a list of machines says

CLOUD = ProviderTraits(absence_grace_s=60, creation_lateness_s=120, orphan_grace_s=60)


def presence(seen: Snapshot, config: FleetConfig = LOCAL) -> Presence:
    return build_context(seen, config).states["w0"].presence


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        pytest.param(snapshot(worker()), Presence.PRESENT, id="listed"),
        pytest.param(snapshot(worker(), machines=(machine("w0", "exited"),)), Presence.EXITED, id="listed as exited"),
        pytest.param(snapshot(worker(), machines=None), Presence.UNKNOWN, id="no list: nothing is known"),
        pytest.param(snapshot(worker(), machines=()), Presence.MISSING, id="not in a list that is the truth"),
        pytest.param(
            snapshot(worker(heartbeat=20), machines=(), traits=CLOUD), Presence.UNKNOWN, id="missing for the first time"
        ),
        pytest.param(
            snapshot(worker(heartbeat=20), machines=(), traits=CLOUD, state={"missing_since": {"w0": ago(59)}}),
            Presence.UNKNOWN,
            id="missing for less than lists may lag",
        ),
        pytest.param(
            snapshot(worker(heartbeat=20), machines=(), traits=CLOUD, state={"missing_since": {"w0": ago(60)}}),
            Presence.MISSING,
            id="missing for longer than lists may lag",
        ),
        pytest.param(
            snapshot(worker(heartbeat=2), machines=(), traits=CLOUD, state={"missing_since": {"w0": ago(900)}}),
            Presence.UNKNOWN,
            id="missing, but it still speaks",
        ),
        pytest.param(
            snapshot(
                worker(status="terminating", heartbeat=2, terminating=5, running=(task(),)),
                machines=(),
                traits=CLOUD,
                state={"missing_since": {"w0": ago(60)}},
            ),
            Presence.UNKNOWN,
            id="missing and told to leave, but it still speaks and may finish",
        ),
        pytest.param(
            snapshot(worker(machine_at=1), machines=(), listed_at=ago(2)),
            Presence.UNKNOWN,
            id="its machine became known after the list was asked for",
        ),
        pytest.param(
            snapshot(worker(machine_at=2), machines=(), listed_at=ago(2)), Presence.MISSING, id="known before the list"
        ),
        pytest.param(
            snapshot(worker(machine_id=None, created=119, heartbeat=None), machines=(), traits=CLOUD),
            Presence.UNKNOWN,
            id="an unanswered creation whose machine may still appear",
        ),
        pytest.param(
            snapshot(worker(machine_id=None, created=120, heartbeat=None), machines=(), traits=CLOUD),
            Presence.NEVER,
            id="an unanswered creation whose machine cannot appear any more",
        ),
        pytest.param(
            snapshot(worker(machine_id=None, created=1, heartbeat=None), machines=(), listed_at=ago(2)),
            Presence.UNKNOWN,
            id="an unanswered creation younger than the list",
        ),
        pytest.param(
            snapshot(worker(machine_id=None, created=900, heartbeat=None), machines=None, traits=CLOUD),
            Presence.UNKNOWN,
            id="an unanswered creation without a list stays unsettled",
        ),
        pytest.param(
            snapshot(worker(machine_id=None, created=1, creation="refused"), machines=None, traits=CLOUD),
            Presence.NEVER,
            id="a creation that was refused needs no list",
        ),
        pytest.param(
            snapshot(worker(machine_id=None, created=1), machines=(machine("w0"),), traits=CLOUD),
            Presence.PRESENT,
            id="an unanswered creation whose machine is there",
        ),
        pytest.param(
            snapshot(
                worker(machine_id=None), machines=(machine("w0", "exited", "a", created=9), machine("w0", id_="b"))
            ),
            Presence.PRESENT,
            id="of two machines for one worker, the one that runs",
        ),
        pytest.param(
            snapshot(worker(slot=None), machines=(machine("w0"),)), Presence.UNKNOWN, id="started by hand: not of ours"
        ),
    ],
)
def test_what_a_list_says_about_a_machine(seen: Snapshot, expected: Presence) -> None:
    assert presence(seen) is expected


def test_what_must_last_is_remembered_from_cycle_to_cycle() -> None:
    seen = snapshot(worker(), queued=1, idle=90, unclaimed={"w0": ago(50)})
    state = build_context(seen, LOCAL).planner_state
    assert state.health.idle_since == {"w0": NOW - timedelta(seconds=90)}
    assert state.health.unclaimed_since == {"w0": NOW - timedelta(seconds=50)}


def test_what_no_longer_holds_is_forgotten() -> None:
    seen = snapshot(worker(running=(task(),)), state={"idle_since": {"w0": ago(9)}, "unclaimed_since": {"w0": ago(9)}})
    state = build_context(seen, LOCAL).planner_state
    assert (state.health.idle_since, state.health.unclaimed_since) == ({}, {})
