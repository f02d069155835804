"""Placements, written down many at a time: while one call is under way, the next ones gather."""

import asyncio
import random

import structlog

from windlass.model.node import NodeVerdict, Placement
from windlass.policy.backoff import reconnect_delay_s
from windlass.ports.ray import RayStore

# In one call: more than any dispatcher places at once, few enough to be quick.
MAX_BATCH = 500
log = structlog.get_logger(__name__)


class Placer:
    def __init__(self, store: RayStore) -> None:
        self._store = store
        self._waiting: list[tuple[Placement, asyncio.Future[NodeVerdict]]] = []
        self._writer: asyncio.Task[None] | None = None

    def place(self, placement: Placement) -> asyncio.Future[NodeVerdict]:
        """Answered when the database has said it. One that does not is asked again for as long as it takes."""
        answer: asyncio.Future[NodeVerdict] = asyncio.get_running_loop().create_future()
        self._waiting.append((placement, answer))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write())
        return answer

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
        for _, answer in self._waiting:
            answer.cancel()

    async def _write(self) -> None:
        failures = 0
        while self._waiting:
            batch = self._waiting[:MAX_BATCH]
            try:
                verdicts = await self._store.place([placement for placement, _ in batch])
            except Exception as error:  # also a deadlock, or what no driver should say: attempts wait for the answer
                failures += 1
                log.warning("not placed, trying again", error=f"{type(error).__name__}: {error}", failures=failures)
                await asyncio.sleep(reconnect_delay_s(failures, random.random()))  # noqa: S311
                continue
            failures = 0
            del self._waiting[: len(batch)]
            for placement, answer in batch:
                if not answer.done():
                    answer.set_result(verdicts[placement.token])
