"""The orchestrator process: cycles of every fleet, once (`windlass cycle`) or until stopped (`windlass up`).

`run_up` also opens the database, migrates it, and runs the Ray supervisor, the HTTP server, alerting, the log sink and
tracing. Each of them ends with the process; none of them delays a cycle.
"""

import asyncio
import contextlib
import functools
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import structlog

from windlass.config_loader import Loaded
from windlass.control.alerting import AlertManager
from windlass.control.cycle import FleetCycle, run_once
from windlass.control.orchestrator import Orchestrator
from windlass.control.summary import Summary
from windlass.model.config import Config
from windlass.model.errors import BadInput, DatabaseUnavailable
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate, holder_of_this_process
from windlass.ports.alerts import Notifier
from windlass.store.alerts import PostgresAlertStore
from windlass.store.control import PostgresControlStore
from windlass.store.database import Database
from windlass.store.doctor_checks import check_may_control, has_managed_workers
from windlass.store.log_sink import LogSink, PostgresLogStore
from windlass.store.migrate import migrate
from windlass.store.transport import PostgresMaintenance
from windlass.wiring.background import background_task
from windlass.wiring.http_server import OnDashboard, open_listener, run_http_server
from windlass.wiring.minimum_cost import log_minimum_costs
from windlass.wiring.notifiers import make_notifiers
from windlass.wiring.providers import check_keys, make_provider, spawning_fleets
from windlass.wiring.ray import check_ray, run_ray_supervisor
from windlass.wiring.reachability import check_control_plane_url
from windlass.wiring.reload import ActiveConfig, check_fleets, reload_on_request
from windlass.wiring.signals import on_stop_signals
from windlass.wiring.store_roles import OrchestratorStores
from windlass.wiring.stores import database, described_database, has_embedded_database
from windlass.wiring.terminal import SETTLE_S, SETTLE_STEPS, ControllingTerminal
from windlass.wiring.tracing import trace_cycles

# Leases without a leader before an alert fires: a restart or a failover takes one.
LEADER_GRACE_LEASES = 2
# `windlass cycle` sends alerts within this time, longer than any notifier takes; the next run sends the rest.
SEND_TIMEOUT_S = 90.0
NO_FLEET = "no fleet is configured: add a table [fleets.NAME] with queues and a handler to windlass.toml"
# Registers a receiver of log lines; returns the function that removes it.
Tap = Callable[[Callable[[Mapping[str, Any]], None]], Callable[[], None]]


async def run_cycles(config: Config) -> list[Summary]:
    """Run one cycle of every fleet, send alerts, apply retention, and release the lease: for cron and the like."""
    check_keys(config)
    await check_control_plane_url(config)
    await check_ray(config)
    async with database(config) as dsn, Database(dsn, retention=config.retention) as opened:
        store, maintenance = PostgresControlStore(opened), PostgresMaintenance(opened)
        candidate, instance_id = make_candidate(config), await store.instance_id()
        # Evaluation follows the cycles of this process, so it has nothing to wait for.
        alerts = _make_alert_manager(config, PostgresAlertStore(opened), make_notifiers(config), settling_s=0.0)

        async def send_alerts_and_sweep(summaries: list[Summary]) -> None:
            for summary in summaries:
                alerts.record_cycle(summary)
            if any(summary.is_leader for summary in summaries):
                await alerts.run_once(SEND_TIMEOUT_S)
                with contextlib.suppress(DatabaseUnavailable):  # the next run does it
                    await maintenance.sweep()

        try:
            cycles = [
                make_cycle(name, fleet, config, store, candidate, instance_id)
                for name, fleet in spawning_fleets(config).items()
            ]
            return await run_once(cycles, send_alerts_and_sweep)
        finally:
            await store.release_lease(candidate)


