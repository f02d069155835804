"""Every mutant of tools/mutants still applies to the current sources, and names tests that exist."""

import ast
import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def load_runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants_run", ROOT / "tools" / "mutants" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


runner: Any = load_runner()


def test_every_mutant_applies_to_the_sources() -> None:
    mutants = runner.load_mutants()
    assert runner.problems(mutants, ROOT) == []
    assert len(mutants) >= 80


def test_every_test_named_by_a_mutant_exists() -> None:
    for test in {test for mutant in runner.load_mutants() for test in mutant.tests}:
        path, _, name = test.partition("::")
        nodes = ast.walk(ast.parse((ROOT / path).read_text()))
        names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert not name or name.partition("[")[0] in names, test


def test_page_lists_every_mutant_and_its_summary_counts_the_table() -> None:
    page = (ROOT / "docs" / "mutants.md").read_text()
    rows = re.findall(r"^\| [a-z ]+ \| ([a-z0-9-]+) \| `([^`]+)` \| ([0-9.]+) \|$", page, re.MULTILINE)
    assert sorted(name for name, _, _ in rows) == sorted(mutant.name for mutant in runner.load_mutants())
    caught = [float(seconds) for _, test, seconds in rows if "::" in test]
    quick = sum(seconds < runner.QUICK_S for seconds in caught)
    assert f"{len(caught)} of {len(rows)} caught, {quick} of them by a test that takes less than" in page
    trials = (ROOT / "docs" / "guarantees.md").read_text()
    assert f"{len(rows)} defects | {len(caught)} caught" in trials


def test_mutant_whose_text_is_not_found_once_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").touch()
    (tmp_path / "a.py").write_text("x = 1\nx = 1\ny = 1\n")
    mutant = runner.Mutant("a", "a.py", "x = 1", "x = 2", ("test_a.py",), "subject")
    assert "occurs 2 times" in mutant.problem(tmp_path)
    assert "occurs 0 times" in replace(mutant, old="z = 1").problem(tmp_path)
    assert replace(mutant, old="y = 1").problem(tmp_path) is None
    assert len(runner.problems([mutant, mutant], tmp_path)) == 3


@pytest.fixture
def few_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pytest of a mutant starts in half of the time without other plugins."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_timeout")


@pytest.mark.usefixtures("few_plugins")
@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        ("assert value == 1", "caught"),
        ("assert value", "survived"),
        ("import missing_module", "caught"),
        ("while True: pass", "timed out"),
    ],
)
def test_verdict_of_a_mutant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, outcome: str) -> None:
    monkeypatch.setattr(runner, "RUN_LIMIT_S", 120.0 if outcome != "timed out" else 3.0)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "subject.py").write_text("value = 1\n")
    (tmp_path / "test_subject.py").write_text(f"from subject import value\ndef test_it():\n    {body}\n")
    mutant = runner.Mutant("a", "src/subject.py", "value = 1", "value = 2", ("test_subject.py",), "subject")
    verdict = runner.judge(mutant, tmp_path)
    assert verdict.outcome == outcome
    assert (tmp_path / "src" / "subject.py").read_text() == "value = 1\n"


@pytest.mark.usefixtures("few_plugins")
def test_mutant_whose_tests_cannot_start_is_invalid(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "subject.py").write_text("value = 1\n")
    (tmp_path / "test_subject.py").write_text("from subject import value\ndef test_it(): pass\n")
    mutant = runner.Mutant("a", "src/subject.py", "value = 1", "other = 1", ("test_subject.py",), "subject")
    assert runner.judge(mutant, tmp_path).outcome == "invalid"
