"""What the emulator of every vendor is: something that goes on by a clock, asked by one caller at a time.

How a vendor answers is its own emulator's to say.
"""

import threading
from collections import deque
from collections.abc import Callable
from datetime import datetime
from typing import Generic, Protocol, TypeVar

from windlass_emulators.http import Json

# Remembered: more than a day's, at the rate that any vendor allows.
MAX_REQUESTS = 100_000


class _Ledger(Protocol):
    def to_json(self, now: datetime) -> Json: ...


class _Customer(Protocol):
    """What a vendor keeps for one customer: a project, an account."""

    now: datetime

    @property
    def ledger(self) -> _Ledger: ...

    def advance(self, to: datetime, /) -> None: ...

    def next_due(self) -> datetime | None: ...


CustomerT = TypeVar("CustomerT", bound=_Customer)
FaultsT = TypeVar("FaultsT")


class VendorEmulator(Generic[CustomerT, FaultsT]):
    def __init__(self, clock: Callable[[], datetime], customer: CustomerT, faults: FaultsT) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._customer = customer
        self._faults = faults
        # The latest requests, as (when, method, path): what a client's thrift is judged by.
        self.requests: deque[tuple[datetime, str, str]] = deque(maxlen=MAX_REQUESTS)

    @property
    def faults(self) -> FaultsT:
        """Trouble from now on. What was due before it has happened without it."""
        self.settle()
        return self._faults

    def settle(self) -> None:
        with self._lock:
            self._customer.advance(self._clock())

    def next_due(self) -> datetime | None:
        with self._lock:
            return self._customer.next_due()

    def bill(self) -> Json:
        """What the customer owes, by now."""
        with self._lock:
            self.settle()
            return self._customer.ledger.to_json(self._customer.now)
