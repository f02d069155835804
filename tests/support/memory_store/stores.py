"""All memory stores over one set of tables, for the simulator and tests, which use every port."""

from collections.abc import Callable
from datetime import datetime
from random import Random
from typing import TYPE_CHECKING

from support.memory_store.auth import MemoryAuthStore
from support.memory_store.control import MemoryControlStore, MemoryCostStore
from support.memory_store.fleet_store import MemoryFleetQueries, MemoryOperations
from support.memory_store.ray import MemoryRayStore
from support.memory_store.tables import Tables
from support.memory_store.task_store import MemoryTaskStore
from support.memory_store.transport import MemoryMaintenance, MemoryTransport
from support.memory_store.worker_logs import MemoryWorkerLogs
from windlass.model.config import Retention

if TYPE_CHECKING:
    from windlass.ports.auth import AuthStore
    from windlass.ports.control import ControlStore
    from windlass.ports.costs import CostStore
    from windlass.ports.fleets import FleetQueries, Operations
    from windlass.ports.ray import RayStore
    from windlass.ports.tasks import MaintenanceStore, TaskStore
    from windlass.ports.transport import WorkerTransport
    from windlass.ports.worker_logs import WorkerLogQueries


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
    MemoryWorkerLogs,
):
    def __init__(
        self, clock: Callable[[], datetime], retention: Retention | None = None, chance: Random | None = None
    ) -> None:
        self.tables = Tables(clock, retention, chance)
        super().__init__(self.tables)


if TYPE_CHECKING:
    # mypy checks every signature against the ports.
    _TRANSPORT: type[WorkerTransport] = MemoryTransport
    _MAINTENANCE: type[MaintenanceStore] = MemoryMaintenance
    _TASKS: type[TaskStore] = MemoryTaskStore
    _FLEETS: type[FleetQueries] = MemoryFleetQueries
    _OPERATIONS: type[Operations] = MemoryOperations
    _CONTROL: type[ControlStore] = MemoryControlStore
    _COSTS: type[CostStore] = MemoryCostStore
    _AUTH: type[AuthStore] = MemoryAuthStore
    _RAY: type[RayStore] = MemoryRayStore
    _WORKER_LOGS: type[WorkerLogQueries] = MemoryWorkerLogs
