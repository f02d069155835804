"""Everything about a simulation that its seed decides. Equal scenarios give equal runs.

The order of the random draws is part of the meaning of a seed: adding or moving one changes every later scenario.
"""

from dataclasses import dataclass, field, replace
from decimal import Decimal
from random import Random
from typing import Any

from support.simulator.cloud import FaultRates
from support.simulator.network import NetworkFaults
from support.simulator.storms import StormPlan
from support.simulator.workers import TaskProfile, WorkerFaults
from windlass.model.fleet import FleetConfig
from windlass.model.snapshot import BootTimes
from windlass.policy.boot import boot_limit


@dataclass(frozen=True, slots=True)
class WorkerFaultPlan:
    """Shares of workers with each fault, from 0 to 1. A worker has at most one."""

    never_joins: float = 0.0
    boots_slowly: float = 0.0
    crashes: float = 0.0
    freezes: float = 0.0
    ignores_drain: float = 0.0
    fails_tasks: float = 0.0

    def draw(self, rng: Random, fleet: FleetConfig) -> WorkerFaults:
        faults = WorkerFaults(boots_s=rng.uniform(1.0, MAX_USUAL_BOOT_S))
        roll = rng.random()
        if roll < self.never_joins:
            return replace(faults, never_joins=True)
        roll -= self.never_joins
        if roll < self.boots_slowly:
            return replace(faults, boots_s=boot_limit(fleet, BootTimes()).stall_s * rng.uniform(0.8, 1.5))
        roll -= self.boots_slowly
        if roll < self.crashes:
            return replace(faults, crashes_at_s=rng.uniform(1.0, 150.0), vanishes=rng.random() < 0.5)
        roll -= self.crashes
        if roll < self.freezes:
            frozen_s = fleet.heartbeat_timeout_s * rng.uniform(0.8, 2.0)
            return replace(faults, freezes_at_s=rng.uniform(5.0, 150.0), frozen_s=frozen_s)
        roll -= self.freezes
        if roll < self.ignores_drain:
            return replace(faults, ignores_drain=True)
        roll -= self.ignores_drain
        return replace(faults, fails_tasks=roll < self.fails_tasks)


@dataclass(frozen=True, slots=True)
class FleetScenario:
    """One fleet: its configuration, cloud, workers and tasks."""

    config: FleetConfig
    max_list_age_s: float = 0.0
    max_creation_delay_s: float = 0.0
    rates: FaultRates = field(default_factory=FaultRates)
    worker_faults: WorkerFaultPlan = WorkerFaultPlan()
    tasks: TaskProfile = field(default_factory=TaskProfile)
    # None: machines are free.
    price_micros_per_hour: int | None = None
    price_micros_per_month: int | None = None
    billing_unit_s: int = 1
    # Times at which tasks are enqueued, with their number.
    arrivals: tuple[tuple[float, int], ...] = ()
    # High enough that no task becomes a dead letter because of injected faults.
    max_attempts: int = 100


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    fleets: dict[str, FleetScenario]
    orchestrators: int = 1
    ttl_s: float = 20.0
    # No faults are injected after this time, and the fleets must come to rest.
    faults_end_s: float = 900.0
    # Faults between the database and the workers, and between the database and the orchestrators.
    worker_network: NetworkFaults = field(default_factory=NetworkFaults)
    control_network: NetworkFaults = field(default_factory=NetworkFaults)
    # Mean time from the start of an orchestrator until it is killed. 0: never.
    killed_every_s: float = 0.0
    # Mean time between database outages (0: none), and the duration of the longest.
    outage_every_s: float = 0.0
    outage_s: float = 60.0
    # Mean time between actions of a human operator. 0: none.
    operator_every_s: float = 0.0
    storm: StormPlan = field(default_factory=StormPlan)
    # Share of a worker's calls that take no virtual time, and so meet no fault. They are cheap to simulate.
    immediate_share: float = 0.8

    @property
    def is_ledger_exact(self) -> bool:
        """Whether machines cost what the cloud bills, and are used to the end of their billing periods.

        A step of the clock and a lost transaction change both.
        """
        return self.storm.failover_every_s == self.storm.clock_step_every_s == 0


STORM_IMMEDIATE_SHARE = 0.3
DEFAULT_POLICY = FleetConfig.model_fields["policy"].default
# The longest boot of a worker without a fault.
MAX_USUAL_BOOT_S = 15.0
# The prices of the emulated machines that the fleets of these worlds rent first.
VENDOR_PRICE_MICROS = {"runpod": 860_000, "hetzner": 6_400}
# The group of faults that a run concentrates on. "all" concentrates on none.
THEMES = ("all", "network", "cloud", "machines", "leadership")


