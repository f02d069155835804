"""The dispatcher of a fleet: one at a time acts, by a lease; the others stand by.

Whoever gets the lease first takes back what earlier ones had claimed and placed: Ray ended it with them. Then it claims
as far as Ray has room, each kind of task (by what it needs) apart, through the same runtime that workers claim with:
registration, heartbeats, lost claims and delivery that outlives the database are that runtime's. It tells the store
what Ray says of the nodes, and has nodes drained whose workers are to end.

It claims no longer than it can trust its lease; when another holds it, it ends. A head that does not answer for
HEAD_TIMEOUT_S ends it too: what ran may have ended, nobody can tell, and whoever comes next takes it back.
"""

import asyncio
import contextlib
import random
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import structlog

from windlass.model.errors import DatabaseUnavailable, WindlassError
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate, LeaseGuard, LeaseLost, Standby, holder_of_this_process
from windlass.model.node import dispatcher_lease
from windlass.model.ray import RaySettings
from windlass.model.task import Claim
from windlass.model.worker import WorkerKind
from windlass.policy.backoff import reconnect_delay_s
from windlass.ports.ray import RayStore
from windlass.ray.capacity import InFlightKind, Needs, free_slots
from windlass.ray.cluster import WORKER_LABEL, Cluster, ClusterReplaced, ClusterUnavailable
from windlass.ray.driver import Driver
from windlass.ray.executor import RayExecutor
from windlass.ray.nodes import NodeReporter, Schedulability
from windlass.ray.placement_writer import Placer
from windlass.ray.seat_pool import Seats
from windlass.ray.seat_process import Job
from windlass.ray.seat_server import SeatServer
from windlass.ray.versions import check_versions, our_versions
from windlass.worker.executor import Executor, Outcome
from windlass.worker.handler import ReportProgress
from windlass.worker.heartbeat import OpenTransport
from windlass.worker.lifecycle import ExitReason, WorkerRuntime, WorkerSettings

# A dispatcher that is silent for this long is replaced by one that stands by.
LEASE_S = 10.0
RENEWALS_PER_LEASE = 4
# From one look at Ray's nodes to the next.
LOOK_INTERVAL_S = 0.5
# A seat that waits since before a node was lost, and for so long after, waits perhaps for that node.
STUCK_S = 10.0
# From the first question that the head did not answer.
HEAD_TIMEOUT_S = 10.0
# Tasks at hand at the same time, however large the cluster is.
MAX_IN_FLIGHT = 5_000
log = structlog.get_logger(__name__)


