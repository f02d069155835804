"""The configuration of every demo."""

import tomllib
from pathlib import Path
from unittest.mock import patch

import pytest

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
