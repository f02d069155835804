"""Lookups of callers: bounded waits, one lookup for requests of the same token, none for clients that have left."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from support.control_planes import bearer, open_control_plane
from support.simulator.loop import run
from windlass.model.auth import API_PREFIX, WORKER_PREFIX, Role, TokenCaller, WorkerCaller, hash_of
from windlass.model.errors import ControlPlaneUnavailable, DatabaseUnavailable
from windlass.ports import http
from windlass.server import identity_lookups
from windlass.server.auth import Authenticator
from windlass.server.errors import ApiError
from windlass.server.identity_cache import CallerIdentity
from windlass.server.identity_lookups import (
    LOOKUP_WAIT_S,
    MAX_LOOKUPS,
    MAX_SHARE_OF_ADDRESS,
    MAX_WAITING_LOOKUPS,
    LookupQueue,
)

PER_ADDRESS = int(MAX_WAITING_LOOKUPS * MAX_SHARE_OF_ADDRESS)


class HangingStore:
    """Answers once `gate` is set: a database host without power."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.lookups: list[bytes] = []
        self.error: Exception | None = None

    async def authenticate(self, token_hash: bytes) -> WorkerCaller:
        self.lookups.append(token_hash)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return WorkerCaller(token_hash.hex()[:8], "default", ("q",), has_terminated=False)


class Callers:
    """Requests of many workers to one authenticator."""

    def __init__(self) -> None:
        self.store = HangingStore()
        store: Any = self.store
        self.authenticator = Authenticator(worker_store=store)
        self.authenticator.cache.set_listening(True)

    def send(self, number: int, address: str = "192.0.2.7", connection: Any = None) -> "asyncio.Task[Any]":
        return asyncio.create_task(self.status(number, address, connection))

    async def status(self, number: int, address: str, connection: Any) -> tuple[int, str | None, float]:
        """Status, Retry-After, and when it was answered."""
        loop = asyncio.get_running_loop()
        scope: Any = {"client": (address, 4711), "state": {"connection": connection} if connection else {}}
        headers = {b"authorization": f"Bearer {token_of(number)}".encode()}
        try:
            await self.authenticator.authenticate(scope, headers)
        except ApiError as error:
            return error.status_code, (error.headers or {}).get("Retry-After"), loop.time()
        return 200, None, loop.time()


class Connection:
    is_closing = False


def token_of(number: int) -> str:
    return f"{WORKER_PREFIX}{number:064x}"


async def until(is_true: Callable[[], bool]) -> None:
    for _ in range(1_000):
        if is_true():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition was not met")


def test_caller_is_answered_503_when_lookups_take_too_long() -> None:
    async def check() -> None:
        callers = Callers()
        replies = await asyncio.gather(*(callers.send(number) for number in range(100)))
        assert set(replies) == {(503, "1", LOOKUP_WAIT_S)}
        # The former waits have ended. After the outage, open requests are answered.
        callers.store.gate.set()
        assert (await callers.send(200))[0] == 200
        assert len(callers.store.lookups) == MAX_LOOKUPS + 1
        # What had begun was useful.
        assert callers.authenticator.cache.get(hash_of(token_of(0))) is not None

    run(check())


@pytest.mark.parametrize(
    ("addresses", "waiting"),
    [pytest.param(1, PER_ADDRESS, id="one address"), pytest.param(4_000, MAX_WAITING_LOOKUPS, id="many addresses")],
)
def test_callers_beyond_the_queue_are_answered_503_at_once(addresses: int, waiting: int) -> None:
    async def check() -> None:
        callers = Callers()
        many = MAX_LOOKUPS + waiting + 1_000
        replies = await asyncio.gather(
            *(callers.send(number, f"192.0.2.{number % addresses}") for number in range(many))
        )
        answered = Counter((status, retry_after, at) for status, retry_after, at in replies)
        assert answered == {(503, "1", 0.0): 1_000, (503, "1", LOOKUP_WAIT_S): MAX_LOOKUPS + waiting}
        callers.store.gate.set()
        assert (await callers.send(many))[0] == 200

    run(check())


async def test_address_with_many_waiting_lookups_leaves_room_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity_lookups, "MAX_WAITING_LOOKUPS", 10)
    callers = Callers()
    flood = [callers.send(number) for number in range(20)]
    await until(lambda: sum(each.done() for each in flood) == 20 - MAX_LOOKUPS - 5)
    other = callers.send(99, "192.0.2.8")
    await until(lambda: len(callers.store.lookups) == MAX_LOOKUPS)
    assert not other.done()
    callers.store.gate.set()
    assert (await other)[0] == 200
    assert Counter(status for status, *_ in await asyncio.gather(*flood)) == {200: MAX_LOOKUPS + 5, 503: 13}


