"""The version of a fleet's code and settings, as part of what a cycle observes.

Before a requested rollout begins, the configuration is read again, so that `windlass deploy` also deploys changed
settings. Meanwhile cycles go on and do not see the request.

While the configured version is rejected, cycles run with the settings of the last version that worked, if they can be
restored (wiring/fingerprint.py).
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

from windlass.model.errors import ConfigError
from windlass.model.fleet import FleetConfig
from windlass.model.rollout import WorkingVersion
from windlass.model.snapshot import Snapshot
from windlass.ports.provider import Provider


class VersionReader(Protocol):
    """The versions of one fleet's code and settings."""

    async def read(self, fleet: FleetConfig) -> str | None:
        """The fingerprint of the current version; None if it is unknown. Never raises."""

    def describe(self, fingerprint: str) -> str | None:
        """What a fingerprint covers, as a JSON object; None if that is unknown."""

    def restore(self, fleet: FleetConfig, working: WorkingVersion) -> FleetConfig | None:
        """The fleet with the settings of a former version; None if they cannot be restored."""


class UnknownVersion:
    """A fleet whose version nothing reads. No rollout of it begins, and no former settings are restored."""

    async def read(self, _fleet: FleetConfig) -> str | None:
        return None

    def describe(self, _fingerprint: str) -> str | None:
        return None

    def restore(self, _fleet: FleetConfig, _working: WorkingVersion) -> FleetConfig | None:
        return None


def _no_provider(_config: FleetConfig) -> Provider:
    raise ConfigError("no provider for former settings")


class Deployment:
    """The version of one fleet, as its cycles use it.

    `make_provider` makes the fleet's provider for former settings. `reload` reads the configuration again, and logs its
    errors; None if there is nothing to read. `is_watching`: a changed version begins a rollout by itself.
    """

    def __init__(
        self,
        versions: VersionReader | None = None,
        *,
        make_provider: Callable[[FleetConfig], Provider] = _no_provider,
        reload: Callable[[], Awaitable[None]] | None = None,
        is_watching: bool = False,
    ) -> None:
        self._versions = versions or UnknownVersion()
        self.make_provider = make_provider
        self._reload = reload
        self._is_watching = is_watching
        # The last request for which the configuration was read again, or is being read.
        self._reloaded_for = 0
        self._reloading: asyncio.Future[None] | None = None

    async def add_version(
        self, seen: Snapshot, config: FleetConfig, wake: Callable[[], None]
    ) -> tuple[Snapshot, FleetConfig]:
        """Add the fleet's current version to the snapshot. Returns it with the settings that new workers get.

        `config`: the configured settings. `wake` requests a cycle once a request can be seen.
        """
        rollout, deploy = seen.planner_state.rollout, seen.deploy
        if deploy is not None and self._reload is not None:
            known = max(self._reloaded_for, rollout.id if rollout is not None else 0)
            if deploy.id > known:
                self._reloaded_for = deploy.id
                self._reloading = asyncio.ensure_future(self._reload())
                self._reloading.add_done_callback(lambda _: wake())
        if self._reloading is not None and not self._reloading.done():
            seen = replace(seen, deploy=None)
        fingerprint = await self._versions.read(config)
        text = self._versions.describe(fingerprint) if fingerprint is not None else None
        seen = replace(seen, fingerprint=fingerprint, version_settings=text, is_watching=self._is_watching)
        working = seen.planner_state.working
        if working is None or not _is_rejected(seen):
            return seen, config
        former = self._versions.restore(config, working)
        if former is None:
            return seen, config
        seen = replace(seen, fingerprint=working.fingerprint, version_settings=working.settings, rejected=fingerprint)
        return seen, former


def _is_rejected(seen: Snapshot) -> bool:
    rollout, deploy = seen.planner_state.rollout, seen.deploy
    if rollout is None or not rollout.rejects(seen.fingerprint, seen.reset_at):
        return False
    # A person deploys it again.
    return deploy is None or deploy.is_aborted or deploy.id <= rollout.id
