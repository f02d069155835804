"""What a worker's calls cost: over the database, and over HTTP to one server process.

`python -m bench.transports` measures finish-and-claim of spawned workers (one task at a time, as fast as possible) with
byte-level clients, with real clients, and on a database connection. Then WORKERS simulated workers send heartbeats
every INTERVAL_S. CPU is that of the server process and of all PostgreSQL processes, from /proc.
"""

import argparse
import asyncio
import contextlib
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from bench.bench_server import connected
from bench.byte_client import ByteClient
from bench.figures import percentile, table
from bench.process_cpu import ProcessCpu
from bench.static_control_plane import StaticControlPlane
from windlass.cli.logs import configure_logs
from windlass.model.auth import WORKER_PREFIX, hash_of, new_token
from windlass.model.config import Config, WorkerConfig
from windlass.model.fleet import FleetConfig
from windlass.model.task import MAX_PAYLOAD_BYTES, Finished, NewTask
from windlass.model.worker import Registration
from windlass.ports import http
from windlass.ports.transport import WorkerTransport
from windlass.server.app import make_app
from windlass.server.context import WorkerApiContext
from windlass.server.long_poll import LongPollHub
from windlass.server.server import listen, serving
from windlass.store.database import Database
from windlass.store.tasks import PostgresTaskStore
from windlass.store.transport import open_postgres_transport
from windlass.wiring import stores
from windlass.wiring.http_server import WORKER_CONNECTIONS
from windlass.wiring.store_roles import WorkerProtocolStores
from windlass.worker.http_transport import HttpTransport, WorkerCredentials

QUEUE = "q"
# A single client makes more calls than one worker may.
WITHOUT_LIMIT = 1e6
FLEET = FleetConfig(queues=(QUEUE,), max_workers=100)
ROUND_TRIPS = 6_000
CLIENT_COUNTS = (1, 8, 16)
WORKERS = 10_000
INTERVAL_S = 20.0
HEARTBEATS_S = 20.0
# Connections that the simulated workers share.
HEARTBEAT_CONNECTIONS = 200
_CLAIM = re.compile(rb'"task_id":(\d+),"token":"([0-9a-f-]{36})"')


async def serve(dsn: str) -> None:
    configure_logs("json")
    async with Database(dsn, max_connections=WORKER_CONNECTIONS) as database:
        store = WorkerProtocolStores(database)
        long_poll_hub, listener = LongPollHub(store.wait_for_work), listen("127.0.0.1", 0)
        context = WorkerApiContext(
            worker_store=store, auth_store=store, long_poll_hub=long_poll_hub,
            control=StaticControlPlane(FLEET), worker_defaults=WorkerConfig(),
            max_payload_bytes=MAX_PAYLOAD_BYTES, version="bench", worker_rate_limit=WITHOUT_LIMIT,
        )  # fmt: skip
        async with serving(make_app(context), listener):
            print(listener.getsockname()[1], flush=True)
            await asyncio.Event().wait()


@dataclass(frozen=True, slots=True)
class BenchEnvironment:
    dsn: str
    port: int
    # Worker tokens by worker id.
    tokens: dict[str, str]
    server: ProcessCpu
    postgres: ProcessCpu


@asynccontextmanager
async def bench_environment(workers: int) -> AsyncIterator[BenchEnvironment]:
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o711)
        async with stores.database(Config(data_dir=Path(folder))) as dsn:
            tokens = await join_workers(dsn, workers)
            with server_process(dsn) as (process, port):
                postgres = ProcessCpu.of_postgres(next(Path(folder).rglob("postmaster.pid")).parent)
                yield BenchEnvironment(dsn, port, tokens, ProcessCpu(process.pid), postgres)


