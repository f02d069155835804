"""GPU types and data centers with prices and stock.

Modelled on Runpod's catalog of 2026 and not kept up to date. Names, sizes and the structure of prices are Runpod's; the
numbers are plausible. Prices are micros of a dollar per hour.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CURRENCY = "USD"
SECURE, COMMUNITY = "SECURE", "COMMUNITY"
CLOUDS = (SECURE, COMMUNITY)
STANDARD, HIGH_PERFORMANCE = "STANDARD", "HIGH_PERFORMANCE"


@dataclass(frozen=True, slots=True)
class GpuType:
    id: str
    name: str
    pool: str | None
    memory_gb: int
    # The number that the driver reports.
    vram_mb: int
    # By cloud. A type without a price is not offered there.
    prices_micros: Mapping[str, int]
    max_counts: Mapping[str, int]
    serverless_micros: int | None = None


@dataclass(frozen=True, slots=True)
class DataCenter:
    id: str
    name: str
    country: str
    volume_types: tuple[str, ...]
    # Versions of its machines, in ascending order.
    cuda_versions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunpodCatalog:
    gpus: Sequence[GpuType]
    data_centers: Sequence[DataCenter]
    # Number of GPUs by type, cloud and data center.
    stock: Mapping[tuple[str, str, str], int]

    def gpu(self, id_: str) -> GpuType | None:
        return next((each for each in self.gpus if each.id == id_), None)

    def data_center(self, id_: str) -> DataCenter | None:
        return next((each for each in self.data_centers if each.id == id_), None)


def cuda_key(version: str) -> tuple[int, ...]:
    """For numeric comparison: 12.11 is newer than 12.2."""
    return tuple(int(part) for part in version.split("."))


def _gpu(
    id_: str, name: str, pool: str | None, memory_gb: int, vram_mb: int, secure: float, community: float, most: int
) -> GpuType:
    clouds = {SECURE: secure, COMMUNITY: community}
    prices = {cloud: round(price * 1_000_000) for cloud, price in clouds.items() if price}
    serverless = None if pool is None else round(secure * 2_500_000)
    counts = {SECURE: most if secure else 0, COMMUNITY: most // 2 if community else 0}
    return GpuType(id_, name, pool, memory_gb, vram_mb, prices, counts, serverless)


_GPUS = (
    _gpu("NVIDIA GeForce RTX 3090", "RTX 3090", "AMPERE_24", 24, 24_576, 0.46, 0.22, 8),
    _gpu("NVIDIA GeForce RTX 4090", "RTX 4090", "ADA_24", 24, 24_564, 0.69, 0.34, 8),
    _gpu("NVIDIA GeForce RTX 5090", "RTX 5090", "ADA_32_PRO", 32, 32_607, 0.99, 0.69, 8),
    _gpu("NVIDIA RTX A4000", "RTX A4000", "AMPERE_16", 16, 16_376, 0.25, 0.17, 8),
    _gpu("NVIDIA RTX A5000", "RTX A5000", "AMPERE_24", 24, 24_564, 0.27, 0.16, 8),
    _gpu("NVIDIA RTX A6000", "RTX A6000", "AMPERE_48", 48, 49_140, 0.49, 0.33, 8),
    _gpu("NVIDIA L40S", "L40S", "ADA_48_PRO", 48, 46_068, 0.86, 0.79, 8),
    _gpu("NVIDIA A100 80GB PCIe", "A100 PCIe", "AMPERE_80", 80, 81_920, 1.64, 1.19, 8),
    _gpu("NVIDIA H100 80GB HBM3", "H100 SXM", "ADA_80_PRO", 80, 81_559, 2.69, 0.0, 8),
    _gpu("NVIDIA H200", "H200 SXM", None, 141, 143_771, 3.59, 0.0, 8),
)

_ALL_CUDA = ("12.4", "12.6", "12.8", "13.0")
_BOTH = (STANDARD, HIGH_PERFORMANCE)
_DATA_CENTERS = (
    DataCenter("US-KS-2", "US Kansas 2", "US", _BOTH, _ALL_CUDA),
    DataCenter("US-TX-3", "US Texas 3", "US", (STANDARD,), _ALL_CUDA),
    DataCenter("CA-MTL-3", "CA Montreal 3", "CA", (STANDARD,), _ALL_CUDA[:3]),
    DataCenter("EU-RO-1", "EU Romania 1", "RO", _BOTH, _ALL_CUDA),
    DataCenter("EU-CZ-1", "EU Czechia 1", "CZ", (STANDARD,), _ALL_CUDA[:3]),
    DataCenter("EUR-IS-1", "EUR Iceland 1", "IS", (STANDARD,), _ALL_CUDA),
    DataCenter("AP-JP-1", "AP Japan 1", "JP", (), _ALL_CUDA[:2]),
)


def _stock() -> dict[tuple[str, str, str], int]:
    """Plenty of small GPUs everywhere; large GPUs are scarce and in few data centers."""
    plenty = {gpu.id: 64 if gpu.memory_gb <= 48 else 16 for gpu in _GPUS}
    return {
        (gpu.id, cloud, place.id): plenty[gpu.id]
        for gpu in _GPUS
        for place in _DATA_CENTERS
        for cloud in gpu.prices_micros
        if gpu.memory_gb <= 48 or place.id in ("US-KS-2", "EU-RO-1", "EUR-IS-1")
    }


DEFAULT_CATALOG = RunpodCatalog(_GPUS, _DATA_CENTERS, _stock())
