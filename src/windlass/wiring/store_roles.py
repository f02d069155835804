"""Combinations of PostgreSQL stores for callers whose port is an intersection of ports.

Each role has exactly the methods its caller may use: the dashboard cannot commit plans, and a command cannot claim.
"""

from typing import TYPE_CHECKING

from windlass.store.auth import PostgresAuthStore
from windlass.store.control import PostgresControlStore
from windlass.store.costs import PostgresCostStore
from windlass.store.dashboard_queries import PostgresQueryStore
from windlass.store.fleets import PostgresFleetQueries, PostgresOperations
from windlass.store.history import PostgresControlMaintenance, PostgresHistoryStore
from windlass.store.processes import PostgresProcessStore
from windlass.store.tasks import PostgresTaskStore
from windlass.store.transport import PostgresMaintenance, PostgresTransport, PostgresWorkSignal
from windlass.store.worker_logs import PostgresWorkerLogs

if TYPE_CHECKING:
    from windlass.ports.alerts import AlertStore
    from windlass.ports.auth import AuthStore
    from windlass.ports.control import ControlStore
    from windlass.ports.costs import CostStore
    from windlass.ports.fleets import FleetQueries, Operations
    from windlass.ports.history import HistoryStore
    from windlass.ports.processes import ProcessStore
    from windlass.ports.queries import QueryStore
    from windlass.ports.ray import RayStore
    from windlass.ports.tasks import MaintenanceStore, TaskStore
    from windlass.ports.transport import WorkerTransport
    from windlass.ports.worker_logs import WorkerLogQueries
    from windlass.store.alerts import PostgresAlertStore
    from windlass.store.ray import PostgresRayStore


class OrchestratorStores(
    PostgresControlStore, PostgresFleetQueries, PostgresControlMaintenance, PostgresWorkSignal, PostgresProcessStore
):
    """Implements OrchestratorStore of control/unconfigured_fleets.py, and what control shares with servers."""


class WorkerProtocolStores(PostgresTransport, PostgresAuthStore, PostgresFleetQueries, PostgresProcessStore):
    """What the HTTP server needs for workers and probes: transport, callers, where there is work, who controls."""


class AccessStores(PostgresAuthStore, PostgresProcessStore):
    """What commands about tokens and links need: callers, and where servers run."""


class DashboardStores(
    PostgresTaskStore,
    PostgresFleetQueries,
    PostgresOperations,
    PostgresCostStore,
    PostgresQueryStore,
    PostgresHistoryStore,
    PostgresAuthStore,
    PostgresProcessStore,
    PostgresWorkerLogs,
):
    """AppStore of server/context.py."""


if TYPE_CHECKING:
    # mypy checks every signature against the ports.
    _TRANSPORT: type[WorkerTransport] = PostgresTransport
    _MAINTENANCE: type[MaintenanceStore] = PostgresMaintenance
    _TASKS: type[TaskStore] = PostgresTaskStore
    _FLEETS: type[FleetQueries] = PostgresFleetQueries
    _OPERATIONS: type[Operations] = PostgresOperations
    _CONTROL: type[ControlStore] = PostgresControlStore
    _COSTS: type[CostStore] = PostgresCostStore
    _QUERIES: type[QueryStore] = PostgresQueryStore
    _HISTORY: type[HistoryStore] = PostgresHistoryStore
    _AUTH: type[AuthStore] = PostgresAuthStore
    _PROCESSES: type[ProcessStore] = PostgresProcessStore
    _RAY: type[RayStore] = PostgresRayStore
    _WORKER_LOGS: type[WorkerLogQueries] = PostgresWorkerLogs
    _ALERTS: type[AlertStore] = PostgresAlertStore
