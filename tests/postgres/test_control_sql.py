"""What only a real PostgreSQL can show of the control loop's SQL: concurrency, and columns no port reads yet."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from support.stores import PostgresStores
from windlass.cost.ledger import settle
from windlass.model.action import Adopt, Plan, Spawn
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate, LeaseLost, Standby
from windlass.model.machine import Machine, MachineState
from windlass.model.outcome import Created, Deleted, Intent
from windlass.model.snapshot import PlannerState, Snapshot

FLEET = FleetConfig(max_workers=4)
MACHINE = Machine(
    "m1",
    "w0",
    MachineState.RUNNING,
    instance_type="tiny",
    place="nbg1",
    price_micros_per_hour=1_500_000,
    currency="EUR",
)
LOOKS_EVERY_S = 0.01


@pytest.fixture
async def connection(each_dsn: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(each_dsn)
    try:
        yield connection
    finally:
        await connection.close()


async def observed(store: PostgresStores, candidate: Candidate) -> tuple[int, Snapshot]:
    seen = await store.observe(candidate, "f", FLEET)
    assert not isinstance(seen, Standby)
    return seen


async def test_of_many_who_ask_at_once_one_leads(each_dsn: str) -> None:
    async with PostgresStores(each_dsn, max_connections=10) as store:
        for round_number in range(10):
            candidates = [Candidate(f"c{n}", 60.0, lease=f"lease{round_number}") for n in range(10)]
            answers = await asyncio.gather(*(store.acquire_lease(candidate) for candidate in candidates))
            assert [answer for answer in answers if not isinstance(answer, Standby)] == [1]


async def test_of_two_leaders_plans_for_the_same_slots_one_gets_each(each_dsn: str) -> None:
    """Two cycles of one holder at once, as a request beside a daemon makes them."""
    ann = Candidate("ann", 60.0)
    async with PostgresStores(each_dsn, max_connections=10) as store:
        term, snapshot = await observed(store, ann)

        async def hire(who: int) -> frozenset[str]:
            intents = [Intent(f"w{who}-{slot}", slot, "wanted", 30.0) for slot in range(FLEET.max_workers)]
            plan = Plan(tuple(Spawn(intent.slot, "wanted") for intent in intents), PlannerState(), f"hiring {who}")
            return (await store.commit_plan(ann, term, snapshot, plan, intents)).granted

        granted = await asyncio.gather(*(hire(who) for who in range(8)))
        assert sum(map(len, granted)) == FLEET.max_workers
        assert len(await store.workers()) == FLEET.max_workers


async def test_nobody_takes_the_lead_in_the_middle_of_a_leaders_plan(each_dsn: str, connection: Any) -> None:
    now = [datetime(2030, 1, 1, tzinfo=UTC)]
    ann, bob = Candidate("ann", 30.0), Candidate("bob", 30.0)
    async with PostgresStores(each_dsn, virtual_now=lambda: now[0]) as store:
        term, snapshot = await observed(store, ann)
        async with connection.transaction():
            # Ann's plan is being written down while her lease runs out.
            await connection.execute("select set_config('windlass.now', $1, true)", now[0].isoformat())
            await connection.execute("select windlass_internal.require_lease('orchestrator', 'ann', $1)", term)
            now[0] += timedelta(seconds=31)
            taking = asyncio.create_task(store.acquire_lease(bob))
            await _waits_for_a_lock(each_dsn)
            assert not taking.done()
        assert await taking == 2
        with pytest.raises(LeaseLost):
            await store.commit_plan(ann, term, snapshot, Plan((), PlannerState(), "late"), [])


async def _waits_for_a_lock(dsn: str) -> None:
    watcher = await asyncpg.connect(dsn)
    try:
        async with asyncio.timeout(30):
            while not await watcher.fetchval(
                "select exists (select from pg_locks where not granted and pid <> pg_backend_pid())"
            ):
                await asyncio.sleep(LOOKS_EVERY_S)
    finally:
        await watcher.close()


@pytest.mark.parametrize("way", ["created", "adopted"])
async def test_what_a_machine_is_and_costs_is_kept(each_dsn: str, connection: Any, way: str) -> None:
    ann = Candidate("ann", 60.0)
    async with PostgresStores(each_dsn) as store:
        term, snapshot = await observed(store, ann)
        await store.commit_plan(ann, term, snapshot, Plan((), PlannerState(), "x"), [Intent("w0", 0, "wanted", 30.0)])
        if way == "created":
            await store.commit_outcomes(ann, term, "f", 1, [Created("w0", MACHINE)], [], {})
        else:
            found = replace(snapshot, machines=(replace(MACHINE, id="m0", name="other"), MACHINE))
            await store.commit_plan(ann, term, found, Plan((Adopt("w0", "m1", "found"),), PlannerState(), "x"), [])
    row = await connection.fetchrow(
        "select machine_id, instance_type, place, price_micros_per_hour, currency from windlass.workers"
    )
    assert tuple(row) == ("m1", "tiny", "nbg1", 1_500_000, "EUR")


async def test_an_unknown_machine_can_be_adopted(each_dsn: str, connection: Any) -> None:
    ann = Candidate("ann", 60.0)
    async with PostgresStores(each_dsn) as store:
        term, snapshot = await observed(store, ann)
        await store.commit_plan(ann, term, snapshot, Plan((), PlannerState(), "x"), [Intent("w0", 0, "wanted", 30.0)])
        await store.commit_plan(ann, term, snapshot, Plan((Adopt("w0", "m1", "found"),), PlannerState(), "x"), [])
    assert await connection.fetchval("select machine_id from windlass.workers") == "m1"


async def test_of_many_who_settle_at_once_one_charges(each_dsn: str, connection: Any) -> None:
    ann, now = Candidate("ann", 100_000.0), datetime(2030, 1, 1, tzinfo=UTC)
    times = [now]
    async with PostgresStores(each_dsn, virtual_now=lambda: times[0], max_connections=10) as store:
        term, snapshot = await observed(store, ann)
        intents = [Intent(f"w{slot}", slot, "wanted", 30.0) for slot in range(4)]
        await store.commit_plan(ann, term, snapshot, Plan((), PlannerState(), "x"), intents)
        machines = [replace(MACHINE, id=f"m{n}", name=f"w{n}", created_at=now) for n in range(4)]
        made = [Created(machine.name, machine, billing_unit_s=3600) for machine in machines]
        await store.commit_outcomes(ann, term, "f", 1, made, [], {})
        times[0] += timedelta(hours=3)
        await store.commit_outcomes(ann, term, "f", 1, [Deleted("w0", "m0", "X", "x")], [], {})
        times[0] += timedelta(minutes=2)

        async def close() -> int:
            accounts = await store.accounts_to_settle("f", 10)
            return await store.settle([settle(account, times[0]) for account in accounts])

        assert sum(await asyncio.gather(*(close() for _ in range(10)))) == 4
        assert await close() == 0
    charged = await connection.fetch("select worker_id, sum(amount_micros) from windlass.charges group by 1 order by 1")
    # Three hours of each are over, and closed.
    assert [tuple(row) for row in charged] == [(f"w{n}", 3 * 1_500_000) for n in range(4)]
    spent = await connection.fetchval("select sum(boot_micros + tail_micros) from windlass.spending")
    assert spent == 12 * 1_500_000
    assert await connection.fetchval("select sum(total_micros) from windlass.daily_costs") == spent
