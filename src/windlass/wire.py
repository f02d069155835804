"""The composition root: the only module that knows all the others and puts them together.

Each part is imported when it is asked for: a producer with a DATABASE_URL loads neither the worker nor the embedded
server, and a worker nothing that only people look at.
"""

import asyncio
import contextlib
import functools
import importlib.util
import itertools
import os
import random
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.model.address import masked, problem_of_control_plane_url
from windlass.model.config import Config
from windlass.model.errors import BadInput, ConfigError, DatabaseUnavailable, WindlassError
from windlass.store.connect import COMMAND_TIMEOUT_S, connected
from windlass.store.migrate import Migration, applied_migrations, migrate
from windlass.store.postgres import PostgresStore

if TYPE_CHECKING:
    from windlass.api.face import FleetPulse, Shown
    from windlass.api.live import Live
    from windlass.api.metrics import Metrics
    from windlass.configure import Loaded
    from windlass.control.cycle import FleetCycle
    from windlass.control.summary import Summary
    from windlass.control.up import Up
    from windlass.engine.node import NodeSettings
    from windlass.model.bootstrap import BootstrapSettings
    from windlass.model.fleet import FleetConfig
    from windlass.model.machine import MachineRequest
    from windlass.model.order import RayHead, RayOrder, WorkOrder
    from windlass.ports.alarm import Receiver
    from windlass.ports.control import Candidate
    from windlass.ports.provider import Provider
    from windlass.providers.hetzner import Account
    from windlass.providers.hetzner.limiter import Limiter
    from windlass.providers.remark import Remark
    from windlass.providers.runpod.account import Account as RunpodAccount
    from windlass.providers.runpod.limiter import Limiter as RunpodLimiter
    from windlass.providers.runpod.ssh import Identity
    from windlass.store.access import PostgresAccessStore
    from windlass.store.control import PostgresControlStore
    from windlass.store.examine import Examination
    from windlass.store.reading import PostgresReadingStore
    from windlass.worker.executor import Executor
    from windlass.worker.heartbeat import OpenTransport
    from windlass.worker.runtime import Ending, WorkerSettings

# Hands every log line to whoever asks, until they call what they got for it.
Tap = Callable[[Callable[[Mapping[str, Any]], None]], Callable[[], None]]

# Of the machine's memory: what all handlers of a worker may use together when nothing else is configured.
MEMORY_SHARE = 0.9
# A machine that has joined waits this long for a control plane that went away before it could register.
JOINED_REGISTRATION_TIMEOUT_S = 900.0
# Of each raylet on this host: they are many, and Ray's own choice is a third of the memory.
LOCAL_OBJECT_STORE_MB = 100
# Connections for all that comes over HTTP, apart from those of the control loop: no flood of calls delays a cycle.
API_CONNECTIONS = 8
# A loop that has not turned for so many of its intervals, and at least that long, is not ready.
MISSED_CYCLES = 3
MIN_MISSED_S = 60.0
# Retention of what only faces need is applied with every so many samples: once in five minutes.
SAMPLES_PER_SWEEP = 60
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def data_dir(config: Config) -> Path:
    from windlass.store.embedded import default_data_dir

    return (config.data_dir or default_data_dir()).expanduser()


def has_embedded_database(config: Config) -> bool:
    """Whether the data directory holds one already; opening it would make one."""
    try:
        return (data_dir(config) / "postgres" / "PG_VERSION").exists()
    except PermissionError:
        return True  # somebody else's: opening it says so


def described_database(config: Config) -> str:
    """Where the database is, without secrets."""
    if config.database_url is not None:
        return masked(config.database_url.get_secret_value())
    return f"embedded, in {data_dir(config)}"


def running_database_url(config: Config) -> str | None:
    """The address of the embedded database, if it runs now. Starts nothing."""
    from windlass.store.embedded import EmbeddedPostgres

    server = EmbeddedPostgres(data_dir(config))
    return server.dsn if server.is_running() else None


