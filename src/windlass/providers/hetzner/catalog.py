"""What servers cost and where there seem to be some, as the API publishes it. Pure: whoever asks brings the answers."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from typing import Any

from windlass.model.cost import PricePart
from windlass.model.hetzner import Choice

_MICROS = Decimal(1_000_000)


@dataclass(frozen=True, slots=True)
class PriceList:
    """In micros of the currency; each part rounded half up, as it stands on the bill."""

    currency: str
    servers: Mapping[Choice, PricePart]
    # By location.
    ipv4: Mapping[str, PricePart]

    def of(self, choice: Choice, *, has_ipv4: bool) -> tuple[PricePart, ...]:
        """What is paid for a server, and for its address. Nothing if any of it is not known: half a price is none."""
        server, address = self.servers.get(choice), self.ipv4.get(choice.location)
        if server is None or (has_ipv4 and address is None):
            return ()
        return (server, address) if has_ipv4 and address is not None else (server,)


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


def _price(price: Mapping[str, Any], kind: str) -> PricePart:
    return PricePart(_micros(price["price_hourly"][kind]), _micros(price["price_monthly"][kind]))


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
