"""`windlass up` and `windlass serve` as programs: what is done first, and the processes that then run.

First the port is bound, so that a port in use is reported at once; then the embedded database starts and the schema is
migrated. Everything after that happens in processes of their own (wiring/supervisor.py): one with the control loop, and
servers that share the listening socket.
"""

import asyncio
import functools
import gc
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from windlass.config_loader import Loaded
from windlass.model.config import Config
from windlass.model.errors import BadInput
from windlass.model.process import ProcessKind
from windlass.wiring.http_server import OnDashboard, load_tls, open_listener, warn_of_open_reading
from windlass.wiring.log_sink import Tap
from windlass.wiring.ray import set_ray_credentials
from windlass.wiring.reload import merge_for_servers
from windlass.wiring.signals import run_until_terminated
from windlass.wiring.stores import check_embedded_database_is_there, database, open_embedded_database
from windlass.wiring.supervised_process import ProcessRole
from windlass.wiring.supervisor import Supervisor
from windlass.wiring.terminal import ControllingTerminal
from windlass.wiring.up import (
    ControlOptions,
    check_start,
    prepare_schema,
    run_control,
    running_dashboards,
    warn_of_owner_rights,
)

if TYPE_CHECKING:
    from windlass.store.embedded import EmbeddedPostgres

# The event loop of a server answers within milliseconds. Its clients wait for at most this long, and then reconnect.
SERVER_SILENCE_S = 5.0
# The control loop plans for thousands of workers at once. While it is silent, workers go on.
CONTROL_SILENCE_S = 15.0
_MB = 1 << 20


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """`on_dashboard` is called once. `on_config` gets each reloaded configuration. `tap`: of log lines."""

    version: str
    on_dashboard: OnDashboard
    on_config: Callable[[Config], None] = lambda _config: None
    tap: Tap = lambda _receiver: lambda: None


@dataclass(frozen=True, slots=True)
class _Prepared:
    config: Config
    listener: socket.socket | None
    database: "EmbeddedPostgres | None"
    # By host: dashboards of other programs on the same database.
    dashboards: Mapping[str, str] = field(default_factory=dict)


def run_up(control: ControlOptions, serve: ServeOptions, *, has_servers: bool = True) -> int:
    """Run the fleets of the configuration, and servers if it has a port, until stopped. Returns the exit code.

    SIGTERM and Ctrl-C shut the fleets down, a second one ends now, SIGHUP reloads the configuration.
    """

    async def prepare() -> _Prepared:
        config = control.load().config
        await check_start(config)
        listener = open_listener(config) if has_servers else None
        if listener is not None:
            load_tls(config.api)  # raises ConfigError before anything is started
            _import_server()
        embedded = await open_embedded_database(config)
        try:
            async with database(config) as dsn:
                await prepare_schema(dsn)
                dashboards = await running_dashboards(dsn)
                # Only this user of the host can connect to the embedded database.
                if config.database_url is not None:
                    await warn_of_owner_rights(dsn)
        except BaseException:
            if embedded is not None:
                embedded.close()
            raise
        set_ray_credentials(config)
        return _Prepared(config, listener, embedded, dashboards)

    terminal = ControllingTerminal()
    with _remembered_reloads() as reloads:
        prepared = asyncio.run(run_until_terminated(prepare()))
        control.on_start()
        listener = prepared.listener
        role = ProcessRole(
            ProcessKind.CONTROL,
            0,
            functools.partial(run_control, options=control, dashboards=prepared.dashboards),
            CONTROL_SILENCE_S,
            closes=(listener,) if listener is not None else (),
        )
        servers = _server_roles(prepared.config, listener, serve) if listener is not None else []
        return _supervise(prepared, [role, *servers], lambda: control.load().config, terminal, reloads)


def run_serve(load: Callable[[], Loaded], serve: ServeOptions, on_start: Callable[[], None] = lambda: None) -> int:
    """Run servers alone, until stopped. The control loop runs elsewhere. Returns the exit code.

    `on_start` is called when everything was checked.
    """

    async def prepare() -> _Prepared:
        config = load().config
        if config.api.port is None:
            raise BadInput("no port is configured: give --port, or set api.port.")
        listener = open_listener(config)
        load_tls(config.api)
        _import_server()
        if config.database_url is None:
            check_embedded_database_is_there(config)
        return _Prepared(config, listener, await open_embedded_database(config))

    terminal = ControllingTerminal()
    with _remembered_reloads() as reloads:
        prepared = asyncio.run(run_until_terminated(prepare()))
        assert prepared.listener is not None  # noqa: S101
        on_start()
        roles = _server_roles(prepared.config, prepared.listener, serve)

        def reload() -> Config:
            config = merge_for_servers(prepared.config, load().config)
            serve.on_config(config)
            return config

        return _supervise(prepared, roles, reload, terminal, reloads)


def server_process_count(config: Config) -> int:
    """One for every two cores: the database and the workers need the others."""
    if config.api.processes is not None:
        return config.api.processes
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // 2)


def _import_server() -> None:
    """Load FastAPI and the rest before the first fork: the processes share it, and restart without importing."""
    import windlass.wiring.server_process  # noqa: F401


def _server_roles(config: Config, listener: socket.socket, serve: ServeOptions) -> list[ProcessRole]:
    import uvloop

    from windlass.server.wheel import build_wheel
    from windlass.wiring.server_process import ServerOptions, run_server

    warn_of_open_reading(config.api)
    # Built once at the start: later the files on disk may be of another version.
    options = ServerOptions(serve.version, build_wheel(), serve.on_dashboard, serve.on_config, serve.tap)
    return [
        ProcessRole(
            ProcessKind.SERVER,
            number,
            functools.partial(run_server, number=number, listener=listener, options=options),
            SERVER_SILENCE_S,
            config.api.max_memory_mb * _MB,
            loop_factory=uvloop.new_event_loop,
        )
        for number in range(server_process_count(config))
    ]


def _supervise(
    prepared: _Prepared,
    roles: list[ProcessRole],
    reload: Callable[[], Config],
    terminal: ControllingTerminal,
    reloads: list[int],
) -> int:
    embedded = prepared.database
    # Objects that live as long as the program: a collection in a fork would copy their memory.
    gc.collect()
    gc.freeze()
    supervisor = Supervisor(
        roles,
        prepared.config,
        reload=reload,
        terminal=terminal,
    )
    if reloads:
        supervisor.request_reload()
    try:
        return supervisor.run()
    finally:
        if prepared.listener is not None:
            prepared.listener.close()
        if embedded is not None:
            embedded.close()


@contextmanager
def _remembered_reloads() -> Iterator[list[int]]:
    """SIGHUP during the start is handled once everything runs."""
    received: list[int] = []
    previous = signal.signal(signal.SIGHUP, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        signal.signal(signal.SIGHUP, previous)
