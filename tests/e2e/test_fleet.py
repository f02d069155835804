"""Fleets as their users have them: `windlass up` as a process, workers as processes, and what people do to them."""

import json
import os
import pty
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest

from support.command_line import CommandLine, Completed
from support.stores import PostgresStores
from support.worker_harness import PATIENCE_S, is_alive, until
from windlass.model.cycle import Cycle, Fleet
from windlass.model.task import Task, TaskStatus, new_task
from windlass.model.worker import SAME_SIGNAL_S, Worker, WorkerStatus

QUEUE = "work"
APP = """
import os
import time
from pathlib import Path

def work(task):
    print("at work on", task.id, flush=True)
    if task.payload and "env" in task.payload:
        return os.environ.get(task.payload["env"])
    if task.payload and "names_of" in task.payload:
        return [name for name, value in os.environ.items() if task.payload["names_of"] in value]
    go = task.payload and task.payload.get("go")
    while go and not Path(go).exists():
        time.sleep(0.01)
    return task.attempt
"""
SETTINGS: dict[str, Any] = {
    "queues": [QUEUE],
    "handler": "app:work",
    "poll_interval_s": 0.3,
    "heartbeat_interval_s": 0.2,
    "heartbeat_timeout_s": 20,
    "spawn_timeout_s": 30,
    "idle_timeout_s": 0.5,
    "stop_timeout_s": 5,
    "max_workers": 3,
}


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {json.dumps(text)}" for name, text in value.items()) + "}"
    return json.dumps(value)


