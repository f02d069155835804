"""Storage that a fleet's machines share: it grows before it is full, by one step for each look at it.

How much is used is measured on a worker, how large it is the provider says; what is free is the difference, so that a
step that was taken shows at once. A volume never shrinks, so a measurement that cannot be true buys none.
"""

from windlass.model.action import Action, GrowVolume
from windlass.model.snapshot import Growth
from windlass.policy.draft import Draft

# No volume can be larger.
MAX_VOLUME_GB = 4096
# What was measured longer ago than this is not acted upon.
MEASURED_WITHIN_S = 3600.0
FULL, NOT_GROWN, DOUBTED = "STORAGE_FULL", "STORAGE_NOT_GROWN", "STORAGE_DOUBTED"
_GB = 10**9
# Vendors do not say which of the two they mean. What is more than the larger cannot be in it.
_GIB = 2**30


def grow_storage(draft: Draft) -> list[Action]:
    """Looked at every `storage_check_interval_cycles`; in the cycles between, nothing is known of it."""
    volume, measured = draft.snapshot.volume, draft.snapshot.storage
    if volume is None:
        draft.keep_alerts(FULL, NOT_GROWN, DOUBTED)
        return []
    asked = draft.memory.growth if draft.memory.growth and draft.memory.growth.volume_id == volume.id else None
    draft.remember(growth=None)
    if measured is None or draft.age_s(measured.at) > MEASURED_WITHIN_S or draft.is_stopped:
        return []
    if not 0 <= measured.used_bytes <= volume.size_gb * _GIB:
        said = f"{measured.worker_id} says that {measured.used_bytes / _GB:.0f} GB of it are used"
        why = f"network volume {volume.id} has {volume.size_gb} GB, and {said}: it does not grow by that"
        return draft.alert(DOUBTED, why, about=volume.id)
    used_gb = measured.used_bytes / _GB
    free_gb, used_percent = volume.size_gb - used_gb, 100 * used_gb / volume.size_gb
    if free_gb >= draft.fleet.storage_min_free_gb and used_percent <= draft.fleet.storage_max_percent_used:
        return []
    why = f"{used_gb:.0f} of {volume.size_gb} GB are used ({used_percent:.0f} %), {max(0, free_gb):.0f} GB are free"
    size_gb = min(volume.size_gb + draft.fleet.storage_expansion_increment_gb, MAX_VOLUME_GB)
    if size_gb <= volume.size_gb:
        return draft.alert(FULL, f"network volume {volume.id}: {why}, and it cannot grow any more", about=volume.id)
    draft.remember(growth=Growth(volume.id, size_gb, draft.now))
    alerts: list[Action] = []
    if asked is not None and volume.size_gb < asked.size_gb:
        since = f"asked for {asked.size_gb} GB at {asked.at:%H:%M:%S} UTC, it has {volume.size_gb}"
        alerts = draft.alert(NOT_GROWN, f"network volume {volume.id} does not grow: {why}; {since}", about=volume.id)
    return [*alerts, GrowVolume(volume.id, size_gb, why)]
