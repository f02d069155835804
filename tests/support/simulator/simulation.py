"""Runs a scenario: store, clouds, workers, orchestrators, task producers and an operator.

`Simulation(scenario).run()` injects faults until `faults_end_s`. Then everything works, and the fleets must lose no
machine or task, come to rest and stay there. It returns a SimulationReport, or raises InvariantViolation with the trace
and the command that replays it. `make_store` and `make_provider` replace the memory store and the simulated cloud.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from random import Random
from typing import Any

from support.memory_store.stores import MemoryStores
from support.simulator.cloud import MachineRecord, SimulatedCloud
from support.simulator.coverage import Coverage
from support.simulator.decisions import FaultDecisions
from support.simulator.invariants import InvariantChecker, InvariantViolation, TaskRecord
from support.simulator.loop import EPOCH, run, virtual_now
from support.simulator.network import NetworkFaults, RemoteStore
from support.simulator.orchestrators import SimulatedOrchestrator, WrapService
from support.simulator.processes import SimulatedProcess, start_detached, track_processes
from support.simulator.scenario import MAX_USUAL_BOOT_S, FleetScenario, Scenario
from support.simulator.storms import RESTART_DELAYS_S, Storm, find_task_difference
from support.simulator.trace import Trace
from support.simulator.workers import SimulatedWorker, WorkerFaults
from windlass.control.executor import CALL_TIMEOUT_S
from windlass.model.action import RaiseAlert
from windlass.model.fleet import FleetConfig
from windlass.model.snapshot import BootTimes
from windlass.model.task import NewTask
from windlass.model.worker import WorkerStatus
from windlass.policy.boot import boot_limit
from windlass.policy.stages import budget
from windlass.policy.stages.orphans import TOO_MANY_ORPHANS
from windlass.ports.provider import Provider

CHECK_INTERVAL_S = 5.0
# From the end of the faults until all tasks are finished and the fleets have their minimum size. A fleet whose machines
# all failed may be held for an hour before it spawns again.
REST_LIMIT_S = 4 * 3600.0
# At rest, every worker sent a heartbeat within this many intervals.
MAX_HEARTBEAT_AGE_INTERVALS = 2
CYCLES_AT_REST = 10
# From rest until the cost of every terminated worker is settled.
SETTLE_COSTS_LIMIT_S = 600.0
MAX_WORKERS = 100_000
# An orchestrator's call of before a reload has ended after its lease, the limit of a call, and this.
RELOADED_S = 60.0


@dataclass(slots=True)
class SimulationReport:
    trace: Trace
    tasks: int
    machines: int
    takeovers: int
    late_results: int
    most_billed: dict[str, int]
    settled_s: float
    rested_s: float
    # Terminated workers with a machine, and those whose cost differs from the cloud's because of a fault.
    billed_workers: int
    inexact_bills: int


@dataclass(slots=True)
class Simulation:
    scenario: Scenario
    # None: the memory store with the clock of the simulation.
    make_store: Callable[[Random], Any] | None = None
    make_provider: Callable[[SimulatedCloud], Provider] = lambda cloud: cloud
    wrap_service: WrapService = lambda _, service: service
    # The program on the machines.
    worker_type: type[SimulatedWorker] = SimulatedWorker
    # Called after everything is built and before it starts: tests script faults here.
    on_ready: Callable[["Simulation"], None] = lambda _: None
    on_faults_ended: Callable[[], None] = lambda: None
    decisions: FaultDecisions = field(default_factory=FaultDecisions)
    # The command that repeats exactly this run. make_simulation() knows it.
    replay: str = "run the test again that built this scenario"

    trace: Trace = field(init=False)
    checker: InvariantChecker = field(init=False)
    store: Any = field(init=False)
    clouds: dict[str, SimulatedCloud] = field(init=False)
    orchestrators: list[SimulatedOrchestrator] = field(init=False)
    faults_ended: bool = field(init=False, default=False)
    # Faults of the next workers, before random ones are drawn.
    scripted_faults: deque[WorkerFaults] = field(init=False, default_factory=deque)
    # Fleet to the fingerprint of its code and settings, and the faults of all workers of a version.
    versions: dict[str, str] = field(init=False, default_factory=dict)
    version_faults: dict[str, WorkerFaults] = field(init=False, default_factory=dict)
    # Whether the settings of a former version can be restored after a rollback, as on rented machines.
    restores_settings: bool = field(init=False, default=False)
    violations: list[str] = field(init=False, default_factory=list)
    coverage: Coverage = field(init=False, default_factory=Coverage)
    # The present configuration of each fleet, and the difference between the database's clock and the loop's.
    configs: dict[str, FleetConfig] = field(init=False)
    clock_offset_s: float = field(init=False, default=0.0)
    storm: Storm = field(init=False)
    # Set once a run ended in which every invariant held.
    report: SimulationReport = field(init=False)
    _worker_network: NetworkFaults = field(init=False)
    _control_network: NetworkFaults = field(init=False)
    _rng: Random = field(init=False)

    def run(self) -> SimulationReport:
        """Run to the end. Raises InvariantViolation with the trace."""
        self.trace = Trace()
        try:
            with self.trace.capture_logs(), self.worker_type.environment(self.rng_for("runtime")):
                self.report = run(self._run())
                return self.report
        except Exception as error:
            problem = self.violations[0] if self.violations else f"{type(error).__name__}: {error}"
            raise InvariantViolation(self.failure_report(problem)) from error

    def failure_report(self, problem: str) -> str:
        return f"{problem}\n\n{self.trace.text()}\n\n{problem}\nreplay: {self.replay}\n"

    def next_worker(self, **faults: Any) -> None:
        """Script the faults of the next worker that starts: `simulation.next_worker(never_joins=True)`."""
        self.scripted_faults.append(WorkerFaults(**faults))

    async def drain_worker(self, worker_id: str) -> None:
        """Drain a worker as an operator does."""
        self.checker.draining_since.setdefault(worker_id, self.now())
        await self.store.set_terminating([worker_id], "by operator")

    def schedule(self, at_s: float, action: Callable[[], Awaitable[None]]) -> None:
        """Run an action at a virtual time. An error in it ends the simulation."""

        async def wait_and_run() -> None:
            await asyncio.sleep(max(0.0, at_s - self.now()))
            try:
                await action()
            except Exception as error:
                self.report_violation(f"{type(error).__name__}: {error}")

        start_detached(wait_and_run())

    def set_database_down(self, is_down: bool) -> None:
        self._worker_network.is_down = self._control_network.is_down = is_down

    def report_violation(self, problem: str) -> None:
        """Record a violation and close the trace. The next check ends the simulation."""
        self.violations.append(problem)
        self.trace.close(problem)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    # -------------------------------------------------------------------------------------------------- building

    def database_now(self) -> datetime:
        return virtual_now() + timedelta(seconds=self.clock_offset_s)

    def _build(self) -> None:
        scenario = self.scenario
        self.storm = Storm(self, scenario.storm)
        self.decisions.on_fault = self._count_fault
        self._rng = self.rng_for("world")
        self._worker_network = replace(scenario.worker_network)
        self._control_network = replace(scenario.control_network)
        store_rng = self.rng_for("store")
        self.store = (
            self.make_store(store_rng) if self.make_store else MemoryStores(self.database_now, chance=store_rng)
        )
        self.configs = {name: fleet.config for name, fleet in scenario.fleets.items()}
        self.checker = InvariantChecker(
            dict(self.configs), self.report_violation, has_billing_rules=scenario.is_ledger_exact
        )
        self.clouds = self.checker.clouds = {
            name: self._make_cloud(name, fleet) for name, fleet in scenario.fleets.items()
        }
        self.orchestrators = [self._make_orchestrator(f"o{number}") for number in range(scenario.orchestrators)]

    def rng_for(self, purpose: str) -> Random:
        """A separate generator per purpose: more draws for one do not change the draws of another."""
        return Random(f"{self.scenario.seed} {purpose}")  # noqa: S311

    def _make_cloud(self, name: str, fleet: FleetScenario) -> SimulatedCloud:
        cloud = SimulatedCloud(
            name,
            self.rng_for(f"cloud {name}"),
            self.trace,
            max_list_age_s=fleet.max_list_age_s,
            max_creation_delay_s=fleet.max_creation_delay_s,
            price_micros_per_hour=fleet.price_micros_per_hour,
            price_micros_per_month=fleet.price_micros_per_month,
            billing_unit_s=fleet.billing_unit_s,
            rates=replace(fleet.rates),
            decisions=self.decisions,
        )
        cloud.on_created = self.checker.on_machine_created
        cloud.on_delete_requested = self.checker.on_delete_requested
        cloud.start_worker = lambda record: self._start_worker(cloud, fleet, record)
        return cloud

    def _start_worker(self, cloud: SimulatedCloud, fleet: FleetScenario, record: MachineRecord) -> SimulatedWorker:
        rng = self.rng_for(f"worker {record.id}")
        if self.faults_ended:
            faults = WorkerFaults(boots_s=rng.uniform(1.0, MAX_USUAL_BOOT_S))
        else:
            faults = fleet.worker_faults.draw(rng, fleet.config)
            if not faults.are_none and not self._allow_worker_faults(record, faults):
                faults = WorkerFaults()
        if self.scripted_faults:
            faults = self.scripted_faults.popleft()
        row = self.store.tables.workers.rows.get(record.name)
        faults = self.version_faults.get(row.spawned.fingerprint if row is not None else "", faults)
        if faults != WorkerFaults(boots_s=faults.boots_s):
            self.trace.add(record.name, f"{faults}")
        process = SimulatedProcess(record.name)
        transport = RemoteStore(
            self.store,
            process,
            self._worker_network,
            rng,
            self.trace,
            self.checker.on_worker_call,
            immediate_share=self.scenario.immediate_share,
            decisions=self.decisions,
            source=record.id,
            worker_id=record.name,
        )
        if faults.boots_s > MAX_USUAL_BOOT_S:
            self.decisions.happened("worker_boots_slowly", record.name)
        config = self.configs[record.fleet]
        worker = self.worker_type(record, cloud, config, transport, process, faults, fleet.tasks, rng, self.trace)
        worker.on_fault = lambda kind: self.decisions.happened(kind, record.name)
        worker.allow_task_failure = lambda: self.decisions.allow(record.id, "task_fails", record.name)
        steps = self.storm.draw_death(record.id, self.scenario.storm.worker_dies)
        if steps is not None and self.decisions.allow(record.id, "worker_dies_at_await", happens_now=False):
            worker.history.has_fault = True
            process.steps_left, process.on_last_step = steps, worker.die
        self.checker.on_worker_started(record, worker)
        worker.start(lambda: self.faults_ended)
        return worker

    def _make_orchestrator(self, name: str) -> SimulatedOrchestrator:
        rng = self.rng_for(f"orchestrator {name}")

        def open_store(process: SimulatedProcess) -> RemoteStore:
            observer = self._on_orchestrator_call
            return RemoteStore(
                self.store, process, self._control_network, rng, self.trace, observer, decisions=self.decisions
            )

        fleets: dict[str, tuple[FleetConfig, Provider]] = {
            fleet: (fleet_scenario.config, self.make_provider(self.clouds[fleet]))
            for fleet, fleet_scenario in self.scenario.fleets.items()
        }
        orchestrator = SimulatedOrchestrator(
            name, fleets, open_store, self.scenario.ttl_s, rng, self.trace, self.wrap_service, self.versions
        )
        orchestrator.restores_settings = self.restores_settings
        orchestrator.draw_death = self._draw_death
        orchestrator.on_death = self._kill_at_await
        return orchestrator

    def _on_orchestrator_call(self, name: str, arguments: tuple[Any, ...], result: Any) -> None:
        self.checker.on_orchestrator_call(name, arguments, result)
        if name == "commit_plan" and not isinstance(result, Exception):
            plan = arguments[3]
            self.coverage.count_plan(plan)
            if any(isinstance(action, RaiseAlert) and action.code == budget.CODE for action in plan.actions):
                self.decisions.happened("budget_reached")

    def _draw_death(self, process: str) -> int | None:
        steps = self.storm.draw_death(process, self.scenario.storm.orchestrator_dies)
        allowed = steps is not None and self.decisions.allow(process, "orchestrator_dies_at_await", happens_now=False)
        return steps if allowed else None

    def _kill_at_await(self, orchestrator: SimulatedOrchestrator) -> None:
        if self.faults_ended:
            return
        self.decisions.happened("orchestrator_dies_at_await")
        orchestrator.kill()
        delay_s = self.rng_for(f"restart {orchestrator.name} {self.now()}").choice(RESTART_DELAYS_S)
        asyncio.get_running_loop().call_later(delay_s, orchestrator.start)

    def _allow_worker_faults(self, record: MachineRecord, faults: WorkerFaults) -> bool:
        name = next(name for name, is_set in faults.as_kinds().items() if is_set)
        return self.decisions.allow(record.id, name, record.name, happens_now=not faults.is_timed)

    def _count_fault(self, kind: str, worker_id: str | None) -> None:
        self.coverage.count_fault(kind, worker_id, self.store)

    async def reconfigure(self, fleet: str, config: FleetConfig, *, is_rolling: bool = False) -> None:
        """Change the configuration of a fleet, by a reload or by restarting one orchestrator after another.

        While calls of the former configuration may be under way, the larger limit holds.
        """
        largest = max(config.max_workers, self.checker.fleets[fleet].max_workers)
        self.configs[fleet] = config
        self.checker.fleets[fleet] = config.model_copy(update={"max_workers": largest})
        self.checker.changing.add(fleet)
        for orchestrator in self.orchestrators:
            if is_rolling:
                orchestrator.kill()
            orchestrator.reconfigure(fleet, config)
            if is_rolling:
                await asyncio.sleep(5.0)
                orchestrator.start()
        calls_s = self.scenario.ttl_s + 2 * CALL_TIMEOUT_S + self.clouds[fleet].traits.creation_lateness_s
        asyncio.get_running_loop().call_later(calls_s + RELOADED_S, self._end_reload, fleet, config)

    def _end_reload(self, fleet: str, config: FleetConfig) -> None:
        """From now on the limits of the new configuration hold, unless it was changed again."""
        if self.configs[fleet] is config:
            self.checker.fleets[fleet] = config
            self.checker.changing.discard(fleet)

    # ---------------------------------------------------------------------------------------------------- phases

    async def _run(self) -> SimulationReport:
        def on_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            self.trace.errors.append(f"{context.get('message')}: {context.get('exception')!r}")

        track_processes(asyncio.get_running_loop())
        asyncio.get_running_loop().set_exception_handler(on_loop_error)
        self._build()
        self.on_ready(self)
        self.storm.start()
        for fleet in self.scenario.fleets.values():
            start_detached(self._enqueue_tasks(fleet))
        for orchestrator in self.orchestrators:
            orchestrator.start()
            start_detached(self._kill_and_restart(orchestrator))
        start_detached(self._cause_outages())
        start_detached(self._act_as_operator())
        await self._run_until(self.scenario.faults_end_s)
        await self._end_faults()
        faults_ended_at = self.now()
        settled_s = await self._wait_for_none(self._find_leak, faults_ended_at, self.settle_limit_s)
        rested_s = await self._wait_for_none(self._find_unrest, faults_ended_at, REST_LIMIT_S)
        await self._check_rest()
        inexact_bills = await self._audit_costs(faults_ended_at)
        self.coverage.count_events(self.store)
        return SimulationReport(
            trace=self.trace,
            tasks=len(self.checker.tasks),
            machines=sum(len(cloud.machines) for cloud in self.clouds.values()),
            takeovers=self.checker.takeovers,
            late_results=self.checker.late_results,
            most_billed=self.checker.most_billed,
            settled_s=settled_s,
            rested_s=rested_s,
            billed_workers=len(self.checker.recorded_deletions),
            inexact_bills=inexact_bills,
        )

    async def _run_until(self, at: float) -> None:
        while self.now() < at:
            self._raise_violation()
            await asyncio.sleep(min(CHECK_INTERVAL_S, at - self.now()))

    def _raise_violation(self) -> None:
        if self.trace.errors:
            self.report_violation(f"unexpected error logged: {self.trace.errors[0]}")
        if not self.violations and isinstance(self.store, MemoryStores):
            difference = find_task_difference(self.checker.tasks, self.store)
            if difference is not None:
                self.report_violation(difference)
        if self.violations:
            raise InvariantViolation(self.violations[0])

    async def _end_faults(self) -> None:
        """Clear all fault rates, start every orchestrator, and undo what only an operator can undo."""
        await self.storm.wait_for_failover()
        self.trace.add("simulation", "the faults end")
        self.faults_ended = True
        await self.storm.fix_versions()
        self.on_faults_ended()
        self._worker_network.clear()
        self._control_network.clear()
        for cloud in self.clouds.values():
            cloud.rates.clear()
        for name, config in self.configs.items():
            if config.budget_per_hour is not None:
                await self.reconfigure(name, config.model_copy(update={"budget_per_hour": None}))
        for orchestrator in self.orchestrators:
            orchestrator.start()
        for fleet in await self.store.fleets():
            await self.store.pause_fleet(fleet.name, False)
            await self.store.restart_slots(fleet.name)

    @property
    def settle_limit_s(self) -> float:
        """The time after the faults within which machines must equal live rows (promise 4).

        Calls in flight arrive or time out, silent workers are detected, draining workers reach their deadline, and ten
        cycles run.
        """
        limits = []
        for name in self.scenario.fleets:
            traits, config = self.clouds[name].traits, self.configs[name]
            calls_s = self.scenario.ttl_s + 2 * CALL_TIMEOUT_S + traits.creation_lateness_s
            boot_s = boot_limit(config, BootTimes()).total_s
            silence_s = 3 * config.heartbeat_timeout_s + 4 * traits.absence_grace_s + boot_s
            limits.append(
                calls_s + silence_s + traits.orphan_grace_s + config.stop_timeout_s + 10 * config.poll_interval_s
            )
        return max(limits)

    async def _wait_for_none(
        self, find_problem: Callable[[], Awaitable[str | None]], since: float, limit_s: float
    ) -> float:
        """Wait until two checks in a row find no problem. Returns the time it took."""
        clean_checks = 0
        problem = None
        while self.now() < since + limit_s:
            self._raise_violation()
            problem = await find_problem()
            clean_checks = clean_checks + 1 if problem is None else 0
            if clean_checks == 2:
                return self.now() - since
            await asyncio.sleep(CHECK_INTERVAL_S)
        self.report_violation(f"{problem}, {limit_s:.0f} s after the faults ended")
        raise InvariantViolation(self.violations[0])

    async def _find_leak(self) -> str | None:
        workers = [worker for worker in await self.store.workers() if worker.slot is not None]
        rows = {(worker.fleet, worker.id) for worker in workers}
        # Held for an hour if most machines are orphaned. At rest there is no hold.
        held = {fleet.name for fleet in await self.store.fleets() if fleet.hold and fleet.hold.code == TOO_MANY_ORPHANS}
        for name, cloud in self.clouds.items():
            if name in held:
                continue
            billed = cloud.billed_machines()
            for record in billed:
                if (name, record.name) not in rows:
                    return f"promise 4 broken: machine {record.id} of {record.name} is billed without a live worker"
            with_machine = {record.name for record in billed}
            if len(with_machine) < len(billed):
                return f"promise 4 broken: fleet {name} has {len(billed)} machines for {len(with_machine)} workers"
            for worker in workers:
                if (
                    worker.fleet == name
                    and worker.id not in with_machine
                    and worker.status is not WorkerStatus.SPAWNING
                ):
                    return f"promise 4 broken: worker {worker.id} is {worker.status} without a machine"
        return None

    async def _find_unrest(self) -> str | None:
        unfinished = self.checker.unfinished_tasks()
        if unfinished:
            return f"promise 1 broken: {len(unfinished)} tasks are not finished, such as {unfinished[:10]}"
        for name, cloud in self.clouds.items():
            config, billed = self.configs[name], len(cloud.billed_machines())
            buffer = config.idle_buffer if config.policy == "buffered" else 0
            needed = min(max(config.min_workers, buffer), config.max_workers)
            if billed != needed:
                return f"promise 9 broken: fleet {name} has {billed} billed machines at rest, {needed} needed"
        for fleet in await self.store.fleets():
            if fleet.rollout is not None and fleet.rollout.is_running:
                return f"promise 9 broken: fleet {fleet.name} still rolls out version {fleet.rollout.target}"
        for worker in await self.store.workers():
            # A worker that is still spawning may never become active, and be replaced.
            if worker.status is not WorkerStatus.ACTIVE:
                return f"promise 9 broken: worker {worker.id} is {worker.status} at rest"
            # A worker that was frozen when the faults ended may be failed, and replaced.
            max_age_s = MAX_HEARTBEAT_AGE_INTERVALS * self.configs[worker.fleet].heartbeat_interval_s
            if (
                worker.last_heartbeat is None
                or self.database_now() - timedelta(seconds=max_age_s) > worker.last_heartbeat
            ):
                return f"promise 9 broken: worker {worker.id} sent no heartbeat for {max_age_s:g} s"
        return await self._find_leak()

    async def _check_rest(self) -> None:
        """At rest no machine is created or deleted. Calls that began before may take up to CALL_TIMEOUT_S.

        A worker on which several tasks failed before, without proof that it is at fault, may still be replaced as a
        trial (policy/quarantine.py). Then the fleet must come to rest again.
        """
        quarantined = len(self.checker.quarantined)
        await self._run_until(self.now() + CALL_TIMEOUT_S)
        before = [(cloud.create_calls, cloud.delete_calls) for cloud in self.clouds.values()]
        slowest_s = max(fleet.config.poll_interval_s for fleet in self.scenario.fleets.values())
        await self._run_until(self.now() + CYCLES_AT_REST * slowest_s)
        after = [(cloud.create_calls, cloud.delete_calls) for cloud in self.clouds.values()]
        if before != after and len(self.checker.quarantined) > quarantined:
            await self._wait_for_none(self._find_unrest, self.now(), REST_LIMIT_S)
            await self._check_rest()
        elif before != after:
            self.report_violation(
                f"promise 9 broken: machines created or deleted at rest, calls per fleet from {before} to {after}"
            )
        self._raise_violation()

    async def _audit_costs(self, faults_ended_at: float) -> int:
        """Compare our ledger with the clouds' bills. Returns the number of inexact bills."""

        async def find_open_account() -> str | None:
            accounts = await self.store.open_accounts()
            ended = [account.worker_id for account in accounts if account.bill.until is not None]
            return f"billing rule broken: the costs of {ended[:5]} are not settled" if ended else None

        billed = [name for name, cloud in self.clouds.items() if cloud.price_micros_per_hour is not None]
        if not billed or not self.scenario.is_ledger_exact:
            return 0
        await self._wait_for_none(find_open_account, self.now(), SETTLE_COSTS_LIMIT_S)
        ledger = {cost.key: cost.total_micros for cost in await self.store.costs("worker", EPOCH, limit=MAX_WORKERS)}
        # Calls that were in flight when the faults ended have ended after settle_limit_s.
        inexact = sum(self.checker.audit(name, ledger, faults_ended_at + self.settle_limit_s) for name in billed)
        for account in await self.store.open_accounts():
            self.checker.audit_open_account(account.bill, account.worker_id, account.fleet, ledger)
        self._raise_violation()
        return inexact

    # ---------------------------------------------------------------------------------------------------- events

    async def _enqueue_tasks(self, fleet: FleetScenario) -> None:
        for at, count in fleet.arrivals:
            await asyncio.sleep(max(0.0, at - self.now()))
            if self.faults_ended:
                return  # a shrunk run, whose faults end before the last arrival
            if not self.decisions.allow("producer", f"tasks_{fleet.config.queues[0]}"):
                continue
            for _ in range(count):
                task_id = await self.store.enqueue(NewTask(fleet.config.queues[0], max_attempts=fleet.max_attempts))
                self.checker.tasks[task_id] = TaskRecord()
            self.trace.add("producer", f"{count} tasks for {fleet.config.queues[0]}")

    async def _kill_and_restart(self, orchestrator: SimulatedOrchestrator) -> None:
        every_s = self.scenario.killed_every_s
        while every_s > 0:
            await asyncio.sleep(self._rng.expovariate(1 / every_s))
            if self.faults_ended:
                return
            down_s = self._rng.choice([0.0, 1.0, 30.0])
            if self.decisions.allow(orchestrator.name, "orchestrator_killed"):
                orchestrator.kill()
                await asyncio.sleep(down_s)
                orchestrator.start()

    async def _cause_outages(self) -> None:
        every_s = self.scenario.outage_every_s
        while every_s > 0:
            await asyncio.sleep(self._rng.expovariate(1 / every_s))
            if self.faults_ended:
                return
            down_s = self._rng.uniform(1.0, self.scenario.outage_s)
            if not self.decisions.allow("database", "outage"):
                continue
            self.trace.add("database", "unavailable")
            self.set_database_down(True)
            await asyncio.sleep(down_s)
            self.set_database_down(False)
            self.trace.add("database", "available")

    async def _act_as_operator(self) -> None:
        rng, every_s = self._rng, self.scenario.operator_every_s
        while every_s > 0:
            await asyncio.sleep(rng.expovariate(1 / every_s))
            if self.faults_ended:
                return
            fleet = rng.choice(list(self.clouds))
            if fleet not in [row.name for row in await self.store.fleets()]:
                continue
            command = rng.choice(["pause", "resume", "spawn", "restart", "drain", "terminate"])
            workers = [worker.id for worker in await self.store.workers() if worker.fleet == fleet]
            if not self.decisions.allow("operator", f"operator_{command}"):
                continue
            self.trace.add("operator", f"{command} {fleet}")
            match command:
                case "pause":
                    await self.store.pause_fleet(fleet, True)
                case "resume":
                    await self.store.pause_fleet(fleet, False)
                case "spawn":
                    await self.store.request_workers(fleet, rng.randint(1, 3))
                case "restart":
                    await self.store.restart_slots(fleet)
                case "drain" if workers:
                    await self.drain_worker(rng.choice(workers))
                case "terminate" if workers:
                    chosen = rng.choice(workers)
                    self.checker.terminated_by_operator.add(chosen)
                    await self.store.terminate_worker(chosen, "by operator")
                case _:
                    pass
