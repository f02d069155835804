"""What the machine has: the file that the emulator writes and everything here reads, anew each time.

    {"has_driver": true, "driver": "570.86", "cuda": "12.8",
     "gpus": [{"name": "NVIDIA L40S", "total_mb": 46068, "used_mb": 512}],
     "mounts": [{"path": "/workspace", "folder": "/tmp/…", "size_gb": 100, "used_gb": 3.5}, …, {"path": "/", …}]}

Only the standard library: it is imported by every Python program of a pod.
"""

import json
import os
from typing import Any

VARIABLE = "EMULATED_HARDWARE"
NOTHING: dict[str, Any] = {"has_driver": False, "driver": "", "cuda": "", "gpus": [], "mounts": []}


def read() -> dict[str, Any]:
    try:
        with open(os.environ[VARIABLE]) as file:
            found: dict[str, Any] = json.load(file)
            return found
    except (KeyError, OSError, ValueError):
        return NOTHING


def places_of(mount: dict[str, Any]) -> tuple[str, str, str]:
    """Its path in the pod, the folder that stands for it, and what that is a link to."""
    return mount["path"], mount["folder"], os.path.realpath(mount["folder"])


def mount_of(path: str, readings: dict[str, Any]) -> dict[str, Any] | None:
    """The mount that a path is on. "/" if no other is."""
    path = os.path.abspath(path)
    places = [(place, mount) for mount in readings["mounts"] for place in places_of(mount)]
    holding = [each for each in places if path == each[0] or path.startswith(each[0].rstrip("/") + "/")]
    return max(holding, key=lambda each: len(each[0]))[1] if holding else None
