"""Log files of local workers, bounded in size whether or not an orchestrator runs.

A worker's standard output and error are appended to a file, so a crash loses nothing and no reader is needed. The
worker's own process bounds it: a file that is too long is copied to `<worker id>.log.1` (its end only) and truncated.
It is not renamed, because processes started by the worker may have it open; a line printed during the truncation is
lost. A worker has at most two files, each of MAX_LOG_BYTES plus the output of one CHECK_INTERVAL_S.

Every process that has the file open holds a shared lock on it. Logs without a lock belong to exited workers; the newest
MAX_KEPT_LOGS of them are kept.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import re
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from windlass.model.errors import BadInput
from windlass.model.redaction import Mask

# About ten thousand lines; two files per worker.
MAX_LOG_BYTES = 4 * 1024 * 1024
# Logs of exited workers. Together with MAX_LOG_BYTES: at most 400 MiB per fleet.
MAX_KEPT_LOGS = 50
CHECK_INTERVAL_S = 1.0
FOLLOW_INTERVAL_S = 0.2
# Enough for the last line of a process; a longer line is cut.
_LAST_LINE_BYTES = 16 * 1024
_MAX_LINE_CHARACTERS = 300
# The interpreter prints the cause first and then a long trace.
_FATAL = "Fatal Python error"


class LogFolder:
    """The logs of one fleet's workers. `mask` is applied to everything read: it reaches reasons, alerts and pages."""

    def __init__(self, path: Path, mask: Mask) -> None:
        self._path = path
        self._mask = mask

    def path_of(self, worker_id: str) -> Path:
        return self._path / f"{worker_id}.log"

    def create(self, worker_id: str) -> int:
        """Create a log and return its file descriptor. FileExistsError: the worker already had a process."""
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
        log = os.open(self.path_of(worker_id), flags, 0o600)
        # The lock belongs to the open file: it is held until the last process that inherits it has exited.
        fcntl.flock(log, fcntl.LOCK_SH)
        return log

    def discard(self, worker_id: str) -> None:
        for path in _files(self.path_of(worker_id)):
            path.unlink(missing_ok=True)

    def last_line(self, worker_id: str) -> str:
        """What the log says about the end of the process, as the end of a sentence; empty if nothing."""
        try:
            with self.path_of(worker_id).open("rb") as log:
                lines = _text(_end_of(log, _LAST_LINE_BYTES)).splitlines()
        except OSError:
            return ""
        nonempty = [line.strip() for line in lines if line.strip()]
        fatal = [line for line in nonempty if line.startswith(_FATAL)]
        # Masked before it is cut: a part of a secret is secret too.
        return self._mask(_describe_line((fatal or nonempty or [""])[-1]))[:_MAX_LINE_CHARACTERS]

    def prune(self) -> None:
        """Delete the oldest logs of exited workers."""
        found: list[tuple[float, Path]] = []
        for path in self._path.glob("*.log"):
            with contextlib.suppress(FileNotFoundError):
                found.append((path.stat().st_mtime, path))
        unused = [path for _, path in sorted(found, reverse=True) if not _is_in_use(path)]
        for path in unused[MAX_KEPT_LOGS:]:
            self.discard(path.stem)

    async def read(self, worker_id: str, lines: int, *, follow: bool = False) -> AsyncIterator[str]:
        """The last `lines` (at least one); with `follow` also new ones until the worker exits. Raises BadInput."""
        path = self.path_of(worker_id)
        try:
            log = path.open("rb")
        except OSError as error:
            raise BadInput(
                f"no log of worker {worker_id} on this host ({error.strerror}: {path}). Check its name, "
                "or look on the host where it ran."
            ) from None
        with log:
            text, position = await asyncio.to_thread(_tail, path, log, lines)
            *whole, part = text.split(b"\n")
            while follow:
                for line in whole:
                    yield self._masked(line)
                # Checked before reading: output printed after this check comes from a process that is still waited for.
                has_exited = not _is_in_use(path)
                more, position = await asyncio.to_thread(_more, path, log, position)
                *whole, part = (part + more).split(b"\n")
                if has_exited:
                    break
                if not more:
                    await asyncio.sleep(FOLLOW_INTERVAL_S)
            for line in whole:
                yield self._masked(line)
            if part:
                yield self._masked(part)

    def _masked(self, line: bytes) -> str:
        return self._mask(_text(line))


