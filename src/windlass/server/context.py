"""Everything the handlers know of the world, and how they answer."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import Response
from pydantic import TypeAdapter

from windlass.model.config import WorkerConfig
from windlass.model.cycle import Explanation
from windlass.model.fleet import FleetConfig
from windlass.model.work_order import RayHead
from windlass.ports.auth import AuthStore
from windlass.ports.costs import CostStore
from windlass.ports.fleets import FleetQueries, Operations
from windlass.ports.queries import QueryStore
from windlass.ports.tasks import TaskStore
from windlass.ports.transport import WorkerTransport
from windlass.server.cpu_executor import SerialExecutor
from windlass.server.event_stream import OverviewFeed
from windlass.server.long_poll import LongPollHub
from windlass.server.wheel import Wheel


@dataclass(frozen=True, slots=True)
class LoopHealth:
    """How a fleet's control loop is doing."""

    is_leader: bool
    last_cycle_age_s: float
    # Older than this, the loop does not turn.
    limit_s: float

    @property
    def is_turning(self) -> bool:
        return self.last_cycle_age_s <= self.limit_s


class DashboardStore(TaskStore, FleetQueries, Operations, CostStore, QueryStore, AuthStore, Protocol):
    """All that people, and their programs, see and do."""


@dataclass(frozen=True, slots=True)
class DashboardContext:
    """What people see and do, beyond what machines need."""

    store: DashboardStore
    live: OverviewFeed
    # Why a task, a worker or a fleet is as it is. Raises BadInput if there is none.
    explain: Callable[[str], Awaitable[Explanation]]
    # The last lines that a worker of a fleet printed on this host. Raises BadInput if nothing of it is here.
    worker_log: Callable[[str, str, int], AsyncIterator[str]]
    # By fleet that is run here: what its last cycle did.
    last_actions: Callable[[], Mapping[str, Mapping[str, int]]]
    # The text that Prometheus reads.
    metrics: Callable[[], Awaitable[bytes]]
    # Deciding again, for whoever asks.
    thinking: SerialExecutor = field(default_factory=SerialExecutor)
    # Whoever is on this host may look for as long as no token was made.
    is_open_here: bool = False
    rate_limit: float = 500.0
    cors_origins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AppContext:
    store: WorkerTransport
    access: AuthStore
    long_poll_hub: LongPollHub
    # The settings of a fleet as they are now, reloads included; None if it is not run here.
    fleet: Callable[[str], FleetConfig | None]
    worker_defaults: WorkerConfig
    max_payload_bytes: int
    version: str
    # Raises DatabaseUnavailable, or answers.
    ask_database: Callable[[], Awaitable[object]]
    # By fleet. A fleet that has not had a cycle yet is not in it.
    pulses: Callable[[], Mapping[str, LoopHealth]]
    # Runs a cycle of every fleet now; their summaries. Raises TimeoutError.
    run_cycle: Callable[[], Awaitable[list[dict[str, Any]]]]
    # None where this program does not know its own files.
    wheel: Callable[[], Wheel | None]
    # None: only for machines.
    shown: DashboardContext | None = None
    # What the machines of fleets join whose tasks Ray places.
    ray_head: Callable[[], RayHead | None] = lambda: None


def answering(kind: Any) -> Callable[[Any], Response]:
    """Writes values of this type as JSON: once, without the copies and second checks a framework would make."""
    adapter: TypeAdapter[Any] = TypeAdapter(kind)

    def answer(value: Any) -> Response:
        return Response(adapter.dump_json(value), media_type="application/json")

    return answer
