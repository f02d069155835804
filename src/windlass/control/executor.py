"""Executes the provider calls of a plan: all of them concurrently, each within its own time limit.

- A call that outlasts its cycle continues. It is not started again meanwhile, and a later cycle records its outcome.
- A missing answer is an outcome too: a creation becomes unclear and keeps its slot, a deletion is requested again.
  So is an unexpected error, because a defect of an adapter must not hide what its other calls have done.
- A provider that throttles gets no creation for as long as it asks, and no deletion for as long, up to LONG_PAUSE_S.
- A creation that waited for its turn is not started after the lease under which it was decided has expired: the next
  leader relies on that.
- The boot log of a machine that never joined is read before its deletion, briefly, for a few machines of a plan, and
  only while the provider answers.
- A preparation may take minutes. No cycle waits for it, and it takes no slot from other calls. Its end starts a cycle.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from datetime import datetime
from functools import partial
from typing import Any

import structlog

from windlass.control.outcome_log import OutcomeLog
from windlass.model.action import Delete, DeleteOrphan, Fail, GrowVolume, Plan, Prepare
from windlass.model.errors import (
    LONG_PAUSE_S,
    NoCapacity,
    NotPrepared,
    ProviderError,
    ProviderUnreachable,
    Refused,
    Throttled,
)
from windlass.model.lease import LeaseGuard
from windlass.model.machine import Machine, MachineRequest, MachineState
from windlass.model.outcome import (
    Created,
    CreationRefused,
    CreationUnclear,
    Deleted,
    HostKeySeen,
    NotDeleted,
    OrphanDeleted,
    Outcome,
    PreparationFailed,
    PreparationUnclear,
    Prepared,
    VolumeGrown,
    VolumeNotGrown,
)
from windlass.model.snapshot import Snapshot, WorkerView
from windlass.model.worker import WorkerStatus
from windlass.ports.provider import KeepsBootLog, KnowsPrices, Provider, SharesVolume

# For adapters without limits of their own.
CALL_TIMEOUT_S = 60.0
# Creations in flight, and deletions in flight: enough to hide latency, few enough not to look like an attack.
MAX_CONCURRENT_CALLS = 16
# A deletion waits for it, and the machine is billed meanwhile.
BOOT_LOG_TIMEOUT_S = 3.0
# In one plan. If more machines fail at once, the logs of these explain the others.
MAX_BOOT_LOGS = 4
# After a failed call, deletions do not wait for logs of a provider that may not answer either.
BOOT_LOG_PAUSE_S = 60.0
# A preparation waits for a machine, not for the provider. Longer than the limits that a fleet can set for it.
PREPARE_TIMEOUT_S = 3900.0
MAX_CONCURRENT_PREPARATIONS = 32
# Delay before a refused deletion is requested again; it doubles up to the maximum.
REFUSED_DELETION_DELAY_S = 20.0
REFUSED_DELETION_MAX_DELAY_S = 300.0
_PREPARE = "prepare "
log = structlog.get_logger(__name__)


class _NotDeleted(Exception):
    """The machine still exists, as far as is known. The text says why."""


class ProviderExecutor:
    """`outcomes` receives the outcome of every call; `on_late_outcome` is called for those that no cycle waits for.

    `record_at_once` stores an outcome that must not wait for the end of its call. `now` is the database's time, if
    known: a machine must not be billed until its deletion is recorded, only until it was deleted.
    """

    def __init__(
        self,
        provider: Provider,
        lease: LeaseGuard,
        outcomes: OutcomeLog,
        *,
        call_timeout_s: float,
        now: Callable[[], datetime | None],
        on_late_outcome: Callable[[], None],
        record_at_once: Callable[[Outcome], Awaitable[None]],
    ) -> None:
        self._provider = provider
        self._lease = lease
        self._outcomes = outcomes
        self._call_timeout_s = call_timeout_s
        self._now = now
        self._on_late_outcome = on_late_outcome
        self._record_at_once = record_at_once
        # Separate limits, so that deletions that do not end never block creations.
        self._creations = asyncio.Semaphore(MAX_CONCURRENT_CALLS)
        self._deletions = asyncio.Semaphore(MAX_CONCURRENT_CALLS)
        self._preparations = asyncio.Semaphore(MAX_CONCURRENT_PREPARATIONS)
        # By subject: the worker to create, the machine to delete.
        self._in_flight: dict[str, asyncio.Task[Outcome]] = {}
        # The calls in flight that the current cycle waits for.
        self._awaited: set[asyncio.Task[Outcome]] = set()
        # End of the provider's throttling, by the loop's clock. A pause for creations does not stop deletions: machines
        # that exist cost money.
        self._create_after = float("-inf")
        self._delete_after = float("-inf")
        # Whether the last pause began because the provider could not be reached.
        self._is_unreachable = False
        # Boot logs are not read before this time, by the loop's clock.
        self._boot_logs_after = float("-inf")
        # Machines whose deletion was refused: the delay before the next request, and when that may start.
        self._refused_deletions: dict[str, tuple[float, float]] = {}

    def replace_provider(self, provider: Provider) -> None:
        """Use this provider for new calls. Calls in flight continue with the old one."""
        self._provider = provider

    @property
    def preparing(self) -> tuple[str, ...]:
        """Workers whose preparation is in flight, or has ended without being recorded."""
        subjects = (*self._in_flight, *self._outcomes)
        return tuple(sorted(subject.removeprefix(_PREPARE) for subject in subjects if subject.startswith(_PREPARE)))

    @property
    def is_busy(self) -> bool:
        """A call is in flight."""
        return bool(self._in_flight)

    async def execute(
        self, snapshot: Snapshot, plan: Plan, requests: Iterable[MachineRequest], wait_s: float | None
    ) -> None:
        """Start all calls of a plan that are not in flight, and wait for them up to `wait_s`.

        None: wait for all calls in flight. Preparations are never awaited here.
        """
        machines = {machine.id: machine for machine in snapshot.machines or ()}
        workers = {worker.id: worker for worker in snapshot.workers}
        failed = {action.worker_id for action in plan.actions if isinstance(action, Fail)}
        deleted = {action.machine_id for action in plan.actions if isinstance(action, Delete | DeleteOrphan)}
        self._refused_deletions = {id_: again for id_, again in self._refused_deletions.items() if id_ in deleted}
        logs_left = MAX_BOOT_LOGS
        for action in plan.actions:
            match action:
                case Delete(worker_id=worker_id, machine_id=machine_id):
                    # Since when complete listings lack the machine. A listing may lag, so a later heartbeat counts.
                    gone_at = plan.planner_state.machines.missing_since.get(worker_id)
                    worker = workers.get(worker_id)
                    if gone_at is not None:
                        gone_at = max(gone_at, (worker.last_heartbeat if worker is not None else None) or gone_at)
                    if self._may_delete(machine_id):
                        subject = machine_id or worker_id
                        reads_log = (
                            logs_left > 0
                            and subject not in self._in_flight
                            and _explains_failure(worker, worker_id in failed)
                        )
                        logs_left -= reads_log
                        self._start(subject, self._delete(action, machines, gone_at, worker, reads_log=reads_log))
                case DeleteOrphan(machine_id=machine_id):
                    if self._may_delete(machine_id):
                        self._start(machine_id, self._delete_orphan(machines[machine_id], action.name, action.reason))
                case Prepare(worker_id=worker_id, machine_id=machine_id):
                    call = self._prepare(worker_id, machines[machine_id], workers[worker_id].host_key)
                    self._start(_PREPARE + worker_id, call, is_awaited=False)
                case GrowVolume(volume_id=volume_id):
                    self._start(f"volume {volume_id}", self._grow(action))
        for request in requests:
            self._start(request.name, self._create(request, self._lease.until))
        if wait_s is None:
            await self.wait_for_all()
        elif self._awaited:
            await asyncio.wait(self._awaited, timeout=wait_s)
        self._awaited.clear()

    async def wait_for_all(self, *, includes_preparations: bool = False) -> None:
        """Wait for every call in flight; for preparations only on request."""
        calls = self._in_flight.items()
        if awaited := [task for subject, task in calls if includes_preparations or not subject.startswith(_PREPARE)]:
            await asyncio.wait(awaited)

    def abandon(self) -> None:
        """Stop waiting for anything. Requests already sent may take effect; a later cycle finds out."""
        for task in self._in_flight.values():
            task.cancel()
        self._in_flight.clear()
        self._awaited.clear()

    def _start(self, subject: str, call: Coroutine[Any, Any, Outcome], *, is_awaited: bool = True) -> None:
        if subject in self._in_flight or subject in self._outcomes:
            call.close()
            return
        self._in_flight[subject] = task = asyncio.create_task(call)
        if is_awaited:
            self._awaited.add(task)
        task.add_done_callback(partial(self._end, subject))

    def _end(self, subject: str, task: asyncio.Task[Outcome]) -> None:
        if task.cancelled():
            return
        self._in_flight.pop(subject, None)
        if (defect := task.exception()) is not None:
            log.error("execute provider call failed", subject=subject, exc_info=defect)
            return
        self._outcomes.add(subject, task.result())
        if task not in self._awaited:
            self._on_late_outcome()

    async def _create(self, request: MachineRequest, start_by: float) -> Outcome:
        """`start_by`: when the lease under which this was decided expires. Later renewals do not extend it."""
        worker_id = request.name
        try:
            async with self._creations, asyncio.timeout(self._call_timeout_s):
                # In both cases no request was sent, so no machine can exist.
                if not self._lease.is_valid:
                    return CreationRefused(worker_id, "LEASE_LOST", "the lease expired before the machine was created")
                if asyncio.get_running_loop().time() >= start_by:
                    return CreationRefused(worker_id, "NOT_BEGUN", "too many other creations were in flight")
                self._check_throttle(max(self._create_after, self._delete_after))
                provider = self._provider
                traits = provider.traits
                machine = await provider.create(request)
                return Created(
                    worker_id,
                    machine,
                    is_prepared=not traits.has_prepare_step,
                    billing_unit_s=traits.billing_unit_s,
                )
        except (Refused, NoCapacity, Throttled) as error:
            self._create_after = max(self._create_after, self._next_call_at(error))
            # Info only: the cycle's summary reports it as a failure.
            log.info("create machine refused", worker_id=worker_id, error=str(error))
            is_long = isinstance(error, Throttled) and error.retry_after_s > LONG_PAUSE_S
            return CreationRefused(worker_id, "PROVIDER_PAUSE" if is_long else error.code, str(error))
        except Exception as error:
            self._pause_boot_logs()
            problem = self._describe(error)
            log.warning("create machine unclear", worker_id=worker_id, error=problem)
            return CreationUnclear(worker_id, problem)

    async def _delete(
        self,
        action: Delete,
        machines: dict[str, Machine],
        gone_at: datetime | None,
        worker: WorkerView | None,
        *,
        reads_log: bool,
    ) -> Outcome:
        """`gone_at`: since when the machine is missing, for a provider that does not report when it ended."""
        machine = machines.get(action.machine_id or "")
        boot_log = await self._read_boot_log(machine) if machine is not None and reads_log else ""
        try:
            if action.machine_id is None:
                self._check_lease()
                return Deleted(action.worker_id, None, action.code, action.reason)
            unlisted = Machine(action.machine_id, action.worker_id, MachineState.RUNNING)
            ended_at = await self._delete_machine(machines.get(action.machine_id, unlisted))
        except _NotDeleted as error:
            return NotDeleted(action.worker_id, str(error))
        ended_at = ended_at or gone_at or self._now()
        priced = None
        if worker is not None and worker.bill is None:
            # Prefer the listed machine: the row of one that the same plan adopted has no type yet.
            priced = await self._price(machine or _recorded_machine(worker))
        unit_s = self._provider.traits.billing_unit_s
        return Deleted(
            *(action.worker_id, action.machine_id, action.code, action.reason, ended_at, priced, unit_s),
            machine_state=machine.state if machine is not None else None,
            machine_note=machine.note if machine is not None else None,
            machine_exit=machine.exit if machine is not None else None,
            boot_log=boot_log,
        )

    async def _read_boot_log(self, machine: Machine) -> str:
        """What a machine printed whose worker never joined: the only explanation that is left of it."""
        pause_until = max(self._create_after, self._delete_after, self._boot_logs_after)
        if not isinstance(self._provider, KeepsBootLog) or asyncio.get_running_loop().time() < pause_until:
            return ""
        try:
            async with asyncio.timeout(BOOT_LOG_TIMEOUT_S):
                return await self._provider.boot_log(machine)
        except Exception as error:
            self._pause_boot_logs()
            problem = self._describe(error, BOOT_LOG_TIMEOUT_S)
            log.info("read boot log failed", worker_id=machine.name, error=problem)
            return ""

    def _pause_boot_logs(self) -> None:
        self._boot_logs_after = asyncio.get_running_loop().time() + BOOT_LOG_PAUSE_S

    async def _price(self, machine: Machine) -> Machine | None:
        """The price of a machine that was deleted, or vanished, before its price was known. None: still unknown."""
        is_known = bool(machine.id and machine.instance_type)
        if not is_known or not isinstance(self._provider, KnowsPrices):
            return None
        try:
            async with asyncio.timeout(self._call_timeout_s):
                priced = await self._provider.price(machine)
        except Exception as error:
            log.warning("price machine failed", worker_id=machine.name, error=self._describe(error))
            return None
        return priced if priced.price_micros_per_hour is not None else None

    async def _delete_orphan(self, machine: Machine, name: str, reason: str) -> Outcome:
        billing_unit_s = self._provider.traits.billing_unit_s
        try:
            ended_at = await self._delete_machine(machine)
        except _NotDeleted as error:
            return NotDeleted(name, str(error))
        ended_at = ended_at or self._now()
        priced = await self._price(machine) if machine.price_micros_per_hour is None else None
        return OrphanDeleted(priced or machine, reason, billing_unit_s, ended_at)

    async def _delete_machine(self, machine: Machine) -> datetime | None:
        """When the machine ended, if the provider reports it. Raises _NotDeleted."""
        try:
            async with self._deletions, asyncio.timeout(self._call_timeout_s):
                self._check_lease()
                self._check_throttle(self._delete_after)
                ended_at = await self._provider.delete(machine)
                self._refused_deletions.pop(machine.id, None)
                return ended_at
        except _NotDeleted:
            raise
        except Exception as error:
            self._delete_after = max(self._delete_after, self._next_call_at(error, LONG_PAUSE_S))
            self._create_after = max(self._create_after, self._next_call_at(error))
            if isinstance(error, Refused):
                # An immediate repeat would be refused again, and uses up the provider's rate limit.
                delay_s, _ = self._refused_deletions.get(machine.id, (REFUSED_DELETION_DELAY_S / 2, 0.0))
                delay_s = min(delay_s * 2, REFUSED_DELETION_MAX_DELAY_S)
                self._refused_deletions[machine.id] = (delay_s, asyncio.get_running_loop().time() + delay_s)
            else:
                self._pause_boot_logs()
            problem = self._describe(error)
            log.warning("delete machine failed", machine_id=machine.id, error=problem)
            raise _NotDeleted(problem) from None

    def _may_delete(self, machine_id: str | None) -> bool:
        _, again_at = self._refused_deletions.get(machine_id or "", (0.0, float("-inf")))
        return asyncio.get_running_loop().time() >= again_at

    def _check_lease(self) -> None:
        if not self._lease.is_valid:
            raise _NotDeleted("the lease expired before the machine was deleted")

    async def _prepare(self, worker_id: str, machine: Machine, host_key: str | None) -> Outcome:
        try:
            async with self._preparations, asyncio.timeout(PREPARE_TIMEOUT_S):
                prepared = await self._provider.prepare(
                    machine, host_key, lambda key: self._record_at_once(HostKeySeen(worker_id, machine.id, key))
                )
                return Prepared(worker_id, machine.id, prepared.host_key)
        except NotPrepared as error:
            log.warning("prepare machine failed", worker_id=worker_id, code=error.code, error=str(error))
            return PreparationFailed(worker_id, machine.id, error.code, str(error), error.output, error.host_key)
        except Exception as error:
            problem = self._describe(error)
            log.warning("prepare machine unclear", worker_id=worker_id, error=problem)
            return PreparationUnclear(worker_id, problem)

    async def _grow(self, action: GrowVolume) -> Outcome:
        volume_id, size_gb = action.volume_id, action.size_gb
        try:
            async with asyncio.timeout(self._call_timeout_s):
                if not self._lease.is_valid:
                    return VolumeNotGrown(volume_id, size_gb, "the lease expired before the volume was resized")
                if not isinstance(self._provider, SharesVolume):
                    return VolumeNotGrown(volume_id, size_gb, "the new provider has no shared volume")
                grown = await self._provider.grow_volume(volume_id, size_gb)
                return VolumeGrown(volume_id, grown.size_gb, action.reason)
        except Exception as error:
            self._create_after = max(self._create_after, self._next_call_at(error))
            problem = self._describe(error)
            log.warning("grow volume failed", volume_id=volume_id, size_gb=size_gb, error=problem)
            return VolumeNotGrown(volume_id, size_gb, problem)

    def _describe(self, error: Exception, limit_s: float | None = None) -> str:
        if isinstance(error, TimeoutError):
            return str(error) or f"no answer within {limit_s or self._call_timeout_s:g} s"
        return str(error) if isinstance(error, ProviderError) else f"{type(error).__name__}: {error}"

    def _next_call_at(self, error: Exception, max_s: float = float("inf")) -> float:
        """When the provider may be called again, by the loop's clock."""
        if not isinstance(error, Throttled):
            return float("-inf")
        self._is_unreachable = isinstance(error, ProviderUnreachable)
        return asyncio.get_running_loop().time() + min(error.retry_after_s, max_s)

    def _check_throttle(self, until: float) -> None:
        left_s = until - asyncio.get_running_loop().time()
        if left_s > 0 and self._is_unreachable:
            raise ProviderUnreachable(f"the provider could not be reached; next attempt in {left_s:.0f} s", left_s)
        if left_s > 0:
            raise Throttled(f"the provider asked for a pause; {left_s:.0f} s left", left_s)


def _recorded_machine(worker: WorkerView) -> Machine:
    """A worker's machine that is no longer listed."""
    return Machine(
        worker.machine_id or "",
        worker.id,
        MachineState.EXITED,
        created_at=worker.machine_created_at,
        instance_type=worker.instance_type,
        place=worker.place,
    )


def _explains_failure(worker: WorkerView | None, is_failing: bool) -> bool:
    """Whether only its boot log can tell why a worker failed: it never joined. `is_failing`: the plan fails it."""
    if worker is None or worker.last_heartbeat is not None:
        return False
    return is_failing or worker.status is WorkerStatus.ERROR
