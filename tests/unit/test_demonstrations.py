"""What all demonstrations have in common."""

import tomllib
from collections import defaultdict
from types import ModuleType

import pytest

from windlass.cli.demonstration import hetzner, local, ray, runpod


@pytest.mark.parametrize("demonstration", [local, hetzner, runpod, ray])
def test_each_can_be_watched_in_a_browser(demonstration: ModuleType) -> None:
    """It waits for the dashboard's address before it begins."""
    settings = tomllib.loads(demonstration.TOML.format_map(defaultdict(lambda: "1")))
    assert "port" in settings["api"]
