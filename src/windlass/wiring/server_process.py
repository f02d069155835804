"""One HTTP server process. It shares the database with the control loop, and nothing else.

Several run on one listening socket (`windlass up`, `windlass serve`), and on any number of hosts. What they show comes
from the database. Fleet settings, which may contain secrets, come from the configuration of their own host.
"""

import asyncio
import contextlib
import functools
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from windlass.background import background_task
from windlass.control.explanation import explain
from windlass.model.config import Config
from windlass.model.counters import HTTP_REQUESTS, LOG_LINES_DROPPED, CounterBuffer
from windlass.model.cycle import Explanation
from windlass.model.errors import WindlassError
from windlass.model.event import Event
from windlass.model.fleet import FleetConfig
from windlass.model.payload_privacy import PayloadPrivacy, privacy_of
from windlass.model.process import ProcessKind
from windlass.model.work_order import RayHead
from windlass.ports.processes import CYCLE_REQUEST_TTL_S, MAX_CYCLE_REQUESTS, ProcessStore
from windlass.server.app import make_app
from windlass.server.context import AppContext, ControlHealth, LoopHealth
from windlass.server.errors import unavailable
from windlass.server.event_stream import OverviewFeed
from windlass.server.long_poll import LongPollHub
from windlass.server.metrics import Metrics
from windlass.server.routes.login import create_login_link
from windlass.server.server import serving
from windlass.server.wheel import Wheel
from windlass.store.doctor_checks import ORCHESTRATOR
from windlass.wiring.http_server import (
    OnDashboard,
    browser_url,
    is_open_to_localhost,
    load_tls,
    make_oidc_client,
    server_stores,
    take_samples,
)
from windlass.wiring.log_sink import Tap, stored_log_lines
from windlass.wiring.process_link import ProcessLink, ProcessNote, StartOrder
from windlass.wiring.process_record import clear_remains, new_record, recorded
from windlass.wiring.providers import spawning_fleets, worker_log
from windlass.wiring.ray import ray_credentials
from windlass.wiring.stores import database_as

if TYPE_CHECKING:
    from windlass.wiring.store_roles import DashboardStores, WorkerProtocolStores


