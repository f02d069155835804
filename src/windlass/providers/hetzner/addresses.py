"""Primary IPs of a fleet's servers: none is paid for that no server has.

The vendor makes one with a server and deletes it with the server, so nothing is left behind by a crash of ours. What
can be left behind all the same (somebody turned the automatic deletion off, or it failed) is found by our labels. The
vendor does not label what it makes by itself: we do, for every server of ours that is listed, whoever had it made, with
requests that nobody else needs at that moment. An address that is not as old as its server was brought by a person: it
is left alone.

What it does not do: an address whose server was gone before anybody listed it, and which the vendor did not delete
with it, has no label, and is not found.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

import structlog
from hcloud.primary_ips.client import BoundPrimaryIP, PrimaryIPsPageResult
from hcloud.primary_ips.domain import PrimaryIP
from hcloud.servers.client import BoundServer

from windlass.model.errors import Throttled
from windlass.providers.hetzner import naming
from windlass.providers.hetzner.account import PAGE_SIZE, HetznerAccount
from windlass.providers.hetzner.errors import HetznerError, HetznerErrorKind
from windlass.providers.hetzner.limiter import RATE_PER_S

# From one look for those left behind to the next. An address costs a tenth of a cent an hour.
SWEEP_INTERVAL_S = 300.0
TEND_TIMEOUT_S = 15.0
CLOSE_PATIENCE_S = 2.0
# For a request that nobody else needs, as long as that many take to come back.
TURN_LOOKS = 3
# Between an address and the server that it was made with. For another one to be put in its place, a server must be off.
MADE_TOGETHER = timedelta(seconds=30)
# Before an address that cannot be labelled is left alone until the next sweep.
LABEL_TRIES = 5
log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Unlabelled:
    labels: Mapping[str, str]
    server_created: datetime | None
    # It was made by a request of ours. Of any other it must be asked.
    is_ours: bool
    tries: int = 0


class PrimaryIpReaper:
    def __init__(self, account: HetznerAccount, labels: Mapping[str, str]) -> None:
        self._account = account
        self._labels = labels
        self._unlabelled: dict[int, _Unlabelled] = {}
        # Nothing to do about these until the next sweep: they are labelled, or a person's, or they cannot be.
        self._settled: set[int] = set()
        self._sweep_due = float("-inf")
        self._tending: asyncio.Task[None] | None = None
        # Whether there may be addresses of ours at all.
        self._has_seen_servers = False

    def made_with(self, server: BoundServer) -> None:
        """A server that we just had made has these. They are labelled at once, for whoever comes after us."""
        for address_id in _addresses_of(server):
            self._unlabelled[address_id] = self._wanted(server, is_ours=True)
        self.tend([server])

    def tend(self, servers: Sequence[BoundServer]) -> None:
        """Begin to delete those left behind, now and then, and to label those of these servers of ours that are not.
        Nobody waits for it: however slow the vendor is with addresses, whoever lists has a list."""
        self._has_seen_servers = self._has_seen_servers or bool(servers)
        if self._tending is None or self._tending.done():
            self._tending = asyncio.create_task(self._tend(servers))
        else:
            self._notice(servers)  # they may be gone before the next list

    async def close(self, *, is_deserted: bool) -> None:
        """Where a process lives for one cycle only, this is all the time there is. `is_deserted`: there is no server of
        the fleet, which may be over. Then nobody looks later, so those left behind are looked for now."""
        if self._tending is not None:
            await asyncio.wait([self._tending], timeout=CLOSE_PATIENCE_S)
            self._tending.cancel()
            await asyncio.wait([self._tending])
        if is_deserted and self._has_seen_servers:
            try:
                async with asyncio.timeout(TEND_TIMEOUT_S):
                    await self._sweep()
            except (HetznerError, Throttled, TimeoutError) as error:
                log.warning("Primary IPs left behind not looked for", error=str(error) or "no answer in time")

    async def _tend(self, servers: Sequence[BoundServer]) -> None:
        """Never for long, and never a reason to fail."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(TEND_TIMEOUT_S):
                if loop.time() >= self._sweep_due and await self._has_turn():
                    self._sweep_due = loop.time() + SWEEP_INTERVAL_S
                    await self._sweep()
                self._notice(servers)
                tried: set[int] = set()
                while untried := self._unlabelled.keys() - tried:  # more may be made meanwhile
                    tried.add(address_id := min(untried))
                    if await self._has_turn():
                        await self._label(address_id)
        except (HetznerError, Throttled, TimeoutError) as error:
            log.info("addresses not tended", error=str(error) or "no answer in time")

    async def _has_turn(self) -> bool:
        """Wait for a request that nobody else needs, but not for long: the next list begins again."""
        for _ in range(TURN_LOOKS):
            if self._account.limiter.spare() > 0:
                return True
            await asyncio.sleep(1 / RATE_PER_S)
        return False

    def _notice(self, servers: Sequence[BoundServer]) -> None:
        for server in servers:
            for address_id in _addresses_of(server):
                if address_id not in self._settled and address_id not in self._unlabelled:
                    self._unlabelled[address_id] = self._wanted(server, is_ours=False)

    def _wanted(self, server: BoundServer, *, is_ours: bool) -> _Unlabelled:
        labels = {**self._labels, naming.WORKER: (server.labels or {})[naming.WORKER]}
        return _Unlabelled(labels, server.created, is_ours)

    async def _label(self, address_id: int) -> None:
        """Or, where that does not work, leave it for a later time: it keeps nobody else waiting."""
        address = self._unlabelled[address_id]
        address.tries += 1
        try:
            labels = address.labels if address.is_ours else await self._labels_for(address_id, address)
            if labels is not None:
                await self._account.ask(
                    lambda: self._account.api.primary_ips.update(PrimaryIP(id=address_id), labels=dict(labels))
                )
        except HetznerError as trouble:
            if trouble.problem.kind is not HetznerErrorKind.NOT_FOUND:
                log.info("Primary IP not labelled", primary_ip=address_id, error=trouble.problem.words)
                if address.tries < LABEL_TRIES:
                    return
        del self._unlabelled[address_id]
        self._settled.add(address_id)

    async def _labels_for(self, address_id: int, address: _Unlabelled) -> Mapping[str, str] | None:
        """None where there is nothing to label."""
        found: BoundPrimaryIP = await self._account.ask(lambda: self._account.api.primary_ips.get_by_id(address_id))
        if found.created is None or address.server_created is None:
            return None
        is_persons = abs(found.created - address.server_created) > MADE_TOGETHER
        labels = {**(found.labels or {}), **address.labels}
        return None if is_persons or labels == found.labels else labels

    async def _sweep(self) -> None:
        pages = await self._account.ask_for_all(self._list_page)
        labelled = [address for page in pages for address in page.primary_ips]
        self._settled = {ip.id for ip in labelled if ip.id is not None}
        for address_id in [ip.id for ip in labelled if ip.id is not None and ip.assignee_id is None]:
            log.warning("deleting a Primary IP that was left behind", primary_ip=address_id)
            try:
                await self._account.ask(partial(self._account.api.primary_ips.delete, PrimaryIP(id=address_id)))
            except HetznerError as trouble:
                log.info("Primary IP not deleted", primary_ip=address_id, error=trouble.problem.words)

    def _list_page(self, page: int) -> PrimaryIPsPageResult:
        return self._account.api.primary_ips.get_list(
            label_selector=naming.selector(self._labels), page=page, per_page=PAGE_SIZE
        )


def _addresses_of(server: BoundServer) -> list[int]:
    net = server.public_net
    made = (net.primary_ipv4, net.primary_ipv6) if net is not None else ()
    return [address.id for address in made if address is not None and address.id is not None]
