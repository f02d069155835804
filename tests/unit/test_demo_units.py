"""What all demonstrations have in common."""

import tomllib
from string import Formatter
from types import ModuleType

import pytest

from windlass.demo import hetzner, local, ray, runpod


@pytest.mark.parametrize("arc", [local, hetzner, runpod, ray], ids=lambda arc: arc.__name__.rpartition(".")[2])
def test_every_demonstration_has_a_dashboard_to_watch_it_on(arc: ModuleType) -> None:
    """`windlass up` prints where it listens, and a demonstration waits for that."""
    names = {name for _, name, _, _ in Formatter().parse(arc.TOML) if name}
    assert "port" in tomllib.loads(arc.TOML.format(**dict.fromkeys(names, "1")))["api"]
