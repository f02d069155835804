"""Builds a wheel of the running program, so that a worker always runs the version of its control plane.

It is built from the installed files with the standard library; an editable install is enough. The same files give the
same bytes. Dependencies are named in the metadata and come from a package index.
"""

import base64
import hashlib
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

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
    files[f"{info}/METADATA"] = metadata_text.encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: windlass\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    entry_points = distribution.read_text("entry_points.txt")
    if entry_points is not None:
        files[f"{info}/entry_points.txt"] = entry_points.encode()
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD")
    content = _zip(files)
    filename = f"windlass-{distribution.version}-py3-none-any.whl"
    return Wheel(filename, distribution.version, hashlib.sha256(content).hexdigest(), content)


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
