"""`windlass db`: the database schema and its migrations."""

import asyncio
import sys
from typing import Annotated, Any

import typer

from windlass import __version__
from windlass.cli.adopt import adopt
from windlass.cli.options import AsJson, ConfigFile, DataDir, command, load
from windlass.cli.output import print_json
from windlass.model.config import Config
from windlass.model.errors import BadInput
from windlass.model.redaction import without_password
from windlass.wiring import schema, stores

app = typer.Typer(help="Manage the database schema.", no_args_is_help=True)
app.command()(adopt)


@app.command()
@command
async def migrate(config: ConfigFile = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Migrate the schema to the version of this program.

    Workers may run meanwhile: no table is locked for longer than two seconds. Safe to repeat.
    """
    async with stores.database(load(config, data_dir).config, makes_schema=False) as dsn:
        applied = await schema.migrate(dsn)
    if as_json:
        print_json({"applied": [m.version for m in applied], "version": schema.LATEST_VERSION})
        return
    for migration in applied:
        print(f"applied {migration.version:04} {migration.name}")
    print(f"schema is at version {schema.LATEST_VERSION}")


@app.command()
@command
async def rollback(
    to: Annotated[int, typer.Option("--to", min=1, help="Schema version of the older program.", metavar="VERSION")],
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Undo migrations, so that an older program can be used again.

    Run it with the newer program, while no orchestrator runs. `windlass db status` of the older program shows the
    version that it needs. Migrations that cannot be undone are refused before anything is changed.
    """
    async with stores.database(load(config, data_dir).config, makes_schema=False) as dsn:
        undone = await schema.rollback(dsn, to)
    if as_json:
        print_json({"undone": [m.version for m in undone], "version": to})
        return
    for migration in undone:
        print(f"undid {migration.version:04} {migration.name}")
    print(f"schema is at version {to}" if undone else "nothing to undo")


@app.command()
@command
async def status(config: ConfigFile = None, data_dir: DataDir = None, as_json: AsJson = False) -> int:
    """Show which migrations the database has.

    Changes nothing. Exit code 1 if the schema is not at the version of this program.
    """
    applied = await _applied_migrations(load(config, data_dir).config)
    missing = {m.version: m.name for m in schema.missing_migrations(applied)}
    rows = [
        {
            "version": version,
            "name": applied[version]["name"] if version in applied else missing[version],
            "applied_at": applied[version]["applied_at"] if version in applied else None,
            "is_known": version <= schema.LATEST_VERSION,
        }
        for version in sorted({*missing, *applied})
    ]
    version = max(applied, default=None)
    if as_json:
        print_json({"version": version, "program_version": schema.LATEST_VERSION, "migrations": rows})
    else:
        for row in rows:
            when = f"applied {row['applied_at']:%Y-%m-%d %H:%M}" if row["applied_at"] else "not applied"
            print(f"{row['version']:04} {row['name']:<20} {when}{'' if row['is_known'] else ' by a newer windlass'}")
    return 0 if version == schema.LATEST_VERSION else 1


@app.command()
@command
async def sql(
    missing: Annotated[
        bool, typer.Option("--missing", help="Only migrations that the database does not have. Connects to it.")
    ] = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Print the migrations as one SQL script.

    Apply it by hand, for example in Supabase's SQL editor. The result is the same as that of `windlass db migrate`.
    """
    applied = await _applied_migrations(load(config, data_dir).config) if missing else {}
    wanted = schema.missing_migrations(applied)
    if not wanted:
        print(f"-- Nothing to apply: the schema has version {max(applied)}, this program {schema.LATEST_VERSION}.")
    else:
        print(schema.script(wanted, __version__, from_version=max(applied, default=0)), end="")


@app.command()
@command
async def roles(
    sql: Annotated[bool, typer.Option("--sql", help="Print the SQL script instead. Connects to nothing.")] = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Create the database roles and give them their rights.

    Run it as the user who applied the schema. The role windlass_owner then owns the schema, and `windlass up` and local
    workers use windlass_orchestrator and windlass_worker. Safe to repeat.
    """
    if sql:
        print(schema.ROLES, end="")
        return
    async with stores.database(load(config, data_dir).config) as dsn:
        await schema.apply_roles(dsn, schema.ROLES)
    print("roles: windlass_owner, windlass_orchestrator, windlass_producer, windlass_worker, windlass_viewer")
    print("grant one to each user: create role shop login password '...' in role windlass_producer;")


@app.command()
@command
async def url(
    keep: Annotated[
        bool, typer.Option("--keep", help="Start the embedded database if it is stopped, and run it until Ctrl-C.")
    ] = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Print the URL of the database, without its password.

    The embedded database runs only while a windlass command uses it, such as `windlass up` or a worker.
    """

    def print_url(address: str) -> None:
        if as_json:
            print_json({"url": address})
        else:
            print(address)
        sys.stdout.flush()

    loaded = load(config, data_dir).config
    if loaded.database_url is not None:
        print_url(without_password(loaded.database_url.get_secret_value()))
        return
    if keep:
        async with stores.database(loaded, makes_schema=False, may_create=False) as dsn:
            print_url(dsn)
            await asyncio.Event().wait()
    stores.check_embedded_database_is_there(loaded)
    address = stores.running_database_url(loaded)
    if address is None:
        raise BadInput(
            f"the embedded database in {stores.data_dir(loaded)} is not running. Add --keep to start it, or start "
            "`windlass up` or a worker."
        )
    print_url(address)


@app.command()
@command
def programs() -> None:
    """Print the folder with the programs of the embedded PostgreSQL.

    It has `pg_dump`, `pg_restore` and `psql` of the embedded database's own version.
    """
    print(stores.postgres_programs())


async def _applied_migrations(config: Config) -> dict[int, Any]:
    """Migrations by version. An embedded database that does not exist yet is not created, and has none."""
    if config.database_url is None and not stores.has_embedded_database(config):
        return {}
    async with stores.database(config, makes_schema=False) as dsn:
        return await stores.applied_migrations_of(dsn)
