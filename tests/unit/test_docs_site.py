"""The documentation site builds strictly from README.md and docs/, and every link in the repository has a target."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("mkdocs.yml", "tools/site_hooks.py", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
BUILD_TIMEOUT_S = 240.0
_FENCED = re.compile(r"^\s*```.*?^\s*```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
# Addresses that a page loads by itself, in contrast to links that a reader follows.
_LOADED = re.compile(r"""<(?:script|img|iframe|link)[^>]*(?:src|href)=["'](?:https?:)?//""")


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", source / "mkdocs.yml", "-d", target],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "docs", tmp_path / "copy" / "docs")
    for name in SOURCES:
        (tmp_path / "copy" / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "copy" / name)
    return tmp_path / "copy"


def test_site_builds_without_broken_links_or_anchors(copy: Path, tmp_path: Path) -> None:
    (copy / "docs" / "new-page.md").write_text("# Page\n")
    done = build(copy, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    pages = {page.name: page.read_text() for page in (tmp_path / "site").glob("*.html")}
    assert {"index.html", "quickstart.html", "reference-cli.html", "runbooks.html"} <= pages.keys()
    assert 'id="STALE_HEARTBEAT"' in pages["runbooks.html"]
    assert 'href="new-page.html"' in pages["index.html"], "a new page is in the navigation"
    assert [name for name, text in pages.items() if _LOADED.search(text)] == []


def test_broken_links_fail_the_build(copy: Path, tmp_path: Path) -> None:
    broken = {
        "README.md": ("docs/concepts.md#no-such-heading", "docs/no-such-page-1.md"),
        "docs/cost.md": ("policies.md#no-such-anchor", "no-such-page-2.md"),
    }
    for name, targets in broken.items():
        page = copy / name
        page.write_text("\n".join([page.read_text(), *(f"[x]({target})" for target in targets), ""]))
    done = build(copy, tmp_path / "site")
    assert done.returncode != 0
    for word in ("no-such-heading", "no-such-page-1", "no-such-anchor", "no-such-page-2"):
        assert word in done.stderr


def test_every_relative_link_in_the_repository_has_a_target() -> None:
    pages = [
        *ROOT.glob("*.md"),
        *(page for name in ("docs", "deploy", "examples") for page in ROOT.glob(f"{name}/**/*.md")),
    ]
    links = [
        (page.relative_to(ROOT), target)
        for page in pages
        for target in _LINK.findall(_FENCED.sub("", page.read_text()))
        if "://" not in target and not target.startswith("mailto:")
    ]
    assert len(links) > 100
    assert [(str(page), target) for page, target in links if not (ROOT / page.parent / target).exists()] == []
