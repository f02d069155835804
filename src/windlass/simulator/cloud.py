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
from windlass.simulator.loop import moment
from windlass.simulator.processes import start_outside
from windlass.simulator.trace import Trace

FOREVER = 1e9


@dataclass(frozen=True, slots=True)
class CreateOutcome:
    takes_s: float = 1.0
    # The caller is told Ambiguous, or nothing at all, and the machine is there.
    times_out_after_taking_effect: bool = False
    # The caller is told Ambiguous, and the machine comes this much later.
    takes_effect_late_s: float | None = None
    # The caller is told Ambiguous, and no machine ever comes.
    fails_without_effect: bool = False
    never_answers: bool = False
    raises: Exception | None = None
    # Beyond the contract: the provider makes two, as a client that repeats a request by itself would.
    makes_double: bool = False


@dataclass(frozen=True, slots=True)
class ListOutcome:
    takes_s: float = 0.2
    is_old_s: float = 0.0
    never_answers: bool = False
    raises: Exception | None = None


@dataclass(frozen=True, slots=True)
class DeleteOutcome:
    takes_s: float = 1.0
    # The machine is gone, and the caller learns it this much later, or never.
    answers_late_s: float = 0.0
    never_answers: bool = False
    # The caller is told that it failed; the machine goes all the same, or stays.
    raises: Exception | None = None
    takes_effect: bool = True


@dataclass(slots=True)
class FaultRates:
    """Shares of calls that go wrong, from 0 to 1."""

    create_unclear: float = 0.0
    create_refused: float = 0.0
    create_slow: float = 0.0
    list_failed: float = 0.0
    list_old: float = 0.0
    list_slow: float = 0.0
    delete_failed: float = 0.0
    delete_slow: float = 0.0

    def clear_up(self) -> None:
        self.create_unclear = self.create_refused = self.create_slow = 0.0
        self.list_failed = self.list_old = self.list_slow = 0.0
        self.delete_failed = self.delete_slow = 0.0


@dataclass(slots=True)
class Entry:
    """A machine in the books."""

    id: str
    name: str
    fleet: str
    slot: int
    began_at: float
    is_double: bool = False
    runs_from: float = FOREVER
    exited_at: float = FOREVER
    gone_at: float = FOREVER

    def is_billed(self, at: float) -> bool:
        return self.began_at <= at < self.gone_at

    def state(self, at: float) -> MachineState:
        if at >= self.exited_at:
            return MachineState.EXITED
        return MachineState.RUNNING if at >= self.runs_from else MachineState.BOOTING


class Tenant(Protocol):
    """What lives on a machine. It tells the machine when it runs, and when it has exited."""

    def stop(self) -> None:
        """Its machine is gone."""


