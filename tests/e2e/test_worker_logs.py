"""Output of rented workers: kept by attempt after the machine is gone, bounded, masked; boots that failed."""

import asyncio
import json
import re
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.command_line import CommandLine
from support.stores import PostgresStores
from support.worker_harness import until
from windlass.model.task import TaskStatus, new_task
from windlass.model.worker import WorkerStatus
from windlass_emulators.hetzner import HetznerEmulator, HetznerEmulatorSettings
from windlass_emulators.http_server import serving
from windlass_emulators.process_host import ProcessHost
from windlass_emulators.runpod import RunpodEmulator, RunpodEmulatorSettings
from windlass_emulators.runpod.pod_host import RealPodHost

SECRET = "hunter2-correct-horse-battery"
APP = """
import os, sys, time

def work(task):
    print(f"begin {task.payload['name']} in attempt {task.attempt}")
    print("key", os.environ["API_KEY"], "prompt", task.payload.get("prompt"), file=sys.stderr)
    for _ in range(task.payload.get("megabytes", 0) * 16):
        print(("x" * 1023 + "\\n") * 64, end="")
    if task.attempt <= task.payload.get("failures", 0):
        raise RuntimeError("no disk")
    while "until" in task.payload and not os.path.exists(task.payload["until"]):
        time.sleep(0.05)
    print(f"end {task.payload['name']}")
"""
TOML = """
[control]
lease_s = 5

[fleets.far]
provider = "{provider}"
queues = ["work"]
handler = "app:work"
chdir = {folder}
env = {{ API_KEY = "{secret}" }}
redact = ["$.prompt"]
concurrency = {concurrency}
min_workers = 0
max_workers = 1
poll_interval_s = 0.5
heartbeat_interval_s = 0.3
heartbeat_timeout_s = 20
spawn_timeout_s = {spawn_timeout_s}
idle_timeout_s = 1
min_scaling_interval_s = 0
stop_timeout_s = 10
"""
HETZNER = """
[fleets.far.hetzner]
choices = ["cx23@nbg1"]
is_ipv4_on = true
is_network_on = false
is_firewall_on = false
billing_hour_s = 30
"""
RUNPOD = """
auto_start_worker = false

[fleets.far.runpod]
image = "example/worker:1"
choices = ["NVIDIA L40S@SECURE/EU-RO-1"]
"""
NEVER_JOINS = f"""args = "sh -c 'echo starting; echo no module named windlass with {SECRET}; sleep 600'"
"""


class LogSite:
    """A control plane, an emulated vendor whose machines are processes, and a database."""

    def __init__(self, folder: Path, dsn: str, env: dict[str, str], toml: str) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.port: int = taken.getsockname()[1]
        self.windlass = CommandLine(folder, {"DATABASE_URL": dsn, **env})
        self.store = PostgresStores(dsn)
        (folder / "app.py").write_text(APP)
        (folder / "windlass.toml").write_text(toml)

    def up(self) -> "subprocess.Popen[str]":
        with (self.folder / "up.log").open("a") as log:
            return self.windlass.start("up", "--port", self.port, stdout=log, stderr=log, start_new_session=True)

    def log(self) -> str:
        return (self.folder / "up.log").read_text()

    async def enqueue(self, **payload: Any) -> int:
        return await self.store.enqueue(new_task("work", payload))

    async def until_status(self, task_id: int, status: TaskStatus) -> None:
        async def reached() -> bool:
            task = await self.store.task(task_id)
            return task is not None and task.status is status

        await until(reached, f"task {task_id} is {status}\n{self.log()[-4000:]}")

    async def until_gone(self) -> str:
        """Drain all workers and wait until their machines are deleted. Returns the newest worker."""
        await self.store.set_terminating([worker.id for worker in await self.store.workers()], "end of the test")

        async def gone() -> str | None:
            workers = await self.store.workers(include_terminated=True)
            ended = [worker.id for worker in workers if worker.status is WorkerStatus.TERMINATED]
            return ended[-1] if ended and len(ended) == len(workers) else None

        found: str = await until(gone, f"the end of all workers\n{self.log()[-4000:]}")
        return found


