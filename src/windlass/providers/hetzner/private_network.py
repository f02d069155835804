"""The private network and the firewall that servers get where the fleet names none.

One network per network zone, `windlass-<zone>`, and one firewall, `windlass`, for all fleets of a project. They are
found by name and label, or created, and kept: both are free, and other fleets may use them. The firewall has no rules,
so it admits no connection from outside; servers call the control plane, never the other way round.
"""

import asyncio
from functools import partial

import structlog
from hcloud.networks.domain import NetworkSubnet

from windlass.model.hetzner import PRIVATE_RANGE
from windlass.providers.hetzner.account import HetznerAccount
from windlass.providers.hetzner.naming import MANAGED_BY
from windlass.providers.vendor_error import ErrorKind, VendorError

NAME = "windlass"
_LABELS = {MANAGED_BY: "windlass"}
log = structlog.get_logger(__name__)


class ProjectNetwork:
    """Remembers the ids of what it found or created. Raises VendorError or Throttled."""

    def __init__(self, account: HetznerAccount) -> None:
        self._account = account
        self._lock = asyncio.Lock()
        self._zones: dict[str, str] = {}
        self._networks: dict[str, int] = {}
        self._firewall_id: int | None = None

    async def network_id(self, location: str) -> int:
        """The network of the location's zone."""
        async with self._lock:
            zone = await self._zone_of(location)
            if zone not in self._networks:
                self._networks[zone] = await self._find_or_create_network(f"{NAME}-{zone}", zone)
            return self._networks[zone]

    async def firewall_id(self) -> int:
        async with self._lock:
            if self._firewall_id is None:
                self._firewall_id = await self._find_or_create_firewall()
            return self._firewall_id

    def forget(self) -> None:
        """A server was refused, perhaps because a person deleted one of them: look for them again."""
        self._networks.clear()
        self._firewall_id = None

    async def _zone_of(self, location: str) -> str:
        if location not in self._zones:
            page = await self._account.request(self._account.api.locations.get_list)
            self._zones = {str(each.name): str(each.network_zone) for each in page.locations}
        zone = self._zones.get(location)
        if zone is None:
            # The vendor refuses a server with the same error: the location is a part of the choice.
            raise VendorError(ErrorKind.REFUSED, f"location {location} does not exist", fields=frozenset({"location"}))
        return zone

    async def _find_or_create_network(self, name: str, zone: str) -> int:
        found = await self._find_network(name)
        if found is not None:
            return found
        subnet = NetworkSubnet(type="cloud", network_zone=zone, ip_range=PRIVATE_RANGE)
        create = partial(
            self._account.api.networks.create, name=name, ip_range=PRIVATE_RANGE, subnets=[subnet], labels=_LABELS
        )
        try:
            network = await self._account.request(create)
        except VendorError as error:
            if error.kind not in (ErrorKind.NAME_IN_USE, ErrorKind.LOST):
                raise
            found = await self._find_network(name)
            if found is None:
                raise
            return found
        log.info("created private network", network=name, network_id=network.id, ip_range=PRIVATE_RANGE)
        return int(network.id or 0)

    async def _find_network(self, name: str) -> int | None:
        page = await self._account.request(lambda: self._account.api.networks.get_list(name=name))
        for network in page.networks:
            _check_ours("network", name, network.labels)
            return int(network.id or 0)
        return None

    async def _find_or_create_firewall(self) -> int:
        found = await self._find_firewall()
        if found is not None:
            return found
        try:
            # The SDK's annotation is wrong: labels are a dictionary.
            created = await self._account.request(
                lambda: self._account.api.firewalls.create(name=NAME, rules=[], labels=_LABELS)  # type: ignore[arg-type]
            )
        except VendorError as error:
            if error.kind not in (ErrorKind.NAME_IN_USE, ErrorKind.LOST):
                raise
            found = await self._find_firewall()
            if found is None:
                raise
            return found
        log.info("created firewall", firewall=NAME, firewall_id=created.firewall.id)
        return int(created.firewall.id or 0)

    async def _find_firewall(self) -> int | None:
        page = await self._account.request(lambda: self._account.api.firewalls.get_list(name=NAME))
        for firewall in page.firewalls:
            _check_ours("firewall", NAME, firewall.labels)
            if firewall.rules:
                raise VendorError(
                    ErrorKind.INVALID,
                    f"the firewall {NAME} has rules, but must admit nothing: remove them, or set firewall_ids",
                )
            return int(firewall.id or 0)
        return None


def _check_ours(kind: str, name: str, labels: dict[str, str] | None) -> None:
    if (labels or {}).get(MANAGED_BY) != "windlass":
        option = "network_id" if kind == "network" else "firewall_ids"
        raise VendorError(
            ErrorKind.INVALID,
            f"a {kind} {name} exists that is not ours: name it in {option} to use it, or rename it",
        )
