"""State shared by the stages of one plan: the snapshot, each worker's derived state, and the results so far.

`build_context` derives the inputs. Each field below names the stage that writes it and the stages that read it.
A machine that is missing from a list counts as gone only if the list can be trusted: see `_presences`.
"""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from windlass.model.action import Action, Delete, Fail, FailSlot, RaiseAlert
from windlass.model.fleet import FleetConfig
from windlass.model.machine import Machine, MachineState
from windlass.model.snapshot import Hold, PlannerState, Snapshot, WorkerView
from windlass.model.worker import WorkerStatus
from windlass.policy.boot import boot_limit, kept_until
from windlass.policy.placement import placement_failure
from windlass.policy.quarantine import QuarantineDecision, decide_quarantines
from windlass.policy.worker_state import Presence, WorkerState, derive_worker_state

LIST_SHRANK = "LIST_SHRANK"
# A machine list is suspect if it lacks more than half of the machines that should be in it, and at least this many.
SUSPECT_SHRINK_MIN = 3
# A suspect list must persist this many times longer than a single missing machine before it is accepted.
SUSPECT_SHRINK_FACTOR = 3
# A worker whose last heartbeat is younger than this many intervals counts as live, whatever a list says.
ALIVE_HEARTBEATS = 2
# Consecutive long gaps between plans that establish a longer cycle interval. A single long gap is an outage.
GAPS_FOR_NEW_INTERVAL = 2
# A plan that follows sooner than this share of the poll interval was triggered by an event. Its gap does not count.
TRIGGERED_PLAN_SHARE = 0.5
# An alert whose condition persists is raised again after this time.
ALERT_REPEAT_S = 3600.0
_STAYING = (WorkerStatus.SPAWNING, WorkerStatus.ACTIVE)


