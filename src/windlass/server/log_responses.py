"""Output of workers and tasks as JSON: parameters and response, for the routes of both."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Query, Request, Response

from windlass.model.auth import Role
from windlass.model.task import MAX_TASK_ID
from windlass.model.worker_log import MAX_LINES_READ, WorkerLogLine, WorkerLogPage
from windlass.server.context import AppContext
from windlass.server.json_api import json_response

LogLineCount = Annotated[int, Query(ge=1, le=MAX_LINES_READ, description="Last lines.")]
LogCursor = Annotated[
    int | None, Query(ge=0, le=MAX_TASK_ID, description="`cursor` of the previous response: only lines since.")
]

OUTPUT_IS_PRIVATE = "this output may contain private parts of payloads (`redact`): reading it needs the role operator"


@dataclass(frozen=True, slots=True)
class LogLinesResponse:
    lines: tuple[WorkerLogLine, ...]
    # Pass it as `after` to get the lines since. 0: the lines are from a file, or there are none.
    cursor: int


_lines = json_response(LogLinesResponse)


def is_output_private(context: AppContext, request: Request, queues: Iterable[str]) -> bool:
    """Workers hide the private parts by value, but a handler may print something derived from them."""
    return request.state.caller.role is Role.VIEWER and any(map(context.privacy.hides, queues))


def log_response(page: WorkerLogPage) -> Response:
    return _lines(LogLinesResponse(page.lines, page.cursor))
