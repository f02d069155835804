"""Cached identities: forgotten at once when they are revoked, and bounded in time if a notification is lost."""

import asyncio
from typing import Any

from windlass.model.auth import WORKER_PREFIX, Role, TokenCaller, WorkerCaller, hash_of
from windlass.server import identity_cache
from windlass.server.auth import Authenticator
from windlass.server.identity_cache import IDENTITY_TTL_S, CallerIdentity, IdentityCache
from windlass.server.identity_lookups import MAX_LOOKUPS

KEY, OTHER = b"1" * 32, b"2" * 32
ANN = CallerIdentity(TokenCaller("ann", Role.VIEWER), "token ann")


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


def cache_with(*keys: bytes, clock: Clock | None = None) -> IdentityCache:
    cache = IdentityCache(clock or Clock())
    cache.set_listening(True)
    for key in keys:
        cache.add(key, ANN, cache.generation)
    return cache


def test_revoked_identity_is_forgotten_at_once_and_others_stay() -> None:
    cache = cache_with(KEY, OTHER)
    cache.revoke(KEY)
    assert (cache.get(KEY), cache.get(OTHER)) == (None, ANN)
    cache.revoke(None)
    assert cache.get(OTHER) is None


def test_lookup_that_began_before_a_revocation_is_not_cached() -> None:
    cache = cache_with()
    generation = cache.generation
    cache.revoke(KEY)  # while the database answers
    cache.add(KEY, ANN, generation)
    assert cache.get(KEY) is None


def test_lost_notification_has_an_effect_for_a_bounded_time() -> None:
    clock = Clock()
    cache = cache_with(KEY, clock=clock)
    clock.now += IDENTITY_TTL_S - 0.001
    assert cache.get(KEY) is ANN  # being used does not extend it
    clock.now += 0.001
    assert cache.get(KEY) is None


def test_nothing_is_cached_while_notifications_may_be_lost() -> None:
    cache = cache_with(KEY)
    cache.set_listening(False)
    assert cache.get(KEY) is None
    cache.add(KEY, ANN, cache.generation)
    assert cache.get(KEY) is None


def test_number_of_identities_is_bounded() -> None:
    cache = cache_with(*(number.to_bytes(32, "big") for number in range(identity_cache.MAX_CACHED_IDENTITIES + 1)))
    assert cache.get((0).to_bytes(32, "big")) is None
    assert cache.get((1).to_bytes(32, "big")) is ANN


async def test_revocation_of_another_does_not_repeat_waiting_lookups() -> None:
    """After a restart thousands of workers wait to be looked up, and now and then one of them terminates."""
    gate, begun = asyncio.Event(), asyncio.Semaphore(0)

    class SlowStore:
        async def authenticate(self, token_hash: bytes) -> WorkerCaller:
            begun.release()
            await gate.wait()
            return WorkerCaller(token_hash.hex()[:8], "default", ("q",), has_terminated=False)

    store: Any = SlowStore()
    authenticator = Authenticator(worker_store=store)
    authenticator.cache.set_listening(True)
    tokens = [f"{WORKER_PREFIX}{number:064x}" for number in range(MAX_LOOKUPS + 3)]
    scope: Any = {"client": ("192.0.2.7", 1)}
    lookups = [
        asyncio.create_task(authenticator.authenticate(scope, {b"authorization": f"Bearer {token}".encode()}))
        for token in tokens
    ]
    for _ in range(MAX_LOOKUPS):
        await begun.acquire()
    authenticator.cache.revoke(OTHER)
    gate.set()
    await asyncio.gather(*lookups)
    cached = [authenticator.cache.get(hash_of(token)) is not None for token in tokens]
    assert cached == [False] * MAX_LOOKUPS + [True] * 3
