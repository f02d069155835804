"""Adopted tables for `windlass db adopt` and `windlass doctor`, so that commands name no concrete adapter."""

from windlass.store.adoption import apply, backfill, compare, remove, repair
from windlass.store.adoption_checks import check_table
from windlass.store.adoption_script import apply_script

__all__ = ["apply", "apply_script", "backfill", "check_table", "compare", "remove", "repair"]
