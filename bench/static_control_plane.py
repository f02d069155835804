"""A ControlPlane for benchmarks of the server: one fleet, and no control loop."""

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from windlass.control.explanation import ExplainStore, explain
from windlass.model.cycle import Explanation
from windlass.model.errors import BadInput
from windlass.model.event import Event
from windlass.model.fleet import FleetConfig
from windlass.model.work_order import RayHead
from windlass.server.context import ControlHealth


class StaticControlPlane:
    """Without a store it explains nothing."""

    def __init__(self, fleet: FleetConfig, store: ExplainStore | None = None) -> None:
        self._fleet = fleet
        self._store = store

    def fleet_config(self, _name: str) -> FleetConfig | None:
        return self._fleet

    async def health(self) -> ControlHealth:
        return ControlHealth(has_leader=False, fleets={})

    async def last_actions(self) -> Mapping[str, Mapping[str, int]]:
        return {}

    async def ray_head(self) -> RayHead | None:
        return None

    async def run_cycle(self) -> list[dict[str, Any]]:
        return []

    async def explain(self, subject: str, redact_event: Callable[[Event], Event] | None = None) -> Explanation:
        if self._store is None:
            raise BadInput(f"{subject} not found.")
        return await explain(self._store, subject, redact_event)

    async def worker_log(self, _fleet: str, _worker_id: str, _lines: int) -> AsyncIterator[str]:
        for line in list[str]():
            yield line
