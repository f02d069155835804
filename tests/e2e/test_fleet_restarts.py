"""Restarts of local worker processes: killed workers, restart loops, failed slots, and what health monitors see."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import psutil
import pytest

from support.local_fleet import FleetHost, open_fleet_host
from support.worker_harness import until
from windlass.model.task import TaskStatus
from windlass.model.worker import Worker

# A worker process starts in a second or two. Six starts on a busy machine take longer.
LOOP_TIMEOUT_S = 150.0


@pytest.fixture
async def host(tmp_path: Path, dsn: str) -> AsyncIterator[FleetHost]:
    async with open_fleet_host(tmp_path, dsn) as host:
        yield host


# Status, restart count and error message by component.
Health = dict[str, tuple[str, int, str | None]]


@pytest.fixture
def health(host: FleetHost) -> Callable[[], Awaitable[Health]]:
    """Asks as a monitor does: GET /api/web/worker/status of a running `up --port 0`, with a token."""
    token = host.windlass("tokens", "create", "monitor", "--role", "viewer").out.strip()

    async def ask() -> Health:
        address = await until(lambda: re.search(r"^dashboard: (http://[^/]+)", host.log(), re.MULTILINE), "the address")
        async with httpx.AsyncClient(base_url=address.group(1), timeout=30) as monitor:
            answer = await monitor.get("/api/web/worker/status", headers={"Authorization": f"Bearer {token}"})
        rows = answer.raise_for_status().json()
        return {row["component"]: (row["status"], row["restart_count"], row["error_message"]) for row in rows}

    return ask


def kill(worker: Worker) -> None:
    assert worker.pid is not None
    psutil.Process(worker.pid).kill()


async def no_hold(host: FleetHost) -> bool:
    return all(fleet.hold is None for fleet in await host.store.fleets()) and "hold: " not in host.log()


async def test_killed_workers_with_tasks_done_are_replaced_at_once(host: FleetHost) -> None:
    """Kill min_spawns_for_rate workers with kill -9, while tasks are queued."""
    host.configure(min_workers=5, max_workers=5)
    up = host.up()
    killed = await host.until_workers(5)
    go = host.folder / "go"
    tasks = await host.enqueue(*[{"go": str(go)}] * 5)
    await host.until_status(TaskStatus.RUNNING, *tasks)
    go.touch()
    await host.until_status(TaskStatus.COMPLETE, *tasks)
    queued = await host.enqueue(*[{"go": str(host.folder / "later")}] * 20)
    for worker in killed:
        kill(worker)
    (host.folder / "later").touch()

    async def are_replaced() -> bool:
        workers = await host.until_workers(5)
        return not {worker.id for worker in workers} & {worker.id for worker in killed}

    await until(are_replaced, f"five new workers\n{host.log()}", LOOP_TIMEOUT_S)
    await host.until_status(TaskStatus.COMPLETE, *queued)
    assert await no_hold(host)
    await host.stop(up)


async def test_restart_loop_of_a_fleet_of_one_ends_as_failed(
    host: FleetHost, health: Callable[[], Awaitable[Health]]
) -> None:
    """Default limits, in a fleet that has just started: the sixth failure in five minutes fails the slot."""
    host.configure(min_workers=1, max_workers=1, handler="missing:work")
    up = await host.up_without_its_handler_file("--port", "0")
    answers: list[Health] = []

    async def is_failed() -> bool:
        answers.append(await health())
        return answers[-1].get("worker:work:0", ("", 0, None))[0] == "failed"

    await until(is_failed, f"a failed component\n{host.log()}", LOOP_TIMEOUT_S)
    _, restarts, why = answers[-1]["worker:work:0"]
    assert restarts == 6
    assert why is not None
    assert "6 workers failed in 5 min, last: " in why
    assert "cannot import handler missing:work" in why
    assert len(await host.store.workers(include_terminated=True)) == 6
    assert await no_hold(host)
    # A monitor that asks "all healthy?" may hear yes only before the first failure.
    seen = [{status for status, *_ in answer.values()} for answer in answers]
    first_failure = next(n for n, statuses in enumerate(seen) if statuses & {"crashed", "failed"})
    assert all(statuses - {"healthy"} for statuses in seen[first_failure:])
    await host.stop(up)


async def test_worker_of_a_fleet_of_one_killed_six_times_ends_as_failed(
    host: FleetHost, health: Callable[[], Awaitable[Health]]
) -> None:
    """Default limits. Each worker becomes active and is killed; the first has completed a task."""
    host.configure(min_workers=1, max_workers=1)
    up = host.up("--port", "0")
    (task,) = await host.enqueue(None)
    await host.until_status(TaskStatus.COMPLETE, task)
    for count in range(6):
        (worker,) = await host.until_workers(1)
        status, restarts, _ = (await health())["worker:work:0"]
        assert (status, restarts) == ("healthy", count)
        kill(worker)

        async def is_counted(killed: str = worker.id) -> bool:
            return killed not in {live.id for live in await host.store.workers()}

        await until(is_counted, f"kill {count} noticed\n{host.log()}", LOOP_TIMEOUT_S)
    status, restarts, why = (await health())["worker:work:0"]
    assert (status, restarts) == ("failed", 6)
    assert why is not None
    assert "6 workers failed in 5 min" in why
    assert await no_hold(host)

    host.windlass("restart", "default")
    await host.until_workers(1)
    status, restarts, why = (await health())["worker:work:0"]
    assert (status, restarts, why) == ("healthy", 0, None)
    await host.stop(up)


async def test_failed_slot_does_not_stop_the_replacement_of_others(
    host: FleetHost, health: Callable[[], Awaitable[Health]]
) -> None:
    host.configure(min_workers=3, max_workers=3, max_restarts=2)
    up = host.up("--port", "0")
    for restart in range(3):
        workers = await host.until_workers(3)
        assert await no_hold(host)
        kill(next(worker for worker in workers if worker.slot == 0))
        killed = {worker.id for worker in workers if worker.slot == 0}

        async def is_counted(killed: set[str] = killed) -> bool:
            return not killed & {worker.id for worker in await host.store.workers()}

        await until(is_counted, f"kill {restart} noticed\n{host.log()}")
    others = await host.until_workers(2)
    assert {worker.slot for worker in others} == {1, 2}
    found = await health()
    assert [(name, status, restarts) for name, (status, restarts, _) in found.items()] == [
        ("worker:work:0", "failed", 3), ("worker:work:1", "healthy", 0), ("worker:work:2", "healthy", 0),
    ]  # fmt: skip

    kill(next(worker for worker in others if worker.slot == 1))

    async def is_replaced() -> bool:
        slots = {worker.slot: worker.id for worker in await host.until_workers(2)}
        return set(slots) == {1, 2} and slots[1] not in {worker.id for worker in others}

    await until(is_replaced, f"a new worker in slot 1\n{host.log()}", LOOP_TIMEOUT_S)
    assert await no_hold(host)
    status, restarts, _ = (await health())["worker:work:1"]
    assert (status, restarts) == ("healthy", 1)
    await host.stop(up)


async def test_health_shows_missing_components_while_the_fleet_is_held(
    host: FleetHost, health: Callable[[], Awaitable[Health]]
) -> None:
    host.configure(handler="missing:work", min_workers=1, max_restarts=2, min_spawns_for_rate=2)
    up = await host.up_without_its_handler_file("--port", "0")

    async def is_held() -> bool:
        return any(fleet.hold is not None for fleet in await host.store.fleets())

    await until(is_held, f"a hold\n{host.log()}", LOOP_TIMEOUT_S)
    # A failed worker keeps its row until its process is gone.
    await until(lambda: not host.worker_processes(), "no process")
    await host.until_workers(0)
    found = await health()
    assert [(name, status, restarts) for name, (status, restarts, _) in found.items()] == [
        ("worker:work:0", "failed", 3), ("worker:work:1", "crashed", 2),
    ]  # fmt: skip
    why = found["worker:work:1"][2]
    assert why is not None
    # On a slow machine, some time after the first hold.
    assert re.match(r"hold: (failure rate 2 of 2 in 5 min|workers keep failing), last MACHINE_GONE \(", why), why
    await host.stop(up)
    async with host.store.database.connection("reading health") as connection:
        rows = await connection.fetch("select component, status from windlass.health")
    assert [tuple(row) for row in rows] == [("worker:work:0", "failed")], "a fleet that was shut down needs no worker"


async def test_health_is_not_empty_while_tasks_wait_for_a_fleet_without_workers(
    host: FleetHost, health: Callable[[], Awaitable[Health]]
) -> None:
    host.configure(min_workers=0)
    up = host.up("--port", "0")
    await until(lambda: "finish cycle" in host.log(), f"a cycle\n{host.log()}")
    assert await health() == {}
    assert host.windlass("pause", "--fleet", "default").code == 0
    await host.enqueue(1)
    assert await health() == {"worker:work:0": ("crashed", 0, "fleet is paused")}
    await host.stop(up)