async def test_requests_with_one_token_share_a_lookup() -> None:
    callers = Callers()
    busy = [callers.send(number) for number in range(MAX_LOOKUPS)]
    same = [callers.send(99) for _ in range(50)]
    await until(lambda: len(callers.store.lookups) == MAX_LOOKUPS)
    cancelled = same.pop(0)  # the others do not end with the first
    cancelled.cancel()
    callers.store.gate.set()
    assert {status for status, *_ in await asyncio.gather(*busy, *same)} == {200}
    assert Counter(callers.store.lookups)[hash_of(token_of(99))] == 1


async def test_request_never_gets_an_answer_that_is_older_than_itself() -> None:
    """Its token may have been revoked after that lookup read the database."""
    callers = Callers()
    first = callers.send(1)
    await until(lambda: len(callers.store.lookups) == 1)
    callers.authenticator.cache.revoke(hash_of(token_of(1)))
    second = callers.send(1)
    callers.store.gate.set()
    assert [(await each)[0] for each in (first, second)] == [200, 200]
    assert len(callers.store.lookups) == 2


async def test_failed_lookup_fails_all_that_wait_for_it() -> None:
    callers = Callers()
    callers.store.error = DatabaseUnavailable("the database cannot be reached")
    requests = [callers.send(1) for _ in range(10)]
    await until(lambda: len(callers.store.lookups) == 1)
    callers.store.gate.set()
    outcomes = await asyncio.gather(*requests, return_exceptions=True)
    assert {type(each) for each in outcomes} == {DatabaseUnavailable}
    callers.store.error = None
    assert (await callers.send(1))[0] == 200


async def test_lookup_of_a_client_that_has_left_is_dropped() -> None:
    callers, gone, here = Callers(), Connection(), Connection()
    busy = [callers.send(number) for number in range(MAX_LOOKUPS)]
    left = [callers.send(98, connection=gone), callers.send(98, connection=gone)]
    shared = [callers.send(99, connection=gone), callers.send(99, connection=here)]
    await until(lambda: len(callers.store.lookups) == MAX_LOOKUPS)
    gone.is_closing = True
    callers.store.gate.set()
    await asyncio.gather(*busy)
    assert {status for status, *_ in await asyncio.gather(*shared)} == {200}
    assert {status for status, *_ in await asyncio.gather(*left)} == {503}
    assert hash_of(token_of(98)) not in callers.store.lookups


async def test_stream_stays_open_while_its_caller_cannot_be_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity_lookups, "LOOKUP_WAIT_S", 0.01)
    callers = Callers()
    ann = CallerIdentity(TokenCaller("ann", Role.VIEWER), "token ann")
    scope: Any = {"client": ("192.0.2.7", 1)}
    headers = {b"authorization": f"Bearer {API_PREFIX}{1:064x}".encode()}
    assert await callers.authenticator.is_still_allowed(ann, scope, headers)
    callers.store.gate.set()
    assert not await callers.authenticator.is_still_allowed(ann, scope, headers)


async def test_worker_backs_off_while_callers_cannot_be_looked_up(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_control_plane(clock) as plane:
        token = await plane.join()
        hanging = HangingStore()
        monkeypatch.setattr(plane.store, "authenticate", hanging.authenticate)
        monkeypatch.setattr(identity_lookups, "LOOKUP_WAIT_S", 0.01)
        reply = await plane.client.post(http.HEARTBEAT, json={}, headers=bearer(token))
        assert (reply.status_code, reply.json()["code"], reply.headers["retry-after"]) == (503, "UNAVAILABLE", "1")
        async with plane.transport(token) as transport:
            with pytest.raises(ControlPlaneUnavailable, match="did not identify the caller in time") as error:
                await transport.heartbeat("w0")
        assert not error.value.is_refusal


async def test_queue_keeps_nothing_after_its_lookups() -> None:
    queue = LookupQueue[int]()

    async def look_up() -> int:
        return 1

    assert await asyncio.gather(*(queue.get(bytes([key]), look_up, "a") for key in range(20))) == [1] * 20
    await until(lambda: not queue._running)
    assert (queue._waiting, queue._waiting_of) == ({}, Counter())
