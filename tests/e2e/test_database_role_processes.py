"""Real processes, each as a database user with one role: `windlass up`, a database worker, a producer and a viewer."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from support.command_line import CommandLine
from support.local_fleet import FleetHost, open_fleet_host
from windlass.model.task import TaskStatus

USERS = {
    "up_user": "windlass_orchestrator",
    "worker_user": "windlass_worker",
    "producer_user": "windlass_producer",
    "viewer_user": "windlass_viewer",
}


@asynccontextmanager
async def sql_as(dsn: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()


@pytest.fixture
async def dsn_of(tmp_path: Path, dsn: str, embedded_server: Any) -> AsyncIterator[Callable[[str], str]]:
    """Addresses of users with one role each, made by `windlass db roles` and `create role`."""
    made = CommandLine(tmp_path, {"DATABASE_URL": dsn})("db", "roles")
    assert made.code == 0, made.err
    assert all(role in made.out for role in (*USERS.values(), "windlass_owner"))
    for user, role in USERS.items():
        embedded_server.execute(f"create role {user} login in role {role}")
    try:
        yield lambda user: dsn.replace(f"{urlsplit(dsn).username}@", f"{user}@")
    finally:
        for user in USERS:
            embedded_server.execute(f"drop role {user}")


async def test_each_program_runs_with_its_role_alone(tmp_path: Path, dsn: str, dsn_of: Callable[[str], str]) -> None:
    async with open_fleet_host(tmp_path, dsn_of("up_user")) as host:
        host.configure(min_workers=1)
        up = host.up()
        producer = CommandLine(tmp_path, {"DATABASE_URL": dsn_of("producer_user")})
        enqueued = producer("enqueue", "work", '{"n": 1}')
        assert enqueued.code == 0, enqueued.err
        task_id = int(enqueued.out)
        await host.until_status(TaskStatus.COMPLETE, task_id)
        shown = producer("tasks", "show", task_id)
        assert (shown.code, "complete" in shown.out) == (0, True), shown.err

        # A worker that a person started, next to those of the fleet.
        by_hand = CommandLine(tmp_path, {"DATABASE_URL": dsn_of("worker_user")})
        worker = by_hand.start("worker", "--queue", "hand", "--handler", "app:work")
        try:
            other = int(producer("enqueue", "hand", "null").out)
            done = await host.until_status(TaskStatus.COMPLETE, other)
            assert done.worker_id is not None
            by_hand_worker = await host.store.worker(done.worker_id)
            assert by_hand_worker is not None
            assert by_hand_worker.is_by_hand
        finally:
            worker.terminate()
            worker.wait(60)

        async with sql_as(dsn_of("viewer_user")) as sql:
            assert await sql.fetchval("select count(*) from windlass.worker_counts") > 0
            assert await sql.fetchval("select count(*) from windlass.orchestrator_status") > 0
        await check_operations(host)
        await host.stop(up)
        assert "denied" not in host.log()
        assert "run with owner rights" not in host.log()
    await check_users(dsn, dsn_of)


async def test_up_with_owner_rights_warns_once(tmp_path: Path, dsn: str) -> None:
    """Without `windlass db roles`, as the user that owns the schema."""
    async with open_fleet_host(tmp_path, dsn) as host:
        up = host.up()
        await host.until_decision("")
        await host.stop(up)
        (warning,) = (line for line in host.log().splitlines() if "run with owner rights" in line)
        assert f'"user": "{urlsplit(dsn).username}"' in warning
        assert "windlass db roles" in warning


async def check_operations(host: FleetHost) -> None:
    """What operators do with the command line, as the orchestrator's user."""
    for arguments in (
        ("status",),
        ("workers", "list"),
        ("tasks", "list"),
        ("tasks", "errors"),
        ("explain", "default"),
        ("cost",),
        ("pause", "--fleet", "default"),
        ("resume", "--fleet", "default"),
        ("tokens", "create", "ci", "--role", "viewer"),
        ("tokens", "list"),
        ("tokens", "revoke", "ci"),
        ("tokens", "sessions"),
        ("audit",),
    ):
        done = await asyncio.to_thread(host.windlass, *arguments)
        assert done.code == 0, (arguments, done.err)


async def check_users(dsn: str, dsn_of: Callable[[str], str]) -> None:
    """No program used more than its role, and only the owner can migrate."""
    async with sql_as(dsn) as sql:
        owned = await sql.fetchval(
            "select count(*) from pg_class where relowner = any ($1::text[]::regrole[]::oid[])", list(USERS)
        )
        assert owned == 0
    for user in USERS:
        async with sql_as(dsn_of(user)) as sql:
            for refused in (
                "select * from windlass.tasks",
                "alter table windlass.tasks add column x int",
                "create table windlass.mine ()",
                "set role windlass_owner",
            ):
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await sql.execute(refused)


@pytest.mark.parametrize(
    ("user", "arguments"),
    [
        ("worker_user", ("up",)),
        ("producer_user", ("up",)),
        ("viewer_user", ("up",)),
        ("worker_user", ("enqueue", "work", "1")),
        ("viewer_user", ("enqueue", "work", "1")),
        ("producer_user", ("tokens", "create", "mine", "--role", "admin")),
        ("worker_user", ("tokens", "create", "mine", "--role", "admin")),
        ("viewer_user", ("tokens", "link")),
        ("producer_user", ("pause", "--fleet", "default")),
        ("worker_user", ("workers", "list")),
        ("viewer_user", ("tasks", "list")),
        ("producer_user", ("worker", "--queue", "work", "--handler", "app:work")),
        ("up_user", ("db", "roles")),
    ],
)
async def test_command_of_another_role_is_refused_with_one_sentence(
    tmp_path: Path, dsn_of: Callable[[str], str], user: str, arguments: tuple[str, ...]
) -> None:
    host = FleetHost(tmp_path, dsn_of(user))
    done = await asyncio.to_thread(host.windlass, *arguments)
    assert done.code != 0
    assert "denied" in done.err or "cannot run" in done.err, done
    assert "Traceback" not in done.err
    assert len([line for line in done.err.splitlines() if line.startswith("windlass: ")]) == 1, done.err
