"""What fleets whose tasks Ray places need beside their cycles."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

from windlass.model.config import Config
from windlass.model.errors import ConfigError
from windlass.model.fleet import FleetConfig
from windlass.store.connect import COMMAND_TIMEOUT_S
from windlass.store.database import Database
from windlass.store.transport import open_postgres_transport
from windlass.wiring.signals import on_stop_signals
from windlass.wiring.stores import data_dir, database
from windlass.wiring.tracing import trace_attempts

if TYPE_CHECKING:
    from windlass.model.work_order import RayHead
    from windlass.ray.node import NodeSettings
    from windlass.ray.supervisor import ProgramSupervisor, SupervisedProgram
    from windlass.worker.lifecycle import ExitReason

# A cluster that is there answers at once.
GREETING_LIMIT_S = 20.0
# What lets a machine into a cluster, by Ray's own names.
_RAY_CREDENTIALS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_gcs_rpc_server_reconnect_timeout_s")

# What a dispatcher goes by of its fleet's settings (Dispatcher, and run_dispatcher below), and so is told. The rest, as
# how many are hired, is not its business and may change under it.
_OF_DISPATCHERS = (
    *("provider", "engine", "queues", "handler", "exec", "chdir", "ray", "concurrency"),
    *("heartbeat_interval_s", "heartbeat_timeout_s", "stop_timeout_s"),
)


async def run_node(config: Config, settings: "NodeSettings") -> "ExitReason":
    """A node of the Ray cluster over the database, until it is told to end."""
    from windlass.ray.node import Node

    async with database(config) as dsn:
        return await Node(
            settings, lambda: open_postgres_transport(dsn, retention=config.retention, max_connections=2)
        ).run()


async def run_dispatcher(config: Config, fleet: str, chosen: FleetConfig, version: str) -> int:
    """A fleet's dispatcher, until told to stop. Returns the exit code: after 3 it is to be started again.

    `chosen`: the fleet's settings.
    """
    import structlog

    from windlass.model.lease import LeaseLost
    from windlass.ray.dispatcher import Dispatch, Dispatcher, HeadLost
    from windlass.ray.versions import MATCH_MINOR
    from windlass.store.ray import PostgresRayStore

    if config.ray_address is None:
        raise AssertionError("whoever dispatches has a cluster")
    if chosen.chdir is not None:
        os.chdir(chosen.chdir)
    os.environ.update(MATCH_MINOR)  # where Ray, which we drive in this process, looks
    async with (
        database(config) as dsn,
        Database(dsn, retention=config.retention, max_connections=4) as opened,
        trace_attempts(config, version) as traced,
    ):
        dispatcher = Dispatcher(
            Dispatch(
                fleet,
                chosen,
                config.ray_address,
                max_result_bytes=config.max_payload_bytes,
                timeout_s=config.worker.timeout_s,
                version=version,
            ),
            PostgresRayStore(opened),
            lambda: open_postgres_transport(
                dsn,
                retention=config.retention,
                max_connections=2,
                command_timeout_s=min(COMMAND_TIMEOUT_S, chosen.heartbeat_timeout_s / 2),
            ),
            traced,
        )
        await dispatcher.connect()
        # Now, because Ray takes signals for itself when it connects.
        on_stop_signals(dispatcher.stop)
        try:
            await dispatcher.run()
        except (HeadLost, LeaseLost) as error:
            structlog.get_logger(__name__).error("dispatching ended", fleet=fleet, error=str(error))
            return 3
    return 0


def placed_by_ray(config: Config) -> dict[str, FleetConfig]:
    return {name: fleet for name, fleet in config.fleets.items() if fleet.engine == "ray"}


async def check_ray(config: Config) -> None:
    """Raise ConfigError where nodes could not work with us, or with their cluster; WindlassError if it is not there."""
    fleets = placed_by_ray(config)
    if not fleets:
        return
    from windlass.ray.probe import greet
    from windlass.ray.versions import check_node_image, check_versions, our_versions

    ours = our_versions()
    for name, fleet in fleets.items():
        if fleet.provider == "hetzner":
            check_node_image(ours, fleet.hetzner.image, name)
        if fleet.provider == "ray" and config.ray_address is None:
            raise ConfigError(
                f"the tasks of fleet {name} run on a Ray cluster that is there already, but where is not known: "
                "set RAY_ADDRESS to its head, as 10.0.0.5:6379."
            )
    if config.ray_address is not None:
        where = f"the Ray head at {config.ray_address}"
        check_versions(ours, await greet(config.ray_address, GREETING_LIMIT_S), where)


class RaySupervisor:
    """What fleets with engine = "ray" need beside their cycles: a head, one for all who share the database, and a
    dispatcher each."""

    def __init__(
        self,
        programs: "ProgramSupervisor",
        use_head: Callable[[Config], AbstractAsyncContextManager[str]],
        until_end: contextlib.AsyncExitStack,
    ) -> None:
        """`use_head`: gives the address of the head that was given, or of our own, and the right to it. Entered for the
        first fleet that needs one, not before: RAY_ADDRESS may be there for others. Left with `until_end`."""
        self._programs = programs
        self._use_head = use_head
        self._until_end = until_end
        self._arranged: dict[str, FleetConfig] = {}
        # Of the head in use.
        self.address: str | None = None

    async def check(self, config: Config) -> None:
        """Before it is rearranged. Raises ConfigError, WindlassError."""
        fleets = placed_by_ray(config)
        if fleets and (config.ray_address or self.address) is None:
            raise ConfigError(
                f"fleet {next(iter(fleets))} is the first whose tasks Ray places, and there is no Ray head yet: start "
                "`windlass up` again, which starts one."
            )
        if fleets and self.address is not None and config.ray_address not in (None, self.address):
            raise ConfigError(
                f"nodes join the Ray head at {self.address}, and ray_address is now {config.ray_address}: start "
                "`windlass up` again to change clusters."
            )
        if fleets != self._arranged:
            await check_ray(config.model_copy(update={"ray_address": self.address or config.ray_address}))

    @asynccontextmanager
    async def rearranged(self, config: Config) -> AsyncIterator[str | None]:
        """The address of the head for these fleets, if one is known. When this ends well each of them has a dispatcher:
        those whose settings have changed, and those not wanted any more, end in good order. Otherwise nothing has
        changed. Raises ConfigError if another orchestrator has a head of its own."""
        address = self.address
        async with contextlib.AsyncExitStack() as taken:
            if address is None and placed_by_ray(config):
                address = await taken.enter_async_context(self._use_head(config))
            programs = dispatchers(config, address) if address is not None else {}
            yield address or config.ray_address
            self._until_end.push_async_exit(taken.pop_all())
        self.address, self._arranged = address, placed_by_ray(config)
        self._programs.arrange(programs)

    def head(self) -> "RayHead | None":
        """For machines that join it. Its versions are ours: that was checked."""
        if self.address is None or not self._arranged:
            return None
        from windlass.model.work_order import RayHead
        from windlass.ray.versions import our_versions

        ours = our_versions()
        env = {name: os.environ[name] for name in _RAY_CREDENTIALS if name in os.environ}
        return RayHead(self.address, ours.ray, ours.python, env)


@asynccontextmanager
async def ray_beside(config: Config, dsn: str) -> AsyncIterator[RaySupervisor]:
    """For as long as this is open. Raises ConfigError if the cluster is not one we can work with, or if another
    orchestrator has one of its own."""
    from windlass.ray.supervisor import ProgramSupervisor

    owner, programs = asyncio.current_task(), ProgramSupervisor()
    await check_ray(config)
    async with contextlib.AsyncExitStack() as until_end:
        beside = RaySupervisor(programs, lambda needed: _one_head(needed, dsn, owner), until_end)
        try:
            async with beside.rearranged(config):
                pass
            yield beside
        finally:
            # Before the head goes, and the right to it: they finish what runs.
            await programs.close()


@asynccontextmanager
async def _one_head(config: Config, dsn: str, owner: "asyncio.Task[Any] | None") -> AsyncIterator[str]:
    """The address of the one that was given, or of our own. `owner`: as sole_head has it."""
    from windlass.ray.head import kept_head
    from windlass.ray.head_lease import given_head, sole_head
    from windlass.store.leases import PostgresLeaseStore

    async with Database(dsn, retention=config.retention, max_connections=1) as opened:
        store = PostgresLeaseStore(opened)
        if config.ray_address is not None:
            async with given_head(store, owner=owner):
                yield config.ray_address
        else:
            async with sole_head(store, owner=owner), kept_head(config.control_plane_ip) as head:
                yield head.address


def dispatchers(config: Config, address: str) -> "dict[str, SupervisedProgram]":
    """By the fleet's name. Each is told all that it goes by and reads no file, which might have changed since."""
    from windlass.config_loader import environment_of
    from windlass.ray.supervisor import SupervisedProgram

    told = environment_of(config, "worker", "retention", "max_payload_bytes", "logs")
    environment = {**os.environ, **told, "RAY_ADDRESS": address}
    if config.database_url is not None:
        # Not on the command line, which everybody on this host can read.
        environment["DATABASE_URL"] = config.database_url.get_secret_value()
        environment.pop("WINDLASS_DATABASE_URL", None)
    return {
        name: SupervisedProgram(tuple(_dispatch_command(name, fleet, config)), environment, fleet.stop_timeout_s)
        for name, fleet in placed_by_ray(config).items()
    }


def _dispatch_command(name: str, fleet: FleetConfig, config: Config) -> list[str]:
    command = [sys.executable, "-P", "-m", "windlass", "ray", "dispatch", "--fleet", name, "--log-format", "json"]
    command += ["--settings", fleet.model_dump_json(include=set(_OF_DISPATCHERS)), "--config", os.devnull]
    if config.database_url is None:
        command += ["--data-dir", str(data_dir(config).absolute())]
    return command
