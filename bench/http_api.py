"""The HTTP API while the control loop runs: 200 requests per second for status and task lists.

    python -m bench.http_api                     # 1,000 workers, 1,000,000 tasks, 200 requests per second for 20 s
    python -m bench.http_api --rate 400 --seconds 10

One process serves: the API with its two connection pools, one cycle per second over all workers, samples for charts,
and alert evaluation. That is harder than `windlass up`, whose control loop has a process of its own. Another sends
requests with a token at fixed times, whether or not earlier answers have arrived, so latency counts from the due time;
and one listens to the event stream. Cycles are timed before and during the load.
"""

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import asyncpg

from bench.control import FILL_QUEUE, FINISHED, FLEET, QUEUED, StaticProvider, fill
from bench.figures import percentile, table
from bench.static_control_plane import StaticControlPlane
from windlass.cli.logs import configure_logs
from windlass.control.alerting import AlertManager
from windlass.control.cycle import FleetCycle
from windlass.model.auth import API_PREFIX, Role, hash_of, new_token
from windlass.model.config import WorkerConfig
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.server.app import make_app
from windlass.server.context import AppContext
from windlass.server.event_stream import OverviewFeed
from windlass.server.long_poll import LongPollHub
from windlass.server.metrics import Metrics
from windlass.server.server import listen, serving
from windlass.store.alerts import PostgresAlertStore
from windlass.store.control import PostgresControlStore
from windlass.store.database import Database
from windlass.store.embedded import EmbeddedPostgres
from windlass.store.migration import migrate
from windlass.wiring.http_server import server_stores, take_samples
from windlass.wiring.store_roles import DashboardStores, WorkerProtocolStores

WORKERS = 1_000
CYCLE_INTERVAL_S = 1.0
TIMEOUT_S = 30.0
# More than are ever in flight, unless the server falls behind.
CONNECTIONS = 32
# One finished task every 50 ms.
FILL_TASKS = """
insert into windlass.tasks (queue, status, attempts, created_at, started_at, finished_at, worker_id, claim_token)
select 'bench', 'complete', 1, now() - n * interval '50 ms' - interval '2 minutes', now() - n * interval '50 ms' -
  interval '1 minute', now() - n * interval '50 ms', 'gone', gen_random_uuid()
from generate_series(1, $1::integer) as n
"""
START_TIMEOUT_S = 60.0
PATHS = (
    "/api/v1/status",
    "/api/v1/tasks",
    "/api/v1/status",
    "/api/v1/tasks?status=queued",
    "/api/v1/status",
    "/api/v1/tasks?status=complete",
    "/api/v1/status",
    "/api/v1/tasks?queue=bench&status=running",
)


# ----------------------------------------------------------------------------------------------------------- the server


async def serve(dsn: str) -> None:
    """Serve the API and run cycles. Prints its port, then the duration of each cycle, one per line."""
    configure_logs("json")  # on standard error, so that only figures stand on standard output
    config = FleetConfig(
        queues=("bench",), handler="x:y", max_workers=WORKERS, heartbeat_timeout_s=36_000, stuck_timeout_s=36_000
    )
    token = new_token(API_PREFIX, random.SystemRandom())
    async with (
        server_stores(dsn) as (worker_store, user_store),
        Database(dsn) as own,
        Database(dsn, max_connections=2) as alert_database,
    ):
        await user_store.create_token("bench", Role.VIEWER, hash_of(token))
        listener = listen("127.0.0.1", 0)
        feed = OverviewFeed(user_store, lambda: frozenset({FLEET}))
        alerts = AlertManager(PostgresAlertStore(alert_database), [], failed_tasks_allowed=0, leader_grace_s=60.0)
        control = PostgresControlStore(own)
        cycle = FleetCycle(FLEET, config, control, StaticProvider(WORKERS), Candidate("bench", 600), random.Random(1))
        background = [asyncio.create_task(work) for work in (take_samples(user_store, feed), alerts.run())]
        async with serving(make_app(_context(worker_store, user_store, feed, config)), listener):
            print(json.dumps({"port": listener.getsockname()[1], "token": token}), flush=True)
            while not any(task.done() for task in background):
                started = time.perf_counter()
                alerts.record_cycle(await cycle.run())
                took_s = time.perf_counter() - started
                print(json.dumps({"cycle_s": took_s, "cpu_s": time.process_time()}), flush=True)
                await asyncio.sleep(max(0.0, CYCLE_INTERVAL_S - took_s))


def _context(
    worker_store: WorkerProtocolStores, user_store: DashboardStores, feed: OverviewFeed, config: FleetConfig
) -> AppContext:
    return AppContext(
        worker_store=worker_store,
        auth_store=worker_store,
        long_poll_hub=LongPollHub(worker_store.wait_for_work),
        control=StaticControlPlane(config, user_store),
        worker_defaults=WorkerConfig(),
        max_payload_bytes=1 << 20,
        version="bench",
        store=user_store,
        overview_feed=feed,
        metrics=Metrics(feed, user_store),
        rate_limit=1e6,
    )


