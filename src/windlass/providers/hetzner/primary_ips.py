"""Deletes orphaned Primary IPs: addresses of a fleet's servers that no server uses, and that are billed.

The vendor creates a Primary IP with a server and deletes it with the server, so a crash on our side leaves none. One
can remain if automatic deletion was turned off or failed. The reaper finds those by labels. Since the vendor does not
label addresses that it creates with a server, the reaper does, for every listed server of the fleet, with requests that
nothing else needs at that moment. An address created at another time than its server was assigned by a person and is
left alone.

Limit: an address without labels is not found. That happens if its server was deleted before any list showed it, and the
vendor did not delete the address.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

import structlog
from hcloud.primary_ips.client import BoundPrimaryIP
from hcloud.primary_ips.domain import PrimaryIP
from hcloud.servers.client import BoundServer

from windlass.model.errors import Throttled
from windlass.providers.hetzner import naming
from windlass.providers.hetzner.account import PAGE_SIZE, HetznerAccount
from windlass.providers.hetzner.limiter import RATE_PER_S
from windlass.providers.vendor_error import ErrorKind, VendorError

# Time between searches for orphaned addresses. An address costs a tenth of a cent an hour.
SWEEP_INTERVAL_S = 300.0
RECONCILE_TIMEOUT_S = 15.0
CLOSE_TIMEOUT_S = 2.0
# A spare request is awaited for as long as the limiter takes to refill this many.
SPARE_POLLS = 3
# An address this close in age to its server was created with it. Assigning another one requires the server to be off.
CREATED_TOGETHER = timedelta(seconds=30)
# After this many failed attempts an address is left alone until the next sweep.
LABEL_ATTEMPTS = 5
log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Unlabelled:
    labels: Mapping[str, str]
    server_created: datetime | None
    # Created by a request of this process. The age of any other address must be checked first.
    is_new: bool
    attempts: int = 0


class PrimaryIpReaper:
    def __init__(self, account: HetznerAccount, labels: Mapping[str, str]) -> None:
        self._account = account
        self._labels = labels
        self._unlabelled: dict[int, _Unlabelled] = {}
        # Addresses that need nothing until the next sweep: labelled, assigned by a person, or impossible to label.
        self._settled: set[int] = set()
        self._sweep_due = float("-inf")
        self._reconciling: asyncio.Task[None] | None = None
        # Without servers the fleet has no addresses.
        self._has_seen_servers = False

    def add_server(self, server: BoundServer) -> None:
        """Label the addresses of a server that was just created, before this process can crash."""
        self._queue_labels(server, is_new=True)
        self.reconcile([server])

    def reconcile(self, servers: Sequence[BoundServer]) -> None:
        """Start a background task that labels the addresses of these servers and, every SWEEP_INTERVAL_S, deletes
        orphaned ones. The caller does not wait: a slow response must not delay a list."""
        self._has_seen_servers = self._has_seen_servers or bool(servers)
        if self._reconciling is None or self._reconciling.done():
            self._reconciling = asyncio.create_task(self._reconcile(servers))
            return
        for server in servers:  # they may be gone before the next list
            self._queue_labels(server, is_new=False)

    async def close(self, *, has_no_servers: bool) -> None:
        """A process that runs a single cycle has only this time. If the fleet has no servers, it may be removed from
        the configuration and nothing would look for its addresses later, so they are deleted now."""
        if self._reconciling is not None:
            await asyncio.wait([self._reconciling], timeout=CLOSE_TIMEOUT_S)
            self._reconciling.cancel()
            await asyncio.wait([self._reconciling])
        if has_no_servers and self._has_seen_servers:
            try:
                async with asyncio.timeout(RECONCILE_TIMEOUT_S):
                    await self._delete_orphans()
            except (VendorError, Throttled, TimeoutError) as error:
                log.warning("list primary ips failed", error=str(error) or "request timed out")

    async def _reconcile(self, servers: Sequence[BoundServer]) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(RECONCILE_TIMEOUT_S):
                if loop.time() >= self._sweep_due and await self._has_spare_request():
                    self._sweep_due = loop.time() + SWEEP_INTERVAL_S
                    await self._delete_orphans()
                for server in servers:
                    self._queue_labels(server, is_new=False)
                tried: set[int] = set()
                while untried := self._unlabelled.keys() - tried:  # more may be queued meanwhile
                    tried.add(address_id := min(untried))
                    if await self._has_spare_request():
                        await self._label(address_id)
        except (VendorError, Throttled, TimeoutError) as error:
            log.info("reconcile primary ips failed", error=str(error) or "request timed out")

    async def _has_spare_request(self) -> bool:
        """Wait briefly for a request that nothing else needs. The next list tries again."""
        for _ in range(SPARE_POLLS):
            if self._account.limiter.spare_requests() > 0:
                return True
            await asyncio.sleep(1 / RATE_PER_S)
        return False

    def _queue_labels(self, server: BoundServer, *, is_new: bool) -> None:
        net = server.public_net
        addresses = (net.primary_ipv4, net.primary_ipv6) if net is not None else ()
        for address_id in [address.id for address in addresses if address is not None and address.id is not None]:
            if is_new or (address_id not in self._settled and address_id not in self._unlabelled):
                labels = {**self._labels, naming.WORKER: (server.labels or {})[naming.WORKER]}
                self._unlabelled[address_id] = _Unlabelled(labels, server.created, is_new)

    async def _label(self, address_id: int) -> None:
        """A failure is retried by a later call, up to LABEL_ATTEMPTS, and does not delay other addresses."""
        address = self._unlabelled[address_id]
        address.attempts += 1
        try:
            labels = address.labels if address.is_new else await self._missing_labels(address_id, address)
            if labels is not None:
                await self._account.request(
                    lambda: self._account.api.primary_ips.update(PrimaryIP(id=address_id), labels=dict(labels))
                )
        except VendorError as error:
            if error.kind is not ErrorKind.NOT_FOUND:
                log.info("label primary ip failed", primary_ip=address_id, error=str(error))
                if address.attempts < LABEL_ATTEMPTS:
                    return
        del self._unlabelled[address_id]
        self._settled.add(address_id)

    async def _missing_labels(self, address_id: int, address: _Unlabelled) -> Mapping[str, str] | None:
        """The labels to set. None if they are set already, or if a person assigned the address."""
        found: BoundPrimaryIP = await self._account.request(lambda: self._account.api.primary_ips.get_by_id(address_id))
        if found.created is None or address.server_created is None:
            return None
        is_foreign = abs(found.created - address.server_created) > CREATED_TOGETHER
        labels = {**(found.labels or {}), **address.labels}
        return None if is_foreign or labels == found.labels else labels

    async def _delete_orphans(self) -> None:
        selector = naming.label_selector(self._labels)
        pages = await self._account.request_all_pages(
            lambda page: self._account.api.primary_ips.get_list(label_selector=selector, page=page, per_page=PAGE_SIZE)
        )
        labelled = [address for page in pages for address in page.primary_ips]
        self._settled = {ip.id for ip in labelled if ip.id is not None}
        for address_id in [ip.id for ip in labelled if ip.id is not None and ip.assignee_id is None]:
            log.warning("delete primary ip", primary_ip=address_id, reason="no server uses it")
            try:
                await self._account.request(partial(self._account.api.primary_ips.delete, PrimaryIP(id=address_id)))
            except VendorError as error:
                log.info("delete primary ip failed", primary_ip=address_id, error=str(error))