def _describe_line(line: str) -> str:
    """Quote the last line. A worker's own JSON lines are quoted only if they are errors: others explain no exit."""
    if not line.startswith("{"):
        return f"last log line: {line}" if line else ""
    try:
        record = json.loads(line)
        is_error = record["level"] in ("error", "critical")
        text = f"last error: {record['event']}" + (f": {record['error']}" if record.get("error") else "")
    except (ValueError, KeyError, TypeError):  # cut in the middle, or not a log record
        return ""
    return text if is_error else ""


def log_folder(state_dir: Path, fleet: str, mask: Mask) -> LogFolder:
    """The log folder of a fleet. A fleet name may contain characters that a folder name may not."""
    return LogFolder(state_dir / "logs" / safe_name(fleet), mask)


def safe_name(name: str) -> str:
    """The name with special characters percent-encoded; distinct names stay distinct."""
    return re.sub(r"[^A-Za-z0-9_-]", lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), name)


def bound_log(path: Path) -> None:
    """Keep the log of this process within its bounds. Never returns."""
    with path.open("r+b") as log:
        while True:
            time.sleep(CHECK_INTERVAL_S)
            if os.fstat(log.fileno()).st_size > MAX_LOG_BYTES:
                rotate(path, log)


def rotate(path: Path, log: BinaryIO) -> None:
    """Copy the end of the log to its predecessor file and truncate it."""
    _, previous, unfinished = _files(path)
    # On a full disk the log is truncated without a copy.
    with contextlib.suppress(OSError):
        unfinished.write_bytes(_end_of(log, MAX_LOG_BYTES))
        unfinished.replace(previous)
    log.truncate(0)


def _files(path: Path) -> tuple[Path, Path, Path]:
    """The log, its predecessor, and the predecessor while it is being written."""
    return path, path.with_name(f"{path.name}.1"), path.with_name(f"{path.name}.1.new")


def _is_in_use(path: Path) -> bool:
    """Whether a process still has the file open. Assumed if unknown."""
    try:
        with path.open("rb") as log:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _end_of(log: BinaryIO, length: int) -> bytes:
    size = os.fstat(log.fileno()).st_size
    log.seek(max(0, size - length))
    return log.read(length)


def _tail(path: Path, log: BinaryIO, lines: int) -> tuple[bytes, int]:
    """The last lines of the log and its predecessor, and the position up to which the log was read."""
    text = _end_of(log, MAX_LOG_BYTES)
    position = log.tell()
    if text.count(b"\n") < lines:
        with contextlib.suppress(FileNotFoundError):
            text = _files(path)[1].read_bytes() + text
    *whole, part = text.split(b"\n")
    wanted = deque(whole, maxlen=lines - 1 if part else lines)
    return b"\n".join([*wanted, part]), position


def _more(path: Path, log: BinaryIO, position: int) -> tuple[bytes, int]:
    """Output since `position`, and the new position. Output that was rotated meanwhile is read from the predecessor."""
    rotated = b""
    if os.fstat(log.fileno()).st_size < position:
        with contextlib.suppress(FileNotFoundError), _files(path)[1].open("rb") as previous:
            previous.seek(position)
            rotated = previous.read()
        position = 0
    log.seek(position)
    text = log.read(MAX_LOG_BYTES)
    return rotated + text, log.tell()


def _text(line: bytes) -> str:
    return line.decode(errors="replace")
