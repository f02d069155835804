"""Temporary directories for Ray's files: one per node or head, deleted with its owner.

Ray creates sockets there, whose paths must be short, so they are directly in /tmp. The owner holds a lock on its
directory. Directories of owners that were killed are deleted by the next one.
"""

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PARENT = Path("/tmp")  # noqa: S108 - mkdtemp makes a private directory in it
_PREFIX = "wl-ray-"
_LOCK = "owner.lock"


@contextmanager
def ray_temp_dir() -> Iterator[Path]:
    delete_abandoned_dirs()
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=PARENT))
    new_lock = directory / f"{_LOCK}.new"
    with new_lock.open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Renamed only when it is locked: under this name, an unlocked file means that the directory is abandoned.
        new_lock.rename(directory / _LOCK)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def delete_abandoned_dirs() -> None:
    for lock_file in PARENT.glob(f"{_PREFIX}*/{_LOCK}"):
        # Fails if the lock is held, belongs to another user, or was just deleted.
        with suppress(OSError), lock_file.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock_file.parent, ignore_errors=True)
