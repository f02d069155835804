"""Runs any policy through the full plan(): a snapshot in every cycle, as production observes it, and its actions.

Workers send heartbeats at every cycle, machine lists are complete, and provider calls take effect at once. A cycle that
changed something is followed by the next one after a second, as in control/fleet_task.py.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from math import inf

from windlass.model.action import Delete, Drain, Promote, Spawn
from windlass.model.fleet import FleetConfig
from windlass.model.machine import Machine, MachineState, ProviderTraits
from windlass.model.snapshot import PlannerState, QueueView, RunningView, Snapshot, WorkerView
from windlass.model.worker import WorkerStatus
from windlass.policy.plan import plan
from windlass.simulator.engine import SimulatedFleet, SimulatedMachine
from windlass.simulator.fast_path import FOLLOW_UP_S
from windlass.simulator.observation import Observation, last_refusal, moment

# Ids of machines begin with it.
HOST = "simulated"


class PlanController:
    """`decision`: that of the last plan. `on_cycle` is called with the time of every cycle."""

    def __init__(self, config: FleetConfig, on_cycle: Callable[[float], None] | None = None) -> None:
        self.interval_s = config.poll_interval_s
        self.decision = ""
        self._config = config
        self._state = PlannerState()
        self._seen = Observation()
        self._slots: dict[int, int] = {}
        self._active: set[int] = set()
        self._on_cycle = on_cycle

    def act(self, fleet: SimulatedFleet, now: float) -> float:
        if self._on_cycle is not None:
            self._on_cycle(now)
        planned = plan(self._snapshot(fleet, now), self._config)
        # Skipped cycles are no cadence: `windlass up` drops long gaps too (control/cycle.py).
        cadence = replace(planned.planner_state.cadence, gaps_s=())
        self._state, self.decision = replace(planned.planner_state, cadence=cadence), planned.decision
        by_name = {_name(machine): machine for machine in fleet.machines.values()}
        changed = False
        for action in planned.actions:
            if isinstance(action, Promote):
                self._active.add(by_name[action.worker_id].number)
            elif isinstance(action, Drain):
                fleet.drain(by_name[action.worker_id])
                changed = True
            elif isinstance(action, Delete):
                machine = by_name[action.worker_id]
                self._slots.pop(machine.number, None)
                fleet.delete(machine)
                changed = True
            elif isinstance(action, Spawn):
                number = fleet.started
                if fleet.spawn(1):
                    self._slots[number] = action.slot
                changed = True
        if changed:
            return now + min(FOLLOW_UP_S, self.interval_s)
        return inf if not fleet.machines and not fleet.queue else now

    def _snapshot(self, fleet: SimulatedFleet, now: float) -> Snapshot:
        seen, at = self._seen, moment(now)
        seen.update(fleet)
        self._slots = {number: slot for number, slot in self._slots.items() if number in fleet.machines}
        durations, queue = seen.durations.ordered, fleet.queue
        return Snapshot(
            now=at,
            fleet="simulated",
            queue=QueueView(
                queued=len(queue),
                running=sum(len(machine.running) for machine in fleet.machines.values()),
                oldest_queued_age_s=now - fleet.trace.arrivals[queue[0]] if queue else None,
                duration_p50_s=durations[len(durations) // 2] if durations else None,
                durations_s=tuple(durations),
                duration_mean_s=seen.durations.mean,
                arrived=seen.arrived,
                boots_s=tuple(seen.boots.ordered),
                each=seen.each_queue(fleet),
            ),
            workers=tuple(self._view(fleet, machine, at) for machine in fleet.machines.values()),
            machines=tuple(_machine(machine) for machine in fleet.machines.values()),
            listed_at=at,
            traits=ProviderTraits(
                billing_unit_s=fleet.world.billing_unit_s, host=HOST if fleet.world.is_free else None
            ),
            refusal=last_refusal(fleet),
            planner_state=self._state,
        )

    def _view(self, fleet: SimulatedFleet, machine: SimulatedMachine, now: datetime) -> WorkerView:
        is_ready = machine.ready_at is not None
        status = WorkerStatus.ACTIVE if machine.number in self._active else WorkerStatus.SPAWNING
        if machine.is_draining:
            status = WorkerStatus.TERMINATING
        created, name, names = moment(machine.requested_at), _name(machine), fleet.trace.queues
        return WorkerView(
            id=name,
            slot=self._slots[machine.number],
            status=status,
            is_paused=False,
            concurrency=fleet.world.slots,
            created_at=created,
            activated_at=moment(machine.ready_at) if machine.ready_at is not None else None,
            last_heartbeat=now if is_ready else None,
            first_claimed_at=moment(machine.first_claimed_at) if machine.first_claimed_at is not None else None,
            terminating_at=moment(machine.draining_since) if machine.is_draining else None,
            idle_s=None if machine.running else (now - moment(machine.idle_since)).total_seconds(),
            machine_id=name,
            machine_at=created,
            creation="created",
            prepared_at=created,
            vram_total_mb=1 if is_ready else None,
            vram_at=now if is_ready else None,
            running=tuple(
                RunningView(index, moment(at), None, names[index] if names else None)
                for index, at in machine.running.items()
            ),
            provider=self._config.provider,
        )


def _machine(machine: SimulatedMachine) -> Machine:
    state = MachineState.RUNNING if machine.ready_at is not None else MachineState.BOOTING
    return Machine(_name(machine), _name(machine), state, created_at=moment(machine.requested_at))


def _name(machine: SimulatedMachine) -> str:
    # All names have one length, so that the order of names is the order of creation.
    return f"{HOST}/{machine.number:08d}"