class Host:
    """A folder with an app and a windlass.toml, a database, and every process that was started here."""

    def __init__(self, folder: Path, dsn: str) -> None:
        self.folder = folder
        # In the environment of all that is started, however it detaches itself.
        self._mark = f"HOST_{uuid4().hex}"
        self.windlass = CommandLine(folder, {"DATABASE_URL": dsn, self._mark: "1"})
        self.store = PostgresStores(dsn)
        self.ups: list[subprocess.Popen[str]] = []
        (folder / "app.py").write_text(APP)
        self.configure()

    def configure(self, file: str = "windlass.toml", *, lease_s: float = 2, **settings: Any) -> None:
        chosen = {**SETTINGS, "chdir": str(self.folder), **settings}
        lines = [f"{name} = {_toml(value)}" for name, value in chosen.items() if value is not None]
        head = f'data_dir = "state"\n[control]\nlease_s = {lease_s}\n[fleets.default]\n'
        (self.folder / file).write_text(head + "\n".join(lines))

    def up(self, *arguments: str) -> "subprocess.Popen[str]":
        with (self.folder / f"up-{len(self.ups)}.log").open("w") as log:
            process = self.windlass.start("up", *arguments, stderr=log, stdout=log, start_new_session=True)
        self.ups.append(process)
        return process

    async def up_and_lose_its_handler(self) -> "subprocess.Popen[str]":
        """One that was not there at the start would be refused."""
        (self.folder / "missing.py").write_text(APP)
        up = self.up()
        await until(lambda: "cycle" in self.log(), f"a first cycle\n{self.log()}")
        (self.folder / "missing.py").unlink()
        return up

    def log(self) -> str:
        return (self.folder / f"up-{len(self.ups) - 1}.log").read_text()

    async def end(self, up: "subprocess.Popen[str]") -> None:
        """In good order: nothing is left."""
        up.send_signal(signal.SIGTERM)
        await until(lambda: up.poll() is not None, f"up ends\n{self.log()}")
        assert (up.returncode, self.remains()) == (0, []), self.log()

    def remains(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if self._mark in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def worker_processes(self) -> list[int]:
        """Started as a worker; their handlers' processes are not."""
        launched = [p for p in self.remains() if "windlass.providers.local.launch" in p.cmdline()]
        pids = {process.pid for process in launched}
        return [process.pid for process in launched if process.ppid() not in pids]

    # -------------------------------------------------------------------------------------------------- the database

    async def enqueue(self, *payloads: Any) -> list[int]:
        return [await self.store.enqueue(new_task(QUEUE, payload)) for payload in payloads]

    async def task(self, task_id: int) -> Task:
        task = await self.store.task(task_id)
        assert task is not None
        return task

    async def until_status(self, status: TaskStatus, *task_ids: int, attempt: int | None = None) -> Task:
        async def are_all_so() -> Task | None:
            tasks = [await self.task(task_id) for task_id in task_ids]
            are_so = all(task.status is status and attempt in (None, task.attempts) for task in tasks)
            return tasks[0] if are_so else None

        task: Task = await until(are_all_so, f"tasks {task_ids} are {status}\n{self.log() if self.ups else ''}")
        return task

    async def until_workers(self, count: int) -> list[Worker]:
        """So many, all of them active."""

        async def are_there() -> list[Worker] | bool:
            workers = await self.store.workers()
            is_so = len(workers) == count and all(worker.status is WorkerStatus.ACTIVE for worker in workers)
            return (workers or True) if is_so else False

        found = await until(are_there, f"{count} workers\n{self.log() if self.ups else ''}")
        return found if isinstance(found, list) else []

    async def fleet(self) -> Fleet:
        (fleet,) = await self.store.fleets()
        return fleet

    async def last_cycle(self) -> Cycle:
        (cycle,) = await self.store.cycles("default", 1)
        return cycle

    async def until_decided(self, words: str) -> Cycle:
        async def is_decided() -> Cycle | None:
            return next((cycle for cycle in await self.store.cycles("default") if words in cycle.decision), None)

        cycle: Cycle = await until(is_decided, f"a decision with {words!r}\n{self.log() if self.ups else ''}")
        return cycle


@asynccontextmanager
async def new_host(folder: Path, dsn: str) -> AsyncIterator[Host]:
    host = Host(folder, dsn)
    async with host.store:
        try:
            yield host
        finally:
            for process in host.remains():
                process.kill()
            for up in host.ups:
                up.wait(PATIENCE_S)


@pytest.fixture
async def host(tmp_path: Path, dsn: str) -> AsyncIterator[Host]:
    async with new_host(tmp_path, dsn) as host:
        yield host


# ----------------------------------------------------------------------------------------------------------- the loop


async def test_a_burst_is_hired_for_worked_off_and_let_go(host: Host) -> None:
    tasks = await host.enqueue(*[None] * 10)
    host.configure(handler=None, queues=None)
    up = host.up("--queue", QUEUE, "--handler", "app:work", "--max", "2")
    await host.until_status(TaskStatus.COMPLETE, *tasks)
    await host.until_workers(0)
    assert "\nno workers\n" in host.windlass("status").out, "nobody has to start any"
    workers = await host.store.workers(include_terminated=True)
    assert {worker.slot for worker in workers} == {0, 1}
    assert {worker.code for worker in workers} == {"IDLE"}
    await host.end(up)
    assert "spawn 2: 10 queued" in host.log()


async def test_a_worker_that_is_killed_is_replaced_and_its_task_recovered(host: Host) -> None:
    go = host.folder / "go"
    (task,) = await host.enqueue({"go": str(go)})
    up = host.up()
    running = await host.until_status(TaskStatus.RUNNING, task)
    (killed,) = await host.store.workers()
    assert killed.pid is not None
    psutil.Process(killed.pid).kill()
    again = await host.until_status(TaskStatus.RUNNING, task, attempt=2)
    assert again.worker_id != running.worker_id == killed.id
    go.touch()
    await host.until_status(TaskStatus.COMPLETE, task)
    told = host.windlass("explain", killed.id).out
    assert f"Worker {killed.id} is terminated (MACHINE_GONE): " in told
    assert "was killed by SIGKILL" in told
    assert "last log line: {" not in told
    story = host.windlass("explain", task).out
    assert "is complete after 2 attempts" in story
    assert "TASK_REQUEUED" in story
    assert f"at work on {task}" in host.windlass("workers", "logs", killed.id).out
    lines = host.windlass("workers", "logs", killed.id, "--json").out.splitlines()
    assert {"line": f"at work on {task}"} in [json.loads(line) for line in lines]
    await host.end(up)


async def test_an_orchestrator_that_was_killed_finds_its_workers_again_and_doubles_none(host: Host) -> None:
    host.configure(min_workers=2)
    first = host.up()
    before = {worker.id: worker.pid for worker in await host.until_workers(2)}
    first.kill()
    first.wait()
    # They go on without it.
    await host.until_status(TaskStatus.COMPLETE, *await host.enqueue(None))
    last = await host.last_cycle()
    second = host.up()

    async def has_decided_since() -> bool:
        cycle = await host.last_cycle()
        return cycle.term > last.term or (cycle.repeated_at or cycle.started_at) > (last.repeated_at or last.started_at)

    await until(has_decided_since, "the second one leads")
    # One that finds work hires at once, if at all.
    await host.until_status(TaskStatus.COMPLETE, *await host.enqueue(None, None))
    assert {worker.id: worker.pid for worker in await host.until_workers(2)} == before
    assert sorted(host.worker_processes()) == sorted(pid for pid in before.values() if pid is not None)
    await host.end(second)
    assert await host.store.workers() == []


async def test_told_to_leave_its_workers_it_does(host: Host) -> None:
    host.configure(min_workers=1)
    up = host.up("--leave-workers")
    (worker,) = await host.until_workers(1)
    up.send_signal(signal.SIGTERM)
    await until(lambda: up.poll() is not None, "up ends")
    assert worker.pid is not None
    assert is_alive(worker.pid)


async def test_of_two_orchestrators_one_leads_and_the_other_takes_over(host: Host) -> None:
    first = host.up()
    await until(host.store.fleets, "the first one leads")
    second = host.up()
    await until(lambda: "standby cycle" in host.log(), f"the second one stands by\n{host.log()}")
    term = (await host.last_cycle()).term
    first.kill()
    first.wait()
    await host.until_status(TaskStatus.COMPLETE, *await host.enqueue(None))
    assert (await host.last_cycle()).term > term
    await host.end(second)


async def test_a_standby_that_is_stopped_leaves_the_leaders_workers_alone(host: Host) -> None:
    host.configure(min_workers=2)
    first = host.up()
    before = await host.until_workers(2)
    second = host.up()
    await until(lambda: "standby cycle" in host.log(), f"the second one stands by\n{host.log()}")
    second.send_signal(signal.SIGTERM)
    await until(lambda: second.poll() is not None, f"the second one ends\n{host.log()}")
    assert second.returncode == 0
    last = await host.last_cycle()

    async def has_looked_again() -> bool:
        cycle = await host.last_cycle()
        return cycle.id > last.id or cycle.repeats > last.repeats + 2

    await until(has_looked_again, "the leader goes on")
    assert [(w.id, w.pid) for w in await host.until_workers(2)] == [(w.id, w.pid) for w in before]
    host.ups.remove(second)
    await host.end(first)


async def test_a_second_signal_ends_it_at_once_and_leaves_who_is_at_work(host: Host) -> None:
    host.configure(stop_timeout_s=600)
    (task,) = await host.enqueue({"go": str(host.folder / "never")})
    up = host.up()
    running = await host.until_status(TaskStatus.RUNNING, task)
    up.send_signal(signal.SIGTERM)
    told_at = time.monotonic()
    await host.until_decided("shutting down: 1 left")
    assert "stop again (Ctrl-C) to end now and leave the workers to the next start" in host.log()
    # One that comes sooner is the same again.
    await until(lambda: time.monotonic() > told_at + 2 * SAME_SIGNAL_S, "the end of the moment")
    up.send_signal(signal.SIGTERM)
    await until(lambda: up.poll() is not None, f"up ends\n{host.log()}", 10.0)
    assert up.returncode == 0
    worker = await host.store.worker(running.worker_id or "")
    assert worker is not None
    assert worker.pid is not None
    assert is_alive(worker.pid)


async def test_two_signals_of_one_moment_are_one_and_everybody_may_finish(host: Host) -> None:
    """As `timeout` sends them: to the program, and to its group."""
    host.configure()
    gate = host.folder / "gate"
    (task,) = await host.enqueue({"go": str(gate)})
    up = host.up()
    await host.until_status(TaskStatus.RUNNING, task)
    for _ in range(2):
        up.send_signal(signal.SIGTERM)
    await host.until_decided("shutting down: 1 left")
    gate.touch()
    await host.until_status(TaskStatus.COMPLETE, task)
    await until(lambda: up.poll() is not None, f"up ends\n{host.log()}", 30.0)
    assert await host.store.workers() == []


async def test_a_file_that_breaks_while_it_runs_keeps_nobody_from_being_hired(host: Host) -> None:
    """Workers are told their settings by whoever starts them, and read no file."""
    host.configure(min_workers=1)
    up = host.up()
    (killed,) = await host.until_workers(1)
    (host.folder / "windlass.toml").write_text("nonsense")
    assert killed.pid is not None
    psutil.Process(killed.pid).kill()

    async def is_replaced() -> bool:
        return [worker.status for worker in await host.store.workers() if worker.id != killed.id] == ["active"]

    await until(is_replaced, f"another one\n{host.log()}")
    await host.end(up)


async def test_workers_get_the_settings_of_the_file_that_was_named_and_no_secret_but_the_databases(host: Host) -> None:
    host.configure("other.toml", env={"GIVEN": "on purpose"})
    text = (host.folder / "other.toml").read_text()
    (host.folder / "other.toml").write_text(text.replace("[control]", "[worker]\ntimeout_s = 77.5\n[control]"))
    (host.folder / "windlass.toml").write_text("nonsense")
    asked = ["WINDLASS_WORKER__TIMEOUT_S", "GIVEN", "RUNPOD_API_KEY", "HETZNER_API_TOKEN", "SUPABASE_SERVICE_ROLE_KEY"]
    # At odds with what a fleet of this host has where the file says nothing: workers are not to judge it.
    host.windlass = host.windlass.with_env(**dict.fromkeys(asked[2:], "secret"), GPU_IDLE_TIMEOUT_SEC="12")
    tasks = await host.enqueue(*({"env": name} for name in (*asked, "DATABASE_URL")))
    up = host.up("--config", "other.toml")
    await host.until_status(TaskStatus.COMPLETE, *tasks)
    *results, url = [json.loads((await host.task(task_id)).result or "") for task_id in tasks]
    assert results == ["77.5", "on purpose", None, None, None]
    assert url.startswith("postgresql://")
    await host.end(up)


async def test_handlers_see_the_database_that_the_fleet_names_for_them_and_not_what_only_the_file_has(
    host: Host, dsn: str
) -> None:
    own = "postgresql://handlers.own/db"
    host.configure(env={"DATABASE_URL": own})
    text = (host.folder / "windlass.toml").read_text()
    (host.folder / "windlass.toml").write_text(f"database_url = {json.dumps(dsn)}\n{text}")
    host.windlass = host.windlass.with_env(DATABASE_URL="")
    tasks = await host.enqueue({"names_of": dsn}, {"env": "DATABASE_URL"})
    up = host.up()
    await host.until_status(TaskStatus.COMPLETE, *tasks)
    assert [json.loads((await host.task(task)).result or "") for task in tasks] == [[], own]
    await host.end(up)


async def test_a_changed_file_is_taken_over_and_a_broken_one_changes_nothing(host: Host) -> None:
    go = host.folder / "go"
    host.configure(max_workers=1)
    tasks = await host.enqueue(*[{"go": str(go)}] * 2)
    up = host.up()
    await host.until_workers(1)
    host.configure(max_workers=2)
    up.send_signal(signal.SIGHUP)
    await host.until_workers(2)
    without_command = {"handler": None, "exec": "nosuch-command now"}
    for broken in ({"max_workers": 0}, {"handler": None}, {"handler": "app:nosuch"}, without_command):
        host.configure(**broken)
        said = host.log().count("reload configuration failed")
        up.send_signal(signal.SIGHUP)
        await until(
            lambda said=said: host.log().count("reload configuration failed") > said, f"it says so\n{host.log()}"
        )
    assert "fleets.default.max_workers (from windlass.toml) is 0" in host.log()
    assert "fleet default has nothing to run" in host.log()
    assert "fleet default: cannot find nosuch in app. Check the name after the colon." in host.log()
    assert "command 'nosuch-command' not found. Check exec of fleet default" in host.log()
    go.touch()
    await host.until_status(TaskStatus.COMPLETE, *tasks)
    await host.until_workers(0)
    assert (await host.fleet()).max_workers == 2
    await host.end(up)


async def test_a_reload_rents_with_the_keys_of_the_new_file_and_one_in_vain_changes_nothing(host: Host) -> None:
    settings = (host.folder / "windlass.toml").read_text()
    far = '[fleets.far]\nprovider = "hetzner"\nhandler = "app:work"\nqueues = ["far"]\n'
    host.windlass = host.windlass.with_env(WINDLASS_API__URL="http://127.0.0.1:9")
    up = host.up()
    # From its first moment on a wish to reload is none to end.
    await until(lambda: _handles_sighup(up.pid), "it heeds the signal")
    up.send_signal(signal.SIGHUP)
    await until(lambda: "reloaded configuration" in host.log(), f"a first reload\n{host.log()}")
    changed = settings.replace("max_workers = 3", "max_workers = 2")
    # Each of its checks is passed; what is missing is noticed when its provider is made.
    stranded = f"{far}[fleets.far.hetzner]\nis_ipv4_on = false\nis_ipv6_on = false\n"
    account = 'hetzner_api_token = "of-the-new-file"\nhetzner_endpoint = "http://127.0.0.1:9/v1"\n'
    (host.folder / "windlass.toml").write_text(f"{account}{changed}\n{stranded}")
    up.send_signal(signal.SIGHUP)
    await until(lambda: "reload configuration failed" in host.log(), f"it says so\n{host.log()}")
    assert "servers of fleet far would have no network" in host.log()
    (host.folder / "windlass.toml").write_text(f"{account}{settings}\n{far}")
    up.send_signal(signal.SIGHUP)
    await until(lambda: '"new": ["far"]' in host.log(), f"a fleet more\n{host.log()}")
    assert '"changed"' not in host.log()
    await until(lambda: "list machines failed" in host.log(), f"it calls\n{host.log()}")


async def test_a_file_without_a_fleet_is_enough_while_workers_of_the_last_one_live(host: Host) -> None:
    host.configure(min_workers=1)
    file = host.folder / "windlass.toml"
    whole = file.read_text()
    without = whole.partition("[fleets.default]")[0]
    up = host.up("--leave-workers")
    (worker,) = await host.until_workers(1)
    up.send_signal(signal.SIGTERM)
    await until(lambda: up.poll() is not None, f"it ends\n{host.log()}")
    file.write_text(without)
    again = host.up()
    told = '"event": "found unconfigured fleet"'
    await until(lambda: told in host.log(), f"it says so\n{host.log()}")
    assert '"shut_down_in_s": 300.0' in host.log()
    file.write_text(whole)
    again.send_signal(signal.SIGHUP)
    await until(lambda: '"new": ["default"]' in host.log(), f"it is put back in time\n{host.log()}")
    assert [each.id for each in await host.until_workers(1)] == [worker.id]
    file.write_text(without)
    again.send_signal(signal.SIGHUP)
    await until(lambda: "the configuration has no fleets" in host.log(), f"an empty file changes nothing\n{host.log()}")
    assert [each.id for each in await host.until_workers(1)] == [worker.id]
    await host.end(again)
    done = host.windlass("up")
    assert (done.code, done.err) == (
        2,
        "windlass: no fleet is configured: add a table [fleets.NAME] with queues and a handler to windlass.toml, or "
        "give --queue and --handler.\n",
    )


def test_without_a_fleet_no_database_is_made_to_find_that_nobody_is_left(tmp_path: Path, empty_dsn: str) -> None:
    done = CommandLine(tmp_path)("up", "--data-dir", tmp_path / "data")
    assert (done.code, done.err[:32]) == (2, "windlass: no fleet is configured")
    assert not (tmp_path / "data").exists()
    unmigrated = CommandLine(tmp_path, {"DATABASE_URL": empty_dsn})
    assert unmigrated("up").err == done.err
    assert json.loads(unmigrated("db", "status", "--json").out)["version"] is None


def _handles_sighup(pid: int) -> bool:
    caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) & 1 << (signal.SIGHUP - 1))


