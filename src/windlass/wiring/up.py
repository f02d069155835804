"""The control process: cycles of every fleet, once (`windlass cycle`) or until stopped (`windlass up`).

`run_control` also runs the Ray supervisor, alerting, the log sink and tracing, and answers requests of HTTP servers,
which run in other processes. Each of them ends with the process; none of them delays a cycle.
"""

import asyncio
import contextlib
import os
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import psutil
import structlog

from windlass.background import background_task
from windlass.config_loader import Loaded
from windlass.control.alerting import AlertManager
from windlass.control.cycle import FleetCycle, run_once
from windlass.control.deployment import Deployment
from windlass.control.orchestrator import Orchestrator
from windlass.control.summary import Summary
from windlass.model.config import Config
from windlass.model.counters import ALERT_MESSAGES, LOG_LINES_DROPPED, CounterBuffer
from windlass.model.errors import BadInput, DatabaseUnavailable
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate, described_holder, holder_of_this_process, process_of_holder
from windlass.model.process import ProcessKind
from windlass.ports.alerts import Notifier
from windlass.store.alerts import PostgresAlertStore
from windlass.store.control import PostgresControlStore
from windlass.store.database import Database
from windlass.store.doctor_checks import (
    ORCHESTRATOR,
    check_may_control,
    dsn_with_role,
    managed_workers_and_leader,
    user_with_owner_rights,
)
from windlass.store.history import PostgresControlMaintenance
from windlass.store.migration import is_schema_current, migrate
from windlass.store.overview import PostgresOverview
from windlass.wiring.boot_counter import BootCounter
from windlass.wiring.cycle_requests import answered_cycle_requests
from windlass.wiring.fingerprint import FingerprintReader
from windlass.wiring.log_sink import Tap, stored_log_lines
from windlass.wiring.minimum_cost import log_minimum_costs
from windlass.wiring.notifiers import make_notifiers
from windlass.wiring.process_link import ProcessLink, ProcessNote, StartOrder
from windlass.wiring.process_record import clear_remains, new_record, recorded
from windlass.wiring.providers import check_keys, check_worker_start, make_provider, spawning_fleets
from windlass.wiring.ray import check_ray, run_ray_supervisor
from windlass.wiring.reachability import check_control_plane_url
from windlass.wiring.reload import ActiveConfig, ReloadRequests, check_fleets, reload_on_request
from windlass.wiring.store_roles import OrchestratorStores
from windlass.wiring.stores import database, database_as, described_database, has_embedded_database
from windlass.wiring.timeout_checks import log_short_spawn_timeouts
from windlass.wiring.tracing import trace_cycles

# Leases without a leader before an alert fires: a restart or a failover takes one.
LEADER_GRACE_LEASES = 2
# `windlass cycle` sends alerts within this time, longer than any notifier takes; the next run sends the rest.
SEND_TIMEOUT_S = 90.0
NO_FLEET = "no fleet is configured: add a table [fleets.NAME] with queues and a handler to windlass.toml"


async def run_cycles(config: Config, version: str, on_start: Callable[[], None] = lambda: None) -> list[Summary]:
    """Run one cycle of every fleet, send alerts, apply retention, and release the lease: for cron and the like.

    `on_start` is called when everything was checked.
    """
    check_keys(config)
    check_worker_start(config)
    await check_control_plane_url(config)
    await check_ray(config)
    on_start()
    async with database_as(ORCHESTRATOR, config) as dsn, Database(dsn, retention=config.retention) as opened:
        store, maintenance = PostgresControlStore(opened), PostgresControlMaintenance(opened)
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
                make_cycle(name, fleet, config, store, candidate, instance_id, version)
                for name, fleet in spawning_fleets(config).items()
            ]
            return await run_once(cycles, send_alerts_and_sweep)
        finally:
            await store.release_lease(candidate)