@dataclass(slots=True)
class PlanningContext:
    # Inputs. Set by build_context, constant afterwards.
    snapshot: Snapshot
    fleet: FleetConfig
    states: dict[str, WorkerState]  # by worker id
    machines: dict[str, tuple[Machine, ...]]  # listed machines by the worker id they were created for, oldest first
    own: dict[str, Machine]  # the one listed machine that belongs to each worker, by worker id
    quarantines: dict[str, QuarantineDecision]  # by worker id, workers to replace because tasks fail on them

    # Results. Every stage may add to the first four.
    actions: list[Action]  # plan() appends what a stage returns; later stages read failed_ids, deleted_ids, FailSlot
    planner_state: PlannerState  # changed by remember, remember_in and hold
    alerts: dict[str, datetime]  # keys of the alerts whose condition holds, by alert and keep_alerts
    is_cut_short: bool = False  # a limit postponed work to a later cycle: spawning, draining, delete_orphans
    decision: str = ""  # written by scale

    # Facts that one stage finds out for another.
    # Written by hold_on_many_orphans, read by delete_orphans: do not delete orphaned machines in this cycle.
    are_orphans_held: bool = False
    # Written by apply_budget, read by scale: spawns that the budget allows. None: any number.
    affordable_spawns: int | None = None
    # Written by apply_budget, read by scale: why all workers must drain when their billing period ends.
    over_budget_reason: str | None = None

    @property
    def now(self) -> datetime:
        return self.snapshot.now

    def remember(self, **groups: Any) -> None:
        """Replace whole groups of the planner state."""
        self.planner_state = replace(self.planner_state, **groups)

    def remember_in(self, group: str, **fields: Any) -> None:
        """Replace fields of one group of the planner state."""
        self.remember(**{group: replace(getattr(self.planner_state, group), **fields)})

    def hold(self, code: str, reason: str, *, is_total: bool = False) -> None:
        """Stop spawning or, if total, every action. The first hold of a cycle stays unless a later one is stricter."""
        current = self.planner_state.hold
        if current is None or (is_total and not current.is_total):
            before = self.snapshot.planner_state.hold
            since = before.since if before is not None and before.code == code else self.now
            self.remember(hold=Hold(code, reason, since, is_total))

    @property
    def is_stopped(self) -> bool:
        """A total hold forbids every action on workers and machines."""
        return self.planner_state.hold is not None and self.planner_state.hold.is_total

    def alert(self, code: str, reason: str, *, about: str = "", worker_id: str | None = None) -> list[Action]:
        """Raise an alert unless it was raised within ALERT_REPEAT_S. Call it every cycle while the condition holds."""
        key = f"{code} {about or worker_id or ''}".rstrip()
        raised_at = self.snapshot.planner_state.alerts.get(key)
        is_due = raised_at is None or self.age_s(raised_at) >= ALERT_REPEAT_S
        self.alerts[key] = self.now if raised_at is None or is_due else raised_at
        return [RaiseAlert(code, reason, worker_id, about)] if is_due else []

    def keep_alerts(self, *codes: str) -> None:
        """Keep alerts of these codes open: this cycle cannot tell whether their condition still holds."""
        for key, raised_at in self.snapshot.planner_state.alerts.items():
            if key.split(" ", 1)[0] in codes:
                self.alerts[key] = raised_at

    @property
    def failed_ids(self) -> set[str]:
        return {action.worker_id for action in self.actions if isinstance(action, Fail)}

    @property
    def deleted_ids(self) -> set[str]:
        return {action.worker_id for action in self.actions if isinstance(action, Delete)}

    @property
    def failed_slots(self) -> set[int]:
        """Slots that stay empty until `windlass restart`, including those that this plan fails."""
        failed = {slot.slot for slot in self.snapshot.slots if slot.is_failed}
        return failed | {action.slot for action in self.actions if isinstance(action, FailSlot)}

    def machine_of(self, worker: WorkerView) -> Machine | None:
        return self.own.get(worker.id)

    @property
    def unowned(self) -> list[Machine]:
        """Listed machines whose worker has no row."""
        return [machine for name, found in self.machines.items() if name not in self.states for machine in found]

    @property
    def slotless(self) -> list[tuple[WorkerState, Machine]]:
        """Live workers without a slot on listed machines of the fleet, whose names only the control plane gives.

        The row was lost, in a failover or with an old backup, and the worker registered again as if by hand.
        """
        return [
            (state, machine)
            for name, state in self.states.items()
            if not state.is_managed
            for machine in self.machines.get(name, ())
        ]

    @property
    def duplicates(self) -> list[tuple[Machine, str]]:
        """Listed machines in addition to the one of their worker, each with the id of that one."""
        pairs: list[tuple[Machine, str]] = []
        for name, found in self.machines.items():
            state = self.states.get(name)
            if state is not None and len(found) == 1 and state.worker.machine_id == found[0].id:
                continue  # the usual case, kept cheap
            own = self.machine_of(state.worker) if state is not None and state.is_managed else None
            keep = state.worker.machine_id if state is not None else None
            keep = keep or (own.id if own is not None else None)
            if keep is not None:
                pairs += [(machine, keep) for machine in found if machine.id != keep]
        return pairs

    @property
    def cycle_interval_s(self) -> float:
        """Seconds between cycles: poll_interval_s, or longer if cycles really run less often."""
        gaps_s = self.planner_state.cadence.gaps_s
        lasting_s = min(gaps_s) if len(gaps_s) == GAPS_FOR_NEW_INTERVAL else 0.0
        return max(self.fleet.poll_interval_s, lasting_s)

    def has_recent_heartbeat(self, worker: WorkerView) -> bool:
        beat_at = worker.last_heartbeat
        return beat_at is not None and self.age_s(beat_at) < ALIVE_HEARTBEATS * self.fleet.heartbeat_interval_s

    def age_s(self, moment: datetime) -> float:
        return (self.now - moment).total_seconds()

    def in_s(self, seconds: float) -> datetime:
        return self.now + timedelta(seconds=seconds)


