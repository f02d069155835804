"""What every command shares: its options, its way of ending, its two ways of printing."""

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime
from enum import Enum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer

from windlass.configure import Loaded, load_config
from windlass.model.errors import WindlassError

EXIT_BAD_INPUT = 2

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="Configuration file (default: windlass.toml, if there).", metavar="FILE")
]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Where the embedded PostgreSQL lives.", metavar="FOLDER")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]

Parameters = ParamSpec("Parameters")


def load(config_file: Path | None, data_dir: Path | None, **overrides: Any) -> Loaded:
    return load_config(config_file, {"data_dir": data_dir, **overrides})


def command(function: Callable[Parameters, Coroutine[Any, Any, int | None]]) -> Callable[Parameters, None]:
    """Run an async command. A WindlassError becomes one sentence on standard error and exit code 2."""

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        try:
            code = asyncio.run(function(*args, **kwargs))
        except WindlassError as error:
            print(f"windlass: {error}", file=sys.stderr)
            raise typer.Exit(EXIT_BAD_INPUT) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        if code:
            raise typer.Exit(code)

    return run


def print_json(value: Any) -> None:
    print(json.dumps(to_plain(value), indent=2, ensure_ascii=False))


def to_plain(value: Any) -> Any:
    """What JSON can hold, from our own types. JSON text in `payload` and `result` is shown as what it says."""
    if is_dataclass(value) and not isinstance(value, type):
        plain = {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
        for name in ("payload", "result"):
            if isinstance(plain.get(name), str):
                plain[name] = json.loads(plain[name])
        return plain
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [to_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value
