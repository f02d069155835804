"""What every command shares: its options and how it runs. Light to import: everything here is loaded by --help too."""

import json
import os
import sys
from collections.abc import Callable, Coroutine, Iterable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer

from windlass.model.errors import BadInput
from windlass.worker.nonblocking_stderr import standard_error

if TYPE_CHECKING:
    from windlass.config_loader import Loaded

EXIT_BAD_INPUT = 2
# What shells report of a program that was ended by SIGTERM, as every command is that does not see to it itself.
EXIT_TERMINATED = 143
# The same for one whose reader went away, as in `windlass tasks list | head`.
EXIT_BROKEN_PIPE = 141

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="Configuration file (default: windlass.toml, if there).", metavar="FILE")
]
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Use the embedded PostgreSQL that lives here, not DATABASE_URL.", metavar="FOLDER"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]

Parameters = ParamSpec("Parameters")


def load(config_file: Path | None, data_dir: Path | None, *, has_fleets: bool = True, **overrides: Any) -> "Loaded":
    from windlass.config_loader import load_config

    return load_config(config_file, {"data_dir": data_dir, **overrides}, has_fleets=has_fleets)


def command(function: Callable[Parameters, Coroutine[Any, Any, int | None]]) -> Callable[Parameters, int]:
    """An async function as a command. It returns the exit code; what it raises is main's to explain."""

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> int:
        import asyncio

        _check_text([*args, *kwargs.values()])
        try:
            code = asyncio.run(_until_terminated(function(*args, **kwargs))) or 0
            if sys.stdout is not None:
                sys.stdout.flush()
        except asyncio.CancelledError:
            return EXIT_TERMINATED
        except BrokenPipeError:
            return _be_quiet()
        return code

    return run


def say(message: str) -> None:
    """On one line, whatever the message holds; to a program that asked for JSON, as that."""
    text = " ".join(message.split())
    # What was logged before stands before it.
    standard_error.drain()
    print(json.dumps({"error": text}) if "--json" in sys.argv else f"windlass: {text}", file=sys.stderr)


def _check_text(given: Iterable[Any]) -> None:
    """Raise BadInput for words that no database stores as text. Paths are bytes to the system, and may be anything."""
    for value in given:
        for word in value if isinstance(value, list) else [value]:
            if isinstance(word, str) and not _is_text(word):
                raise BadInput(f"{os.fsencode(word)!r} on the command line is not UTF-8: write it in that encoding.")


def _is_text(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def _be_quiet() -> int:
    """Whoever read our output has enough; what is still buffered goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_BROKEN_PIPE


async def _until_terminated(coroutine: Coroutine[Any, Any, int | None]) -> int | None:
    """SIGTERM ends a command like Ctrl-C does: it tidies up after itself, an embedded server included."""
    import asyncio
    import signal

    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await coroutine
