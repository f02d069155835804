"""The `windlass doctor` checks for Hetzner fleets: whether a server could be created. Only reads."""

from collections.abc import AsyncGenerator, Mapping
from datetime import UTC, datetime

from windlass.model.errors import Throttled
from windlass.model.fleet import FleetConfig
from windlass.model.hetzner import HetznerSettings
from windlass.providers.diagnostic import UNCONFIGURED_FLEETS_ADVICE, Diagnostic
from windlass.providers.fingerprint import fingerprint
from windlass.providers.hetzner.account import PAGE_SIZE, HetznerAccount
from windlass.providers.hetzner.errors import TOKEN_HINT
from windlass.providers.hetzner.naming import FLEET, INSTALLATION, MANAGED_BY, fleet_label, label_selector
from windlass.providers.hetzner.private_network import NAME
from windlass.providers.vendor_error import VendorError

# Hetzner attaches at most this many servers to one private network, whatever the limits of the project.
MAX_NETWORK_SERVERS = 100
# The vendor's network zone of each location. A location that is not here counts as a zone of its own.
ZONES = {
    **dict.fromkeys(("fsn1", "nbg1", "hel1"), "eu-central"),
    "ash": "us-east",
    "hil": "us-west",
    "sin": "ap-southeast",
}


async def run_checks(
    account: HetznerAccount, identity: str | None, fleets: dict[str, HetznerSettings], network_id: int | None
) -> AsyncGenerator[Diagnostic, None]:
    """Check the token, orphaned Primary IPs, and every network, server type and image that the fleets use. `identity`
    is the database's; None if it is unknown."""
    installation = {} if identity is None else {INSTALLATION: fingerprint(identity)}
    ours = label_selector({MANAGED_BY: "windlass", **installation})
    token = await _check_token(account, ours, fleets if identity is not None else None)
    yield token
    if token.is_error:
        return
    if identity is not None and (orphans := await _check_primary_ips(account, ours)) is not None:
        yield orphans
    on_network = [settings for settings in fleets.values() if settings.is_network_on]
    for network in sorted({n for s in on_network if (n := s.network_id or network_id) is not None}):
        yield await _check_network(account, network)
    for name, settings in fleets.items():
        yield _check_exposure(name, settings)
    choices = {choice for settings in fleets.values() for choice in settings.ordered}
    for name in sorted({choice.server_type for choice in choices}):
        locations = {choice.location for choice in choices if choice.server_type == name}
        yield await _check_server_type(account, name, locations)
    for image in sorted({settings.image for settings in fleets.values()}):
        yield await _check_image(account, image)


def check_network_sizes(fleets: Mapping[str, FleetConfig], network_id: int | None) -> list[Diagnostic]:
    """Warnings about networks that are too small for all servers that the fleets may have at the same time."""
    sharing: dict[str, list[str]] = {}
    for name, fleet in fleets.items():
        settings = fleet.hetzner
        named = settings.network_id or network_id
        zones = {ZONES.get(choice.location, choice.location) for choice in settings.ordered}
        networks = [f"network {named}"] if named is not None else [f"network {NAME}-{zone}" for zone in sorted(zones)]
        for network in networks if settings.is_network_on else ():
            sharing.setdefault(network, []).append(name)
    found = []
    for network, names in sharing.items():
        count = sum(fleets[name].max_workers for name in names)
        if count > MAX_NETWORK_SERVERS:
            message = (
                f"{network} admits {MAX_NETWORK_SERVERS} servers, and max_workers of its fleets "
                f"({', '.join(names)}) are {count} together"
            )
            advice = "give a fleet a network of its own with hetzner.network_id, or set is_network_on = false"
            found.append(Diagnostic("network", message, advice))
    return found


async def _check_token(account: HetznerAccount, ours: str, fleets: dict[str, HetznerSettings] | None) -> Diagnostic:
    try:
        pages = await account.request_all_pages(
            lambda page: account.api.servers.get_list(label_selector=ours, page=page, per_page=PAGE_SIZE)
        )
    except (VendorError, Throttled) as error:
        is_denied = isinstance(error, VendorError) and error.is_denied
        return Diagnostic("hetzner", str(error), TOKEN_HINT if is_denied else "retry later", is_error=True)
    servers = [server for page in pages for server in page.servers]
    if fleets is not None:
        known = {fleet_label(name) for name in fleets}
        others = sorted({(server.labels or {}).get(FLEET, "?") for server in servers} - known)
        if others:
            message = f"servers exist of fleets that are not configured: {', '.join(others)}"
            return Diagnostic("hetzner", message, UNCONFIGURED_FLEETS_ADVICE)
    return Diagnostic("hetzner", f"token valid, windlass servers: {len(servers)}")


