"""A running `up` that is told to reload: all of a new configuration that can be taken over is, or nothing of it.

What can be: the fleets, what their machines are rented with, and which Ray head there is while none is in use. The rest
is read at the start only, and is in use: where it has changed that is said, and it stays as it was.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from windlass.model.config import Config
from windlass.model.errors import ConfigError, WindlassError
from windlass.wiring.background import beside
from windlass.wiring.handlers import check_handlers
from windlass.wiring.providers import check_keys, check_machines_can_call, spawning_fleets
from windlass.wiring.ray import RaySupervisor

if TYPE_CHECKING:
    from windlass.config_loader import Loaded
    from windlass.control.orchestrator import Orchestrator

# The settings with which machines are rented, beside those of their fleet.
ACCOUNTS = (
    "hetzner_api_token",
    "hetzner_endpoint",
    "hetzner_network_id",
    "runpod_api_key",
    "runpod_endpoint",
    "runpod_ssh_key_file",
)
NOT_RELOADED = "configuration not reloaded, nothing changed"
READ_AT_START = "settings have changed that are read at the start only: start `windlass up` again to use them"


@dataclass
class Current:
    """What providers are made with: a reload changes the fleets, what their machines are rented with, and which Ray
    head there is while none is in use. All else is as at the start: it is in use."""

    config: Config
    # Of the Ray head, given or ours.
    ray_address: str | None

    def with_changes_of(self, loaded: Config, *, is_head_in_use: bool) -> Config:
        """Raises ConfigError for another database: no part of what is asked for can be had there."""
        for name in ("database_url", "data_dir"):
            if getattr(loaded, name) != getattr(self.config, name):
                raise ConfigError(
                    f"{name} is not what it was at the start, and all that runs keeps what it knows there: put it "
                    "back, or stop `windlass up` and start it again."
                )
        names = ("fleets", *ACCOUNTS, *(() if is_head_in_use else ("ray_address",)))
        return self.config.model_copy(update={name: getattr(loaded, name) for name in names})

    @contextmanager
    def changed_to(self, config: Config, ray_address: str | None) -> Iterator[None]:
        """From here on; unless this ends badly, for then it is as before."""
        before = self.config, self.ray_address
        self.config, self.ray_address = config, ray_address
        try:
            yield
        except BaseException:
            self.config, self.ray_address = before
            raise

    def of_providers(self) -> Config:
        return self.config.model_copy(update={"ray_address": self.ray_address})


async def check_hiring(config: Config) -> None:
    """Raise ConfigError if a fleet lacks what its machines need, as far as that can be seen before one is hired."""
    check_machines_can_call(config)
    check_keys(config)
    await check_handlers(config)


@asynccontextmanager
async def reloading(
    up: "Orchestrator", current: Current, load: "Callable[[], Loaded]", ray: RaySupervisor, is_wanted: asyncio.Event
) -> AsyncIterator[None]:
    """The configuration is taken over as it is when that is wanted; wanted several times, while one is heeded, it is
    once more."""
    import structlog

    log = structlog.get_logger(__name__)

    async def heed() -> None:
        while True:
            await is_wanted.wait()
            is_wanted.clear()
            try:
                await _reconfigure(up, current, load, ray)
            except WindlassError as error:
                log.error(NOT_RELOADED, error=str(error))
            except Exception:
                # A defect; but without this loop nothing is ever reloaded again, and nobody is told why.
                log.exception(NOT_RELOADED)

    async with beside(heed()):
        yield


async def _reconfigure(up: "Orchestrator", current: Current, load: "Callable[[], Loaded]", ray: RaySupervisor) -> None:
    """Fleets and their dispatchers as the configuration now is. Raises whatever is in the way; nothing is changed
    then."""
    import structlog

    from windlass.config_loader import differing_keys

    loaded = load().config
    if current.config.fleets and not loaded.fleets:
        # A file that is gone, or empty, is more often a mistake than a wish.
        raise ConfigError("there is no fleet any more: to let all of them go, stop `windlass up`.")
    config = current.with_changes_of(loaded, is_head_in_use=ray.address is not None)
    # Before anything is refused: what is missing may be among them.
    if ignored := differing_keys(config, loaded):
        structlog.get_logger(__name__).warning(READ_AT_START, settings=ignored)
    await check_hiring(config)
    await ray.check(loaded)
    has_new_accounts = any(getattr(config, name) != getattr(current.config, name) for name in ACCOUNTS)
    async with ray.rearranged(config) as ray_address:
        with current.changed_to(config, ray_address):
            up.reconfigure(
                spawning_fleets(config), has_new_accounts=has_new_accounts, stops_when_empty=not config.fleets
            )
