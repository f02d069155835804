"""Machines billed by the started hour: idle workers are drained before the next hour, and the ledgers agree.

The billing invariants are in simulator/invariants.py.
`WINDLASS_SEEDS=1000 pytest -n 2 tests/simulator/test_billing_hours.py` runs more seeds.
`PYTHONPATH=tests python -m support.simulator --world billed --seed N` replays one.
"""

import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from support.simulator.cloud import SimulatedCloud
from support.simulator.crashes import CrashPoint, CrashTiming, record_calls, run_with_crash
from support.simulator.invariants import InvariantChecker, InvariantViolation
from support.simulator.loop import EPOCH, to_datetime
from support.simulator.scenario import FleetScenario, Scenario, draw_billed_scenario, fleet_config
from support.simulator.simulation import Simulation
from support.simulator.workers import TaskProfile
from windlass.model.cost import ChargeKind
from windlass.policy import billing

SEEDS = int(os.environ.get("WINDLASS_SEEDS", "0")) or 40
FIRST = int(os.environ.get("WINDLASS_FIRST_SEED", "0"))
CHUNK = 5
HOUR_S = 3600.0
PRICE = 6_000


@pytest.mark.parametrize("first", range(FIRST, FIRST + SEEDS, CHUNK))
def test_every_invariant_holds_with_billing_periods(first: int) -> None:
    billed = inexact = 0
    for seed in range(first, min(first + CHUNK, FIRST + SEEDS)):
        report = Simulation(draw_billed_scenario(seed)).run()
        billed, inexact = billed + report.billed_workers, inexact + report.inexact_bills
    assert inexact <= 1 + billed // 20, "a deletion time is rarely unknown"


def billed_simulation(
    *,
    arrivals: tuple[tuple[float, int], ...] = ((1.0, 2),),
    lasts_s: float = 3 * HOUR_S,
    task_s: tuple[float, float] = (100.0, 110.0),
    unit_s: int = 3600,
    **config: Any,
) -> Simulation:
    """One billed fleet without random faults."""
    fleet_scenario = FleetScenario(
        config=fleet_config(**({"max_workers": 3, "poll_interval_s": 10.0} | config)),
        max_list_age_s=5.0,
        max_creation_delay_s=5.0,
        price_micros_per_hour=PRICE,
        billing_unit_s=unit_s,
        tasks=TaskProfile(duration_s=task_s),
        arrivals=arrivals,
    )
    return Simulation(Scenario(0, {"red": fleet_scenario}, ttl_s=20.0, faults_end_s=lasts_s))


def red(simulation: Simulation) -> SimulatedCloud:
    return simulation.clouds["red"]


def lifetimes_s(simulation: Simulation) -> list[float]:
    return [machine.deleted_at - machine.created_at for machine in red(simulation).machines.values()]


def at(simulation: Simulation, at_s: float, action: Callable[[], Awaitable[None]]) -> None:
    simulation.on_ready = lambda _: simulation.schedule(at_s, action)


def charged_micros(simulation: Simulation, kind: ChargeKind | None = None) -> int:
    return sum(charge.amount_micros for charge in simulation.store.tables.ledger.charges if kind in (None, charge.kind))


# ---------------------------------------------------------------------------------------------------- billing periods


def test_idle_workers_are_kept_until_their_hour_ends() -> None:
    simulation = billed_simulation()
    simulation.run()
    assert len(lifetimes_s(simulation)) == 2
    assert all(0.95 * HOUR_S < lifetime_s < HOUR_S for lifetime_s in lifetimes_s(simulation))
    assert charged_micros(simulation) == 2 * PRICE
    assert charged_micros(simulation, ChargeKind.TAIL) < 2 * PRICE // 20


def test_later_tasks_within_the_hour_use_existing_workers() -> None:
    simulation = billed_simulation(arrivals=((1.0, 2), (1200.0, 2), (2400.0, 2)))
    simulation.run()
    assert len(lifetimes_s(simulation)) == 2
    assert charged_micros(simulation) == 2 * PRICE


def test_busy_worker_is_drained_at_the_end_of_its_next_hour() -> None:
    simulation = billed_simulation(arrivals=((1.0, 1), (3500.0, 1)), stuck_timeout_s=9999.0, task_s=(300.0, 310.0))
    simulation.run()
    (lifetime_s,) = lifetimes_s(simulation)
    assert 1.95 * HOUR_S < lifetime_s < 2 * HOUR_S
    assert charged_micros(simulation) == 2 * PRICE


def test_per_second_billing_keeps_no_idle_worker() -> None:
    simulation = billed_simulation(unit_s=1)
    simulation.run()
    assert all(lifetime_s < 300.0 for lifetime_s in lifetimes_s(simulation))
    assert charged_micros(simulation) == sum(
        red(simulation).cost_micros(machine, to_datetime(machine.deleted_at))
        for machine in red(simulation).machines.values()
    )


