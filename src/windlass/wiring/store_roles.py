"""Combinations of PostgreSQL stores for callers whose port is an intersection of ports.

Each role has exactly the methods its caller may use: the dashboard cannot commit plans, and a command cannot claim.
"""

from windlass.store.auth import PostgresAuthStore
from windlass.store.control import PostgresControlStore
from windlass.store.costs import PostgresCostStore
from windlass.store.dashboard_queries import PostgresQueryStore
from windlass.store.fleets import PostgresFleetQueries, PostgresOperations
from windlass.store.tasks import PostgresTaskStore
from windlass.store.transport import PostgresMaintenance, PostgresTransport, PostgresWorkSignal


class OrchestratorStores(PostgresControlStore, PostgresFleetQueries, PostgresMaintenance, PostgresWorkSignal):
    """OrchestratorStore of control/orchestrator.py."""


class WorkerProtocolStores(PostgresTransport, PostgresAuthStore):
    """What the HTTP server needs for workers: their transport, and who they are."""


class DashboardStores(
    PostgresTaskStore,
    PostgresFleetQueries,
    PostgresOperations,
    PostgresCostStore,
    PostgresQueryStore,
    PostgresAuthStore,
):
    """DashboardStore of server/context.py."""
