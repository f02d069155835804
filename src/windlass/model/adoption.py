"""Settings of an adopted table: a table of another program whose rows are tasks (docs/adopt.md).

The defaults fit a table `tasks` with the columns of the first GPU orchestrators. Names of schemas, tables and columns
are taken literally, with their case: SQL that is generated from them quotes every one.
"""

import re
from dataclasses import dataclass
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from windlass.model.task import MAX_TIMEOUT_S, is_name

# The names of triggers and functions are made of it, and PostgreSQL cuts names after 63 bytes.
MAX_ADOPTION_NAME = 30
MAX_IDENTIFIER_BYTES = 63
# jsonb_build_object takes at most 100 arguments, two per column.
MAX_PAYLOAD_COLUMNS = 50
MAX_EXPRESSION_CHARACTERS = 8_000
_PART = r'(?:[^".]+|"(?:[^"]|"")+")'
_TABLE = re.compile(rf"(?:({_PART})\.)?({_PART})")
# A column that Windlass reads, by its setting; and one that it writes.
READ_COLUMNS = ("queue", "priority", "run_after", "owner")
WRITTEN_COLUMNS = (
    "status",
    "attempts",
    "worker",
    "started_at",
    "finished_at",
    "progress",
    "result",
    "error_code",
    "error",
)


def _check_identifier(name: str) -> str:
    if not name or "\0" in name or len(name.encode()) > MAX_IDENTIFIER_BYTES:
        raise ValueError(f"{name!r} is not a name of PostgreSQL: it needs 1 to {MAX_IDENTIFIER_BYTES} bytes")
    return name


