"""All memory stores over one set of tables, for the simulator and for tests, which act in every role."""

from collections.abc import Callable
from datetime import datetime
from random import Random

from windlass.model.config import Retention
from windlass.store.memory.auth import MemoryAuthStore
from windlass.store.memory.control import MemoryControlStore, MemoryCostStore
from windlass.store.memory.fleet_store import MemoryFleetQueries, MemoryOperations
from windlass.store.memory.ray import MemoryRayStore
from windlass.store.memory.tables import Tables
from windlass.store.memory.task_store import MemoryTaskStore
from windlass.store.memory.transport import MemoryMaintenance, MemoryTransport


class MemoryStores(
    MemoryTransport,
    MemoryMaintenance,
    MemoryTaskStore,
    MemoryFleetQueries,
    MemoryOperations,
    MemoryControlStore,
    MemoryCostStore,
    MemoryAuthStore,
    MemoryRayStore,
):
    def __init__(
        self, clock: Callable[[], datetime], retention: Retention | None = None, chance: Random | None = None
    ) -> None:
        self.tables = Tables(clock, retention, chance)
        super().__init__(self.tables)