@dataclass(frozen=True, slots=True)
class _RateDraw:
    rng: Random
    theme: str

    def share(self, most: float, theme: str) -> float:
        """A fault rate: up to `most` in a run with this theme and up to a third of it in others. About half of all
        rates are 0, so that each fault also occurs without the others."""
        is_theme = self.theme == theme
        if self.rng.random() < (0.2 if is_theme else 0.5):
            return 0.0
        return self.rng.uniform(0.0, most if is_theme else most / 3)


def draw_scenario(seed: int) -> Scenario:
    """A scenario with faults of every kind."""
    rng = Random(seed)  # noqa: S311
    rates = _RateDraw(rng, rng.choice(THEMES))
    is_leadership = rates.theme == "leadership"
    faults_end_s = rng.uniform(300.0, 900.0)
    names = ["red"] if rng.random() < 0.85 else ["red", "blue"]
    fleets = {name: _draw_fleet(rates, name, faults_end_s) for name in names}
    fails_tasks = _RateDraw(Random(f"{seed} fails"), rates.theme).share(0.3, "machines")  # noqa: S311
    return Scenario(
        seed=seed,
        fleets={
            name: replace(fleet_scenario, worker_faults=replace(fleet_scenario.worker_faults, fails_tasks=fails_tasks))
            for name, fleet_scenario in fleets.items()
        },
        orchestrators=rng.choice([2, 3]) if is_leadership else rng.choice([1, 2, 2]),
        ttl_s=rng.choice([5.0, 10.0, 20.0]),
        faults_end_s=faults_end_s,
        # Orchestrators make far fewer calls than workers, so their calls need higher fault rates.
        worker_network=NetworkFaults(
            slow=rates.share(0.1, "network"),
            lost=rates.share(0.1, "network"),
            unanswered=rates.share(0.1, "network"),
            late=rates.share(0.1, "network"),
        ),
        control_network=NetworkFaults(
            slow=rates.share(0.4, "network"),
            lost=rates.share(0.2, "network"),
            unanswered=rates.share(0.3, "network"),
            late=rates.share(0.4, "network"),
        ),
        killed_every_s=rng.choice([20.0, 60.0]) if is_leadership else rng.choice([0.0, 150.0]),
        outage_every_s=rng.choice([0.0, 0.0, 300.0]),
        outage_s=rng.choice([20.0, 150.0]),
        operator_every_s=rng.choice([0.0, 0.0, 60.0]),
    )


