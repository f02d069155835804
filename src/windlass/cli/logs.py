"""Log lines: for people on a terminal, JSON elsewhere, always on standard error. Without secrets, whoever logs them.
Whoever reads them may stop or end first (Ctrl-S, `windlass worker | tee`); the program still has work to finish.

`tap` hands every line to somebody else too, as what it says and not as text.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Annotated, Any, Literal, TextIO, cast

import typer

from windlass.model.redaction import Mask, mask_of
from windlass.worker.nonblocking_stderr import standard_error

LogFormat = Annotated[
    Literal["auto", "human", "json"], typer.Option("--log-format", help="auto: human on a terminal, JSON elsewhere.")
]

_mask = Mask()
_taps: list[Callable[[Mapping[str, Any]], None]] = []


def configure_logs(log_format: Literal["auto", "human", "json"] = "auto") -> None:
    """Comes before everything that logs is imported."""
    _import_structlog_without_rich()
    import logging

    import structlog

    is_human = log_format == "human" or (log_format == "auto" and sys.stderr.isatty())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            without_secrets,
            _hand_on,
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty() and not os.environ.get("NO_COLOR"))
            if is_human
            else structlog.processors.JSONRenderer(default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _Lines())),
        cache_logger_on_first_use=True,
    )


def hide(secrets: Iterable[str]) -> None:
    """From now on no line holds any of these."""
    global _mask  # noqa: PLW0603 - the log is one for the whole process
    _mask = mask_of(secrets)


def tap(taker: Callable[[Mapping[str, Any]], None]) -> Callable[[], None]:
    """Hand every line to somebody who takes no time. Returns how to stop that."""
    _taps.append(taker)
    return lambda: _taps.remove(taker)


def without_secrets(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> Mapping[str, Any]:
    return {name: _masked(value) for name, value in line.items()}


def _masked(value: Any) -> Any:
    if isinstance(value, str):
        return _mask(value)
    if isinstance(value, Mapping):
        return {name: _masked(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_masked(each) for each in value]
    if isinstance(value, BaseException):
        return _masked(str(value))
    return value


def _hand_on(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> Mapping[str, Any]:
    for taker in _taps:
        taker(line)
    return line


class _Lines:
    """Standard error as structlog wants it, a file. It prints a line in parts, and flushes when it is whole."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def write(self, text: str) -> None:
        self._parts.append(text)

    def flush(self) -> None:
        line = "".join(self._parts)
        self._parts.clear()
        standard_error.write(line.encode(errors="backslashreplace"))


def _import_structlog_without_rich() -> None:
    """structlog takes rich for tracebacks if it finds it, and that costs a worker more time than all the rest of it."""
    if "structlog" in sys.modules or "rich" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment] # makes `import rich` fail
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]
