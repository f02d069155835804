"""`windlass up` with local workers as processes: scaling, crashes, leader change, shutdown and failing handlers."""

import json
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from support.local_fleet import APP, QUEUE, FleetHost, open_fleet_host
from support.worker_harness import is_alive, until
from windlass.model.task import TaskStatus
from windlass.model.worker import SAME_SIGNAL_S
from windlass.store.export_sql import ROLES
from windlass.store.migration import apply_roles


@pytest.fixture
async def host(tmp_path: Path, dsn: str) -> AsyncIterator[FleetHost]:
    async with open_fleet_host(tmp_path, dsn) as host:
        yield host


async def test_burst_spawns_workers_that_drain_when_idle(host: FleetHost) -> None:
    tasks = await host.enqueue(*[None] * 10)
    host.configure(handler=None, queues=None)
    up = host.up("--queue", QUEUE, "--handler", "app:work", "--max", "2")
    await host.until_status(TaskStatus.COMPLETE, *tasks)
    await host.until_workers(0)
    assert "\nno workers\n" in host.windlass("status").out, (
        "workers are spawned by `up`, so there is no hint to start one"
    )
    workers = await host.store.workers(include_terminated=True)
    assert {worker.slot for worker in workers} == {0, 1}
    assert {worker.code for worker in workers} == {"IDLE"}
    await host.stop(up)
    assert "spawn 2: 10 queued" in host.log()


@pytest.mark.parametrize("user", ["orchestrator", "owner"])
async def test_fleet_runs_without_the_owners_rights(tmp_path: Path, dsn: str, embedded_server: Any, user: str) -> None:
    """Runs as a user with the role windlass_orchestrator alone, and as the owner, who takes that role."""
    await apply_roles(dsn, ROLES)
    if user == "orchestrator":
        embedded_server.execute("create role conductor_up login in role windlass_orchestrator")
        dsn = dsn.replace(f"{urlsplit(dsn).username}@", "conductor_up@")
    try:
        async with open_fleet_host(tmp_path, dsn) as host:
            tasks = await host.enqueue(*[None] * 4)
            up = host.up()
            await host.until_status(TaskStatus.COMPLETE, *tasks)
            await host.until_workers(0)
            assert {worker.code for worker in await host.store.workers(include_terminated=True)} == {"IDLE"}
            await host.stop(up)
            assert "denied" not in host.log()
    finally:
        if user == "orchestrator":
            embedded_server.execute("drop role conductor_up")


async def test_killed_worker_is_replaced_and_its_task_is_requeued(host: FleetHost) -> None:
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
    explanation = host.windlass("explain", killed.id).out
    assert f"Worker {killed.id} is terminated (MACHINE_GONE): " in explanation
    assert "was killed by SIGKILL" in explanation
    assert "last log line: {" not in explanation
    shown = host.windlass("workers", "show", killed.id, "--json").json["worker"]["metadata"]["diagnostics"]
    assert (shown["exit"], shown["code"]) == ({"signal": "SIGKILL"}, "MACHINE_GONE")
    lines = host.windlass("workers", "show", killed.id).out.splitlines()
    assert "ended: killed by SIGKILL" in lines
    task_explanation = host.windlass("explain", task).out
    assert "is complete after 2 attempts" in task_explanation
    assert "TASK_REQUEUED" in task_explanation
    assert f"running task {task}" in host.windlass("workers", "logs", killed.id).out
    lines = host.windlass("workers", "logs", killed.id, "--json").out.splitlines()
    assert f"running task {task}" in [json.loads(line)["text"] for line in lines]
    await host.stop(up)


