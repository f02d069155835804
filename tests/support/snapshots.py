"""Builders of snapshots for policy tests, and a simulation in which every action takes effect at once.

Times are given as ages in seconds: `worker(heartbeat=12)` sent its last heartbeat 12 s ago.
"""

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from windlass.model.action import (
    ACTION_KINDS,
    Action,
    Adopt,
    Delete,
    DeleteOrphan,
    Drain,
    Fail,
    FailSlot,
    GrowVolume,
    Plan,
    Prepare,
    Promote,
    RaiseAlert,
    RecordEvent,
    RecordMachine,
    RecordPrice,
    Requeue,
    Spawn,
)
from windlass.model.cost import Bill, Tariff
from windlass.model.fleet import FleetConfig
from windlass.model.machine import Machine, MachineState, ProviderTraits, Volume
from windlass.model.snapshot import LaunchRecord, PlannerState, QueueView, RunningView, SlotView, Snapshot, WorkerView
from windlass.model.worker import WorkerStatus
from windlass.policy.plan import plan

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)

# Settings of the original GPU orchestrator. Settings that only delay scaling are off.
GPU = FleetConfig(
    policy="buffered",
    has_gpu=True,
    min_workers=0,
    max_workers=10,
    poll_interval_s=30,
    heartbeat_interval_s=20,
    heartbeat_timeout_s=600,
    spawn_timeout_s=600,
    stop_timeout_s=600,
    stuck_timeout_s=1200,
)
# Defaults of the provider `local`.
LOCAL = FleetConfig(policy="buffered")
# A provider whose machine list lags: new machines appear late, and listed machines may be missing for a while.
LAGGING_LIST = ProviderTraits(absence_grace_s=60, creation_lateness_s=120, orphan_grace_s=60)


def ago(seconds: float, now: datetime = NOW) -> datetime:
    return now - timedelta(seconds=seconds)


def fleet(base: FleetConfig = LOCAL, **settings: Any) -> FleetConfig:
    return FleetConfig.model_validate(base.model_dump() | settings)


def task(task_id: int = 1, started: float = 5, timeout_s: float | None = None) -> RunningView:
    return RunningView(task_id, ago(started), timeout_s)


def worker(
    id_: str = "w0",
    slot: int | None = 0,
    status: str = "active",
    *,
    created: float = 100,
    heartbeat: float | None = 1,
    activated: float | None = None,
    claimed: float | None = None,
    terminating: float | None = None,
    prepared: float | None = None,
    vram_mb: int | None = None,
    vram: float | None = None,
    vram_lost: float | None = None,
    machine_at: float | None = None,
    machine_id: str | None = "own",
    **rest: Any,
) -> WorkerView:
    """Its machine is `m-<id>` by default. A manual worker (slot None) has none."""
    if machine_id == "own":
        machine_id = None if slot is None else f"m-{id_}"
    if activated is None and status == "active":
        activated = created
    return WorkerView(
        id=id_,
        slot=slot,
        status=WorkerStatus(status),
        is_paused=rest.pop("is_paused", False),
        concurrency=rest.pop("concurrency", 1),
        created_at=ago(created),
        activated_at=_maybe(activated),
        last_heartbeat=_maybe(heartbeat),
        first_claimed_at=_maybe(claimed),
        terminating_at=_maybe(terminating),
        prepared_at=_maybe(prepared),
        machine_id=machine_id,
        machine_at=_maybe(machine_at),
        vram_total_mb=vram_mb,
        vram_at=_maybe(vram if vram is not None or vram_mb is None else 1),
        vram_lost_at=_maybe(vram_lost),
        running_at=rest.pop("running_at", ago(created if machine_at is None else machine_at)),
        **rest,
    )


def _maybe(age_s: float | None) -> datetime | None:
    return None if age_s is None else ago(age_s)


def machine(name: str, state: str = "running", id_: str | None = None, *, created: float = 100, **rest: Any) -> Machine:
    return Machine(id=id_ or f"m-{name}", name=name, state=MachineState(state), created_at=ago(created), **rest)


def machines_of(workers: Iterable[WorkerView]) -> tuple[Machine, ...]:
    """The provider's list if every known machine runs."""
    return tuple(
        Machine(w.machine_id, w.id, MachineState.RUNNING, w.created_at) for w in workers if w.machine_id is not None
    )


def with_state(state: PlannerState, **values: Any) -> PlannerState:
    """The planner state with these fields replaced, each in the group that has a field of that name."""
    for name, value in values.items():
        if name in PlannerState.__dataclass_fields__:
            state = replace(state, **{name: value})
            continue
        (group,) = (group for group in PlannerState.__dataclass_fields__ if hasattr(getattr(state, group), name))
        state = replace(state, **{group: replace(getattr(state, group), **{name: value})})
    return state


