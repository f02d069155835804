"""The emulated hardware, from a file that the emulator writes. The file is read at every call.

    {"has_driver": true, "driver": "570.86", "cuda": "12.8",
     "gpus": [{"name": "NVIDIA L40S", "total_mb": 46068, "used_mb": 512}],
     "mounts": [{"path": "/workspace", "folder": "/tmp/…", "size_gb": 100, "used_gb": 3.5}, …, {"path": "/", …}]}

Standard library only: every Python program of a pod imports it.
"""

import json
import os
from typing import Any

VARIABLE = "EMULATED_HARDWARE"
NO_HARDWARE: dict[str, Any] = {"has_driver": False, "driver": "", "cuda": "", "gpus": [], "mounts": []}


def read() -> dict[str, Any]:
    try:
        with open(os.environ[VARIABLE]) as file:
            found: dict[str, Any] = json.load(file)
            return found
    except (KeyError, OSError, ValueError):
        return NO_HARDWARE


def paths_of(mount: dict[str, Any]) -> tuple[str, str, str]:
    """The path in the pod, the folder on this host, and the folder with links resolved."""
    return mount["path"], mount["folder"], os.path.realpath(mount["folder"])


def mount_of(path: str, readings: dict[str, Any]) -> dict[str, Any] | None:
    """The mount that contains a path; "/" if no other does."""
    path = os.path.abspath(path)
    paths = [(prefix, mount) for mount in readings["mounts"] for prefix in paths_of(mount)]
    found = [each for each in paths if path == each[0] or path.startswith(each[0].rstrip("/") + "/")]
    return max(found, key=lambda each: len(each[0]))[1] if found else None
