"""Measures the used and free space of a shared volume on a machine that mounts it. Vendors report no such figure.

Measuring has its own thread, because a hanging network file system must not delay the heartbeat. Some vendors mount a
part of one large file system and show the size of the whole. A volume that seems larger than any that can be rented is
therefore measured by adding up its files, which is slow and done rarely. A path that is no mount point is not measured:
it would be the machine's own disk.
"""

import contextlib
import os
import threading
import time

# The largest volume that can be rented has 4,096 GB (of 10^9 or 2^30 bytes).
MAX_VOLUME_BYTES = 4096 * 1024**3
SAMPLE_INTERVAL_S = 30.0
# Adding up a million files over the network takes minutes.
WALK_INTERVAL_S = 900.0
WALK_LIMIT_S = 600.0
# An older sample is not reported.
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
        """`storage_used_bytes` and `storage_free_bytes`; None if unknown or outdated."""
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
                    counted = self._sum_file_sizes(time.monotonic() + WALK_LIMIT_S)
                    if counted is None:
                        continue
                    used = counted
                self._sample = (time.monotonic(), {"storage_used_bytes": used, "storage_free_bytes": free})

    def _sum_file_sizes(self, give_up_at: float) -> int | None:
        """The disk usage of all files, each counted once regardless of hard links. None if it took too long."""
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
                            # Only files with several links are remembered, which are few.
                            if (found.st_dev, found.st_ino) in counted:
                                continue
                            counted.add((found.st_dev, found.st_ino))
                        total += found.st_blocks * _BLOCK
        return total
