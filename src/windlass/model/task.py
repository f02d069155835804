"""A task: one unit of work in a queue, and a claim: the right to one attempt of it."""

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, NamedTuple
from uuid import UUID

from windlass.model.errors import BadInput

# Larger payloads and results belong into object storage, with their address in the task.
MAX_PAYLOAD_BYTES = 1024 * 1024
# Upper limit for the setting: what the functions of the database accept.
MAX_PAYLOAD_BYTES_LIMIT = 64 * MAX_PAYLOAD_BYTES
# The same rule as windlass_internal.is_name() in the database.
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,62}$"
_NAME = re.compile(NAME_PATTERN)
# Preceded by an even number of backslashes, which are backslashes of the text itself.
_ESCAPED_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
# Levels of lists and objects in a payload that workers accept. Python 3.11 parses about 950 below its recursion limit.
MAX_JSON_DEPTH = 900
# Strings match as a whole, so that brackets in them do not count.
_BRACKETS_OUTSIDE_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
MAX_UNIQUE_KEY_LENGTH = 200
# The longest time limit of an attempt: ten years, like every duration of the configuration.
MAX_TIMEOUT_S = 315_360_000.0
# Results in one call of finish_and_claim; the database refuses more.
MAX_RESULTS_PER_CALL = 1_000
# The database truncates both to these lengths.
MAX_NOTE_CHARACTERS = 500
MAX_ERROR_CHARACTERS = 8_000
# Error code of tasks that a person cancelled: they are failed, but not counted as failures.
CANCELLED = "CANCELLED"
# Decimal places of a task's progress.
PROGRESS_DIGITS = 6
_LEFT_OUT = " ... "
# The same bounds as windlass.due_time in the database: valid in every time zone.
FIRST_RUN_AFTER, RUN_AFTER_BEFORE = datetime(2, 1, 1, tzinfo=UTC), datetime(9999, 1, 1, tzinfo=UTC)
# PostgreSQL's bigint.
MAX_TASK_ID = 2**63 - 1
# PostgreSQL's integer.
_MIN_INTEGER, _MAX_INTEGER = -(2**31), 2**31 - 1


class TaskStatus(StrEnum):
    """Where a task is. `complete` and `failed` are final."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETE = "complete"
    ERROR = "error"  # an attempt failed; waits for its retry
    FAILED = "failed"  # the dead letter


class Retried(NamedTuple):
    """Failed tasks that were requeued, and when the latest of them had failed; None if there were none."""

    ids: list[int]
    failed_to: datetime | None


class NewTask(NamedTuple):
    """A task to enqueue. `payload` is JSON text, checked by `new_task`. COPY writes it as one row."""

    queue: str
    payload: str = "null"
    priority: int = 0
    run_after: datetime | None = None
    max_attempts: int = 3
    timeout_s: float | None = None
    unique_key: str | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """One attempt of one task. `token` must be given to finish, fail or release it."""

    task_id: int
    token: UUID
    queue: str
    payload: str
    attempt: int
    max_attempts: int
    timeout_s: float | None
    priority: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Finished:
    """A claim whose attempt succeeded, with its result as JSON text."""

    task_id: int
    token: UUID
    result: str | None


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """The reply to finish_and_claim: new claims, and the tokens of results whose claim was lost."""

    claims: list[Claim]
    lost: list[UUID]


@dataclass(frozen=True, slots=True)
class TaskSummary:
    """A task without payload and result, which may be large."""

    id: int
    queue: str
    status: TaskStatus
    priority: int
    attempts: int
    max_attempts: int
    timeout_s: float | None
    run_after: datetime | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    worker_id: str | None
    unique_key: str | None
    progress: float | None
    progress_note: str | None
    error_code: str | None
    error: str | None
    # Who enqueued it, if known: `token:NAME#ID`, `session:NAME` or `user:NAME@HOST`.
    owner: str | None

    def __post_init__(self) -> None:
        """A handler's last report may be missing when its task is complete. The database stores four-byte numbers."""
        if self.status is TaskStatus.COMPLETE:
            object.__setattr__(self, "progress", 1.0)
        elif self.progress is not None:
            object.__setattr__(self, "progress", round(self.progress, 4))


@dataclass(frozen=True, slots=True)
class Task(TaskSummary):
    """A task as the database stores it. Payload and result are JSON text."""

    payload: str
    result: str | None


def is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def check_queue_name(name: str) -> str:
    if not is_name(name):
        raise BadInput(
            f"{name!r} cannot be a queue's name: use letters, digits and _ . : -, "
            "starting with a letter or digit, at most 63 characters."
        )
    return name


def new_task(
    queue: str,
    payload: Any = None,
    *,
    priority: int = 0,
    run_after: datetime | timedelta | None = None,
    max_attempts: int = 3,
    timeout_s: float | None = None,
    unique_key: str | None = None,
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
) -> NewTask:
    """A checked task from a Python value that JSON can hold. Raises BadInput with what to change.

    A `run_after` of type timedelta counts from now, by the clock of this machine.
    """
    check_queue_name(queue)
    if not (isinstance(priority, int) and _MIN_INTEGER <= priority <= _MAX_INTEGER):
        raise BadInput(f"priority is {priority}, but it must be a whole number of at most 32 bits.")
    if not (isinstance(max_attempts, int) and 1 <= max_attempts <= _MAX_INTEGER):
        raise BadInput(f"max_attempts is {max_attempts}, but a task needs from 1 to {_MAX_INTEGER:,} attempts.")
    if timeout_s is not None and not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise BadInput(
            f"timeout_s is {timeout_s}, but a time limit must be above 0 and at most ten years (leave it out for none)."
        )
    if unique_key == "":
        raise BadInput("the unique key is empty: give a key that names this task, or leave it out.")
    if unique_key is not None and len(unique_key) > MAX_UNIQUE_KEY_LENGTH:
        raise BadInput(f"the unique key has {len(unique_key)} characters, at most {MAX_UNIQUE_KEY_LENGTH} fit.")
    if unique_key is not None and not _is_storable(unique_key):
        raise BadInput("the unique key has a NUL character or half of a surrogate pair: remove it.")
    due_at = _due_time(run_after)
    return NewTask(
        queue=queue,
        payload=to_json(payload, "the payload", max_payload_bytes),
        priority=priority,
        run_after=due_at,
        max_attempts=max_attempts,
        timeout_s=timeout_s,
        unique_key=unique_key,
    )


