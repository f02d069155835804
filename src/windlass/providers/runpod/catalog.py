"""What pods cost and where there seem to be GPUs, as the API publishes it. Pure: whoever asks brings the answers."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from typing import Any

from windlass.model.runpod import GpuChoice

CURRENCY = "USD"
_MICROS = Decimal(1_000_000)
_NONE = "NONE"


@dataclass(frozen=True, slots=True)
class Want:
    """What one request asks for, as far as it decides whether there is any: of the rest, others may have plenty."""

    choice: GpuChoice
    gpu_count: int
    min_cuda_version: str | None
    network_volume_id: str | None


@dataclass(frozen=True, slots=True)
class Offer:
    """One GPU type in one cloud."""

    # For one GPU; None where that cloud has none of it.
    micros_per_hour: int | None
    max_count: int
    # By data center. Those that are not named have none.
    is_left: Mapping[str, bool]

    def has_left(self, data_centers: Sequence[str]) -> bool:
        return any(self.is_left.get(place, False) for place in data_centers or self.is_left)


def read_offers(answer: Mapping[str, Any], cloud: str) -> dict[str, Offer]:
    """By GPU type, from the answer of GET /catalog/gpus with AVAILABILITY for this cloud. Raises KeyError, TypeError,
    ValueError or AttributeError."""
    name = cloud.lower()
    return {
        str(gpu["id"]): Offer(
            micros_of(gpu["price"].get(name)) if gpu.get(name) else None,
            int(gpu.get("maxCount", {}).get(name, 0)),
            {str(place["id"]): place["availability"] != _NONE for place in gpu.get("dataCenters", ())},
        )
        for gpu in answer["gpus"]
    }


def micros_of(dollars: object) -> int | None:
    """None for what is no price: nothing at all, or zero, which is what a pod costs that does not run."""
    if dollars is None:
        return None
    try:
        micros = int((Decimal(str(dollars)) * _MICROS).quantize(Decimal(1), rounding=ROUND_HALF_UP))
    except InvalidOperation as error:
        raise ValueError(f"{dollars!r} is no price") from error
    return micros if micros > 0 else None


def in_order(
    choices: Sequence[GpuChoice], exhausted: Collection[GpuChoice], offers: Mapping[str, Mapping[str, Offer]]
) -> list[GpuChoice]:
    """Those worth a try: as configured, but first those that the catalog does not say are out. `offers`: by cloud."""

    def is_out(choice: GpuChoice) -> bool:
        offer = offers.get(choice.cloud, {}).get(choice.gpu)
        return offer is not None and not offer.has_left(choice.data_centers)

    return sorted((choice for choice in choices if choice not in exhausted), key=is_out)


def named(choices: Iterable[GpuChoice]) -> str:
    return ", ".join(map(str, choices))
