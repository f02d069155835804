"""The dispatcher of a fleet: claims tasks as far as Ray has capacity, and runs them through seats.

One dispatcher per fleet acts, by a lease (dispatcher_lease.py). It claims each kind of task (by resource needs) through
a worker runtime of its own, so registration, heartbeats, lost claims and delivery work as in any worker.

It claims nothing while its lease is not valid or the head does not respond, and exits when another dispatcher has the
lease or the head is lost.
"""

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from uuid import uuid4

import structlog

from windlass.model.fleet import FleetConfig
from windlass.model.payload_privacy import privacy_of
from windlass.model.task import Claim
from windlass.model.worker import WorkerKind
from windlass.ports.ray import RayStore
from windlass.ray.capacity import InFlightKind, Needs, count_free_slots
from windlass.ray.cluster import Cluster
from windlass.ray.dispatcher_lease import RENEWAL_INTERVAL_S, DispatcherLease
from windlass.ray.driver import Driver
from windlass.ray.executor import RayExecutor
from windlass.ray.node_table import NodeTable, Schedulability
from windlass.ray.node_watch import NodeWatch
from windlass.ray.placement_writer import PlacementWriter
from windlass.ray.runtime_group import RuntimeGroup
from windlass.ray.seat_pool import SeatPool
from windlass.ray.seat_process import SeatJob
from windlass.ray.seat_server import SeatServer
from windlass.ray.versions import check_versions, our_versions
from windlass.worker.executor import Executor, Outcome
from windlass.worker.handler import ReportProgress
from windlass.worker.heartbeat import OpenTransport
from windlass.worker.lifecycle import WorkerRuntime, WorkerSettings
from windlass.worker.output_buffer import OutputBuffer, OutputLimits, captured_output
from windlass.worker.private_errors import PrivateErrors

# A dispatcher sends the output of all its nodes, at this multiple of a worker's rate: by default half of what the
# database accepts from one worker.
OUTPUT_RATE_FACTOR = 4.0
# Tasks in flight at the same time, however large the cluster is.
MAX_IN_FLIGHT = 5_000
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DispatcherSettings:
    fleet: str
    config: FleetConfig
    # Address of the Ray head.
    address: str
    max_result_bytes: int
    timeout_s: float | None
    # Limits of what each of Ray's processes prints in attempts. None: output is not sent.
    output: OutputLimits | None = None
    version: str | None = None


