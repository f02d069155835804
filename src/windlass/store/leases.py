"""Leases over PostgreSQL. Implements ports/lease.py."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

import asyncpg

from windlass.model.lease import Candidate, LeaseLost, Standby
from windlass.store.database import DatabaseStore

if TYPE_CHECKING:
    from windlass.ports.lease import LeaseStore


class PostgresLeaseStore(DatabaseStore):
    async def acquire_lease(self, candidate: Candidate) -> int | Standby:
        text = await self._database.fetchval(
            "acquiring a lease",
            "select windlass_internal.acquire_lease($1, $2, $3)",
            candidate.lease,
            candidate.holder,
            candidate.ttl_s,
        )
        answer = json.loads(text)
        return standby_of(answer) if answer["term"] is None else int(answer["term"])

    async def release_lease(self, candidate: Candidate) -> None:
        await self._database.execute(
            "releasing a lease", "select windlass_internal.release_lease($1, $2)", candidate.lease, candidate.holder
        )


def standby_of(answer: Mapping[str, Any]) -> Standby:
    return Standby(answer["expires_in_s"], datetime.fromisoformat(answer["now"]))


@contextmanager
def lease_required() -> Iterator[None]:
    """The SQL functions that check the lease term raise object_not_in_prerequisite_state; here it becomes LeaseLost."""
    try:
        yield
    except asyncpg.ObjectNotInPrerequisiteStateError as error:
        raise LeaseLost(str(error)) from None


if TYPE_CHECKING:
    # mypy compares every signature with the port's.
    _: type[LeaseStore] = PostgresLeaseStore
