"""Random histories of faults against the emulated Hetzner.

Every promise holds in each: no machine is left, no billed hour is wasted, and our ledger agrees with the vendor's.

`WINDLASS_SEEDS=1000 pytest -n 2 tests/simulator/test_hetzner_histories.py` runs a thousand.
`WINDLASS_FIRST_SEED` is the first of them.
"""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from support.hetzner_histories import REFUSALS, HetznerHistory, hetzner_scenario
from support.simulator import invariants
from support.simulator.cloud import FaultRates
from support.simulator.invariants import InvariantViolation
from support.simulator.scenario import FleetScenario, Scenario, fleet_config
from support.simulator.simulation import Simulation
from support.simulator.workers import TaskProfile
from support.simulator.worlds import check_seed
from windlass.policy import billing
from windlass.policy.stages import draining
from windlass_emulators.hetzner.ledger import HetznerBill

SEEDS = int(os.environ.get("WINDLASS_SEEDS", "0")) or 10
FIRST = int(os.environ.get("WINDLASS_FIRST_SEED", "0"))
# Small enough that two workers finish at about the same time.
CHUNK = 5
# Scenarios with high fault rates to run before a fault that never occurred fails the test.
MAX_ROUGH = 60


@pytest.mark.parametrize("first", range(FIRST, FIRST + SEEDS, CHUNK))
def test_no_leaks_no_excess_servers_and_no_wasted_hours(
    first: int, record_property: Callable[[str, object], None]
) -> None:
    """`--junitxml=FILE -o junit_family=xunit1` keeps the numbers of the simulated events."""
    tally: Counter[str] = Counter()
    for seed in range(first, min(first + CHUNK, FIRST + SEEDS)):
        history = check_seed("hetzner", seed)
        assert isinstance(history, HetznerHistory)
        report = history.report
        requests = len(history.project.emulator.requests)
        tally += history.tally + Counter(
            histories=1,
            requests=requests,
            servers=report.machines,
            billed=report.billed_workers,
            guessed=report.inexact_bills,
        )
    assert tally["guessed"] <= 1 + tally["billed"] // 20, "most ends are reported by the vendor"
    for what, count in tally.items():
        record_property(what, count)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(2220, id="a server vanishes while prices are unknown"),
        pytest.param(2261, id="a server vanishes before its price is recorded"),
        pytest.param(50225, id="a worker at the minimum is replaced long after the queue emptied"),
    ],
)
def test_history_that_once_failed_holds(seed: int) -> None:
    HetznerHistory(hetzner_scenario(seed)).run()


def calm() -> Scenario:
    """Where nothing goes wrong: two workers for two tasks, and then nothing to do."""
    fleet_scenario = FleetScenario(
        config=fleet_config(max_workers=2, poll_interval_s=5.0, policy="clear-time"),
        tasks=TaskProfile(duration_s=(20.0, 30.0)),
        arrivals=((1.0, 2),),
        billing_unit_s=600,
        price_micros_per_hour=1,
    )
    return Scenario(0, {"red": fleet_scenario}, faults_end_s=5.0)


def test_idle_servers_drain_at_hour_end_and_cost_matches_the_bill() -> None:
    history = HetznerHistory(calm())
    report = history.run()
    assert history.tally == {"idle, at the end of an hour": 2}
    assert (report.billed_workers, report.inexact_bills) == (2, 0)
    ours = sum(charge.amount_micros for charge in history.store.tables.ledger.charges)
    assert ours == history.project.bill()["total_micros"] == 2 * 6_400


def test_server_that_vanishes_while_prices_are_unknown_is_in_the_ledger() -> None:
    history = HetznerHistory(replace(calm(), faults_end_s=60.0))

    async def vanish() -> None:
        cloud = history.clouds["red"]
        assert await history.store.open_accounts() == [], "no price is known"
        cloud.remove_machine(next(iter(cloud.machines)))

    def on_ready(_: Simulation) -> None:
        history.project.emulator.faults.next("unavailable", method="GET", path="/v1/pricing", times=3)
        history.schedule(25.0, vanish)

    history.on_ready = on_ready
    history.run()
    ours = sum(charge.amount_micros for charge in history.store.tables.ledger.charges)
    assert ours == history.project.bill()["total_micros"] == 2 * 6_400


def test_refused_settings_hold_the_fleet_with_their_code() -> None:
    history = HetznerHistory(calm())
    history.on_ready = lambda _: history.project.emulator.faults.next_create("invalid_input", times=9)
    history.run()
    alerts = {event.detail["code"] for event in history.store.tables.event_log.events if event.code == "ALERT"}
    assert "INVALID_REQUEST" in alerts
    assert "FAILURE_RATE" not in alerts


def test_history_detects_an_idle_server_billed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "_drainable_spare", lambda *_: [])
    with pytest.raises(InvariantViolation, match=r"kept into its next billing period|billed machines at rest"):
        HetznerHistory(calm()).run()


def test_history_detects_a_server_deleted_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(billing, "is_worth_waiting", lambda *_: False)
    monkeypatch.setattr(invariants, "MIN_USED_SHARE", 0.0)  # or those who look at decisions would notice before
    with pytest.raises(InvariantViolation, match=r"red-\d-\w+ is deleted \d+ s into a billed hour without a reason"):
        HetznerHistory(calm()).run()


def test_history_detects_a_bill_that_differs_by_a_micro(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = HetznerBill._micros
    monkeypatch.setattr(HetznerBill, "_micros", lambda *args, **kwargs: honest(*args, **kwargs) + 1)
    with pytest.raises(InvariantViolation, match=r"cost 6402 micros, our ledger has 6400"):
        HetznerHistory(calm()).run()


def rough(seed: int) -> Scenario:
    """Where every second request fails, and every third server."""
    scenario = hetzner_scenario(seed)
    rates = FaultRates(create_ambiguous=0.3, create_refused=0.5, list_failed=0.3, list_stale=0.3, delete_failed=0.7)
    fleets = {
        name: replace(fleet_scenario, rates=rates, worker_faults=replace(fleet_scenario.worker_faults, crashes=0.3))
        for name, fleet_scenario in scenario.fleets.items()
    }
    return replace(scenario, fleets=fleets)


def test_histories_cover_every_kind_of_fault() -> None:
    """A bed in which nothing happens proves nothing. They go on until they have: which one meets what is chance."""
    cloud_faults = {
        "late",
        "answer lost",
        "POST silence",
        "POST silence after",
        "POST 5xx",
        "POST 5xx after",
        *(f"POST {code}" for code in REFUSALS),
        "DELETE not_found",
        "DELETE locked",
        "DELETE silence",
        "DELETE silence after",
        "DELETE protected",
        "GET silence",
        "GET 5xx",
        "GET rate_limit_exceeded",
        "list old",
        "start_server failed",
        "delete_server failed",
        "forgotten address",
    }
    trace_lines = {
        "crashed with its machine",
        "killed",
        "database       unavailable",
        "delete primary ip",
        "create machine refused",
        "create machine unclear",
        "delete machine failed",
        "list machines failed",
        "hold: ",
    }
    for seed in range(MAX_ROUGH):
        history = HetznerHistory(rough(seed))
        trace = history.run().trace.text(limit=None)
        trace_lines -= {line for line in trace_lines if line in trace}
        cloud_faults -= history.project.faults_seen
        if not cloud_faults and not trace_lines:
            return
    pytest.fail(f"not covered: {sorted(cloud_faults | trace_lines)}")
