"""A real `windlass up` on a database of its own, with simulated workers that look spawned.

The workers are rows with tokens, and their machines exist only in the list of a static provider (static_fleet/). So a
load generator can act as thousands of workers over HTTP while the real control loop runs its cycles over them.
"""

import asyncio
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from bench.bench_server import BenchServer, connected
from bench.process_usage import cpu_s, memory_mib, process_tree
from bench.raw_http import call_once, get_request
from windlass.model.auth import API_PREFIX, WORKER_PREFIX, Role, hash_of
from windlass.model.config import ApiConfig
from windlass.store.migration import migrate

FLEET = QUEUE = "bench"
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 60.0
STATIC_FLEET = Path(__file__).with_name("static_fleet")
ROOT = Path(__file__).resolve().parent.parent

FILL_FLEET = "insert into windlass.fleets (name, queues, min_workers, max_workers) values ('bench', '{bench}', $1, $1)"
FILL_SLOTS = "insert into windlass.slots (fleet, slot) select 'bench', n from generate_series(0, $1::integer - 1) as n"
# With a price, as spawned machines have, so that each finish also writes a span for the ledger.
FILL_WORKERS = """
insert into windlass.workers (id, fleet, slot, status, queues, lease_s, created_at, activated_at, last_heartbeat,
  first_claimed_at, machine_id, machine_at, creation, metadata, price_micros_per_hour, currency, token_hash, joined_at)
select 'w' || n, 'bench', n, 'active', '{bench}', $2, now() - interval '1 hour', now() - interval '1 hour', now(),
  now() - interval '1 hour', 'm' || n, now() - interval '1 hour', 'created', '{"idle_s": 0}', 6000, 'EUR',
  sha256(convert_to($3 || encode(sha256(convert_to('bench ' || n, 'UTF8')), 'hex'), 'UTF8')), now()
from generate_series(0, $1::integer - 1) as n
"""
FILL_TASKS = (
    "insert into windlass.tasks (queue, payload) select 'bench', to_jsonb(n) from generate_series(1, $1::integer) n"
)
HAS_PROCESSES = "select to_regclass('windlass.processes') is not null"
PROCESSES = "select kind, pid from windlass.processes"
FILL_TOKENS = "insert into windlass.tokens (name, role, hash) values ($1, $2, $3)"

TOML = """
[fleets.{fleet}]
queues = ["{fleet}"]
exec = "true"
min_workers = {workers}
max_workers = {workers}
poll_interval_s = {poll_interval_s}
heartbeat_interval_s = 20
heartbeat_timeout_s = {heartbeat_timeout_s}
stuck_timeout_s = 36000
"""


def worker_token(number: int) -> str:
    """The token of worker `w{number}`, which FILL_WORKERS computes too."""
    return WORKER_PREFIX + hashlib.sha256(f"bench {number}".encode()).hexdigest()


def api_token(role: Role) -> str:
    return API_PREFIX + hashlib.sha256(f"bench {role}".encode()).hexdigest()


class CycleRecord(NamedTuple):
    """One line of static_fleet/sitecustomize.py: when the cycle ended, by the monotonic clock of this machine."""

    ended_at: float
    took_s: float
    is_leader: bool
    pid: int


class Usage(NamedTuple):
    """CPU seconds so far. While one process does everything, it counts as server and as control."""

    server_s: float
    control_s: float
    postgres_s: float

    def since(self, before: "Usage") -> "Usage":
        return Usage(*(now - then for now, then in zip(self, before, strict=True)))