@dataclass(frozen=True, slots=True)
class ControlOptions:
    """`load` reads the configuration, at the start and at each reload. `on_summary` gets each cycle's summary.

    `tap` registers receivers of log lines. `on_start` is called when everything was checked.
    """

    load: Callable[[], Loaded]
    on_summary: Callable[[Summary], None]
    keeps_workers: bool
    version: str
    tap: Tap = lambda _receiver: lambda: None
    on_start: Callable[[], None] = lambda: None
    # A changed version of a fleet's code or settings begins a rollout by itself.
    is_watching: bool = False


async def check_start(config: Config) -> None:
    """Raise BadInput or ConfigError if the fleets cannot run, as far as that shows before anything is started.

    A configuration without fleets is accepted while workers of former fleets exist, which are then shut down. Only a
    leader shuts them down, so it is refused while another process leads.
    """
    if not config.fleets:
        has_workers, leader = await _managed_workers_and_leader(config)
        if leader is not None and not _is_ended_process(leader):
            raise BadInput(
                f"{NO_FLEET}, or give --queue and --handler. Nothing was started: {described_holder(leader)} leads in "
                "this database."
            )
        if not has_workers:
            raise BadInput(f"{NO_FLEET}, or give --queue and --handler.")
    await check_fleets(config)


async def prepare_schema(dsn: str) -> None:
    """Apply migrations, and check that this user may run the control loop, without the owner's rights if it can."""
    if not await is_schema_current(dsn):  # a user who is not the owner could not lock the migrations
        await migrate(dsn)
    await check_may_control(await dsn_with_role(dsn, ORCHESTRATOR))


async def warn_of_owner_rights(dsn: str) -> None:
    """Log it if the control plane runs as the schema's owner: an error or a stolen password then reaches everything."""
    user = await user_with_owner_rights(await dsn_with_role(dsn, ORCHESTRATOR))
    if user is not None:
        hint = "run `windlass db roles`, then connect as a user with the role windlass_orchestrator"
        structlog.get_logger("windlass.up").warning("run with owner rights", user=user, hint=hint)


async def running_dashboards(dsn: str) -> dict[str, str]:
    """The address of a server on each host, of those that were started last."""
    async with Database(await dsn_with_role(dsn, ORCHESTRATOR), max_connections=1) as opened:
        processes = await OrchestratorStores(opened).processes()
    return {process.host: process.url for process in reversed(processes) if process.url is not None}


