"""The orchestrator: every fleet's cycles, once or until told to stop, and all that goes on beside them."""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windlass.model.config import Config
from windlass.model.errors import ConfigError, DatabaseUnavailable, WindlassError
from windlass.store.migrate import migrate
from windlass.wire.engine import RayBeside, check_ray, ray_beside
from windlass.wire.face import http_face, open_listener
from windlass.wire.handlers import check_handlers
from windlass.wire.providers import check_keys, check_machines_can_call, hiring_fleets, provider
from windlass.wire.receivers import receivers
from windlass.wire.stores import control_store, database, described_database

if TYPE_CHECKING:
    from windlass.configure import Loaded
    from windlass.control.cycle import FleetCycle
    from windlass.control.summary import Summary
    from windlass.control.up import Up
    from windlass.model.fleet import FleetConfig
    from windlass.ports.alarm import Receiver
    from windlass.ports.control import Candidate
    from windlass.store.control import PostgresControlStore

# Without a leader for so many leases before people are told: a restart and a failover take one.
LEADER_GRACE_LEASES = 2
# The settings with which machines are rented, beside those of their fleet.
ACCOUNTS = (
    "hetzner_api_token",
    "hetzner_endpoint",
    "hetzner_network_id",
    "runpod_api_key",
    "runpod_endpoint",
    "runpod_ssh_key_file",
)
NOT_RELOADED = "configuration not reloaded, nothing changed"
READ_AT_START = "settings have changed that are read at the start only: start `windlass up` again to use them"
# Hands every log line to whoever asks, until they call what they got for it.
Tap = Callable[[Callable[[Mapping[str, Any]], None]], Callable[[], None]]


async def run_cycles(config: Config) -> "list[Summary]":
    """One cycle of every fleet, then give the lead up: for cron and the like."""
    from windlass.control.cycle import run_once

    check_machines_can_call(config)
    check_keys(config)
    await check_ray(config)
    async with control_store(config) as store:
        ourselves, instance_id = candidate(config), await store.instance_id()
        try:
            return await run_once(
                [
                    fleet_cycle(name, fleet, config, store, ourselves, instance_id)
                    for name, fleet in hiring_fleets(config).items()
                ]
            )
        finally:
            await store.resign(ourselves)


@dataclass
class _Current:
    """What providers are made with: a reload changes the fleets, what their machines are rented with, and which Ray
    head there is while none is in use. All else is as at the start: it is in use."""

    config: Config
    # Of the Ray head, given or ours.
    ray_address: str | None

    def with_changes_of(self, loaded: Config, *, is_head_in_use: bool) -> Config:
        """Raises ConfigError for another database: no part of what is asked for can be had there."""
        for name in ("database_url", "data_dir"):
            if getattr(loaded, name) != getattr(self.config, name):
                raise ConfigError(
                    f"{name} is not what it was at the start, and all that runs keeps what it knows there: put it "
                    "back, or stop `windlass up` and start it again."
                )
        names = ("fleets", *ACCOUNTS, *(() if is_head_in_use else ("ray_address",)))
        return self.config.model_copy(update={name: getattr(loaded, name) for name in names})

    @contextmanager
    def changed_to(self, config: Config, ray_address: str | None) -> Iterator[None]:
        """From here on; unless this ends badly, for then it is as before."""
        before = self.config, self.ray_address
        self.config, self.ray_address = config, ray_address
        try:
            yield
        except BaseException:
            self.config, self.ray_address = before
            raise

    def of_providers(self) -> Config:
        return self.config.model_copy(update={"ray_address": self.ray_address})


async def run_up(
    load: "Callable[[], Loaded]",
    on_summary: "Callable[[Summary], None]",
    *,
    is_leaving_workers: bool,
    version: str,
    on_link: Callable[[str], None] = lambda _link: None,
    tap: Tap = lambda _taker: lambda: None,
) -> None:
    """Every fleet, until told to stop: SIGTERM and Ctrl-C end in good order, a second one at once; SIGHUP reloads.

    `load` is asked for the configuration now, and for each reload.
    `on_link` is told, once, the address that lets a person's browser in. `tap` hands log lines to whoever asks.
    """
    import structlog

    from windlass.control.up import Up
    from windlass.store.control import PostgresControlStore

    loop = asyncio.get_running_loop()
    # Before the file is read: whoever changes it while we start, and says so, is heard once we are up.
    is_reload_wanted = asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, is_reload_wanted.set)
    config = load().config
    check_machines_can_call(config)
    check_keys(config)
    await check_handlers(config)
    # Before anything else: a port that is taken ends the matter.
    listener = open_listener(config)
    async with (
        database(config) as dsn,
        _migrated(dsn),
        ray_beside(config, dsn) as ray,
        PostgresControlStore(dsn, retention=config.retention) as opened,
    ):
        ourselves, instance_id = candidate(config), await opened.instance_id()
        watchers, told = [on_summary], receivers(config)

        def tell_all(summary: "Summary") -> None:
            for tell in watchers:
                tell(summary)

        current = _Current(config, ray.address or config.ray_address)
        up = Up(
            opened,
            lambda name, fleet: fleet_cycle(name, fleet, current.of_providers(), opened, ourselves, instance_id),
            lambda name, fleet: provider(name, fleet, current.of_providers(), instance_id),
            tell_all,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lambda: up.stop(is_leaving_workers=is_leaving_workers))
        log = structlog.get_logger("windlass.up")
        log.info("up", database=described_database(config), fleets=list(config.fleets), pid=os.getpid())
        async with (
            _reloading(up, current, load, ray, is_reload_wanted),
            http_face(config, dsn, up, listener, version, watchers, on_link, ray.head, told) as counts,
            _alarm(config, dsn, watchers, told, counts.on_message),
            _logs_in_database(config, dsn, tap, counts.on_dropped),
            _traced_cycles(config, version, watchers),
        ):
            await up.run(hiring_fleets(config))
        with contextlib.suppress(DatabaseUnavailable):
            await opened.resign(ourselves)
        log.info("ended")