@dataclass(frozen=True, slots=True)
class Installation:
    """`up` is the process that was started. Which of its descendants serve and which control, `roles` tells."""

    dsn: str
    port: int
    folder: Path
    up: "subprocess.Popen[bytes]"
    postmaster: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def roles(self) -> dict[str, list[int]]:
        """Processes by role: `server`, `control`, `supervisor`; or `up`, if one process does everything."""
        pids = [process.pid for process in process_tree(self.up.pid)]
        async with connected(self.dsn) as connection:
            if await connection.fetchval(HAS_PROCESSES):
                kinds = {row["pid"]: row["kind"] for row in await connection.fetch(PROCESSES)}
            else:
                kinds = dict.fromkeys(pids, "up")
        found: dict[str, list[int]] = {}
        for pid in pids:
            found.setdefault(kinds.get(pid, "supervisor"), []).append(pid)
        return found

    async def usage(self) -> Usage:
        roles = await self.roles()
        serving, controlling = (roles.get(role) or roles.get("up", []) for role in ("server", "control"))
        postgres = [process.pid for process in process_tree(self.postmaster)]
        return Usage(cpu_s(serving), cpu_s(controlling), cpu_s(postgres))

    async def memory_mib(self) -> dict[str, float]:
        """Memory of each process of Windlass, and of all processes of PostgreSQL together."""
        each = {f"{role} {pid}": memory_mib(pid) for role, pids in (await self.roles()).items() for pid in pids}
        return {**each, "postgres": sum(memory_mib(process.pid) for process in process_tree(self.postmaster))}

    def cycles(self) -> list[CycleRecord]:
        path = self.folder / "cycles"
        lines = path.read_text().splitlines() if path.exists() else []
        return [
            CycleRecord(float(at), float(took), leads == "1", int(pid))
            for at, took, leads, pid in map(str.split, lines)
        ]

    def log_tail(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-3_000:]

    def check(self) -> None:
        if self.up.poll() is not None:
            raise ChildProcessError(f"`windlass up` exited\n{self.log_tail()}")


@asynccontextmanager
async def installation(
    server: BenchServer,
    name: str,
    *,
    workers: int,
    tasks: int = 0,
    processes: int | None = None,
    poll_interval_s: float = 1.0,
    heartbeat_timeout_s: float = 120.0,
    lease_s: float = 60.0,
    settings: str = "",
) -> AsyncIterator[Installation]:
    """Fill a database, start `windlass up`, wait until it is ready, and stop it at the end.

    `processes`: number of server processes; None leaves the default. `settings`: further lines of windlass.toml.
    """

    async def build(dsn: str) -> None:
        await migrate(dsn)
        await _fill(dsn, workers, tasks, lease_s)

    template = await server.template(f"{name}_template", build)
    async with server.copy(template, name) as dsn:
        folder = server.folder / name
        folder.mkdir()
        toml = TOML.format(
            fleet=FLEET, workers=workers, poll_interval_s=poll_interval_s, heartbeat_timeout_s=heartbeat_timeout_s
        )
        (folder / "windlass.toml").write_text(f"{settings}\n{toml}")
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("WINDLASS_")},
            "DATABASE_URL": dsn,
            "PYTHONPATH": f"{STATIC_FLEET}:{ROOT}",
            "BENCH_MACHINES": str(workers),
            "BENCH_CYCLES": str(folder / "cycles"),
        }
        if processes is not None and "processes" in ApiConfig.model_fields:
            environment["WINDLASS_API__PROCESSES"] = str(processes)
        port = _free_port()
        with (folder / "log").open("wb") as log:
            up = subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, "-m", "windlass", "up", "--port", str(port), "--leave-workers"],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        postmaster = int((server.postgres_data / "postmaster.pid").read_text().split()[0])
        running = Installation(dsn, port, folder, up, postmaster)
        try:
            await wait_until_ready(running)
            yield running
        finally:
            await asyncio.to_thread(_stop, up)


async def wait_until_ready(running: Installation, timeout_s: float = START_TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        running.check()
        try:
            reply = await call_once(running.port, get_request("/readyz"), 5.0)
            if reply.status == 200 and json.loads(reply.body)["has_control_loop"]:
                return
        except (OSError, TimeoutError):
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"`windlass up` is not ready after {timeout_s:g} s\n{running.log_tail()}")
        await asyncio.sleep(0.1)


async def _fill(dsn: str, workers: int, tasks: int, lease_s: float) -> None:
    async with connected(dsn) as connection:
        await connection.execute(FILL_FLEET, workers)
        await connection.execute(FILL_SLOTS, workers)
        await connection.execute(FILL_WORKERS, workers, lease_s, WORKER_PREFIX, timeout=600)
        await connection.execute(FILL_TASKS, tasks, timeout=600)
        for role in Role:
            await connection.execute(FILL_TOKENS, role.value, role.value, hash_of(api_token(role)))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def _stop(up: "subprocess.Popen[bytes]") -> None:
    """Stop `up` and, if it does not stop in time, everything it started."""
    children = process_tree(up.pid)
    if up.poll() is None:
        up.send_signal(signal.SIGTERM)
    try:
        up.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        print(f"`windlass up` did not stop in {STOP_TIMEOUT_S:g} s and is killed", file=sys.stderr)
    for process in children:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    up.wait()
