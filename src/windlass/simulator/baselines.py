"""Policies of other systems, to compare with: each with its formula and its source.

They see what their systems see: counts of tasks and machines at their own interval. None deletes a busy machine. The
limits `min` and `max` apply to all. Numbers without a source here are the systems' documented defaults.
"""

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from windlass.simulator.engine import ClaimOrder, Controller, SimulatedFleet, SimulatedMachine


@dataclass(slots=True, kw_only=True)
class Limits:
    min_workers: int = 0
    max_workers: int = 100_000


def _spawn(fleet: SimulatedFleet, limits: Limits, wanted: int) -> None:
    """Spawn as many as wanted, within the maximum, and up to the minimum."""
    wanted = max(wanted, limits.min_workers - len(fleet.machines))
    fleet.spawn(max(0, min(wanted, limits.max_workers - len(fleet.machines))))


def _idle(fleet: SimulatedFleet) -> list[SimulatedMachine]:
    """Idle machines, the least recently used first."""
    found = [machine for machine in fleet.free.values() if not machine.running]
    return sorted(found, key=lambda machine: (machine.idle_since, machine.number))


def _delete_idle(fleet: SimulatedFleet, limits: Limits, idle_s: float, most: int | None = None) -> None:
    """Delete machines that were idle for this long, the longest idle first, down to the minimum."""
    room = len(fleet.machines) - limits.min_workers
    for machine in _idle(fleet)[: max(0, min(room, room if most is None else most))]:
        if fleet.now - machine.idle_since >= idle_s - 1e-9:
            fleet.delete(machine)


def _queued(fleet: SimulatedFleet) -> int:
    return len(fleet.queue)


def _running(fleet: SimulatedFleet) -> int:
    return sum(len(machine.running) for machine in fleet.machines.values())


def _booting_slots(fleet: SimulatedFleet) -> int:
    return len(fleet.booting) * fleet.world.slots


def _quiet(fleet: SimulatedFleet, now: float) -> float:
    """Nothing to decide before the next task, as long as there is no machine and no task."""
    return math.inf if not fleet.machines and not fleet.queue else now


@dataclass(slots=True)
class Reactive(Limits):
    """One machine per queued task that no booting machine covers; idle machines stop after `idle_s`.

    spawn  ceil((queued - booting slots) / slots)
    With idle_s = one boot time it is DelayedOff (Gandhi, Harchol-Balter et al., AutoScale, TOCS 2012): ski rental. It
    also cancels boots beyond the queued tasks, the newest first.
    """

    interval_s: float = 10.0
    idle_s: float = 0.0
    cancels_boots: bool = False

    def act(self, fleet: SimulatedFleet, now: float) -> float:
        if self.cancels_boots:
            surplus = len(fleet.booting) - math.ceil(_queued(fleet) / fleet.world.slots)
            newest = sorted(fleet.booting.values(), key=lambda machine: -machine.number)
            for machine in newest[: max(0, surplus)]:
                fleet.delete(machine)
        _spawn(fleet, self, math.ceil((_queued(fleet) - _booting_slots(fleet)) / fleet.world.slots))
        _delete_idle(fleet, self, self.idle_s)
        return _quiet(fleet, now)


@dataclass(slots=True)
class RunpodQueueDelay(Limits):
    """Runpod serverless, scaler type queue delay: each task that waits longer than `delay_s` gets a machine.

    spawn  tasks older than delay_s - booting slots; idle machines stop after 5 s.
    Source: docs.runpod.io/serverless/endpoints/endpoint-configurations.
    """

    interval_s: float = 5.0
    delay_s: float = 4.0
    idle_s: float = 5.0

    def act(self, fleet: SimulatedFleet, now: float) -> float:
        arrivals = fleet.trace.arrivals
        late = sum(now - arrivals[index] > self.delay_s for index in fleet.queue)
        _spawn(fleet, self, math.ceil((late - _booting_slots(fleet)) / fleet.world.slots))
        _delete_idle(fleet, self, self.idle_s)
        return _quiet(fleet, now)


