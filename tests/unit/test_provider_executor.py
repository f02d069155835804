"""Boot logs and deletions: what a deletion waits for, and when it does not."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import pytest

from support.simulator.loop import run, virtual_now
from support.snapshots import machine, snapshot, worker
from support.virtual_time import in_virtual_time
from windlass.control.executor import BOOT_LOG_PAUSE_S, BOOT_LOG_TIMEOUT_S, MAX_BOOT_LOGS, ProviderExecutor
from windlass.control.outcome_log import OutcomeLog
from windlass.model.action import Action, Delete, DeleteOrphan, Plan
from windlass.model.errors import Throttled, Unavailable
from windlass.model.lease import Candidate, LeaseGuard
from windlass.model.machine import Machine, ProviderTraits
from windlass.model.outcome import Deleted, OrphanDeleted, Outcome
from windlass.model.snapshot import PlannerState, Snapshot


@dataclass
class LoggingProvider:
    """Deletes at once. `log_takes_s`: how long it takes to read a boot log."""

    log_takes_s: float = 0.0
    log_error: Exception | None = None
    deletion_error: Exception | None = None
    read: list[str] = field(default_factory=list)
    deleted_at: list[float] = field(default_factory=list)
    traits: ProviderTraits = field(default_factory=ProviderTraits)

    async def boot_log(self, machine: Machine) -> str:
        self.read.append(machine.name)
        await asyncio.sleep(self.log_takes_s)
        if self.log_error is not None:
            raise self.log_error
        return f"log of {machine.name}"

    async def delete(self, machine: Machine) -> datetime | None:
        self.deleted_at.append(asyncio.get_running_loop().time())
        if self.deletion_error is not None:
            raise self.deletion_error
        return None


@dataclass
class PricedProvider(LoggingProvider):
    """Knows a price for every machine whose type and place are known."""

    async def price(self, machine: Machine) -> Machine:
        assert machine.instance_type == "cx23" and machine.place == "nbg1"
        return replace(machine, price_micros_per_hour=6_400)


class ExecutorFixture:
    def __init__(self, provider: LoggingProvider) -> None:
        self.provider: Any = provider
        self.recorded: list[Outcome] = []
        lease = LeaseGuard(Candidate("me", 10_000))
        lease.renewed(asyncio.get_running_loop().time())
        self._outcomes = OutcomeLog()
        self._executor = ProviderExecutor(
            self.provider, lease, self._outcomes, call_timeout_s=60, now=virtual_now, on_late_outcome=lambda: None,
            record_at_once=self._record,
        )  # fmt: skip

    async def _record(self, outcome: Outcome) -> None:
        self.recorded.append(outcome)

    async def _record_all(self, outcomes: list[Outcome]) -> None:
        self.recorded += outcomes

    async def execute(self, seen: Snapshot, *actions: Action) -> None:
        self.recorded.clear()
        await self._executor.execute(seen, Plan(actions, PlannerState(), ""), (), None)
        await self._outcomes.record(self._record_all)

    async def delete(self, *names: str, heartbeat: float | None = None) -> list[str]:
        """Delete the machines of these failed workers. Returns the boot logs of the outcomes."""
        failed = [worker(name, n, "error", heartbeat=heartbeat) for n, name in enumerate(names)]
        actions = tuple(Delete(view.id, view.machine_id, "BOOT_TIMEOUT", "no heartbeat") for view in failed)
        await self.execute(snapshot(*failed), *actions)
        return [outcome.boot_log for outcome in self.recorded if isinstance(outcome, Deleted)]


@in_virtual_time
async def test_boot_log_of_a_worker_that_never_joined_is_kept() -> None:
    fixture = ExecutorFixture(LoggingProvider())
    assert await fixture.delete("a") == ["log of a"]
    assert await fixture.delete("b", heartbeat=5) == [""], "it joined, so its own log explains the failure"


@in_virtual_time
async def test_deletion_waits_three_seconds_for_a_boot_log() -> None:
    fixture = ExecutorFixture(LoggingProvider(log_takes_s=1000))
    begun = asyncio.get_running_loop().time()
    assert await fixture.delete("a") == [""]
    assert fixture.provider.deleted_at == [pytest.approx(begun + BOOT_LOG_TIMEOUT_S)]
    assert BOOT_LOG_TIMEOUT_S <= 3
    begun = asyncio.get_running_loop().time()
    await fixture.delete("b")
    assert fixture.provider.deleted_at[1:] == [begun], "the next deletion does not wait again"


FAILURES: list[Callable[[], LoggingProvider]] = [
    lambda: LoggingProvider(log_error=Unavailable("broken")),
    lambda: LoggingProvider(deletion_error=Unavailable("broken")),
    lambda: LoggingProvider(deletion_error=Throttled("too many requests", 30)),
]


@pytest.mark.parametrize("failing", FAILURES)
def test_no_boot_log_is_read_soon_after_a_failed_call(failing: Callable[[], LoggingProvider]) -> None:
    async def scenario() -> None:
        fixture = ExecutorFixture(failing())
        await fixture.delete("a")
        fixture.provider.log_error = fixture.provider.deletion_error = None
        await fixture.delete("b")
        assert fixture.provider.read == ["a"]
        await asyncio.sleep(BOOT_LOG_PAUSE_S)
        assert await fixture.delete("c") == ["log of c"]

    run(scenario())


@in_virtual_time
async def test_mass_failure_reads_a_few_boot_logs() -> None:
    fixture = ExecutorFixture(LoggingProvider())
    logs = await fixture.delete(*(f"w{n}" for n in range(20)))
    assert len(logs) == 20
    assert len(fixture.provider.read) == MAX_BOOT_LOGS == sum(map(bool, logs))


@in_virtual_time
async def test_machine_deleted_in_the_plan_that_adopts_it_gets_its_price() -> None:
    """Its row has neither type nor place yet, and prices were unavailable when it was listed."""
    fixture = ExecutorFixture(PricedProvider())
    failed = worker("a", 0, "error", machine_id=None)
    listed = (machine("a", instance_type="cx23", place="nbg1"), machine("b", instance_type="cx23", place="nbg1"))
    actions: tuple[Action, ...] = (Delete("a", "m-a", "MANUAL", "by hand"), DeleteOrphan("m-b", "b", "no worker"))
    await fixture.execute(snapshot(failed, machines=listed), *actions)
    deleted, orphan = fixture.recorded
    assert isinstance(deleted, Deleted) and deleted.priced is not None
    assert deleted.priced.price_micros_per_hour == 6_400
    assert isinstance(orphan, OrphanDeleted) and orphan.machine.price_micros_per_hour == 6_400


@in_virtual_time
async def test_machine_without_known_type_gets_no_price() -> None:
    fixture = ExecutorFixture(PricedProvider())
    unlisted = worker("a", 0, "error", instance_type="cx23", place="nbg1"), worker("b", 1, "error")
    actions = tuple(Delete(view.id, view.machine_id, "MANUAL", "by hand") for view in unlisted)
    await fixture.execute(snapshot(*unlisted, machines=()), *actions)
    assert [isinstance(each, Deleted) and each.priced is not None for each in fixture.recorded] == [True, False]
