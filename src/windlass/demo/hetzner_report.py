"""What `windlass demo --on hetzner` promises, and whether it was kept: by the database, and by the vendor's bill."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from windlass.cli.output import duration
from windlass.demo.cloud_report import RentedReport

CRASHED = "CRASHED"
# Why a worker leaves whom nobody needs.
PAID_TIME_IS_OVER = "BILLING_HOUR_END"
# Until this share of an hour is over, nobody is let go for want of work.
KEPT_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class ServerLine:
    """A line of the vendor's bill, with what our ledger has for it."""

    server_id: int
    # None: no worker of ours had it.
    worker_id: str | None
    ended_as: str | None
    lived_s: float
    hours: int
    bill_micros: int
    ledger_micros: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HetznerReport(RentedReport):
    servers: list[ServerLine]
    servers_left: int
    addresses_left: int
    hour_s: int

    headings: ClassVar[tuple[str, ...]] = (
        "server", "worker", "ended as", "lived", "hours", "bill, micros", "ledger, micros",
    )  # fmt: skip
    numbers: ClassVar[tuple[str, ...]] = ("lived", "hours", "bill, micros", "ledger, micros")

    def machines(self) -> Sequence[ServerLine]:
        return self.servers

    @property
    def crashed(self) -> list[ServerLine]:
        return [line for line in self.servers if line.ended_as == CRASHED]

    @property
    def kept(self) -> list[ServerLine]:
        return [line for line in self.servers if line.ended_as == PAID_TIME_IS_OVER]

    def promises(self) -> dict[str, bool]:
        unused_s = (1 - KEPT_SHARE) * self.hour_s
        early = [line for line in self.kept if line.hours * self.hour_s - line.lived_s > unused_s]
        return {
            **RentedReport.promises(self),
            "no server was crashed": bool(self.crashed),
            "the crashed server was not replaced": len(self.servers) > max(1, len(self.crashed)),
            "no server was kept until its hour was nearly over": bool(self.kept),
            f"servers {_numbers(early)} were deleted when most of their hour was still paid": not early,
            f"{self.servers_left} servers and {self.addresses_left} Primary IPs are left": not (
                self.servers_left or self.addresses_left
            ),
        }

    def lines(self) -> list[tuple[str, str]]:
        crashed, hours = len(self.crashed), sum(line.hours for line in self.servers)
        deleted = len(self.servers) - self.servers_left
        return [
            *RentedReport.lines(self),
            (
                "servers",
                f"{len(self.servers)} hired, {crashed} crashed, {deleted} deleted, {self.servers_left or 'none'} left",
            ),
            ("crashed", f"{self.killed_worker_id}, ended as {self.worker_ended_as}"),
            self.recovery(),
            ("paid hours", f"{hours}, of {self.hour_s} s each"),
            *self.money_lines(),
        ]

    def table(self) -> list[tuple[object, ...]]:
        return [
            (
                line.server_id,
                line.worker_id,
                line.ended_as,
                duration(line.lived_s),
                line.hours,
                f"{line.bill_micros:,}",
                f"{line.ledger_micros:,}",
            )
            for line in self.servers
        ]


def _numbers(lines: list[ServerLine]) -> str:
    return ", ".join(str(line.server_id) for line in lines)
