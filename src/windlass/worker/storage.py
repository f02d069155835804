"""How much of a shared volume is used and free, as a machine that has it mounted sees it: vendors have no such figure.

Measured on a thread of its own: a network file system that hangs must not hold up a heartbeat. Some vendors mount a
part of one large file system and show the size of the whole. No volume that can be rented is as large as that, so one
that seems to be is measured by adding up what is in it, which takes its time and is done seldom. Where nothing is
mounted nothing is measured: it would be the machine's own disk, whatever its name.
"""

import contextlib
import os
import threading
import time

# The largest volume that can be rented has 4,096 GB, be they of 10^9 bytes or of 2^30.
MAX_VOLUME_BYTES = 4096 * 1024**3
SAMPLE_INTERVAL_S = 30.0
# Adding up a million files over the network takes minutes.
WALK_INTERVAL_S = 900.0
WALK_LIMIT_S = 600.0
# A sample older than this says nothing about now.
SAMPLE_VALID_S = 3 * WALK_INTERVAL_S
_BLOCK = 512


class StorageReader:
    def __init__(self, path: str, interval_s: float = SAMPLE_INTERVAL_S) -> None:
        self._path = path
        self._interval_s = interval_s
        self._sample: tuple[float, dict[str, int | None]] | None = None
        self._stopped = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._read_forever, name="windlass-storage", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def vitals(self) -> dict[str, int | None]:
        """`storage_used_bytes` and `storage_free_bytes`; None for what is not known (any more)."""
        if self._sample is None or time.monotonic() - self._sample[0] > SAMPLE_VALID_S:
            return {"storage_used_bytes": None, "storage_free_bytes": None}
        return self._sample[1]

    def _read_forever(self) -> None:
        pause_s = 0.0
        while not self._stopped.wait(pause_s):
            pause_s = self._interval_s
            if not os.path.ismount(self._path):
                continue
            with contextlib.suppress(OSError):
                whole = os.statvfs(self._path)
                used = (whole.f_blocks - whole.f_bfree) * whole.f_frsize
                free: int | None = whole.f_bavail * whole.f_frsize
                if whole.f_blocks * whole.f_frsize > MAX_VOLUME_BYTES:
                    pause_s, free = WALK_INTERVAL_S, None
                    counted = self._add_up(time.monotonic() + WALK_LIMIT_S)
                    if counted is None:
                        continue
                    used = counted
                self._sample = (time.monotonic(), {"storage_used_bytes": used, "storage_free_bytes": free})

    def _add_up(self, give_up_at: float) -> int | None:
        """What all files take, each counted once, however many names it has. None: it took too long."""
        total, folders = 0, [self._path]
        counted: set[tuple[int, int]] = set()
        while folders:
            if time.monotonic() > give_up_at or self._stopped.is_set():
                return None
            with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        found = entry.stat(follow_symlinks=False)
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
                        elif found.st_nlink > 1:
                            # Only of those with several names it is remembered which they were: most have one.
                            if (found.st_dev, found.st_ino) in counted:
                                continue
                            counted.add((found.st_dev, found.st_ino))
                        total += found.st_blocks * _BLOCK
        return total
