"""Two PostgreSQL servers with synchronous replication, from the programs of the embedded database.

Nothing that was acknowledged is lost in a failover, because a commit waits for the standby. Both servers listen on
loopback and are children of this process. As root, each has a small file system of its own, which can be filled, and
runs with a clock that can be stepped. fsync is off: the faults kill processes, never the machine.
"""

import asyncio
import ctypes
import os
import shutil
import signal
import socket
import struct
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import asyncpg
import psutil

from windlass.store.postgres_programs import Installation, find_installation, server_account

HOST = "127.0.0.1"
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
# Room for the database of a run of 10 minutes, and little enough to be held in memory.
DISK_BYTES = 700 << 20
CLOCK_SOURCE = Path(__file__).with_name("stepped_clock.c")
SETTINGS = {
    "listen_addresses": HOST,
    "unix_socket_directories": "",
    "max_connections": 300,
    "shared_buffers": "64MB",
    "min_wal_size": "32MB",
    "max_wal_size": "96MB",
    "autovacuum_naptime": "5s",
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "remote_write",
    "wal_level": "replica",
    "wal_retrieve_retry_interval": "200ms",
    "log_checkpoints": "off",
}
STREAMING = "select count(*) from pg_stat_replication where state = 'streaming'"


def free_port() -> int:
    with socket.create_server((HOST, 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


class PostgresNode:
    def __init__(self, folder: Path, programs: Installation, env: dict[str, str]) -> None:
        self.folder = folder
        self.port = free_port()
        self.data = folder / "data"
        # Outside the small file system, which may be full.
        self.log = folder.with_suffix(".log")
        self._programs = programs
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def dsn(self) -> str:
        return f"postgresql://postgres@{HOST}:{self.port}/postgres"

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def create(self) -> None:
        self._run("initdb", "-D", str(self.data), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C")

    def copy_from(self, primary: "PostgresNode") -> None:
        shutil.rmtree(self.data, ignore_errors=True)
        address = ("-h", HOST, "-p", str(primary.port), "-U", "postgres")
        self._run("pg_basebackup", *address, "-D", str(self.data), "-X", "stream", "-c", "fast", "-R")
        # Once promoted, it has no standby to wait for.
        with (self.data / "postgresql.auto.conf").open("a") as settings:
            settings.write("synchronous_standby_names = ''\n")

    def launch(self) -> None:
        account = self._programs.account
        options = [word for name, value in SETTINGS.items() for word in ("-c", f"{name}={value}")]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [self._programs.bin_dir / "postgres", "-D", self.data, "-c", f"port={self.port}", *options],
                cwd=self.folder,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                user=account and account.uid,
                group=account and account.gid,
                extra_groups=account and [],
            )

    async def start(self) -> None:
        self.launch()
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with suppress(OSError, asyncpg.PostgresError, TimeoutError):
                await self.fetchval("select 1")
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"PostgreSQL does not start: {self.log_tail()}")
            await asyncio.sleep(0.05)

    async def stop(self, how: signal.Signals = signal.SIGQUIT) -> None:
        process = self._process
        if process is None:
            return
        children = psutil.Process(process.pid).children() if process.poll() is None else []
        process.send_signal(how)
        await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
        # They end by themselves; a new server on the same data must not meet them.
        await asyncio.to_thread(psutil.wait_procs, children, STOP_TIMEOUT_S)

    async def fetchval(self, sql: str) -> object:
        connection = await asyncpg.connect(self.dsn, timeout=5.0)
        try:
            return await connection.fetchval(sql, timeout=30.0)
        finally:
            connection.terminate()

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-1_500:]

    def _run(self, program: str, *arguments: str) -> None:
        done = self._programs.run(self.folder, program, *arguments)
        if done.returncode != 0:
            raise ChildProcessError(f"{program} failed: {done.stderr[-1_000:]}")