@dataclass(slots=True)
class RunpodRequestCount(Limits):
    """Runpod serverless, scaler type request count: machines = ceil((queued + running) / target). Idle 5 s.

    Source: docs.runpod.io/serverless/endpoints/endpoint-configurations (default target 4).
    """

    interval_s: float = 5.0
    target: float = 4.0
    idle_s: float = 5.0

    def act(self, fleet: SimulatedFleet, now: float) -> float:
        wanted = math.ceil((_queued(fleet) + _running(fleet)) / self.target)
        _spawn(fleet, self, wanted - len(fleet.machines))
        _delete_idle(fleet, self, self.idle_s, len(fleet.machines) - wanted)
        return _quiet(fleet, now)


@dataclass(slots=True)
class HorizontalPodAutoscaler(Limits):
    """KEDA with the Kubernetes HPA: the number of pods that brings (queued + running) per pod to `target`.

    desired  ceil((queued + running) / (target * slots)), unless within 10 % of the current number
    up       at most max(100 %, 4 pods) per 15 s; down: the highest desired of the last 300 s
    It does not know which pods are busy: those it removes are drained, at random.
    Source: kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale, keda.sh/docs (cooldown 300 s).
    """

    interval_s: float = 15.0
    target: float = 1.0
    window_s: float = 300.0
    _desired: deque[tuple[float, int]] = field(default_factory=deque)
    _random: random.Random = field(default_factory=lambda: random.Random(1))  # noqa: S311

    def act(self, fleet: SimulatedFleet, now: float) -> float:
        machines = list(fleet.machines.values())
        for machine in machines:
            if machine.is_draining and not machine.running:
                fleet.delete(machine)
        live = [machine for machine in machines if not machine.is_draining]
        current, load = len(live), (_queued(fleet) + _running(fleet)) / (self.target * fleet.world.slots)
        desired = math.ceil(load)
        if current and abs(load / current - 1.0) <= 0.1:
            desired = current
        self._desired.append((now, desired))
        while self._desired[0][0] <= now - self.window_s:
            self._desired.popleft()
        if desired > current:
            _spawn(fleet, self, min(desired - current, max(current, 4)))
            return now
        highest = max(self.min_workers, *(count for _, count in self._desired))
        for machine in self._random.sample(live, max(0, current - highest)):
            if machine.running:
                fleet.drain(machine)
            else:
                fleet.delete(machine)
        return _quiet(fleet, now)


@dataclass(slots=True)
class RayAutoscaler(Limits):
    """Ray's autoscaler: packs the queued demand on free and booting slots, spawns for the rest, idle 5 minutes.

    At most max(5, ready machines) boot at the same time (upscaling_speed 1). Tasks go to any free machine.
    Source: docs.ray.io/en/latest/cluster/key-concepts.html, autoscaler v2 (upscaling_speed 1, idle_timeout 5 min).
    """

    interval_s: float = 5.0
    idle_s: float = 300.0

    def act(self, fleet: SimulatedFleet, now: float) -> float:
        booting = len(fleet.booting)
        most = max(5, len(fleet.machines) - booting) - booting
        wanted = math.ceil((_queued(fleet) - _booting_slots(fleet)) / fleet.world.slots)
        _spawn(fleet, self, min(wanted, max(0, most)))
        _delete_idle(fleet, self, self.idle_s)
        return _quiet(fleet, now)


