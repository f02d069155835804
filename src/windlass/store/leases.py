"""Leases over PostgreSQL. Implements ports/lease.py."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import asyncpg

from windlass.model.lease import Candidate, LeaseLost, Standby
from windlass.store.database import DatabaseStore


class PostgresLeaseStore(DatabaseStore):
    async def acquire_lease(self, candidate: Candidate) -> int | Standby:
        arguments = (candidate.lease, candidate.holder, candidate.ttl_s)
        answer = json.loads(
            await self._database.call("acquiring a lease", "windlass_internal.acquire_lease", *arguments)
        )
        return standby_of(answer) if answer["term"] is None else int(answer["term"])

    async def release_lease(self, candidate: Candidate) -> None:
        function = "windlass_internal.release_lease"
        await self._database.call("releasing a lease", function, candidate.lease, candidate.holder)


def standby_of(answer: Mapping[str, Any]) -> Standby:
    return Standby(answer["expires_in_s"], datetime.fromisoformat(answer["now"]), answer["holder"])


@contextmanager
def lease_required() -> Iterator[None]:
    """The SQL functions that check the lease term raise object_not_in_prerequisite_state; here it becomes LeaseLost."""
    try:
        yield
    except asyncpg.ObjectNotInPrerequisiteStateError as error:
        raise LeaseLost(str(error)) from None
