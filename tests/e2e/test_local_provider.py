"""Local workers as real processes: start, crash and logs."""

import asyncio
import json
import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.local_workers import (
    LocalWorkers,
    exited,
    pid_of,
    read_if_exists,
    request_named,
)
from support.stores import PostgresStores
from support.worker_harness import is_alive, until
from windlass.model.config import Config
from windlass.model.errors import BadInput, Refused
from windlass.model.machine import MachineExit
from windlass.model.task import TaskStatus, new_task
from windlass.model.worker import WorkerStatus
from windlass.providers.local import LocalProvider
from windlass.providers.local.logs import MAX_KEPT_LOGS, MAX_LOG_BYTES
from windlass.providers.local.processes import ProcFs
from windlass.providers.local.provider import children
from windlass.wiring import stores

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")


@pytest.fixture
async def workers(tmp_path: Path) -> AsyncIterator[LocalWorkers]:
    made = LocalWorkers(tmp_path)
    yield made
    await made.delete_all()


async def test_worker_gets_the_settings_of_its_fleet(workers: LocalWorkers) -> None:
    folder = workers.folder / "work"
    folder.mkdir()
    provider = workers.provider(
        queues=("renders", "thumbs"), concurrency=3, chdir=folder, heartbeat_timeout_s=7.5, env={"COLOUR": "blue"}
    )
    await provider.create(request_named("crowd-0-aa"))
    up = await workers.read_file("up")
    expected = "--queue renders --queue thumbs --handler some_handlers:where"
    expected += f" --chdir {folder} --concurrency 3 --heartbeat-interval 0.2 --lease 7.5 --config /dev/null"
    assert " ".join(up["argv"]) == expected
    assert up["env"]["COLOUR"] == "blue"
    assert (up["env"]["WINDLASS_WORKER_ID"], up["env"]["WINDLASS_FLEET"]) == ("crowd-0-aa", "crowd")
    assert up["env"]["WINDLASS_WORKER__DRAIN_TIMEOUT_S"] == "30"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"exec": "convert - out.png", "handler": None, "env": {"PATH": "/"}}, "--exec convert - out.png"),
        ({"is_inline": True}, "--inline"),
    ],
    ids=["a command", "an inline handler"],
)
async def test_worker_runs_the_configured_program(
    workers: LocalWorkers, settings: dict[str, Any], expected: str
) -> None:
    command = workers.folder / "convert"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    settings = {**settings, "env": {"PATH": f"{workers.folder}:{os.environ['PATH']}"}}
    await workers.provider(**settings).create(request_named("crowd-0-aa"))
    assert expected in " ".join((await workers.read_file("up"))["argv"])


async def test_worker_leads_its_own_session(workers: LocalWorkers) -> None:
    pid = pid_of(await workers.provider().create(request_named("crowd-0-aa")))
    assert os.getsid(pid) == os.getpgid(pid) == pid


