"""Schema tools for `windlass db` and `windlass doctor`, so that commands name no concrete adapter."""

from windlass.store.doctor_checks import DatabaseCheck
from windlass.store.export_sql import GRANTS, script
from windlass.store.migrate import LATEST_VERSION, check_schema_version, migrate, missing_migrations

__all__ = [
    "GRANTS",
    "LATEST_VERSION",
    "DatabaseCheck",
    "check_schema_version",
    "migrate",
    "missing_migrations",
    "script",
]
