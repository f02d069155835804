"""Windlass: elastic workers for a PostgreSQL task queue.

Producers use `Client` or `SyncClient`. Handlers take a `RunningTask`. Names are imported when they are first used, so
that the process of a handler starts in milliseconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windlass.client import Client, ClientTask, SyncClient, TaskFailed
    from windlass.model.codec import CodecError, PayloadCodec
    from windlass.model.errors import BadInput, ConfigError, DatabaseUnavailable, SchemaMismatch, WindlassError
    from windlass.model.task import NewTask, TaskStatus, new_task
    from windlass.worker.handler import DoNotRetry, RunningTask
    from windlass.worker.sealed_handler import sealed

__version__ = "0.1.0"
__all__ = [
    "BadInput",
    "Client",
    "ClientTask",
    "CodecError",
    "ConfigError",
    "DatabaseUnavailable",
    "DoNotRetry",
    "NewTask",
    "PayloadCodec",
    "RunningTask",
    "SchemaMismatch",
    "SyncClient",
    "TaskFailed",
    "TaskStatus",
    "WindlassError",
    "new_task",
    "sealed",
]

_HOMES = {
    "BadInput": "windlass.model.errors",
    "Client": "windlass.client",
    "ClientTask": "windlass.client",
    "CodecError": "windlass.model.codec",
    "ConfigError": "windlass.model.errors",
    "DatabaseUnavailable": "windlass.model.errors",
    "DoNotRetry": "windlass.worker.handler",
    "NewTask": "windlass.model.task",
    "PayloadCodec": "windlass.model.codec",
    "RunningTask": "windlass.worker.handler",
    "SchemaMismatch": "windlass.model.errors",
    "SyncClient": "windlass.client",
    "TaskFailed": "windlass.client",
    "TaskStatus": "windlass.model.task",
    "WindlassError": "windlass.model.errors",
    "new_task": "windlass.model.task",
    "sealed": "windlass.worker.sealed_handler",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'windlass' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