async def test_a_handler_that_cannot_be_imported_fails_its_slot_until_it_is_mended(host: Host) -> None:
    host.configure(max_workers=1, max_restarts=1, handler="missing:work")
    up = await host.up_and_lose_its_handler()
    (task,) = await host.enqueue(None)

    async def failed_slots() -> tuple[int, ...]:
        return next((fleet.failed_slots for fleet in await host.store.fleets()), ())

    await until(failed_slots, f"the slot fails\n{host.log()}")
    told = host.windlass("explain", "default").out
    assert "Slot 0 has failed too often and stays empty until `windlass restart default`." in told
    broken = [worker for worker in await host.store.workers(include_terminated=True) if worker.code]
    assert "cannot import handler missing:work" in host.windlass("explain", broken[-1].id).out
    assert "failed slots 0" in host.windlass("status").out
    assert "Slot 0 has failed" in host.windlass("explain", task).out
    (host.folder / "missing.py").write_text(APP)
    assert host.windlass("restart", "default", "--json").json["slots_freed"] == 1
    await host.until_status(TaskStatus.COMPLETE, task)
    await host.end(up)


async def test_with_default_limits_a_broken_handler_is_held_and_a_restart_by_hand_lifts_the_hold(host: Host) -> None:
    host.configure(handler="missing:work")
    up = await host.up_and_lose_its_handler()
    (task,) = await host.enqueue(None)

    async def hold() -> str | None:
        return next((fleet.hold.code for fleet in await host.store.fleets() if fleet.hold), None)

    await until(hold, f"it is held\n{host.log()}")
    assert await hold() == "FAILURE_RATE"
    assert len(await host.store.workers(include_terminated=True)) <= 5 + SETTINGS["max_workers"]
    why = "last log line: windlass: cannot import handler missing:work: No module named 'missing'"
    for told in (("status",), ("explain", "default"), ("explain", task)):
        assert why in host.windlass(*told).out, "the cause is told wherever the hold is"

    async def is_told_once() -> bool:
        return host.windlass("status").out.count(why) == 1

    await until(is_told_once, "the brake leaves the cause to the decision beside it")
    assert "After fixing the cause: `windlass restart default`" in host.windlass("explain", "default").out
    logged = [json.loads(line) for line in host.log().splitlines()]
    failures = [line for line in logged if line["event"] == "worker failed"]
    assert {line["level"] for line in failures} == {"warning"}
    assert why in failures[0]["reason"]
    assert failures[0]["worker"].startswith("default-")
    (host.folder / "missing.py").write_text(APP)
    host.windlass("restart", "default")
    await host.until_status(TaskStatus.COMPLETE, task)
    await host.end(up)


