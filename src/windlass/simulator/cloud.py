"""A cloud that keeps the contract of ports/provider.py and nothing more, and keeps books.

What it may do to a caller: answer late or never, take effect after it failed, refuse, run out, throttle, list what was
true a while ago, fail to list, delete slowly, deny, not answer a deletion that happened. What it never does: return a
part of the list as the whole, say that a machine is gone while it is there, take longer than its traits say.

Faults are scripted, `cloud.next_create(times_out_after_taking_effect=True)`, or drawn from `rates`. A call that was
sent happens, whatever becomes of its caller. `books` has every machine there ever was: checkers read it, nobody else.
Where machines have a price, `charged` is its own ledger: counted unit by unit, and by nobody else's arithmetic.
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

from windlass.model.cost import PricePart
from windlass.model.errors import Ambiguous, NoCapacity, ProviderError, Refused, Throttled, Unavailable
from windlass.model.machine import Machine, MachineRequest, MachineState, Preparation, ProviderTraits
from windlass.ports.provider import OnHostKey
from windlass.simulator.loop import to_datetime
from windlass.simulator.processes import start_detached
from windlass.simulator.trace import Trace

FOREVER = 1e9


@dataclass(frozen=True, slots=True)
class CreateOutcome:
    duration_s: float = 1.0
    # The caller is told Ambiguous, or nothing at all, and the machine is there.
    times_out_after_taking_effect: bool = False
    # The caller is told Ambiguous, and the machine comes this much later.
    takes_effect_late_s: float | None = None
    # The caller is told Ambiguous, and no machine ever comes.
    fails_without_effect: bool = False
    never_answers: bool = False
    raises: Exception | None = None
    # Beyond the contract: the provider makes two, as a client that repeats a request by itself would.
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
    # The machine is gone, and the caller learns it this much later, or never.
    answer_delay_s: float = 0.0
    never_answers: bool = False
    # The caller is told that it failed; the machine goes all the same, or stays.
    raises: Exception | None = None
    takes_effect: bool = True


@dataclass(slots=True)
class FaultRates:
    """Shares of calls that go wrong, from 0 to 1."""

    create_ambiguous: float = 0.0
    create_refused: float = 0.0
    create_slow: float = 0.0
    list_failed: float = 0.0
    list_stale: float = 0.0
    list_slow: float = 0.0
    delete_failed: float = 0.0
    delete_slow: float = 0.0

    def clear(self) -> None:
        self.create_ambiguous = self.create_refused = self.create_slow = 0.0
        self.list_failed = self.list_stale = self.list_slow = 0.0
        self.delete_failed = self.delete_slow = 0.0


@dataclass(slots=True)
class MachineRecord:
    """A machine in the books."""

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
    """What lives on a machine. It tells the machine when it runs, and when it has exited."""

    def stop(self) -> None:
        """Its machine is gone."""


@dataclass(slots=True)
class SimulatedCloud:
    """The account of one fleet, a Provider for it, and its books."""

    fleet: str
    rng: Random
    trace: Trace
    # How old a list may be, and how long after a failed create its machine may still come.
    max_list_age_s: float = 0.0
    max_creation_delay_s: float = 0.0
    # None: its machines cost nothing.
    price_micros_per_hour: int | None = None
    price_micros_per_month: int | None = None
    billing_unit_s: int = 1
    start_worker: Callable[[MachineRecord], Stoppable] | None = None
    rates: FaultRates = field(default_factory=FaultRates)
    machines: dict[str, MachineRecord] = field(default_factory=dict)
    # Told of every machine that begins to be billed, and of every one that somebody asks to delete.
    on_created: Callable[[MachineRecord], None] = lambda _: None
    on_delete_requested: Callable[[MachineRecord], None] = lambda _: None
    create_calls: int = 0
    list_calls: int = 0
    delete_calls: int = 0
    workers: dict[str, Stoppable] = field(default_factory=dict)
    _creates: deque[CreateOutcome] = field(default_factory=deque)
    _lists: deque[ListOutcome] = field(default_factory=deque)
    _deletes: deque[DeleteOutcome] = field(default_factory=deque)

    @property
    def traits(self) -> ProviderTraits:
        if self.max_list_age_s == 0 and self.max_creation_delay_s == 0:
            return ProviderTraits(billing_unit_s=self.billing_unit_s)
        # Missing for as long as a list may be old, seen from a list that was itself under way for a while.
        return ProviderTraits(
            absence_grace_s=2 * self.max_list_age_s,
            creation_lateness_s=self.max_creation_delay_s + self.max_list_age_s,
            orphan_grace_s=self.max_list_age_s,
            billing_unit_s=self.billing_unit_s,
        )

    # ---------------------------------------------------------------------------------------------------- scripts

    def next_create(self, **fate: Any) -> None:
        self._creates.append(CreateOutcome(**fate))

    def next_list(self, **fate: Any) -> None:
        self._lists.append(ListOutcome(**fate))

    def next_delete(self, **fate: Any) -> None:
        self._deletes.append(DeleteOutcome(**fate))

    # --------------------------------------------------------------------------------------------------- provider

    async def create(self, request: MachineRequest) -> Machine:
        self.create_calls += 1
        fate = self._creates.popleft() if self._creates else self._draw_create()
        self.trace.add("cloud", f"create {request.name}: {_said(fate, CreateOutcome())}")
        answer: asyncio.Future[Machine] = asyncio.get_running_loop().create_future()
        start_detached(self._create(request, fate, answer))
        return await answer

    async def _create(self, request: MachineRequest, fate: CreateOutcome, answer: asyncio.Future[Machine]) -> None:
        await asyncio.sleep(fate.duration_s)
        if fate.raises is not None:
            _fail(answer, fate.raises)
            return
        if fate.fails_without_effect or fate.takes_effect_late_s is not None:
            _fail(answer, Ambiguous(f"creating {request.name}: the connection broke"))
            if fate.takes_effect_late_s is None:
                return
            await asyncio.sleep(fate.takes_effect_late_s)
        entry = self.add_machine(request)
        if fate.creates_duplicate:
            self.add_machine(request, is_duplicate=True)
        if fate.never_answers:
            return
        if fate.times_out_after_taking_effect:
            _fail(answer, Ambiguous(f"creating {request.name}: no answer in time"))
        elif not answer.done():
            answer.set_result(self._machine(entry, asyncio.get_running_loop().time()))

    async def list_machines(self) -> tuple[Machine, ...]:
        self.list_calls += 1
        fate = self._lists.popleft() if self._lists else self._draw_list()
        # What is listed was true when the question arrived, or earlier.
        as_of = asyncio.get_running_loop().time() - fate.stale_by_s
        if fate != ListOutcome():
            self.trace.add("cloud", f"list: {_said(fate, ListOutcome())}")
        await asyncio.sleep(FOREVER if fate.never_answers else fate.duration_s)
        if fate.raises is not None:
            raise fate.raises
        return tuple(self._machine(entry, as_of) for entry in self.machines.values() if entry.is_billed(as_of))

    async def delete(self, machine: Machine) -> datetime | None:
        self.delete_calls += 1
        fate = self._deletes.popleft() if self._deletes else self._draw_delete()
        self.trace.add("cloud", f"delete {machine.id} of {machine.name}: {_said(fate, DeleteOutcome())}")
        answer: asyncio.Future[datetime | None] = asyncio.get_running_loop().create_future()
        start_detached(self._delete(machine.id, fate, answer))
        return await answer

    async def _delete(self, machine_id: str, fate: DeleteOutcome, answer: asyncio.Future[datetime | None]) -> None:
        entry = self.machines.get(machine_id)
        is_there = entry is not None and entry.deleted_at == FOREVER
        if entry is not None and is_there:
            self.on_delete_requested(entry)
        await asyncio.sleep(fate.duration_s)
        if fate.takes_effect:
            self.remove_machine(machine_id)
        await asyncio.sleep(fate.answer_delay_s)
        if fate.raises is not None:
            _fail(answer, fate.raises)
        elif not fate.never_answers and not answer.done():
            # Of one that was gone before, nobody says since when.
            answer.set_result(to_datetime(entry.deleted_at) if entry is not None and is_there else None)

    async def prepare(self, machine: Machine, host_key: str | None, on_host_key: OnHostKey) -> Preparation:  # noqa: ARG002
        return Preparation()

    async def close(self) -> None:
        pass

    # -------------------------------------------------------------------------------------------------- machines

    def add_machine(
        self, request: MachineRequest, *, is_duplicate: bool = False, machine_id: str | None = None
    ) -> MachineRecord:
        """A machine is there, and billed. A vendor's emulator calls this with its own id, `end` and `billed`, and keeps
        no books."""
        now = asyncio.get_running_loop().time()
        machine_id = machine_id or f"m{len(self.machines)}-{request.fleet}"
        entry = MachineRecord(machine_id, request.name, request.fleet, request.slot, now, is_duplicate=is_duplicate)
        self.machines[entry.id] = entry
        self.trace.add("cloud", f"{entry.id} of {entry.name} begins")
        self.on_created(entry)
        if self.start_worker is not None:
            self.workers[entry.id] = self.start_worker(entry)
        return entry

    def remove_machine(self, machine_id: str) -> None:
        """It is gone, and billed no more."""
        entry = self.machines.get(machine_id)
        if entry is None or entry.deleted_at != FOREVER:
            return
        entry.deleted_at = asyncio.get_running_loop().time()
        self.trace.add("cloud", f"{entry.id} of {entry.name} is gone")
        tenant = self.workers.pop(machine_id, None)
        if tenant is not None:
            tenant.stop()

    def mark_exited(self, machine_id: str) -> None:
        """What lived on it has ended; it is still there, and billed."""
        entry = self.machines[machine_id]
        entry.exited_at = min(entry.exited_at, asyncio.get_running_loop().time())

    @property
    def remaining_machine_ids(self) -> list[str]:
        """When all is over: the machines that were never ended."""
        return [entry.id for entry in self.machines.values() if entry.deleted_at == FOREVER]

    def billed_machines(self) -> list[MachineRecord]:
        now = asyncio.get_running_loop().time()
        return [entry for entry in self.machines.values() if entry.is_billed(now)]

    # -------------------------------------------------------------------------------------------------------- money

    def cost_micros(self, entry: MachineRecord, until: datetime) -> int:
        """What a machine costs that is gone at that time: every unit that begins before, at least one."""
        if self.price_micros_per_hour is None:
            return 0
        begins, unit = to_datetime(entry.created_at), timedelta(seconds=self.billing_unit_s)
        units: Counter[tuple[int, int]] = Counter()
        while begins < until or not units:
            units[begins.year, begins.month] += 1
            begins += unit
        price = Fraction(self.price_micros_per_hour * self.billing_unit_s, 3600)
        months = [floor(price * count + Fraction(1, 2)) for count in units.values()]
        cap = self.price_micros_per_month
        return sum(months) if cap is None else sum(min(month, cap) for month in months)

    @property
    def _price_parts(self) -> tuple[PricePart, ...]:
        price, cap = self.price_micros_per_hour, self.price_micros_per_month
        return () if price is None or cap is None else (PricePart(price, cap),)

    def _machine(self, entry: MachineRecord, as_of: float) -> Machine:
        return Machine(
            entry.id,
            entry.name,
            entry.state(as_of),
            created_at=to_datetime(entry.created_at),
            instance_type="sim",
            price_micros_per_hour=self.price_micros_per_hour,
            price_parts=self._price_parts,
            currency=None if self.price_micros_per_hour is None else "EUR",
        )

    # ------------------------------------------------------------------------------------------------------- fates

    def _draw_create(self) -> CreateOutcome:
        rng, rates, roll = self.rng, self.rates, self.rng.random()
        duration_s = rng.uniform(0.1, 3.0)
        if roll < rates.create_ambiguous:
            kinds: list[CreateOutcome] = [
                CreateOutcome(duration_s, times_out_after_taking_effect=True),
                CreateOutcome(duration_s, takes_effect_late_s=rng.uniform(0.0, self.max_creation_delay_s)),
                CreateOutcome(duration_s, fails_without_effect=True),
                CreateOutcome(duration_s, never_answers=True),
                CreateOutcome(duration_s, raises=RuntimeError("a fault in the adapter")),
            ]
            return rng.choice(kinds)
        roll -= rates.create_ambiguous
        if roll < rates.create_refused:
            problems: list[ProviderError] = [
                Refused("creating: the limit of the account is reached"),
                NoCapacity("creating: no capacity"),
                Throttled("creating: too many requests", retry_after_s=rng.uniform(1.0, 30.0)),
            ]
            return CreateOutcome(duration_s, raises=rng.choice(problems))
        roll -= rates.create_refused
        return CreateOutcome(rng.uniform(3.0, 55.0) if roll < rates.create_slow else duration_s)

    def _draw_list(self) -> ListOutcome:
        rng, rates, roll = self.rng, self.rates, self.rng.random()
        if roll < rates.list_failed:
            problems: list[Exception] = [Unavailable("listing: 503"), RuntimeError("a fault in the adapter")]
            return rng.choice([ListOutcome(raises=rng.choice(problems)), ListOutcome(never_answers=True)])
        roll -= rates.list_failed
        if roll < rates.list_stale:
            return ListOutcome(stale_by_s=rng.uniform(0.0, self.max_list_age_s))
        roll -= rates.list_stale
        return ListOutcome(duration_s=rng.uniform(1.0, 50.0)) if roll < rates.list_slow else ListOutcome()

    def _draw_delete(self) -> DeleteOutcome:
        rng, rates, roll = self.rng, self.rates, self.rng.random()
        duration_s = rng.uniform(0.1, 2.0)
        if roll < rates.delete_failed:
            kinds = [
                DeleteOutcome(duration_s, raises=Unavailable("deleting: 503"), takes_effect=False),
                DeleteOutcome(duration_s, raises=Unavailable("deleting: 503")),
                DeleteOutcome(duration_s, raises=Refused("deleting: denied"), takes_effect=False),
                DeleteOutcome(duration_s, raises=Throttled("deleting: too many requests", 5.0), takes_effect=False),
                DeleteOutcome(duration_s, raises=RuntimeError("a fault in the adapter"), takes_effect=False),
                DeleteOutcome(duration_s, never_answers=True),
                DeleteOutcome(duration_s, never_answers=True, takes_effect=False),
            ]
            return rng.choice(kinds)
        roll -= rates.delete_failed
        if roll < rates.delete_slow:
            return rng.choice(
                [DeleteOutcome(rng.uniform(2.0, 80.0)), DeleteOutcome(duration_s, rng.uniform(2.0, 80.0))]
            )
        return DeleteOutcome(duration_s)


def _fail(answer: asyncio.Future[Any], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)


def _said(fate: Any, usual: Any) -> str:
    """What about it is unusual."""
    told = {field.name: getattr(fate, field.name) for field in fields(fate)}
    unusual = {name: value for name, value in told.items() if value != getattr(usual, name)}
    return (
        ", ".join(
            f"{name}={value:.1f}" if isinstance(value, float) else f"{name}={value!r}"
            for name, value in unusual.items()
        )
        or "as usual"
    )
