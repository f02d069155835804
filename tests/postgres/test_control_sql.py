"""Control-plane SQL on a real PostgreSQL: concurrency, stored columns, and rejected input."""

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from support.known_secrets import known_secrets
from support.queue_sql import eventually, is_blocked
from support.stores import PostgresStores
from windlass.cost.ledger import settle
from windlass.model.action import Adopt, Drain, Plan, RaiseAlert, Spawn
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate, LeaseLost, Standby
from windlass.model.machine import Machine, MachineState
from windlass.model.outcome import Created, Deleted, Intent
from windlass.model.redaction import HIDDEN
from windlass.model.snapshot import MAX_QUEUED, Hold, PlannerState, Snapshot
from windlass.model.worker import Registration, WorkerStatus
from windlass.store import control

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


async def observed(store: PostgresStores, candidate: Candidate) -> tuple[int, Snapshot]:
    seen = await store.observe(candidate, "f", FLEET)
    assert not isinstance(seen, Standby)
    return seen


async def test_one_of_many_concurrent_candidates_gets_the_lease(each_dsn: str) -> None:
    async with PostgresStores(each_dsn, max_connections=10) as store:
        for round_number in range(10):
            candidates = [Candidate(f"c{n}", 60.0, lease=f"lease{round_number}") for n in range(10)]
            answers = await asyncio.gather(*(store.acquire_lease(candidate) for candidate in candidates))
            assert [answer for answer in answers if not isinstance(answer, Standby)] == [1]


async def test_concurrent_plans_for_the_same_slots_get_each_slot_once(each_dsn: str) -> None:
    """Concurrent cycles of one holder: a request to a running orchestrator causes them."""
    ann = Candidate("ann", 60.0)
    async with PostgresStores(each_dsn, max_connections=10) as store:
        term, snapshot = await observed(store, ann)

        async def commit(number: int) -> frozenset[str]:
            intents = [Intent(f"w{number}-{slot}", slot, "wanted", 30.0) for slot in range(FLEET.max_workers)]
            plan = Plan(tuple(Spawn(intent.slot, "wanted") for intent in intents), PlannerState(), f"spawn {number}")
            return (await store.commit_plan(ann, term, snapshot, plan, intents)).granted

        granted = await asyncio.gather(*(commit(number) for number in range(8)))
        assert sum(map(len, granted)) == FLEET.max_workers
        assert len(await store.workers()) == FLEET.max_workers


async def test_lease_is_not_taken_while_a_plan_is_committed(
    each_dsn: str, connection: Any, second_connection: Any
) -> None:
    now = [datetime(2030, 1, 1, tzinfo=UTC)]
    ann, bob = Candidate("ann", 30.0), Candidate("bob", 30.0)
    async with PostgresStores(each_dsn, virtual_now=lambda: now[0]) as store:
        term, snapshot = await observed(store, ann)
        async with connection.transaction():
            # The holder commits its plan while its lease expires.
            await connection.execute("select set_config('windlass.now', $1, true)", now[0].isoformat())
            await connection.execute("select windlass_internal.require_lease('orchestrator', 'ann', $1)", term)
            now[0] += timedelta(seconds=31)
            taking = asyncio.create_task(store.acquire_lease(bob))
            await eventually(lambda: is_blocked(second_connection), "acquire_lease blocks")
            assert not taking.done()
        assert await taking == 2
        with pytest.raises(LeaseLost):
            await store.commit_plan(ann, term, snapshot, Plan((), PlannerState(), "late"), [])


async def test_commit_plan_locks_the_fleet_before_its_workers(
    each_dsn: str, connection: Any, second_connection: Any
) -> None:
    ann = Candidate("ann", 60.0)
    async with PostgresStores(each_dsn) as store:
        term, snapshot = await observed(store, ann)
        await store.register(Registration("w0", ("q",), fleet="f"))
        plan = Plan((Drain("w0", "IDLE", "idle"),), PlannerState(), "drain 1")
        async with connection.transaction():
            # The same order as in pause_fleet, which continues with the workers.
            await connection.execute("update windlass.fleets set paused = true where name = 'f'")
            committing = asyncio.create_task(store.commit_plan(ann, term, snapshot, plan, []))
            await eventually(lambda: is_blocked(second_connection), "commit_plan blocks")
            await connection.execute("select from windlass.workers where id = 'w0' for no key update nowait")
        await committing
        worker = await store.worker("w0")
        assert worker is not None and worker.status is WorkerStatus.TERMINATING


