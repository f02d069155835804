"""What a round trip costs a worker: over the database, and over HTTP to a control plane in another process.

`python -m bench.transports`: each worker finishes one task and claims the next, as fast as it can.
"""

import asyncio
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.static_control_plane import StaticControlPlane
from windlass.cli.logs import configure_logs
from windlass.model.action import Plan
from windlass.model.auth import JOIN_PREFIX, WORKER_PREFIX, hash_of, new_token
from windlass.model.config import Config, WorkerConfig
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.model.outcome import Intent
from windlass.model.snapshot import PlannerState
from windlass.model.task import MAX_PAYLOAD_BYTES, Finished, NewTask
from windlass.model.worker import Registration
from windlass.server.app import make_app
from windlass.server.context import WorkerApiContext
from windlass.server.long_poll import LongPollHub
from windlass.server.server import listen, serving
from windlass.store.auth import PostgresAuthStore
from windlass.store.control import PostgresControlStore
from windlass.store.database import Database
from windlass.store.tasks import PostgresTaskStore
from windlass.store.transport import open_postgres_transport
from windlass.wiring import stores
from windlass.wiring.http_server import WORKER_CONNECTIONS
from windlass.wiring.store_roles import WorkerProtocolStores
from windlass.worker.http_transport import HttpTransport, WorkerCredentials

QUEUE = "q"
FLEET = FleetConfig(queues=(QUEUE,), max_workers=100)
ROUND_TRIPS = 3_000
WORKER_COUNTS = (1, 8)


async def serve(dsn: str) -> None:
    configure_logs("json")
    async with Database(dsn, max_connections=WORKER_CONNECTIONS) as database:
        store = WorkerProtocolStores(database)
        long_poll_hub, listener = LongPollHub(store.wait_for_work), listen("127.0.0.1", 0)
        context = WorkerApiContext(
            worker_store=store, auth_store=store, long_poll_hub=long_poll_hub,
            control=StaticControlPlane(FLEET), worker_defaults=WorkerConfig(),
            max_payload_bytes=MAX_PAYLOAD_BYTES, version="bench",
        )  # fmt: skip
        async with serving(make_app(context), listener):
            print(listener.getsockname()[1], flush=True)
            await asyncio.Event().wait()


async def join_workers(dsn: str, count: int) -> dict[str, str]:
    """Workers that have joined, and their tokens."""
    chance, ourselves, tokens = random.SystemRandom(), Candidate("bench", 3600.0), {}
    async with Database(dsn) as database:
        store, auth = PostgresControlStore(database), PostgresAuthStore(database)
        for slot in range(count):
            name, join = f"w{slot}", new_token(JOIN_PREFIX, chance)
            tokens[name] = new_token(WORKER_PREFIX, chance)
            observed = await store.observe(ourselves, "far", FLEET)
            assert isinstance(observed, tuple)
            intent = Intent(name, slot, "bench", 30.0, join_token_hash=hash_of(join), join_ttl_s=600.0)
            await store.commit_plan(ourselves, observed[0], observed[1], Plan((), PlannerState(), "x"), [intent])
            await auth.activate(name, hash_of(join), hash_of(tokens[name]))
    return tokens


async def work(transport: Any, name: str, count: int) -> None:
    async with transport as line:
        await line.register(Registration(name, (QUEUE,)))
        finished: list[Finished] = []
        for _ in range(count):
            turn = await line.finish_and_claim(name, finished, (QUEUE,), 1)
            finished = [Finished(claim.task_id, claim.token, "1") for claim in turn.claims]


async def measure(dsn: str, open_transport: Callable[[str], Any], names: list[str]) -> float:
    async with Database(dsn) as database:
        await PostgresTaskStore(database).enqueue_many(NewTask(QUEUE) for _ in range(ROUND_TRIPS))
    each = ROUND_TRIPS // len(names)
    started = time.perf_counter()
    await asyncio.gather(*(work(open_transport(name), name, each) for name in names))
    return each * len(names) / (time.perf_counter() - started)


async def main() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o711)
        async with stores.database(Config(data_dir=Path(folder))) as dsn:
            tokens = await join_workers(dsn, max(WORKER_COUNTS))
            server = subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, "-m", "bench.transports", dsn],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            assert server.stdout is not None
            try:
                url = f"http://127.0.0.1:{int(server.stdout.readline())}"
                for count_ in WORKER_COUNTS:
                    names = list(tokens)[:count_]
                    for what, open_transport in {
                        "database": lambda _: open_postgres_transport(dsn, max_connections=2),
                        "http": lambda name: HttpTransport(WorkerCredentials(name, url, tokens[name]), False),
                    }.items():
                        rate = await measure(dsn, open_transport, names)
                        print(f"{count_} workers over {what:>8}: {rate:6.0f} finish-and-claim a second")
            finally:
                server.terminate()
                server.wait(10)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]) if len(sys.argv) > 1 else main())
