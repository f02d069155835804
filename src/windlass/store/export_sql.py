"""The migrations as one SQL script, for people who apply SQL by hand. It ends where `migrate` ends."""

from importlib import resources

from windlass.store.migrate import LOCK_KEY, LOCK_TIMEOUT_S, Migration

# Rights for those who are not the schema's owner. Not a migration: not every database wants these roles.
GRANTS = resources.files("windlass.store").joinpath("grants.sql").read_text()
_SCRIPT = resources.files("windlass.store").joinpath("export_sql.sql").read_text()


def script(migrations: list[Migration], program_version: str) -> str:
    """These migrations, which must be consecutive, with the rows by which `migrate` will know them."""
    return _SCRIPT.format(
        program_version=program_version,
        from_version=migrations[0].version - 1,
        to_version=migrations[-1].version,
        lock_timeout_s=LOCK_TIMEOUT_S,
        lock_key=LOCK_KEY,
        migrations="\n".join(map(_applied, migrations)),
    )


def _applied(migration: Migration) -> str:
    # The name comes from a file of ours and the checksum is hexadecimal: neither needs quoting.
    row = f"({migration.version}, '{migration.name}', '{migration.checksum}')"
    return (
        f"-- {'-' * 60} {migration.version:04} {migration.name}\n\n{migration.sql.strip()}\n\n"
        f"insert into windlass.migrations (version, name, checksum) values {row};\n"
    )
