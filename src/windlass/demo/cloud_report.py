"""What demonstrations on rented machines promise about money, and whether it was kept: by the vendor's bill."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from windlass.demo.report import DemoReport
from windlass.model.money import with_currency


class MachineLine(Protocol):
    """A line of the vendor's bill, with what our ledger has for it."""

    @property
    def bill_micros(self) -> int: ...

    @property
    def ledger_micros(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RentedReport(DemoReport):
    bill_micros: int
    ledger_micros: int
    currency: str
    requests: int

    headings: ClassVar[tuple[str, ...]] = ()
    numbers: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def machines(self) -> Sequence[MachineLine]: ...

    @abstractmethod
    def table(self) -> list[tuple[object, ...]]:
        """The bill, line by line, under `headings`."""

    def promises(self) -> dict[str, bool]:
        unequal = sum(line.bill_micros != line.ledger_micros for line in self.machines())
        return {
            f"{self.complete} of {self.enqueued} tasks are complete": self.complete == self.enqueued,
            **DemoReport.promises(self),
            f"{self.workers_left} workers are left": self.workers_left == 0,
            f"the ledgers differ about {unequal} machines": not unequal,
            f"the bill is {self.bill_micros} micros and our ledger has {self.ledger_micros}": self.bill_micros
            == self.ledger_micros,
        }

    def money_lines(self) -> list[tuple[str, str]]:
        return [
            ("the vendor's bill", f"{with_currency(self.bill_micros, self.currency)} ({self.bill_micros:,} micros)"),
            ("our ledger", f"{with_currency(self.ledger_micros, self.currency)} ({self.ledger_micros:,} micros)"),
            ("requests to the API", f"{self.requests} in {self.took_s:.0f} s"),
        ]
