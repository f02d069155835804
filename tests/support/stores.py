"""All PostgreSQL stores on one database in one object, for tests that act as producer, worker, leader and operator."""

from typing import Any, Self

from support.memory_store.stores import MemoryStores
from windlass.store.alerts import PostgresAlertStore
from windlass.store.auth import PostgresAuthStore
from windlass.store.control import PostgresControlStore
from windlass.store.costs import PostgresCostStore
from windlass.store.dashboard_queries import PostgresQueryStore
from windlass.store.database import Database
from windlass.store.fleets import PostgresFleetQueries, PostgresOperations
from windlass.store.history import PostgresControlMaintenance, PostgresHistoryStore
from windlass.store.log_sink import PostgresLogStore
from windlass.store.processes import PostgresProcessStore
from windlass.store.ray import PostgresRayStore
from windlass.store.tasks import PostgresTaskStore
from windlass.store.transport import PostgresTransport
from windlass.store.worker_logs import PostgresWorkerLogs


class PostgresStores(
    PostgresTransport,
    PostgresControlMaintenance,
    PostgresTaskStore,
    PostgresFleetQueries,
    PostgresOperations,
    PostgresControlStore,
    PostgresCostStore,
    PostgresQueryStore,
    PostgresAuthStore,
    PostgresAlertStore,
    PostgresRayStore,
    PostgresLogStore,
    PostgresProcessStore,
    PostgresHistoryStore,
    PostgresWorkerLogs,
):
    def __init__(self, dsn: str, *, secret: str | None = None, **options: Any) -> None:
        """`secret`: of the workers that act here. `options` are those of Database."""
        self.database = Database(dsn, **options)
        super().__init__(self.database, secret)

    async def __aenter__(self) -> Self:
        await self.database.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.database.__aexit__(*error)


AnyStore = PostgresStores | MemoryStores