async def run_up(
    load: Callable[[], Loaded],
    on_summary: Callable[[Summary], None],
    *,
    keeps_workers: bool,
    version: str,
    on_dashboard: OnDashboard,
    tap: Tap = lambda _receiver: lambda: None,
    on_start: Callable[[], None] = lambda: None,
) -> None:
    """Run every fleet until stopped: SIGTERM and Ctrl-C shut down, a second one ends now, SIGHUP reloads.

    `load` reads the configuration, now and at each reload. A configuration without fleets is accepted while workers of
    former fleets exist, which are then shut down; otherwise BadInput. `on_dashboard` is called once, when the HTTP
    server runs. `tap` registers receivers of log lines. `on_start` is called when everything was checked.
    """
    # Before the file is read: a SIGHUP during start-up is handled once everything runs.
    is_reload_requested = asyncio.Event()
    terminal = ControllingTerminal()
    is_hung_up = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, is_hung_up.set)
    config = load().config
    if not config.fleets and not await _has_workers_left(config):
        raise BadInput(f"{NO_FLEET}, or give --queue and --handler.")
    await check_fleets(config)
    # First, because a port in use ends the start-up.
    listener = open_listener(config)
    async with (
        database(config) as dsn,
        _migrated(dsn),
        run_ray_supervisor(config, dsn) as ray,
        Database(dsn, retention=config.retention) as opened,
    ):
        store = OrchestratorStores(opened)
        candidate, instance_id = make_candidate(config), await store.instance_id()
        notifiers = make_notifiers(config)
        active = ActiveConfig(config, ray.address or config.ray_address)
        # Receivers of every cycle's summary; the services below add theirs.
        listeners = [on_summary]

        def publish(summary: Summary) -> None:
            for receive in listeners:
                receive(summary)

        orchestrator = Orchestrator(
            store,
            candidate,
            lambda name, fleet: make_cycle(name, fleet, active.for_providers(), store, candidate, instance_id),
            lambda name, fleet: make_provider(name, fleet, active.for_providers(), instance_id),
            publish,
        )
        stop = functools.partial(orchestrator.stop, keeps_workers=keeps_workers)
        on_stop_signals(stop)
        log = structlog.get_logger("windlass.up")
        on_start()
        log.info("started", database=described_database(config), fleets=list(config.fleets), pid=os.getpid())
        async with (
            background_task(_follow_hangups(is_hung_up, terminal, stop, is_reload_requested.set)),
            reload_on_request(orchestrator, active, load, ray, is_reload_requested),
            run_http_server(
                config, dsn, orchestrator, listener, version, listeners, on_dashboard, ray.head, notifiers
            ) as hooks,
            _alerting(config, dsn, listeners, notifiers, hooks.on_message),
            _log_sink(config, dsn, tap, hooks.on_dropped),
            trace_cycles(config, version, listeners),
            background_task(log_minimum_costs(config)),
        ):
            await orchestrator.run(spawning_fleets(config), stops_when_empty=not config.fleets)
        with contextlib.suppress(DatabaseUnavailable):
            await store.release_lease(candidate)
        log.info("stopped")


async def _follow_hangups(
    is_hung_up: asyncio.Event, terminal: ControllingTerminal, stop: Callable[[], None], reload: Callable[[], None]
) -> None:
    """SIGHUP reloads; if it came because the terminal was closed, it stops."""
    while True:
        await is_hung_up.wait()
        is_hung_up.clear()
        for _ in range(SETTLE_STEPS if terminal.is_watched else 0):
            if terminal.is_gone:
                stop()
                return
            await asyncio.sleep(SETTLE_S / SETTLE_STEPS)
        reload()


def make_cycle(
    name: str, fleet: FleetConfig, config: Config, store: PostgresControlStore, candidate: Candidate, instance_id: str
) -> FleetCycle:
    provider = make_provider(name, fleet, config, instance_id)
    return FleetCycle(name, fleet, store, provider, candidate, random.SystemRandom())


def make_candidate(config: Config) -> Candidate:
    """This process as a candidate for the leader's lease."""
    return Candidate(holder_of_this_process(), config.control.lease_s)


async def _has_workers_left(config: Config) -> bool:
    """Whether managed workers are live. Creates and migrates nothing: this may be the wrong folder."""
    if config.database_url is None and not has_embedded_database(config):
        return False
    async with database(config, makes_schema=False) as dsn:
        return await has_managed_workers(dsn)


@asynccontextmanager
async def _migrated(dsn: str) -> AsyncIterator[None]:
    await migrate(dsn)
    await check_may_control(dsn)
    yield


def _make_alert_manager(
    config: Config, store: PostgresAlertStore, notifiers: list[Notifier], **options: Any
) -> AlertManager:
    return AlertManager(
        store,
        notifiers,
        dead_letters_allowed=config.alerts.dead_letters_per_hour,
        leader_grace_s=LEADER_GRACE_LEASES * config.control.lease_s,
        ignored=config.alerts.ignored,
        **options,
    )


@asynccontextmanager
async def _alerting(
    config: Config,
    dsn: str,
    listeners: list[Callable[[Summary], None]],
    notifiers: list[Notifier],
    on_message: Callable[[str, str], None],
) -> AsyncIterator[None]:
    # Connections of its own: no notifier makes a cycle wait for one.
    async with Database(dsn, retention=config.retention, max_connections=2) as opened:
        alerts = _make_alert_manager(config, PostgresAlertStore(opened), notifiers, on_message=on_message)
        listeners.append(alerts.record_cycle)
        async with background_task(alerts.run()):
            yield


@asynccontextmanager
async def _log_sink(config: Config, dsn: str, tap: Tap, on_dropped: Callable[[int], None]) -> AsyncIterator[None]:
    """Writes log lines into the database, if that is configured."""
    if not config.logs.in_database:
        yield
        return
    async with Database(dsn, retention=config.retention, max_connections=1) as opened:
        sink = LogSink(PostgresLogStore(opened), on_dropped)
        async with background_task(sink.run()):
            remove = tap(sink.take)
            try:
                yield
            finally:
                remove()
