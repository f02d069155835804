"""`windlass up` with Ray: servers of an emulated cloud, its own head, an external head, reloads."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from support.ray_fixture import HANDLERS, head_in_thread, until
from support.stores import PostgresStores
from windlass.model.lease import Candidate, Standby
from windlass.model.node import HEAD_LEASE
from windlass.model.task import TaskStatus, new_task
from windlass.model.worker import WorkerKind
from windlass.ray.versions import PYTHON_OF_IMAGE, our_versions
from windlass_emulators.hetzner import HetznerEmulator, HetznerEmulatorSettings
from windlass_emulators.http_server import serving
from windlass_emulators.process_host import ProcessHost

pytestmark = [pytest.mark.ray, pytest.mark.timeout(480)]
RUN_TIMEOUT_S = 180.0
LOCAL = """
[fleets.many]
provider = "ray-local"
concurrency = 2
"""
HETZNER = """
[api]
port = {port}
open_reading = true

[fleets.many]
provider = "hetzner"
policy = "clear-time"
engine = "ray"
concurrency = 2

[fleets.many.hetzner]
image = "{image}"
choices = ["cx23@nbg1"]

[fleets.many.ray]
node_cpus = 2
object_store_mb = 80

[fleets.many.bootstrap]
requirements = ["numpy"]
"""
COMMON = """
queues = ["q"]
handler = "ray_handlers:work"
chdir = '{chdir}'
max_workers = 2
poll_interval_s = 0.5
heartbeat_interval_s = 1
heartbeat_timeout_s = 10
spawn_timeout_s = 60
idle_timeout_s = 60
stop_timeout_s = 10
"""


@asynccontextmanager
async def up(folder: Path, dsn: str, toml: str, **environment: str) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Run `windlass up` inside the context, and check that it stops with success."""
    (folder / "windlass.toml").write_text(toml)
    with (folder / "up.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: ASYNC220 - short, and nothing else runs
            [sys.executable, "-m", "windlass", "up", "--log-format", "json"],
            cwd=folder,
            env={**os.environ, "DATABASE_URL": dsn, **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(process.wait, 60)
        assert code == 0, (folder / "up.log").read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def all_finished(store: Any, ids: list[int]) -> Callable[[], Awaitable[list[Any]]]:
    terminal = (TaskStatus.COMPLETE, TaskStatus.FAILED)

    async def finished() -> list[Any]:
        tasks = [await store.task(task_id) for task_id in ids]
        return tasks if all(task.status in terminal for task in tasks) else []

    return finished


async def test_hetzner_servers_become_nodes_and_are_deleted(tmp_path: Path, dsn: str) -> None:
    matching = [name for name, python in PYTHON_OF_IMAGE.items() if python == our_versions().python_minor]
    with ProcessHost(tmp_path / "machines") as host:
        emulator = HetznerEmulator(lambda: datetime.now(UTC), HetznerEmulatorSettings(boot_s=0.5, action_s=0.1), host)
        with serving(emulator) as address:
            port = _free_port()
            fleet = COMMON.format(chdir=HANDLERS)
            toml = HETZNER.format(port=port, image=matching[0] if matching else "114690387")
            toml = toml.replace("concurrency = 2\n", f"concurrency = 2\n{fleet}", 1)
            secrets = {"HCLOUD_ENDPOINT": f"{address}/v1", "HETZNER_API_TOKEN": "any"}
            async with PostgresStores(dsn) as store, up(tmp_path, dsn, toml, **secrets):
                ids = [await store.enqueue(new_task("q", {"number": number, "s": 0.1})) for number in range(6)]
                tasks = await until(all_finished(store, ids), "all tasks", RUN_TIMEOUT_S)
                assert {task.status for task in tasks} == {TaskStatus.COMPLETE}
                nodes = {worker.id: worker for worker in await store.workers() if worker.kind is WorkerKind.NODE}
                assert {task.worker_id for task in tasks} <= set(nodes)
                assert all(worker.slot is not None and worker.node is not None for worker in nodes.values())
                async with httpx.AsyncClient(trust_env=False, timeout=30) as browser:
                    page = (await browser.get(f"http://127.0.0.1:{port}/workers")).text
                assert "Ray: alive" in page
                assert re.search(r"CPU \d of 2<", page), page
                (server, *_) = emulator.project.servers.values()
                assert f"ray=={our_versions().ray}" in server.user_data
                assert "numpy" in server.user_data
                assert "RAY_AUTH_TOKEN" not in server.user_data
            assert not emulator.project.servers


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_dead_head_is_restarted_and_no_task_is_lost(tmp_path: Path, dsn: str) -> None:
    toml = LOCAL + COMMON.format(chdir=HANDLERS)
    async with PostgresStores(dsn) as store, up(tmp_path, dsn, toml) as process:
        ids = [await store.enqueue(new_task("q", {"number": number, "s": 0.5})) for number in range(40)]

        async def are_some_complete() -> bool:
            return len(await store.tasks(status=TaskStatus.COMPLETE, limit=100)) >= 3

        await until(are_some_complete, "the first tasks", RUN_TIMEOUT_S)
        (gcs,) = [p for p in psutil.Process(process.pid).children(recursive=True) if p.name() == "gcs_server"]
        gcs.kill()
        tasks = await until(all_finished(store, ids), "all tasks", RUN_TIMEOUT_S)
        assert {task.status for task in tasks} == {TaskStatus.COMPLETE}
        log = (tmp_path / "up.log").read_text()
        assert "restart ray head" in log
        # The remaining tasks need a second head with new nodes and a second dispatcher.
        assert log.count("started ray head") == log.count("started dispatcher") == 2
        assert process.poll() is None
    assert not [p for p in psutil.process_iter() if p.name() == "raylet" and _is_of(p, tmp_path)]


async def test_reload_starts_dispatchers_and_other_orchestrators_are_refused(tmp_path: Path, dsn: str) -> None:
    (tmp_path / "second").mkdir()
    toml = LOCAL + COMMON.format(chdir=HANDLERS)
    more = toml.replace("fleets.many", "fleets.more").replace('"q"', '"r"')
    async with PostgresStores(dsn) as store, up(tmp_path, dsn, toml) as process:

        async def is_dispatching() -> bool:
            return "started dispatcher" in (tmp_path / "up.log").read_text()

        await until(is_dispatching, "the first dispatcher", RUN_TIMEOUT_S)
        (tmp_path / "second" / "windlass.toml").write_text(toml)
        # One without RAY_ADDRESS, and one with the address of the only head there is.
        external = {k: v for k, v in _dispatcher(process.pid).environ().items() if k.startswith("RAY_")}
        others = [
            subprocess.Popen(  # noqa: ASYNC220 - short
                [sys.executable, "-m", "windlass", "up"],
                cwd=tmp_path / "second",
                env={**os.environ, **environment, "DATABASE_URL": dsn},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            for environment in ({}, external)
        ]
        second, third = others
        try:
            # The worker's settings are read at the start only, so the first dispatcher does not restart.
            (tmp_path / "windlass.toml").write_text(f"[worker]\ntimeout_s = 77\n{toml}{more}")
            process.send_signal(signal.SIGHUP)
            task_id = await store.enqueue(new_task("r", {"number": 1}))
            (task,) = await until(all_finished(store, [task_id]), "the task of the new fleet", RUN_TIMEOUT_S)
            assert task.status is TaskStatus.COMPLETE
            assert task.worker_id.startswith("more-")
            _, errors = await asyncio.to_thread(second.communicate, None, 60)
            assert second.returncode == 2
            assert b"another `windlass up` of this database uses a Ray head, its own or by RAY_ADDRESS, and" in errors
            _, errors = await asyncio.to_thread(third.communicate, None, 60)
            assert third.returncode == 2
            assert b"another `windlass up` of this database runs a Ray head of its own, and two heads" in errors
        finally:
            for other in others:
                if other.poll() is None:
                    other.kill()
                    other.wait()
        assert (tmp_path / "up.log").read_text().count("started dispatcher") == 2  # the first did not restart


async def test_first_ray_fleet_of_a_reload_takes_the_lease_of_the_external_head(tmp_path: Path, dsn: str) -> None:
    plain = '[fleets.plain]\nexec = "true"\n'
    another = Candidate("another", 10.0, HEAD_LEASE)
    with head_in_thread() as head:
        external = {**head.env, "RAY_ADDRESS": head.address}
        async with PostgresStores(dsn) as store, up(tmp_path, dsn, plain, **external) as process:

            async def has_logged(event: str) -> bool:
                return event in (tmp_path / "up.log").read_text()

            await until(lambda: has_logged('"cycle"'), "a first cycle", RUN_TIMEOUT_S)
            # RAY_ADDRESS alone does not take the lease.
            assert not isinstance(await store.acquire_lease(another), Standby)
            await store.release_lease(another)
            (tmp_path / "windlass.toml").write_text(plain + LOCAL + COMMON.format(chdir=HANDLERS))
            process.send_signal(signal.SIGHUP)
            await until(lambda: has_logged("started dispatcher"), "the dispatcher has started", RUN_TIMEOUT_S)
            assert isinstance(await store.acquire_lease(another), Standby)

        # Without spawned machines there are no cycles, but dispatchers run.
        folder = tmp_path / "others"
        folder.mkdir()
        fleets = LOCAL.replace("ray-local", "ray") + COMMON.format(chdir=HANDLERS)
        async with up(folder, dsn, fleets, **external) as process:
            log = folder / "up.log"

            async def is_dispatching() -> bool:
                return "started dispatcher" in log.read_text()

            await until(is_dispatching, "the dispatcher has started", RUN_TIMEOUT_S)
            assert (process.poll(), '"stopped orchestrator"' in log.read_text()) == (None, False)


def _dispatcher(pid: int) -> psutil.Process:
    (found,) = [child for child in psutil.Process(pid).children(recursive=True) if "dispatch" in child.cmdline()]
    return found


def _is_of(process: psutil.Process, folder: Path) -> bool:
    try:
        return str(folder) in " ".join(process.environ().values())
    except psutil.Error:
        return False
