"""What is kept beside fleets whose tasks Ray places, and what is refused before anybody is hired for them."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from windlass.config_loader import load_config
from windlass.model.bootstrap import BootstrapSettings
from windlass.model.config import Config, Retention
from windlass.model.errors import ConfigError, WindlassError
from windlass.model.fleet import FleetConfig
from windlass.model.machine import MachineRequest
from windlass.providers.local import LocalProvider
from windlass.ray.head_lease import given_head, sole_head
from windlass.ray.supervisor import ProgramSupervisor
from windlass.ray.versions import our_versions
from windlass.store.memory.stores import MemoryStores
from windlass.wiring.providers import _with_ray, make_provider
from windlass.wiring.ray import RaySupervisor, check_ray, dispatchers

FLEET = """
[fleets.a]
provider = "ray-local"
queues = ["q"]
handler = "app:work"
max_workers = 2
"""
ADDRESS = "10.0.0.5:6379"
LEASE_S = 0.4


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


class Beside(RaySupervisor):
    """With a head that was given, and the right to it by a lease in `leases`."""

    def __init__(self) -> None:
        self.leases = MemoryStores(lambda: datetime.now(UTC), Retention(), Random(1))  # noqa: S311
        self.programs = ProgramSupervisor()
        self.until_end = AsyncExitStack()
        super().__init__(self.programs, self.given, self.until_end)

    @asynccontextmanager
    async def given(self, config: Config) -> AsyncIterator[str]:
        async with given_head(self.leases, LEASE_S):
            yield config.ray_address or "none was given"

    async def keep_another(self) -> None:
        """What somebody without RAY_ADDRESS does. Raises ConfigError if we use ours."""
        async with asyncio.timeout(10 * LEASE_S), sole_head(self.leases, LEASE_S):
            pass


def write(toml: str) -> None:
    Path("windlass.toml").write_text(toml)


@pytest.mark.parametrize(
    ("before", "after", "is_the_same"),
    [
        ("max_workers = 2", "max_workers = 9", True),
        ("app:work", "app:other", False),
        ('["q"]', '["q", "r"]', False),
        ("max_workers = 2", "max_workers = 2\n[fleets.a.ray]\nnum_cpus = 2", False),
        ("max_workers = 2", "max_workers = 2\nconcurrency = 3", False),
        ("[fleets.a]", "[worker]\ntimeout_s = 5\n[fleets.a]", False),
    ],
    ids=[
        "how many are hired",
        "what runs",
        "its queues",
        "what tasks need",
        "what nodes offer",
        "how long tasks may take",
    ],
)
def test_a_dispatcher_starts_anew_when_what_it_goes_by_has_changed(before: str, after: str, is_the_same: bool) -> None:
    write(FLEET)
    first = dispatchers(load_config().config, ADDRESS)
    assert list(first) == ["a"]
    write(FLEET.replace(before, after))
    assert (dispatchers(load_config().config, ADDRESS) == first) is is_the_same


def test_a_dispatcher_is_told_what_it_goes_by_and_reads_no_file() -> None:
    of_fleet = 'engine = "ray"\nhandler = "app:work"\nqueues = ["q", "r"]\nheartbeat_interval_s = 50\nconcurrency = 3\n'
    needs = "env = {HUSH = 'secret'}\n[fleets.b.ray]\nnode_cpus = 4\n[fleets.b.ray.queues.r]\nnum_cpus = 0.5\n"
    write(
        'database_url = "postgresql://me:secret@host/db"\nmax_payload_bytes = 5\n'
        f'[fleets.b]\nprovider = "hetzner"\nheartbeat_timeout_s = 400\n{of_fleet}{needs}'
    )
    config = load_config().config
    program = dispatchers(config, ADDRESS)["b"]
    options = dict(pairwise(program.command))
    told, meant = FleetConfig.model_validate_json(options["--settings"]), config.fleets["b"]
    for name in ("provider", "engine", "queues", "handler", "ray", "concurrency", "heartbeat_timeout_s"):
        assert getattr(told, name) == getattr(meant, name)
    assert options["--config"] == os.devnull
    assert "secret" not in " ".join(program.command)
    expected = {
        "DATABASE_URL": "postgresql://me:secret@host/db",
        "WINDLASS_MAX_PAYLOAD_BYTES": "5",
        "RAY_ADDRESS": ADDRESS,
    }
    assert expected.items() <= program.env.items()


async def test_a_reload_that_would_need_a_head_or_another_one_is_refused() -> None:
    write(FLEET)
    config, beside = load_config().config, Beside()
    with pytest.raises(ConfigError, match="fleet a is the first whose tasks Ray places.*start `windlass up` again"):
        await beside.check(config)
    beside.address = ADDRESS
    with pytest.raises(
        ConfigError, match=f"nodes join the Ray head at {ADDRESS}, and ray_address is now 10.0.0.6:6379"
    ):
        await beside.check(config.model_copy(update={"ray_address": "10.0.0.6:6379"}))


async def test_an_image_that_cannot_work_is_refused_whoever_hires() -> None:
    write('[fleets.a]\nprovider = "hetzner"\nengine = "ray"\nhandler = "app:work"\nhetzner.image = "ubuntu-22.04"\n')
    with pytest.raises(ConfigError, match="ubuntu-22.04, which has Python 3.10"):
        await check_ray(load_config().config)


async def test_a_reload_that_was_refused_binds_nobody_to_its_cluster() -> None:
    write('[fleets.a]\nprovider = "hetzner"\nengine = "ray"\nhandler = "app:work"\nhetzner.image = "ubuntu-22.04"\n')
    beside = Beside()
    with pytest.raises(ConfigError, match="ubuntu-22.04"):
        await beside.check(load_config().config.model_copy(update={"ray_address": "10.0.0.6:6379"}))
    assert beside.address is None


async def test_a_reload_that_fails_or_comes_too_late_gives_no_fleet_a_dispatcher_and_leaves_the_head_to_others() -> (
    None
):
    write(f'ray_address = "{ADDRESS}"\n{FLEET}')
    beside = Beside()
    with pytest.raises(WindlassError, match="too late"):
        async with beside.rearranged(load_config().config) as address:
            assert address == ADDRESS
            with pytest.raises(ConfigError, match="another `windlass up` .* has a Ray head"):
                await beside.keep_another()
            raise WindlassError("it is too late")
    assert (beside.address, beside.head()) == (None, None)
    assert not beside.programs._kept
    await beside.keep_another()


async def test_a_head_that_was_given_is_none_of_our_business_before_a_fleet_needs_it() -> None:
    plain = f'ray_address = "{ADDRESS}"\n[fleets.plain]\nhandler = "app:work"\n'
    write(plain)
    beside = Beside()
    async with sole_head(beside.leases, LEASE_S):
        async with beside.rearranged(load_config().config) as address:
            assert address == ADDRESS
        write(plain + FLEET)
        with pytest.raises(ConfigError, match="another `windlass up` .* keeps a Ray head of its own"):
            async with beside.rearranged(load_config().config):
                pytest.fail("two heads")
    assert not beside.programs._kept


def test_nodes_get_our_ray_with_what_was_asked_for_beside_it() -> None:
    asked = BootstrapSettings(requirements=("numpy", "ray[data]>=2", "ray-lightning", "Ray [serve]"))
    ours = our_versions().ray
    assert _with_ray(asked).requirements == ("numpy", "ray-lightning", f"ray[data,serve]=={ours}")
    assert _with_ray(BootstrapSettings(requirements=("ray==1.0",))).requirements == (f"ray=={ours}",)


def test_only_nodes_are_told_how_to_join_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "hush")
    write(FLEET + '[fleets.plain]\nhandler = "app:work"\n')
    config = load_config().config.model_copy(update={"ray_address": ADDRESS})
    told = {}
    for name, fleet in config.fleets.items():
        hires = make_provider(name, fleet, config, "i")
        assert isinstance(hires, LocalProvider)
        told[name] = hires._environment(MachineRequest("w", name, 0))
    assert {name: "RAY_AUTH_TOKEN" in environment for name, environment in told.items()} == {"a": True, "plain": False}
