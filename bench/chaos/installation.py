"""The installation that faults are injected into: PostgreSQL, `windlass up`, and workers on every kind of connection.

| queue | its workers | connection |
| --- | --- | --- |
| `local` | a fleet of local workers | as `up`: a proxy for each server |
| `direct` | `windlass worker` | proxies of its own |
| `http` | `windlass worker --url` | a proxy to the HTTP servers |
| `pooled` | `windlass worker`, if pgbouncer is installed | pgbouncer in transaction mode, through a proxy |

`up`, pgbouncer and the workers without a fleet are restarted when they exit, as a service manager does. Everything is
on loopback, and every process has a mark in its environment, by which it is found and ended.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from bench.bench_server import connected
from bench.chaos.postgres_pair import HOST, PostgresPair, free_port
from bench.chaos.tcp_proxy import TcpProxy
from bench.installation import FILL_TOKENS, ROOT, api_token
from bench.raw_http import call_once, get_request
from windlass.model.auth import Role, hash_of
from windlass.store.migration import migrate
from windlass.store.postgres_programs import server_account

FLEET = "local"
LOCAL_WORKERS = 3
SERVERS = 2
LEASE_S = 8.0
HEARTBEAT_INTERVAL_S = 0.5
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 60.0
RESTART_INTERVAL_S = 0.5
RECORD_TIMEOUT_S = 20.0
# `up` is started at most once in this time, as by the systemd unit in deploy/.
RESTART_UP_INTERVAL_S = 2.0
PROCESSES = "select pid from windlass.processes where kind = $1 order by seen_at desc"
HANDLER = "bench.chaos.handlers:work"

# Slots may restart far more often than on a machine without faults; the limit is not what is measured here.
TOML = f"""
[control]
lease_s = 4

[api]
processes = {SERVERS}

