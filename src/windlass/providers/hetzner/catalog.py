"""What servers cost and where there seem to be some, as the API publishes it. Pure: whoever asks brings the answers."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from typing import Any

from windlass.model.hetzner import Choice

_MICROS = Decimal(1_000_000)


@dataclass(frozen=True, slots=True)
class Price:
    """In micros of the currency; each part of it rounded half up, as it stands on the bill."""

    per_hour: int
    # No calendar month costs more.
    per_month: int

    def __add__(self, other: "Price") -> "Price":
        return Price(self.per_hour + other.per_hour, self.per_month + other.per_month)


@dataclass(frozen=True, slots=True)
class PriceList:
    currency: str
    servers: Mapping[Choice, Price]
    # By location.
    ipv4: Mapping[str, Price]

    def of(self, choice: Choice, *, has_ipv4: bool) -> Price | None:
        """None if any part of it is not known: half a price is no price."""
        server, address = self.servers.get(choice), self.ipv4.get(choice.location)
        if server is None or (has_ipv4 and address is None):
            return None
        return server + address if has_ipv4 and address is not None else server


def read_prices(pricing: Mapping[str, Any], kind: str) -> PriceList:
    """From the answer of GET /pricing; `kind` is net or gross. Raises KeyError, TypeError or ValueError."""
    ipv4 = [address for address in pricing["primary_ips"] if address["type"] == "ipv4"]
    return PriceList(
        currency=str(pricing["currency"]),
        servers={
            Choice(server_type["name"], price["location"]): _price(price, kind)
            for server_type in pricing["server_types"]
            for price in server_type["prices"]
        },
        ipv4={price["location"]: _price(price, kind) for address in ipv4 for price in address["prices"]},
    )


def _price(price: Mapping[str, Any], kind: str) -> Price:
    return Price(_micros(price["price_hourly"][kind]), _micros(price["price_monthly"][kind]))


def _micros(amount: str) -> int:
    try:
        return int((Decimal(amount) * _MICROS).quantize(Decimal(1), rounding=ROUND_HALF_UP))
    except InvalidOperation as error:
        raise ValueError(f"{amount!r} is no price") from error


def in_order(choices: Sequence[Choice], exhausted: Collection[Choice], unavailable: Collection[Choice]) -> list[Choice]:
    """Those worth a try: as configured, but first those that the vendor does not say are out."""
    worth = [choice for choice in choices if choice not in exhausted]
    return sorted(worth, key=lambda choice: choice in unavailable)


def named(choices: Iterable[Choice]) -> str:
    return ", ".join(map(str, choices))
