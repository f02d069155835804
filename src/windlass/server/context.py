"""The objects that request handlers use: one context per application.

WorkerApiContext is enough for the worker protocol and the health routes. AppContext adds what the JSON API and the
dashboard need. `ControlPlane` is the only tie to the control loop, which runs in another process.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from windlass.model.config import LogsConfig, WorkerConfig
from windlass.model.counters import CounterBuffer
from windlass.model.cycle import Explanation
from windlass.model.event import Event
from windlass.model.fleet import FleetConfig
from windlass.model.payload_privacy import PayloadPrivacy
from windlass.model.work_order import RayHead
from windlass.ports.auth import AuthStore
from windlass.ports.costs import CostStore
from windlass.ports.fleets import FleetQueries, Operations
from windlass.ports.history import HistoryStore
from windlass.ports.processes import ProcessStore
from windlass.ports.queries import QueryStore
from windlass.ports.tasks import TaskStore
from windlass.ports.transport import HeartbeatStore, WorkerTransport
from windlass.ports.worker_logs import WorkerLogQueries
from windlass.server.cpu_executor import SerialExecutor
from windlass.server.event_stream import OverviewFeed
from windlass.server.long_poll import LongPollHub
from windlass.server.metrics import Metrics
from windlass.server.oidc import OidcClient
from windlass.server.wheel import Wheel


@dataclass(frozen=True, slots=True)
class LoopHealth:
    """State of the control loop of a fleet, wherever it runs."""

    # None: no cycle yet.
    last_cycle_age_s: float | None
    # Whether the next cycle is not overdue.
    is_running: bool


@dataclass(frozen=True, slots=True)
class ControlHealth:
    """`has_leader`: a control process holds the leader lease. `fleets`: by name, those configured here."""

    has_leader: bool
    fleets: Mapping[str, LoopHealth]

    @property
    def is_running(self) -> bool:
        return bool(self.fleets) and all(loop.is_running for loop in self.fleets.values())


class WorkerStore(WorkerTransport, HeartbeatStore, Protocol):
    """The store methods behind the worker protocol, without those of AuthStore."""

    async def now(self) -> datetime: ...


class AppStore(
    TaskStore,
    FleetQueries,
    Operations,
    CostStore,
    QueryStore,
    HistoryStore,
    AuthStore,
    ProcessStore,
    WorkerLogQueries,
    Protocol,
):
    """The store methods behind the JSON API and the dashboard."""


class ControlPlane(Protocol):
    """The control loop as a server sees it. It may run in another process or on another host, and may be stalled.

    Raises DatabaseUnavailable where it reads the database.
    """

    def fleet_config(self, name: str) -> FleetConfig | None:
        """Current settings of a fleet, reloads included. None if the fleet is not configured here."""

    async def health(self) -> ControlHealth: ...

    async def last_actions(self) -> Mapping[str, Mapping[str, int]]:
        """Action counts of the last cycle, by fleet."""

    async def ray_head(self) -> RayHead | None:
        """The Ray head that machines of Ray fleets join."""

    async def run_cycle(self) -> list[dict[str, Any]]:
        """Run one cycle of every fleet and return their summaries. Raises TimeoutError."""

    async def explain(self, subject: str, redact_event: Callable[[Event], Event] | None = None) -> Explanation:
        """Explain the state of a task, a worker or a fleet. Raises BadInput if there is none of that name.

        `redact_event` removes from the events of a worker what the reader may not see.
        """

    def worker_log(self, fleet: str, worker_id: str, lines: int) -> AsyncIterator[str]:
        """The last lines that a worker on this host printed. Raises BadInput if this host has no log of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerApiContext:
    worker_store: WorkerStore
    auth_store: AuthStore
    long_poll_hub: LongPollHub
    control: ControlPlane
    worker_defaults: WorkerConfig
    # What workers send of their output.
    logs: LogsConfig = field(default_factory=LogsConfig)
    max_payload_bytes: int
    version: str
    # Requests per second of one token, session or address, and of one worker. A worker with tasks that take no time
    # makes up to 1,500 calls per second, and a server process answers some 5,000.
    rate_limit: float = 500.0
    worker_rate_limit: float = 2_000.0
    counters: CounterBuffer = field(default_factory=CounterBuffer)
    # None if this program was not installed as a package.
    wheel: Wheel | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AppContext(WorkerApiContext):
    # Uses connections of its own, so that dashboard readers never delay a worker.
    store: AppStore
    overview_feed: OverviewFeed
    metrics: Metrics
    # Runs replays.
    executor: SerialExecutor = field(default_factory=SerialExecutor)
    # Requests from this host may read without a token until the first token is created.
    is_open_to_localhost: bool = False
    cors_origins: tuple[str, ...] = ()
    # Parts of payloads and results that are hidden on pages, and from viewers. A reload changes them.
    payload_privacy: Callable[[], PayloadPrivacy] = PayloadPrivacy
    # Login through an identity provider, if one is configured.
    oidc: OidcClient | None = None

    @property
    def privacy(self) -> PayloadPrivacy:
        return self.payload_privacy()
