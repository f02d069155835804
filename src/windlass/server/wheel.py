"""Builds a wheel of the running program, so that a worker always runs the version of its control plane.

It is built from the installed files; an editable install is enough. The same files give the same bytes. Dependencies
come from a package index, in exactly the versions that this process runs with, also the indirect ones: a machine that
boots later does not install a newer release. Extras keep the ranges of the project.
"""

import base64
import hashlib
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Far more than a program has.
MAX_REQUIREMENTS = 1_000
# The earliest time that a zip file can hold. The build time would make every wheel different.
_TIMESTAMP = (1980, 1, 1, 0, 0, 0)
_READABLE = 0o644 << 16
_PACKAGE = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Wheel:
    filename: str
    version: str
    sha256: str
    content: bytes = field(repr=False)


def build_wheel() -> Wheel | None:
    """None if this program was not installed, because then its dependencies are unknown."""
    try:
        distribution = metadata.distribution("windlass")
    except metadata.PackageNotFoundError:
        return None
    metadata_text = distribution.read_text("METADATA")
    if metadata_text is None:
        return None
    info = f"windlass-{distribution.version}.dist-info"
    files = dict(_package_files())
    files[f"{info}/METADATA"] = pin_requirements(metadata_text).encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: windlass\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    entry_points = distribution.read_text("entry_points.txt")
    if entry_points is not None:
        files[f"{info}/entry_points.txt"] = entry_points.encode()
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD")
    content = _zip(files)
    filename = f"windlass-{distribution.version}-py3-none-any.whl"
    return Wheel(filename, distribution.version, hashlib.sha256(content).hexdigest(), content)


def pin_requirements(metadata_text: str) -> str:
    """The metadata of a package, with exact versions of everything that it needs and that is installed here."""
    head, separator, description = metadata_text.partition("\n\n")
    pinned: dict[str, Requirement] = {}
    for found in _needed(head):
        name = canonicalize_name(found.name)
        # With extras, if any requirement has them.
        if name not in pinned or found.extras:
            pinned[name] = found
    lines = []
    for line in head.splitlines():
        requirement = _requirement_of(line)
        if requirement is None or not _is_core(requirement):
            lines.append(line)
    lines += [f"Requires-Dist: {_exact(requirement)}" for _, requirement in sorted(pinned.items())]
    return "\n".join(lines) + separator + description


def _requirement_of(line: str) -> Requirement | None:
    name, _, value = line.partition(": ")
    return Requirement(value) if name == "Requires-Dist" else None


def _is_core(requirement: Requirement) -> bool:
    """Whether it is needed without any extra."""
    return requirement.marker is None or "extra" not in str(requirement.marker)


def _needed(head: str) -> Iterator[Requirement]:
    """Requirements of the package and, in turn, of those that are installed here; each name once."""
    waiting = [found for line in head.splitlines() if (found := _requirement_of(line)) is not None and _is_core(found)]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting and len(seen) < MAX_REQUIREMENTS:
        requirement = waiting.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        yield requirement
        try:
            needs = metadata.requires(requirement.name) or []
        except metadata.PackageNotFoundError:
            continue  # its marker excludes this platform
        extras = requirement.extras or {""}
        waiting += [
            each
            for each in map(Requirement, needs)
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in ("", *extras))
        ]


def _exact(requirement: Requirement) -> str:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return str(requirement)
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    marker = f" ; {requirement.marker}" if requirement.marker is not None and _is_core(requirement) else ""
    return f"{requirement.name}{extras}=={version}{marker}"


def _package_files() -> Iterator[tuple[str, bytes]]:
    for path in sorted(_PACKAGE.rglob("*")):
        inner = path.relative_to(_PACKAGE)
        if path.is_file() and "__pycache__" not in inner.parts and not path.name.endswith((".pyc", "~", ".swp")):
            yield f"windlass/{inner.as_posix()}", path.read_bytes()


def _record(files: dict[str, bytes], own_name: str) -> bytes:
    def line(name: str, content: bytes) -> str:
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        return f"{name},sha256={digest},{len(content)}"

    lines = [line(name, files[name]) for name in sorted(files)]
    return ("\n".join([*lines, f"{own_name},,"]) + "\n").encode()


def _zip(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        # The wheel format recommends metadata last.
        for name in sorted(files, key=lambda name: (".dist-info/" in name, name)):
            entry = zipfile.ZipInfo(name, _TIMESTAMP)
            entry.external_attr = _READABLE
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, files[name])
    return buffer.getvalue()