@contextmanager
def hetzner(folder: Path) -> Iterator[tuple[dict[str, str], str]]:
    with ProcessHost(folder / "servers") as host:
        settings = HetznerEmulatorSettings(boot_s=0.2, action_s=0.1, delete_s=0.1, billing_hour_s=30)
        with serving(HetznerEmulator(lambda: datetime.now(UTC), settings, host)) as address:
            yield {"HETZNER_API_TOKEN": "any", "HCLOUD_ENDPOINT": f"{address}/v1"}, HETZNER


@contextmanager
def runpod(folder: Path) -> Iterator[tuple[dict[str, str], str]]:
    plenty = {"requests_per_minute": 10**5, "requests_per_hour": 10**6, "requests_per_day": 10**6}
    settings = RunpodEmulatorSettings(provisioning_s=0.1, starting_s=0.2, runtime_s=0.1, **plenty)
    with RealPodHost(folder / "pods", stop_grace_s=2.0) as host:
        emulator = RunpodEmulator(lambda: datetime.now(UTC), settings, host)
        with serving(emulator) as address:
            yield {"RUNPOD_API_KEY": "any", "RUNPOD_ENDPOINT": f"{address}/v2"}, RUNPOD


@pytest.fixture(params=["hetzner", "runpod"])
def vendor(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
async def site(tmp_path: Path, dsn: str, vendor: str, request: pytest.FixtureRequest) -> AsyncIterator[LogSite]:
    with (hetzner if vendor == "hetzner" else runpod)(tmp_path) as (env, section):
        never_joins = "never_joined" in request.node.name
        toml = TOML.format(
            provider=vendor,
            folder=json.dumps(str(tmp_path)),
            secret=SECRET,
            # A GPU runs one task at a time.
            concurrency=2 if vendor == "hetzner" else 1,
            spawn_timeout_s=12 if never_joins else 60,
        )
        toml += section + (NEVER_JOINS if never_joins else "")
        site = LogSite(tmp_path, dsn, env, toml)
        async with site.store:
            up = site.up()
            try:
                yield site
            finally:
                up.send_signal(signal.SIGTERM)
                try:
                    up.wait(60)
                except subprocess.TimeoutExpired:
                    up.kill()
                    up.wait()


async def test_output_of_each_attempt_outlives_the_machine(site: LogSite) -> None:
    flaky = await site.enqueue(name="flaky", failures=1, prompt="a private prompt")
    plain = await site.enqueue(name="plain")
    for task in (flaky, plain):
        await site.until_status(task, TaskStatus.COMPLETE)
    worker = await site.until_gone()

    def lines(*arguments: object) -> list[str]:
        done = site.windlass(*arguments)
        assert (done.code, done.err) == (0, "")
        return done.out.splitlines()

    first = lines("tasks", "logs", flaky, "--attempt", 1)
    assert first == ["begin flaky in attempt 1", "key ******** prompt ********"]
    second = lines("tasks", "logs", flaky, "--attempt", 2)
    assert second == ["begin flaky in attempt 2", "key ******** prompt ********", "end flaky"]
    assert lines("tasks", "logs", plain, "--follow") == [
        "begin plain in attempt 1", "key ******** prompt None", "end plain",
    ]  # fmt: skip
    whole = lines("workers", "logs", worker, "--timestamps")
    assert any(re.search(rf"task {plain} attempt 1  end plain$", line) for line in whole)
    assert any("registered worker" in line for line in whole), "its own lines too"
    # The output is that of a local worker: one object per line.
    shown = [json.loads(line) for line in lines("workers", "logs", worker, "--tail", 3, "--json")]
    assert len(shown) == 3
    assert {"at", "text", "task_id", "attempt"} <= shown[0].keys()
    link = json.loads(site.windlass("tokens", "create", "reader", "--role", "operator", "--json").out)
    headers = {"Authorization": f"Bearer {link['token']}"}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{site.port}", headers=headers, trust_env=False) as client:
        own = (await client.get(f"/api/v1/tasks/{flaky}/logs", params={"attempt": 2})).json()
        assert [line["text"] for line in own["lines"]] == second
        whole_log = (await client.get(f"/api/v1/workers/{worker}/logs")).text
        diagnostics = (await client.get(f"/api/v1/workers/{worker}")).json()["metadata"]["diagnostics"]
    assert "end plain" in whole_log
    assert diagnostics["last_lines"]
    # The state is from the last list of machines: the tasks may end before a cycle lists the machine again.
    assert diagnostics["machine"]["state"] in ("booting", "running")
    assert "last output:" in site.windlass("workers", "show", worker).out
    everything = whole_log + "".join(whole) + json.dumps(diagnostics)
    assert SECRET not in everything
    assert "private prompt" not in everything


@pytest.mark.parametrize("vendor", ["runpod"], indirect=True)
async def test_live_tail_follows_the_stored_output_of_a_running_worker(site: LogSite) -> None:
    released, shown = site.folder / "released", site.folder / "tail.log"
    task_id = await site.enqueue(name="live", until=str(released))
    await site.until_status(task_id, TaskStatus.RUNNING)
    task = await site.store.task(task_id)
    assert task is not None
    with shown.open("w") as stream:
        tail = site.windlass.start("workers", "logs", task.worker_id, "--follow", stdout=stream, stderr=stream)

    async def until_shown(text: str) -> None:
        async def is_shown() -> bool:
            return text in shown.read_text()

        await until(is_shown, f"the line {text!r}\n{site.log()[-4000:]}")

    try:
        await until_shown("begin live in attempt 1")
        # What is printed from now on cannot be among the lines that the command found at its start.
        await site.until_status(task_id, TaskStatus.RUNNING)
        released.touch()
        await until_shown("end live")
        await site.until_gone()
        assert await asyncio.to_thread(tail.wait, 60) == 0, "it ends with the worker"
    finally:
        tail.kill()
        tail.wait()
    lines = shown.read_text().splitlines()
    assert [lines.count(line) for line in ("begin live in attempt 1", "end live")] == [1, 1]
    assert SECRET not in shown.read_text()


@pytest.mark.parametrize("vendor", ["hetzner"], indirect=True)
async def test_worker_that_prints_a_gigabyte_stays_healthy(site: LogSite) -> None:
    tasks = [await site.enqueue(name=f"loud-{number}", megabytes=60) for number in range(18)]
    for task in tasks:
        await site.until_status(task, TaskStatus.COMPLETE)
    workers = await site.store.workers(include_terminated=True)
    assert [
        worker.code for worker in workers if worker.code not in (None, "IDLE", "DEREGISTERED", "BILLING_HOUR_END")
    ] == []
    assert len(workers) == 1, "it was never replaced"
    await site.until_gone()
    stored = await site.store.database.fetchval("sizes", "select sum(octet_length(body)) from windlass.worker_logs")
    dropped = await site.store.database.fetchval("totals", "select sum(dropped_lines) from windlass.worker_log_totals")
    assert 100_000 < stored < 16 << 20
    assert dropped > 900_000
    for task in tasks[-2:]:
        text = site.windlass("tasks", "logs", task, "--tail", 5).out
        assert f"end loud-{tasks.index(task)}" in text, "the end of each output is kept"


@pytest.mark.parametrize("vendor", ["runpod"], indirect=True)
async def test_boot_output_of_a_pod_that_never_joined_is_kept(site: LogSite) -> None:
    await site.enqueue(name="never")

    async def failed() -> str | None:
        workers = await site.store.workers(include_terminated=True)
        return next((worker.id for worker in workers if worker.status is WorkerStatus.TERMINATED), None)

    worker = await until(failed, f"a worker that never joined\n{site.log()[-4000:]}")
    output = site.windlass("workers", "logs", worker).out
    assert "no module named windlass with ********" in output
    assert "system: pod" in output
    assert "no module named windlass" in site.windlass("explain", worker).out
