"""Workers over HTTP: what the worker's client costs, and how one worker compares with a database connection.

    python -m bench.http_clients
    python -m bench.http_clients --part worker --rounds 3

First eight real HttpTransports in this process finish one task and claim the next, as
fast as they can. Then one `windlass worker --inline` over HTTP and one on a database connection run in turns, one
window each per round, as in `bench.throughput`. The control plane is that of `bench.transports`, in another process.
Goals: the clients make 1,800 calls per second together, and a worker over HTTP reaches 0.4 of the rate of a worker on a
database connection. Exits with 1 if a goal is missed.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import psutil

from bench.bench_server import BenchServer, open_bench_server
from bench.figures import ratio, report_goals
from bench.shared_counters import SharedCounters
from bench.transports import QUEUE, join_workers, server_process
from bench.worker_processes import WorkerProcesses, worker_processes
from windlass.model.auth import API_PREFIX, Role, hash_of, new_token
from windlass.model.task import Finished, NewTask
from windlass.model.worker import Registration
from windlass.store.auth import PostgresAuthStore
from windlass.store.database import Database
from windlass.store.migration import migrate
from windlass.store.tasks import PostgresTaskStore
from windlass.worker.http_transport import HttpTransport, WorkerCredentials

CLIENTS = 8
SETTLE_S = 0.2
# Upper bound of a worker's rate: its queue must not run empty.
MAX_PER_S = 3_000
TRANSPORTS = ("database", "http")
GOAL_CALLS_PER_S = 1_800
GOAL_RATIO = 0.4


async def fill(dsn: str, queue: str, count: int) -> None:
    async with Database(dsn) as database:
        await PostgresTaskStore(database).enqueue_many(NewTask(queue) for _ in range(count))


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure_clients(dsn: str, calls: int) -> dict[str, bool]:
    tokens = await join_workers(dsn, CLIENTS)
    await fill(dsn, QUEUE, calls)
    async with AsyncExitStack() as stack:
        process, port = stack.enter_context(server_process(dsn))
        url, server = f"http://127.0.0.1:{port}", psutil.Process(process.pid)
        transports = {}
        for name, token in tokens.items():
            transport = HttpTransport(WorkerCredentials(name, url, token), False)
            transports[name] = await stack.enter_async_context(transport)
            await transport.register(Registration(name, (QUEUE,)))

        async def work(name: str, transport: HttpTransport) -> int:
            finished: list[Finished] = []
            count = 0
            while True:
                result = await transport.finish_and_claim(name, finished, (QUEUE,), 1)
                count += 1
                finished = [Finished(claim.task_id, claim.token, "1") for claim in result.claims]
                if not finished:
                    return count

        started_at, own_s, server_s = time.perf_counter(), time.process_time(), cpu_s(server)
        made = sum(await asyncio.gather(*(work(name, transport) for name, transport in transports.items())))
        took_s = time.perf_counter() - started_at
        print(
            f"{CLIENTS} clients: {made / took_s:,.0f} finish-and-claim per second, CPU per call: "
            f"client {(time.process_time() - own_s) / made * 1e6:.0f} us, "
            f"server {(cpu_s(server) - server_s) / made * 1e6:.0f} us"
        )
    goal = f"{CLIENTS} clients make {GOAL_CALLS_PER_S:,} calls per second together"
    return {goal: made / took_s >= GOAL_CALLS_PER_S}


async def measure_workers(server: BenchServer, dsn: str, rounds: int, window_s: float) -> dict[str, bool]:
    for queue in TRANSPORTS:
        await fill(dsn, queue, int(MAX_PER_S * (rounds + 1) * (window_s + SETTLE_S)))
    token = new_token(API_PREFIX, random.SystemRandom())
    token_file = server.folder / "token"
    token_file.write_text(token)
    async with Database(dsn) as database:
        await PostgresAuthStore(database).create_token("bench", Role.WORKER, hash_of(token))
    program = str(Path(sys.executable).with_name("windlass"))
    common = [program, "worker", "--handler", "bench.handlers:noop_inline", "--inline"]
    async with AsyncExitStack() as stack:
        _, port = stack.enter_context(server_process(dsn))
        url = f"http://127.0.0.1:{port}"
        commands = {
            "database": [*common, "--queue", "database"],
            "http": [*common, "--queue", "http", "--url", url, "--token-file", str(token_file)],
        }
        workers: dict[str, WorkerProcesses] = {}
        for name, command in commands.items():
            counters = SharedCounters(server.folder / f"tally_{name}")
            log = server.folder / f"{name}.log"
            workers[name] = stack.enter_context(worker_processes(command, 1, dsn, counters, log))
            await workers[name].wait_until_all_started()
            counters.release()
            workers[name].pause()
        rates: dict[str, list[float]] = {name: [] for name in TRANSPORTS}
        cpu_us: dict[str, list[float]] = {name: [] for name in TRANSPORTS}
        for _ in range(rounds):
            for name in random.sample(TRANSPORTS, len(TRANSPORTS)):
                running = workers[name]
                running.resume()
                await asyncio.sleep(SETTLE_S)
                process = psutil.Process(running.pids[0])
                started_at, count, used_s = time.perf_counter(), sum(running.counts()), cpu_s(process)
                await asyncio.sleep(window_s)
                done = sum(running.counts()) - count
                rates[name].append(done / (time.perf_counter() - started_at))
                cpu_us[name].append((cpu_s(process) - used_s) / max(done, 1) * 1e6)
                running.check()
                running.pause()
        for name in TRANSPORTS:
            rate, cost_us = statistics.median(rates[name]), statistics.median(cpu_us[name])
            print(f"one worker over {name:>8}: {rate:6,.0f} tasks per second, {cost_us:.0f} us of its CPU per task")
        middle, lowest, highest = ratio(rates, "http", "database")
        print(f"http to database: {middle:.2f} ({lowest:.2f} to {highest:.2f})")
    return {f"one worker over HTTP reaches {GOAL_RATIO} of one on a database connection": middle >= GOAL_RATIO}


async def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["clients", "worker"])
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--window-s", type=float, default=1.0)
    options = parser.parse_args()
    with open_bench_server() as server:
        dsn = server.dsn_of("postgres")
        await migrate(dsn)
        goals: dict[str, bool] = {}
        if options.part != "worker":
            goals |= await measure_clients(dsn, options.calls)
        if options.part != "clients":
            goals |= await measure_workers(server, dsn, options.rounds, options.window_s)
    return report_goals(goals)


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(main()) else 1)
