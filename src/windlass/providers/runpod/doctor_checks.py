"""Whether a Runpod fleet could hire: what `windlass doctor` asks. Reads only; one request for each thing."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from windlass.model.errors import Throttled
from windlass.model.runpod import GpuChoice, RunpodSettings
from windlass.providers.diagnostic import OF_OTHER_FLEETS, Diagnostic
from windlass.providers.runpod import naming
from windlass.providers.runpod.account import Json, RunpodAccount
from windlass.providers.runpod.catalog import Offer, read_offers
from windlass.providers.runpod.errors import HOW_TO_BE_LET_IN, RunpodError, RunpodErrorKind


async def examine(
    account: RunpodAccount, identity: str | None, fleets: dict[str, RunpodSettings]
) -> AsyncGenerator[Diagnostic, None]:
    """The key, then every network volume, registry and GPU type that the fleets name. `identity` None: which database
    is ours is not known."""
    try:
        pods = (await account.list_pods(asyncio.get_running_loop().time())).pods
    except (RunpodError, Throttled) as trouble:
        is_denied = isinstance(trouble, RunpodError) and trouble.problem.kind in (
            RunpodErrorKind.DENIED,
            RunpodErrorKind.FORBIDDEN,
        )
        yield Diagnostic("runpod", str(trouble), HOW_TO_BE_LET_IN if is_denied else "try again", is_grave=True)
        return
    yield _key(pods, identity, fleets)
    if identity is not None:
        for tag, count in sorted(naming.other_installations(pods, identity).items()):
            what = f"{count} pods of another windlass database ({naming.TAG} begins with {tag}/) are in this account"
            yield Diagnostic(
                "runpod", what, "if that database is gone, delete them in Runpod's console: nobody else will"
            )
    for volume_id in sorted({s.network_volume_id for s in fleets.values() if s.network_volume_id is not None}):
        users = [settings for settings in fleets.values() if settings.network_volume_id == volume_id]
        yield await _volume(account, volume_id, users)
    for registry_id in sorted({s.registry_id for s in fleets.values() if s.registry_id is not None}):
        yield await _registry(account, registry_id)
    # Stock depends on how many a pod wants at once.
    for cloud, count in sorted({(c.cloud, s.gpu_count) for s in fleets.values() for c in s.ordered}):
        wanted = {choice for s in fleets.values() if s.gpu_count == count for choice in s.ordered}
        of_this_cloud = {choice for choice in wanted if choice.cloud == cloud}
        async with aclosing(_gpus(account, cloud, count, of_this_cloud)) as remarks:
            async for remark in remarks:
                yield remark


def _key(pods: list[Json], identity: str | None, fleets: dict[str, RunpodSettings]) -> Diagnostic:
    if identity is None:
        return Diagnostic("runpod", f"the key is good; there are {len(pods)} pods")
    ours = naming.fleets_of(pods, identity)
    others = sorted(set(ours) - set(fleets))
    if others:
        what = f"there are pods of fleets that are not configured: {', '.join(others)}"
        return Diagnostic("runpod", what, OF_OTHER_FLEETS)
    return Diagnostic("runpod", f"the key is good; {sum(ours.values())} pods are ours")


async def _volume(account: RunpodAccount, volume_id: str, users: list[RunpodSettings]) -> Diagnostic:
    try:
        volume = await account.read(f"/network-volumes/{volume_id}")
    except (RunpodError, Throttled) as trouble:
        what = f"network volume {volume_id}: {trouble}"
        return Diagnostic("volume", what, "change runpod.network_volume_id", is_grave=True)
    place = str(volume.get("dataCenter"))
    named = {c for settings in users for c in settings.ordered if c.data_centers and place not in c.data_centers}
    if named:
        what = f"{volume.get('name')} is in {place}, where {sorted(map(str, named))[0]} is not"
        return Diagnostic("volume", what, f"name {place} in runpod.choices", is_grave=True)
    return Diagnostic("volume", f"{volume.get('name')} ({volume.get('size')} GB in {place})")


async def _registry(account: RunpodAccount, registry_id: str) -> Diagnostic:
    try:
        registry = await account.read(f"/registries/{registry_id}")
    except (RunpodError, Throttled) as trouble:
        return Diagnostic("registry", f"registry {registry_id}: {trouble}", "change runpod.registry_id", is_grave=True)
    return Diagnostic("registry", str(registry.get("name")))


async def _gpus(
    account: RunpodAccount, cloud: str, count: int, choices: set[GpuChoice]
) -> AsyncGenerator[Diagnostic, None]:
    path = f"/catalog/gpus?include=AVAILABILITY&product=POD&cloud={cloud}&count={count}"
    try:
        offers = read_offers(await account.read(path), cloud)
    except (RunpodError, Throttled, KeyError, TypeError, ValueError, AttributeError) as trouble:
        yield Diagnostic("gpu type", f"{cloud}: {trouble or type(trouble).__name__}", "try again", is_grave=True)
        return
    for choice in sorted(choices):
        yield _gpu(choice, count, offers)


def _gpu(choice: GpuChoice, count: int, offers: Mapping[str, Offer]) -> Diagnostic:
    offer = offers.get(choice.gpu)
    if offer is None or offer.micros_per_hour is None:
        what = f"there is no {choice.gpu}" if offer is None else f"{choice.gpu} is not offered in {choice.cloud}"
        return Diagnostic("gpu type", what, "change runpod.choices", is_grave=True)
    if count > offer.max_count:
        what = f"a pod can have {offer.max_count} of {choice.gpu} at the most, and is to have {count}"
        return Diagnostic("gpu type", what, "lower runpod.gpu_count", is_grave=True)
    if not offer.has_left(choice.data_centers):
        return Diagnostic("gpu type", f"{choice} is out now", "add to runpod.choices")
    return Diagnostic("gpu type", f"{choice}, {offer.micros_per_hour * count / 1_000_000:.2f} USD per hour")
