"""Claims as the role windlass_worker, with row-level security on every table, compared with the schema's owner.

Both call the same functions in one database, in turns. What counts is the CPU time of their server processes, which a
busy machine disturbs less than the time of day. Exits with 1 if a claim as the role has less than 0.9 of the owner's
speed.
"""

import argparse
import asyncio
import statistics
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.bench_server import BenchServer, connected, open_bench_server
from bench.figures import ratio, table
from windlass.store.export_sql import ROLES
from windlass.store.migration import apply_roles, migrate

GOAL = 0.9
QUEUED = 200_000
CALLS_A_ROUND = 200
BATCH = 100
BATCHES_A_ROUND = 10
WARM_UP_CALLS = 100
QUEUE = "q"
SECRET = "wld_" + "5" * 64
USERS = {"owner": None, "windlass_worker": SECRET}
REGISTER = "select windlass.register_worker($1, 'default', $2, p_secret => $3)"
FINISH_AND_CLAIM = "select * from windlass.finish_and_claim($1, $2, $3, $4, $5, $6, $7)"
HEARTBEAT = "select * from windlass.heartbeat($1, $2, $3, $4)"
ENQUEUE = "insert into windlass.tasks (queue) select 'q' from generate_series(1, $1::integer)"


@dataclass
class _Worker:
    """A worker without a handler, on a connection of its own."""

    name: str
    secret: str | None
    connection: Any
    backend_pid: int
    finished: list[Any] = field(default_factory=list)

    def cpu_us(self) -> float:
        """CPU time of its server process so far."""
        return int(Path(f"/proc/{self.backend_pid}/schedstat").read_text().split()[0]) / 1_000

    async def claim(self, limit: int) -> None:
        done = self.finished
        self.finished = await self.connection.fetch(
            FINISH_AND_CLAIM,
            self.name,
            [claim["task_id"] for claim in done],
            [claim["token"] for claim in done],
            ["null" for _ in done],
            [QUEUE],
            limit,
            self.secret,
        )

    async def send_heartbeat(self) -> None:
        await self.connection.fetch(HEARTBEAT, self.name, "[]", "{}", self.secret)


async def measure(server: BenchServer, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Microseconds of CPU time per call, by kind of call, user and round."""
    actions: dict[str, tuple[int, Callable[[_Worker], Awaitable[None]]]] = {
        "claim one": (CALLS_A_ROUND, lambda worker: worker.claim(1)),
        f"claim {BATCH}": (BATCHES_A_ROUND, lambda worker: worker.claim(BATCH)),
        "heartbeat": (CALLS_A_ROUND, _Worker.send_heartbeat),
    }
    samples: dict[str, dict[str, list[float]]] = {action: {user: [] for user in USERS} for action in actions}
    dsn = server.dsn_of(await server.template("roles", _build))
    async with AsyncExitStack() as stack:
        workers = []
        for user, secret in USERS.items():
            as_role = f"{dsn}{'&' if '?' in dsn else '?'}role={user}" if secret is not None else dsn
            connection = await stack.enter_async_context(connected(as_role))
            pid = await connection.fetchval("select pg_backend_pid()")
            worker = _Worker(user, secret, connection, pid)
            await connection.execute(REGISTER, user, [QUEUE], secret)
            workers.append(worker)
        for calls, act in actions.values():
            for worker in workers:
                for _ in range(min(calls, WARM_UP_CALLS)):
                    await act(worker)
        for round_ in range(rounds):
            for action, (calls, act) in actions.items():
                # The second contender finds the pages in memory, so the order alternates.
                for worker in workers if round_ % 2 else reversed(workers):
                    before_us = worker.cpu_us()
                    for _ in range(calls):
                        await act(worker)
                    samples[action][worker.name].append((worker.cpu_us() - before_us) / calls)
    return samples


async def _build(dsn: str) -> None:
    await migrate(dsn)
    await apply_roles(dsn, ROLES)
    async with connected(dsn) as connection:
        await connection.execute(ENQUEUE, QUEUED)


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    with open_bench_server() as server:
        samples = await measure(server, arguments.rounds)
    rows, has_missed = [], False
    for action, by_user in samples.items():
        middle, lowest, highest = ratio(by_user, "owner", "windlass_worker")
        has_missed |= action.startswith("claim") and middle < GOAL
        rows.append(
            [
                action,
                *(f"{statistics.median(by_user[user]):.0f}" for user in USERS),
                f"**{middle:.2f}** ({lowest:.2f} to {highest:.2f})",
            ]
        )
    print(f"\n### Calls as the role of workers, {arguments.rounds} rounds\n")
    print(table(["µs of CPU time", *USERS, "speed of the role"], rows))
    return 1 if has_missed else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
