"""Locks taken by the SQL of Ray fleets: lock order, waits and timeouts."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest

from support.queue_sql import connected, eventually, is_blocked
from support.stores import PostgresStores
from windlass.model.action import Drain, Plan
from windlass.model.errors import DatabaseUnavailable
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate, Standby
from windlass.model.node import AliveNode, NodeVerdict, Placement, dispatcher_lease
from windlass.model.snapshot import PlannerState
from windlass.model.task import Claim, TaskStatus, new_task
from windlass.model.worker import Registration, WorkerKind, WorkerStatus

NAMES = ("n1", "n2", "n3")
LEADER = Candidate("h", 60.0)
DISPATCHER = Candidate("h", 60.0, dispatcher_lease("f"))
Act = Callable[[PostgresStores, int], Awaitable[Any]]


async def place(store: PostgresStores, term: int) -> None:
    del term
    await store.place([Placement(number, uuid4(), name) for number, name in enumerate(reversed(NAMES))])


async def report(store: PostgresStores, term: int) -> None:
    nodes = [AliveNode(name, f"id-of-{name}", {"CPU": 2.0}, {}) for name in reversed(NAMES)]
    await store.report_nodes(DISPATCHER, term, "f", ["q"], 30.0, nodes)


async def commit(store: PostgresStores, term: int) -> None:
    del term
    seen = await store.observe(LEADER, "f", FleetConfig(max_workers=len(NAMES)))
    assert not isinstance(seen, Standby)
    plan = Plan(tuple(Drain(name, "IDLE", "idle") for name in reversed(NAMES)), PlannerState(), "drain 3")
    await store.commit_plan(LEADER, *seen, plan, [])


async def pause_fleet(store: PostgresStores, term: int) -> None:
    del term
    await store.pause_fleet("f", True)


async def pause(store: PostgresStores, term: int) -> None:
    del term
    await store.set_paused(list(reversed(NAMES)), True)


async def drain(store: PostgresStores, term: int) -> None:
    del term
    await store.set_terminating(list(reversed(NAMES)), "by hand")


async def add_nodes(connection: Any) -> None:
    await connection.execute("insert into windlass.fleets (name) values ('f')")
    # Not in the order of their ids in the table either.
    for slot, name in reversed(list(enumerate(NAMES))):
        await connection.execute("insert into windlass.slots (fleet, slot) values ('f', $1)", slot)
        await connection.execute(
            "insert into windlass.workers (id, fleet, slot, status, kind) values ($1, 'f', $2, 'active', 'node')",
            name,
            slot,
        )


@pytest.mark.parametrize("act", [place, report, commit, pause_fleet, pause, drain])
async def test_nodes_are_locked_in_the_order_of_their_ids(dsn: str, act: Act) -> None:
    """Otherwise two of these could deadlock."""
    async with connected(dsn) as connection, connected(dsn) as observer:
        await add_nodes(connection)
        async with PostgresStores(dsn) as store:
            term = await store.acquire_lease(DISPATCHER)
            assert isinstance(term, int)
            async with connection.transaction():
                await connection.execute("select from windlass.workers where id = 'n2' for update")
                acting = asyncio.ensure_future(act(store, term))
                await eventually(lambda: is_blocked(observer), "the call blocks")
                free = await observer.fetch("select id from windlass.workers order by id for update skip locked")
            await acting
        assert [row["id"] for row in free] == ["n3"]


async def placed_tasks(store: PostgresStores, count: int) -> list[Claim]:
    """Tasks claimed by dispatcher `d` and placed on node n1."""
    await store.register(Registration("d", ("q",), "f", 10, 30.0, kind=WorkerKind.DISPATCHER))
    for number in range(count):
        await store.enqueue(new_task("q", number))
    claims = await store.claim("d", ["q"], count)
    verdicts = await store.place([Placement(claim.task_id, claim.token, "n1") for claim in claims])
    assert set(verdicts.values()) == {NodeVerdict.PLACED}
    return claims


async def test_take_over_waits_for_locked_tasks(dsn: str) -> None:
    """The node stays alive, so no later recovery would requeue a skipped task."""
    async with connected(dsn) as connection, connected(dsn) as observer:
        await add_nodes(connection)
        async with PostgresStores(dsn) as store:
            await store.acquire_lease(DISPATCHER)
            claims = await placed_tasks(store, 2)
            await store.release_lease(DISPATCHER)
            other = Candidate("other", 60.0, dispatcher_lease("f"))
            term = await store.acquire_lease(other)
            assert isinstance(term, int)
            async with connection.transaction():
                await connection.execute("select from windlass.tasks where id = $1 for update", claims[0].task_id)
                taking_over = asyncio.ensure_future(store.take_over_nodes(other, term, "f"))
                await eventually(lambda: is_blocked(observer), "the call blocks")
            assert await taking_over == 2
            tasks = [await store.task(claim.task_id) for claim in claims]
            assert {(task.status, task.worker_id) for task in tasks if task} == {(TaskStatus.QUEUED, None)}


async def test_take_over_lock_timeout_releases_the_lease_row(dsn: str) -> None:
    async with connected(dsn) as connection:
        await add_nodes(connection)
        async with PostgresStores(dsn) as store, PostgresStores(dsn) as other_store:
            term = await store.acquire_lease(DISPATCHER)
            assert isinstance(term, int)
            (claim,) = await placed_tasks(store, 1)
            async with connection.transaction():
                await connection.execute("select from windlass.tasks where id = $1 for update", claim.task_id)
                with pytest.raises(DatabaseUnavailable, match="lock timeout.*Try again"):
                    await store.take_over_nodes(DISPATCHER, term, "f")
                assert await other_store.acquire_lease(DISPATCHER) == term
            assert await store.take_over_nodes(DISPATCHER, term, "f") == 1


async def test_lost_dispatcher_stays_active_while_a_task_is_locked(dsn: str) -> None:
    async with connected(dsn) as connection:
        await add_nodes(connection)
        # With a leader, workers do not judge the managed nodes.
        leader = Candidate("leader", 60.0)
        async with PostgresStores(dsn) as store:
            await store.acquire_lease(leader)
            locked, free = await placed_tasks(store, 2)
            await store.register(Registration("survivor", ("other",), "other", lease_s=30.0))
            await connection.execute(
                "update windlass.workers set last_heartbeat = now() - interval '40 s' where id = 'd'"
            )
            await connection.execute(
                "update windlass.workers set last_heartbeat = now(), heartbeat_gapless_since = now() - interval '1 h'"
                " where id = 'survivor'"
            )
            async with connection.transaction():
                await connection.execute("select from windlass.tasks where id = $1 for update", locked.task_id)
                (recovery,) = await store.recover_lost_workers("survivor")
                assert (recovery.worker_id, recovery.tasks_requeued) == ("d", 1)
                # A second call requeues nothing and records no second event.
                assert await store.recover_lost_workers("survivor") == []
                dispatcher = await store.worker("d")
                assert dispatcher is not None and dispatcher.status is WorkerStatus.ACTIVE
            (recovery,) = await store.recover_lost_workers("survivor")
            assert (recovery.worker_id, recovery.tasks_requeued) == ("d", 1)
            dispatcher = await store.worker("d")
            assert dispatcher is not None and dispatcher.status is WorkerStatus.TERMINATED
            tasks = [await store.task(claim.task_id) for claim in (locked, free)]
            assert {(task.status, task.worker_id) for task in tasks if task} == {(TaskStatus.QUEUED, None)}
            assert [event.code for event in await store.events(worker_id="d")].count("WORKER_LOST") == 1
