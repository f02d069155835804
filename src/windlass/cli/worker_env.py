"""What the provider that started a worker on this host says of it, in its environment.

It is taken out of there as it is read: what a handler starts is not this worker, and the database's address, which may
stand in nothing but the orchestrator's windlass.toml, is not for handlers.
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
    # None: nobody said so, or the database is an embedded one.
    database_url: str | None

    @classmethod
    def from_environment(cls) -> Self:
        """Comes before settings are read, of which these are none."""
        return cls(
            worker_id=os.environ.pop("WINDLASS_WORKER_ID", None),
            fleet=os.environ.pop("WINDLASS_FLEET", DEFAULT_FLEET),
            needs_gpu=bool(os.environ.pop("WINDLASS_NEEDS_GPU", "")),
            database_url=os.environ.pop("WINDLASS_WORKER_DATABASE_URL", None),
        )
