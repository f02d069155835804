"""adaptive: spawns what a forward look says would miss the goal, and keeps what is worth its next charge.

    spawn  workers without which a queued task would start later than its goal   adaptive_spawn.py
           more of them where boots vary; those that come too late are cancelled adaptive_boot.py
    drain  idle workers whose rank's learned idle timeout has passed             adaptive_keep.py
           where billing periods are long: idle workers at the end of their period

Two settings, of which one is enough: `wait_goal_s` (the longest wait that tasks should see; unset: one boot time and
10 s, and none for processes of this host, which cost nothing), or `price_of_waiting` (what a second of waiting is
worth, in machine seconds). All else is learned: durations by queue, boot times, arrivals and idle gaps. It never spawns
and drains in one cycle, and a worker that drains was idle for its whole timeout, so that it does not flap.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil, inf

from windlass.model.adaptive import AdaptiveMemory
from windlass.policy import billing
from windlass.policy.scale import adaptive_keep
from windlass.policy.scale.adaptive_boot import estimate_boots, in_time_share, ready_in_time, starts_for
from windlass.policy.scale.adaptive_load import FleetLoad, IdleWorker, assumed_duration_s, count_overdue
from windlass.policy.scale.adaptive_spawn import clearing_workers, spawns_needed
from windlass.policy.scale.demand import Demand, ScalingDecision
from windlass.policy.worker_state import WorkerState

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
# A worker whose timeout ends this soon is due: gaps and timeouts are rounded to milliseconds.
DUE_TOLERANCE_S = 0.001
# Cancelled starts that are remembered: two for each boot that the estimate uses.
MAX_CANCELLED = 100


class SpawnRule(StrEnum):
    """What set the number of workers to spawn."""

    GOAL = "goal"  # the forward look
    BACKLOG = "backlog"  # a lost backlog: fewer workers clear it at least cost
    PRICE = "price"  # the price of waiting: a higher constant number costs least


@dataclass(frozen=True, slots=True)
class SpawnNeed:
    """New workers that tasks need, and the rule that set the number."""

    workers: int
    rule: SpawnRule
    # Workers that the goal alone wants, and those that the rule wants: new ones, and with PRICE all.
    of_goal: int
    of_rule: int


@dataclass(frozen=True, slots=True)
class AdaptiveDecision:
    spawn: int
    # Positions in `FleetLoad.idle` of workers to drain, the least recently used first.
    drain: tuple[int, ...]
    # Starting workers to cancel, the newest first.
    cancel: int
    floor: int
    goal_s: float
    # Idle timeout of the rank after the busy workers.
    timeout_s: float
    # Share of boots that are ready within the goal. 1: no more workers start than tasks need.
    in_time: float
    need: SpawnNeed
    memory: AdaptiveMemory
    # The decision stays the same until this moment unless a task arrives or ends or a worker becomes ready.
    valid_until: float


def decide(load: FleetLoad, memory: AdaptiveMemory, wait_goal_s: float | None, price: float | None) -> AdaptiveDecision:
    load = count_overdue(load)
    goal_s = wait_goal_s if wait_goal_s is not None else 0.0 if load.is_free else load.boots.mean_s + GOAL_MARGIN_S
    price = price or 0.0
    is_long_unit = load.billing_unit_s >= billing.LONG_UNIT_S
    late_slack_s = LATE_SLACK_LONG_UNIT_S if is_long_unit else LATE_SLACK_S
    if price or load.is_free:
        late_slack_s = 0.0
    if memory.at is not None and memory.at > load.now + MAX_CLOCK_STEP_S:
        memory = AdaptiveMemory()
    memory = adaptive_keep.observe(load, memory)
    # The queue is played with the median boot. Where boots vary, the mean is longer, and the goal leaves less time.
    played_goal_s = max(0.0, goal_s - max(0.0, load.boots.mean_s - load.boots.median_s))
    # Where boots vary, more workers start than tasks need, and `counted` of them are ready in time. Not where a start
    # costs a long billing period. The newest tasks arrived half a cycle ago on average.
    ages_s = sorted(load.starting_ages_s, reverse=True)
    in_time = 1.0
    if not is_long_unit and not load.is_free:
        in_time = in_time_share(load.boots, goal_s - GOAL_MARGIN_S / 2, load.queued_mean_s)
    counted = ready_in_time(len(ages_s), in_time)

    floor = adaptive_keep.cheapest_workers(load, memory, price, PATIENCE_WITH_PRICE) if price else 0
    need = _needed_workers(load, memory, price, floor, played_goal_s, late_slack_s, ages_s[:counted])
    needed = need.workers
    spawn = max(needed, starts_for(counted + needed, in_time) - len(ages_s)) if needed else 0
    allowed = max(0, min(spawn, load.max_workers - load.workers))
    restart_s = load.boot_s * (1 + TASKS_PER_RESTART * price if price else RESTART_BOOTS)
    memory = adaptive_keep.learn_gaps(load, memory, min(counted + needed, len(ages_s) + allowed), restart_s)

    extra = min(memory.extra_starts, len(ages_s))
    cancel = 0
    if not spawn and extra:
        surplus = len(ages_s) - starts_for(min(counted, ceil(load.queued / load.slots)), in_time)
        cancel = max(0, min(surplus, extra, load.max_cancelled))
    memory = replace(
        _with_cancelled(load, memory, ages_s[len(ages_s) - cancel :]),
        machines=load.workers + allowed,
        extra_starts=extra - cancel + max(0, allowed - needed),
    )

    drain, valid_until = tuple[int, ...](), inf
    # A rank without a known gap is kept for a boot at most: nothing says yet that a task would wait for it.
    unknown_s = load.boot_s if price else restart_s
    # Queued tasks will occupy the most recently used idle workers; the others may drain.
    reserved = ceil(load.queued / load.slots)
    if len(load.idle) > reserved and not spawn:
        if not is_long_unit:
            patience = PATIENCE_WITH_PRICE if price else PATIENCE
            floor = max(floor, adaptive_keep.floor_of_workers(load, memory, played_goal_s, patience))
        drain, valid_until = _drains(load, memory, max(reserved, floor - load.busy), unknown_s, price)
        if len(load.idle) > reserved and floor > load.busy + reserved:
            valid_until = load.now
    if load.queued or load.starting_ages_s:
        valid_until = load.now
    timeout_s = _idle_timeout_s(load, memory, load.busy + 1, unknown_s)
    return AdaptiveDecision(
        spawn,
        drain,
        cancel,
        floor,
        goal_s,
        timeout_s,
        in_time,
        need,
        memory,
        valid_until,
    )


def _needed_workers(
    load: FleetLoad,
    memory: AdaptiveMemory,
    price: float,
    floor: int,
    goal_s: float,
    late_slack_s: float,
    starting_ages_s: Sequence[float],
) -> SpawnNeed:
    """`floor`: the number of workers that costs least with this price of waiting."""
    if not load.queued:
        return SpawnNeed(0, SpawnRule.GOAL, 0, 0)
    of_goal = spawns_needed(load, memory, goal_s, late_slack_s, starting_ages_s)
    need = SpawnNeed(of_goal, SpawnRule.GOAL, of_goal, of_goal)
    is_lost = (load.oldest_queued_age_s or 0.0) > goal_s - load.boot_s
    if of_goal and is_lost and not load.is_free:
        clearing = clearing_workers(load, memory, price)
        if clearing is not None and clearing < of_goal:
            need = SpawnNeed(clearing, SpawnRule.BACKLOG, of_goal, clearing)
    if floor - load.workers > need.workers:
        return SpawnNeed(floor - load.workers, SpawnRule.PRICE, load.workers + of_goal, floor)
    return need


def _with_cancelled(load: FleetLoad, memory: AdaptiveMemory, ages_s: Sequence[float]) -> AdaptiveMemory:
    """The memory with further cancelled starts, and without those that are older than every known boot.

    Such a start says nothing about the boots that are known now: a smaller image may boot faster. It would count as a
    slow boot permanently, because a fleet whose boots seem too slow starts no extra workers, and so cancels none.
    """
    if not (memory.cancelled_boots_s or ages_s):
        return memory
    # A release without these numbers may have left more ages than numbers.
    missing = len(memory.cancelled_boots_s) - len(memory.cancelled_at_boot)
    at_boot = (*[0] * missing, *memory.cancelled_at_boot, *[memory.boots] * len(ages_s))
    all_ages_s = (*memory.cancelled_boots_s, *(round(age_s, 3) for age_s in ages_s))
    # The known boots are the last ones, so that the oldest of them ended this many boots ago.
    oldest = memory.boots - load.boots.boots
    first = max(0, len(at_boot) - MAX_CANCELLED, bisect_right(at_boot, oldest) if load.boots.boots else 0)
    return replace(memory, cancelled_boots_s=all_ages_s[first:], cancelled_at_boot=at_boot[first:])


def _drains(
    load: FleetLoad, memory: AdaptiveMemory, kept: int, unknown_s: float, price: float
) -> tuple[tuple[int, ...], float]:
    """Positions of idle workers to drain, beyond the first `kept`, and until when no further one is due."""
    drain, valid_until = list[int](), inf
    for position in range(len(load.idle) - 1, kept - 1, -1):
        rank, worker = load.busy + position + 1, load.idle[position]
        if worker.billed_s is not None:
            left_s = worker.billed_s - worker.window_s
            if left_s <= 0 and adaptive_keep.is_worth_next_unit(load, memory, rank, worker.idle_s, price):
                left_s = max(1.0, worker.billed_s)
        else:
            left_s = _idle_timeout_s(load, memory, rank, unknown_s) - worker.idle_s
        if left_s <= DUE_TOLERANCE_S:
            drain.append(position)
        else:
            valid_until = min(valid_until, load.now + left_s - DUE_TOLERANCE_S)
    return tuple(drain), valid_until


def _idle_timeout_s(load: FleetLoad, memory: AdaptiveMemory, rank: int, unknown_s: float) -> float:
    least_s = MIN_FREE_IDLE_S if load.is_free else 0.0
    return max(least_s, adaptive_keep.timeout_s(memory, rank, unknown_s))


def adaptive(demand: Demand) -> ScalingDecision:
    fleet, queue, now = demand.fleet, demand.queue, demand.now.timestamp()
    idle = sorted((s for s in demand.active if not s.has_active_task), key=lambda s: (s.idle_s or 0.0, s.worker.id))
    busy = [state for state in demand.active if state.has_active_task]
    running = [task for state in busy for task in state.worker.running]
    memory = demand.memory or AdaptiveMemory()
    unknown_s = UNKNOWN_PROCESS_START_S if demand.is_free else UNKNOWN_BOOT_S
    starting = sorted(demand.booting, key=lambda s: (s.worker.created_at, s.worker.id))
    durations, is_long_unit = queue.durations_s, demand.billing_unit_s >= billing.LONG_UNIT_S
    ready_at = [state.worker.activated_at for state in demand.active if state.worker.activated_at is not None]

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
        running_ages_s=[(demand.now - task.started_at).total_seconds() for task in running],
        idle=[idle_worker(state) for state in idle],
        starting_ages_s=[(demand.now - state.worker.created_at).total_seconds() for state in starting],
        durations_s=durations,
        duration_mean_s=queue.duration_mean_s,
        boots=estimate_boots(queue.boots_s, memory.cancelled_boots_s, unknown_s),
        assumed_duration_s=assumed_duration_s(has_long_units=is_long_unit, price=fleet.price_of_waiting),
        billing_unit_s=demand.billing_unit_s,
        booted=sum(memory.at is None or at.timestamp() > memory.at for at in ready_at),
        max_workers=fleet.max_workers,
        max_cancelled=min(fleet.max_changes_per_cycle, max(0, demand.capacity - fleet.min_workers)),
        is_free=demand.is_free,
        running_queues=[task.queue for task in running] if queue.each else (),
        queues=queue.each,
    )
    decision = decide(load, memory, fleet.wait_goal_s, fleet.price_of_waiting)
    spare = tuple(idle[position] for position in decision.drain)
    spare += tuple(starting[::-1][: decision.cancel])
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
    text = f"{demand.queue.queued_text}, {demand.workers_text}"
    if load.queued:
        known = "" if load.duration_mean_s is not None else " (assumed)"
        text += f", tasks of {load.queued_mean_s:.3g} s{known}, boot {load.boot_s:.0f} s, goal {decision.goal_s:.0f} s"
        if decision.in_time < 1:
            text += f", {decision.in_time:.0%} of boots in time"
        return text + _rule_text(decision, demand.fleet.price_of_waiting or 0.0)
    if decision.floor:
        return f"{text}, {decision.floor} kept for the load of the last {adaptive_keep.WINDOW_S / 60:.0f} min"
    if load.idle and load.idle[0].billed_s is None:
        return f"{text}, idle timeout {decision.timeout_s:.0f} s"
    return text


def _rule_text(decision: AdaptiveDecision, price: float) -> str:
    """What set the number of workers, with its numbers, if it was not the goal."""
    need = decision.need
    match need.rule:
        case SpawnRule.BACKLOG:
            return f", missed by the oldest: {need.of_rule} more cost least, not {need.of_goal}"
        case SpawnRule.PRICE:
            return f", price_of_waiting {price:g}: {need.of_rule} workers cost least, not {need.of_goal}"
    return ""
