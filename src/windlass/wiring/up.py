"""The orchestrator: every fleet's cycles, once or until told to stop, and all that goes on beside them."""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from windlass.model.config import Config
from windlass.model.errors import BadInput, DatabaseUnavailable
from windlass.store.migrate import migrate
from windlass.wiring.background import beside
from windlass.wiring.http_server import open_listener, run_http_server
from windlass.wiring.notifiers import notifiers
from windlass.wiring.providers import check_keys, check_machines_can_call, provider, spawning_fleets
from windlass.wiring.ray import check_ray, ray_beside
from windlass.wiring.reload import Current, check_hiring, reloading
from windlass.wiring.signals import on_stop_signals
from windlass.wiring.stores import database, described_database, has_embedded_database

if TYPE_CHECKING:
    from windlass.config_loader import Loaded
    from windlass.control.alerting import AlertManager
    from windlass.control.cycle import FleetCycle
    from windlass.control.orchestrator import Orchestrator
    from windlass.control.summary import Summary
    from windlass.model.fleet import FleetConfig
    from windlass.model.lease import Candidate
    from windlass.ports.alerts import Notifier
    from windlass.store.alerts import PostgresAlertStore
    from windlass.store.control import PostgresControlStore

# Without a leader for so many leases before people are told: a restart and a failover take one.
LEADER_GRACE_LEASES = 2
# What a single cycle has to tell is sent within this time, or by the next: longer than any receiver takes.
TELL_TIMEOUT_S = 90.0
NO_FLEET = "there is no fleet: write a table [fleets.NAME] with queues and a handler into windlass.toml"
# Hands every log line to whoever asks, until they call what they got for it.
Tap = Callable[[Callable[[Mapping[str, Any]], None]], Callable[[], None]]


async def run_cycles(config: Config) -> "list[Summary]":
    """One cycle of every fleet, then give the lead up: for cron and the like. Beside them, what `up` does: people are
    told what is the matter, and retention is applied."""
    from windlass.control.cycle import run_once
    from windlass.store.alerts import PostgresAlertStore

    check_machines_can_call(config)
    check_keys(config)
    await check_ray(config)
    async with database(config) as dsn, PostgresAlertStore(dsn, retention=config.retention) as store:
        ourselves, instance_id = candidate(config), await store.instance_id()
        # The cycles of this process are over when it looks.
        alarm = _make_alarm(config, store, notifiers(config), settling_s=0.0)

        async def tell_and_sweep(summaries: "list[Summary]") -> None:
            for summary in summaries:
                alarm.note(summary)
            # Whoever leads does it.
            if any(summary.is_leader for summary in summaries):
                await alarm.tell_once(TELL_TIMEOUT_S)
                with contextlib.suppress(DatabaseUnavailable):  # the next one does it
                    await store.sweep()

        try:
            return await run_once(
                [
                    fleet_cycle(name, fleet, config, store, ourselves, instance_id)
                    for name, fleet in spawning_fleets(config).items()
                ],
                tell_and_sweep,
            )
        finally:
            await store.release_lease(ourselves)


async def run_up(
    load: "Callable[[], Loaded]",
    on_summary: "Callable[[Summary], None]",
    *,
    keeps_workers: bool,
    version: str,
    on_link: Callable[[str], None] = lambda _link: None,
    tap: Tap = lambda _taker: lambda: None,
) -> None:
    """Every fleet, until told to stop: SIGTERM and Ctrl-C end in good order, a second one at once; SIGHUP reloads.

    `load` is asked for the configuration now, and for each reload. One without a fleet is enough for as long as there
    are workers of former fleets, which are then let go; BadInput if there are none.
    `on_link` is told, once, the address that lets a person's browser in. `tap` hands log lines to whoever asks.
    """
    import structlog

    from windlass.store.control import PostgresControlStore

    loop = asyncio.get_running_loop()
    # Before the file is read: whoever changes it while we start, and says so, is heard once we are up.
    is_reload_wanted = asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, is_reload_wanted.set)
    config = load().config
    if not config.fleets and not await _is_anybody_left(config):
        raise BadInput(f"{NO_FLEET}, or give --queue and --handler.")
    await check_hiring(config)
    # Before anything else: a port that is taken ends the matter.
    listener = open_listener(config)
    async with (
        database(config) as dsn,
        _migrated(dsn),
        ray_beside(config, dsn) as ray,
        PostgresControlStore(dsn, retention=config.retention) as opened,
    ):
        ourselves, instance_id = candidate(config), await opened.instance_id()
        watchers, told = [on_summary], notifiers(config)
        current = Current(config, ray.address or config.ray_address)
        up = _make_up(opened, current, ourselves, instance_id, watchers)
        on_stop_signals(lambda: up.stop(keeps_workers=keeps_workers))
        log = structlog.get_logger("windlass.up")
        log.info("up", database=described_database(config), fleets=list(config.fleets), pid=os.getpid())
        async with (
            reloading(up, current, load, ray, is_reload_wanted),
            run_http_server(config, dsn, up, listener, version, watchers, on_link, ray.head, told) as counts,
            _alarm(config, dsn, watchers, told, counts.on_message),
            _logs_in_database(config, dsn, tap, counts.on_dropped),
            _traced_cycles(config, version, watchers),
        ):
            await up.run(spawning_fleets(config), is_clearing_up=not config.fleets)
        with contextlib.suppress(DatabaseUnavailable):
            await opened.release_lease(ourselves)
        log.info("ended")


