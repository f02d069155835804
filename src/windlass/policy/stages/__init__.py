"""The stages of a cycle, one file per part of a worker's life."""

from windlass.policy.stages.budget import keep_budget
from windlass.policy.stages.health import brake, fail_broken, fail_slots, promote, requeue_orphans, warn
from windlass.policy.stages.reconcile import (
    clean_up,
    doubt_strays,
    end_drained,
    end_strays,
    find_machines,
    keep_provider,
    prepare,
)
from windlass.policy.stages.scaling import scale
from windlass.policy.stages.storage import grow_storage

__all__ = [
    "brake",
    "clean_up",
    "doubt_strays",
    "end_drained",
    "end_strays",
    "fail_broken",
    "fail_slots",
    "find_machines",
    "grow_storage",
    "keep_budget",
    "keep_provider",
    "prepare",
    "promote",
    "requeue_orphans",
    "scale",
    "warn",
]
