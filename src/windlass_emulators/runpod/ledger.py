"""The bill of every pod and network volume.

A pod costs its hourly rate by the started second, from its creation until it is stopped or deleted: also while it is
`PROVISIONING`, `STARTING` or in `ERROR`. A network volume costs its GB by the second, from its creation to its
deletion. The disks of a pod, its container's and its own volume, cost their GB in addition to the hourly rate; the rate
that a pod shows leaves them out.

Amounts are in micros of a dollar. Each line is rounded once, half up.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from fractions import Fraction

from windlass_emulators.http import Json
from windlass_emulators.runpod.catalog import CURRENCY, HIGH_PERFORMANCE

HOUR_S = 3600
MONTH_S = 30 * 24 * HOUR_S
# Per GB and month: for the first TB, and beyond it.
VOLUME_MICROS, LARGE_VOLUME_MICROS, LARGE_GB = 70_000, 50_000, 1_000
HIGH_PERFORMANCE_FACTOR = 2
# Per GB and month, for the disks of a pod that is not stopped.
DISK_MICROS = 100_000
_SECOND = timedelta(seconds=1)

POD, VOLUME = "pod", "network_volume"


@dataclass(slots=True)
class RatePeriod:
    """A period with a constant rate."""

    started: datetime
    micros_per_hour: Fraction
    # The part of the rate that is for disks.
    disks: int = 0
    ended: datetime | None = None

    def seconds(self, now: datetime) -> int:
        """Started seconds."""
        return max(0, -((self.started - (self.ended or now)) // _SECOND))


@dataclass(slots=True)
class RunpodBillLine:
    kind: str
    id: str
    name: str
    # Description, such as "1x NVIDIA L40S, SECURE, EU-RO-1".
    what: str
    created: datetime
    periods: list[RatePeriod] = field(default_factory=list)
    deleted: datetime | None = None

    def micros(self, now: datetime) -> int:
        return rounded(sum((each.seconds(now) * each.micros_per_hour for each in self.periods), Fraction()) / HOUR_S)

    def disk_micros(self, now: datetime) -> int:
        return rounded(Fraction(sum(each.seconds(now) * each.disks for each in self.periods), HOUR_S))


def rounded(micros: Fraction) -> int:
    return int(micros + Fraction(1, 2))


class RunpodBill:
    def __init__(self) -> None:
        self._lines: dict[str, RunpodBillLine] = {}

    def open(self, line: RunpodBillLine) -> None:
        self._lines[line.id] = line

    def set_rate(self, id_: str, micros_per_hour: Fraction, at: datetime, disks: int = 0) -> None:
        """Change the rate. Zero ends the billing."""
        line = self._lines[id_]
        if line.periods and line.periods[-1].ended is None:
            line.periods[-1].ended = at
        if micros_per_hour:
            line.periods.append(RatePeriod(at, micros_per_hour, disks))

    def close(self, id_: str, at: datetime) -> None:
        self.set_rate(id_, Fraction(), at)
        self._lines[id_].deleted = at

    def lines(self, *kinds: str) -> Sequence[RunpodBillLine]:
        return [line for line in self._lines.values() if line.kind in kinds]

    def to_json(self, now: datetime) -> Json:
        pods = list(self._shown(now, POD))
        volumes = list(self._shown(now, VOLUME))
        return {
            "currency": CURRENCY,
            "now": now.isoformat(),
            "pods": pods,
            "network_volumes": volumes,
            "pods_micros": sum(line["micros"] for line in pods),
            "total_micros": sum(line["micros"] for line in (*pods, *volumes)),
        }

    def _shown(self, now: datetime, *kinds: str) -> Iterator[Json]:
        for line in self.lines(*kinds):
            yield {
                "id": line.id,
                "name": line.name,
                "what": line.what,
                "created": line.created.isoformat(),
                "deleted": line.deleted.isoformat() if line.deleted else None,
                "seconds": sum(each.seconds(now) for each in line.periods),
                "micros": line.micros(now),
                "disk_micros": line.disk_micros(now),
            }


def disk_rate(size_gb: int) -> int:
    """Micros per hour of a pod's disks, in whole micros."""
    return rounded(Fraction(size_gb * DISK_MICROS * HOUR_S, MONTH_S))


def volume_rate(size_gb: int, type_: str) -> Fraction:
    """Micros per hour."""
    monthly = min(size_gb, LARGE_GB) * VOLUME_MICROS + max(0, size_gb - LARGE_GB) * LARGE_VOLUME_MICROS
    return Fraction(monthly * (HIGH_PERFORMANCE_FACTOR if type_ == HIGH_PERFORMANCE else 1) * HOUR_S, MONTH_S)
