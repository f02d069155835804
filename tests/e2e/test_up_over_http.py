"""`windlass up --port` as its users have it: fleets far away, health, a cycle on request, tokens."""

import hashlib
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psutil
import pytest

from support.command_line import CommandLine
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
lease_s = 2

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


class Site:
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

    def remains(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if self._mark in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

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

    async def no_worker(self) -> list[Worker]:
        async def ended() -> list[Worker] | None:
            return None if await self.store.workers() else await self.store.workers(include_terminated=True)

        found: list[Worker] = await until(ended, f"nobody is left\n{self.log()}")
        return found

    async def end(self, up: "subprocess.Popen[str]") -> None:
        up.send_signal(signal.SIGTERM)
        await until(lambda: up.poll() is not None, f"up ends\n{self.log()}")
        assert (up.returncode, self.remains()) == (0, []), self.log()


@asynccontextmanager
async def new_site(folder: Path, dsn: str) -> AsyncIterator[Site]:
    site = Site(folder, dsn)
    async with site.store:
        try:
            yield site
        finally:
            for process in site.remains():
                process.kill()
            for up in site.ups:
                up.wait(PATIENCE_S)


@pytest.fixture
async def site(tmp_path: Path, dsn: str) -> AsyncIterator[Site]:
    async with new_site(tmp_path, dsn) as site:
        yield site


async def test_a_burst_is_worked_off_by_machines_that_know_nothing_but_the_control_plane(site: Site) -> None:
    tasks = [await site.enqueue() for _ in range(6)]
    up = site.up()
    for task_id in tasks:
        assert await site.result(task_id) == [1, "a secret", False]
    workers = await site.no_worker()
    assert {worker.code for worker in workers} == {"IDLE"}
    codes = [event.code for event in await site.store.events(worker_id=workers[0].id)]
    assert codes[:2] == ["WORKER_SPAWNED", "WORKER_JOINED"]
    await site.end(up)
    for secret in ("wlj_", "wlw_", "a secret"):
        assert secret not in site.log() + site.machine_logs()


async def test_machines_outlive_the_control_plane_and_work_on_when_it_is_back(site: Site) -> None:
    go = site.folder / "go"
    task_id = await site.enqueue({"go": str(go)})
    up = site.up()
    worker_id = await site.until_running(task_id)
    # The claim is written before its answer is sent: only the handler shows that the worker knows of it.
    await until((site.folder / "go.begun").exists, f"the handler has begun\n{site.machine_logs()}")
    up.kill()
    up.wait(PATIENCE_S)
    log = site.machines / worker_id / "log"
    await until(lambda: '"event": "heartbeat failed"' in log.read_text(), "it has noticed")
    go.touch()
    await until(lambda: f'"undelivered": [{task_id}]' in log.read_text(), "its result waits")
    second = site.up()
    assert await site.result(task_id) == [1, "a secret", False]
    task = await site.store.task(task_id)
    assert task is not None
    assert task.worker_id == worker_id
    await site.no_worker()
    await site.end(second)


async def test_health_readiness_and_a_cycle_on_request(site: Site) -> None:
    up = site.up()
    assert (await site.until_answers("/healthz", 200)).json()["status"] == "ok"
    ready = (await site.until_answers("/readyz", 200)).json()
    assert (ready["has_database"], ready["is_leader"], list(ready["fleets"])) == (True, True, ["far"])
    operator = site.windlass("tokens", "create", "cron", "--role", "operator").out.strip()
    viewer = site.windlass("tokens", "create", "eyes", "--role", "viewer", "--json").json["token"]
    async with httpx.AsyncClient(base_url=site.url, trust_env=False, timeout=PATIENCE_S) as client:

        async def ask(token: str) -> httpx.Response:
            return await client.post("/internal/cycle", headers={"Authorization": f"Bearer {token}"})

        before = await site.store.now()
        (summary,) = (await ask(operator)).json()
        assert (summary["fleet"], summary["is_leader"]) == ("far", True)
        assert summary["timestamp"] >= before.isoformat()
        assert (await ask(viewer)).status_code == 403
        site.windlass("tokens", "revoke", "cron")
        assert (await ask(operator)).status_code == 401
    listed = {token["name"]: token for token in site.windlass("tokens", "list", "--json").json}
    assert listed["cron"]["revoked_at"] is not None
    assert listed["cron"]["last_used_at"] is not None
    assert "hash" not in listed["cron"]
    assert operator not in site.log()
    await site.end(up)


async def test_a_wheel_of_the_running_program_is_there_for_machines(site: Site) -> None:
    go = site.folder / "go"
    task_id = await site.enqueue({"go": str(go)})
    up = site.up()
    worker_id = await site.until_running(task_id)
    token = (site.machines / worker_id / "join.json.token").read_text()
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=site.url, trust_env=False, headers=headers) as client:
        told = (await client.get("/internal/wheel")).json()
        content = (await client.get(f"/internal/wheel/{told['filename']}")).content
    assert hashlib.sha256(content).hexdigest() == told["sha256"]
    go.touch()
    await site.result(task_id)
    await site.no_worker()
    await site.end(up)


def test_a_port_in_use_is_refused_in_one_sentence(tmp_path: Path, dsn: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        windlass = CommandLine(tmp_path, {"DATABASE_URL": dsn})
        done = windlass("up", "--queue", "q", "--exec", "true", "--port", port)
    assert done.code == 2
    assert done.err.startswith(f"windlass: cannot listen on 127.0.0.1 port {port} (Address already in use): choose")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param(("create", "a b", "--role", "viewer"), "invalid token name 'a b'", id="an invalid name"),
        pytest.param(("create", "a", "--role", "king"), "invalid value for '--role'", id="a role"),
        pytest.param(("revoke", "nobody"), "active token nobody not found", id="an unknown token"),
        pytest.param(("revoke",), "choose what to revoke: the NAME of a token, or --session", id="nothing to revoke"),
        pytest.param(("revoke", "--session", "f00"), "session f00 not found", id="an unknown session"),
        pytest.param(("link", "--url", "here"), "'here' is not the URL of a dashboard", id="not a URL"),
        pytest.param(("link", "--role", "worker"), "invalid value for '--role'", id="no role of people"),
    ],
)
def test_tokens_are_refused_for(tmp_path: Path, dsn: str, arguments: tuple[str, ...], sentence: str) -> None:
    done = CommandLine(tmp_path, {"DATABASE_URL": dsn})("tokens", *arguments)
    assert done.code == 2
    assert done.err.startswith(f"windlass: {sentence}")


def test_a_token_is_printed_once_and_listed_without_it(tmp_path: Path, dsn: str) -> None:
    windlass = CommandLine(tmp_path, {"DATABASE_URL": dsn})
    assert windlass("tokens", "list").out == "no tokens\n"
    token = windlass("tokens", "create", "ci", "--role", "producer").out.strip()
    assert token.startswith("wlt_")
    listed = windlass("tokens", "list").out
    assert "producer" in listed
    assert token not in listed
    assert windlass("tokens", "create", "ci", "--role", "viewer").code == 2
    assert windlass("tokens", "revoke", "ci").out == "revoked ci\n"
    assert "revoked" in windlass("tokens", "list").out


def test_links_are_made_and_listed_and_revoked(tmp_path: Path, dsn: str) -> None:
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