class Dispatcher:
    """`wrap_executor` adds tracing of attempts."""

    def __init__(
        self,
        settings: DispatcherSettings,
        store: RayStore,
        open_transport: OpenTransport,
        wrap_executor: Callable[[Executor], Executor] = lambda executor: executor,
    ) -> None:
        self._settings = settings
        self._store = store
        self._open_transport = open_transport
        self._wrap_executor = wrap_executor
        self._name = f"ray-{settings.fleet}-{uuid4().hex[:8]}"
        config, offer = settings.config, settings.config.node_offer
        self._cluster = Cluster(settings.address)
        # Tasks of an external cluster run on any of its nodes.
        self._driver = Driver(settings.address, None if offer is None else settings.fleet, self._name)
        self._lease = DispatcherLease(store, settings.fleet)
        self._nodes = NodeTable(settings.fleet, config.ray, config.queues, offer)
        self._runtimes = RuntimeGroup(self._name)
        self._watch = NodeWatch(config, self._nodes, self._lease, store, self._cluster, self._runtimes.recheck_capacity)
        self._kinds: list[_KindSlots] = []
        self._outputs: list[OutputBuffer] = []

    def stop(self) -> None:
        """Finish running tasks, release those that have not begun, and exit. A second call releases all of them."""
        self._runtimes.stop()

    async def connect(self) -> None:
        """Raises ConfigError if versions do not match, WindlassError if the cluster is unavailable."""
        address = self._settings.address
        check_versions(our_versions(), await self._cluster.fetch_versions(), f"the Ray head at {address}")
        await self._driver.connect()

    async def run(self) -> None:
        """Run until stopped. Raises HeadLost, LeaseLost, HandlerNotFound or another WindlassError: then start anew."""
        stop = self._runtimes.stop_requested
        if not await self._lease.acquire(stop):
            return
        try:
            requeued = await self._lease.take_over(stop)
            settings = self._settings
            log.info(
                "started dispatcher",
                fleet=settings.fleet,
                ray_address=settings.address,
                requeued=requeued,
                term=self._lease.term,
            )
            await self._dispatch()
        finally:
            await self._lease.release()

    async def _dispatch(self) -> None:
        settings, driver = self._settings, self._driver
        placements = PlacementWriter(self._store)
        pool = SeatPool(driver, self._nodes, settings.config.ray, placements.place)
        server = SeatServer(pool, settings.max_result_bytes)
        address = await server.open(driver.host)
        driver.set_job(
            SeatJob(address, settings.config.handler, settings.config.exec, settings.max_result_bytes, settings.output)
        )
        try:
            await self._watch.observe(pool)
            self._add_runtimes(pool)
            renewing = self._lease.renew_until_lost(self._runtimes.recheck_capacity)
            # What the dispatcher itself prints is sent with the output of its first kind of tasks.
            with captured_output(self._outputs[0]) if self._outputs else contextlib.nullcontext():
                await self._runtimes.run(renewing, self._watch.run(pool))
        finally:
            await server.close()
            await pool.close()
            await placements.close()

    def _add_runtimes(self, pool: SeatPool) -> None:
        settings, config = self._settings, self._settings.config
        for number, (needs, queues) in enumerate(config.ray.classes(config.queues).items()):
            output = self._new_output()
            executor: Executor = RayExecutor(pool, config.ray, output)
            if config.redact:
                executor = PrivateErrors(executor, config.queues, config.redact)
            executor = self._wrap_executor(executor)
            slots = _KindSlots(
                needs, executor, lambda kind: self._count_free(kind, pool), self._runtimes.recheck_capacity
            )
            self._kinds.append(slots)
            worker_settings = WorkerSettings(
                queues=queues,
                fleet=settings.fleet,
                concurrency=MAX_IN_FLIGHT,
                heartbeat_interval_s=min(config.heartbeat_interval_s, RENEWAL_INTERVAL_S),
                lease_s=config.heartbeat_timeout_s,
                timeout_s=settings.timeout_s,
                drain_timeout_s=config.stop_timeout_s,
                worker_id=f"{self._name}-{number}",
                version=settings.version,
                kind=WorkerKind.DISPATCHER,
                remarks={"ray_address": settings.address, "ray_dashboard": self._driver.dashboard_url},
            )
            self._runtimes.add(WorkerRuntime(worker_settings, self._open_transport, slots, slots, output))

    def _new_output(self) -> OutputBuffer | None:
        limits, config = self._settings.output, self._settings.config
        if limits is None:
            return None
        limits = replace(limits, bytes_per_s=OUTPUT_RATE_FACTOR * limits.bytes_per_s)
        self._outputs.append(OutputBuffer(limits, privacy_of([(config.queues, config.redact)])))
        return self._outputs[-1]

    def _count_free(self, needs: Needs, pool: SeatPool) -> int:
        if not self._lease.is_valid or self._watch.is_head_silent:
            return 0
        reserved = Counter({InFlightKind(slots.needs): slots.reserved for slots in self._kinds})
        free = count_free_slots(
            self._nodes.open_nodes(),
            pool.in_flight + reserved,
            dict(needs),
            self._settings.config.ray.margin,
            may_grow=self._nodes.schedulability(needs) is Schedulability.MAY_FIT_AFTER_GROWTH,
        )
        return max(0, min(free, MAX_IN_FLIGHT - pool.in_flight.total() - reserved.total()))


class _KindSlots:
    """Concurrency limit and executor of one runtime. All kinds share the same capacity.

    It counts the claims that the executor, and so the seat pool, does not know yet.
    """

    def __init__(
        self, needs: Needs, executor: Executor, count_free: Callable[[Needs], int], on_freed: Callable[[], None]
    ) -> None:
        self.needs = needs
        self._executor = executor
        self._count_free = count_free
        self._on_freed = on_freed
        self._used = 0
        self._running = 0

    @property
    def reserved(self) -> int:
        """Tasks that are being claimed, or are claimed and not yet in the seat pool."""
        return self._used - self._running

    def set_used(self, count: int) -> None:
        is_freed = count < self._used
        self._used = count
        if is_freed:
            self._on_freed()

    def count_free(self) -> int:
        return self._count_free(self.needs)

    async def start(self) -> None:
        await self._executor.start()

    async def close(self) -> None:
        await self._executor.close()

    async def run(self, claim: Claim, report: ReportProgress) -> Outcome:
        self._running += 1
        try:
            return await self._executor.run(claim, report)
        finally:
            self._running -= 1
