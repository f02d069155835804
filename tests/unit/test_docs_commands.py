"""Every `windlass ...` in the documentation and in the advice of alerts is a command with options that exist."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from windlass.cli.app import app
from windlass.model.alert import ADVICE

ROOT = Path(__file__).parents[2]
# Generated from the commands, and what commands were called in former versions.
LEFT_OUT = {"reference-cli.md", "reference-http.md", "CHANGELOG.md"}
PAGES = [
    page
    for pattern in ("*.md", "docs/**/*.md", "deploy/**/*.md", "examples/**/*.md")
    for page in ROOT.glob(pattern)
    if page.name not in LEFT_OUT
]
# Languages of fenced blocks that contain commands. Others name the package or the schema windlass.
SHELLS = {"", "sh", "console", "text", "ini"}
FENCED = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")
COMMAND = re.compile(
    r"""(?:^|[\s("`'|])(?<!-u\ )(?:[\w./$-]*/bin/)?windlass\   # not the unit of `journalctl -u windlass`
        (?=[a-z-]+\b(?![.=]))((?:[^\n|&;\#<>`)(]|<(?=[a-z]+>)|(?<=[a-z])>)+)  # <id> is part of it
    """,
    re.VERBOSE,
)
# Words after `windlass` in output and in comments.
PROSE = re.compile(r"[a-z]+[:,.]$|and$|is$|in$")


def texts(page: str) -> Iterator[str]:
    """Where a page has commands."""
    for language, block in FENCED.findall(page):
        if language in SHELLS:
            yield re.sub(r"\\\n\s*", "", block)
    yield from INLINE.findall(FENCED.sub("", page))


def commands(page: str) -> Iterator[list[str]]:
    for text in texts(page):
        for arguments in COMMAND.findall(text):
            try:
                words = shlex.split(arguments)
            except ValueError:  # a quotation that goes on after the command
                words = arguments.replace("'", " ").replace('"', " ").split()
            if words and not PROSE.fullmatch(words[0]):
                yield words


def wrong(words: list[str]) -> str | None:
    """What does not exist in this command. None if all does."""
    command: Any = typer.main.get_command(app)
    context = command.context_class(command, info_name="windlass")
    rest = list(words)
    while hasattr(command, "list_commands") and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        path = f"{context.command_path} {name}"
        command = command.get_command(context, name)
        if command is None:
            return path
        context = type(context)(command, info_name=name, parent=context)
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for word in rest:
        name = word.partition("=")[0].rstrip(".,:")
        if name == "--":
            break  # the rest is the program of the user
        if re.fullmatch(r"--?[a-zA-Z][\w-]*", name) and name not in options | {"--help"}:
            return f"{context.command_path} {name}"
    return None


def test_commands_of_the_documentation_are_found() -> None:
    found = [words for page in PAGES for words in commands(page.read_text())]
    assert len(found) > 300
    assert {"up", "deploy", "runbook", "tokens"} <= {words[0] for words in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_exist(page: Path) -> None:
    assert [found for words in commands(page.read_text()) if (found := wrong(words))] == []


def test_commands_in_the_advice_of_alerts_exist() -> None:
    found = [words for advice in ADVICE.values() for words in commands(advice)]
    assert len(found) > 5
    assert [wrong(words) for words in found if wrong(words)] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ray status", "windlass ray status"),
        ("tasks retry --all", "windlass tasks retry --all"),
        ("worker --queue q -- --all", None),
        ("up --port=8080", None),
        ("--version", None),
    ],
)
def test_command_that_does_not_exist_is_named(text: str, expected: str | None) -> None:
    assert wrong(text.split()) == expected
