"""What workers print, kept within bounds, whether an orchestrator runs or not.

A worker's standard output and error are a file, appended to, so a crash loses nothing and nobody needs to read along.
The worker's own process keeps it short: when it is too long, its end becomes `<worker id>.log.1` and the file is
emptied. (Copied and emptied rather than renamed, since others that the worker started may have it open too; a line
printed in the very moment of emptying is lost.) So a worker has two files at most, each of MAX_LOG_BYTES and what can
be printed in one CHECK_INTERVAL_S.

Whoever has the file open holds a lock on it. The logs of workers that are over are those without one; the newest
MAX_KEPT_LOGS of them stay, for whoever asks why.
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

# Some ten thousand lines; twice this per worker.
MAX_LOG_BYTES = 4 * 1024 * 1024
# Of workers that are over. With the two above: at most 400 MiB a fleet.
MAX_KEPT_LOGS = 50
CHECK_INTERVAL_S = 1.0
FOLLOW_INTERVAL_S = 0.2
# Enough for the last words of a process; a line that is longer is cut.
_LAST_WORDS_BYTES = 16 * 1024
_MAX_WORDS_CHARACTERS = 300
# The interpreter says first what killed it, then at length where.
_FATAL = "Fatal Python error"


class LogFolder:
    """The logs of one fleet's workers. `mask`: what is read of them goes into reasons, alerts and pages."""

    def __init__(self, path: Path, mask: Mask) -> None:
        self._path = path
        self._mask = mask

    def path_of(self, worker_id: str) -> Path:
        return self._path / f"{worker_id}.log"

    def create(self, worker_id: str) -> int:
        """A new log to hand to a process, as a file descriptor. FileExistsError: that worker has, or had, a process."""
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
        log = os.open(self.path_of(worker_id), flags, 0o600)
        # It belongs to the open file, not to us: it is held until the last process that inherits it has ended.
        fcntl.flock(log, fcntl.LOCK_SH)
        return log

    def discard(self, worker_id: str) -> None:
        for path in _files(self.path_of(worker_id)):
            path.unlink(missing_ok=True)

    def last_words(self, worker_id: str) -> str:
        """What its log says about its end, as the end of a sentence; empty if that is nothing."""
        try:
            with self.path_of(worker_id).open("rb") as log:
                lines = _text(_end_of(log, _LAST_WORDS_BYTES)).splitlines()
        except OSError:
            return ""
        spoken = [line.strip() for line in lines if line.strip()]
        fatal = [line for line in spoken if line.startswith(_FATAL)]
        # Masked before it is cut: a part of a secret is one too.
        return self._mask(_in_words((fatal or spoken or [""])[-1]))[:_MAX_WORDS_CHARACTERS]

    def prune(self) -> None:
        """Delete the logs of workers long over."""
        found: list[tuple[float, Path]] = []
        for path in self._path.glob("*.log"):
            with contextlib.suppress(FileNotFoundError):
                found.append((path.stat().st_mtime, path))
        over = [path for _, path in sorted(found, reverse=True) if not _is_in_use(path)]
        for path in over[MAX_KEPT_LOGS:]:
            self.discard(path.stem)

    async def read(self, worker_id: str, lines: int, *, follow: bool = False) -> AsyncIterator[str]:
        """The last `lines` (at least one), with `follow` all that come until the worker is over. Raises BadInput."""
        path = self.path_of(worker_id)
        try:
            log = path.open("rb")
        except OSError as error:
            raise BadInput(
                f"there is no log of worker {worker_id} on this host ({error.strerror}: {path}): check its name, "
                f"or look on the host it ran on."
            ) from None
        with log:
            text, position = await asyncio.to_thread(_tail, path, log, lines)
            *whole, part = text.split(b"\n")
            while follow:
                for line in whole:
                    yield self._shown(line)
                # Asked first: what is printed after that belongs to somebody, who is waited for.
                is_over = not _is_in_use(path)
                more, position = await asyncio.to_thread(_more, path, log, position)
                *whole, part = (part + more).split(b"\n")
                if is_over:
                    break
                if not more:
                    await asyncio.sleep(FOLLOW_INTERVAL_S)
            for line in whole:
                yield self._shown(line)
            if part:
                yield self._shown(part)

    def _shown(self, line: bytes) -> str:
        return self._mask(_text(line))


def _in_words(line: str) -> str:
    """A worker's own log is JSON: what it complained of is said in its words, what else it noted explains no end."""
    if not line.startswith("{"):
        return f"its log ends: {line}" if line else ""
    try:
        said = json.loads(line)
        is_complaint = said["level"] in ("error", "critical")
        text = f"it last said: {said['event']}" + (f": {said['error']}" if said.get("error") else "")
    except (ValueError, KeyError, TypeError):  # cut in the middle, or nobody's log line
        return ""
    return text if is_complaint else ""


def log_folder(state_dir: Path, fleet: str, mask: Mask) -> LogFolder:
    """Where the logs of a fleet's workers lie. A fleet's name may be anything; a folder's may not."""
    return LogFolder(state_dir / "logs" / safe_name(fleet), mask)


def safe_name(name: str) -> str:
    """The name in letters that mean nothing to file systems, and no two names alike."""
    return re.sub(r"[^A-Za-z0-9_-]", lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), name)


def keep_short(path: Path) -> None:
    """Never returns: keeps the log of this process within its bounds."""
    with path.open("r+b") as log:
        while True:
            time.sleep(CHECK_INTERVAL_S)
            if os.fstat(log.fileno()).st_size > MAX_LOG_BYTES:
                shorten(path, log)


def shorten(path: Path, log: BinaryIO) -> None:
    """Put the end of the log aside and empty it."""
    _, previous, unfinished = _files(path)
    # A disk that is full is one more reason to empty it.
    with contextlib.suppress(OSError):
        unfinished.write_bytes(_end_of(log, MAX_LOG_BYTES))
        unfinished.replace(previous)
    log.truncate(0)


def _files(path: Path) -> tuple[Path, Path, Path]:
    """The log, the one before it, and that one in the making."""
    return path, path.with_name(f"{path.name}.1"), path.with_name(f"{path.name}.1.new")


def _is_in_use(path: Path) -> bool:
    """Whether a process still has it as its output. If that cannot be told, it has."""
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
    """The last lines of the log and the one before it, and up to where it was read."""
    text = _end_of(log, MAX_LOG_BYTES)
    position = log.tell()
    if text.count(b"\n") < lines:
        with contextlib.suppress(FileNotFoundError):
            text = _files(path)[1].read_bytes() + text
    *whole, part = text.split(b"\n")
    wanted = deque(whole, maxlen=lines - 1 if part else lines)
    return b"\n".join([*wanted, part]), position


def _more(path: Path, log: BinaryIO, position: int) -> tuple[bytes, int]:
    """What was printed since, and up to where it was read now. What was put aside meanwhile is read from there."""
    aside = b""
    if os.fstat(log.fileno()).st_size < position:
        with contextlib.suppress(FileNotFoundError), _files(path)[1].open("rb") as previous:
            previous.seek(position)
            aside = previous.read()
        position = 0
    log.seek(position)
    text = log.read(MAX_LOG_BYTES)
    return aside + text, log.tell()


def _text(line: bytes) -> str:
    return line.decode(errors="replace")
