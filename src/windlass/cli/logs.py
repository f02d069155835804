"""Logging to standard error: text on a terminal, JSON elsewhere, with secrets masked.

Writing a line never blocks the program, even if the terminal is stopped (Ctrl-S) or the reading process has exited.
`add_tap` passes every log entry, as structured data, to another consumer too.

Import this module before any other module that imports structlog (see below).
"""

import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Annotated, Any, Literal, TextIO, cast

import typer

from windlass.model.redaction import mask_known, set_known_secrets
from windlass.worker.nonblocking_stderr import standard_error

# structlog imports rich for tracebacks if it finds it, which takes a worker longer than the rest of its start.
_hides_rich = "structlog" not in sys.modules and "rich" not in sys.modules
if _hides_rich:
    sys.modules["rich"] = None  # type: ignore[assignment] # makes `import rich` fail
import structlog  # noqa: E402

from windlass.cli.human_log import HumanRenderer  # noqa: E402 - it imports structlog

if _hides_rich:
    del sys.modules["rich"]

LogFormat = Annotated[
    Literal["auto", "human", "json"], typer.Option("--log-format", help="auto: human on a terminal, json elsewhere.")
]

_taps: list[Callable[[Mapping[str, Any]], None]] = []


def configure_logs(log_format: Literal["auto", "human", "json"] = "auto") -> None:
    is_human = log_format == "human" or (log_format == "auto" and sys.stderr.isatty())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            mask_secrets,
            _pass_to_taps,
            HumanRenderer(has_colors=sys.stderr.isatty() and not os.environ.get("NO_COLOR"))
            if is_human
            else structlog.processors.JSONRenderer(default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _Lines())),
        cache_logger_on_first_use=True,
    )


def get_logger(name: str) -> Any:
    return structlog.get_logger(name)


def hide(secrets: Iterable[str]) -> None:
    """Mask these strings in all later log lines, and wherever this process writes or shows text."""
    set_known_secrets(secrets)


def add_tap(consumer: Callable[[Mapping[str, Any]], None]) -> Callable[[], None]:
    """Pass every log entry to `consumer`, which must return at once. Returns a function that removes it."""
    _taps.append(consumer)
    return lambda: _taps.remove(consumer)


def mask_secrets(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> Mapping[str, Any]:
    return {name: _masked(value) for name, value in line.items()}


def _masked(value: Any) -> Any:
    if isinstance(value, str):
        return mask_known(value)
    if isinstance(value, Mapping):
        return {name: _masked(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_masked(each) for each in value]
    if isinstance(value, BaseException):
        return _masked(str(value))
    return value


def _pass_to_taps(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> Mapping[str, Any]:
    for consumer in _taps:
        consumer(line)
    return line


class _Lines:
    """A file for structlog, which writes a line in parts and flushes at its end."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def write(self, text: str) -> None:
        self._parts.append(text)

    def flush(self) -> None:
        line = "".join(self._parts)
        self._parts.clear()
        standard_error.write(line.encode(errors="backslashreplace"))
