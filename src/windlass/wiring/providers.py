"""Makes the providers of fleets, and checks that they have what they need: keys, URLs, networks."""

import functools
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from importlib import metadata
from typing import TYPE_CHECKING

from windlass.config_loader import environment_of, secrets_of
from windlass.config_sources import secret_variables
from windlass.model.bootstrap import BootstrapSettings
from windlass.model.config import Config
from windlass.model.errors import BadInput, ConfigError, WindlassError
from windlass.model.fleet import FleetConfig
from windlass.model.hetzner import HetznerSettings
from windlass.model.machine import MachineRequest
from windlass.model.redaction import Mask, mask_of
from windlass.model.runpod import RunpodSettings
from windlass.ports.provider import Provider
from windlass.providers.diagnostic import Diagnostic
from windlass.providers.local import LocalProvider, worker_process
from windlass.providers.local.logs import log_folder
from windlass.providers.runpod.installation import INSTALL_SCRIPT, PodInstallation
from windlass.ray.versions import our_versions
from windlass.store.control import PostgresControlStore
from windlass.store.database import Database
from windlass.wiring.stores import data_dir, database, has_embedded_database
from windlass.worker.bootstrap import FETCH_SCRIPT, read_certificate, render_user_data, script

# The SDKs of Hetzner and Runpod are imported where they are used: they are slow to load, and most processes need none.
if TYPE_CHECKING:
    from windlass.providers.hetzner.account import HetznerAccount
    from windlass.providers.runpod.account import RunpodAccount
    from windlass.providers.runpod.ssh import Identity

# Per raylet on this host. There are many, and Ray's default is a third of the memory.
LOCAL_OBJECT_STORE_MB = 100


def spawning_fleets(config: Config) -> dict[str, FleetConfig]:
    """Fleets with cycles. The nodes of a Ray cluster that others run are not spawned by Windlass."""
    return {name: fleet for name, fleet in config.fleets.items() if fleet.provider != "ray"}


def check_keys(config: Config) -> None:
    """Raise ConfigError if the API key of a fleet's provider is missing."""
    providers = {fleet.provider for fleet in config.fleets.values()}
    if "hetzner" in providers:
        _hetzner_token(config)
    if "runpod" in providers:
        _runpod_key(config)


def check_worker_start(config: Config) -> None:
    """Raise ConfigError if no pod of a fleet could ever run a worker: each would be billed until its spawn timeout."""
    for name, fleet in config.fleets.items():
        if (problem := _start_problem(fleet)) is not None:
            raise ConfigError(f"fleet {name}: image {fleet.runpod.image} {problem}.")


def _start_problem(fleet: FleetConfig) -> str | None:
    return fleet.runpod.start_problem(has_ssh=fleet.auto_start_worker) if fleet.provider == "runpod" else None


def machine_url(fleet: str, config: Config) -> str:
    """The URL that machines of a fleet call. ConfigError if it is unknown."""
    if config.machine_url is None:
        raise ConfigError(
            f"machines of fleet {fleet} work over HTTP, but the address of this control plane is unknown. "
            "Set api.port (or --port) and control_plane_ip, or api.url."
        )
    return config.machine_url


def make_provider(name: str, fleet: FleetConfig, config: Config, instance_id: str) -> Provider:
    """The provider of a fleet. `instance_id`: the database's id, with which machines are tagged. Raises ConfigError."""
    if fleet.provider == "hetzner":
        return _hetzner_provider(name, fleet, config, instance_id)
    if fleet.provider == "runpod":
        return _runpod_provider(name, fleet, config, instance_id)
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
        withheld=withheld_from(fleet),
        program=program,
        mask=_mask(name, fleet, config),
    )


def _mask(name: str, fleet: FleetConfig, config: Config) -> Mask:
    """Masks secrets in output of a fleet's workers. The fleet may be newer than `config`, after a reload."""
    return mask_of(secrets_of(config.model_copy(update={"fleets": {**config.fleets, name: fleet}})))


def withheld_from(fleet: FleetConfig) -> list[str]:
    """Environment variables with secrets that local workers do not get. A worker needs the database's URL, and a node
    the token of its Ray cluster."""
    secrets = [name for name, key in secret_variables().items() if key != ("database_url",)]
    return secrets if fleet.engine is not None else [*secrets, "RAY_AUTH_TOKEN"]


def has_worker_log(config: Config, fleet: str, worker_id: str) -> bool:
    """Whether this host has the log file of a local worker."""
    return not _is_ray(config, fleet) and log_folder(data_dir(config), fleet, Mask()).path_of(worker_id).exists()


def _is_ray(config: Config, fleet: str) -> bool:
    """Whether tasks of the fleet run in Ray's processes: then log files of its nodes have no line of a handler."""
    found = config.fleets.get(fleet)
    return found is not None and found.engine == "ray" and config.logs.send_output


