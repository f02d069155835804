"""A plan in the making: the snapshot with every worker judged, and what the stages so far have decided."""

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from windlass.model.action import Action, Delete, Fail, RaiseAlert
from windlass.model.fleet import FleetConfig
from windlass.model.machine import Machine, MachineState
from windlass.model.snapshot import Hold, PlannerState, Snapshot, WorkerView
from windlass.model.worker import WorkerStatus
from windlass.policy.derive import Presence, WorkerState, derive_worker_state
from windlass.policy.quarantine import QuarantineDecision, verdicts

# A list that lost more than half of what it had, and at least this many, is doubted before it is believed.
SHRUNK_MIN = 3
LIST_SHRANK = "LIST_SHRANK"
# And this many times longer than a single absence.
SHRUNK_PATIENCE = 3
# Who was heard less than so many beats ago is there.
BEATS_WHILE_SPEAKING = 2
# So many gaps between plans, one after another, are how often there is one. A single long one was an outage.
GAPS_OF_A_PACE = 2
# Of the poll interval: a plan that comes sooner was brought about by something, and tells nothing of the next.
EARLY_SHARE = 0.5
# Whoever was told of something that lasts is reminded this often.
ALERT_AGAIN_S = 3600.0


@dataclass(slots=True)
class PlanningContext:
    snapshot: Snapshot
    fleet: FleetConfig
    planner_state: PlannerState
    states: dict[str, WorkerState]
    machines: dict[str, tuple[Machine, ...]]  # by the name of the worker they were made for, oldest first
    own: dict[str, Machine]  # the one machine of each worker that has one
    verdicts: dict[str, QuarantineDecision] = field(
        default_factory=dict
    )  # by worker, on those that are to blame for failures
    actions: list[Action] = field(default_factory=list)
    decision: str = ""
    is_cut_short: bool = False
    are_strays_doubted: bool = False
    alerts: dict[str, datetime] = field(default_factory=dict)
    # How many more workers the budget has room for; None: as many as are wanted.
    affordable: int | None = None
    # Why everybody is to go, if the budget is spent and says so.
    over_budget: str | None = None

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
        """Put the brake on. The first reason of a cycle stays, unless a later one forbids more."""
        current = self.planner_state.hold
        if current is None or (is_total and not current.is_total):
            before = self.snapshot.planner_state.hold
            since = before.since if before is not None and before.code == code else self.now
            self.remember(hold=Hold(code, reason, since, is_total))

    @property
    def is_stopped(self) -> bool:
        """Whether the brake forbids touching anything."""
        return self.planner_state.hold is not None and self.planner_state.hold.is_total

    def alert(self, code: str, reason: str, *, about: str = "", worker_id: str | None = None) -> list[Action]:
        """Tell a person, unless they know. Call it in every cycle in which the cause is there."""
        key = f"{code} {about or worker_id or ''}".rstrip()
        told_at = self.snapshot.planner_state.alerts.get(key)
        is_news = told_at is None or self.age_s(told_at) >= ALERT_AGAIN_S
        self.alerts[key] = self.now if told_at is None or is_news else told_at
        return [RaiseAlert(code, reason, worker_id, about)] if is_news else []

    def keep_alerts(self, *codes: str) -> None:
        """Whether the cause is still there is not known in this cycle: what a person was told of it stays."""
        for key, told_at in self.snapshot.planner_state.alerts.items():
            if key.split(" ", 1)[0] in codes:
                self.alerts[key] = told_at

    @property
    def failed_ids(self) -> set[str]:
        return {action.worker_id for action in self.actions if isinstance(action, Fail)}

    @property
    def deleted_ids(self) -> set[str]:
        return {action.worker_id for action in self.actions if isinstance(action, Delete)}

    def machine_of(self, worker: WorkerView) -> Machine | None:
        return self.own.get(worker.id)

    @property
    def unowned(self) -> list[Machine]:
        """Listed machines whose worker has no row."""
        return [machine for name, found in self.machines.items() if name not in self.states for machine in found]

    @property
    def doubles(self) -> list[tuple[Machine, str]]:
        """Listed machines beside the one their hired worker has, with the id of that one."""
        pairs: list[tuple[Machine, str]] = []
        for name, found in self.machines.items():
            state = self.states.get(name)
            if state is not None and len(found) == 1 and state.worker.machine_id == found[0].id:
                continue  # as it nearly always is
            own = self.machine_of(state.worker) if state is not None and state.is_managed else None
            keep = state.worker.machine_id if state is not None else None
            keep = keep or (own.id if own is not None else None)
            if keep is not None:
                pairs += [(machine, keep) for machine in found if machine.id != keep]
        return pairs

    @property
    def pace_s(self) -> float:
        """How far apart cycles are: as they are meant to be, or farther, if whoever runs them does so less often."""
        gaps_s = self.planner_state.cadence.gaps_s
        lasting_s = min(gaps_s) if len(gaps_s) == GAPS_OF_A_PACE else 0.0
        return max(self.fleet.poll_interval_s, lasting_s)

    def is_speaking(self, worker: WorkerView) -> bool:
        heard_at = worker.last_heartbeat
        return heard_at is not None and self.age_s(heard_at) < BEATS_WHILE_SPEAKING * self.fleet.heartbeat_interval_s

    def age_s(self, moment: datetime) -> float:
        return (self.now - moment).total_seconds()

    def in_s(self, seconds: float) -> datetime:
        return self.now + timedelta(seconds=seconds)


