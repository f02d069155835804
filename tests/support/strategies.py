"""Hypothesis strategies for random fleets: consistent snapshots with every status, machine state and planner state.

Ages end in half a second, so that none is exactly at a limit, where a moment later gives another decision. Workers are
drawn whole from a fixed pool, simple ones first: drawing each field separately would be too slow.
"""

import random
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from hypothesis import strategies as st

from support.snapshots import NOW, ago, with_state, worker
from windlass.model.cost import Bill, Spending, Tariff
from windlass.model.fleet import FleetConfig
from windlass.model.machine import Machine, MachineState, ProviderTraits
from windlass.model.snapshot import (
    FailureRateState,
    LaunchRecord,
    PlannerState,
    ProviderBackoff,
    ProviderRefusal,
    QueueView,
    RunningView,
    SlotView,
    Snapshot,
    WorkerView,
)
from windlass.model.worker import LIVE, WorkerStatus

MAX_SLOTS = 7
POOL_SIZE = 600
BUDGETS = ("budget_per_hour", "budget_per_day", "budget_per_month")
AGES = (0.5, 5.5, 20.5, 40.5, 90.5, 200.5, 400.5, 700.5, 2000.5)


@dataclass(frozen=True)
class Scenario:
    snapshot: Snapshot
    fleet: FleetConfig


@dataclass(frozen=True)
class WorkerCase:
    """A worker, its listed machines, and its part of the planner state."""

    view: WorkerView
    machine: MachineState | None = MachineState.RUNNING
    double: MachineState | None = None
    missing_since: datetime | None = None
    idle_since: datetime | None = None
    unclaimed_since: datetime | None = None


# -------------------------------------------------------------------------------------------------------------- workers


def _worker_case(dice: random.Random) -> WorkerCase:
    def maybe(value: Any, chance: float) -> Any:
        return value if dice.random() < chance else None

    def since(oldest: float) -> datetime:
        return ago(dice.choice([age for age in AGES if age <= oldest]))

    status = dice.choice([s for s in WorkerStatus if s is not WorkerStatus.TERMINATED])
    created = dice.choice(AGES)
    claimed = maybe(since(created), 0.5)
    tasks = dice.choice((0, 1, 1, 2)) if claimed else 0
    is_known = dice.random() < 0.8
    vram_at = maybe(since(created), 0.6)
    vram_mb = dice.choice((0, 24_000, 24_000)) if vram_at else None
    states = (MachineState.RUNNING,) * 5 + (MachineState.BOOTING, MachineState.EXITED)
    return WorkerCase(
        view=WorkerView(
            id="",
            slot=0,
            status=status,
            is_paused=dice.random() < 0.1,
            concurrency=dice.choice((1, 1, 2, 3)),
            created_at=ago(created),
            activated_at=None if status is WorkerStatus.SPAWNING else since(created),
            last_heartbeat=dice.choice((None, ago(0.5), ago(0.5), ago(0.5), since(created))),
            first_claimed_at=claimed,
            terminating_at=since(created) if status is WorkerStatus.TERMINATING else None,
            idle_s=dice.choice((None, 0.0, 10.25, 100.25)),
            machine_id="known" if is_known else None,
            machine_at=maybe(since(created), 0.5) if is_known else None,
            creation="created" if is_known else dice.choice((None, "ambiguous")),
            prepared_at=maybe(since(created), 0.5),
            vram_total_mb=vram_mb,
            vram_at=vram_at,
            vram_lost_at=maybe(since(created), 0.5) if vram_mb == 0 else None,
            running=tuple(RunningView(n, since(created), dice.choice((None, 60.0, 9000.0))) for n in range(tasks)),
            lease_s=30.0,
            prepare_code=maybe("DISK_FULL", 0.1),
        ),
        machine=maybe(dice.choice(states), 0.85),
        double=maybe(dice.choice(states), 0.1),
        missing_since=maybe(since(created), 0.5),
        idle_since=maybe(since(created), 0.7),
        unclaimed_since=maybe(since(created), 0.5),
    )


def _worker_pool() -> list[WorkerCase]:
    dice = random.Random(5)  # noqa: S311
    plain = [
        WorkerCase(worker(claimed=50.5, created=90.5, running=(RunningView(0, ago(5.5), None),), vram_mb=24_000)),
        WorkerCase(worker(created=90.5, vram_mb=24_000)),
        WorkerCase(worker(status="spawning", created=5.5, heartbeat=None)),
    ]
    return plain + [_worker_case(dice) for _ in range(POOL_SIZE)]


# ------------------------------------------------------------------------------------------------------------ scenarios

worker_cases = st.sampled_from(_worker_pool())
moments = st.sampled_from(AGES).map(ago)
maybe_moments = st.one_of(st.none(), moments)
intervals = st.sampled_from((0.0, 45.0))


