"""What a policy sees and what it answers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import ceil

from windlass.model.fleet import FleetConfig
from windlass.model.snapshot import QueueView
from windlass.policy.derive import WorkerState

_NEVER = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Demand:
    """The queue, and the workers that count: those that can take tasks and those still starting. None that ends."""

    queue: QueueView
    active: tuple[WorkerState, ...]
    booting: tuple[WorkerState, ...]
    fleet: FleetConfig
    # Worker id to until when it is paid for, where time is paid in long units.
    paid_until: Mapping[str, datetime] = field(default_factory=dict)

    @property
    def capacity(self) -> int:
        """Workers there or on their way. Those starting count, or each cycle would hire for the same task again."""
        return len(self.active) + len(self.booting)

    @property
    def running(self) -> int:
        """Tasks at hand."""
        return sum(len(state.worker.running) for state in self.active)

    @property
    def busy(self) -> int:
        return sum(state.has_active_task for state in self.active)

    @property
    def free_slots(self) -> int:
        """Tasks that could start at once if they were there, on workers still starting too."""
        places = sum(max(0, state.worker.concurrency - len(state.worker.running)) for state in self.active)
        return places + len(self.booting) * self.fleet.concurrency

    @property
    def idle(self) -> tuple[WorkerState, ...]:
        """Workers with nothing to do: first those that are soonest to be paid for again, then the longest idle."""
        resting = [state for state in self.active if not state.has_active_task]
        return tuple(sorted(resting, key=self._order_of_going))

    def _order_of_going(self, state: WorkerState) -> tuple[datetime, float, str]:
        return self.paid_until.get(state.worker.id, _NEVER), -(state.idle_s or 0.0), state.worker.id

    @property
    def unneeded(self) -> tuple[WorkerState, ...]:
        """Idle workers beyond those that the waiting tasks will fill."""
        filled = ceil(self.queue.queued / self.fleet.concurrency)
        return self.idle[: max(0, len(self.idle) - filled)]


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """What a policy wants: more workers, or to spare some. Never both."""

    reason: str
    hire: int = 0
    # It will want more still when these are on their way.
    is_first_step: bool = False
    # Workers it can do without, the first to go first.
    spare: tuple[WorkerState, ...] = ()
    # There are more workers than needed, even if none may be let go yet.
    is_over_capacity: bool = False


Policy = Callable[[Demand], ScalingDecision]
