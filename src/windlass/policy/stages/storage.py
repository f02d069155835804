"""Storage that a fleet's machines share: it grows before it is full, by one step for each look at it.

How much is used is measured on a worker, how large it is the provider says; what is free is the difference, so that a
step that was taken shows at once. A volume never shrinks, so a measurement that cannot be true buys none. Where one of
the two is not known for several looks while workers fill it, a person is told: nobody else would notice.
"""

from windlass.model.action import Action, GrowVolume
from windlass.model.snapshot import VolumeResize
from windlass.model.worker import WorkerStatus
from windlass.policy.planning_context import PlanningContext

# No volume can be larger.
MAX_VOLUME_GB = 4096
# What was measured longer ago than this is not acted upon.
MEASURED_WITHIN_S = 3600.0
# Whoever works for this long has measured it: where all files must be added up, that takes ten minutes.
MEASURED_BY_S = 1800.0
# Looks that show nothing before a person should know.
BLIND_TO_TELL = 3
FULL, NOT_GROWN, DOUBTED, UNKNOWN = "STORAGE_FULL", "STORAGE_NOT_GROWN", "STORAGE_DOUBTED", "STORAGE_UNKNOWN"
_GB = 10**9
# Vendors do not say which of the two they mean. What is more than the larger cannot be in it.
_GIB = 2**30


def grow_storage(context: PlanningContext) -> list[Action]:
    """Looked at every `storage_check_interval_cycles`; in the cycles between, nothing is known of it."""
    volume, measured = context.snapshot.volume, context.snapshot.storage
    if volume is None:
        context.keep_alerts(FULL, NOT_GROWN, DOUBTED)
        problem = context.snapshot.volume_problem
        if problem is None:
            context.keep_alerts(UNKNOWN)
            return []
        return _note_blindness(context, f"its network volume cannot be seen: {problem}", 0.0)
    context.remember_in("storage", checked_in_cycle=context.planner_state.cadence.cycle)
    asked = (
        context.planner_state.storage.resize
        if context.planner_state.storage.resize and context.planner_state.storage.resize.volume_id == volume.id
        else None
    )
    context.remember_in("storage", resize=None)
    if measured is None or context.age_s(measured.at) > MEASURED_WITHIN_S:
        why = f"no worker has measured network volume {volume.id} within the last hour: is it mounted at volume_path?"
        return _note_blindness(context, why, MEASURED_BY_S)
    context.remember_in("storage", unknown_checks=0)
    if context.is_stopped:
        return []
    if not 0 <= measured.used_bytes <= volume.size_gb * _GIB:
        said = f"{measured.worker_id} says that {measured.used_bytes / _GB:.0f} GB of it are used"
        why = f"network volume {volume.id} has {volume.size_gb} GB, and {said}: it does not grow by that"
        return context.alert(DOUBTED, why, about=volume.id)
    used_gb = measured.used_bytes / _GB
    free_gb, used_percent = volume.size_gb - used_gb, 100 * used_gb / volume.size_gb
    if free_gb >= context.fleet.storage_min_free_gb and used_percent <= context.fleet.storage_max_percent_used:
        return []
    why = f"{used_gb:.0f} of {volume.size_gb} GB are used ({used_percent:.0f} %), {max(0, free_gb):.0f} GB are free"
    size_gb = min(volume.size_gb + context.fleet.storage_expansion_increment_gb, MAX_VOLUME_GB)
    if size_gb <= volume.size_gb:
        return context.alert(FULL, f"network volume {volume.id}: {why}, and it cannot grow any more", about=volume.id)
    context.remember_in("storage", resize=VolumeResize(volume.id, size_gb, context.now))
    alerts: list[Action] = []
    if asked is not None and volume.size_gb < asked.size_gb:
        since = f"asked for {asked.size_gb} GB at {asked.at:%H:%M:%S} UTC, it has {volume.size_gb}"
        alerts = context.alert(NOT_GROWN, f"network volume {volume.id} does not grow: {why}; {since}", about=volume.id)
    return [*alerts, GrowVolume(volume.id, size_gb, why)]


def _note_blindness(context: PlanningContext, why: str, working_s: float) -> list[Action]:
    """How full it is cannot be said, although somebody has worked for so long and may fill it."""
    workers = (state.worker for state in context.states.values() if state.is_managed)
    starts = [worker.activated_at for worker in workers if worker.status is WorkerStatus.ACTIVE and worker.activated_at]
    is_used = any(context.age_s(started_at) >= working_s for started_at in starts)
    looks = context.planner_state.storage.unknown_checks + 1 if is_used else 0
    context.remember_in("storage", unknown_checks=looks)
    return context.alert(UNKNOWN, f"{why}; it does not grow until that is known") if looks >= BLIND_TO_TELL else []
