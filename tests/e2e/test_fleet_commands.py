"""Commands for fleets: pause, spawn, terminate, cycle, replay and status --watch, with real workers."""

import json
import os
import pty
import re
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import pytest

from support.command_line import CommandLine, Completed
from support.local_fleet import FleetHost, open_fleet_host
from support.worker_harness import until
from windlass.model.task import TaskStatus
from windlass.model.worker import WorkerStatus


@pytest.fixture
async def host(tmp_path: Path, dsn: str) -> AsyncIterator[FleetHost]:
    async with open_fleet_host(tmp_path, dsn) as host:
        yield host


async def test_paused_fleet_spawns_no_worker_until_resumed(host: FleetHost) -> None:
    up = host.up()
    await until(host.store.fleets, "the first cycle")
    host.windlass("pause", "--fleet", "default")
    (task,) = await host.enqueue(None)
    await host.until_decision("paused")
    assert await host.store.workers() == []
    explanation = host.windlass("explain", task).out
    assert "It is paused: `windlass resume --fleet default` resumes it." in explanation
    assert "paused" in host.windlass("status").out
    host.windlass("resume", "--fleet", "default")
    await host.until_status(TaskStatus.COMPLETE, task)
    await host.stop(up)


async def test_spawn_and_terminate_commands_with_and_without_force(host: FleetHost) -> None:
    go = host.folder / "go"
    host.configure(idle_timeout_s=60, stop_timeout_s=60)
    up = host.up()
    await host.until_decision("")
    assert host.windlass("spawn", "--count", 2, "--json").json["requested"] == 2
    await host.until_workers(2)
    host.windlass("pause", "--all")
    assert host.windlass("spawn", "--fleet", "default", "-n", 9).out == (
        "1 of 9 workers requested in fleet default: max_workers is 3, and no more slots are free\n"
    )
    await host.store.request_workers("default", -1)
    assert host.windlass("resume", "--all").out == "all fleets resumed, with 2 workers\n"
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
    drained, killed = [(await host.task(task_id)).worker_id or "" for task_id in tasks]
    assert host.windlass("terminate", drained, "--reason", "to make room", "--json").json["changed"] == 1
    assert host.windlass("terminate", killed, "--force", "--json").json["changed"] == 1
    # The worker terminated with --force loses its task, the drained worker finishes its own.
    await host.until_status(TaskStatus.RUNNING, tasks[1], attempt=2)
    go.touch()
    await host.until_status(TaskStatus.COMPLETE, *tasks)
    assert [(await host.task(task_id)).attempts for task_id in tasks] == [1, 2]
    assert (await host.task(tasks[0])).worker_id == drained

    async def are_terminated() -> bool:
        rows = [await host.store.worker(worker_id) for worker_id in (drained, killed)]
        return all(row is not None and row.status is WorkerStatus.TERMINATED for row in rows)

    await until(are_terminated, f"both workers terminated\n{host.log()}")
    assert f"Worker {drained} is terminated (MANUAL): to make room." in host.windlass("explain", drained).out
    await host.stop(up)


async def test_cycle_applies_retention_and_refuses_a_missing_command(host: FleetHost) -> None:
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


async def test_cycle_names_settings_without_effect_on_standard_error(host: FleetHost) -> None:
    host.configure(storage_min_free_gb=7)
    done = host.windlass("cycle")
    assert done.json["is_leader"] is True
    assert "fleets.default.storage_min_free_gb (from windlass.toml) has no effect with provider local" in done.err


async def test_cycles_spawn_and_drain_workers_and_can_be_replayed(host: FleetHost) -> None:
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
    assert host.live_processes() == []
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
        (("--set", "max_worker=1"), "'max_worker' is not a fleet setting: did you mean max_workers?"),
        (("--with", "nosuch.toml"), "configuration file nosuch.toml not found. Check --with."),
    ):
        refused = host.windlass("replay", number, *wrong)
        assert refused.code == 2
        assert sentence in refused.err


async def test_status_watch_draws_until_ctrl_c(host: FleetHost) -> None:
    await host.enqueue(None)
    host.windlass("cycle")
    terminal, child_end = pty.openpty()
    os.set_blocking(terminal, False)
    watch = host.windlass.with_env(COLUMNS="200", LINES="50").start(
        "status", "--watch", stdout=child_end, stderr=child_end
    )
    with watch as process:
        drawn = b""

        def is_drawn() -> bool:
            nonlocal drawn
            with suppress(BlockingIOError):
                drawn += os.read(terminal, 65_536)  # may end within a character
            return b"spawn 1: 1 queued" in drawn and b"running tasks" in drawn

        try:
            await until(is_drawn, "the status")
        finally:
            process.send_signal(signal.SIGINT)
        await until(lambda: is_drawn() and process.poll() is not None, "the end")
    assert process.returncode == 130, drawn
    os.close(terminal)
    os.close(child_end)