class PostgresPair:
    """A primary with its synchronous standby.

    `fill_disk` and `step_clock` work if the reasons against them, `no_small_disk` and `no_clock`, are None.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.no_small_disk: str | None = None
        self.no_clock: str | None = None
        self._mounts: list[Path] = []
        self._clock = folder / "clock"
        self._keeper: asyncio.Task[None] | None = None
        # Whether servers that exit are started again: not while this class stops them itself.
        self._is_kept = True
        self._has_standby = False
        self.nodes: list[PostgresNode] = []
        self._primary = 0

    @property
    def primary(self) -> PostgresNode:
        return self.nodes[self._primary]

    @property
    def standby(self) -> PostgresNode:
        return self.nodes[1 - self._primary]

    async def open(self) -> None:
        account = server_account(self.folder / "none")
        programs = find_installation(self.folder, account)
        env = {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC", **self._clock_environment()}
        for number in range(2):
            folder = self.folder / f"node-{number}"
            folder.mkdir()
            self._mount_small_disk(folder)
            if account is not None:
                os.chown(folder, account.uid, account.gid)
            self.nodes.append(PostgresNode(folder, programs, env))
        await asyncio.to_thread(self.primary.create)
        await self.primary.start()
        await self.attach_standby()
        self._keeper = asyncio.create_task(self._restart_dead_servers())

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
        for node in self.nodes:
            with suppress(Exception):
                await node.stop()
        for mount in self._mounts:
            subprocess.run(["umount", "--lazy", mount], check=False)  # noqa: ASYNC221

    # ---------------------------------------------------------------------------------------------------- replication

    async def attach_standby(self) -> None:
        """Make the other server a standby of the primary, unless it is one, and wait for it in every commit."""
        if not self._has_standby:
            await asyncio.to_thread(self.standby.copy_from, self.primary)
            await self.standby.start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while await self.primary.fetchval(STREAMING) != 1:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the standby does not stream: {self.standby.log_tail()}")
            await asyncio.sleep(0.1)
        if not self._has_standby:
            await self.primary.fetchval("alter system set synchronous_standby_names = '*'")
            await self.primary.fetchval("select pg_reload_conf()")
        self._has_standby = self._is_kept = True

    async def restart(self) -> None:
        self._is_kept = False
        try:
            await self.primary.stop(signal.SIGQUIT)
            await self.primary.start()
        finally:
            self._is_kept = True

    async def fail_over(self) -> None:
        """The primary dies, and the standby takes over. The old primary stays down until `attach_standby`."""
        self._is_kept = self._has_standby = False
        await self.primary.stop(signal.SIGQUIT)
        self._primary = 1 - self._primary
        await self.primary.fetchval("select pg_promote(true, 60)")

    async def _restart_dead_servers(self) -> None:
        """Start a server that ended by itself, on a full disk, until it stays, like a service manager."""
        while True:
            await asyncio.sleep(0.5)
            if self._is_kept:
                for node in self.nodes:
                    if not node.is_running:
                        node.launch()

    # ----------------------------------------------------------------------------------------------- disk and clock

    def fill_disk(self) -> None:
        ballast = self.primary.folder / "ballast"
        with ballast.open("wb") as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
                file.flush()

    def free_disk(self) -> None:
        for node in self.nodes:
            (node.folder / "ballast").unlink(missing_ok=True)

    def step_clock(self, seconds: float) -> None:
        """Set the offset of the database's clock from that of the machine."""
        with self._clock.open("r+b") as file:
            file.write(struct.pack("=q", round(seconds * 1_000_000)))

    def _mount_small_disk(self, folder: Path) -> None:
        if os.geteuid() != 0:
            self.no_small_disk = "only root can mount a small file system"
            return
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "windlass-chaos", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            self.no_small_disk = f"no small file system can be mounted: {done.stderr.strip()}"
            return
        self._mounts.append(folder)

    def _clock_environment(self) -> dict[str, str]:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            self.no_clock = "no C compiler for the library that steps the clock"
            return {}
        library = self.folder / "stepped_clock.so"
        command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(CLOCK_SOURCE)]
        try:
            subprocess.run(command, capture_output=True, check=True)
            ctypes.CDLL(str(library))
        except (OSError, subprocess.CalledProcessError) as error:
            self.no_clock = f"the library that steps the clock does not work here: {error}"
            return {}
        self._clock.write_bytes(struct.pack("=q", 0))
        return {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(self._clock)}