class _AdoptionSection(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AdoptedColumns(_AdoptionSection):
    """Columns of the table. If this section is given, columns that it does not name are neither read nor written."""

    status: str = Field(default="status", description="Status of the row: text, an enum or a number.")
    attempts: str | None = Field(default=None, description="Attempts so far. Default without this section: `attempts`.")
    worker: str | None = Field(
        default=None, description="Id of the worker that runs it. Default without this section: `worker_id`."
    )
    started_at: str | None = Field(
        default=None,
        description="When the last attempt began. Default without this section: `generation_started_at`.",
    )
    finished_at: str | None = Field(
        default=None,
        description="When the last attempt ended. Default without this section: `generation_processed_at`.",
    )
    progress: str | None = Field(default=None, description="Progress from 0 to 1.")
    result: str | None = Field(default=None, description="Result of the handler. JSON, unless `result_path` is set.")
    error_code: str | None = Field(default=None, description="Error code of the last attempt.")
    error: str | None = Field(default=None, description="Error of the last attempt.")
    queue: str | None = Field(default=None, description="Read: the queue of the row, instead of `queue`.")
    priority: str | None = Field(default=None, description="Read: its priority, an integer.")
    run_after: str | None = Field(default=None, description="Read: the time before which it does not start.")
    owner: str | None = Field(
        default=None, description="Read: the id of the end user that it belongs to. Default: the signed-in user."
    )

    @field_validator("*")
    @classmethod
    def _check_names(cls, name: str | None) -> str | None:
        return _check_identifier(name) if name is not None else None

    @model_validator(mode="after")
    def _check_unique(self) -> Self:
        written = [name for setting in WRITTEN_COLUMNS if (name := getattr(self, setting)) is not None]
        for name in written:
            if written.count(name) > 1:
                raise ValueError(f"column {name!r} is named twice: Windlass would write it twice")
        read = {getattr(self, setting) for setting in READ_COLUMNS} - {None}
        both = sorted(read & set(written))
        if both:
            raise ValueError(f"column {both[0]!r} is both read and written: name another one")
        return self

    def written(self) -> dict[str, str]:
        """Columns that Windlass writes, by setting."""
        return {setting: name for setting in WRITTEN_COLUMNS if (name := getattr(self, setting)) is not None}


class AdoptedStates(_AdoptionSection):
    """The status that a row has in each state of its task."""

    queued: str = Field(default="Queued", min_length=1, description="Wanted: a row with this status gets a task.")
    running: str = Field(default="In Progress", min_length=1, description="A worker runs it.")
    retrying: str | None = Field(
        default=None, min_length=1, description="An attempt failed, and another follows. Default: that of `queued`."
    )
    complete: str = Field(default="Complete", min_length=1, description="Its result is accepted.")
    failed: str = Field(default="Failed", min_length=1, description="All attempts failed.")
    cancelled: str | None = Field(
        default=None, min_length=1, description="Cancelled in Windlass. Default: that of `failed`."
    )

    @model_validator(mode="after")
    def _check_distinct(self) -> Self:
        states = self.by_state()
        for name, status in states.items():
            if name not in ("queued", "retrying") and status == self.queued:
                raise ValueError(f"{name} has the status of queued, {status!r}: a row would be run without end")
            if "\0" in status:
                raise ValueError(f"the status of {name} contains a NUL character")
        finished = {states[name] for name in ("complete", "failed", "cancelled")}
        for name in ("running", "retrying"):
            if states[name] in finished:
                raise ValueError(f"{name} has the status of a finished task, {states[name]!r}")
        if self.complete in (states["failed"], states["cancelled"]):
            raise ValueError(f"complete has the status of a failed or cancelled task, {self.complete!r}")
        return self

    def by_state(self) -> dict[str, str]:
        return {
            "queued": self.queued,
            "running": self.running,
            "retrying": self.retrying or self.queued,
            "complete": self.complete,
            "failed": self.failed,
            "cancelled": self.cancelled or self.failed,
        }


class AdoptionConfig(_AdoptionSection):
    """A table whose rows are tasks."""

    table: str | None = Field(
        default=None,
        description="`name` (in schema public) or `schema.name`; a name with a dot in double quotes. Default: NAME.",
    )
    key: str = Field(default="id", description="Column of the key: uuid, an integer or text; unique, never null.")
    queue: str | None = Field(default=None, description="Queue of the tasks. Default: NAME.")
    payload: tuple[str, ...] | str | None = Field(
        default=None,
        description="A list of columns, or one column that is the payload. Default: all columns that are not written.",
    )
    payload_sql: str | None = Field(
        default=None,
        max_length=MAX_EXPRESSION_CHARACTERS,
        description="An SQL expression of type jsonb over the row `r` instead: `jsonb_build_object('to', r.address)`.",
    )
    result_path: tuple[str, ...] = Field(
        default=(), description='Only this part of the result is written, as text: `["url"]`.'
    )
    max_attempts: int = Field(default=3, ge=1, le=2**31 - 1, description="Attempts before a task fails.")
    timeout_s: float | None = Field(default=None, gt=0, le=MAX_TIMEOUT_S, description="Time limit of an attempt.")
    order_by: str | None = Field(
        default=None, description="Column by which the backfill sorts, such as `created_at`. Default: the key."
    )
    columns: AdoptedColumns = Field(
        default=AdoptedColumns(
            attempts="attempts",
            worker="worker_id",
            started_at="generation_started_at",
            finished_at="generation_processed_at",
        ),
        description="Columns of the table.",
    )
    states: AdoptedStates = Field(default=AdoptedStates(), description="Status of a row for each state of its task.")

    @field_validator("table")
    @classmethod
    def _check_table(cls, table: str | None) -> str | None:
        if table is not None:
            split_table(table)
        return table

    @field_validator("key", "order_by")
    @classmethod
    def _check_column(cls, name: str | None) -> str | None:
        return _check_identifier(name) if name is not None else None

    @field_validator("queue")
    @classmethod
    def _check_queue(cls, queue: str | None) -> str | None:
        if queue is not None and not is_name(queue):
            raise ValueError(f"invalid queue name {queue!r}: use at most 63 letters, digits and _ . : -")
        return queue

    @field_validator("payload")
    @classmethod
    def _check_payload(cls, payload: tuple[str, ...] | str | None) -> tuple[str, ...] | str | None:
        columns = (payload,) if isinstance(payload, str) else payload or ()
        if len(columns) > MAX_PAYLOAD_COLUMNS:
            raise ValueError(f"it has {len(columns)} columns and at most {MAX_PAYLOAD_COLUMNS} are possible")
        for name in columns:
            _check_identifier(name)
        return payload

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.payload is not None and self.payload_sql is not None:
            raise ValueError("payload and payload_sql are both set: set one of them")
        if self.result_path and self.columns.result is None:
            raise ValueError("result_path is set and columns.result is not: name the column of the result")
        if self.key in self.columns.written().values():
            raise ValueError(f"the column {self.key!r} is the key and a column that Windlass writes")
        return self

    def place(self, name: str) -> tuple[str, str]:
        """Schema and table of the adoption `name`."""
        return split_table(self.table or name)


def split_table(table: str) -> tuple[str, str]:
    """Schema and name. Raises ValueError."""
    found = _TABLE.fullmatch(table)
    if found is None:
        raise ValueError(f'{table!r} is not a table: write name or schema.name, or "na.me" in quotes if it has a dot')
    schema, name = (
        part[1:-1].replace('""', '"') if part is not None and part.startswith('"') else part for part in found.groups()
    )
    return _check_identifier(schema or "public"), _check_identifier(str(name))


def check_adoption_name(name: str) -> None:
    """Raise ValueError."""
    if not is_name(name) or len(name) > MAX_ADOPTION_NAME:
        raise ValueError(
            f"invalid name of an adopted table {name!r}: use at most {MAX_ADOPTION_NAME} letters, digits and _ . : -"
        )


@dataclass(frozen=True, slots=True)
class AdoptionFinding:
    """One result of a check of an adopted table. `advice` is empty if there is nothing to do."""

    check: str
    message: str
    advice: str = ""
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class AdoptionComparison:
    """How a table and its tasks differ. `differences` counts them by kind: no task, no row, status."""

    name: str
    differences: dict[str, int]
    # Rows whose change waits to be settled, and why the one that was tried most often does.
    deferred: int
    deferred_reason: str | None
    is_backfilled: bool
    # The configuration or the program changed since the script was applied.
    is_outdated: bool