async def test_a_fleet_that_nobody_runs_any_more_is_said_to_be_so_and_is_not_paused(host: Host) -> None:
    host.configure(min_workers=1)
    up = host.up()
    await host.until_workers(1)
    assert "no orchestrator" not in host.windlass("status").out
    assert host.windlass("status", "--json").json["fleets"][0]["without_orchestrator_s"] is None
    await host.end(up)
    first, *_, last = [json.loads(line) for line in host.log().splitlines()]
    assert (first["event"], first["fleets"], last["event"]) == ("started", ["default"], "stopped")
    assert first["database"].startswith("postgresql://")
    (task,) = await host.enqueue(None)
    for told in (("status",), ("explain", "default"), ("explain", task)):
        out = host.windlass(*told).out
        assert "no cycle for " in out
        assert "; start `windlass up`" in out
        assert "paused" not in out


async def test_a_fleet_that_was_removed_is_shown_on_request_only(host: Host) -> None:
    host.configure(min_workers=1)
    up = host.up()
    await host.until_workers(1)
    text = (host.folder / "windlass.toml").read_text()
    (host.folder / "windlass.toml").write_text(text.replace("[fleets.default]", "[fleets.other]"))
    up.send_signal(signal.SIGHUP)
    await until(lambda: "reloaded configuration" in host.log(), "it is taken over")
    (told,) = [json.loads(line) for line in host.log().splitlines() if "reloaded configuration" in line]
    assert (told["new"], told["removed"]) == (["other"], ["default"])

    def fleets(*options: str) -> list[str]:
        return [fleet["name"] for fleet in host.windlass("status", "--json", *options).json["fleets"]]

    await until(lambda: "default" not in fleets(), f"it is gone\n{host.log()}")
    assert fleets("--all") == ["default", "other"]
    (host.folder / "windlass.toml").write_text(text.replace("[fleets.default]", "[fleets.other]") + "\npriority=1")
    up.send_signal(signal.SIGHUP)
    await until(lambda: "fleets.other.priority in windlass.toml is not a setting" in host.log(), "a mistake is told")
    changed = text.replace("[fleets.default]", "[fleets.other]").replace("max_workers = 3", "max_workers = 2")
    (host.folder / "windlass.toml").write_text(changed)
    up.send_signal(signal.SIGHUP)
    await until(lambda: "other (max_workers)" in host.log(), f"what has changed is told\n{host.log()}")
    await host.end(up)


