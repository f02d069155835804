"""A world from a scenario: store, clouds, workers, orchestrators, producers and a person; faults, then calm, then rest.

`World(scenario).run()` lives through it and returns a Report, or raises Broken with the story and how to see it again.
What a store or a provider is made of is decided by the two functions that make them: the in-memory store and the
simulated cloud are only the usual choice.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from windlass.control.executor import CALL_TIMEOUT_S
from windlass.model.fleet import FleetConfig
from windlass.model.task import NewTask
from windlass.model.worker import WorkerStatus
from windlass.ports.provider import Provider
from windlass.simulator.cloud import MachineRecord, SimulatedCloud
from windlass.simulator.invariants import InvariantChecker, InvariantViolation
from windlass.simulator.loop import EPOCH, run, to_datetime, virtual_now
from windlass.simulator.network import NetworkFaults, RemoteStore
from windlass.simulator.orchestrators import SimulatedOrchestrator, Wrap
from windlass.simulator.processes import SimulatedProcess, start_detached, track_processes
from windlass.simulator.scenario import FleetScenario, Scenario
from windlass.simulator.trace import Trace
from windlass.simulator.workers import SimulatedWorker, WorkerFaults
from windlass.store.memory.stores import MemoryStores

# From the end of all faults until everything is at rest: all tasks done, fleets at their minimum. Long, since a fleet
# whose machines all failed may be held for up to an hour before it tries again.
REST_LIMIT_S = 4 * 3600.0
# Of a worker at rest, the longest silence.
SILENT_BEATS = 2
LOOKS_EVERY_S = 5.0
CYCLES_AT_REST = 10
# From rest until the last account is closed: a minute of patience and a few cycles.
BOOKS_LIMIT_S = 600.0
MAX_WORKERS = 100_000
# Of a worker's calls, those that take no time at all and cost little to simulate.
STRAIGHT_SHARE = 0.8

MakeStore = Callable[[Random], Any]
MakeProvider = Callable[[SimulatedCloud], Provider]


def memory_store(rng: Random) -> MemoryStores:
    return MemoryStores(virtual_now, chance=rng)


@dataclass(slots=True)
class SimulationReport:
    """How a run went."""

    trace: Trace
    tasks: int
    machines: int
    takeovers: int
    late_results: int
    most_billed: dict[str, int]
    settled_s: float
    rested_s: float
    # Workers that were paid for, and those of them whose end nobody told us.
    paid: int = 0
    guessed: int = 0


@dataclass(slots=True)
class Simulation:
    scenario: Scenario
    make_store: MakeStore = memory_store
    # What orchestrators are given instead of the bare cloud.
    make_provider: MakeProvider = lambda cloud: cloud
    wrap: Wrap = lambda _, service: service
    # Told when everything stands, before anything moves: tests script faults here.
    on_ready: Callable[["Simulation"], None] = lambda _: None
    on_faults_ended: Callable[[], None] = lambda: None

    trace: Trace = field(init=False)
    checker: InvariantChecker = field(init=False)
    store: Any = field(init=False)
    clouds: dict[str, SimulatedCloud] = field(init=False)
    orchestrators: list[SimulatedOrchestrator] = field(init=False)
    worker_network: NetworkFaults = field(init=False)
    control_network: NetworkFaults = field(init=False)
    faults_ended: bool = field(init=False, default=False)
    scripted_faults: deque[WorkerFaults] = field(init=False, default_factory=deque)
    _rng: Random = field(init=False)
    _broken: list[str] = field(init=False, default_factory=list)

    def run(self) -> SimulationReport:
        """Live through it. Raises Broken, with its story."""
        self.trace = Trace()
        try:
            with self.trace.with_logs():
                return run(self._live())
        except Exception as error:
            why = self._broken[0] if self._broken else f"{type(error).__name__}: {error}"
            raise InvariantViolation(self.failure_report(why)) from error

    def failure_report(self, why: str) -> str:
        seed = f"{self.scenario.seed}{' --paid' if self.scenario.is_billed else ''}"
        return f"{why}\n\n{self.trace.text()}\n\n{why}\nreplay: python -m windlass.simulator --seed {seed}\n"

    def next_worker(self, **faults: Any) -> None:
        """Script the luck of the next worker that moves in: `world.next_worker(never_joins=True)`."""
        self.scripted_faults.append(WorkerFaults(**faults))

    async def drain_worker(self, worker_id: str) -> None:
        """A person lets a worker go: it may finish what it has."""
        self.checker.draining_since.setdefault(worker_id, self.now())
        await self.store.set_terminating([worker_id], "by hand")

    def at(self, at_s: float, action: Callable[[], Awaitable[None]]) -> None:
        """Do this at that time; an error in it ends the run."""
        start_detached(self._perform(at_s, action))

    async def _perform(self, at_s: float, action: Callable[[], Awaitable[None]]) -> None:
        await asyncio.sleep(max(0.0, at_s - self.now()))
        try:
            await action()
        except Exception as error:
            self.report_violation(f"{type(error).__name__}: {error}")

    # -------------------------------------------------------------------------------------------------- building

    def _build(self) -> None:
        scenario = self.scenario
        self._rng = self._rng_for("world")
        self.worker_network, self.control_network = replace(scenario.worker_network), replace(scenario.control_network)
        self.store = self.make_store(self._rng_for("store"))
        self.checker = InvariantChecker(
            {name: fleet_scenario.config for name, fleet_scenario in scenario.fleets.items()},
            on_violation=self.report_violation,
        )
        self.clouds = self.checker.clouds = {
            name: self._make_cloud(name, fleet_scenario) for name, fleet_scenario in scenario.fleets.items()
        }
        self.orchestrators = [self._make_orchestrator(f"o{number}") for number in range(scenario.orchestrators)]

    def _rng_for(self, purpose: str) -> Random:
        """Everybody has their own, so that one who asks more often does not change everybody's luck."""
        return Random(f"{self.scenario.seed} {purpose}")  # noqa: S311

    def _make_cloud(self, name: str, fleet_scenario: FleetScenario) -> SimulatedCloud:
        cloud = SimulatedCloud(
            name,
            self._rng_for(f"cloud {name}"),
            self.trace,
            max_list_age_s=fleet_scenario.max_list_age_s,
            max_creation_delay_s=fleet_scenario.max_creation_delay_s,
            price_micros_per_hour=fleet_scenario.price_micros_per_hour,
            price_micros_per_month=fleet_scenario.price_micros_per_month,
            billing_unit_s=fleet_scenario.billing_unit_s,
            rates=replace(fleet_scenario.rates),
        )
        cloud.on_created, cloud.on_delete_requested = self.checker.on_machine_created, self.checker.on_delete_requested
        cloud.start_worker = lambda entry: self._start_worker(cloud, fleet_scenario, entry)
        return cloud

    def _start_worker(
        self, cloud: SimulatedCloud, fleet_scenario: FleetScenario, entry: MachineRecord
    ) -> SimulatedWorker:
        rng = self._rng_for(f"worker {entry.id}")
        faults = (
            WorkerFaults(boots_s=rng.uniform(1.0, 15.0))
            if self.faults_ended
            else fleet_scenario.worker_faults.draw(rng, fleet_scenario.config)
        )
        if self.scripted_faults:
            faults = self.scripted_faults.popleft()
        if faults != WorkerFaults(boots_s=faults.boots_s):
            self.trace.add(entry.name, f"has bad luck: {faults}")
        process = SimulatedProcess(entry.name)
        seen = RemoteStore(
            self.store,
            process,
            self.worker_network,
            rng,
            self.trace,
            self.checker.on_worker_call,
            straight=STRAIGHT_SHARE,
        )
        worker = SimulatedWorker(
            entry, cloud, fleet_scenario.config, seen, process, faults, fleet_scenario.tasks, rng, self.trace
        )
        self.checker.on_worker_started(entry, worker)
        worker.start(lambda: self.faults_ended)
        return worker

    def _make_orchestrator(self, name: str) -> SimulatedOrchestrator:
        rng = self._rng_for(f"orchestrator {name}")

        def open_store(process: SimulatedProcess) -> RemoteStore:
            return RemoteStore(
                self.store, process, self.control_network, rng, self.trace, self.checker.on_orchestrator_call
            )

        fleets: dict[str, tuple[FleetConfig, Provider]] = {
            fleet: (fleet_scenario.config, self.make_provider(self.clouds[fleet]))
            for fleet, fleet_scenario in self.scenario.fleets.items()
        }
        return SimulatedOrchestrator(name, fleets, open_store, self.scenario.ttl_s, rng, self.trace, self.wrap)

    # ---------------------------------------------------------------------------------------------------- living

    async def _live(self) -> SimulationReport:
        track_processes(asyncio.get_running_loop())
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        self._build()
        self.on_ready(self)
        for fleet_scenario in self.scenario.fleets.values():
            start_detached(self._enqueue_tasks(fleet_scenario))
        for orchestrator in self.orchestrators:
            orchestrator.start()
            start_detached(self._kill_and_restart(orchestrator))
        start_detached(self._cause_outages())
        start_detached(self._act_as_operator())
        await self._until(self.scenario.faults_end_s)
        await self._end_faults()
        faults_ended_at = self.now()
        settled_s = await self._wait_for("nothing leaked", self._find_leak, faults_ended_at, self.settle_limit_s)
        rested_s = await self._wait_for("rest", self._find_unrest, faults_ended_at, REST_LIMIT_S)
        await self._check_rest()
        guessed = await self._audit_costs(faults_ended_at)
        return SimulationReport(
            trace=self.trace,
            tasks=len(self.checker.tasks),
            machines=sum(len(cloud.machines) for cloud in self.clouds.values()),
            takeovers=self.checker.takeovers,
            late_results=self.checker.late_results,
            most_billed=self.checker.most_billed,
            settled_s=settled_s,
            rested_s=rested_s,
            paid=len(self.checker.ended_at),
            guessed=guessed,
        )

    async def _until(self, at: float) -> None:
        while self.now() < at:
            self._check()
            await asyncio.sleep(min(LOOKS_EVERY_S, at - self.now()))

    async def _end_faults(self) -> None:
        """From here on everything works, and a person has put right what only a person can."""
        self.trace.add("world", "the faults end")
        self.faults_ended = True
        self.on_faults_ended()
        self.worker_network.clear()
        self.control_network.clear()
        for cloud in self.clouds.values():
            cloud.rates.clear()
        for orchestrator in self.orchestrators:
            orchestrator.start()
        for fleet in await self.store.fleets():
            await self.store.pause_fleet(fleet.name, False)
            await self.store.restart_slots(fleet.name)

    @property
    def settle_limit_s(self) -> float:
        """Within this time after the faults, every machine has a row and every row that claims one has its machine:
        what was sent has arrived, what was never answered is given up, who is silent is found out, who drains has had
        its time, and then ten cycles."""
        limits = []
        for name, fleet_scenario in self.scenario.fleets.items():
            traits, config = self.clouds[name].traits, fleet_scenario.config
            answers_s = self.scenario.ttl_s + 2 * CALL_TIMEOUT_S + traits.creation_lateness_s
            silence_s = 3 * config.heartbeat_timeout_s + 4 * traits.absence_grace_s + config.spawn_timeout_s
            limits.append(
                answers_s + silence_s + traits.orphan_grace_s + config.stop_timeout_s + 10 * config.poll_interval_s
            )
        return max(limits)

    async def _wait_for(self, what: str, trouble: Callable[[], Any], since: float, limit_s: float) -> float:
        """Wait until there is no trouble, twice in a row. Returns how long it took."""
        quiet = 0
        problem = None
        while self.now() < since + limit_s:
            self._check()
            problem = await trouble()
            quiet = quiet + 1 if problem is None else 0
            if quiet == 2:
                return self.now() - since
            await asyncio.sleep(LOOKS_EVERY_S)
        self.report_violation(f"{what} was not reached within {limit_s:.0f} s after the faults: {problem}")
        raise InvariantViolation(self._broken[0])

    async def _check_rest(self) -> None:
        """Where nothing changes, nothing is done; but a call that was begun in trouble may go on for its time."""
        await self._until(self.now() + CALL_TIMEOUT_S)
        calls = [(cloud.create_calls, cloud.delete_calls) for cloud in self.clouds.values()]
        slowest_s = max(fleet_scenario.config.poll_interval_s for fleet_scenario in self.scenario.fleets.values())
        await self._until(self.now() + CYCLES_AT_REST * slowest_s)
        if calls != [(cloud.create_calls, cloud.delete_calls) for cloud in self.clouds.values()]:
            self.report_violation("machines were created or deleted when everything was at rest")
        self._check()

    async def _audit_costs(self, faults_ended_at: float) -> int:
        """Wait until everybody who has ended is settled, and compare. Returns how many ends had to be guessed."""

        async def unsettled() -> str | None:
            owing = [
                account.worker_id for account in await self.store.open_accounts() if account.bill.until is not None
            ]
            return f"the accounts of {owing[:5]} are open" if owing else None

        paid = [name for name, cloud in self.clouds.items() if cloud.price_micros_per_hour is not None]
        if not paid:
            return 0
        await self._wait_for("closed books", unsettled, self.now(), BOOKS_LIMIT_S)
        ours = {cost.key: cost.total_micros for cost in await self.store.costs("worker", EPOCH, limit=MAX_WORKERS)}
        # What was under way when it became calm has ended by then.
        guessed = [self.checker.audit(name, ours, faults_ended_at + self.settle_limit_s) for name in paid]
        for account in await self.store.open_accounts():
            self.checker.audit_living(account.bill, account.worker_id, account.fleet, ours)
        self._check()
        return sum(map(len, guessed))

    async def _find_leak(self) -> str | None:
        workers = [worker for worker in await self.store.workers() if worker.slot is not None]
        rows = {(worker.fleet, worker.id) for worker in workers}
        for name, cloud in self.clouds.items():
            billed = cloud.billed_machines()
            for entry in billed:
                if (name, entry.name) not in rows:
                    return f"{entry.id} of {entry.name} is billed and no live worker has it"
            if len({entry.name for entry in billed}) < len(billed):
                return f"there are doubles in {name}"
            there = {entry.name for entry in billed}
            for worker in workers:
                if worker.fleet == name and worker.id not in there and worker.status is not WorkerStatus.SPAWNING:
                    return f"{worker.id} is {worker.status} and has no machine"
        return None

    async def _find_unrest(self) -> str | None:
        unfinished = self.checker.unfinished_tasks()
        if unfinished:
            return f"tasks {unfinished[:10]} are not finished"
        for name, cloud in self.clouds.items():
            config, billed = self.scenario.fleets[name].config, len(cloud.billed_machines())
            if billed != _resting_size(config):
                return f"{billed} machines of {name} are billed, {_resting_size(config)} would do"
        for worker in await self.store.workers():
            # One that is still starting may never come, and be replaced.
            if worker.status is not WorkerStatus.ACTIVE:
                return f"{worker.id} is {worker.status}"
            # One that stood still when the faults ended may be missed, and replaced.
            patience_s = SILENT_BEATS * self.scenario.fleets[worker.fleet].config.heartbeat_interval_s
            if worker.last_heartbeat is None or to_datetime(self.now() - patience_s) > worker.last_heartbeat:
                return f"{worker.id} is silent"
        return await self._find_leak()

    def report_violation(self, what: str) -> None:
        self._broken.append(what)
        self.trace.end(f"a promise is broken: {what}")

    def _on_loop_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.trace.errors.append(f"{context.get('message')}: {context.get('exception')!r}")

    def _check(self) -> None:
        if self.trace.errors:
            self.report_violation(f"an error nobody foresaw: {self.trace.errors[0]}")
        if self._broken:
            raise InvariantViolation(self._broken[0])

    # ---------------------------------------------------------------------------------------------------- troubles

    async def _enqueue_tasks(self, fleet_scenario: FleetScenario) -> None:
        for at, count in fleet_scenario.arrivals:
            await asyncio.sleep(max(0.0, at - self.now()))
            for _ in range(count):
                task_id = await self.store.enqueue(
                    NewTask(fleet_scenario.config.queues[0], max_attempts=fleet_scenario.max_attempts)
                )
                self.checker.enqueued(task_id)
            self.trace.add("producer", f"{count} tasks for {fleet_scenario.config.queues[0]}")

    async def _kill_and_restart(self, orchestrator: SimulatedOrchestrator) -> None:
        every_s = self.scenario.killed_every_s
        while every_s > 0:
            await asyncio.sleep(self._rng.expovariate(1 / every_s))
            if self.faults_ended:
                return
            orchestrator.kill()
            await asyncio.sleep(self._rng.choice([0.0, 1.0, 30.0]))
            orchestrator.start()

    async def _cause_outages(self) -> None:
        every_s = self.scenario.outage_every_s
        while every_s > 0:
            await asyncio.sleep(self._rng.expovariate(1 / every_s))
            if self.faults_ended:
                return
            self.trace.add("world", "the database is away")
            self.set_database_down(True)
            await asyncio.sleep(self._rng.uniform(1.0, self.scenario.outage_s))
            self.set_database_down(False)
            self.trace.add("world", "the database is back")

    def set_database_down(self, is_down: bool) -> None:
        self.worker_network.is_down = self.control_network.is_down = is_down

    async def _act_as_operator(self) -> None:
        every_s = self.scenario.operator_every_s
        while every_s > 0:
            await asyncio.sleep(self._rng.expovariate(1 / every_s))
            if self.faults_ended:
                return
            fleet = self._rng.choice(list(self.clouds))
            known = [row.name for row in await self.store.fleets()]
            if fleet in known:
                await self._do_by_hand(fleet)

    async def _do_by_hand(self, fleet: str) -> None:
        rng = self._rng
        action = rng.choice(["pause", "resume", "ask", "restart", "end", "end at once"])
        workers = [worker.id for worker in await self.store.workers() if worker.fleet == fleet]
        self.trace.add("person", f"{action} {fleet}")
        match action:
            case "pause":
                await self.store.pause_fleet(fleet, True)
            case "resume":
                await self.store.pause_fleet(fleet, False)
            case "ask":
                await self.store.request_workers(fleet, rng.randint(1, 3))
            case "restart":
                await self.store.restart_slots(fleet)
            case "end" if workers:
                chosen = rng.choice(workers)
                await self.drain_worker(chosen)
            case "end at once" if workers:
                chosen = rng.choice(workers)
                self.checker.terminated_by_operator.add(chosen)
                await self.store.terminate_worker(chosen, "by hand")
            case _:
                pass

    def now(self) -> float:
        return asyncio.get_running_loop().time()


def _resting_size(config: FleetConfig) -> int:
    """How many workers a fleet keeps when there is nothing to do."""
    buffer = config.idle_buffer if config.policy == "buffered" else 0
    return min(max(config.min_workers, buffer), config.max_workers)
