"""The pods of one fleet: list them, find one by name, and map them to machines.

A list is complete or raises. Lists within a few seconds of each other reuse the account's last response, corrected by
our own creations and deletions since.
"""

import asyncio
import ipaddress
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from windlass.model.errors import Throttled, Unavailable
from windlass.model.machine import Machine, MachineExit, MachineState
from windlass.model.runpod import RunpodSettings
from windlass.providers.recent_changes import RecentChanges
from windlass.providers.runpod import naming
from windlass.providers.runpod.account import Json, PodListing, RunpodAccount
from windlass.providers.runpod.catalog import CURRENCY, DEFAULT_DISK_GB, Offers, disk_gb_of, disk_price, read_price
from windlass.providers.runpod.errors import TOKEN_HINT
from windlass.providers.runpod.ssh import Endpoint
from windlass.providers.vendor_error import VendorError

# Shorter than the control loop's own limit, so that the error says what is known.
LIST_TIMEOUT_S = 50.0
# A list is reused for this long.
LIST_REUSE_S = 5.0
# A search for a name may reuse an older list: the list of the cycle that decided on the creation is enough.
NAME_CHECK_S = 30.0
# A new pod may report no price yet. Its billing record is opened once, so it waits this long for the pod's own price,
# which applies from its creation, before it uses the catalog's.
PRICE_TIMEOUT_S = 300.0
# Statuses of a pod that does not work again, and that may be billed while it exists.
EXITED = {"EXITED": "the pod has stopped", "ERROR": "the pod is in an error state that it does not recover from"}


class PodList:
    """`tag` is the prefix of the tags of the fleet's pods."""

    def __init__(
        self,
        fleet: str,
        settings: RunpodSettings,
        account: RunpodAccount,
        tag: str,
        *,
        reuse_s: float,
        now: Callable[[], datetime],
    ) -> None:
        self._doing = f"listing the pods of fleet {fleet}"
        self._settings = settings
        self._account = account
        self._tag = tag
        self._reuse_s = reuse_s
        self._now = now
        self.changes = RecentChanges()

    async def machines(self) -> tuple[Machine, ...]:
        """Raises Unavailable."""
        try:
            async with asyncio.timeout(LIST_TIMEOUT_S):
                listing = await self.recent()
                # Refresh prices now, when no creation waits for a request.
                offers = await self.offers() if self._account.limiter.spare_requests() > 0 else {}
        except TimeoutError:
            raise Unavailable(f"{self._doing}: incomplete after {LIST_TIMEOUT_S:g} s") from None
        except VendorError as error:
            hint = f": {TOKEN_HINT}." if error.is_denied else ""
            raise Unavailable(f"{self._doing}: {error}{hint}") from error
        except Throttled as error:
            raise Unavailable(f"{self._doing}: {error}") from error
        self.changes.discard_before(listing.requested_at)
        return self._current(listing, offers)

    async def recent(self) -> PodListing:
        return await self._account.list_pods(asyncio.get_running_loop().time() - self._reuse_s)

    async def find(self, name: str) -> Machine | None:
        """The pod with this name, if there is one. Raises VendorError or Throttled."""
        max_age_s = min(NAME_CHECK_S, self._reuse_s * 6)
        listing = await self._account.list_pods(asyncio.get_running_loop().time() - max_age_s)
        return next((machine for machine in self._current(listing, {}) if machine.name == name), None)

    async def offers(self) -> Offers:
        clouds = {choice.cloud for choice in self._settings.ordered}
        return await self._account.offers(clouds, self._settings.gpu_count)

    def _current(self, listing: PodListing, offers: Offers) -> tuple[Machine, ...]:
        machines = {
            str(pod["id"]): self.to_machine(pod, offers)
            for pod in listing.pods
            if naming.is_of_fleet(pod, self._tag) and pod.get("status") != "TERMINATED"
        }
        return self.changes.apply(machines, listing.requested_at)

    def to_machine(self, pod: Json, offers: Offers) -> Machine:
        status = str(pod.get("status"))
        gpu, cloud = str((pod.get("gpu") or {}).get("id", "")), str(pod.get("cloud") or "")
        price, created_at = read_price(pod.get("cost")), _read_time(pod.get("createdAt"))
        is_new = created_at is not None and self._now() - created_at < timedelta(seconds=PRICE_TIMEOUT_S)
        if price is None and status not in EXITED and not is_new:
            offer = offers.get(cloud, {}).get(gpu)
            if offer is not None and offer.micros_per_hour is not None:
                price = offer.micros_per_hour * self._settings.gpu_count
        if price is not None:
            price += disk_price(disk_gb_of(pod))
        endpoint, host = self.endpoint(pod), _host(pod)
        place = str(pod.get("dataCenterId") or "") or None
        # RUNNING without a runtime has not started yet. An unknown status does not mean gone.
        is_running = status == "RUNNING" and pod.get("runtime") is not None
        running_state = MachineState.RUNNING if is_running else MachineState.BOOTING
        return Machine(
            id=str(pod["id"]),
            name=naming.tagged_worker(pod, self._tag) or str(pod.get("name")),
            state=MachineState.EXITED if status in EXITED else running_state,
            created_at=created_at,
            address=f"{endpoint.host}:{endpoint.port}" if endpoint is not None else None,
            instance_type=gpu or None,
            place=place,
            host=host,
            price_micros_per_hour=price,
            currency=CURRENCY if price is not None else None,
            note=EXITED.get(status),
            exit=MachineExit(status=status) if status in EXITED else None,
            misplaced=self._settings.placement_problem(gpu, cloud, place, host, is_running=is_running),
            is_locked=bool(pod.get("locked")),
        )

    def with_price(self, machine: Machine, offers: Offers) -> Machine:
        """The catalog's price of a pod that is gone. Of several clouds that it may have been in, the highest price: a
        budget must not be exceeded. Unchanged while prices are unknown."""
        listed = self._account.last_listed(machine.id) or {}
        wanted = {choice.cloud for choice in self._settings.ordered if choice.gpu == machine.instance_type}
        clouds = {str(listed["cloud"])} if listed.get("cloud") else wanted
        found = [offers.get(cloud, {}).get(machine.instance_type or "") for cloud in clouds]
        prices = [offer.micros_per_hour for offer in found if offer is not None and offer.micros_per_hour is not None]
        if not prices:
            return machine
        disk_gb = disk_gb_of(listed) or self._settings.disk_gb or DEFAULT_DISK_GB
        price = max(prices) * self._settings.gpu_count + disk_price(disk_gb)
        return replace(machine, price_micros_per_hour=price, currency=CURRENCY)

    def endpoint(self, pod: Json) -> Endpoint | None:
        """The address of the pod's own sshd. The vendor's SSH proxy runs no commands."""
        direct = (pod.get("ssh") or {}).get("direct")
        if not direct:
            return None
        return Endpoint(str(direct["host"]), int(direct["port"]), self._settings.ssh.user or str(direct["username"]))


def _host(pod: Json) -> str | None:
    """The public address of the physical host, which all pods on it share. The API has no other name for a host.
    None for an emulator, where all pods have the address of this host."""
    ports = (pod.get("runtime") or {}).get("ports") or ()
    direct = (pod.get("ssh") or {}).get("direct") or {}
    for address in (*(port.get("ip") for port in ports), direct.get("host")):
        try:
            if address and ipaddress.ip_address(str(address)).is_global:
                return str(address)
        except ValueError:
            continue
    return None


def _read_time(value: Any) -> datetime | None:
    try:
        time = datetime.fromisoformat(str(value))
    except ValueError:
        return None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)
