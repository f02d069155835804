"""Warns of rented fleets whose `spawn_timeout_s` may be too short: `windlass up` logs it, `windlass doctor` shows it.

Measured boots do not change a timeout that is set, and the original orchestrators' 300 s are shorter than the pull of a
large image: each machine is paid for, and replaced before it joins. The setting applies as it is; this only warns.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from math import ceil

import structlog

from windlass.model.config import Config
from windlass.model.errors import WindlassError
from windlass.model.fleet import FleetConfig
from windlass.model.overview import BootQuantiles
from windlass.model.plural import plural
from windlass.policy.boot import MEASURED_FACTOR, MIN_MEASURED, TOTAL_FACTOR
from windlass.providers.diagnostic import Diagnostic
from windlass.store.database import Database
from windlass.store.overview import PostgresOverview
from windlass.wiring.reachability import remote_fleets
from windlass.wiring.stores import database, has_embedded_database

# The phase of a boot that ends with the first heartbeat.
JOINED = "joined"
# Reads the boot times of a fleet.
ReadBootTimes = Callable[[str], Awaitable[list[BootQuantiles]]]
log = structlog.get_logger("windlass.up")


def short_spawn_timeout(name: str, fleet: FleetConfig, boots: list[BootQuantiles]) -> Diagnostic | None:
    """A warning if the timeout that is set is below the provider's default, or if measured boots exceed it."""
    limit_s, default_s = fleet.spawn_timeout_s, fleet.default_spawn_timeout_s
    if limit_s is None:
        return None
    joined = next((each for each in boots if each.phase == JOINED and each.count >= MIN_MEASURED), None)
    is_exceeded = joined is not None and joined.p99_s > limit_s
    if limit_s >= default_s and not is_exceeded:
        return None
    machine, steps = _boot_of(fleet)
    message = (
        f"a new {machine} of fleet {name} has {TOTAL_FACTOR * limit_s:g} s to {steps}, {limit_s:g} s of them without "
        "progress; after that it is replaced, and both are billed"
    )
    sufficient_s = default_s
    if joined is not None and is_exceeded:
        message += f"; its last {plural(joined.count, 'boot')} took up to {joined.p99_s:.0f} s (p99)"
        sufficient_s = max(default_s, float(ceil(MEASURED_FACTOR * joined.p99_s)))
    advice = (
        f"remove spawn_timeout_s (SPAWNING_TIMEOUT_SEC): the default is {default_s:g} s, and later twice the p99 of "
        f"the fleet's own boots; or set {sufficient_s:g} or more"
    )
    return Diagnostic("boot time", message, advice)


async def check_spawn_timeouts(config: Config) -> AsyncGenerator[Diagnostic, None]:
    """The warnings of all rented fleets, with the boots that the database knows. Only reads."""
    fleets = _with_timeout(config)
    boots = await _measured_boots(config, list(fleets)) if fleets else {}
    for name, fleet in fleets.items():
        if (short := short_spawn_timeout(name, fleet, boots.get(name, []))) is not None:
            yield short


async def log_short_spawn_timeouts(config: Config, read_boot_times: ReadBootTimes) -> None:
    for name, fleet in _with_timeout(config).items():
        try:
            boots = await read_boot_times(name)
        except WindlassError:
            boots = []
        short = short_spawn_timeout(name, fleet, boots)
        if short is not None:
            log.warning("keep short spawn timeout", fleet=name, problem=short.message, hint=short.advice)


def _with_timeout(config: Config) -> dict[str, FleetConfig]:
    return {name: fleet for name, fleet in remote_fleets(config).items() if fleet.spawn_timeout_s is not None}


def _boot_of(fleet: FleetConfig) -> tuple[str, str]:
    """The noun of a machine of this provider, and what it does before its worker joins."""
    if fleet.provider == "runpod":
        return "pod", "pull its image (a pull of 20 GB takes 10 to 15 minutes) and start its worker"
    if images := len(fleet.bootstrap.images):
        return "server", f"install Docker, pull {plural(images, 'image')} and start its worker"
    return "server", "install packages and start its worker"


async def _measured_boots(config: Config, fleets: list[str]) -> dict[str, list[BootQuantiles]]:
    """By fleet. Empty if there is no database, or it is unavailable: another check reports that."""
    if config.database_url is None and not has_embedded_database(config):
        return {}
    try:
        async with database(config) as dsn, Database(dsn) as opened:
            overview = PostgresOverview(opened)
            return {name: await overview.boot_times(name) for name in fleets}
    except WindlassError:
        return {}
