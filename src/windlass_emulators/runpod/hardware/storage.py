"""`df`, `mountpoint` and `findmnt` inside an emulated pod. The first argument selects the command."""

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

import readings

_GB = 10**9
_UNITS = {"K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4, "KB": 1000, "MB": 1000**2, "GB": 1000**3}
_COLUMNS = ("source", "fstype", "size", "used", "avail", "pcent", "target")
_TITLES = {
    "source": "Filesystem", "fstype": "Type", "used": "Used", "avail": "Avail", "pcent": "Use%", "target": "Mounted on",
}  # fmt: skip


def df(words: list[str]) -> int:
    parser = argparse.ArgumentParser("df", add_help=False)
    parser.add_argument("-P", "-a", "-l", action="store_true")
    parser.add_argument("-T", dest="type", action="store_true")
    parser.add_argument("-k", dest="block", action="store_const", const="1K")
    parser.add_argument("-m", dest="block", action="store_const", const="1M")
    parser.add_argument("-B", "--block-size", dest="block")
    parser.add_argument("-h", "-H", dest="human", action="store_true")
    parser.add_argument("--output", nargs="?", const=",".join(_COLUMNS))
    parser.add_argument("paths", nargs="*")
    options = parser.parse_args(words)
    found = readings.read()
    mounts, status = found["mounts"], 0
    if options.paths:
        mounts = []
        for path in options.paths:
            mount = readings.mount_of(path, found)
            if mount is None or not os.path.exists(path):
                print(f"df: {path}: No such file or directory", file=sys.stderr)
                status = 1
            else:
                mounts.append(mount)
    if not mounts:
        return status
    block = _block_of(options.block)
    columns = options.output.split(",") if options.output else [c for c in _COLUMNS if options.type or c != "fstype"]
    size_title = "Size" if options.human else f"{block}-blocks" if block != 1024 else "1K-blocks"
    print(" ".join({**_TITLES, "size": size_title}.get(column, column) for column in columns))
    for mount in mounts:
        cells = _cells(mount, lambda size: _human(size) if options.human else str(-(-int(size) // block)))
        print(" ".join(cells.get(column, "-") for column in columns))
    return status


def _block_of(text: str | None) -> int:
    if not text:
        return 1024
    digits = text.rstrip("KMGTB")
    return int(digits or 1) * _UNITS.get(text[len(digits) :], 1)


def _cells(mount: dict[str, Any], shown: Callable[[float], str]) -> dict[str, str]:
    size, used = mount["size_gb"] * _GB, mount["used_gb"] * _GB
    percent = min(100, -(-int(used) * 100 // max(1, int(size))))
    is_root = mount["path"] == "/"
    return {
        "source": "overlay" if is_root else "mfs#emulated:9421",
        "fstype": "overlay" if is_root else "fuse",
        "size": shown(size),
        "used": shown(used),
        "avail": shown(max(0, size - used)),
        "pcent": f"{percent}%",
        "target": mount["path"],
    }


def _human(size: float) -> str:
    for unit in ("", "K", "M", "G", "T"):
        if size < 1024 or unit == "T":
            return f"{size:.1f}{unit}" if size < 10 and unit else f"{size:.0f}{unit}"
        size /= 1024
    return ""


def mountpoint(words: list[str]) -> int:
    paths = [word for word in words if not word.startswith("-")]
    found = readings.read()
    is_mount = bool(paths) and _mounted(paths[-1], found) is not None
    if "-q" not in words:
        print(f"{paths[-1] if paths else ''} is {'' if is_mount else 'not '}a mountpoint")
    return 0 if is_mount else 32


def findmnt(words: list[str]) -> int:
    paths = [word for word in words if word.startswith("/")]
    found = readings.read()
    mounts = [_mounted(path, found) for path in paths] if paths else found["mounts"]
    shown = [mount for mount in mounts if mount]
    for mount in shown:
        cells = _cells(mount, str)
        print(cells["target"], cells["source"], cells["fstype"], "rw")
    return 0 if shown else 1


def _mounted(path: str, found: dict[str, Any]) -> dict[str, Any] | None:
    path = os.path.abspath(path)
    return next((mount for mount in found["mounts"] if path in readings.paths_of(mount)), None)


if __name__ == "__main__":
    sys.exit({"df": df, "mountpoint": mountpoint, "findmnt": findmnt}[sys.argv[1]](sys.argv[2:]))
