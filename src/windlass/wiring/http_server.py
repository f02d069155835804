"""The HTTP face of a running orchestrator."""

import asyncio
import contextlib
import functools
import itertools
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from windlass.model.auth import SERVER_TTL_S, ServerAddress
from windlass.model.config import ApiConfig, Config, Retention
from windlass.model.errors import BadInput, DatabaseUnavailable, WindlassError
from windlass.model.urls import LOOPBACK
from windlass.wiring.background import background_task
from windlass.wiring.providers import worker_log
from windlass.wiring.stores import auth_store

if TYPE_CHECKING:
    from datetime import datetime

    from windlass.control.orchestrator import Orchestrator
    from windlass.control.summary import Summary
    from windlass.model.auth import Role
    from windlass.model.work_order import RayHead
    from windlass.ports.alerts import Notifier
    from windlass.server.context import DashboardContext, LoopHealth
    from windlass.server.event_stream import OverviewFeed
    from windlass.server.metrics import Metrics
    from windlass.store.auth import PostgresAuthStore
    from windlass.store.dashboard_queries import PostgresQueryStore
    from windlass.wiring.store_roles import DashboardStores, WorkerProtocolStores

# Connections for what comes over HTTP, apart from those of the control loop: no flood of calls delays a cycle. And
# those of machines apart from those of people, so that no crowd of readers silences a worker.
MACHINES_CONNECTIONS = 8
PEOPLES_CONNECTIONS = 6
# What a person asks is answered within this time, or not at all.
PEOPLES_STATEMENT_TIMEOUT_S = 5.0
# A loop that has not turned for so many of its intervals, and at least that long, is not ready.
MISSED_CYCLES = 3
MIN_MISSED_S = 60.0
# Retention of what only faces need is applied with every so many samples: once in five minutes.
SAMPLES_PER_SWEEP = 60
# One that is late, and one that is lost, leave a running orchestrator where it is.
FACE_NOTES_PER_TTL = 4


def open_listener(config: Config) -> "socket.socket | None":
    """Take the port, if there is to be one, and as many files as its callers may need. Raises BadInput."""
    if config.api.port is None:
        return None
    from windlass.server.connections import raise_file_limit
    from windlass.server.server import listen

    raise_file_limit()
    return listen(config.api.host, config.api.port)


@dataclass(frozen=True, slots=True)
class Counts:
    """Who counts what others do, for metrics: nobody, without a face."""

    # Receiver and outcome of a message.
    on_message: Callable[[str, str], None] = lambda _notifier, _outcome: None
    # Log lines that were not written.
    on_dropped: Callable[[int], None] = lambda _count: None


@asynccontextmanager
async def face_stores(
    dsn: str, retention: Retention | None = None, virtual_now: "Callable[[], datetime] | None" = None
) -> "AsyncIterator[tuple[WorkerProtocolStores, DashboardStores]]":
    """What machines call, and what people ask."""
    from windlass.store.database import Database
    from windlass.wiring.store_roles import DashboardStores, WorkerProtocolStores

    async with (
        Database(dsn, retention=retention, max_connections=MACHINES_CONNECTIONS, virtual_now=virtual_now) as machines,
        Database(
            dsn,
            retention=retention,
            max_connections=PEOPLES_CONNECTIONS,
            statement_timeout_s=PEOPLES_STATEMENT_TIMEOUT_S,
            virtual_now=virtual_now,
        ) as people,
    ):
        yield WorkerProtocolStores(machines), DashboardStores(people)


@asynccontextmanager
async def http_face(
    config: Config,
    dsn: str,
    up: "Orchestrator",
    listener: "socket.socket | None",
    version: str,
    watchers: "list[Callable[[Summary], None]]",
    on_link: Callable[[str], None],
    ray_head: "Callable[[], RayHead | None]",
    told: "Sequence[Notifier]",
) -> "AsyncIterator[Counts]":
    """The HTTP face of a running `up`, if it is to have one. It watches the cycles by adding itself to `watchers`.

    `ray_head`: what machines are told to join whose tasks Ray places. `told`: who is told of alerts.
    """
    if listener is None:
        yield Counts()
        return
    from windlass.server.app import make_app
    from windlass.server.context import AppContext
    from windlass.server.long_poll import LongPollHub
    from windlass.server.server import serving
    from windlass.server.session import new_link
    from windlass.server.wheel import build_wheel

    async def run_cycle() -> list[dict[str, Any]]:
        return [summary.to_plain() for summary in await up.cycle_now()]

    # Now: what is on the disk later may be another version.
    wheel = await asyncio.to_thread(build_wheel)
    async with face_stores(dsn, config.retention) as (machines, people):
        long_poll_hub = LongPollHub(machines.wait_for_work)
        shown, metrics = _shown(config, people, up, watchers, told)
        face = AppContext(
            store=machines,
            access=machines,
            long_poll_hub=long_poll_hub,
            fleet=up.fleet,
            worker_defaults=config.worker,
            max_payload_bytes=config.max_payload_bytes,
            version=version,
            ask_database=machines.now,
            pulses=lambda: _pulses(up),
            run_cycle=run_cycle,
            wheel=lambda: wheel,
            shown=shown,
            ray_head=ray_head,
        )
        url = _browser_url(config, listener.getsockname()[1])
        async with (
            background_task(take_samples(people, shown.live)),
            serving(make_app(face), listener),
            _told_where(people, url),
        ):
            on_link(await new_link(people, url))
            try:
                yield Counts(metrics.record_message, metrics.record_dropped_lines)
            finally:
                # Before the server ends, or it would wait for those who wait.
                await shown.live.close()
                await long_poll_hub.close()


