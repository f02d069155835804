"""Writes placements to the database in batches: while one call is in progress, the next placements accumulate."""

import asyncio

from windlass.model.node import NodeVerdict, Placement
from windlass.ports.ray import RayStore
from windlass.retry import retrying

# Placements per call: more than a dispatcher makes at once, few enough for a short transaction.
MAX_BATCH = 500


class PlacementWriter:
    def __init__(self, store: RayStore) -> None:
        self._store = store
        self._pending: list[tuple[Placement, asyncio.Future[NodeVerdict]]] = []
        self._writing: asyncio.Task[None] | None = None

    def place(self, placement: Placement) -> asyncio.Future[NodeVerdict]:
        """The database's verdict. The call is retried until the database answers."""
        verdict: asyncio.Future[NodeVerdict] = asyncio.get_running_loop().create_future()
        self._pending.append((placement, verdict))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_all())
        return verdict

    async def close(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        for _, verdict in self._pending:
            verdict.cancel()

    async def _write_all(self) -> None:
        while self._pending:
            # Every error is retried, also a deadlock or one that no driver should raise: attempts wait for the verdict.
            await retrying(self._write_batch, "write placements failed", retry_on=Exception)

    async def _write_batch(self) -> None:
        batch = self._pending[:MAX_BATCH]
        verdicts = await self._store.place([placement for placement, _ in batch])
        del self._pending[: len(batch)]
        for placement, verdict in batch:
            if not verdict.done():
                verdict.set_result(verdicts[placement.token])