async def test_status_watch_with_json_prints_one_line_per_refresh(host: FleetHost) -> None:
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
        pytest.param(("spawn", "missing"), "fleet missing not found", id="spawn for an unknown fleet"),
        pytest.param(("restart", "missing"), "fleet missing not found", id="restart of an unknown fleet"),
        pytest.param(("pause", "--fleet", "missing"), "fleet missing not found", id="pause of an unknown fleet"),
        pytest.param(("resume", "--fleet", "missing"), "fleet missing not found", id="resume of an unknown fleet"),
        pytest.param(("terminate", "--fleet", "missing"), "fleet missing not found", id="terminate an unknown fleet"),
        pytest.param(
            ("workers", "list", "--fleet", "missing"), "fleet missing not found", id="list of an unknown fleet"
        ),
        pytest.param(("terminate", "missing"), "live worker or fleet missing not found", id="an unknown worker"),
        pytest.param(("terminate",), "nothing to terminate", id="nothing to terminate"),
        pytest.param(("pause",), "pass exactly one of", id="nothing to pause"),
        pytest.param(("pause", "--all", "--fleet", "x"), "pass exactly one of", id="two things to pause"),
        pytest.param(("workers", "show", "missing"), "worker missing not found", id="show an unknown worker"),
        pytest.param(("workers", "logs", "missing"), "worker missing not found", id="logs of an unknown worker"),
        pytest.param(
            ("explain", "missing"), "no task, worker or fleet has the name missing", id="explain an unknown name"
        ),
        pytest.param(("explain", "4711"), "task 4711 not found", id="explain an unknown task"),
        pytest.param(("replay", "4711"), "cycle 4711 not found", id="an unknown cycle"),
        pytest.param(("replay", "zero"), "must be a whole number", id="a cycle id that is not a number"),
        pytest.param(("replay", "9" * 20), "must be at most 9223372036854775807", id="a cycle id out of range"),
        pytest.param(("explain", "9" * 20), "task 99999999999999999999 not found", id="a task id out of range"),
        pytest.param(("spawn", "--count", "99999999999"), "must be at most 100000", id="spawn too many"),
        pytest.param(("restart", "--slot", "2147483648"), "must be at most 100000", id="a slot out of range"),
        pytest.param(("up",), "no fleet is configured", id="up without a fleet"),
        pytest.param(("cycle",), "no fleet is configured", id="cycle without a fleet"),
        pytest.param(
            ("up", "-q", "q"), "set its handler or exec, or give --handler or --exec.", id="a fleet without a handler"
        ),
        pytest.param(
            ("up", "-q", "q", "--min", "9", "--handler", "a:b"), "min must not exceed max", id="min above max"
        ),
        pytest.param(("spawn", "a", "--fleet", "b"), "are different fleets", id="two different fleets"),
        pytest.param(("cycle",), "add a table [fleets.NAME] with queues and a handler", id="how to configure a fleet"),
        pytest.param(
            ("up", "-q", "q", "--handler", "app.work"),
            "fleets.default.handler (from command line)",
            id="a handler without a function",
        ),
        pytest.param(
            ("up", "-q", "q", "--handler", "a:b", "--chdir", "/nowhere"),
            "fleets.default.chdir (from command line) is /nowhere: folder not found.",
            id="no such folder",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(tmp_path: Path, dsn: str, arguments: tuple[str, ...], sentence: str) -> None:
    done: Completed = CommandLine(tmp_path, {"DATABASE_URL": dsn})(*arguments)
    assert (done.code, done.out) == (2, ""), done
    assert sentence in done.err
    assert done.err.count("\n") == 1


async def test_cycle_command_is_standby_while_another_orchestrator_leads(host: FleetHost) -> None:
    host.configure(poll_interval_s=60, lease_s=60)  # so that a slow machine does not lose the lease
    up = host.up()
    await until(host.store.fleets, "the first cycle")
    before = await host.store.now()
    done = host.windlass("cycle").json
    assert done["is_leader"] is False
    assert datetime.fromisoformat(done["timestamp"]) >= before
    assert done["actions"]["workers_spawned"] == 0
    assert done["status"]["queued_tasks"] is None, "a standby observes nothing"
    assert re.fullmatch(r"standby: pid \d+ on host .+ leads for \d+ s more", done["decision"]), done
    await host.stop(up)
