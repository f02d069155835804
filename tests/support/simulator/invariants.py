"""Checks, in every simulation, the promises of docs/architecture.md and the billing rules.

The evidence is the cloud's record of machines, the workers' own histories, and a record of tasks kept here. The store
and the planner are under test, so their view is never used as evidence.

    promise 2   a task is accepted once; it is taken only from a worker that may lose it       every claim and result
    promise 3   at most max_workers machines of a fleet are billed                             every new machine
    promise 5   a plan of an earlier term is never committed; no worker is spawned twice       every commit
    promise 7   the machine of a healthy worker that is not draining is not deleted            every delete call
    promise 8   a busy worker keeps its machine until its drain deadline                       every delete call
    promise 9   a plan has at most max_changes_per_cycle spawns, drains, orphan deletions      every commit
    billing     idle workers are drained at the end of their billing period, not before        every commit
    billing     our ledger equals the cloud's bill, to the micro                               at the end

simulation.py checks promise 1 (every task finishes), promise 4 (no leak) and rest (promise 9) after the faults end, and
that the real code logs no error.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from support.simulator.cloud import MachineRecord, SimulatedCloud
from support.simulator.loop import EPOCH, to_datetime
from support.simulator.workers import SimulatedWorker
from windlass.model.action import Adopt, Delete, DeleteOrphan, Drain, Fail, Plan, Requeue, Spawn
from windlass.model.cost import Bill
from windlass.model.fleet import FleetConfig
from windlass.model.outcome import Committed, Created, Deleted, Intent, OrphanDeleted, Outcome
from windlass.model.snapshot import Snapshot, WorkerView
from windlass.model.task import Claim, ClaimResult, Finished
from windlass.model.worker import LIVE, HeartbeatReply, WorkerStatus

# The planner decides this long before the store commits the decision.
DECISION_SLACK_S = 0.001
# An idle worker is drained only after this share of its billing period. Applies to periods of at least this length.
MIN_USED_SHARE = 0.8
MIN_PERIOD_S = 30
# An idle worker must be drained this many cycles (at least, at most) before its billing period ends, plus the time that
# its deletion may take. One second of tolerance on both sides.
DRAIN_WINDOW_CYCLES = (1, 3)
DELETE_CALL_S, DELETE_CALL_SHARE = 30.0, 1 / 20
# Drains for these codes wait for the end of the billing period. Others need not.
IDLE_CODES = ("IDLE", "BILLING_HOUR_END")


# Heartbeats of one worker: the first, the last, and the longest silence.
Heartbeats = tuple[float | None, float | None, float]


class InvariantViolation(AssertionError):
    """The message names the broken promise, gives the numbers, and contains the trace."""


@dataclass(slots=True)
class TaskRecord:
    """The claims of a task as (worker id, token), and the token whose result was accepted."""

    claims: list[tuple[str, UUID]] = field(default_factory=list)
    accepted: UUID | None = None
    is_dead: bool = False
    failed_on: set[str] = field(default_factory=set)
    # A worker it failed on was quarantined, so the task may be retried after it became a dead letter.
    is_refunded: bool = False

    @property
    def is_finished(self) -> bool:
        return self.accepted is not None or self.is_dead


@dataclass(slots=True)
class InvariantChecker:
    fleets: dict[str, FleetConfig]
    on_violation: Callable[[str], None]
    # Steps of the database's clock and lost transactions change when machines are deleted, and what they cost.
    has_billing_rules: bool = True
    # Fleets whose configuration is being changed: `fleets` has the larger limit.
    changing: set[str] = field(default_factory=set)
    clouds: dict[str, SimulatedCloud] = field(default_factory=dict)
    tasks: dict[int, TaskRecord] = field(default_factory=dict)
    workers_by_machine: dict[str, SimulatedWorker] = field(default_factory=dict)
    # The latest worker with this id: a duplicate machine has the same.
    workers_by_id: dict[str, SimulatedWorker] = field(default_factory=dict)
    spawned_at: dict[str, float] = field(default_factory=dict)
    draining_since: dict[str, float] = field(default_factory=dict)
    terminated_by_operator: set[str] = field(default_factory=set)
    most_billed: dict[str, int] = field(default_factory=dict)
    # The lease holder, its last renewal, and the longest time in which no lease was valid.
    leader: str = ""
    leader_seen_at: float = 0.0
    longest_leaderless_s: float = 0.0
    takeovers: int = 0
    plans: int = 0
    last_term: int = 0
    # By worker id: its machine, and the deletion time that the product recorded. By machine id: that of orphans.
    machine_of: dict[str, str] = field(default_factory=dict)
    recorded_deletions: dict[str, datetime] = field(default_factory=dict)
    orphan_deletions: dict[str, datetime] = field(default_factory=dict)
    # By worker id: when it was drained because it was idle, when it was first kept although it was due, its last claim.
    idle_drain_at: dict[str, float] = field(default_factory=dict)
    _kept_since: dict[str, float] = field(default_factory=dict)
    claimed_at: dict[str, float] = field(default_factory=dict)
    # Results that came after their claim was lost.
    late_results: int = 0
    # Workers whose rows were lost in a failover. Their machines are orphaned.
    lost_rows: set[str] = field(default_factory=set)
    quarantined: list[str] = field(default_factory=list)

    def unfinished_tasks(self) -> list[int]:
        return [task_id for task_id, task in self.tasks.items() if not task.is_finished]

    # ----------------------------------------------------------------------------------------------------- machines

    def on_machine_created(self, record: MachineRecord) -> None:
        cloud, fleet = self.clouds[record.fleet], self.fleets[record.fleet]
        # A machine whose row was lost in a failover is unknown until a list shows it.
        billed = [
            other for other in cloud.billed_machines() if not other.is_duplicate and other.name not in self.lost_rows
        ]
        self.most_billed[record.fleet] = max(self.most_billed.get(record.fleet, 0), len(billed))
        if len(billed) > fleet.max_workers:
            names = ", ".join(f"{other.id} of {other.name}" for other in billed)
            self._violate(
                3, f"fleet {record.fleet} has {len(billed)} billed machines, max_workers {fleet.max_workers}: {names}"
            )

    def on_worker_started(self, record: MachineRecord, worker: SimulatedWorker) -> None:
        self.workers_by_machine[record.id] = self.workers_by_id[worker.id] = worker
        worker.history.spawned_at = self.spawned_at.get(worker.id, record.created_at)

    def on_delete_requested(self, record: MachineRecord) -> None:
        worker = self.workers_by_machine.get(record.id)
        if worker is None or record.is_duplicate or not self._must_be_kept(worker):
            return
        draining_since, fleet = self.draining_since.get(worker.id), self.fleets[record.fleet]
        if draining_since is None:
            self._violate(7, f"machine {record.id} deleted, but its worker {worker.id} is healthy and not draining")
        elif worker.history.running and self._now() - draining_since < fleet.stop_timeout_s - DECISION_SLACK_S:
            self._violate(
                8,
                f"machine {record.id} of busy worker {worker.id} deleted {self._now() - draining_since:.1f} s after "
                f"its drain began, stop_timeout_s {fleet.stop_timeout_s:g}",
            )

    def _must_be_kept(self, worker: SimulatedWorker) -> bool:
        """Whether the orchestrator has no reason to fail this worker."""
        if worker.history.has_ended or worker.id in self.terminated_by_operator or worker.id in self.lost_rows:
            return False
        return worker.history.reason_to_fail(self._now(), self.fleets[worker.fleet_name]) is None

    # ----------------------------------------------------------------------------------------------------- database

    def on_rows_lost(self, worker_ids: set[str]) -> None:
        """These workers were spawned in transactions that a failover lost."""
        self.lost_rows |= worker_ids

    def copy_heartbeats(self) -> dict[str, Heartbeats]:
        """The heartbeats of each worker, as a standby has them."""
        histories = {worker_id: worker.history for worker_id, worker in self.workers_by_id.items()}
        return {
            worker_id: (history.first_heartbeat_at, history.last_heartbeat_at, history.max_silence_s)
            for worker_id, history in histories.items()
        }

    def on_failover(self, copied: dict[str, Heartbeats], held: set[UUID | None]) -> None:
        """A failover lost later heartbeats and claims. Only what the standby has can protect a worker: it was silent
        since the heartbeat that the standby knows, and an attempt whose claim was lost will be refused."""
        for worker_id, worker in self.workers_by_id.items():
            history = worker.history
            kept = copied.get(worker_id, (None, None, 0.0))
            history.first_heartbeat_at, history.last_heartbeat_at, history.max_silence_s = kept
            history.running = {token: since for token, since in history.running.items() if token in held}

    def on_clock_step(self, step_s: float) -> None:
        """Only database time counts: after a step forward, limits on drains, starts and tasks may be over.

        The heartbeat timeout is not among them: a step must not make a worker look silent.
        """
        if step_s < 0:
            return
        for worker_id in self.draining_since:
            self.draining_since[worker_id] -= step_s
        # Their machines are being created.
        for worker_id in self.spawned_at.keys() - self.workers_by_id.keys():
            self.spawned_at[worker_id] -= step_s
        for worker in self.workers_by_machine.values():
            history = worker.history
            if history.first_heartbeat_at is None:
                history.spawned_at -= step_s
            history.running = {token: since - step_s for token, since in history.running.items()}

    # -------------------------------------------------------------------------------------------------------- tasks

    def on_worker_call(self, name: str, arguments: tuple[Any, ...], result: Any) -> None:
        """A call of a worker took effect, whether or not the worker gets the answer."""
        if isinstance(result, Exception):
            return
        match name:
            case "claim":
                self._check_claims(arguments[0], result)
            case "finish_and_claim":
                self._check_results(arguments[0], arguments[1], result)
            case "fail":
                self._end_attempt(arguments[0], arguments[2])
                self._record_failure(arguments[0], arguments[1], result)
            case "release":
                self._end_attempt(arguments[0], arguments[2])
            case "heartbeat":
                self._record_heartbeat(arguments[0], result)
            case "deregister":
                self.draining_since.setdefault(arguments[0], self._now())
            case _:
                pass

    def _check_claims(self, worker_id: str, claims: list[Claim]) -> None:
        for claim in claims:
            self.claimed_at[worker_id] = self._now()
            task = self.tasks[claim.task_id]
            if task.is_refunded:
                task.is_dead = task.is_refunded = False
            if task.is_finished:
                self._violate(2, f"task {claim.task_id} is finished and was claimed again by {worker_id}")
            for previous_id, token in task.claims:
                previous = self.workers_by_id.get(previous_id)
                if previous is None or token not in previous.history.running or not self._must_be_kept(previous):
                    continue
                stop_timeout_s = self.fleets[previous.fleet_name].stop_timeout_s
                drained_s = self._now() - self.draining_since.get(previous_id, math.inf)
                if drained_s < stop_timeout_s - DECISION_SLACK_S:
                    self._violate(2, f"task {claim.task_id} taken from {previous_id}, which is healthy and running it")
            task.claims.append((worker_id, claim.token))

    def _check_results(self, worker_id: str, finished: list[Finished], result: ClaimResult) -> None:
        for done in finished:
            self._end_attempt(worker_id, done.token)
            task = self.tasks.get(done.task_id)
            if task is None:
                # A failover lost the task after it was claimed.
                if done.token not in result.lost:
                    self._violate(2, f"result of unknown task {done.task_id} accepted from {worker_id}")
                continue
            if done.token not in result.lost and worker_id in self.workers_by_id:
                self.workers_by_id[worker_id].history.consecutive_failures.clear()
            if done.token in result.lost:
                self.late_results += 1
            elif task.accepted not in (None, done.token) or task.is_dead:
                self._violate(2, f"task {done.task_id} accepted twice, the second time from {worker_id}")
            else:
                task.accepted = done.token
                if task.claims[-1:] != [(worker_id, done.token)]:
                    self._violate(2, f"task {done.task_id} accepted from {worker_id}, which does not hold its claim")
        self._check_claims(worker_id, result.claims)

    def _end_attempt(self, worker_id: str, token: UUID) -> None:
        worker = self.workers_by_id.get(worker_id)
        if worker is not None:
            worker.history.end_attempt(token, self._now(), self.fleets[worker.fleet_name])

    def _record_failure(self, worker_id: str, task_id: int, status: str | None) -> None:
        if status is None:
            return
        if worker_id in self.workers_by_id:
            self.workers_by_id[worker_id].history.consecutive_failures.add(task_id)
        self.tasks[task_id].failed_on.add(worker_id)
        self.tasks[task_id].is_dead = status == "failed"

    def _record_heartbeat(self, worker_id: str, reply: HeartbeatReply) -> None:
        worker = self.workers_by_id.get(worker_id)
        if worker is None or reply.status not in LIVE:
            return
        worker.history.add_heartbeat(self._now())
        if reply.status is WorkerStatus.TERMINATING:
            self.draining_since.setdefault(worker_id, self._now())

    # ------------------------------------------------------------------------------------------------ orchestrators

    def on_orchestrator_call(self, name: str, arguments: tuple[Any, ...], result: Any) -> None:
        """A call of an orchestrator took effect, whether or not it gets the answer."""
        if name == "record_outcomes":
            self._record_outcomes(arguments[2])
        if isinstance(result, Exception):
            return
        match name:
            case "acquire_lease" if isinstance(result, int):
                self._record_leader(arguments[0].holder, arguments[0].ttl_s)
            case "observe" if isinstance(result, tuple):
                self._record_leader(arguments[0].holder, arguments[0].ttl_s)
            case "commit_plan":
                _, term, snapshot, plan, intents, *_ = arguments
                self._check_idle_drains(snapshot, plan)
                if self.has_billing_rules and snapshot.fleet not in self.changing:
                    self._check_kept_workers(snapshot, plan)
                self._check_plan(term, snapshot, plan, intents, result)
            case _:
                pass

    def _record_leader(self, holder: str, ttl_s: float) -> None:
        now = self._now()
        self.longest_leaderless_s = max(self.longest_leaderless_s, now - self.leader_seen_at - ttl_s)
        self.takeovers += holder != self.leader
        self.leader, self.leader_seen_at = holder, now

    def _check_plan(
        self, term: int, snapshot: Snapshot, plan: Plan, intents: list[Intent], committed: Committed
    ) -> None:
        if term < self.last_term:
            self._violate(5, f"a plan of term {term} committed after one of term {self.last_term}")
        limit = self.fleets[snapshot.fleet].max_changes_per_cycle
        for kind in (Spawn, Drain, DeleteOrphan):
            count = sum(isinstance(action, kind) for action in plan.actions)
            if count > limit and not (kind is Drain and snapshot.is_shutting_down):
                self._violate(9, f"a plan has {count} {kind.__name__} actions, max_changes_per_cycle {limit}")
        self.last_term = term
        self.plans += 1
        for action in plan.actions:
            if isinstance(action, Adopt):
                self.machine_of.setdefault(action.worker_id, action.machine_id)
            if isinstance(action, Fail) and action.attempt_refund is not None:
                self.quarantined.append(action.worker_id)
                for task in self.tasks.values():
                    task.is_refunded = task.is_refunded or action.worker_id in task.failed_on
            if isinstance(action, Drain):
                self.draining_since.setdefault(action.worker_id, self._now())
        self._check_spawns(intents, committed.granted)

    def _check_spawns(self, intents: list[Intent], granted: frozenset[str]) -> None:
        for intent in intents:
            if intent.worker_id in granted:
                if intent.worker_id in self.spawned_at:
                    self._violate(5, f"worker {intent.worker_id} spawned twice")
                self.spawned_at[intent.worker_id] = self._now()

    def _record_outcomes(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            match outcome:
                case Created(worker_id, machine):
                    self.machine_of.setdefault(worker_id, machine.id)
                case OrphanDeleted(machine, _, _, ended_at):
                    self.orphan_deletions.setdefault(machine.id, ended_at or to_datetime(self._now()))
                case Deleted(worker_id, _, _, _, ended_at) if worker_id in self.machine_of:
                    self.recorded_deletions.setdefault(worker_id, ended_at or to_datetime(self._now()))
                case _:
                    pass

    # ------------------------------------------------------------------------------------------------------- billing

    def _check_idle_drains(self, snapshot: Snapshot, plan: Plan) -> None:
        """No idle worker is drained early in its billing period."""
        cloud, now = self.clouds[snapshot.fleet], (snapshot.now - EPOCH).total_seconds()
        for action in plan.actions:
            if not isinstance(action, Drain) or action.code not in IDLE_CODES:
                continue
            self.idle_drain_at.setdefault(action.worker_id, now)
            record = cloud.machines.get(self.machine_of.get(action.worker_id, ""))
            if record is None or cloud.billing_unit_s < MIN_PERIOD_S or not self.has_billing_rules:
                continue
            used_s, earliest_s = (now - record.created_at) % cloud.billing_unit_s, MIN_USED_SHARE * cloud.billing_unit_s
            if used_s < earliest_s:
                self._violate(
                    None,
                    f"idle worker {action.worker_id} drained ({action.code}) {used_s:.0f} s into its billing period of "
                    f"{cloud.billing_unit_s} s, allowed from {earliest_s:.0f} s",
                )

    def _check_kept_workers(self, snapshot: Snapshot, plan: Plan) -> None:
        """With an empty queue, an idle worker that is not needed is drained before its next billing period begins."""
        cloud, fleet = self.clouds[snapshot.fleet], self.fleets[snapshot.fleet]
        is_requested = snapshot.is_paused or snapshot.is_shutting_down or snapshot.requested > 0
        is_changing = plan.hold is not None or plan.is_cut_short or any(isinstance(a, Spawn) for a in plan.actions)
        is_exempt = snapshot.queue.queued > 0 or is_requested or is_changing
        if cloud.billing_unit_s < MIN_PERIOD_S or snapshot.machines is None or is_exempt:
            self._kept_since.clear()
            return
        ended = {action.worker_id for action in plan.actions if isinstance(action, Fail | Delete | Requeue)}
        active = [
            view
            for view in snapshot.workers
            if view.slot is not None
            and view.status is WorkerStatus.ACTIVE
            and not view.is_paused
            and view.id not in ended
        ]
        ready = sum(bool(view.running) for view in active) + fleet.idle_buffer if fleet.policy == "buffered" else 0
        needed = max(fleet.min_workers, ready)
        drained = {action.worker_id for action in plan.actions if isinstance(action, Drain)}
        due = [view.id for view in active if self._is_drain_due(snapshot, view, cloud, fleet)]
        kept = [worker_id for worker_id in due if worker_id not in drained]
        expected = min(len(due), len(active) - needed, fleet.max_changes_per_cycle)
        is_scaling_down = needed <= len(active) * fleet.scale_down_multiplier
        if not is_scaling_down or len(due) - len(kept) >= expected or not drained <= set(due):
            self._kept_since.clear()
            return
        # A drain starts a short pause in scaling down, so one cycle may keep a due worker. A second one may not.
        now, poll_s = (snapshot.now - EPOCH).total_seconds(), fleet.poll_interval_s
        if now - self._kept_since.get(kept[0], -math.inf) > DRAIN_WINDOW_CYCLES[1] * poll_s:
            self._kept_since[kept[0]] = now
        elif now - self._kept_since[kept[0]] >= poll_s / 2:
            self._violate(
                None,
                f"idle worker {kept[0]} kept into its next billing period, {len(active)} active, {needed} needed: "
                f"{plan.decision}",
            )

    def _is_drain_due(self, snapshot: Snapshot, view: WorkerView, cloud: SimulatedCloud, fleet: FleetConfig) -> bool:
        """Whether a worker has been idle for long enough and its billing period is about to end."""
        record = cloud.machines.get(self.machine_of.get(view.id, ""))
        idle_since = snapshot.planner_state.health.idle_since.get(view.id)
        if record is None or idle_since is None or view.bill is None or view.running:
            return False
        idle_s = (snapshot.now - idle_since).total_seconds()
        if view.idle_s is not None:
            # A task that ran between two cycles is not in the planner's memory.
            idle_s = min(idle_s, view.idle_s)
        if idle_s < max(fleet.idle_timeout_s, fleet.poll_interval_s, fleet.scale_down_grace_s):
            return False
        unit_s, call_s = cloud.billing_unit_s, min(DELETE_CALL_S, DELETE_CALL_SHARE * cloud.billing_unit_s)
        left_s = unit_s - ((snapshot.now - EPOCH).total_seconds() - record.created_at) % unit_s - call_s
        last_s, first_s = (cycles * fleet.poll_interval_s for cycles in DRAIN_WINDOW_CYCLES)
        return last_s + 1.0 < left_s < first_s - 1.0

    def audit_open_account(self, bill: Bill, worker_id: str, fleet: str, ledger: dict[str, int]) -> None:
        """Compare what is settled for a worker that still has a machine with the cloud's bill for that time."""
        cloud = self.clouds[fleet]
        record = cloud.machines[self.machine_of[worker_id]]
        billed = 0 if bill.settled_until in (None, bill.since) else cloud.cost_micros(record, bill.settled_until)
        if ledger.get(worker_id, 0) != billed:
            self._violate(None, f"{worker_id} cost {billed} micros so far, our ledger has {ledger.get(worker_id, 0)}")

    def audit(self, fleet: str, ledger: dict[str, int], faults_ended_at: float) -> int:
        """Compare our ledger with the cloud's bill. Returns the number of workers with another cost than the cloud's.

        That is allowed only during faults: the product cannot know when a machine vanished, or when it was deleted if
        the answer was lost. The ledger must still match the deletion time that the product recorded.
        """
        cloud, inexact = self.clouds[fleet], 0
        deletions = [
            (worker_id, self.machine_of[worker_id], at, f"worker {worker_id}")
            for worker_id, at in self.recorded_deletions.items()
        ]
        known = set(self.machine_of.values())
        deletions += [
            (f"orphan-{machine_id}", machine_id, at, f"orphaned machine {machine_id}")
            for machine_id, at in self.orphan_deletions.items()
            if machine_id not in known
        ]
        for key, machine_id, recorded_at, subject in deletions:
            record = cloud.machines.get(machine_id)
            if record is None:
                continue
            billed, booked = cloud.cost_micros(record, to_datetime(record.deleted_at)), ledger.get(key, 0)
            expected = cloud.cost_micros(record, recorded_at)
            if booked != expected:
                self._violate(None, f"{subject} cost {expected} micros, our ledger has {booked}")
            if billed != expected and record.deleted_at > faults_ended_at:
                self._violate(None, f"{subject} cost {billed} micros, our ledger has {expected}")
            if key in self.recorded_deletions:
                inexact += billed != expected
                self._check_deleted_in_period(cloud, record, key, faults_ended_at)
        return inexact

    def _check_deleted_in_period(
        self, cloud: SimulatedCloud, record: MachineRecord, worker_id: str, faults_ended_at: float
    ) -> None:
        """Without faults, the machine of an idle worker is deleted in the billing period in which it was drained."""
        drained_at = self.idle_drain_at.get(worker_id)
        if drained_at is None or drained_at < faults_ended_at or cloud.billing_unit_s < MIN_PERIOD_S:
            return
        if self.claimed_at.get(worker_id, 0.0) >= drained_at:
            return  # it claimed a task at the same instant, and may finish it
        drained_in, deleted_in = (
            (at - record.created_at) // cloud.billing_unit_s for at in (drained_at, record.deleted_at)
        )
        if drained_in != deleted_in:
            self._violate(
                None, f"{worker_id} drained at {drained_at:.0f} s, its machine deleted only in the next billing period"
            )

    def _violate(self, promise: int | None, problem: str) -> None:
        """Report a broken promise by its number in docs/architecture.md. None: a billing rule."""
        self.on_violation(f"{'billing rule' if promise is None else f'promise {promise}'} broken: {problem}")

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