[fleets.{FLEET}]
provider = "local"
queues = ["{FLEET}"]
handler = "{HANDLER}"
chdir = {json.dumps(str(ROOT))}
concurrency = 2
min_workers = {LOCAL_WORKERS}
max_workers = {LOCAL_WORKERS}
poll_interval_s = 0.5
heartbeat_interval_s = {HEARTBEAT_INTERVAL_S}
heartbeat_timeout_s = {LEASE_S:g}
spawn_timeout_s = 60
stop_timeout_s = 10
max_restarts = 100
restart_window_s = 60
"""


class Service:
    """A program that is started again whenever it exits."""

    def __init__(
        self, command: Sequence[Any], env: Mapping[str, str], log: Path, interval_s: float, **account: Any
    ) -> None:
        self._command = list(command)
        self._env = dict(env)
        self._log = log
        self._interval_s = interval_s
        self._account = account
        self._started_at = 0.0
        self._keeper: asyncio.Task[None] | None = None
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        if self.process is None:
            raise ProcessLookupError("not started")
        return self.process.pid

    def start(self) -> None:
        self._launch()
        self._keeper = asyncio.create_task(self._keep())

    async def stop(self) -> int | None:
        """Stop with SIGTERM. Returns the exit code; None if it had to be killed."""
        if self._keeper is not None:
            self._keeper.cancel()
        process = self.process
        if process is None:
            return None
        process.send_signal(signal.SIGTERM)
        try:
            return await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return None

    def log_tail(self, characters: int = 2_000) -> str:
        return self._log.read_text(errors="replace")[-characters:] if self._log.exists() else "not started"

    def _launch(self) -> None:
        self._started_at = time.monotonic()
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                cwd=self._log.parent,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **self._account,
            )

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            has_exited = self.process is not None and self.process.poll() is not None
            if has_exited and time.monotonic() >= self._started_at + self._interval_s:
                self._launch()


class ChaosInstallation:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self.postgres = PostgresPair(folder)
        self._mark = f"CHAOS_{uuid4().hex}"
        self.server_port = free_port()
        self.http_link = TcpProxy(lambda: self.server_port)
        # One proxy per server, as both are named in the URLs: a client follows the primary by itself.
        self.control_links: list[TcpProxy] = []
        self.direct_links: list[TcpProxy] = []
        self.pooler_link = TcpProxy(lambda: self.postgres.primary.port)
        self.pooler: Service | None = None
        self.no_pooler: str | None = None
        self.services: dict[str, Service] = {}

    @property
    def up(self) -> Service:
        return self.services["up"]

    @property
    def queues(self) -> list[str]:
        return ["local", "direct", "http", *(["pooled"] if self.pooler is not None else [])]

    @property
    def external_workers(self) -> dict[str, Service]:
        """Workers without a fleet, by name. The name begins with the queue."""
        return {name: service for name, service in self.services.items() if name != "up"}

    @property
    def dsn(self) -> str:
        """Both servers, without proxies: for the observer, which no fault may disturb."""
        return self._dsn_of([node.port for node in self.postgres.nodes])

    async def open(self) -> None:
        self.folder.chmod(0o755)
        await self.postgres.open()
        await self.postgres.primary.fetchval("create database app template template0")
        await migrate(self.dsn)
        async with connected(self.dsn) as connection:
            await connection.execute(Path(__file__).with_name("audit.sql").read_text())
            for role in Role:
                await connection.execute(FILL_TOKENS, role.value, role.value, hash_of(api_token(role)))
        self.control_links, self.direct_links = (
            [TcpProxy(lambda node=node: node.port) for node in self.postgres.nodes]  # type: ignore[misc]
            for _ in range(2)
        )
        for proxy in self.proxies:
            await proxy.start()
        (self.folder / "windlass.toml").write_text(TOML)
        (self.folder / "token").write_text(api_token(Role.WORKER))
        self._start_pooler()
        self._add_service("up", "up", "--port", str(self.server_port), dsn=self._proxied(self.control_links))
        token = ("--url", f"http://{HOST}:{self.http_link.port}", "--token-file", self.folder / "token")
        self._add_worker("direct", dsn=self._proxied(self.direct_links))
        for number in range(2):
            self._add_worker("http", *token, name=f"http-{number}")
        if self.pooler is not None:
            self._add_worker("pooled", dsn=f"postgresql://postgres@{HOST}:{self._pooler_port}/app")
        for service in self.services.values():
            service.start()

    async def close(self) -> None:
        """End everything that is still running."""
        for service in [*self.services.values(), *([self.pooler] if self.pooler else [])]:
            if service.process is not None and service.process.poll() is None:
                await service.stop()
        for process in self.marked_processes():
            with suppress(psutil.Error):
                process.kill()
        for proxy in self.proxies:
            await proxy.close()
        await self.postgres.close()

    def keep_logs(self, target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        for path in [self.runs, *self.folder.glob("*.log")]:
            with suppress(OSError):
                shutil.copy(path, target)

    @property
    def proxies(self) -> list[TcpProxy]:
        return [self.http_link, *self.control_links, *self.direct_links, self.pooler_link]

    # -------------------------------------------------------------------------------------------------- processes

    def marked_processes(self) -> list[psutil.Process]:
        """All live processes of the installation except PostgreSQL, also those that were detached."""
        found = []
        for process in psutil.process_iter():
            try:
                if self._mark in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def up_processes(self) -> list[int]:
        """The live children of the supervisor: control and servers."""
        return [process.pid for process in _children(self.up.pid) if _is_live(process)]

    async def process_of(self, kind: str) -> int:
        """A process of `up`: `control` or `server`. Its record is missing for some seconds after a crash."""
        deadline = time.monotonic() + RECORD_TIMEOUT_S
        while time.monotonic() < deadline:
            children = set(self.up_processes())
            async with connected(self.dsn) as connection:
                pids: list[int] = [row["pid"] for row in await connection.fetch(PROCESSES, kind)]
            for pid in pids:
                if pid in children:
                    return pid
            await asyncio.sleep(0.2)
        raise ProcessLookupError(f"`windlass up` has no process of kind {kind}")

    def local_workers(self) -> list[int]:
        """The machines of the fleet: worker processes, without their forks, which have the same command line."""
        launched = [process for process in self.marked_processes() if _is_launched_worker(process)]
        pids = {process.pid for process in launched}
        return [process.pid for process in launched if _parent(process) not in pids]

    def workers_of(self, queue: str) -> list[int]:
        if queue == FLEET:
            return self.local_workers()
        return [service.pid for name, service in self.external_workers.items() if name.split("-")[0] == queue]

    def all_workers(self) -> list[int]:
        return [pid for queue in self.queues for pid in self.workers_of(queue)]

    async def is_ready(self) -> bool:
        try:
            reply = await call_once(self.server_port, get_request("/readyz"), 5.0)
        except (OSError, TimeoutError):
            return False
        return reply.status == 200

    # ---------------------------------------------------------------------------------------------------- building

    def _dsn_of(self, ports: list[int]) -> str:
        hosts = ",".join(HOST for _ in ports)
        return (
            f"postgresql://postgres@/app?host={hosts}&port={','.join(map(str, ports))}"
            "&target_session_attrs=read-write&sslmode=disable"
        )

    def _proxied(self, links: list[TcpProxy]) -> str:
        return self._dsn_of([proxy.port for proxy in links])

    def _environment(self, dsn: str | None = None) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("WINDLASS_") and k != "DATABASE_URL"}
        return {
            **kept,
            self._mark: "1",
            "CHAOS_RUNS": str(self.runs),
            **({"DATABASE_URL": dsn} if dsn is not None else {}),
        }

    def _add_service(self, name: str, *arguments: Any, dsn: str | None = None) -> None:
        interval_s = RESTART_UP_INTERVAL_S if name == "up" else RESTART_INTERVAL_S
        command = [sys.executable, "-m", "windlass", *arguments, "--log-format", "json"]
        self.services[name] = Service(command, self._environment(dsn), self.folder / f"{name}.log", interval_s)

    def _add_worker(self, queue: str, *arguments: Any, name: str | None = None, dsn: str | None = None) -> None:
        options = ["--queue", queue, "--handler", HANDLER, "--chdir", ROOT, "-c", "2"]
        options += ["--heartbeat-interval", str(HEARTBEAT_INTERVAL_S), "--lease", str(LEASE_S)]
        self._add_service(name or queue, "worker", *options, *arguments, dsn=dsn)

    def _start_pooler(self) -> None:
        program = shutil.which("pgbouncer", path="/usr/sbin:/usr/bin:/usr/local/bin:/usr/local/sbin")
        if program is None:
            self.no_pooler = "pgbouncer is not installed"
            return
        self._pooler_port = free_port()
        settings = {
            "listen_addr": HOST,
            "listen_port": self._pooler_port,
            "unix_socket_dir": "",
            "auth_type": "any",
            "pool_mode": "transaction",
            "server_login_retry": 1,
        }
        lines = ["[databases]", f"* = host={HOST} port={self.pooler_link.port} user=postgres", "[pgbouncer]"]
        lines += [f"{name} = {value}" for name, value in settings.items()]
        (self.folder / "pgbouncer.ini").write_text("\n".join(lines) + "\n")
        account = server_account(self.folder / "none")
        options = {} if account is None else {"user": account.uid, "group": account.gid, "extra_groups": []}
        command = [program, self.folder / "pgbouncer.ini"]
        self.pooler = Service(
            command, self._environment(), self.folder / "pgbouncer.log", RESTART_INTERVAL_S, **options
        )
        self.pooler.start()


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []


def _is_live(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _is_launched_worker(process: psutil.Process) -> bool:
    try:
        return "windlass.providers.local.entry_point" in process.cmdline()
    except psutil.Error:
        return False


def _parent(process: psutil.Process) -> int:
    try:
        return int(process.ppid())
    except psutil.Error:
        return 0
