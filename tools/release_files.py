"""Builds the files of a release: source archive, wheel, SBOM (CycloneDX) and SHA-256 sums.

    python tools/release_files.py [--directory dist/release] [--tag v0.1.0]

The wheel is built from the source archive, so both have what they need. The same commit gives the same bytes.
With --tag, the version and the changelog must be those of the tag. Nothing is signed or published here:
.github/workflows/release.yml does that (docs/releasing.md).
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tomllib
import uuid
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from windlass.server.wheel import pin_requirements

ROOT = Path(__file__).parent.parent
SUMS = "SHA256SUMS"
BUILD_TIMEOUT_S = 600


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the files of a release.")
    parser.add_argument("--directory", type=Path, default=ROOT / "dist" / "release")
    parser.add_argument("--tag", help="must fit the version and the changelog")
    chosen = parser.parse_args()
    if chosen.tag is not None and (problem := tag_problem(chosen.tag)):
        raise SystemExit(problem)
    directory: Path = chosen.directory
    if directory.exists() and any(directory.iterdir()):
        raise SystemExit(f"{directory} is not empty: remove it first, so that no file of another build is released")
    build(directory)
    (wheel,) = directory.glob("*.whl")
    sbom = directory / f"{wheel.stem.removesuffix('-py3-none-any')}.cdx.json"
    sbom.write_text(json.dumps(bill_of_materials(wheel), indent=2) + "\n")
    files = sorted(directory.iterdir())
    (directory / SUMS).write_text("".join(f"{sha256(file)}  {file.name}\n" for file in files))
    for file in [*files, directory / SUMS]:
        print(f"{file.stat().st_size:>9,}  {file}")


def tag_problem(tag: str) -> str | None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    if tag != f"v{version}":
        return f"the tag is {tag} and pyproject.toml has version {version}: change one of them"
    if not re.search(rf"^## \[{re.escape(version)}\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE):
        return f"CHANGELOG.md has no section [{version}]: rename [Unreleased], and begin a new one"
    return None


def build(directory: Path) -> None:
    # The build tool is pinned with everything else in constraints.txt, and installed here: no isolation.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(directory), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stdout + done.stderr)


def bill_of_materials(wheel: Path) -> dict[str, Any]:
    """The wheel and every package that it needs without extras, in the versions that this environment tests with."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(name).decode()
    own_name, own_version = (re.findall(rf"^{field}: (.+)$", text, re.MULTILINE)[0] for field in ("Name", "Version"))
    needed = _required(_requires_dist(pin_requirements(text)))
    refs = {canonicalize_name(need.name): _purl(need.name, metadata.version(need.name)) for need in needed}
    own = {
        "type": "application",
        "bom-ref": _purl(own_name, own_version),
        "name": own_name,
        "version": own_version,
        "purl": _purl(own_name, own_version),
        "licenses": [{"expression": re.findall(r"^License-Expression: (.+)$", text, re.MULTILINE)[0]}],
        "hashes": [{"alg": "SHA-256", "content": sha256(wheel)}],
    }
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": uuid.uuid5(uuid.NAMESPACE_URL, sha256(wheel)).urn,
        "version": 1,
        "metadata": {"component": own},
        "components": [_component(name, ref) for name, ref in sorted(refs.items())],
        "dependencies": [
            {"ref": own["bom-ref"], "dependsOn": _refs(_requires_dist(text), refs)},
            *(
                {"ref": ref, "dependsOn": _refs(metadata.requires(name) or [], refs)}
                for name, ref in sorted(refs.items())
            ),
        ],
    }


def _component(name: str, ref: str) -> dict[str, Any]:
    found = metadata.metadata(name)
    component = {
        "type": "library",
        "bom-ref": ref,
        "name": found["Name"],
        "version": metadata.version(name),
        "purl": ref,
        "scope": "required",
    }
    expression = found.get("License-Expression")
    return component | ({"licenses": [{"expression": expression}]} if expression else {})


def _requires_dist(text: str) -> list[str]:
    return re.findall(r"^Requires-Dist: (.+)$", text, re.MULTILINE)


def _required(lines: list[str]) -> list[Requirement]:
    """Without what only an extra or another platform needs."""
    needs = map(Requirement, lines)
    return [need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]


def _refs(lines: list[str], refs: dict[str, str]) -> list[str]:
    names = {canonicalize_name(need.name) for need in _required(lines)}
    return sorted(refs[name] for name in names if name in refs)


def _purl(name: str, version: str) -> str:
    return f"pkg:pypi/{canonicalize_name(name)}@{version}"


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
