"""Rate limits that several server processes enforce together, in virtual time."""

from random import Random
from typing import Any

import pytest

from support.memory_store.stores import MemoryStores
from windlass.model.auth import RATE_TTL_S
from windlass.server.errors import ApiError
from windlass.server.rate_limit import SHARE_INTERVAL_S, RateSharing, RequestRateLimiter

LIMIT = 100.0
STEPS_PER_S = 100


class ServerProcess:
    def __init__(self, store: MemoryStores, clock: Any) -> None:
        self.limiter = RequestRateLimiter("request", LIMIT, lambda: clock().timestamp())
        self._sharing = RateSharing(store, [self.limiter])

    async def share(self) -> None:
        await self._sharing.share()

    def admit(self, caller: str, requests: int) -> int:
        """How many of these requests are admitted."""
        admitted = 0
        for _ in range(requests):
            try:
                self.limiter.check(caller)
                admitted += 1
            except ApiError:
                pass
        return admitted


async def admitted_per_s(
    clock: Any, offered: dict[ServerProcess, int], seconds: float, caller: str = "token a"
) -> float:
    """`offered`: requests per step of each process. Each process shares its rates in turn."""
    admitted = 0
    for step in range(round(seconds * STEPS_PER_S)):
        clock.advance(1 / STEPS_PER_S)
        for server, requests in offered.items():
            admitted += server.admit(caller, requests)
        if step % round(SHARE_INTERVAL_S * STEPS_PER_S) == 0:
            for server in offered:
                await server.share()
    return admitted / seconds


@pytest.fixture
def store(clock: Any) -> MemoryStores:
    return MemoryStores(clock, None, Random(1))  # noqa: S311


@pytest.mark.parametrize(("one", "other"), [(3, 3), (9, 1)], ids=["same rates", "different rates"])
async def test_server_processes_enforce_one_limit_together(
    store: MemoryStores, clock: Any, one: int, other: int
) -> None:
    servers = ServerProcess(store, clock), ServerProcess(store, clock)
    offered = dict(zip(servers, (one, other), strict=True))
    await admitted_per_s(clock, offered, 3 * SHARE_INTERVAL_S)
    assert 0.95 * LIMIT <= await admitted_per_s(clock, offered, 10.0) <= 1.01 * LIMIT
    # Callers of one process, and slow ones, keep the whole limit.
    assert servers[0].admit("token b", 200) == LIMIT


async def test_surviving_server_process_grants_the_whole_limit(store: MemoryStores, clock: Any) -> None:
    killed, survivor = ServerProcess(store, clock), ServerProcess(store, clock)
    await admitted_per_s(clock, {killed: 3, survivor: 3}, 5.0)
    assert await admitted_per_s(clock, {survivor: 3}, 1.0) < 0.6 * LIMIT
    await admitted_per_s(clock, {survivor: 3}, RATE_TTL_S + SHARE_INTERVAL_S)
    assert 0.99 * LIMIT <= await admitted_per_s(clock, {survivor: 3}, 10.0) <= 1.01 * LIMIT


async def test_share_ends_with_the_load_of_a_caller(store: MemoryStores, clock: Any) -> None:
    one, other = ServerProcess(store, clock), ServerProcess(store, clock)
    await admitted_per_s(clock, {one: 3, other: 3}, 5.0)
    await admitted_per_s(clock, {one: 0, other: 0}, 3 * SHARE_INTERVAL_S)
    assert one.admit("token a", 200) == LIMIT
