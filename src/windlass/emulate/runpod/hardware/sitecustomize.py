"""Run by every Python program of a pod when it starts: the size of a mount is that of the emulated volume, whatever
this host's own disk has. `shutil.disk_usage` and psutil ask the same function."""

import os
from typing import Any

import readings

_GB = 10**9
_BLOCK = 4096
_real_statvfs = os.statvfs


def _statvfs(path: Any) -> os.statvfs_result:
    if isinstance(path, int):
        return _real_statvfs(path)
    mount = readings.mount_of(os.fsdecode(path), readings.read())
    if mount is None or mount["path"] == "/":
        return _real_statvfs(path)
    blocks = int(mount["size_gb"] * _GB / _BLOCK)
    free = max(0, int((mount["size_gb"] - mount["used_gb"]) * _GB / _BLOCK))
    return os.statvfs_result((_BLOCK, _BLOCK, blocks, free, free, 10**6, 10**6, 10**6, 0, 255))


if readings.VARIABLE in os.environ:
    os.statvfs = _statvfs