async def worker_log(
    config: Config, fleet: str, worker_id: str, lines: int, *, is_following: bool
) -> AsyncIterator[str]:
    """Log lines of a local worker on this host, with secrets masked. BadInput if there is no log here."""
    if _is_ray(config, fleet):
        raise BadInput(f"the output of worker {worker_id} is in the database.")
    mask = mask_of(secrets_of(config))
    async for line in log_folder(data_dir(config), fleet, mask).read(worker_id, lines, follow=is_following):
        yield line


def _node_program(fleet: FleetConfig, config: Config) -> tuple[str, ...]:
    """The command of a process that joins the Ray cluster as a node."""
    if config.ray_address is None:
        raise ConfigError("no Ray cluster to join. Set RAY_ADDRESS, or use `windlass up`, which starts one.")
    offered = (fleet.node_offer or fleet.ray).model_copy(
        update={"object_store_mb": fleet.ray.object_store_mb or LOCAL_OBJECT_STORE_MB}
    )
    return ("windlass", "ray", "node", "--address", config.ray_address, "--settings", offered.model_dump_json())


def _hetzner_provider(name: str, fleet: FleetConfig, config: Config, instance_id: str) -> Provider:
    from windlass.providers.hetzner.provider import HetznerProvider

    settings = fleet.hetzner
    return HetznerProvider(
        name,
        settings,
        hetzner_account(config, settings.call_timeout_s),
        identity=instance_id,
        network_id=config.hetzner_network_id,
        render_user_data=_user_data(name, fleet, config),
    )


def _user_data(name: str, fleet: FleetConfig, config: Config) -> Callable[[MachineRequest], str]:
    """Renders the cloud-init data for the first boot of a machine."""
    url = machine_url(name, config)
    bootstrap = _with_ray(fleet.bootstrap) if fleet.engine == "ray" else fleet.bootstrap
    return lambda request: render_user_data(bootstrap, request, url, stop_timeout_s=fleet.stop_timeout_s)


def _with_ray(bootstrap: BootstrapSettings) -> BootstrapSettings:
    """Pin Ray to our own version, since only the same version can join, and keep the requested extras."""
    asked = {line: re.match(r"ray\b(?!-)\s*(\[[^\]]*\])?", line, re.IGNORECASE) for line in bootstrap.requirements}
    others = [line for line, ray in asked.items() if ray is None]
    extras = ",".join(ray[1].strip("[]") for ray in asked.values() if ray is not None and ray[1])
    ours = f"ray[{extras}]" if extras else "ray"
    return bootstrap.model_copy(update={"requirements": (*others, f"{ours}=={our_versions().ray}")})


def hetzner_account(config: Config, timeout_s: float) -> "HetznerAccount":
    """One account for all fleets with the same token: they share its rate limit, and what is out of stock."""
    account = _hetzner_account(_hetzner_token(config), config.hetzner_endpoint)
    account.raise_timeout(timeout_s)
    return account


def _hetzner_token(config: Config) -> str:
    if config.hetzner_api_token is None:
        raise ConfigError(
            "the Hetzner API token is missing. Set HETZNER_API_TOKEN to a token with read and write permission "
            "(Hetzner console, Security, API tokens)."
        )
    return config.hetzner_api_token.get_secret_value()


@functools.cache
def _hetzner_account(token: str, endpoint: str) -> "HetznerAccount":
    from windlass.providers.hetzner.account import HetznerAccount

    return HetznerAccount(token, endpoint=endpoint, timeout_s=0.0)


async def check_hetzner(config: Config) -> AsyncGenerator[Diagnostic, None]:
    """Diagnose the Hetzner fleets, and what else is in the account; with a token also if no fleet uses it. Only reads.
    Raises ConfigError."""
    from windlass.providers.hetzner.doctor_checks import check_network_sizes, run_checks

    fleets = {name: fleet.hetzner for name, fleet in config.fleets.items() if fleet.provider == "hetzner"}
    if not fleets and config.hetzner_api_token is None:
        return
    for crowded in check_network_sizes({name: config.fleets[name] for name in fleets}, config.hetzner_network_id):
        yield crowded
    timeouts_s = (settings.call_timeout_s for settings in fleets.values())
    timeout_s = min(timeouts_s, default=HetznerSettings().call_timeout_s)
    account = hetzner_account(config, timeout_s)
    instance_id = await _known_instance_id(config)
    try:
        async with aclosing(run_checks(account, instance_id, fleets, config.hetzner_network_id)) as diagnostics:
            async for diagnostic in diagnostics:
                yield _downgrade(diagnostic, has_fleets=bool(fleets))
    finally:
        account.close()


