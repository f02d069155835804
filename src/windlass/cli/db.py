"""`windlass db`: the schema and where it lives."""

from typing import Any

import asyncpg
import typer

from windlass import wire
from windlass.cli.common import AsJson, ConfigFile, DataDir, command, load, print_json
from windlass.store.migrate import LATEST_VERSION, MIGRATIONS, applied_migrations
from windlass.store.postgres import CONNECTION_ERRORS, unavailable

app = typer.Typer(help="The database's schema.", no_args_is_help=True)


@app.command()
@command
async def migrate(config: ConfigFile = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Bring the schema to this program's version; all of it or nothing. Safe to repeat."""
    loaded = load(config, data_dir)
    # The embedded database is migrated when it is opened, so what was missing is asked before.
    async with wire.database(loaded.config) as dsn:
        applied = await wire.migrate_database(dsn)
    if as_json:
        print_json({"applied": [m.version for m in applied], "version": LATEST_VERSION})
    else:
        for migration in applied:
            print(f"applied {migration.version:04} {migration.name}")
        print(f"the schema is at version {LATEST_VERSION}")


@app.command()
@command
async def status(config: ConfigFile = None, data_dir: DataDir = None, as_json: AsJson = False) -> int:
    """Which migrations the database has. Exit code 1 if it is not at this program's version."""
    loaded = load(config, data_dir)
    async with wire.database(loaded.config) as dsn:
        applied = await _applied(dsn)
    known = {migration.version: migration.name for migration in MIGRATIONS}
    rows = [
        {
            "version": version,
            "name": known.get(version) or applied[version]["name"],
            "applied_at": applied[version]["applied_at"] if version in applied else None,
            "is_known": version in known,
        }
        for version in sorted({*known, *applied})
    ]
    if as_json:
        print_json({"version": max(applied, default=None), "program_version": LATEST_VERSION, "migrations": rows})
    else:
        for row in rows:
            when = f"applied {row['applied_at']:%Y-%m-%d %H:%M}" if row["applied_at"] else "not applied"
            print(f"{row['version']:04} {row['name']:<20} {when}{'' if row['is_known'] else ' by a newer windlass'}")
    return 0 if max(applied, default=None) == LATEST_VERSION else 1


async def _applied(dsn: str) -> dict[int, Any]:
    try:
        connection = await asyncpg.connect(dsn, timeout=10, command_timeout=30, statement_cache_size=0)
        try:
            async with connection.transaction():
                return await applied_migrations(connection)
        finally:
            await connection.close(timeout=10)
    except CONNECTION_ERRORS as error:
        raise unavailable("reading the schema's version", dsn, error) from None
