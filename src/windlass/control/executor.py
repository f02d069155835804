"""Carry out what a plan asks of a provider: everything at once, each within its time, nobody waiting for another.

A call that takes longer than a cycle's patience goes on beside the next cycles and is not made again meanwhile; what
became of it is written down by the cycle that comes after it. An answer that did not come is an outcome too: a creation
becomes unclear and keeps its slot, a deletion is asked for again. So is an error nobody foresaw: an adapter's fault
must not make us forget what its other calls have done. A provider that asks us to slow down is asked for no machine for
as long as it said, and to end none for as long, up to five minutes. A creation that had to wait for its turn is not
begun any more when the lease under which it was decided would be over: whoever leads then may count on it.

A preparation may take minutes. No cycle waits for it, it takes no place from other calls, and its end starts a cycle.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import structlog

from windlass.model.action import Delete, DeleteOrphan, GrowVolume, Plan, Prepare
from windlass.model.errors import LONG_PAUSE_S, NoCapacity, NotPrepared, ProviderError, Refused, Throttled
from windlass.model.lease import LeaseGuard
from windlass.model.machine import Machine, MachineRequest, MachineState
from windlass.model.outcome import (
    Created,
    CreationRefused,
    CreationUnclear,
    Deleted,
    HostKeySeen,
    Intent,
    NotDeleted,
    OrphanDeleted,
    Outcome,
    PreparationFailed,
    PreparationUnclear,
    Prepared,
    VolumeGrown,
    VolumeNotGrown,
)
from windlass.model.snapshot import Snapshot
from windlass.ports.provider import Provider, SharesVolume

# Adapters keep their own limits; this one is for an adapter that does not.
CALL_TIMEOUT_S = 60.0
# Calls under way at the same time: enough to hide latency, few enough not to look like an attack.
MAX_CONCURRENT_CALLS = 16
# The same for preparations. What they wait for is a machine, not the provider.
PREPARE_TIMEOUT_S = 1800.0
MAX_CONCURRENT_PREPARATIONS = 32
LOST = "the lead was lost before it was ended"
# A machine whose deletion is refused outright is asked to go again after this, then after twice as long, up to this.
REFUSED_AGAIN_S = 20.0
REFUSED_AGAIN_MAX_S = 300.0
_PREPARING = "prepare "
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _CallResult:
    """A machine is gone; since when, if the provider says so."""

    at: datetime | None


class ProviderExecutor:
    """`write_down` keeps at once what must not wait for the end of a call. `on_settled` is told when a call ends that
    no cycle waits for any more. `now` is the database's time, as far as it is known: what is written down later than it
    happened must not be paid for longer."""

    def __init__(
        self,
        provider: Provider,
        trust: LeaseGuard,
        call_timeout_s: float = CALL_TIMEOUT_S,
        on_settled: Callable[[], None] = lambda: None,
        now: Callable[[], datetime | None] = lambda: None,
        *,
        write_down: Callable[[Outcome], Awaitable[None]],
    ) -> None:
        self._now = now
        self._write_down = write_down
        self._provider = provider
        self._trust = trust
        self._call_timeout_s = call_timeout_s
        self._on_settled = on_settled
        # Apart, so that machines that do not end keep nobody from being hired.
        self._places_to_create = asyncio.Semaphore(MAX_CONCURRENT_CALLS)
        self._places_to_end = asyncio.Semaphore(MAX_CONCURRENT_CALLS)
        self._places_to_prepare = asyncio.Semaphore(MAX_CONCURRENT_PREPARATIONS)
        # By what they are about: the worker to be hired, the machine to be ended.
        self._under_way: dict[str, asyncio.Task[Outcome]] = {}
        # Those that the present cycle began and waits for.
        self._begun: set[asyncio.Task[Outcome]] = set()
        # By the loop's clock.
        # The provider's pauses: one in hiring keeps nobody from being deleted, who would be paid for again.
        self._hires_from = float("-inf")
        self._ends_from = float("-inf")
        # Machines whose deletion was refused: how long to wait with the next one, and until when.
        self._spared: dict[str, tuple[float, float]] = {}

    def exchange_provider(self, provider: Provider) -> None:
        """For the calls to come. Those under way go on with the one they were begun with."""
        self._provider = provider

    def end_machines(self, snapshot: Snapshot, plan: Plan) -> None:
        """Begin all deletions of a plan that are not under way."""
        machines = {machine.id: machine for machine in snapshot.machines or ()}
        gone = _gone_since(snapshot, plan)
        asked_for = {action.machine_id for action in plan.actions if isinstance(action, Delete | DeleteOrphan)}
        self._spared = {machine_id: spared for machine_id, spared in self._spared.items() if machine_id in asked_for}
        for action in plan.actions:
            if isinstance(action, Delete):
                gone_at = gone.get(action.worker_id)
                if not self._is_spared(action.machine_id):
                    self._begin(action.machine_id or action.worker_id, self._delete(action, machines, gone_at))
            elif isinstance(action, DeleteOrphan) and not self._is_spared(action.machine_id):
                self._begin(action.machine_id, self._delete_stray(action, machines))

    def create_machines(
        self, fleet: str, intents: Iterable[Intent], granted: frozenset[str], join_tokens: Mapping[str, str]
    ) -> None:
        """Begin to create a machine for each intent that was granted. `join_tokens`: by worker, where it needs one."""
        for intent in intents:
            if intent.worker_id in granted:
                token = join_tokens.get(intent.worker_id)
                request = MachineRequest(name=intent.worker_id, fleet=fleet, slot=intent.slot, join_token=token)
                self._begin(intent.worker_id, self._create(request, self._trust.until))

    def prepare_machines(self, snapshot: Snapshot, plan: Plan) -> None:
        """Begin all preparations of a plan that are not under way."""
        machines = {machine.id: machine for machine in snapshot.machines or ()}
        host_keys = {worker.id: worker.host_key for worker in snapshot.workers}
        for action in plan.actions:
            if isinstance(action, Prepare):
                machine = machines[action.machine_id]
                call = self._prepare(action.worker_id, machine, host_keys.get(action.worker_id))
                self._begin(_PREPARING + action.worker_id, call, is_waited_for=False)

    def grow_volumes(self, plan: Plan) -> None:
        """Begin what of a plan makes storage larger."""
        for action in plan.actions:
            if isinstance(action, GrowVolume):
                self._begin(f"volume {action.volume_id}", self._grow(action))

    @property
    def preparing(self) -> tuple[str, ...]:
        """Workers whose preparation is under way, or has ended and nobody has written it down."""
        return tuple(
            sorted(about.removeprefix(_PREPARING) for about in self._under_way if about.startswith(_PREPARING))
        )

    def _begin(self, about: str, call: Coroutine[Any, Any, Outcome], *, is_waited_for: bool = True) -> None:
        if about in self._under_way:
            call.close()
            return
        self._under_way[about] = task = asyncio.create_task(call)
        if is_waited_for:
            self._begun.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Outcome]) -> None:
        if task not in self._begun and not task.cancelled():
            self._on_settled()

    @property
    def is_busy(self) -> bool:
        """Whether a call is under way, or one has ended and nobody has written it down."""
        return bool(self._under_way)

    async def outcomes(self, patience_s: float | None, *, is_patient_with_all: bool = False) -> list[Outcome]:
        """What became of all calls that have ended, those just begun being waited for no longer than this.

        None: until all have ended; preparations only if `is_patient_with_all`. Each outcome stays until it is
        forgotten: whoever writes it down may fail.
        """
        waited_for = [*self._begun]
        if patience_s is None:
            calls = self._under_way.items()
            waited_for = [task for about, task in calls if is_patient_with_all or not about.startswith(_PREPARING)]
        if waited_for:
            await asyncio.wait(waited_for, timeout=patience_s)
        self._begun.clear()
        return [task.result() for task in self._under_way.values() if task.done()]

    def forget(self, outcomes: Iterable[Outcome]) -> None:
        """They are written down."""
        written = set(map(id, outcomes))
        self._under_way = {
            about: task
            for about, task in self._under_way.items()
            if not task.done() or id(task.result()) not in written
        }

    def abandon(self) -> None:
        """Stop waiting for anything. What was sent may still happen; a later cycle finds out."""
        for task in self._under_way.values():
            task.cancel()
        self._under_way.clear()
        self._begun.clear()

    async def _create(self, request: MachineRequest, begin_by: float) -> Outcome:
        """`begin_by`: the end of our trust when it was decided. Cycles renew the trust; this they do not renew."""
        worker_id = request.name
        try:
            async with self._places_to_create, asyncio.timeout(self._call_timeout_s):
                if not self._trust.is_valid:
                    # Not called at all, so nothing can have been made; a new leader decides anew.
                    return CreationRefused(worker_id, "LEASE_LOST", "the lead was lost before it was hired")
                if asyncio.get_running_loop().time() >= begin_by:
                    return CreationRefused(worker_id, "NOT_BEGUN", "too many others were being hired before it")
                _check_throttle(max(self._hires_from, self._ends_from))
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
            self._hires_from = max(self._hires_from, _next_call(error))
            # Whoever writes the summary down says it aloud.
            log.info("machine refused", worker_id=worker_id, error=str(error))
            is_long = isinstance(error, Throttled) and error.retry_after_s > LONG_PAUSE_S
            return CreationRefused(worker_id, "PROVIDER_PAUSE" if is_long else error.code, str(error))
        except Exception as error:
            problem = self._describe(error)
            log.warning("creation unclear", worker_id=worker_id, error=problem)
            return CreationUnclear(worker_id, problem)

    async def _delete(self, action: Delete, machines: dict[str, Machine], gone_at: datetime | None) -> Outcome:
        """`gone_at`: since when its machine seems to be gone, for a provider that does not say."""
        if action.machine_id is None:
            if not self._trust.is_valid:
                return NotDeleted(action.worker_id, LOST)
            return Deleted(action.worker_id, None, action.code, action.reason)
        machine = machines.get(action.machine_id) or Machine(action.machine_id, action.worker_id, MachineState.RUNNING)
        ended = await self._end(machine)
        if isinstance(ended, str):
            return NotDeleted(action.worker_id, ended)
        ended_at = ended.at or gone_at or self._now()
        return Deleted(action.worker_id, action.machine_id, action.code, action.reason, ended_at)

    async def _delete_stray(self, action: DeleteOrphan, machines: dict[str, Machine]) -> Outcome:
        machine, traits = machines[action.machine_id], self._provider.traits
        ended = await self._end(machine)
        if isinstance(ended, str):
            return NotDeleted(action.name, ended)
        return OrphanDeleted(machine, action.reason, traits.billing_unit_s, ended.at or self._now())

    async def _end(self, machine: Machine) -> "_CallResult | str":
        """That it is gone, or why it is not."""
        try:
            async with self._places_to_end, asyncio.timeout(self._call_timeout_s):
                if not self._trust.is_valid:
                    return LOST
                _check_throttle(self._ends_from)
                ended_at = await self._provider.delete(machine)
                self._spared.pop(machine.id, None)
                return _CallResult(ended_at)
        except Exception as error:
            self._ends_from = max(self._ends_from, _next_call(error, LONG_PAUSE_S))
            self._hires_from = max(self._hires_from, _next_call(error))
            if isinstance(error, Refused):
                self._spare(machine.id)
            problem = self._describe(error)
            log.warning("machine not deleted", machine_id=machine.id, error=problem)
            return problem

    async def _prepare(self, worker_id: str, machine: Machine, host_key: str | None) -> Outcome:
        try:
            async with self._places_to_prepare, asyncio.timeout(PREPARE_TIMEOUT_S):
                prepared = await self._provider.prepare(
                    machine, host_key, lambda key: self._write_down(HostKeySeen(worker_id, machine.id, key))
                )
                return Prepared(worker_id, machine.id, prepared.host_key)
        except NotPrepared as error:
            log.warning("machine not prepared", worker_id=worker_id, code=error.code, error=str(error))
            return PreparationFailed(worker_id, machine.id, error.code, str(error), error.output, error.host_key)
        except Exception as error:
            problem = self._describe(error)
            log.warning("preparation unclear", worker_id=worker_id, error=problem)
            return PreparationUnclear(worker_id, problem)

    def _spare(self, machine_id: str) -> None:
        """Asking at once would be answered as before; the provider has others to answer, and so have we."""
        wait_s, _ = self._spared.get(machine_id, (REFUSED_AGAIN_S / 2, 0.0))
        wait_s = min(wait_s * 2, REFUSED_AGAIN_MAX_S)
        self._spared[machine_id] = (wait_s, asyncio.get_running_loop().time() + wait_s)

    async def _grow(self, action: GrowVolume) -> Outcome:
        volume_id, size_gb = action.volume_id, action.size_gb
        try:
            async with asyncio.timeout(self._call_timeout_s):
                if not self._trust.is_valid:
                    return VolumeNotGrown(volume_id, size_gb, "the lead was lost before it grew")
                if not isinstance(self._provider, SharesVolume):
                    return VolumeNotGrown(volume_id, size_gb, "its provider was exchanged meanwhile")
                grown = await self._provider.grow_volume(volume_id, size_gb)
                return VolumeGrown(volume_id, grown.size_gb, action.reason)
        except Exception as error:
            self._hires_from = max(self._hires_from, _next_call(error))
            problem = self._describe(error)
            log.warning("volume not grown", volume_id=volume_id, size_gb=size_gb, error=problem)
            return VolumeNotGrown(volume_id, size_gb, problem)

    def _is_spared(self, machine_id: str | None) -> bool:
        return machine_id in self._spared and asyncio.get_running_loop().time() < self._spared[machine_id][1]

    def _describe(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return str(error) or f"no answer within {self._call_timeout_s:g} s"
        return str(error) if isinstance(error, ProviderError) else f"{type(error).__name__}: {error}"


def _next_call(error: Exception, longest_s: float = float("inf")) -> float:
    """From when on the provider may be asked again."""
    if not isinstance(error, Throttled):
        return float("-inf")
    return asyncio.get_running_loop().time() + min(error.retry_after_s, longest_s)


def _check_throttle(until: float) -> None:
    left_s = until - asyncio.get_running_loop().time()
    if left_s > 0:
        raise Throttled(f"the provider asked for a pause; {left_s:.0f} s of it are left", left_s)


def _gone_since(snapshot: Snapshot, plan: Plan) -> dict[str, datetime]:
    """Worker id to since when its machine has been missing from complete lists. A list may lag, and so lack what is
    there already: whoever was heard later was there later."""
    heard = {worker.id: worker.last_heartbeat for worker in snapshot.workers}
    return {
        worker_id: max(since, heard.get(worker_id) or since)
        for worker_id, since in plan.planner_state.machines.missing_since.items()
    }
