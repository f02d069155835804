"""A machine's meter, as a person reads it: what it has cost, and how much of what is paid is left. Pure."""

from dataclasses import dataclass
from datetime import datetime

from windlass.model.cost import Bill
from windlass.policy.billing import cost, unit_end


@dataclass(frozen=True, slots=True)
class Meter:
    currency: str
    cost_micros: int
    micros_per_hour: int
    # Until then it is paid. None: it is gone.
    paid_until: datetime | None
    left_s: float | None


def read_meter(bill: Bill, now: datetime) -> Meter:
    tariff = bill.tariff
    paid_until = unit_end(tariff.unit_s, bill.since, now) if bill.until is None else None
    return Meter(
        currency=tariff.currency,
        cost_micros=cost(tariff, bill.since, bill.until or now),
        micros_per_hour=tariff.price_micros_per_hour,
        paid_until=paid_until,
        left_s=(paid_until - now).total_seconds() if paid_until is not None else None,
    )
