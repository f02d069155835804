"""Every command of docs/backup.md, executed in the order of the page on real servers, with tasks under way."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from support.postgres_servers import PORT, SystemPostgres, reachable_temp_dir, unprivileged_user
from support.stores import PostgresStores
from support.worker_harness import until
from windlass.model.task import TaskStatus, new_task
from windlass.store.embedded import EmbeddedPostgres
from windlass.store.migration import migrate
from windlass.wiring.stores import postgres_programs

PAGE = (Path(__file__).parents[2] / "docs" / "backup.md").read_text()
TIMEOUT_S = 120.0
ADOPT_TOML = """
[adopt.tasks]
columns = { status = "status" }
"""
ADOPTED_TABLE = """
create table public.tasks (id bigint generated always as identity primary key, status text not null);
insert into public.tasks (status) values ('Queued'), ('Queued');
"""
HANDLER = """
import time
from pathlib import Path

def work(task):
    while task.payload and not Path(task.payload["go"]).exists():
        time.sleep(0.01)
    return task.attempt
"""


def blocks(heading: str, language: str = "sh( server)?") -> list[str]:
    """The command blocks of a section."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [block[1] for block in re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)]


def test_page_has_the_commands_of_every_section() -> None:
    counts_of_blocks = {
        "Back up": 1,
        "Restore": 4,
        "Adopted tables": 2,
        "Move from the embedded database to a server": 1,
        "Failover to a standby": 3,
    }
    assert {heading: len(blocks(heading)) for heading in counts_of_blocks} == counts_of_blocks


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Path]:
    """The programs of the embedded PostgreSQL, in a folder that the server's user can enter."""
    with reachable_temp_dir() as folder:
        installation = postgres_programs().parent
        copy = folder / installation.parent.name / installation.name
        shutil.copytree(installation, copy, symlinks=True)
        # The programs find their libraries by a path relative to themselves.
        libraries = installation.parent.with_name(f"{installation.parent.name}.libs")
        if libraries.exists():
            shutil.copytree(libraries, folder / libraries.name)
        yield copy / "bin"


@contextmanager
def new_server(programs: Path) -> Iterator[SystemPostgres]:
    with reachable_temp_dir() as folder:
        postgres = SystemPostgres(programs, folder)
        postgres.start()
        try:
            yield postgres
        finally:
            postgres.stop(signal.SIGQUIT)


@pytest.fixture
def server(programs: Path) -> Iterator[SystemPostgres]:
    with new_server(programs) as postgres:
        yield postgres


@pytest.fixture
def other_server(programs: Path) -> Iterator[SystemPostgres]:
    """Without the roles of the first."""
    with new_server(programs) as postgres:
        yield postgres


async def create_database(server: SystemPostgres, name: str) -> str:
    connection = await asyncpg.connect(server.dsn)
    try:
        await connection.execute(f"create database {name} template template0")
    finally:
        await connection.close()
    return server.dsn.replace("/postgres?", f"/{name}?")


