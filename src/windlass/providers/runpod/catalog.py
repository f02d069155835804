"""Prices and stock of GPUs, and the order in which choices are tried. Pure: it reads responses, but requests none."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.model.machine import Quote
from windlass.model.runpod import GpuChoice, RunpodSettings
from windlass.providers.money import to_micros

CURRENCY = "USD"


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


def quote(settings: RunpodSettings, offers: Offers) -> Quote | None:
    """The price of the first choice whose price is known."""
    for choice in settings.ordered:
        offer = offers.get(choice.cloud, {}).get(choice.gpu)
        if offer is not None and offer.micros_per_hour is not None:
            return Quote(str(choice), offer.micros_per_hour * settings.gpu_count, CURRENCY)
    return None


def order_choices(choices: Sequence[GpuChoice], excluded: Collection[GpuChoice], offers: Offers) -> list[GpuChoice]:
    """The choices to try, in the configured order, but those that the catalog reports out of stock last."""

    def is_out_of_stock(choice: GpuChoice) -> bool:
        offer = offers.get(choice.cloud, {}).get(choice.gpu)
        return offer is not None and not offer.is_in_stock(choice.data_centers)

    return sorted((choice for choice in choices if choice not in excluded), key=is_out_of_stock)
