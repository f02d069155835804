"""Ray's own files, of nodes that share a host: a folder each, which is gone when its owner is.

Ray makes sockets in it, whose names must be short, so it lies directly in /tmp. Its owner holds a lock on it. What was
left behind by owners that were killed is deleted by the next that asks.
"""

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PLACE = Path("/tmp")  # noqa: S108 - mkdtemp makes its own folder in it
_PREFIX = "wl-ray-"
_LOCK = "owner.lock"


@contextmanager
def ray_folder() -> Iterator[Path]:
    _delete_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_PLACE))
    unlocked = folder / f"{_LOCK}.new"
    with unlocked.open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # By this name others find it: not before it is locked, or they would take it for abandoned.
        unlocked.rename(folder / _LOCK)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _delete_abandoned() -> None:
    for lock_file in _PLACE.glob(f"{_PREFIX}*/{_LOCK}"):
        # Held, somebody else's, or just gone.
        with suppress(OSError), lock_file.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock_file.parent, ignore_errors=True)
