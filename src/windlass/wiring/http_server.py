"""Starts the HTTP server of a running orchestrator.

The server uses database connections of its own, so that no number of requests delays a cycle. Workers and users have
separate connections, so that a crowd of readers never delays a worker. While the server runs, its address is recorded
in the database, for `windlass tokens link`.
"""

import asyncio
import contextlib
import functools
import itertools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import structlog

from windlass.model.auth import SERVER_TTL_S, Role, ServerAddress
from windlass.model.config import ApiConfig, Config, Retention
from windlass.model.cycle import Explanation
from windlass.model.errors import BadInput, DatabaseUnavailable, WindlassError
from windlass.model.fleet import FleetConfig
from windlass.model.payload_privacy import privacy_of
from windlass.model.urls import LOOPBACK
from windlass.model.work_order import RayHead
from windlass.wiring.background import background_task
from windlass.wiring.providers import worker_log
from windlass.wiring.stores import auth_store

# The modules below import FastAPI and uvicorn, which commands without a server must not load.
if TYPE_CHECKING:
    from windlass.control.orchestrator import Orchestrator
    from windlass.control.summary import Summary
    from windlass.ports.alerts import Notifier
    from windlass.server.context import LoopHealth
    from windlass.server.event_stream import OverviewFeed
    from windlass.server.tls import ReloadingTls
    from windlass.store.auth import PostgresAuthStore
    from windlass.wiring.store_roles import DashboardStores, WorkerProtocolStores

WORKER_CONNECTIONS = 8
USER_CONNECTIONS = 6
# Longer queries of users are cancelled.
USER_STATEMENT_TIMEOUT_S = 5.0
# A control loop without a cycle for this many intervals, and at least MIN_STUCK_S, is not ready.
STUCK_INTERVALS = 3
MIN_STUCK_S = 60.0
# Retention of links, sessions and addresses is applied with every 60th sample: once in five minutes.
SAMPLES_PER_PURGE = 60
# The address is recorded again several times per TTL, so that one late or lost write does not remove it.
ADDRESS_UPDATES_PER_TTL = 4
# Gets the address of the dashboard, and a function that creates a login link; None if `api.login_link` is off.
OnDashboard = Callable[[str, Callable[[], Awaitable[str]] | None], Awaitable[None]]
log = structlog.get_logger(__name__)


def open_listener(config: Config) -> socket.socket | None:
    """Bind the configured port, and raise the file limit for its connections. Raises BadInput."""
    if config.api.port is None:
        return None
    if config.api.host not in LOOPBACK and config.api.tls_cert is None and not config.api.plain_http:
        raise BadInput(
            f"api.host is {config.api.host} without TLS, which would send tokens unencrypted: set api.tls_cert and "
            "api.tls_key, or api.plain_http = true if a proxy or the network encrypts."
        )
    from windlass.server.connections import raise_file_limit
    from windlass.server.server import listen

    raise_file_limit()
    return listen(config.api.host, config.api.port)


@dataclass(frozen=True, slots=True)
class MetricHooks:
    """Called by other background tasks to count metrics. Without a server they do nothing."""

    # Notifier and outcome of an alert message.
    on_message: Callable[[str, str], None] = lambda _notifier, _outcome: None
    # Number of log lines that were not written to the database.
    on_dropped: Callable[[int], None] = lambda _count: None


@asynccontextmanager
async def server_stores(
    dsn: str, retention: Retention | None = None, virtual_now: Callable[[], datetime] | None = None
) -> "AsyncIterator[tuple[WorkerProtocolStores, DashboardStores]]":
    """The store of workers and the store of users."""
    from windlass.store.database import Database
    from windlass.wiring.store_roles import DashboardStores, WorkerProtocolStores

    async with (
        Database(
            dsn, retention=retention, max_connections=WORKER_CONNECTIONS, virtual_now=virtual_now
        ) as worker_database,
        Database(
            dsn,
            retention=retention,
            max_connections=USER_CONNECTIONS,
            statement_timeout_s=USER_STATEMENT_TIMEOUT_S,
            virtual_now=virtual_now,
        ) as user_database,
    ):
        yield WorkerProtocolStores(worker_database), DashboardStores(user_database)