@dataclass(slots=True)
class SimulatedCloud:
    """The account of one fleet, a Provider for it, and its books."""

    fleet: str
    rng: Random
    story: Trace
    # How old a list may be, and how long after a failed create its machine may still come.
    max_list_age_s: float = 0.0
    max_late_s: float = 0.0
    # None: its machines cost nothing.
    price_micros_per_hour: int | None = None
    price_micros_per_month: int | None = None
    billing_unit_s: int = 1
    move_in: Callable[[Entry], Tenant] | None = None
    rates: FaultRates = field(default_factory=FaultRates)
    books: dict[str, Entry] = field(default_factory=dict)
    # Told of every machine that begins to be billed, and of every one that somebody asks to delete.
    on_begun: Callable[[Entry], None] = lambda _: None
    on_ending: Callable[[Entry], None] = lambda _: None
    created_calls: int = 0
    listed_calls: int = 0
    deleted_calls: int = 0
    _tenants: dict[str, Tenant] = field(default_factory=dict)
    _creates: deque[CreateOutcome] = field(default_factory=deque)
    _lists: deque[ListOutcome] = field(default_factory=deque)
    _deletes: deque[DeleteOutcome] = field(default_factory=deque)

    @property
    def traits(self) -> ProviderTraits:
        if self.max_list_age_s == 0 and self.max_late_s == 0:
            return ProviderTraits(billing_unit_s=self.billing_unit_s)
        # Missing for as long as a list may be old, seen from a list that was itself under way for a while.
        return ProviderTraits(
            absence_grace_s=2 * self.max_list_age_s,
            creation_lateness_s=self.max_late_s + self.max_list_age_s,
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
        self.created_calls += 1
        fate = self._creates.popleft() if self._creates else self._draw_create()
        self.story.tell("cloud", f"create {request.name}: {_said(fate, CreateOutcome())}")
        answer: asyncio.Future[Machine] = asyncio.get_running_loop().create_future()
        start_outside(self._create(request, fate, answer))
        return await answer

    async def _create(self, request: MachineRequest, fate: CreateOutcome, answer: asyncio.Future[Machine]) -> None:
        await asyncio.sleep(fate.takes_s)
        if fate.raises is not None:
            _fail(answer, fate.raises)
            return
        if fate.fails_without_effect or fate.takes_effect_late_s is not None:
            _fail(answer, Ambiguous(f"creating {request.name}: the connection broke"))
            if fate.takes_effect_late_s is None:
                return
            await asyncio.sleep(fate.takes_effect_late_s)
        entry = self.begin(request)
        if fate.makes_double:
            self.begin(request, is_double=True)
        if fate.never_answers:
            return
        if fate.times_out_after_taking_effect:
            _fail(answer, Ambiguous(f"creating {request.name}: no answer in time"))
        elif not answer.done():
            answer.set_result(self._machine(entry, asyncio.get_running_loop().time()))

    async def list_machines(self) -> tuple[Machine, ...]:
        self.listed_calls += 1
        fate = self._lists.popleft() if self._lists else self._draw_list()
        # What is listed was true when the question arrived, or earlier.
        as_of = asyncio.get_running_loop().time() - fate.is_old_s
        if fate != ListOutcome():
            self.story.tell("cloud", f"list: {_said(fate, ListOutcome())}")
        await asyncio.sleep(FOREVER if fate.never_answers else fate.takes_s)
        if fate.raises is not None:
            raise fate.raises
        return tuple(self._machine(entry, as_of) for entry in self.books.values() if entry.is_billed(as_of))

    async def delete(self, machine: Machine) -> datetime | None:
        self.deleted_calls += 1
        fate = self._deletes.popleft() if self._deletes else self._draw_delete()
        self.story.tell("cloud", f"delete {machine.id} of {machine.name}: {_said(fate, DeleteOutcome())}")
        answer: asyncio.Future[datetime | None] = asyncio.get_running_loop().create_future()
        start_outside(self._delete(machine.id, fate, answer))
        return await answer

    async def _delete(self, machine_id: str, fate: DeleteOutcome, answer: asyncio.Future[datetime | None]) -> None:
        entry = self.books.get(machine_id)
        is_there = entry is not None and entry.gone_at == FOREVER
        if entry is not None and is_there:
            self.on_ending(entry)
        await asyncio.sleep(fate.takes_s)
        if fate.takes_effect:
            self.end(machine_id)
        await asyncio.sleep(fate.answers_late_s)
        if fate.raises is not None:
            _fail(answer, fate.raises)
        elif not fate.never_answers and not answer.done():
            # Of one that was gone before, nobody says since when.
            answer.set_result(moment(entry.gone_at) if entry is not None and is_there else None)

    async def prepare(self, machine: Machine, host_key: str | None, on_host_key: OnHostKey) -> Preparation:  # noqa: ARG002
        return Preparation()

    async def close(self) -> None:
        pass

    # -------------------------------------------------------------------------------------------------- machines

    def begin(self, request: MachineRequest, *, is_double: bool = False, machine_id: str | None = None) -> Entry:
        """A machine is there, and billed. A vendor's emulator calls this with its own id, `end` and `billed`, and keeps
        no books."""
        now = asyncio.get_running_loop().time()
        machine_id = machine_id or f"m{len(self.books)}-{request.fleet}"
        entry = Entry(machine_id, request.name, request.fleet, request.slot, now, is_double=is_double)
        self.books[entry.id] = entry
        self.story.tell("cloud", f"{entry.id} of {entry.name} begins")
        self.on_begun(entry)
        if self.move_in is not None:
            self._tenants[entry.id] = self.move_in(entry)
        return entry

    def end(self, machine_id: str) -> None:
        """It is gone, and billed no more."""
        entry = self.books.get(machine_id)
        if entry is None or entry.gone_at != FOREVER:
            return
        entry.gone_at = asyncio.get_running_loop().time()
        self.story.tell("cloud", f"{entry.id} of {entry.name} is gone")
        tenant = self._tenants.pop(machine_id, None)
        if tenant is not None:
            tenant.stop()

    def exited(self, machine_id: str) -> None:
        """What lived on it has ended; it is still there, and billed."""
        entry = self.books[machine_id]
        entry.exited_at = min(entry.exited_at, asyncio.get_running_loop().time())

    @property
    def billed_at_end(self) -> list[str]:
        """When all is over: the machines that were never ended."""
        return [entry.id for entry in self.books.values() if entry.gone_at == FOREVER]

    def billed(self) -> list[Entry]:
        now = asyncio.get_running_loop().time()
        return [entry for entry in self.books.values() if entry.is_billed(now)]

    # -------------------------------------------------------------------------------------------------------- money

    def charged(self, entry: Entry, until: datetime) -> int:
        """What a machine costs that is gone at that time: every unit that begins before, at least one."""
        if self.price_micros_per_hour is None:
            return 0
        begins, unit = moment(entry.began_at), timedelta(seconds=self.billing_unit_s)
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

    def _machine(self, entry: Entry, as_of: float) -> Machine:
        return Machine(
            entry.id,
            entry.name,
            entry.state(as_of),
            created_at=moment(entry.began_at),
            instance_type="sim",
            price_micros_per_hour=self.price_micros_per_hour,
            price_parts=self._price_parts,
            currency=None if self.price_micros_per_hour is None else "EUR",
        )

    # ------------------------------------------------------------------------------------------------------- fates

    def _draw_create(self) -> CreateOutcome:
        rng, rates, roll = self.rng, self.rates, self.rng.random()
        takes_s = rng.uniform(0.1, 3.0)
        if roll < rates.create_unclear:
            kinds: list[CreateOutcome] = [
                CreateOutcome(takes_s, times_out_after_taking_effect=True),
                CreateOutcome(takes_s, takes_effect_late_s=rng.uniform(0.0, self.max_late_s)),
                CreateOutcome(takes_s, fails_without_effect=True),
                CreateOutcome(takes_s, never_answers=True),
                CreateOutcome(takes_s, raises=RuntimeError("a fault in the adapter")),
            ]
            return rng.choice(kinds)
        roll -= rates.create_unclear
        if roll < rates.create_refused:
            problems: list[ProviderError] = [
                Refused("creating: the limit of the account is reached"),
                NoCapacity("creating: no capacity"),
                Throttled("creating: too many requests", retry_after_s=rng.uniform(1.0, 30.0)),
            ]
            return CreateOutcome(takes_s, raises=rng.choice(problems))
        roll -= rates.create_refused
        return CreateOutcome(rng.uniform(3.0, 55.0) if roll < rates.create_slow else takes_s)

    def _draw_list(self) -> ListOutcome:
        rng, rates, roll = self.rng, self.rates, self.rng.random()
        if roll < rates.list_failed:
            problems: list[Exception] = [Unavailable("listing: 503"), RuntimeError("a fault in the adapter")]
            return rng.choice([ListOutcome(raises=rng.choice(problems)), ListOutcome(never_answers=True)])
        roll -= rates.list_failed
        if roll < rates.list_old:
            return ListOutcome(is_old_s=rng.uniform(0.0, self.max_list_age_s))
        roll -= rates.list_old
        return ListOutcome(takes_s=rng.uniform(1.0, 50.0)) if roll < rates.list_slow else ListOutcome()

    def _draw_delete(self) -> DeleteOutcome:
        rng, rates, roll = self.rng, self.rates, self.rng.random()
        takes_s = rng.uniform(0.1, 2.0)
        if roll < rates.delete_failed:
            kinds = [
                DeleteOutcome(takes_s, raises=Unavailable("deleting: 503"), takes_effect=False),
                DeleteOutcome(takes_s, raises=Unavailable("deleting: 503")),
                DeleteOutcome(takes_s, raises=Refused("deleting: denied"), takes_effect=False),
                DeleteOutcome(takes_s, raises=Throttled("deleting: too many requests", 5.0), takes_effect=False),
                DeleteOutcome(takes_s, raises=RuntimeError("a fault in the adapter"), takes_effect=False),
                DeleteOutcome(takes_s, never_answers=True),
                DeleteOutcome(takes_s, never_answers=True, takes_effect=False),
            ]
            return rng.choice(kinds)
        roll -= rates.delete_failed
        if roll < rates.delete_slow:
            return rng.choice([DeleteOutcome(rng.uniform(2.0, 80.0)), DeleteOutcome(takes_s, rng.uniform(2.0, 80.0))])
        return DeleteOutcome(takes_s)


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