@asynccontextmanager
async def _migrated(dsn: str) -> AsyncIterator[None]:
    await migrate(dsn)
    yield


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
    from windlass.control.leader import holder_of_this_process
    from windlass.ports.control import Candidate

    return Candidate(holder_of_this_process(), config.control.lease_s)


@asynccontextmanager
async def _alarm(
    config: Config,
    dsn: str,
    watchers: "list[Callable[[Summary], None]]",
    told: "list[Receiver]",
    on_message: Callable[[str, str], None],
) -> AsyncIterator[None]:
    """People are told what is the matter for as long as this is open."""
    from windlass.control.alarm import Alarm
    from windlass.store.alarm import PostgresAlarmStore

    # Its own connections: whatever a receiver does, no cycle waits for one.
    async with PostgresAlarmStore(dsn, retention=config.retention, max_connections=2) as store:
        alarm = Alarm(
            store,
            told,
            dead_letters_allowed=config.alerts.dead_letters_per_hour,
            leader_grace_s=LEADER_GRACE_LEASES * config.control.lease_s,
            ignored=config.alerts.ignored,
            on_message=on_message,
        )
        watchers.append(alarm.note)
        telling = asyncio.create_task(alarm.run())
        try:
            yield
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)


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
        untap, writing = tap(sink.take), asyncio.create_task(sink.run())
        try:
            yield
        finally:
            untap()
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)


@asynccontextmanager
async def _traced_cycles(
    config: Config, version: str, watchers: "list[Callable[[Summary], None]]"
) -> AsyncIterator[None]:
    """Cycles are told to OpenTelemetry, if that is configured."""
    if config.logs.traces_endpoint is None:
        yield
        return
    from windlass.traces import Traces

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


@asynccontextmanager
async def _reloading(
    up: "Up", current: _Current, load: "Callable[[], Loaded]", ray: RayBeside, is_wanted: asyncio.Event
) -> AsyncIterator[None]:
    """The configuration is taken over as it is when that is wanted; wanted several times, while one is heeded, it is
    once more."""
    import structlog

    log = structlog.get_logger(__name__)

    async def heed() -> None:
        while True:
            await is_wanted.wait()
            is_wanted.clear()
            try:
                await _reconfigure(up, current, load, ray)
            except WindlassError as error:
                log.error(NOT_RELOADED, error=str(error))
            except Exception:
                # A defect; but without this loop nothing is ever reloaded again, and nobody is told why.
                log.exception(NOT_RELOADED)

    heeding = asyncio.create_task(heed())
    try:
        yield
    finally:
        heeding.cancel()
        await asyncio.gather(heeding, return_exceptions=True)


async def _reconfigure(up: "Up", current: _Current, load: "Callable[[], Loaded]", ray: RayBeside) -> None:
    """Fleets and their dispatchers as the configuration now is. Raises whatever is in the way; nothing is changed
    then."""
    import structlog

    from windlass.configure import differing_keys

    loaded = load().config
    config = current.with_changes_of(loaded, is_head_in_use=ray.address is not None)
    # Before anything is refused: what is missing may be among them.
    if ignored := differing_keys(config, loaded):
        structlog.get_logger(__name__).warning(READ_AT_START, settings=ignored)
    check_machines_can_call(config)
    check_keys(config)
    await check_handlers(config)
    await ray.check(loaded)
    has_new_accounts = any(getattr(config, name) != getattr(current.config, name) for name in ACCOUNTS)
    async with ray.rearranged(config) as ray_address:
        with current.changed_to(config, ray_address):
            up.reconfigure(hiring_fleets(config), has_new_accounts=has_new_accounts)
