"""adaptive: spawns what a forward look says would miss the goal, and keeps what is worth its next charge.

    spawn  workers without which a queued task would start later than its goal   adaptive_spawn.py
    drain  idle workers whose rank's learned idle timeout has passed             adaptive_keep.py
           where billing periods are long: idle workers at the end of their period

Two settings, of which one is enough: `wait_goal_s` (the longest wait that tasks should see; unset: one boot time and
10 s, and none for processes of this host, which cost nothing), or `price_of_waiting` (what a second of waiting is
worth, in machine seconds). All else is learned: durations, boot times, arrivals and idle gaps. It never spawns and
drains in one cycle, and a worker that drains was idle for its whole timeout, so that it does not flap.
"""

from dataclasses import dataclass, replace
from math import ceil

from windlass.model.adaptive import AdaptiveMemory
from windlass.policy import billing
from windlass.policy.derive import WorkerState
from windlass.policy.scale import adaptive_keep
from windlass.policy.scale.adaptive_load import FleetLoad, IdleWorker, assumed_duration_s
from windlass.policy.scale.adaptive_spawn import spawns_needed
from windlass.policy.scale.demand import Demand, ScalingDecision

# The default goal: a task that needs a new worker waits for its boot and for one cycle.
GOAL_MARGIN_S = 10.0
# What a restart is worth: a boot, and with a price of waiting the wait of the tasks that arrive meanwhile. A little
# less than a boot without a price, because a worker that is kept may not be needed at all.
RESTART_BOOTS = 0.8
TASKS_PER_RESTART = 2.0
# Silence that ends the replay floor, in multiples of the longest silence before.
PATIENCE = 1.5
PATIENCE_WITH_PRICE = 2.0
# Tasks that miss their goal anyway may start this much later, if another worker costs a long billing period.
LATE_SLACK_S = 10.0
LATE_SLACK_LONG_UNIT_S = 30.0
# Processes of this host cost nothing: they are kept at least this long, because starting one takes processor time.
MIN_FREE_IDLE_S = 30.0
# Before the first worker has booted.
UNKNOWN_BOOT_S = 60.0
UNKNOWN_PROCESS_START_S = 1.0
# A memory from further in the future is dropped: the clock was set back, and its times would not pass for as long.
MAX_CLOCK_STEP_S = 1.0


@dataclass(frozen=True, slots=True)
class AdaptiveDecision:
    spawn: int
    # Positions in `FleetLoad.idle` of workers to drain, the least recently used first.
    drain: tuple[int, ...]
    floor: int
    goal_s: float
    # Idle timeout of the rank after the busy workers.
    timeout_s: float
    memory: AdaptiveMemory
    # The decision stays the same until this moment unless a task arrives or ends or a worker becomes ready.
    valid_until: float


def decide(load: FleetLoad, memory: AdaptiveMemory, wait_goal_s: float | None, price: float | None) -> AdaptiveDecision:
    goal_s = wait_goal_s if wait_goal_s is not None else 0.0 if load.is_free else load.boot_s + GOAL_MARGIN_S
    has_price = price is not None and price > 0
    restart_s = load.boot_s * (1 + TASKS_PER_RESTART * (price or 0.0) if has_price else RESTART_BOOTS)
    is_long_unit = load.billing_unit_s >= billing.LONG_UNIT_S
    late_slack_s = LATE_SLACK_LONG_UNIT_S if is_long_unit else LATE_SLACK_S
    if has_price or load.is_free:
        late_slack_s = 0.0
    if memory.at is not None and memory.at > load.now + MAX_CLOCK_STEP_S:
        memory = AdaptiveMemory()
    memory = adaptive_keep.observe(load, memory)
    spawn = spawns_needed(load, memory, goal_s, late_slack_s) if load.queued else 0
    allowed = max(0, min(spawn, load.max_workers - load.workers))
    memory = adaptive_keep.learn_gaps(load, memory, allowed, restart_s)
    floor, drain, valid_until = 0, list[int](), float("inf")
    timeout_s = adaptive_keep.timeout_s(memory, load.busy + 1, restart_s)
    # Queued tasks will occupy the most recently used idle workers; the others may drain.
    reserved = ceil(load.queued / load.slots)
    if len(load.idle) > reserved and not spawn:
        patience = PATIENCE_WITH_PRICE if has_price else PATIENCE
        floor = 0 if is_long_unit else adaptive_keep.floor_of_workers(load, memory, goal_s, patience)
        for position in range(len(load.idle) - 1, reserved - 1, -1):
            rank = load.busy + position + 1
            if rank <= floor:
                valid_until = load.now
                break
            worker = load.idle[position]
            if worker.billed_s is not None:
                left_s = worker.billed_s - worker.window_s
                if left_s > 0:
                    valid_until = min(valid_until, load.now + left_s)
                elif not adaptive_keep.is_worth_next_unit(load, memory, rank, worker.idle_s, price or 0.0):
                    drain.append(position)
                else:
                    valid_until = min(valid_until, load.now + max(1.0, worker.billed_s))
                continue
            least_s = MIN_FREE_IDLE_S if load.is_free else 0.0
            left_s = max(least_s, adaptive_keep.timeout_s(memory, rank, restart_s)) - worker.idle_s
            if left_s <= 0.001:
                drain.append(position)
            else:
                valid_until = min(valid_until, load.now + left_s)
    if load.queued or load.starting_ages_s:
        valid_until = load.now
    memory = replace(memory, machines=load.workers + allowed)
    return AdaptiveDecision(spawn, tuple(drain), floor, goal_s, timeout_s, memory, valid_until)