def _shown(
    config: Config,
    store: "DashboardStores",
    up: "Orchestrator",
    watchers: "list[Callable[[Summary], None]]",
    told: "Sequence[Notifier]",
) -> "tuple[DashboardContext, Metrics]":
    """What people see of a running `up`, and who counts for them."""
    from windlass.control.explain import explain
    from windlass.server.context import DashboardContext
    from windlass.server.event_stream import OverviewFeed
    from windlass.server.metrics import Metrics

    live = OverviewFeed(store, lambda: frozenset(up.fleets))
    metrics = Metrics(live.overview, store.fleet_metrics)
    metrics.expect(up.fleets, [notifier.name for notifier in told])

    def note(summary: "Summary") -> None:
        metrics.record_cycle(
            summary.fleet,
            is_leader=summary.is_leader,
            duration_s=summary.duration_s,
            actions=summary.actions or {},
            provider_calls=summary.provider_calls,
        )

    watchers.append(note)
    shown = DashboardContext(
        store=store,
        live=live,
        explain=functools.partial(explain, store),
        worker_log=lambda fleet, worker_id, lines: worker_log(config, fleet, worker_id, lines, is_following=False),
        last_actions=lambda: {name: heard.summary.actions or {} for name, heard in up.last_cycles().items()},
        metrics=metrics.read,
        is_open_here=is_reading_open(config.api),
        rate_limit=config.api.rate_limit,
        cors_origins=config.api.cors_origins,
    )
    return shown, metrics


def is_reading_open(api: ApiConfig) -> bool:
    """To whoever is on this host. An address for others means that something stands before it, perhaps on this host."""
    return api.host in LOOPBACK and api.url is None


async def dashboard_link(config: Config, role: "Role", url: str | None) -> str:
    """The address that lets one more browser in. `url`: where the dashboard is, if nobody else is to be asked."""
    from windlass.server.session import new_link

    async with auth_store(config, may_create=False) as store:
        base_url = url or config.api.url or await _running_at(store) or _configured_at(config)
        return await new_link(store, base_url.rstrip("/"), role)


async def _running_at(store: "PostgresAuthStore") -> str | None:
    """Where a running `windlass up` serves people who are here; None if none does. BadInput if only others reach it."""
    servers = await store.servers()
    for face in servers:
        if face.host == socket.gethostname() or urlsplit(face.url).hostname not in LOOPBACK:
            return face.url
    if servers:
        raise BadInput(
            f"the dashboard is at {servers[0].url} of {servers[0].host}: make the link there, or give --url with an "
            "address that leads there."
        )
    return None


def _configured_at(config: Config) -> str:
    if not config.api.port:
        raise BadInput(
            "no `windlass up --port` is running that would say where the dashboard is: start one, or give --url "
            "http://127.0.0.1:8080, or set api.port or api.url."
        )
    return _browser_url(config, config.api.port)


@asynccontextmanager
async def _told_where(store: "PostgresAuthStore", url: str) -> AsyncIterator[None]:
    """For as long as this is open, whoever has the database learns from it where people are served."""
    face = ServerAddress(url, socket.gethostname())
    await store.record_server(face)
    try:
        async with background_task(_note_again(store, face)):
            yield
    finally:
        with contextlib.suppress(DatabaseUnavailable):
            await store.remove_server(face)


async def _note_again(store: "PostgresAuthStore", face: ServerAddress) -> None:
    while True:
        await asyncio.sleep(SERVER_TTL_S / FACE_NOTES_PER_TTL)
        # A database that is away is told of elsewhere, and everywhere.
        with contextlib.suppress(DatabaseUnavailable):
            await store.record_server(face)


def _browser_url(config: Config, port: int) -> str:
    """Where a person on this host, or wherever machines call from, finds us."""
    if config.api.url is not None:
        return config.api.url
    host = "127.0.0.1" if config.api.host in ("0.0.0.0", "::", *LOOPBACK) else config.api.host  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def take_samples(store: "PostgresQueryStore", live: "OverviewFeed") -> None:
    """How things stand, every few seconds, for charts; and the retention of what only faces need. Whatever happens."""
    import structlog

    from windlass.store.overview import SAMPLE_INTERVAL_S

    log = structlog.get_logger(__name__)
    for round_number in itertools.count():
        try:
            await store.take_samples(await live.overview())
            if round_number % SAMPLES_PER_SWEEP == 0:
                await store.purge_servers()
        except WindlassError as error:
            log.warning("no sample was taken", error=str(error))
        except Exception:
            # A defect; but without this loop charts end for good, and nobody is told why.
            log.exception("no sample was taken")
        await asyncio.sleep(SAMPLE_INTERVAL_S)


def _pulses(up: "Orchestrator") -> "dict[str, LoopHealth]":
    from windlass.server.context import LoopHealth

    now = asyncio.get_running_loop().time()
    pulses = {}
    for name, heard in up.last_cycles().items():
        fleet = up.fleet(name)
        if fleet is not None:
            limit_s = max(MIN_MISSED_S, MISSED_CYCLES * fleet.poll_interval_s)
            pulses[name] = LoopHealth(heard.summary.is_leader, now - heard.at, limit_s)
    return pulses
