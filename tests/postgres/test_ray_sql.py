"""What only a real PostgreSQL can show of an engine's SQL: who waits for whom."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from support.stores import PostgresStores
from windlass.model.errors import DatabaseUnavailable
from windlass.model.lease import Candidate
from windlass.model.node import AliveNode, NodeVerdict, Placement, dispatcher_lease
from windlass.model.task import Claim, TaskStatus, new_task
from windlass.model.worker import Registration, WorkerKind, WorkerStatus

LOOKS_EVERY_S = 0.01
NAMES = ("n1", "n2", "n3")
DISPATCHER = Candidate("h", 60.0, dispatcher_lease("f"))
Act = Callable[[PostgresStores, int], Awaitable[Any]]


async def place(store: PostgresStores, term: int) -> None:
    del term
    await store.place([Placement(number, uuid4(), name) for number, name in enumerate(reversed(NAMES))])


async def report(store: PostgresStores, term: int) -> None:
    nodes = [AliveNode(name, f"id-of-{name}", {"CPU": 2.0}, {}) for name in reversed(NAMES)]
    await store.report_nodes(DISPATCHER, term, "f", ["q"], 30.0, nodes)


async def hire_nodes(person: Any) -> None:
    await person.execute("insert into windlass.fleets (name) values ('f')")
    for slot, name in enumerate(NAMES):
        await person.execute("insert into windlass.slots (fleet, slot) values ('f', $1)", slot)
        await person.execute(
            "insert into windlass.workers (id, fleet, slot, status, kind) values ($1, 'f', $2, 'active', 'node')",
            name,
            slot,
        )


async def somebody_waits(onlooker: Any) -> None:
    async with asyncio.timeout(10):
        while not await onlooker.fetchval("select exists (select from pg_locks where not granted)"):
            await asyncio.sleep(LOOKS_EVERY_S)


@pytest.mark.parametrize("act", [place, report])
async def test_nodes_are_locked_in_the_order_of_their_ids(dsn: str, act: Act) -> None:
    """Else who places and who reports would wait for each other until one is thrown out."""
    person, onlooker = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
    try:
        await hire_nodes(person)
        async with PostgresStores(dsn) as store:
            term = await store.acquire_lease(DISPATCHER)
            assert isinstance(term, int)
            async with person.transaction():
                await person.execute("select from windlass.workers where id = 'n2' for update")
                acting = asyncio.ensure_future(act(store, term))
                await somebody_waits(onlooker)
                free = await onlooker.fetch("select id from windlass.workers order by id for update skip locked")
            await acting
        assert [row["id"] for row in free] == ["n3"]
    finally:
        await person.close()
        await onlooker.close()


async def placed_tasks(store: PostgresStores, count: int) -> list[Claim]:
    """Of the dispatcher `d`, on the node n1."""
    await store.register(Registration("d", ("q",), "f", 10, 30.0, kind=WorkerKind.DISPATCHER))
    for number in range(count):
        await store.enqueue(new_task("q", number))
    claims = await store.claim("d", ["q"], count)
    verdicts = await store.place([Placement(claim.task_id, claim.token, "n1") for claim in claims])
    assert set(verdicts.values()) == {NodeVerdict.PLACED}
    return claims


async def test_who_takes_over_waits_for_what_somebody_has_locked(dsn: str) -> None:
    """Its node lives on, and nobody else would ever take it back."""
    person, onlooker = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
    try:
        await hire_nodes(person)
        async with PostgresStores(dsn) as store:
            await store.acquire_lease(DISPATCHER)
            claims = await placed_tasks(store, 2)
            await store.release_lease(DISPATCHER)
            other = Candidate("other", 60.0, dispatcher_lease("f"))
            term = await store.acquire_lease(other)
            assert isinstance(term, int)
            async with person.transaction():
                await person.execute("select from windlass.tasks where id = $1 for update", claims[0].task_id)
                taking_over = asyncio.ensure_future(store.take_over_nodes(other, term, "f"))
                await somebody_waits(onlooker)
            assert await taking_over == 2
            tasks = [await store.task(claim.task_id) for claim in claims]
            assert {(task.status, task.worker_id) for task in tasks if task} == {(TaskStatus.QUEUED, None)}
    finally:
        await person.close()
        await onlooker.close()


async def test_who_waits_too_long_to_take_over_lets_go_of_the_lease_and_asks_again(dsn: str) -> None:
    person = await asyncpg.connect(dsn)
    try:
        await hire_nodes(person)
        async with PostgresStores(dsn) as store, PostgresStores(dsn) as elsewhere:
            term = await store.acquire_lease(DISPATCHER)
            assert isinstance(term, int)
            (claim,) = await placed_tasks(store, 1)
            async with person.transaction():
                await person.execute("select from windlass.tasks where id = $1 for update", claim.task_id)
                with pytest.raises(DatabaseUnavailable, match="lock timeout.*: try again"):
                    await store.take_over_nodes(DISPATCHER, term, "f")
                assert await elsewhere.acquire_lease(DISPATCHER) == term
            assert await store.take_over_nodes(DISPATCHER, term, "f") == 1
    finally:
        await person.close()


async def test_a_lost_dispatcher_is_not_over_while_somebody_has_a_task_of_its_nodes_locked(dsn: str) -> None:
    person = await asyncpg.connect(dsn)
    try:
        await hire_nodes(person)
        # Somebody orchestrates, so the nodes are not the judge's.
        leader = Candidate("leader", 60.0)
        async with PostgresStores(dsn) as store:
            await store.acquire_lease(leader)
            locked, free = await placed_tasks(store, 2)
            await store.register(Registration("judge", ("other",), "other", lease_s=30.0))
            await person.execute("update windlass.workers set last_heartbeat = now() - interval '40 s' where id = 'd'")
            await person.execute(
                "update windlass.workers set last_heartbeat = now(), heartbeat_gapless_since = now() - interval '1 h'"
                " where id = 'judge'"
            )
            async with person.transaction():
                await person.execute("select from windlass.tasks where id = $1 for update", locked.task_id)
                (recovery,) = await store.recover_lost_workers("judge")
                assert (recovery.worker_id, recovery.tasks_requeued) == ("d", 1)
                # It takes nothing more, and says nothing twice.
                assert await store.recover_lost_workers("judge") == []
                dispatcher = await store.worker("d")
                assert dispatcher is not None and dispatcher.status is WorkerStatus.ACTIVE
            (recovery,) = await store.recover_lost_workers("judge")
            assert (recovery.worker_id, recovery.tasks_requeued) == ("d", 1)
            dispatcher = await store.worker("d")
            assert dispatcher is not None and dispatcher.status is WorkerStatus.TERMINATED
            tasks = [await store.task(claim.task_id) for claim in (locked, free)]
            assert {(task.status, task.worker_id) for task in tasks if task} == {(TaskStatus.QUEUED, None)}
            assert [event.code for event in await store.events(worker_id="d")].count("WORKER_LOST") == 1
    finally:
        await person.close()
