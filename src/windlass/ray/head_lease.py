"""One Ray cluster for all orchestrators of a database, by a lease: a head that one of them keeps, or one that is given.

Two heads are two clusters: whom one orchestrator hires into its own, the dispatcher of the other never sees. Several
orchestrators share a head that is none of theirs (RAY_ADDRESS), and hold the lease in one name. That they were given
the same one is not checked: a head may have several addresses. Without one, the next keeps a head when the one before
it is gone.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import structlog

from windlass.model.errors import ConfigError, DatabaseUnavailable, WindlassError
from windlass.model.lease import Candidate, Standby, holder_of_this_process
from windlass.model.node import HEAD_LEASE

LEASE_S = 10.0
RENEWALS_PER_LEASE = 4
# One that was killed leaves its lease behind, and whoever takes its place waits until that is over, and a little.
PATIENCE_LEASES = 1.5
# All who use a head that was given hold the lease in this name.
_GIVEN = "RAY_ADDRESS"
_FIX = "set RAY_ADDRESS to one head for all of them, or run one"
log = structlog.get_logger(__name__)


class HeadLeaseStore(Protocol):
    async def acquire_lease(self, candidate: Candidate) -> int | Standby: ...

    async def release_lease(self, candidate: Candidate) -> None: ...


@asynccontextmanager
async def sole_head(
    leases: HeadLeaseStore, lease_s: float = LEASE_S, owner: "asyncio.Task[Any] | None" = None
) -> AsyncIterator[None]:
    """For as long as this is open, nobody else may keep a head, or use one that was given. Raises ConfigError if
    another does so and goes on. `owner`: the task that goes on in here, and leaves; without it, the one that enters.

    When the right is lost all the same (we were cut off from the database for longer than the lease, and another was
    not), or can no longer be asked for, what goes on in here is cancelled, and WindlassError raised.
    """
    async with _held(leases, Candidate(holder_of_this_process(), lease_s, HEAD_LEASE), owner):
        yield


@asynccontextmanager
async def given_head(
    leases: HeadLeaseStore, lease_s: float = LEASE_S, owner: "asyncio.Task[Any] | None" = None
) -> AsyncIterator[None]:
    """For as long as this is open, nobody may keep a head of its own; others may use one that was given, as we do.
    Raises as sole_head does. Afterwards it is over with the lease, which others may hold too."""
    async with _held(leases, Candidate(_GIVEN, lease_s, HEAD_LEASE), owner):
        yield


@asynccontextmanager
async def _held(leases: HeadLeaseStore, ourselves: Candidate, owner: "asyncio.Task[Any] | None") -> AsyncIterator[None]:
    term = await _wait_for(leases, ourselves)
    owner = owner or asyncio.current_task()
    keeper = asyncio.create_task(_keep(leases, ourselves, term))
    if owner is None:
        raise AssertionError("contexts are entered by tasks")
    is_lost = False

    def on_end(_keeper: object) -> None:
        nonlocal is_lost
        is_lost = not keeper.cancelled()
        if is_lost:
            owner.cancel()

    keeper.add_done_callback(on_end)
    try:
        yield
    except asyncio.CancelledError:
        if not is_lost:
            raise
        owner.uncancel()
        if (error := keeper.exception()) is not None:
            raise WindlassError(f"the right to keep a Ray head could not be renewed ({error}).") from error
        raise WindlassError(
            "another `windlass up` has a Ray head of its own, or by RAY_ADDRESS, since the database was away from "
            f"here: {_FIX}."
        ) from None
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        if ourselves.holder != _GIVEN:
            with contextlib.suppress(DatabaseUnavailable):
                await leases.release_lease(ourselves)


async def _wait_for(leases: HeadLeaseStore, ourselves: Candidate) -> int:
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + PATIENCE_LEASES * ourselves.ttl_s
    while isinstance(led := await leases.acquire_lease(ourselves), Standby):
        if loop.time() >= give_up_at:
            raise ConfigError(
                f"another `windlass up` of this database {_whom(ourselves)}, and two heads would be two clusters: "
                f"{_FIX}."
            )
        log.info("another `windlass up` has a Ray head; waiting for its end", lease_s=round(led.expires_in_s, 1))
        await asyncio.sleep(min(max(led.expires_in_s, 0.05), max(0.05, give_up_at - loop.time())))
    return led


def _whom(ourselves: Candidate) -> str:
    """Who is in the way: of a head that was given, only one that somebody keeps."""
    return "keeps a Ray head of its own" if ourselves.holder == _GIVEN else "has a Ray head, its own or by RAY_ADDRESS"


async def _keep(leases: HeadLeaseStore, ourselves: Candidate, term: int) -> None:
    """Until it is lost."""
    while True:
        await asyncio.sleep(ourselves.ttl_s / RENEWALS_PER_LEASE)
        try:
            if await leases.acquire_lease(ourselves) != term:
                return
        except DatabaseUnavailable as error:
            log.warning("the right to keep a Ray head is not renewed: the database is away", error=str(error))
