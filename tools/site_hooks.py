"""Hooks of the documentation site: pages from the top folder, links out of docs/, anchors of codes, the decisions.

README.md is the home page. Links to files that are not part of the site become plain text, because the site is read
without the repository. Every code in the first column of a table has an anchor: runbooks.html#STALE_HEARTBEAT.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
# Page of the site -> file of the repository.
TOP_PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_CODE_CELL = re.compile(r"<td>((?:<code>[A-Z_]+</code>(?:, )?)+)</td>")
_CODE = re.compile(r"<code>([A-Z_]+)</code>")


def on_files(files: Any, config: Any) -> Any:
    for page, source in TOP_PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_linked_from_docs(text)))
    return files


def on_config(config: Any) -> Any:
    """Every page is in the navigation: new ones under More until mkdocs.yml names them, decision records in order."""
    listed = str(config.nav)
    unlisted = [page.name for page in sorted(Path(config.docs_dir).glob("*.md")) if f"'{page.name}'" not in listed]
    if unlisted:
        config.nav.append({"More": unlisted})
    decisions = sorted((Path(config.docs_dir) / "decisions").glob("*.md"))
    config.nav.append({"Decisions": [f"decisions/{file.name}" for file in decisions]})
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    def keep_or_plain(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        if target.endswith("/") and "://" not in target:
            # A folder, which a reader of the repository can list.
            return text
        is_outside = target.startswith(("../", "/")) and not (ROOT / "docs" / page.file.src_uri).parent.joinpath(
            target
        ).resolve().is_relative_to(ROOT / "docs")
        return text if is_outside else match[0]

    return _LINK.sub(keep_or_plain, markdown)


def on_page_content(html: str, **_: Any) -> str:
    seen: set[str] = set()

    def with_anchor(match: re.Match[str]) -> str:
        if match[1] in seen:
            return match[0]
        seen.add(match[1])
        return f'<code id="{match[1]}">{match[1]}</code>'

    return _CODE_CELL.sub(lambda cell: f"<td>{_CODE.sub(with_anchor, cell[1])}</td>", html)


def _linked_from_docs(text: str) -> str:
    """A file of the top folder as a page: links into docs/ are relative to it, other files are plain text."""
    names = {source: page for page, source in TOP_PAGES.items()}
    text = text.replace("](docs/images/", "](images/")

    def relative(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target:
            return match[0]
        if target in names:
            return f"[{label}]({names[target]}{anchor})"
        if target.startswith("docs/") and target.endswith(".md"):
            return f"[{label}]({target.removeprefix('docs/')}{anchor})"
        return label

    return _LINK.sub(relative, text)
