"""Runs the `adaptive` policy on plain numbers: the same decisions as through plan(), without snapshots.

Applies the limits that matter in a healthy fleet: minimum, maximum, changes per cycle, termination windows and the
back-off after refused create calls. Cycles in which the policy promises no change are skipped.
tests/unit/test_simulator_paths.py compares it with full_path.py.
"""

from collections.abc import Callable
from math import inf

from windlass.model.adaptive import AdaptiveMemory
from windlass.model.fleet import FleetConfig
from windlass.model.snapshot import ProviderBackoff
from windlass.policy import billing
from windlass.policy.scale.adaptive import UNKNOWN_BOOT_S, UNKNOWN_PROCESS_START_S, decide
from windlass.policy.scale.adaptive_boot import BootEstimate, estimate_boots
from windlass.policy.scale.adaptive_load import FleetLoad, IdleWorker, assumed_duration_s
from windlass.policy.stages.provider_backoff import next_backoff
from windlass.simulator.engine import SimulatedFleet, SimulatedMachine
from windlass.simulator.observation import Observation, last_refusal, moment

# A cycle that changed something is followed by the next this soon, as in control/fleet_task.py.
FOLLOW_UP_S = 1.0


class AdaptiveController:
    def __init__(self, config: FleetConfig, on_cycle: Callable[[float], None] | None = None) -> None:
        self.interval_s = config.poll_interval_s
        self._config = config
        self._memory = AdaptiveMemory()
        self._seen = Observation()
        self._on_cycle = on_cycle
        self._backoff: ProviderBackoff | None = None
        self._estimated: tuple[int, tuple[float, ...]] | None = None
        self._estimate = BootEstimate(UNKNOWN_BOOT_S, UNKNOWN_BOOT_S)

    def act(self, fleet: SimulatedFleet, now: float) -> float:
        if self._on_cycle is not None:
            self._on_cycle(now)
        draining = [machine for machine in fleet.machines.values() if machine.is_draining]
        for machine in draining:
            fleet.delete(machine)
        load, idle = self._load(fleet, now)
        config = self._config
        decision = decide(load, self._memory, config.wait_goal_s, config.price_of_waiting)
        self._memory = decision.memory
        wanted = max(decision.spawn, config.min_workers - load.workers)
        wanted = min(wanted, config.max_workers - load.workers)
        changed = bool(draining)
        if wanted > 0:
            most = self._most_spawns(fleet, now)
            fleet.spawn(min(wanted, most))
            changed = changed or most > 0
        elif (decision.drain or decision.cancel) and not decision.spawn:
            spare = [idle[position] for position in decision.drain]
            spare += list(fleet.booting.values())[::-1][: decision.cancel]
            most = min(config.max_changes_per_cycle, load.busy + len(idle) + decision.cancel - config.min_workers)
            for machine in spare[: max(0, most)]:
                fleet.drain(machine)
                changed = True
        if changed:
            return now + min(FOLLOW_UP_S, self.interval_s)
        if not fleet.machines and not fleet.queue:
            return inf
        # Not earlier than the next regular cycle: only a change is followed up early.
        return max(decision.valid_until, now + self.interval_s)

    def _load(self, fleet: SimulatedFleet, now: float) -> tuple[FleetLoad, list[SimulatedMachine]]:
        seen, slots = self._seen, fleet.world.slots
        seen.update(fleet)
        unit_s, cycle_s = fleet.world.billing_unit_s, self.interval_s
        has_windows = billing.is_worth_waiting(unit_s, cycle_s)
        idle: list[SimulatedMachine] = []
        running: list[int] = []
        ages: list[float] = []
        busy = booted = 0
        decided_at = self._memory.at if self._memory.at is not None else -inf
        for machine in fleet.machines.values():
            booted += machine.ready_at is not None and machine.ready_at > decided_at
            if machine.running:
                busy += 1
                ages += [now - started for started in machine.running.values()]
                running += machine.running
            elif machine.ready_at is not None:
                idle.append(machine)
        idle.sort(key=lambda machine: (-machine.idle_since, machine.number))
        window_s = billing.lead_s(unit_s, cycle_s, billing.WINDOW_OPENS_CYCLES) if has_windows else 0.0
        closes_s = billing.lead_s(unit_s, cycle_s, billing.WINDOW_CLOSES_CYCLES) if has_windows else 0.0

        def billed_s(machine: SimulatedMachine) -> float | None:
            if not has_windows:
                return None
            left_s = machine.billed_until(now, unit_s) - now
            return left_s if left_s >= closes_s else left_s + unit_s

        queue, is_free = fleet.queue, fleet.world.is_free
        queues = seen.each_queue(fleet)
        load = FleetLoad(
            now=now,
            slots=slots,
            queued=len(queue),
            arrived=seen.arrived,
            oldest_queued_age_s=now - fleet.trace.arrivals[queue[0]] if queue else None,
            busy=busy,
            running_ages_s=ages,
            idle=[IdleWorker(round(now - machine.idle_since, 6), billed_s(machine), window_s) for machine in idle],
            starting_ages_s=[now - machine.requested_at for machine in fleet.booting.values()],
            durations_s=seen.durations.ordered,
            duration_mean_s=seen.durations.mean,
            boots=self._boots(UNKNOWN_PROCESS_START_S if is_free else UNKNOWN_BOOT_S),
            assumed_duration_s=assumed_duration_s(has_long_units=has_windows, price=self._config.price_of_waiting),
            billing_unit_s=unit_s if has_windows else 1,
            booted=booted,
            max_workers=self._config.max_workers,
            max_cancelled=min(
                self._config.max_changes_per_cycle, max(0, len(fleet.machines) - self._config.min_workers)
            ),
            is_free=is_free,
            running_queues=[fleet.trace.queues[index] for index in running] if queues else (),
            queues=queues,
        )
        return load, idle

    def _most_spawns(self, fleet: SimulatedFleet, now: float) -> int:
        """How many machines one cycle may request: none during a back-off, and one after it until one is created."""
        self._backoff = next_backoff(last_refusal(fleet), self._backoff)
        if self._backoff is None:
            return self._config.max_changes_per_cycle
        return 0 if moment(now) < self._backoff.until else 1

    def _boots(self, unknown_s: float) -> BootEstimate:
        """The estimate, computed again only if a boot ended or a start was cancelled."""
        key = (self._seen.boots.added, self._memory.cancelled_boots_s)
        if key != self._estimated:
            self._estimated = key
            self._estimate = estimate_boots(self._seen.boots.ordered, self._memory.cancelled_boots_s, unknown_s)
        return self._estimate
