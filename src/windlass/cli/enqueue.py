"""`windlass enqueue`: adds a task, or one task per line of a file.

Either all lines are added or none: every line is checked first, then all are added in one transaction. Checked lines
are kept in a temporary file, so memory use does not grow with their number.
"""

import json
import os
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Annotated, Any, Protocol

import typer

from windlass.cli.options import AsJson, ConfigFile, DataDir, load, person_command
from windlass.cli.output import print_json, progress
from windlass.cli.times import parse_when
from windlass.model.config import Config
from windlass.model.errors import BadInput, WindlassError
from windlass.model.plural import plural
from windlass.model.task import NewTask, new_task, to_json
from windlass.operations import OperationOutcome, enqueue_task
from windlass.ports.tasks import TaskStore
from windlass.wiring import stores

STDIN = "-"
# An earlier --run-after is most likely a mistake, unless the clocks differ.
PAST_TOLERANCE = timedelta(minutes=5)
# JSON may escape one byte as six (A as \u0041) and add white space. A payload within the limit fits in a line of
# LINE_BYTES_PER_PAYLOAD_BYTE times the limit, plus LINE_SLACK_BYTES.
LINE_BYTES_PER_PAYLOAD_BYTE = 6
LINE_SLACK_BYTES = 64 * 1024
# More than this is written to a file on disk.
SPOOL_IN_MEMORY_BYTES = 8 * 1024 * 1024


@person_command
async def enqueue(
    queue: Annotated[str, typer.Argument(help="Name of the queue.", metavar="QUEUE")],
    payload: Annotated[
        str | None,
        typer.Argument(help="Payload of the task; - reads one payload per line from stdin.", metavar="JSON|-"),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="File with one JSON payload per line. Either all are added or none.", metavar="FILE"),
    ] = None,
    priority: Annotated[int, typer.Option(help="Tasks with a higher priority run first.", metavar="N")] = 0,
    run_after: Annotated[
        str | None, typer.Option(help="Run not before: 90s, 5m, 2h, 7d from now, or 2030-01-31T08:00Z.", metavar="WHEN")
    ] = None,
    max_attempts: Annotated[int, typer.Option(help="Attempts before the task fails permanently.", metavar="N")] = 3,
    timeout: Annotated[float | None, typer.Option(help="Time limit of an attempt.", metavar="SECONDS")] = None,
    unique_key: Annotated[
        str | None, typer.Option(help="Add nothing if the queue already has a task with this key.", metavar="KEY")
    ] = None,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Add a task to a queue, or one task per line of a file.

    Prints the id of the task, or how many tasks were added.
    """
    if payload is None and queue.lstrip().startswith(("{", "[")):
        raise BadInput(f"missing queue: write `windlass enqueue QUEUE '{queue[:60]}'`.")
    if (payload is None) == (file is None):
        raise BadInput("pass exactly one of: a JSON payload, --file FILE, or - to read lines from standard input.")
    source = STDIN if payload == STDIN or str(file) == STDIN else file
    loaded = load(config, data_dir)
    when = parse_when(run_after, "--run-after") if run_after is not None else None
    if isinstance(when, datetime) and when < datetime.now(UTC) - PAST_TOLERANCE:
        raise BadInput(f"--run-after {run_after} is in the past. Leave it out to run the task at once.")
    max_bytes = loaded.config.max_payload_bytes
    # Checks everything except the payload.
    template = new_task(
        queue,
        priority=priority,
        run_after=when if isinstance(when, datetime) else None,
        max_attempts=max_attempts,
        timeout_s=timeout,
        unique_key=unique_key,
    )
    if source is None:
        task = template._replace(payload=_check_payload(payload or "", "the payload", max_bytes))
        async with stores.store(loaded.config, is_contract_sufficient=True) as store:
            result = await enqueue_task(store, await _schedule(task, when, store))
            is_new = result.outcome is OperationOutcome.DONE
            if as_json:
                print_json({"id": result.task_id, "queue": queue, "is_new": is_new})
                return
            print(result.task_id)
            if is_new:
                await _warn_if_unserved(store, queue, loaded.config)
            else:
                # On standard error: programs read the id from standard output.
                print(f"windlass: {result.message}; nothing was added.", file=sys.stderr)
        return
    if unique_key is not None:
        raise BadInput("--unique-key is for a single task: it cannot be combined with several lines.")
    with _checked_lines(source, max_bytes) as lines:
        async with stores.store(loaded.config, is_contract_sufficient=True) as store:
            scheduled = await _schedule(template, when, store)
            with progress("enqueueing", lines.count) as advance:

                async def stream() -> AsyncIterator[NewTask]:
                    for line in lines:
                        yield scheduled._replace(payload=line)
                        advance(1)

                count = await store.enqueue_many(stream())
            if as_json:
                print_json({"enqueued": count, "queue": queue})
                return
            print(f"enqueued {plural(count, 'task')} in {queue}")
            await _warn_if_unserved(store, queue, loaded.config)


class ServedQueueStore(TaskStore, Protocol):
    async def is_queue_served(self, queue: str, /) -> bool: ...


async def _warn_if_unserved(store: ServedQueueStore, queue: str, config: Config) -> None:
    """The tasks are added, so an error of this query, such as missing privileges, is ignored."""
    try:
        if await store.is_queue_served(queue):
            return
    except WindlassError:
        return
    fleet = next((name for name, fleet in config.fleets.items() if queue in fleet.queues), None)
    if fleet is not None:
        advice = f"Fleet {fleet} of the configuration does when `windlass up` runs."
    else:
        advice = f"Start `windlass worker --queue {queue}`, or add it to a fleet's queues."
    print(f"windlass: no fleet or worker serves queue {queue} yet. {advice}", file=sys.stderr)


async def _schedule(task: NewTask, when: datetime | timedelta | None, store: TaskStore) -> NewTask:
    """Durations count from the database's clock, which workers use too."""
    return task._replace(run_after=await store.now() + when) if isinstance(when, timedelta) else task


