"""Rare faults of a whole installation, on top of the usual faults of a simulation.

- Any await can be the moment at which an orchestrator or a worker dies.
- The database fails over to a standby that lacks the last transactions, and its clock steps in both directions.
- Notifications are lost. The vendor takes away several machines at once.
- The configuration changes, by a reload or by a rolling restart of the orchestrators. New code is deployed; some of it
  is bad.
- A budget is reached (a setting of the fleets, see scenario.py).

The task ledger of the invariant checker follows a failover: docs/backup.md allows that a task enqueued in the lost
transactions is lost, and that one completed in them runs again. Nothing else may be lost.
"""

import asyncio
import copy
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from support.memory_store.stores import MemoryStores
from support.simulator.invariants import Heartbeats, TaskRecord
from support.simulator.processes import start_detached
from support.simulator.workers import WorkerFaults
from windlass.model.fleet import FleetConfig
from windlass.model.rollout import RolloutStatus
from windlass.policy.stages.rollout import STALL_S

if TYPE_CHECKING:
    from support.simulator.simulation import Simulation

RESTART_DELAYS_S = (0.0, 1.0, 30.0)
# Oldest transaction that a failover may lose, and the longest time until the standby accepts connections.
MAX_LOST_S, MAX_FAILOVER_S = 10.0, 20.0
CLOCK_STEPS_S = (-3600.0, -60.0, -5.0, 5.0, 60.0, 3600.0)
# A worker or orchestrator that dies at an await does so within its first steps.
MAX_STEPS = 3_000
POLICIES = ("adaptive", "threshold", "buffered", "clear-time")
# How often a person looks at the rollouts after the faults.
ACTS_EVERY_S = 60.0
# Deploys whose workers all have a fault, and which faults.
BAD_VERSION_SHARE = 1 / 3
BAD_VERSIONS = (WorkerFaults(crashes_at_s=3.0), WorkerFaults(never_joins=True), WorkerFaults(fails_tasks=True))


@dataclass(frozen=True, slots=True)
class StormPlan:
    """Mean times between events in seconds (0: never), and shares from 0 to 1."""

    failover_every_s: float = 0.0
    clock_step_every_s: float = 0.0
    reconfigured_every_s: float = 0.0
    deployed_every_s: float = 0.0
    machines_taken_every_s: float = 0.0
    notification_lost: float = 0.0
    # Shares of starts of a process that end at a random await.
    orchestrator_dies: float = 0.0
    worker_dies: float = 0.0

    @property
    def is_calm(self) -> bool:
        return self == StormPlan()


@dataclass(frozen=True, slots=True)
class Standby:
    """A copy of the database, and what the checks knew of it."""

    store: MemoryStores
    tasks: dict[int, TaskRecord]
    term: int
    spawned: set[str]
    heartbeats: dict[str, Heartbeats]


