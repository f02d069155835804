"""The lease that keeps all orchestrators of a database on one Ray cluster.

Two heads are two clusters: nodes that one orchestrator spawns into its own cluster are invisible to the dispatchers of
the other. So an orchestrator with a head of its own holds the lease exclusively. Orchestrators that use an external
head (RAY_ADDRESS) share the lease under one name. Whether their addresses mean the same head is not checked, because a
head may have several addresses.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import structlog

from windlass.model.errors import ConfigError, DatabaseUnavailable, WindlassError
from windlass.model.lease import Candidate, Standby, holder_of_this_process
from windlass.model.node import HEAD_LEASE
from windlass.ports.lease import LeaseStore

LEASE_S = 10.0
RENEWALS_PER_LEASE = 4
# A killed orchestrator leaves its lease. The next one waits until that has expired, and a little longer.
MAX_WAIT_LEASES = 1.5
MIN_WAIT_S = 0.05
# The holder name of all orchestrators with an external head.
_SHARED_HOLDER = "RAY_ADDRESS"
_FIX = "Set the same RAY_ADDRESS for all orchestrators, or run only one."
log = structlog.get_logger(__name__)


@asynccontextmanager
async def hold_head_lease(
    leases: LeaseStore,
    *,
    is_shared: bool,
    lease_s: float = LEASE_S,
    owner: "asyncio.Task[Any] | None" = None,
    holder: str | None = None,
) -> AsyncIterator[None]:
    """Hold the lease inside the context: shared for an external head, exclusively for a head of our own.

    Raises ConfigError if another orchestrator holds the lease for longer than MAX_WAIT_LEASES. If the lease is lost
    later, or can no longer be renewed, `owner` (default: the current task) is cancelled and WindlassError raised. A
    shared lease is not released at the end, because others may hold it too. `holder`: the name of this process.
    """
    candidate = Candidate(_SHARED_HOLDER if is_shared else holder or holder_of_this_process(), lease_s, HEAD_LEASE)
    term = await _acquire(leases, candidate, is_shared=is_shared)
    owner = owner or asyncio.current_task()
    if owner is None:
        raise AssertionError("hold_head_lease must run in a task")
    renewing = asyncio.create_task(_renew_until_lost(leases, candidate, term))
    is_lost = False

    def on_renewal_end(_task: object) -> None:
        nonlocal is_lost
        is_lost = not renewing.cancelled()
        if is_lost:
            owner.cancel()

    renewing.add_done_callback(on_renewal_end)
    try:
        yield
    except asyncio.CancelledError:
        if not is_lost:
            raise
        owner.uncancel()
        if (error := renewing.exception()) is not None:
            raise WindlassError(f"cannot renew the lease of the Ray head: {error}") from error
        raise WindlassError(
            f"lost the lease of the Ray head: another `windlass up` took over while PostgreSQL did not answer. {_FIX}"
        ) from None
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
        if not is_shared:
            with contextlib.suppress(DatabaseUnavailable):
                await leases.release_lease(candidate)


async def _acquire(leases: LeaseStore, candidate: Candidate, *, is_shared: bool) -> int:
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + MAX_WAIT_LEASES * candidate.ttl_s
    while isinstance(lease := await leases.acquire_lease(candidate), Standby):
        if loop.time() >= give_up_at:
            holder = "runs a Ray head of its own" if is_shared else "uses a Ray head, its own or by RAY_ADDRESS"
            raise ConfigError(
                f"another `windlass up` of this database {holder}, and two heads would be two clusters. {_FIX}"
            )
        log.info("wait for ray head lease", expires_in_s=round(lease.expires_in_s, 1))
        await asyncio.sleep(min(max(lease.expires_in_s, MIN_WAIT_S), max(MIN_WAIT_S, give_up_at - loop.time())))
    return lease


async def _renew_until_lost(leases: LeaseStore, candidate: Candidate, term: int) -> None:
    while True:
        await asyncio.sleep(candidate.ttl_s / RENEWALS_PER_LEASE)
        try:
            if await leases.acquire_lease(candidate) != term:
                return
        except DatabaseUnavailable as error:
            log.warning("renew ray head lease failed", error=str(error))
