"""/catalog/gpus: GPU types with their prices and, on request, their availability."""

from collections.abc import Sequence

from windlass_emulators.http import ApiCall, Json, Response, json_response
from windlass_emulators.runpod.account import EmulatedRunpodAccount
from windlass_emulators.runpod.catalog import CLOUDS, COMMUNITY, SECURE, DataCenter, GpuType, cuda_key
from windlass_emulators.runpod.errors import RunpodApiError, not_found
from windlass_emulators.runpod.resource_json import MICROS
from windlass_emulators.runpod.validation import query_choice, query_number, query_words

LEVELS = ("NONE", "LOW", "MEDIUM", "HIGH")
# Number of further pods at which the level rises to the next one.
_THRESHOLDS = (1, 3, 9)
_AVAILABILITY_ONLY = ("product", "count", "cloud", "countryCodes", "cudaVersions", "minCudaVersion")


def list_gpus(account: EmulatedRunpodAccount, call: ApiCall) -> Response:
    places = _places(account, call)
    gpus = account.catalog.gpus
    if "countryCodes" in call.query:
        gpus = [each for each in gpus if any(_is_stocked(account, each, place) for place in places)]
    return json_response(200, {"gpus": [_render(account, call, each, places) for each in gpus]})


def get_gpu(account: EmulatedRunpodAccount, call: ApiCall) -> Response:
    gpu = account.catalog.gpu(call.params["id"])
    if gpu is None:
        raise not_found("gpu type")
    return json_response(200, _render(account, call, gpu, _places(account, call)))


def _render(account: EmulatedRunpodAccount, call: ApiCall, gpu: GpuType, places: Sequence[DataCenter]) -> Json:
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
    is_included = bool(query_words(call, "include", ("AVAILABILITY",)))
    has_product = bool(query_words(call, "product", ("POD", "CLUSTER", "SERVERLESS")))
    if not is_included:
        if orphan := next((name for name in _AVAILABILITY_ONLY if name in call.query), None):
            raise RunpodApiError(400, f"{orphan} is valid only with include=AVAILABILITY")
        return shown
    if not has_product:
        raise RunpodApiError(400, "include=AVAILABILITY requires product")
    return shown | _availability(account, call, gpu, places)


def _availability(account: EmulatedRunpodAccount, call: ApiCall, gpu: GpuType, places: Sequence[DataCenter]) -> Json:
    count = query_number(call, "count", 1, least=1)
    cloud = query_choice(call, "cloud", CLOUDS, SECURE)
    exact = query_words(call, "cudaVersions", pattern=r"\d+\.\d+")
    least = query_words(call, "minCudaVersion", pattern=r"\d+(\.\d+)?")
    if exact and least:
        raise RunpodApiError(400, "cudaVersions and minCudaVersion are mutually exclusive")

    def suits(version: str) -> bool:
        return (not exact or version in exact) and (not least or cuda_key(version) >= cuda_key(least[0]))

    def pods_left(place: DataCenter) -> int:
        shortage = account.faults.shortage(gpu.id, cloud, place.id)
        if (shortage and shortage.is_announced) or count > gpu.max_counts[cloud]:
            return 0
        return account.free_gpus(gpu, cloud, place.id) // count

    stocked = [each for each in places if _is_stocked(account, gpu, each) and any(map(suits, each.cuda_versions))]
    left = {each.id: pods_left(each) for each in stocked}
    versions = sorted({version for each in stocked for version in each.cuda_versions if suits(version)}, key=cuda_key)
    shown: Json = {"availability": _level(sum(left.values()))}
    if any(left.values()):
        shown["dataCenters"] = [
            {"id": each.id, "name": each.name, "availability": _level(left[each.id])} for each in stocked
        ]
    if versions:
        shown["cudaVersions"] = [
            {"version": each, "available": any(left[place.id] for place in stocked if each in place.cuda_versions)}
            for each in versions
        ]
    return shown


def _level(pods: int) -> str:
    return LEVELS[sum(pods >= threshold for threshold in _THRESHOLDS)]


def _is_stocked(account: EmulatedRunpodAccount, gpu: GpuType, place: DataCenter) -> bool:
    return any((gpu.id, cloud, place.id) in account.catalog.stock for cloud in CLOUDS)


def _places(account: EmulatedRunpodAccount, call: ApiCall) -> list[DataCenter]:
    countries = query_words(call, "countryCodes", pattern=r"[A-Z]{2}")
    return [each for each in account.catalog.data_centers if not countries or each.country in countries]