class Storm:
    """Causes the events of a StormPlan in a simulation until its faults end."""

    def __init__(self, simulation: "Simulation", plan: StormPlan) -> None:
        self._simulation = simulation
        self._plan = plan
        self._rng = simulation.rng_for("storm")
        # What changes in addition to the limits of a fleet, and which versions are bad: the draws of the rest stay.
        self._settings_rng, self._versions_rng = simulation.rng_for("settings"), simulation.rng_for("versions")
        self._deploys = 0
        # Clear from the first lost transaction until the standby accepts connections.
        self._is_complete = asyncio.Event()
        self._is_complete.set()

    async def wait_for_failover(self) -> None:
        """A failover in progress is a fault. It would undo what an operator does when the faults end."""
        await self._is_complete.wait()

    def start(self) -> None:
        plan = self._plan
        if plan.deployed_every_s > 0:
            self._simulation.versions.update(dict.fromkeys(self._simulation.clouds, "v0"))
        if plan.notification_lost > 0:
            self._lose_notifications()
        for every_s, cause in (
            (plan.failover_every_s, self._fail_over),
            (plan.clock_step_every_s, self._step_clock),
            (plan.reconfigured_every_s, self._reconfigure),
            (plan.deployed_every_s, self._deploy),
            (plan.machines_taken_every_s, self._take_machines),
        ):
            if every_s > 0:
                start_detached(self._repeat(every_s, cause))

    async def _repeat(self, every_s: float, cause: Callable[[], Any]) -> None:
        # A generator of its own: the events of one kind do not change the draws of another.
        rng = self._simulation.rng_for(f"storm {cause.__name__}")
        while True:
            await asyncio.sleep(rng.expovariate(1 / every_s))
            if self._simulation.faults_ended:
                return
            await cause()

    def _allow(self, kind: str) -> bool:
        return self._simulation.decisions.allow("storm", kind)

    # ------------------------------------------------------------------------------------------------------ deaths

    def draw_death(self, purpose: str, share: float) -> int | None:
        """After how many awaits a new process dies. None: it does not."""
        rng = self._simulation.rng_for(f"death {purpose}")
        if self._simulation.faults_ended or rng.random() >= share:
            return None
        # Crash as often early in a life as late: a start has few awaits, and each matters.
        return round(float(MAX_STEPS ** rng.random()))

    # ---------------------------------------------------------------------------------------------------- database

    async def _fail_over(self) -> None:
        simulation = self._simulation
        lost_s, down_s = self._rng.uniform(0.0, MAX_LOST_S), self._rng.uniform(0.0, MAX_FAILOVER_S)
        if not self._allow("failover"):
            return
        self._is_complete.clear()
        standby = self.save()
        await asyncio.sleep(lost_s)
        simulation.trace.add("database", f"fails over, the last {lost_s:.1f} s are lost")
        simulation.set_database_down(True)
        await asyncio.sleep(down_s)
        lost_tasks = self.restore(standby)
        simulation.set_database_down(False)
        self._is_complete.set()
        simulation.trace.add("database", f"standby accepts connections, {lost_tasks} tasks lost")

    def save(self) -> "Standby":
        """What a standby has now."""
        checker = self._simulation.checker
        return Standby(
            copy_store(self._simulation.store),
            copy.deepcopy(checker.tasks),
            checker.last_term,
            set(checker.spawned_at),
            checker.copy_heartbeats(),
        )

    def restore(self, standby: "Standby") -> int:
        """Continue with a standby. Returns how many tasks were lost."""
        store, checker = self._simulation.store, self._simulation.checker
        restore_store(store, standby.store)
        lost_tasks = set(checker.tasks) - set(standby.tasks)
        checker.tasks, checker.last_term = standby.tasks, standby.term
        checker.on_rows_lost(set(checker.spawned_at) - standby.spawned)
        held = store.tables.tasks.running.values()
        checker.on_failover(standby.heartbeats, {row.token for tasks in held for row in tasks.values()})
        return len(lost_tasks)

    async def _step_clock(self) -> None:
        step_s = self._rng.choice(CLOCK_STEPS_S)
        if self._allow("clock_forward" if step_s > 0 else "clock_back"):
            self._simulation.trace.add("database", f"clock steps by {step_s:+g} s")
            self._simulation.clock_offset_s += step_s
            self._simulation.checker.on_clock_step(step_s)

    def _lose_notifications(self) -> None:
        """A listener may miss a notification, for instance while it reconnects."""
        simulation, rng = self._simulation, self._simulation.rng_for("storm notify")
        hub = simulation.store.tables.notifications
        notify = hub.notify

        def notify_or_lose(queue: str) -> None:
            is_lost = rng.random() < self._plan.notification_lost and not simulation.faults_ended
            if not (is_lost and self._allow("notification_lost")):
                notify(queue)

        hub.notify = notify_or_lose

    # ------------------------------------------------------------------------------------------- operators, vendor

    async def _reconfigure(self) -> None:
        simulation, rng = self._simulation, self._rng
        name = rng.choice(list(simulation.clouds))
        config = simulation.configs[name]
        max_workers = rng.choice([1, 2, 3, 6])
        changes = {
            "max_workers": max_workers,
            "min_workers": rng.randint(0, min(2, max_workers)),
            "idle_timeout_s": rng.choice([10.0, 20.0, 60.0]),
        }
        changes |= self._draw_settings(config)
        is_rolling = rng.random() < 0.5
        if not self._allow("rolling_restart" if is_rolling else "reconfigured"):
            return
        how = "rolling restart" if is_rolling else "reload"
        simulation.trace.add("operator", f"{how} of {name} with {changes}")
        await simulation.reconfigure(name, config.model_copy(update=changes), is_rolling=is_rolling)

    def _draw_settings(self, config: FleetConfig) -> dict[str, Any]:
        """Sometimes another policy, concurrency or budget. A GPU of the Runpod world runs one task at a time."""
        rng, changes = self._settings_rng, dict[str, Any]()
        policy, concurrency, factor = rng.choice(POLICIES), rng.choice([1, 2]), rng.choice(["0.5", "2"])
        if rng.random() < 0.3:
            changes["policy"] = policy
        if rng.random() < 0.3 and not config.has_gpu:
            changes["concurrency"] = concurrency
        if rng.random() < 0.3 and config.budget_per_hour is not None:
            changes["budget_per_hour"] = (config.budget_per_hour * Decimal(factor)).quantize(Decimal("0.000001"))
        return changes

    async def _deploy(self) -> None:
        simulation, rng = self._simulation, self._versions_rng
        name = self._rng.choice(list(simulation.clouds))
        roll, faults = rng.random(), rng.choice(BAD_VERSIONS)
        if not self._allow("deployed"):
            return
        self._deploys += 1
        version = f"v{self._deploys}"
        if roll < BAD_VERSION_SHARE and self._allow("bad_version"):
            simulation.version_faults[version] = faults
        is_bad = "bad " if version in simulation.version_faults else ""
        simulation.trace.add("operator", f"deploy {is_bad}{version} to {name}")
        simulation.versions[name] = version
        if name in [fleet.name for fleet in await simulation.store.fleets()]:
            surge, max_unavailable = rng.choice([(0, 0), (1, 0), (0, 1)])
            await simulation.store.request_deploy(name, surge, max_unavailable, is_immediate=rng.random() < 0.2)

    async def fix_versions(self) -> None:
        """When the faults end, a person deploys a version that works, and then acts on alerts about rollouts."""
        simulation = self._simulation
        for name, version in simulation.versions.items():
            if version in simulation.version_faults:
                simulation.trace.add("operator", f"deploy a version that works to {name}")
                simulation.versions[name] = f"{version} fixed"
                await simulation.store.request_deploy(name, 0, 0, is_immediate=False)
        start_detached(self._act_on_rollouts())

    async def _act_on_rollouts(self) -> None:
        """What the runbooks advise: VERSION_REJECTED, deploy again; DEPLOY_STALLED, abort.

        Faults make workers of a good version fail, so that it is rolled back. A rollout whose new worker failed its
        last task is not decided until there are more tasks.
        """
        simulation = self._simulation
        while True:
            await asyncio.sleep(ACTS_EVERY_S)
            for fleet in await simulation.store.fleets():
                rollout = fleet.rollout
                if rollout is None:
                    continue
                age_s = (simulation.database_now() - (rollout.changed_at or rollout.started_at)).total_seconds()
                is_rejected = rollout.status is RolloutStatus.ROLLED_BACK and rollout.target == fleet.fingerprint
                if is_rejected:
                    simulation.trace.add("operator", f"deploy {rollout.target} to {fleet.name} again")
                    await simulation.store.request_deploy(fleet.name, 0, 0, is_immediate=False)
                elif rollout.is_running and age_s > STALL_S + simulation.clouds[fleet.name].billing_unit_s:
                    simulation.trace.add("operator", f"abort the rollout of {rollout.target} to {fleet.name}")
                    await simulation.store.abort_deploy(fleet.name)

    async def _take_machines(self) -> None:
        simulation, rng = self._simulation, self._rng
        cloud = simulation.clouds[rng.choice(list(simulation.clouds))]
        share = rng.choice([0.5, 1.0])
        records = [record for record in cloud.billed_machines() if rng.random() < share]
        if records and self._allow("machines_taken"):
            simulation.trace.add("cloud", f"vendor takes away {len(records)} machines of {cloud.fleet}")
            for record in records:
                if record.id in simulation.checker.workers_by_machine:
                    simulation.checker.workers_by_machine[record.id].history.has_ended = True
                cloud.remove_machine(record.id)


def copy_store(store: MemoryStores) -> MemoryStores:
    """A copy of all rows. Listeners, random numbers and the clock are shared: they are not part of a database."""
    tables = store.tables
    memo: dict[int, Any] = {id(each): each for each in (tables.notifications, tables.chance, tables.now)}
    return copy.deepcopy(store, memo)


def restore_store(store: MemoryStores, saved: MemoryStores) -> None:
    """Replace all rows with those of a copy. References to `store` stay valid."""
    for name, value in vars(saved).items():
        setattr(store, name, value)


def find_task_difference(tasks: dict[int, TaskRecord], store: MemoryStores) -> str | None:
    """A difference between the task ledger and the rows: a task lost, or a result accepted by only one of them."""
    for task_id, record in tasks.items():
        row = store.tables.tasks.rows.get(task_id)
        if row is None:
            return f"promise 1 broken: task {task_id} was enqueued and has no row"
        is_complete = row.status == "complete"
        if is_complete != (record.accepted is not None):
            return f"promise 2 broken: task {task_id} is {row.status}, accepted result: {record.accepted is not None}"
    return None
