"""The past of a fleet, as simulations need it: when tasks arrived and how long they ran, and what machines did."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class TaskHistory:
    """Finished tasks by arrival, in seconds after `since`. The three sequences belong together.

    A task that was retried appears once, with its last attempt. `is_cut`: there were more, and the oldest are missing.
    """

    since: datetime
    arrivals_s: Sequence[float]
    durations_s: Sequence[float]
    queues: Sequence[str]
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class MachineRecord:
    """A machine that was requested. `boot_s` is None if it was refused or never became ready."""

    requested_at: datetime
    boot_s: float | None
    lived_s: float
    # Its start was cancelled at this age: its boot would have taken longer.
    cancelled_s: float | None = None
    is_refused: bool = False
    # It failed after it was ready.
    is_crashed: bool = False
    price_micros_per_hour: int | None = None
    currency: str | None = None
    billing_unit_s: int | None = None
