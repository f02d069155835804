"""Two orchestrator processes on one PostgreSQL. The leader is killed with SIGKILL repeatedly."""

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from orchestrator_process import MAX_WORKERS, SCHEMA, TTL_S

SCRIPT = Path(__file__).with_name("orchestrator_process.py")
CYCLES = 100
KILLS = 8
# Timeout on a loaded machine; normally far shorter.
PATIENCE_S = 90.0
LOOKS_EVERY_S = 0.02
BUSY_MACHINE_S = 10.0


class Orchestrators:
    """Processes with unique names; no name is reused."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._numbers = count()
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> str:
        name = f"o{next(self._numbers)}"
        # The script imports tests/support, which pytest has on its own path only.
        environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])}
        self.running[name] = subprocess.Popen([sys.executable, str(SCRIPT), self._dsn, name], env=environment)
        return name

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.kill()
        process.wait()


@pytest.fixture
def orchestrators(dsn: str) -> Iterator[Orchestrators]:
    found = Orchestrators(dsn)
    try:
        yield found
    finally:
        for name in list(found.running):
            found.kill(name)


async def until(what: str, condition: Callable[[], Awaitable[Any]]) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        while not (value := await condition()):
            await asyncio.sleep(LOOKS_EVERY_S)
        return value
    raise AssertionError(what)


@pytest.mark.timeout(600)
async def test_killed_leaders_never_exceed_max_workers(dsn: str, orchestrators: Orchestrators) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(SCHEMA)
        await _kill_leaders(connection, orchestrators)
        await _check_books(connection)
    finally:
        await connection.close()


async def _kill_leaders(connection: Any, orchestrators: Orchestrators) -> None:
    async def leader() -> str | None:
        name = await connection.fetchval("select holder from windlass.leases where expires_at > clock_timestamp()")
        return name if name in orchestrators.running else None

    async def cycles() -> int:
        return int(
            await connection.fetchval(
                "select coalesce(max((planner_state #>> '{cadence,cycle}')::integer), 0) from windlass.fleets"
            )
        )

    orchestrators.start()
    orchestrators.start()
    kills = 0
    while kills < KILLS or await cycles() < CYCLES:
        name = await until("a leader", leader)
        led_before = await cycles()

        async def moves_on(before: int = led_before) -> bool:
            return await cycles() > before + 2

        await until("cycles go on", moves_on)
        # At any point of a cycle.
        await asyncio.sleep(random.uniform(0.0, 0.2))  # noqa: S311
        if name in orchestrators.running:
            orchestrators.kill(name)
            orchestrators.start()
            kills += 1

    # No process spawns any more: pending creations have arrived after this time.
    for name in list(orchestrators.running):
        orchestrators.kill(name)

    async def nothing_under_way() -> bool:
        asked = "select count(*) from pg_stat_activity where query like '%fake.create_machine%' and state = 'active'"
        return await connection.fetchval(f"{asked} and pid <> pg_backend_pid()") == 0

    await until("the last creations end", nothing_under_way)


async def _check_books(connection: Any) -> None:
    most = await connection.fetchval(
        """
        select max(billed) from (
          select (
            select count(*) from fake.machines other
            where other.began_at <= m.began_at and (other.gone_at is null or other.gone_at > m.began_at)
          ) as billed
          from fake.machines m
        ) as moments
        """
    )
    assert most == MAX_WORKERS
    assert await connection.fetchval("select count(*) from fake.machines") > 2 * MAX_WORKERS
    # No slot was filled twice, by one orchestrator or by two.
    assert await connection.fetchval("select count(*) = count(distinct name) from fake.created")
    assert await connection.fetchval("select count(*) = count(distinct name) from fake.machines")
    # Every remaining machine has a worker row that names it or can adopt it.
    leaked = await connection.fetch(
        """
        select m.name from fake.machines m
        where m.gone_at is null
          and not exists (select from windlass.workers w where w.id = m.name and w.status <> 'terminated')
        """
    )
    assert leaked == []
    # Time from the last sign of one leader to the first of the next. The standby retries when the lease expires
    # (TTL_S after the last renewal), then lists machines. The remaining time allows for a loaded machine.
    # tests/simulator/test_succession.py checks lease plus half a second in virtual time.
    longest_s = await connection.fetchval(
        """
        select max(extract(epoch from later - at)) from (
          select at, lead(at) over (order by at) as later from fake.led
        ) as signs
        """
    )
    assert longest_s < TTL_S + BUSY_MACHINE_S