async def test_options_describe_one_more_fleet_beside_those_of_the_file(host: Host) -> None:
    text = (host.folder / "windlass.toml").read_text()
    (host.folder / "windlass.toml").write_text(text.replace("[fleets.default]", "[fleets.other]"))
    up = host.up("--queue", "extra", "--handler", "app:work", "--max", "2", "--chdir", str(host.folder))

    async def limits() -> list[tuple[str, int]]:
        return [(fleet.name, fleet.max_workers) for fleet in await host.store.fleets() if fleet.planned_at]

    async def both() -> bool:
        return await limits() == [("default", 2), ("other", 3)]

    await until(both, f"two fleets\n{host.log()}")
    await host.end(up)


async def test_a_cycle_while_another_leads_says_so_and_does_nothing(host: Host) -> None:
    host.configure(poll_interval_s=60, lease_s=60)  # so that a busy machine does not cost the lead
    up = host.up()
    await until(host.store.fleets, "the first cycle")
    before = await host.store.now()
    done = host.windlass("cycle").json
    assert done["is_leader"] is False
    assert datetime.fromisoformat(done["timestamp"]) >= before
    assert done["actions"]["workers_spawned"] == 0
    assert done["status"]["queued_tasks"] is None, "nobody has looked"
    assert re.fullmatch(r"standby: another orchestrator leads for \d+ s more", done["decision"]), done
    await host.end(up)


