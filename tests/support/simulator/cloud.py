"""A simulated cloud: a Provider that follows the contract of ports/provider.py, with faults, and its own bill.

It may answer late or never, take effect after a failed call, refuse, run out of capacity, throttle, return a stale
list, and delete slowly. It never returns a partial list, reports a billed machine as deleted, or exceeds the delays in
its traits.

A fault is scripted with `cloud.next_create(times_out_after_taking_effect=True)` or drawn from `rates`. A request that
was sent takes effect even when its caller dies. `machines` records every machine that ever existed and `cost_micros`
computes its price independently of the product's billing code; only the invariant checker and tests read them.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from fractions import Fraction
from math import floor
from random import Random
from typing import Any, Protocol

from support.simulator.decisions import FaultDecisions
from support.simulator.loop import to_datetime
from support.simulator.processes import start_detached
from support.simulator.trace import Trace
from windlass.model.cost import PricePart
from windlass.model.errors import Ambiguous, NoCapacity, ProviderError, Refused, Throttled, Unavailable
from windlass.model.machine import Machine, MachineRequest, MachineState, Preparation, ProviderTraits
from windlass.ports.provider import OnHostKey

FOREVER = 1e9


@dataclass(frozen=True, slots=True)
class CreateOutcome:
    duration_s: float = 1.0
    # The machine is created, and the caller gets Ambiguous.
    times_out_after_taking_effect: bool = False
    # The caller gets Ambiguous, and the machine is created this much later.
    takes_effect_late_s: float | None = None
    # The caller gets Ambiguous, and no machine is created.
    fails_without_effect: bool = False
    never_answers: bool = False
    raises: Exception | None = None
    # Two machines are created, as by a client that repeats a request. The provider contract forbids this.
    creates_duplicate: bool = False


@dataclass(frozen=True, slots=True)
class ListOutcome:
    duration_s: float = 0.2
    stale_by_s: float = 0.0
    never_answers: bool = False
    raises: Exception | None = None


@dataclass(frozen=True, slots=True)
class DeleteOutcome:
    duration_s: float = 1.0
    # Time between the deletion and its answer.
    answer_delay_s: float = 0.0
    never_answers: bool = False
    # The caller gets this error. `takes_effect` says whether the machine is deleted.
    raises: Exception | None = None
    takes_effect: bool = True


@dataclass(slots=True)
class FaultRates:
    """Shares of calls with each fault, from 0 to 1."""

    create_ambiguous: float = 0.0
    create_refused: float = 0.0
    create_slow: float = 0.0
    list_failed: float = 0.0
    list_stale: float = 0.0
    list_slow: float = 0.0
    delete_failed: float = 0.0
    delete_slow: float = 0.0

    def clear(self) -> None:
        for rate in fields(self):
            setattr(self, rate.name, 0.0)


@dataclass(slots=True)
class MachineRecord:
    """One machine from creation to deletion. Times are those of the virtual clock."""

    id: str
    name: str
    fleet: str
    slot: int
    created_at: float
    is_duplicate: bool = False
    running_at: float = FOREVER
    exited_at: float = FOREVER
    deleted_at: float = FOREVER

    def is_billed(self, at: float) -> bool:
        return self.created_at <= at < self.deleted_at

    def state(self, at: float) -> MachineState:
        if at >= self.exited_at:
            return MachineState.EXITED
        return MachineState.RUNNING if at >= self.running_at else MachineState.BOOTING


class Stoppable(Protocol):
    """The program on a machine."""

    def stop(self) -> None: ...


@dataclass(slots=True)
class SimulatedCloud:
    """The machines of one fleet, and the Provider that creates, lists and deletes them."""

    fleet: str
    rng: Random
    trace: Trace
    # The age of the oldest list, and the time after a failed create call in which its machine may still appear.
    max_list_age_s: float = 0.0
    max_creation_delay_s: float = 0.0
    # None: machines are free.
    price_micros_per_hour: int | None = None
    price_micros_per_month: int | None = None
    billing_unit_s: int = 1
    start_worker: Callable[[MachineRecord], Stoppable] | None = None
    rates: FaultRates = field(default_factory=FaultRates)
    machines: dict[str, MachineRecord] = field(default_factory=dict)
    decisions: FaultDecisions = field(default_factory=FaultDecisions)
    # Called when a machine is created, and when a call to delete an existing machine arrives.
    on_created: Callable[[MachineRecord], None] = lambda _: None
    on_delete_requested: Callable[[MachineRecord], None] = lambda _: None
    create_calls: int = 0
    delete_calls: int = 0
    workers: dict[str, Stoppable] = field(default_factory=dict)
    _creates: deque[CreateOutcome] = field(default_factory=deque)
    _lists: deque[ListOutcome] = field(default_factory=deque)
    _deletes: deque[DeleteOutcome] = field(default_factory=deque)

    @property
    def traits(self) -> ProviderTraits:
        if self.max_list_age_s == 0 and self.max_creation_delay_s == 0:
            return ProviderTraits(billing_unit_s=self.billing_unit_s)
        # Twice the age: a list may be that old when it is made, and take as long to arrive.
        return ProviderTraits(
            absence_grace_s=2 * self.max_list_age_s,
            creation_lateness_s=self.max_creation_delay_s + self.max_list_age_s,
            orphan_grace_s=self.max_list_age_s,
            billing_unit_s=self.billing_unit_s,
        )

    # ---------------------------------------------------------------------------------------------- scripted faults

    def next_create(self, **outcome: Any) -> None:
        self._creates.append(CreateOutcome(**outcome))

    def next_list(self, **outcome: Any) -> None:
        self._lists.append(ListOutcome(**outcome))

    def next_delete(self, **outcome: Any) -> None:
        self._deletes.append(DeleteOutcome(**outcome))

    def clear_scripts(self) -> None:
        """Forget the scripted outcomes that no call has used yet."""
        for script in (self._creates, self._lists, self._deletes):
            script.clear()

    # --------------------------------------------------------------------------------------------------- provider

    async def create(self, request: MachineRequest) -> Machine:
        self.create_calls += 1
        outcome = self._creates.popleft() if self._creates else self._draw_create(request.name)
        self.trace.add("cloud", f"create {request.name}: {_describe(outcome)}")
        answer: asyncio.Future[Machine] = asyncio.get_running_loop().create_future()
        start_detached(self._create(request, outcome, answer))
        return await answer

    async def _create(self, request: MachineRequest, outcome: CreateOutcome, answer: asyncio.Future[Machine]) -> None:
        await asyncio.sleep(outcome.duration_s)
        if outcome.raises is not None:
            _fail(answer, outcome.raises)
            return
        if outcome.fails_without_effect or outcome.takes_effect_late_s is not None:
            _fail(answer, Ambiguous(f"creating {request.name}: the connection broke"))
            if outcome.takes_effect_late_s is None:
                return
            await asyncio.sleep(outcome.takes_effect_late_s)
        record = self.add_machine(request)
        if outcome.creates_duplicate:
            self.add_machine(request, is_duplicate=True)
        if outcome.never_answers:
            return
        if outcome.times_out_after_taking_effect:
            _fail(answer, Ambiguous(f"creating {request.name}: no answer in time"))
        elif not answer.done():
            answer.set_result(self._machine(record, asyncio.get_running_loop().time()))

    async def list_machines(self) -> tuple[Machine, ...]:
        outcome = self._lists.popleft() if self._lists else self._draw_list()
        # A list shows the state when the request arrived, or an older one.
        as_of = asyncio.get_running_loop().time() - outcome.stale_by_s
        if outcome != ListOutcome():
            self.trace.add("cloud", f"list: {_describe(outcome)}")
        await asyncio.sleep(FOREVER if outcome.never_answers else outcome.duration_s)
        if outcome.raises is not None:
            raise outcome.raises
        return tuple(self._machine(record, as_of) for record in self.machines.values() if record.is_billed(as_of))

    async def delete(self, machine: Machine) -> datetime | None:
        self.delete_calls += 1
        outcome = self._deletes.popleft() if self._deletes else self._draw_delete(machine.name)
        self.trace.add("cloud", f"delete {machine.id} of {machine.name}: {_describe(outcome)}")
        answer: asyncio.Future[datetime | None] = asyncio.get_running_loop().create_future()
        start_detached(self._delete(machine.id, outcome, answer))
        return await answer

    async def _delete(self, machine_id: str, outcome: DeleteOutcome, answer: asyncio.Future[datetime | None]) -> None:
        record = self.machines.get(machine_id)
        existed = record is not None and record.deleted_at == FOREVER
        if record is not None and existed:
            self.on_delete_requested(record)
        await asyncio.sleep(outcome.duration_s)
        if outcome.takes_effect:
            self.remove_machine(machine_id)
        await asyncio.sleep(outcome.answer_delay_s)
        if outcome.raises is not None:
            _fail(answer, outcome.raises)
        elif not outcome.never_answers and not answer.done():
            # The deletion time is unknown for a machine that was already gone.
            answer.set_result(to_datetime(record.deleted_at) if record is not None and existed else None)

    async def prepare(self, machine: Machine, host_key: str | None, on_host_key: OnHostKey) -> Preparation:
        return Preparation()

    async def close(self) -> None:
        pass

    # -------------------------------------------------------------------------------------------------- machines

    def add_machine(
        self, request: MachineRequest, *, is_duplicate: bool = False, machine_id: str | None = None
    ) -> MachineRecord:
        """Record a new machine and start its program. A vendor's emulator calls this with its own machine id."""
        now = asyncio.get_running_loop().time()
        machine_id = machine_id or f"m{len(self.machines)}-{request.fleet}"
        record = MachineRecord(machine_id, request.name, request.fleet, request.slot, now, is_duplicate=is_duplicate)
        self.machines[record.id] = record
        self.trace.add("cloud", f"{record.id} of {record.name} created")
        self.on_created(record)
        if self.start_worker is not None:
            self.workers[record.id] = self.start_worker(record)
        return record

    def remove_machine(self, machine_id: str) -> None:
        """Stop billing a machine and stop its program. Does nothing if it is already gone."""
        record = self.machines.get(machine_id)
        if record is None or record.deleted_at != FOREVER:
            return
        record.deleted_at = asyncio.get_running_loop().time()
        self.trace.add("cloud", f"{record.id} of {record.name} deleted")
        worker = self.workers.pop(machine_id, None)
        if worker is not None:
            worker.stop()

    def mark_exited(self, machine_id: str) -> None:
        """The program on a machine has ended. The machine still exists and is billed."""
        record = self.machines[machine_id]
        record.exited_at = min(record.exited_at, asyncio.get_running_loop().time())

    @property
    def remaining_machine_ids(self) -> list[str]:
        """Machines that were not deleted. Usable after the run, when there is no virtual clock."""
        return [record.id for record in self.machines.values() if record.deleted_at == FOREVER]

    def billed_machines(self) -> list[MachineRecord]:
        now = asyncio.get_running_loop().time()
        return [record for record in self.machines.values() if record.is_billed(now)]

    def cost_micros(self, record: MachineRecord, until: datetime) -> int:
        """The cost of a machine deleted at `until`: every billing unit that started before, and at least one."""
        if self.price_micros_per_hour is None:
            return 0
        begins, unit = to_datetime(record.created_at), timedelta(seconds=self.billing_unit_s)
        units: Counter[tuple[int, int]] = Counter()
        while begins < until or not units:
            units[begins.year, begins.month] += 1
            begins += unit
        price = Fraction(self.price_micros_per_hour * self.billing_unit_s, 3600)
        months = [floor(price * count + Fraction(1, 2)) for count in units.values()]
        cap = self.price_micros_per_month
        return sum(months) if cap is None else sum(min(month, cap) for month in months)

    def _machine(self, record: MachineRecord, as_of: float) -> Machine:
        price, cap = self.price_micros_per_hour, self.price_micros_per_month
        return Machine(
            record.id,
            record.name,
            record.state(as_of),
            created_at=to_datetime(record.created_at),
            instance_type="sim",
            price_micros_per_hour=price,
            price_parts=() if price is None or cap is None else (PricePart(price, cap),),
            currency=None if price is None else "EUR",
        )

    # ---------------------------------------------------------------------------------------------- random outcomes

    def allow(self, kind: str, worker_id: str | None = None) -> bool:
        """Whether to inject a drawn fault of this fleet's machines."""
        return self.decisions.allow(self.fleet, kind, worker_id)

    def _draw_create(self, worker_id: str) -> CreateOutcome:
        rng, rates, roll = self.rng, self.rates, self.rng.random()
        duration_s = rng.uniform(0.1, 3.0)
        if roll < rates.create_ambiguous:
            kinds: list[CreateOutcome] = [
                CreateOutcome(duration_s, times_out_after_taking_effect=True),
                CreateOutcome(duration_s, takes_effect_late_s=rng.uniform(0.0, self.max_creation_delay_s)),
                CreateOutcome(duration_s, fails_without_effect=True),
                CreateOutcome(duration_s, never_answers=True),
                CreateOutcome(duration_s, raises=RuntimeError("adapter bug")),
            ]
            chosen = rng.choice(kinds)
            return chosen if self.allow("create_ambiguous", worker_id) else CreateOutcome(duration_s)
        roll -= rates.create_ambiguous
        if roll < rates.create_refused:
            problems: list[ProviderError] = [
                Refused("creating: account limit reached"),
                NoCapacity("creating: no capacity"),
                Throttled("creating: too many requests", retry_after_s=rng.uniform(1.0, 30.0)),
            ]
            problem = rng.choice(problems)
            is_throttled = isinstance(problem, Throttled)
            kind = "create_throttled" if is_throttled else "create_refused"
            return CreateOutcome(duration_s, raises=problem if self.allow(kind, worker_id) else None)
        roll -= rates.create_refused
        if roll < rates.create_slow:
            slow_s = rng.uniform(3.0, 55.0)
            return CreateOutcome(slow_s if self.allow("create_slow", worker_id) else duration_s)
        return CreateOutcome(duration_s)

    def _draw_list(self) -> ListOutcome:
        rng, rates, roll = self.rng, self.rates, self.rng.random()
        if roll < rates.list_failed:
            problems: list[Exception] = [Unavailable("listing: 503"), RuntimeError("adapter bug")]
            failed = rng.choice([ListOutcome(raises=rng.choice(problems)), ListOutcome(never_answers=True)])
            return failed if self.allow("list_failed") else ListOutcome()
        roll -= rates.list_failed
        if roll < rates.list_stale:
            stale = ListOutcome(stale_by_s=rng.uniform(0.0, self.max_list_age_s))
            return stale if self.allow("list_stale") else ListOutcome()
        roll -= rates.list_stale
        if roll < rates.list_slow:
            slow = ListOutcome(duration_s=rng.uniform(1.0, 50.0))
            return slow if self.allow("list_slow") else ListOutcome()
        return ListOutcome()

    def _draw_delete(self, worker_id: str) -> DeleteOutcome:
        rng, rates, roll = self.rng, self.rates, self.rng.random()
        duration_s = rng.uniform(0.1, 2.0)
        if roll < rates.delete_failed:
            kinds = [
                DeleteOutcome(duration_s, raises=Unavailable("deleting: 503"), takes_effect=False),
                DeleteOutcome(duration_s, raises=Unavailable("deleting: 503")),
                DeleteOutcome(duration_s, raises=Refused("deleting: denied"), takes_effect=False),
                DeleteOutcome(duration_s, raises=Throttled("deleting: too many requests", 5.0), takes_effect=False),
                DeleteOutcome(duration_s, raises=RuntimeError("adapter bug"), takes_effect=False),
                DeleteOutcome(duration_s, never_answers=True),
                DeleteOutcome(duration_s, never_answers=True, takes_effect=False),
            ]
            chosen = rng.choice(kinds)
            return chosen if self.allow("delete_failed", worker_id) else DeleteOutcome(duration_s)
        roll -= rates.delete_failed
        if roll < rates.delete_slow:
            slow = rng.choice(
                [DeleteOutcome(rng.uniform(2.0, 80.0)), DeleteOutcome(duration_s, rng.uniform(2.0, 80.0))]
            )
            return slow if self.allow("delete_slow", worker_id) else DeleteOutcome(duration_s)
        return DeleteOutcome(duration_s)


def _fail(answer: asyncio.Future[Any], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)


def _describe(outcome: CreateOutcome | ListOutcome | DeleteOutcome) -> str:
    """The fields that differ from the default outcome."""
    usual = type(outcome)()
    values = {item.name: getattr(outcome, item.name) for item in fields(outcome)}
    unusual = [
        f"{name}={value:.1f}" if isinstance(value, float) else f"{name}={value!r}"
        for name, value in values.items()
        if value != getattr(usual, name)
    ]
    return ", ".join(unusual) or "no fault"
