"""Bad input: one line on standard error, exit code 2, no change in the database, no secret in the message."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from support.command_line import CommandLine, Completed

PASSWORD = "hunter2"
# Nothing listens on port 1.
NOWHERE = f"postgresql://app:{PASSWORD}@127.0.0.1:1/app"
WORKER = ("worker", "--queue", "q")
# An invalid byte, as Python passes it on from the shell.
NO_UTF8 = "q\udcff"


@pytest.fixture
def windlass(tmp_path: Path) -> CommandLine:
    return CommandLine(tmp_path)


def assert_refused(done: Completed, sentence: str) -> None:
    assert done.err.startswith("windlass: "), done
    assert sentence in done.err
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1
    assert done.err.rstrip().endswith((".", "?"))
    assert "Traceback" not in done.err
    assert PASSWORD not in done.err


@pytest.mark.parametrize(
    ("arguments", "env", "sentence"),
    [
        # Refused by typer.
        pytest.param(("tsks",), {}, "no such command 'tsks'. Did you mean 'tasks'", id="a command with a typo"),
        pytest.param(("worker", "--nope"), {}, "no such option", id="an unknown option"),
        pytest.param(("enqueue",), {}, "missing argument", id="a missing argument"),
        pytest.param(("tasks", "list", "--status", "lost"), {}, "is not one of", id="an unknown status"),
        pytest.param(("tasks", "show", "first"), {}, "must be a whole number", id="an id that is not a number"),
        pytest.param(("tasks", "show", "99999999999999999999"), {}, "must be at most", id="an id out of range"),
        pytest.param(("status", "extra"), {}, "unexpected extra argument", id="an extra argument"),
        # Payloads.
        pytest.param(("enqueue", "q", "{a: 1}"), {}, "the payload is not JSON", id="a payload that is not JSON"),
        pytest.param(
            ("enqueue", "q", '{\n  "a": 1,\n  b: 2\n}'),
            {},
            "the payload is not JSON (Expecting property name enclosed in double quotes at line 3, column 3)",
            id="a payload of several lines",
        ),
        pytest.param(("enqueue", "q", "9" * 5_000), {}, "the payload is not readable JSON", id="a number too long"),
        pytest.param(("enqueue", "q", "NaN"), {}, "cannot be written as JSON", id="a payload that is not a number"),
        pytest.param(("enqueue", "q", '"\\u0000"'), {}, "NUL character", id="a payload with NUL"),
        pytest.param(
            ("enqueue", "q", '"longer than that"'),
            {"WINDLASS_MAX_PAYLOAD_BYTES": "10"},
            "18 bytes and at most 10 are accepted",
            id="a payload over the configured limit",
        ),
        pytest.param(("enqueue", "q"), {}, "pass exactly one of", id="nothing to enqueue"),
        pytest.param(("enqueue", "q", "1", "--file", "f"), {}, "pass exactly one of", id="a payload and a file"),
        pytest.param(("enqueue", "q", "--file", "missing"), {}, "cannot read missing: No such file", id="no such file"),
        pytest.param(
            ("enqueue", "q", "--file", "."), {}, "cannot read .: Is a directory", id="a folder instead of a file"
        ),
        # A task's other fields.
        pytest.param(("enqueue", "a b", "1"), {}, "cannot be a queue's name", id="a queue with a space"),
        pytest.param(
            ("enqueue", "q", "1", "--priority", "3000000000"),
            {},
            "priority is 3000000000",
            id="a priority out of range",
        ),
        pytest.param(("enqueue", "q", "1", "--max-attempts", "0"), {}, "max_attempts is 0", id="no attempts"),
        pytest.param(("enqueue", "q", "1", "--timeout", "-1"), {}, "timeout_s is -1", id="a negative time limit"),
        pytest.param(
            ("enqueue", "q", "1", "--timeout", "nan"), {}, "timeout_s is nan", id="a time limit that is not a number"
        ),
        pytest.param(("enqueue", "q", "1", "--run-after", "soon"), {}, "'soon' is not a time", id="a time in words"),
        pytest.param(
            ("enqueue", "q", "1", "--run-after", "2030-01-01T08:00"), {}, "no time zone", id="a time without a zone"
        ),
        pytest.param(("enqueue", "q", "1", "--run-after", "99999999d"), {}, "not a duration", id="a time out of range"),
        pytest.param(("enqueue", "q", "1", "--unique-key", "k" * 201), {}, "201 characters", id="a key too long"),
        pytest.param(("enqueue", "q", "1", "--unique-key", ""), {}, "the unique key is empty", id="an empty key"),
        pytest.param(("enqueue", '{"a": 1}'), {}, "missing queue: write `windlass enqueue QUEUE '{", id="no queue"),
        pytest.param(
            ("tasks", "retry", "1", "--include-cancelled"), {}, "needs --all-failed", id="--include-cancelled with ids"
        ),
        pytest.param(
            ("enqueue", "q", "-", "--unique-key", "k"), {}, "is for a single task", id="one key for several tasks"
        ),
        # Which tasks.
        pytest.param(("tasks", "retry"), {}, "nothing to retry", id="retry nothing"),
        pytest.param(("tasks", "retry", "--all-failed"), {}, "with --queue", id="retry all of all queues"),
        pytest.param(("tasks", "retry", "1", "--all-failed"), {}, "nothing to retry", id="retry ids and all"),
        pytest.param(
            ("enqueue", "q", "1", "--run-after", "2020-01-01T00:00Z"),
            {},
            "is in the past",
            id="a run-after in the past",
        ),
        pytest.param(
            ("enqueue", "q", "1", "--priority", "high"), {}, "must be a whole number", id="a word as priority"
        ),
        pytest.param(("worker", "-q", "q", "--timeout", "x"), {}, "must be a number", id="a word as a time limit"),
        pytest.param(("status", "--data-dir", "/etc"), {}, "/etc has other files", id="a data folder with other files"),
        pytest.param(("tasks", "cancel", "--queue", "q"), {}, "with --queue", id="cancel a queue without a filter"),
        pytest.param(("tasks", "cancel", "1", "--all-queued"), {}, "with --queue", id="cancel ids and all queued"),
        pytest.param(
            ("tasks", "cancel"),
            {},
            "nothing was cancelled: pass ids of tasks, or --all-queued with --queue",
            id="cancel nothing",
        ),
        pytest.param(
            ("tasks", "purge", "--yes"),
            {},
            "nothing was deleted: add --status complete or --status failed",
            id="purge without a status",
        ),
        pytest.param(("tasks", "purge", "--status", "failed"), {}, "--older-than", id="purge of any age"),
        pytest.param(
            ("tasks", "purge", "-s", "queued", "--older-than", "1d"), {}, "not one of", id="purge queued tasks"
        ),
        pytest.param(
            ("tasks", "purge", "-s", "failed", "--older-than", "1y"), {}, "not a duration", id="purge by years"
        ),
        # Reasons.
        pytest.param(
            ("tasks", "cancel", "1", "--reason", ""), {}, "--reason is empty", id="cancel with an empty reason"
        ),
        pytest.param(
            ("terminate", "w", "--force", "--reason", " "), {}, "--reason is empty", id="terminate with an empty reason"
        ),
        # Arguments that are not valid UTF-8.
        pytest.param(
            ("status", "-q", NO_UTF8), {}, "b'q\\xff' on the command line is not valid UTF-8", id="status: not UTF-8"
        ),
        pytest.param(("tasks", "list", "--queue", NO_UTF8), {}, "is not valid UTF-8", id="queue: not UTF-8"),
        pytest.param(("tasks", "cancel", "1", "--reason", NO_UTF8), {}, "is not valid UTF-8", id="reason: not UTF-8"),
        pytest.param(
            ("tasks", "purge", "-s", "failed", "--older-than", "1d", "--yes", "-q", NO_UTF8),
            {},
            "is not valid UTF-8",
            id="purge: not UTF-8",
        ),
        pytest.param(("terminate", "w", NO_UTF8), {}, "is not valid UTF-8", id="worker: not UTF-8"),
        pytest.param(("explain", NO_UTF8), {}, "is not valid UTF-8", id="explain: not UTF-8"),
        # Workers.
        pytest.param(
            (*WORKER, "--exec", "x", "--lease", "1e-8", "--heartbeat-interval", "1e-9"),
            {},
            "worker.heartbeat_interval_s (from command line) is 1e-09",
            id="a heartbeat interval too short",
        ),
        pytest.param(WORKER, {}, "pass exactly one of --handler and --exec", id="a worker without a handler"),
        pytest.param((*WORKER, "--exec", "x", "--inline"), {}, "--inline needs --handler", id="an inline command"),
        pytest.param(
            (*WORKER, "--handler", "a:b", "--chdir", "missing"),
            {},
            "cannot change to the folder missing",
            id="no such folder",
        ),
        pytest.param(
            (*WORKER, "--exec", "x", "--lease", "1"), {}, "at least three heartbeat intervals", id="a lease too short"
        ),
        pytest.param(
            (*WORKER, "--exec", "x", "--lease", "-1"),
            {},
            "it must be greater than or equal to 1",
            id="a negative lease",
        ),
        pytest.param(
            ("worker", "-q", "a b", "--exec", "x"), {}, "cannot be a queue's name", id="an invalid queue of a worker"
        ),
        # Configuration.
        pytest.param(
            ("status", "--config", "missing"),
            {},
            "configuration file missing not found",
            id="no such configuration file",
        ),
        pytest.param(("status",), {"WINDLASS_LEASE_S": "3"}, "is not a setting", id="an unknown variable"),
        pytest.param(
            ("status",), {"WINDLASS_WORKER__LEASE_S": "x"}, "is 'x': this is not a number", id="a bad variable"
        ),
        pytest.param(
            ("status",),
            {"DATABASE_URL": f"mysql://u:{PASSWORD}@h"},
            "not the URL of",
            id="another kind of database",
        ),
        pytest.param(("status",), {"DATABASE_URL": f"postgresql://u:{PASSWORD}#@h"}, "%23", id="an unencoded password"),
        pytest.param(("status",), {"DATABASE_URL": PASSWORD}, "is not a URL", id="not a URL"),
        # Databases.
        pytest.param(
            ("status",), {"DATABASE_URL": NOWHERE}, "127.0.0.1:1 cannot be reached", id="status without a server"
        ),
        pytest.param(
            ("db", "migrate"), {"DATABASE_URL": NOWHERE}, "127.0.0.1:1 cannot be reached", id="migrate without a server"
        ),
        pytest.param(
            ("db", "status"),
            {"DATABASE_URL": NOWHERE},
            "127.0.0.1:1 cannot be reached",
            id="db status without a server",
        ),
        pytest.param(
            (*WORKER, "--exec", "true"),
            {"DATABASE_URL": NOWHERE},
            "127.0.0.1:1 cannot be reached",
            id="worker without a server",
        ),
        pytest.param(
            ("status",),
            {"DATABASE_URL": "postgresql://windlass.invalid/d"},
            "the host name of the database, windlass.invalid:5432, cannot be resolved",
            id="no such host",
        ),
        pytest.param(
            ("status",),
            {"DATABASE_URL": f"{NOWHERE}?sslmode=maybe"},
            "cannot be reached (`sslmode` parameter",
            id="an unknown sslmode",
        ),
        pytest.param(
            ("enqueue", "q", "1", "--data-dir", "/dev/null/data"),
            {},
            "cannot use /dev/null/data as",
            id="an unusable data folder",
        ),
        pytest.param(
            ("status",), {"WINDLASS_DATA_DIR": "~nobody-here/x"}, "home directory", id="an unknown home directory"
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(
    windlass: CommandLine, arguments: tuple[str, ...], env: dict[str, str], sentence: str
) -> None:
    # Bad input is found before the database is opened, except where the database is the subject.
    assert_refused(windlass.with_env(**{"DATABASE_URL": NOWHERE, **env})(*arguments), sentence)


@pytest.mark.parametrize(
    ("handler", "options", "sentence"),
    [
        (
            "nosuch:f",
            (),
            "cannot import handler nosuch:f: No module named 'nosuch'. Run from the folder that contains nosuch.py",
        ),
        ("app:nosuch", (), "cannot find nosuch in app. Check the name after the colon."),
        ("broken:f", (), "cannot import handler broken:f: SyntaxError"),
        ("app:f", ("--inline",), "app:f is not an async function, which --inline requires"),
    ],
)
def test_up_refuses_a_handler_that_workers_cannot_run(
    windlass: CommandLine, handler: str, options: tuple[str, ...], sentence: str
) -> None:
    (windlass.folder / "app.py").write_text("print('imported')\ndef f(task): pass\n")
    (windlass.folder / "broken.py").write_text("def f(:\n")
    done = windlass.with_env(DATABASE_URL=NOWHERE)("up", "--queue", "q", "--handler", handler, *options)
    assert_refused(done, f"windlass: fleet default: {sentence}")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ('provider = "hetzner"', "the Hetzner API token is missing. Set HETZNER_API_TOKEN"),
        ('provider = "runpod"\nrunpod.image = "i"', "the Runpod API key is missing. Set RUNPOD_API_KEY"),
    ],
)
def test_up_refuses_to_start_without_a_provider_key(windlass: CommandLine, settings: str, sentence: str) -> None:
    fleet = f'[fleets.far]\nqueues = ["q"]\nhandler = "app:f"\n{settings}\n'
    (windlass.folder / "windlass.toml").write_text(f'[api]\nurl = "https://plane.example.com"\n{fleet}')
    keys = {"HETZNER_API_TOKEN": "", "HCLOUD_TOKEN": "", "RUNPOD_API_KEY": ""}
    assert_refused(windlass.with_env(DATABASE_URL=NOWHERE, **keys)("up", "--port", "0"), sentence)


@pytest.mark.parametrize("command", [("up", "--port", "8499"), ("cycle",)])
def test_fleet_that_cannot_reach_its_control_plane_is_refused(windlass: CommandLine, command: tuple[str, ...]) -> None:
    (windlass.folder / "windlass.toml").write_text(
        'runpod_api_key = "rpa_x"\n[api]\nport = 8499\n'
        '[fleets.a]\nprovider = "runpod"\nhandler = "app:x"\nrunpod.image = "x/y:1"\n'
    )
    done = windlass.with_env(DATABASE_URL=NOWHERE)(*command)
    assert done.code == 2
    assert "Runpod's pods of fleet a call http://127.0.0.1:8499, which only this host can reach. Set api" in done.err


def test_up_names_the_variable_that_created_a_fleet(windlass: CommandLine) -> None:
    done = windlass.with_env(MAX_ACTIVE_GPUS="3", DATABASE_URL=NOWHERE)("up")
    assert_refused(
        done, "fleet default (created by MAX_ACTIVE_GPUS in the environment) has nothing to run: set its handler or"
    )


def test_json_option_prints_errors_as_json(windlass: CommandLine) -> None:
    for arguments in (("tasks", "show", "1"), ("tasks", "show", "first"), ("tasks", "retry")):
        done = windlass.with_env(DATABASE_URL=NOWHERE)(*arguments, "--json")
        assert (done.code, done.out) == (2, "")
        (sentence,) = json.loads(done.err).values()
        assert PASSWORD not in sentence
        assert done.err.startswith('{"error": "')
        assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        pytest.param("data_dir = =", "is not valid TOML (Invalid value (at line 1", id="not TOML"),
        pytest.param("[worker]\nleese_s = 3", "did you mean worker.lease_s?", id="an unknown setting"),
        pytest.param(
            "[fleets.a]\npoll_interval_s = 1e-300", "fleets.a.poll_interval_s", id="a poll interval too short"
        ),
        pytest.param(f"database_url = 'postgresql://u:{PASSWORD}@h:x'", "has a port that is not", id="a bad address"),
        pytest.param(
            f"[alerts]\nemail_to = ['a@b']\nsmtp_url = 'smtp://bot:{PASSWORD}/x@mail'",
            "%2F",
            id="an unencoded mail password",
        ),
        pytest.param("[alerts]\ncommand = '\"abc'", "a quote in it is not closed", id="an unclosed quote in a command"),
    ],
)
def test_configuration_file_is_refused(windlass: CommandLine, content: str, sentence: str) -> None:
    (windlass.folder / "windlass.toml").write_text(content)
    assert_refused(windlass("status"), sentence)


def test_data_of_another_postgresql_version_is_refused(windlass: CommandLine) -> None:
    cluster = windlass.folder / "data" / "postgres"
    cluster.mkdir(parents=True)
    (cluster / "PG_VERSION").write_text("16\n")
    assert_refused(windlass("status", "--data-dir", "data"), "has data of PostgreSQL version 16")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_data_directory_is_refused(windlass: CommandLine) -> None:
    windlass.folder.chmod(0o555)
    assert_refused(windlass("db", "migrate", "--data-dir", "data"), "as the data directory (Permission denied")


# ------------------------------------------------------------------------------------------------- lines of payloads


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        pytest.param(b"1\n\n{a}\n4\n", "line 3 is not JSON (Expecting property name", id="not JSON"),
        pytest.param(
            b'{\n  "a": 1\n}\n',
            "line 1 is not JSON (Expecting property name enclosed in double quotes at column 2): "
            "each line must be a complete JSON value; nothing was enqueued.",
            id="one JSON over many lines",
        ),
        pytest.param(b"1\n2\n\xff\n", "line 3 is not valid UTF-8 at byte 1", id="not UTF-8"),
        pytest.param(
            b'1\n"' + b"x" * 1_100_000 + b'"\n', "line 2 has 1,100,002 bytes and at most", id="a payload too large"
        ),
        pytest.param(b"1\n" + b" " * 7_000_000 + b"2\n", "line 2 has more than 6,356,992 bytes", id="a line too long"),
        pytest.param(b'1\n"\\u0000"\n', "line 2 contains a NUL character", id="NUL"),
        pytest.param(b"[" * 100_000, "line 1 is not readable JSON", id="nested too deeply"),
        pytest.param(b"\n \n", "nothing to enqueue in", id="only empty lines"),
    ],
)
@pytest.mark.parametrize("way", ["file", "stdin"])
async def test_one_bad_line_enqueues_nothing(
    windlass: CommandLine, dsn: str, lines: bytes, sentence: str, way: str
) -> None:
    windlass = windlass.with_env(DATABASE_URL=dsn)
    if way == "file":
        (windlass.folder / "lines").write_bytes(lines)
        done = windlass("enqueue", "q", "--file", "lines")
    else:
        done = windlass("enqueue", "q", "-", stdin=lines)
    assert_refused(done, sentence)
    assert await ask(dsn, "select count(*) from windlass.tasks") == 0


# ------------------------------------------------------------------------------------------ checked by the database


async def ask(dsn: str, sql: str) -> Any:
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetchval(sql)
    finally:
        await connection.close()


@pytest.mark.parametrize(
    "arguments",
    [("status", "--queue", "rendrs"), ("tasks", "list", "--queue", "rendrs"),
     ("tasks", "purge", "--queue", "rendrs", "-s", "failed", "--older-than", "0s", "--yes"),
     ("tasks", "retry", "--all-failed", "--queue", "rendrs")],
    ids=lambda arguments: " ".join(arguments[:2]),
)  # fmt: skip
def test_unknown_queue_is_refused_with_the_known_ones(
    windlass: CommandLine, dsn: str, arguments: tuple[str, ...]
) -> None:
    windlass = windlass.with_env(DATABASE_URL=dsn)
    assert_refused(windlass(*arguments), "queue rendrs not found; known queues: none.")
    windlass("enqueue", "renders", "1")
    windlass("enqueue", "mail", "1")
    assert_refused(windlass(*arguments), "queue rendrs not found; known queues: mail, renders.")


@pytest.mark.parametrize("command", ["show", "retry", "cancel"])
async def test_unknown_task_id_changes_no_task(windlass: CommandLine, dsn: str, command: str) -> None:
    windlass = windlass.with_env(DATABASE_URL=dsn)
    task_id = windlass("enqueue", "q", "1").out.strip()
    ids = ("404",) if command == "show" else (task_id, "404", "405")
    assert_refused(
        windlass("tasks", command, *ids),
        f"{', '.join(i for i in ids if i != task_id)} not found (unknown, or already purged)",
    )
    assert await ask(dsn, "select status from windlass.tasks") == "queued"


@pytest.mark.parametrize(
    ("handler", "sentence"),
    [
        pytest.param(
            "nowhere:handle", "cannot import handler nowhere:handle: No module named 'nowhere'", id="no module"
        ),
        pytest.param("app:missing", "cannot find missing in app", id="no function"),
        pytest.param("app", "Write package.module:function", id="no colon"),
        pytest.param("broken:handle", "cannot import handler broken:handle: ZeroDivisionError", id="a broken module"),
    ],
)
def test_unknown_handler_is_refused(windlass: CommandLine, dsn: str, handler: str, sentence: str) -> None:
    (windlass.folder / "app.py").write_text("def handle(task): ...\n")
    (windlass.folder / "broken.py").write_text("1 / 0\n")
    windlass = windlass.with_env(DATABASE_URL=dsn)
    assert_refused(windlass(*WORKER, "--handler", handler), sentence)


@pytest.mark.parametrize("arguments", [("status",), ("enqueue", "q", "1"), (*WORKER, "--exec", "true")])
def test_database_without_schema_is_refused(windlass: CommandLine, empty_dsn: str, arguments: tuple[str, ...]) -> None:
    windlass = windlass.with_env(DATABASE_URL=empty_dsn)
    assert_refused(windlass(*arguments), "has no windlass schema yet: run `windlass db migrate` once")


async def test_schema_of_a_development_build_is_refused(windlass: CommandLine, dsn: str) -> None:
    await ask(dsn, "update windlass.migrations set version = 9")
    for arguments in (("enqueue", "q", "1"), ("status",), ("db", "migrate")):
        assert_refused(windlass.with_env(DATABASE_URL=dsn)(*arguments), "cannot be upgraded: use a new database")
    assert await ask(dsn, "select count(*) from windlass.tasks") == 0


async def test_newer_schema_is_refused(windlass: CommandLine, dsn: str) -> None:
    await ask(dsn, "insert into windlass.migrations (version, name, checksum) values (999, 'later', '')")
    windlass = windlass.with_env(DATABASE_URL=dsn)
    for arguments in (("status",), ("db", "migrate")):
        assert_refused(windlass(*arguments), "is at version 999 and this program supports")


async def test_modified_schema_is_not_migrated(windlass: CommandLine, dsn: str) -> None:
    await ask(dsn, "update windlass.migrations set checksum = 'other'")
    assert_refused(windlass.with_env(DATABASE_URL=dsn)("db", "migrate"), "differs from this program's")


@pytest.fixture(scope="module")
def locked_role(embedded_server: Any) -> Iterator[str]:
    """A role that needs a password. The server trusts all others."""
    rules = embedded_server.socket_dir.parent / "postgres" / "pg_hba.conf"
    before = rules.read_text()
    embedded_server.execute("create role locked login password 'right'")
    rules.write_text(f"local all locked scram-sha-256\n{before}")
    embedded_server.execute("select pg_reload_conf()")
    yield "locked"
    rules.write_text(before)
    embedded_server.execute("select pg_reload_conf()")
    embedded_server.execute("drop role locked")


def test_wrong_password_is_refused(windlass: CommandLine, dsn: str, locked_role: str) -> None:
    url = dsn.replace("//windlass@", f"//{locked_role}:{PASSWORD}@")
    assert_refused(windlass.with_env(DATABASE_URL=url)("status"), "refused the user or password. Check DATABASE_URL")


def test_doctor_finds_missing_privileges(windlass: CommandLine, dsn: str, locked_role: str) -> None:
    windlass = windlass.with_env(DATABASE_URL=dsn.replace("//windlass@", f"//{locked_role}:right@"))
    assert_refused(windlass("status"), "permission denied for schema windlass")
    findings = {f["check"]: f for f in json.loads(windlass("doctor", "--json").out)}
    assert findings["privileges"]["verdict"] == "fail"
    assert "usage on schema windlass" in findings["privileges"]["what"]


@pytest.mark.parametrize("command", ["cancel", "retry"])
async def test_read_only_user_cannot_change_tasks(
    windlass: CommandLine, dsn: str, locked_role: str, command: str
) -> None:
    windlass.with_env(DATABASE_URL=dsn)("enqueue", "q", "-", stdin="1\n2\n3\n")
    await ask(dsn, f"grant usage on schema windlass to {locked_role}")
    await ask(dsn, f"grant select on all tables in schema windlass to {locked_role}")
    read_only = windlass.with_env(DATABASE_URL=dsn.replace("//windlass@", f"//{locked_role}:right@"))
    assert_refused(read_only("tasks", command, "1", "2", "3"), "denied permission (permission denied for function ")


def test_missing_database_is_named(windlass: CommandLine, dsn: str) -> None:
    url = dsn.replace("/test_", "/missing_")
    assert_refused(windlass.with_env(DATABASE_URL=url)("status"), 'database "missing_')


# ---------------------------------------------------------------------------------------------- choosing a fleet


async def add_fleet(dsn: str, name: str, *, is_run: bool) -> None:
    connection = await asyncpg.connect(dsn)
    await connection.execute("insert into windlass.fleets (name) values ($1)", name)
    if is_run:
        state = "jsonb_build_object('cadence', jsonb_build_object('planned_at', windlass.now()))"
        planned = f"update windlass.fleets set planner_state = {state} where name = $1"  # noqa: S608
        await connection.execute(planned, name)
    await connection.close()


@pytest.mark.parametrize("command", ["spawn", "restart"])
async def test_fleet_must_be_named_unless_only_one_runs(windlass: CommandLine, dsn: str, command: str) -> None:
    windlass = windlass.with_env(DATABASE_URL=dsn)
    assert_refused(windlass(command), "pass the name of a fleet; known fleets: none.")
    # A worker that is started by hand creates its fleet.
    await add_fleet(dsn, "default", is_run=False)
    assert_refused(windlass(command), "fleet default has had no cycle yet: start `windlass up` with it first")
    assert_refused(windlass(command, "default"), "fleet default has had no cycle yet")
    await add_fleet(dsn, "renders", is_run=True)
    assert windlass(command, "--json").json["fleet"] == "renders"
    await add_fleet(dsn, "mail", is_run=True)
    assert_refused(windlass(command), "pass the name of a fleet; known fleets: default, mail, renders.")
    assert windlass(command, "mail", "--json").json["fleet"] == "mail"


async def test_unknown_slot_is_refused(windlass: CommandLine, dsn: str) -> None:
    await add_fleet(dsn, "renders", is_run=True)
    refused = windlass.with_env(DATABASE_URL=dsn)("restart", "--slot", "99")
    assert_refused(refused, "slot 99 not found in fleet renders: its slots are 0 to 9.")