@dataclass(slots=True)
class SkyServe(Limits):
    """SkyServe's request-rate autoscaler: replicas = ceil(arrivals per second over 60 s / target rate per replica).

    Up after 300 s above the number, down after 1,200 s below it; the target rate is what one machine completes.
    Source: docs.skypilot.co/en/latest/serving/autoscaling.html. A first queued task starts the first replica.
    """

    interval_s: float = 20.0
    window_s: float = 60.0
    up_s: float = 300.0
    down_s: float = 1200.0
    _above_since: float | None = None
    _below_since: float | None = None
    _completed: int = 0
    _work_s: float = 0.0

    def act(self, fleet: SimulatedFleet, now: float) -> float:
        for _, started, ended in fleet.completed:
            self._completed += 1
            self._work_s += ended - started
        fleet.completed.clear()
        arrivals, recent, index = fleet.trace.arrivals, 0, fleet.arrived
        while index > 0 and arrivals[index - 1] > now - self.window_s:
            index, recent = index - 1, recent + 1
        duration_s = self._work_s / self._completed if self._completed else 60.0
        wanted = math.ceil(recent / self.window_s * duration_s / fleet.world.slots)
        current = len(fleet.machines)
        self._above_since = (self._above_since if self._above_since is not None else now) if wanted > current else None
        self._below_since = (self._below_since if self._below_since is not None else now) if wanted < current else None
        if current == 0 and fleet.queue:
            _spawn(fleet, self, max(1, wanted))
        elif self._above_since is not None and now - self._above_since >= self.up_s:
            _spawn(fleet, self, wanted - current)
        elif self._below_since is not None and now - self._below_since >= self.down_s:
            # The last replica stays while tasks wait for it.
            keep = max(wanted, 1 if fleet.queue else 0)
            _delete_idle(fleet, self, 0.0, current - keep)
        return _quiet(fleet, now)


@dataclass(slots=True)
class HetznerRecycler(Limits):
    """The self-hosted-runner recycler for Hetzner: one machine per queued task, idle ones kept until their hour ends.

    spawn  ceil((queued - booting slots) / slots); delete idle machines in the last `before_s` of their billed unit.
    Source: github.com/testflows/TestFlows-GitHub-Hetzner-Runners (recycling by price of the started hour).
    """

    interval_s: float = 10.0
    before_s: float = 60.0

    def act(self, fleet: SimulatedFleet, now: float) -> float:
        _spawn(fleet, self, math.ceil((_queued(fleet) - _booting_slots(fleet)) / fleet.world.slots))
        _delete_at_unit_end(fleet, self, self.before_s)
        return _quiet(fleet, now)


def _delete_at_unit_end(fleet: SimulatedFleet, limits: Limits, before_s: float) -> None:
    unit_s, room = fleet.world.billing_unit_s, len(fleet.machines) - limits.min_workers
    ending = [m for m in _idle(fleet) if m.billed_until(fleet.now, unit_s) - fleet.now <= before_s]
    for machine in ending[: max(0, room)]:
        fleet.delete(machine)


@dataclass(slots=True)
class OriginalThreshold(Limits):
    """`threshold` of an earlier system, every 30 s: idle machines stop.

    More than 3 queued tasks per machine spawn ceil(queued / 3) - machines.
    """

    interval_s: float = 30.0
    per_worker: float = 3.0

    def act(self, fleet: SimulatedFleet, now: float) -> float:
        queued, current = _queued(fleet), len(fleet.machines)
        wanted = 0
        if current == 0:
            wanted = max(1, self.min_workers) if queued else 0
        elif queued / current > self.per_worker:
            wanted = max(1, self.min_workers, math.ceil(queued / self.per_worker)) - current
        _spawn(fleet, self, wanted)
        _delete_idle(fleet, self, 0.0)
        return _quiet(fleet, now)


@dataclass(slots=True)
class OriginalBuffered(Limits):
    """`buffered` of an earlier system, every 30 s: one machine per task without one, times a multiplier.

    Idle machines stop after 30 s.
    Spawns at least 45 s apart (MIN_SCALING_INTERVAL_SEC), except for the first machine.
    """

    interval_s: float = 30.0
    multiplier: float = 1.0
    idle_s: float = 30.0
    between_s: float = 45.0
    _spawned_at: float = -math.inf

    def act(self, fleet: SimulatedFleet, now: float) -> float:
        uncovered = _queued(fleet) - _booting_slots(fleet)
        if uncovered > 0 and (not fleet.machines or now - self._spawned_at >= self.between_s):
            self._spawned_at = now
            _spawn(fleet, self, math.ceil(uncovered * self.multiplier / fleet.world.slots))
        _delete_idle(fleet, self, self.idle_s)
        return _quiet(fleet, now)


