"""Builds Dockerfiles with buildah, without a registry, a package index or a daemon.

The base images are stand-ins: a root folder whose programs and libraries are those of this host, mounted while the
build and its containers run, with the Python that runs the tests, a pip that finds packages in a folder of wheels, and
an apt-get that installs nothing. All instructions of the Dockerfile run, in a chroot, as root.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUILD_TIMEOUT_S = 1200
RUN_TIMEOUT_S = 120
# Where programs and libraries are on Debian and Ubuntu. /usr/local belongs to the image.
_HOST_FOLDERS = ("/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib64", "/usr/share")
_HOST_FILES = ("passwd", "group", "shadow", "gshadow", "login.defs", "nsswitch.conf", "ld.so.cache", "ld.so.conf")
_BASE = """\
FROM scratch
COPY base /
ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LD_LIBRARY_PATH=/python/lib
"""


def has_buildah() -> bool:
    return shutil.which("buildah") is not None


@dataclass(frozen=True)
class ImageBuilder:
    folder: Path
    wheels: Path

    def _buildah(self, *words: str, timeout_s: int = RUN_TIMEOUT_S) -> "subprocess.CompletedProcess[str]":
        store = ("--storage-driver", "vfs", "--root", str(self.folder / "store"), "--runroot", str(self.folder / "run"))
        return subprocess.run(
            ["buildah", "--log-level", "error", *store, *words], env={**os.environ, "BUILDAH_ISOLATION": "chroot"},
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip

    def _volumes(self) -> list[str]:
        folders = {**{place: place for place in _HOST_FOLDERS if Path(place).is_dir()}, sys.base_prefix: "/python"}
        folders[str(self.wheels)] = "/wheels"
        return [word for source, target in folders.items() for word in ("--volume", f"{source}:{target}:ro")]

    def problem(self) -> str | None:
        """Why buildah runs no container here, for example in a container that may mount nothing; None if it does."""
        made = self._buildah("from", "--name", "probe", "scratch")
        if made.returncode == 0:
            links = (f"/usr/{each}:/{each}" for each in ("lib", "lib64") if (Path("/usr") / each).is_dir())
            volumes = [word for pair in ("/usr:/usr", *links) for word in ("--volume", f"{pair}:ro")]
            made = self._buildah("run", *volumes, "probe", "--", "/usr/bin/env", "true")
        return (made.stderr or made.stdout).strip()[-300:] or "no output" if made.returncode != 0 else None

    def make_base(self, name: str) -> None:
        """The stand-in of a public image."""
        root = self.folder / "context" / "base"
        if not root.exists():
            for place in (
                "etc",
                "usr/local/bin",
                "usr/local/sbin",
                "var/lib",
                "tmp",
                "root",
                "home",
                "proc",
                "sys",
                "dev",
            ):
                (root / place).mkdir(parents=True)
            (root / "tmp").chmod(0o1777)
            for place in ("bin", "sbin", "lib", "lib64"):
                (root / place).symlink_to(f"usr/{place}")
            for each in _HOST_FILES:
                if (Path("/etc") / each).exists():
                    shutil.copy(Path("/etc") / each, root / "etc" / each)
            (root / "etc" / "pip.conf").write_text(
                "[global]\nno-index = true\nfind-links = /wheels\n[install]\nno-compile = true\n"
            )
            programs = {
                # No links: an environment looks for its library next to the program that made it.
                **dict.fromkeys(("python", "python3"), f'exec /python/bin/python3.{sys.version_info.minor} "$@"'),
                "apt-get": "exit 0",
            }
            for program, text in programs.items():
                (root / "usr/local/bin" / program).write_text(f"#!/bin/sh\n{text}\n")
                (root / "usr/local/bin" / program).chmod(0o755)
        (root.parent / "Dockerfile").write_text(_BASE)
        built = self._buildah("build", "--format", "docker", "--tag", name, str(root.parent))
        assert built.returncode == 0, built.stdout + built.stderr

    def build(self, dockerfile: Path, context: Path, tag: str) -> dict[str, Any]:
        """Returns the configuration of the image."""
        built = self._buildah(
            "build", "--pull-never", "--format", "docker", *self._volumes(), "--file", str(dockerfile), "--tag", tag,
            str(context), timeout_s=BUILD_TIMEOUT_S,
        )  # fmt: skip
        assert built.returncode == 0, (built.stdout + built.stderr)[-5000:]
        shown = self._buildah("inspect", "--type", "image", tag)
        assert shown.returncode == 0, shown.stderr
        config: dict[str, Any] = json.loads(shown.stdout)["Docker"]["config"]
        return config

    def container(self, tag: str) -> str:
        made = self._buildah("from", "--pull-never", tag)
        assert made.returncode == 0, made.stderr
        return made.stdout.strip()

    def run(self, container: str, words: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        """Run a command as the image's user and in its folder."""
        # buildah looks for a program before it mounts the folders of this host.
        return self._buildah("run", *self._volumes(), container, "--", "/bin/sh", "-c", 'exec "$@"', "sh", *words)