def build_context(snapshot: Snapshot, fleet: FleetConfig) -> PlanningContext:
    """Derive every worker's state. The only side result is a hold if the machine list shrank suspiciously."""
    listed: dict[str, list[Machine]] = {}
    for machine in sorted(snapshot.machines or (), key=lambda m: (m.created_at or snapshot.now, m.id)):
        listed.setdefault(machine.name, []).append(machine)
    machines = {name: tuple(found) for name, found in listed.items()}
    found = ((worker.id, _own_machine(worker, machines.get(worker.id, ()))) for worker in snapshot.workers)
    own = {worker_id: machine for worker_id, machine in found if machine is not None}

    before = snapshot.planner_state
    gaps_s, planned_at = before.cadence.gaps_s, before.cadence.planned_at
    gap_s = (snapshot.now - planned_at).total_seconds() if planned_at is not None else 0.0
    if gap_s >= TRIGGERED_PLAN_SHARE * fleet.poll_interval_s:
        gaps_s = (*gaps_s, gap_s)[-GAPS_FOR_NEW_INTERVAL:]
    cadence = replace(before.cadence, cycle=before.cadence.cycle + 1, gaps_s=gaps_s)
    # Holds are decided anew in every cycle.
    planner_state = replace(before, cadence=cadence, hold=None)

    managed = {worker.id for worker in snapshot.workers if worker.slot is not None}
    streaks = [streak for streak in snapshot.failure_streaks if streak.worker_id in managed]
    quarantines = decide_quarantines(streaks, fleet, before.health.quarantine_trial_at, snapshot.now)
    context = PlanningContext(snapshot, fleet, {}, machines, own, quarantines, [], planner_state, {})

    presences = _presences(context)
    limit, unit_s = boot_limit(fleet, snapshot.boots), snapshot.traits.billing_unit_s
    for worker in snapshot.workers:
        context.states[worker.id] = derive_worker_state(
            worker,
            context.machine_of(worker),
            presences[worker.id],
            fleet,
            snapshot.now,
            snapshot.queue.queued,
            idle_since=before.health.idle_since.get(worker.id),
            unclaimed_since=before.health.unclaimed_since.get(worker.id),
            quarantine_reason=quarantines[worker.id].reason if worker.id in quarantines else None,
            limit=limit,
            late_until=kept_until(worker, unit_s, snapshot.now, context.cycle_interval_s)
            if worker.last_heartbeat is None
            else None,
            misplaced=placement_failure(worker, context.machine_of(worker), snapshot.avoided_hosts),
        )
    states = context.states.values()
    context.remember_in(
        "health",
        idle_since={s.worker.id: s.idle_since for s in states if s.idle_since is not None},
        unclaimed_since={s.worker.id: s.unclaimed_since for s in states if s.unclaimed_since is not None},
        gpu_grace_s=fleet.startup_grace_s if fleet.has_gpu else None,
    )
    unlisted_since = (before.machines.unlisted_since or snapshot.now) if snapshot.machines is None else None
    context.remember_in("machines", unlisted_since=unlisted_since)
    return context


def _own_machine(worker: WorkerView, found: tuple[Machine, ...]) -> Machine | None:
    """The machine whose id is known. Without a known id: the oldest that has not exited, else the oldest."""
    if worker.slot is None or not found:
        return None
    if len(found) == 1:
        return found[0] if worker.machine_id in (None, found[0].id) else None
    own = [machine for machine in found if worker.machine_id in (None, machine.id)]
    return min(own, key=lambda machine: machine.state is MachineState.EXITED, default=None)