def adaptive(demand: Demand) -> ScalingDecision:
    fleet, queue, now = demand.fleet, demand.queue, demand.now.timestamp()
    idle = sorted((s for s in demand.active if not s.has_active_task), key=lambda s: (s.idle_s or 0.0, s.worker.id))
    busy = [state for state in demand.active if state.has_active_task]
    ages = [(demand.now - task.started_at).total_seconds() for state in busy for task in state.worker.running]
    boots = queue.boots_s
    unknown_s = UNKNOWN_PROCESS_START_S if demand.is_free else UNKNOWN_BOOT_S
    boot_s = boots[len(boots) // 2] if boots else unknown_s
    durations = queue.durations_s

    def idle_worker(state: WorkerState) -> IdleWorker:
        idle_s, until = state.idle_s or 0.0, demand.billed_until.get(state.worker.id)
        if until is None:
            return IdleWorker(idle_s)
        window_s = (until - demand.opens_at[state.worker.id]).total_seconds()
        return IdleWorker(idle_s, (until - demand.now).total_seconds(), window_s)

    load = FleetLoad(
        now=now,
        slots=fleet.concurrency,
        queued=queue.queued,
        arrived=queue.arrived,
        oldest_queued_age_s=queue.oldest_queued_age_s,
        busy=len(busy),
        running_ages_s=ages,
        idle=[idle_worker(state) for state in idle],
        starting_ages_s=[(demand.now - state.worker.created_at).total_seconds() for state in demand.booting],
        durations_s=durations,
        duration_mean_s=queue.duration_mean_s,
        boot_s=boot_s,
        assumed_duration_s=assumed_duration_s(has_long_units=bool(demand.billed_until), price=fleet.price_of_waiting),
        billing_unit_s=demand.billing_unit_s,
        max_workers=fleet.max_workers,
        is_free=demand.is_free,
    )
    decision = decide(load, demand.memory or AdaptiveMemory(), fleet.wait_goal_s, fleet.price_of_waiting)
    spare = tuple(idle[position] for position in decision.drain)
    return ScalingDecision(
        _reason(demand, load, decision),
        spawn=decision.spawn,
        target=load.workers + decision.spawn - len(spare),
        spare=spare,
        is_over_capacity=bool(spare),
        is_timed=True,
        memory=decision.memory,
    )


def _reason(demand: Demand, load: FleetLoad, decision: AdaptiveDecision) -> str:
    text = f"{load.queued} queued, {demand.workers_text}"
    if load.queued:
        known = "" if load.duration_mean_s is not None else " (assumed)"
        return (
            f"{text}, tasks of {load.duration_s:.3g} s{known}, boot {load.boot_s:.0f} s, goal {decision.goal_s:.0f} s"
        )
    if decision.floor:
        return f"{text}, {decision.floor} kept for the load of the last {adaptive_keep.WINDOW_S / 60:.0f} min"
    if load.idle and load.idle[0].billed_s is None:
        return f"{text}, idle timeout {decision.timeout_s:.0f} s"
    return text
