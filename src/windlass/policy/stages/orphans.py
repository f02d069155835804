"""Deletes orphaned machines: machines with Windlass tags whose worker has no row, and duplicates of a worker's machine.

If most machines are orphaned, the database may have been restored from an old copy or emptied while they work. Then
none is deleted, and no worker is spawned, until a person had an hour to look or ran `windlass restart`.
"""

from datetime import datetime, timedelta

from windlass.model.action import Action, DeleteOrphan
from windlass.model.machine import Machine, MachineState
from windlass.policy.planning_context import PlanningContext

TOO_MANY_ORPHANS = "TOO_MANY_ORPHANS"
# At least this many orphans, and more than half of all machines, suggest that the database lost their rows.
MANY_ORPHANS_MIN = 3
# How long the alerted person has to react before the orphans are deleted.
ORPHANS_HELD_S = 3600.0


def hold_on_many_orphans(context: PlanningContext) -> list[Action]:
    """Writes are_orphans_held for delete_orphans."""
    before = context.snapshot.planner_state.orphans
    if context.snapshot.machines is None:
        if before.orphans_held_since is not None and _may_person_react(context, before.orphans_held_since):
            context.hold(TOO_MANY_ORPHANS, "in the last machine list most machines had no worker")
            context.keep_alerts(TOO_MANY_ORPHANS)
        return []
    # With machines whose worker has no slot any more: they take up room, and become orphans when their worker ends.
    extra = [*context.unowned, *(machine for _, machine in context.slotless)]
    orphan_since = {machine.id: before.orphan_since.get(machine.id, context.now) for machine in extra}
    context.remember_in("orphans", orphan_since=orphan_since, orphans_held_since=None)
    if len(orphan_since) < MANY_ORPHANS_MIN:
        return []
    running = [machine for machine in context.snapshot.machines if machine.state is not MachineState.EXITED]
    orphans = [machine for machine in _lasting_orphans(context) if machine.state is not MachineState.EXITED]
    if len(orphans) < MANY_ORPHANS_MIN or len(orphans) * 2 <= len(running):
        return []
    since = before.orphans_held_since or context.now
    context.remember_in("orphans", orphans_held_since=since)
    if not _may_person_react(context, since):
        return []
    why = f"{len(orphans)} of {len(running)} machines have Windlass tags and no worker"
    context.are_orphans_held = True
    context.hold(TOO_MANY_ORPHANS, why)
    deleted_at = since + timedelta(seconds=ORPHANS_HELD_S)
    return context.alert(TOO_MANY_ORPHANS, f"{why}; they are deleted at {deleted_at:%H:%M:%S} UTC")


def delete_orphans(context: PlanningContext) -> list[Action]:
    """At most max_changes_per_cycle, so that a person can notice a mistake in time."""
    if context.snapshot.machines is None or context.is_stopped:
        return []
    duplicates = [(extra, keep) for extra, keep in context.duplicates if not extra.is_locked]
    orphans = [DeleteOrphan(extra.id, extra.name, f"duplicate of {keep}") for extra, keep in duplicates]
    if not context.are_orphans_held:
        orphans += [
            DeleteOrphan(machine.id, machine.name, "has Windlass tags and no worker")
            for machine in _lasting_orphans(context)
            if not machine.is_locked
        ]
    deletions = orphans[: context.fleet.max_changes_per_cycle]
    context.is_cut_short = context.is_cut_short or len(deletions) < len(orphans)
    return [*deletions]


def _may_person_react(context: PlanningContext, since: datetime) -> bool:
    """The hour has not passed, and no person has restarted the fleet since."""
    restarted_at = context.snapshot.restarted_at
    return context.age_s(since) < ORPHANS_HELD_S and (restarted_at is None or restarted_at < since)


def _lasting_orphans(context: PlanningContext) -> list[Machine]:
    """Orphans for longer than a row or a list may lag."""
    since, grace_s = context.planner_state.orphans.orphan_since, context.snapshot.traits.orphan_grace_s
    if not since:
        return []
    return [machine for machine in context.unowned if context.age_s(since[machine.id]) >= grace_s]
