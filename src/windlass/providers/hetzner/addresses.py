"""Primary IPs of a fleet's servers: none is paid for that no server has.

The vendor makes one with a server and deletes it with the server, so nothing is left behind by a crash of ours. What
can be left behind all the same (somebody turned the automatic deletion off, or it failed) is found by our labels. The
vendor does not label what it makes by itself: we do, with requests that nobody else needs at that moment. Only those
made by our own request are labelled: of any other we cannot know whose it is.
"""

import asyncio
from collections.abc import Mapping
from functools import partial

import structlog
from hcloud.primary_ips.client import PrimaryIPsPageResult
from hcloud.primary_ips.domain import PrimaryIP
from hcloud.servers.client import BoundServer

from windlass.model.errors import Throttled
from windlass.providers.hetzner import naming
from windlass.providers.hetzner.account import MAX_PAGES, PAGE_SIZE, Account
from windlass.providers.hetzner.problems import Kind, Trouble

# From one look for those left behind to the next. An address costs a tenth of a cent an hour.
SWEEP_INTERVAL_S = 300.0
TEND_TIMEOUT_S = 15.0
log = structlog.get_logger(__name__)


class Addresses:
    def __init__(self, account: Account, labels: Mapping[str, str]) -> None:
        self._account = account
        self._labels = labels
        self._unlabelled: dict[int, dict[str, str]] = {}
        self._sweep_due = float("-inf")

    def made_with(self, server: BoundServer) -> None:
        """A server that we just had made has these; they will be labelled."""
        net, worker_id = server.public_net, (server.labels or {})[naming.WORKER]
        for address in (net.primary_ipv4, net.primary_ipv6) if net is not None else ():
            if address is not None and address.id is not None:
                self._unlabelled[address.id] = {**self._labels, naming.WORKER: worker_id}

    async def tend(self) -> None:
        """Delete those left behind, now and then, and label new ones. Never for long, and never a reason to fail."""
        loop, limiter = asyncio.get_running_loop(), self._account.limiter
        try:
            async with asyncio.timeout(TEND_TIMEOUT_S):
                if loop.time() >= self._sweep_due and limiter.spare() > 0:
                    self._sweep_due = loop.time() + SWEEP_INTERVAL_S
                    await self._sweep()
                for address_id in list(self._unlabelled)[: limiter.spare()]:
                    await self._label(address_id)
        except (Trouble, Throttled, TimeoutError) as error:
            log.info("addresses not tended", error=str(error) or "no answer in time")

    async def _label(self, address_id: int) -> None:
        labels = self._unlabelled[address_id]
        try:
            await self._account.ask(
                lambda: self._account.api.primary_ips.update(PrimaryIP(id=address_id), labels=labels)
            )
        except Trouble as trouble:
            if trouble.problem.kind is not Kind.NOT_FOUND:
                raise
        self._unlabelled.pop(address_id, None)

    async def _sweep(self) -> None:
        page: int | None = 1
        left_behind: list[int] = []
        while page is not None and page <= MAX_PAGES:
            found = await self._account.ask(partial(self._list_page, page))
            left_behind += [ip.id for ip in found.primary_ips if ip.id is not None and ip.assignee_id is None]
            page = found.meta.pagination.next_page if found.meta and found.meta.pagination else None
        for address_id in left_behind:
            log.warning("deleting a Primary IP that was left behind", primary_ip=address_id)
            try:
                await self._account.ask(partial(self._account.api.primary_ips.delete, PrimaryIP(id=address_id)))
            except Trouble as trouble:
                log.info("Primary IP not deleted", primary_ip=address_id, error=trouble.problem.words)

    def _list_page(self, page: int) -> PrimaryIPsPageResult:
        return self._account.api.primary_ips.get_list(
            label_selector=naming.selector(self._labels), page=page, per_page=PAGE_SIZE
        )