class OrchestratorControlPlane:
    """Implements the server's ControlPlane with the orchestrator in this process."""

    def __init__(
        self,
        config: Config,
        orchestrator: "Orchestrator",
        store: "DashboardStores",
        ray_head: Callable[[], RayHead | None],
    ) -> None:
        self._config = config
        self._orchestrator = orchestrator
        self._store = store
        self._ray_head = ray_head

    def fleet_config(self, name: str) -> FleetConfig | None:
        return self._orchestrator.fleet(name)

    def loop_health(self) -> "Mapping[str, LoopHealth]":
        from windlass.server.context import LoopHealth

        now = asyncio.get_running_loop().time()
        health = {}
        for name, last in self._orchestrator.last_cycles().items():
            fleet = self._orchestrator.fleet(name)
            if fleet is not None:
                limit_s = max(MIN_STUCK_S, STUCK_INTERVALS * fleet.poll_interval_s)
                health[name] = LoopHealth(last.summary.is_leader, now - last.at, limit_s)
        return health

    def last_actions(self) -> Mapping[str, Mapping[str, int]]:
        return {name: last.summary.actions or {} for name, last in self._orchestrator.last_cycles().items()}

    def ray_head(self) -> RayHead | None:
        return self._ray_head()

    async def run_cycle(self) -> list[dict[str, Any]]:
        return [summary.to_plain() for summary in await self._orchestrator.cycle_now()]

    async def explain(self, subject: str) -> Explanation:
        from windlass.control.explain import explain

        return await explain(self._store, subject)

    def worker_log(self, fleet: str, worker_id: str, lines: int) -> AsyncIterator[str]:
        return worker_log(self._config, fleet, worker_id, lines, is_following=False)


@asynccontextmanager
async def run_http_server(
    config: Config,
    dsn: str,
    orchestrator: "Orchestrator",
    listener: socket.socket | None,
    version: str,
    watchers: "list[Callable[[Summary], None]]",
    on_dashboard: OnDashboard,
    ray_head: Callable[[], RayHead | None],
    notifiers: "Sequence[Notifier]",
) -> AsyncIterator[MetricHooks]:
    """Serve until the context exits, if there is a listener.

    `watchers` are called with the summary of each cycle; the server adds itself. `on_dashboard` is called once,
    when the server runs.
    """
    if listener is None:
        yield MetricHooks()
        return
    from windlass.server.app import make_app
    from windlass.server.context import AppContext
    from windlass.server.event_stream import OverviewFeed
    from windlass.server.long_poll import LongPollHub
    from windlass.server.metrics import Metrics
    from windlass.server.routes.login import create_login_link
    from windlass.server.server import serving
    from windlass.server.wheel import build_wheel

    # Built at the start: later the files on disk may be of another version.
    wheel = await asyncio.to_thread(build_wheel)
    async with server_stores(dsn, config.retention) as (worker_store, user_store):
        overview_feed = OverviewFeed(user_store, lambda: frozenset(orchestrator.fleets))
        metrics = Metrics(overview_feed, user_store)
        metrics.start_at_zero(orchestrator.fleets, [notifier.name for notifier in notifiers])
        watchers.append(metrics.record_cycle)
        context: AppContext = AppContext(
            worker_store=worker_store,
            auth_store=worker_store,
            long_poll_hub=LongPollHub(worker_store.wait_for_work),
            control=OrchestratorControlPlane(config, orchestrator, user_store, ray_head),
            worker_defaults=config.worker,
            max_payload_bytes=config.max_payload_bytes,
            version=version,
            wheel=wheel,
            store=user_store,
            overview_feed=overview_feed,
            metrics=metrics,
            is_open_to_localhost=is_open_to_localhost(config.api),
            rate_limit=config.api.rate_limit,
            cors_origins=config.api.cors_origins,
            privacy=privacy_of([(fleet.queues, fleet.redact) for fleet in config.fleets.values()]),
        )
        url = _browser_url(config, listener.getsockname()[1])
        async with (
            background_task(take_samples(user_store, overview_feed)),
            serving(make_app(context), listener, tls=load_tls(config.api)),
            _recorded_address(user_store, url),
        ):
            create_link = functools.partial(create_login_link, user_store, url)
            await on_dashboard(url, create_link if config.api.login_link else None)
            try:
                yield MetricHooks(metrics.record_message, metrics.record_dropped_lines)
            finally:
                # Before the server stops: it waits for open requests.
                await overview_feed.close()
                await context.long_poll_hub.close()