def _due_time(run_after: datetime | timedelta | None) -> datetime | None:
    if run_after is None:
        return None
    if isinstance(run_after, timedelta):
        try:
            run_after = datetime.now(UTC) + run_after
        except OverflowError:
            raise BadInput(f"run_after is {run_after}, which is beyond the year {RUN_AFTER_BEFORE.year - 1}.") from None
    if not isinstance(run_after, datetime):
        raise BadInput(f"run_after is {run_after!r}, but it must be a datetime or a timedelta.")
    if run_after.tzinfo is None:
        raise BadInput(f"run_after {run_after.isoformat()} has no time zone: use an aware datetime.")
    if not FIRST_RUN_AFTER <= run_after < RUN_AFTER_BEFORE:
        raise BadInput(
            f"run_after is {run_after.isoformat()}, but only the years 2 to {RUN_AFTER_BEFORE.year - 1} will do."
        )
    return run_after


def truncate_error(error: str, max_characters: int = MAX_ERROR_CHARACTERS) -> str:
    """Keep both ends of an error that is too long, as the SQL function truncate_error() does: the kind is at the
    beginning of a message, and the cause at the end of a traceback."""
    if len(error) <= max_characters:
        return error
    head = max_characters // 4
    return f"{error[:head]}{_LEFT_OUT}{error[len(error) - max_characters + head + len(_LEFT_OUT) :]}"


def storable(text: str) -> str:
    """Escape what PostgreSQL cannot store (NUL, half a surrogate pair), so that no error text is lost."""
    return text.replace("\x00", "\\0").encode(errors="backslashreplace").decode()


def _is_storable(text: str) -> bool:
    """Whether PostgreSQL can store it as text."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def to_json(value: Any, what: str, max_bytes: int) -> str:
    """JSON text that PostgreSQL's jsonb accepts: no NaN, no infinity, no NUL character, within the limit."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(f"{what} cannot be written as JSON ({error}): use dicts, lists, strings and numbers.") from None
    _check_storable_json(text, what)
    try:
        size_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise BadInput(f"{what} contains half of a surrogate pair, which is not valid text: remove it.") from None
    if size_bytes > max_bytes:
        raise _too_large(what, size_bytes, max_bytes)
    return text


def check_json_text(content: bytes, what: str, max_bytes: int) -> str:
    """Valid JSON as text that PostgreSQL's jsonb accepts. Its size is judged as it was written, before anything else.

    PostgreSQL refuses what is left: half of a surrogate pair, and numbers beyond its range.
    """
    if len(content) > max_bytes:
        raise _too_large(what, len(content), max_bytes)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise BadInput(f"{what} is not valid UTF-8.") from None
    _check_storable_json(text, what)
    return text


def _check_storable_json(text: str, what: str) -> None:
    if "\\u0000" in text and _ESCAPED_NUL.search(text):
        raise BadInput(f"{what} contains a NUL character, which PostgreSQL cannot store: remove it.")
    if _is_nested_too_deeply(text):
        raise BadInput(f"{what} is nested more than {MAX_JSON_DEPTH} levels deep: flatten it, or send it as text.")


def parse_json(text: str) -> Any:
    """Raises ValueError for what Python cannot parse, and for nesting beyond MAX_JSON_DEPTH.

    The limit is ours: Python's own differs between versions, and a value that is parsed in one place must not fail in
    the next.
    """
    if _is_nested_too_deeply(text):
        raise ValueError(f"it is nested more than {MAX_JSON_DEPTH} levels deep")
    return json.loads(text)


def _is_nested_too_deeply(text: str) -> bool:
    """Whether valid JSON has more than MAX_JSON_DEPTH levels of lists and objects."""
    if text.count("[") + text.count("{") > MAX_JSON_DEPTH:
        depth = 0
        for token in _BRACKETS_OUTSIDE_STRINGS.finditer(text):
            depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token.group(), 0)
            if depth > MAX_JSON_DEPTH:
                return True
    return False


def check_payload_size(task: NewTask, max_bytes: int) -> NewTask:
    """For tasks that were created with another limit, or none."""
    # A character takes at most four bytes, so most payloads need not be encoded to be measured.
    if len(task.payload) * 4 > max_bytes:
        size_bytes = len(task.payload.encode(errors="replace"))
        if size_bytes > max_bytes:
            raise _too_large("the payload", size_bytes, max_bytes)
    return task


def _too_large(what: str, size_bytes: int, max_bytes: int) -> BadInput:
    return BadInput(
        f"{what} has {size_bytes:,} bytes and at most {max_bytes:,} are accepted: "
        "store large data elsewhere and put its address into the task."
    )
