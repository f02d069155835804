"""The `windlass doctor` checks for Runpod fleets: whether a pod could be created. Only reads."""

import asyncio
from collections.abc import AsyncGenerator, Mapping

from windlass.model.errors import Throttled
from windlass.model.runpod import GpuChoice, RunpodSettings
from windlass.providers.diagnostic import UNCONFIGURED_FLEETS_ADVICE, Diagnostic
from windlass.providers.fingerprint import fingerprint
from windlass.providers.runpod import naming
from windlass.providers.runpod.account import RunpodAccount
from windlass.providers.runpod.catalog import Offer, offers_path, read_offers
from windlass.providers.runpod.errors import TOKEN_HINT
from windlass.providers.vendor_error import VendorError


async def run_checks(
    account: RunpodAccount, identity: str | None, fleets: dict[str, RunpodSettings]
) -> AsyncGenerator[Diagnostic, None]:
    """Check the key, pods of unconfigured fleets and other databases, and every network volume, registry and GPU type
    that the fleets use. `identity` is the database's; None if it is unknown."""
    try:
        pods = (await account.list_pods(asyncio.get_running_loop().time())).pods
    except (VendorError, Throttled) as error:
        is_denied = isinstance(error, VendorError) and error.is_denied
        yield Diagnostic("runpod", str(error), TOKEN_HINT if is_denied else "retry later", is_error=True)
        return
    if identity is None:
        yield Diagnostic("runpod", f"key valid, pods in the account: {len(pods)}")
    else:
        for diagnostic in _check_tags(naming.count_pods(pods), fingerprint(identity), fleets):
            yield diagnostic
    for volume_id in sorted({s.network_volume_id for s in fleets.values() if s.network_volume_id is not None}):
        users = [settings for settings in fleets.values() if settings.network_volume_id == volume_id]
        yield await _check_volume(account, volume_id, users)
    for registry_id in sorted({s.registry_id for s in fleets.values() if s.registry_id is not None}):
        try:
            registry = await account.read(f"/registries/{registry_id}")
            yield Diagnostic("registry", str(registry.get("name")))
        except (VendorError, Throttled) as error:
            message = f"registry {registry_id}: {error}"
            yield Diagnostic("registry", message, "change runpod.registry_id", is_error=True)
    # Stock depends on the number of GPUs per pod.
    for cloud, count in sorted({(c.cloud, s.gpu_count) for s in fleets.values() for c in s.ordered}):
        choices = {c for s in fleets.values() if s.gpu_count == count for c in s.ordered if c.cloud == cloud}
        try:
            offers = read_offers(await account.read(offers_path(cloud, count)), cloud)
        except (VendorError, Throttled, KeyError, TypeError, ValueError, AttributeError) as error:
            message = f"{cloud}: {str(error) or type(error).__name__}"
            yield Diagnostic("gpu type", message, "retry later", is_error=True)
            continue
        for choice in sorted(choices):
            yield _check_gpu(choice, count, offers)


def _check_tags(
    counts: Mapping[tuple[str, str], int], installation: str, fleets: Mapping[str, RunpodSettings]
) -> list[Diagnostic]:
    ours = {fleet: count for (owner, fleet), count in counts.items() if owner == installation}
    if others := ", ".join(sorted(ours.keys() - fleets.keys())):
        message = f"pods exist of fleets that are not configured: {others}"
        found = [Diagnostic("runpod", message, UNCONFIGURED_FLEETS_ADVICE)]
    else:
        found = [Diagnostic("runpod", f"key valid, windlass pods: {sum(ours.values())}")]
    for owner in sorted({owner for owner, _ in counts} - {installation}):
        count = sum(number for (other, _), number in counts.items() if other == owner)
        message = f"pods of another windlass database in this account: {count} ({naming.TAG} begins with {owner}/)"
        advice = "if that database is gone, delete them in Runpod's console: no orchestrator does"
        found.append(Diagnostic("runpod", message, advice))
    return found


async def _check_volume(account: RunpodAccount, volume_id: str, users: list[RunpodSettings]) -> Diagnostic:
    try:
        volume = await account.read(f"/network-volumes/{volume_id}")
    except (VendorError, Throttled) as error:
        message = f"network volume {volume_id}: {error}"
        return Diagnostic("volume", message, "change runpod.network_volume_id", is_error=True)
    name, place = volume.get("name"), str(volume.get("dataCenter"))
    elsewhere = {c for settings in users for c in settings.ordered if c.data_centers and place not in c.data_centers}
    if elsewhere:
        message = f"{name} is in {place}, but {min(map(str, elsewhere))} is not"
        return Diagnostic("volume", message, f"use {place} in runpod.choices", is_error=True)
    return Diagnostic("volume", f"{name} ({volume.get('size')} GB in {place})")


def _check_gpu(choice: GpuChoice, count: int, offers: Mapping[str, Offer]) -> Diagnostic:
    offer = offers.get(choice.gpu)
    if offer is None or offer.micros_per_hour is None:
        problem = "does not exist" if offer is None else f"is not offered in {choice.cloud}"
        return Diagnostic("gpu type", f"{choice.gpu} {problem}", "change runpod.choices", is_error=True)
    if count > offer.max_count:
        message = f"a pod can have at most {offer.max_count} of {choice.gpu}, gpu_count is {count}"
        return Diagnostic("gpu type", message, "lower runpod.gpu_count", is_error=True)
    if not offer.is_in_stock(choice.data_centers):
        return Diagnostic("gpu type", f"{choice} is out of stock", "add choices to runpod.choices")
    return Diagnostic("gpu type", f"{choice}, {offer.micros_per_hour * count / 1_000_000:.2f} USD per hour")
