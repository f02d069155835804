"""Who rents which machines, with what they need for it."""

import functools
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from windlass.model.config import Config
from windlass.model.errors import ConfigError, WindlassError
from windlass.model.redaction import Mask, mask_of
from windlass.model.urls import LOOPBACK, problem_of_control_plane_url
from windlass.wiring.stores import control_store, data_dir, has_embedded_database

if TYPE_CHECKING:
    from windlass.model.bootstrap import BootstrapSettings
    from windlass.model.fleet import FleetConfig
    from windlass.model.machine import MachineRequest
    from windlass.ports.provider import Provider
    from windlass.providers.diagnostic import Diagnostic
    from windlass.providers.hetzner import HetznerAccount
    from windlass.providers.runpod.account import RunpodAccount
    from windlass.providers.runpod.ssh import Identity

# Of each raylet on this host: they are many, and Ray's own choice is a third of the memory.
LOCAL_OBJECT_STORE_MB = 100


def spawning_fleets(config: Config) -> "dict[str, FleetConfig]":
    """Those that have cycles: the nodes of a cluster that others run are not hired."""
    return {name: fleet for name, fleet in config.fleets.items() if fleet.provider != "ray"}


def check_machines_can_call(config: Config) -> None:
    """Raise ConfigError where a fleet's machines work over HTTP and nobody could tell them whom to call."""
    remote = next((name for name, fleet in config.fleets.items() if fleet.provider in ("hetzner", "runpod")), None)
    if remote is None:
        return
    url = _machine_url(remote, config)
    problem = problem_of_control_plane_url(url)
    if problem is not None:
        raise ConfigError(f"the machines of fleet {remote} are to call {url}, which {problem}.")
    is_only_here = config.api.host in LOOPBACK
    if config.api.url is None and config.control_plane_ip not in (None, config.api.host) and is_only_here:
        raise ConfigError(
            f"the machines of fleet {remote} are to call {config.machine_url}, but api.host is {config.api.host}, "
            f"where only this host can: set it to {config.control_plane_ip} or 0.0.0.0."
        )


def check_keys(config: Config) -> None:
    """Raise ConfigError where a fleet's machines cannot be rented because we have no key to the provider."""
    providers = {fleet.provider for fleet in config.fleets.values()}
    if "hetzner" in providers:
        _hetzner_token(config)
    if "runpod" in providers:
        _runpod_key(config)


def _machine_url(fleet: str, config: Config) -> str:
    if config.machine_url is None:
        raise ConfigError(
            f"the machines of fleet {fleet} work over HTTP, but where they call is not known: "
            "set api.port (or --port) and control_plane_ip, or api.url."
        )
    return config.machine_url


def provider(name: str, fleet: "FleetConfig", config: Config, instance_id: str) -> "Provider":
    """Who rents a fleet's machines. `instance_id`: the database's, with which they are tagged.

    Raises ConfigError if something is missing for that.
    """
    if fleet.provider == "hetzner":
        return _hetzner_provider(name, fleet, config, instance_id)
    if fleet.provider == "runpod":
        return _runpod_provider(name, fleet, config, instance_id)
    from windlass.config_loader import environment_of
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
        withheld=withheld_from(fleet),
        program=program,
        mask=_mask(name, fleet, config),
    )


def _mask(name: str, fleet: "FleetConfig", config: Config) -> Mask:
    """What workers of this fleet say, before it is told to anybody. The fleet may have been reloaded since."""
    from windlass.config_loader import secrets_of

    return mask_of(secrets_of(config.model_copy(update={"fleets": {**config.fleets, name: fleet}})))


def withheld_from(fleet: "FleetConfig") -> list[str]:
    """Variables of our environment that workers of this host are not to see: all that one needs to know is where its
    database is, and a node how to join its cluster."""
    from windlass.config_loader import secret_variables

    secrets = [name for name, key in secret_variables().items() if key != ("database_url",)]
    return secrets if fleet.engine is not None else [*secrets, "RAY_AUTH_TOKEN"]


async def worker_log(
    config: Config, fleet: str, worker_id: str, lines: int, *, is_following: bool
) -> AsyncIterator[str]:
    """What a worker of a local fleet printed on this host, without secrets. Raises BadInput if nothing is here."""
    from windlass.config_loader import secrets_of
    from windlass.providers.local.logs import log_folder

    mask = mask_of(secrets_of(config))
    async for line in log_folder(data_dir(config), fleet, mask).read(worker_id, lines, follow=is_following):
        yield line


def _node_program(fleet: "FleetConfig", config: Config) -> tuple[str, ...]:
    """What makes a process of this host a node of the Ray cluster."""
    if config.ray_address is None:
        raise ConfigError("there is no Ray cluster to join: set RAY_ADDRESS, or use `windlass up`, which starts one.")
    offered = (fleet.node_offer or fleet.ray).model_copy(
        update={"object_store_mb": fleet.ray.object_store_mb or LOCAL_OBJECT_STORE_MB}
    )
    return ("windlass", "ray", "node", "--address", config.ray_address, "--settings", offered.model_dump_json())


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
        render_user_data=_user_data(name, fleet, config),
    )


def _user_data(name: str, fleet: "FleetConfig", config: Config) -> "Callable[[MachineRequest], str]":
    """What a new machine of this fleet is told at its first boot."""
    from windlass.worker.bootstrap import render_user_data

    url = _machine_url(name, config)
    bootstrap = _with_ray(fleet.bootstrap) if fleet.engine == "ray" else fleet.bootstrap
    return lambda request: render_user_data(bootstrap, request, url, stop_timeout_s=fleet.stop_timeout_s)