def test_task_run_on_two_workers_is_charged_on_both() -> None:
    simulation = billed_simulation(arrivals=((1.0, 1),), task_s=(100.0, 100.0))
    simulation.on_ready = lambda _: simulation.next_worker(boots_s=5.0, crashes_at_s=50.0)
    simulation.run()
    first, second = red(simulation).machines.values()
    charges = [charge for charge in simulation.store.tables.ledger.charges if charge.task_id == 1]
    assert {charge.worker_id for charge in charges} == {first.name, second.name}
    assert charged_micros(simulation) == 2 * PRICE


def test_spent_budget_stops_spawning_and_drains_at_hour_end() -> None:
    """The budget buys two machine hours of 0.006, with twenty tasks of ten minutes queued."""
    simulation = billed_simulation(
        arrivals=((1.0, 20),),
        task_s=(550.0, 560.0),
        lasts_s=2.5 * HOUR_S,
        stop_timeout_s=600.0,
        stuck_timeout_s=9999.0,
        budget_per_month="0.012",
        budget_action="drain",
    )
    seen: list[int] = []

    async def raise_budget() -> None:
        seen.append(len(red(simulation).billed_machines()))
        # Without a budget the remaining tasks are finished, so that the simulation can end.
        for orchestrator in simulation.orchestrators:
            orchestrator.kill()
            config, provider = orchestrator.fleets["red"]
            orchestrator.fleets["red"] = (config.model_copy(update={"budget_per_month": None}), provider)
            orchestrator.start()

    at(simulation, 2 * HOUR_S, raise_budget)
    simulation.run()
    assert seen == [0]
    early = [machine for machine in red(simulation).machines.values() if machine.created_at < 2 * HOUR_S]
    assert len(early) == 2
    assert all(machine.deleted_at - machine.created_at < HOUR_S for machine in early)
    # Draining workers finish their tasks.
    assert all(len(task.claims) == 1 for task in simulation.checker.tasks.values())


# ------------------------------------------------------------------------------------------------------------ crashes


def short_simulation() -> Simulation:
    """Billing periods of one minute, so that costs are settled at many crash points."""
    simulation = billed_simulation(
        unit_s=60, poll_interval_s=3.0, lasts_s=240.0, task_s=(5.0, 6.0), arrivals=((1.0, 2), (80.0, 1))
    )
    fleet_scenario = simulation.scenario.fleets["red"]
    return Simulation(
        replace(
            simulation.scenario, fleets={"red": replace(fleet_scenario, max_list_age_s=1.0, max_creation_delay_s=1.0)}
        )
    )


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_crash_at_any_call_keeps_the_ledger_exact(when: CrashTiming) -> None:
    calls = record_calls(short_simulation)
    settling = [number for number, name in enumerate(calls) if name in ("accounts_to_settle", "settle")]
    assert len(settling) >= 2
    others = [number for number, name in enumerate(calls) if name in ("record_outcomes", "delete", "create")]
    for number in (*settling, *others):
        run_with_crash(short_simulation, CrashPoint(number, when))


# ---------------------------------------------------------------------------------------------------- the checker


def test_checker_detects_idle_drain_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(billing, "is_worth_waiting", lambda *_: False)
    with pytest.raises(InvariantViolation, match=r"drained \(IDLE\) \d+ s into its billing period of 3600 s"):
        billed_simulation().run()


def test_checker_detects_idle_drain_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(billing, "WINDOW_OPENS_CYCLES", 1)
    monkeypatch.setattr(billing, "WINDOW_CLOSES_CYCLES", 0)
    monkeypatch.setattr(billing, "DELETE_CALL_S", 1.0)
    # This check detects the same error earlier, and has its own test.
    monkeypatch.setattr(InvariantChecker, "_check_kept_workers", lambda *_: None)
    with pytest.raises(InvariantViolation, match=r"drained at \d+ s, its machine deleted only in the next"):
        billed_simulation(lasts_s=60.0).run()


def test_checker_detects_ledger_error_of_one_micro() -> None:
    simulation = billed_simulation()

    async def forge() -> None:
        ledger = simulation.store.tables.ledger
        settle = ledger.settle

        def settle_wrongly(worker: Any, settlement: Any) -> bool:
            first, *rest = settlement.charges
            return bool(settle(worker, replace(settlement, charges=(replace(first, amount_micros=1), *rest))))

        ledger.settle = settle_wrongly

    at(simulation, 1.0, forge)
    with pytest.raises(InvariantViolation, match=r"cost 6000 micros, our ledger has \d+"):
        simulation.run()


def test_virtual_time_begins_with_a_month() -> None:
    assert (EPOCH.month, EPOCH.day) == (1, 1)
