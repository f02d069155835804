"""A ControlPlane for tests of the server: answers that a test sets, instead of a running control loop."""

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from windlass.model.cycle import Explanation
from windlass.model.errors import BadInput
from windlass.model.event import Event
from windlass.model.fleet import FleetConfig
from windlass.model.work_order import RayHead
from windlass.server.context import ControlHealth, LoopHealth


class FakeControlPlane:
    """`cycle_summaries` None: a requested cycle times out."""

    def __init__(self, fleets: Mapping[str, FleetConfig] | None = None) -> None:
        self.fleets: dict[str, FleetConfig] = dict(fleets or {})
        # Settings of every other fleet.
        self.default_fleet: FleetConfig | None = None
        self.has_leader = True
        self.loops: dict[str, LoopHealth] = {}
        self.actions: dict[str, Mapping[str, int]] = {}
        self.cycle_summaries: list[dict[str, Any]] | None = None
        self.cycles_requested = 0

    def fleet_config(self, name: str) -> FleetConfig | None:
        return self.fleets.get(name, self.default_fleet)

    async def health(self) -> ControlHealth:
        return ControlHealth(self.has_leader, self.loops)

    async def last_actions(self) -> Mapping[str, Mapping[str, int]]:
        return self.actions

    async def ray_head(self) -> RayHead | None:
        return None

    async def run_cycle(self) -> list[dict[str, Any]]:
        if self.cycle_summaries is None:
            raise TimeoutError
        self.cycles_requested += 1
        return self.cycle_summaries

    async def explain(self, subject: str, redact_event: Callable[[Event], Event] | None = None) -> Explanation:
        raise BadInput(f"{subject} not found.")

    async def worker_log(self, fleet: str, worker_id: str, lines: int) -> AsyncIterator[str]:
        if fleet not in self.fleets:
            raise BadInput(f"this host has no log of worker {worker_id}.")
        for line in [f"{worker_id} says hello"][:lines]:
            yield line