@dataclass(slots=True)
class OriginalClearTime(Limits):
    """`clear-time` of an earlier system, every 10 s, with two defects fixed.

    Booting machines count, and idle machines stop before the hour.

    spawn  0 if free slots >= queued, or queued / (free / median duration) < 300 s
           ceil((queued - free) / slots), at most 10 per cycle, otherwise
    delete idle machines in the last 5 minutes of their billed hour
    """

    interval_s: float = 10.0
    clear_s: float = 300.0
    before_s: float = 300.0
    most: int = 10
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=500))

    def act(self, fleet: SimulatedFleet, now: float) -> float:
        self._durations.extend(ended - started for _, started, ended in fleet.completed)
        fleet.completed.clear()
        queued = _queued(fleet)
        ready = len(fleet.machines) - len(fleet.booting)
        free = ready * fleet.world.slots - _running(fleet) + _booting_slots(fleet)
        wanted = 0
        if free < queued:
            known = sorted(self._durations)
            clears_s = queued / (free / known[len(known) // 2]) if known and free > 0 else math.inf
            wanted = min(self.most, math.ceil((queued - free) / fleet.world.slots)) if clears_s >= self.clear_s else 0
        _spawn(fleet, self, wanted)
        _delete_at_unit_end(fleet, self, self.before_s)
        return _quiet(fleet, now)


@dataclass(slots=True)
class Fixed(Limits):
    """A constant number of machines, from the first second to the last task."""

    interval_s: float = 10.0
    count: int = 1

    def act(self, fleet: SimulatedFleet, now: float) -> float:
        fleet.spawn(self.count - len(fleet.machines))
        return now if len(fleet.machines) < self.count else math.inf


@dataclass(frozen=True, slots=True)
class Baseline:
    """`build` receives the mean boot time and the limits."""

    summary: str
    build: Callable[[float, dict[str, Any]], Controller]
    claim_order: ClaimOrder = ClaimOrder.RECENT


BASELINES: dict[str, Baseline] = {
    "reactive": Baseline("one machine per queued task, off when idle", lambda _, limits: Reactive(**limits)),
    "delayed-off": Baseline(
        "the same, off after one boot time idle",
        lambda boot_s, limits: Reactive(idle_s=boot_s, cancels_boots=True, **limits),
    ),
    "runpod-queue-delay": Baseline(
        "Runpod serverless, queue delay 4 s", lambda _, limits: RunpodQueueDelay(**limits), ClaimOrder.OLDEST
    ),
    "runpod-request-count": Baseline(
        "Runpod serverless, request count 4", lambda _, limits: RunpodRequestCount(**limits), ClaimOrder.OLDEST
    ),
    "keda": Baseline(
        "KEDA/HPA, target 1 per slot", lambda _, limits: HorizontalPodAutoscaler(**limits), ClaimOrder.RANDOM
    ),
    "ray": Baseline("Ray autoscaler, idle 5 min", lambda _, limits: RayAutoscaler(**limits), ClaimOrder.RANDOM),
    "skyserve": Baseline("SkyServe, request rate", lambda _, limits: SkyServe(**limits), ClaimOrder.RANDOM),
    "hetzner-recycler": Baseline("Hetzner runner recycler", lambda _, limits: HetznerRecycler(**limits)),
    "original-threshold": Baseline(
        "the first threshold, 3 tasks per machine", lambda _, limits: OriginalThreshold(**limits)
    ),
    "original-clear-time": Baseline("the first clear-time, 5 min", lambda _, limits: OriginalClearTime(**limits)),
    "original-buffered": Baseline("the first buffered, no buffer", lambda _, limits: OriginalBuffered(**limits)),
    "fixed-min": Baseline(
        "always the minimum, at least one", lambda _, limits: Fixed(count=max(1, limits["min_workers"]))
    ),
    "fixed-max": Baseline("always the maximum", lambda _, limits: Fixed(count=limits["max_workers"])),
}
