"""Input and output of a scaling policy."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import ceil

from windlass.model.adaptive import AdaptiveMemory
from windlass.model.fleet import FleetConfig
from windlass.model.snapshot import QueueView
from windlass.policy.worker_state import WorkerState

_NEVER = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Demand:
    """The queue and the workers that count: those that can claim tasks and those that start. No terminating ones."""

    queue: QueueView
    active: tuple[WorkerState, ...]
    booting: tuple[WorkerState, ...]
    fleet: FleetConfig
    # Worker id to the end of its billing period, where periods are long.
    billed_until: Mapping[str, datetime] = field(default_factory=dict)
    now: datetime = _NEVER
    # Worker id to when its termination window opens: from then on it may drain if it is idle.
    opens_at: Mapping[str, datetime] = field(default_factory=dict)
    # Length of a billing period.
    billing_unit_s: int = 1
    # Machines are processes of this host.
    is_free: bool = False
    # What the policy kept from the last cycle.
    memory: AdaptiveMemory | None = None

    @property
    def capacity(self) -> int:
        """Workers, including those that start: otherwise each cycle would spawn again for the same tasks."""
        return len(self.active) + len(self.booting)

    @property
    def running(self) -> int:
        return sum(len(state.worker.running) for state in self.active)

    @property
    def busy(self) -> int:
        return sum(state.has_active_task for state in self.active)

    @property
    def free_slots(self) -> int:
        """Tasks that could start at once, including on workers that start."""
        slots = sum(max(0, state.worker.concurrency - len(state.worker.running)) for state in self.active)
        return slots + len(self.booting) * self.fleet.concurrency

    @property
    def idle(self) -> tuple[WorkerState, ...]:
        """Idle workers in drain order: those whose billing period ends first, then those idle longest."""
        return tuple(sorted((state for state in self.active if not state.has_active_task), key=self._drain_order))

    def _drain_order(self, state: WorkerState) -> tuple[datetime, float, str]:
        return self.billed_until.get(state.worker.id, _NEVER), -(state.idle_s or 0.0), state.worker.id

    @property
    def unneeded(self) -> tuple[WorkerState, ...]:
        """Idle workers beyond those that the queued tasks will occupy."""
        occupied = ceil(self.queue.queued / self.fleet.concurrency)
        return self.idle[: max(0, len(self.idle) - occupied)]

    @property
    def workers_text(self) -> str:
        """For decisions: "3 busy, 1 idle, 2 starting"."""
        idle = len(self.active) - self.busy
        parts = ((self.busy, "busy"), (idle, "idle"), (len(self.booting), "starting"))
        return ", ".join(f"{count} {word}" for count, word in parts if count or word == "busy")


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """What a policy wants: more workers, or to spare some. Never both."""

    # The numbers behind it, for the decision text.
    reason: str
    spawn: int = 0
    # Workers wanted in total, before max_workers limits it.
    target: int = 0
    # The policy will want more when these have been spawned.
    is_first_step: bool = False
    # Workers it can do without, in drain order.
    spare: tuple[WorkerState, ...] = ()
    # There are more workers than needed, even if none may drain yet.
    is_over_capacity: bool = False
    # The spare workers were idle for the policy's own timeouts: idle_timeout_s and the grace periods do not apply.
    is_timed: bool = False
    # What the policy keeps for the next cycle.
    memory: AdaptiveMemory | None = None


Policy = Callable[[Demand], ScalingDecision]
