"""Python imports this module at the start of every program in a pod.

It replaces `os.statvfs` and `os.path.ismount`, so that mounts have the emulated size. `shutil.disk_usage` and psutil
use the same function. Packages of this host that the pod's image does not have are removed from the path.
"""

import os
import sys
from typing import Any

import readings

_GB = 10**9
_BLOCK = 4096
_real_statvfs = os.statvfs
_real_ismount = os.path.ismount


def _statvfs(path: Any) -> os.statvfs_result:
    if isinstance(path, int):
        return _real_statvfs(path)
    mount = readings.mount_of(os.fsdecode(path), readings.read())
    if mount is None or mount["path"] == "/":
        return _real_statvfs(path)
    blocks = int(mount["size_gb"] * _GB / _BLOCK)
    free = max(0, int((mount["size_gb"] - mount["used_gb"]) * _GB / _BLOCK))
    return os.statvfs_result((_BLOCK, _BLOCK, blocks, free, free, 10**6, 10**6, 10**6, 0, 255))


def _ismount(path: Any) -> bool:
    if isinstance(path, int):
        return _real_ismount(path)
    place = os.path.abspath(os.fsdecode(path))
    return any(place in readings.paths_of(mount) for mount in readings.read()["mounts"])


if readings.VARIABLE in os.environ:
    os.statvfs = _statvfs
    os.path.ismount = _ismount

_hidden = os.environ.get("EMULATED_HIDDEN_PACKAGES", "").split(os.pathsep)
sys.path[:] = [folder for folder in sys.path if folder not in _hidden]