# ------------------------------------------------------------------------------------------------------------ by hand


async def test_a_paused_fleet_hires_nobody_until_it_is_resumed(host: Host) -> None:
    up = host.up()
    await until(host.store.fleets, "the first cycle")
    host.windlass("pause", "--fleet", "default")
    (task,) = await host.enqueue(None)
    await host.until_decided("paused")
    assert await host.store.workers() == []
    told = host.windlass("explain", task).out
    assert "It is paused: `windlass resume --fleet default` resumes it." in told
    assert "paused" in host.windlass("status").out
    host.windlass("resume", "--fleet", "default")
    await host.until_status(TaskStatus.COMPLETE, task)
    await host.end(up)


async def test_workers_are_hired_and_let_go_by_hand_gracefully_or_not(host: Host) -> None:
    go = host.folder / "go"
    host.configure(idle_timeout_s=60, stop_timeout_s=60)
    up = host.up()
    await host.until_decided("")
    assert host.windlass("spawn", "--count", 2, "--json").json["requested"] == 2
    await host.until_workers(2)
    host.windlass("pause", "--all")
    assert host.windlass("spawn", "--fleet", "default", "-n", 9).out == (
        "1 of 9 workers requested in fleet default: max_workers is 3, and no more slots are free\n"
    )
    await host.store.request_workers("default", -1)
    assert host.windlass("resume", "--all").out == "fleet default resumed, with 2 workers\n"
    assert host.windlass("pause", "default").out == "fleet default paused, with 2 workers\n"
    assert host.windlass("resume", "default", "--json").json == {
        "changed": 2,
        "fleets": ["default"],
        "is_paused": False,
    }
    sentence = "slot 17 not found in fleet default: its slots are 0 to 2"
    assert sentence in host.windlass("restart", "default", "--slot", "17").err
    tasks = await host.enqueue(*[{"go": str(go)}] * 2)
    await host.until_status(TaskStatus.RUNNING, *tasks)
    leaving, killed = [(await host.task(task_id)).worker_id or "" for task_id in tasks]
    assert host.windlass("terminate", leaving, "--reason", "to make room", "--json").json["changed"] == 1
    assert host.windlass("terminate", killed, "--force", "--json").json["changed"] == 1
    # The one that was forced loses its task, the other finishes it.
    await host.until_status(TaskStatus.RUNNING, tasks[1], attempt=2)
    go.touch()
    await host.until_status(TaskStatus.COMPLETE, *tasks)
    assert [(await host.task(task_id)).attempts for task_id in tasks] == [1, 2]
    assert (await host.task(tasks[0])).worker_id == leaving

    async def ended() -> bool:
        rows = [await host.store.worker(worker_id) for worker_id in (leaving, killed)]
        return all(row is not None and row.status is WorkerStatus.TERMINATED for row in rows)

    await until(ended, f"both have ended\n{host.log()}")
    assert f"Worker {leaving} is terminated (MANUAL): to make room." in host.windlass("explain", leaving).out
    await host.end(up)


