"""What runs on a cloud's machines: it joins, beats, claims, works for a while and delivers, through a transport.

Its luck is decided when it moves in: it may never join, boot slowly, crash, stand still for a while and come back with
late results, ignore that it should end, have no GPU, or a handler that fails. A worker without bad luck is blameless,
and `Conduct` keeps the evidence: nobody may end a blameless worker's work before its time.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any
from uuid import UUID

from windlass.model.errors import DatabaseUnavailable, UnknownWorker
from windlass.model.fleet import FleetConfig
from windlass.model.task import Claim, Finished
from windlass.model.worker import LIVE, HeartbeatReply, HeldClaim, Registration, WorkerStatus
from windlass.policy.backoff import reconnect_delay_s
from windlass.simulator.cloud import MachineRecord, SimulatedCloud
from windlass.simulator.processes import SimulatedProcess
from windlass.simulator.trace import Trace

# An idle worker looks for work this often even when nobody tells it to.
LOOKS_EVERY_S = 30.0
# What a task takes on a worker on which all fail.
FAILS_WITHIN_S = 0.5
VRAM_MB = 24_000


@dataclass(frozen=True, slots=True)
class WorkerFaults:
    boots_s: float = 5.0
    never_joins: bool = False
    # Counted from when it moved in.
    crashes_at_s: float | None = None
    # A crash takes the machine with it: it is gone from the list, not only exited.
    vanishes: bool = False
    freezes_at_s: float | None = None
    frozen_s: float = 0.0
    ignores_drain: bool = False
    # Its GPU is dead and does not say so: every task it takes fails, and at once.
    fails_tasks: bool = False
    # It sees no GPU, which matters where the fleet's workers need one.
    has_no_gpu: bool = False

    @property
    def is_good(self) -> bool:
        is_useless = self.never_joins or self.ignores_drain or self.fails_tasks or self.has_no_gpu
        return not (is_useless or self.crashes_at_s or self.freezes_at_s)


@dataclass(slots=True)
class WorkerHistory:
    """What a worker has done, by its own books."""

    asked_at: float
    faults: WorkerFaults
    first_heartbeat_at: float | None = None
    last_heartbeat_at: float | None = None
    max_silence_s: float = 0.0
    # Claims it is working on, by token, since when.
    at_work: dict[UUID, float] = field(default_factory=dict)
    # When the store first told it, or others, that it should end.
    draining_since: float | None = None
    # Different tasks that failed on it since it last completed one.
    failed_in_a_row: set[int] = field(default_factory=set)
    is_over: bool = False

    def heard(self, now: float) -> None:
        since = self.last_heartbeat_at if self.last_heartbeat_at is not None else self.asked_at
        self.max_silence_s = max(self.max_silence_s, now - since)
        self.first_heartbeat_at = self.first_heartbeat_at if self.first_heartbeat_at is not None else now
        self.last_heartbeat_at = now

    def blame(self, now: float, fleet: FleetConfig) -> str | None:
        """What can be held against it: whoever has none of these must be left alone."""
        if not self.faults.is_good:
            return "bad luck"
        if self.first_heartbeat_at is None or self.last_heartbeat_at is None:
            return "never heard" if now - self.asked_at > fleet.spawn_timeout_s else None
        if self.first_heartbeat_at - self.asked_at > fleet.spawn_timeout_s:
            return "slow to join"
        if max(self.max_silence_s, now - self.last_heartbeat_at) > fleet.heartbeat_timeout_s:
            return "silent for too long"
        stuck_s = fleet.stuck_timeout_s
        if stuck_s is not None and any(now - since > stuck_s for since in self.at_work.values()):
            return "stuck"
        # By chance, tasks that fail anywhere may fail on one worker, one after another.
        return "unlucky with tasks" if len(self.failed_in_a_row) >= fleet.quarantine_min_failures else None


@dataclass(frozen=True, slots=True)
class TaskProfile:
    """How tasks go."""

    duration_s: tuple[float, float] = (5.0, 30.0)
    failure_rate: float = 0.0


class SimulatedWorker:
    """One worker on one machine. `transport` is the store as this worker sees it."""

    def __init__(
        self,
        entry: MachineRecord,
        cloud: SimulatedCloud,
        fleet: FleetConfig,
        transport: Any,
        process: SimulatedProcess,
        faults: WorkerFaults,
        tasks: TaskProfile,
        rng: Random,
        trace: Trace,
    ) -> None:
        self.id = entry.name
        self.history = WorkerHistory(entry.created_at, faults)
        self._entry = entry
        self._make_cloud = cloud
        self._fleet = fleet
        self._transport = transport
        self._process = process
        self._luck = faults
        self._tasks = tasks
        self._rng = rng
        self._trace = trace
        self._is_draining = False
        self._is_calm: Callable[[], bool] = lambda: False
        self._failed: set[int] = set()
        self._idle_since = entry.created_at
        self._held: dict[UUID, Claim] = {}
        self._attempts: dict[UUID, asyncio.Task[None]] = {}
        self._lanes: list[asyncio.Task[None]] = []

    # --------------------------------------------------------------------------------------------------- as tenant

    @property
    def fleet_name(self) -> str:
        return self._entry.fleet

    def start(self, faults_ended: Callable[[], bool] = lambda: False) -> None:
        """What bad luck has in store happens unless it is calm by then."""
        self._is_calm = faults_ended
        self._process.start(self._live())
        for at_s, strike in ((self._luck.crashes_at_s, self._crash), (self._luck.freezes_at_s, self._freeze)):
            if at_s is not None:
                asyncio.get_running_loop().call_later(at_s, _strike_unless, faults_ended, strike)

    def stop(self) -> None:
        self.history.is_over = True
        self._process.kill()

    def _crash(self) -> None:
        if self._process.is_dead:
            return
        self._trace.add(self.id, "vanishes with its machine" if self._luck.vanishes else "crashes")
        self.stop()
        if self._luck.vanishes:
            self._make_cloud.remove_machine(self._entry.id)
        else:
            self._make_cloud.mark_exited(self._entry.id)

    def _freeze(self) -> None:
        if not self._process.is_dead:
            self._trace.add(self.id, f"stands still for {self._luck.frozen_s:.0f} s")
            self._process.freeze()
            asyncio.get_running_loop().call_later(self._luck.frozen_s, self._process.thaw)

    # -------------------------------------------------------------------------------------------------------- life

    async def _live(self) -> None:
        await asyncio.sleep(self._luck.boots_s)
        self._entry.running_at = self._now()
        if self._luck.never_joins:
            return
        try:
            if await self._join():
                await self._work_until_told()
        finally:
            if not self._process.is_dead:
                self._leave_machine()

    def _leave_machine(self) -> None:
        self._trace.add(self.id, "has ended")
        self.stop()
        if self._make_cloud.max_list_age_s == 0:
            # Where a machine is a process, it ends with its program; elsewhere it idles on, and costs.
            self._make_cloud.mark_exited(self._entry.id)

    async def _join(self) -> bool:
        registration = Registration(
            self.id,
            self._fleet.queues,
            fleet=self._entry.fleet,
            concurrency=self._fleet.concurrency,
            lease_s=self._fleet.heartbeat_timeout_s,
            start_id=self.id,
        )
        status = await self._insist(lambda: self._transport.register(registration))
        self._idle_since = self._now()
        return status in LIVE

    async def _work_until_told(self) -> None:
        self._lanes = [asyncio.create_task(self._lane()) for _ in range(self._fleet.concurrency)]
        beating = asyncio.create_task(self._beat())
        await beating
        for lane in self._lanes:
            lane.cancel()

    async def _beat(self) -> None:
        """Until it is over: ended by others, or drained to the last task."""
        while True:
            pulse = await self._beat_once()
            if pulse is not None and pulse.status not in LIVE:
                self._trace.add(self.id, f"learns that it is {pulse.status}")
                return
            if pulse is not None and pulse.status is WorkerStatus.TERMINATING and not self._luck.ignores_drain:
                self._is_draining = True
            if self._is_draining and not self._held:
                await self._insist(lambda: self._transport.deregister(self.id, "drained"))
                return
            await asyncio.sleep(self._fleet.heartbeat_interval_s)
            await self._process.checkpoint()

    async def _beat_once(self) -> HeartbeatReply | None:
        held = [HeldClaim(claim.task_id, token) for token, claim in self._held.items()]
        vitals: dict[str, float] = {"idle_s": 0.0 if self._held else self._now() - self._idle_since}
        if self._fleet.has_gpu:
            vitals |= {"vram_total_mb": 0 if self._luck.has_no_gpu else VRAM_MB, "vram_used_mb": 0}
        try:
            async with asyncio.timeout(self._fleet.heartbeat_timeout_s / 2):
                pulse: HeartbeatReply = await self._transport.heartbeat(self.id, held, vitals)
        except (DatabaseUnavailable, TimeoutError):
            return None
        for token in pulse.lost:
            attempt = self._attempts.get(token)
            if attempt is not None:
                self._trace.add(self.id, f"lost its claim on task {self._held[token].task_id}")
                attempt.cancel()
        return pulse

    # -------------------------------------------------------------------------------------------------------- work

    async def _lane(self) -> None:
        claims: list[Claim] = []
        while True:
            if not claims and not self._is_draining and not (self._fleet.has_gpu and self._luck.has_no_gpu):
                claims = await self._insist(lambda: self._transport.claim(self.id, self._fleet.queues, 1))
            if not claims:
                with suppress(DatabaseUnavailable):
                    await self._transport.wait_for_work(self._fleet.queues, LOOKS_EVERY_S)
                continue
            claims = await self._attempt(claims[0])

    async def _attempt(self, claim: Claim) -> list[Claim]:
        """Work on it; returns what is to be done next."""
        self._held[claim.token] = claim
        self.history.at_work[claim.token] = self._now()
        duration_s = self._rng.uniform(*self._tasks.duration_s)
        attempt = asyncio.create_task(asyncio.sleep(FAILS_WITHIN_S if self._is_useless() else duration_s))
        self._attempts[claim.token] = attempt
        try:
            await asyncio.wait([attempt])
            await self._process.checkpoint()
            if attempt.cancelled():
                return []
            return await self._deliver(claim)
        finally:
            attempt.cancel()
            del self._held[claim.token], self._attempts[claim.token]
            self.history.at_work.pop(claim.token, None)
            if not self._held:
                self._idle_since = self._now()

    def _is_useless(self) -> bool:
        """Where too little has failed on it for anybody to tell, and no more may come, that ends with the faults."""
        is_suspicious = len(self._failed) >= self._fleet.quarantine_min_failures
        return self._luck.fails_tasks and (is_suspicious or not self._is_calm())

    async def _deliver(self, claim: Claim) -> list[Claim]:
        if self._rng.random() < self._tasks.failure_rate or self._is_useless():
            self._failed.add(claim.task_id)
            await self._insist(
                lambda: self._transport.fail(self.id, claim.task_id, claim.token, "it did not work out", jitter=0.5)
            )
            return []
        done = [Finished(claim.task_id, claim.token, '"done"')]

        async def finish() -> Any:
            # With nobody to ask whether it should end, it asks for no more than it may still do.
            limit = 0 if self._is_draining else 1
            return await self._transport.finish_and_claim(self.id, done, self._fleet.queues, limit)

        turn = await self._insist(finish)
        return list(turn.claims)

    async def _insist(self, call: Any) -> Any:
        """Until the store answers: a result survives an outage."""
        failures = 0
        while True:
            try:
                return await call()
            except UnknownWorker:
                # Its row is gone: whatever it had is somebody else's by now.
                self._trace.add(self.id, "is unknown to the store")
                raise asyncio.CancelledError from None
            except DatabaseUnavailable:
                failures += 1
                await asyncio.sleep(reconnect_delay_s(failures, self._rng.random()))
                await self._process.checkpoint()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _strike_unless(faults_ended: Callable[[], bool], strike: Callable[[], None]) -> None:
    if not faults_ended():
        strike()