def snapshot(*workers: WorkerView, queued: int = 0, idle: float = 0, **rest: Any) -> Snapshot:
    """By default all machines are listed and the last cycle was a second ago.

    `idle`: how long cycles have seen every worker without a task idle. `state`: fields of the planner state.
    """
    planner_state = with_state(
        PlannerState(),
        planned_at=ago(1),
        idle_since={w.id: ago(idle) for w in workers if not w.running},
        unclaimed_since=rest.pop("unclaimed", {}),
    )
    planner_state = with_state(planner_state, **rest.pop("state", {}))
    queue = QueueView(queued=queued, running=sum(len(w.running) for w in workers), duration_p50_s=rest.pop("p50", None))
    return Snapshot(
        now=NOW,
        fleet="default",
        queue=queue,
        workers=workers,
        machines=rest.pop("machines", machines_of(workers)),
        planner_state=planner_state,
        **rest,
    )


def of_kind(actions: Iterable[Action], kind: type[Action]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def only(planned: Plan, kind: type[Action]) -> Any:
    """The single action of this kind. Fails if there is none or more than one."""
    (action,) = of_kind(planned.actions, kind)
    return action


def kinds(planned: Plan) -> list[str]:
    return [ACTION_KINDS[type(action)] for action in planned.actions]


# ------------------------------------------------------------------------------------------------------ simulation


def apply(planned: Plan, seen: Snapshot, config: FleetConfig) -> Snapshot:
    """The next snapshot if every action takes effect and no time passes."""
    effects = _Effects(seen, config)
    for action in planned.actions:
        effects.apply(action)
    return effects.snapshot(planned.planner_state)


class _Effects:
    def __init__(self, seen: Snapshot, config: FleetConfig) -> None:
        self.seen = seen
        self.config = config
        self.workers = {worker.id: worker for worker in seen.workers}
        self.machines = None if seen.machines is None else {machine.id: machine for machine in seen.machines}
        self.slots = {slot.slot: slot for slot in seen.slots}
        self.launches = list(seen.launches)
        self.queued = seen.queue.queued
        self.orphaned = list(seen.orphaned)
        self.requested = seen.requested
        self.refusal = seen.refusal
        self.ended_bills = seen.ended_bills
        self.preparing = seen.preparing
        self.volume = seen.volume

    def apply(self, action: Action) -> None:  # noqa: PLR0912 - one branch for each kind of action
        now = self.seen.now
        match action:
            case Promote(worker_id):
                self._change(worker_id, status=WorkerStatus.ACTIVE, activated_at=now)
            case Fail(worker_id, code, reason, is_proven=is_proven):
                self._record_failure(self.workers[worker_id], is_proven=is_proven)
                self._requeue(worker_id)
                self._change(worker_id, status=WorkerStatus.ERROR, code=code, reason=reason)
            case Requeue(worker_id):
                self._requeue(worker_id)
            case Drain(worker_id, code, reason):
                self._change(worker_id, status=WorkerStatus.TERMINATING, terminating_at=now, code=code, reason=reason)
            case Delete(worker_id, machine_id):
                self._requeue(worker_id)
                bill = self.workers.pop(worker_id).bill
                if bill is not None:
                    self.ended_bills += (replace(bill, until=now),)
                self._remove_machine(machine_id)
            case Adopt(worker_id, machine_id):
                found = (self.machines or {}).get(machine_id)
                self._change(
                    worker_id,
                    machine_id=machine_id,
                    creation="created",
                    machine_at=now,
                    running_at=now if found is not None and found.state is MachineState.RUNNING else None,
                    address=found.address if found is not None else None,
                    machine_host=found.host if found is not None else None,
                )
            case RecordPrice(worker_id, machine_id):
                self._change(worker_id, bill=self._bill(machine_id))
            case RecordMachine(worker_id, address=address, machine_host=host, is_running=is_running):
                known = self.workers[worker_id]
                running_at = known.running_at or (now if is_running else None)
                self._change(
                    worker_id,
                    running_at=running_at,
                    address=address or known.address,
                    machine_host=host or known.machine_host,
                )
            case Prepare(worker_id):
                self.preparing += (worker_id,)
            case DeleteOrphan(machine_id):
                self._remove_machine(machine_id)
            case FailSlot(slot):
                self.slots[slot] = replace(self.slots.get(slot, SlotView(slot, False)), is_failed=True)
            case Spawn(slot):
                self._spawn(slot)
                self.refusal = None
            case GrowVolume(volume_id, size_gb):
                self.volume = Volume(volume_id, size_gb)
            case RaiseAlert() | RecordEvent():
                pass

    def _bill(self, machine_id: str) -> Bill:
        machine = (self.machines or {})[machine_id]
        tariff = Tariff(machine.price_micros_per_hour or 0, "EUR", self.seen.traits.billing_unit_s)
        return Bill(tariff, machine.created_at or self.seen.now)

    def _change(self, worker_id: str, **changes: Any) -> None:
        self.workers[worker_id] = replace(self.workers[worker_id], **changes)

    def _record_failure(self, view: WorkerView, *, is_proven: bool) -> None:
        if view.slot is None:
            return
        slot = self.slots.get(view.slot, SlotView(view.slot, False))
        self.slots[view.slot] = replace(slot, restarts=(*slot.restarts, self.seen.now))
        launch = LaunchRecord(view.created_at, False, view.slot)
        if launch in self.launches:
            self.launches.remove(launch)
        self.launches.append(replace(launch, has_failed=not is_proven))

    def _requeue(self, worker_id: str) -> None:
        if worker_id in self.workers:
            self.queued += len(self.workers[worker_id].running)
            self._change(worker_id, running=())
        elif worker_id in self.orphaned:
            self.queued += 1
        if worker_id in self.orphaned:
            self.orphaned.remove(worker_id)

    def _remove_machine(self, machine_id: str | None) -> None:
        if machine_id is not None and self.machines is not None:
            self.machines.pop(machine_id, None)

    def _spawn(self, slot: int) -> None:
        now = self.seen.now
        assert all(w.slot != slot for w in self.workers.values()), f"slot {slot} is taken"
        id_ = f"n{slot}-{now.timestamp():.6f}"
        machine_id = f"{self.seen.traits.host}/{id_}" if self.seen.traits.host is not None else f"m-{id_}"
        self.workers[id_] = WorkerView(
            id=id_,
            slot=slot,
            status=WorkerStatus.SPAWNING,
            is_paused=self.seen.is_paused,
            concurrency=self.config.concurrency,
            created_at=now,
            machine_id=machine_id,
            machine_at=now,
            creation="created",
            running_at=None if self.seen.traits.has_prepare_step else now,
            fingerprint=self.seen.fingerprint,
        )
        if self.machines is not None:
            # A machine with a prepare step is prepared when it runs, not yet.
            state = MachineState.BOOTING if self.seen.traits.has_prepare_step else MachineState.RUNNING
            self.machines[machine_id] = Machine(machine_id, id_, state, now)
        self.launches.append(LaunchRecord(now, False, slot))
        self.requested = max(0, self.requested - 1)

    def _spawnable_slots(self) -> int:
        """Drop requests that no slot can take, like the store."""
        staying = (WorkerStatus.SPAWNING, WorkerStatus.ACTIVE)
        taken = {w.slot for w in self.workers.values() if w.slot is not None and w.status in staying}
        taken |= {slot.slot for slot in self.slots.values() if slot.is_failed and slot.slot < self.config.max_workers}
        return self.config.max_workers - len(taken)

    def snapshot(self, planner_state: PlannerState) -> Snapshot:
        workers = tuple(self.workers.values())
        return replace(
            self.seen,
            queue=replace(self.seen.queue, queued=self.queued, running=sum(len(w.running) for w in workers)),
            workers=workers,
            slots=tuple(self.slots.values()),
            machines=None if self.machines is None else tuple(self.machines.values()),
            launches=tuple(sorted(self.launches, key=lambda launch: launch.at)),
            orphaned=tuple(self.orphaned),
            requested=max(0, min(self.requested, self._spawnable_slots())),
            refusal=self.refusal,
            ended_bills=self.ended_bills,
            preparing=self.preparing,
            volume=self.volume,
            planner_state=planner_state,
        )


class FleetSimulation:
    """Consecutive cycles of a fleet. `live(worker, now)` returns each worker's next view, or None if it died.

    Idle, ready workers claim queued tasks before the next cycle. Tasks never end.
    """

    def __init__(self, config: FleetConfig, first: Snapshot, live: Any) -> None:
        self.config = config
        self.seen = first
        self.live = live
        self.plans: list[Plan] = []
        self._last_task = 1000

    def cycle(self, after_s: float | None = None) -> Plan:
        planned = plan(self.seen, self.config)
        self.plans.append(planned)
        done = apply(planned, self.seen, self.config)
        now = done.now + timedelta(seconds=self.config.poll_interval_s if after_s is None else after_s)
        self.seen = self._age(done, now)
        return planned

    def _age(self, done: Snapshot, now: datetime) -> Snapshot:
        queued = done.queue.queued
        workers, gone = [], set()
        for before in done.workers:
            after = self.live(before, now)
            if after is None:
                gone.add(before.machine_id)
                after = before
            can_claim = after.status is WorkerStatus.ACTIVE and not after.is_paused and after.last_heartbeat == now
            while can_claim and queued > 0 and len(after.running) < after.concurrency:
                queued -= 1
                self._last_task += 1
                running = (*after.running, RunningView(self._last_task, now, None))
                after = replace(after, running=running, first_claimed_at=after.first_claimed_at or now)
            workers.append(after)
        window = timedelta(seconds=max(self.config.failure_window_s, self.config.restart_window_s))
        return replace(
            done,
            now=now,
            queue=replace(done.queue, queued=queued, running=sum(len(w.running) for w in workers)),
            workers=tuple(workers),
            machines=tuple(m for m in done.machines or () if m.id not in gone),
            launches=tuple(h for h in done.launches if now - h.at < window),
            slots=tuple(replace(s, restarts=tuple(r for r in s.restarts if now - r < window)) for s in done.slots),
        )

    def spawns(self) -> int:
        return sum(len(of_kind(planned.actions, Spawn)) for planned in self.plans)


def beating(view: WorkerView, now: datetime) -> WorkerView:
    """A worker that starts at once and sends a heartbeat in every cycle."""
    return replace(view, last_heartbeat=now, vram_total_mb=24_000, vram_at=now)