def load_tls(api: ApiConfig) -> "ReloadingTls | None":
    """Raises ConfigError if the certificate or key cannot be used."""
    if api.tls_cert is None or api.tls_key is None:
        return None
    from windlass.server.tls import ReloadingTls, TlsFiles

    return ReloadingTls(TlsFiles(api.tls_cert.expanduser(), api.tls_key.expanduser()))


def is_open_to_localhost(api: ApiConfig) -> bool:
    """Whether requests from this host may read without a token. With `api.url`, a proxy on this host is likely."""
    return api.open_reading and api.host in LOOPBACK and api.url is None


async def dashboard_link(config: Config, role: Role, url: str | None, name: str) -> str:
    """A login link for one browser. `url`: where the dashboard is, if it is not to be looked up. `name`: the person."""
    from windlass.server.routes.login import create_login_link

    async with auth_store(config, may_create=False) as store:
        base_url = url or config.api.url or await _recorded_url(store)
        if base_url is None:
            if not config.api.port:
                raise BadInput(
                    "no running `windlass up --port` was found: start one, or give --url http://127.0.0.1:8080, or set "
                    "api.port or api.url."
                )
            base_url = _browser_url(config, config.api.port)
        return await create_login_link(store, base_url.rstrip("/"), role, name)


async def _recorded_url(store: "PostgresAuthStore") -> str | None:
    """Address of a running server that is reachable from this host. BadInput if all are on other hosts."""
    servers = await store.servers()
    for server in servers:
        if server.host == socket.gethostname() or urlsplit(server.url).hostname not in LOOPBACK:
            return server.url
    if servers:
        raise BadInput(
            f"the dashboard runs at {servers[0].url} on host {servers[0].host}: create the link there, or give --url "
            "with an address that reaches it."
        )
    return None


@asynccontextmanager
async def _recorded_address(store: "PostgresAuthStore", url: str) -> AsyncIterator[None]:
    """Keep the address of this server recorded in the database until the context exits."""
    address = ServerAddress(url, socket.gethostname())

    async def record_again() -> None:
        while True:
            await asyncio.sleep(SERVER_TTL_S / ADDRESS_UPDATES_PER_TTL)
            with contextlib.suppress(DatabaseUnavailable):  # other tasks log it
                await store.record_server(address)

    await store.record_server(address)
    try:
        async with background_task(record_again()):
            yield
    finally:
        with contextlib.suppress(DatabaseUnavailable):
            await store.remove_server(address)


def _browser_url(config: Config, port: int) -> str:
    if config.api.url is not None:
        return config.api.url
    host = "127.0.0.1" if config.api.host in ("0.0.0.0", "::", *LOOPBACK) else config.api.host  # noqa: S104
    return f"{config.api.scheme}://[{host}]:{port}" if ":" in host else f"{config.api.scheme}://{host}:{port}"


async def take_samples(store: "DashboardStores", overview_feed: "OverviewFeed") -> None:
    """Record samples for charts every few seconds, and purge links, sessions and addresses now and then."""
    from windlass.store.overview import SAMPLE_INTERVAL_S

    for number in itertools.count():
        try:
            await store.take_samples(await overview_feed.overview())
            if number % SAMPLES_PER_PURGE == 0:
                await store.purge_dashboard_rows()
        except WindlassError as error:
            log.warning("take sample failed", error=str(error))
        except Exception:
            # A defect. Without this loop the charts would end.
            log.exception("take sample failed")
        await asyncio.sleep(SAMPLE_INTERVAL_S)
