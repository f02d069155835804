"""The simulated world of one fleet: tasks arrive, machines boot, workers claim in order, the provider bills.

Time is in seconds from the first task. A controller is called at its interval and spawns or deletes machines; between
its calls only workers act: a free worker claims the oldest queued task at once. A busy machine is deleted only by a
crash. The run ends with the last task, and machines that exist then are billed until that moment. A run whose queued
tasks get no worker ends too, with NoProgress: every run is bounded.

Waits are exact. Everything random (boot times, crashes, refusals) comes from one seeded generator.
"""

import heapq
import math
import random
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from windlass.simulator.trace import Trace

HOUR_S = 3600.0
# Queued tasks that no worker has claimed for this long and two long boots, while no task runs, are never claimed: the
# longest hold of production lasts an hour.
MAX_STALLED_S = 4 * HOUR_S
# One in 31,000 boots exceeds its mean by more than this many sigma.
RARE_SIGMAS = 4.0
# Attempts of a task, as for a task that was enqueued without a number. Without an end to them, a task that outlasts the
# life of its machines would run forever.
MAX_ATTEMPTS = 3
_END, _READY, _CRASH = 0, 1, 2


class ClaimOrder(StrEnum):
    """Which free worker claims a task."""

    RECENT = "recent"  # the most recently used
    BILLED = "billed"  # the one with most billed time left
    OLDEST = "oldest"  # the one that was idle longest
    RANDOM = "random"


@dataclass(frozen=True, slots=True)
class World:
    """What a simulated provider and its workers do."""

    slots: int = 1
    boot_s: float = 120.0
    # Spread of boot times: sigma of a lognormal distribution whose mean is boot_s. 0: every boot takes boot_s.
    boot_sigma: float = 0.0
    # Measured boots, which are drawn instead: (boot time, share of boots that take longer), ascending.
    boot_steps: tuple[tuple[float, float], ...] = ()
    # 1: billed by the second. 3600: by the started hour.
    billing_unit_s: int = 1
    claim_order: ClaimOrder = ClaimOrder.RECENT
    # Crashes per hour of a ready machine. Its tasks are queued again, at their old position.
    crashes_per_hour: float = 0.0
    # Share of create calls that the provider refuses.
    refused_share: float = 0.0
    # Machines are processes of this host, which cost nothing.
    is_free: bool = False
    seed: int = 1

    def long_boot_s(self, sigmas: float) -> float:
        """A boot that exceeds the mean by this many sigma; of measured boots the longest."""
        if self.boot_steps:
            return self.boot_steps[-1][0]
        return self.boot_s * math.exp(sigmas * self.boot_sigma - self.boot_sigma**2 / 2)

    @property
    def max_stalled_s(self) -> float:
        """How long queued tasks may be without a worker before a run ends. Refused create calls take their time too."""
        return (MAX_STALLED_S + 2 * self.long_boot_s(RARE_SIGMAS)) / (1 - self.refused_share)


class NoProgress(Exception):
    """Queued tasks get no worker. `requested`, `refused`: create calls since a task was last claimed."""

    def __init__(self, queued: int, stalled_s: float, requested: int, refused: int) -> None:
        super().__init__(f"no worker for {queued} queued tasks in {stalled_s:.0f} s")
        self.queued = queued
        self.stalled_s = stalled_s
        self.requested = requested
        self.refused = refused


@dataclass(slots=True, eq=False)
class SimulatedMachine:
    number: int
    requested_at: float
    boot_s: float
    ready_at: float | None = None
    # Tasks that run: index to start time.
    running: dict[int, float] = field(default_factory=dict)
    idle_since: float = 0.0
    first_claimed_at: float | None = None
    is_draining: bool = False
    draining_since: float = 0.0

    def billed_until(self, now: float, unit_s: int) -> float:
        units = math.floor((now - self.requested_at) / unit_s) + 1
        return self.requested_at + units * unit_s


class Controller(Protocol):
    """Decides what to spawn and delete. `act` returns when it wants to be called again.

    Sooner than the interval: a follow-up at that moment. Later: a promise that no call before it would change anything
    unless a task arrives or ends or a machine becomes ready. The next regular call then comes at the interval.
    """

    interval_s: float

    def act(self, fleet: "SimulatedFleet", now: float) -> float: ...


@dataclass(frozen=True, slots=True)
class FleetSample:
    """The fleet at one moment, for charts."""

    at: float
    queued: int
    ready: int
    busy: int
    booting: int
    billed_s: float


