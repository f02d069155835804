"""/catalog: what there is, for how much, and how much of it is left."""

from collections.abc import Iterable, Sequence

from windlass_emulators.http import Json
from windlass_emulators.runpod.account import EmulatedRunpodAccount
from windlass_emulators.runpod.calls import RunpodAnswer, RunpodCall
from windlass_emulators.runpod.catalog import (
    CLOUDS,
    COMMUNITY,
    COMPLIANCE,
    REGIONS,
    SECURE,
    VOLUME_TYPES,
    CpuType,
    DataCenter,
    GpuType,
    cuda_key,
)
from windlass_emulators.runpod.errors import RunpodApiError, not_found
from windlass_emulators.runpod.render import MICROS

LEVELS = ("NONE", "LOW", "MEDIUM", "HIGH")
# Pods that could be placed, from which on there is more than the level before.
_THRESHOLDS = (1, 3, 9)
_AVAILABILITY_ONLY = ("product", "count", "cloud", "countryCodes", "cudaVersions", "minCudaVersion", "vcpuCount")


# ------------------------------------------------------------------------------------------------------------- GPUs


def list_gpus(account: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    countries = call.words("countryCodes", pattern=r"[A-Z]{2}")
    gpus = account.catalog.gpus
    if countries:
        gpus = [each for each in gpus if any(_stocked(account, each, place) for place in _places(account, countries))]
    return RunpodAnswer(200, {"gpus": [_gpu(account, call, each) for each in gpus]})


def get_gpu(account: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    gpu = account.catalog.gpu(call.id)
    if gpu is None:
        raise not_found("gpu type")
    return RunpodAnswer(200, _gpu(account, call, gpu))


def _gpu(account: EmulatedRunpodAccount, call: RunpodCall, gpu: GpuType) -> Json:
    prices = {cloud.lower(): gpu.prices_micros.get(cloud, 0) / MICROS for cloud in CLOUDS}
    if gpu.serverless_micros is not None:
        prices["serverless"] = gpu.serverless_micros / MICROS
    shown: Json = {
        "id": gpu.id,
        "name": gpu.name,
        "pool": gpu.pool,
        "manufacturer": "NVIDIA",
        "memory": gpu.memory_gb,
        "secure": SECURE in gpu.prices_micros,
        "community": COMMUNITY in gpu.prices_micros,
        "price": prices,
        "maxCount": {cloud.lower(): gpu.max_counts[cloud] for cloud in CLOUDS},
    }
    if _wants_availability(call, ("POD", "CLUSTER", "SERVERLESS")):
        shown |= _gpu_stock(account, call, gpu)
    return shown


def _wants_availability(call: RunpodCall, products: Sequence[str]) -> bool:
    """Raises Problem where the query contradicts itself."""
    includes = call.words("include", ("AVAILABILITY",))
    has_product = bool(call.words("product", products))
    if not includes:
        if orphan := next((name for name in _AVAILABILITY_ONLY if call.has(name)), None):
            raise RunpodApiError(400, f"{orphan} is valid only with include=AVAILABILITY")
        return False
    if not has_product:
        raise RunpodApiError(400, "include=AVAILABILITY requires product")
    return True


def _gpu_stock(account: EmulatedRunpodAccount, call: RunpodCall, gpu: GpuType) -> Json:
    count = call.number("count", 1, least=1)
    cloud = call.one_of("cloud", CLOUDS, SECURE)
    places = _places(account, call.words("countryCodes", pattern=r"[A-Z]{2}"))
    exact = call.words("cudaVersions", pattern=r"\d+\.\d+")
    least = call.words("minCudaVersion", pattern=r"\d+(\.\d+)?")
    if exact and least:
        raise RunpodApiError(400, "cudaVersions and minCudaVersion are mutually exclusive")

    def suits(version: str) -> bool:
        return (not exact or version in exact) and (not least or cuda_key(version) >= cuda_key(least[0]))

    stocked = [each for each in places if _stocked(account, gpu, each) and any(map(suits, each.cuda_versions))]
    left = {each.id: gpu_pods_left(account, gpu, cloud, each, count) for each in stocked}
    versions = sorted({version for each in stocked for version in each.cuda_versions if suits(version)}, key=cuda_key)
    shown: Json = {"availability": level(sum(left.values()))}
    if any(left.values()):
        shown["dataCenters"] = [
            {"id": each.id, "name": each.name, "availability": level(left[each.id])} for each in stocked
        ]
    if versions:
        shown["cudaVersions"] = [
            {"version": each, "available": any(left[place.id] for place in stocked if each in place.cuda_versions)}
            for each in versions
        ]
    return shown


def gpu_pods_left(account: EmulatedRunpodAccount, gpu: GpuType, cloud: str, place: DataCenter, count: int = 1) -> int:
    shortage = account.faults.shortage(gpu.id, cloud, place.id)
    if (shortage and shortage.is_announced) or count > gpu.max_counts[cloud]:
        return 0
    return account.free_gpus(gpu, cloud, place.id) // count


def level(pods: int) -> str:
    return LEVELS[sum(pods >= threshold for threshold in _THRESHOLDS)]


def _stocked(account: EmulatedRunpodAccount, gpu: GpuType, place: DataCenter) -> bool:
    return any((gpu.id, cloud, place.id) in account.catalog.stock for cloud in CLOUDS)


def _places(account: EmulatedRunpodAccount, countries: Sequence[str]) -> list[DataCenter]:
    return [each for each in account.catalog.data_centers if not countries or each.country in countries]


# ------------------------------------------------------------------------------------------------------------- CPUs


def list_cpus(account: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    return RunpodAnswer(200, {"cpus": [_cpu(account, call, each) for each in account.catalog.cpus]})


def get_cpu(account: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    cpu = account.catalog.cpu(call.id)
    if cpu is None:
        raise not_found("cpu type")
    return RunpodAnswer(200, _cpu(account, call, cpu))


def _cpu(account: EmulatedRunpodAccount, call: RunpodCall, cpu: CpuType) -> Json:
    shown: Json = {
        "id": cpu.id,
        "name": cpu.name,
        "group": cpu.group,
        "vcpu": {"min": cpu.min_vcpu, "max": cpu.max_vcpu},
        "ramGbPerVcpu": cpu.ram_gb_per_vcpu,
        "price": {
            "securePerVcpu": cpu.secure_micros / MICROS,
            "serverlessPerVcpu": cpu.serverless_micros / MICROS,
        },
    }
    if not _wants_availability(call, ("POD", "SERVERLESS")):
        return shown
    vcpus = call.number("vcpuCount", cpu.min_vcpu, least=2)
    if vcpus & (vcpus - 1):
        raise RunpodApiError(422, None, ["query.vcpuCount: must be a power of two"])
    places = [each for each in account.catalog.data_centers if _has_cpu(account, cpu, each) and vcpus <= cpu.max_vcpu]
    shown["availability"] = "HIGH" if places else "NONE"
    if places:
        shown["dataCenters"] = [{"id": each.id, "name": each.name, "availability": "HIGH"} for each in places]
    return shown


def _has_cpu(account: EmulatedRunpodAccount, cpu: CpuType, place: DataCenter) -> bool:
    shortage = account.faults.shortage(cpu.id, SECURE, place.id)
    return not (shortage and shortage.is_announced)


# ----------------------------------------------------------------------------------------------------- data centers


def list_data_centers(account: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    regions = call.words("regions", REGIONS)
    types = set(call.words("networkVolumeTypes", VOLUME_TYPES))
    compliance = set(call.words("compliance", COMPLIANCE))
    has_network = call.flag("globalNetwork")
    found = [
        each
        for each in account.catalog.data_centers
        if (not regions or each.region in regions)
        if types <= set(each.volume_types) and compliance <= set(each.compliance)
        if has_network is None or each.has_global_network == has_network
    ]
    return RunpodAnswer(200, {"dataCenters": [_data_center(account, call, each) for each in found]})


def get_data_center(account: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    place = account.catalog.data_center(call.id)
    if place is None:
        raise not_found("data center")
    return RunpodAnswer(200, _data_center(account, call, place))


def _data_center(account: EmulatedRunpodAccount, call: RunpodCall, place: DataCenter) -> Json:
    includes = call.words("include", ("GPU_AVAILABILITY", "CPU_AVAILABILITY"))
    shown: Json = {
        "id": place.id,
        "name": place.name,
        "region": place.region,
        "globalNetwork": place.has_global_network,
        "networkVolumeTypes": list(place.volume_types),
        "compliance": list(place.compliance),
    }
    if "GPU_AVAILABILITY" in includes and (gpus := list(_gpus_of(account, place))):
        shown["gpuAvailability"] = gpus
    if "CPU_AVAILABILITY" in includes:
        shown["cpuAvailability"] = [
            {"id": each.id, "name": each.name, "availability": "HIGH" if _has_cpu(account, each, place) else "NONE"}
            for each in account.catalog.cpus
        ]
    return shown


def _gpus_of(account: EmulatedRunpodAccount, place: DataCenter) -> Iterable[Json]:
    for gpu in account.catalog.gpus:
        if _stocked(account, gpu, place):
            left = sum(gpu_pods_left(account, gpu, cloud, place) for cloud in gpu.prices_micros)
            yield {"id": gpu.id, "name": gpu.name, "availability": level(left)}
