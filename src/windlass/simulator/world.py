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
from windlass.simulator.cloud import Entry, SimulatedCloud
from windlass.simulator.invariants import InvariantChecker, InvariantViolation
from windlass.simulator.loop import EPOCH, moment, run, virtual_now
from windlass.simulator.network import NetworkFaults, Remote
from windlass.simulator.orchestrators import SimOrchestrator, Wrap
from windlass.simulator.processes import SimulatedProcess, start_outside, track_processes
from windlass.simulator.scenario import Scenario, Surroundings
from windlass.simulator.trace import Trace
from windlass.simulator.workers import SimWorker, WorkerFaults
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

    story: Trace
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
class World:
    scenario: Scenario
    make_store: MakeStore = memory_store
    # What orchestrators are given instead of the bare cloud.
    make_provider: MakeProvider = lambda cloud: cloud
    wrap: Wrap = lambda _, service: service
    # Told when everything stands, before anything moves: tests script faults here.
    on_ready: Callable[["World"], None] = lambda _: None
    on_calm: Callable[[], None] = lambda: None

    story: Trace = field(init=False)
    watch: InvariantChecker = field(init=False)
    store: Any = field(init=False)
    clouds: dict[str, SimulatedCloud] = field(init=False)
    orchestrators: list[SimOrchestrator] = field(init=False)
    weather: NetworkFaults = field(init=False)
    control_weather: NetworkFaults = field(init=False)
    is_calm: bool = field(init=False, default=False)
    _next_lucks: deque[WorkerFaults] = field(init=False, default_factory=deque)
    _rng: Random = field(init=False)
    _broken: list[str] = field(init=False, default_factory=list)

    def run(self) -> SimulationReport:
        """Live through it. Raises Broken, with its story."""
        self.story = Trace()
        try:
            with self.story.with_logs():
                return run(self._live())
        except Exception as error:
            why = self._broken[0] if self._broken else f"{type(error).__name__}: {error}"
            raise InvariantViolation(self.tell(why)) from error

    def tell(self, why: str) -> str:
        seed = f"{self.scenario.seed}{' --paid' if self.scenario.is_paid else ''}"
        return f"{why}\n\n{self.story.text()}\n\n{why}\nreplay: python -m windlass.simulator --seed {seed}\n"

    def next_worker(self, **luck: Any) -> None:
        """Script the luck of the next worker that moves in: `world.next_worker(never_joins=True)`."""
        self._next_lucks.append(WorkerFaults(**luck))

    async def end_by_hand(self, worker_id: str) -> None:
        """A person lets a worker go: it may finish what it has."""
        self.watch.told_to_end_at.setdefault(worker_id, self._now())
        await self.store.set_terminating([worker_id], "by hand")

    def at(self, at_s: float, action_label: Callable[[], Awaitable[None]]) -> None:
        """Do this at that time; an error in it ends the run."""
        start_outside(self._perform(at_s, action_label))

    async def _perform(self, at_s: float, action_label: Callable[[], Awaitable[None]]) -> None:
        await asyncio.sleep(max(0.0, at_s - self._now()))
        try:
            await action_label()
        except Exception as error:
            self._break(f"{type(error).__name__}: {error}")

    # -------------------------------------------------------------------------------------------------- building

    def _build(self) -> None:
        scenario = self.scenario
        self._rng = self._chance("world")
        self.weather, self.control_weather = replace(scenario.weather), replace(scenario.control_weather)
        self.store = self.make_store(self._chance("store"))
        self.watch = InvariantChecker(
            {name: around.config for name, around in scenario.fleets.items()}, on_broken=self._break
        )
        self.clouds = self.watch.clouds = {name: self._cloud(name, around) for name, around in scenario.fleets.items()}
        self.orchestrators = [self._orchestrator(f"o{number}") for number in range(scenario.orchestrators)]

    def _chance(self, purpose: str) -> Random:
        """Everybody has their own, so that one who asks more often does not change everybody's luck."""
        return Random(f"{self.scenario.seed} {purpose}")  # noqa: S311

    def _cloud(self, name: str, around: Surroundings) -> SimulatedCloud:
        cloud = SimulatedCloud(
            name,
            self._chance(f"cloud {name}"),
            self.story,
            max_list_age_s=around.max_list_age_s,
            max_late_s=around.max_late_s,
            price_micros_per_hour=around.price_micros_per_hour,
            price_micros_per_month=around.price_micros_per_month,
            billing_unit_s=around.billing_unit_s,
            rates=replace(around.rates),
        )
        cloud.on_begun, cloud.on_ending = self.watch.machine_begins, self.watch.machine_ends
        cloud.move_in = lambda entry: self._move_in(cloud, around, entry)
        return cloud

    def _move_in(self, cloud: SimulatedCloud, around: Surroundings, entry: Entry) -> SimWorker:
        rng = self._chance(f"worker {entry.id}")
        luck = WorkerFaults(boots_s=rng.uniform(1.0, 15.0)) if self.is_calm else around.lucks.draw(rng, around.config)
        if self._next_lucks:
            luck = self._next_lucks.popleft()
        if luck != WorkerFaults(boots_s=luck.boots_s):
            self.story.tell(entry.name, f"has bad luck: {luck}")
        process = SimulatedProcess(entry.name)
        seen = Remote(
            self.store, process, self.weather, rng, self.story, self.watch.of_workers, straight=STRAIGHT_SHARE
        )
        worker = SimWorker(entry, cloud, around.config, seen, process, luck, around.habits, rng, self.story)
        self.watch.moved_in(entry, worker)
        worker.start(lambda: self.is_calm)
        return worker

    def _orchestrator(self, name: str) -> SimOrchestrator:
        rng = self._chance(f"orchestrator {name}")

        def open_store(process: SimulatedProcess) -> Remote:
            return Remote(self.store, process, self.control_weather, rng, self.story, self.watch.of_orchestrators)

        fleets: dict[str, tuple[FleetConfig, Provider]] = {
            fleet: (around.config, self.make_provider(self.clouds[fleet]))
            for fleet, around in self.scenario.fleets.items()
        }
        return SimOrchestrator(name, fleets, open_store, self.scenario.ttl_s, rng, self.story, self.wrap)

    # ---------------------------------------------------------------------------------------------------- living

    async def _live(self) -> SimulationReport:
        track_processes(asyncio.get_running_loop())
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        self._build()
        self.on_ready(self)
        for around in self.scenario.fleets.values():
            start_outside(self._produce(around))
        for orchestrator in self.orchestrators:
            orchestrator.start()
            start_outside(self._endanger(orchestrator))
        start_outside(self._bring_outages())
        start_outside(self._interfere())
        await self._until(self.scenario.faults_end_s)
        await self._calm_down()
        calm_at = self._now()
        settled_s = await self._come_to("nothing leaked", self._leaked, calm_at, self.settle_limit_s)
        rested_s = await self._come_to("rest", self._restless, calm_at, REST_LIMIT_S)
        await self._stay_at_rest()
        guessed = await self._close_the_books(calm_at)
        return SimulationReport(
            story=self.story,
            tasks=len(self.watch.tasks),
            machines=sum(len(cloud.books) for cloud in self.clouds.values()),
            takeovers=self.watch.takeovers,
            late_results=self.watch.late_results,
            most_billed=self.watch.most_billed,
            settled_s=settled_s,
            rested_s=rested_s,
            paid=len(self.watch.ended_at),
            guessed=guessed,
        )

    async def _until(self, at: float) -> None:
        while self._now() < at:
            self._check()
            await asyncio.sleep(min(LOOKS_EVERY_S, at - self._now()))

    async def _calm_down(self) -> None:
        """From here on everything works, and a person has put right what only a person can."""
        self.story.tell("world", "the faults end")
        self.is_calm = True
        self.on_calm()
        self.weather.clear_up()
        self.control_weather.clear_up()
        for cloud in self.clouds.values():
            cloud.rates.clear_up()
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
        for name, around in self.scenario.fleets.items():
            traits, config = self.clouds[name].traits, around.config
            answers_s = self.scenario.ttl_s + 2 * CALL_TIMEOUT_S + traits.creation_lateness_s
            silence_s = 3 * config.heartbeat_timeout_s + 4 * traits.absence_grace_s + config.spawn_timeout_s
            limits.append(
                answers_s + silence_s + traits.orphan_grace_s + config.stop_timeout_s + 10 * config.poll_interval_s
            )
        return max(limits)

    async def _come_to(self, what: str, trouble: Callable[[], Any], since: float, limit_s: float) -> float:
        """Wait until there is no trouble, twice in a row. Returns how long it took."""
        quiet = 0
        problem = None
        while self._now() < since + limit_s:
            self._check()
            problem = await trouble()
            quiet = quiet + 1 if problem is None else 0
            if quiet == 2:
                return self._now() - since
            await asyncio.sleep(LOOKS_EVERY_S)
        self._break(f"{what} was not reached within {limit_s:.0f} s after the faults: {problem}")
        raise InvariantViolation(self._broken[0])

    async def _stay_at_rest(self) -> None:
        """Where nothing changes, nothing is done; but a call that was begun in trouble may go on for its time."""
        await self._until(self._now() + CALL_TIMEOUT_S)
        calls = [(cloud.created_calls, cloud.deleted_calls) for cloud in self.clouds.values()]
        slowest_s = max(around.config.poll_interval_s for around in self.scenario.fleets.values())
        await self._until(self._now() + CYCLES_AT_REST * slowest_s)
        if calls != [(cloud.created_calls, cloud.deleted_calls) for cloud in self.clouds.values()]:
            self._break("machines were created or deleted when everything was at rest")
        self._check()

    async def _close_the_books(self, calm_at: float) -> int:
        """Wait until everybody who has ended is settled, and compare. Returns how many ends had to be guessed."""

        async def unsettled() -> str | None:
            owing = [
                account.worker_id for account in await self.store.open_accounts() if account.bill.until is not None
            ]
            return f"the accounts of {owing[:5]} are open" if owing else None

        paid = [name for name, cloud in self.clouds.items() if cloud.price_micros_per_hour is not None]
        if not paid:
            return 0
        await self._come_to("closed books", unsettled, self._now(), BOOKS_LIMIT_S)
        ours = {cost.key: cost.total_micros for cost in await self.store.costs("worker", EPOCH, limit=MAX_WORKERS)}
        # What was under way when it became calm has ended by then.
        guessed = [self.watch.audit(name, ours, calm_at + self.settle_limit_s) for name in paid]
        for account in await self.store.open_accounts():
            self.watch.audit_living(account.bill, account.worker_id, account.fleet, ours)
        self._check()
        return sum(map(len, guessed))

    async def _leaked(self) -> str | None:
        workers = [worker for worker in await self.store.workers() if worker.slot is not None]
        rows = {(worker.fleet, worker.id) for worker in workers}
        for name, cloud in self.clouds.items():
            billed = cloud.billed()
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

    async def _restless(self) -> str | None:
        unfinished = self.watch.unfinished()
        if unfinished:
            return f"tasks {unfinished[:10]} are not finished"
        for name, cloud in self.clouds.items():
            config, billed = self.scenario.fleets[name].config, len(cloud.billed())
            if billed != _resting_size(config):
                return f"{billed} machines of {name} are billed, {_resting_size(config)} would do"
        for worker in await self.store.workers():
            # One that is still starting may never come, and be replaced.
            if worker.status is not WorkerStatus.ACTIVE:
                return f"{worker.id} is {worker.status}"
            # One that stood still when the faults ended may be missed, and replaced.
            patience_s = SILENT_BEATS * self.scenario.fleets[worker.fleet].config.heartbeat_interval_s
            if worker.last_heartbeat is None or moment(self._now() - patience_s) > worker.last_heartbeat:
                return f"{worker.id} is silent"
        return await self._leaked()

    def _break(self, what: str) -> None:
        self._broken.append(what)
        self.story.end(f"a promise is broken: {what}")

    def _on_loop_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.story.errors.append(f"{context.get('message')}: {context.get('exception')!r}")

    def _check(self) -> None:
        if self.story.errors:
            self._break(f"an error nobody foresaw: {self.story.errors[0]}")
        if self._broken:
            raise InvariantViolation(self._broken[0])

    # ---------------------------------------------------------------------------------------------------- troubles

    async def _produce(self, around: Surroundings) -> None:
        for at, count in around.arrivals:
            await asyncio.sleep(max(0.0, at - self._now()))
            for _ in range(count):
                task_id = await self.store.enqueue(NewTask(around.config.queues[0], max_attempts=around.max_attempts))
                self.watch.enqueued(task_id)
            self.story.tell("producer", f"{count} tasks for {around.config.queues[0]}")

    async def _endanger(self, orchestrator: SimOrchestrator) -> None:
        every_s = self.scenario.killed_every_s
        while every_s > 0:
            await asyncio.sleep(self._rng.expovariate(1 / every_s))
            if self.is_calm:
                return
            orchestrator.kill()
            await asyncio.sleep(self._rng.choice([0.0, 1.0, 30.0]))
            orchestrator.start()

    async def _bring_outages(self) -> None:
        every_s = self.scenario.outage_every_s
        while every_s > 0:
            await asyncio.sleep(self._rng.expovariate(1 / every_s))
            if self.is_calm:
                return
            self.story.tell("world", "the database is away")
            self._set_down(True)
            await asyncio.sleep(self._rng.uniform(1.0, self.scenario.outage_s))
            self._set_down(False)
            self.story.tell("world", "the database is back")

    def _set_down(self, is_down: bool) -> None:
        self.weather.is_down = self.control_weather.is_down = is_down

    async def _interfere(self) -> None:
        every_s = self.scenario.by_hand_every_s
        while every_s > 0:
            await asyncio.sleep(self._rng.expovariate(1 / every_s))
            if self.is_calm:
                return
            fleet = self._rng.choice(list(self.clouds))
            known = [row.name for row in await self.store.fleets()]
            if fleet in known:
                await self._do_by_hand(fleet)

    async def _do_by_hand(self, fleet: str) -> None:
        rng = self._rng
        action_label = rng.choice(["pause", "resume", "ask", "restart", "end", "end at once"])
        workers = [worker.id for worker in await self.store.workers() if worker.fleet == fleet]
        self.story.tell("person", f"{action_label} {fleet}")
        match action_label:
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
                await self.end_by_hand(chosen)
            case "end at once" if workers:
                chosen = rng.choice(workers)
                self.watch.ended_by_hand.add(chosen)
                await self.store.terminate_worker(chosen, "by hand")
            case _:
                pass

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _resting_size(config: FleetConfig) -> int:
    """How many workers a fleet keeps when there is nothing to do."""
    buffer = config.idle_buffer if config.policy == "buffered" else 0
    return min(max(config.min_workers, buffer), config.max_workers)
