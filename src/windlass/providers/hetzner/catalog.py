"""Prices of servers and the order in which choices are tried. Pure: it reads responses, but requests none."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.model.cost import PricePart
from windlass.model.hetzner import HOUR_S, Choice, HetznerSettings
from windlass.model.machine import Quote
from windlass.providers.money import to_micros


@dataclass(frozen=True, slots=True)
class PriceList:
    """In micros of the currency. Each part is rounded half up, as on the vendor's bill."""

    currency: str
    servers: Mapping[Choice, PricePart]
    # By location.
    ipv4: Mapping[str, PricePart]

    def price_parts(self, choice: Choice, *, has_ipv4: bool) -> tuple[PricePart, ...]:
        """The price of a server and of its IPv4 address. Empty if either is unknown."""
        server, address = self.servers.get(choice), self.ipv4.get(choice.location)
        if server is None or (has_ipv4 and address is None):
            return ()
        return (server, address) if has_ipv4 and address is not None else (server,)


def quote(settings: HetznerSettings, prices: PriceList | None) -> Quote | None:
    """The price per real hour of the first choice whose price is known."""
    if prices is None:
        return None
    for choice in settings.ordered:
        parts = prices.price_parts(choice, has_ipv4=settings.is_ipv4_on)
        if parts:
            # An emulator with shorter billing hours charges the hourly price for each of them.
            hours = HOUR_S // settings.billing_hour_s
            micros = sum(part.price_micros_per_hour for part in parts) * hours
            return Quote(str(choice), micros, prices.currency)
    return None


def read_prices(pricing: Mapping[str, Any], kind: str) -> PriceList:
    """From the response of GET /pricing; `kind` is net or gross. Raises KeyError, TypeError or ValueError."""
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
    return PricePart(to_micros(price["price_hourly"][kind]), to_micros(price["price_monthly"][kind]))


def order_choices(
    choices: Sequence[Choice], excluded: Collection[Choice], out_of_stock: Collection[Choice]
) -> list[Choice]:
    """The choices to try, in the configured order, but those that the vendor reports out of stock last."""
    return sorted((choice for choice in choices if choice not in excluded), key=lambda choice: choice in out_of_stock)
