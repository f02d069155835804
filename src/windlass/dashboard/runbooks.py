"""The page of runbooks, rendered from its Markdown, and links of codes to their runbooks."""

from collections.abc import Iterator, Sequence
from functools import cache
from urllib.parse import urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

from windlass.runbooks import heading_anchor, runbook_page, runbooks

PATH = "/runbooks"
_SCROLLING = Markup('<div class="scroll" tabindex="0" role="region" aria-label="{}, scrollable table">')


def runbook_url(code: str | None) -> str | None:
    """None if the code has no runbook."""
    return f"{PATH}#{code}" if code in runbooks() else None


def runbook_link(code: str | None) -> Markup | str:
    """The code, linked to its runbook if it has one."""
    url = runbook_url(code)
    return code or "" if url is None else Markup('<a href="{}">{}</a>').format(url, code)


@cache
def runbooks_html() -> Markup:
    """The page without its title. Every code and heading has an anchor; links to other pages are plain text."""
    markdown = MarkdownIt("js-default")
    tokens = list(_without_title(markdown.parse(runbook_page())))
    _add_anchors(tokens)
    tokens = list(_with_scrolling_tables(tokens))
    # HTML in the source is escaped by this preset, and the source is part of the package.
    return Markup(markdown.renderer.render(tokens, markdown.options, {}))  # noqa: S704


def _without_title(tokens: Sequence[Token]) -> Iterator[Token]:
    is_title = False
    for token in tokens:
        if token.type.startswith("heading_") and token.tag == "h1":
            is_title = token.nesting == 1
        elif not is_title:
            yield token


def _add_anchors(tokens: Sequence[Token]) -> None:
    has_anchor: set[str] = set()
    is_first_cell = False
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.type == "tr_open":
            is_first_cell = True
        elif token.type == "td_close":
            is_first_cell = False
        elif token.type == "inline" and token.children is not None:
            if before is not None and before.type == "heading_open":
                before.attrSet("id", heading_anchor(token.content))
            token.children = list(_without_outer_links(token.children))
            for child in token.children:
                is_code = is_first_cell and child.type == "code_inline" and child.content in runbooks()
                if is_code and child.content not in has_anchor:
                    has_anchor.add(child.content)
                    child.attrSet("id", child.content)


def _with_scrolling_tables(tokens: Sequence[Token]) -> Iterator[Token]:
    """Each table in a region that scrolls on a narrow screen, named after the heading above it."""
    heading = "Overview"
    for before, token in zip([None, *tokens], tokens, strict=False):
        if before is not None and before.type == "heading_open":
            heading = token.content
        if token.type == "table_open":
            yield Token("html_block", "", 0, content=_SCROLLING.format(heading))
        yield token
        if token.type == "table_close":
            yield Token("html_block", "", 0, content="</div>")


def _without_outer_links(tokens: Sequence[Token]) -> Iterator[Token]:
    """Links within the page are kept. The other pages of the documentation are not served here."""
    is_kept = True
    for token in tokens:
        if token.type == "link_open":
            is_kept = not urlsplit(str(token.attrGet("href"))).path
        if is_kept or token.type not in ("link_open", "link_close"):
            yield token
