"""The bill of every server and Primary IP.

A resource costs its hourly price for every started hour between its creation and its deletion, at least one hour, and
at most its monthly price per calendar month (UTC). An hour belongs to the month in which it starts. A Primary IP that
was created with a server is billed on that server's line, even after the server is deleted. Other Primary IPs have
lines of their own.

Amounts are in micros of the currency, net and gross. Every published price is a whole number of micros.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from windlass_emulators.hetzner.catalog import CURRENCY, CatalogPrice, Rate
from windlass_emulators.http import Json

MICROS = 1_000_000


@dataclass(slots=True)
class HetznerBillLine:
    kind: str
    id: int
    name: str
    rate: Rate
    started: datetime
    # Description, such as "cx23 in nbg1".
    what: str
    # For a Primary IP: the server it was created with.
    made_with: int | None = None
    ended: datetime | None = None


class HetznerBill:
    def __init__(self, billing_hour_s: float) -> None:
        self._hour = timedelta(seconds=billing_hour_s)
        self._lines: dict[tuple[str, int], HetznerBillLine] = {}

    def open(self, line: HetznerBillLine) -> None:
        self._lines[line.kind, line.id] = line

    def close(self, kind: str, id_: int, at: datetime) -> None:
        line = self._lines[kind, id_]
        if line.ended is None:
            line.ended = at

    def to_json(self, now: datetime) -> Json:
        servers = [self._server(line, now) for line in self._lines.values() if line.kind == "server"]
        alone = [line for line in self._lines.values() if line.kind == "primary_ip" and line.made_with is None]
        primary_ips = [self._line(line, now) for line in alone]
        return {
            "currency": CURRENCY,
            "billing_hour_s": self._hour.total_seconds(),
            "now": now.isoformat(),
            "servers": servers,
            "primary_ips": primary_ips,
            "total_micros": sum(line["micros"] for line in servers + primary_ips),
            "total_gross_micros": sum(line["gross_micros"] for line in servers + primary_ips),
        }

    def _server(self, line: HetznerBillLine, now: datetime) -> Json:
        own = self._line(line, now)
        ips = [self._line(each, now) for each in self._lines.values() if each.made_with == line.id]
        ip_micros = sum(ip["micros"] for ip in ips)
        return {
            **own,
            "server_micros": own["micros"],
            "primary_ip_micros": ip_micros,
            "micros": own["micros"] + ip_micros,
            "gross_micros": own["gross_micros"] + sum(ip["gross_micros"] for ip in ips),
        }

    def _line(self, line: HetznerBillLine, now: datetime) -> Json:
        ended = line.ended or now
        return {
            "id": line.id,
            "name": line.name,
            "what": line.what,
            "created": line.started.isoformat(),
            "deleted": line.ended.isoformat() if line.ended else None,
            "hours": sum(hours_by_month(line.started, ended, self._hour)),
            "micros": self._micros(line, ended, is_gross=False),
            "gross_micros": self._micros(line, ended, is_gross=True),
        }

    def _micros(self, line: HetznerBillLine, ended: datetime, *, is_gross: bool) -> int:
        hourly, monthly = _micros(line.rate.hourly, is_gross), _micros(line.rate.monthly, is_gross)
        return sum(min(hours * hourly, monthly) for hours in hours_by_month(line.started, ended, self._hour))


def _micros(price: CatalogPrice, is_gross: bool) -> int:
    amount: Decimal = (price.gross if is_gross else price.net) * MICROS
    if amount != int(amount):
        raise AssertionError(f"{amount} is not a whole number of micros")
    return int(amount)


def hours_by_month(started: datetime, ended: datetime, hour: timedelta) -> list[int]:
    """Started hours, one number per calendar month in which at least one of them starts. At least one hour in total."""
    total = max(1, -((started - ended) // hour))
    counts: list[int] = []
    counted, month_end = 0, started
    while counted < total:
        month_end = _next_month(month_end)
        until_then = min(total, -((started - month_end) // hour))
        counts.append(until_then - counted)
        counted = until_then
    return counts


def _next_month(moment: datetime) -> datetime:
    moment = moment.astimezone(UTC)
    year, month = (moment.year + 1, 1) if moment.month == 12 else (moment.year, moment.month + 1)
    return datetime(year, month, 1, tzinfo=UTC)
