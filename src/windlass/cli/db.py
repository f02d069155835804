"""`windlass db`: the schema, and how it got there."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windlass import __version__
from windlass.cli.common import AsJson, ConfigFile, DataDir, command, load
from windlass.cli.output import print_json
from windlass.model.errors import BadInput
from windlass.model.urls import without_password

if TYPE_CHECKING:
    from windlass.model.config import Config

app = typer.Typer(help="The database's schema.", no_args_is_help=True)


@app.command()
@command
async def migrate(config: ConfigFile = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Bring the schema to this program's version.

    All of it or nothing. Safe to repeat.
    """
    loaded = load(config, data_dir)
    from windlass.store.migrate import LATEST_VERSION
    from windlass.store.migrate import migrate as migrate_database
    from windlass.wiring import stores

    async with stores.database(loaded.config, makes_schema=False) as dsn:
        applied = await migrate_database(dsn)
    if as_json:
        print_json({"applied": [m.version for m in applied], "version": LATEST_VERSION})
        return
    for migration in applied:
        print(f"applied {migration.version:04} {migration.name}")
    print(f"the schema is at version {LATEST_VERSION}")


@app.command()
@command
async def status(config: ConfigFile = None, data_dir: DataDir = None, as_json: AsJson = False) -> int:
    """Show which migrations the database has.

    Changes nothing. Exit code 1 if the database is not at this program's version.
    """
    from windlass.store.migrate import LATEST_VERSION, MIGRATIONS, missing_migrations

    applied = await _applied(load(config, data_dir).config)
    known = {m.version: m.name for m in (*MIGRATIONS, *missing_migrations(applied))}
    rows = [
        {
            "version": version,
            "name": applied[version]["name"] if version in applied else known[version],
            "applied_at": applied[version]["applied_at"] if version in applied else None,
            "is_known": version <= LATEST_VERSION,
        }
        for version in sorted({*known, *applied})
    ]
    version = max(applied, default=None)
    if as_json:
        print_json({"version": version, "program_version": LATEST_VERSION, "migrations": rows})
    else:
        for row in rows:
            when = f"applied {row['applied_at']:%Y-%m-%d %H:%M}" if row["applied_at"] else "not applied"
            print(f"{row['version']:04} {row['name']:<20} {when}{'' if row['is_known'] else ' by a newer windlass'}")
    return 0 if version == LATEST_VERSION else 1


@app.command()
@command
async def sql(
    missing: Annotated[
        bool, typer.Option("--missing", help="Only what the database does not have yet; asks it.")
    ] = False,
    grants: Annotated[
        bool, typer.Option("--grants", help="Only the rights of the roles windlass_producer and windlass_worker.")
    ] = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Print the migrations as one SQL script.

    To apply by hand, in Supabase's SQL editor or after a review. The result is that of `windlass db migrate`.
    """
    from windlass.store.export_sql import GRANTS, script
    from windlass.store.migrate import LATEST_VERSION, missing_migrations

    if grants:
        if missing:
            raise BadInput("--missing is about migrations: leave it or --grants out.")
        print(GRANTS, end="")
        return
    applied = await _applied(load(config, data_dir).config) if missing else {}
    wanted = missing_migrations(applied)
    if not wanted:
        print(f"-- The schema is at version {max(applied)} and this program's is {LATEST_VERSION}: nothing to apply.")
    else:
        print(script(wanted, __version__, from_version=max(applied, default=0)), end="")


@app.command()
@command
async def url(
    keep: Annotated[
        bool, typer.Option("--keep", help="Start the embedded database if need be, and keep it until Ctrl-C.")
    ] = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Print the database's address, for psql and pg_dump; without a password.

    The embedded database can be reached while it runs: while `windlass up`, a worker or any other command is open.
    """
    import asyncio

    from windlass.wiring import stores

    def tell(address: str) -> None:
        if as_json:
            print_json({"url": address})
        else:
            print(address)
        sys.stdout.flush()

    loaded = load(config, data_dir).config
    if loaded.database_url is not None:
        tell(without_password(loaded.database_url.get_secret_value()))
        return
    if keep:
        async with stores.database(loaded, makes_schema=False, may_create=False) as dsn:
            tell(dsn)
            await asyncio.Event().wait()
    stores.check_embedded_database_is_there(loaded)
    address = stores.running_database_url(loaded)
    if address is None:
        raise BadInput(
            f"the embedded database in {stores.data_dir(loaded)} does not run now: add --keep to start it, or ask "
            "while `windlass up` or a worker runs."
        )
    tell(address)


async def _applied(config: "Config") -> dict[int, Any]:
    """What the database has. One that does not exist yet has nothing, and is not made by asking."""
    from windlass.wiring import stores

    if config.database_url is None and not stores.has_embedded_database(config):
        return {}
    async with stores.database(config, makes_schema=False) as dsn:
        return await stores.applied_migrations_of(dsn)
