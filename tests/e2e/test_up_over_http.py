"""`windlass up --port` with remote workers: joining, outages, health, cycles on request, tokens and links."""

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psutil
import pytest

from support.command_line import CommandLine
from support.marked_processes import live_processes
from support.stores import PostgresStores
from support.worker_harness import PATIENCE_S, until
from windlass.model.task import TaskStatus, new_task
from windlass.model.worker import Worker

HERE = Path(__file__).parent
QUEUE = "work"
APP = """
import os, time
from pathlib import Path

def work(task):
    go = task.payload and task.payload.get("go")
    if go:
        Path(go + ".begun").touch()
    while go and not Path(go).exists():
        time.sleep(0.01)
    return [task.attempt, os.environ.get("API_KEY"), "DATABASE_URL" in os.environ]
"""
TOML = """
[control]
lease_s = 10

[fleets.far]
queues = ["work"]
handler = "app:work"
chdir = {folder}
env = {{ API_KEY = "a secret" }}
poll_interval_s = 0.3
heartbeat_interval_s = 0.2
heartbeat_timeout_s = 20
spawn_timeout_s = 30
idle_timeout_s = 0.5
stop_timeout_s = 5
max_workers = 2
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


class ControlPlaneHost:
    """A folder with `windlass up --port`, a remote fleet whose machines are local processes, and a database."""

    def __init__(self, folder: Path, dsn: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.machines = folder / "machines"
        self._mark = f"SITE_{uuid4().hex}"
        self.windlass = CommandLine(folder, {"DATABASE_URL": dsn, self._mark: "1"})
        self.store = PostgresStores(dsn)
        self.ups: list[subprocess.Popen[str]] = []
        (folder / "app.py").write_text(APP)
        (folder / "windlass.toml").write_text(TOML.format(folder=json.dumps(str(folder))))

    def up(self, *arguments: str) -> "subprocess.Popen[str]":
        program = [sys.executable, str(HERE.parent / "support" / "remote_fleet.py"), str(self.machines), self.url]
        with (self.folder / f"up-{len(self.ups)}.log").open("w") as log:
            process = subprocess.Popen(
                [*program, "up", "--port", str(self.port), *arguments],
                cwd=self.folder,
                env=self.windlass.environment(),
                stdout=log,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self.ups.append(process)
        return process

    def log(self) -> str:
        return (self.folder / f"up-{len(self.ups) - 1}.log").read_text()

    def machine_logs(self) -> str:
        return "\n".join(path.read_text() for path in self.machines.glob("*/log"))

    def live_processes(self) -> list[psutil.Process]:
        return live_processes(self._mark)

    async def enqueue(self, payload: Any = None) -> int:
        return await self.store.enqueue(new_task(QUEUE, payload))

    async def result(self, task_id: int) -> Any:
        async def complete() -> str | None:
            task = await self.store.task(task_id)
            assert task is not None
            assert task.status is not TaskStatus.FAILED, task
            return task.result if task.status is TaskStatus.COMPLETE else None

        return json.loads(await until(complete, f"task {task_id} is complete\n{self.log()}\n{self.machine_logs()}"))

    async def until_running(self, task_id: int) -> str:
        async def worker_id() -> str | None:
            task = await self.store.task(task_id)
            return task.worker_id if task is not None and task.status is TaskStatus.RUNNING else None

        found: str = await until(worker_id, f"task {task_id} runs\n{self.log()}\n{self.machine_logs()}")
        return found

    async def until_answers(self, path: str, status: int) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.url, trust_env=False) as client:

            async def answer() -> httpx.Response | None:
                try:
                    response = await client.get(path)
                except httpx.TransportError:
                    return None
                return response if response.status_code == status else None

            found: httpx.Response = await until(answer, f"{path} answers {status}\n{self.log()}")
            return found

    async def until_controlled(self) -> Any:
        """The readiness once the cycles of all fleets run."""

        async def readiness() -> Any:
            found = (await self.until_answers("/readyz", 200)).json()
            return found if found["has_control_loop"] else None

        return await until(readiness, f"the control loop runs\n{self.log()}")

    async def until_no_workers(self) -> list[Worker]:
        async def terminated() -> list[Worker] | None:
            return None if await self.store.workers() else await self.store.workers(include_terminated=True)

        found: list[Worker] = await until(terminated, f"the end of all workers\n{self.log()}")
        return found

    async def stop(self, up: "subprocess.Popen[str]") -> None:
        up.send_signal(signal.SIGTERM)
        await until(lambda: up.poll() is not None, f"end of up\n{self.log()}")
        assert (up.returncode, self.live_processes()) == (0, []), self.log()


@asynccontextmanager
async def open_site(folder: Path, dsn: str) -> AsyncIterator[ControlPlaneHost]:
    site = ControlPlaneHost(folder, dsn)
    async with site.store:
        try:
            yield site
        finally:
            for process in site.live_processes():
                with suppress(psutil.NoSuchProcess):  # the processes of `up` end with their supervisor
                    process.kill()
            for up in site.ups:
                up.wait(PATIENCE_S)


@pytest.fixture
async def site(tmp_path: Path, dsn: str) -> AsyncIterator[ControlPlaneHost]:
    async with open_site(tmp_path, dsn) as site:
        yield site


async def test_remote_workers_run_a_burst_without_database_access(site: ControlPlaneHost) -> None:
    tasks = [await site.enqueue() for _ in range(6)]
    up = site.up()
    for task_id in tasks:
        assert await site.result(task_id) == [1, "a secret", False]
    workers = await site.until_no_workers()
    assert {worker.code for worker in workers} == {"IDLE"}
    codes = [event.code for event in await site.store.events(worker_id=workers[0].id)]
    assert codes[:2] == ["WORKER_SPAWNED", "WORKER_JOINED"]
    await site.stop(up)
    for secret in ("wlj_", "wlw_", "a secret"):
        assert secret not in site.log() + site.machine_logs()


async def test_remote_worker_delivers_its_result_after_an_outage(site: ControlPlaneHost) -> None:
    go = site.folder / "go"
    task_id = await site.enqueue({"go": str(go)})
    up = site.up()
    worker_id = await site.until_running(task_id)
    # The claim is committed before its response is sent. Only the running handler shows that the worker received it.
    await until((site.folder / "go.begun").exists, f"the start of the handler\n{site.machine_logs()}")
    up.kill()
    up.wait(PATIENCE_S)
    log = site.machines / worker_id / "log"
    await until(lambda: '"event": "send heartbeat failed"' in log.read_text(), "a failed heartbeat in its log")
    go.touch()
    await until(lambda: f'"undelivered": [{task_id}]' in log.read_text(), "an undelivered result in its log")
    second = site.up()
    assert await site.result(task_id) == [1, "a secret", False]
    task = await site.store.task(task_id)
    assert task is not None
    assert task.worker_id == worker_id
    await site.until_no_workers()
    await site.stop(second)


async def test_health_readiness_and_cycle_on_request(site: ControlPlaneHost) -> None:
    up = site.up()
    assert (await site.until_answers("/healthz", 200)).json()["status"] == "ok"
    await site.until_answers("/readyz", 200)
    ready = await site.until_controlled()
    assert (ready["has_database"], ready["has_leader"], list(ready["fleets"])) == (True, True, ["far"])
    operator = site.windlass("tokens", "create", "cron", "--role", "operator").out.strip()
    viewer = site.windlass("tokens", "create", "dashboard", "--role", "viewer", "--json").json["token"]
    async with httpx.AsyncClient(base_url=site.url, trust_env=False, timeout=PATIENCE_S) as client:

        async def request_cycle(token: str) -> httpx.Response:
            return await client.post("/internal/cycle", headers={"Authorization": f"Bearer {token}"})

        before = await site.store.now()
        (summary,) = (await request_cycle(operator)).json()
        assert (summary["fleet"], summary["is_leader"]) == ("far", True)
        assert summary["timestamp"] >= before.isoformat()
        assert (await request_cycle(viewer)).status_code == 403
        site.windlass("tokens", "revoke", "cron")
        assert (await request_cycle(operator)).status_code == 401
    listed = {token["name"]: token for token in site.windlass("tokens", "list", "--json").json}
    assert listed["cron"]["revoked_at"] is not None
    assert listed["cron"]["last_used_at"] is not None
    assert "hash" not in listed["cron"]
    assert operator not in site.log()
    await site.stop(up)


async def test_machines_can_download_the_wheel_of_the_running_program(site: ControlPlaneHost) -> None:
    go = site.folder / "go"
    task_id = await site.enqueue({"go": str(go)})
    up = site.up()
    worker_id = await site.until_running(task_id)
    token = (site.machines / worker_id / "join.json.token").read_text()
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=site.url, trust_env=False, headers=headers) as client:
        wheel = (await client.get("/internal/wheel")).json()
        content = (await client.get(f"/internal/wheel/{wheel['filename']}")).content
    assert hashlib.sha256(content).hexdigest() == wheel["sha256"]
    go.touch()
    await site.result(task_id)
    await site.until_no_workers()
    await site.stop(up)


def test_port_in_use_is_refused_in_one_line(tmp_path: Path, dsn: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        windlass = CommandLine(tmp_path, {"DATABASE_URL": dsn})
        done = windlass("up", "--queue", "q", "--exec", "true", "--port", port)
    assert done.code == 2
    assert done.err.startswith(f"windlass: cannot listen on 127.0.0.1 port {port}: python with pid {os.getpid()} ")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param(("create", "a b", "--role", "viewer"), "invalid token name 'a b'", id="an invalid name"),
        pytest.param(("create", "a", "--role", "king"), "invalid value for '--role'", id="an unknown role"),
        pytest.param(("revoke", "missing"), "active token missing not found", id="an unknown token"),
        pytest.param(("revoke",), "choose what to revoke: the NAME of a token, or --session", id="nothing to revoke"),
        pytest.param(("revoke", "--session", "f00"), "session f00 not found", id="an unknown session"),
        pytest.param(("link", "--url", "here"), "'here' is not the URL of a dashboard", id="not a URL"),
        pytest.param(("link", "--role", "worker"), "invalid value for '--role'", id="a role that cannot log in"),
    ],
)
def test_bad_token_arguments_are_refused(tmp_path: Path, dsn: str, arguments: tuple[str, ...], sentence: str) -> None:
    done = CommandLine(tmp_path, {"DATABASE_URL": dsn})("tokens", *arguments)
    assert done.code == 2
    assert done.err.startswith(f"windlass: {sentence}")


def test_token_is_printed_once_and_never_listed(tmp_path: Path, dsn: str) -> None:
    windlass = CommandLine(tmp_path, {"DATABASE_URL": dsn})
    assert windlass("tokens", "list").out == "no tokens\n"
    token = windlass("tokens", "create", "ci", "--role", "producer").out.strip()
    assert token.startswith("wlt_")
    listed = windlass("tokens", "list").out
    assert "producer" in listed
    assert token not in listed
    assert windlass("tokens", "create", "ci", "--role", "viewer").code == 2
    assert windlass("tokens", "revoke", "ci").out == "token ci revoked\n"
    assert "revoked" in windlass("tokens", "list").out


def test_login_link_is_created_listed_and_revoked(tmp_path: Path, dsn: str) -> None:
    windlass = CommandLine(tmp_path, {"DATABASE_URL": dsn, "WINDLASS_API__PORT": "8123"})
    link = windlass("tokens", "link", "--role", "viewer").out
    assert re.fullmatch(r"http://127\.0\.0\.1:8123/login\?key=wll_[0-9a-f]{64}\n", link)
    listed = windlass("tokens", "sessions").out
    assert "unused link" in listed
    assert "viewer" in listed
    assert "wll_" not in listed
    session = listed.splitlines()[1].split()[0]
    assert windlass("tokens", "revoke", "--session", session, "--json").json == {"revoked": session}
    assert windlass("tokens", "sessions", "--json").json == []
