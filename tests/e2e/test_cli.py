"""The program `windlass`: help, imports, exit codes, interrupts, logs."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from support.command_line import CommandLine
from windlass import __version__
from windlass.cli.app import COMMANDS, app
from windlass.cli.examples import EXAMPLES

SLOW_IMPORTS = ("rich", "asyncio", "asyncpg", "structlog", "pynvml", "psutil")


@pytest.fixture
def windlass(tmp_path: Path) -> CommandLine:
    return CommandLine(tmp_path)


def loaded_modules(importtime: str) -> set[str]:
    return set(re.findall(r"\|\s+([\w.]+)$", importtime, re.MULTILINE))


@pytest.mark.parametrize("argument", ["--version", "--help"])
def test_help_and_version_import_no_command(windlass: CommandLine, argument: str) -> None:
    done = windlass(argument, python=("-X", "importtime"))
    assert done.code == 0
    loaded = loaded_modules(done.err)
    assert loaded.isdisjoint(SLOW_IMPORTS)
    assert {name for name in loaded if name.startswith("windlass.cli.")} == {
        "windlass.cli.app",
        "windlass.cli.errors",
        "windlass.cli.examples",
    }


@pytest.mark.parametrize("arguments", [("enqueue", "--help"), ("tasks", "list", "--help"), ("worker", "--help")])
def test_commands_import_only_their_own_modules(windlass: CommandLine, arguments: tuple[str, ...]) -> None:
    loaded = loaded_modules(windlass(*arguments, python=("-X", "importtime")).err)
    assert not {name for name in loaded if name.startswith(("rich.", "hcloud", "asyncssh", "fastapi", "ray."))}
    assert "windlass.cli.demo" not in loaded


def test_summaries_in_the_help_match_the_commands(windlass: CommandLine) -> None:
    group: Any = typer.main.get_command(app)
    for entry in (entry for entries in COMMANDS.values() for entry in entries):
        command = group.get_command(None, entry.name)
        assert command.help.partition("\n")[0] == entry.summary, entry.name


def test_worker_starts_without_rich(windlass: CommandLine, dsn: str) -> None:
    windlass = windlass.with_env(DATABASE_URL=dsn)
    done = windlass("worker", "-q", "q", "--exec", "missing-command", python=("-X", "importtime"))
    assert "cannot find the command 'missing-command'" in done.err
    assert "windlass.worker.lifecycle" in loaded_modules(done.err)
    # A failed import lists "rich" only; a successful one lists its submodules too.
    assert not [name for name in loaded_modules(done.err) if name.startswith("rich.")]


def commands(group: Any, *path: str) -> Iterator[tuple[str, Any]]:
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if hasattr(command, "commands"):
            yield from commands(command, *path, name)
        else:
            yield " ".join((*path, name)), command


def test_every_command_with_a_result_has_json_output() -> None:
    without = {
        name
        for name, command in commands(typer.main.get_command(app))
        if "--json" not in {option for parameter in command.params for option in parameter.opts}
    }
    run_until_stopped = {"up", "serve", "worker", "ray dispatch", "ray node", "emulate hetzner", "emulate runpod"}
    print_a_document = {"db sql", "db roles", "db programs", "bootstrap render", "cycle"}
    write_files = {"init"}
    assert without == run_until_stopped | print_a_document | write_files


def test_version_option_prints_the_version(windlass: CommandLine) -> None:
    assert windlass("--version").out == f"windlass {__version__}\n"


def test_no_command_prints_the_help(windlass: CommandLine) -> None:
    done = windlass()
    assert (done.code, done.err) == (0, "")
    assert "Usage: windlass" in done.out


@pytest.mark.parametrize(
    "line", [line for lines in EXAMPLES.values() for line in lines if line.startswith("windlass ")]
)
def test_example_of_the_help_is_a_valid_command_line(line: str) -> None:
    command: Any = typer.main.get_command(app)
    context = command.make_context("windlass", shlex.split(line, comments=True)[1:])
    while isinstance(command, TyperGroup):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)


def test_every_command_has_examples_in_its_help(windlass: CommandLine) -> None:
    assert set(EXAMPLES) == {"windlass", *(entry.name for entries in COMMANDS.values() for entry in entries)}
    assert '  Examples:\n    windlass enqueue renders \'{"prompt"' in windlass("enqueue", "--help").out


def test_summaries_of_subcommands_are_not_cut(windlass: CommandLine) -> None:
    for group in ("tasks", "workers", "db", "tokens", "bootstrap", "emulate", "ray", "config"):
        listed = windlass(group, "--help").out.partition("Commands:")[2]
        assert listed
        assert "..." not in listed, group


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        pytest.param("windlass ta", "tasks", id="a command"),
        pytest.param("windlass tasks re", "retry", id="a subcommand"),
        pytest.param("windlass tasks list --status ", "failed", id="a value of an option"),
    ],
)
def test_shell_completion(windlass: CommandLine, words: str, offered: str) -> None:
    windlass = windlass.with_env(_WINDLASS_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(words.count(" ")))
    assert offered in windlass().out.split()


def test_completion_can_be_installed(windlass: CommandLine, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # A shell that keeps running: typer detects the shell from its parent process.
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


def test_closed_output_pipe_ends_the_command_quietly(windlass: CommandLine, dsn: str) -> None:
    windlass = windlass.with_env(DATABASE_URL=dsn)
    assert windlass("enqueue", "q", "-", stdin='{"long": "line"}\n' * 5_000).code == 0
    with windlass.start("tasks", "list", "--limit", 5_000, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_ctrl_c_at_a_question_ends_the_command(windlass: CommandLine) -> None:
    purge = ("tasks", "purge", "--status", "failed", "--older-than", "7d")
    with windlass.start(*purge, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        question = "Delete all failed tasks of all queues that finished more than 7d ago, permanently? [y/N] "
        assert process.stderr.read(len(question)) == question
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == ""
    assert process.returncode == 130


def test_internal_error_is_one_line_and_debug_shows_the_traceback(windlass: CommandLine) -> None:
    (windlass.folder / "sitecustomize.py").write_text(
        "import windlass.config_loader\n"
        "def broken(*_, **__): raise KeyError('postgresql://u:hunter2@h/d')\n"
        "windlass.config_loader.load_config = broken\n"
    )
    broken = windlass.with_env(PYTHONPATH=str(windlass.folder))
    done = broken("config", "show")
    assert done.code == 1
    assert done.err.startswith("windlass: unexpected KeyError: ")
    assert done.err.endswith("Set WINDLASS_DEBUG=1 to see the traceback.\n")
    assert done.err.count("\n") == 1
    assert "hunter2" not in done.err
    assert "Traceback" in broken.with_env(WINDLASS_DEBUG="1")("config", "show").err


def test_worker_keeps_running_when_its_log_pipe_is_closed(windlass: CommandLine, dsn: str) -> None:
    windlass = windlass.with_env(DATABASE_URL=dsn)
    (windlass.folder / "app.py").write_text("def handle(task): return task.payload\n")
    arguments = ("worker", "-q", "q", "--handler", "app:handle", "--log-format", "json")
    with windlass.start(*arguments, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert any("registered worker" in line for line in process.stderr)
        process.stderr.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert windlass("status", "--json").json["workers"] == []


@pytest.mark.parametrize("log_format", ["json", "human"])
def test_log_of_a_failed_attempt_has_the_error_and_no_colors(windlass: CommandLine, dsn: str, log_format: str) -> None:
    windlass = windlass.with_env(DATABASE_URL=dsn)
    (windlass.folder / "app.py").write_text(
        "def handle(task): raise ValueError('no such file\\n-- end of message --')\n"
    )
    windlass("enqueue", "q", "0", "--max-attempts", "1")
    arguments = ("worker", "-q", "q", "--handler", "app:handle", "--log-format", log_format)
    with windlass.start(*arguments, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "fail attempt" in line)
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
    assert "ValueError: no such file" in line
    assert "end of message" not in line
    assert "\x1b" not in line


def test_config_show_prints_values_and_sources_without_secrets(windlass: CommandLine) -> None:
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


def test_installed_program_runs(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("windlass")
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True, env=dict(os.environ))
    assert done.stdout == f"windlass {__version__}\n"
