"""`windlass enqueue`, `tasks`, `workers` and `status`."""

import asyncio
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from support.command_line import CommandLine

UNSERVED = (
    "windlass: no fleet or worker serves queue q yet. Start `windlass worker --queue q`, or add it to a fleet's queues."
)

# Two commands take a few seconds. A query times out after 30.
LOCK_TIMEOUT_S = 25.0


@pytest.fixture
def windlass(tmp_path: Path, dsn: str) -> CommandLine:
    return CommandLine(tmp_path, {"DATABASE_URL": dsn})


async def ask(dsn: str, sql: str) -> Any:
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetchval(sql)
    finally:
        await connection.close()


async def set_status(dsn: str, status: str, *task_ids: int, finished_days_ago: float = 0) -> None:
    """Finish tasks as a worker would."""
    connection = await asyncpg.connect(dsn)
    await connection.execute(
        "update windlass.tasks set status = $1::text, attempts = 3, error_code = 'HANDLER_ERROR', error = $4,"
        " run_after = case $1::text when 'error' then windlass.now() + interval '1 hour' end,"
        " finished_at = windlass.now() - make_interval(secs => $3) where id = any ($2)",
        status,
        task_ids,
        finished_days_ago * 86_400.0,
        "Traceback (most recent call last):\n  File x\nZeroDivisionError: [red]by\x1b[2Jzero[/red]",
    )
    await connection.close()


# ----------------------------------------------------------------------------------------------------------- enqueue


def test_enqueue_stores_every_option(windlass: CommandLine) -> None:
    due = datetime(2100, 1, 31, 8, tzinfo=UTC)
    options = (
        "--priority",
        7,
        "--max-attempts",
        1,
        "--timeout",
        2.5,
        "--unique-key",
        "k",
        "--run-after",
        due.isoformat(),
    )
    added = windlass("enqueue", "renders", '{"prompt": "ein Türmchen"}', *options, "--json").json
    assert added == {"id": 1, "queue": "renders", "is_new": True}
    task = windlass("tasks", "show", 1, "--json").json
    expected = {
        "queue": "renders",
        "payload": {"prompt": "ein Türmchen"},
        "priority": 7,
        "max_attempts": 1,
        "timeout_s": 2.5,
        "unique_key": "k",
        "run_after": due.isoformat(),
        "status": "queued",
    }
    assert {name: task[name] for name in expected} == expected


def test_known_unique_key_returns_the_existing_task(windlass: CommandLine) -> None:
    first = windlass("enqueue", "q", "1", "--unique-key", "k")
    again = windlass("enqueue", "q", "2", "--unique-key", "k")
    assert (again.code, again.out) == (0, first.out)
    assert (first.err, again.err) == (
        f"{UNSERVED}\n",
        "windlass: unique key already used by task 1; nothing was added.\n",
    )
    same = {"id": 1, "queue": "q", "is_new": False}
    assert windlass("enqueue", "q", "2", "--unique-key", "k", "--json").json == same
    (task,) = windlass("tasks", "list", "--json").json
    assert not {"payload", "result"} & task.keys(), "payloads may be large"
    assert windlass("tasks", "show", task["id"], "--json").json["payload"] == 1


async def test_enqueue_warns_about_a_queue_without_workers(windlass: CommandLine, dsn: str) -> None:
    done = windlass("enqueue", "q", "1")
    assert (done.code, done.out, done.err) == (0, "1\n", f"{UNSERVED}\n")
    assert windlass("enqueue", "q", "1", "--json").err == ""
    assert "q (not served)" in windlass("status").out
    asked = windlass("explain", "q")
    assert asked.code == 2
    assert "q is a queue: no fleet serves it; `windlass tasks list --queue q` lists its tasks" in asked.err
    await ask(dsn, "select windlass.register_worker('w1', 'default', '{q}')")
    assert windlass("enqueue", "q", "1").err == ""
    assert "not served" not in windlass("status").out


