"""Reload of a running control loop: all of the new configuration is applied, or nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from windlass.config_loader import Loaded
from windlass.model.config import AlertsConfig, ApiConfig, Config, ControlConfig, WorkerConfig
from windlass.model.errors import ConfigError
from windlass.model.fleet import FleetConfig
from windlass.wiring import up as wiring_up
from windlass.wiring.process_link import ProcessLink, StartOrder
from windlass.wiring.reload import merge_for_servers
from windlass.wiring.up import ControlOptions, prepare_schema, run_control

LIMIT_S = 30.0
FLEET = FleetConfig(provider="local", exec="true", queues=("nothing-comes",), poll_interval_s=0.2)


class RunningUp:
    """An `up` in this process, with its log lines. `config` is what it loads."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.defect: Exception | None = None
        self.lines: list[Any] = []
        self.has_begun = asyncio.Event()
        self.link = ProcessLink()

    def load(self) -> Loaded:
        defect, self.defect = self.defect, None
        if defect is not None:
            raise defect
        return Loaded(self.config, {})

    def logged(self, event: str) -> list[Any]:
        return [line for line in self.lines if line["event"].startswith(event)]

    async def reload(self, event: str, **changes: Any) -> Any:
        """Reload, and return the next log line of this event."""
        self.config = self.config.model_copy(update=changes)
        before = len(self.logged(event))
        self.link.reload_requested.set()
        await until(lambda: len(self.logged(event)) > before, f"{event}: {self.lines}")
        return self.logged(event)[-1]


async def until(condition: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(what)


@pytest.fixture
async def up(dsn: str, tmp_path: Path) -> AsyncIterator[RunningUp]:
    async with running(
        Config.model_validate({"database_url": dsn, "data_dir": tmp_path, "fleets": {"a": FLEET}})
    ) as it:
        yield it


@asynccontextmanager
async def running(config: Config) -> AsyncIterator[RunningUp]:
    """Runs `up` in this process and stops it at the end."""
    it = RunningUp(config)
    with capture_logs() as it.lines:
        assert config.database_url is not None
        await prepare_schema(config.database_url.get_secret_value())
        options = ControlOptions(it.load, lambda _: it.has_begun.set(), keeps_workers=False, version="0")
        task = asyncio.create_task(run_control(it.link, StartOrder(config), options=options, dashboards={}))
        try:
            async with asyncio.timeout(LIMIT_S):
                await it.has_begun.wait()
            yield it
            it.link.stop()
            async with asyncio.timeout(LIMIT_S):
                await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_reload_works_again_after_a_failure(up: RunningUp) -> None:
    up.defect = RuntimeError("unexpected")
    line = await up.reload("reload configuration failed")
    assert (line["log_level"], line["exc_info"]) == ("error", True)
    await up.reload("reloaded configuration")


async def test_reload_applies_what_a_failed_reload_did_not(up: RunningUp, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = "http://127.0.0.1:9/v1"
    made: list[str] = []

    def fail_at_first(name: str, fleet: FleetConfig, config: Config, instance_id: str) -> Any:
        made.append(config.hetzner_endpoint)
        if len(made) == 1:
            raise RuntimeError("unexpected")
        return provider(name, fleet, config, instance_id)

    provider = wiring_up.make_provider
    monkeypatch.setattr(wiring_up, "make_provider", fail_at_first)
    await up.reload("reload configuration failed", hetzner_endpoint=endpoint)
    await up.reload("reloaded configuration")
    # The fleet did not change, but its account did: it gets a new provider.
    assert made == [endpoint] * 2


async def test_reload_names_settings_that_need_a_restart(up: RunningUp) -> None:
    alerts = AlertsConfig(webhook_url=SecretStr("https://example.com/hush"))
    line = await up.reload(
        "ignored changed settings",
        worker=WorkerConfig(timeout_s=77),
        alerts=alerts,
        ray_address="10.0.0.5:6379",
        hetzner_endpoint="http://127.0.0.1:9/v1",
        fleets={"a": FLEET.model_copy(update={"max_workers": 2})},
    )
    assert (line["log_level"], line["settings"]) == ("warning", ["worker.timeout_s", "alerts.webhook_url"])
    assert "hush" not in str(line)
    await until(lambda: bool(up.logged("reloaded configuration")), str(up.lines))
    assert up.logged("reloaded configuration")[0]["changed"] == ["a (max_workers)"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("database_url", SecretStr("postgresql://me:hush@elsewhere/db")), ("data_dir", Path("/elsewhere"))],
)
async def test_reload_with_another_database_is_refused(up: RunningUp, name: str, value: Any) -> None:
    fleets = {"b": FLEET}
    line = await up.reload("reload configuration failed", **{name: value, "fleets": fleets})
    assert line["error"] == (
        f"{name} changed, and a running `windlass up` cannot move to another database. "
        "Restore it, or restart `windlass up`."
    )
    assert not up.logged("reloaded configuration")


def test_servers_keep_settings_of_their_start_until_a_restart() -> None:
    active = Config(api=ApiConfig(port=8080))
    loaded = Config(
        api=ApiConfig(port=8080, rate_limit=7), control=ControlConfig(lease_s=77), fleets={"a": FLEET}, data_dir=None
    )
    with capture_logs() as lines:
        merged = merge_for_servers(active, loaded)
    assert (merged.api, merged.fleets) == (active.api, loaded.fleets)
    # Servers do not use the settings of the control loop, so no restart is needed for them.
    (line,) = lines
    assert (line["event"], line["settings"]) == ("ignored changed settings", ["api.rate_limit"])
    with pytest.raises(ConfigError, match="data_dir changed, and a running `windlass serve` cannot move"):
        merge_for_servers(active, loaded.model_copy(update={"data_dir": Path("/elsewhere")}))
