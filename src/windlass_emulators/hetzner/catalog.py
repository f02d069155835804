"""Server types with their prices, locations and images.

Modelled on Hetzner's catalog of late 2025 and not kept up to date. Names, sizes and the structure of prices are
Hetzner's; the numbers are plausible. Prices are net; the gross price adds 19 % VAT.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal

CURRENCY = "EUR"
VAT_PERCENT = Decimal("19.00")
_TB = 1024**4


@dataclass(frozen=True, slots=True)
class CatalogPrice:
    net: Decimal

    @property
    def gross(self) -> Decimal:
        return self.net * (100 + VAT_PERCENT) / 100


@dataclass(frozen=True, slots=True)
class Rate:
    """Price per started hour, and the cap per calendar month."""

    hourly: CatalogPrice
    monthly: CatalogPrice


@dataclass(frozen=True, slots=True)
class Location:
    id: int
    name: str
    description: str
    country: str
    city: str
    latitude: float
    longitude: float
    network_zone: str
    included_traffic_bytes: int
    price_per_tb_traffic: CatalogPrice


@dataclass(frozen=True, slots=True)
class ServerType:
    id: int
    name: str
    cores: int
    memory_gb: float
    disk_gb: int
    cpu_type: str
    architecture: str
    category: str
    # By location name. A type without a price in a location is not offered there.
    rates: Mapping[str, Rate]
    announced_at: datetime | None = None
    unavailable_after: datetime | None = None


@dataclass(frozen=True, slots=True)
class Image:
    id: int
    name: str
    description: str
    os_flavor: str
    os_version: str
    architecture: str
    created: datetime
    disk_size_gb: int = 5


@dataclass(frozen=True, slots=True)
class HetznerCatalog:
    locations: Sequence[Location]
    server_types: Sequence[ServerType]
    images: Sequence[Image]
    # The same in every location. IPv6 is free.
    primary_ipv4: Rate
    primary_ipv6: Rate

    def location(self, id_or_name: object) -> Location | None:
        return next((each for each in self.locations if _matches(each.id, each.name, id_or_name)), None)

    def server_type(self, id_or_name: object) -> ServerType | None:
        return next((each for each in self.server_types if _matches(each.id, each.name, id_or_name)), None)

    def image(self, id_or_name: object, architecture: str) -> Image | None:
        """Find an image by id or name; among images with the same name, the one for this architecture."""
        found = [each for each in self.images if _matches(each.id, each.name, id_or_name)]
        return next((each for each in found if each.architecture == architecture), found[0] if found else None)


def _matches(own_id: int, name: str, id_or_name: object) -> bool:
    return str(id_or_name) in (str(own_id), name) and not isinstance(id_or_name, bool)


def _price(net: str) -> CatalogPrice:
    return CatalogPrice(Decimal(net))


def _rate(hourly: str, monthly: str) -> Rate:
    return Rate(_price(hourly), _price(monthly))


_EU = ("fsn1", "nbg1", "hel1")
_US = ("ash", "hil")

_LOCATIONS = (
    Location(
        1, "fsn1", "Falkenstein DC Park 1", "DE", "Falkenstein", 50.47612, 12.370071, "eu-central",
        20 * _TB, _price("1.0000"),
    ),
    Location(
        2, "nbg1", "Nuremberg DC Park 1", "DE", "Nuremberg", 49.452102, 11.076665, "eu-central",
        20 * _TB, _price("1.0000"),
    ),
    Location(
        3, "hel1", "Helsinki DC Park 1", "FI", "Helsinki", 60.169855, 24.938379, "eu-central",
        20 * _TB, _price("1.0000"),
    ),
    Location(
        4, "ash", "Ashburn, VA", "US", "Ashburn, VA", 39.045821, -77.487073, "us-east",
        1 * _TB, _price("1.0000"),
    ),
    Location(
        5, "hil", "Hillsboro, OR", "US", "Hillsboro, OR", 45.54222, -122.951924, "us-west",
        1 * _TB, _price("1.0000"),
    ),
    Location(
        6, "sin", "Singapore", "SG", "Singapore", 1.283333, 103.833333, "ap-southeast",
        _TB // 2, _price("7.4000"),
    ),
)  # fmt: skip


def _at(places: Sequence[str], hourly: str, monthly: str) -> dict[str, Rate]:
    return {place: _rate(hourly, monthly) for place in places}


_COST, _REGULAR, _ARM, _DEDICATED = "Cost-Optimized", "Regular Performance", "Cost-Optimized", "General Purpose"
_RETIRED = (datetime(2025, 10, 16, 6, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC))
_SERVER_TYPES = (
    ServerType(
        104, "cx22", 2, 4.0, 40, "shared", "x86", _COST, _at(_EU, "0.0061", "3.7900"), *_RETIRED,
    ),
    ServerType(114, "cx23", 2, 4.0, 40, "shared", "x86", _COST, _at(_EU, "0.0056", "3.4900")),
    ServerType(115, "cx33", 4, 8.0, 80, "shared", "x86", _COST, _at(_EU, "0.0088", "5.4900")),
    ServerType(116, "cx43", 8, 16.0, 160, "shared", "x86", _COST, _at(_EU, "0.0152", "9.4900")),
    ServerType(117, "cx53", 16, 32.0, 320, "shared", "x86", _COST, _at(_EU, "0.0280", "17.4900")),
    ServerType(
        22, "cpx11", 2, 2.0, 40, "shared", "x86", _REGULAR,
        _at(_US, "0.0072", "4.4900") | _at(("sin",), "0.0080", "4.9900"),
    ),
    ServerType(
        23, "cpx21", 3, 4.0, 80, "shared", "x86", _REGULAR,
        _at(_US, "0.0144", "8.9900") | _at(("sin",), "0.0168", "10.4900"),
    ),
    ServerType(
        24, "cpx31", 4, 8.0, 160, "shared", "x86", _REGULAR,
        _at(_US, "0.0256", "15.9900") | _at(("sin",), "0.0305", "18.9900"),
    ),
    ServerType(109, "cpx22", 2, 4.0, 80, "shared", "x86", _REGULAR, _at(_EU, "0.0104", "6.4900")),
    ServerType(110, "cpx32", 4, 8.0, 160, "shared", "x86", _REGULAR, _at(_EU, "0.0176", "10.9900")),
    ServerType(45, "cax11", 2, 4.0, 40, "shared", "arm", _ARM, _at(_EU, "0.0061", "3.7900")),
    ServerType(93, "cax21", 4, 8.0, 80, "shared", "arm", _ARM, _at(_EU, "0.0104", "6.4900")),
    ServerType(94, "cax31", 8, 16.0, 160, "shared", "arm", _ARM, _at(_EU, "0.0200", "12.4900")),
    ServerType(
        96, "ccx13", 2, 8.0, 80, "dedicated", "x86", _DEDICATED,
        _at(_EU, "0.0200", "12.4900") | _at(_US, "0.0208", "12.9900") | _at(("sin",), "0.0256", "15.9900"),
    ),
    ServerType(
        97, "ccx23", 4, 16.0, 160, "dedicated", "x86", _DEDICATED,
        _at(_EU, "0.0392", "24.4900") | _at(_US, "0.0401", "24.9900") | _at(("sin",), "0.0497", "30.9900"),
    ),
    ServerType(
        98, "ccx33", 8, 32.0, 240, "dedicated", "x86", _DEDICATED,
        _at(_EU, "0.0777", "48.4900") | _at(_US, "0.0785", "48.9900") | _at(("sin",), "0.0962", "59.9900"),
    ),
)  # fmt: skip

_IMAGES = (
    Image(67794396, "ubuntu-22.04", "Ubuntu 22.04", "ubuntu", "22.04", "x86", datetime(2022, 4, 21, 13, tzinfo=UTC)),
    Image(103908130, "ubuntu-22.04", "Ubuntu 22.04", "ubuntu", "22.04", "arm", datetime(2023, 3, 20, 10, tzinfo=UTC)),
    Image(114690387, "debian-12", "Debian 12", "debian", "12", "x86", datetime(2023, 6, 13, 6, tzinfo=UTC)),
    Image(114690389, "debian-12", "Debian 12", "debian", "12", "arm", datetime(2023, 6, 13, 6, tzinfo=UTC)),
    Image(161547269, "ubuntu-24.04", "Ubuntu 24.04", "ubuntu", "24.04", "x86", datetime(2024, 4, 25, 13, tzinfo=UTC)),
    Image(161547270, "ubuntu-24.04", "Ubuntu 24.04", "ubuntu", "24.04", "arm", datetime(2024, 4, 25, 13, tzinfo=UTC)),
)

DEFAULT_CATALOG = HetznerCatalog(
    _LOCATIONS, _SERVER_TYPES, _IMAGES, primary_ipv4=_rate("0.0008", "0.5000"), primary_ipv6=_rate("0.0000", "0.0000")
)
