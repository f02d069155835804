"""What fleets whose tasks Ray places need beside their cycles."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from windlass.model.config import Config
from windlass.model.errors import ConfigError
from windlass.store.connect import COMMAND_TIMEOUT_S
from windlass.store.postgres import PostgresStore
from windlass.wire.stores import data_dir, database

if TYPE_CHECKING:
    from windlass.configure import Loaded
    from windlass.engine.node import NodeSettings
    from windlass.model.order import RayHead
    from windlass.worker.runtime import Ending

# A cluster that is there answers at once.
GREETING_LIMIT_S = 20.0
# What lets a machine into a cluster, by Ray's own names.
_RAY_CREDENTIALS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_gcs_rpc_server_reconnect_timeout_s")


async def run_node(config: Config, settings: "NodeSettings") -> "Ending":
    """A node of the Ray cluster over the database, until it is told to end."""
    from windlass.engine.node import Node

    async with database(config) as dsn:
        return await Node(settings, lambda: PostgresStore(dsn, retention=config.retention, max_connections=2)).run()


async def run_dispatcher(config: Config, fleet: str, version: str) -> int:
    """A fleet's dispatcher, until told to stop. Returns the exit code: after 3 it is to be started again."""
    import structlog

    from windlass.engine.dispatcher import Dispatch, Dispatcher, HeadLost
    from windlass.engine.versions import MATCH_MINOR
    from windlass.ports.control import LeaseLost
    from windlass.store.engine import PostgresEngineStore

    chosen = config.fleets[fleet]
    if config.ray_address is None:
        raise AssertionError("whoever dispatches has a cluster")
    if chosen.chdir is not None:
        os.chdir(chosen.chdir)
    os.environ.update(MATCH_MINOR)  # where Ray, which we drive in this process, looks
    async with (
        database(config) as dsn,
        PostgresEngineStore(dsn, retention=config.retention, max_connections=4) as opened,
    ):
        dispatcher = Dispatcher(
            Dispatch(
                fleet,
                chosen,
                config.ray_address,
                is_foreign=chosen.provider == "ray",
                max_result_bytes=config.max_payload_bytes,
                timeout_s=config.worker.timeout_s,
                version=version,
            ),
            opened,
            lambda: PostgresStore(
                dsn,
                retention=config.retention,
                max_connections=2,
                command_timeout_s=min(COMMAND_TIMEOUT_S, chosen.heartbeat_timeout_s / 2),
            ),
        )
        await dispatcher.connect()
        # Now, because Ray takes signals for itself when it connects.
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, dispatcher.stop)
        try:
            await dispatcher.run()
        except (HeadLost, LeaseLost) as error:
            structlog.get_logger(__name__).error("dispatching ended", fleet=fleet, error=str(error))
            return 3
    return 0


@asynccontextmanager
async def ray_beside(loaded: "Loaded") -> AsyncIterator[Config]:
    """What fleets with engine = "ray" need beside their cycles: a head, if there is none, and a dispatcher each. The
    configuration, with the head's address. Raises ConfigError if the cluster is not one we can work with."""
    config = loaded.config
    fleets = {name: fleet for name, fleet in config.fleets.items() if fleet.engine == "ray"}
    if not fleets:
        yield config
        return
    from windlass.engine.greet import greet
    from windlass.engine.head import kept_head
    from windlass.engine.supervise import kept_running
    from windlass.engine.versions import check_node_image, check_versions, our_versions

    ours = our_versions()
    for name, fleet in fleets.items():
        if fleet.provider == "hetzner":
            check_node_image(ours, fleet.hetzner.image, name)
    async with contextlib.AsyncExitStack() as stack:
        if config.ray_address is None:
            foreign = next((name for name, fleet in fleets.items() if fleet.provider == "ray"), None)
            if foreign is not None:
                raise ConfigError(
                    f"the tasks of fleet {foreign} run on a Ray cluster that is there already, but where is not known: "
                    "set RAY_ADDRESS to its head, as 10.0.0.5:6379."
                )
            head = await stack.enter_async_context(kept_head(config.control_plane_ip))
            config = config.model_copy(update={"ray_address": head.address})
        address = config.ray_address
        if address is None:
            raise AssertionError("either given or started")
        check_versions(ours, await greet(address, GREETING_LIMIT_S), f"the Ray head at {address}")
        for name, fleet in fleets.items():
            await stack.enter_async_context(
                kept_running(
                    f"dispatcher of {name}",
                    _dispatch_command(loaded, name),
                    {**os.environ, **_given_on_command_line(loaded, name), "RAY_ADDRESS": address},
                    fleet.stop_timeout_s,
                )
            )
        yield config


def ray_head(config: Config) -> "RayHead | None":
    """For the machines of fleets whose tasks Ray places. Its versions are ours: that was checked."""
    if config.ray_address is None or not any(fleet.engine == "ray" for fleet in config.fleets.values()):
        return None
    from windlass.engine.versions import our_versions
    from windlass.model.order import RayHead

    ours = our_versions()
    env = {name: os.environ[name] for name in _RAY_CREDENTIALS if name in os.environ}
    return RayHead(config.ray_address, ours.ray, ours.python, env)


def _dispatch_command(loaded: "Loaded", fleet: str) -> list[str]:
    command = [sys.executable, "-P", "-m", "windlass", "ray", "dispatch", "--fleet", fleet, "--log-format", "json"]
    if loaded.file is not None:
        command += ["--config", str(loaded.file.absolute())]
    if loaded.config.database_url is None:
        command += ["--data-dir", str(data_dir(loaded.config).absolute())]
    return command


def _given_on_command_line(loaded: "Loaded", fleet: str) -> dict[str, str]:
    """What `up` was told of the fleet beyond its file, as environment."""
    from windlass.configure import variable_of

    section = loaded.config.fleets[fleet]
    plain = section.model_dump(mode="json")
    told = {
        key[2]: plain[key[2]]
        for key, source in loaded.sources.items()
        if key[:2] == ("fleets", fleet) and source == "command line"
    }
    return {
        variable_of(("fleets", fleet, name)): ",".join(value) if isinstance(value, list) else str(value)
        for name, value in told.items()
    }
