"""`windlass doctor`: is everything here that windlass needs, and if not, what to do.

Looks and changes nothing: where there is no embedded database yet, its place is looked over, and one is tried out in a
temporary directory.
"""

import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.cli.common import AsJson, ConfigFile, DataDir, command, load
from windlass.cli.output import print_json
from windlass.model.errors import WindlassError

if TYPE_CHECKING:
    from windlass.model.config import Config
    from windlass.store.doctor_checks import DatabaseCheck

OLDEST_PYTHON = (3, 11)
OLDEST_SERVER = 140_000
# Below the first it will soon be full; below the second PostgreSQL may not even start.
DISK_WARN_BYTES = 2 * 1024**3
DISK_FAIL_BYTES = 200 * 1024**2
# Leases go by the database's clock; this machine's only decides how punctually a waiting task is looked for.
CLOCK_WARN_S = 2.0


class CheckStatus(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    verdict: CheckStatus
    what: str
    # Empty where there is nothing to do.
    do: str = ""


@command
async def doctor(config: ConfigFile = None, data_dir: DataDir = None, as_json: AsJson = False) -> int:
    """Check this machine and the database.

    A line for each thing, with what to do about it. Exit code 1 if something fails.
    """
    findings: list[Finding] = []
    # Closed in order if our reader goes away: what the loop's end finds open it closes all at once, one inside another.
    async with aclosing(_findings(config, data_dir)) as found:
        async for finding in found:
            findings.append(finding)
            if not as_json:
                advice = f": {finding.do}" if finding.do else ""
                word = finding.verdict.upper() if finding.verdict is CheckStatus.FAIL else finding.verdict.value
                print(f"{word:<5}{finding.check:<14}{finding.what}{advice}", flush=True)
    if as_json:
        print_json(findings)
    return 1 if any(finding.verdict is CheckStatus.FAIL for finding in findings) else 0


async def _findings(config_file: Path | None, data_dir: Path | None) -> AsyncGenerator[Finding, None]:
    yield _python()
    yield _platform()
    yield _gpu()
    try:
        config = load(config_file, data_dir).config
    except WindlassError as error:
        yield Finding("configuration", CheckStatus.FAIL, _clause(error))
        return
    yield Finding("configuration", CheckStatus.OK, "readable")
    async with aclosing(_providers(config)) as of_providers:
        async for finding in of_providers:
            yield finding
    if config.database_url is None:
        disk = _disk(config)
        yield disk
        if disk.verdict is CheckStatus.FAIL:
            return
    try:
        async with _reached(config) as (where, examination, is_trial):
            yield where
            for finding in _database(examination, is_embedded=config.database_url is None, is_trial=is_trial):
                yield finding
    except WindlassError as error:
        yield Finding("database", CheckStatus.FAIL, _clause(error))


async def _providers(config: "Config") -> AsyncGenerator[Finding, None]:
    from windlass.wiring import providers

    for name, examine in (("hetzner", providers.examine_hetzner), ("runpod", providers.examine_runpod)):
        try:
            async with aclosing(examine(config)) as remarks:
                async for remark in remarks:
                    verdict = CheckStatus.FAIL if remark.is_grave else CheckStatus.WARN if remark.do else CheckStatus.OK
                    yield Finding(remark.check, verdict, remark.what, remark.do)
        except WindlassError as error:
            yield Finding(name, CheckStatus.FAIL, _clause(error))


# -------------------------------------------------------------------------------------------------------- this machine


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST_PYTHON:
        return Finding("python", CheckStatus.FAIL, version, "install Python 3.11 or newer")
    return Finding("python", CheckStatus.OK, f"{version} at {sys.executable}")


def _platform() -> Finding:
    import platform

    name = f"{platform.system()} {platform.machine()}"
    if platform.system() not in ("Linux", "Darwin"):
        return Finding("platform", CheckStatus.WARN, name, "workers and the embedded database need Linux or macOS")
    return Finding("platform", CheckStatus.OK, name)


def _gpu() -> Finding:
    """By NVML, as a worker reports it."""
    from windlass.worker.gpu import GpuReader

    reader = GpuReader()
    reader.start()
    reader.stop()
    vitals = reader.vitals()
    if not vitals:
        return Finding("gpu", CheckStatus.OK, "no NVIDIA driver: workers report no GPU memory")
    if not vitals["vram_total_mb"]:
        return Finding("gpu", CheckStatus.WARN, "the NVIDIA driver is there, but no GPU answers", "look at nvidia-smi")
    return Finding(
        "gpu", CheckStatus.OK, f"{vitals['vram_used_mb']:,} of {vitals['vram_total_mb']:,} MB of memory used"
    )


def _disk(config: "Config") -> Finding:
    import os
    import shutil

    from windlass.wiring import stores

    data_dir = stores.data_dir(config)
    there = next(folder for folder in (data_dir, *data_dir.parents) if os.path.exists(folder))  # noqa: PTH110
    free_bytes = shutil.disk_usage(there).free
    if not os.access(there, os.W_OK | os.X_OK):
        return Finding("disk", CheckStatus.FAIL, f"{there} cannot be written", "name another place with --data-dir")
    what = f"{free_bytes / 1024**3:.1f} GiB free for {data_dir}"
    if free_bytes < DISK_WARN_BYTES:
        verdict = CheckStatus.FAIL if free_bytes < DISK_FAIL_BYTES else CheckStatus.WARN
        return Finding("disk", verdict, what, "make room, or name another place with --data-dir")
    return Finding("disk", CheckStatus.OK, what)


# -------------------------------------------------------------------------------------------------------- the database


@asynccontextmanager
async def _reached(config: "Config") -> AsyncIterator[tuple[Finding, "DatabaseCheck", bool]]:
    from windlass.wiring import stores

    if config.database_url is not None or stores.has_embedded_database(config):
        async with stores.database(config, makes_schema=False) as dsn:
            examination = await stores.examine_database(dsn)
            kind = (
                "embedded, in " + str(stores.data_dir(config)) if config.database_url is None else "from DATABASE_URL"
            )
            what = f"{examination.database} as {examination.user} ({kind})"
            yield Finding("database", CheckStatus.OK, what), examination, False
        return
    stores.check_place_of_embedded_database(config)
    with stores.temporary_data_dir() as folder:
        trial = config.model_copy(update={"data_dir": folder / "data"})
        async with stores.database(trial) as dsn:
            what = f"the embedded one works; it will be made in {stores.data_dir(config)} when first used"
            yield Finding("database", CheckStatus.OK, what), await stores.examine_database(dsn), True


def _database(found: "DatabaseCheck", *, is_embedded: bool, is_trial: bool) -> Iterator[Finding]:
    yield _server_version(found)
    if not is_trial:
        yield _schema(found, is_embedded=is_embedded)
        yield _privileges(found)
    yield _pooler(found)
    yield _listen(found)
    yield _clock(found)


def _server_version(found: "DatabaseCheck") -> Finding:
    what = f"PostgreSQL {found.server_version}"
    if found.server_version_number < OLDEST_SERVER:
        return Finding("version", CheckStatus.FAIL, what, "windlass needs PostgreSQL 14 or newer")
    return Finding("version", CheckStatus.OK, what)


def _schema(found: "DatabaseCheck", *, is_embedded: bool) -> Finding:
    from windlass.store.migrate import check_schema_version

    if "usage on schema windlass" in found.missing_privileges:
        return Finding("schema", CheckStatus.FAIL, "there is one that this user may not enter", "see privileges")
    try:
        check_schema_version(found.schema_version)
    except WindlassError as error:
        # Workers and clients need only the contract. An embedded database gets its schema when it is opened next.
        is_usable = found.supports_contract or (is_embedded and found.schema_version is None)
        return Finding("schema", CheckStatus.WARN if is_usable else CheckStatus.FAIL, _clause(error))
    return Finding("schema", CheckStatus.OK, f"version {found.schema_version}")


def _privileges(found: "DatabaseCheck") -> Finding:
    if found.missing_privileges:
        shown = ", ".join(found.missing_privileges[:3])
        more = f" and {len(found.missing_privileges) - 3} more" if len(found.missing_privileges) > 3 else ""
        what = f"{found.user} lacks {shown}{more}"
        return Finding("privileges", CheckStatus.FAIL, what, "let the schema's owner grant them")
    if found.schema_version is None and not found.may_create_schema:
        what = f"{found.user} may not create the schema"
        do = f"grant create on database {found.database}, or let its owner apply the output of `windlass db sql`"
        return Finding("privileges", CheckStatus.FAIL, what, do)
    return Finding("privileges", CheckStatus.OK, f"{found.user} has all it needs")


def _pooler(found: "DatabaseCheck") -> Finding:
    if found.is_pooled:
        what = "a pooler stands before the server: workers look for tasks once a second instead of being woken"
        return Finding("pooler", CheckStatus.WARN, what, "use the direct address if that is too slow")
    return Finding("pooler", CheckStatus.OK, "none between us and the server")


def _listen(found: "DatabaseCheck") -> Finding:
    if found.can_listen:
        return Finding("listen", CheckStatus.OK, "notifications arrive")
    if found.is_pooled:
        return Finding("listen", CheckStatus.WARN, "not possible through a pooler", "see pooler")
    what = "no notification arrives: workers look for tasks once a second instead"
    return Finding("listen", CheckStatus.WARN, what, "is something between us and the server?")


def _clock(found: "DatabaseCheck") -> Finding:
    difference_s = found.clock_difference_s
    if abs(difference_s) > CLOCK_WARN_S + found.clock_uncertainty_s:
        what = f"the database's clock is {abs(difference_s):.1f} s {'ahead' if difference_s > 0 else 'behind'}"
        return Finding("clock", CheckStatus.WARN, what, "set this machine's by NTP; scheduled tasks may be found late")
    return Finding("clock", CheckStatus.OK, f"{abs(difference_s) * 1000:.0f} ms apart from the database's")


def _clause(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
