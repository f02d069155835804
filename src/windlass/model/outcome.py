"""What a cycle asks of the providers and what came of it: spawn intents, and one outcome per provider call."""

from dataclasses import dataclass
from datetime import datetime

from windlass.model.machine import Machine, MachineExit, MachineState
from windlass.model.worker import WorkerKind


@dataclass(frozen=True, slots=True)
class Intent:
    """A worker about to be spawned. Its id names its machine and is the idempotency key of the creation."""

    worker_id: str
    slot: int
    reason: str
    lease_s: float
    # A person requested this worker; granting the intent fulfils one request.
    is_requested: bool = False
    # For a machine that joins over HTTP: the hash of its join token and the token's lifetime. The token itself goes
    # only to the provider.
    join_token_hash: bytes | None = None
    join_ttl_s: float | None = None
    # These override what the worker says about itself when it registers.
    concurrency: int = 1
    kind: WorkerKind = WorkerKind.WORKER
    # For a worker that calls the database itself: the hash of its secret, which goes only to the provider.
    secret_hash: bytes | None = None
    # See Spawn.
    cause: str = "queue_depth"
    # Version of the code and settings that the worker is spawned with. None: unknown.
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class Committed:
    """A committed plan: its cycle, the ids of the intents that were granted, and the number of requeued tasks."""

    cycle_id: int
    granted: frozenset[str]
    requeued: int


@dataclass(frozen=True, slots=True)
class Created:
    worker_id: str
    machine: Machine
    # The machine starts the worker's program itself; no step is needed between boot and first heartbeat.
    is_prepared: bool = True
    # Granularity in which the provider bills time.
    billing_unit_s: int = 1


@dataclass(frozen=True, slots=True)
class CreationUnclear:
    """The machine may exist, or may still be created. Only a complete machine list can tell."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class CreationRefused:
    worker_id: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Deleted:
    """The worker's machine no longer exists. `machine_id` None: it never had one.

    A worker that meanwhile has another machine is not terminated.
    """

    worker_id: str
    machine_id: str | None
    code: str
    reason: str
    # When billing of the machine stopped. None: now.
    ended_at: datetime | None = None
    # The machine with its price, if that became known only when the machine was gone.
    priced: Machine | None = None
    billing_unit_s: int = 1
    # The machine as the provider last listed it, and its reason if it exited.
    machine_state: MachineState | None = None
    machine_note: str | None = None
    machine_exit: MachineExit | None = None
    # What the machine printed, if its worker never joined and the provider keeps that.
    boot_log: str = ""


@dataclass(frozen=True, slots=True)
class NotDeleted:
    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class OrphanDeleted:
    """A machine without a worker row was deleted. Its time was billed too."""

    machine: Machine
    reason: str
    billing_unit_s: int = 1
    # See Deleted.
    ended_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class HostKeySeen:
    """The SSH host key of the worker's machine. The first one recorded stays."""

    worker_id: str
    machine_id: str
    host_key: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """The worker's program was started on its machine."""

    worker_id: str
    machine_id: str
    host_key: str | None = None


@dataclass(frozen=True, slots=True)
class PreparationFailed:
    """The machine cannot run the worker. `output`: the last output of the failing step."""

    worker_id: str
    machine_id: str
    code: str
    reason: str
    output: str = ""
    host_key: str | None = None


@dataclass(frozen=True, slots=True)
class PreparationUnclear:
    """Preparation did not finish. It is repeated, and skips the steps that are done."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class VolumeGrown:
    volume_id: str
    size_gb: int
    reason: str


@dataclass(frozen=True, slots=True)
class VolumeNotGrown:
    """`reason`: the provider's message."""

    volume_id: str
    size_gb: int
    reason: str


Outcome = (
    Created
    | CreationUnclear
    | CreationRefused
    | Deleted
    | NotDeleted
    | OrphanDeleted
    | HostKeySeen
    | Prepared
    | PreparationFailed
    | PreparationUnclear
    | VolumeGrown
    | VolumeNotGrown
)