async def _check_primary_ips(account: HetznerAccount, ours: str) -> Diagnostic | None:
    """A warning about orphaned Primary IPs, also of fleets that are no longer configured: `windlass up` looks only for
    those of its fleets."""
    try:
        pages = await account.request_all_pages(
            lambda page: account.api.primary_ips.get_list(label_selector=ours, page=page, per_page=PAGE_SIZE)
        )
    except (VendorError, Throttled) as error:
        return Diagnostic("primary ips", str(error), "retry later")
    orphans = [address for page in pages for address in page.primary_ips if address.assignee_id is None]
    if not orphans:
        return None
    names = ", ".join(f"{address.ip} (fleet {(address.labels or {}).get(FLEET, '?')})" for address in orphans)
    return Diagnostic(
        "primary ips",
        f"Primary IPs without a server are billed: {names}",
        "windlass up deletes those of its fleets within minutes; delete the others in Hetzner's console",
    )


def _check_exposure(fleet: str, settings: HetznerSettings) -> Diagnostic:
    """Which public addresses servers have, and whether a firewall protects them."""
    families = [name for name, is_on in (("IPv4", settings.is_ipv4_on), ("IPv6", settings.is_ipv6_on)) if is_on]
    if not families:
        return Diagnostic("exposure", f"servers of fleet {fleet} have no public address")
    public = f"servers of fleet {fleet} have a public {' and '.join(families)} address"
    if not settings.is_firewall_on:
        return Diagnostic("exposure", f"{public} and no firewall", "set is_firewall_on = true")
    given = ", ".join(map(str, settings.firewall_ids))
    firewall = f"firewall {given}" if given else "a firewall that admits nothing"
    return Diagnostic("exposure", f"{public} behind {firewall}")


async def _check_network(account: HetznerAccount, network_id: int) -> Diagnostic:
    try:
        network = await account.request(lambda: account.api.networks.get_by_id(network_id))
    except (VendorError, Throttled) as error:
        return Diagnostic("network", f"network {network_id}: {error}", "check hetzner_network_id", is_error=True)
    return Diagnostic("network", f"{network.name} ({network.ip_range})")


async def _check_server_type(account: HetznerAccount, name: str, locations: set[str]) -> Diagnostic:
    try:
        page = await account.request(lambda: account.api.server_types.get_list(name=name))
    except (VendorError, Throttled) as error:
        return Diagnostic("server type", f"{name}: {error}", "retry later", is_error=True)
    if not page.server_types:
        return Diagnostic("server type", f"{name} does not exist", "change hetzner.choices", is_error=True)
    available = {
        str(place.location.name): place.available for found in page.server_types for place in found.locations or ()
    }
    retired = {
        str(place.location.name): place.deprecation.unavailable_after
        for found in page.server_types
        for place in found.locations or ()
        if place.deprecation is not None and place.deprecation.unavailable_after is not None
    }
    if leaving := sorted(locations & retired.keys()):
        first = min(retired[location] for location in leaving)
        is_gone = first <= datetime.now(UTC)
        verb = "is retired since" if is_gone else "will be retired on"
        message = f"{name} {verb} {first:%Y-%m-%d} in {', '.join(leaving)}"
        return Diagnostic("server type", message, "replace it in hetzner.choices", is_error=is_gone)
    if missing := ", ".join(sorted(locations - available.keys())):
        message = f"{name} is not offered in {missing}"
        return Diagnostic("server type", message, "change hetzner.choices", is_error=True)
    places = ", ".join(sorted(locations))
    if not any(available[location] for location in locations):
        return Diagnostic("server type", f"{name} is out of stock in {places}", "add choices to hetzner.choices")
    return Diagnostic("server type", f"{name} in {places}")


async def _check_image(account: HetznerAccount, image: str) -> Diagnostic:
    try:
        if image.isdigit():
            found = str((await account.request(lambda: account.api.images.get_by_id(int(image)))).description)
        else:
            page = await account.request(lambda: account.api.images.get_list(name=image))
            found = ", ".join(sorted({str(each.description) for each in page.images}))
    except (VendorError, Throttled) as error:
        return Diagnostic("image", f"{image}: {error}", "change hetzner.image", is_error=True)
    if not found:
        return Diagnostic("image", f"image {image} does not exist", "change hetzner.image", is_error=True)
    return Diagnostic("image", found)