class HeadLost(WindlassError):
    """The head of the cluster does not answer any more."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """What a dispatcher is to do."""

    fleet: str
    config: FleetConfig
    address: str
    max_result_bytes: int
    timeout_s: float | None
    version: str | None = None


class Dispatcher:
    """`watched`: makes of the executor of attempts one that tells of each."""

    def __init__(
        self,
        dispatch: Dispatch,
        store: RayStore,
        open_transport: OpenTransport,
        watched: Callable[[Executor], Executor] = lambda executor: executor,
    ) -> None:
        self._dispatch = dispatch
        self._store = store
        self._open_transport = open_transport
        self._watched = watched
        self._cluster = Cluster(dispatch.address)
        self._name = f"ray-{dispatch.fleet}-{uuid4().hex[:8]}"
        offer = dispatch.config.node_offer
        # On a cluster that is not ours tasks run on its nodes, whoever they are.
        self._driver = Driver(dispatch.address, None if offer is None else dispatch.fleet, self._name)
        self._candidate = Candidate(holder_of_this_process(), LEASE_S, dispatcher_lease(dispatch.fleet))
        self._trust = LeaseGuard(self._candidate)
        self._nodes = NodeReporter(dispatch.fleet, dispatch.config.ray, dispatch.config.queues, offer)
        self._stop = asyncio.Event()
        self._runtimes: deque[WorkerRuntime] = deque()
        self._places: list[_Places] = []
        self._drained: set[str] = set()
        self._head_silent_since: float | None = None
        # When nodes were lost, until the seats that wait since then have been replaced.
        self._losses: deque[float] = deque()

    def stop(self) -> None:
        """Let what runs finish, give back what has not begun, and end. A second time: give everything back."""
        limit_s = 0.0 if self._stop.is_set() else None
        self._stop.set()
        for runtime in self._runtimes:
            runtime.drain("told to stop", limit_s)

    async def connect(self) -> None:
        """Raises ConfigError for a cluster of other versions, WindlassError for one that cannot be had."""
        where = f"the Ray head at {self._dispatch.address}"
        check_versions(our_versions(), await self._cluster.versions(), where)
        await self._driver.connect()

    async def run(self) -> None:
        """Until stopped. Raises HeadLost, LeaseLost, HandlerNotFound and other WindlassErrors: then start anew."""
        dispatch = self._dispatch
        term = await self._lead()
        if term is None:
            return
        try:
            taken = await self._take_over(term)
            log.info("dispatching", fleet=dispatch.fleet, ray=dispatch.address, taken_back=taken, term=term)
            await self._act(term)
        finally:
            with contextlib.suppress(DatabaseUnavailable):
                await self._store.release_lease(self._candidate)

    async def _take_over(self, term: int) -> int:
        """However long somebody keeps one of the tasks locked, or the database is away. Raises LeaseLost."""
        failures = 0
        while True:
            try:
                return await self._store.take_over_nodes(self._candidate, term, self._dispatch.fleet)
            except DatabaseUnavailable as error:
                if self._stop.is_set():
                    raise
                failures += 1
                log.warning("nodes not taken over, trying again", error=str(error), failures=failures)
            await asyncio.sleep(reconnect_delay_s(failures, random.random()))  # noqa: S311
            with contextlib.suppress(DatabaseUnavailable):
                if await self._ask_for_lease() != term:
                    raise LeaseLost(f"another dispatcher of fleet {self._dispatch.fleet} took over meanwhile")

    async def _lead(self) -> int | None:
        """The term, when we have it. None: told to stop."""
        is_told = False
        while not self._stop.is_set():
            try:
                led = await self._ask_for_lease()
            except DatabaseUnavailable as error:
                log.warning("no lease: the database is away", error=str(error))
                led = Standby(LEASE_S / RENEWALS_PER_LEASE)
            if not isinstance(led, Standby):
                return led
            if not is_told:
                log.info("standing by: another dispatcher acts", fleet=self._dispatch.fleet)
                is_told = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(max(led.expires_in_s, 0.2), LEASE_S)):
                    await self._stop.wait()
        return None

    async def _ask_for_lease(self) -> int | Standby:
        asked_at = asyncio.get_running_loop().time()
        led = await self._store.acquire_lease(self._candidate)
        if isinstance(led, Standby):
            self._trust.lost()
        else:
            self._trust.renewed(asked_at)
        return led

    async def _act(self, term: int) -> None:
        """One term: until stopped, or until something ends it, which is raised."""
        placer = Placer(self._store)
        driver = self._driver
        seats = Seats(driver, self._nodes, self._settings, placer.place)
        gate = SeatServer(seats, self._dispatch.max_result_bytes)
        driver.use(
            Job(
                await gate.open(driver.host),
                self._dispatch.config.handler,
                self._dispatch.config.exec,
                self._dispatch.max_result_bytes,
            )
        )
        try:
            await self._look(seats, term)
            self._make_runtimes(self._watched(RayExecutor(seats, self._settings)), seats)
            if self._stop.is_set():
                self.stop()
            await self._run_beside(self._renew(term), self._watch(seats, term))
        finally:
            await gate.close()
            await seats.close()
            await placer.close()

    async def _run_beside(self, *watches: Coroutine[Any, Any, None]) -> None:
        """The runtimes, until all have ended, or one of them or of the watches fails: then all end at once.

        One that was told to end by others leaves its queues unserved: the others drain too, and LeaseLost is raised.
        """
        working = [asyncio.create_task(runtime.work()) for runtime in self._runtimes]
        watching = [asyncio.create_task(watch) for watch in watches]
        is_let_go = False
        try:
            pending: set[asyncio.Task[Any]] = {*working, *watching}
            while not all(task.done() for task in working):
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if task.result() is ExitReason.LOST:
                        raise LeaseLost(f"dispatcher {self._name} was declared lost, or replaced")
                    if task.result() is ExitReason.DRAINED and not self._stop.is_set():
                        is_let_go = True
                        for runtime in self._runtimes:
                            runtime.drain("a part of this dispatcher was told to end")
            if is_let_go and not self._stop.is_set():
                raise LeaseLost(f"dispatcher {self._name} was told to end: start another")
        finally:
            for task in watching:
                task.cancel()
            for runtime in self._runtimes:
                runtime.drain("the term is over", 0.0)
            await asyncio.gather(*watching, *working, return_exceptions=True)

    def _make_runtimes(self, executor: Executor, seats: Seats) -> None:
        config = self._dispatch.config
        classes = self._settings.classes(config.queues)

        def count_free(needs: Needs) -> int:
            return self._count_free(needs, seats)

        self._places = [_Places(needs, executor, count_free, self._look_again) for needs in classes]
        self._runtimes.clear()
        for number, (queues, places) in enumerate(zip(classes.values(), self._places, strict=True)):
            settings = WorkerSettings(
                queues=queues,
                fleet=self._dispatch.fleet,
                concurrency=MAX_IN_FLIGHT,
                heartbeat_interval_s=min(config.heartbeat_interval_s, LEASE_S / RENEWALS_PER_LEASE),
                lease_s=config.heartbeat_timeout_s,
                timeout_s=self._dispatch.timeout_s,
                drain_timeout_s=config.stop_timeout_s,
                worker_id=f"{self._name}-{number}",
                version=self._dispatch.version,
                kind=WorkerKind.DISPATCHER,
                remarks={"ray_address": self._dispatch.address, "ray_dashboard": self._driver.dashboard_url},
            )
            self._runtimes.append(WorkerRuntime(settings, self._open_transport, places, places))

    def _count_free(self, needs: Needs, seats: Seats) -> int:
        if not self._trust.is_valid or self._head_silent_since is not None:
            return 0
        reserved = Counter({InFlightKind(places.needs): places.reserved for places in self._places})
        free = free_slots(
            self._nodes.rooms(),
            seats.counts + reserved,
            dict(needs),
            self._settings.margin,
            is_awaited=self._nodes.outlook(needs) is Schedulability.AWAITED,
        )
        return max(0, min(free, MAX_IN_FLIGHT - len(seats) - reserved.total()))

    # ---------------------------------------------------------------------------------------------- what is watched

    async def _renew(self, term: int) -> None:
        """Raises LeaseLost when another acts."""
        while True:
            await asyncio.sleep(LEASE_S / RENEWALS_PER_LEASE)
            try:
                led = await self._ask_for_lease()
            except DatabaseUnavailable as error:
                # Away for all, or for us alone: then another takes over, and what runs here runs for nothing. We cannot
                # tell, and to end it whenever the database is away would cost more. Nothing is claimed meanwhile.
                log.warning("lease not renewed: the database is away", error=str(error))
                continue
            if led != term:
                raise LeaseLost(f"another dispatcher acts for fleet {self._dispatch.fleet}")
            self._look_again()

    async def _watch(self, seats: Seats, term: int) -> None:
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            await self._look(seats, term)

    async def _look(self, seats: Seats, term: int) -> None:
        """At Ray's nodes: remember, tell the store, drain. Raises HeadLost."""
        now = asyncio.get_running_loop().time()
        try:
            nodes = await self._cluster.nodes()
        except ClusterReplaced as error:
            raise HeadLost(str(error)) from error
        except ClusterUnavailable as error:
            self._head_silent_since = self._head_silent_since or now
            log.warning("no word from the Ray head", error=str(error))
            if asyncio.get_running_loop().time() - self._head_silent_since >= HEAD_TIMEOUT_S:
                raise HeadLost(str(error)) from error
            return
        self._head_silent_since = None
        before = set(self._nodes.alive)
        if self._nodes.see(nodes, _used_by(seats.counts)):
            self._losses.append(now)
        stuck_since = None
        while self._losses and now >= self._losses[0] + STUCK_S:
            stuck_since = self._losses.popleft()
        seats.look(stuck_since)
        if not self._trust.is_valid:
            # After an outage the lease has run out, and perhaps nobody took it: what runs is not to end for that.
            return
        config = self._dispatch.config
        try:
            barred = await self._store.report_nodes(
                self._candidate,
                term,
                self._dispatch.fleet,
                config.queues,
                config.heartbeat_timeout_s,
                self._nodes.report(),
            )
        except DatabaseUnavailable as error:
            log.warning("nodes not reported", error=str(error))
            return
        except LeaseLost as error:
            # It took too long to ask, or another has it: the next renewal says which.
            self._trust.lost()
            log.warning("nodes not reported", error=str(error))
            return
        self._nodes.bar(barred)
        if set(self._nodes.alive) - before:
            self._look_again()
        await self._drain({worker_id for worker_id, is_ending in barred.items() if is_ending})

    async def _drain(self, exit_reason: set[str]) -> None:
        for node_id, node in self._nodes.alive.items():
            worker_id = node.labels.get(WORKER_LABEL)
            if worker_id in exit_reason and node_id not in self._drained:
                log.info("draining its node", worker_id=worker_id, node_id=node_id)
                try:
                    await self._cluster.drain(
                        node_id, f"worker {worker_id} is to end", self._dispatch.config.stop_timeout_s
                    )
                except ClusterUnavailable as error:
                    log.warning("node not drained", worker_id=worker_id, error=str(error))
                else:
                    self._drained.add(node_id)
        self._drained &= self._nodes.alive.keys()

    def _look_again(self) -> None:
        # Who is woken first claims first: each class in its turn, or one would take every place that becomes free.
        self._runtimes.rotate(-1)
        for runtime in self._runtimes:
            runtime.recheck_capacity()

    @property
    def _settings(self) -> RaySettings:
        return self._dispatch.config.ray