def draw_billed_scenario(seed: int) -> Scenario:
    """The scenario of a seed with machines billed by started units of 5 to 60 minutes.

    It lasts for several units, and tasks come in waves, so that workers are idle in between.
    """
    scenario = draw_scenario(seed)
    rng = Random(f"{seed} paid")  # noqa: S311
    unit_s = rng.choice([300, 600, 600, 600, 3600])
    until_s = unit_s * rng.uniform(1.2, 2.2 if unit_s == 3600 else 4.0)
    waves = [rng.uniform(0.0, until_s) for _ in range(4)]
    price = rng.choice([5_999, 1_000_000])
    return replace(
        scenario,
        faults_end_s=until_s,
        fleets={
            name: replace(
                fleet_scenario,
                price_micros_per_hour=price,
                price_micros_per_month=rng.choice([None, price * unit_s * 2 // 3600]),
                billing_unit_s=unit_s,
                arrivals=tuple(sorted((at, rng.choice([1, 3, 12])) for at in waves)),
            )
            for name, fleet_scenario in scenario.fleets.items()
        },
    )


def draw_policies(scenario: Scenario) -> Scenario:
    """The product's default policy for a third of the fleets of every world. Other draws do not change."""
    fleets = dict(scenario.fleets)
    for name, fleet in fleets.items():
        rng = Random(f"{scenario.seed} {name} policy")  # noqa: S311
        if rng.random() < 1 / 3:
            config = fleet.config.model_copy(update={"policy": DEFAULT_POLICY})
            fleets[name] = replace(fleet, config=config)
    return replace(scenario, fleets=fleets)


def add_storm(scenario: Scenario) -> Scenario:
    """The scenario with rare faults of the whole installation (storms.py).

    Clocks and lost transactions change what a machine costs by design (Scenario.is_ledger_exact), so they come to half
    of the scenarios with billing periods. In the others the ledger must still equal the bill.
    """
    rng = Random(f"{scenario.seed} storm")  # noqa: S311
    has_periods = any(fleet.billing_unit_s > 1 for fleet in scenario.fleets.values())
    has_exact_ledger = has_periods and Random(f"{scenario.seed} storm ledger").random() < 0.5  # noqa: S311

    def every_s(*means: float) -> float:
        return rng.choice([0.0, *means])

    plan = StormPlan(
        machines_taken_every_s=every_s(150.0, 400.0),
        notification_lost=rng.choice([0.0, 0.1, 1.0]),
        orchestrator_dies=rng.choice([0.0, 0.5, 1.0]),
        worker_dies=rng.choice([0.0, 0.1, 0.4]),
        failover_every_s=0.0 if has_exact_ledger else every_s(120.0, 300.0),
        clock_step_every_s=0.0 if has_exact_ledger else every_s(100.0, 300.0),
        reconfigured_every_s=every_s(100.0, 300.0),
        deployed_every_s=every_s(200.0),
    )
    return replace(
        scenario,
        storm=plan,
        immediate_share=STORM_IMMEDIATE_SHARE,
        fleets={name: _with_budget(fleet, rng) for name, fleet in scenario.fleets.items()},
    )


def _with_budget(fleet: FleetScenario, rng: Random) -> FleetScenario:
    """A fleet of machines with a price, and often a budget that it reaches."""
    roll, workers, action = rng.random(), rng.choice([1, 2, 4]), rng.choice(["warn", "stop-spawning", "drain"])
    if fleet.price_micros_per_hour is None and roll < 0.5:
        return fleet
    price_micros = VENDOR_PRICE_MICROS.get(fleet.config.provider, fleet.price_micros_per_hour or 1_000_000)
    if fleet.config.provider not in VENDOR_PRICE_MICROS:
        fleet = replace(fleet, price_micros_per_hour=price_micros)
    changes = {"budget_per_hour": workers * Decimal(price_micros) / 1_000_000, "budget_action": action}
    return replace(fleet, config=fleet.config.model_copy(update=changes))


def _draw_fleet(rates: _RateDraw, queue: str, until_s: float) -> FleetScenario:
    rng = rates.rng
    is_cloud = rng.random() < 0.6
    max_workers = rng.choice([1, 2, 2, 3, 4, 6])
    return FleetScenario(
        config=fleet_config(
            queues=(queue,),
            policy=rng.choice(["threshold", "buffered", "buffered", "clear-time"]),
            min_workers=rng.randint(0, min(2, max_workers)),
            max_workers=max_workers,
            concurrency=rng.choice([1, 1, 1, 2]),
            max_changes_per_cycle=rng.choice([1, 3, 10]),
            poll_interval_s=rng.choice([3.0, 5.0, 10.0]),
            stop_timeout_s=rng.choice([20.0, 60.0]),
            idle_buffer=rng.choice([0, 0, 1]),
            # With limits out of reach, a fleet of bad machines keeps spawning, so more faults can happen.
            min_spawns_for_rate=rng.choice([5, 100]),
            max_restarts=rng.choice([5, 100]),
        ),
        max_list_age_s=rng.choice([5.0, 30.0]) if is_cloud else 0.0,
        max_creation_delay_s=rng.choice([5.0, 60.0]) if is_cloud else 0.0,
        rates=FaultRates(
            create_ambiguous=rates.share(0.8, "cloud"),
            create_refused=rates.share(0.5, "cloud"),
            create_slow=rates.share(0.5, "cloud"),
            list_failed=rates.share(0.6, "cloud"),
            list_stale=rates.share(0.8, "cloud") if is_cloud else 0.0,
            list_slow=rates.share(0.5, "cloud"),
            delete_failed=rates.share(0.8, "machines"),
            delete_slow=rates.share(0.6, "machines"),
        ),
        worker_faults=WorkerFaultPlan(
            never_joins=rates.share(0.4, "machines"),
            boots_slowly=rates.share(0.3, "machines"),
            crashes=rates.share(0.5, "machines"),
            freezes=rates.share(0.6, "machines"),
            ignores_drain=rates.share(0.3, "machines"),
        ),
        tasks=TaskProfile(duration_s=(1.0, rng.choice([10.0, 60.0])), failure_rate=rates.share(0.4, "machines")),
        arrivals=tuple(sorted((rng.uniform(0.0, until_s), rng.choice([1, 3, 12])) for _ in range(int(until_s / 40)))),
    )


def fleet_config(**changes: Any) -> FleetConfig:
    """A fleet with the timeouts of a GPU fleet, divided by ten."""
    settings: dict[str, Any] = {
        "queues": ("red",),
        "poll_interval_s": 5.0,
        "heartbeat_interval_s": 5.0,
        "heartbeat_timeout_s": 30.0,
        "spawn_timeout_s": 60.0,
        "startup_grace_s": 60.0,
        "not_claiming_timeout_s": 120.0,
        "stuck_timeout_s": 300.0,
        "stop_timeout_s": 60.0,
        "idle_timeout_s": 20.0,
        "failure_window_s": 60.0,
        "restart_window_s": 60.0,
    }
    return FleetConfig(**(settings | changes))