async def test_restart_after_sigkill_adopts_running_workers(host: FleetHost) -> None:
    host.configure(min_workers=2)
    first = host.up()
    before = {worker.id: worker.pid for worker in await host.until_workers(2)}
    first.kill()
    first.wait()
    # The workers continue without an orchestrator.
    await host.until_status(TaskStatus.COMPLETE, *await host.enqueue(None))
    last = await host.last_cycle()
    second = host.up()

    async def has_planned_again() -> bool:
        cycle = await host.last_cycle()
        return cycle.term > last.term or (cycle.repeated_at or cycle.started_at) > (last.repeated_at or last.started_at)

    await until(has_planned_again, "a cycle of the second orchestrator")
    # Queued tasks would cause a spawn in the first cycle, if at all.
    await host.until_status(TaskStatus.COMPLETE, *await host.enqueue(None, None))
    assert {worker.id: worker.pid for worker in await host.until_workers(2)} == before
    assert sorted(host.worker_processes()) == sorted(pid for pid in before.values() if pid is not None)
    await host.stop(second)
    assert await host.store.workers() == []


async def test_leave_workers_option_keeps_workers_running(host: FleetHost) -> None:
    host.configure(min_workers=1)
    up = host.up("--leave-workers")
    (worker,) = await host.until_workers(1)
    up.send_signal(signal.SIGTERM)
    await until(lambda: up.poll() is not None, "end of up")
    assert worker.pid is not None
    assert is_alive(worker.pid)


async def test_standby_takes_over_after_the_leader_is_killed(host: FleetHost) -> None:
    first = host.up()
    await until(host.store.fleets, "a first leader")
    second = host.up()
    await until(lambda: "skip cycle" in host.log(), f"a standby cycle\n{host.log()}")
    term = (await host.last_cycle()).term
    first.kill()
    first.wait()
    await host.until_status(TaskStatus.COMPLETE, *await host.enqueue(None))
    assert (await host.last_cycle()).term > term
    await host.stop(second)


async def test_stopped_standby_leaves_workers_running(host: FleetHost) -> None:
    host.configure(min_workers=2)
    first = host.up()
    before = await host.until_workers(2)
    second = host.up()
    await until(lambda: "skip cycle" in host.log(), f"a standby cycle\n{host.log()}")
    second.send_signal(signal.SIGTERM)
    await until(lambda: second.poll() is not None, f"end of the standby\n{host.log()}")
    assert second.returncode == 0
    last = await host.last_cycle()

    async def has_new_cycle() -> bool:
        cycle = await host.last_cycle()
        return cycle.id > last.id or cycle.repeats > last.repeats + 2

    await until(has_new_cycle, "another cycle of the leader")
    assert [(w.id, w.pid) for w in await host.until_workers(2)] == [(w.id, w.pid) for w in before]
    host.ups.remove(second)
    await host.stop(first)


async def test_second_sigterm_ends_up_and_leaves_busy_workers(host: FleetHost) -> None:
    host.configure(stop_timeout_s=600)
    (task,) = await host.enqueue({"go": str(host.folder / "never")})
    up = host.up()
    running = await host.until_status(TaskStatus.RUNNING, task)
    up.send_signal(signal.SIGTERM)
    signalled_at = time.monotonic()
    await host.until_decision("shutting down: 1 left")
    assert "stop again (Ctrl-C) to end now and leave the workers to the next start" in host.log()
    # An earlier signal would count as the same one.
    await until(lambda: time.monotonic() > signalled_at + 2 * SAME_SIGNAL_S, "enough time between the signals")
    up.send_signal(signal.SIGTERM)
    await until(lambda: up.poll() is not None, f"end of up\n{host.log()}", 10.0)
    assert up.returncode == 0
    worker = await host.store.worker(running.worker_id or "")
    assert worker is not None
    assert worker.pid is not None
    assert is_alive(worker.pid)


async def test_two_immediate_sigterms_count_as_one_and_tasks_finish(host: FleetHost) -> None:
    """`timeout` sends two signals: one to the program and one to its process group."""
    host.configure()
    go = host.folder / "go"
    (task,) = await host.enqueue({"go": str(go)})
    up = host.up()
    await host.until_status(TaskStatus.RUNNING, task)
    for _ in range(2):
        up.send_signal(signal.SIGTERM)
    await host.until_decision("shutting down: 1 left")
    go.touch()
    await host.until_status(TaskStatus.COMPLETE, task)
    await until(lambda: up.poll() is not None, f"end of up\n{host.log()}", 30.0)
    assert await host.store.workers() == []


