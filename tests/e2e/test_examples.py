"""The examples that bring a configuration of their own: each runs with `windlass up`, as its README says."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from support.command_line import CommandLine
from support.postgres_servers import do_without

EXAMPLES = Path(__file__).parents[2] / "examples"
DEPLOY = EXAMPLES.parent / "deploy"
LIMIT_S = 90.0


@contextmanager
def running(example: str, folder: Path, dsn: str) -> Iterator[CommandLine]:
    copy = folder / example
    shutil.copytree(EXAMPLES / example, copy)
    with running_in(copy, folder / "up.log", dsn) as windlass:
        yield windlass


@contextmanager
def running_in(project: Path, log_file: Path, dsn: str, *options: str) -> Iterator[CommandLine]:
    windlass = CommandLine(project, {"DATABASE_URL": dsn})
    with log_file.open("w") as log:
        up = windlass.start("up", *options, stdout=log, stderr=log)
        try:
            yield windlass
        finally:
            up.send_signal(signal.SIGTERM)
            up.wait(LIMIT_S)


def results(dsn: str, count: int, log: Path) -> list[Any]:
    """The results of all tasks, once all of them are finished."""
    deadline = time.monotonic() + LIMIT_S
    with psycopg.connect(dsn, autocommit=True) as sql:
        while True:
            rows = sql.execute("select status, result, error from windlass.tasks order by id").fetchall()
            if len(rows) == count and all(status in ("complete", "failed") for status, *_ in rows):
                assert all(status == "complete" for status, *_ in rows), rows
                return [result for _, result, _ in rows]
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)


def test_warm_model_is_loaded_once_per_worker(tmp_path: Path, dsn: str) -> None:
    with running("warm-model", tmp_path, dsn) as windlass:
        for number in range(6):
            assert windlass("enqueue", "images", json.dumps({"prompt": f"harbour {number}"})).code == 0
        found = results(dsn, 6, tmp_path / "up.log")
        assert len({result["loaded_by"] for result in found}) <= 2, "max_workers, not tasks"
        pictures = {(windlass.folder / result["file"]).read_bytes() for result in found}
    assert len(pictures) == 6
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)


def test_ffmpeg_transcodes_a_batch(tmp_path: Path, dsn: str) -> None:
    if shutil.which("ffmpeg") is None:
        do_without("ffmpeg not found: install the package ffmpeg")
    with running("ffmpeg", tmp_path, dsn) as windlass:
        for name in ("one", "two"):
            source = ["ffmpeg", "-nostdin", "-loglevel", "error", "-f", "lavfi", "-i", "testsrc=d=1:s=64x64:r=5"]
            subprocess.run([*source, f"{name}.avi"], check=True, cwd=windlass.folder, timeout=LIMIT_S)
            payload = {"input": f"{name}.avi", "output": f"{name}.mp4"}
            assert windlass("enqueue", "videos", json.dumps(payload)).code == 0
        found = results(dsn, 2, tmp_path / "up.log")
        assert [result["output"] for result in found] == ["one.mp4", "two.mp4"]
        assert all(b"ftyp" in (windlass.folder / result["output"]).read_bytes()[:32] for result in found)


def test_commands_of_the_adopted_table_run_as_they_stand(reachable_path: Path) -> None:
    folder = shutil.copytree(EXAMPLES / "adopt", reachable_path / "adopt")
    database, worker, look = re.findall(r"```\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    place = {"cwd": folder, "env": {"PATH": path, "HOME": str(folder)}, "text": True}
    (export,) = {line for line in (database + worker).splitlines() if line.startswith("export ")}

    def printed(command: str) -> str:
        shell = ["bash", "-c", f"{export}\n{command}"]
        return subprocess.run(shell, **place, check=False, capture_output=True, timeout=LIMIT_S).stdout

    def until(is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not is_done():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

    log = reachable_path / "log"
    # The line of `db url --keep`: a separate `db url` also succeeds during `db migrate`, whose database then stops.
    steps = ((database, lambda: "://" in log.read_text()), (worker, lambda: printed(look).count("Complete") == 3))
    terminals = []
    with log.open("w") as out:
        try:
            for block, is_done in steps:
                shell = ["bash", "-ec", block]
                terminals.append(subprocess.Popen(shell, **place, stdout=out, stderr=out, start_new_session=True))
                until(is_done)
        finally:
            for terminal in reversed(terminals):
                os.killpg(terminal.pid, signal.SIGTERM)
                terminal.wait(LIMIT_S)


@pytest.mark.slow
@pytest.mark.ray
def test_ray_finds_the_best_setting_of_a_model(tmp_path: Path, dsn: str) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    penalties = [0, 0.01, 10]
    with running("ray-data-science", tmp_path, dsn) as windlass:
        for penalty in penalties:
            assert windlass("enqueue", "fits", json.dumps({"penalty": penalty})).code == 0
        found = results(dsn, len(penalties), tmp_path / "up.log")
        (query,) = re.findall(r"```sql\n(.*?)```", (windlass.folder / "README.md").read_text(), re.DOTALL)
        with psycopg.connect(dsn) as sql:
            assert sql.execute(query).fetchone() == ("0.01", pytest.approx(0.0864, abs=0.001))
    assert [result["penalty"] for result in found] == penalties
    for result in found:
        assert result["fold_processes"], "Ray ran the folds"
        assert result["process"] not in result["fold_processes"], "in other processes than the task's"


# What a Supabase project has: the roles of PostgREST, and the user of a request.
SUPABASE = """
do $$ begin
  create role authenticated nologin noinherit;
