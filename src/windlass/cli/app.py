"""The program `windlass`: its list of commands, and how errors become one line and an exit code.

A command's module is imported when the command is used, so that `windlass --help` stays fast. The user never sees a
traceback unless WINDLASS_DEBUG=1 is set.

Exit codes: 0 success; 1 a check failed (doctor, db status, demo, replay) or an internal error; 2 bad input, or a
request that cannot be executed; 3 a worker was declared lost; 130, 141, 143 for SIGINT, SIGPIPE, SIGTERM.
"""

import os
import sys
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from windlass import __version__
from windlass.cli.errors import EXIT_BAD_INPUT, print_error
from windlass.cli.examples import help_epilog
from windlass.model.errors import WindlassError
from windlass.model.redaction import masked

EXIT_DEFECT = 1
EXIT_INTERRUPTED = 130
# How typer's messages, which are pydantic's, read to a person at a shell.
_PYDANTIC_WORDS = {
    "Value error, ": "",
    "Input should be a valid integer, unable to parse string as an integer": "must be a whole number",
    "Input should be a valid number, unable to parse string as a number": "must be a number",
    "Input should be greater than or equal to": "must be at least",
    "Input should be less than or equal to": "must be at most",
}
# Click's UsageError or typer's own copy of it, depending on the version of typer.
_UsageError: Any = typer.BadParameter.__base__


class CommandEntry(NamedTuple):
    name: str
    module: str
    attribute: str
    # The first sentence of the command's own help. A test compares them.
    summary: str


COMMANDS = {
    "Run": (
        CommandEntry("up", "up", "up", "Run the fleets in windlass.toml: spawn, supervise and terminate workers."),
        CommandEntry("reload", "reload", "reload", "Make the running `windlass up` read its configuration again."),
        CommandEntry("serve", "up", "serve", "Run HTTP servers alone, for a control loop that runs elsewhere."),
        CommandEntry("worker", "worker", "worker", "Claim tasks and run a handler for each."),
        CommandEntry("cycle", "up", "cycle", "Run one control cycle of every fleet and print a summary as JSON."),
        CommandEntry("demo", "demo", "demo", "Show autoscaling and crash recovery on this host, in under a minute."),
    ),
    "Tasks": (
        CommandEntry("enqueue", "enqueue", "enqueue", "Add a task to a queue, or one task per line of a file."),
        CommandEntry("tasks", "tasks", "app", "List, retry, cancel and delete tasks."),
    ),
    "Fleets and workers": (
        CommandEntry("status", "status", "status", "Show queues, fleets, workers and the results of the last hour."),
        CommandEntry("workers", "workers", "app", "List workers and show their logs."),
        CommandEntry("spawn", "fleets", "spawn", "Spawn workers now, whatever the scaling policy decides."),
        CommandEntry("terminate", "fleets", "terminate", "Drain workers: they finish their tasks, then terminate."),
        CommandEntry("pause", "fleets", "pause", "Pause workers or fleets: no new tasks, no new workers."),
        CommandEntry("resume", "fleets", "resume", "Resume paused workers or fleets."),
        CommandEntry("deploy", "deploy", "deploy", "Replace a fleet's workers to deploy new code or settings."),
        CommandEntry("restart", "fleets", "restart", "Replace the workers of a fleet, and clear its failures."),
    ),
    "Decisions and cost": (
        CommandEntry("explain", "explain", "explain", "Explain the state of a task, a worker or a fleet."),
        CommandEntry("runbook", "runbook", "runbook", "Print what a code means and what to do about it."),
        CommandEntry("replay", "explain", "replay", "Repeat the decision of a stored cycle, with other settings."),
        CommandEntry(
            "simulate",
            "simulate",
            "simulate",
            "Simulate a scaling policy on a trace of tasks: cost, waits and machines.",
        ),
        CommandEntry(
            "tune", "tune", "tune", "Search settings for the least cost that holds a goal, on part of a trace."
        ),
        CommandEntry("cost", "cost", "cost", "Show the cost of machines by day, fleet, queue, worker or task."),
    ),
    "Set-up": (
        CommandEntry("init", "init", "init", "Write windlass.toml, a handler and deploy files for a new project."),
        CommandEntry("doctor", "doctor", "doctor", "Check this machine, the configuration and the database."),
        CommandEntry("config", "config", "app", "Show the configuration."),
        CommandEntry("db", "db", "app", "Manage the database schema."),
        CommandEntry("tokens", "tokens", "app", "Create and revoke API tokens and dashboard links."),
        CommandEntry(
            "audit", "audit", "audit", "List the changes that people and programs with a token made, newest first."
        ),
        CommandEntry("bootstrap", "bootstrap", "app", "Show the first-boot script of a cloud machine."),
        CommandEntry("emulate", "emulate", "app", "Run an emulated cloud on this host, with real workers."),
        CommandEntry("ray", "ray", "app", "Run the parts of a fleet whose tasks Ray places."),
    ),
}
_ENTRIES = {entry.name: entry for entries in COMMANDS.values() for entry in entries}


