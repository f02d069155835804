"""What the image of an emulated pod contains: Python, an SSH server, Windlass.

The emulator pulls no images. Well-known public images are listed here by the start of their name. Any other image is
taken for one that was built for Windlass, unless `bare_images` names it. A pod of an image without
Windlass has no `windlass` and no such package: its Python is that of the emulator with the standard library only, and
its other programs are those of this host.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PROBE_TIMEOUT_S = 30.0
# Programs of this host that would bring another Python, or Windlass.
_HIDDEN_PROGRAMS = re.compile(
    r"(python|pip|pypy|idle|pydoc|conda|mamba|uv|pyenv|poetry|pipx|windlass|ray)[\d.]*(-.*)?x?"
)


@dataclass(frozen=True, slots=True)
class ImageContents:
    has_python: bool = True
    has_ssh: bool = True
    has_windlass: bool = False
    # With join data in the environment and no `args`, it runs a worker.
    starts_worker: bool = False
    # Which variables its start script writes to /etc/rp_environment. None: it writes no such file.
    written_variables: re.Pattern[str] | None = None


# The start script of Runpod's images, since October 2025 and before August 2025.
_UPPER_CASE = re.compile(r"(?!PUBLIC_KEY)[A-Z_][A-Z0-9_]*=")
_OF_RUNPOD = re.compile(r"RUNPOD_|PATH=|_=")
WINDLASS_IMAGE = ImageContents(has_windlass=True, starts_worker=True)
BARE_IMAGE = ImageContents(written_variables=_UPPER_CASE)
OLD_RUNPOD_IMAGE = ImageContents(written_variables=_OF_RUNPOD)
# By the start of the name. The first that fits counts.
PUBLIC_IMAGES: Mapping[str, ImageContents] = {
    "runpod/pytorch:2.": OLD_RUNPOD_IMAGE,
    "runpod/": BARE_IMAGE,
    "python:": ImageContents(has_ssh=False),
    "pytorch/pytorch": ImageContents(has_ssh=False),
    "tensorflow/tensorflow": ImageContents(has_ssh=False),
    "nvidia/cuda": ImageContents(has_python=False, has_ssh=False),
    "nvcr.io/nvidia/cuda": ImageContents(has_python=False, has_ssh=False),
    "ubuntu": ImageContents(has_python=False, has_ssh=False),
    "debian": ImageContents(has_python=False, has_ssh=False),
    "alpine": ImageContents(has_python=False, has_ssh=False),
}


def contents_of(image: str, own: Mapping[str, ImageContents]) -> ImageContents:
    """`own` comes first; its keys are starts of names too."""
    for start, contents in (*own.items(), *PUBLIC_IMAGES.items()):
        if image.startswith(start):
            return contents
    return WINDLASS_IMAGE


def environment_file(image: ImageContents, environment: Mapping[str, str]) -> str | None:
    """What the start script writes to /etc/rp_environment, if anything: the lines of `printenv` that begin with a
    variable that it writes, in double quotes without escaping. A value keeps only its first line."""
    pattern = image.written_variables
    if pattern is None:
        return None
    printed = "".join(f"{name}={value}\n" for name, value in environment.items()).split("\n")
    pairs = [line.partition("=") for line in printed if pattern.match(line)]
    return "".join(f'export {name}="{value}"\n' for name, _, value in pairs)


def link_programs(folder: Path) -> None:
    """Link the programs of this host into a folder, without those that bring Python or Windlass."""
    if folder.exists():
        return
    folder.mkdir(parents=True)
    own = Path(sys.prefix) / "bin" if sys.prefix != sys.base_prefix else None
    for place in map(Path, os.environ.get("PATH", os.defpath).split(os.pathsep)):
        if place == own:
            continue
        # A PATH may name folders that do not exist, or that belong to another user.
        try:
            programs = list(place.iterdir())
        except OSError:
            continue
        for program in programs:
            link = folder / program.name
            if not _HIDDEN_PROGRAMS.fullmatch(program.name) and not link.is_symlink():
                link.symlink_to(program)


def python_of_image() -> str:
    """A program that starts the Python of an image: the interpreter under the emulator's own environment."""
    return f'#!/bin/sh\nexec {shlex.quote(_base_python())} "$@"\n'


def _base_python() -> str:
    return str(getattr(sys, "_base_executable", sys.executable))


@cache
def hidden_packages() -> tuple[str, ...]:
    """Folders of packages that the interpreter of this host has and an image does not."""
    found = subprocess.run(
        [_base_python(), "-I", "-c", "import site; print('\\n'.join(site.getsitepackages()))"],
        check=True, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S,
    )  # fmt: skip
    return tuple(found.stdout.split("\n")[:-1])


def without_windlass(python_path: str) -> str:
    """A PYTHONPATH without folders that contain Windlass."""
    folders = [each for each in python_path.split(os.pathsep) if each]
    return os.pathsep.join(each for each in folders if not (Path(each) / "windlass" / "__init__.py").exists())