# ---------------------------------------------------------------------------------------------------------- the client


class Server:
    """The server process and the durations of its cycles."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.port = 0
        self.token = ""
        self.cycles: list[float] = []
        # CPU seconds of its process after each cycle.
        self.cpu: list[float] = []

    async def listen(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            report = json.loads(line)
            if "port" in report:
                self.port, self.token = report["port"], report["token"]
            else:
                self.cycles.append(report["cycle_s"])
                self.cpu.append(report["cpu_s"])

    async def until_cycles(self, count: int) -> None:
        async with asyncio.timeout(START_TIMEOUT_S):
            while len(self.cycles) < count:
                if self._process.returncode is not None:
                    sys.exit("the server exited: see above")
                await asyncio.sleep(0.05)


async def count_events(server: Server) -> int:
    """Listen to the event stream until cancelled, and count its messages."""
    received = 0
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(_request("/api/v1/stream", server.token))
    try:
        while line := await reader.readline():
            received += line.startswith(b"event:")
    except asyncio.CancelledError:
        writer.close()
    return received


def _request(path: str, token: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n\r\n".encode()


async def send_requests(server: Server, rate: float, seconds: float) -> tuple[list[float], list[int]]:
    """Seconds from the due time of each request to its answer, and the status codes.

    Uses bare connections: an HTTP library takes longer per request than the server.
    """
    waits: list[float] = []
    statuses: list[int] = []
    began = time.perf_counter()
    due = iter(
        [(began + number / rate, path) for number, path in zip(range(int(rate * seconds)), itertools.cycle(PATHS))]
    )

    async def one_after_another() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for at, path in due:  # shared: the next free connection takes the next request
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            writer.write(_request(path, server.token))
            async with asyncio.timeout(TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
                await reader.readexactly(length)
            statuses.append(int(head[9:12]))
            waits.append(time.perf_counter() - at)
        writer.close()

    await asyncio.gather(*(one_after_another() for _ in range(CONNECTIONS)))
    return waits, statuses


async def measure(dsn: str, rate: float, seconds: float) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench.http_api",
        "--serve",
        dsn,
        stdout=asyncio.subprocess.PIPE,
    )
    server = Server(process)
    listening = asyncio.create_task(server.listen())
    try:
        # The first ones warm caches and plans.
        await server.until_cycles(3)
        stream = asyncio.create_task(count_events(server))
        alone = len(server.cycles)
        await asyncio.sleep(max(5.0, seconds / 2))
        before = server.cycles[alone:]
        asked = len(server.cycles)
        waits, statuses = await send_requests(server, rate, seconds)
        meanwhile = server.cycles[asked:]
        used = [server.cpu[asked - 1] - server.cpu[alone - 1], server.cpu[-1] - server.cpu[asked - 1]]
        stream.cancel()
        received = await stream
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        await listening
    refused = [status for status in statuses if status != 200]
    print(f"{WORKERS:,} workers, {FINISHED + QUEUED:,} tasks, {rate:g} requests per second for {seconds:g} s")
    print(f"answered {len(statuses) - len(refused):,} of {len(statuses):,}; others: {sorted(set(refused)) or 'none'}\n")
    print(table(["ms", "p50", "p95", "p99", "highest"], list(_rows(waits, before, meanwhile))))
    print(f"\ncycles under load: {len(meanwhile)} in {seconds:g} s, one per second is due")
    print(f"the listener received {received} messages")
    shares = [used[0] / max(1, len(before)), used[1] / max(1, len(meanwhile))]
    print(f"the server's process used {shares[0]:.0%} of a core alone, {shares[1]:.0%} under load")


def _rows(waits: list[float], before: list[float], meanwhile: list[float]) -> Iterator[list[str]]:
    for name, values in (("request", waits), ("cycle alone", before), ("cycle under load", meanwhile)):
        figures = [percentile(values, share) for share in (0.5, 0.95, 0.99)] + [max(values)]
        yield [name, *(f"{1000 * figure:.1f}" for figure in figures)]


async def run(rate: float, seconds: float) -> None:
    with tempfile.TemporaryDirectory(prefix="windlass-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with EmbeddedPostgres(folder / "data") as postgres:
            await migrate(postgres.dsn)
            connection = await asyncpg.connect(postgres.dsn, timeout=60)
            await connection.execute(FILL_TASKS, FINISHED, timeout=600)
            await connection.execute(FILL_QUEUE, QUEUED, timeout=600)
            await connection.close()
            await fill(postgres.dsn, WORKERS)
            await measure(postgres.dsn, rate, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--serve", metavar="DSN", help=argparse.SUPPRESS)
    given = parser.parse_args()
    asyncio.run(serve(given.serve) if given.serve else run(given.rate, given.seconds))


if __name__ == "__main__":
    main()