# A requester of a cycle looks for its answer this often, at first and later.
ANSWER_POLL_S, MAX_ANSWER_POLL_S = 0.05, 0.5


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What all server processes of one supervisor have in common. `on_dashboard` is called once."""

    version: str
    wheel: Wheel | None
    on_dashboard: OnDashboard
    on_config: Callable[[Config], None]
    tap: Tap


class DatabaseControlPlane:
    """Implements the server's ControlPlane over the database, whatever process runs the control loop.

    Workers and probes read over `worker_store`: readers may occupy every connection of `store`.
    """

    def __init__(self, config: Config, store: "DashboardStores", worker_store: "WorkerProtocolStores") -> None:
        self._store = store
        self._worker_store = worker_store
        self._fleets: dict[str, FleetConfig] = {}
        self.set_config(config)

    def set_config(self, config: Config) -> None:
        self._config = config
        # Former fleets stay: their last machines may still join.
        self._fleets |= spawning_fleets(config)
        self._privacy = privacy_of([(fleet.queues, fleet.redact) for fleet in config.fleets.values()])

    def payload_privacy(self) -> PayloadPrivacy:
        return self._privacy

    def redact_event(self, event: Event) -> Event:
        return self._privacy.redact_event(event)

    @property
    def fleet_names(self) -> frozenset[str]:
        return frozenset(spawning_fleets(self._config))

    def fleet_config(self, name: str) -> FleetConfig | None:
        return self._fleets.get(name)

    async def health(self) -> ControlHealth:
        store = self._worker_store
        now, stored = await store.now(), {fleet.name: fleet for fleet in await store.fleets()}
        loops = {}
        for name in self.fleet_names:
            fleet = stored.get(name)
            if fleet is None or fleet.planned_at is None:
                loops[name] = LoopHealth(None, is_running=False)
            else:
                age_s = max(0.0, (now - fleet.planned_at).total_seconds())
                loops[name] = LoopHealth(age_s, is_running=fleet.without_orchestrator_s(now) is None)
        return ControlHealth(any(fleet.is_led for fleet in stored.values()), loops)

    async def last_actions(self) -> Mapping[str, Mapping[str, int]]:
        return await self._store.last_actions()

    async def ray_head(self) -> RayHead | None:
        processes = await self._worker_store.processes()
        heads = [process.ray_head for process in processes if process.ray_head is not None]
        if not heads:
            return None
        return RayHead(heads[0].address, heads[0].ray_version, heads[0].python_version, ray_credentials())

    async def run_cycle(self) -> list[dict[str, Any]]:
        return await request_cycle(self._store)

    async def explain(self, subject: str, redact_event: Callable[[Event], Event] | None = None) -> Explanation:
        return await explain(self._store, subject, redact_event)

    def worker_log(self, fleet: str, worker_id: str, lines: int) -> AsyncIterator[str]:
        return worker_log(self._config, fleet, worker_id, lines, is_following=False)


async def request_cycle(store: ProcessStore) -> list[dict[str, Any]]:
    """The summaries of cycles that began after this call. Raises TimeoutError, and ApiError if too many are open."""
    request_id = await store.request_cycle()
    if request_id is None:
        raise unavailable(f"{MAX_CYCLE_REQUESTS} requested cycles have not ended: wait for them")
    try:
        async with asyncio.timeout(CYCLE_REQUEST_TTL_S):
            pause_s = ANSWER_POLL_S
            while (summaries := await store.cycle_answer(request_id)) is None:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_ANSWER_POLL_S)
            return summaries
    finally:
        with contextlib.suppress(WindlassError):
            await store.withdraw_cycle_request(request_id)


async def run_server(
    link: ProcessLink, order: StartOrder, *, number: int, listener: socket.socket, options: ServerOptions
) -> None:
    """Serve until the link requests a stop. Running requests are finished; streams and long polls end at once."""
    config = order.config
    async with (
        database_as(ORCHESTRATOR, config, may_create=False) as dsn,
        server_stores(dsn, config.retention) as (worker_store, user_store),
    ):
        process = new_record(ProcessKind.SERVER, number, options.version)
        link.send("note", ProcessNote(process.id))
        await clear_remains(user_store, order.predecessors)
        control = DatabaseControlPlane(config, user_store, worker_store)

        def set_config(changed: Config) -> None:
            options.on_config(changed)
            control.set_config(changed)

        link.receive_configs(set_config)
        overview_feed = OverviewFeed(user_store, lambda: control.fleet_names, redact_event=control.redact_event)
        counters = CounterBuffer()
        url = browser_url(config, listener.getsockname()[1])

        async def has_tasks(queues: Sequence[str]) -> bool:
            # On the connections of workers: those of users may all be busy.
            return bool(await worker_store.queues_with_tasks(queues))

        context = AppContext(
            worker_store=worker_store,
            auth_store=worker_store,
            long_poll_hub=LongPollHub(worker_store.wait_for_work, has_tasks),
            control=control,
            worker_defaults=config.worker,
            logs=config.logs,
            max_payload_bytes=config.max_payload_bytes,
            version=options.version,
            wheel=options.wheel,
            counters=counters,
            store=user_store,
            overview_feed=overview_feed,
            metrics=Metrics(overview_feed, user_store),
            is_open_to_localhost=is_open_to_localhost(config.api),
            rate_limit=config.api.rate_limit,
            cors_origins=config.api.cors_origins,
            oidc=make_oidc_client(config, url),
            payload_privacy=control.payload_privacy,
        )
        async with (
            stored_log_lines(config, dsn, options.tap, lambda count: counters.add(LOG_LINES_DROPPED, (), count)),
            serving(make_app(context), listener, tls=load_tls(config.api)) as connections,
        ):
            counted = 0

            def gauges() -> Mapping[str, float]:
                nonlocal counted
                counters.add(HTTP_REQUESTS, (), connections.responses - counted)
                counted = connections.responses
                return {"connections": len(connections)}

            async with recorded(user_store, replace(process, url=url), order, counters, gauges=gauges):
                link.on_stop = lambda: None
                link.report_ready()
                try:
                    if number == 0:
                        # One process of a supervisor is enough. Supervisors of other hosts write the same rows.
                        async with background_task(take_samples(user_store, overview_feed)):
                            if order.reason is None:
                                create_link = functools.partial(create_login_link, user_store, url)
                                await options.on_dashboard(url, create_link if config.api.login_link else None)
                            await link.stop_requested.wait()
                    else:
                        await link.stop_requested.wait()
                finally:
                    # Before the server stops: it waits for open requests.
                    await overview_feed.close()
                    await context.long_poll_hub.close()
                    gauges()
