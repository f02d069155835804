"""Heartbeats say how long to wait before a claim: by billed time left, where billing periods are long."""

from typing import Any

import pytest

from support.stores import PostgresStores
from windlass.model.worker import HeartbeatReport

# Workers of one fleet: id, minutes of the billing period that have passed, idle seconds, unit.
WORKER = """
insert into windlass.workers (id, fleet, slot, status, activated_at, last_heartbeat, metadata, price_micros_per_hour,
  currency, billing_unit_s, billed_since)
values ($1, 'f', $2, 'active', now(), now(), jsonb_build_object('idle_s', $3::float8), 5000, 'EUR', $4,
  now() - $5 * interval '1 minute')
"""


async def delays(store: PostgresStores, connection: Any, *workers: tuple[str, int, float, int]) -> dict[str, Any]:
    """The delay of each worker (name, minutes passed, idle seconds, unit), in the reply to its heartbeat."""
    await connection.execute("insert into windlass.fleets (name) values ('f')")
    for slot, (name, minutes, idle_s, unit_s) in enumerate(workers):
        await connection.execute("insert into windlass.slots (fleet, slot) values ('f', $1)", slot)
        await connection.execute(WORKER, name, slot, idle_s, unit_s, minutes)
    reports = [HeartbeatReport(name, (), {"idle_s": idle_s}) for name, _, idle_s, _ in workers]
    replies = await store.heartbeat_many(reports)
    assert all(reply is not None for reply in replies)
    return {report.worker_id: reply and reply.claim_delay for report, reply in zip(reports, replies, strict=True)}


async def test_workers_wait_by_the_passed_part_of_their_hour(connection: Any, store: PostgresStores) -> None:
    # `next` is in the second minute of its second hour.
    found = await delays(store, connection, ("late", 54, 9.0, 3600), ("half", 30, 9.0, 3600), ("next", 61, 9.0, 3600))
    assert found == {"late": pytest.approx(0.9, abs=0.01), "half": pytest.approx(0.5, abs=0.01), "next": 0.0}


async def test_worker_waits_for_no_busy_worker(connection: Any, store: PostgresStores) -> None:
    found = await delays(store, connection, ("late", 54, 9.0, 3600), ("busy", 5, 0.0, 3600))
    assert found["late"] == 0.0


async def test_workers_with_about_the_same_time_left_do_not_wait(connection: Any, store: PostgresStores) -> None:
    found = await delays(store, connection, ("a", 30, 9.0, 3600), ("b", 31, 9.0, 3600))
    assert found == {"a": 0.0, "b": 0.0}


async def test_short_periods_have_no_delay_by_billed_time(connection: Any, store: PostgresStores) -> None:
    found = await delays(store, connection, ("a", 30, 9.0, 1), ("b", 1, 9.0, 60))
    assert found == {"a": None, "b": None}