class _Places:
    """The places for one class of tasks, which are those of the other classes too. Counts what is not yet in flight."""

    def __init__(
        self, needs: Needs, executor: Executor, count_free: Callable[[Needs], int], on_less: Callable[[], None]
    ) -> None:
        self.needs = needs
        self._executor = executor
        self._count_free = count_free
        self._on_less = on_less
        self._held = 0
        self._in_flight = 0

    @property
    def reserved(self) -> int:
        """Being claimed, or claimed and not yet on their way to Ray."""
        return self._held - self._in_flight

    def set_used(self, count: int) -> None:
        is_less = count < self._held
        self._held = count
        if is_less:
            self._on_less()

    def count_free(self) -> int:
        return self._count_free(self.needs)

    # ------------------------------------------------------------------------------------- as its runtime's executor

    async def start(self) -> None:
        await self._executor.start()

    async def close(self) -> None:
        await self._executor.close()

    async def run(self, claim: Claim, report: ReportProgress) -> Outcome:
        self._in_flight += 1
        try:
            return await self._executor.run(claim, report)
        finally:
            self._in_flight -= 1


def _used_by(flights: Mapping[InFlightKind, int]) -> dict[str, dict[str, float]]:
    used: dict[str, dict[str, float]] = {}
    for flight, count in flights.items():
        if flight.node_id is not None:
            amounts = used.setdefault(flight.node_id, {})
            for name, amount in flight.needs:
                amounts[name] = amounts.get(name, 0.0) + count * amount
    return used