async def test_unimportable_handler_fails_its_slot_until_restart(host: FleetHost) -> None:
    host.configure(max_workers=1, max_restarts=1, handler="missing:work")
    up = await host.up_without_its_handler_file()
    (task,) = await host.enqueue(None)

    async def failed_slots() -> tuple[int, ...]:
        return next((fleet.failed_slots for fleet in await host.store.fleets()), ())

    await until(failed_slots, f"a failed slot\n{host.log()}")
    explanation = host.windlass("explain", "default").out
    assert "Slot 0 has failed too often and stays empty until `windlass restart default`." in explanation
    failed = [worker for worker in await host.store.workers(include_terminated=True) if worker.code]
    assert "cannot import handler missing:work" in host.windlass("explain", failed[-1].id).out
    assert "failed slots 0" in host.windlass("status").out
    assert "Slot 0 has failed" in host.windlass("explain", task).out
    (host.folder / "missing.py").write_text(APP)
    assert host.windlass("restart", "default", "--json").json["slots_freed"] == 1
    await host.until_status(TaskStatus.COMPLETE, task)
    await host.stop(up)


async def test_broken_handler_causes_a_hold_that_restart_lifts(host: FleetHost) -> None:
    host.configure(handler="missing:work", max_restarts=2, min_spawns_for_rate=2)
    up = await host.up_without_its_handler_file()
    (task,) = await host.enqueue(None)

    async def hold() -> str | None:
        return next((fleet.hold.code for fleet in await host.store.fleets() if fleet.hold), None)

    await until(hold, f"a hold\n{host.log()}", 150.0)
    assert await hold() == "FAILURE_RATE"
    workers = await host.store.workers(include_terminated=True)
    assert [worker.slot for worker in workers] == [0, 0, 0, 1, 1], "slot 0 fails first, then the fleet is held"
    why = "last log line: windlass: cannot import handler missing:work: No module named 'missing'"
    for command in (("status",), ("explain", "default"), ("explain", task)):
        assert why in host.windlass(*command).out, "every view of the hold shows its cause"

    async def is_shown_once() -> bool:
        return host.windlass("status").out.count(why) == 1

    await until(is_shown_once, "the cause once in the status")
    assert "After fixing the cause: `windlass restart default`" in host.windlass("explain", "default").out
    logged = [json.loads(line) for line in host.log().splitlines()]
    failures = [line for line in logged if line["event"] == "fail worker"]
    assert {line["level"] for line in failures} == {"warning"}
    assert why in failures[0]["reason"]
    assert failures[0]["worker"].startswith("default-")
    (host.folder / "missing.py").write_text(APP)
    host.windlass("restart", "default")
    await host.until_status(TaskStatus.COMPLETE, task)
    await host.stop(up)


async def test_fleet_without_orchestrator_is_reported_as_such(host: FleetHost) -> None:
    host.configure(min_workers=1)
    up = host.up()
    await host.until_workers(1)
    assert "no orchestrator" not in host.windlass("status").out
    assert host.windlass("status", "--json").json["fleets"][0]["without_orchestrator_s"] is None
    await host.stop(up)
    *lines, last = [json.loads(line) for line in host.log().splitlines()]
    started = next(line for line in lines if line["event"] == "started orchestrator")
    assert (started["fleets"], last["event"]) == (["default"], "stopped orchestrator")
    assert started["database"].startswith("postgresql://")
    (task,) = await host.enqueue(None)
    for command in (("status",), ("explain", "default"), ("explain", task)):
        out = host.windlass(*command).out
        assert "no cycle for " in out
        assert "; start `windlass up`" in out
        assert "paused" not in out