async def run_control(
    link: ProcessLink, order: StartOrder, *, options: ControlOptions, dashboards: Mapping[str, str]
) -> None:
    """Run every fleet until the link requests a stop: the first shuts the fleets down, a second one ends now.

    The schema is up to date. A successor takes the leader's lease over from its dead predecessor at once.
    `dashboards`: by host, those that ran before this program. A standby names the leader's.
    """
    config, candidate = order.config, make_candidate(order.config)
    process, counters = new_record(ProcessKind.CONTROL, 0, options.version), CounterBuffer()
    link.send("note", ProcessNote(process.id, candidate.holder))
    async with (
        database_as(ORCHESTRATOR, config) as dsn,
        Database(dsn, retention=config.retention) as opened,
        _cleared_remains(OrchestratorStores(opened), order),
        run_ray_supervisor(config, dsn, candidate.holder) as ray,
    ):
        store = OrchestratorStores(opened)
        instance_id = await store.instance_id()
        notifiers = make_notifiers(config)
        active = ActiveConfig(config, ray.address or config.ray_address)
        # Receivers of every cycle's summary; the services below add theirs.
        has_begun = asyncio.Event()
        if not spawning_fleets(config):
            has_begun.set()
        boots = BootCounter(PostgresOverview(opened), counters)
        listeners: list[Callable[[Summary], None]] = [options.on_summary, counters.add_cycle, boots.record_cycle]
        listeners.append(lambda _summary: has_begun.set())
        counters.start_at_zero(spawning_fleets(config), [notifier.name for notifier in notifiers])

        reloads = ReloadRequests(link.reload_requested)

        def publish(summary: Summary) -> None:
            leader = process_of_holder(summary.leader) if summary.leader is not None else None
            if leader is not None:
                summary = replace(summary, leader_url=dashboards.get(leader[0]))
            for receive in listeners:
                receive(summary)

        orchestrator = Orchestrator(
            store,
            candidate,
            lambda name, fleet: make_cycle(
                name,
                fleet,
                active.for_providers(),
                store,
                candidate,
                instance_id,
                options.version,
                reload=reloads.request,
                latest=active.for_providers,
                is_watching=options.is_watching,
            ),
            lambda name, fleet: make_provider(name, fleet, active.for_providers(), instance_id),
            publish,
        )

        def on_reloaded(changed: Config) -> None:
            counters.start_at_zero(spawning_fleets(changed))
            link.send("config", changed)

        link.on_stop = lambda: orchestrator.stop(keeps_workers=options.keeps_workers)
        log = structlog.get_logger("windlass.up")
        # The supervisor's pid: it is the process that a person started, and that handles signals.
        log.info(
            "started orchestrator", database=described_database(config), fleets=list(config.fleets), pid=os.getppid()
        )
        async with (
            recorded(store, process, order, counters, details=lambda own: replace(own, ray_head=ray.head_address())),
            reload_on_request(orchestrator, active, options.load, ray, reloads, on_reloaded),
            answered_cycle_requests(store, orchestrator.cycle_now, orchestrator.wake, has_begun),
            _alerting(config, dsn, listeners, notifiers, lambda *message: counters.add(ALERT_MESSAGES, message)),
            stored_log_lines(config, dsn, options.tap, lambda count: counters.add(LOG_LINES_DROPPED, (), count)),
            trace_cycles(config, options.version, listeners),
            background_task(log_minimum_costs(config)),
            background_task(log_short_spawn_timeouts(config, PostgresOverview(opened).boot_times)),
            background_task(boots.run()),
        ):
            link.report_ready()
            await orchestrator.run(spawning_fleets(config), stops_when_empty=not config.fleets)
        with contextlib.suppress(DatabaseUnavailable):
            await store.release_lease(candidate)
        log.info("stopped orchestrator")


def make_cycle(
    name: str,
    fleet: FleetConfig,
    config: Config,
    store: PostgresControlStore,
    candidate: Candidate,
    instance_id: str,
    version: str,
    *,
    reload: Callable[[], Awaitable[None]] | None = None,
    latest: Callable[[], Config] | None = None,
    is_watching: bool = False,
) -> FleetCycle:
    """`latest`: the configuration after reloads."""
    provider = make_provider(name, fleet, config, instance_id)
    deployment = Deployment(
        FingerprintReader(name, instance_id, version),
        make_provider=lambda former: make_provider(
            name, former, latest() if latest is not None else config, instance_id
        ),
        reload=reload,
        is_watching=is_watching,
    )
    return FleetCycle(name, fleet, store, provider, candidate, random.SystemRandom(), deployment=deployment)


def make_candidate(config: Config) -> Candidate:
    """This process as a candidate for the leader's lease."""
    return Candidate(holder_of_this_process(), config.control.lease_s)


async def _managed_workers_and_leader(config: Config) -> tuple[bool, str | None]:
    """Whether managed workers are live, and who leads. Creates and migrates nothing: this may be the wrong folder."""
    if config.database_url is None and not has_embedded_database(config):
        return False, None
    async with database(config, makes_schema=False) as dsn:
        return await managed_workers_and_leader(dsn)


def _is_ended_process(holder: str) -> bool:
    """Whether the holder of a lease was a process of this host that has ended. Its lease then only has to expire."""
    process = process_of_holder(holder)
    return process is not None and process[0] == socket.gethostname() and not psutil.pid_exists(process[1])


@asynccontextmanager
async def _cleared_remains(store: OrchestratorStores, order: StartOrder) -> AsyncIterator[None]:
    await clear_remains(store, order.predecessors)
    yield


def _make_alert_manager(
    config: Config, store: PostgresAlertStore, notifiers: list[Notifier], **options: Any
) -> AlertManager:
    return AlertManager(
        store,
        notifiers,
        failed_tasks_allowed=config.alerts.failed_tasks_per_hour,
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
