"""`windlass up` and `windlass serve` as several processes: what happens when one is killed or stopped.

A worker over HTTP runs tasks in most tests. The fleet of the configuration serves a queue without tasks, so that cycles
run and no other worker takes the tasks.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psutil
import pytest

from support.command_line import CommandLine
from support.stores import PostgresStores
from support.worker_harness import PATIENCE_S, is_alive, until
from windlass.model.process import ProcessKind, ProcessRecord
from windlass.model.redaction import HIDDEN
from windlass.model.task import TaskStatus, new_task

# A stopped process is replaced after seconds of silence, and the machine may be busy.
LONG_S = 3 * PATIENCE_S
# Much longer than the tests wait: only an orderly handover explains a new leader.
LEASE_S = 600
APP = "def work(task):\n    return task.payload\n"
TOML = """
[api]
processes = {processes}
{api}
[control]
lease_s = {lease_s}

[fleets.idle]
queues = ["nothing-comes"]
exec = "true"
poll_interval_s = 0.5
max_workers = {max_workers}
redact = {redact}
"""


class ProcessHost:
    """A folder with a configuration, the programs that run in it, and their database."""

    def __init__(self, folder: Path, dsn: str) -> None:
        self.folder = folder
        # Every process that is started here has this variable.
        self._mark = f"HOST_{uuid4().hex}"
        self.windlass = CommandLine(folder, {"DATABASE_URL": dsn, self._mark: "1"})
        self.store = PostgresStores(dsn)
        self.port = _free_port()
        self._programs: list[subprocess.Popen[str]] = []
        self._token = ""
        (folder / "app.py").write_text(APP)
        self.configure()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def configure(self, *, processes: int = 1, max_workers: int = 1, api: str = "", redact: str = "[]") -> None:
        toml = TOML.format(processes=processes, max_workers=max_workers, lease_s=LEASE_S, api=api, redact=redact)
        (self.folder / "windlass.toml").write_text(toml)

    def start(self, *arguments: object, **env: str) -> "subprocess.Popen[str]":
        with (self.folder / f"program-{len(self._programs)}.log").open("w") as log:
            program = self.windlass.with_env(**env).start(*arguments, stdout=log, stderr=log, start_new_session=True)
        self._programs.append(program)
        return program

    def logs(self) -> str:
        return "\n".join(file.read_text()[-6_000:] for file in sorted(self.folder.glob("program-*.log")))

    def start_worker(self) -> "subprocess.Popen[str]":
        (self.folder / "token").write_text(self.create_token("worker"))
        command = ["worker", "--url", self.url, "--token-file", "token", "--queue", "work", "--handler", "app:work"]
        # A worker that used a database would fail.
        return self.start(*command, DATABASE_URL="postgresql://127.0.0.1:1/x")

    def run(self, *arguments: object) -> str:
        done = self.windlass(*arguments)
        assert done.code == 0, done
        return done.out.strip()

    def create_token(self, role: str) -> str:
        return self.run("tokens", "create", f"{role}-token", "--role", role)

    def server_of(self, response: httpx.Response) -> int:
        """The process that serves the connection of this response."""
        address = response.extensions["network_stream"].get_extra_info("client_addr")
        for pid in (process.pid for process in psutil.process_iter() if self._mark in _environment(process)):
            connections = psutil.Process(pid).net_connections("tcp")
            if any(each.laddr.port == self.port and each.raddr == address for each in connections):
                return int(pid)
        raise AssertionError(f"no server has the connection {address}\n{self.logs()}")

    async def processes(self, kind: ProcessKind) -> dict[int, ProcessRecord]:
        """Live ones by number."""
        found = [each for each in await self.store.processes() if each.kind is kind and is_alive(each.pid)]
        return {each.number: each for each in found}

    async def until_processes(self, kind: ProcessKind, count: int, *, without: int | None = None) -> dict[int, int]:
        """The pids of this many live processes by number, none of them `without`."""

        async def pids() -> dict[int, int] | None:
            live = {number: each.pid for number, each in (await self.processes(kind)).items()}
            return live if len(live) == count and without not in live.values() else None

        found: dict[int, int] = await until(pids, f"{count} processes of kind {kind}\n{self.logs()}", LONG_S)
        return found

    async def until_complete(self, count: int = 5) -> None:
        """Enqueue tasks and wait until the worker has completed them."""
        ids = [await self.store.enqueue(new_task("work", number)) for number in range(count)]

        async def are_complete() -> bool:
            tasks = [await self.store.task(task_id) for task_id in ids]
            return all(task is not None and task.status is TaskStatus.COMPLETE for task in tasks)

        await until(are_complete, f"tasks are complete\n{self.logs()}", LONG_S)

    async def until_controlled(self) -> None:
        async def has_control_loop() -> bool:
            return bool((await self.get("/readyz"))["has_control_loop"])

        await until(has_control_loop, f"the control loop runs\n{self.logs()}", LONG_S)

    async def get(self, path: str) -> Any:
        """A response over a new connection, as a viewer. Without content while no server answers."""
        self._token = self._token or self.create_token("viewer")
        headers = {"Authorization": f"Bearer {self._token}"}
        async with httpx.AsyncClient(base_url=self.url, trust_env=False, headers=headers, timeout=PATIENCE_S) as client:
            try:
                response = await client.get(path)
            except httpx.TransportError:
                return {"has_control_loop": False}
            return response.json() if "json" in response.headers["content-type"] else response.text

    async def until_metric(self, line: str) -> None:
        async def is_served() -> bool:
            return line in str(await self.get("/metrics"))

        await until(is_served, f"{line} in the metrics\n{self.logs()}", LONG_S)

    async def stop(self, program: "subprocess.Popen[str]") -> None:
        program.send_signal(signal.SIGTERM)
        await until(lambda: program.poll() is not None, f"the end of the program\n{self.logs()}", LONG_S)
        assert program.returncode == 0, self.logs()

    def kill_all(self) -> None:
        for process in psutil.process_iter():
            if self._mark in _environment(process):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        for program in self._programs:
            program.wait(PATIENCE_S)


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return dict(process.environ())
    except psutil.Error:
        return {}


class EndOfStream(Exception):
    """The server closed an event stream."""


async def event_id(lines: AsyncIterator[str], code: str) -> int:
    """The id of the next event with this code in the lines of a stream."""
    async with asyncio.timeout(LONG_S):
        async for line in lines:
            name, _, data = line.partition(": ")
            if name == "data" and (event := json.loads(data)).get("code") == code:
                return int(event["id"])
    raise EndOfStream


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


@pytest.fixture
async def host(tmp_path: Path, dsn: str) -> AsyncIterator[ProcessHost]:
    host = ProcessHost(tmp_path, dsn)
    async with host.store:
        await host.store.database.fetchval("checking the schema", "select 1")
        try:
            yield host
        finally:
            host.kill_all()


async def test_killed_and_stopped_servers_are_replaced(host: ProcessHost) -> None:
    host.configure(processes=2)
    up = host.start("up", "--port", host.port)
    servers = await host.until_processes(ProcessKind.SERVER, 2)
    await host.until_controlled()
    host.start_worker()
    await host.until_complete()
    os.kill(servers[0], signal.SIGKILL)
    replaced = await host.until_processes(ProcessKind.SERVER, 2, without=servers[0])
    assert replaced[1] == servers[1]
    await host.until_complete()
    os.kill(servers[1], signal.SIGSTOP)
    await host.until_complete()
    replaced = await host.until_processes(ProcessKind.SERVER, 2, without=servers[1])
    assert not is_alive(servers[1])
    await host.until_metric('windlass_process_restarts_total{kind="server",reason="exited"} 1.0')
    await host.until_metric('windlass_process_restarts_total{kind="server",reason="stalled"} 1.0')
    await host.until_metric('windlass_processes{kind="server"} 2.0')
    await host.until_complete()
    await host.stop(up)


async def test_killed_control_process_is_replaced_as_leader(host: ProcessHost) -> None:
    up = host.start("up", "--port", host.port)
    (control,) = (await host.until_processes(ProcessKind.CONTROL, 1)).values()
    (server,) = (await host.until_processes(ProcessKind.SERVER, 1)).values()
    await host.until_controlled()
    host.start_worker()
    await host.until_complete()
    before = await host.store.overview()
    assert before.leader is not None
    assert f"-{control}-" in before.leader.holder
    os.kill(control, signal.SIGKILL)
    (successor,) = (await host.until_processes(ProcessKind.CONTROL, 1, without=control)).values()

    async def leads() -> bool:
        leader = (await host.store.overview()).leader
        return leader is not None and f"-{successor}-" in leader.holder

    await until(leads, f"the successor leads\n{host.logs()}", LONG_S)
    after = (await host.store.overview()).leader
    assert after is not None
    # Plans of the dead process are refused.
    assert after.term == before.leader.term + 1
    await host.until_complete()
    assert is_alive(server)
    await host.stop(up)


async def test_worker_finishes_tasks_while_control_process_is_stopped(host: ProcessHost) -> None:
    up = host.start("up", "--port", host.port)
    (control,) = (await host.until_processes(ProcessKind.CONTROL, 1)).values()
    await host.until_controlled()
    host.start_worker()
    await host.until_complete()
    # Without its supervisor it is not replaced.
    os.kill(up.pid, signal.SIGSTOP)
    os.kill(control, signal.SIGSTOP)
    await host.until_complete(20)
    assert psutil.Process(control).status() == psutil.STATUS_STOPPED
    assert (await host.get("/readyz"))["is_ready"]
    os.kill(up.pid, signal.SIGCONT)
    await host.until_processes(ProcessKind.CONTROL, 1, without=control)
    await host.until_metric('windlass_process_restarts_total{kind="control",reason="stalled"} 1.0')
    await host.stop(up)


async def test_no_process_survives_its_killed_supervisor(host: ProcessHost) -> None:
    up = host.start("up", "--port", host.port)
    (control,) = (await host.until_processes(ProcessKind.CONTROL, 1)).values()
    (server,) = (await host.until_processes(ProcessKind.SERVER, 1)).values()
    await host.until_controlled()
    up.kill()
    up.wait(PATIENCE_S)
    await until(lambda: not is_alive(control) and not is_alive(server), f"the end of both\n{host.logs()}")
    # The port is free again.
    second = host.start("up", "--port", host.port)
    await host.until_processes(ProcessKind.SERVER, 1, without=server)
    await host.stop(second)


async def test_reload_reaches_servers_and_their_successors(host: ProcessHost) -> None:
    up = host.start("up", "--port", host.port)
    (server,) = (await host.until_processes(ProcessKind.SERVER, 1)).values()
    await host.until_controlled()

    async def max_workers() -> int | None:
        settings = (await host.get("/api/v1/fleets/idle")).get("settings")
        return settings["max_workers"] if settings is not None else None

    async def payload() -> Any:
        return (await host.get(f"/api/v1/tasks/{task_id}")).get("payload")

    # Due much later, so that no worker is spawned.
    task_id = await host.store.enqueue(
        new_task("nothing-comes", {"prompt": "a lighthouse"}, run_after=timedelta(days=1))
    )
    assert (await max_workers(), await payload()) == (1, {"prompt": "a lighthouse"})
    host.configure(max_workers=7, redact='["$.prompt"]', api="rate_limit = 77")
    up.send_signal(signal.SIGHUP)

    async def is_reloaded() -> bool:
        return await max_workers() == 7

    await until(is_reloaded, f"the new setting\n{host.logs()}", LONG_S)
    # The same process, which hides what the new configuration says.
    assert (await host.until_processes(ProcessKind.SERVER, 1))[0] == server
    assert await payload() == {"prompt": HIDDEN}
    assert "ignored changed settings" in host.logs()
    assert "api.rate_limit" in host.logs()
    # A successor has the configuration that was applied, not a file that someone edits.
    (host.folder / "windlass.toml").write_text("not a configuration")
    os.kill(server, signal.SIGKILL)
    await host.until_processes(ProcessKind.SERVER, 1, without=server)
    await until(is_reloaded, f"the new setting in the successor\n{host.logs()}", LONG_S)
    assert await payload() == {"prompt": HIDDEN}
    up.send_signal(signal.SIGHUP)
    await until(lambda: "reload configuration failed" in host.logs(), "a refused reload", LONG_S)
    assert await max_workers() == 7
    await host.stop(up)


async def test_session_and_stream_continue_on_another_server(host: ProcessHost) -> None:
    host.configure(processes=2)
    up = host.start("up", "--port", host.port)
    await host.until_processes(ProcessKind.SERVER, 2)
    await host.until_controlled()
    link = host.run("tokens", "link", "--url", host.url)
    async with httpx.AsyncClient(base_url=host.url, trust_env=False, timeout=LONG_S) as browser:
        assert (await browser.get(link)).status_code == 200
        async with browser.stream("GET", "/api/v1/stream") as stream:
            lines = stream.aiter_lines()
            host.run("pause", "idle")
            last_id = await event_id(lines, "FLEET_PAUSED")
            serving = host.server_of(stream)
            os.kill(serving, signal.SIGKILL)
            with pytest.raises((httpx.TransportError, EndOfStream)):
                await event_id(lines, "FLEET_RESUMED")
        # The other server knows the session, and continues after the last event.
        host.run("resume", "idle")
        async with browser.stream("GET", "/api/v1/stream", headers={"Last-Event-ID": str(last_id)}) as stream:
            assert stream.status_code == 200
            assert await event_id(stream.aiter_lines(), "FLEET_RESUMED") > last_id
    await host.until_processes(ProcessKind.SERVER, 2, without=serving)
    await host.stop(up)


async def test_servers_without_control_process_request_cycles_elsewhere(host: ProcessHost) -> None:
    up = host.start("up", "--no-serve", "--port", host.port)
    (control,) = (await host.until_processes(ProcessKind.CONTROL, 1)).values()
    serve = host.start("serve", "--port", host.port)
    await host.until_processes(ProcessKind.SERVER, 1)
    assert await host.processes(ProcessKind.CONTROL)
    operator = host.create_token("operator")

    async def request_cycle() -> list[dict[str, Any]]:
        headers = {"Authorization": f"Bearer {operator}"}
        async with httpx.AsyncClient(base_url=host.url, trust_env=False, headers=headers, timeout=LONG_S) as client:
            response = await client.post("/internal/cycle")
        assert response.status_code == 200, response.text
        summaries: list[dict[str, Any]] = response.json()
        return summaries

    (summary,) = await request_cycle()
    assert (summary["fleet"], summary["is_leader"]) == ("idle", True)
    host.start_worker()
    await host.until_complete()
    os.kill(control, signal.SIGKILL)
    (summary,) = await request_cycle()
    assert summary["is_leader"]
    await host.stop(serve)
    assert await host.processes(ProcessKind.SERVER) == {}
    await host.stop(up)


async def test_serve_program_goes_on_after_another_was_killed(host: ProcessHost) -> None:
    up = host.start("up", "--no-serve", "--port", host.port)
    killed = host.start("serve", "--port", host.port)
    await host.until_processes(ProcessKind.SERVER, 1)
    await host.until_controlled()
    await host.until_metric('windlass_processes{kind="server"} 1.0')
    host.port = _free_port()
    serve = host.start("serve", "--port", host.port)
    await host.until_metric('windlass_processes{kind="server"} 2.0')
    host.start_worker()
    await host.until_complete()
    killed.kill()
    await host.until_complete()
    await host.until_metric('windlass_processes{kind="server"} 1.0')
    await host.stop(serve)
    await host.stop(up)


async def test_counters_and_rate_limits_add_up_over_two_servers(host: ProcessHost) -> None:
    host.configure(processes=2, api="rate_limit = 20")
    up = host.start("up", "--port", host.port)
    await host.until_processes(ProcessKind.SERVER, 2)
    await host.until_controlled()
    token = host.create_token("producer")
    headers = {"Authorization": f"Bearer {token}"}
    limit, sent = httpx.Limits(max_keepalive_connections=0), 0
    async with httpx.AsyncClient(
        base_url=host.url, trust_env=False, headers=headers, timeout=LONG_S, limits=limit
    ) as client:

        async def are_shared() -> bool:
            nonlocal sent
            sent += 20
            for _ in range(20):
                await client.get("/api/v1/overview")
            servers = "select count(distinct server_id) from windlass.caller_rates where caller like '%producer-token%'"
            return await host.store.database.fetchval("counting servers", servers) == 2

        await until(are_shared, f"both servers share the rate of one token\n{host.logs()}", LONG_S)

    async def counted() -> bool:
        rows = {value.name: value.value for value in await host.store.counters() if not value.labels}
        return rows.get("windlass_http_requests", 0) >= sent

    await until(counted, f"{sent} requests in the counters\n{host.logs()}", LONG_S)
    await host.stop(up)


def test_serve_needs_a_port_and_a_database(tmp_path: Path) -> None:
    windlass = CommandLine(tmp_path)
    done = windlass("serve", "--data-dir", tmp_path / "data")
    assert (done.code, done.err) == (2, "windlass: no port is configured: give --port, or set api.port.\n")
    done = windlass("serve", "--data-dir", tmp_path / "data", "--port", "0")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert not (tmp_path / "data").exists()


def test_start_failure_of_control_process_is_one_sentence(tmp_path: Path, dsn: str) -> None:
    windlass = CommandLine(tmp_path, {"DATABASE_URL": dsn})
    script = (
        "import windlass.wiring.processes as p\n"
        "from windlass.model.errors import ConfigError\n"
        "async def fail(link, order, **given): raise ConfigError('the cluster does not answer. Start it.')\n"
        "p.run_control = fail\n"
        "from windlass.cli.app import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "up", "--queue", "q", "--exec", "true", "--port", "0"],
        cwd=tmp_path,
        env=windlass.environment(),
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1] == "windlass: the cluster does not answer. Start it."
