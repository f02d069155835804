"""Adopted tables whose own triggers are slow or fail: no fleet and no worker stops for them."""

from collections.abc import AsyncIterator
from random import Random

import pytest

from support.adopted_tables import AdoptedTable, adopted_renders
from support.queue_sql import connected
from support.stores import PostgresStores
from windlass.control.cycle import FleetCycle
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.model.machine import Machine, ProviderTraits
from windlass.store import control, transport
from windlass.store.transport import open_postgres_transport

# Far longer than any limit of this test: only a cancelled statement ends it.
SLOW_TRIGGER = """
create function public.wait() returns trigger language plpgsql as $$ begin perform pg_sleep(600); return new; end $$;
create trigger wait before update on public.renders for each row when (new.prompt = 'slow')
  execute function public.wait();
"""


class MachinelessProvider:
    traits = ProviderTraits()

    async def list_machines(self) -> tuple[Machine, ...]:
        return ()

    async def close(self) -> None:
        pass


@pytest.fixture
async def renders(each_dsn: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AdoptedTable]:
    for module in (control, transport):
        monkeypatch.setattr(module, "SETTLE_ROWS_LIMIT_S", 1.0)
    async with adopted_renders(each_dsn) as table:
        yield table


async def defer_slow_and_fast_row(renders: AdoptedTable) -> tuple[int, int]:
    """Both rows are behind their tasks. Writing the first takes ten minutes."""
    slow, fast = await renders.add("slow"), await renders.add("fast")
    async with connected(renders.dsn) as owner, owner.transaction():
        await owner.execute("select from public.renders for update")
        assert len(await renders.claim(2)) == 2
    await renders.sql.execute(SLOW_TRIGGER)
    order = "update windlass.deferred_rows set retry_at = now() - make_interval(secs => 100 - row_key::integer)"
    await renders.sql.execute(order)
    return slow, fast


async def check_slow_row_is_tried_later(renders: AdoptedTable, slow: int) -> None:
    (deferred,) = await renders.sql.fetch("select * from windlass.deferred_rows where row_key = $1", str(slow))
    assert (deferred["attempts"], deferred["reason"]) == (1, "writing its row took too long")
    assert await renders.state(slow) == "waiting"


async def test_cycle_continues_while_a_trigger_of_a_table_is_slow(renders: AdoptedTable) -> None:
    slow, fast = await defer_slow_and_fast_row(renders)
    async with PostgresStores(renders.dsn) as store:
        config = FleetConfig(min_workers=0, queues=("other",))
        cycle = FleetCycle("f", config, store, MachinelessProvider(), Candidate("ann", 30.0), Random(1))  # noqa: S311
        assert (await cycle.run()).is_leader
        await check_slow_row_is_tried_later(renders, slow)
        await renders.sql.execute(
            "update windlass.deferred_rows set retry_at = now() + interval '1 hour' where attempts = 1"
        )
        assert (await cycle.run()).is_leader
        assert await renders.state(fast) == "working"
        assert await renders.deferred() == 1


async def test_maintenance_continues_while_a_trigger_of_a_table_is_slow(renders: AdoptedTable) -> None:
    slow, _ = await defer_slow_and_fast_row(renders)
    async with open_postgres_transport(renders.dsn) as worker:
        await worker.run_maintenance("w")
    await check_slow_row_is_tried_later(renders, slow)


async def test_observing_and_judging_workers_write_no_rows(renders: AdoptedTable) -> None:
    slow, fast = await defer_slow_and_fast_row(renders)
    async with PostgresStores(renders.dsn) as store:
        observed = await store.observe(Candidate("ann", 30.0), "f", FleetConfig(queues=("renders",)))
        assert isinstance(observed, tuple)
        assert observed[1].has_due_rows
    await renders.sql.execute("select * from windlass.recover_lost_workers('w')", timeout=30)
    assert [await renders.state(key) for key in (slow, fast)] == ["waiting", "waiting"]


async def test_failure_of_settling_never_fails_the_cycle(renders: AdoptedTable) -> None:
    await defer_slow_and_fast_row(renders)
    await renders.sql.execute("drop function windlass_internal.settle_row(text, text, boolean, text[])")
    await renders.sql.execute(
        "create function windlass_internal.row_is_broken() returns trigger language plpgsql as"
        " $$ begin raise 'broken'; end $$;"
        "create trigger broken before update on windlass.deferred_rows for each row"
        " execute function windlass_internal.row_is_broken()"
    )
    async with PostgresStores(renders.dsn) as store:
        config = FleetConfig(min_workers=0, queues=("other",))
        cycle = FleetCycle("f", config, store, MachinelessProvider(), Candidate("ann", 30.0), Random(1))  # noqa: S311
        assert (await cycle.run()).is_leader
    async with open_postgres_transport(renders.dsn) as worker:
        assert await worker.run_maintenance("w") == []