async def run_block(commands: str, folder: Path, programs: Path, *, user: str | None = None, **variables: str) -> str:
    environment = {
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.defpath}",
        "HOME": str(folder),
        "LC_ALL": "C.UTF-8",
        **variables,
    }
    process = await asyncio.create_subprocess_exec(
        "bash", "-euo", "pipefail", "-c", commands,
        cwd=folder, env=environment, user=user, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        stdin=asyncio.subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    async with asyncio.timeout(TIMEOUT_S):
        output, _ = await process.communicate()
    assert process.returncode == 0, f"{commands}\n{output.decode()}"
    return output.decode()


@asynccontextmanager
async def running(command: str, dsn: str, folder: Path, **variables: str) -> AsyncIterator[None]:
    """`windlass worker`, or another program with a handler."""
    (folder / "app.py").write_text(HANDLER)
    with (folder / f"{command.split(maxsplit=1)[0]}.log").open("ab") as log:
        process = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-m", "windlass", *command.split(), "--handler", "app:work"],
            cwd=folder, env={**os.environ, "DATABASE_URL": dsn, **variables}, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()


@asynccontextmanager
async def worker(dsn: str, folder: Path, **variables: str) -> AsyncIterator[None]:
    async with running("worker --queue q", dsn, folder, **variables):
        yield


async def counts(dsn: str) -> dict[str, int]:
    connection = await asyncpg.connect(dsn)
    try:
        rows = await connection.fetch("select status::text, count(*) from windlass.tasks group by 1")
        return {row[0]: row[1] for row in rows}
    finally:
        await connection.close()


async def execute(dsn: str, sql: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


async def fetch_value(dsn: str, query: str, *arguments: Any) -> Any:
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetchval(query, *arguments)
    finally:
        await connection.close()


async def test_backup_is_taken_while_tasks_run_and_restored(
    server: SystemPostgres, programs: Path, tmp_path: Path
) -> None:
    dsn = await create_database(server, "app")
    await migrate(dsn)
    async with PostgresStores(dsn) as store, worker(dsn, tmp_path):
        slow = await store.enqueue(new_task("q", {"go": str(tmp_path / "go")}))
        ids = [await store.enqueue(new_task("q")) for _ in range(20)]

        async def is_running() -> bool:
            task = await store.task(slow)
            return task is not None and task.status is TaskStatus.RUNNING

        await until(is_running, "a running task", TIMEOUT_S)
        (backup,) = blocks("Back up")
        await run_block(backup, tmp_path, programs, DATABASE_URL=dsn)
        (tmp_path / "go").touch()
    restored = await create_database(server, "restored")
    for commands in blocks("Restore"):
        printed = await run_block(commands, tmp_path, programs, RESTORED_URL=restored)
    assert "q" in printed
    assert sum((await counts(restored)).values()) == len(ids) + 1
    # The running task lost its worker with the old database; every task completes in the restored one.
    async with PostgresStores(restored) as store, worker(restored, tmp_path):
        await store.enqueue(new_task("q"))

        async def are_complete() -> bool:
            return (await counts(restored)).get("complete", 0) >= len(ids) + 1

        await until(are_complete, "all tasks of the backup", TIMEOUT_S)


async def test_adopted_table_and_roles_are_restored_on_another_server(
    server: SystemPostgres, other_server: SystemPostgres, programs: Path, tmp_path: Path
) -> None:
    dsn = await create_database(server, "app")
    (tmp_path / "windlass.toml").write_text(ADOPT_TOML)
    await execute(dsn, ADOPTED_TABLE)
    await run_block(
        "windlass db migrate; windlass db adopt tasks --apply --backfill; windlass db roles",
        tmp_path, programs, DATABASE_URL=dsn,
    )  # fmt: skip
    await execute(dsn, "create role shop login in role windlass_producer")
    (backup,) = blocks("Back up")
    await run_block(backup, tmp_path, programs, DATABASE_URL=dsn)
    await execute(dsn, "insert into public.tasks (status) values ('Queued')")
    dump_table, restore_table = blocks("Adopted tables")
    await run_block(dump_table, tmp_path, programs, DATABASE_URL=dsn)

    restored = await create_database(other_server, "restored")
    for commands in blocks("Restore"):
        await run_block(commands, tmp_path, programs, RESTORED_URL=restored)
    assert "rows and tasks agree" in await run_block(restore_table, tmp_path, programs, RESTORED_URL=restored)
    await execute(restored, "insert into public.tasks (status) values ('Queued')")
    assert await counts(restored) == {"queued": 4}
    public = (
        "select count(*) from information_schema.routine_privileges where grantee = 'PUBLIC' and routine_schema = $1"
    )
    for schema in ("windlass", "windlass_adopt"):
        assert await fetch_value(restored, public, schema) == await fetch_value(dsn, public, schema)


async def test_embedded_database_moves_to_a_server(
    server: SystemPostgres, programs: Path, tmp_path: Path, reachable_path: Path
) -> None:
    variables = {"WINDLASS_DATA_DIR": str(reachable_path / "state")}
    await run_block(
        "windlass db migrate; for n in 1 2 3; do windlass enqueue q null; done", tmp_path, programs, **variables
    )
    (tmp_path / "windlass.toml").write_text(ADOPT_TOML)
    with EmbeddedPostgres(reachable_path / "state") as embedded:
        await execute(embedded.dsn, ADOPTED_TABLE)
        await run_block("windlass db adopt tasks --apply --backfill", tmp_path, programs, **variables)
    target = await create_database(server, "moved")
    (commands,) = blocks("Move from the embedded database to a server")
    await run_block(commands, tmp_path, programs, SERVER_URL=target, **variables)
    assert await counts(target) == {"queued": 5}
    assert "rows and tasks agree" in await run_block("windlass doctor", tmp_path, programs, DATABASE_URL=target)
    await execute(target, "delete from public.tasks")
    async with worker(target, tmp_path):

        async def are_complete() -> bool:
            return await counts(target) == {"complete": 3, "failed": 2}

        await until(are_complete, "the moved tasks", TIMEOUT_S)


async def test_workers_and_control_plane_follow_a_failover_with_tasks_under_way(
    server: SystemPostgres, programs: Path, tmp_path: Path
) -> None:
    dsn = await create_database(server, "app")
    await migrate(dsn)
    user = unprivileged_user()
    with reachable_temp_dir() as folder:
        if user is not None:
            shutil.chown(folder, user)
        variables = {
            "PRIMARY_URL": server.dsn,
            "STANDBY_DATA": str(folder / "data"),
            "STANDBY_OPTIONS": f"-c unix_socket_directories={folder} -c listen_addresses= -c port={PORT}",
            "STANDBY_URL": f"postgresql://postgres@/app?host={folder}&port={PORT}",
        }
        create, start, promote = blocks("Failover to a standby")
        await run_block(create, folder, programs, user=user, **variables)
        await run_block(start, folder, programs, user=user, **variables)
        try:
            primary_dir = re.search(r"host=([^&]+)", dsn)
            assert primary_dir is not None
            both = f"postgresql://postgres@/app?host={primary_dir[1]},{folder}&port={PORT},{PORT}&target_session_attrs=read-write"
            data = str(tmp_path / "data")
            async with worker(both, tmp_path), running("up --queue r --max 1", both, tmp_path, WINDLASS_DATA_DIR=data):
                async with PostgresStores(dsn) as store:
                    slow = await store.enqueue(new_task("q", {"go": str(tmp_path / "go")}))
                    for _ in range(10):
                        await store.enqueue(new_task("q"))

                    async def is_running() -> bool:
                        task = await store.task(slow)
                        return task is not None and task.status is TaskStatus.RUNNING

                    await until(is_running, "a running task", TIMEOUT_S)

                    # `up` leads, and has nothing to do so far.
                    cycles = "select exists (select from windlass.cycles where fleet = 'default')"

                    async def is_replicated() -> bool:
                        has_cycles = await fetch_value(variables["STANDBY_URL"], cycles)
                        return has_cycles and sum((await counts(variables["STANDBY_URL"])).values()) == 11

                    await until(is_replicated, "replication", TIMEOUT_S)
                server.stop(signal.SIGQUIT)
                await run_block(promote, folder, programs, user=user, **variables)
                (tmp_path / "go").touch()
                # Only a worker that `up` spawns now serves this queue.
                await execute(variables["STANDBY_URL"], "select windlass.enqueue('r')")

                async def are_complete() -> bool:
                    return await counts(variables["STANDBY_URL"]) == {"complete": 12}

                logs = "\n".join((tmp_path / name).read_text()[-3000:] for name in ("worker.log", "up.log"))
                await until(are_complete, f"all tasks\n{logs}", TIMEOUT_S)
            attempts = "select attempts from windlass.tasks where id = $1"
            assert await fetch_value(variables["STANDBY_URL"], attempts, slow) == 1, (
                "the running task finished on the worker that had it"
            )
        finally:
            stop = 'pg_ctl --pgdata="$STANDBY_DATA" --mode=immediate stop'
            await run_block(stop, folder, programs, user=user, **variables)
            server.start()