@st.composite
def fleets(draw: st.DrawFn) -> FleetConfig:
    max_workers = draw(st.integers(1, MAX_SLOTS - 2))
    has_gpu = draw(st.booleans())
    timeout_s = draw(st.sampled_from((30.0, 600.0)))
    return FleetConfig(
        policy=draw(st.sampled_from(("buffered", "threshold", "clear-time"))),
        min_workers=draw(st.integers(0, max_workers)),
        max_workers=max_workers,
        max_changes_per_cycle=draw(st.sampled_from((10, 1, 2))),
        concurrency=1 if has_gpu else draw(st.integers(1, 3)),
        has_gpu=has_gpu,
        idle_buffer=draw(st.integers(0, 2)),
        scale_up_multiplier=draw(st.sampled_from((1.0, 0.5, 1.5))),
        scale_down_multiplier=draw(st.sampled_from((0.9, 0.5, 1.0))),
        min_scaling_interval_s=draw(intervals),
        spawn_grace_s=draw(intervals),
        scale_down_grace_s=draw(intervals),
        idle_timeout_s=draw(st.sampled_from((0.0, 30.0))),
        heartbeat_timeout_s=timeout_s,
        spawn_timeout_s=timeout_s,
        stop_timeout_s=timeout_s,
        min_spawns_for_rate=draw(st.sampled_from((5, 2))),
        max_restarts=draw(st.sampled_from((5, 2))),
    )


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    fleet = draw(fleets())
    # Sometimes in slots above max_workers: the maximum was lowered.
    last_slot = draw(st.sampled_from((fleet.max_workers, MAX_SLOTS))) - 1
    slots = draw(st.lists(st.integers(0, last_slot), unique=True))
    managed = [_managed(draw(worker_cases), slot) for slot in slots]
    manual = [_manual(draw(worker_cases), n) for n in range(draw(st.sampled_from((0, 0, 1, 2))))]
    cases = [*managed, *manual]
    views = tuple(case.view for case in cases)
    return Scenario(
        Snapshot(
            now=NOW,
            fleet="default",
            queue=QueueView(
                queued=draw(st.sampled_from((0, 0, 1, 3, 50))),
                running=sum(len(view.running) for view in views),
                duration_p50_s=draw(st.sampled_from((None, 1.0, 600.0))),
            ),
            workers=views,
            slots=draw(slot_views()),
            machines=_listed(managed, draw(st.sampled_from((0, 0, 1, 2, 5))), draw(st.sampled_from(MachineState)))
            if draw(st.integers(0, 4))
            else None,
            listed_at=draw(st.sampled_from((None, ago(1.0)))),
            traits=draw(st.sampled_from(TRAITS)),
            launches=_launches(views, draw(st.lists(st.tuples(moments, st.booleans()), max_size=6)), fleet),
            refusal=draw(st.sampled_from(REFUSALS)),
            orphaned=_orphaned(views, draw(st.booleans())),
            is_paused=draw(st.integers(0, 9)) == 9,
            is_shutting_down=draw(st.integers(0, 9)) == 9,
            reset_at=draw(st.sampled_from((None, None, ago(1000.5), ago(5.5)))),
            restarted_at=draw(st.sampled_from((None, None, ago(1000.5), ago(5.5)))),
            requested=draw(st.sampled_from((0, 0, 1, 5))),
            planner_state=draw(planner_states(cases)),
        ),
        fleet,
    )


def _managed(case: WorkerCase, slot: int) -> WorkerCase:
    view = case.view
    machine_id = None if view.machine_id is None else f"m-w{slot}"
    return replace(case, view=replace(view, id=f"w{slot}", slot=slot, machine_id=machine_id))


def _manual(case: WorkerCase, number: int) -> WorkerCase:
    view = case.view
    status = WorkerStatus.ACTIVE if view.status is WorkerStatus.SPAWNING else view.status
    view = replace(view, id=f"h{number}", slot=None, status=status, machine_id=None, machine_at=None, creation=None)
    return replace(case, view=view)


def _listed(managed: list[WorkerCase], orphans: int, state: MachineState) -> tuple[Machine, ...]:
    listed = [
        Machine(f"{prefix}-{case.view.id}", case.view.id, found, case.view.created_at)
        for case in managed
        for prefix, found in (("m", case.machine), ("d", case.double))
        if found is not None
    ]
    return (*listed, *(Machine(f"orphan-{n}", f"unknown-{n}", state) for n in range(orphans)))


def _launches(
    views: tuple[WorkerView, ...], others: list[tuple[datetime, bool]], fleet: FleetConfig
) -> tuple[LaunchRecord, ...]:
    found = [
        LaunchRecord(view.created_at, view.status is WorkerStatus.ERROR, view.slot)
        for view in views
        if view.slot is not None
    ]
    found += [LaunchRecord(at, has_failed) for at, has_failed in others]
    recent = [launch for launch in found if (NOW - launch.at).total_seconds() < fleet.failure_window_s]
    return tuple(sorted(recent, key=lambda launch: launch.at))


