"""Processes of an installation: control loops and HTTP servers, as they record themselves in the database."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from uuid import UUID

# A process records itself several times in this time. An older record is of a process that died.
PROCESS_TTL_S = 20.0


class ProcessKind(StrEnum):
    CONTROL = "control"
    SERVER = "server"


@dataclass(frozen=True, slots=True)
class RayHeadAddress:
    """Where the Ray head of a control process is. Its credentials are in the environment of the servers, not here."""

    address: str
    ray_version: str
    python_version: str


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    id: UUID
    kind: ProcessKind
    # Tells apart the server processes of one `windlass up`.
    number: int
    host: str
    pid: int
    version: str
    # Servers only. A loopback URL refers to `host`.
    url: str | None = None
    # Control processes with Ray fleets only.
    ray_head: RayHeadAddress | None = None
    # Values for metrics: memory_bytes, connections.
    gauges: Mapping[str, float] = field(default_factory=dict)