class LazyGroup(TyperGroup):
    """The commands of COMMANDS. Imports a command's module when the command is used."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # None: not imported yet. Typer suggests similar names from the keys.
        self.commands: dict[str, Any] = dict.fromkeys(_ENTRIES)

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(_ENTRIES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        if cmd_name in _ENTRIES and self.commands[cmd_name] is None:
            entry = _ENTRIES[cmd_name]
            found = getattr(import_module(f"windlass.cli.{entry.module}"), entry.attribute)
            holder = typer.Typer(
                add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, callback=lambda: None
            )
            if isinstance(found, typer.Typer):
                holder.add_typer(found, name=cmd_name)
            else:
                holder.command(cmd_name)(found)
            group: Any = typer.main.get_command(holder)
            self.commands[cmd_name] = group.commands[cmd_name]
            self.commands[cmd_name].epilog = help_epilog(cmd_name)
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        for panel, entries in COMMANDS.items():
            with formatter.section(panel):
                formatter.write_dl([(entry.name, entry.summary) for entry in entries])


app = typer.Typer(
    name="windlass",
    cls=LazyGroup,
    help="Elastic workers for a PostgreSQL task queue.",
    epilog=help_epilog("windlass"),
    no_args_is_help=True,
    # With markup, typer loads rich for help and errors, which takes longer than everything else together.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"windlass {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


def main() -> None:
    sys.exit(_run())


def _run() -> int:
    try:
        code = app(prog_name="windlass", standalone_mode=False)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        if os.environ.get("WINDLASS_DEBUG") and not isinstance(error, _UsageError):
            raise
        return _report(error)
    return code if isinstance(code, int) else 0


def _report(error: Exception) -> int:
    while isinstance(error, ExceptionGroup):
        # Several concurrent calls failed: report one of them, an internal error before an expected one.
        error = min(error.exceptions, key=lambda one: isinstance(one, WindlassError))
    if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command: the message is the help text
        print(error)
        return 0
    if isinstance(error, _UsageError):
        text = error.format_message().rstrip(".")
        for words, plain in _PYDANTIC_WORDS.items():
            text = text.replace(words, plain)
        end = "" if text.endswith("?") else "."
        path = error.ctx.command_path if error.ctx else "windlass"
        print_error(f"{text[:1].lower()}{text[1:]}{end} See `{path} --help`.")
        return EXIT_BAD_INPUT
    if isinstance(error, WindlassError):
        print_error(str(error))
        return EXIT_BAD_INPUT
    if type(error).__module__.startswith("asyncpg"):
        print_error(f"the database returned an error: {masked(str(error))}. Run `windlass doctor` to find the cause.")
        return EXIT_BAD_INPUT
    print_error(
        f"unexpected {type(error).__name__}: {masked(str(error))}. This is a defect in windlass. "
        "Set WINDLASS_DEBUG=1 to see the traceback."
    )
    return EXIT_DEFECT
