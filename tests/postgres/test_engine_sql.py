"""What only a real PostgreSQL can show of an engine's SQL: who waits for whom."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from windlass.model.node import AliveNode, Placement, dispatcher_lease
from windlass.ports.control import Candidate
from windlass.store.engine import PostgresEngineStore

LOOKS_EVERY_S = 0.01
NAMES = ("n1", "n2", "n3")
DISPATCHER = Candidate("h", 60.0, dispatcher_lease("f"))
Act = Callable[[PostgresEngineStore, int], Awaitable[Any]]


async def place(store: PostgresEngineStore, term: int) -> None:
    del term
    await store.place([Placement(number, uuid4(), name) for number, name in enumerate(reversed(NAMES))])


async def report(store: PostgresEngineStore, term: int) -> None:
    nodes = [AliveNode(name, f"id-of-{name}", {"CPU": 2.0}, {}) for name in reversed(NAMES)]
    await store.report_nodes(DISPATCHER, term, "f", ["q"], 30.0, nodes)


@pytest.mark.parametrize("act", [place, report])
async def test_nodes_are_locked_in_the_order_of_their_ids(dsn: str, act: Act) -> None:
    """Else who places and who reports would wait for each other until one is thrown out."""
    person, onlooker = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
    try:
        await person.execute("insert into windlass.fleets (name) values ('f')")
        for slot, name in enumerate(NAMES):
            await person.execute("insert into windlass.slots (fleet, slot) values ('f', $1)", slot)
            await person.execute(
                "insert into windlass.workers (id, fleet, slot, status, kind) values ($1, 'f', $2, 'active', 'node')",
                name,
                slot,
            )
        async with PostgresEngineStore(dsn) as store:
            term = await store.lead(DISPATCHER)
            assert isinstance(term, int)
            async with person.transaction():
                await person.execute("select from windlass.workers where id = 'n2' for update")
                acting = asyncio.ensure_future(act(store, term))
                async with asyncio.timeout(10):
                    while not await onlooker.fetchval("select exists (select from pg_locks where not granted)"):
                        await asyncio.sleep(LOOKS_EVERY_S)
                free = await onlooker.fetch("select id from windlass.workers order by id for update skip locked")
            await acting
        assert [row["id"] for row in free] == ["n3"]
    finally:
        await person.close()
        await onlooker.close()
