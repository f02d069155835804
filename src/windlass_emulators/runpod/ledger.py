"""The bill: what every pod and every network volume has cost so far.

A pod costs its hourly rate by the second for as long as its `cost` is not zero: from its creation on, while it is
provisioned, starts and runs, or is in error, until it is stopped or deleted. Every started second counts. A network
volume costs its GB by the second from its creation to its deletion. Disks of pods are not billed here.

Money is in micros of a dollar. A line is rounded once, half up, so that seconds' fractions never add up.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from fractions import Fraction

from windlass_emulators.http import Json
from windlass_emulators.runpod.catalog import CURRENCY, HIGH_PERFORMANCE

HOUR_S = 3600
MONTH_S = 30 * 24 * HOUR_S
# Per GB and month: the first TB, and what is beyond it.
VOLUME_MICROS, LARGE_VOLUME_MICROS, LARGE_GB = 70_000, 50_000, 1_000
HIGH_PERFORMANCE_FACTOR = 2
_SECOND = timedelta(seconds=1)

GPU, CPU, VOLUME = "gpu", "cpu", "network_volume"


@dataclass(slots=True)
class Stretch:
    """A time in which the rate did not change."""

    started: datetime
    micros_per_hour: Fraction
    ended: datetime | None = None

    def seconds(self, now: datetime, since: datetime | None = None, until: datetime | None = None) -> int:
        """Started ones, of those that begin within a span of time."""
        ended = self.ended or now
        last = _started_seconds(self.started, min(ended, until) if until else ended)
        first = _started_seconds(self.started, since) if since else 0
        return max(0, last - first)


def _started_seconds(started: datetime, until: datetime) -> int:
    return max(0, -((started - until) // _SECOND))


@dataclass(slots=True)
class RunpodBillLine:
    kind: str
    id: str
    name: str
    # What was rented, in words: "1x NVIDIA L40S, SECURE, EU-RO-1".
    what: str
    created: datetime
    stretches: list[Stretch] = field(default_factory=list)
    deleted: datetime | None = None
    is_high_performance: bool = False

    def exact_micros(self, now: datetime, since: datetime | None = None, until: datetime | None = None) -> Fraction:
        parts = (each.seconds(now, since, until) * each.micros_per_hour for each in self.stretches)
        return sum(parts, Fraction()) / HOUR_S

    def micros(self, now: datetime) -> int:
        return rounded(self.exact_micros(now))


def rounded(micros: Fraction) -> int:
    return int(micros + Fraction(1, 2))


class RunpodBill:
    def __init__(self) -> None:
        self._lines: dict[str, RunpodBillLine] = {}

    def open(self, line: RunpodBillLine) -> None:
        self._lines[line.id] = line

    def set_rate(self, id_: str, micros_per_hour: Fraction, at: datetime) -> None:
        """Zero: it costs nothing from now on."""
        line = self._lines[id_]
        if line.stretches and line.stretches[-1].ended is None:
            line.stretches[-1].ended = at
        if micros_per_hour:
            line.stretches.append(Stretch(at, micros_per_hour))

    def close(self, id_: str, at: datetime) -> None:
        self.set_rate(id_, Fraction(), at)
        self._lines[id_].deleted = at

    def lines(self, *kinds: str) -> Sequence[RunpodBillLine]:
        return [line for line in self._lines.values() if line.kind in kinds]

    def micros_of(self, id_: str, now: datetime) -> int:
        return self._lines[id_].micros(now)

    def to_json(self, now: datetime) -> Json:
        pods = list(self._shown(now, GPU, CPU))
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
                "seconds": sum(each.seconds(now) for each in line.stretches),
                "micros": line.micros(now),
            }


def volume_rate(size_gb: int, type_: str) -> Fraction:
    """Micros per hour."""
    monthly = min(size_gb, LARGE_GB) * VOLUME_MICROS + max(0, size_gb - LARGE_GB) * LARGE_VOLUME_MICROS
    return Fraction(monthly * (HIGH_PERFORMANCE_FACTOR if type_ == HIGH_PERFORMANCE else 1) * HOUR_S, MONTH_S)
