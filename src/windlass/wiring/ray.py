"""Builds the parts of fleets with `engine = "ray"`: node programs, dispatchers, and the head they share.

`windlass up` runs a RaySupervisor: it holds the lease of the head, runs a head if none is given by RAY_ADDRESS, and
keeps one dispatcher process per fleet running.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import structlog

from windlass.config_loader import environment_of
from windlass.model.config import Config
from windlass.model.errors import ConfigError
from windlass.model.fleet import FleetConfig
from windlass.model.lease import LeaseLost
from windlass.model.process import RayHeadAddress
from windlass.model.redaction import add_known_secrets
from windlass.ray.dispatcher import Dispatcher, DispatcherSettings
from windlass.ray.head import head_credentials, run_head
from windlass.ray.head_lease import hold_head_lease
from windlass.ray.node import NodeProgram, NodeSettings
from windlass.ray.node_watch import HeadLost
from windlass.ray.probe import probe_head
from windlass.ray.supervisor import ProgramSupervisor, SupervisedProgram
from windlass.ray.versions import MATCH_MINOR_ENV, check_node_image, check_versions, our_versions
from windlass.store.connection import COMMAND_TIMEOUT_S
from windlass.store.database import Database
from windlass.store.doctor_checks import ORCHESTRATOR, WORKER
from windlass.store.leases import PostgresLeaseStore
from windlass.store.ray import PostgresRayStore
from windlass.store.transport import open_postgres_transport
from windlass.wiring.signals import on_stop_signals
from windlass.wiring.stores import data_dir, database_as
from windlass.wiring.tracing import trace_attempts
from windlass.wiring.worker import output_limits, worker_output
from windlass.worker.lifecycle import ExitReason

# A running head responds at once.
PROBE_TIMEOUT_S = 20.0
# Exit code of a dispatcher that should be started again.
EXIT_RESTART = 3
# Ray's environment variables that admit a machine to a cluster.
_RAY_CREDENTIALS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_gcs_rpc_server_reconnect_timeout_s")
# The fleet settings that a dispatcher uses. The others, such as max_workers, may change without restarting it.
_DISPATCHER_SETTINGS = {
    *("provider", "engine", "queues", "handler", "exec", "chdir", "ray", "concurrency", "redact"),
    *("heartbeat_interval_s", "heartbeat_timeout_s", "stop_timeout_s"),
}
log = structlog.get_logger(__name__)


async def run_node(config: Config, settings: NodeSettings, *, secret: str | None) -> ExitReason:
    """Run a node of the Ray cluster that connects to the database, until it is drained or stopped."""
    if secret is not None:
        add_known_secrets([secret])
    async with database_as(WORKER, config) as dsn:
        with worker_output(config.logs, settings.queues, redact=()) as output:
            return await NodeProgram(
                settings,
                lambda: open_postgres_transport(dsn, secret=secret, retention=config.retention, max_connections=2),
                output,
            ).run()


async def run_dispatcher(config: Config, fleet: str, fleet_config: FleetConfig, version: str) -> int:
    """Run a fleet's dispatcher until stopped. Returns the exit code."""
    if config.ray_address is None:
        raise AssertionError("the caller checks ray_address")
    if fleet_config.chdir is not None:
        os.chdir(fleet_config.chdir)
    os.environ.update(MATCH_MINOR_ENV)  # for Ray in this process
    async with (
        database_as(ORCHESTRATOR, config) as dsn,
        Database(dsn, retention=config.retention, max_connections=4) as opened,
        trace_attempts(config, version) as trace,
    ):
        dispatcher = Dispatcher(
            DispatcherSettings(
                fleet,
                fleet_config,
                config.ray_address,
                max_result_bytes=config.max_payload_bytes,
                timeout_s=config.worker.timeout_s,
                output=output_limits(config.logs),
                version=version,
            ),
            PostgresRayStore(opened),
            lambda: open_postgres_transport(
                dsn,
                retention=config.retention,
                max_connections=2,
                command_timeout_s=min(COMMAND_TIMEOUT_S, fleet_config.heartbeat_timeout_s / 2),
            ),
            trace,
        )
        await dispatcher.connect()
        # After connect(), in which Ray installs its own signal handlers.
        on_stop_signals(dispatcher.stop)
        try:
            await dispatcher.run()
        except (HeadLost, LeaseLost) as error:
            log.error("stop dispatcher", fleet=fleet, error=str(error))
            return EXIT_RESTART
    return 0


def ray_fleets(config: Config) -> dict[str, FleetConfig]:
    return {name: fleet for name, fleet in config.fleets.items() if fleet.engine == "ray"}


async def check_ray(config: Config) -> None:
    """Raise ConfigError if nodes could not work with this host or the cluster, WindlassError if it is unavailable."""
    fleets = ray_fleets(config)
    if not fleets:
        return
    ours = our_versions()
    for name, fleet in fleets.items():
        if fleet.provider == "hetzner":
            check_node_image(ours, fleet.hetzner.image, name)
        if fleet.provider == "ray" and config.ray_address is None:
            raise ConfigError(
                f'fleet {name} has provider = "ray" and no cluster: set RAY_ADDRESS to the address of its head, for '
                "example 10.0.0.5:6379."
            )
    if config.ray_address is not None:
        head_versions = await probe_head(config.ray_address, PROBE_TIMEOUT_S)
        check_versions(ours, head_versions, f"the Ray head at {config.ray_address}")


