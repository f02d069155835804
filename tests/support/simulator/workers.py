"""The simulated worker program on a machine: it registers, sends heartbeats, claims tasks, works and delivers results.

Its faults are fixed when it starts: it may never register, boot slowly, crash, freeze and return with late results,
ignore a drain, see no GPU, or fail every task. `WorkerHistory` records what it did, so that the invariant checker can
tell whether the orchestrator had a reason to fail it.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any
from uuid import UUID

from support.simulator.cloud import MachineRecord, SimulatedCloud
from support.simulator.processes import SimulatedProcess
from support.simulator.trace import Trace
from windlass.model.errors import DatabaseUnavailable, UnknownWorker
from windlass.model.fleet import FleetConfig
from windlass.model.snapshot import BootTimes
from windlass.model.task import Claim, Finished
from windlass.model.worker import LIVE, HeartbeatReply, HeldClaim, Registration, WorkerStatus
from windlass.policy.backoff import reconnect_delay_s
from windlass.policy.boot import boot_limit

# An idle worker tries to claim this often even without a notification.
CLAIM_INTERVAL_S = 30.0
# Duration of a task on a worker with `fails_tasks`.
FAILING_TASK_S = 0.5
VRAM_MB = 24_000
# From the snapshot of a plan until its machines are deleted.
PLAN_AGE_S = 60.0


@dataclass(frozen=True, slots=True)
class WorkerFaults:
    boots_s: float = 5.0
    never_joins: bool = False
    # Seconds after the machine was created.
    crashes_at_s: float | None = None
    # The machine disappears in the crash. Otherwise it is listed as exited.
    vanishes: bool = False
    freezes_at_s: float | None = None
    frozen_s: float = 0.0
    ignores_drain: bool = False
    # The GPU is broken and does not report it: every task fails after FAILING_TASK_S.
    fails_tasks: bool = False
    # Has an effect only in fleets with `has_gpu`.
    has_no_gpu: bool = False

    @property
    def is_timed(self) -> bool:
        """The fault happens some time after the start."""
        return self.crashes_at_s is not None or self.freezes_at_s is not None

    def as_kinds(self) -> dict[str, bool]:
        return {
            "worker_never_joins": self.never_joins,
            "worker_vanishes": self.crashes_at_s is not None and self.vanishes,
            "worker_crashes": self.crashes_at_s is not None and not self.vanishes,
            "worker_freezes": self.freezes_at_s is not None,
            "worker_ignores_drain": self.ignores_drain,
            "worker_fails_tasks": self.fails_tasks,
            "worker_has_no_gpu": self.has_no_gpu,
        }

    @property
    def are_none(self) -> bool:
        is_useless = self.never_joins or self.ignores_drain or self.fails_tasks or self.has_no_gpu
        return not (is_useless or self.crashes_at_s or self.freezes_at_s)


@dataclass(slots=True)
class WorkerHistory:
    """What a worker did, recorded independently of the store."""

    spawned_at: float
    faults: WorkerFaults
    first_heartbeat_at: float | None = None
    last_heartbeat_at: float | None = None
    max_silence_s: float = 0.0
    # Start time of each running attempt, by claim token.
    running: dict[UUID, float] = field(default_factory=dict)
    # When the last attempt ended that was longer than stuck_timeout_s.
    was_stuck_at: float | None = None
    # Distinct tasks that failed since the last completed one.
    consecutive_failures: set[int] = field(default_factory=set)
    has_ended: bool = False
    # It dies at some await.
    has_fault: bool = False

    def add_heartbeat(self, now: float) -> None:
        since = self.last_heartbeat_at if self.last_heartbeat_at is not None else self.spawned_at
        self.max_silence_s = max(self.max_silence_s, now - since)
        self.first_heartbeat_at = self.first_heartbeat_at if self.first_heartbeat_at is not None else now
        self.last_heartbeat_at = now

    def end_attempt(self, token: UUID, now: float, fleet: FleetConfig) -> None:
        since, stuck_s = self.running.pop(token, None), fleet.stuck_timeout_s
        if since is not None and stuck_s is not None and now - since > stuck_s:
            self.was_stuck_at = now

    def reason_to_fail(self, now: float, fleet: FleetConfig) -> str | None:
        """Why the orchestrator may fail this worker. None: it must not."""
        if not self.faults.are_none or self.has_fault:
            return "has an injected fault"
        if self.first_heartbeat_at is None or self.last_heartbeat_at is None:
            return "never sent a heartbeat" if now - self.spawned_at > boot_limit(fleet, BootTimes()).stall_s else None
        if self.first_heartbeat_at - self.spawned_at > boot_limit(fleet, BootTimes()).stall_s:
            return "slow to register"
        if max(self.max_silence_s, now - self.last_heartbeat_at) > fleet.heartbeat_timeout_s:
            return "silent for longer than heartbeat_timeout_s"
        stuck_s = fleet.stuck_timeout_s
        if stuck_s is not None and any(now - since > stuck_s for since in self.running.values()):
            return "stuck"
        if self.was_stuck_at is not None and now - self.was_stuck_at < PLAN_AGE_S:
            return "stuck when the plan was made"
        # With a random failure rate, many tasks may fail in a row on a worker without a fault.
        return "failed many tasks" if len(self.consecutive_failures) >= fleet.quarantine_min_failures else None


@dataclass(frozen=True, slots=True)
class TaskProfile:
    """The range of task durations, and the share of attempts that fail on any worker.

    A task whose payload has a `duration_s` takes that long.
    """

    duration_s: tuple[float, float] = (5.0, 30.0)
    failure_rate: float = 0.0


class SimulatedWorker:
    """One worker on one machine. `transport` is the store as this worker sees it."""

    @classmethod
    def environment(cls, _rng: Random) -> AbstractContextManager[None]:
        """What the program needs during a simulation."""
        return nullcontext()

    def __init__(
        self,
        machine: MachineRecord,
        cloud: SimulatedCloud,
        fleet: FleetConfig,
        transport: Any,
        process: SimulatedProcess,
        faults: WorkerFaults,
        tasks: TaskProfile,
        rng: Random,
        trace: Trace,
    ) -> None:
        self.id = machine.name
        self.fleet_name = machine.fleet
        self.process = process
        self.history = WorkerHistory(machine.created_at, faults)
        self._machine = machine
        self._cloud = cloud
        self._fleet = fleet
        self._transport = transport
        self._faults = faults
        self._tasks = tasks
        self._rng = rng
        self._trace = trace
        self.on_fault: Callable[[str], None] = lambda _: None
        self.allow_task_failure: Callable[[], bool] = lambda: True
        self._is_draining = False
        self._have_faults_ended: Callable[[], bool] = lambda: False
        self._failed_tasks: set[int] = set()
        self._idle_since = machine.created_at
        self._held: dict[UUID, Claim] = {}
        self._attempts: dict[UUID, asyncio.Task[None]] = {}

    def start(self, have_faults_ended: Callable[[], bool] = lambda: False) -> None:
        """Start the program. A crash or freeze that is still to come when the faults end does not happen."""
        self._have_faults_ended = have_faults_ended
        self.process.start(self._run())
        for at_s, cause_fault in ((self._faults.crashes_at_s, self._crash), (self._faults.freezes_at_s, self._freeze)):
            if at_s is not None:
                asyncio.get_running_loop().call_later(at_s, cause_fault)

    def stop(self) -> None:
        self.history.has_ended = True
        self.process.kill()

    def _crash(self) -> None:
        if self.process.is_dead or self._have_faults_ended():
            return
        self.on_fault("worker_vanishes" if self._faults.vanishes else "worker_crashes")
        self._trace.add(self.id, "crashed with its machine" if self._faults.vanishes else "crashed")
        self.stop()
        if self._faults.vanishes:
            self._cloud.remove_machine(self._machine.id)
        else:
            self._cloud.mark_exited(self._machine.id)

    def die(self) -> None:
        """End the program at the await that it has reached."""
        if not (self.process.is_dead or self._have_faults_ended()):
            self.on_fault("worker_dies_at_await")
            self._trace.add(self.id, "died at an await")
            self.stop()
            self._cloud.mark_exited(self._machine.id)

    def _freeze(self) -> None:
        if not (self.process.is_dead or self._have_faults_ended()):
            self.on_fault("worker_freezes")
            self._trace.add(self.id, f"frozen for {self._faults.frozen_s:.0f} s")
            self.process.freeze()
            asyncio.get_running_loop().call_later(self._faults.frozen_s, self.process.thaw)

    async def _run(self) -> None:
        await asyncio.sleep(self._faults.boots_s)
        self._machine.running_at = self._now()
        if self._faults.never_joins:
            return
        try:
            await self._serve()
        finally:
            if not self.process.is_dead:
                self._trace.add(self.id, "ended")
                self.stop()
                if self._cloud.max_list_age_s == 0:
                    # A local machine is a process and exits with its program. A cloud machine stays and is billed.
                    self._cloud.mark_exited(self._machine.id)

    async def _serve(self) -> None:
        """The program, from its registration to its end."""
        registration = Registration(
            self.id,
            self._fleet.queues,
            fleet=self._machine.fleet,
            concurrency=self._fleet.concurrency,
            lease_s=self._fleet.heartbeat_timeout_s,
            start_id=self.id,
        )
        status = await self._retry(lambda: self._transport.register(registration))
        self._idle_since = self._now()
        if status in LIVE:
            lanes = [asyncio.create_task(self._work()) for _ in range(self._fleet.concurrency)]
            await asyncio.create_task(self._send_heartbeats())
            for lane in lanes:
                lane.cancel()

    # -------------------------------------------------------------------------------------------------- heartbeats

    async def _send_heartbeats(self) -> None:
        """Until the worker is no longer live, or is draining and has no tasks."""
        while True:
            reply = await self._send_heartbeat()
            if reply is not None and reply.status not in LIVE:
                self._trace.add(self.id, f"stops: its status is {reply.status}")
                return
            if reply is not None and reply.status is WorkerStatus.TERMINATING and not self._faults.ignores_drain:
                self._is_draining = True
            if self._is_draining and not self._held:
                await self._retry(lambda: self._transport.deregister(self.id, "drained"))
                return
            await asyncio.sleep(self._fleet.heartbeat_interval_s)
            await self.process.checkpoint()

    async def _send_heartbeat(self) -> HeartbeatReply | None:
        held = [HeldClaim(claim.task_id, token) for token, claim in self._held.items()]
        vitals: dict[str, float] = {"idle_s": 0.0 if self._held else self._now() - self._idle_since}
        if self._fleet.has_gpu:
            vitals |= {"vram_total_mb": 0 if self._faults.has_no_gpu else VRAM_MB, "vram_used_mb": 0}
        try:
            async with asyncio.timeout(self._fleet.heartbeat_timeout_s / 2):
                reply: HeartbeatReply = await self._transport.heartbeat(self.id, held, vitals)
        except (DatabaseUnavailable, TimeoutError):
            return None
        for token in reply.lost:
            attempt = self._attempts.get(token)
            if attempt is not None:
                self._trace.add(self.id, f"lost its claim on task {self._held[token].task_id}")
                attempt.cancel()
        return reply

    # -------------------------------------------------------------------------------------------------------- tasks

    async def _work(self) -> None:
        claims: list[Claim] = []
        while True:
            if not claims and not self._is_draining and not (self._fleet.has_gpu and self._faults.has_no_gpu):
                claims = await self._retry(lambda: self._transport.claim(self.id, self._fleet.queues, 1))
            if not claims:
                with suppress(DatabaseUnavailable):
                    await self._transport.wait_for_work(self._fleet.queues, CLAIM_INTERVAL_S)
                continue
            claims = await self._attempt(claims[0])

    async def _attempt(self, claim: Claim) -> list[Claim]:
        """Run one attempt and deliver its result. Returns the claims to work on next."""
        self._held[claim.token] = claim
        self.history.running[claim.token] = self._now()
        payload = json.loads(claim.payload)
        own_s = payload.get("duration_s") if isinstance(payload, dict) else None
        duration_s = own_s if own_s is not None else self._rng.uniform(*self._tasks.duration_s)
        attempt = asyncio.create_task(asyncio.sleep(FAILING_TASK_S if self._fails_tasks() else duration_s))
        self._attempts[claim.token] = attempt
        try:
            await asyncio.wait([attempt])
            await self.process.checkpoint()
            if attempt.cancelled():
                return []
            return await self._deliver(claim)
        finally:
            attempt.cancel()
            del self._held[claim.token], self._attempts[claim.token]
            self.history.running.pop(claim.token, None)
            if not self._held:
                self._idle_since = self._now()

    def _fails_tasks(self) -> bool:
        """Whether every task fails here. When the faults end, a worker with too few failures to be quarantined works
        again: if no more tasks come, the orchestrator could never detect it."""
        is_detectable = len(self._failed_tasks) >= self._fleet.quarantine_min_failures
        return self._faults.fails_tasks and (is_detectable or not self._have_faults_ended())

    async def _deliver(self, claim: Claim) -> list[Claim]:
        is_failure = self._rng.random() < self._tasks.failure_rate and self.allow_task_failure()
        if is_failure or self._fails_tasks():
            self._failed_tasks.add(claim.task_id)
            await self._retry(
                lambda: self._transport.fail(self.id, claim.task_id, claim.token, "simulated failure", jitter=0.5)
            )
            return []
        finished = [Finished(claim.task_id, claim.token, '"done"')]
        result = await self._retry(
            # The limit is read again at each retry: the worker may have started to drain.
            lambda: self._transport.finish_and_claim(
                self.id, finished, self._fleet.queues, 0 if self._is_draining else 1
            )
        )
        return list(result.claims)

    async def _retry(self, call: Callable[[], Any]) -> Any:
        """Repeat a call until the store answers, so that no result is lost in an outage."""
        failures = 0
        while True:
            try:
                return await call()
            except UnknownWorker:
                # The row is gone, and with it every claim.
                self._trace.add(self.id, "stops: unknown to the store")
                raise asyncio.CancelledError from None
            except DatabaseUnavailable:
                failures += 1
                await asyncio.sleep(reconnect_delay_s(failures, self._rng.random()))
                await self.process.checkpoint()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
