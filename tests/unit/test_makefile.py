"""The Makefile: `make demo` installs what the demo needs, and nothing else."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def planned(target: str, venv: Path) -> str:
    """The commands that make would run."""
    return subprocess.run(
        ["make", "--dry-run", target, f"VENV={venv}"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    return tmp_path


def test_make_demo_installs_neither_ray_nor_test_tools(venv: Path) -> None:
    commands = planned("demo", venv)
    assert "--editable .\n" in commands
    assert "[dev]" not in commands
    assert "[ray]" not in commands


def test_make_check_installs_test_tools_after_a_demo(venv: Path) -> None:
    (venv / ".runtime").touch()
    assert '--editable ".[dev]"' in planned("check", venv)


def test_make_demo_after_tests_installs_nothing(venv: Path) -> None:
    (venv / ".runtime").touch()
    (venv / ".installed").touch()
    assert "pip install" not in planned("demo", venv)


def test_processes_of_tests_may_write_bytecode(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    (venv / ".installed").touch()
    (venv / "bin" / "python").write_text("#!/bin/sh\nenv >&2\n")
    (venv / "bin" / "python").chmod(0o755)
    seen = subprocess.run(
        ["make", "chaos", f"VENV={venv}"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stderr
    assert "PATH=" in seen
    assert "PYTHONDONTWRITEBYTECODE" not in seen


def test_make_creates_missing_environment(tmp_path: Path) -> None:
    assert f"-m venv {tmp_path}" in planned("demo", tmp_path)
