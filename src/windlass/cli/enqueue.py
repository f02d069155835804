"""`windlass enqueue`: put tasks into a queue.

Many at once are all or nothing: every line is checked before the database is asked, and all of them are added in one
transaction. The checked lines wait in a temporary file, so memory stays small however many there are.
"""

import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from windlass.cli.common import AsJson, ConfigFile, DataDir, command, load
from windlass.cli.output import counted, print_json, progress
from windlass.cli.times import parse_when
from windlass.model.errors import BadInput, WindlassError

if TYPE_CHECKING:
    from windlass.model.task import NewTask
    from windlass.wiring.stores import CommandStore

STDIN = "-"
# JSON may write one byte as six (A as \u0041), and add white space; a line beyond that cannot hold a payload that fits.
MAX_LINE_PER_PAYLOAD = 6
LINE_SLACK_BYTES = 64 * 1024
# What fits in here needs no file on disk.
SPOOL_IN_MEMORY_BYTES = 8 * 1024 * 1024


@command
async def enqueue(
    queue: Annotated[str, typer.Argument(help="The queue's name.", metavar="QUEUE")],
    payload: Annotated[
        str | None, typer.Argument(help="The task's payload; - reads one per line from stdin.", metavar="JSON|-")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="A file with one JSON payload per line: all are added, or none.", metavar="FILE")
    ] = None,
    priority: Annotated[int, typer.Option(help="Higher goes first.", metavar="N")] = 0,
    run_after: Annotated[
        str | None, typer.Option(help="Not before: 90s, 5m, 2h, 7d from now, or 2030-01-31T08:00Z.", metavar="WHEN")
    ] = None,
    max_attempts: Annotated[int, typer.Option(help="Tries before it is a dead letter.", metavar="N")] = 3,
    timeout: Annotated[float | None, typer.Option(help="Time limit of one attempt.", metavar="SECONDS")] = None,
    unique_key: Annotated[
        str | None, typer.Option(help="With a key that the queue knows already, nothing is added.", metavar="KEY")
    ] = None,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Add a task, or one for each line of a file. Prints the task's id, or how many were added."""
    from windlass.model.task import new_task

    if payload is None and queue.lstrip().startswith(("{", "[")):
        raise BadInput(f"the queue is missing: write `windlass enqueue QUEUE '{queue[:60]}'`.")
    source = _source(payload, file)
    loaded = load(config, data_dir)
    when = parse_when(run_after, "--run-after") if run_after is not None else None
    max_bytes = loaded.config.max_payload_bytes
    # Everything but the payload is checked here, once.
    template = new_task(
        queue,
        priority=priority,
        run_after=when if isinstance(when, datetime) else None,
        max_attempts=max_attempts,
        timeout_s=timeout,
        unique_key=unique_key,
    )
    if source is None:
        task = template._replace(payload=_checked(payload or "", "the payload", max_bytes))
        task_id, is_new, is_unserved = await _add_one(loaded.config, task, when, is_told=not as_json)
        if as_json:
            print_json({"id": task_id, "queue": queue, "is_new": is_new})
            return
        print(task_id)
        if not is_new:
            # Beside the id, which programs read.
            print(f"windlass: already there as {task_id}; nothing was added.", file=sys.stderr)
        elif is_unserved:
            _tell_that_nobody_serves(queue)
        return
    if unique_key is not None:
        raise BadInput("--unique-key names one task: it does not go with many lines.")
    with _checked_lines(source, max_bytes) as lines:
        count, is_unserved = await _add_many(loaded.config, template, lines, when, is_told=not as_json)
    if as_json:
        print_json({"enqueued": count, "queue": queue})
        return
    print(f"enqueued {counted(count, 'task')} in {queue}")
    if is_unserved:
        _tell_that_nobody_serves(queue)


def _tell_that_nobody_serves(queue: str) -> None:
    print(
        f"windlass: nobody serves queue {queue} yet: start `windlass worker --queue {queue}`, or add it to a fleet's "
        "queues.",
        file=sys.stderr,
    )


def _source(payload: str | None, file: Path | None) -> Path | str | None:
    """Where lines come from; None if the payload is given right here."""
    if (payload is None) == (file is None):
        raise BadInput(
            "say what to enqueue in one of three ways: a JSON payload, --file FILE, or - for lines from standard input."
        )
    if payload == STDIN or str(file) == STDIN:
        return STDIN
    return file


# --------------------------------------------------------------------------------------------------------- checking


@dataclass(frozen=True, slots=True)
class PayloadLines:
    """Checked payloads, one a line."""

    spool: IO[bytes]
    count: int

    def __iter__(self) -> Iterator[str]:
        self.spool.seek(0)
        for line in self.spool:
            yield line.decode().rstrip("\n")


