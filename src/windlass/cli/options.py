"""The options that commands share, and `command`, which runs an async function as a command."""

import asyncio
import os
import pwd
import socket
import sys
from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer

from windlass.cli.errors import EXIT_BROKEN_PIPE, EXIT_TERMINATED
from windlass.config_loader import Loaded, load_config
from windlass.model.actor import acting_as
from windlass.model.errors import BadInput
from windlass.wiring.signals import run_until_terminated

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="Configuration file (default: windlass.toml, if present).", metavar="FILE"),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir", help="Use the embedded PostgreSQL in this folder instead of DATABASE_URL.", metavar="FOLDER"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
FleetFilter = Annotated[str | None, typer.Option("--fleet", "-f", help="Only this fleet.", metavar="NAME")]
QueueFilter = Annotated[str | None, typer.Option("--queue", "-q", help="Only this queue.", metavar="NAME")]

Parameters = ParamSpec("Parameters")


def load(config_file: Path | None, data_dir: Path | None, *, has_fleets: bool = True, **overrides: Any) -> Loaded:
    return load_config(config_file, {"data_dir": data_dir, **overrides}, has_fleets=has_fleets)


def command(
    function: Callable[Parameters, Coroutine[Any, Any, int | None] | int | None],
) -> Callable[Parameters, int]:
    """Run a function as a command, with an event loop if it is async.

    It returns the exit code, None for 0. `main` reports what it raises.
    """

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> int:
        for value in (*args, *kwargs.values()):
            for word in value if isinstance(value, list) else [value]:
                _check_encoding(word)
        try:
            code = _run(function, *args, **kwargs) or 0
            if sys.stdout is not None:
                sys.stdout.flush()
        except asyncio.CancelledError:
            return EXIT_TERMINATED
        except BrokenPipeError:
            # The reader of our output has closed it. Discard the rest of the buffer.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_BROKEN_PIPE
        return code

    return run


def person_command(function: Callable[Parameters, Coroutine[Any, Any, int | None]]) -> Callable[Parameters, int]:
    """A command with which a person changes something. Its events name the user of the operating system."""

    @wraps(function)
    async def run_as_person(*args: Parameters.args, **kwargs: Parameters.kwargs) -> int | None:
        with acting_as(os_actor()):
            return await function(*args, **kwargs)

    return command(run_as_person)


def os_user() -> str:
    """The user of the operating system that runs this command, and the host."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        name = str(os.getuid())
    return f"{name}@{socket.gethostname()}"


def os_actor() -> str:
    """This user as events name the person who caused them."""
    return f"user:{os_user()}"


def _run(
    function: Callable[Parameters, Coroutine[Any, Any, int | None] | int | None],
    *args: Parameters.args,
    **kwargs: Parameters.kwargs,
) -> int | None:
    result = function(*args, **kwargs)
    return asyncio.run(run_until_terminated(result)) if isinstance(result, Coroutine) else result


def _check_encoding(word: Any) -> None:
    """Raise BadInput for text that the database cannot store. Paths are bytes, and need no encoding."""
    if isinstance(word, str):
        try:
            word.encode()
        except UnicodeEncodeError:
            raise BadInput(
                f"{os.fsencode(word)!r} on the command line is not valid UTF-8. Use a UTF-8 terminal."
            ) from None
