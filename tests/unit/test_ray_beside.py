"""What is kept beside fleets whose tasks Ray places, and what is refused before anybody is hired for them."""

from pathlib import Path

import pytest

from windlass.configure import load_config
from windlass.engine.supervise import Programs
from windlass.model.errors import ConfigError
from windlass.wire.engine import RayBeside, check_ray, dispatchers

FLEET = """
[fleets.a]
provider = "ray-local"
queues = ["q"]
handler = "app:work"
max_workers = 2
"""
ADDRESS = "10.0.0.5:6379"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def write(toml: str) -> None:
    Path("windlass.toml").write_text(toml)


@pytest.mark.parametrize(
    ("before", "after", "is_the_same"),
    [
        ("max_workers = 2", "max_workers = 9", True),
        ("app:work", "app:other", False),
        ('["q"]', '["q", "r"]', False),
        ("max_workers = 2", "max_workers = 2\n[fleets.a.ray]\nnum_cpus = 2", False),
        ("[fleets.a]", "[worker]\ntimeout_s = 5\n[fleets.a]", False),
    ],
    ids=["how many are hired", "what runs", "its queues", "what tasks need", "how long tasks may take"],
)
def test_a_dispatcher_starts_anew_when_what_it_goes_by_has_changed(before: str, after: str, is_the_same: bool) -> None:
    write(FLEET)
    first = dispatchers(load_config(), ADDRESS)
    assert list(first) == ["a"]
    write(FLEET.replace(before, after))
    assert (dispatchers(load_config(), ADDRESS) == first) is is_the_same


async def test_a_reload_that_would_need_a_head_or_another_one_is_refused() -> None:
    write(FLEET)
    config = load_config().config
    with pytest.raises(ConfigError, match="fleet a is the first whose tasks Ray places.*start `windlass up` again"):
        await RayBeside(Programs(), None).check(config)
    beside = RayBeside(Programs(), ADDRESS)
    beside._is_needed = True
    with pytest.raises(ConfigError, match=f"joined the Ray head at {ADDRESS}, and ray_address is now 10.0.0.6:6379"):
        await beside.check(config.model_copy(update={"ray_address": "10.0.0.6:6379"}))


async def test_an_image_that_cannot_work_is_refused_whoever_hires() -> None:
    write('[fleets.a]\nprovider = "hetzner"\nengine = "ray"\nhandler = "app:work"\nhetzner.image = "ubuntu-22.04"\n')
    with pytest.raises(ConfigError, match="ubuntu-22.04, which has Python 3.10"):
        await check_ray(load_config().config)
