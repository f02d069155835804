"""Reload of the configuration of a running `up` or `serve`: all of it that can change is applied, or nothing.

Fleets, the accounts that rent their machines, and the Ray head while none is in use can change. Everything else is read
at the start only: a changed value is logged and ignored. So all processes of one program, also those that start later,
use the same settings.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import structlog

from windlass.background import background_task
from windlass.config_loader import Loaded, differing_keys
from windlass.control.orchestrator import Orchestrator
from windlass.model.config import Config
from windlass.model.errors import ConfigError, WindlassError
from windlass.wiring.handlers import check_handlers
from windlass.wiring.providers import check_keys, check_worker_start, spawning_fleets
from windlass.wiring.ray import RaySupervisor
from windlass.wiring.reachability import check_control_plane_url

# Settings outside of [fleets] with which machines are rented.
ACCOUNTS = (
    "hetzner_api_token",
    "hetzner_endpoint",
    "hetzner_network_id",
    "runpod_api_key",
    "runpod_endpoint",
    "runpod_ssh_key_file",
)
# Settings that HTTP servers read at their start only. They do not use those of the control loop.
SERVER_SETTINGS = ("database_url", "data_dir", "max_payload_bytes", "retention", "worker", "api", "oidc", "logs")
log = structlog.get_logger(__name__)


def merge_for_servers(active: Config, loaded: Config) -> Config:
    """What the servers of `windlass serve` use after a reload. ConfigError if the database changed."""
    _check_database(active, loaded, "windlass serve")
    config = loaded.model_copy(update={name: getattr(active, name) for name in SERVER_SETTINGS})
    _log_ignored(config, loaded, "windlass serve")
    return config


def _check_database(active: Config, loaded: Config, program: str) -> None:
    for name in ("database_url", "data_dir"):
        if getattr(loaded, name) != getattr(active, name):
            raise ConfigError(
                f"{name} changed, and a running `{program}` cannot move to another database. "
                f"Restore it, or restart `{program}`."
            )


def _log_ignored(config: Config, loaded: Config, program: str) -> None:
    if ignored := differing_keys(config, loaded):
        log.warning("ignored changed settings", settings=ignored, hint=f"restart `{program}` to apply them")


@dataclass
class ActiveConfig:
    """The configuration in use. `ray_address`: of the Ray head, configured or started by `up`."""

    config: Config
    ray_address: str | None

    def merged_with(self, loaded: Config, *, is_head_in_use: bool) -> Config:
        """The active configuration with the reloadable settings of `loaded`. ConfigError if the database changed."""
        _check_database(self.config, loaded, "windlass up")
        names = ("fleets", *ACCOUNTS, *(() if is_head_in_use else ("ray_address",)))
        return self.config.model_copy(update={name: getattr(loaded, name) for name in names})

    @contextmanager
    def replaced_by(self, config: Config, ray_address: str | None) -> Iterator[None]:
        """Use these from now on; restore the old ones if the context raises."""
        before = self.config, self.ray_address
        self.config, self.ray_address = config, ray_address
        try:
            yield
        except BaseException:
            self.config, self.ray_address = before
            raise

    def for_providers(self) -> Config:
        return self.config.model_copy(update={"ray_address": self.ray_address})


async def check_fleets(config: Config) -> None:
    """Raise ConfigError if machines of a fleet could not work, as far as that shows before one is rented."""
    check_keys(config)
    check_worker_start(config)
    await check_control_plane_url(config)
    await check_handlers(config)


class ReloadRequests:
    """Requests to read the configuration again: by a signal, which sets `signalled`, or by a rollout that begins."""

    def __init__(self, signalled: asyncio.Event) -> None:
        self._signalled = signalled
        self._done = asyncio.Event()

    async def request(self) -> None:
        """Return when the configuration was read after this call, whether it could be applied or not."""
        done = self._done
        self._signalled.set()
        await done.wait()

    async def next(self) -> Callable[[], None]:
        """Wait for requests. The result answers those that were made before this returned."""
        await self._signalled.wait()
        self._signalled.clear()
        answered, self._done = self._done, asyncio.Event()
        return answered.set


@asynccontextmanager
async def reload_on_request(
    orchestrator: Orchestrator,
    active: ActiveConfig,
    load: Callable[[], Loaded],
    ray: RaySupervisor,
    requests: ReloadRequests,
    on_reloaded: Callable[[Config], None] = lambda _config: None,
) -> AsyncIterator[None]:
    """Reload whenever it is requested. Requests during a reload cause one more.

    `on_reloaded` gets each configuration that was applied.
    """

    async def reload_forever() -> None:
        while True:
            answered = await requests.next()
            try:
                await _reload(orchestrator, active, load, ray)
                on_reloaded(active.config)
            except WindlassError as error:
                log.error("reload configuration failed", error=str(error))
            except Exception:
                # A defect. The loop must continue, or no later reload would work.
                log.exception("reload configuration failed")
            answered()

    async with background_task(reload_forever()):
        yield


async def _reload(
    orchestrator: Orchestrator, active: ActiveConfig, load: Callable[[], Loaded], ray: RaySupervisor
) -> None:
    """Apply the configuration to fleets and dispatchers. If it raises, nothing has changed."""
    loaded = load().config
    if active.config.fleets and not loaded.fleets:
        # A missing or empty file is more often a mistake than an intention.
        raise ConfigError("the configuration has no fleets any longer. To shut them all down, stop `windlass up`.")
    config = active.merged_with(loaded, is_head_in_use=ray.address is not None)
    # Before the checks: a check may fail because of a setting that was ignored.
    _log_ignored(config, loaded, "windlass up")
    await check_fleets(config)
    await ray.check(loaded)
    has_new_accounts = any(getattr(config, name) != getattr(active.config, name) for name in ACCOUNTS)
    async with ray.reconfigured(config) as ray_address:
        with active.replaced_by(config, ray_address):
            orchestrator.reconfigure(
                spawning_fleets(config), has_new_accounts=has_new_accounts, stops_when_empty=not config.fleets
            )