@contextmanager
def _checked_lines(source: Path | str, max_payload_bytes: int) -> Iterator[PayloadLines]:
    """All lines but empty ones, checked. The first that cannot be used is named and nothing goes further."""
    import tempfile

    with _opened(source) as stream, tempfile.SpooledTemporaryFile(SPOOL_IN_MEMORY_BYTES) as spool:
        count = 0
        with progress("checking", _size_bytes(stream)) as advance:
            for number, line in _numbered_lines(stream, max_payload_bytes):
                advance(len(line))
                if text := _decoded(line, number).strip():
                    # Most likely a file that holds one JSON over many lines.
                    rule = "each line must be one whole JSON; " if count == 0 else ""
                    spool.write(_checked(text, f"line {number}", max_payload_bytes, rule).encode() + b"\n")
                    count += 1
        if count == 0:
            raise BadInput(f"there is nothing to enqueue in {'standard input' if source == STDIN else source}.")
        yield PayloadLines(spool, count)


@contextmanager
def _opened(source: Path | str) -> Iterator[IO[bytes]]:
    if isinstance(source, str):
        if sys.stdin is None:
            raise BadInput("standard input is closed: there is nothing to read.")
        yield sys.stdin.buffer
        return
    try:
        stream = source.open("rb")
    except OSError as error:
        raise BadInput(f"cannot read {source} ({error.strerror}): check --file.") from None
    with stream:
        yield stream


def _size_bytes(stream: IO[bytes]) -> int | None:
    import os
    import stat

    found = os.fstat(stream.fileno())
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _numbered_lines(stream: IO[bytes], max_payload_bytes: int) -> Iterator[tuple[int, bytes]]:
    limit_bytes = MAX_LINE_PER_PAYLOAD * max_payload_bytes + LINE_SLACK_BYTES
    number = 0
    try:
        while line := stream.readline(limit_bytes + 1):
            number += 1
            if len(line) > limit_bytes:
                raise BadInput(
                    f"line {number} has over {limit_bytes:,} bytes, and payloads up to {max_payload_bytes:,} fit."
                )
            yield number, line
    except OSError as error:
        raise BadInput(f"cannot read what to enqueue ({error.strerror}), after line {number}.") from None


def _decoded(line: bytes, number: int) -> str:
    try:
        # Some editors begin a file with a mark; it is no part of the first payload.
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"line {number} is not UTF-8 (at byte {error.start + 1}): nothing was enqueued.") from None


def _checked(text: str, what: str, max_payload_bytes: int, rule: str = "") -> str:
    """The payload as the database takes it. `rule`: what to say, beside what is wrong, of one that is not JSON."""
    from windlass.model.task import to_json

    try:
        value: Any = json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text else ""
        raise BadInput(
            f"{what} is not JSON ({error.msg} at {line}column {error.colno}): {rule}nothing was enqueued."
        ) from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{what} is not JSON that can be read ({error}): nothing was enqueued.") from None
    return to_json(value, what, max_payload_bytes)


# ----------------------------------------------------------------------------------------------------------- adding


async def _add_one(
    config: Any, task: "NewTask", when: datetime | timedelta | None, *, is_told: bool
) -> tuple[int, bool, bool]:
    """Its id, whether it is new, and whether to tell that nobody serves its queue."""
    from windlass.wiring import stores

    async with stores.store(config) as store:
        scheduled = await _scheduled(task, when, store)
        if task.unique_key is None:
            task_id, is_new = await store.enqueue(scheduled), True
        else:
            task_id, is_new = await store.enqueue_or_find(scheduled)
        return task_id, is_new, is_told and is_new and await _is_unserved(store, task.queue)


async def _add_many(
    config: Any, template: "NewTask", lines: PayloadLines, when: datetime | timedelta | None, *, is_told: bool
) -> tuple[int, bool]:
    """How many, and whether to tell that nobody serves their queue."""
    from windlass.wiring import stores

    async with stores.store(config) as store:
        scheduled = await _scheduled(template, when, store)
        with progress("enqueueing", lines.count) as advance:

            async def stream() -> AsyncIterator["NewTask"]:
                for payload in lines:
                    yield scheduled._replace(payload=payload)
                    advance(1)

            count = await store.enqueue_many(stream())
        return count, is_told and await _is_unserved(store, template.queue)


async def _is_unserved(store: "CommandStore", queue: str) -> bool:
    """False where we may not look, as producers may not, or cannot: the tasks are there."""
    try:
        return not await store.is_queue_served(queue)
    except WindlassError:
        return False


async def _scheduled(task: "NewTask", when: datetime | timedelta | None, store: "CommandStore") -> "NewTask":
    """A span counts from the database's time, the only one that workers go by."""
    return task._replace(run_after=await store.now() + when) if isinstance(when, timedelta) else task
