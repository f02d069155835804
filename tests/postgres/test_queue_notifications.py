"""Notifications about new tasks, and polling when they are unavailable."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from support.queue_sql import LIMIT_S, POLL_S, eventually, register
from support.stores import PostgresStores
from windlass.store import listener


async def plain_insert(connection: Any) -> None:
    await connection.execute("insert into windlass.tasks (queue, payload) values ('q', '{\"by\": \"insert\"}')")


async def copy(connection: Any) -> None:
    await connection.copy_records_to_table("tasks", schema_name="windlass", records=[("q",)] * 3, columns=["queue"])


async def enqueue_in_sql(connection: Any) -> None:
    await connection.execute("select windlass.enqueue('q')")


async def retry(connection: Any) -> None:
    task_id = await connection.fetchval(
        "insert into windlass.tasks (queue, status) values ('other', 'failed') returning id"
    )
    await connection.execute("update windlass.tasks set queue = 'q' where id = $1", task_id)
    assert await connection.fetchval("select windlass.retry_task($1)", task_id)


async def lose_worker(connection: Any) -> None:
    await connection.execute(
        "insert into windlass.tasks (queue, status, worker_id, claim_token, started_at)"
        " values ('other', 'running', 'gone', gen_random_uuid(), now())"
    )
    await connection.execute("update windlass.tasks set queue = 'q'")
    await connection.execute("select windlass.recover_lost_workers('survivor')")


async def retry_all_failed(connection: Any) -> None:
    await connection.execute(
        "insert into windlass.tasks (queue, status, finished_at) values ('other', 'failed', now())"
    )
    await connection.execute("update windlass.tasks set queue = 'q'")
    assert await connection.fetchval("select count(*) from windlass.retry_failed('q')") == 1


async def release(connection: Any) -> None:
    await connection.execute("select windlass.register_worker('giver')")
    await connection.execute(
        "insert into windlass.tasks (queue, status, worker_id, claim_token, started_at, attempts)"
        " values ('other', 'running', 'giver', gen_random_uuid(), now(), 1)"
    )
    await connection.execute("update windlass.tasks set queue = 'q'")
    released = "select windlass.release_task('giver', t.id, t.claim_token, 'busy') from windlass.tasks t"
    assert await connection.fetchval(released)


@pytest.mark.parametrize("arrive", [plain_insert, copy, enqueue_in_sql, retry, retry_all_failed, lose_worker, release])
async def test_every_way_to_queue_a_task_wakes_waiting_workers(
    connection: Any, store: PostgresStores, arrive: Callable[[Any], Awaitable[None]]
) -> None:
    # The first wait opens the listener and returns at once: tasks may have arrived before it listened.
    await asyncio.wait_for(store.wait_for_work(("q",), 3600), LIMIT_S)
    waiting = asyncio.create_task(store.wait_for_work(("q",), 3600))
    announced: asyncio.Queue[str] = asyncio.Queue()
    await connection.add_listener("windlass_tasks", lambda *notified: announced.put_nowait(notified[-1]))
    await arrive(connection)
    # Notifications arrive in the order of their commits.
    await connection.execute("notify windlass_tasks, 'end'")
    queues = set()
    while (queue := await asyncio.wait_for(announced.get(), LIMIT_S)) != "end":
        queues.add(queue)
    # The empty name means any queue.
    assert queues & {"q", ""}
    await asyncio.wait_for(waiting, LIMIT_S)
    await register(store, "w1")
    assert await store.claim("w1", ("q",)) != []


async def test_listener_polls_after_its_connection_is_lost(
    connection: Any, store: PostgresStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "POLL_WITHOUT_LISTEN_S", POLL_S)
    await asyncio.wait_for(store.wait_for_work(("q",), 3600), LIMIT_S)
    ended = "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and pid <> $1"
    await connection.fetch(ended, await connection.fetchval("select pg_backend_pid()"))

    async def is_polling() -> bool:
        """A poll returns at once. A wait for a notification takes the whole second."""
        began = time.monotonic()
        await store.wait_for_work(("q",), 1.0)
        return time.monotonic() - began < 0.5

    await eventually(is_polling, "the listener polls")


async def test_revoked_token_is_announced_to_servers(connection: Any) -> None:
    """Servers keep callers in memory for a while, and forget one when its hash is announced."""
    announced: asyncio.Queue[str] = asyncio.Queue()
    create = "select count(*) from windlass_internal.create_token('ci', 'viewer', '\\xabcd', '{}', '{}', null)"
    assert await connection.fetchval(create) == 1
    await connection.add_listener("windlass_identities", lambda *notified: announced.put_nowait(notified[-1]))
    assert await connection.fetchval("select windlass_internal.revoke_token('ci')")
    # Notifications arrive in the order of their commits.
    await connection.execute("notify windlass_identities, 'end'")
    assert await asyncio.wait_for(announced.get(), LIMIT_S) == "abcd"


async def test_only_workers_of_a_token_are_announced_with_it(connection: Any) -> None:
    """Thousands of workers need no new lookup because another token was created or revoked."""
    create = "select count(*) from windlass_internal.create_token($1, 'worker', $2, '{}', '{}', null)"
    for name, hash_ in (("mine", b"\xaa"), ("other", b"\xbb")):
        await connection.execute(create, name, hash_)
    await connection.execute("insert into windlass.fleets (name) values ('f')")
    await connection.execute(
        "insert into windlass.workers (id, fleet, status, queues, token_hash, registered_by) "
        "select 'of-' || t.name, 'f', 'active', '{q}', 'hash of ' || t.name::text::bytea, t.id from windlass.tokens t"
    )
    announced: list[str] = []
    ended = asyncio.Event()

    def listener(*notified: Any) -> None:
        announced.append(notified[-1])
        if notified[-1] == "end":
            ended.set()

    await connection.add_listener("windlass_identities", listener)
    await connection.execute(create, "new", b"\xcc")
    await connection.execute("update windlass.tokens set queues = '{q}' where name = 'new'")
    assert await connection.fetchval("select windlass_internal.revoke_token('mine')")
    await connection.execute("notify windlass_identities, 'end'")
    await asyncio.wait_for(ended.wait(), LIMIT_S)
    assert announced == ["cc", "cc", "aa", b"hash of mine".hex(), "end"]


OPERATIONS = {
    "restart": ("select windlass_internal.restart_slots('f')", True),
    "spawn": ("select windlass_internal.request_workers('f', 1)", True),
    "deploy": ("select windlass_internal.request_deploy('f', 1, 0, false)", True),
    "abort a deploy": ("select windlass_internal.abort_deploy('f')", True),
    "pause the fleet": ("select windlass_internal.pause_fleet('f', true)", True),
    "pause workers": ("select windlass_internal.pause_workers('{w1,w2}', true)", True),
    "drain workers": ("select windlass_internal.drain_workers('{w1,w2}', 'by hand')", True),
    "terminate": ("select windlass_internal.terminate_worker('w1', 'by hand')", True),
    "terminate a worker that has ended": ("select windlass_internal.terminate_worker('w3', 'by hand')", False),
}


@pytest.mark.parametrize(("call", "is_announced"), OPERATIONS.values(), ids=OPERATIONS)
async def test_operation_wakes_the_control_loop_of_its_fleet(connection: Any, call: str, is_announced: bool) -> None:
    await connection.execute(
        "insert into windlass.fleets (name, max_workers, deploy)"
        """ values ('f', 4, '{"id": 1, "surge": 1, "is_immediate": false, "is_aborted": false}')"""
    )
    await connection.execute("select windlass.register_worker(id, 'f') from unnest('{w1,w2,w3}'::text[]) as id")
    await connection.execute("select windlass.deregister_worker('w3', 'done')")
    announced: asyncio.Queue[str] = asyncio.Queue()
    await connection.add_listener("windlass_cycle_requests", lambda *notified: announced.put_nowait(notified[-1]))
    await connection.execute(call)
    await connection.execute("notify windlass_cycle_requests, 'end'")
    async with asyncio.timeout(LIMIT_S):
        payloads = [await announced.get()]
        while payloads[-1] != "end":
            payloads.append(await announced.get())
    assert payloads == [*(["f"] if is_announced else []), "end"]