class RaySupervisor:
    """The head and the dispatchers of all fleets with `engine = "ray"`, which change with the configuration."""

    def __init__(
        self,
        programs: ProgramSupervisor,
        use_head: Callable[[Config], AbstractAsyncContextManager[str]],
        resources: contextlib.AsyncExitStack,
    ) -> None:
        """`use_head` gives the address of the external head or of our own, and holds its lease.

        It is entered for the first fleet that needs a head, not before: RAY_ADDRESS may be set for other reasons. It is
        left with `resources`.
        """
        self._programs = programs
        self._use_head = use_head
        self._resources = resources
        self._fleets: dict[str, FleetConfig] = {}
        # Address of the head in use.
        self.address: str | None = None

    async def check(self, config: Config) -> None:
        """Call before reconfigured(). Raises ConfigError, WindlassError."""
        fleets = ray_fleets(config)
        if fleets and (config.ray_address or self.address) is None:
            raise ConfigError(
                f"fleet {next(iter(fleets))} needs a Ray head, and none is running: restart `windlass up` to start one."
            )
        if fleets and self.address is not None and config.ray_address not in (None, self.address):
            raise ConfigError(
                f"ray_address changed from {self.address} to {config.ray_address}: restart `windlass up` to change the "
                "cluster."
            )
        if fleets != self._fleets:
            await check_ray(config.model_copy(update={"ray_address": self.address or config.ray_address}))

    @asynccontextmanager
    async def reconfigured(self, config: Config) -> AsyncIterator[str | None]:
        """Give the address of the head for these fleets, if there is one, and apply the configuration at the end.

        Without an exception in the context, each fleet then has a dispatcher; those with changed settings restart, and
        those of other fleets stop. After an exception nothing has changed. Raises ConfigError if another orchestrator
        has a head of its own.
        """
        address = self.address
        async with contextlib.AsyncExitStack() as acquired:
            if address is None and ray_fleets(config):
                address = await acquired.enter_async_context(self._use_head(config))
            programs = dispatcher_programs(config, address) if address is not None else {}
            yield address or config.ray_address
            self._resources.push_async_exit(acquired.pop_all())
        self.address, self._fleets = address, ray_fleets(config)
        self._programs.set_programs(programs)

    def head_address(self) -> RayHeadAddress | None:
        """The head that spawned machines join. Its versions were checked to be ours."""
        if self.address is None or not self._fleets:
            return None
        ours = our_versions()
        return RayHeadAddress(self.address, ours.ray, ours.python)


def ray_credentials() -> dict[str, str]:
    """The variables in the environment of this process with which a machine joins the cluster."""
    return {name: os.environ[name] for name in _RAY_CREDENTIALS if name in os.environ}


def set_ray_credentials(config: Config) -> None:
    """Set the credentials of the Ray head that `up` will start, if it needs one, for all processes of this program.

    They are never stored. A server elsewhere needs the same variables in its environment.
    """
    if ray_fleets(config) and config.ray_address is None:
        os.environ.update(head_credentials())


@asynccontextmanager
async def run_ray_supervisor(config: Config, dsn: str, holder: str) -> AsyncIterator[RaySupervisor]:
    """Run head and dispatchers inside the context. Raises ConfigError if the cluster cannot be used.

    `holder`: the name of this process in leases.
    """
    owner, programs = asyncio.current_task(), ProgramSupervisor()
    await check_ray(config)
    async with contextlib.AsyncExitStack() as resources:
        supervisor = RaySupervisor(programs, lambda needed: _use_head(needed, dsn, holder, owner), resources)
        try:
            async with supervisor.reconfigured(config):
                pass
            yield supervisor
        finally:
            # Before the head stops and its lease is released: dispatchers finish their running tasks.
            await programs.close()


@asynccontextmanager
async def _use_head(config: Config, dsn: str, holder: str, owner: "asyncio.Task[Any] | None") -> AsyncIterator[str]:
    async with contextlib.AsyncExitStack() as stack:
        opened = await stack.enter_async_context(Database(dsn, retention=config.retention, max_connections=1))
        is_shared = config.ray_address is not None
        lease = hold_head_lease(PostgresLeaseStore(opened), is_shared=is_shared, owner=owner, holder=holder)
        await stack.enter_async_context(lease)
        if config.ray_address is not None:
            yield config.ray_address
        else:
            yield (await stack.enter_async_context(run_head(config.control_plane_ip))).address


def dispatcher_programs(config: Config, address: str) -> dict[str, SupervisedProgram]:
    """The dispatchers by fleet. Command and environment have all their settings: the file may change later."""
    settings = environment_of(config, "worker", "retention", "max_payload_bytes", "logs")
    environment = {**os.environ, **settings, "RAY_ADDRESS": address}
    options = ["--log-format", "json", "--config", os.devnull]
    if config.database_url is None:
        options += ["--data-dir", str(data_dir(config).absolute())]
    else:
        # In the environment, because every user of the host can read command lines.
        environment["DATABASE_URL"] = config.database_url.get_secret_value()
        environment.pop("WINDLASS_DATABASE_URL", None)
    programs = {}
    for name, fleet in ray_fleets(config).items():
        command = [sys.executable, "-P", "-m", "windlass", "ray", "dispatch", "--fleet", name]
        command += ["--settings", fleet.model_dump_json(include=_DISPATCHER_SETTINGS), *options]
        programs[name] = SupervisedProgram(tuple(command), environment, fleet.stop_timeout_s)
    return programs
