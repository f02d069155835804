"""docs/guarantees.md states every promise of docs/architecture.md, and names tests that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
MIN_TESTS_PER_PROMISE = 4


def sections() -> dict[int, str]:
    found = re.split(r"^## (\d+)\. ", PAGE, flags=re.MULTILINE)[1:]
    return {int(number): text for number, text in zip(found[::2], found[1::2], strict=True)}


def promises() -> dict[int, str]:
    """The first words of each promise in the list of docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.split("\n## Promises\n")[1].split("\n## ")[0]
    return {int(number): words for number, words in re.findall(r"^(\d+)\. (\w+ \w+:? \w+)", section, re.MULTILINE)}


def test_page_states_every_promise_of_the_architecture() -> None:
    stated = {number: " ".join(text.split("**")[1].split()) for number, text in sections().items()}
    assert list(stated) == list(range(1, 13))
    assert [number for number, words in promises().items() if not stated[number].startswith(words)] == []


def test_every_promise_has_conditions_limits_and_tests() -> None:
    for number, text in sections().items():
        assert "| condition |" in text or "| bound |" in text or "| deadline |" in text, number
        assert "| not included |" in text, number
        assert len(TEST.findall(text)) >= MIN_TESTS_PER_PROMISE, number
        assert "\nTrials: " in text, number


def test_every_named_test_exists() -> None:
    missing = []
    for path, name in TEST.findall(PAGE):
        file = ROOT / "tests" / path
        nodes = ast.walk(ast.parse(file.read_text())) if file.exists() else []
        if name not in {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}:
            missing.append(f"{path}::{name}")
    assert missing == []