# --------------------------------------------------------------------------------------------------------- checking


@dataclass(frozen=True, slots=True)
class PayloadLines:
    """Checked payloads, one per line."""

    spool: IO[bytes]
    count: int

    def __iter__(self) -> Iterator[str]:
        self.spool.seek(0)
        for line in self.spool:
            yield line.decode().rstrip("\n")


@contextmanager
def _checked_lines(source: Path | str, max_payload_bytes: int) -> Iterator[PayloadLines]:
    """Check all lines, except empty ones. Raise BadInput for the first invalid line."""
    with _opened(source) as stream, tempfile.SpooledTemporaryFile(SPOOL_IN_MEMORY_BYTES) as spool:
        count = 0
        with progress("checking", _size_bytes(stream)) as advance:
            for number, line in _numbered_lines(stream, max_payload_bytes):
                advance(len(line))
                if text := _decoded(line, number).strip():
                    # An invalid first line is most likely a JSON document that spans several lines.
                    rule = "each line must be a complete JSON value; " if count == 0 else ""
                    spool.write(_check_payload(text, f"line {number}", max_payload_bytes, rule).encode() + b"\n")
                    count += 1
        if count == 0:
            raise BadInput(f"nothing to enqueue in {'standard input' if source == STDIN else source}.")
        yield PayloadLines(spool, count)


@contextmanager
def _opened(source: Path | str) -> Iterator[IO[bytes]]:
    if isinstance(source, str):
        if sys.stdin is None:
            raise BadInput("standard input is closed: nothing to enqueue.")
        yield sys.stdin.buffer
        return
    try:
        stream = source.open("rb")
    except OSError as error:
        raise BadInput(f"cannot read {source}: {error.strerror}. Check --file.") from None
    with stream:
        yield stream


def _size_bytes(stream: IO[bytes]) -> int | None:
    found = os.fstat(stream.fileno())
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _numbered_lines(stream: IO[bytes], max_payload_bytes: int) -> Iterator[tuple[int, bytes]]:
    limit_bytes = LINE_BYTES_PER_PAYLOAD_BYTE * max_payload_bytes + LINE_SLACK_BYTES
    number = 0
    try:
        while line := stream.readline(limit_bytes + 1):
            number += 1
            if len(line) > limit_bytes:
                raise BadInput(
                    f"line {number} has more than {limit_bytes:,} bytes; payloads may have {max_payload_bytes:,}."
                )
            yield number, line
    except OSError as error:
        raise BadInput(f"cannot read after line {number}: {error.strerror}. Nothing was enqueued.") from None


def _decoded(line: bytes, number: int) -> str:
    try:
        # Some editors write a byte order mark at the start of a file.
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"line {number} is not valid UTF-8 at byte {error.start + 1}: nothing was enqueued.") from None


def _check_payload(text: str, what: str, max_payload_bytes: int, rule: str = "") -> str:
    """The payload as the database stores it. `rule` is added to the message if it is not JSON."""
    try:
        value: Any = json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text else ""
        raise BadInput(
            f"{what} is not JSON ({error.msg} at {line}column {error.colno}): {rule}nothing was enqueued."
        ) from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{what} is not readable JSON ({error}): nothing was enqueued.") from None
    return to_json(value, what, max_payload_bytes)
