"""A machine: what a provider bills. A pod, a server, a process."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from windlass.model.cost import PricePart


class MachineState(StrEnum):
    BOOTING = "booting"  # exists, and is billed, but cannot run anything yet
    RUNNING = "running"
    EXITED = "exited"  # still listed, will never run again: a process that ended, a pod that stopped


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine that carries our tags. `name` is the id of the worker it was made for."""

    id: str
    name: str
    state: MachineState
    created_at: datetime | None = None
    address: str | None = None
    instance_type: str | None = None
    place: str | None = None
    price_micros_per_hour: int | None = None
    # What the price is made of, where the provider caps a calendar month of each.
    price_parts: tuple[PricePart, ...] = ()
    currency: str | None = None
    # What the provider says about why it exited, for the event.
    note: str | None = None


@dataclass(frozen=True, slots=True)
class MachineRequest:
    """What to hire. `name` is unique for ever and is the idempotency key of the call."""

    name: str
    fleet: str
    slot: int
    # What a machine that is to work over HTTP shows to join, once. In memory and on the machine, nowhere else.
    join_token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Volume:
    """Storage that a fleet's machines share."""

    id: str
    size_gb: int


@dataclass(frozen=True, slots=True)
class Preparation:
    """That a machine's worker was started. `host_key`: whom it was that let us in, to be recognised again."""

    host_key: str | None = None


@dataclass(frozen=True, slots=True)
class ProviderTraits:
    """What the control loop must know of a provider to judge what it says."""

    # For how long a machine may be missing from a complete list before it counts as gone. 0: the list is the truth.
    absence_grace_s: float = 0.0
    # How long after a create whose answer was lost its machine may still appear.
    creation_lateness_s: float = 0.0
    # For how long a machine with our tags and no row is left alone: its row may belong to a newer leader.
    orphan_grace_s: float = 0.0
    # Time is paid in whole units of this length, the first from the machine's creation: 3600 for a started hour.
    billing_unit_s: int = 1
    # How fast machines can be deleted, where that is limited: many that end together must begin early. None: at once.
    deletions_per_s: float | None = None
    # Its machines reach the control plane over HTTP and need a join token; others speak to the database.
    is_remote: bool = False
    # Something is to be done between the boot of a machine and the start of the worker's program.
    has_prepare_step: bool = False
    # Its machines are those of one host, and their ids begin with its name: from here, no others can be seen or missed.
    host: str | None = None
    # A hash of the key that machines are rented with, and of where: with another, others may be listed. None: no key.
    key_hash: str | None = None
    # Which of a fleet's choices of machine it has refused lately, while another could be had, and in which words:
    # whoever wrote the list should know that the rest of it is used.
    refused_choices: tuple[tuple[str, str], ...] = ()
