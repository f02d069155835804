"""The lease of a fleet's dispatcher: one acts at a time, the others are standbys.

A new holder requeues what earlier dispatchers had claimed and placed, because Ray ended it with them. The holder claims
only while the lease is valid by its own clock. After an outage it continues if no other dispatcher took the lease.
"""

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from windlass.model.errors import DatabaseUnavailable
from windlass.model.lease import Candidate, LeaseGuard, LeaseLost, Standby, holder_of_this_process
from windlass.model.node import dispatcher_lease
from windlass.ports.ray import RayStore
from windlass.retry import retrying

# A dispatcher without a renewal for this long is replaced by a standby.
LEASE_S = 10.0
RENEWAL_INTERVAL_S = LEASE_S / 4
MIN_STANDBY_WAIT_S = 0.2
log = structlog.get_logger(__name__)


class DispatcherLease:
    def __init__(self, store: RayStore, fleet: str) -> None:
        self._store = store
        self._fleet = fleet
        self.candidate = Candidate(holder_of_this_process(), LEASE_S, dispatcher_lease(fleet))
        self._guard = LeaseGuard(self.candidate)
        # Term of the last acquisition.
        self.term = 0

    @property
    def is_valid(self) -> bool:
        return self._guard.is_valid

    def invalidate(self) -> None:
        """Claim nothing until the next renewal shows which dispatcher has the lease."""
        self._guard.lost()

    async def acquire(self, stop: asyncio.Event) -> bool:
        """Wait for the lease. Returns False if stopped meanwhile."""
        is_logged = False
        while not stop.is_set():
            try:
                lease = await self._request()
            except DatabaseUnavailable as error:
                log.warning("acquire lease failed", fleet=self._fleet, error=str(error))
                lease = Standby(RENEWAL_INTERVAL_S)
            if not isinstance(lease, Standby):
                self.term = lease
                return True
            if not is_logged:
                log.info("wait for dispatcher lease", fleet=self._fleet)
                is_logged = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(max(lease.expires_in_s, MIN_STANDBY_WAIT_S), LEASE_S)):
                    await stop.wait()
        return False

    async def take_over(self, stop: asyncio.Event) -> int:
        """Requeue the tasks of earlier dispatchers and return their number. Raises LeaseLost.

        Retried while the database is unavailable or another transaction has a task locked, unless stopped.
        """

        async def pause(delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            with contextlib.suppress(DatabaseUnavailable):
                if await self._request() != self.term:
                    raise LeaseLost(f"another dispatcher of fleet {self._fleet} took over")

        return await retrying(
            lambda: self._store.take_over_nodes(self.candidate, self.term, self._fleet),
            "take over nodes failed",
            is_stopped=stop.is_set,
            pause=pause,
            fleet=self._fleet,
        )

    async def renew_until_lost(self, on_renewed: Callable[[], None]) -> None:
        """Raises LeaseLost when another dispatcher has the lease."""
        while True:
            await asyncio.sleep(RENEWAL_INTERVAL_S)
            try:
                lease = await self._request()
            except DatabaseUnavailable as error:
                # If only this host is cut off, another dispatcher takes over, and what runs here is wasted. That looks
                # the same as a general outage, in which killing the tasks would cost more. Nothing is claimed.
                log.warning("renew lease failed", fleet=self._fleet, error=str(error))
                continue
            if lease != self.term:
                raise LeaseLost(f"another dispatcher of fleet {self._fleet} is active")
            on_renewed()

    async def release(self) -> None:
        with contextlib.suppress(DatabaseUnavailable):
            await self._store.release_lease(self.candidate)

    async def _request(self) -> int | Standby:
        requested_at = asyncio.get_running_loop().time()
        lease = await self._store.acquire_lease(self.candidate)
        if isinstance(lease, Standby):
            self._guard.lost()
        else:
            self._guard.renewed(requested_at)
        return lease
