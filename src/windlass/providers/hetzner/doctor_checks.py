"""Whether a Hetzner fleet could hire: what `windlass doctor` asks. Reads only."""

from collections.abc import AsyncGenerator

from windlass.model.errors import Throttled
from windlass.model.fleet import FleetConfig
from windlass.model.hetzner import HetznerSettings
from windlass.providers.diagnostic import OF_OTHER_FLEETS, Diagnostic
from windlass.providers.hetzner.account import PAGE_SIZE, HetznerAccount
from windlass.providers.hetzner.errors import HOW_TO_BE_LET_IN, HetznerError, HetznerErrorKind
from windlass.providers.hetzner.naming import FLEET, INSTALLATION, MANAGED_BY, fleet_label, installation_of, selector

# Installing Docker takes about a minute, and a gigabyte of images another.
SLOW_BOOT_S = 300.0


async def examine(
    account: HetznerAccount, identity: str | None, fleets: dict[str, HetznerSettings], network_id: int | None
) -> AsyncGenerator[Diagnostic, None]:
    """The token, addresses left behind, then every network, server type and image that the fleets name. `identity`
    None: which database is ours is not known."""
    token = await _token(account, identity, fleets)
    yield token
    if token.is_grave:
        return
    if identity is not None and (left := await _addresses_left(account, identity)) is not None:
        yield left
    for network in sorted({n for s in fleets.values() if (n := s.network_id or network_id) is not None}):
        yield await _network(account, network)
    choices = {choice for settings in fleets.values() for choice in settings.ordered}
    for name in sorted({choice.server_type for choice in choices}):
        yield await _server_type(account, name, {choice.location for choice in choices if choice.server_type == name})
    for image in sorted({settings.image for settings in fleets.values()}):
        yield await _image(account, image)


def boot_time(fleet: str, config: FleetConfig) -> Diagnostic | None:
    """Whether a server may take longer for its first boot than it is given."""
    if not config.bootstrap.images or config.spawn_timeout_s >= SLOW_BOOT_S:
        return None
    count = len(config.bootstrap.images)
    return Diagnostic(
        "boot time",
        f"a new server of fleet {fleet} has {config.spawn_timeout_s:g} s to install Docker, pull {count} "
        f"image{'' if count == 1 else 's'} and start its worker; then it is replaced",
        f"set spawn_timeout_s to {SLOW_BOOT_S:g} or more, or make an image of your own that has them",
    )


async def _token(account: HetznerAccount, identity: str | None, fleets: dict[str, HetznerSettings]) -> Diagnostic:
    installation = {} if identity is None else {INSTALLATION: installation_of(identity)}
    ours = selector({MANAGED_BY: "windlass", **installation})
    try:
        pages = await account.ask_for_all(
            lambda page: account.api.servers.get_list(label_selector=ours, page=page, per_page=PAGE_SIZE)
        )
    except (HetznerError, Throttled) as trouble:
        is_denied = isinstance(trouble, HetznerError) and trouble.problem.kind is HetznerErrorKind.DENIED
        return Diagnostic("hetzner", str(trouble), HOW_TO_BE_LET_IN if is_denied else "try again", is_grave=True)
    servers = [server for page in pages for server in page.servers]
    known = {fleet_label(name) for name in fleets}
    others = sorted({(server.labels or {}).get(FLEET, "?") for server in servers} - known)
    if others and identity is not None:
        what = f"there are servers of fleets that are not configured: {', '.join(others)}"
        return Diagnostic("hetzner", what, OF_OTHER_FLEETS)
    return Diagnostic("hetzner", f"the token is good; {len(servers)} servers are ours")


async def _addresses_left(account: HetznerAccount, identity: str) -> Diagnostic | None:
    """Of fleets that are not configured any more, too: nobody else looks for those."""
    ours = selector({MANAGED_BY: "windlass", INSTALLATION: installation_of(identity)})
    try:
        pages = await account.ask_for_all(
            lambda page: account.api.primary_ips.get_list(label_selector=ours, page=page, per_page=PAGE_SIZE)
        )
    except (HetznerError, Throttled) as trouble:
        return Diagnostic("addresses", str(trouble), "try again")
    left = [address for page in pages for address in page.primary_ips if address.assignee_id is None]
    if not left:
        return None
    names = ", ".join(f"{address.ip} (of fleet {(address.labels or {}).get(FLEET, '?')})" for address in left)
    return Diagnostic(
        "addresses",
        f"Primary IPs of ours that no server has are paid for: {names}",
        "windlass up deletes those of its fleets within minutes; delete the others in Hetzner's console",
    )


async def _network(account: HetznerAccount, network_id: int) -> Diagnostic:
    try:
        network = await account.ask(lambda: account.api.networks.get_by_id(network_id))
    except (HetznerError, Throttled) as trouble:
        return Diagnostic("network", f"network {network_id}: {trouble}", "check hetzner_network_id", is_grave=True)
    return Diagnostic("network", f"{network.name} ({network.ip_range})")


async def _server_type(account: HetznerAccount, name: str, locations: set[str]) -> Diagnostic:
    try:
        page = await account.ask(lambda: account.api.server_types.get_list(name=name))
    except (HetznerError, Throttled) as trouble:
        return Diagnostic("server type", f"{name}: {trouble}", "try again", is_grave=True)
    if not page.server_types:
        return Diagnostic("server type", f"there is no {name}", "change hetzner.choices", is_grave=True)
    where = {
        str(place.location.name): place.available for found in page.server_types for place in found.locations or ()
    }
    missing = sorted(locations - set(where))
    if missing:
        return Diagnostic(
            "server type", f"{name} is not offered in {', '.join(missing)}", "change hetzner.choices", True
        )
    if not any(where[location] for location in locations):
        return Diagnostic(
            "server type", f"{name} is out in {', '.join(sorted(locations))} now", "add to hetzner.choices"
        )
    return Diagnostic("server type", f"{name} in {', '.join(sorted(locations))}")


async def _image(account: HetznerAccount, image: str) -> Diagnostic:
    try:
        if image.isdigit():
            found = str((await account.ask(lambda: account.api.images.get_by_id(int(image)))).description)
        else:
            page = await account.ask(lambda: account.api.images.get_list(name=image))
            found = ", ".join(sorted({str(each.description) for each in page.images}))
    except (HetznerError, Throttled) as trouble:
        return Diagnostic("image", f"{image}: {trouble}", "change hetzner.image", is_grave=True)
    if not found:
        return Diagnostic("image", f"there is no image {image}", "change hetzner.image", is_grave=True)
    return Diagnostic("image", found)
