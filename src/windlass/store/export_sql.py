"""The schema, or the deltas a database lacks, as one SQL script for people who apply SQL by hand.

The result is the same as that of `migrate`, including the rows in windlass.migrations.
"""

from importlib import resources

from windlass.store.migration import LOCK_KEY, LOCK_TIMEOUT_S, Migration

# Creates the roles and applies their rights. Not part of the schema: not every database has these roles.
ROLES = resources.files("windlass.store").joinpath("roles.sql").read_text()
_SCRIPT = resources.files("windlass.store").joinpath("export_sql.sql").read_text()


def script(migrations: list[Migration], program_version: str, *, from_version: int) -> str:
    """A transaction that applies `migrations` to a database at exactly `from_version` (0: empty)."""
    return _SCRIPT.format(
        program_version=program_version,
        from_version=from_version,
        to_version=migrations[-1].version,
        lock_timeout_s=LOCK_TIMEOUT_S,
        lock_key=LOCK_KEY,
        # Names come from our file names and checksums are hexadecimal: neither needs quoting.
        migrations="\n".join(
            f"-- {'-' * 60} {m.version:04} {m.name}\n\n{m.script.strip()}\n\n"
            "insert into windlass.migrations (version, name, checksum)"
            f" values ({m.version}, '{m.name}', '{m.checksum}');\n"
            for m in migrations
        ),
    )