def begin(snapshot: Snapshot, fleet: FleetConfig) -> PlanningContext:
    """Judge every worker. Absence from a list becomes evidence only when the list can be believed."""
    machines: dict[str, list[Machine]] = {}
    for machine in sorted(snapshot.machines or (), key=lambda m: (m.created_at or snapshot.now, m.id)):
        machines.setdefault(machine.name, []).append(machine)
    # Holds are decided anew in every cycle: the cause is there, or the hold is gone.
    before = snapshot.planner_state
    cadence = replace(before.cadence, cycle=before.cadence.cycle + 1, gaps_s=_gaps_s(snapshot, fleet.poll_interval_s))
    planner_state = replace(before, cadence=cadence, hold=None)
    by_name = {name: tuple(found) for name, found in machines.items()}
    found = ((worker.id, _machine_of(worker, by_name.get(worker.id, ()))) for worker in snapshot.workers)
    own = {worker_id: machine for worker_id, machine in found if machine is not None}
    context = PlanningContext(snapshot, fleet, planner_state, {}, by_name, own)
    presences = _presences(context)
    hired = {worker.id for worker in snapshot.workers if worker.slot is not None}
    failure_streaks = [suspect for suspect in snapshot.failure_streaks if suspect.worker_id in hired]
    context.verdicts = verdicts(failure_streaks, fleet, planner_state.health.quarantine_trial_at, snapshot.now)
    for worker in snapshot.workers:
        context.states[worker.id] = derive_worker_state(
            worker,
            context.machine_of(worker),
            presences[worker.id],
            fleet,
            snapshot.now,
            snapshot.queue.queued,
            idle_since=snapshot.planner_state.health.idle_since.get(worker.id),
            unclaimed_since=snapshot.planner_state.health.unclaimed_since.get(worker.id),
            blamed=context.verdicts[worker.id].reason if worker.id in context.verdicts else None,
        )
    states = context.states.values()
    unlisted_since = (planner_state.machines.unlisted_since or snapshot.now) if snapshot.machines is None else None
    context.remember_in("machines", unlisted_since=unlisted_since)
    context.remember_in(
        "health",
        idle_since={s.worker.id: s.idle_since for s in states if s.idle_since is not None},
        unclaimed_since={s.worker.id: s.unclaimed_since for s in states if s.unclaimed_since is not None},
    )
    return context


def _gaps_s(snapshot: Snapshot, poll_interval_s: float) -> tuple[float, ...]:
    before, last = snapshot.planner_state.cadence.gaps_s, snapshot.planner_state.cadence.planned_at
    gap_s = (snapshot.now - last).total_seconds() if last is not None else 0.0
    return (*before, gap_s)[-GAPS_OF_A_PACE:] if gap_s >= EARLY_SHARE * poll_interval_s else before


