"""The version of a fleet's code and settings, as part of what a cycle observes.

Before a requested rollout begins, the configuration is read again, so that `windlass deploy` also deploys changed
settings. Meanwhile cycles go on and do not see the request.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from windlass.model.fleet import FleetConfig
from windlass.model.snapshot import Snapshot


async def _unknown_version(_config: FleetConfig) -> str | None:
    return None


class Deployment:
    """Of one fleet. `read_fingerprint` returns None if the version is unknown, and never raises.

    `reload` reads the configuration again, and logs its errors; None if there is nothing to read. `is_watching`: a
    changed version begins a rollout by itself.
    """

    def __init__(
        self,
        read_fingerprint: Callable[[FleetConfig], Awaitable[str | None]] = _unknown_version,
        *,
        reload: Callable[[], Awaitable[None]] | None = None,
        is_watching: bool = False,
    ) -> None:
        self._read_fingerprint = read_fingerprint
        self._reload = reload
        self._is_watching = is_watching
        # The last request for which the configuration was read again, or is being read.
        self._reloaded_for = 0
        self._reloading: asyncio.Future[None] | None = None

    async def add_version(self, seen: Snapshot, config: FleetConfig, wake: Callable[[], None]) -> Snapshot:
        """The snapshot with the fleet's current version. `wake` requests a cycle once a request can be seen."""
        rollout, deploy = seen.planner_state.rollout, seen.deploy
        if deploy is not None and self._reload is not None:
            known = max(self._reloaded_for, rollout.id if rollout is not None else 0)
            if deploy.id > known:
                self._reloaded_for = deploy.id
                self._reloading = asyncio.ensure_future(self._reload())
                self._reloading.add_done_callback(lambda _: wake())
        if self._reloading is not None and not self._reloading.done():
            seen = replace(seen, deploy=None)
        fingerprint = await self._read_fingerprint(config)
        return replace(seen, fingerprint=fingerprint, is_watching=self._is_watching)
