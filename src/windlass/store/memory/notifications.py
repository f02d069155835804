"""Wakes transports that wait for work, and remembers arrivals while none waits."""

import asyncio
from collections.abc import Iterable, Sequence


class NotificationHub:
    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], frozenset[str]] = {}
        self._arrived: set[str] = set()

    def notify(self, queue: str) -> None:
        """A task arrived in this queue: wake its waiters, or let the next wait return at once."""
        is_waking = False
        for waiter, queues in self._waiters.items():
            if queue in queues and not waiter.done():
                waiter.set_result(None)
                is_waking = True
        if not is_waking:
            self._arrived.add(queue)

    def clear(self, queues: Iterable[str]) -> None:
        """These queues were read: earlier arrivals in them need no wake-up."""
        self._arrived.difference_update(queues)

    async def wait(self, queues: Sequence[str], timeout_s: float) -> None:
        """Wait for an arrival. The timeout uses the event loop's clock, which a simulation may run ahead."""
        if not self._arrived.isdisjoint(queues):
            self.clear(queues)
            # Yield to other tasks, even if this caller only ever waits.
            await asyncio.sleep(0)
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = frozenset(queues)
        try:
            await asyncio.wait([waiter], timeout=timeout_s)
        finally:
            del self._waiters[waiter]