@contextmanager
def temporary_data_dir() -> Iterator[Path]:
    """A data directory that is gone afterwards, with all that is in it."""
    folder = make_temporary_folder("windlass-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_temporary_folder(prefix: str) -> Path:
    """For a data directory. Whoever asks deletes it."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=_temporary_place()))
    # Under root the server runs as somebody else, who must get through. What lies inside is closed to others.
    folder.chmod(0o711)
    return folder


def _temporary_place() -> Path:
    """Where temporary files go; under root, if others cannot get there (TMPDIR in root's home), /tmp."""
    place = Path(tempfile.gettempdir()).absolute()
    is_open = os.geteuid() != 0 or all(folder.stat().st_mode & 0o001 for folder in (place, *place.parents))
    return place if is_open else Path("/tmp")  # noqa: S108 - mkdtemp makes its own folder in it


@asynccontextmanager
async def database(config: Config, *, is_migrating: bool = True, may_create: bool = True) -> AsyncIterator[str]:
    """The address of the database, running for as long as this is open.

    The embedded one is brought up to date, unless `is_migrating` is false; any other is left as it is. For whoever only
    looks, `may_create` is false: BadInput if there is none yet.
    """
    if config.database_url is not None:
        yield config.database_url.get_secret_value()
        return
    if not may_create and not has_embedded_database(config):
        raise BadInput(
            f"there is no database in {data_dir(config)} yet: `windlass up`, `worker` or `enqueue` makes one; "
            "--data-dir or DATABASE_URL names another."
        )
    from windlass.store.embedded import EmbeddedPostgres

    server = EmbeddedPostgres(data_dir(config))
    try:
        await _in_thread(server.open)
        if is_migrating:
            await migrate_database(server.dsn)
        yield server.dsn
    finally:
        await _in_thread(server.close)


async def _in_thread(function: Callable[[], None]) -> None:
    """Once begun it is waited for, even when we are cancelled: only then can what it did be undone."""
    # Not in the loop's own threads: handlers may have taken all of them, for ever.
    thread = ThreadPoolExecutor(1)
    work = asyncio.get_running_loop().run_in_executor(thread, function)
    thread.shutdown(wait=False)
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


@asynccontextmanager
async def store(config: Config, *, max_connections: int = 4, may_create: bool = True) -> AsyncIterator[PostgresStore]:
    async with (
        database(config, may_create=may_create) as dsn,
        PostgresStore(dsn, retention=config.retention, max_connections=max_connections) as opened,
    ):
        yield opened


@asynccontextmanager
async def access_store(config: Config) -> "AsyncIterator[PostgresAccessStore]":
    from windlass.store.access import PostgresAccessStore

    async with database(config) as dsn, PostgresAccessStore(dsn, retention=config.retention) as opened:
        yield opened


@asynccontextmanager
async def control_store(
    config: Config, *, max_connections: int = 4, may_create: bool = True
) -> "AsyncIterator[PostgresControlStore]":
    from windlass.store.control import PostgresControlStore

    async with (
        database(config, may_create=may_create) as dsn,
        PostgresControlStore(dsn, retention=config.retention, max_connections=max_connections) as opened,
    ):
        yield opened


async def migrate_database(dsn: str) -> list[Migration]:
    return await migrate(dsn)


async def applied_migrations_of(dsn: str) -> dict[int, Any]:
    """Version to row of what the database has; changes nothing."""
    async with connected(dsn, "reading the schema's version") as connection, connection.transaction(readonly=True):
        return await applied_migrations(connection)


async def examine_database(dsn: str) -> "Examination":
    from windlass.store.examine import examine

    return await examine(dsn)


async def run_worker(
    config: Config, settings: "WorkerSettings", *, handler: str | None, command: str | None, is_inline: bool
) -> "Ending":
    """One worker over the database, until it is told to end."""
    from windlass.worker.runtime import WorkerRuntime

    executor = _executor(config, settings, handler=handler, command=command, is_inline=is_inline)
    async with database(config) as dsn, _traced(config, executor, settings) as traced:

        def open_transport() -> PostgresStore:
            return PostgresStore(
                dsn,
                retention=config.retention,
                # The loop and its look-out each need one connection at a time.
                max_connections=2,
                # After a lease the heartbeat gives back what it does not know of: a claim must be answered well before.
                command_timeout_s=min(COMMAND_TIMEOUT_S, settings.lease_s / 2),
            )

        return await WorkerRuntime(settings, open_transport, traced).run()


@asynccontextmanager
async def _traced(config: Config, executor: "Executor", settings: "WorkerSettings") -> "AsyncIterator[Executor]":
    """The same executor, whose attempts are told to OpenTelemetry if that is configured."""
    if config.logs.traces_endpoint is None:
        yield executor
        return
    from windlass.traces import Traces
    from windlass.worker.traced import TracedExecutor

    traces = Traces(config.logs.traces_endpoint, "windlass-worker", settings.version or "")
    try:
        yield TracedExecutor(executor, traces.note)
    finally:
        await asyncio.to_thread(traces.close)


async def run_joined_worker(join_file: Path, version: str) -> "Ending":
    """One worker over HTTP, until it is told to end. Raises TokenRefused if the control plane does not want it."""
    from windlass.model.config import LogsConfig, WorkerConfig
    from windlass.worker.http_transport import HttpTransport
    from windlass.worker.join import join
    from windlass.worker.runtime import WorkerRuntime, WorkerSettings

    membership, tls, order = await join(join_file)
    # For handlers, and for what they start.
    os.environ.update(order.env)
    if order.chdir is not None:
        try:
            os.chdir(order.chdir)
        except OSError as error:
            raise BadInput(
                f"cannot work in {order.chdir} ({error.strerror}): check chdir of fleet {order.fleet}."
            ) from None
    settings = WorkerSettings(
        queues=order.queues,
        fleet=order.fleet,
        concurrency=order.concurrency,
        heartbeat_interval_s=order.heartbeat_interval_s,
        lease_s=order.lease_s,
        timeout_s=order.timeout_s,
        drain_timeout_s=order.drain_timeout_s,
        registration_timeout_s=JOINED_REGISTRATION_TIMEOUT_S,
        worker_id=order.worker_id,
        version=version,
        storage_path=order.storage_path,
    )
    if order.ray is not None:
        return await _run_joined_node(order, order.ray, lambda: HttpTransport(membership, tls), version)
    config = Config(
        max_payload_bytes=order.max_payload_bytes,
        worker=WorkerConfig(memory_limit_mb=order.memory_limit_mb),
        # The only setting that a fleet's `env` may bring along: a machine far away has no windlass.toml.
        logs=LogsConfig(traces_endpoint=os.environ.get("WINDLASS_LOGS__TRACES_ENDPOINT") or None),
    )
    executor = _executor(config, settings, handler=order.handler, command=order.exec, is_inline=order.is_inline)
    if not order.is_inline:
        _stop_looking_for_sniffio()
    async with _traced(config, executor, settings) as traced:
        return await WorkerRuntime(settings, lambda: HttpTransport(membership, tls), traced).run()


def _stop_looking_for_sniffio() -> None:
    """httpcore asks for this module four times a request, and to look for it in vain takes a fifth of the request's
    time. From now on it is known not to be there; only for a process in which nobody else's code runs."""
    if importlib.util.find_spec("sniffio") is None:
        sys.modules["sniffio"] = None  # type: ignore[assignment]


async def _run_joined_node(
    order: "WorkOrder", ray: "RayOrder", open_transport: "OpenTransport", version: str
) -> "Ending":
    from windlass.engine.node import Node, NodeSettings
    from windlass.engine.versions import Versions

    settings = NodeSettings(
        worker_id=order.worker_id,
        fleet=order.fleet,
        queues=order.queues,
        address=ray.address,
        ray=ray.settings,
        concurrency=order.concurrency,
        heartbeat_interval_s=order.heartbeat_interval_s,
        lease_s=order.lease_s,
        registration_timeout_s=JOINED_REGISTRATION_TIMEOUT_S,
        version=version,
        head_versions=Versions(ray.ray_version, ray.python_version),
    )
    return await Node(settings, open_transport).run()


def _executor(
    config: Config, settings: "WorkerSettings", *, handler: str | None, command: str | None, is_inline: bool
) -> "Executor":
    limit_mb = config.worker.memory_limit_mb
    limit_bytes = limit_mb << 20 if limit_mb else int(_memory_bytes() * MEMORY_SHARE) // settings.concurrency
    if command is not None:
        from windlass.worker.command import CommandExecutor

        return CommandExecutor(command, memory_limit_bytes=limit_bytes, max_result_bytes=config.max_payload_bytes)
    if handler is None:
        raise BadInput("there is nothing to run: a worker needs a handler or a command.")
    if is_inline:
        from windlass.worker.inline import InlineExecutor

        return InlineExecutor(handler, max_result_bytes=config.max_payload_bytes)
    from windlass.worker.isolated import IsolatedExecutor

    return IsolatedExecutor(
        handler,
        concurrency=settings.concurrency,
        memory_limit_bytes=limit_bytes,
        max_result_bytes=config.max_payload_bytes,
    )


def _memory_bytes() -> int:
    """The memory of this machine, or of the container we are in if that is less."""
    import psutil

    total = int(psutil.virtual_memory().total)
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no cgroup, or "max"
        return total


# ------------------------------------------------------------------------------------------------------------- fleets


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


def provider(name: str, fleet: "FleetConfig", config: Config, instance_id: str) -> "Provider":
    """Who rents a fleet's machines. `instance_id`: the database's, with which they are tagged.

    Raises ConfigError if something is missing for that.
    """
    if fleet.provider == "hetzner":
        return _hetzner_provider(name, fleet, config, instance_id)
    if fleet.provider == "runpod":
        return _runpod_provider(name, fleet, config, instance_id)
    from windlass.configure import environment_of, secret_variables
    from windlass.providers.local import LocalProvider

    program = _node_program(fleet, config) if fleet.provider == "ray-local" else ("windlass", "worker")

    url = config.database_url.get_secret_value() if config.database_url is not None else None
    return LocalProvider(
        name,
        fleet,
        identity=instance_id,
        state_dir=data_dir(config),
        database_url=url,
        data_dir=data_dir(config) if url is None else None,
        settings=environment_of(config, "worker", "retention", "max_payload_bytes", "logs"),
        # All that a worker needs to know is where its database is.
        withheld=[name for name, key in secret_variables().items() if key != ("database_url",)],
        program=program,
    )


def _hetzner_provider(name: str, fleet: "FleetConfig", config: Config, instance_id: str) -> "Provider":
    from windlass.providers.hetzner import HetznerProvider

    settings = fleet.hetzner
    if not (settings.is_ipv4_on or settings.is_ipv6_on or settings.network_id or config.hetzner_network_id):
        raise ConfigError(
            f"the servers of fleet {name} would have no network: set hetzner_network_id, or turn is_ipv4_on back on."
        )
    return HetznerProvider(
        name,
        settings,
        hetzner_account(config, settings.call_timeout_s),
        identity=instance_id,
        network_id=config.hetzner_network_id,
        render_user_data=_user_data(fleet, config),
    )


def _user_data(fleet: "FleetConfig", config: Config) -> "Callable[[MachineRequest], str]":
    """What a new machine of this fleet is told at its first boot."""
    from windlass.worker.bootstrap import render_user_data

    url = config.machine_url
    if url is None:
        raise AssertionError("check_machines_can_call comes before any provider")
    bootstrap = _with_ray(fleet.bootstrap) if fleet.engine == "ray" else fleet.bootstrap
    return lambda request: render_user_data(bootstrap, request, url, stop_timeout_s=fleet.stop_timeout_s)


def _with_ray(bootstrap: "BootstrapSettings") -> "BootstrapSettings":
    """The same, with the Ray that we have: what is asked for otherwise could not work with it."""
    from windlass.engine.versions import our_versions

    others = [line for line in bootstrap.requirements if not re.match(r"ray\b(?!-)", line, re.IGNORECASE)]
    return bootstrap.model_copy(update={"requirements": (*others, f"ray=={our_versions().ray}")})


def hetzner_account(config: Config, timeout_s: float) -> "Account":
    """One for all fleets with the same token: they share its allowance of requests."""
    if config.hetzner_api_token is None:
        raise ConfigError(
            "there is no token for Hetzner: set HETZNER_API_TOKEN to one that may read and write "
            "(Hetzner's console, Security, API tokens)."
        )
    return _hetzner_account(config.hetzner_api_token.get_secret_value(), config.hetzner_endpoint, timeout_s)


@functools.cache
def _hetzner_account(token: str, endpoint: str, timeout_s: float) -> "Account":
    from windlass.providers.hetzner import Account

    return Account(token, endpoint=endpoint, timeout_s=timeout_s, limiter=_hetzner_limiter(token, endpoint))


@functools.cache
def _hetzner_limiter(token: str, endpoint: str) -> "Limiter":  # noqa: ARG001 - whose allowance it is
    from windlass.providers.hetzner.limiter import Limiter

    return Limiter()


async def _known_instance_id(config: Config) -> str | None:
    """The database's, with which machines are tagged. None without a database: none is made for this, and
    that it is away is said elsewhere."""
    if config.database_url is None and not has_embedded_database(config):
        return None
    try:
        async with control_store(config) as store:
            return await store.instance_id()
    except WindlassError:
        return None


async def examine_hetzner(config: Config) -> "AsyncIterator[Remark]":
    """What stands in the way of the Hetzner fleets. Reads only. Raises ConfigError."""
    from windlass.providers.hetzner.examine import examine

    fleets = {name: fleet.hetzner for name, fleet in config.fleets.items() if fleet.provider == "hetzner"}
    if not fleets:
        return
    timeout_s = min(settings.call_timeout_s for settings in fleets.values())
    account = hetzner_account(config, timeout_s)
    instance_id = await _known_instance_id(config)
    try:
        async for remark in examine(account, instance_id, fleets, config.hetzner_network_id):
            yield remark
    finally:
        account.close()


def _runpod_provider(name: str, fleet: "FleetConfig", config: Config, instance_id: str) -> "Provider":
    from windlass.providers.runpod import RunpodProvider
    from windlass.providers.runpod.preparing import Preparer

    url = config.machine_url
    if url is None:
        raise AssertionError("check_machines_can_call comes before any provider")
    settings = fleet.runpod
    identity = runpod_identity(name, fleet, config) if fleet.auto_start_worker else None
    return RunpodProvider(
        name,
        settings,
        runpod_account(config, settings.call_timeout_s),
        identity=instance_id,
        url=url,
        preparer=Preparer(settings, identity.open_shell) if identity is not None else None,
        public_key=identity.public_key if identity is not None else None,
    )


def runpod_identity(name: str, fleet: "FleetConfig", config: Config) -> "Identity":
    """The key that opens a fleet's pods. Raises ConfigError."""
    from windlass.providers.runpod.ssh import read_identity

    file = fleet.runpod.ssh.private_key_file or config.runpod_ssh_key_file
    if file is None:
        raise ConfigError(
            f"auto_start_worker is set for fleet {name}, which needs an SSH key: make one with `ssh-keygen -t ed25519 "
            "-N ''` and name it in runpod_ssh_key_file (RUNPOD_SSH_PRIVATE_KEY_PATH)."
        )
    return read_identity(file)


def runpod_account(config: Config, timeout_s: float) -> "RunpodAccount":
    """One for all fleets with the same key: they share its allowance of requests, and its list of pods."""
    if config.runpod_api_key is None:
        raise ConfigError(
            "there is no key for Runpod: set RUNPOD_API_KEY to one that may read and write "
            "(Runpod's console, Settings, API keys)."
        )
    return _runpod_account(config.runpod_api_key.get_secret_value(), config.runpod_endpoint, timeout_s)


@functools.cache
def _runpod_account(key: str, endpoint: str, timeout_s: float) -> "RunpodAccount":
    from windlass.providers.runpod import Account

    return Account(key, endpoint=endpoint, timeout_s=timeout_s, limiter=_runpod_limiter(key, endpoint))


@functools.cache
def _runpod_limiter(key: str, endpoint: str) -> "RunpodLimiter":  # noqa: ARG001 - whose allowance it is
    from windlass.providers.runpod.limiter import Limiter

    return Limiter()


async def examine_runpod(config: Config) -> "AsyncIterator[Remark]":
    """What stands in the way of the Runpod fleets. Reads only. Raises ConfigError."""
    from windlass.providers.remark import Remark
    from windlass.providers.runpod.examine import examine

    fleets = {name: fleet for name, fleet in config.fleets.items() if fleet.provider == "runpod"}
    if not fleets:
        return
    settings = {name: fleet.runpod for name, fleet in fleets.items()}
    account = runpod_account(config, min(each.call_timeout_s for each in settings.values()))
    try:
        async for remark in examine(account, await _known_instance_id(config), settings):
            yield remark
    finally:
        await account.close()
    for name, fleet in fleets.items():
        if fleet.auto_start_worker:
            identity = runpod_identity(name, fleet, config)
            yield Remark("ssh key", f"the pods of fleet {name} let {identity.key.get_fingerprint()} in")


def candidate(config: Config) -> "Candidate":
    """Ourselves, as one who might lead."""
    from windlass.ports.control import Candidate

    return Candidate(f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}", config.control.lease_s)


async def run_cycles(config: Config) -> "list[Summary]":
    """One cycle of every fleet, then give the lead up: for cron and the like."""
    check_machines_can_call(config)
    async with control_store(config) as store:
        ourselves, instance_id = candidate(config), await store.instance_id()
        try:
            return [
                await _run_once(fleet_cycle(name, fleet, config, store, ourselves, instance_id))
                for name, fleet in hiring_fleets(config).items()
            ]
        finally:
            await store.resign(ourselves)


async def _run_once(cycle: "FleetCycle") -> "Summary":
    try:
        summary = await cycle.run()
        # Machines that are being prepared: nobody else is there to hear of it.
        await cycle.settle(is_patient_with_all=True)
    finally:
        await cycle.close()
    return summary


# ---------------------------------------------------------------------------------------------------------------- Ray


def _node_program(fleet: "FleetConfig", config: Config) -> tuple[str, ...]:
    """What makes a process of this host a node of the Ray cluster."""
    if config.ray_address is None:
        raise ConfigError("there is no Ray cluster to join: set RAY_ADDRESS, or use `windlass up`, which starts one.")
    ray = fleet.ray
    # Many nodes share this host: each offers what its tasks need, not all there is.
    offered = ray.model_copy(
        update={
            "node_cpus": ray.node_cpus or fleet.concurrency * max(ray.num_cpus, 1.0),
            "node_gpus": ray.node_gpus if ray.node_gpus is not None else fleet.concurrency * ray.num_gpus,
            "object_store_mb": ray.object_store_mb or LOCAL_OBJECT_STORE_MB,
        }
    )
    return ("windlass", "ray", "node", "--address", config.ray_address, "--settings", offered.model_dump_json())


async def run_node(config: Config, settings: "NodeSettings") -> "Ending":
    """A node of the Ray cluster over the database, until it is told to end."""
    from windlass.engine.node import Node

    async with database(config) as dsn:
        return await Node(settings, lambda: PostgresStore(dsn, retention=config.retention, max_connections=2)).run()


async def run_dispatcher(config: Config, fleet: str, version: str) -> int:
    """A fleet's dispatcher, until told to stop. Returns the exit code: after 3 it is to be started again."""
    import structlog

    from windlass.engine.dispatcher import Dispatch, Dispatcher, HeadLost
    from windlass.ports.control import LeaseLost
    from windlass.store.engine import PostgresEngineStore

    chosen = config.fleets[fleet]
    if config.ray_address is None:
        raise AssertionError("whoever dispatches has a cluster")
    if chosen.chdir is not None:
        os.chdir(chosen.chdir)
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
async def _ray(loaded: "Loaded") -> AsyncIterator[Config]:
    """What fleets with engine = "ray" need beside their cycles: a head, if there is none, and a dispatcher each. The
    configuration, with the head's address. Raises ConfigError if the cluster is not one we can work with."""
    config = loaded.config
    fleets = {name: fleet for name, fleet in config.fleets.items() if fleet.engine == "ray"}
    if not fleets:
        yield config
        return
    from windlass.engine.cluster import Cluster
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
        check_versions(ours, await Cluster(address).versions(), f"the Ray head at {address}")
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


# What lets a machine into a cluster, by Ray's own names.
_RAY_CREDENTIALS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_gcs_rpc_server_reconnect_timeout_s")


def _ray_head(config: Config) -> "RayHead | None":
    """For the machines of fleets whose tasks Ray places. Its versions are ours: that was checked."""
    if config.ray_address is None or not any(fleet.engine == "ray" for fleet in config.fleets.values()):
        return None
    from windlass.engine.versions import our_versions
    from windlass.model.order import RayHead

    ours = our_versions()
    env = {name: os.environ[name] for name in _RAY_CREDENTIALS if name in os.environ}
    return RayHead(config.ray_address, ours.ray, ours.python, env)


def _dispatch_command(loaded: "Loaded", fleet: str) -> list[str]:
    import sys

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


async def run_up(
    loaded: "Loaded",
    reload: "Callable[[], Loaded]",
    on_summary: "Callable[[Summary], None]",
    *,
    is_leaving_workers: bool,
    version: str,
    on_link: Callable[[str], None] = lambda _link: None,
    tap: Tap = lambda _taker: lambda: None,
) -> None:
    """Every fleet, until told to stop: SIGTERM and Ctrl-C end in good order, a second one at once; SIGHUP reloads.

    `on_link` is told, once, the address that lets a person's browser in. `tap` hands log lines to whoever asks.
    """
    import structlog

    from windlass.control.up import Up
    from windlass.store.control import PostgresControlStore

    config = loaded.config
    check_machines_can_call(config)
    # Before anything else: a port that is taken ends the matter.
    listener = _listener(config)
    async with (
        database(config) as dsn,
        _migrated(dsn),
        _ray(loaded) as config,
        PostgresControlStore(dsn, retention=config.retention) as opened,
    ):
        ourselves, instance_id = candidate(config), await opened.instance_id()
        watchers = [on_summary]

        def tell_all(summary: "Summary") -> None:
            for tell in watchers:
                tell(summary)

        up = Up(
            opened,
            lambda name, fleet: fleet_cycle(name, fleet, config, opened, ourselves, instance_id),
            lambda name, fleet: provider(name, fleet, config, instance_id),
            tell_all,
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lambda: up.stop(is_leaving_workers=is_leaving_workers))
        loop.add_signal_handler(signal.SIGHUP, lambda: _reconfigure(up, reload, config.ray_address))
        log = structlog.get_logger("windlass.up")
        log.info("up", database=described_database(config), fleets=list(config.fleets), pid=os.getpid())
        async with (
            _face(config, dsn, up, listener, version, watchers, on_link) as counts,
            _alarm(config, dsn, watchers, counts.on_message),
            _logs_in_database(config, dsn, tap, counts.on_dropped),
            _traced_cycles(config, version, watchers),
        ):
            await up.run(hiring_fleets(config))
        with contextlib.suppress(DatabaseUnavailable):
            await opened.resign(ourselves)
        log.info("ended")


@asynccontextmanager
async def _migrated(dsn: str) -> AsyncIterator[None]:
    await migrate_database(dsn)
    yield


def hiring_fleets(config: Config) -> "dict[str, FleetConfig]":
    """Those that have cycles: the nodes of a cluster that others run are not hired."""
    return {name: fleet for name, fleet in config.fleets.items() if fleet.provider != "ray"}


def check_machines_can_call(config: Config) -> None:
    """Raise ConfigError where a fleet's machines work over HTTP and nobody could tell them whom to call."""
    remote = next((name for name, fleet in config.fleets.items() if fleet.provider in ("hetzner", "runpod")), None)
    if remote is None:
        return
    if config.machine_url is None:
        raise ConfigError(
            f"the machines of fleet {remote} work over HTTP, but where they call is not known: "
            "set api.port (or --port) and control_plane_ip, or api.url."
        )
    problem = problem_of_control_plane_url(config.machine_url)
    if problem is not None:
        raise ConfigError(f"the machines of fleet {remote} are to call {config.machine_url}, which {problem}.")
    is_only_here = config.api.host in _LOOPBACK
    if config.api.url is None and config.control_plane_ip not in (None, config.api.host) and is_only_here:
        raise ConfigError(
            f"the machines of fleet {remote} are to call {config.machine_url}, but api.host is {config.api.host}, "
            f"where only this host can: set it to {config.control_plane_ip} or 0.0.0.0."
        )


def _listener(config: Config) -> "socket.socket | None":
    if config.api.port is None:
        return None
    from windlass.api.server import listen

    return listen(config.api.host, config.api.port)


@dataclass(frozen=True, slots=True)
class _Counts:
    """Who counts what others do, for metrics: nobody, without a face."""

    # Receiver and outcome of a message.
    on_message: Callable[[str, str], None] = lambda _receiver, _outcome: None
    # Log lines that were not written.
    on_dropped: Callable[[int], None] = lambda _count: None


@asynccontextmanager
async def _face(
    config: Config,
    dsn: str,
    up: "Up",
    listener: "socket.socket | None",
    version: str,
    watchers: "list[Callable[[Summary], None]]",
    on_link: Callable[[str], None],
) -> "AsyncIterator[_Counts]":
    """The HTTP face of a running `up`, if it is to have one. It watches the cycles by adding itself to `watchers`."""
    if listener is None:
        yield _Counts()
        return
    from windlass.api.app import make_app
    from windlass.api.doorbell import Doorbell
    from windlass.api.face import Face
    from windlass.api.server import serving
    from windlass.api.session import new_link
    from windlass.api.wheel import build_wheel
    from windlass.store.reading import PostgresReadingStore

    async def run_cycle() -> list[dict[str, Any]]:
        return [summary.to_plain() for summary in await up.cycle_now()]

    # Now: what is on the disk later may be another version.
    wheel = await asyncio.to_thread(build_wheel)
    async with PostgresReadingStore(dsn, retention=config.retention, max_connections=API_CONNECTIONS) as store:
        doorbell = Doorbell(store.wait_for_work)
        shown, metrics = _shown(config, store, up, watchers)
        face = Face(
            store=store,
            access=store,
            doorbell=doorbell,
            fleet=up.fleet,
            worker_defaults=config.worker,
            max_payload_bytes=config.max_payload_bytes,
            version=version,
            ask_database=store.now,
            pulses=lambda: _pulses(up),
            run_cycle=run_cycle,
            wheel=lambda: wheel,
            shown=shown,
            ray_head=_ray_head(config),
        )
        sampling = asyncio.create_task(_take_samples(store, shown.live))
        try:
            async with serving(make_app(face), listener):
                on_link(await new_link(store, _browser_url(config, listener)))
                try:
                    yield _Counts(metrics.note_message, metrics.note_dropped_lines)
                finally:
                    # Before the server ends, or it would wait for those who wait.
                    await shown.live.close()
                    await doorbell.close()
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)


def _shown(
    config: Config, store: "PostgresReadingStore", up: "Up", watchers: "list[Callable[[Summary], None]]"
) -> "tuple[Shown, Metrics]":
    """What people see of a running `up`, and who counts for them."""
    from windlass.api.face import Shown
    from windlass.api.live import Live
    from windlass.api.metrics import Metrics
    from windlass.control.explain import tell

    live = Live(store, lambda: frozenset(up.fleets))
    metrics = Metrics(live.overview, store.measures)

    def note(summary: "Summary") -> None:
        metrics.note_cycle(
            summary.fleet,
            is_leader=summary.is_leader,
            duration_s=summary.duration_s,
            actions=summary.actions or {},
            provider_calls=summary.provider_calls,
        )

    watchers.append(note)
    shown = Shown(
        store=store,
        live=live,
        explain=functools.partial(tell, store),
        worker_log=lambda fleet, worker_id, lines: worker_log(config, fleet, worker_id, lines, is_following=False),
        last_actions=lambda: {name: heard.summary.actions or {} for name, heard in up.heard().items()},
        metrics=metrics.read,
        is_open_here=config.api.host in _LOOPBACK,
        rate_limit=config.api.rate_limit,
        cors_origins=config.api.cors_origins,
    )
    return shown, metrics


@asynccontextmanager
async def _alarm(
    config: Config,
    dsn: str,
    watchers: "list[Callable[[Summary], None]]",
    on_message: Callable[[str, str], None],
) -> AsyncIterator[None]:
    """People are told what is the matter for as long as this is open."""
    from windlass.control.alarm import Alarm
    from windlass.store.alarm import PostgresAlarmStore

    # Its own connections: whatever a receiver does, no cycle waits for one.
    async with PostgresAlarmStore(dsn, retention=config.retention, max_connections=2) as store:
        alarm = Alarm(
            store,
            receivers(config),
            dead_letters_allowed=config.alerts.dead_letters_per_hour,
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


def receivers(config: Config) -> "list[Receiver]":
    """Everybody who is to be told what is the matter."""
    from windlass.configure import secret_variables
    from windlass.notify.command import Command
    from windlass.notify.email import Email
    from windlass.notify.webhook import Slack, Webhook

    alerts, found = config.alerts, list["Receiver"]()
    if alerts.webhook_url is not None:
        found.append(Webhook(alerts.webhook_url.get_secret_value()))
    if alerts.slack_url is not None:
        found.append(Slack(alerts.slack_url.get_secret_value()))
    if alerts.email_to and alerts.smtp_url is not None:
        found.append(Email(alerts.smtp_url.get_secret_value(), alerts.email_from, alerts.email_to))
    if alerts.command is not None:
        found.append(Command(alerts.command, tuple(secret_variables())))
    return found


def _browser_url(config: Config, listener: "socket.socket") -> str:
    """Where a person on this host, or wherever machines call from, finds us."""
    if config.api.url is not None:
        return config.api.url
    port = listener.getsockname()[1]
    host = "127.0.0.1" if config.api.host in ("0.0.0.0", "::", *_LOOPBACK) else config.api.host  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _take_samples(store: "PostgresReadingStore", live: "Live") -> None:
    """How things stand, every few seconds, for charts; and the retention of what only faces need."""
    import structlog

    from windlass.store.reading import SAMPLE_INTERVAL_S

    for round_number in itertools.count():
        try:
            await store.take_samples(await live.overview())
            if round_number % SAMPLES_PER_SWEEP == 0:
                await store.sweep_faces()
        except WindlassError as error:
            structlog.get_logger(__name__).warning("no sample was taken", error=str(error))
        await asyncio.sleep(SAMPLE_INTERVAL_S)


def _pulses(up: "Up") -> "dict[str, FleetPulse]":
    from windlass.api.face import FleetPulse

    now = asyncio.get_running_loop().time()
    pulses = {}
    for name, heard in up.heard().items():
        fleet = up.fleet(name)
        if fleet is not None:
            limit_s = max(MIN_MISSED_S, MISSED_CYCLES * fleet.poll_interval_s)
            pulses[name] = FleetPulse(heard.summary.is_leader, now - heard.at, limit_s)
    return pulses


def _reconfigure(up: "Up", reload: "Callable[[], Loaded]", ray_address: str | None) -> None:
    import structlog

    try:
        config = reload().config
        check_machines_can_call(config)
        # Their nodes join the head that we know, or started.
        config = config.model_copy(update={"ray_address": config.ray_address or ray_address})
        changed = [name for name, fleet in config.fleets.items() if fleet.engine == "ray" and up.fleet(name) != fleet]
        up.reconfigure(hiring_fleets(config))
        if changed:
            structlog.get_logger(__name__).warning(
                "dispatchers go on with the settings they have: start `windlass up` again to change them",
                fleets=changed,
            )
    except (ConfigError, BadInput) as error:
        structlog.get_logger(__name__).error("configuration not reloaded, nothing changed", error=str(error))


async def worker_log(
    config: Config, fleet: str, worker_id: str, lines: int, *, is_following: bool
) -> AsyncIterator[str]:
    """What a worker of a local fleet printed on this host. Raises BadInput if nothing of it is here."""
    from windlass.providers.local.logs import log_folder

    async for line in log_folder(data_dir(config), fleet).read(worker_id, lines, follow=is_following):
        yield line