async def test_long_statement_is_not_taken_for_a_clock_set_back(connection: Any) -> None:
    await connection.execute(
        """
        do $$ begin
          perform windlass_internal.follow_clock();
          perform pg_sleep(1.1);
          update windlass.clock set seen_at = clock_timestamp();
          perform windlass_internal.follow_clock();
        end $$
        """
    )
    assert not await connection.fetchval("select exists (select from windlass.events where code = 'CLOCK_SET_BACK')")


async def test_large_snapshot_is_stored_twice_a_minute_while_numbers_change(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "LARGE_SNAPSHOT_WORKERS", -1)
    ann, now = Candidate("ann", 3600.0), datetime(2030, 1, 1, tzinfo=UTC)
    async with PostgresStores(dsn, virtual_now=lambda: now) as store:
        term, _ = await observed(store, ann)

        async def decide(after_s: float, decision: str, *actions: RaiseAlert) -> int:
            nonlocal now
            now += timedelta(seconds=after_s)
            _, snapshot = await observed(store, ann)
            plan = Plan(actions, PlannerState(), decision)
            return (await store.commit_plan(ann, term, snapshot, plan, [])).cycle_id

        first = await decide(1, "at max_workers (4): 7 queued")
        assert await decide(10, "at max_workers (4): 9 queued") == first
        (cycle,) = await store.cycles("f")
        # Lists show the last decision. The snapshot belongs to the first.
        assert (cycle.decision, cycle.repeats) == ("at max_workers (4): 9 queued", 1)
        (overview,) = (await store.overview()).fleets
        assert overview.decision == cycle.decision
        stored = await store.cycle(first)
        assert stored is not None
        assert stored.cycle.decision == "at max_workers (4): 7 queued"
        second = await decide(20, "at max_workers (4): 9 queued")
        third = await decide(1, "steady: 0 queued")
        fourth = await decide(1, "steady: 1 queued", RaiseAlert("X", "x"))
        assert len({first, second, third, fourth}) == 4


@pytest.mark.parametrize("way", ["created", "adopted"])
async def test_machine_type_location_and_price_are_stored(each_dsn: str, connection: Any, way: str) -> None:
    ann = Candidate("ann", 60.0)
    async with PostgresStores(each_dsn) as store:
        term, snapshot = await observed(store, ann)
        await store.commit_plan(ann, term, snapshot, Plan((), PlannerState(), "x"), [Intent("w0", 0, "wanted", 30.0)])
        if way == "created":
            await store.record_outcomes("f", 1, [Created("w0", MACHINE)], {})
        else:
            found = replace(snapshot, machines=(replace(MACHINE, id="m0", name="other"), MACHINE))
            await store.commit_plan(ann, term, found, Plan((Adopt("w0", "m1", "found"),), PlannerState(), "x"), [])
    row = await connection.fetchrow(
        "select machine_id, instance_type, place, price_micros_per_hour, currency from windlass.workers"
    )
    assert tuple(row) == ("m1", "tiny", "nbg1", 1_500_000, "EUR")


async def test_machine_missing_in_the_snapshot_can_be_adopted(each_dsn: str, connection: Any) -> None:
    ann = Candidate("ann", 60.0)
    async with PostgresStores(each_dsn) as store:
        term, snapshot = await observed(store, ann)
        await store.commit_plan(ann, term, snapshot, Plan((), PlannerState(), "x"), [Intent("w0", 0, "wanted", 30.0)])
        await store.commit_plan(ann, term, snapshot, Plan((Adopt("w0", "m1", "found"),), PlannerState(), "x"), [])
    assert await connection.fetchval("select machine_id from windlass.workers") == "m1"


async def test_concurrent_settlements_charge_once(each_dsn: str, connection: Any) -> None:
    ann, now = Candidate("ann", 100_000.0), datetime(2030, 1, 1, tzinfo=UTC)
    times = [now]
    async with PostgresStores(each_dsn, virtual_now=lambda: times[0], max_connections=10) as store:
        term, snapshot = await observed(store, ann)
        intents = [Intent(f"w{slot}", slot, "wanted", 30.0) for slot in range(4)]
        await store.commit_plan(ann, term, snapshot, Plan((), PlannerState(), "x"), intents)
        machines = [replace(MACHINE, id=f"m{n}", name=f"w{n}", created_at=now) for n in range(4)]
        made = [Created(machine.name, machine, billing_unit_s=3600) for machine in machines]
        await store.record_outcomes("f", 1, made, {})
        times[0] += timedelta(hours=3)
        await store.record_outcomes("f", 1, [Deleted("w0", "m0", "X", "x")], {})
        times[0] += timedelta(minutes=2)

        async def close() -> int:
            accounts = await store.accounts_to_settle("f", 10)
            return await store.settle([settle(account, times[0]) for account in accounts])

        assert sum(await asyncio.gather(*(close() for _ in range(10)))) == 4
        assert await close() == 0
    charged = await connection.fetch("select worker_id, sum(amount_micros) from windlass.charges group by 1 order by 1")
    # Three hours of each worker are settled.
    assert [tuple(row) for row in charged] == [(f"w{n}", 3 * 1_500_000) for n in range(4)]
    spent = await connection.fetchval("select sum(boot_micros + tail_micros) from windlass.spending")
    assert spent == 12 * 1_500_000
    assert await connection.fetchval("select sum(total_micros) from windlass.daily_costs") == spent