@contextlib.contextmanager
def server_process(dsn: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    arguments = [sys.executable, "-m", "bench.transports", "--serve", dsn]
    server = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield server, int(server.stdout.readline())
    finally:
        server.terminate()
        server.wait(10)


async def join_workers(dsn: str, count: int) -> dict[str, str]:
    """Spawned workers that have joined: their finished tasks are recorded for the ledger."""
    chance = random.SystemRandom()
    tokens = {f"w{slot}": new_token(WORKER_PREFIX, chance) for slot in range(count)}
    async with connected(dsn) as connection:
        await connection.execute("insert into windlass.fleets (name) values ('far')")
        await connection.execute("insert into windlass.slots select 'far', s from generate_series(0, $1 - 1) s", count)
        await connection.execute(
            "insert into windlass.workers (id, fleet, slot, status, queues, token_hash, last_heartbeat) "
            "select w.id, 'far', w.slot - 1, 'active', $2, w.hash, now() "
            "from unnest($1::text[], $3::bytea[]) with ordinality as w (id, hash, slot)",
            list(tokens),
            [QUEUE],
            [hash_of(token) for token in tokens.values()],
        )
        await connection.execute("vacuum analyze")
    return tokens


async def work_by_bytes(client: ByteClient, count: int) -> None:
    finished = b""
    for _ in range(count):
        reply = await client.post(http.FINISH, b'{"finished":[%b],"queues":["q"],"limit":1}' % finished)
        found = _CLAIM.search(reply)
        assert found is not None, reply
        finished = b'{"task_id":%b,"token":"%b","result":"1"}' % found.groups()


async def work(transport: WorkerTransport, name: str, count: int) -> None:
    await transport.register(Registration(name, (QUEUE,)))
    finished: list[Finished] = []
    for _ in range(count):
        reply = await transport.finish_and_claim(name, finished, (QUEUE,), 1)
        finished = [Finished(claim.task_id, claim.token, "1") for claim in reply.claims]


Run = Callable[[BenchEnvironment, Sequence[str], int], Awaitable[None]]


async def run_bytes(bench: BenchEnvironment, names: Sequence[str], each: int) -> None:
    clients = [await ByteClient.connect(bench.port, bench.tokens[name]) for name in names]
    await asyncio.gather(*(work_by_bytes(client, each) for client in clients))
    for client in clients:
        client.close()


async def run_http(bench: BenchEnvironment, names: Sequence[str], each: int) -> None:
    url = f"http://127.0.0.1:{bench.port}"

    async def run_one(name: str) -> None:
        async with HttpTransport(WorkerCredentials(name, url, bench.tokens[name]), False) as transport:
            await work(transport, name, each)

    await asyncio.gather(*(run_one(name) for name in names))


async def run_database(bench: BenchEnvironment, names: Sequence[str], each: int) -> None:
    async def run_one(name: str) -> None:
        async with open_postgres_transport(bench.dsn, max_connections=2) as transport:
            await work(transport, name, each)

    await asyncio.gather(*(run_one(name) for name in names))


async def measure(bench: BenchEnvironment, what: str, run: Run, names: Sequence[str], round_trips: int) -> list[str]:
    """A row: calls per second, then CPU microseconds per call of the server, of PostgreSQL and of the clients."""
    each = round_trips // len(names)
    async with Database(bench.dsn) as database:
        # Some more than needed: the last claims are never finished.
        tasks = (NewTask(QUEUE) for _ in range(round_trips + 2 * len(names)))
        await PostgresTaskStore(database).enqueue_many(tasks)
    async with connected(bench.dsn) as connection:
        await connection.execute("vacuum analyze windlass.tasks")
        await connection.execute("checkpoint")
    bench.server.restart()
    bench.postgres.restart()
    started, ours_s = time.perf_counter(), time.process_time()
    await run(bench, names, each)
    calls, elapsed_s = each * len(names), time.perf_counter() - started
    costs_s = (bench.server.used_s, bench.postgres.used_s, time.process_time() - ours_s)
    return [what, str(len(names)), f"{calls / elapsed_s:,.0f}", *(f"{1e6 * cost_s / calls:,.0f}" for cost_s in costs_s)]


async def measure_heartbeats(bench: BenchEnvironment, duration_s: float) -> str:
    """Every worker sends its heartbeat once per INTERVAL_S, at a time of its own."""
    loop, latencies_s, late = asyncio.get_running_loop(), list[float](), 0
    tokens = list(bench.tokens.values())
    rate = len(tokens) / INTERVAL_S
    body = json.dumps({"claims": [], "vitals": {"pid": 7, "cpu": 0.25}}).encode()
    clients = [
        await ByteClient.connect(bench.port, token) for token in tokens[: min(HEARTBEAT_CONNECTIONS, len(tokens))]
    ]
    groups = [tokens[start :: len(clients)] for start in range(len(clients))]

    async def run_one(number: int, client: ByteClient) -> None:
        nonlocal late
        own, started = groups[number], loop.time() + 0.1
        for turn in range(int(rate * duration_s / len(clients))):
            due = started + (turn * len(clients) + number) / rate
            await asyncio.sleep(max(0.0, due - loop.time()))
            client.use_token(own[turn % len(own)])
            await client.post(http.HEARTBEAT, body)
            latencies_s.append(loop.time() - due)
            late += loop.time() - due > 1.0

    bench.server.restart()
    bench.postgres.restart()
    started = time.perf_counter()
    await asyncio.gather(*(run_one(number, client) for number, client in enumerate(clients)))
    elapsed_s = time.perf_counter() - started
    server_s, postgres_s = bench.server.used_s, bench.postgres.used_s
    for client in clients:
        client.close()
    beats = len(latencies_s)
    return (
        f"{len(tokens):,} workers, {beats / elapsed_s:,.0f} heartbeats/s for {elapsed_s:.0f} s: "
        f"server {server_s / elapsed_s:.1%} of a core ({1e6 * server_s / beats:,.0f} us each), "
        f"PostgreSQL {postgres_s / elapsed_s:.1%} ({1e6 * postgres_s / beats:,.0f} us each), "
        f"p50 {1e3 * percentile(latencies_s, 0.5):.1f} ms, p99 {1e3 * percentile(latencies_s, 0.99):.1f} ms, "
        f"{late} later than 1 s"
    )


async def main(options: argparse.Namespace) -> None:
    async with bench_environment(options.workers) as bench:
        rows = []
        for count in CLIENT_COUNTS:
            names = list(bench.tokens)[:count]
            await measure(bench, "", run_bytes, names, 500)  # plans, caches, connections
            rows.append(await measure(bench, "HTTP, byte-level client", run_bytes, names, options.round_trips))
            if not options.only_server and count <= 8:
                rows.append(await measure(bench, "HTTP, HttpTransport", run_http, names, options.round_trips // 2))
                rows.append(await measure(bench, "database connection", run_database, names, options.round_trips // 2))
        head = ["finish-and-claim", "clients", "calls/s", "server us", "PostgreSQL us", "client us"]
        print(table(head, rows))
        print(await measure_heartbeats(bench, options.heartbeats_s))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", metavar="DSN", help="run only the server, and print its port")
    parser.add_argument("--round-trips", type=int, default=ROUND_TRIPS)
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--heartbeats-s", type=float, default=HEARTBEATS_S)
    parser.add_argument("--only-server", action="store_true", help="only byte-level clients")
    given = parser.parse_args()
    # Workers run on the loop of the standard library.
    uvloop.run(serve(given.serve)) if given.serve else asyncio.run(main(given))
