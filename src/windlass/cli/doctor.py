"""`windlass doctor`: checks this machine, the configuration, the providers and the database.

Changes nothing, except that --repair settles the differences of adopted tables. If no embedded database exists yet, it
checks the folder and tries one in a temporary directory.
"""

import os
import platform
import shutil
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from windlass.cli.options import AsJson, ConfigFile, DataDir, command, load
from windlass.cli.output import print_json
from windlass.cli.up import check_fleets
from windlass.config_loader import Loaded
from windlass.model.config import Config
from windlass.model.errors import BadInput, ConfigError, WindlassError
from windlass.wiring import adoption, providers, reachability, stores, timeout_checks
from windlass.wiring.handlers import CHECK_TIMEOUT_S, handler_checks
from windlass.wiring.rehearsal import rehearse
from windlass.wiring.schema import LATEST_VERSION, DatabaseCheck, check_schema_version
from windlass.worker.gpu import GpuReader

OLDEST_PYTHON = (3, 11)
OLDEST_SERVER = 140_000
# Below the first limit the disk will soon be full. Below the second PostgreSQL may not start.
DISK_WARN_BYTES = 2 * 1024**3
DISK_FAIL_BYTES = 200 * 1024**2
# Leases use the database's clock. The clock of this machine only affects how early a scheduled task is claimed.
CLOCK_WARN_S = 2.0

# Kinds of windlass_internal.compare_rows.
DIFFERENCES = {
    "no task": "rows without a task",
    "no row": "tasks without a row that wants them",
    "status": "rows with another status than their task",
}