async def test_worker_environment_has_settings_but_no_secrets(
    workers: LocalWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RUNPOD_API_KEY", "WINDLASS_RUNPOD_API_KEY", "SUPABASE_SERVICE_ROLE_KEY", "MODEL_DIR"):
        monkeypatch.setenv(name, "ours")
    monkeypatch.setenv("WINDLASS_WORKER__TIMEOUT_S", "1")
    provider = workers._add(
        LocalProvider(
            "crowd",
            workers.config(env={"SUPABASE_SERVICE_ROLE_KEY": "theirs"}),
            identity=workers.identity,
            state_dir=workers.state_dir,
            settings={"WINDLASS_WORKER__TIMEOUT_S": "7"},
            withheld=["RUNPOD_API_KEY", "WINDLASS_RUNPOD_API_KEY", "SUPABASE_SERVICE_ROLE_KEY"],
            program=["stand_in"],
        )
    )
    await provider.create(request_named("crowd-0-aa"))
    env = (await workers.read_file("up"))["env"]
    assert (env["MODEL_DIR"], env["WINDLASS_WORKER__TIMEOUT_S"]) == ("ours", "7")
    assert "RUNPOD_API_KEY" not in env
    assert "WINDLASS_RUNPOD_API_KEY" not in env
    assert env["SUPABASE_SERVICE_ROLE_KEY"] == "theirs", "what a fleet's env says is meant for its workers"


async def test_process_of_another_host_is_not_touched(workers: LocalWorkers) -> None:
    """An orchestrator on the other host started it. The same pid here is a different process."""
    provider = workers.provider()
    machine = await provider.create(request_named("crowd-0-aa"))
    host, _, process = machine.id.partition("/")
    assert provider.traits.host == host
    await provider.delete(replace(machine, id=f"other-{host}/{process}"))
    assert is_alive(pid_of(machine))


async def test_command_line_contains_no_password(workers: LocalWorkers) -> None:
    url = "postgresql://user:s3cret@db.example/tasks"
    provider = workers._add(
        LocalProvider(
            "crowd",
            workers.config(),
            identity=workers.identity,
            state_dir=workers.state_dir,
            database_url=url,
            program=["stand_in"],
        )
    )
    machine = await provider.create(request_named("crowd-0-aa"))
    assert (await workers.read_file("up"))["env"]["WINDLASS_WORKER_DATABASE_URL"] == url
    assert "s3cret" not in " ".join(psutil.Process(pid_of(machine)).cmdline())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chdir": Path("/no/such/folder")}, "folder /no/such/folder not found. Check chdir of fleet crowd"),
        ({"chdir": Path("/etc/hostname")}, "folder /etc/hostname not found"),
        ({"handler": None, "exec": "no-such-command --fast"}, "command 'no-such-command' not found"),
        ({"handler": None, "exec": "./not-here"}, "command './not-here' not found"),
        ({"handler": None, "exec": "sh 'unfinished"}, "(No closing quotation)"),
        ({"handler": None}, "neither handler nor exec"),
        ({"env": {"A=B": "1"}}, "Check env"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_impossible_start_is_refused(workers: LocalWorkers, settings: dict[str, Any], message: str) -> None:
    provider = workers.provider(**settings)
    with pytest.raises(Refused) as refusal:
        await provider.create(request_named("crowd-0-aa"))
    assert str(refusal.value).startswith("creating worker crowd-0-aa: ")
    assert message in str(refusal.value)
    assert await provider.list_machines() == ()
    assert not list(workers.state_dir.rglob("*.log"))


async def test_create_does_not_block_the_event_loop(workers: LocalWorkers) -> None:
    has_turned = threading.Event()

    class WaitingTable(ProcFs):
        def pids(self) -> list[int]:
            assert has_turned.wait(10), "the event loop was blocked"
            return super().pids()

    provider = workers.provider()
    provider._table = WaitingTable()
    asyncio.get_running_loop().call_soon(has_turned.set)
    await provider.create(request_named("crowd-0-aa"))


COMMAND = (
    """import json, os; print(json.dumps([os.getcwd(), *map(os.environ.get, ["COLOUR", "WINDLASS_WORKER_ID"])]))"""
)


@pytest.mark.parametrize(
    "runs",
    [
        {"handler": "some_handlers:where"},
        {"handler": "some_handlers:where_inline", "is_inline": True},
        {"handler": None, "exec": shlex.join([sys.executable, "-c", COMMAND])},
    ],
    ids=["a handler", "an inline handler", "a command"],
)
async def test_spawned_worker_runs_tasks_under_its_given_id(
    workers: LocalWorkers, dsn: str, runs: dict[str, Any]
) -> None:
    provider = workers.real_provider(dsn, env={"COLOUR": "green"}, **runs)
    async with PostgresStores(dsn) as store:
        task_id = await store.enqueue(new_task("default", None))
        machine = await provider.create(request_named("crowd-0-aa"))
        task = await until(lambda: _complete(store, task_id), "the task is complete")
        result = json.loads(task.result)
        # The variable is only for the worker, not for its handler.
        assert list(result.values() if "exec" not in runs else result) == [str(workers.folder), "green", None]
        (row,) = await store.workers()
        assert (row.id, row.fleet, row.pid, row.lease_s) == ("crowd-0-aa", "crowd", pid_of(machine), 30.0)
        await provider.delete(machine)
        # After SIGTERM the worker deregistered.
        (row,) = await store.workers(include_terminated=True)
        assert row.status is WorkerStatus.TERMINATED
        assert not is_alive(pid_of(machine))


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a GPU here")
async def test_gpu_worker_claims_nothing_on_a_host_without_gpu(workers: LocalWorkers, dsn: str) -> None:
    provider = workers.real_provider(dsn, has_gpu=True)
    async with PostgresStores(dsn) as store:
        task_id = await store.enqueue(new_task("default", None))
        machine = await provider.create(request_named("crowd-0-aa"))

        async def says_so() -> bool:
            return any(worker.vram_total_mb == 0 for worker in await store.workers())

        await until(says_so, "its heartbeat says that there is no GPU")
        assert "stop claiming" in workers.log("crowd-0-aa")
        await provider.delete(machine)
        task = await store.task(task_id)
        assert task is not None
        assert (task.status, task.attempts) == (TaskStatus.QUEUED, 0)


async def test_worker_uses_the_embedded_database_of_its_orchestrator(
    workers: LocalWorkers, embedded_server: Any
) -> None:
    data_dir = embedded_server.socket_dir.parent
    provider = workers._add(
        LocalProvider(
            "crowd",
            workers.config(queues=[workers.identity]),
            identity=workers.identity,
            state_dir=workers.state_dir,
            data_dir=data_dir,
        )
    )
    async with stores.store(Config(data_dir=data_dir)) as store:
        task_id = await store.enqueue(new_task(workers.identity, None))
        machine = await provider.create(request_named("crowd-0-aa"))
        await until(lambda: _complete(store, task_id), "the task is complete")
        await provider.delete(machine)


async def test_handler_that_exits_at_import_is_reported(workers: LocalWorkers, dsn: str) -> None:
    provider = workers.real_provider(dsn, handler="leaves_at_import:handler")
    await provider.create(request_named("crowd-0-aa"))
    found = await exited(provider, "crowd-0-aa")
    says = "windlass: cannot import handler leaves_at_import:handler: SystemExit: no licence for this model"
    assert (found.note or "").startswith(f"its process exited with code 2; last log line: {says}")


async def test_delete_ends_the_handler_and_its_children(workers: LocalWorkers, dsn: str) -> None:
    provider = workers.real_provider(dsn, handler="some_handlers:long", stop_timeout_s=60)
    async with PostgresStores(dsn) as store:
        task_id = await store.enqueue(new_task("default", str(workers.folder / "running")))
        machine = await provider.create(request_named("crowd-0-aa"))
        pids = await until(lambda: read_if_exists(workers.folder / "running"), "the task runs")
        await provider.delete(machine)
        assert not any(is_alive(int(pid)) for pid in [*pids.split(), pid_of(machine)])
        # The task was released at once, before its lease expired.
        task = await store.task(task_id)
        assert task is not None
        assert task.status is TaskStatus.QUEUED


async def test_processes_of_a_killed_worker_are_deleted(workers: LocalWorkers, dsn: str) -> None:
    provider = workers.real_provider(dsn, handler="some_handlers:long")
    async with PostgresStores(dsn) as store:
        await store.enqueue(new_task("default", str(workers.folder / "running")))
        machine = await provider.create(request_named("crowd-0-aa"))
        pids = await until(lambda: read_if_exists(workers.folder / "running"), "the task runs")
        os.kill(pid_of(machine), signal.SIGKILL)
        # The worker's process guard ends the handler, without an orchestrator.
        await until(lambda: not any(is_alive(int(pid)) for pid in pids.split()), "the handler is gone")
        found = await exited(provider, "crowd-0-aa")
        assert (found.note or "").startswith("its process was killed by SIGKILL (out of memory?)")


async def _complete(store: PostgresStores, task_id: int) -> Any:
    task = await store.task(task_id)
    return task if task is not None and task.status is TaskStatus.COMPLETE else None


@pytest.mark.parametrize(
    ("how", "note", "ended"),
    [
        ("exit", "its process exited with code 1; last log line: cannot go on: no model", MachineExit(code=1)),
        (
            "segfault",
            "its process was killed by SIGSEGV; last log line: Fatal Python error: Segmentation fault",
            MachineExit(signal="SIGSEGV"),
        ),
    ],
    ids=["exit", "segfault"],
)
async def test_crash_is_reported_with_its_reason(
    workers: LocalWorkers, how: str, note: str, ended: MachineExit
) -> None:
    provider = workers.provider(how)
    created = await provider.create(request_named("crowd-0-aa"))
    found = await exited(provider, "crowd-0-aa")
    assert (found.id, found.note, found.exit) == (created.id, note, ended)
    # Reaped: the process table has no entry for it.
    assert not psutil.pid_exists(pid_of(created))


async def test_crash_is_listed_until_the_machine_is_deleted(workers: LocalWorkers) -> None:
    provider = workers.provider("exit")
    await provider.create(request_named("crowd-0-aa"))
    found = await exited(provider, "crowd-0-aa")
    assert await provider.list_machines() == (found,)
    await provider.delete(found)
    assert await provider.list_machines() == ()


async def test_crash_is_listed_for_a_limited_time(workers: LocalWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    provider = workers.provider("exit")
    await provider.create(request_named("crowd-0-aa"))
    await exited(provider, "crowd-0-aa")
    monkeypatch.setattr("windlass.providers.local.provider.EXITED_LISTED_S", 0.0)
    assert await provider.list_machines() == ()


async def test_end_of_an_adopted_worker_is_reported(workers: LocalWorkers) -> None:
    machine = await workers.provider().create(request_named("crowd-0-aa"))
    await workers.read_file("up")
    adopter = workers.provider()
    assert [found.id for found in await adopter.list_machines()] == [machine.id]
    # The adopter did not start the process.
    child = children.pop(machine.id)
    child.kill()
    child.wait()
    found = await exited(adopter, "crowd-0-aa")
    assert found.exit is None
    assert found.note == "its process is gone; its exit code is known only to the orchestrator that started it"


async def test_log_size_is_bounded(workers: LocalWorkers) -> None:
    provider = workers.provider("chatter")
    await provider.create(request_named("crowd-0-aa"))
    log = provider._logs.path_of("crowd-0-aa")
    rotated = log.with_name(f"{log.name}.1")
    await until(lambda: rotated.exists() and rotated.stat().st_size, "the log is rotated once")
    (workers.folder / "quiet").touch()
    await workers.read_file("up")
    await until(lambda: log.stat().st_size <= MAX_LOG_BYTES, "the log is short again")
    assert rotated.stat().st_size <= MAX_LOG_BYTES
    assert sorted(path.name for path in log.parent.iterdir()) == [log.name, rotated.name]
    # The read spans both files.
    lines = [line async for line in provider._logs.read("crowd-0-aa", 1000)]
    assert len(lines) == 1000
    assert lines[-1] == "the last line"


async def test_log_can_be_followed_until_the_worker_ends(workers: LocalWorkers) -> None:
    provider = workers.provider("polite")
    machine = await provider.create(request_named("crowd-0-aa"))
    await workers.read_file("up")

    async def follow() -> list[str]:
        return [line async for line in provider._logs.read("crowd-0-aa", 100, follow=True)]

    following = asyncio.create_task(follow())
    await provider.delete(machine)
    assert (await asyncio.wait_for(following, 10))[-1] == "goodbye"


async def test_log_of_a_terminated_worker_can_be_read(workers: LocalWorkers) -> None:
    provider = workers.provider("exit")
    await provider.create(request_named("crowd-0-aa"))
    await exited(provider, "crowd-0-aa")
    assert [line async for line in workers.provider()._logs.read("crowd-0-aa", 1)] == ["cannot go on: no model"]


async def test_worker_without_a_log_is_unknown(workers: LocalWorkers) -> None:
    with pytest.raises(BadInput, match="no log of worker crowd-9-zz on this host"):
        [line async for line in workers.provider()._logs.read("crowd-9-zz", 100)]


async def test_old_logs_are_removed_unless_in_use(workers: LocalWorkers) -> None:
    provider = workers.provider()
    folder = workers.state_dir / "logs" / "crowd"
    folder.mkdir(parents=True)
    for number in range(MAX_KEPT_LOGS + 5):
        for name in (f"old-{number:03}.log", f"old-{number:03}.log.1"):
            (folder / name).write_text("old")
            os.utime(folder / name, (number + 1, number + 1))
    await provider.create(request_named("crowd-0-aa"))
    in_use = provider._logs.path_of("crowd-0-aa")
    os.utime(in_use, (0, 0))
    await provider.list_machines()
    left = sorted(path.name for path in folder.glob("*.log"))
    assert left == [in_use.name, *(f"old-{number:03}.log" for number in range(5, MAX_KEPT_LOGS + 5))]
    assert len(list(folder.iterdir())) == 2 * MAX_KEPT_LOGS + 1
