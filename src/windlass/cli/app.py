"""The program `windlass`.

However it ends, a person gets at most one sentence on standard error and never a traceback (unless WINDLASS_DEBUG=1
asks for it). Exit codes: 0 done; 1 the answer is "no" (doctor, db status, demo) or a defect of ours; 2 something given
cannot be used; 3 a worker was declared lost; 130, 141, 143 as shells have it.
"""

import os
import sys
from typing import Annotated, Any

import typer

from windlass import __version__
from windlass.cli import (
    bootstrap,
    config,
    cost,
    db,
    demo,
    doctor,
    emulate,
    enqueue,
    explain,
    fleets,
    ray,
    status,
    tasks,
    tokens,
    up,
    worker,
    workers,
)
from windlass.cli.common import EXIT_BAD_INPUT, say
from windlass.model.errors import WindlassError
from windlass.model.urls import masked

EXIT_DEFECT = 1
EXIT_INTERRUPTED = 130
# Click's UsageError, or typer's own copy of it: typer's versions differ in where it lives.
_UsageError: Any = typer.BadParameter.__base__

app = typer.Typer(
    name="windlass",
    help="Elastic workers for a PostgreSQL task queue.",
    no_args_is_help=True,
    # Typer would load rich for help and errors, which takes longer than everything else together.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(up.up)
app.command()(worker.worker)
app.command()(enqueue.enqueue)
app.add_typer(tasks.app, name="tasks")
app.command()(status.status)
app.add_typer(workers.app, name="workers")
app.command()(explain.explain)
app.command()(explain.replay)
for by_hand in (fleets.spawn, fleets.terminate, fleets.pause, fleets.resume, fleets.restart):
    app.command()(by_hand)
app.command()(up.cycle)
app.command()(cost.cost)
app.command()(demo.demo)
app.command()(doctor.doctor)
app.add_typer(tokens.app, name="tokens")
app.add_typer(emulate.app, name="emulate")
app.add_typer(db.app, name="db")
app.add_typer(config.app, name="config")
app.add_typer(bootstrap.app, name="bootstrap")
app.add_typer(ray.app, name="ray")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"windlass {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and end.")
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
        return _explain(error)
    return code if isinstance(code, int) else 0


def _explain(error: Exception) -> int:
    while isinstance(error, ExceptionGroup):
        # Many of a kind were done at once: one speaks for all, but what is a defect is not kept back.
        error = min(error.exceptions, key=lambda one: isinstance(one, WindlassError))
    if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command: its message is the help
        print(error, file=sys.stderr)
        return EXIT_BAD_INPUT
    if isinstance(error, _UsageError):
        say(f"{_sentence(error.format_message())} See `{error.ctx.command_path if error.ctx else 'windlass'} --help`.")
        return EXIT_BAD_INPUT
    if isinstance(error, WindlassError):
        say(str(error))
        return EXIT_BAD_INPUT
    if type(error).__module__.startswith("asyncpg"):
        say(f"the database refused ({masked(str(error))}): `windlass doctor` looks for the cause.")
        return EXIT_BAD_INPUT
    say(
        f"unexpected {type(error).__name__} ({masked(str(error))}): this is a defect of windlass. "
        "WINDLASS_DEBUG=1 shows where it happened."
    )
    return EXIT_DEFECT


def _sentence(text: str) -> str:
    text = text.replace("Value error, ", "").rstrip(".")
    return f"{text[:1].lower()}{text[1:]}{'' if text.endswith('?') else '.'}"