def _presences(context: PlanningContext) -> dict[str, Presence]:
    """What the list says about each worker's machine. Places the LIST_SHRANK hold while a suspect list is new."""
    snapshot, grace_s = context.snapshot, context.snapshot.traits.absence_grace_s
    context.remember_in("machines", unproven_s=_unproven_s(context))
    # Workers whose machine, if it exists, must be in the list: it is known, on this host, and was known before the list
    # was requested. Where lists lag, it was not new then.
    host, listed_at = snapshot.traits.host, snapshot.listed_at
    expected = [
        worker
        for worker in snapshot.workers
        if worker.machine_id is not None
        and (host is None or worker.machine_id.startswith(f"{host}/"))
        and (
            worker.machine_at is None
            or listed_at is None
            or worker.machine_at + timedelta(seconds=grace_s) <= listed_at
        )
    ]
    missing_since = snapshot.planner_state.machines.missing_since
    if snapshot.machines is not None:
        absent = [worker for worker in expected if context.machine_of(worker) is None]
        missing_since = {worker.id: missing_since.get(worker.id, snapshot.now) for worker in absent}
        context.remember_in("machines", missing_since=missing_since)

    # Without a list, the last one still counts. Terminating workers that went missing are left out, as their machines
    # may be deleted, unless they were missing before they drained: a drain makes no list more or less credible.
    staying = [w for w in expected if w.status in _STAYING or _is_drain_irrelevant(w, missing_since)]
    lacking = [w for w in staying if w.id in missing_since]
    is_suspect = grace_s > 0 and len(lacking) >= SUSPECT_SHRINK_MIN and len(lacking) * 2 > len(staying)
    if is_suspect:
        grace_s *= SUSPECT_SHRINK_FACTOR
        if any(context.age_s(missing_since[w.id]) < grace_s for w in lacking):
            context.hold(LIST_SHRANK, f"machine list lacks {len(lacking)} of {len(staying)} machines")

    return {w.id: _presence(context, w, missing_since.get(w.id), grace_s, is_suspect) for w in snapshot.workers}


def _is_drain_irrelevant(worker: WorkerView, missing_since: dict[str, datetime]) -> bool:
    """A draining worker whose machine is listed, or was missing before it drained."""
    if worker.status is not WorkerStatus.TERMINATING or worker.terminating_at is None:
        return False
    return missing_since.get(worker.id, worker.terminating_at) <= worker.terminating_at


def _unproven_s(context: PlanningContext) -> dict[str, float]:
    """Id of a worker without a known machine to the part of its age that may not have passed.

    The database's clock may have been set forward since the last plan. The leader's own clock proves how much time has
    passed since then. If another process made that plan, one cycle interval is taken as proven.
    """
    before, planned_at = context.snapshot.planner_state.machines.unproven_s, context.planner_state.cadence.planned_at
    if planned_at is None:
        added_s = 0.0
    else:
        measured_s = context.snapshot.since_plan_s
        added_s = max(0.0, context.age_s(planned_at) - (context.cycle_interval_s if measured_s is None else measured_s))
    unknown = [worker for worker in context.snapshot.workers if worker.machine_id is None and worker.slot is not None]
    # Never more than its age: the clock may have been set back since.
    totals_s = {w.id: min(before.get(w.id, 0.0) + added_s, context.age_s(w.created_at)) for w in unknown}
    return {worker_id: total_s for worker_id, total_s in totals_s.items() if total_s > 0}


def _presence(
    context: PlanningContext, worker: WorkerView, missing_since: datetime | None, grace_s: float, is_suspect: bool
) -> Presence:
    if context.snapshot.machines is None:
        is_never = worker.slot is not None and worker.creation == "refused"
        return Presence.NEVER if is_never else Presence.UNKNOWN
    machine = context.machine_of(worker)
    if machine is not None:
        return Presence.EXITED if machine.state is MachineState.EXITED else Presence.PRESENT
    if worker.machine_id is None:
        # The create call was never answered. Its machine may still appear for creation_lateness_s, measured from when
        # the list was requested: a slow list shows the state at that time. A step of the clock is no waiting.
        listed_at = context.snapshot.listed_at or context.now
        unproven_s = context.planner_state.machines.unproven_s.get(worker.id, 0.0)
        waited_s = (listed_at - worker.created_at).total_seconds() - unproven_s
        may_appear = worker.creation != "refused" and waited_s < context.snapshot.traits.creation_lateness_s
        is_never = worker.slot is not None and not is_suspect and not may_appear
        return Presence.NEVER if is_never else Presence.UNKNOWN
    if missing_since is None or context.age_s(missing_since) < grace_s:
        return Presence.UNKNOWN
    # A recent heartbeat outweighs a list that may lag.
    return Presence.UNKNOWN if grace_s > 0 and context.has_recent_heartbeat(worker) else Presence.MISSING
