"""`windlass db` and `windlass doctor`."""

import asyncio
import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from support.catalog import catalog
from support.command_line import TIMEOUT_S, CommandLine
from support.postgres_servers import transaction_pooler
from windlass.store import migration
from windlass.store.embedded import EmbeddedPostgres
from windlass.store.migration import LATEST_VERSION, MIGRATIONS, Migration


@pytest.fixture
def windlass(tmp_path: Path) -> CommandLine:
    return CommandLine(tmp_path)


@pytest.fixture
def data_dir(reachable_path: Path) -> Path:
    return reachable_path / "data"


def test_migrate_prints_the_applied_migrations(windlass: CommandLine, data_dir: Path) -> None:
    place = ("--data-dir", data_dir)
    before = windlass("db", "status", *place)
    assert before.code == 1
    assert before.out.split()[:2] == [f"{LATEST_VERSION:04}", "schema"]
    assert before.out.endswith("not applied\n")
    assert not data_dir.exists(), "a query created a database"
    with EmbeddedPostgres(data_dir):  # opened once for all of this, and empty
        assert windlass("db", "status", *place).out == before.out
        done = windlass("db", "migrate", *place)
        assert done.out.splitlines() == [
            f"applied {LATEST_VERSION:04} schema",
            f"schema is at version {LATEST_VERSION}",
        ]
        assert windlass("db", "migrate", *place, "--json").json == {"applied": [], "version": LATEST_VERSION}
        after = windlass("db", "status", *place, "--json").json
    assert (after["version"], after["program_version"]) == (LATEST_VERSION, LATEST_VERSION)
    assert all(row["applied_at"] and row["is_known"] for row in after["migrations"])


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            ("status",),
            ("tasks", "list"),
            ("tasks", "retry", "1"),
            ("workers", "list"),
            ("explain", "1"),
            ("replay", "1"),
            ("cost",),
            ("tokens", "list"),
            ("tokens", "sessions"),
            ("tokens", "revoke", "ci"),
            ("db", "url"),
        ),
        *(("spawn",), ("pause", "--all"), ("resume", "--all"), ("restart",), ("terminate", "w")),
    ],
    ids=" ".join,
)
def test_queries_create_no_database(windlass: CommandLine, data_dir: Path, arguments: tuple[str, ...]) -> None:
    done = windlass(*arguments, "--data-dir", data_dir)
    assert (done.code, done.out) == (2, "")
    assert (
        f"there is no database in {data_dir} yet. `windlass up`, `worker`, `enqueue` or `db migrate` creates one"
        in done.err
    )
    assert not data_dir.exists()