class CheckStatus(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    verdict: CheckStatus
    what: str
    # What to do about it. Empty if nothing.
    do: str = ""


@command
async def doctor(
    fleet: Annotated[
        str | None, typer.Option("--fleet", "-f", help="The fleet that --live rehearses.", metavar="NAME")
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Rent one machine of --fleet, run one task on it, and delete it.")
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Settle differences between adopted tables and their tasks.")
    ] = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> int:
    """Check this machine, the configuration and the database.

    Prints one line per check, with what to do about a problem. Exit code 1 if a check fails. With --live it also rents
    a machine, which costs money: each step, how long it took, and the cost are printed.
    """
    if live and fleet is None:
        raise BadInput("--live needs --fleet: name the fleet whose machine is rehearsed.")
    if fleet is not None and not live:
        raise BadInput("--fleet needs --live: the other checks concern all fleets.")
    findings: list[Finding] = []

    async def report(checks: AsyncGenerator[Finding, None]) -> bool:
        """Print findings as they come. Returns whether none failed."""
        # aclosing: if the reader of our output closes it, the nested generators are closed in order.
        async with aclosing(checks) as found:
            async for finding in found:
                findings.append(finding)
                if not as_json:
                    advice = f": {finding.do}" if finding.do else ""
                    word = finding.verdict.upper() if finding.verdict is CheckStatus.FAIL else finding.verdict.value
                    print(f"{word:<5}{finding.check:<14}{finding.what}{advice}", flush=True)
        return not any(finding.verdict is CheckStatus.FAIL for finding in findings)

    is_sound = await report(_run_checks(config, data_dir, is_repairing=repair))
    if fleet is not None and is_sound:
        await report(_rehearse(load(config, data_dir).config, fleet))
    if as_json:
        print_json(findings)
    return 1 if any(finding.verdict is CheckStatus.FAIL for finding in findings) else 0


async def _run_checks(
    config_file: Path | None, data_dir: Path | None, *, is_repairing: bool
) -> AsyncGenerator[Finding, None]:
    yield _check_python()
    yield _check_platform()
    yield _check_gpu()
    try:
        loaded = load(config_file, data_dir)
    except WindlassError as error:
        yield Finding("configuration", CheckStatus.FAIL, _clause(error))
        return
    config = loaded.config
    yield Finding("configuration", CheckStatus.OK, "readable")
    for warning in loaded.warnings:
        yield Finding("configuration", CheckStatus.WARN, warning)
    async with aclosing(_check_fleets(loaded)) as found:
        async for finding in found:
            yield finding
    async with aclosing(_check_providers(config)) as found:
        async for finding in found:
            yield finding
    if config.database_url is None:
        disk = _check_disk(config)
        yield disk
        if disk.verdict is CheckStatus.FAIL:
            return
    try:
        async with _open_database(config) as (where, dsn, database, is_trial):
            yield where
            yield _check_server_version(database)
            if not is_trial:
                yield _check_schema(database, is_embedded=config.database_url is None)
                yield _check_privileges(database)
            yield _check_pooler(database)
            yield _check_notifications(database)
            yield _check_clock(database)
            if not is_trial and database.schema_version == LATEST_VERSION and not database.missing_privileges:
                async with aclosing(_check_adopted_tables(config, dsn, is_repairing=is_repairing)) as found:
                    async for finding in found:
                        yield finding
    except WindlassError as error:
        yield Finding("database", CheckStatus.FAIL, _clause(error))


async def _check_fleets(loaded: Loaded) -> AsyncGenerator[Finding, None]:
    """What `windlass up` checks before it starts: each fleet has something to run, and handlers can be imported."""
    fleets = loaded.config.fleets
    named = ", ".join(f"{name} ({fleet.provider})" for name, fleet in fleets.items())
    try:
        check_fleets(loaded)
    except WindlassError as error:
        yield Finding("fleets", CheckStatus.FAIL, _clause(error))
        return
    yield Finding("fleets", CheckStatus.OK, f"{len(fleets)}: {named}" if fleets else "none in the configuration")
    checks = await handler_checks(loaded.config)
    for name, fleet in fleets.items():
        what, check = f"{name}: {fleet.handler}", checks.get(name)
        if fleet.handler is None:
            continue
        if check is None:
            yield Finding("handler", CheckStatus.OK, f"{what} is imported on the fleet's machines, not here")
        elif check.problem is not None:
            yield Finding("handler", CheckStatus.FAIL, f"{name}: {_clause(ConfigError(check.problem))}")
        elif check.is_importable:
            yield Finding("handler", CheckStatus.OK, f"{what} is importable")
        else:
            do = "`windlass worker --queue NAME --handler ...` shows why"
            yield Finding(
                "handler", CheckStatus.WARN, f"{what}: its import crashed or took over {CHECK_TIMEOUT_S:g} s", do
            )


async def _rehearse(config: Config, fleet: str) -> AsyncGenerator[Finding, None]:
    async with aclosing(rehearse(config, fleet)) as diagnostics:
        async for found in diagnostics:
            verdict = CheckStatus.FAIL if found.is_error else CheckStatus.WARN if found.advice else CheckStatus.OK
            yield Finding(found.check, verdict, found.message, found.advice)


async def _check_providers(config: Config) -> AsyncGenerator[Finding, None]:
    for name, run_checks in (
        ("control plane", reachability.check_address),
        ("boot time", timeout_checks.check_spawn_timeouts),
        ("hetzner", providers.check_hetzner),
        ("runpod", providers.check_runpod),
    ):
        try:
            async with aclosing(run_checks(config)) as diagnostics:
                async for found in diagnostics:
                    verdict = (
                        CheckStatus.FAIL if found.is_error else CheckStatus.WARN if found.advice else CheckStatus.OK
                    )
                    yield Finding(found.check, verdict, found.message, found.advice)
        except WindlassError as error:
            yield Finding(name, CheckStatus.FAIL, _clause(error))


# -------------------------------------------------------------------------------------------------------- this machine


def _check_python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST_PYTHON:
        return Finding("python", CheckStatus.FAIL, version, "install Python 3.11 or newer")
    return Finding("python", CheckStatus.OK, f"{version} at {sys.executable}")


def _check_platform() -> Finding:
    name = f"{platform.system()} {platform.machine()}"
    if platform.system() not in ("Linux", "Darwin"):
        return Finding("platform", CheckStatus.WARN, name, "workers and the embedded database need Linux or macOS")
    return Finding("platform", CheckStatus.OK, name)


def _check_gpu() -> Finding:
    """Read the GPU through NVML, as a worker does."""
    reader = GpuReader()
    reader.start()
    reader.stop()
    vitals = reader.vitals()
    if not vitals:
        return Finding("gpu", CheckStatus.OK, "no NVIDIA driver (workers report no GPU memory)")
    if not vitals["vram_total_mb"]:
        return Finding("gpu", CheckStatus.WARN, "the NVIDIA driver is installed, but no GPU responds", "run nvidia-smi")
    return Finding(
        "gpu", CheckStatus.OK, f"{vitals['vram_used_mb']:,} of {vitals['vram_total_mb']:,} MB of GPU memory used"
    )


def _check_disk(config: Config) -> Finding:
    data_dir = stores.data_dir(config)
    existing = next(folder for folder in (data_dir, *data_dir.parents) if os.path.exists(folder))  # noqa: PTH110
    free_bytes = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK | os.X_OK):
        return Finding("disk", CheckStatus.FAIL, f"{existing} is not writable", "choose another folder with --data-dir")
    what = f"{free_bytes / 1024**3:.1f} GiB free for {data_dir}"
    if free_bytes < DISK_WARN_BYTES:
        verdict = CheckStatus.FAIL if free_bytes < DISK_FAIL_BYTES else CheckStatus.WARN
        return Finding("disk", verdict, what, "free some space, or choose another folder with --data-dir")
    return Finding("disk", CheckStatus.OK, what)


# -------------------------------------------------------------------------------------------------------- the database


@asynccontextmanager
async def _open_database(config: Config) -> AsyncIterator[tuple[Finding, str, DatabaseCheck, bool]]:
    """Yield the finding, the URL, the details, and whether this is a temporary database, not the configured one."""
    if config.database_url is not None or stores.has_embedded_database(config):
        async with stores.database(config, makes_schema=False) as dsn:
            found = await stores.examine_database(dsn)
            kind = f"embedded, in {stores.data_dir(config)}" if config.database_url is None else "from DATABASE_URL"
            what = f"{found.database} as {found.user} ({kind})"
            yield Finding("database", CheckStatus.OK, what), dsn, found, False
        return
    stores.check_place_of_embedded_database(config)
    with stores.temporary_data_dir() as folder:
        trial = config.model_copy(update={"data_dir": folder / "data"})
        async with stores.database(trial) as dsn:
            what = f"the embedded PostgreSQL works; {stores.data_dir(config)} gets a database at first use"
            yield Finding("database", CheckStatus.OK, what), dsn, await stores.examine_database(dsn), True


def _check_server_version(found: DatabaseCheck) -> Finding:
    what = f"PostgreSQL {found.server_version}"
    if found.server_version_number < OLDEST_SERVER:
        return Finding("version", CheckStatus.FAIL, what, "upgrade to PostgreSQL 14 or newer")
    return Finding("version", CheckStatus.OK, what)


def _check_schema(found: DatabaseCheck, *, is_embedded: bool) -> Finding:
    if "usage on schema windlass" in found.missing_privileges:
        return Finding("schema", CheckStatus.FAIL, "this user has no access to the schema", "see privileges")
    try:
        check_schema_version(found.schema_version)
    except WindlassError as error:
        # Workers and clients need only the contract. An embedded database gets its schema when it is opened next.
        is_usable = found.supports_contract or (is_embedded and found.schema_version is None)
        return Finding("schema", CheckStatus.WARN if is_usable else CheckStatus.FAIL, _clause(error))
    return Finding("schema", CheckStatus.OK, f"version {found.schema_version}")


def _check_privileges(found: DatabaseCheck) -> Finding:
    if found.missing_privileges:
        shown = ", ".join(found.missing_privileges[:3])
        more = f" and {len(found.missing_privileges) - 3} more" if len(found.missing_privileges) > 3 else ""
        what = f"{found.user} lacks {shown}{more}"
        return Finding("privileges", CheckStatus.FAIL, what, "ask the owner of the schema to grant them")
    if found.schema_version is None and not found.may_create_schema:
        what = f"{found.user} may not create the schema"
        do = f"grant create on database {found.database}, or ask its owner to apply `windlass db sql`"
        return Finding("privileges", CheckStatus.FAIL, what, do)
    return Finding("privileges", CheckStatus.OK, f"{found.user} has all required privileges")


def _check_pooler(found: DatabaseCheck) -> Finding:
    if found.is_pooled:
        what = "connected through a pooler: workers poll once a second instead of being notified"
        return Finding("pooler", CheckStatus.WARN, what, "connect directly if that is too slow")
    return Finding("pooler", CheckStatus.OK, "direct connection")


def _check_notifications(found: DatabaseCheck) -> Finding:
    if found.can_listen:
        return Finding("listen", CheckStatus.OK, "notifications arrive")
    if found.is_pooled:
        return Finding("listen", CheckStatus.WARN, "unavailable through a pooler", "see pooler")
    what = "no notifications arrive: workers poll once a second instead"
    return Finding("listen", CheckStatus.WARN, what, "check for a proxy between this host and the server")


def _check_clock(found: DatabaseCheck) -> Finding:
    difference_s = found.clock_difference_s
    if abs(difference_s) > CLOCK_WARN_S + found.clock_uncertainty_s:
        what = f"the database's clock is {abs(difference_s):.1f} s {'ahead' if difference_s > 0 else 'behind'}"
        return Finding(
            "clock", CheckStatus.WARN, what, "synchronize this machine with NTP; scheduled tasks may start late"
        )
    return Finding("clock", CheckStatus.OK, f"{abs(difference_s) * 1000:.0f} ms from the database's clock")


async def _check_adopted_tables(config: Config, dsn: str, *, is_repairing: bool) -> AsyncGenerator[Finding, None]:
    """Compare each adopted table with its tasks, after its differences were repaired if that was asked for."""
    compared = await adoption.compare(dsn, config.adopt)
    if compared is None:
        for name in config.adopt:
            what = "not compared: this user is not the owner or an orchestrator"
            yield Finding(f"adopt {name}", CheckStatus.WARN, what, "set DATABASE_URL to such a user")
        return
    repaired: dict[str, int] = {}
    if is_repairing and compared:
        repaired = {each.name: await adoption.repair(dsn, each.name) for each in compared}
        compared = await adoption.compare(dsn, config.adopt) or []
    for each in compared:
        check = f"adopt {each.name}"
        if repaired.get(each.name):
            yield Finding(check, CheckStatus.OK, f"{repaired[each.name]:,} differences repaired")
        if each.is_outdated:
            do = f"windlass db adopt {each.name} --apply"
            yield Finding(check, CheckStatus.WARN, "the configuration or Windlass changed since it was applied", do)
        if not each.is_backfilled:
            do = f"windlass db adopt {each.name} --backfill"
            yield Finding(check, CheckStatus.WARN, "rows that were queued before are not all enqueued", do)
        if each.deferred:
            what = f"{each.deferred:,} rows are not written yet: {each.deferred_reason}"
            yield Finding(check, CheckStatus.WARN, what, "fix the cause, then windlass doctor --repair")
        differences = ", ".join(f"{count:,} {DIFFERENCES[kind]}" for kind, count in each.differences.items())
        if differences:
            yield Finding(check, CheckStatus.WARN, differences, "windlass doctor --repair")
        else:
            yield Finding(check, CheckStatus.OK, "rows and tasks agree")
    for name in config.adopt.keys() - {each.name for each in compared}:
        do = f"windlass db adopt {name} --apply"
        yield Finding(f"adopt {name}", CheckStatus.WARN, "configured, but not applied", do)


def _clause(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
