"""An orchestrator as a process of its own, over a provider whose machines are rows.

    python orchestrator_process.py DSN NAME

Its machines never join, so each is spawned, times out, is deleted and replaced repeatedly. A creation runs inside the
database and continues when its caller is killed. Ends by being killed.
"""

import asyncio
import random
import sys

import asyncpg

from support.stores import PostgresStores
from windlass.control.cycle import FleetCycle
from windlass.control.fleet_task import FleetTask
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.model.machine import Machine, MachineRequest, MachineState, ProviderTraits

MAX_WORKERS = 4
# Long enough for a busy machine: a leader that always loses its lease within a cycle would never act.
TTL_S = 3.0
CALL_TIMEOUT_S = 3.0
# The longest that the database sleeps in a creation, and the longest that the creation may take on a busy machine.
SLEEP_S = 0.3
LATE_S = 3.0

SCHEMA = """
create schema fake;
create table fake.machines (
  id bigint generated always as identity primary key,
  name text not null,
  began_at timestamptz not null default clock_timestamp(),
  gone_at timestamptz
);
create table fake.created (name text not null, orchestrator text not null);
create table fake.led (orchestrator text not null, at timestamptz not null default clock_timestamp());

create function fake.create_machine(p_name text, p_takes_s double precision) returns bigint
language plpgsql
as $$
declare
  v_id bigint;
begin
  perform pg_sleep(p_takes_s);
  insert into fake.machines (name) values (p_name) returning id into v_id;
  return v_id;
end
$$;
"""


class TableProvider:
    traits = ProviderTraits(creation_lateness_s=LATE_S)

    def __init__(self, pool: asyncpg.Pool, name: str) -> None:
        self._pool = pool
        self._name = name

    async def create(self, request: MachineRequest) -> Machine:
        await self._pool.execute("insert into fake.created values ($1, $2)", request.name, self._name)
        takes_s = random.uniform(0.0, SLEEP_S)  # noqa: S311
        machine_id = await self._pool.fetchval("select fake.create_machine($1, $2)", request.name, takes_s)
        return Machine(str(machine_id), request.name, MachineState.RUNNING)

    async def list_machines(self) -> tuple[Machine, ...]:
        await self._pool.execute("insert into fake.led (orchestrator) values ($1)", self._name)
        rows = await self._pool.fetch("select id, name, began_at from fake.machines where gone_at is null")
        return tuple(Machine(str(row["id"]), row["name"], MachineState.RUNNING, row["began_at"]) for row in rows)

    async def delete(self, machine: Machine) -> None:
        await self._pool.execute(
            "update fake.machines set gone_at = clock_timestamp() where id = $1 and gone_at is null", int(machine.id)
        )

    async def close(self) -> None:
        pass


async def main(dsn: str, name: str) -> None:
    config = FleetConfig(
        min_workers=MAX_WORKERS,
        max_workers=MAX_WORKERS,
        poll_interval_s=0.05,
        spawn_timeout_s=0.5,
        # Nothing here ever works: no guard may stop it.
        min_spawns_for_rate=100_000,
        restart_window_s=0.001,
    )
    async with PostgresStores(dsn) as store, asyncpg.create_pool(dsn, min_size=0) as pool:
        provider = TableProvider(pool, name)
        cycle = FleetCycle(
            "f", config, store, provider, Candidate(name, TTL_S), random.SystemRandom(), call_timeout_s=CALL_TIMEOUT_S
        )
        await FleetTask(cycle, lambda _: None).run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
