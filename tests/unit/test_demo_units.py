"""The configuration of every demo, and the commands that a kept one suggests."""

import sys
import tomllib
from pathlib import Path
from unittest.mock import patch

import pytest

from windlass.cli.demo import program_name, suggested_commands
from windlass.demo.environment import DemoPlace
from windlass.demo.hetzner import HetznerDemo
from windlass.demo.local import LocalDemo
from windlass.demo.ray import RayDemo
from windlass.demo.runpod import RunpodDemo
from windlass.demo.scenario import DemoScenario

DEMOS = {
    "local": LocalDemo(50, 3, print),
    "hetzner": HetznerDemo(50, 3, print, hour_s=60),
    "runpod": RunpodDemo(50, 3, print),
    "ray": RayDemo(50, 3, print),
}


@pytest.mark.parametrize("name", DEMOS)
def test_demo_configuration_has_a_dashboard_and_its_fleet(name: str, tmp_path: Path) -> None:
    """`windlass up` prints the link of the dashboard, and the demo waits for it."""
    demo: DemoScenario = DEMOS[name]
    with patch.multiple(demo, create=True, address="http://127.0.0.1:1", volume_id="v"):
        toml = tomllib.loads(demo.render_toml(DemoPlace(tmp_path, "mark")))
    assert toml["api"]["port"] > 0
    assert toml["fleets"]["demo"]["max_workers"] == 3
    assert toml["fleets"]["demo"].get("provider", "local").startswith(name)  # "ray-local"


def test_suggested_program_is_one_that_the_shell_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("a venv", "other"):
        program = tmp_path / folder / "windlass"
        program.parent.mkdir()
        program.touch(0o755)
    monkeypatch.chdir(tmp_path)
    own = "a venv/windlass"
    for path in ("", "other"):  # another installation
        monkeypatch.setenv("PATH", path and str(tmp_path / path))
        assert program_name(own) == "'a venv/windlass'"
    monkeypatch.setenv("PATH", str(tmp_path / "a venv"))
    assert program_name(own) == "windlass"
    assert program_name("/x/windlass/__main__.py") == f"{sys.executable} -m windlass"


@pytest.mark.parametrize("poisonous", [None, 7])
def test_suggested_commands_name_program_and_folder(poisonous: int | None, tmp_path: Path) -> None:
    place = DemoPlace(tmp_path / "a demo", "mark")
    commands = suggested_commands(place, poisonous, ".venv/bin/windlass")
    assert commands[0] == f".venv/bin/windlass status --watch --data-dir '{tmp_path}/a demo/data'"
    assert len(commands) == 4
    assert any("explain 7 " in command for command in commands) == (poisonous == 7)
