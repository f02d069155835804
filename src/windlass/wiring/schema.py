"""Schema tools for `windlass db` and `windlass doctor`, so that commands name no concrete adapter."""

from windlass.store.doctor_checks import DatabaseCheck
from windlass.store.export_sql import ROLES, script
from windlass.store.migration import (
    LATEST_VERSION,
    apply_roles,
    check_schema_version,
    migrate,
    missing_migrations,
    rollback,
)

__all__ = [
    "LATEST_VERSION",
    "ROLES",
    "DatabaseCheck",
    "apply_roles",
    "check_schema_version",
    "migrate",
    "missing_migrations",
    "rollback",
    "script",
]
