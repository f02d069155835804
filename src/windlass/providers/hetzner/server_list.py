"""The servers of one fleet: list them, map them to machines, and reuse a recent list.

A list is complete or raises. Lists within a few seconds of each other reuse the last response, corrected by our own
creations and deletions since: the lists of a busy fleet must not use up the requests that its creations need.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial

from hcloud.servers.client import BoundServer

from windlass.model.cost import PricePart
from windlass.model.errors import Throttled, Unavailable
from windlass.model.hetzner import HOUR_S, Choice, HetznerSettings
from windlass.model.machine import Machine, MachineExit, MachineState
from windlass.providers.hetzner import naming
from windlass.providers.hetzner.account import MAX_PAGES, MAX_WAIT_S, PAGE_SIZE, HetznerAccount
from windlass.providers.hetzner.catalog import PriceList
from windlass.providers.hetzner.errors import TOKEN_HINT
from windlass.providers.recent_changes import RecentChanges
from windlass.providers.vendor_error import VendorError

# Shorter than the control loop's own limit, so that the error says what is known.
LIST_TIMEOUT_S = 50.0
# A list is reused for this long per page: lists take at most a fifth of a request per second.
LIST_REUSE_S = 5.0
LIST_REUSE_MAX_S = 20.0
# A new server may be off for a moment between its creation and its start.
OFF_WHILE_BOOTING_S = 60.0

_STATES = {
    "initializing": MachineState.BOOTING,
    "starting": MachineState.BOOTING,
    "running": MachineState.RUNNING,
    # The vendor is working on it; it returns without our help.
    "migrating": MachineState.BOOTING,
    "rebuilding": MachineState.BOOTING,
    # Unknown does not mean gone.
    "unknown": MachineState.BOOTING,
    # Still billed, and does not return without our help.
    "off": MachineState.EXITED,
    "stopping": MachineState.EXITED,
    "deleting": MachineState.EXITED,
}


@dataclass(slots=True)
class _Listing:
    machines: dict[str, Machine]
    requested_at: float
    fresh_until: float


class ServerList:
    """`labels` are those that all servers of the fleet have. `on_listed` receives the servers of each new list."""

    def __init__(
        self,
        fleet: str,
        settings: HetznerSettings,
        account: HetznerAccount,
        labels: Mapping[str, str],
        *,
        on_listed: Callable[[Sequence[BoundServer]], None],
        reuse_s: float,
        now: Callable[[], datetime],
    ) -> None:
        self._doing = f"listing the servers of fleet {fleet}"
        self._settings = settings
        self._account = account
        self._labels = labels
        self._on_listed = on_listed
        self._reuse_s = reuse_s
        self._now = now
        self._listing: _Listing | None = None
        self.changes = RecentChanges()
        # Servers that were running once. If one of them is off, it has stopped.
        self._have_run: set[str] = set()

    @property
    def is_empty(self) -> bool:
        """Whether the fleet is known to have no servers."""
        return self._listing is not None and not self._current(self._listing)

    def is_known(self, machine_id: str) -> bool:
        """Whether it was in the last list, or created or deleted by this process since. Ids are never reused."""
        return machine_id in self.changes or (self._listing is not None and machine_id in self._listing.machines)

    def is_ours(self, server: BoundServer) -> bool:
        labels = server.labels or {}
        return naming.WORKER in labels and all(labels.get(key) == value for key, value in self._labels.items())

    async def machines(self) -> tuple[Machine, ...]:
        """Raises Unavailable."""
        requested_at = asyncio.get_running_loop().time()
        if self._listing is not None and requested_at < self._listing.fresh_until:
            return self._current(self._listing)
        try:
            async with asyncio.timeout(LIST_TIMEOUT_S):
                servers = await self._request_servers()
                prices = await self._account.prices(self._settings.prices, MAX_WAIT_S)
        except TimeoutError:
            raise Unavailable(f"{self._doing}: incomplete after {LIST_TIMEOUT_S:g} s") from None
        except VendorError as error:
            hint = f": {TOKEN_HINT}." if error.is_denied else ""
            raise Unavailable(f"{self._doing}: {error}{hint}") from error
        except Throttled as error:
            raise Unavailable(f"{self._doing}: {error}") from error
        machines = {str(server.id): self.to_machine(server, prices) for server in servers}
        pages = max(1, math.ceil(len(machines) / PAGE_SIZE))
        fresh_until = requested_at + min(self._reuse_s * pages, LIST_REUSE_MAX_S)
        self._listing = _Listing(machines, requested_at, fresh_until)
        self.changes.discard_before(requested_at)
        self._have_run &= machines.keys()
        self._on_listed(servers)
        return self._current(self._listing)

    def _current(self, listing: _Listing) -> tuple[Machine, ...]:
        return self.changes.apply(listing.machines, listing.requested_at)

    async def _request_servers(self) -> list[BoundServer]:
        """All pages. If the list changes meanwhile, it is read once more: an entry may have moved to a page that was
        already read."""
        get_page = partial(
            self._account.api.servers.get_list, label_selector=naming.label_selector(self._labels), per_page=PAGE_SIZE
        )
        for _ in range(2):
            servers: list[BoundServer] = []
            totals: set[int | None] = set()
            page: int | None = 1
            while page is not None and page <= MAX_PAGES:
                found = await self._account.request(partial(get_page, page=page), is_urgent=True)
                servers += found.servers
                pagination = found.meta.pagination if found.meta is not None else None
                totals.add(pagination.total_entries if pagination is not None else len(servers))
                page = pagination.next_page if pagination is not None else None
            is_complete = len(totals) == 1 and totals <= {None, len({server.id for server in servers})}
            if is_complete and page is None:
                # The vendor selected them by label. Machines are deleted by this list, so it is checked again.
                return [server for server in servers if self.is_ours(server)]
        raise Unavailable(f"{self._doing}: the list changed while it was read")

    def to_machine(self, server: BoundServer, prices: PriceList | None) -> Machine:
        server_type = str(server.server_type.name) if server.server_type is not None else ""
        location = str(server.location.name) if server.location is not None else ""
        net = server.public_net
        has_ipv4 = net is not None and net.ipv4 is not None
        # Prefer the private address: the control plane and its workers communicate over it.
        private = [each.ip for each in server.private_net or ()]
        public = [each.ip for each in (net.ipv4, net.ipv6) if each is not None] if net is not None else []
        state = self._state(server)
        machine = Machine(
            id=str(server.id),
            name=(server.labels or {})[naming.WORKER],
            state=state,
            created_at=server.created,
            address=next(map(str, [*private, *public]), None),
            instance_type=server_type,
            place=location,
            note=f"the server is {server.status}" if state is MachineState.EXITED else None,
            exit=MachineExit(status=server.status) if state is MachineState.EXITED else None,
            is_locked=bool(server.protection and server.protection["delete"]),
        )
        return self.with_price(machine, prices, has_ipv4=has_ipv4)

    def with_price(self, machine: Machine, prices: PriceList | None, *, has_ipv4: bool) -> Machine:
        """The published price of its type and place, and of its IPv4 address. Unchanged while prices are unknown."""
        choice = Choice(machine.instance_type or "", machine.place or "")
        published = prices.price_parts(choice, has_ipv4=has_ipv4) if prices is not None else ()
        if prices is None or not published:
            return machine
        # An emulator with shorter billing hours charges the hourly price for each of them.
        hours = HOUR_S // self._settings.billing_hour_s
        parts = tuple(PricePart(part.price_micros_per_hour * hours, part.price_micros_per_month) for part in published)
        per_hour = sum(part.price_micros_per_hour for part in parts)
        return replace(machine, price_micros_per_hour=per_hour, price_parts=parts, currency=prices.currency)

    def _state(self, server: BoundServer) -> MachineState:
        state = _STATES.get(str(server.status), MachineState.BOOTING)
        if state is MachineState.RUNNING:
            self._have_run.add(str(server.id))
        is_new = server.created is not None and self._now() - server.created < timedelta(seconds=OFF_WHILE_BOOTING_S)
        if server.status == "off" and is_new and str(server.id) not in self._have_run:
            return MachineState.BOOTING
        return state
