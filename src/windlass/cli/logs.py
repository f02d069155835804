"""Log lines: for people on a terminal, JSON elsewhere, always on standard error."""

import os
import sys
from contextlib import suppress
from typing import Annotated, Literal, TextIO, cast

import typer

LogFormat = Annotated[
    Literal["auto", "human", "json"], typer.Option("--log-format", help="auto: human on a terminal, JSON elsewhere.")
]


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
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty() and not os.environ.get("NO_COLOR"))
            if is_human
            else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _Unbreakable(sys.stderr))),
        cache_logger_on_first_use=True,
    )


class _Unbreakable:
    """Whoever reads the log may end first (`windlass worker | tee`, Ctrl-C); the worker still has work to finish."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def _import_structlog_without_rich() -> None:
    """structlog takes rich for tracebacks if it finds it, and that costs a worker more time than all the rest of it."""
    if "structlog" in sys.modules or "rich" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment] # makes `import rich` fail
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]
