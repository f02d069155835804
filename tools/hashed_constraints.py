"""Writes constraints-hashed.txt: the versions of constraints.txt with the SHA-256 of every file of each version.

    python tools/hashed_constraints.py [--index https://pypi.org/simple]

Run it after every change of constraints.txt; a test compares the two. pip cannot check hashes and install an editable
package in one call, so `make setup` installs this file first (`--require-hashes`), and then the project itself, for
which nothing is left to download but its build tool. The hashes of all platforms come from the index.
"""

import argparse
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

ROOT = Path(__file__).parent.parent
CONSTRAINTS, HASHED = ROOT / "constraints.txt", ROOT / "constraints-hashed.txt"
HEADER = "# The versions of constraints.txt with the hashes of their files. Written by tools/hashed_constraints.py.\n"
# An environment marker may follow the version.
PINNED = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;]+)(?P<marker>\s*;.*)?")
# A link of an index that has no JSON (PEP 503).
LINK = re.compile(r"#sha256=(?P<sha256>[0-9a-f]{64})[^>]*>\s*(?P<name>[^<\s]+)\s*<")
JSON = "application/vnd.pypi.simple.v1+json"
TIMEOUT_S = 30.0


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(text: str) -> list[re.Match[str]]:
    return [match for line in text.splitlines() if (match := PINNED.fullmatch(line.strip()))]


def version_of(filename: str, name: str) -> str | None:
    """The version in the name of a wheel or source archive."""
    stem = re.sub(r"\.(tar\.gz|tar\.bz2|zip|whl)$", "", filename)
    if filename.endswith(".whl"):
        return stem.split("-")[1]
    parts = stem.rsplit("-", 1)
    return parts[1] if len(parts) == 2 and normalized(parts[0]) == normalized(name) else None


def is_same_version(one: str | None, other: str) -> bool:
    if one is None:
        return False
    return one.lower().replace("_", "-") == other.lower().replace("_", "-")


def hashes_of(client: httpx.Client, index: str, name: str, version: str) -> list[str]:
    page = client.get(f"{index}/{normalized(name)}/", headers={"Accept": f"{JSON}, text/html;q=0.5"})
    page.raise_for_status()
    if "json" in page.headers.get("content-type", ""):
        files = [(file["filename"], file.get("hashes", {}).get("sha256")) for file in page.json()["files"]]
    else:
        files = [(match["name"], match["sha256"]) for match in LINK.finditer(page.text)]
    found = {sha256 for file, sha256 in files if sha256 and is_same_version(version_of(file, name), version)}
    if not found:
        raise SystemExit(f"the index has no file of {name} {version} with a SHA-256")
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write constraints-hashed.txt.")
    parser.add_argument("--index", default="https://pypi.org/simple")
    index = parser.parse_args().index.rstrip("/")
    packages = pinned(CONSTRAINTS.read_text(encoding="utf-8"))
    with httpx.Client(timeout=TIMEOUT_S, follow_redirects=True) as client, ThreadPoolExecutor(8) as threads:
        hashes = list(threads.map(lambda each: hashes_of(client, index, each["name"], each["version"]), packages))
    lines = [HEADER]
    for package, values in zip(packages, hashes, strict=True):
        head = f"{package['name']}=={package['version']}{package['marker'] or ''}"
        lines.append(" \\\n".join([head, *(f"    --hash=sha256:{value}" for value in values)]) + "\n")
    HASHED.write_text("".join(lines), encoding="utf-8")
    sys.stdout.write(f"wrote {HASHED.name}: {len(packages)} packages, {sum(map(len, hashes))} files\n")


if __name__ == "__main__":
    main()