def _runpod_provider(name: str, fleet: FleetConfig, config: Config, instance_id: str) -> Provider:
    from windlass.providers.runpod.provider import RunpodProvider
    from windlass.providers.runpod.provisioning import Preparer

    url = machine_url(name, config)
    settings = fleet.runpod
    identity = runpod_identity(name, fleet, config) if fleet.auto_start_worker else None
    preparer = None
    if identity is not None:
        preparer = Preparer(
            settings, identity.open_shell, mask=_mask(name, fleet, config), installation=_installation(fleet)
        )
    return RunpodProvider(
        name,
        settings,
        runpod_account(config, settings.call_timeout_s),
        identity=instance_id,
        url=url,
        preparer=preparer,
        public_key=identity.public_key if identity is not None else None,
        ca_pem=read_certificate(fleet.bootstrap),
    )


def _installation(fleet: FleetConfig) -> PodInstallation | None:
    """What is installed on the fleet's pods over SSH."""
    ssh = fleet.runpod.ssh
    if not ssh.installs_windlass:
        return None
    scripts = {name: script(name) for name in (INSTALL_SCRIPT, FETCH_SCRIPT)}
    try:
        version = metadata.version("windlass")
    except metadata.PackageNotFoundError:
        version = "not installed"  # The install script on pods reports that there is no wheel.
    return PodInstallation(version, scripts, fleet.bootstrap.requirements, ssh.has_image_packages)


def runpod_identity(name: str, fleet: FleetConfig, config: Config) -> "Identity":
    """The key that opens a fleet's pods. Raises ConfigError."""
    from windlass.providers.runpod.ssh import read_identity

    file = fleet.runpod.ssh.private_key_file or config.runpod_ssh_key_file
    if file is None:
        raise ConfigError(
            f"fleet {name} has auto_start_worker, which needs an SSH key. Create one with "
            "`ssh-keygen -t ed25519 -N ''` and set runpod_ssh_key_file (RUNPOD_SSH_PRIVATE_KEY_PATH)."
        )
    return read_identity(file)


def runpod_account(config: Config, timeout_s: float) -> "RunpodAccount":
    """One account for all fleets with the same key: they share its rate limit and its list of pods."""
    account = _runpod_account(_runpod_key(config), config.runpod_endpoint)
    account.raise_timeout(timeout_s)
    return account


def _runpod_key(config: Config) -> str:
    if config.runpod_api_key is None:
        raise ConfigError(
            "the Runpod API key is missing. Set RUNPOD_API_KEY to a key with read and write permission "
            "(Runpod console, Settings, API keys)."
        )
    return config.runpod_api_key.get_secret_value()


@functools.cache
def _runpod_account(key: str, endpoint: str) -> "RunpodAccount":
    from windlass.providers.runpod.account import RunpodAccount

    return RunpodAccount(key, endpoint=endpoint, timeout_s=0.0)


async def check_runpod(config: Config) -> AsyncGenerator[Diagnostic, None]:
    """Diagnose the Runpod fleets, and what else is in the account; with a key also if no fleet uses it. Only reads.
    Raises ConfigError."""
    from windlass.providers.runpod.doctor_checks import run_checks

    fleets = {name: fleet for name, fleet in config.fleets.items() if fleet.provider == "runpod"}
    if not fleets and config.runpod_api_key is None:
        return
    for name, fleet in fleets.items():
        if (problem := _start_problem(fleet)) is not None:
            message, _, advice = problem.partition(". ")
            yield Diagnostic("image", f"{fleet.runpod.image} of fleet {name} {message}", advice, is_error=True)
    settings = {name: fleet.runpod for name, fleet in fleets.items()}
    timeouts_s = (each.call_timeout_s for each in settings.values())
    account = runpod_account(config, min(timeouts_s, default=RunpodSettings().call_timeout_s))
    try:
        async with aclosing(run_checks(account, await _known_instance_id(config), settings)) as diagnostics:
            async for diagnostic in diagnostics:
                yield _downgrade(diagnostic, has_fleets=bool(fleets))
    finally:
        await account.close()
    for name, fleet in fleets.items():
        if fleet.auto_start_worker:
            identity = runpod_identity(name, fleet, config)
            yield Diagnostic("ssh key", f"pods of fleet {name} accept {identity.key.get_fingerprint()}")


def _downgrade(diagnostic: Diagnostic, *, has_fleets: bool) -> Diagnostic:
    """A key that no fleet uses may belong to another purpose: its problems are warnings."""
    return diagnostic if has_fleets else replace(diagnostic, is_error=False)


async def _known_instance_id(config: Config) -> str | None:
    """The database's id, with which machines are tagged. None without a database: this creates none, and another check
    reports that it is unavailable."""
    if config.database_url is None and not has_embedded_database(config):
        return None
    try:
        async with database(config) as dsn, Database(dsn) as opened:
            return await PostgresControlStore(opened).instance_id()
    except WindlassError:
        return None


def startup_problem(name: str, fleet: FleetConfig) -> str | None:
    """Why no worker process of a local fleet could start, as a sentence; None if one could."""
    return worker_process.startup_problem(name, fleet, fleet.env.get("PATH", os.environ.get("PATH")))
