"""What the programs that register as a worker have in common: tasks' workers and the nodes of a Ray cluster."""

import os
import socket
from dataclasses import dataclass, field
from uuid import uuid4

from windlass.model.worker import Registration, WorkerKind


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrationSettings:
    queues: tuple[str, ...]
    fleet: str = "default"
    concurrency: int = 1
    heartbeat_interval_s: float = 5.0
    lease_s: float = 30.0
    # How long the first registration is retried. A rented machine must survive a restart of the control plane.
    registration_timeout_s: float = 0.0
    version: str | None = None
    # Identifies this start of the program when it registers more than once under the same worker id.
    start_id: str = field(default_factory=lambda: uuid4().hex)

    def registration(self, worker_id: str, kind: WorkerKind) -> Registration:
        """The registration of this process."""
        return Registration(
            worker_id=worker_id,
            queues=self.queues,
            fleet=self.fleet,
            concurrency=self.concurrency,
            lease_s=self.lease_s,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=self.version,
            kind=kind,
            start_id=self.start_id,
        )