exception when duplicate_object then null; end $$;
do $$ begin
  create role anon nologin noinherit;
exception when duplicate_object then null; end $$;
create schema auth;
grant usage on schema auth to authenticated;
create function auth.uid() returns uuid language sql stable as $$
  select nullif(nullif(current_setting('request.jwt.claims', true), '')::jsonb ->> 'sub', '')::uuid
$$;
"""
ANN, BEN = (f"00000000-0000-4000-8000-00000000000{number}" for number in (1, 2))


def as_user(sql: Any, user: str, statement: str, *arguments: Any) -> list[Any]:
    """A request of PostgREST, which checked the user's token before."""
    with sql.transaction():
        sql.execute("set local role authenticated")
        sql.execute("select set_config('request.jwt.claims', %s, true)", [json.dumps({"sub": user})])
        done = sql.execute(statement, arguments)
        return list(done.fetchall()) if done.description is not None else [done.rowcount]


def test_supabase_app_runs_the_rows_of_its_users(tmp_path: Path, dsn: str) -> None:
    add = "insert into public.pictures (input) values (%s) returning id, status"
    with psycopg.connect(dsn, autocommit=True) as sql:
        sql.execute(SUPABASE)
        sql.execute((EXAMPLES / "supabase" / "schema.sql").read_text())
        with running("supabase", tmp_path, dsn) as windlass:
            checked = windlass("db", "adopt", "pictures", "--check")
            assert (checked.code, "FAIL" in checked.out) == (0, False), checked
            applied = windlass("db", "adopt", "pictures", "--apply")
            assert applied.code == 0, applied
            ((key, status),) = as_user(sql, ANN, add, json.dumps({"prompt": "a lighthouse"}))
            assert status == "queued"
            ((wrong, _),) = as_user(sql, ANN, add, json.dumps({"prompt": " "}))

            def until(column: str, of: Any, value: str) -> Any:
                deadline = time.monotonic() + LIMIT_S
                while True:
                    seen = f"select {column}, output from public.pictures where id = %s"  # noqa: S608
                    ((found, output),) = as_user(sql, ANN, seen, of)
                    if found is not None and value in found:
                        return output
                    assert time.monotonic() < deadline, (found, (tmp_path / "up.log").read_text())
                    time.sleep(0.1)

            assert until("status", key, "done")["prompt"] == "a lighthouse"
            until("error", wrong, "the prompt is empty")
            assert as_user(sql, BEN, "select * from public.pictures") == []
            assert as_user(sql, BEN, "update public.pictures set status = 'cancelled'") == [0]
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                as_user(sql, ANN, "update public.pictures set output = '{}'")
            # It waits for its next attempt. The user does not.
            assert as_user(sql, ANN, "update public.pictures set status = 'cancelled' where id = %s", wrong) == [1]
            task = "select status, error_code, owner from windlass.tasks where unique_key = %s"
            assert sql.execute(task, [str(wrong)]).fetchone() == ("failed", "CANCELLED", f"jwt:{ANN}")


def test_commands_of_the_compose_file_run_a_task(tmp_path: Path, dsn: str) -> None:
    folder = tmp_path / "deploy" / "docker"
    shutil.copytree(DEPLOY / "docker", folder)
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    header = re.findall(r"^#   (.+)$", (folder / "compose.yaml").read_text(), re.MULTILINE)
    prepare, described = [], []
    for line in header:
        (described if line.startswith("docker compose") else prepare).append(line)
    subprocess.run(["sh", "-euc", "\n".join(prepare)], cwd=folder, check=True, timeout=LIMIT_S)
    url = urlsplit((folder / "secrets" / "database_url").read_text())
    assert (url.hostname, url.password) == ("database", (folder / "secrets" / "database_password").read_text().strip())

    # The container starts it in this folder, too.
    start, enqueue = described
    assert start == "docker compose up --detach"
    with running_in(folder / "app", tmp_path / "up.log", dsn, "--port", "0") as windlass:
        assert windlass(*shlex.split(enqueue.removeprefix("docker compose exec windlass windlass "))).code == 0
        assert results(dsn, 1, tmp_path / "up.log") == ["Hello, Ada!"]
