"""`windlass db adopt` from beginning to end: examples/adopt with real workers, one of which is killed."""

import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.command_line import CommandLine

EXAMPLE = Path(__file__).parents[2] / "examples" / "adopt"
LIMIT_S = 60.0
ROWS = 300
# Like that of the example; it tells the test when it runs, and the first run of a row waits to be killed.
HANDLER = """
import pathlib, time
def generate(task):
    payload = task.payload
    marker = pathlib.Path("ran-" + payload["id"])
    if payload["prompt"] == "stuck" and not marker.exists():
        marker.touch()
        time.sleep(600)
    return {"url": "https://files.example.com/" + payload["id"] + ".png"}
"""


@pytest.fixture
def windlass(dsn: str, tmp_path: Path) -> CommandLine:
    for file in EXAMPLE.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    return CommandLine(tmp_path, {"DATABASE_URL": dsn})


@pytest.fixture
def sql(dsn: str) -> Iterator[Any]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute((EXAMPLE / "tasks.sql").read_text())
        yield connection


def until(condition: Callable[[], bool], description: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_S:g} s: {description}"
        time.sleep(0.05)


def start_worker(windlass: CommandLine, handler: str) -> "subprocess.Popen[str]":
    options = ("--queue", "generations", "--handler", handler, "--lease", "3", "--heartbeat-interval", "0.3")
    return windlass.start("worker", *options, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def test_example_runs_as_the_documentation_says(windlass: CommandLine, sql: Any) -> None:
    printed = windlass("db", "adopt", "tasks")
    assert printed.code == 0
    assert 'after insert on "public"."tasks"' in printed.out
    assert windlass("db", "adopt", "task").err.startswith(
        "windlass: [adopt.task] is not configured. Did you mean tasks?"
    )
    checked = windlass("db", "adopt", "tasks", "--check")
    assert (checked.code, "FAIL" in checked.out) == (0, False), checked
    assert sql.execute("select count(*) from pg_trigger where tgname like 'windlass%'").fetchone() == (0,)
    applied = windlass("db", "adopt", "tasks", "--apply", "--backfill")
    assert applied.out.splitlines()[-2:] == [
        "public.tasks is adopted: new rows become tasks of queue generations",
        "3 existing rows were adopted",
    ]
    sql.execute("insert into public.tasks (prompt) values ('a buoy')")
    worker = start_worker(windlass, "generate:generate")
    try:
        done = "select count(*) from public.tasks where status = 'Complete' and output_url like 'https://%.png'"
        until(lambda: sql.execute(done).fetchone() == (4,), "all rows are complete")
    finally:
        worker.kill()
        worker.wait()
    assert "adopt tasks   rows and tasks agree" in windlass("doctor").out
    removed = windlass("db", "adopt", "tasks", "--remove")
    assert removed.out == "tasks is no longer adopted; 0 rows of unfinished tasks are queued again\n"
    again = windlass("db", "adopt", "tasks", "--remove")
    assert (again.code, again.err) == (2, "windlass: tasks is not adopted: there is nothing to remove.\n")


def test_killed_worker_loses_no_row(windlass: CommandLine, sql: Any, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(HANDLER)
    assert windlass("db", "adopt", "tasks", "--apply", "--backfill").code == 0
    sql.execute("insert into public.tasks (prompt) values ('stuck')")
    sql.execute("insert into public.tasks (prompt) select n::text from generate_series(1, %s) n", (ROWS,))
    stuck = "select id, status, attempts, worker_id from public.tasks where prompt = 'stuck'"
    workers = [start_worker(windlass, "slow:generate")]
    try:
        until(lambda: any(tmp_path.glob("ran-*")), "the handler of the row runs")
        assert sql.execute(stuck).fetchone()[1:3] == ("In Progress", 1)
        workers[0].send_signal(signal.SIGKILL)
        workers += [start_worker(windlass, "slow:generate") for _ in range(2)]
        left = "select count(*) from public.tasks where status <> 'Complete'"
        until(lambda: sql.execute(left).fetchone() == (0,), "all rows are complete")
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert sql.execute(stuck).fetchone()[1:3] == ("Complete", 2)
    assert sql.execute("select count(*), min(attempts) from windlass.tasks").fetchone() == (ROWS + 4, 1)


def test_doctor_reports_and_repairs(windlass: CommandLine, sql: Any) -> None:
    assert "configured, but not applied: windlass db adopt tasks --apply" in windlass("doctor").out
    assert windlass("db", "adopt", "tasks", "--apply").code == 0
    assert "rows that were queued before are not all enqueued" in windlass("doctor").out
    sql.execute("set session_replication_role = replica")
    sql.execute("insert into public.tasks (prompt) values ('unseen')")
    sql.execute("set session_replication_role = origin")
    assert windlass("db", "adopt", "tasks", "--backfill").out == "4 existing rows were adopted\n"
    sql.execute("set session_replication_role = replica")
    sql.execute("update public.tasks set status = 'Cancelled' where prompt = 'unseen'")
    sql.execute("insert into public.tasks (prompt) values ('unseen too')")
    sql.execute("set session_replication_role = origin")
    found = windlass("doctor").out
    assert "1 tasks without a row that wants them, 1 rows without a task: windlass doctor --repair" in found
    repaired = windlass("doctor", "--repair").out
    assert "2 differences repaired" in repaired
    assert "rows and tasks agree" in repaired


@pytest.mark.parametrize("options", [("--apply", "--remove"), ("--remove", "--backfill")])
def test_contradicting_options_are_refused(windlass: CommandLine, options: tuple[str, ...]) -> None:
    refused = windlass("db", "adopt", "tasks", *options)
    assert (refused.code, refused.err) == (
        2,
        "windlass: --remove goes with none of --check, --apply and --backfill.\n",
    )


def test_failed_check_applies_nothing(windlass: CommandLine, sql: Any) -> None:
    sql.execute("alter table public.tasks drop column error")
    refused = windlass("db", "adopt", "tasks", "--apply")
    assert refused.code == 1
    assert "FAIL columns       there is no column error: change adopt.tasks.columns.error" in refused.out
    assert sql.execute("select count(*) from windlass.adoptions").fetchone() == (0,)