async def _is_anybody_left(config: Config) -> bool:
    """Whether workers live that some fleet hired. Nothing is made or migrated for this question: the answer may be that
    we are in the wrong folder."""
    from windlass.store.doctor_checks import has_managed_workers

    if config.database_url is None and not has_embedded_database(config):
        return False
    async with database(config, makes_schema=False) as dsn:
        return await has_managed_workers(dsn)


@asynccontextmanager
async def _migrated(dsn: str) -> AsyncIterator[None]:
    from windlass.store.doctor_checks import check_may_control

    await migrate(dsn)
    await check_may_control(dsn)
    yield


def _make_up(
    store: "PostgresControlStore",
    current: Current,
    ourselves: "Candidate",
    instance_id: str,
    watchers: "Sequence[Callable[[Summary], None]]",
) -> "Orchestrator":
    """Which hires by what is current, and tells of each cycle whoever then watches."""
    from windlass.control.orchestrator import Orchestrator

    def tell_all(summary: "Summary") -> None:
        for tell in watchers:
            tell(summary)

    return Orchestrator(
        store,
        ourselves,
        lambda name, fleet: fleet_cycle(name, fleet, current.of_providers(), store, ourselves, instance_id),
        lambda name, fleet: provider(name, fleet, current.of_providers(), instance_id),
        tell_all,
    )


def fleet_cycle(
    name: str,
    fleet: "FleetConfig",
    config: Config,
    store: "PostgresControlStore",
    candidate: "Candidate",
    instance_id: str,
) -> "FleetCycle":
    from windlass.control.cycle import FleetCycle

    rents = provider(name, fleet, config, instance_id)
    return FleetCycle(name, fleet, store, rents, candidate, random.SystemRandom())


def candidate(config: Config) -> "Candidate":
    """Ourselves, as one who might lead."""
    from windlass.model.lease import Candidate, holder_of_this_process

    return Candidate(holder_of_this_process(), config.control.lease_s)


@asynccontextmanager
async def _alarm(
    config: Config,
    dsn: str,
    watchers: "list[Callable[[Summary], None]]",
    told: "list[Notifier]",
    on_message: Callable[[str, str], None],
) -> AsyncIterator[None]:
    """People are told what is the matter for as long as this is open."""
    from windlass.store.alerts import PostgresAlertStore

    # Its own connections: whatever a receiver does, no cycle waits for one.
    async with PostgresAlertStore(dsn, retention=config.retention, max_connections=2) as store:
        alarm = _make_alarm(config, store, told, on_message=on_message)
        watchers.append(alarm.note)
        async with beside(alarm.run()):
            yield


def _make_alarm(config: Config, store: "PostgresAlertStore", told: "list[Notifier]", **other: Any) -> "AlertManager":
    from windlass.control.alerting import AlertManager

    return AlertManager(
        store,
        told,
        dead_letters_allowed=config.alerts.dead_letters_per_hour,
        leader_grace_s=LEADER_GRACE_LEASES * config.control.lease_s,
        ignored=config.alerts.ignored,
        **other,
    )


@asynccontextmanager
async def _logs_in_database(
    config: Config, dsn: str, tap: Tap, on_dropped: Callable[[int], None]
) -> AsyncIterator[None]:
    """Log lines go into the database too, if that is configured."""
    if not config.logs.in_database:
        yield
        return
    from windlass.store.log_sink import LogSink, PostgresLogStore

    async with PostgresLogStore(dsn, retention=config.retention, max_connections=1) as store:
        sink = LogSink(store, on_dropped)
        async with beside(sink.run()):
            untap = tap(sink.take)
            try:
                yield
            finally:
                untap()


@asynccontextmanager
async def _traced_cycles(
    config: Config, version: str, watchers: "list[Callable[[Summary], None]]"
) -> AsyncIterator[None]:
    """Cycles are told to OpenTelemetry, if that is configured."""
    if config.logs.traces_endpoint is None:
        yield
        return
    from windlass.tracing_spans import Traces

    traces = Traces(config.logs.traces_endpoint, "windlass", version)

    def note(summary: "Summary") -> None:
        if summary.is_leader:
            about = {"fleet": summary.fleet, "cycle.id": summary.cycle_id, "decision": summary.decision}
            counts = {**(summary.actions or {}), **(summary.status or {})}
            traces.note("cycle", summary.duration_s, {**about, **counts}, summary.hold)

    watchers.append(note)
    try:
        yield
    finally:
        await asyncio.to_thread(traces.close)
