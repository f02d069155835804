"""Prices and stock of GPUs, and the order in which choices are tried. Pure: it reads responses, but requests none."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.model.machine import Quote
from windlass.model.runpod import GpuChoice, RunpodSettings
from windlass.providers.money import to_micros

CURRENCY = "USD"
# Published price of a pod's disks while it exists: 0.10 USD per GB and month of 30 days.
DISK_MICROS_PER_GB_MONTH = 100_000
_HOURS_PER_MONTH = 30 * 24
# Published prices of network volumes per GB and month.
_VOLUME_MICROS, _LARGE_VOLUME_MICROS, _LARGE_VOLUME_GB = 70_000, 50_000, 1_000
# Runpod's own size of a container disk if neither the settings nor a template name one.
DEFAULT_DISK_GB = 50


@dataclass(frozen=True, slots=True)
class CapacityKey:
    """The parts of a request that decide whether there is capacity for it."""

    choice: GpuChoice
    gpu_count: int
    min_cuda_version: str | None
    network_volume_id: str | None


@dataclass(frozen=True, slots=True)
class Offer:
    """One GPU type in one cloud."""

    # For one GPU. None if the cloud does not offer it.
    micros_per_hour: int | None
    max_count: int
    # By data center. A data center that is missing has none.
    in_stock: Mapping[str, bool]

    def is_in_stock(self, data_centers: Sequence[str]) -> bool:
        """Whether any of these data centers has some; any at all if none are named."""
        return any(self.in_stock.get(place, False) for place in data_centers or self.in_stock)


# By cloud and GPU type.
Offers = Mapping[str, Mapping[str, Offer]]


def offers_path(cloud: str, gpu_count: int) -> str:
    return f"/catalog/gpus?include=AVAILABILITY&product=POD&cloud={cloud}&count={gpu_count}"


def read_offers(response: Mapping[str, Any], cloud: str) -> dict[str, Offer]:
    """Offers by GPU type, from the response to `offers_path`. Raises KeyError, TypeError, ValueError or
    AttributeError."""
    name = cloud.lower()
    return {
        str(gpu["id"]): Offer(
            read_price(gpu["price"].get(name)) if gpu.get(name) else None,
            int(gpu.get("maxCount", {}).get(name, 0)),
            {str(place["id"]): place["availability"] != "NONE" for place in gpu.get("dataCenters", ())},
        )
        for gpu in response["gpus"]
    }


def read_price(dollars: object) -> int | None:
    """Micros per hour. None if missing or zero, which is the price of a pod that does not run. Raises ValueError."""
    micros = to_micros(dollars) if dollars is not None else 0
    return micros if micros > 0 else None


def disk_price(size_gb: int) -> int:
    """Micros per hour of a pod's disks, rounded half up. The price that the API reports for a pod leaves them out."""
    return (2 * size_gb * DISK_MICROS_PER_GB_MONTH + _HOURS_PER_MONTH) // (2 * _HOURS_PER_MONTH)


def volume_price(size_gb: int, *, is_fast: bool) -> int:
    """Micros per hour of a network volume, rounded half up: 0.07 USD per GB and month, 0.05 beyond the first TB, and
    twice that for the fast kind."""
    first_gb = min(size_gb, _LARGE_VOLUME_GB)
    monthly = first_gb * _VOLUME_MICROS + (size_gb - first_gb) * _LARGE_VOLUME_MICROS
    monthly *= 2 if is_fast else 1
    return (2 * monthly + _HOURS_PER_MONTH) // (2 * _HOURS_PER_MONTH)


def disk_gb_of(pod: Mapping[str, Any]) -> int:
    """The container's disk and the pod's own volume. A network volume is not a disk of the pod."""
    persistent = (pod.get("mounts") or {}).get("persistent") or {}
    sizes = (pod.get("disk"), persistent.get("size") if isinstance(persistent, Mapping) else None)
    return sum(size for size in sizes if isinstance(size, int) and size > 0)


def quote(settings: RunpodSettings, offers: Offers) -> Quote | None:
    """The price of the first choice whose price is known."""
    for choice in settings.ordered:
        offer = offers.get(choice.cloud, {}).get(choice.gpu)
        if offer is not None and offer.micros_per_hour is not None:
            gpus = offer.micros_per_hour * settings.gpu_count
            return Quote(str(choice), gpus + disk_price(settings.disk_gb or DEFAULT_DISK_GB), CURRENCY)
    return None


def order_choices(choices: Sequence[GpuChoice], excluded: Collection[GpuChoice], offers: Offers) -> list[GpuChoice]:
    """The choices to try, in the configured order, but those that the catalog reports out of stock last."""

    def is_out_of_stock(choice: GpuChoice) -> bool:
        offer = offers.get(choice.cloud, {}).get(choice.gpu)
        return offer is not None and not offer.is_in_stock(choice.data_centers)

    return sorted((choice for choice in choices if choice not in excluded), key=is_out_of_stock)
