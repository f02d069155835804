"""The stages of a plan, in the order of policy/plan.py.

provider_account, health, orphans: holds. machines: adoption and preparation. termination: failures and deletions.
budget, failure_rate, provider_backoff: limits on spawning. rollout: replacement of
old versions. scaling: spawning and draining. storage. warnings.
"""

from windlass.policy.stages.budget import apply_budget
from windlass.policy.stages.health import hold_on_mass_silence, promote
from windlass.policy.stages.machines import adopt_machines, prepare_machines, record_machines
from windlass.policy.stages.orphans import delete_orphans, hold_on_many_orphans
from windlass.policy.stages.provider_account import hold_on_provider_change
from windlass.policy.stages.rollout import advance_rollout
from windlass.policy.stages.scaling import scale
from windlass.policy.stages.storage import grow_storage
from windlass.policy.stages.termination import (
    delete_drained,
    delete_failed,
    fail_slots,
    fail_workers,
    requeue_orphaned_tasks,
)
from windlass.policy.stages.warnings import raise_warnings

__all__ = [
    "adopt_machines",
    "advance_rollout",
    "apply_budget",
    "delete_drained",
    "delete_failed",
    "delete_orphans",
    "fail_slots",
    "fail_workers",
    "grow_storage",
    "hold_on_many_orphans",
    "hold_on_mass_silence",
    "hold_on_provider_change",
    "prepare_machines",
    "promote",
    "raise_warnings",
    "record_machines",
    "requeue_orphaned_tasks",
    "scale",
]