def _orphaned(views: tuple[WorkerView, ...], has_unknown: bool) -> tuple[str, ...]:
    ids = [view.id for view in views if view.running and view.status not in LIVE]
    return tuple(sorted([*ids, *(["long-gone"] if has_unknown else [])]))


@st.composite
def slot_views(draw: st.DrawFn) -> tuple[SlotView, ...]:
    restarts = (ago(0.5), ago(20.5), ago(90.5), ago(200.5))
    known = draw(st.dictionaries(st.integers(0, MAX_SLOTS - 1), st.integers(-1, len(restarts)), max_size=3))
    return tuple(SlotView(slot, count < 0, restarts[: max(0, count)]) for slot, count in known.items())


@st.composite
def planner_states(draw: st.DrawFn, cases: list[WorkerCase]) -> PlannerState:
    def of_all(name: str) -> dict[str, datetime]:
        found = {case.view.id: getattr(case, name) for case in cases}
        return {id_: moment for id_, moment in found.items() if moment is not None}

    return with_state(
        PlannerState(),
        planned_at=draw(st.sampled_from((ago(0.5), None, ago(400.5)))),
        gaps_s=draw(st.sampled_from(((), (60.25, 60.25), (400.5,), (400.5, 60.25)))),
        spawned_at=draw(maybe_moments),
        over_capacity_since=draw(maybe_moments),
        missing_since=of_all("missing_since"),
        orphan_since=draw(st.sampled_from(({}, {"orphan-0": ago(20.5)}, {"orphan-0": ago(90.5)}))),
        orphans_held_since=draw(st.sampled_from((None, ago(20.5), ago(4000.5)))),
        mass_silence_since=draw(maybe_moments),
        outage_ended_at=draw(maybe_moments),
        idle_since=of_all("idle_since"),
        unclaimed_since=of_all("unclaimed_since"),
        own_listed_at=draw(maybe_moments),
        unlisted_since=draw(maybe_moments),
        failure_rate=draw(st.sampled_from(FAILURE_RATES)),
        provider_backoff=draw(
            st.sampled_from(
                (None, None, ProviderBackoff("NO_CAPACITY", 1, ago(90.5)), ProviderBackoff("DENIED", 2, ago(-20.5)))
            )
        ),
    )


REFUSALS = (
    None,
    None,
    None,
    ProviderRefusal("NO_CAPACITY", "none left", ago(20.5)),
    ProviderRefusal("LIMIT_REACHED", "no more than ten", ago(90.5)),
    ProviderRefusal("DENIED", "unauthorized", ago(400.5)),
)
# The third has billing units of 441 s: a machine of 400.5 s has 40.5 s left, within its termination window.
TRAITS = (
    ProviderTraits(),
    ProviderTraits(60.25, 120.25, 60.25),
    ProviderTraits(60.25, 120.25, 60.25, billing_unit_s=441),
    ProviderTraits(60.25, 120.25, 60.25, has_prepare_step=True),
)
FAILURE_RATES = (
    FailureRateState(),
    FailureRateState(failed_starts=1, last_failure_at=ago(20.5)),
    FailureRateState(trips=1, until=ago(-100.5), judged_until=ago(200.5)),
    FailureRateState(trips=1, until=ago(100.5), judged_until=ago(400.5)),
    FailureRateState(trips=3, until=ago(100.5), judged_until=ago(700.5), failed_starts=1, last_failure_at=ago(20.5)),
)


@st.composite
def priced_scenarios(draw: st.DrawFn) -> Scenario:
    """Scenarios with prices and budgets."""
    scenario = draw(scenarios())
    limits = draw(st.fixed_dictionaries({name: st.sampled_from((None, "0.5", "2", "40")) for name in BUDGETS}))
    action = draw(st.sampled_from(("warn", "stop-spawning", "drain")))
    fleet = FleetConfig.model_validate(scenario.fleet.model_dump() | limits | {"budget_action": action})
    tariff = Tariff(draw(st.sampled_from((1, 360_000, 3_600_000))), "EUR", scenario.snapshot.traits.billing_unit_s)
    views = tuple(
        replace(view, bill=Bill(tariff, view.machine_at or view.created_at)) if view.machine_id is not None else view
        for view in scenario.snapshot.workers
    )
    snapshot = replace(
        scenario.snapshot,
        workers=views,
        spending=draw(st.sampled_from(((), (Spending("EUR", 0, 300_000, 1_900_000),), (Spending("USD", 5, 5, 5),)))),
        ended_bills=draw(st.sampled_from(((), (Bill(tariff, ago(2000.5), ago(90.5)),)))),
    )
    return Scenario(snapshot, fleet)


def uncapped(scenario: Scenario) -> Scenario:
    """The scenario without a limit on changes per cycle."""
    return replace(scenario, fleet=scenario.fleet.model_copy(update={"max_changes_per_cycle": 100}))
