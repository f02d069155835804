"""A folder of wheels with everything that Windlass needs, so that pip can install it without a package index.

Each wheel is packed from the files of an installed package. Windlass itself is not among them: machines get it from the
control plane. Programs of the packages are left out, since only their modules are used.
"""

import base64
import csv
import hashlib
import io
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from windlass.server.wheel import build_wheel

# Files of the installation, not of the package.
_OF_INSTALLATION = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")


def write_wheels(folder: Path, also: Sequence[str] = ()) -> Path:
    """`also`: further packages, with what they need."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in {*_needed_packages(), *_with_needed(also)}:
        _write_wheel(metadata.distribution(name), folder)
    return folder


def _needed_packages() -> list[str]:
    wheel = build_wheel()
    assert wheel is not None, "windlass is not installed as a package"
    with zipfile.ZipFile(io.BytesIO(wheel.content)) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = archive.read(path).decode().partition("\n\n")[0].splitlines()
    needed = [Requirement(line.partition(": ")[2]) for line in lines if line.startswith("Requires-Dist: ")]
    return [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]


def _with_needed(names: Sequence[str]) -> list[str]:
    """Packages and, in turn, what they need."""
    found = list(names)
    # It grows while it is read.
    for name in found:
        for need in map(Requirement, metadata.requires(name) or []):
            if need.name not in found and (need.marker is None or need.marker.evaluate({"extra": ""})):
                found.append(need.name)
    return found


def _write_wheel(distribution: metadata.Distribution, folder: Path) -> None:
    name = distribution.metadata["Name"].replace("-", "_").replace(".", "_")
    tags = [line[5:] for line in (distribution.read_text("WHEEL") or "").splitlines() if line.startswith("Tag: ")]
    # Tags such as py2.py3-none-any: interpreters, interfaces and platforms.
    parts = zip(*(tag.split("-") for tag in tags), strict=True)
    tag = "-".join(".".join(dict.fromkeys(part)) for part in parts)
    record, rows = "", []
    with zipfile.ZipFile(folder / f"{name}-{distribution.version}-{tag}.whl", "w") as archive:
        for file in distribution.files or []:
            path = file.as_posix()
            if path.endswith(".dist-info/RECORD"):
                record = path
            is_module = not path.startswith("../") and not path.endswith(".pyc")
            if is_module and not (".dist-info/" in path and path.endswith(_OF_INSTALLATION)):
                source = Path(str(file.locate()))
                archive.write(source, path)
                digest = base64.urlsafe_b64encode(hashlib.sha256(source.read_bytes()).digest()).rstrip(b"=").decode()
                rows.append((path, f"sha256={digest}", str(source.stat().st_size)))
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*rows, (record, "", "")])
        archive.writestr(record, text.getvalue())
