"""The settings and the provider that cycles of one fleet run with, and their replacement.

They are as configured, or those of a former version (deployment.py). A replaced provider is closed once no call of it
is in flight.
"""

import asyncio
from collections.abc import Callable

import structlog

from windlass.model.errors import WindlassError
from windlass.model.fleet import FleetConfig
from windlass.ports.provider import Provider

# Longer than a provider needs to look for leftovers of its machines, at one request per second.
CLOSE_TIMEOUT_S = 20.0
log = structlog.get_logger(__name__)


class ProviderInUse:
    """Owns the providers of one fleet: close() closes them.

    `make_provider` makes the provider for former settings. `on_replace` receives each provider that replaces another.
    """

    def __init__(
        self,
        fleet: str,
        config: FleetConfig,
        provider: Provider,
        *,
        make_provider: Callable[[FleetConfig], Provider],
        on_replace: Callable[[Provider], None],
    ) -> None:
        self._fleet = fleet
        self.config, self.provider = config, provider
        self._configured = config, provider
        self._make_provider = make_provider
        self._on_replace = on_replace
        # Configuration and provider that the next cycle starts with.
        self._reload: tuple[FleetConfig, Provider] | None = None
        self._replaced: list[Provider] = []
        # Why the settings of a former version could not be used the last time.
        self._former_error = ""
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def configured(self) -> FleetConfig:
        """The configuration of the running cycle."""
        return self._configured[0]

    @property
    def next_configured(self) -> FleetConfig:
        """The configuration of the next cycle."""
        return self._configured[0] if self._reload is None else self._reload[0]

    def reload(self, config: FleetConfig, provider: Provider) -> None:
        """Keep these for the next cycle, which calls apply_reload()."""
        if self._reload is not None:
            self._replaced.append(self._reload[1])
        self._reload = config, provider

    def apply_reload(self) -> None:
        if self._reload is not None:
            self.use(self._configured[0])
            self._replaced.append(self.provider)
            self._configured, self._reload = self._reload, None
            self._replace(*self._configured)

    def use(self, config: FleetConfig) -> bool:
        """Use these settings from now on: as configured, or of a former version. False if that has no provider now."""
        if config == self.config:
            return True
        configured, provider = self._configured
        if config != configured:
            try:
                provider = self._make_provider(config)
            except WindlassError as error:
                # Every cycle tries again: the same error is logged once.
                if str(error) != self._former_error:
                    log.warning("apply former settings failed", fleet=self._fleet, error=str(error))
                    self._former_error = str(error)
                self.use(configured)
                return False
        if self.provider is not self._configured[1]:
            self._replaced.append(self.provider)
        self._replace(config, provider)
        return True

    def close_replaced(self) -> None:
        """Start closing the providers that are no longer in use. No call of them may be in flight."""
        replaced, self._replaced = self._replaced, []
        for provider in replaced:
            self._start_closing(provider)

    async def close(self, timeout_s: float) -> None:
        """Close all providers. Machines keep running."""
        self.apply_reload()
        self.use(self._configured[0])
        self.close_replaced()
        self._start_closing(self.provider)
        _, late = await asyncio.wait(self._closing, timeout=timeout_s)
        for closing in late:
            closing.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    def _replace(self, config: FleetConfig, provider: Provider) -> None:
        self.config, self.provider = config, provider
        self._on_replace(provider)

    def _start_closing(self, provider: Provider) -> None:
        async def close() -> None:
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await provider.close()
            except Exception as error:
                log.warning("close provider failed", fleet=self._fleet, error=str(error) or type(error).__name__)

        self._closing = {task for task in self._closing if not task.done()}
        self._closing.add(asyncio.create_task(close()))