def _machine_of(worker: WorkerView, found: tuple[Machine, ...]) -> Machine | None:
    """The one we know of; else the oldest that runs, or may yet; else the oldest."""
    if worker.slot is None or not found:
        return None
    if len(found) == 1:
        return found[0] if worker.machine_id in (None, found[0].id) else None
    own = [machine for machine in found if worker.machine_id in (None, machine.id)]
    return min(own, key=lambda machine: machine.state is MachineState.EXITED, default=None)


def _presences(context: PlanningContext) -> dict[str, Presence]:
    snapshot, grace_s = context.snapshot, context.snapshot.traits.absence_grace_s
    # A worker started by hand has no machine of ours, and one without a machine yet cannot have lost it.
    expected = [
        w for w in snapshot.workers if _is_listed_here(context, w) and _is_older_than_list(context, w.machine_at)
    ]
    if snapshot.machines is None:
        if grace_s > 0:
            _has_shrunk(
                context, expected, snapshot.planner_state.machines.missing_since, grace_s
            )  # the last one that was had
        return {worker.id: _without_list(worker) for worker in snapshot.workers}
    absent = [w for w in expected if context.machine_of(w) is None]
    since = {w.id: snapshot.planner_state.machines.missing_since.get(w.id, snapshot.now) for w in absent}
    context.remember_in("machines", missing_since=since)
    is_doubted = grace_s > 0 and _has_shrunk(context, expected, since, grace_s)
    if is_doubted:
        grace_s *= SHRUNK_PATIENCE
    return {w.id: _presence(context, w, since.get(w.id), grace_s, is_doubted) for w in snapshot.workers}


def _without_list(worker: WorkerView) -> Presence:
    return Presence.NEVER if worker.slot is not None and worker.creation == "refused" else Presence.UNKNOWN


def _is_listed_here(context: PlanningContext, worker: WorkerView) -> bool:
    """Whether its machine, if it lives, must be in a list that was made where we are."""
    host = context.snapshot.traits.host
    return worker.machine_id is not None and (host is None or worker.machine_id.startswith(f"{host}/"))


def _is_older_than_list(context: PlanningContext, moment: datetime | None) -> bool:
    """What became known after the list was asked for cannot be missing from it; nor, where lists may be old, what was
    new then."""
    listed_at, age_s = context.snapshot.listed_at, context.snapshot.traits.absence_grace_s
    return moment is None or listed_at is None or moment + timedelta(seconds=age_s) <= listed_at


def _has_shrunk(
    context: PlanningContext, expected: list[WorkerView], since: dict[str, datetime], grace_s: float
) -> bool:
    """Whether the list lacks more than can be chance; while that is new, hiring is held. Those who were told to leave
    may be gone with good reason."""
    staying = [w for w in expected if w.status in (WorkerStatus.SPAWNING, WorkerStatus.ACTIVE)]
    lacking = [w for w in staying if w.id in since]
    if len(lacking) < SHRUNK_MIN or len(lacking) * 2 <= len(staying):
        return False
    if any(context.age_s(since[w.id]) < grace_s * SHRUNK_PATIENCE for w in lacking):
        context.hold(LIST_SHRANK, f"the provider's list lacks {len(lacking)} of {len(staying)} machines")
    return True


def _presence(
    context: PlanningContext, worker: WorkerView, missing_since: datetime | None, grace_s: float, is_doubted: bool
) -> Presence:
    machine = context.machine_of(worker)
    if machine is not None:
        return Presence.EXITED if machine.state is MachineState.EXITED else Presence.PRESENT
    if worker.machine_id is None:
        is_never = worker.slot is not None and not is_doubted and not _may_still_appear(context, worker)
        return Presence.NEVER if is_never else Presence.UNKNOWN
    if missing_since is None or context.age_s(missing_since) < grace_s:
        return Presence.UNKNOWN
    # Whoever still speaks is not gone, whatever a list that may lag says.
    return Presence.UNKNOWN if grace_s > 0 and context.is_speaking(worker) else Presence.MISSING


def _may_still_appear(context: PlanningContext, worker: WorkerView) -> bool:
    """Whether the machine of an unanswered creation could still turn up in a list."""
    if worker.creation == "refused":
        return False
    # By when the list was asked for: a slow list tells what was true then, not what is true now.
    listed_at = context.snapshot.listed_at or context.now
    return (listed_at - worker.created_at).total_seconds() < context.snapshot.traits.creation_lateness_s
