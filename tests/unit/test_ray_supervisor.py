"""The head and the dispatchers of `windlass up`, and the checks before machines are spawned."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from support.memory_store.stores import MemoryStores
from windlass.config_loader import load_config
from windlass.model.bootstrap import BootstrapSettings
from windlass.model.config import Config, Retention
from windlass.model.errors import ConfigError, WindlassError
from windlass.model.fleet import FleetConfig
from windlass.ray.head_lease import hold_head_lease
from windlass.ray.supervisor import ProgramSupervisor
from windlass.ray.versions import our_versions
from windlass.wiring.providers import _with_ray, withheld_from
from windlass.wiring.ray import RaySupervisor, check_ray, dispatcher_programs

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


class ExternalHeadSupervisor(RaySupervisor):
    """Uses an external head, with its lease in a memory store."""

    def __init__(self) -> None:
        self.leases = MemoryStores(lambda: datetime.now(UTC), Retention(), Random(1))  # noqa: S311
        self.programs = ProgramSupervisor()
        super().__init__(self.programs, self.use_external_head, AsyncExitStack())

    @asynccontextmanager
    async def use_external_head(self, config: Config) -> AsyncIterator[str]:
        async with hold_head_lease(self.leases, is_shared=True, lease_s=LEASE_S):
            yield config.ray_address or "not set"

    async def run_own_head_elsewhere(self) -> None:
        """Like another orchestrator without RAY_ADDRESS. Raises ConfigError while this one uses its head."""
        async with asyncio.timeout(10 * LEASE_S), hold_head_lease(self.leases, is_shared=False, lease_s=LEASE_S):
            pass


def write(toml: str) -> None:
    Path("windlass.toml").write_text(toml)


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        ("max_workers = 2", "max_workers = 9", True),
        ("app:work", "app:other", False),
        ('["q"]', '["q", "r"]', False),
        ("max_workers = 2", "max_workers = 2\n[fleets.a.ray]\nnum_cpus = 2", False),
        ("max_workers = 2", "max_workers = 2\nconcurrency = 3", False),
        ("max_workers = 2", "max_workers = 2\nredact = ['$.prompt']", False),
        ("[fleets.a]", "[worker]\ntimeout_s = 5\n[fleets.a]", False),
    ],
    ids=[
        "max_workers",
        "handler",
        "queues",
        "needs of tasks",
        "resources of nodes",
        "hidden parts of payloads",
        "time limit of tasks",
    ],
)
def test_dispatcher_restarts_only_if_its_settings_changed(before: str, after: str, is_same: bool) -> None:
    write(FLEET)
    first = dispatcher_programs(load_config().config, ADDRESS)
    assert list(first) == ["a"]
    write(FLEET.replace(before, after))
    assert (dispatcher_programs(load_config().config, ADDRESS) == first) is is_same


def test_dispatcher_gets_its_settings_by_command_and_environment() -> None:
    fleet = 'engine = "ray"\nhandler = "app:work"\nqueues = ["q", "r"]\nheartbeat_interval_s = 50\nconcurrency = 3\n'
    needs = "env = {KEY = 'secret'}\n[fleets.b.ray]\nnode_cpus = 4\n[fleets.b.ray.queues.r]\nnum_cpus = 0.5\n"
    write(
        'database_url = "postgresql://me:secret@host/db"\nmax_payload_bytes = 5\n'
        f'[fleets.b]\nprovider = "hetzner"\nheartbeat_timeout_s = 400\n{fleet}{needs}'
    )
    config = load_config().config
    program = dispatcher_programs(config, ADDRESS)["b"]
    options = dict(pairwise(program.command))
    passed, configured = FleetConfig.model_validate_json(options["--settings"]), config.fleets["b"]
    for name in ("provider", "engine", "queues", "handler", "ray", "concurrency", "heartbeat_timeout_s"):
        assert getattr(passed, name) == getattr(configured, name)
    assert options["--config"] == os.devnull
    assert "secret" not in " ".join(program.command)
    expected = {
        "DATABASE_URL": "postgresql://me:secret@host/db",
        "WINDLASS_MAX_PAYLOAD_BYTES": "5",
        "RAY_ADDRESS": ADDRESS,
    }
    assert expected.items() <= program.env.items()


async def test_reload_that_needs_a_new_or_another_head_is_refused() -> None:
    write(FLEET)
    config, supervisor = load_config().config, ExternalHeadSupervisor()
    with pytest.raises(ConfigError, match="fleet a needs a Ray head, and none is running: restart `windlass up`"):
        await supervisor.check(config)
    supervisor.address = ADDRESS
    with pytest.raises(
        ConfigError, match=f"ray_address changed from {ADDRESS} to 10.0.0.6:6379: restart `windlass up`"
    ):
        await supervisor.check(config.model_copy(update={"ray_address": "10.0.0.6:6379"}))


async def test_image_with_another_python_is_refused() -> None:
    write('[fleets.a]\nprovider = "hetzner"\nengine = "ray"\nhandler = "app:work"\nhetzner.image = "ubuntu-22.04"\n')
    with pytest.raises(ConfigError, match="from image ubuntu-22.04 have 3.10"):
        await check_ray(load_config().config)


async def test_refused_reload_does_not_use_its_cluster() -> None:
    write('[fleets.a]\nprovider = "hetzner"\nengine = "ray"\nhandler = "app:work"\nhetzner.image = "ubuntu-22.04"\n')
    supervisor = ExternalHeadSupervisor()
    with pytest.raises(ConfigError, match="ubuntu-22.04"):
        await supervisor.check(load_config().config.model_copy(update={"ray_address": "10.0.0.6:6379"}))
    assert supervisor.address is None


async def test_failed_reload_starts_no_dispatcher_and_releases_the_head() -> None:
    write(f'ray_address = "{ADDRESS}"\n{FLEET}')
    supervisor = ExternalHeadSupervisor()
    with pytest.raises(WindlassError, match="reload failed"):
        async with supervisor.reconfigured(load_config().config) as address:
            assert address == ADDRESS
            with pytest.raises(ConfigError, match="another `windlass up` .* uses a Ray head"):
                await supervisor.run_own_head_elsewhere()
            raise WindlassError("reload failed")
    assert (supervisor.address, supervisor.head_address()) == (None, None)
    assert not supervisor.programs.programs
    await supervisor.run_own_head_elsewhere()


async def test_external_head_is_not_used_before_a_fleet_needs_it() -> None:
    plain = f'ray_address = "{ADDRESS}"\n[fleets.plain]\nhandler = "app:work"\n'
    write(plain)
    supervisor = ExternalHeadSupervisor()
    async with hold_head_lease(supervisor.leases, is_shared=False, lease_s=LEASE_S):
        async with supervisor.reconfigured(load_config().config) as address:
            assert address == ADDRESS
        write(plain + FLEET)
        with pytest.raises(ConfigError, match="another `windlass up` .* runs a Ray head of its own"):
            async with supervisor.reconfigured(load_config().config):
                pytest.fail("two heads")
    assert not supervisor.programs.programs


def test_nodes_install_our_ray_version_with_the_requested_extras() -> None:
    requested = BootstrapSettings(requirements=("numpy", "ray[data]>=2", "ray-lightning", "Ray [serve]"))
    ours = our_versions().ray
    assert _with_ray(requested).requirements == ("numpy", "ray-lightning", f"ray[data,serve]=={ours}")
    assert _with_ray(BootstrapSettings(requirements=("ray==1.0",))).requirements == (f"ray=={ours}",)


def test_only_ray_nodes_get_the_token_of_the_cluster() -> None:
    write(FLEET + '[fleets.plain]\nhandler = "app:work"\n')
    fleets = load_config().config.fleets
    assert {name: "RAY_AUTH_TOKEN" in withheld_from(fleet) for name, fleet in fleets.items()} == {
        "a": False,
        "plain": True,
    }
