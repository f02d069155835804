"""What must hold in every run, at every moment, judged by the clouds' books, the workers' books and a book of tasks.

The store's opinion is never asked whether something is right: it is what is being judged.

    never more than max machines of a fleet are billed         on every machine that begins
    nobody ends a blameless worker before its time             on every call that deletes
    nobody takes a task from a blameless worker                on every claim
    a task is accepted once, and claimed no more afterwards    on every claim and finish
    whoever lost the lead decides nothing                      on every plan written down
    no plan hires, lets go, or clears up more than it may      on every plan written down
    no cycle fails in a way nobody foresaw                     on every line logged
    nobody is let go in the first 80 % of paid time            on every plan written down
    nobody is paid for again though spare                      on every plan written down
    our ledger is the clouds' ledger, to the micro             when everything is at rest
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from windlass.model.action import Adopt, Delete, DeleteOrphan, Drain, Fail, Plan, Requeue, Spawn
from windlass.model.cost import Bill
from windlass.model.fleet import FleetConfig
from windlass.model.outcome import Committed, Created, Deleted, Intent, OrphanDeleted, Outcome
from windlass.model.snapshot import Snapshot, WorkerView
from windlass.model.task import Claim, ClaimResult, Finished
from windlass.model.worker import LIVE, HeartbeatReply, WorkerStatus
from windlass.simulator.cloud import MachineRecord, SimulatedCloud
from windlass.simulator.loop import EPOCH, to_datetime
from windlass.simulator.workers import SimulatedWorker

# A decision is made a moment before it is carried out.
MOMENT_S = 0.001
# Nobody is let go for want of work before this share of what is paid is used up, where time is paid in units this long.
MIN_USED_SHARE = 0.8
LONG_UNIT_S = 30
# From when to when before the end of paid time somebody spare must be let go, in cycles, on top of what its deletion
# may take: less is too late, and more is too early. A second on both sides is nobody's fault.
LEAVES_CYCLES = (1, 3)
LEAVES_CALL_S, LEAVES_CALL_SHARE = 30.0, 1 / 20
# Why a worker is let go that nobody needs; other reasons need not wait.
SPARE = ("IDLE", "BILLING_HOUR_END")


class InvariantViolation(AssertionError):
    """A promise was broken. The message says which, and how."""


@dataclass(slots=True)
class TaskRecord:
    """A task in the book: who had it, and whose result was taken."""

    claims: list[tuple[str, UUID]] = field(default_factory=list)
    accepted: UUID | None = None
    is_dead: bool = False
    failed_attempts: set[str] = field(default_factory=set)
    # Somebody it failed on was found to be to blame: it may live again.
    is_pardoned: bool = False

    @property
    def is_finished(self) -> bool:
        return self.accepted is not None or self.is_dead


@dataclass(slots=True)
class InvariantChecker:
    fleets: dict[str, FleetConfig]
    on_violation: Callable[[str], None]
    clouds: dict[str, SimulatedCloud] = field(default_factory=dict)
    tasks: dict[int, TaskRecord] = field(default_factory=dict)
    # By machine, and the latest by worker id.
    workers_by_machine: dict[str, SimulatedWorker] = field(default_factory=dict)
    workers_by_id: dict[str, SimulatedWorker] = field(default_factory=dict)
    hired_at: dict[str, float] = field(default_factory=dict)
    draining_since: dict[str, float] = field(default_factory=dict)
    terminated_by_operator: set[str] = field(default_factory=set)
    most_billed: dict[str, int] = field(default_factory=dict)
    # When somebody last held the lease, and the longest time nobody did.
    leader_seen_at: float = 0.0
    leader: str = ""
    longest_leaderless_s: float = 0.0
    takeovers: int = 0
    plans: int = 0
    # Worker id to its machine, to when that was gone as far as anybody told us, and to when it was let go as spare.
    machine_of: dict[str, str] = field(default_factory=dict)
    ended_at: dict[str, datetime] = field(default_factory=dict)
    strays_ended: dict[str, datetime] = field(default_factory=dict)
    idle_drain_at: dict[str, float] = field(default_factory=dict)
    # Worker id to when it was first kept though it could have gone.
    _kept_since: dict[str, float] = field(default_factory=dict)
    claimed_at: dict[str, float] = field(default_factory=dict)
    last_term: int = 0
    late_results: int = 0
    quarantined: list[str] = field(default_factory=list)

    # ----------------------------------------------------------------------------------------------------- machines

    def on_machine_created(self, entry: MachineRecord) -> None:
        cloud, fleet = self.clouds[entry.fleet], self.fleets[entry.fleet]
        billed = [other for other in cloud.billed_machines() if not other.is_duplicate]
        self.most_billed[entry.fleet] = max(self.most_billed.get(entry.fleet, 0), len(billed))
        if len(billed) > fleet.max_workers:
            names = ", ".join(f"{other.id} of {other.name}" for other in billed)
            self.report_violation(
                f"{len(billed)} machines of {entry.fleet} are billed, the maximum is {fleet.max_workers}: {names}"
            )

    def on_worker_started(self, entry: MachineRecord, worker: SimulatedWorker) -> None:
        self.workers_by_machine[entry.id] = self.workers_by_id[worker.id] = worker
        worker.history.asked_at = self.hired_at.get(worker.id, entry.created_at)

    def on_delete_requested(self, entry: MachineRecord) -> None:
        """Somebody asks for it to be deleted."""
        worker = self.workers_by_machine.get(entry.id)
        if worker is None or entry.is_duplicate or worker.history.is_over or worker.id in self.terminated_by_operator:
            return
        now, fleet = self._now(), self.fleets[entry.fleet]
        if worker.history.blame(now, fleet) is not None:
            return
        told_at = self.draining_since.get(worker.id)
        if told_at is None:
            self.report_violation(
                f"{worker.id} is blameless, was never told to end, and its machine {entry.id} is deleted"
            )
        elif worker.history.at_work and now - told_at < fleet.stop_timeout_s - MOMENT_S:
            self.report_violation(
                f"{worker.id} is at work, was told to end {now - told_at:.1f} s ago, may finish for "
                f"{fleet.stop_timeout_s:g} s, and its machine {entry.id} is deleted"
            )

    # -------------------------------------------------------------------------------------------------------- tasks

    def on_worker_call(self, name: str, arguments: tuple[Any, ...], _: dict[str, Any], result: Any) -> None:
        """What took effect of a worker's call, whether or not it learns of it."""
        if isinstance(result, Exception):
            return
        match name:
            case "claim":
                self._claimed(arguments[0], result)
            case "finish_and_claim":
                self._finished(arguments[0], arguments[1], result)
            case "fail":
                self._is_done(arguments[0], arguments[2])
                self._failed(arguments[0], arguments[1], result)
            case "heartbeat":
                self._beat(arguments[0], result)
            case "deregister":
                self.draining_since.setdefault(arguments[0], self._now())
            case _:
                pass

    def enqueued(self, task_id: int) -> None:
        self.tasks[task_id] = TaskRecord()

    def _claimed(self, worker_id: str, claims: list[Claim]) -> None:
        for claim in claims:
            self.claimed_at[worker_id] = self._now()
            task = self.tasks[claim.task_id]
            if task.is_pardoned:
                task.is_dead = task.is_pardoned = False
            if task.is_finished:
                self.report_violation(f"task {claim.task_id} is finished and was claimed again by {worker_id}")
            for before, token in task.claims:
                self._check_taken(claim.task_id, before, token)
            task.claims.append((worker_id, claim.token))

    def _check_taken(self, task_id: int, worker_id: str, token: UUID) -> None:
        """Somebody else has it now: who had it must be to blame, or have had its time."""
        worker = self.workers_by_id.get(worker_id)
        if worker is None or worker.history.is_over or worker_id in self.terminated_by_operator:
            return
        if token not in worker.history.at_work:
            return
        fleet, now = self.fleets[worker.fleet_name], self._now()
        told_at = self.draining_since.get(worker_id)
        is_timely = told_at is not None and now - told_at >= fleet.stop_timeout_s - MOMENT_S
        if worker.history.blame(now, fleet) is None and not is_timely:
            self.report_violation(f"task {task_id} was taken from {worker_id}, which is blameless and at work on it")

    def _finished(self, worker_id: str, finished: list[Finished], turn: ClaimResult) -> None:
        for done in finished:
            task = self.tasks[done.task_id]
            self._is_done(worker_id, done.token)
            if done.token not in turn.lost and worker_id in self.workers_by_id:
                self.workers_by_id[worker_id].history.failed_in_a_row.clear()
            if done.token in turn.lost:
                self.late_results += 1
            elif task.accepted not in (None, done.token) or task.is_dead:
                self.report_violation(f"task {done.task_id} was accepted twice, now from {worker_id}")
            else:
                task.accepted = done.token
                if task.claims[-1:] != [(worker_id, done.token)]:
                    self.report_violation(f"task {done.task_id} was accepted from {worker_id}, which does not have it")
        self._claimed(worker_id, turn.claims)

    def _is_done(self, worker_id: str, token: UUID) -> None:
        """Its work on it has arrived, whether or not it knows."""
        worker = self.workers_by_id.get(worker_id)
        if worker is not None:
            worker.history.at_work.pop(token, None)

    def _failed(self, worker_id: str, task_id: int, status: str | None) -> None:
        if status is None:
            return
        if worker_id in self.workers_by_id:
            self.workers_by_id[worker_id].history.failed_in_a_row.add(task_id)
        self.tasks[task_id].failed_attempts.add(worker_id)
        self.tasks[task_id].is_dead = status == "failed"

    def _pardon(self, worker_id: str) -> None:
        self.quarantined.append(worker_id)
        for task in self.tasks.values():
            task.is_pardoned = task.is_pardoned or worker_id in task.failed_attempts

    def _beat(self, worker_id: str, pulse: HeartbeatReply) -> None:
        worker = self.workers_by_id.get(worker_id)
        if worker is None or pulse.status not in LIVE:
            return
        worker.history.heard(self._now())
        if pulse.status is WorkerStatus.TERMINATING:
            self.draining_since.setdefault(worker_id, self._now())

    # ------------------------------------------------------------------------------------------------ orchestrators

    def on_orchestrator_call(self, name: str, arguments: tuple[Any, ...], _: dict[str, Any], result: Any) -> None:
        if name == "commit_outcomes":
            # Facts are written down even if what comes with them is refused.
            self._became(arguments[4])
        if isinstance(result, Exception):
            return
        match name:
            case "acquire_lease" if isinstance(result, int):
                self._led(arguments[0].holder, arguments[0].ttl_s)
            case "observe" if isinstance(result, tuple):
                self._led(arguments[0].holder, arguments[0].ttl_s)
            case "commit_plan":
                self._spared(arguments[2].fleet, arguments[3], arguments[2].now)
                self._kept(arguments[2], arguments[3])
                self._planned(arguments[1], arguments[2], arguments[3], arguments[4], result)
            case "commit_outcomes":
                self._hired(arguments[5], result)
            case _:
                pass

    def _led(self, holder: str, ttl_s: float) -> None:
        now = self._now()
        self.longest_leaderless_s = max(self.longest_leaderless_s, now - self.leader_seen_at - ttl_s)
        self.takeovers += holder != self.leader
        self.leader, self.leader_seen_at = holder, now

    def _planned(self, term: int, seen: Snapshot, plan: Plan, intents: list[Intent], committed: Committed) -> None:
        if term < self.last_term:
            self.report_violation(f"a plan of term {term} was written down after one of term {self.last_term}")
        limit = self.fleets[seen.fleet].max_changes_per_cycle
        for kind in (Spawn, Drain, DeleteOrphan):
            count = sum(isinstance(action, kind) for action in plan.actions)
            if count > limit and not (kind is Drain and seen.is_shutting_down):
                self.report_violation(f"a plan has {count} {kind.__name__}, and at most {limit} may be at once")
        self.last_term = term
        self.plans += 1
        for action in plan.actions:
            if isinstance(action, Adopt):
                self.machine_of.setdefault(action.worker_id, action.machine_id)
            if isinstance(action, Fail) and action.attempt_refund is not None:
                self._pardon(action.worker_id)
            if isinstance(action, Drain):
                self.draining_since.setdefault(action.worker_id, self._now())
        self._hired(intents, committed.granted)

    def _hired(self, intents: list[Intent], granted: frozenset[str]) -> None:
        for intent in intents:
            if intent.worker_id in granted:
                if intent.worker_id in self.hired_at:
                    self.report_violation(f"{intent.worker_id} was hired twice")
                self.hired_at[intent.worker_id] = self._now()

    # -------------------------------------------------------------------------------------------------------- money

    def _spared(self, fleet: str, plan: Plan, decided_at: datetime) -> None:
        cloud = self.clouds[fleet]
        for action in plan.actions:
            if not isinstance(action, Drain) or action.code not in SPARE:
                continue
            entry = cloud.machines.get(self.machine_of.get(action.worker_id, ""))
            now = (decided_at - EPOCH).total_seconds()
            self.idle_drain_at.setdefault(action.worker_id, now)
            if entry is None or cloud.billing_unit_s < LONG_UNIT_S:
                continue
            used_s = (now - entry.created_at) % cloud.billing_unit_s
            if used_s < MIN_USED_SHARE * cloud.billing_unit_s:
                self.report_violation(
                    f"{action.worker_id} is let go ({action.code}) {used_s:.0f} s into {cloud.billing_unit_s} s that "
                    "are paid"
                )

    def _kept(self, seen: Snapshot, plan: Plan) -> None:
        """Where nothing waits, whoever has nothing to do and could go at the end of its paid time does."""
        cloud, fleet = self.clouds[seen.fleet], self.fleets[seen.fleet]
        is_told = seen.is_paused or seen.is_shutting_down or seen.requested > 0
        is_changing = plan.hold is not None or plan.is_cut_short or any(isinstance(a, Spawn) for a in plan.actions)
        is_needed = seen.queue.queued > 0 or is_told or is_changing
        if cloud.billing_unit_s < LONG_UNIT_S or seen.machines is None or is_needed:
            self._kept_since.clear()
            return
        ended = {action.worker_id for action in plan.actions if isinstance(action, Fail | Delete | Requeue)}
        there = [
            view
            for view in seen.workers
            if view.slot is not None
            and view.status is WorkerStatus.ACTIVE
            and not view.is_paused
            and view.id not in ended
        ]
        ready = sum(bool(view.running) for view in there) + fleet.idle_buffer if fleet.policy == "buffered" else 0
        needed = max(fleet.min_workers, ready)
        if needed > len(there) * fleet.scale_down_multiplier:
            self._kept_since.clear()
            return
        going = {action.worker_id for action in plan.actions if isinstance(action, Drain)}
        due = [view.id for view in there if self._must_leave(seen, view, cloud, fleet)]
        kept = [worker_id for worker_id in due if worker_id not in going]
        may_go = min(len(due), len(there) - needed, fleet.max_changes_per_cycle)
        if len(due) - len(kept) >= may_go or not going <= set(due):
            self._kept_since.clear()
            return
        # One that lets somebody go is followed by a short pause; the next one that is due in time must not forget it.
        now, poll_s = (seen.now - EPOCH).total_seconds(), fleet.poll_interval_s
        if now - self._kept_since.get(kept[0], -math.inf) > LEAVES_CYCLES[1] * poll_s:
            self._kept_since[kept[0]] = now
        elif now - self._kept_since[kept[0]] >= poll_s / 2:
            self.report_violation(
                f"{kept[0]} is spare and is kept though it is about to be paid for again: {plan.decision}"
            )

    def _must_leave(self, seen: Snapshot, view: WorkerView, cloud: SimulatedCloud, fleet: FleetConfig) -> bool:
        """Idle for long enough, and at the end of its paid time by the cloud's book."""
        entry, idle_since = (
            cloud.machines.get(self.machine_of.get(view.id, "")),
            seen.planner_state.health.idle_since.get(view.id),
        )
        if entry is None or idle_since is None or view.bill is None or view.running:
            return False
        idle_s = (seen.now - idle_since).total_seconds()
        if idle_s < max(fleet.idle_timeout_s, fleet.poll_interval_s, fleet.scale_down_grace_s):
            return False
        unit_s, call_s = cloud.billing_unit_s, min(LEAVES_CALL_S, LEAVES_CALL_SHARE * cloud.billing_unit_s)
        left_s = unit_s - ((seen.now - EPOCH).total_seconds() - entry.created_at) % unit_s - call_s
        last, first = (cycles * fleet.poll_interval_s for cycles in LEAVES_CYCLES)
        return last + 1.0 < left_s < first - 1.0

    def _became(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            match outcome:
                case Created(worker_id, machine):
                    self.machine_of.setdefault(worker_id, machine.id)
                case OrphanDeleted(machine, _, _, ended_at):
                    self.strays_ended.setdefault(machine.id, ended_at or to_datetime(self._now()))
                case Deleted(worker_id, _, _, _, ended_at) if worker_id in self.machine_of:
                    self.ended_at.setdefault(worker_id, ended_at or to_datetime(self._now()))
                case _:
                    pass

    def audit_living(self, bill: Bill, worker_id: str, fleet: str, ours: dict[str, int]) -> None:
        """What is settled of a worker that is there is what the cloud has charged for that time."""
        cloud = self.clouds[fleet]
        entry = cloud.machines[self.machine_of[worker_id]]
        theirs = 0 if bill.settled_until in (None, bill.since) else cloud.cost_micros(entry, bill.settled_until)
        if ours.get(worker_id, 0) != theirs:
            self.report_violation(
                f"{worker_id} cost {theirs} micros so far, and our ledger has {ours.get(worker_id, 0)}"
            )

    def audit(self, fleet: str, ours: dict[str, int], faults_ended_at: float) -> list[str]:
        """Compare what we say that each worker cost with the cloud's ledger. Returns who has another bill than the
        cloud's because nobody ever told us when it ended: a machine that vanished, an answer that was lost."""
        cloud, guessed = self.clouds[fleet], []
        self._audit_strays(cloud, ours, faults_ended_at)
        for worker_id, ended_at in self.ended_at.items():
            entry = cloud.machines.get(self.machine_of[worker_id])
            if entry is None:
                continue
            theirs, with_our_end = (
                cloud.cost_micros(entry, to_datetime(entry.deleted_at)),
                cloud.cost_micros(entry, ended_at),
            )
            if ours.get(worker_id, 0) != with_our_end:
                self.report_violation(
                    f"{worker_id} cost {with_our_end} micros, and our ledger has {ours.get(worker_id, 0)}"
                )
            if theirs != with_our_end:
                guessed.append(worker_id)
                if entry.deleted_at > faults_ended_at:
                    self.report_violation(f"{worker_id} cost {theirs} micros, and our ledger has {with_our_end}")
            self._check_in_time(cloud, entry, worker_id, faults_ended_at)
        return guessed

    def _audit_strays(self, cloud: SimulatedCloud, ours: dict[str, int], faults_ended_at: float) -> None:
        """Machines that never became a worker's cost money too. What went while we were dead nobody can know."""
        known = set(self.machine_of.values())
        for entry in cloud.machines.values():
            if entry.id in known or entry.id not in self.strays_ended:
                continue
            theirs, ended = cloud.cost_micros(entry, to_datetime(entry.deleted_at)), self.strays_ended[entry.id]
            with_our_end, booked = cloud.cost_micros(entry, ended), ours.get(f"orphan-{entry.id}", 0)
            if booked != with_our_end or (entry.deleted_at > faults_ended_at and theirs != with_our_end):
                self.report_violation(f"stray {entry.id} cost {theirs} micros, and our ledger has {booked}")

    def _check_in_time(
        self, cloud: SimulatedCloud, entry: MachineRecord, worker_id: str, faults_ended_at: float
    ) -> None:
        """Where nothing goes wrong, who is let go as spare is gone before it is paid for again."""
        idle_drain_at = self.idle_drain_at.get(worker_id)
        if idle_drain_at is None or idle_drain_at < faults_ended_at or cloud.billing_unit_s < LONG_UNIT_S:
            return
        if self.claimed_at.get(worker_id, 0.0) >= idle_drain_at:
            return  # it took a task in the very moment, and may finish it
        units = [(at - entry.created_at) // cloud.billing_unit_s for at in (idle_drain_at, entry.deleted_at)]
        if units[0] != units[1]:
            self.report_violation(
                f"{worker_id} was let go at {idle_drain_at:.0f} s and paid for again before it was gone"
            )

    # -------------------------------------------------------------------------------------------------------- other

    def unfinished_tasks(self) -> list[int]:
        return [task_id for task_id, task in self.tasks.items() if not task.is_finished]

    def report_violation(self, what: str) -> None:
        self.on_violation(what)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
