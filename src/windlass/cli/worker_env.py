"""What the provider that spawned a worker on this host passes to it in environment variables.

Reading removes the variables: a process that a handler starts is not this worker, and handlers must not see the
database URL, which may be only in the orchestrator's windlass.toml.
"""

import os
from dataclasses import dataclass
from typing import Self

from windlass.model.worker import DEFAULT_FLEET


@dataclass(frozen=True, slots=True)
class SpawnedWorkerEnv:
    worker_id: str | None
    fleet: str
    needs_gpu: bool
    # None: started by hand, or the database is embedded.
    database_url: str | None
    # Proves to the database that it is this worker. None: started by hand, and it generates one.
    secret: str | None

    @classmethod
    def take_from_environment(cls) -> Self:
        """Call it before the configuration is loaded, which rejects variables that are not settings."""
        return cls(
            worker_id=os.environ.pop("WINDLASS_WORKER_ID", None),
            fleet=os.environ.pop("WINDLASS_FLEET", DEFAULT_FLEET),
            needs_gpu=bool(os.environ.pop("WINDLASS_NEEDS_GPU", "")),
            database_url=os.environ.pop("WINDLASS_WORKER_DATABASE_URL", None),
            secret=os.environ.pop("WINDLASS_WORKER_SECRET", None),
        )