async def test_enqueue_with_json_does_not_wait_for_the_warning(windlass: CommandLine, dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        async with connection.transaction(), asyncio.timeout(LOCK_TIMEOUT_S):
            # The query for the warning would block.
            await connection.execute("lock windlass.fleets, windlass.workers in access exclusive mode")
            one = await asyncio.to_thread(windlass, "enqueue", "q", "1", "--json")
            many = await asyncio.to_thread(windlass, "enqueue", "q", "-", "--json", stdin="2\n3\n")
    finally:
        connection.terminate()
    assert (one.json["id"], many.json["enqueued"]) == (1, 2)


def test_run_after_counts_from_the_databases_clock(windlass: CommandLine) -> None:
    windlass("enqueue", "q", "1", "--run-after", "90m")
    (task,) = windlass("tasks", "list", "--json").json
    assert windlass("tasks", "list", "--status", "scheduled", "--json").json == [task]
    waits = datetime.fromisoformat(task["run_after"]) - datetime.fromisoformat(task["created_at"])
    assert timedelta(minutes=89) < waits <= timedelta(minutes=90)


@pytest.mark.parametrize("way", ["--file", "-", "--file -"])
async def test_each_line_becomes_a_task_in_order(windlass: CommandLine, dsn: str, way: str) -> None:
    lines = "\ufeff" + "".join(f'{{"n": {n}}}\r\n\n' for n in range(1_500)) + '"the last has no end"'
    (windlass.folder / "lines").write_text(lines, newline="")
    arguments = {"--file": ["--file", "lines"], "-": ["-"], "--file -": ["--file", "-"]}[way]
    done = windlass("enqueue", "q", *arguments, "--priority", "3", stdin=lines if way.endswith("-") else "")
    assert (done.code, done.out, done.err) == (0, "enqueued 1,501 tasks in q\n", f"{UNSERVED}\n")
    ordered = "select array_agg((payload ->> 'n')::int order by id) from windlass.tasks where payload ? 'n'"
    assert await ask(dsn, ordered) == list(range(1_500))
    assert await ask(dsn, "select count(*) from windlass.tasks where priority = 3") == 1_501


async def test_database_error_enqueues_none_of_the_lines(windlass: CommandLine, dsn: str) -> None:
    # Only the database refuses the last line.
    await ask(dsn, "alter table windlass.tasks add check (payload <> '\"bad\"')")
    done = windlass("enqueue", "q", "-", stdin="1\n" * 20_000 + '"bad"\n')
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("windlass: enqueueing tasks: ")
    assert done.err.count("\n") == 1
    assert await ask(dsn, "select count(*) from windlass.tasks") == 0


# -------------------------------------------------------------------------------------------------------------- tasks


async def test_tasks_are_listed_newest_first_and_filtered(windlass: CommandLine, dsn: str) -> None:
    windlass("enqueue", "a", "-", stdin="1\n2\n3\n")
    windlass("enqueue", "b", "4")
    await set_status(dsn, "failed", 2)

    def ids(*arguments: object) -> list[int]:
        return [task["id"] for task in windlass("tasks", "list", *arguments, "--json").json]

    assert ids() == [4, 3, 2, 1]
    assert ids("--queue", "a") == [3, 2, 1]
    assert ids("--status", "failed") == [2]
    assert ids("--limit", 2, "--before", 4) == [3, 2]
    assert ids("--queue", "b", "--status", "failed") == []
    page = windlass("tasks", "list", "--limit", 2).out
    headings = ["id", "queue", "status", "attempt", "age", "due", "took", "worker", "payload", "note"]
    assert page.splitlines()[0].split() == headings
    assert page.splitlines()[-1] == "next page: --before 3"


async def test_list_shows_the_beginning_of_payloads_unless_private(windlass: CommandLine, tmp_path: Path) -> None:
    windlass("enqueue", "open", json.dumps({"prompt": "a lighthouse " * 10}))
    windlass("enqueue", "private", '{"prompt": "a harbour", "size": 2}')
    (tmp_path / "windlass.toml").write_text(
        "[fleets.a]\nqueues = ['private']\nhandler = 'app:run'\nredact = ['$.prompt']\n"
    )
    config = ("--config", str(tmp_path / "windlass.toml"))
    private, shown = windlass("tasks", "list", *config).out.splitlines()[1:]
    assert shown.endswith('{"prompt": "a lighthouse a lighthouse a…')
    assert private.endswith('{"size": 2, "prompt": "********"}')
    for search in ((), ("--search", "2")):
        (row,) = windlass("tasks", "list", "--queue", "private", *search, *config, "--json").json
        assert row["payload_preview"] == '{"size": 2, "prompt": "********"}'
    assert windlass("tasks", "list", "--search", "harbour", *config, "--json").json == []


async def test_tasks_are_searched_by_payload_and_past_errors(windlass: CommandLine, dsn: str) -> None:
    windlass("enqueue", "q", "-", stdin='{"prompt": "a lighthouse"}\n{"prompt": "a harbour"}\n')
    # The first attempt of task 2 failed, and it is queued again.
    await ask(
        dsn,
        "insert into windlass.events (code, reason, task_id, worker_id, detail) values ('TASK_ERROR', 'x', 2, 'gpu-1',"
        ' \'{"attempt": 1, "error_code": "HANDLER_ERROR", "error": "RuntimeError: CUDA error"}\')',
    )
    await ask(dsn, "update windlass.tasks set attempts = 1, ready_at = now() where id = 2")

    def found(search: str) -> list[int]:
        return [task["id"] for task in windlass("tasks", "list", "--search", search, "--json").json]

    assert (found("LIGHTHOUSE"), found("cuda"), found("nothing like it")) == ([1], [2], [])
    listed = windlass("tasks", "errors", "--search", "cuda", "--since", "1h").out
    assert "gpu-1" in listed
    assert "RuntimeError: CUDA error" in listed
    assert windlass("tasks", "errors", "--worker", "gpu-2", "--json").json == []
    refused = windlass("tasks", "list", "--search", "x", "--before", 3)
    assert refused.code == 2
    assert "cannot be combined" in refused.err


async def test_control_characters_in_errors_are_escaped(windlass: CommandLine, dsn: str) -> None:
    windlass("enqueue", "q", "1")
    await set_status(dsn, "failed", 1)
    for arguments in (("list",), ("show", 1)):
        out = windlass("tasks", *arguments).out
        assert "\x1b" not in out
        assert "ZeroDivisionError: [red]by\\x1b[2Jzero[/red]" in out


async def test_list_names_states_as_status_does(windlass: CommandLine, dsn: str) -> None:
    for options in ((), ("--run-after", "1h"), (), (), ()):
        windlass("enqueue", "q", "1", *options)
    await set_status(dsn, "error", 3)
    await set_status(dsn, "failed", 5)
    windlass("tasks", "cancel", 4)
    rows = [line.split() for line in windlass("tasks", "list").out.splitlines()[1:]]
    names = {"1": "queued", "2": "scheduled", "3": "retrying", "4": "cancelled", "5": "failed"}
    assert {row[0]: row[2] for row in rows} == names
    for name, task_id in (("retrying", 3), ("cancelled", 4), ("failed", 5)):
        for search in ((), ("--search", "1")):
            found = windlass("tasks", "list", "--status", name, "--json", *search).json
            assert [task["id"] for task in found] == [task_id], (name, search)
    assert re.search(r"\b1 failed", windlass("status").out), "a cancelled task is no failure"


def test_enqueue_names_the_configured_fleet_that_is_not_running(windlass: CommandLine) -> None:
    (windlass.folder / "windlass.toml").write_text('[fleets.gpus]\nqueues = ["renders"]\nhandler = "app:f"\n')
    assert windlass("enqueue", "renders", "1").err == (
        "windlass: no fleet or worker serves queue renders yet. "
        "Fleet gpus of the configuration does when `windlass up` runs.\n"
    )


def test_cancel_all_queued_leaves_other_queues_and_finished_tasks(windlass: CommandLine) -> None:
    for queue in ("q", "q", "r"):
        windlass("enqueue", queue, "1")
    windlass("enqueue", "q", "1", "--run-after", "1h")
    assert windlass("tasks", "cancel", "--all-queued", "--queue", "q").out == "cancelled 3 tasks\n"
    assert {task["id"]: task["status"] for task in windlass("tasks", "list", "--json").json} == {
        1: "failed",
        2: "failed",
        3: "queued",
        4: "failed",
    }
    assert windlass("tasks", "cancel", "--all-queued", "--queue", "q", "--json").json["cancelled"] == []
    assert windlass("tasks", "cancel", "--all-queued", "--queue", "nosuch").code == 2


def test_task_is_shown_with_its_events(windlass: CommandLine) -> None:
    windlass("enqueue", "q", '{"a": 1}')
    assert windlass("tasks", "cancel", 1, "--reason", "no longer wanted").out == "cancelled task 1\n"
    shown = windlass("tasks", "show", 1)
    assert 'payload        {"a": 1}' in shown.out
    assert "TASK_CANCELLED  no longer wanted" in shown.out
    shown_json = windlass("tasks", "show", 1, "--json").json
    assert (shown_json["error_code"], [event["code"] for event in shown_json["events"]]) == (
        "CANCELLED",
        ["TASK_CANCELLED"],
    )


@pytest.mark.parametrize("payload", ["[" * 3_000 + "]" * 3_000, "9" * 5_000], ids=["nested deeply", "a long number"])
async def test_task_is_shown_with_json_that_python_cannot_parse(windlass: CommandLine, dsn: str, payload: str) -> None:
    """PostgreSQL accepts both."""
    await ask(dsn, f"select windlass.enqueue('q', '{payload}')")
    await ask(dsn, "update windlass.tasks set result = payload")
    shown = windlass("tasks", "show", 1)
    assert (shown.code, shown.err) == (0, "")
    assert f"payload        {payload}\n" in shown.out
    assert f"result         {payload}\n" in shown.out
    as_json = windlass("tasks", "show", 1, "--json").out
    assert as_json.endswith(f',\n  "payload": {payload},\n  "result": {payload}\n}}\n')
    assert json.loads(as_json.replace(payload, "0"))["payload"] == 0


async def test_retry_by_id_refuses_tasks_that_did_not_fail(windlass: CommandLine, dsn: str) -> None:
    windlass("enqueue", "q", "-", stdin="1\n2\n3\n")
    await set_status(dsn, "failed", 1, 2)
    done = windlass("tasks", "retry", 1, 2, 3, "--json")
    assert done.code == 2
    assert json.loads(done.out) == {"retried": [1, 2], "refused": [{"id": 3, "status": "queued"}]}
    assert json.loads(done.err) == {"error": "task 3 is queued: only failed and retrying tasks can be retried."}
    assert await ask(dsn, "select array_agg(status) from windlass.tasks") == ["queued"] * 3


async def test_all_failed_tasks_of_a_queue_are_retried(windlass: CommandLine, dsn: str) -> None:
    windlass("enqueue", "q", "-", stdin="1\n" * 1_200)
    windlass("enqueue", "other", "1")
    await set_status(dsn, "failed", *range(1, 1_202))
    assert windlass("tasks", "retry", "--all-failed", "--queue", "q").out == "retried 1,200 tasks\n"
    assert await ask(dsn, "select string_agg(queue, '') from windlass.tasks where status = 'failed'") == "other"
    assert windlass("tasks", "retry", "--all-failed", "--queue", "q").out == "retried 0 tasks\n"


async def test_cancelled_tasks_are_retried_only_on_request(windlass: CommandLine, dsn: str) -> None:
    windlass("enqueue", "q", "-", stdin="1\n2\n3\n")
    windlass("tasks", "cancel", 1, 2)
    await set_status(dsn, "failed", 3)
    assert windlass("tasks", "retry", "--all-failed", "--queue", "q").out == "retried task 3\n"
    both = ("tasks", "retry", "--all-failed", "--include-cancelled", "--queue", "q", "--json")
    assert windlass(*both).json == {"retried": [1, 2], "refused": []}


async def test_list_shows_due_time_and_progress(windlass: CommandLine, dsn: str) -> None:
    windlass("enqueue", "q", "1", "--run-after", "2h")
    windlass("enqueue", "q", "2")
    await ask(dsn, "select windlass.register_worker('w1', 'default', '{q}')")
    await ask(dsn, "select windlass.claim_task('w1', '{q}')")
    await ask(dsn, "update windlass.tasks set progress = 0.2, progress_note = 'half way' where id = 2")
    running, scheduled = windlass("tasks", "list").out.splitlines()[1:]
    assert "  in 120 min" in scheduled
    assert running.endswith("20 % half way")
    assert "progress       20 %" in windlass("tasks", "show", 2).out
    assert ["queues", "q"] in [line.split() for line in windlass("workers", "show", "w1").out.splitlines()]


async def test_workers_started_by_hand_are_marked(windlass: CommandLine, dsn: str) -> None:
    windlass("db", "migrate")
    await ask(dsn, "select windlass.register_worker('hand', 'default', '{q}')")
    await ask(dsn, "insert into windlass.slots (fleet, slot) values ('default', 0)")
    await ask(
        dsn,
        "insert into windlass.workers (id, fleet, slot, status, paused) values ('own', 'default', 0, 'active', true)",
    )
    listed = windlass("workers", "list").out
    assert re.search(r"^hand +default +active, started by hand  ", listed, re.MULTILINE), listed
    assert re.search(r"^own +default +0 +active, paused  ", listed, re.MULTILINE), listed
    assert re.search(r"^status +active, started by hand$", windlass("workers", "show", "hand").out, re.MULTILINE)
    assert windlass("workers", "show", "hand", "--json").json["worker"]["status"] == "active"
    assert "by hand" not in windlass("workers", "show", "own").out


async def test_worker_is_shown_with_type_and_place_of_its_machine(windlass: CommandLine, dsn: str) -> None:
    windlass("db", "migrate")
    await ask(dsn, "select windlass.register_worker('w1', 'default', '{q}')")
    await ask(
        dsn,
        "update windlass.workers set machine_id = 'm7', instance_type = 'NVIDIA RTX A5000', place = 'EU-RO-1'",
    )
    shown = [line.split(maxsplit=1) for line in windlass("workers", "show", "w1").out.splitlines()]
    assert ["machine_id", "m7"] in shown
    assert ["instance_type", "NVIDIA RTX A5000"] in shown
    assert ["place", "EU-RO-1"] in shown
    worker = windlass("workers", "show", "w1", "--json").json["worker"]
    assert (worker["instance_type"], worker["place"]) == ("NVIDIA RTX A5000", "EU-RO-1")


async def test_hosts_are_shown_with_losses_and_failed_checks(windlass: CommandLine, dsn: str) -> None:
    windlass("db", "migrate")
    assert windlass("workers", "hosts").out == "no rented machines\n"
    await ask(dsn, "select count(windlass.register_worker('w' || n, 'default', '{q}')) from generate_series(0, 2) as n")
    await ask(dsn, "insert into windlass.slots (fleet, slot) select 'default', n from generate_series(0, 2) as n")
    await ask(
        dsn,
        "update windlass.workers set machine_id = id, slot = right(id, 1)::integer, place = 'EU-RO-1', "
        "machine_host = '198.51.100.7', code = (array['MACHINE_GONE', 'GPU_NOT_DETECTED'])[right(id, 1)::integer + 1]",
    )
    header, row = windlass("workers", "hosts").out.splitlines()
    assert header.split() == ["fleet", "place", "host", "machines", "lost", "loss", "rate", "failed", "checks"]
    assert row.split() == ["default", "EU-RO-1", "198.51.100.7", "3", "1", "33%", "1"]
    (host,) = windlass("workers", "hosts", "--json").json
    assert (host["machines"], host["lost"], host["failed_checks"]) == (3, 1, 1)
    await ask(dsn, "update windlass.workers set machine_host = '198.51.100.8' where id = 'w2'")
    header, row = windlass("workers", "hosts", "--by", "place").out.splitlines()
    assert header.split() == ["fleet", "place", "machines", "lost", "loss", "rate", "failed", "checks"]
    assert row.split() == ["default", "EU-RO-1", "3", "1", "33%", "1"]


async def test_last_report_of_a_terminated_worker_stays_readable(windlass: CommandLine, dsn: str) -> None:
    windlass("db", "migrate")
    await ask(dsn, "select windlass.register_worker('w1', 'default', '{q}')")
    report = json.dumps({"pid": 4711, "vram_total_mb": 24576, "vram_used_mb": 20000, "driver": "12.4"})
    await ask(dsn, f"select status from windlass.heartbeat('w1', '[]', '{report}')")  # noqa: S608
    await ask(dsn, "update windlass.workers set status = 'error', reason = 'GPU lost', failed_at = now()")
    await ask(dsn, "update windlass.workers set status = 'terminated', terminated_at = now()")
    worker = windlass("workers", "show", "w1", "--json").json["worker"]
    assert (worker["status"], worker["reason"], worker["pid"]) == ("terminated", "GPU lost", 4711)
    assert (worker["vram_total_mb"], worker["vram_used_mb"]) == (24576, 20000)
    assert worker["metadata"]["driver"] == "12.4"
    assert worker["metadata"]["diagnostics"]["gpu"]["vram_used_mb"] == 20000
    (metadata,) = [line for line in windlass("workers", "show", "w1").out.splitlines() if line.startswith("metadata")]
    assert "driver 12.4" in metadata
    shown = windlass("workers", "show", "w1").out.splitlines()
    assert [line for line in shown if line.startswith("last vitals: driver 12.4")]
    assert [line for line in shown if line.startswith("last heartbeat: ")]


async def test_finished_tasks_cannot_be_cancelled(windlass: CommandLine, dsn: str) -> None:
    windlass("enqueue", "q", "-", stdin="1\n2\n")
    await set_status(dsn, "complete", 1)
    done = windlass("tasks", "cancel", 1, 2)
    assert (done.code, done.out) == (2, "cancelled task 2\n")
    assert done.err == "windlass: task 1 is complete: only unfinished tasks can be cancelled.\n"


async def test_finished_tasks_are_purged_by_status_age_and_queue(windlass: CommandLine, dsn: str) -> None:
    windlass("enqueue", "q", "-", stdin="1\n" * 6)
    windlass("enqueue", "other", "1")
    await set_status(dsn, "failed", 1, finished_days_ago=8)
    await set_status(dsn, "failed", 2, finished_days_ago=6)
    await set_status(dsn, "complete", 3, finished_days_ago=8)
    await set_status(dsn, "failed", 7, finished_days_ago=8)
    purge = ("tasks", "purge", "--older-than", "7d", "--queue", "q", "--status")
    assert windlass(*purge, "failed", "--yes", "--json").json == {"deleted": 1}
    assert windlass(*purge, "failed", "--status", "complete", stdin="y\n").out == "deleted 1 task\n"
    assert await ask(dsn, "select array_agg(id order by id) from windlass.tasks") == [2, 4, 5, 6, 7]


@pytest.mark.parametrize("answer", ["n\n", "\n", "maybe\n", ""], ids=["no", "empty", "maybe", "end of input"])
async def test_purge_needs_a_yes(windlass: CommandLine, dsn: str, answer: str) -> None:
    windlass("enqueue", "q", "1")
    await set_status(dsn, "failed", 1, finished_days_ago=8)
    done = windlass("tasks", "purge", "--status", "failed", "--older-than", "7d", stdin=answer)
    assert (done.code, done.out) == (2, "")
    assert done.err.endswith("windlass: nothing was deleted. Answer yes, or add --yes.\n")
    assert await ask(dsn, "select count(*) from windlass.tasks") == 1


# ------------------------------------------------------------------------------------------------------------- status


async def test_status_shows_queues_workers_and_the_last_hour(windlass: CommandLine, dsn: str) -> None:
    windlass("enqueue", "q", "-", stdin="1\n2\n3\n")
    windlass("enqueue", "later", "1", "--run-after", "1h")
    await set_status(dsn, "complete", 1)
    await ask(dsn, "select windlass.register_worker('w1', 'default', '{q,other}', 2)")
    await ask(dsn, "select (windlass.heartbeat('w1')).status")
    await ask(dsn, "update windlass.workers set last_heartbeat = last_heartbeat - interval '1 minute'")
    status = windlass("status", "--json").json
    assert [(q["queue"], q["queued"], q["scheduled"]) for q in status["queues"]] == [("later", 0, 1), ("q", 2, 0)]
    assert [(w["id"], w["is_silent"], w["queues"]) for w in status["workers"]] == [("w1", True, ["q", "other"])]
    assert status["last_hour"] == {"complete": 1, "failed": 0}
    assert [q["queue"] for q in windlass("status", "--queue", "q", "--json").json["queues"]] == ["q"]
    assert windlass("status", "--queue", "other", "--json").json["queues"] == []
    out = windlass("status").out
    assert "active, started by hand, silent" in out
    assert "last hour: 1 complete, 0 failed" in out


async def test_worker_started_by_hand_is_shown_as_such(windlass: CommandLine, dsn: str) -> None:
    await ask(dsn, "select windlass.register_worker('w1', 'default', '{q}')")
    lines = windlass("status").out.splitlines()
    (row,) = [line for line in lines if line.startswith("w1 ")]
    assert " active, started by hand " in row
    assert not [line for line in lines if line.startswith("default ")], "no fleet of that name is configured"
    assert windlass("explain", "default").out == (
        "Fleet default has 1 worker started by hand with `windlass worker`. "
        "Nothing spawns or replaces them: no orchestrator has a fleet of that name.\n"
    )


async def test_explanation_leads_to_the_runbook_of_its_code(windlass: CommandLine, dsn: str) -> None:
    assert windlass("enqueue", "q", "1").code == 0
    await set_status(dsn, "failed", 1)
    assert "What to do: windlass runbook HANDLER_ERROR\n" in windlass("explain", "1").out
    assert windlass("explain", "1", "--json").json["runbooks"] == ["HANDLER_ERROR"]
    shown = windlass("runbook", "handler_error").out
    assert shown.startswith("HANDLER_ERROR (Task errors)\n  why: The handler raised an exception")
    assert "Fix the handler" in shown
    assert windlass("runbook", "UNAUTHORIZED").out.startswith("UNAUTHORIZED (HTTP errors)\n  status: 401\n  why: ")
    assert "\nHetzner fleets: The token is refused\n" in windlass("runbook", "DENIED").out
    unknown = windlass("runbook", "HANDLER_EROR")
    assert unknown.code == 2
    assert "no runbook for HANDLER_EROR. Similar codes: HANDLER_ERROR" in unknown.err
    assert windlass("runbook", "zzz").err == "windlass: no runbook for zzz. docs/runbooks.md lists all codes.\n"


def test_status_of_an_empty_database(windlass: CommandLine) -> None:
    assert windlass("status").out.splitlines() == [
        "no queued or running tasks",
        "no workers; start some with `windlass up` or `windlass worker`",
        "last hour: 0 complete, 0 failed",
    ]
