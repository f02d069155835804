"""Machines (a pod, a server, a process) and the traits of the providers that run them."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from windlass.model.cost import PricePart


class MachineState(StrEnum):
    BOOTING = "booting"  # exists and is billed, but cannot run a program yet
    RUNNING = "running"
    EXITED = "exited"  # listed, but will never run again: a process that ended, a pod that stopped


@dataclass(frozen=True, slots=True)
class MachineExit:
    """How a machine or its worker process ended. Only what the provider reports is set."""

    code: int | None = None
    # Name of the signal that killed the process, for example SIGKILL.
    signal: str | None = None
    # The state of the machine in the vendor's words. Neither Hetzner nor Runpod reports exit codes.
    status: str | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine with Windlass tags. `name` is the id of the worker that it was created for."""

    id: str
    name: str
    state: MachineState
    created_at: datetime | None = None
    address: str | None = None
    # The physical host, by an address that it shares with the other machines on it. None: the provider does not tell.
    host: str | None = None
    instance_type: str | None = None
    place: str | None = None
    price_micros_per_hour: int | None = None
    # The parts of the price if each has a monthly cap.
    price_parts: tuple[PricePart, ...] = ()
    currency: str | None = None
    # The provider's reason why it exited, for the event.
    note: str | None = None
    # The same in parts, for programs.
    exit: MachineExit | None = None
    # Why it must not be used: it is not where it was requested, or where a person excluded it.
    misplaced: str | None = None
    # The provider refuses to delete it until a person unlocks it.
    is_locked: bool = False


@dataclass(frozen=True, slots=True)
class MachineRequest:
    """A machine to create. `name` is never reused and is the idempotency key of the create call."""

    name: str
    fleet: str
    slot: int
    # One-time token for a worker that joins over HTTP. Kept in memory and on the machine, never stored.
    join_token: str | None = field(default=None, repr=False)
    # Secret of a worker that calls the database itself. Kept in memory and in its process, never stored.
    secret: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Quote:
    """The published price of one machine of a fleet, for its first choice that has a price."""

    choice: str
    price_micros_per_hour: int
    currency: str


@dataclass(frozen=True, slots=True)
class Volume:
    """A volume that a fleet's machines share."""

    id: str
    size_gb: int
    # None: unknown, or it costs nothing.
    price_micros_per_hour: int | None = None
    currency: str | None = None


@dataclass(frozen=True, slots=True)
class Preparation:
    """The worker's program was started on a machine. `host_key`: the SSH host key, to recognise the machine later."""

    host_key: str | None = None


@dataclass(frozen=True, slots=True)
class ProviderTraits:
    """What a plan must know about a provider to interpret its answers."""

    # How long a machine may be missing from complete lists before it counts as gone. 0: lists never lag.
    absence_grace_s: float = 0.0
    # How long after an unanswered create call its machine may still appear.
    creation_lateness_s: float = 0.0
    # How long an orphaned machine is kept: its row may be written by a newer leader.
    orphan_grace_s: float = 0.0
    # Length of a billing unit, counted from the machine's creation: 3600 for started hours.
    billing_unit_s: int = 1
    # Deletions per second, if the provider limits them. None: no limit.
    deletions_per_s: float | None = None
    # Its workers join over HTTP with a token. Other workers connect to the database.
    is_remote: bool = False
    # A machine must be prepared after its boot: Windlass starts the worker's program.
    has_prepare_step: bool = False
    # Machines are processes of this host, and their ids begin with its name. Those of other hosts are not listed.
    host: str | None = None
    # Hash of the API key and endpoint. Another one may list other machines. None: no key.
    key_hash: str | None = None
    # Machine choices of the fleet that the provider refused recently while another was available, with its error.
    refused_choices: tuple[tuple[str, str], ...] = ()