async def test_commit_plan_rejects_an_unknown_action_kind(each_dsn: str, connection: Any) -> None:
    ann = Candidate("ann", 60.0)
    async with PostgresStores(each_dsn) as store:
        term, snapshot = await observed(store, ann)
    for action in ('{"kind": "promte", "worker_id": "w0"}', '{"worker_id": "w0"}'):
        with pytest.raises(asyncpg.RaiseError, match="unknown action kind"):
            await connection.execute(
                "select windlass_internal.commit_plan('orchestrator', 'ann', $1, 'f', $2, $3, '{}', 'x', '[]')",
                term,
                json.dumps({"now": snapshot.now.isoformat()}),
                f"[{action}]",
            )
    assert await connection.fetchval("select count(*) from windlass.cycles") == 0


async def test_record_outcomes_rejects_an_unknown_outcome_kind(each_dsn: str, connection: Any) -> None:
    ann = Candidate("ann", 60.0)
    async with PostgresStores(each_dsn) as store:
        await observed(store, ann)
    for outcome in ('{"kind": "delted", "worker_id": "w0"}', '{"worker_id": "w0"}'):
        with pytest.raises(asyncpg.RaiseError, match="unknown outcome kind"):
            await connection.execute(
                "select windlass_internal.record_outcomes('f', 1, $1, '{}')",
                f"[{outcome}]",
            )


async def test_cycle_counts_a_bounded_number_of_queued_tasks(connection: Any) -> None:
    await connection.execute("insert into windlass.tasks (queue) select 'deep' from generate_series(1, 20)")
    await connection.execute("insert into windlass.tasks (queue, run_after) values ('deep', now()), ('due', now())")
    counted = "select * from windlass_internal.count_queued('{deep,due,deep}', now(), 10) order by queue"
    assert [tuple(row) for row in await connection.fetch(counted)] == [("deep", 11), ("due", 1)]
    body = await connection.fetchval("select prosrc from pg_proc where proname = 'observe_queues'")
    assert f"count_queued(p_queues, p_now, {MAX_QUEUED})" in body


async def test_plan_and_outcomes_are_stored_whatever_the_secrets_are(each_dsn: str, connection: Any) -> None:
    """A setting such as MAX_TOKENS counts as a secret. Its value may be a price, and a mode may be a part of a key."""
    ann, machine = Candidate("ann", 60.0), replace(MACHINE, price_micros_per_hour=100_000, note="token 100000")
    async with PostgresStores(each_dsn) as store:
        with known_secrets("100000", "worker", "machine", "w0", "running"):
            term, snapshot = await observed(store, ann)
            state = PlannerState(hold=Hold("DENIED", "the worker has token 100000", snapshot.now))
            plan = Plan((Spawn(0, "token 100000"),), state, "spawn 1: token 100000")
            intents = [Intent("w0", 0, "token 100000", 30.0)]
            found = replace(snapshot, machines=(machine,))
            committed = await store.commit_plan(ann, term, found, plan, intents)
            assert committed.granted == {"w0"}
            summary = {"fleet": "f", "duration_s": 100000, "hold": "token 100000"}
            await store.record_outcomes("f", committed.cycle_id, [Created("w0", machine)], summary)
            _, seen = await observed(store, ann)
        assert seen.planner_state.hold == Hold("DENIED", f"the {HIDDEN} has token {HIDDEN}", snapshot.now)
        stored = await store.cycle(committed.cycle_id)
    assert stored is not None and stored.snapshot.machines == (replace(machine, note=f"token {HIDDEN}"),)
    assert stored.cycle.summary == {"fleet": "f", "duration_s": 100000, "hold": f"token {HIDDEN}"}
    row = await connection.fetchrow("select id, machine_id, price_micros_per_hour from windlass.workers")
    assert tuple(row) == ("w0", "m1", 100_000)
    assert set(await connection.fetch("select reason from windlass.events")) == {(f"token {HIDDEN}",)}