# --------------------------------------------------------------------------------------------- once, and once again


async def test_cycles_run_by_cron_apply_retention_and_refuse_what_cannot_be_run(host: Host) -> None:
    async with host.store.database.connection("a finished task") as connection:
        await connection.execute(
            "insert into windlass.tasks (queue, status, finished_at)"
            " values ('red', 'complete', now() - interval '1 year')"
        )
    assert host.windlass("cycle").json["is_leader"] is True
    assert await host.store.tasks() == []
    host.configure(handler=None, exec="nosuch-command now")
    refused = host.windlass("cycle")
    assert refused.code == 2
    assert "command 'nosuch-command' not found. Check exec of fleet default" in refused.err


async def test_cycles_run_by_cron_do_the_same_and_can_be_replayed(host: Host) -> None:
    (task, *_) = tasks = await host.enqueue(None, None)
    first = host.windlass("cycle").json
    assert first["actions"] == {
        "workers_promoted": 0,
        "workers_failed": 0,
        "workers_spawned": 2,
        "workers_terminated": 0,
        "tasks_reset": 0,
    }
    assert (
        first["status"].items()
        >= {
            "queued_tasks": 2,
            "spawning_workers": 0,
            "active_workers": 0,
            "terminating_workers": 0,
            "total_workers": 0,
        }.items()
    )
    assert first["timestamp"].startswith("20")
    await host.until_status(TaskStatus.COMPLETE, *tasks)
    for _ in range(10):
        if host.windlass("cycle").json["status"]["total_workers"] == 0:
            break
    assert host.remains() == []
    assert "complete" in host.windlass("explain", task).out

    number = str(first["cycle_id"])
    same = host.windlass("replay", number, "--json").json
    assert (same["is_same"], [a["kind"] for a in same["then"]["actions"]]) == (True, ["spawn", "spawn"])
    host.configure("other.toml", max_workers=1)
    other = host.windlass("replay", number, "--with", "other.toml", "--json").json
    assert (other["is_same"], [a["kind"] for a in other["again"]["actions"]]) == (False, ["spawn"])
    assert "replayed: same decision" in host.windlass("replay", number).out
    assert "replayed: spawn 1" in host.windlass("replay", number, "--with", "other.toml").out
    fewer = host.windlass("replay", number, "--set", "max_workers=1", "--json").json
    assert fewer["again"] == other["again"]
    for wrong, sentence in (
        (("--set", "max_worker=1"), "'max_worker=1' is not a fleet setting: write name=value"),
        (("--with", "nosuch.toml"), "configuration file nosuch.toml not found. Check --with."),
    ):
        refused = host.windlass("replay", number, *wrong)
        assert refused.code == 2
        assert sentence in refused.err