class SimulatedFleet:
    """The machines and the queue. Controllers read it, and change it only by spawn, drain and delete."""

    def __init__(self, trace: Trace, world: World, *, sample_every_s: float | None = None) -> None:
        self.trace = trace
        self.world = world
        self.now = 0.0
        self.queue: deque[int] = deque()
        # By number, in order of creation.
        self.machines: dict[int, SimulatedMachine] = {}
        self.booting: dict[int, SimulatedMachine] = {}
        # Free workers. With one slot they are all idle, the most recently used last.
        self.free: dict[int, SimulatedMachine] = {}
        self.started = 0
        self.peak = 0
        self.refused = 0
        self.crashed = 0
        # Tasks whose attempts all ended with their machine.
        self.failed = 0
        self.waits: list[float] = [0.0] * len(trace.arrivals)
        # Completed since a controller last took them: (index, start, end). Boots: seconds.
        self.completed: list[tuple[int, float, float]] = []
        self.boots: list[float] = []
        self.arrived = 0
        # The last create call, if the provider refused it.
        self.refused_at: float | None = None
        self.deleted_billed_s = 0.0
        self.done = 0
        self.samples: list[FleetSample] = []
        self._sample_every_s = sample_every_s
        self._next_sample_at = 0.0
        self._events: list[tuple[float, int, int, int]] = []
        self._random = random.Random(world.seed)  # noqa: S311
        self._is_single = world.slots == 1 and world.claim_order is ClaimOrder.RECENT
        self._restarts: dict[int, int] = {}
        self._max_stalled_s = world.max_stalled_s
        # The last claim, end or crash of a task, and the create calls until then.
        self._progress_at = 0.0
        self._progress_started = 0
        self._progress_refused = 0

    # ---------------------------------------------------------------------------------------- what controllers do

    def spawn(self, count: int) -> int:
        """Request machines. Returns how many the provider accepted."""
        accepted = 0
        for _ in range(count):
            if self.world.refused_share and self._random.random() < self.world.refused_share:
                self.refused += 1
                self.refused_at = self.now
                continue
            self.refused_at = None
            boot_s = self._boot_time_s()
            machine = SimulatedMachine(self.started, self.now, boot_s)
            self.started += 1
            self.machines[machine.number] = machine
            self.booting[machine.number] = machine
            heapq.heappush(self._events, (self.now + boot_s, _READY, machine.number, 0))
            accepted += 1
        self.peak = max(self.peak, len(self.machines))
        return accepted

    def drain(self, machine: SimulatedMachine) -> None:
        """The worker claims no more tasks."""
        machine.is_draining = True
        machine.draining_since = self.now
        self.free.pop(machine.number, None)

    def delete(self, machine: SimulatedMachine) -> None:
        if machine.running:
            raise ValueError("a busy machine is not deleted")
        self._remove(machine)

    # ------------------------------------------------------------------------------------------------------- time

    def run(self, controller: Controller) -> None:
        """Until the last task has ended. NoProgress if queued tasks get no worker."""
        interval, count = controller.interval_s, len(self.trace.arrivals)
        cycle_at = 0.0
        while self.done < count:
            self._advance(cycle_at)
            if self.done >= count:
                break
            self.now = cycle_at
            wanted_at = controller.act(self, cycle_at)
            # Skipped cycles would see what this one saw: the next that matters follows an event or the wanted time.
            due = min(wanted_at, self._next_event_at(), self._stalled_at())
            if due <= cycle_at + interval:
                cycle_at = wanted_at if cycle_at < wanted_at < cycle_at + interval else cycle_at + interval
            else:
                cycle_at += interval * max(1, math.ceil((due - cycle_at) / interval - 1e-9))
        if self._sample_every_s is not None:
            self._sample(self.now)
        for machine in list(self.machines.values()):
            self._remove(machine)

    def _stalled_at(self) -> float:
        """When the queued tasks will have been without a worker for too long. NoProgress if that moment has passed."""
        if not self.queue:
            return math.inf
        since = max(self._progress_at, self.trace.arrivals[self.queue[0]])
        if self.now <= since + self._max_stalled_s:
            return since + self._max_stalled_s
        if any(machine.running for machine in self.machines.values()):
            return math.inf
        refused = self.refused - self._progress_refused
        requested = self.started - self._progress_started + refused
        raise NoProgress(len(self.queue), self.now - since, requested, refused)

    def _record_progress(self) -> None:
        self._progress_at, self._progress_started, self._progress_refused = self.now, self.started, self.refused

    def _next_event_at(self) -> float:
        event = self._events[0][0] if self._events else math.inf
        arrivals = self.trace.arrivals
        return min(event, arrivals[self.arrived]) if self.arrived < len(arrivals) else event

    def _advance(self, until: float) -> None:
        """Everything that happens up to this moment, in order. At the same moment tasks end before others arrive."""
        arrivals, events, queue = self.trace.arrivals, self._events, self.queue
        count = len(arrivals)
        while True:
            event_at = events[0][0] if events else math.inf
            arrival_at = arrivals[self.arrived] if self.arrived < count else math.inf
            at = min(event_at, arrival_at)
            if at > until or self.done >= count:
                return
            if self._sample_every_s is not None and at >= self._next_sample_at:
                self._sample(at)
            self.now = at
            if arrival_at < event_at:
                queue.append(self.arrived)
                self.arrived += 1
            else:
                self._happen(heapq.heappop(events))
            if queue and self.free:
                self._claim()

    def _happen(self, event: tuple[float, int, int, int]) -> None:
        at, kind, number, detail = event
        machine = self.machines.get(number)
        if machine is None:
            return
        if kind == _END:
            index, restarts = divmod(detail, 256)
            started = machine.running.get(index)
            if started is None or restarts != self._restarts.get(index, 0):
                return
            del machine.running[index]
            self._record_progress()
            self.done += 1
            self.completed.append((index, started, at))
            if not machine.running:
                machine.idle_since = at
            if not machine.is_draining:
                # Moves it to the end: the most recently used.
                self.free.pop(number, None)
                self.free[number] = machine
        elif kind == _READY:
            machine.ready_at = machine.idle_since = at
            self.boots.append(at - machine.requested_at)
            self.booting.pop(number, None)
            if not machine.is_draining:
                self.free[number] = machine
            if self.world.crashes_per_hour:
                lives_s = self._random.expovariate(self.world.crashes_per_hour / HOUR_S)
                heapq.heappush(self._events, (at + lives_s, _CRASH, number, 0))
        else:
            self._crash(machine)

    def _crash(self, machine: SimulatedMachine) -> None:
        self.crashed += 1
        if machine.running:
            self._record_progress()
        waiting = list(self.queue)
        for index in sorted(machine.running):
            attempts = self._restarts[index] = self._restarts.get(index, 0) + 1
            if attempts < MAX_ATTEMPTS:
                insort(waiting, index)
            else:
                self.failed += 1
                self.done += 1
        machine.running.clear()
        # The same object: `_advance` goes on with it.
        self.queue.clear()
        self.queue.extend(waiting)
        self._remove(machine)

    def _claim(self) -> None:
        queue, free, trace, now = self.queue, self.free, self.trace, self.now
        self._record_progress()
        while queue and free:
            if self._is_single:
                number, machine = free.popitem()
            else:
                machine = self._preferred()
                number = machine.number
                if len(machine.running) + 1 >= self.world.slots:
                    del free[number]
            index = queue.popleft()
            machine.running[index] = now
            if machine.first_claimed_at is None:
                machine.first_claimed_at = now
            self.waits[index] = now - trace.arrivals[index]
            detail = index * 256 + (self._restarts.get(index, 0) if self._restarts else 0)
            heapq.heappush(self._events, (now + trace.durations[index], _END, number, detail))

    def _preferred(self) -> SimulatedMachine:
        """The free worker that claims next. A partly busy one comes first: it cannot be deleted anyway."""
        order, now, unit_s = self.world.claim_order, self.now, self.world.billing_unit_s
        candidates = list(self.free.values())
        if order is ClaimOrder.RANDOM:
            return candidates[self._random.randrange(len(candidates))]
        if order is ClaimOrder.OLDEST:
            return candidates[0]
        if order is ClaimOrder.BILLED:
            return max(candidates, key=lambda m: (bool(m.running), m.billed_until(now, unit_s), -m.number))
        busy = [machine for machine in candidates if machine.running]
        return busy[-1] if busy else candidates[-1]

    def _remove(self, machine: SimulatedMachine) -> None:
        self.machines.pop(machine.number, None)
        self.booting.pop(machine.number, None)
        self.free.pop(machine.number, None)
        self.deleted_billed_s += self._billed_s(machine, self.now)

    def _billed_s(self, machine: SimulatedMachine, until: float) -> float:
        lived_s, unit_s = until - machine.requested_at, self.world.billing_unit_s
        if unit_s == 1:
            return lived_s
        return unit_s * max(1, math.ceil(lived_s / unit_s - 1e-9))

    def _boot_time_s(self) -> float:
        sigma, mean_s, steps = self.world.boot_sigma, self.world.boot_s, self.world.boot_steps
        if steps:
            # The first step that at most this share of boots exceeds. After cancelled starts some exceed the last one.
            position = bisect_left(steps, -self._random.random(), key=lambda step: -step[1])
            return steps[min(position, len(steps) - 1)][0]
        return mean_s * math.exp(sigma * self._random.gauss(0.0, 1.0) - sigma * sigma / 2) if sigma else mean_s

    def _sample(self, at: float) -> None:
        billed_s = self.deleted_billed_s + sum(self._billed_s(machine, at) for machine in self.machines.values())
        ready = [machine for machine in self.machines.values() if machine.ready_at is not None]
        busy = sum(bool(machine.running) for machine in ready)
        booting = len(self.machines) - len(ready)
        self.samples.append(FleetSample(at, len(self.queue), len(ready), busy, booting, billed_s))
        step_s = self._sample_every_s or 1.0
        self._next_sample_at = (math.floor(at / step_s) + 1) * step_s
