"""The program as a whole: how it starts, how it ends, what it loads."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from support.command_line import CommandLine
from windlass import __version__
from windlass.cli.app import app

HEAVY = ("rich", "asyncio", "asyncpg", "structlog", "pynvml", "psutil")


@pytest.fixture
def windlass(tmp_path: Path) -> CommandLine:
    return CommandLine(tmp_path)


def loaded_modules(importtime: str) -> set[str]:
    return set(re.findall(r"\|\s+([\w.]+)$", importtime, re.MULTILINE))


@pytest.mark.parametrize("arguments", [("--version",), ("--help",), ("worker", "--help"), ("tasks", "list", "--help")])
def test_nothing_heavy_is_loaded_for(windlass: CommandLine, arguments: tuple[str, ...]) -> None:
    done = windlass(*arguments, python=("-X", "importtime"))
    assert done.code == 0
    assert loaded_modules(done.err).isdisjoint(HEAVY)


def test_a_worker_starts_without_rich(windlass: CommandLine, dsn: str) -> None:
    windlass = windlass.with_env(DATABASE_URL=dsn)
    done = windlass("worker", "-q", "q", "--exec", "missing-command", python=("-X", "importtime"))
    assert "cannot find the command 'missing-command'" in done.err
    assert "windlass.worker.lifecycle" in loaded_modules(done.err)
    # The word alone is an attempt; with parts it succeeded.
    assert not [name for name in loaded_modules(done.err) if name.startswith("rich.")]


def commands(group: Any, *path: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *path, name)
        else:
            yield " ".join((*path, name)), command


def test_every_command_that_answers_a_program_can_answer_in_json() -> None:
    without = {
        name
        for name, command in commands(typer.main.get_command(app))
        if "--json" not in {option for parameter in command.params for option in parameter.opts}
    }
    run_until_ended = {"up", "worker", "ray dispatch", "ray node", "emulate hetzner", "emulate runpod"}
    print_a_file = {"db sql", "bootstrap render"}
    assert without == run_until_ended | print_a_file


def test_the_version_is_printed(windlass: CommandLine) -> None:
    assert windlass("--version").out == f"windlass {__version__}\n"


def test_without_a_command_the_help_is_shown(windlass: CommandLine) -> None:
    done = windlass()
    assert (done.code, done.out) == (2, "")
    assert "Usage: windlass" in done.err


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        pytest.param("windlass ta", "tasks", id="a command"),
        pytest.param("windlass tasks re", "retry", id="a command of a group"),
        pytest.param("windlass tasks list --status ", "failed", id="a value"),
    ],
)
def test_the_shell_completes(windlass: CommandLine, words: str, offered: str) -> None:
    windlass = windlass.with_env(_WINDLASS_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(words.count(" ")))
    assert offered in windlass().out.split()


def test_completion_can_be_installed(windlass: CommandLine, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # In a shell that stays: typer finds out which shell it is from its parent.
    done = subprocess.run(
        ["bash", "-c", "windlass --install-completion; windlass --show-completion; exit $?"],
        env={**windlass.environment(), "HOME": str(tmp_path), "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done
    assert "complete -o default -F _windlass_completion windlass" in done.stdout
    assert (tmp_path / ".bash_completions" / "windlass.sh").exists()


def test_a_reader_that_has_enough_is_left_in_peace(windlass: CommandLine, dsn: str) -> None:
    windlass = windlass.with_env(DATABASE_URL=dsn)
    assert windlass("enqueue", "q", "-", stdin='{"long": "line"}\n' * 5_000).code == 0
    with windlass.start("tasks", "list", "--limit", 5_000, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_a_question_that_is_interrupted_ends_the_command(windlass: CommandLine) -> None:
    purge = ("tasks", "purge", "--status", "failed", "--older-than", "7d")
    with windlass.start(*purge, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        question = "Delete all failed tasks of all queues that ended more than 7d ago, for good? [y/N] "
        assert process.stderr.read(len(question)) == question
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == ""
    assert process.returncode == 130


def test_a_defect_is_one_sentence_and_its_traceback_is_there_for_the_asking(windlass: CommandLine) -> None:
    (windlass.folder / "sitecustomize.py").write_text(
        "import windlass.config_loader\n"
        "def broken(*_, **__): raise KeyError('postgresql://u:hunter2@h/d')\n"
        "windlass.config_loader.load_config = broken\n"
    )
    broken = windlass.with_env(PYTHONPATH=str(windlass.folder))
    done = broken("config", "show")
    assert done.code == 1
    assert done.err.startswith("windlass: unexpected KeyError (")
    assert done.err.endswith("WINDLASS_DEBUG=1 shows where it happened.\n")
    assert done.err.count("\n") == 1
    assert "hunter2" not in done.err
    assert "Traceback" in broken.with_env(WINDLASS_DEBUG="1")("config", "show").err


def test_a_worker_goes_on_when_nobody_reads_its_log(windlass: CommandLine, dsn: str) -> None:
    windlass = windlass.with_env(DATABASE_URL=dsn)
    (windlass.folder / "app.py").write_text("def handle(task): return task.payload\n")
    arguments = ("worker", "-q", "q", "--handler", "app:handle", "--log-format", "json")
    with windlass.start(*arguments, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert "worker registered" in process.stderr.readline()
        process.stderr.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert windlass("status", "--json").json["workers"] == []


@pytest.mark.parametrize("log_format", ["json", "human"])
def test_the_log_of_a_failed_attempt_says_why_and_paints_nothing(
    windlass: CommandLine, dsn: str, log_format: str
) -> None:
    windlass = windlass.with_env(DATABASE_URL=dsn)
    (windlass.folder / "app.py").write_text("def handle(task): return 1 / task.payload\n")
    windlass("enqueue", "q", "0", "--max-attempts", "1")
    arguments = ("worker", "-q", "q", "--handler", "app:handle", "--log-format", log_format)
    with windlass.start(*arguments, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "attempt failed" in line)
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
    assert "ZeroDivisionError: division by zero" in line
    assert "\x1b" not in line


def test_config_show_names_every_value_and_its_source_but_no_secret(windlass: CommandLine) -> None:
    (windlass.folder / "other.toml").write_text("[retention]\ncomplete_s = 60")
    windlass = windlass.with_env(DATABASE_URL="postgresql://u:hunter2@h:5432/d?sslpassword=hunter2")
    shown = windlass("config", "show", "--config", "other.toml")
    assert "hunter2" not in shown.out
    assert "False" not in shown.out, "a file takes false"
    settings = windlass("config", "show", "--config", "other.toml", "--json").json
    assert settings["database_url"]["value"] == "postgresql://u:********@h:5432/d?sslpassword=********"
    assert settings["database_url"]["source"] == "DATABASE_URL"
    assert settings["retention.complete_s"] | {"description": ""} == {
        "value": 60.0,
        "source": "other.toml",
        "description": "",
    }
    assert settings["worker.lease_s"]["source"] == "default"


def test_the_installed_program_is_the_same(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("windlass")
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True, env=dict(os.environ))
    assert done.stdout == f"windlass {__version__}\n"
