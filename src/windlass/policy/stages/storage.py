"""Grows the fleet's shared volume before it is full, by at most one step per check.

Workers measure the used space, the provider reports the size. Free space is the difference, so that a resize shows at
once. A volume never shrinks, so an implausible measurement causes no resize. If either value stays unknown for several
checks while workers use the volume, an alert fires: otherwise a full volume would come as a surprise.
"""

from windlass.model.action import Action, GrowVolume
from windlass.model.snapshot import VolumeResize
from windlass.model.worker import WorkerStatus
from windlass.policy.planning_context import PlanningContext

# The provider's largest volume.
MAX_VOLUME_GB = 4096
# Older measurements are ignored.
MAX_MEASUREMENT_AGE_S = 3600.0
# A worker that has been active for this long should have measured the volume. Adding up all files takes ten minutes.
MEASURED_BY_S = 1800.0
# Consecutive checks without a result before an alert fires.
UNKNOWN_CHECKS_TO_ALERT = 3
FULL, NOT_GROWN, IMPLAUSIBLE, UNKNOWN = "STORAGE_FULL", "STORAGE_NOT_GROWN", "STORAGE_IMPLAUSIBLE", "STORAGE_UNKNOWN"
_GB = 10**9
# Vendors do not say which of the two they mean. A volume cannot hold more than the larger.
_GIB = 2**30


def grow_storage(context: PlanningContext) -> list[Action]:
    """Runs in every cycle; the volume is known only every `storage_check_interval_cycles`."""
    volume, measured, fleet = context.snapshot.volume, context.snapshot.storage, context.fleet
    if volume is None:
        context.keep_alerts(FULL, NOT_GROWN, IMPLAUSIBLE)
        problem = context.snapshot.volume_problem
        if problem is None:
            context.keep_alerts(UNKNOWN)
            return []
        return _alert_if_usage_unknown(context, f"the network volume cannot be read from the provider: {problem}", 0.0)
    resize = context.planner_state.storage.resize
    requested = resize if resize is not None and resize.volume_id == volume.id else None
    context.remember_in("storage", checked_in_cycle=context.planner_state.cadence.cycle, resize=None)
    if measured is None or context.age_s(measured.at) > MAX_MEASUREMENT_AGE_S:
        why = f"no worker has measured network volume {volume.id} in the last hour"
        return _alert_if_usage_unknown(context, why, MEASURED_BY_S)
    context.remember_in("storage", unknown_checks=0)
    if context.is_stopped:
        return []

    used_gb = measured.used_bytes / _GB
    if not 0 <= measured.used_bytes <= volume.size_gb * _GIB:
        measurement = f"worker {measured.worker_id} measured {used_gb:.0f} GB used"
        why = f"network volume {volume.id} has {volume.size_gb} GB, but {measurement}; it is not resized"
        return context.alert(IMPLAUSIBLE, why, about=volume.id)
    free_gb, used_percent = volume.size_gb - used_gb, 100 * used_gb / volume.size_gb
    if free_gb >= fleet.storage_min_free_gb and used_percent <= fleet.storage_max_percent_used:
        return []
    why = f"{used_gb:.0f} of {volume.size_gb} GB used ({used_percent:.0f} %), {max(0, free_gb):.0f} GB free"
    size_gb = min(volume.size_gb + fleet.storage_expansion_increment_gb, MAX_VOLUME_GB)
    if size_gb <= volume.size_gb:
        return context.alert(FULL, f"network volume {volume.id} is at its largest size: {why}", about=volume.id)
    context.remember_in("storage", resize=VolumeResize(volume.id, size_gb, context.now))
    alerts: list[Action] = []
    if requested is not None and volume.size_gb < requested.size_gb:
        since = f"{requested.size_gb} GB requested at {requested.at:%H:%M:%S} UTC, it has {volume.size_gb} GB"
        alerts = context.alert(NOT_GROWN, f"network volume {volume.id} did not grow: {since}; {why}", about=volume.id)
    return [*alerts, GrowVolume(volume.id, size_gb, why)]


def _alert_if_usage_unknown(context: PlanningContext, why: str, active_s: float) -> list[Action]:
    """Count a check without a result if a worker has been active for `active_s` and may fill the volume."""
    workers = (state.worker for state in context.states.values() if state.is_managed)
    starts = [worker.activated_at for worker in workers if worker.status is WorkerStatus.ACTIVE and worker.activated_at]
    is_used = any(context.age_s(started_at) >= active_s for started_at in starts)
    checks = context.planner_state.storage.unknown_checks + 1 if is_used else 0
    context.remember_in("storage", unknown_checks=checks)
    if checks < UNKNOWN_CHECKS_TO_ALERT:
        return []
    return context.alert(UNKNOWN, f"{why}; it does not grow until its usage is known")
