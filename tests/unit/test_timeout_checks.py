"""Warnings about a spawn timeout that is shorter than the boots of rented machines."""

from typing import Any

import pytest
import structlog

from windlass.config_loader import load_config
from windlass.model.config import Config
from windlass.model.errors import DatabaseUnavailable
from windlass.model.fleet import FleetConfig
from windlass.model.overview import BootQuantiles
from windlass.wiring.timeout_checks import check_spawn_timeouts, log_short_spawn_timeouts, short_spawn_timeout

DOCKER = {"bootstrap": {"has_docker": True, "images": ["postgres:16"]}}


def fleet(provider: str, **settings: Any) -> FleetConfig:
    return FleetConfig.model_validate({"provider": provider, provider: {"image": "example/worker:1"}, **settings})


def joined(p99_s: float, count: int = 20) -> list[BootQuantiles]:
    return [
        BootQuantiles("running", count, 1.0, 2.0, 9_999.0),
        BootQuantiles("joined", count, p99_s / 2, p99_s, p99_s),
    ]


@pytest.mark.parametrize(
    ("config", "p99_s"),
    [
        pytest.param(fleet("runpod"), 5_000.0, id="measured boots set it"),
        pytest.param(fleet("runpod", spawn_timeout_s=900), None, id="default of Runpod"),
        pytest.param(fleet("runpod", spawn_timeout_s=900), 900.0, id="boots within it"),
        pytest.param(fleet("hetzner", spawn_timeout_s=600), None, id="default of Hetzner"),
    ],
)
def test_sufficient_spawn_timeout_is_no_problem(config: FleetConfig, p99_s: float | None) -> None:
    assert short_spawn_timeout("red", config, joined(p99_s) if p99_s is not None else []) is None


@pytest.mark.parametrize(
    ("config", "message", "default_s"),
    [
        pytest.param(
            fleet("runpod", spawn_timeout_s=300),
            "a new pod of fleet red has 600 s to pull its image (a pull of 20 GB takes 10 to 15 minutes) and start its "
            "worker, 300 s of them without progress; after that it is replaced, and both are billed",
            900,
            id="pod",
        ),
        pytest.param(
            fleet("hetzner", spawn_timeout_s=120, **DOCKER),
            "a new server of fleet red has 240 s to install Docker, pull 1 image and start its worker, 120 s of them "
            "without progress; after that it is replaced, and both are billed",
            600,
            id="server with images",
        ),
        pytest.param(
            fleet("hetzner", spawn_timeout_s=120),
            "a new server of fleet red has 240 s to install packages and start its worker, 120 s of them without "
            "progress; after that it is replaced, and both are billed",
            600,
            id="server",
        ),
    ],
)
def test_spawn_timeout_below_the_default_is_named(config: FleetConfig, message: str, default_s: int) -> None:
    # Two boots prove nothing.
    for boots in ([], joined(5_000.0, count=2), joined(60.0)):
        found = short_spawn_timeout("red", config, boots)
        assert found is not None
        assert (found.check, found.message, found.is_error) == ("boot time", message, False)
        assert found.advice == (
            f"remove spawn_timeout_s (SPAWNING_TIMEOUT_SEC): the default is {default_s} s, and later twice the p99 of "
            f"the fleet's own boots; or set {default_s} or more"
        )


@pytest.mark.parametrize(
    ("limit_s", "p99_s", "sufficient"), [(300, 540.2, "1081"), (300, 310.0, "900"), (1000, 1001.0, "2002")]
)
def test_spawn_timeout_below_measured_boots_is_named(limit_s: int, p99_s: float, sufficient: str) -> None:
    found = short_spawn_timeout("red", fleet("runpod", spawn_timeout_s=limit_s), joined(p99_s))
    assert found is not None
    assert found.message.endswith(f"; its last 20 boots took up to {p99_s:.0f} s (p99)")
    assert found.advice.endswith(f"; or set {sufficient} or more")


@pytest.mark.parametrize("is_database_available", [True, False])
async def test_up_warns_of_the_timeout_of_the_original_orchestrators(
    monkeypatch: pytest.MonkeyPatch, is_database_available: bool
) -> None:
    monkeypatch.setenv("SPAWNING_TIMEOUT_SEC", "300")
    monkeypatch.setenv("WINDLASS_FLEETS__DEFAULT__PROVIDER", "runpod")
    monkeypatch.setenv("WINDLASS_FLEETS__DEFAULT__RUNPOD__IMAGE", "example/worker:1")

    async def read_boot_times(name: str) -> list[BootQuantiles]:
        assert name == "default"
        if not is_database_available:
            raise DatabaseUnavailable("no")
        return joined(540.0)

    with structlog.testing.capture_logs() as lines:
        await log_short_spawn_timeouts(load_config().config, read_boot_times)
    (line,) = lines
    assert (line["event"], line["log_level"], line["fleet"]) == ("keep short spawn timeout", "warning", "default")
    assert ("took up to 540 s" in line["problem"]) == is_database_available
    assert "SPAWNING_TIMEOUT_SEC" in line["hint"]


async def test_processes_of_this_host_may_have_any_spawn_timeout() -> None:
    async def read_boot_times(_: str) -> list[BootQuantiles]:
        raise AssertionError("not read")

    config = Config(fleets={"red": FleetConfig(spawn_timeout_s=5, handler="a:b")})
    with structlog.testing.capture_logs() as lines:
        await log_short_spawn_timeouts(config, read_boot_times)
    assert lines == []
    assert [found async for found in check_spawn_timeouts(config)] == []