async def test_a_live_view_is_drawn_until_ctrl_c(host: Host) -> None:
    await host.enqueue(None)
    host.windlass("cycle")
    terminal, its_end = pty.openpty()
    os.set_blocking(terminal, False)
    watch = host.windlass.with_env(COLUMNS="200", LINES="50").start("status", "--watch", stdout=its_end, stderr=its_end)
    with watch as process:
        drawn = b""

        def is_drawn() -> bool:
            nonlocal drawn
            with suppress(BlockingIOError):
                drawn += os.read(terminal, 65_536)  # perhaps a part of a character
            return b"spawn 1: 1 queued" in drawn and b"running tasks" in drawn

        try:
            await until(is_drawn, "a picture")
        finally:
            process.send_signal(signal.SIGINT)
        await until(lambda: is_drawn() and process.poll() is not None, "it ends")
    assert process.returncode == 130, drawn
    os.close(terminal)
    os.close(its_end)


async def test_a_live_view_for_programs_is_a_line_a_second(host: Host) -> None:
    await host.enqueue(None)
    with host.windlass.start("status", "--watch", "--json", stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
    assert [line["queues"][0]["queued"] for line in lines] == [1, 1]
    assert lines[0]["at"] < lines[1]["at"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param(("spawn", "nobody"), "fleet nobody not found", id="spawn for an unknown fleet"),
        pytest.param(("restart", "nobody"), "fleet nobody not found", id="restart of an unknown fleet"),
        pytest.param(("pause", "--fleet", "nobody"), "fleet nobody not found", id="pause of an unknown fleet"),
        pytest.param(("resume", "--fleet", "nobody"), "fleet nobody not found", id="resume of an unknown fleet"),
        pytest.param(("terminate", "--fleet", "nobody"), "fleet nobody not found", id="terminate an unknown fleet"),
        pytest.param(("workers", "list", "--fleet", "nobody"), "fleet nobody not found", id="list of an unknown fleet"),
        pytest.param(("terminate", "nobody"), "live worker or fleet nobody not found", id="an unknown worker"),
        pytest.param(("terminate",), "nothing to terminate", id="nobody to terminate"),
        pytest.param(("pause",), "pass exactly one of", id="nothing to pause"),
        pytest.param(("pause", "--all", "--fleet", "x"), "pass exactly one of", id="two things to pause"),
        pytest.param(("workers", "show", "nobody"), "worker nobody not found", id="show an unknown worker"),
        pytest.param(("workers", "logs", "nobody"), "worker nobody not found", id="logs of an unknown worker"),
        pytest.param(("explain", "nobody"), "no task, worker or fleet nobody", id="explain the unknown"),
        pytest.param(("explain", "4711"), "task 4711 not found", id="explain an unknown task"),
        pytest.param(("replay", "4711"), "cycle 4711 not found", id="an unknown cycle"),
        pytest.param(("replay", "zero"), "valid integer", id="a cycle that is no number"),
        pytest.param(
            ("replay", "9" * 20), "should be less than or equal to 9223372036854775807", id="a cycle beyond all numbers"
        ),
        pytest.param(("explain", "9" * 20), "task 99999999999999999999 not found", id="a task beyond all numbers"),
        pytest.param(("spawn", "--count", "99999999999"), "should be less than or equal to 100000", id="too many"),
        pytest.param(
            ("restart", "--slot", "2147483648"), "should be less than or equal to 100000", id="a slot of no fleet"
        ),
        pytest.param(("up",), "no fleet is configured", id="up without a fleet"),
        pytest.param(("cycle",), "no fleet is configured", id="cycle without a fleet"),
        pytest.param(("up", "--queue", "q"), "has nothing to run", id="a fleet without a handler"),
        pytest.param(
            ("up", "-q", "q", "--min", "9", "--handler", "a:b"), "min must not exceed max", id="limits at odds"
        ),
        pytest.param(("spawn", "a", "--fleet", "b"), "are different fleets", id="two fleets"),
        pytest.param(("cycle",), "add a table [fleets.NAME] with queues and a handler", id="what cycle needs"),
        pytest.param(
            ("up", "-q", "q", "--handler", "app.work"), "fleets.default.handler (from command line)", id="no function"
        ),
        pytest.param(
            ("up", "-q", "q", "--handler", "a:b", "--chdir", "/nowhere"),
            "fleets.default.chdir (from command line) is /nowhere: folder not found.",
            id="no folder to work in",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(tmp_path: Path, dsn: str, arguments: tuple[str, ...], sentence: str) -> None:
    done: Completed = CommandLine(tmp_path, {"DATABASE_URL": dsn})(*arguments)
    assert (done.code, done.out) == (2, ""), done
    assert sentence in done.err
    assert done.err.count("\n") == 1
