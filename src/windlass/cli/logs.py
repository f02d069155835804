"""Log lines: for people on a terminal, JSON elsewhere, always on standard error."""

import logging
import sys
from typing import Annotated, Literal

import structlog
import typer

LogFormat = Annotated[
    Literal["auto", "human", "json"], typer.Option("--log-format", help="auto: human on a terminal, JSON elsewhere.")
]


def configure_logs(log_format: Literal["auto", "human", "json"] = "auto", level: int = logging.INFO) -> None:
    is_human = log_format == "human" or (log_format == "auto" and sys.stderr.isatty())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer() if is_human else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