def test_commands_never_migrate_the_schema_of_another_program(
    windlass: CommandLine, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = ("--data-dir", data_dir)
    later = Migration(LATEST_VERSION + 1, "later", "create table windlass.later (id integer)")
    with EmbeddedPostgres(data_dir) as postgres:
        asyncio.run(migration.migrate(postgres.dsn))
        monkeypatch.setattr(migration, "MIGRATIONS", [*MIGRATIONS, later])
        monkeypatch.setattr(migration, "LATEST_VERSION", later.version)
        asyncio.run(migration.migrate(postgres.dsn))
        for arguments in (("status",), ("workers", "list"), ("db", "migrate")):
            done = windlass(*arguments, *place)
            assert (done.code, done.out) == (2, ""), done
            assert f"is at version {later.version} and this program supports {LATEST_VERSION}: upgrade" in done.err
        assert re.search(r"^warn schema .*upgrade windlass on this machine$", windlass("doctor", *place).out, re.M)
        # A producer needs only the contract.
        assert windlass("enqueue", "q", "2", *place).code == 0


def test_folder_with_other_files_gets_no_database(windlass: CommandLine, data_dir: Path) -> None:
    data_dir.mkdir()
    (data_dir / "thesis.tex").write_text("all of it")
    for arguments in (("enqueue", "q", "1"), ("db", "migrate")):
        done = windlass(*arguments, "--data-dir", data_dir)
        assert done.code == 2
        assert f"{data_dir} has other files (thesis.tex) and no database of Windlass: name an empty or" in done.err
    assert [path.name for path in data_dir.iterdir()] == ["thesis.tex"]


def test_db_url_works_while_the_database_runs(windlass: CommandLine, data_dir: Path) -> None:
    place = ("--data-dir", data_dir)
    with EmbeddedPostgres(data_dir) as postgres:
        assert windlass("db", "url", *place).out == f"{postgres.dsn}\n"
    assert f"the embedded database in {data_dir} is not running" in windlass("db", "url", *place).err
    with windlass.start("db", "url", "--keep", *place, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{postgres.dsn}\n"
        assert windlass("db", "url", *place).out == f"{postgres.dsn}\n"
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    assert "is not running" in windlass("db", "url", *place).err
    named = windlass.with_env(DATABASE_URL="postgresql://u:secret@h:5432/d?password=secret&sslmode=require")
    assert named("db", "url").out == "postgresql://u@h:5432/d?sslmode=require\n"
    assert named("db", "url", "--json").json == {"url": "postgresql://u@h:5432/d?sslmode=require"}


def test_config_and_doctor_show_the_data_folder(windlass: CommandLine) -> None:
    where = windlass("config", "show", "--json").json["data_dir"]
    assert where["source"] == "default"
    assert Path(where["value"]).is_absolute()
    assert where["value"] in windlass("doctor").out


async def test_status_shows_migrations_of_a_newer_program(windlass: CommandLine, dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    await connection.execute("insert into windlass.migrations (version, name, checksum) values (999, 'later', '')")
    await connection.close()
    done = windlass.with_env(DATABASE_URL=dsn)("db", "status")
    assert done.code == 1
    assert re.search(r"^0999 later +applied .* by a newer windlass$", done.out, re.MULTILINE)


# ------------------------------------------------------------------------------------------------------ db sql


async def paste(dsn: str, sql: str) -> None:
    """Run the whole script in one request, as an SQL editor does."""
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


async def test_pasted_script_gives_the_same_database_as_migrate(
    windlass: CommandLine, each_server: Any, empty_dsn: str
) -> None:
    await paste(empty_dsn, windlass("db", "sql").out)
    with each_server.migrated_database() as migrated_dsn:
        assert await catalog(empty_dsn) == await catalog(migrated_dsn)
    # The rows in windlass.migrations are those that migrate writes.
    assert windlass.with_env(DATABASE_URL=empty_dsn)("db", "migrate", "--json").json["applied"] == []


async def test_missing_prints_the_schema_for_an_empty_database_only(
    windlass: CommandLine, dsn: str, embedded_server: Any
) -> None:
    with embedded_server.database() as empty_dsn:
        windlass = windlass.with_env(DATABASE_URL=empty_dsn)
        await paste(empty_dsn, windlass("db", "sql", "--missing").out)
        assert await catalog(empty_dsn) == await catalog(dsn)
        assert windlass("db", "sql", "--missing").out.startswith("-- Nothing to apply: ")


async def test_script_for_another_version_changes_nothing(windlass: CommandLine, dsn: str) -> None:
    before = await catalog(dsn)
    with pytest.raises(asyncpg.RaiseError, match=f"the schema is at version {LATEST_VERSION}, this script starts at 0"):
        await paste(dsn, windlass("db", "sql").out)
    assert await catalog(dsn) == before


# ------------------------------------------------------------------------------------------------------------- doctor


def test_doctor_passes_on_a_good_database(windlass: CommandLine, dsn: str) -> None:
    done = windlass.with_env(DATABASE_URL=dsn)("doctor")
    assert done.code == 0, done
    checks = [line.split()[1] for line in done.out.splitlines()]
    assert checks == [
        *("python", "platform", "gpu", "configuration", "fleets", "database"),
        *("version", "schema", "privileges", "pooler", "listen", "clock"),
    ]
    assert {line.split()[0] for line in done.out.splitlines()} <= {"ok", "warn"}


def test_doctor_names_fleets_and_checks_their_handlers(windlass: CommandLine, dsn: str, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("def generate(task): ...\n")
    (tmp_path / "crashing.py").write_text("import os\nos._exit(3)\n")
    (tmp_path / "windlass.toml").write_text(
        f"""[fleets.good]\nhandler = "app:generate"\nchdir = "{tmp_path}"
        [fleets.mistyped]\nhandler = "app:generat"\nchdir = "{tmp_path}"
        [fleets.crashing]\nhandler = "crashing:generate"\nchdir = "{tmp_path}"
        [fleets.far]\nprovider = "ray"\nhandler = "app:generate"
        [fleets.shell]\nexec = "true"\n"""
    )
    done = windlass.with_env(DATABASE_URL=dsn)("doctor", "--config", tmp_path / "windlass.toml")
    assert done.code == 1
    found = [line.split(maxsplit=2) for line in done.out.splitlines()]
    assert [line for line in found if line[1] in ("fleets", "handler")] == [
        ["ok", "fleets", "5: good (local), mistyped (local), crashing (local), far (ray), shell (local)"],
        ["ok", "handler", "good: app:generate is importable"],
        ["FAIL", "handler", "mistyped: cannot find generat in app. Check the name after the colon"],
        [
            "warn",
            "handler",
            "crashing: crashing:generate: its import crashed or took over 10 s: "
            "`windlass worker --queue NAME --handler ...` shows why",
        ],
        ["ok", "handler", "far: app:generate is imported on the fleet's machines, not here"],
    ]
    (tmp_path / "windlass.toml").write_text("[fleets.idle]\n")
    idle = windlass.with_env(DATABASE_URL=dsn)("doctor", "--config", tmp_path / "windlass.toml")
    assert "FAIL fleets        fleet idle has nothing to run: set its handler or exec" in idle.out


def test_doctor_ends_quietly_when_its_pipe_is_closed(windlass: CommandLine, data_dir: Path) -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    doctor = windlass.start("doctor", "--data-dir", data_dir, **pipes)
    assert doctor.stdout is not None
    # The next line is printed after doctor has started a database, which it must stop although the pipe is closed.
    while "disk" not in doctor.stdout.readline():
        assert doctor.poll() is None
    doctor.stdout.close()
    _, errors = doctor.communicate(timeout=TIMEOUT_S)
    assert (doctor.returncode, errors) == (141, "")


def test_doctor_tries_an_embedded_database_and_removes_it(windlass: CommandLine, data_dir: Path) -> None:
    done = windlass("doctor", "--data-dir", data_dir)
    assert done.code == 0, done
    assert f"{data_dir} gets a database at first use" in done.out
    assert not data_dir.exists()


@pytest.mark.needs_root
def test_doctor_finds_a_folder_that_postgres_cannot_enter(windlass: CommandLine, reachable_path: Path) -> None:
    (reachable_path / "closed").mkdir(mode=0o700)
    there = reachable_path / "closed" / "data"
    done = windlass("doctor", "--data-dir", there)
    assert done.code == 1
    assert re.search(rf"^FAIL database .*cannot enter {there}: name a data directory every", done.out, re.MULTILINE)
    assert not there.exists()


def test_doctor_finds_a_folder_with_other_files(windlass: CommandLine, data_dir: Path) -> None:
    data_dir.mkdir()
    (data_dir / "thesis.tex").write_text("all of it")
    done = windlass("doctor", "--data-dir", data_dir)
    assert done.code == 1
    assert re.search(r"^FAIL database .*has other files \(thesis.tex\)", done.out, re.MULTILINE)


@pytest.mark.parametrize(
    ("env", "check", "what"),
    [
        pytest.param({"DATABASE_URL": "postgresql://u@127.0.0.1:1/d"}, "database", "cannot be reached", id="no server"),
        pytest.param({"WINDLASS_NOPE": "1"}, "configuration", "WINDLASS_NOPE in the environment", id="a bad setting"),
        pytest.param({"WINDLASS_DATA_DIR": "/dev/null/x"}, "disk", "is not writable", id="an unusable folder"),
    ],
)
def test_doctor_reports_failed_checks(windlass: CommandLine, env: dict[str, str], check: str, what: str) -> None:
    done = windlass.with_env(**env)("doctor", "--json")
    (finding,) = [finding for finding in json.loads(done.out) if finding["check"] == check]
    assert (done.code, finding["verdict"]) == (1, "fail")
    assert what in finding["what"]


def test_doctor_asks_for_a_migration(windlass: CommandLine, empty_dsn: str) -> None:
    done = windlass.with_env(DATABASE_URL=empty_dsn)("doctor")
    assert done.code == 1
    assert re.search(r"^FAIL schema .*run `windlass db migrate` once$", done.out, re.MULTILINE)


@pytest.fixture
def pooled_dsn(dsn: str, embedded_server: Any, reachable_path: Path) -> Iterator[str]:
    with transaction_pooler(embedded_server, dsn, reachable_path) as pooled:
        yield pooled


def test_doctor_warns_about_a_pooler(windlass: CommandLine, pooled_dsn: str) -> None:
    done = windlass.with_env(DATABASE_URL=pooled_dsn)("doctor", "--json")
    verdicts = {finding["check"]: finding["verdict"] for finding in done.json}
    assert (verdicts["schema"], verdicts["pooler"], verdicts["listen"]) == ("ok", "warn", "warn")


async def test_roles_are_enough_for_a_producer(windlass: CommandLine, dsn: str) -> None:
    printed = windlass("db", "roles", "--sql").out
    done = windlass.with_env(DATABASE_URL=dsn)("db", "roles")
    assert (done.code, done.out.splitlines()[0].split()[1]) == (0, "windlass_owner,")
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(printed)
        if not await connection.fetchval("select exists (select from pg_roles where rolname = 'shop')"):
            await connection.execute("create role shop login in role windlass_producer")
        shop = dsn.replace(f"{urlsplit(dsn).username}@", "shop@")
        findings = {
            finding["check"]: finding for finding in windlass.with_env(DATABASE_URL=shop)("doctor", "--json").json
        }
        assert (findings["schema"]["verdict"], findings["privileges"]["verdict"]) == ("ok", "ok")
        done = windlass.with_env(DATABASE_URL=shop)("enqueue", "q", "1", "--json")
        assert done.code == 0
        assert windlass.with_env(DATABASE_URL=dsn)("db", "migrate").code == 0
    finally:
        await connection.close()


def test_roles_need_a_schema(windlass: CommandLine, empty_dsn: str) -> None:
    done = windlass.with_env(DATABASE_URL=empty_dsn)("db", "roles")
    assert done.code != 0
    assert "run `windlass db migrate`" in done.err
