"""Who waits for work, and what arrived while nobody did."""

import asyncio
from collections.abc import Iterable, Sequence


class NotificationHub:
    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], frozenset[str]] = {}
        self._arrived: set[str] = set()

    def notify(self, queue: str) -> None:
        """Something arrived: whoever waits for it wakes, or whoever will wait next does not."""
        is_heard = False
        for waiter, queues in self._waiters.items():
            if queue in queues and not waiter.done():
                waiter.set_result(None)
                is_heard = True
        if not is_heard:
            self._arrived.add(queue)

    def clear(self, queues: Iterable[str]) -> None:
        """Somebody looks into these queues: what had arrived in them is seen."""
        self._arrived.difference_update(queues)

    async def wait(self, queues: Sequence[str], timeout_s: float) -> None:
        """Time goes by the event loop's own clock here: a simulation's loop may run ahead of the world's."""
        if not self._arrived.isdisjoint(queues):
            self.clear(queues)
            # Others get their turn even if this caller only ever waits.
            await asyncio.sleep(0)
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = frozenset(queues)
        try:
            await asyncio.wait([waiter], timeout=timeout_s)
        finally:
            del self._waiters[waiter]