def _with_ray(bootstrap: "BootstrapSettings") -> "BootstrapSettings":
    """The same, with the Ray that we have, since no other could work with it, and the extras that were asked for."""
    from windlass.ray.versions import our_versions

    asked = {line: re.match(r"ray\b(?!-)\s*(\[[^\]]*\])?", line, re.IGNORECASE) for line in bootstrap.requirements}
    others = [line for line, ray in asked.items() if ray is None]
    extras = ",".join(ray[1].strip("[]") for ray in asked.values() if ray is not None and ray[1])
    ours = f"ray[{extras}]" if extras else "ray"
    return bootstrap.model_copy(update={"requirements": (*others, f"{ours}=={our_versions().ray}")})


def hetzner_account(config: Config, timeout_s: float) -> "HetznerAccount":
    """One for all fleets with the same token: they share its allowance of requests, and what is out of stock."""
    account = _hetzner_account(_hetzner_token(config), config.hetzner_endpoint)
    account.be_patient(timeout_s)
    return account


def _hetzner_token(config: Config) -> str:
    if config.hetzner_api_token is None:
        raise ConfigError(
            "there is no token for Hetzner: set HETZNER_API_TOKEN to one that may read and write "
            "(Hetzner's console, Security, API tokens)."
        )
    return config.hetzner_api_token.get_secret_value()


@functools.cache
def _hetzner_account(token: str, endpoint: str) -> "HetznerAccount":
    from windlass.providers.hetzner import HetznerAccount

    return HetznerAccount(token, endpoint=endpoint, timeout_s=0.0)


async def examine_hetzner(config: Config) -> "AsyncGenerator[Diagnostic, None]":
    """What stands in the way of the Hetzner fleets, and what is there of others: as long as there is a token, also when
    the last fleet has left the configuration. Reads only. Raises ConfigError."""
    from windlass.model.hetzner import HetznerSettings
    from windlass.providers.hetzner.doctor_checks import boot_time, examine

    fleets = {name: fleet.hetzner for name, fleet in config.fleets.items() if fleet.provider == "hetzner"}
    if not fleets and config.hetzner_api_token is None:
        return
    for slow in filter(None, (boot_time(name, config.fleets[name]) for name in fleets)):
        yield slow
    timeouts_s = (settings.call_timeout_s for settings in fleets.values())
    timeout_s = min(timeouts_s, default=HetznerSettings().call_timeout_s)
    account = hetzner_account(config, timeout_s)
    instance_id = await _known_instance_id(config)
    try:
        async with aclosing(examine(account, instance_id, fleets, config.hetzner_network_id)) as remarks:
            async for remark in remarks:
                yield _remark(remark, has_fleets=bool(fleets))
    finally:
        account.close()


def _runpod_provider(name: str, fleet: "FleetConfig", config: Config, instance_id: str) -> "Provider":
    from windlass.providers.runpod import RunpodProvider
    from windlass.providers.runpod.provisioning import Preparer

    url = _machine_url(name, config)
    settings = fleet.runpod
    identity = runpod_identity(name, fleet, config) if fleet.auto_start_worker else None
    mask = _mask(name, fleet, config)
    return RunpodProvider(
        name,
        settings,
        runpod_account(config, settings.call_timeout_s),
        identity=instance_id,
        url=url,
        preparer=Preparer(settings, identity.open_shell, mask=mask) if identity is not None else None,
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
    account = _runpod_account(_runpod_key(config), config.runpod_endpoint)
    account.be_patient(timeout_s)
    return account


def _runpod_key(config: Config) -> str:
    if config.runpod_api_key is None:
        raise ConfigError(
            "there is no key for Runpod: set RUNPOD_API_KEY to one that may read and write "
            "(Runpod's console, Settings, API keys)."
        )
    return config.runpod_api_key.get_secret_value()


@functools.cache
def _runpod_account(key: str, endpoint: str) -> "RunpodAccount":
    from windlass.providers.runpod import RunpodAccount

    return RunpodAccount(key, endpoint=endpoint, timeout_s=0.0)


async def examine_runpod(config: Config) -> "AsyncGenerator[Diagnostic, None]":
    """What stands in the way of the Runpod fleets, and what is there of others: as long as there is a key, also when
    the last fleet has left the configuration. Reads only. Raises ConfigError."""
    from windlass.model.runpod import RunpodSettings
    from windlass.providers.diagnostic import Diagnostic
    from windlass.providers.runpod.doctor_checks import examine

    fleets = {name: fleet for name, fleet in config.fleets.items() if fleet.provider == "runpod"}
    if not fleets and config.runpod_api_key is None:
        return
    settings = {name: fleet.runpod for name, fleet in fleets.items()}
    timeouts_s = (each.call_timeout_s for each in settings.values())
    account = runpod_account(config, min(timeouts_s, default=RunpodSettings().call_timeout_s))
    try:
        async with aclosing(examine(account, await _known_instance_id(config), settings)) as remarks:
            async for remark in remarks:
                yield _remark(remark, has_fleets=bool(fleets))
    finally:
        await account.close()
    for name, fleet in fleets.items():
        if fleet.auto_start_worker:
            identity = runpod_identity(name, fleet, config)
            yield Diagnostic("ssh key", f"the pods of fleet {name} let {identity.key.get_fingerprint()} in")


def _remark(remark: "Diagnostic", *, has_fleets: bool) -> "Diagnostic":
    """A key that no fleet uses may be for something else, and stands in nobody's way."""
    return remark if has_fleets else replace(remark, is_grave=False)


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


def startup_problem(name: str, fleet: "FleetConfig") -> str | None:
    """Why no worker process of a local fleet could start, as a sentence; None if one could."""
    from windlass.providers.local import spawn

    return spawn.startup_problem(name, fleet, fleet.env.get("PATH", os.environ.get("PATH")))
