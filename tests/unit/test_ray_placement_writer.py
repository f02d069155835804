"""Batches of placements, and their retries."""

import asyncio
from uuid import UUID, uuid4

from windlass.model.node import NodeVerdict, Placement
from windlass.ray.placement_writer import PlacementWriter
from windlass.simulator.loop import run


class FailingStore:
    """Fails in the first call, as after a deadlock."""

    def __init__(self) -> None:
        self.calls: list[list[Placement]] = []

    async def place(self, placements: list[Placement]) -> dict[UUID, NodeVerdict]:
        self.calls.append(placements)
        if len(self.calls) == 1:
            raise RuntimeError("deadlock detected")
        return {placement.token: NodeVerdict.PLACED for placement in placements}


def test_failed_batch_of_placements_is_retried() -> None:
    async def place() -> None:
        store = FailingStore()
        writer = PlacementWriter(store)  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            verdicts = [writer.place(Placement(number, uuid4(), "n1")) for number in range(3)]
            assert await asyncio.gather(*verdicts) == 3 * [NodeVerdict.PLACED]
        assert [len(placements) for placements in store.calls] == [3, 3]
        await writer.close()

    run(place())
