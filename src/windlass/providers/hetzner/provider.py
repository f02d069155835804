"""Workers on servers of Hetzner Cloud.

Guarantees:
- A server is ours if its labels name our database, our fleet and a worker. Others are neither listed nor touched.
- `create` sends one request per choice of server type and location. A choice without capacity is skipped, and all
  fleets with the token remember it. So is a choice that a limit of the project excludes: limits are per kind, so
  without dedicated cores a shared type may still be available. A choice that is refused is skipped too, but only this
  fleet remembers it, since the cause may be in its settings. Both are reported in `traits`. If all choices are refused,
  the request is invalid; if a limit excludes all that remain, it is LimitReached. If
  the name is in use by a server with our labels, an earlier response was lost and that server is adopted. Any other
  failure that is not a clear rejection is Ambiguous.
- `list_machines` is complete or raises (server_list.py).
- `delete` returns when a server whose deletion was requested is not found by its id. An accepted deletion is not
  enough, nor a deletion that answers "not found".
- Primary IPs are created and deleted by the vendor with their server. Orphaned ones are deleted (primary_ips.py).
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial

import structlog
from hcloud.actions.client import BoundAction
from hcloud.firewalls.domain import Firewall
from hcloud.images.domain import Image
from hcloud.locations.domain import Location
from hcloud.networks.domain import Network
from hcloud.server_types.domain import ServerType
from hcloud.servers.client import BoundServer
from hcloud.servers.domain import CreateServerResponse, Server, ServerCreatePublicNetwork
from hcloud.ssh_keys.domain import SSHKey

from windlass.model.errors import (
    Ambiguous,
    Denied,
    InvalidRequest,
    LimitReached,
    NoCapacity,
    ProviderError,
    ProviderUnreachable,
    Refused,
    Throttled,
    Unavailable,
)
from windlass.model.hetzner import Choice, HetznerSettings
from windlass.model.machine import Machine, MachineRequest, Preparation, ProviderTraits
from windlass.ports.provider import OnHostKey
from windlass.providers.fingerprint import fingerprint
from windlass.providers.hetzner import naming
from windlass.providers.hetzner.account import BUSY_PAUSE_S, MAX_WAIT_S, PAGE_SIZE, HetznerAccount
from windlass.providers.hetzner.catalog import order_choices
from windlass.providers.hetzner.errors import TOKEN_HINT, LimitKind, limit_kind
from windlass.providers.hetzner.limiter import RATE_PER_S
from windlass.providers.hetzner.primary_ips import PrimaryIpReaper
from windlass.providers.hetzner.private_network import ProjectNetwork
from windlass.providers.hetzner.server_list import LIST_REUSE_S, ServerList
from windlass.providers.vendor_error import ErrorKind, VendorError

# Each is shorter than the control loop's own limit, so that the error says what is known.
CREATE_TIMEOUT_S = 55.0
DELETE_TIMEOUT_S = 55.0
# Pause before the next creation if the API could not be reached.
UNREACHABLE_PAUSE_S = 10.0
# Attempts of a creation that collides with another action.
CREATE_ATTEMPTS = 3
# The last 250 actions of a project, those of a busy hour, are searched for a deletion whose response was lost.
MAX_ACTION_PAGES = 5
# Pauses between checks whether a server is gone. A deletion usually takes a second.
DELETE_POLL_INTERVALS_S = (1.5, 2.0, 4.0, 8.0, 12.0, 12.0)
# A refused choice is reported for this long, unless it succeeds earlier.
REFUSED_REPORTED_S = 3600.0

# The age that a list may have. The vendor promises nothing about replicas and caches, and lists are reused. Waiting is
# free: a machine that is really gone costs nothing, and missing heartbeats would take twice as long to notice.
_ABSENCE_GRACE_S = 60.0
# A gateway times out after a minute while its backend may still create the server, and then the list may be old.
_CREATION_LATENESS_S = 60.0 + _ABSENCE_GRACE_S
# A server that was just deleted may still be listed, and a server of a newer leader may be listed before its row is
# visible. Both are settled when the list can no longer be old.
_ORPHAN_GRACE_S = _ABSENCE_GRACE_S
# The share of the request rate that deletions get at least. Many fleets with one token list less often.
_MIN_DELETION_RATE_PER_S = RATE_PER_S / 4
# A deletion, and a check whether the server is gone.
_REQUESTS_PER_DELETION = 2
_FIELDS_OF_CHOICE = frozenset({"server_type", "location"})
log = structlog.get_logger(__name__)


class HetznerProvider:
    """The servers of one fleet. `identity` is the database's; fleets with the same token share an `account`.
    `render_user_data` returns the cloud-init data of a new server."""

    def __init__(
        self,
        fleet: str,
        settings: HetznerSettings,
        account: HetznerAccount,
        *,
        identity: str,
        render_user_data: Callable[[MachineRequest], str],
        network_id: int | None = None,
        list_reuse_s: float = LIST_REUSE_S,
        delete_poll_intervals_s: Sequence[float] = DELETE_POLL_INTERVALS_S,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._account = account
        self._installation = fingerprint(identity)
        self._labels = naming.fleet_labels(self._installation, fleet)
        self._render_user_data = render_user_data
        self._network_id = settings.network_id or (network_id if settings.is_network_on else None)
        self._delete_poll_intervals_s = delete_poll_intervals_s
        self._now = now
        # Refused choices: when, and the vendor's message.
        self._refused: dict[Choice, tuple[datetime, str]] = {}
        self._primary_ips = PrimaryIpReaper(account, self._labels)
        self._default_network = ProjectNetwork(account)
        self._servers = ServerList(
            fleet,
            settings,
            account,
            self._labels,
            on_listed=self._primary_ips.reconcile,
            reuse_s=list_reuse_s,
            now=now,
        )
        account.add_user(fleet)

    @property
    def traits(self) -> ProviderTraits:
        # Fleets with one token share the rate that their lists leave. Their billing hours may end together.
        fleets = self._account.limiter.fleet_count
        deletion_rate_per_s = max(RATE_PER_S - fleets / LIST_REUSE_S, _MIN_DELETION_RATE_PER_S)
        return ProviderTraits(
            absence_grace_s=_ABSENCE_GRACE_S,
            creation_lateness_s=_CREATION_LATENESS_S,
            orphan_grace_s=_ORPHAN_GRACE_S,
            billing_unit_s=self._settings.billing_hour_s,
            deletions_per_s=deletion_rate_per_s / _REQUESTS_PER_DELETION / fleets,
            is_remote=True,
            key_hash=self._account.key_hash,
            refused_choices=tuple(
                (str(choice), message) for choice, message in self._refused_within(REFUSED_REPORTED_S).items()
            ),
        )

    def _limited_choices(self) -> dict[Choice, str]:
        limited = self._account.limited()
        return {c: limited[c.server_type] for c in self._settings.ordered if c.server_type in limited}

    def _refused_within(self, seconds: float) -> dict[Choice, str]:
        since = self._now() - timedelta(seconds=seconds)
        return {choice: message for choice, (at, message) in self._refused.items() if at > since}

    async def prepare(self, machine: Machine, host_key: str | None, on_host_key: OnHostKey) -> Preparation:  # noqa: ARG002
        """Nothing to do: servers start their workers themselves."""
        return Preparation()

    async def close(self) -> None:
        """Servers keep running. The account closes with its last user."""
        try:
            await self._primary_ips.close(has_no_servers=self._servers.is_empty)
        finally:
            self._account.remove_user(self._fleet)

    async def list_machines(self) -> tuple[Machine, ...]:
        return await self._servers.machines()

    async def price(self, machine: Machine) -> Machine:
        prices = await self._account.prices(self._settings.prices, MAX_WAIT_S)
        return self._servers.with_price(machine, prices, has_ipv4=self._settings.is_ipv4_on)

    # ------------------------------------------------------------------------------------------------------ create

    async def create(self, request: MachineRequest) -> Machine:
        doing = f"creating server {request.name}"
        name = naming.server_name(request.name, self._installation)
        labels = naming.server_labels(self._labels, request, self._settings.labels)
        try:
            user_data = self._render_user_data(request)
        except ProviderError:
            raise
        except Exception as error:
            # The template is the user's own. Whatever it raises, no server was requested.
            raise InvalidRequest(
                f"{doing}: cannot render user_data ({error}). Check the bootstrap settings of fleet {self._fleet}."
            ) from error
        naming.check_user_data(request.name, user_data)
        try:
            async with asyncio.timeout(CREATE_TIMEOUT_S):
                prices = await self._account.prices(self._settings.prices, MAX_WAIT_S)
                server = await self._create(name, labels, user_data, doing)
        except TimeoutError:
            raise Ambiguous(f"{doing}: no response within {CREATE_TIMEOUT_S:g} s") from None
        machine = self._servers.to_machine(server, prices)
        self._servers.changes.record(machine.id, machine)
        return machine

    async def _create(self, name: str, labels: dict[str, str], user_data: str, doing: str) -> BoundServer:
        choices = self._settings.ordered
        limited = self._limited_choices()
        skipped = self._account.exhausted() | self._refused_within(self._settings.capacity_memory_s).keys()
        skipped |= limited.keys()
        if all(choice in skipped for choice in choices):
            raise self._nothing_left(doing)
        # Stock is only a hint, not worth waiting for.
        out_of_stock = await self._account.out_of_stock({choice.server_type for choice in choices}, max_wait_s=0.0)
        refused: list[tuple[Choice, VendorError]] = []
        for choice in order_choices(choices, skipped, out_of_stock):
            if choice in self._limited_choices():
                continue  # a limit that an earlier choice has shown
            try:
                post = await self._request_of(name, labels, user_data, choice)
                created = await self._account.request(post, attempts=CREATE_ATTEMPTS)
            except VendorError as error:
                if error.kind is ErrorKind.NAME_IN_USE:
                    return await self._adopt_server(name, labels, error, doing)
                if error.kind is ErrorKind.LIMIT and self._record_limit(choice, error):
                    continue
                if _may_depend_on_choice(error):
                    refused.append((choice, error))
                    continue
                self._default_network.forget()
                if error.kind is not ErrorKind.NO_CAPACITY:
                    raise self._creation_error(error, doing) from error
                log.info("find no capacity", fleet=self._fleet, choice=str(choice), error=str(error))
                self._account.record_no_capacity(choice, self._settings.capacity_memory_s)
            else:
                self._refused.pop(choice, None)
                self._record_refused(refused)
                self._primary_ips.add_server(created.server)
                return created.server
        self._record_refused(refused)
        all_refused = self._refused_within(self._settings.capacity_memory_s).keys() | {choice for choice, _ in refused}
        if refused and len(all_refused) == len(choices):
            # Nothing is left to try: the next request tries all choices again.
            self._refused.clear()
            self._default_network.forget()
            raise self._creation_error(refused[0][1], doing)
        raise self._nothing_left(doing)

    def _record_limit(self, choice: Choice, error: VendorError) -> bool:
        """Remember which kind is used up, and for which server types. False if no choice can help."""
        kind, types = limit_kind(error), {choice.server_type}
        if kind in (LimitKind.SERVERS, LimitKind.PRIMARY_IPS):
            return False
        if kind is LimitKind.DEDICATED_CORES:
            types |= {each.server_type for each in self._settings.ordered}
        log.warning("reach limit", fleet=self._fleet, choice=str(choice), limit=kind.value, error=str(error))
        self._account.record_limit(kind, types, str(error), self._settings.capacity_memory_s)
        for each, message in self._limited_choices().items():
            self._refused[each] = (self._now(), message)
        return True

    def _nothing_left(self, doing: str) -> ProviderError:
        """Why no choice can be tried: a limit of the project excludes all that are not refused, or no capacity."""
        limited = self._limited_choices()
        refused = self._refused_within(self._settings.capacity_memory_s)
        if limited and all(choice in limited or choice in refused for choice in self._settings.ordered):
            # The next request, after the control loop's back-off, asks again.
            self._account.forget_limits()
            self._refused.clear()
            message = next(iter(limited.values()))
            return self._creation_error(VendorError(ErrorKind.LIMIT, message), doing)
        return self._no_capacity(doing)

    def _record_refused(self, refused: Sequence[tuple[Choice, VendorError]]) -> None:
        """Skip these for a while, and report them."""
        for choice, error in refused:
            log.warning("skip choice", fleet=self._fleet, choice=str(choice), error=str(error))
            self._refused[choice] = (self._now(), str(error))

    def _no_capacity(self, doing: str) -> NoCapacity:
        refused = self._refused_within(self._settings.capacity_memory_s)
        lacking = ", ".join(str(choice) for choice in self._settings.ordered if choice not in refused)
        advice = f"Wait, or add choices to hetzner.choices of fleet {self._fleet}."
        reasons = [f" Refused: {choice} ({message})." for choice, message in refused.items()]
        return NoCapacity(f"{doing}: no capacity for {lacking}. {advice}{''.join(reasons)}")

    async def _request_of(
        self, name: str, labels: dict[str, str], user_data: str, choice: Choice
    ) -> Callable[[], CreateServerResponse]:
        """The call that creates a server. Network and firewall are found or created before. Raises VendorError."""
        settings, network_id, firewalls = self._settings, self._network_id, list(self._settings.firewall_ids)
        if settings.is_network_on and network_id is None:
            network_id = await self._default_network.network_id(choice.location)
        if settings.is_firewall_on and settings.has_public_address and not firewalls:
            firewalls = [await self._default_network.firewall_id()]
        return partial(
            self._account.api.servers.create,
            name=name,
            server_type=ServerType(name=choice.server_type),
            # The API accepts an id or a name here, as text.
            image=Image(name=settings.image),
            location=Location(name=choice.location),
            labels=labels,
            user_data=user_data,
            ssh_keys=[SSHKey(name=key) for key in settings.ssh_keys] or None,
            firewalls=[Firewall(id=number) for number in firewalls] or None,
            networks=[Network(id=network_id)] if network_id is not None else None,
            public_net=ServerCreatePublicNetwork(enable_ipv4=settings.is_ipv4_on, enable_ipv6=settings.is_ipv6_on),
        )

    async def _adopt_server(self, name: str, labels: Mapping[str, str], in_use: VendorError, doing: str) -> BoundServer:
        """The name is in use: by the server of our earlier request, or by a foreign server."""
        try:
            page = await self._account.request(lambda: self._account.api.servers.get_list(name=name))
        except (VendorError, Throttled) as error:
            raise Ambiguous(f"{doing}: {in_use}, and its owner cannot be read ({error})") from error
        for server in page.servers:
            if self._servers.is_ours(server) and (server.labels or {})[naming.WORKER] == labels[naming.WORKER]:
                return server
        if page.servers:
            raise Refused(f"{doing}: a server {name} exists that is not ours. Rename or delete it.")
        raise Ambiguous(f"{doing}: {in_use}, but no server with that name is listed")

    def _creation_error(self, error: VendorError, doing: str) -> ProviderError:
        message = f"{doing}: {error}"
        match error.kind:
            case ErrorKind.LIMIT:
                return LimitReached(
                    f"{message}: request a higher limit in Hetzner's console, or lower max_workers of fleet "
                    f"{self._fleet}."
                )
            case ErrorKind.DENIED:
                return Denied(f"{message}: {TOKEN_HINT}.")
            case ErrorKind.THROTTLED | ErrorKind.BUSY:
                return self._throttled(message)
            case ErrorKind.UNSENT:
                return ProviderUnreachable(message, retry_after_s=UNREACHABLE_PAUSE_S)
            case ErrorKind.LOST:
                return Ambiguous(message)
            case ErrorKind.REFUSED | ErrorKind.NOT_FOUND | ErrorKind.INVALID:
                return InvalidRequest(f"{message}: check the hetzner settings of fleet {self._fleet}.")
            case _:
                return Refused(f"{message}: check the hetzner settings of fleet {self._fleet}.")

    def _throttled(self, message: str) -> Throttled:
        return Throttled(message, retry_after_s=max(self._account.limiter.pause_s, 2 * BUSY_PAUSE_S))

    # ------------------------------------------------------------------------------------------------------ delete

    async def delete(self, machine: Machine) -> datetime | None:
        """Returns when the vendor began to delete the server, which ends its billing. None if that is unknown."""
        doing = f"deleting server {machine.id} of {machine.name}"
        if not machine.id.isdigit():
            raise Refused(f"{doing}: not a Hetzner server id. Delete the machine at the fleet's former provider.")
        try:
            async with asyncio.timeout(DELETE_TIMEOUT_S):
                return await self._delete(int(machine.id), machine.name, doing)
        except TimeoutError:
            raise Unavailable(f"{doing}: the server still exists after {DELETE_TIMEOUT_S:g} s") from None

    async def _delete(self, server_id: int, worker_id: str, doing: str) -> datetime | None:
        status: str | None = None
        accepted: list[datetime] = []
        if not self._servers.is_known(str(server_id)):
            server = await self._get_server(server_id, doing)
            if server is None:
                return await self._find_deletion_time(server_id)
            if not self._servers.is_ours(server):
                raise Refused(
                    f"{doing}: server {server.name}, created for {worker_id}, has lost our labels. Delete it in "
                    "Hetzner's console, or restore the labels. It is billed until then."
                )
            # It may be gone before it is listed here. Label its addresses, so that orphaned ones are found.
            self._primary_ips.reconcile([server])
        for interval_s in self._delete_poll_intervals_s:
            if status != "deleting":
                accepted += await self._request_deletion(server_id, doing)
            await asyncio.sleep(interval_s)
            server = await self._get_server(server_id, doing)
            if server is None:
                self._servers.changes.record(str(server_id), None)
                if len(accepted) == 1:
                    return accepted[0]
                # Any of several accepted deletions may have failed later.
                return await self._find_deletion_time(server_id) or next(iter(accepted), None)
            status = server.status
        raise Unavailable(f"{doing}: the server is still {status}")

    async def _get_server(self, server_id: int, doing: str) -> BoundServer | None:
        """None if the vendor answers "not found"."""
        try:
            return await self._account.request(lambda: self._account.api.servers.get_by_id(server_id), is_urgent=True)
        except VendorError as error:
            if error.kind is ErrorKind.NOT_FOUND:
                return None
            raise self._deletion_error(error, doing) from error

    async def _request_deletion(self, server_id: int, doing: str) -> list[datetime]:
        """When the deletion began; empty if it did not."""
        try:
            action = await self._account.request(
                lambda: self._account.api.servers.delete(Server(id=server_id)), is_urgent=True
            )
        except VendorError as error:
            # Busy: a server that is being created can be deleted soon. Not found: the caller checks by id.
            if error.kind not in (ErrorKind.NOT_FOUND, ErrorKind.BUSY):
                raise self._deletion_error(error, doing) from error
            return []
        return [] if action.started is None else [action.started]

    async def _find_deletion_time(self, server_id: int) -> datetime | None:
        """From the vendor's log of actions, if our deletion had no response or was not the only one. The server is gone
        either way, so a failure is ignored."""
        get_page = partial(self._account.api.servers.actions.get_list, sort=["started:desc"], per_page=PAGE_SIZE)
        page: int | None = 1
        try:
            while page is not None and page <= MAX_ACTION_PAGES:
                found = await self._account.request(partial(get_page, page=page), is_urgent=True)
                began = [action.started for action in found.actions if action.started and _deletes(action, server_id)]
                if began:
                    return min(began)
                page = found.meta.pagination.next_page if found.meta and found.meta.pagination else None
        except (VendorError, Throttled):
            pass
        return None

    def _deletion_error(self, error: VendorError, doing: str) -> ProviderError:
        message = f"{doing}: {error}"
        match error.kind:
            case ErrorKind.PROTECTED:
                return Refused(f"{message}: remove the protection in Hetzner's console. It is billed until then.")
            case ErrorKind.DENIED:
                return Denied(f"{message}: {TOKEN_HINT}. The server is billed until then.")
            case ErrorKind.THROTTLED:
                return self._throttled(message)
            case _:
                return Unavailable(message)


def _may_depend_on_choice(error: VendorError) -> bool:
    """Whether another type or location may be accepted. If the vendor names no field, it may be one of these."""
    is_refused = error.kind in (ErrorKind.REFUSED, ErrorKind.NOT_FOUND)
    return is_refused and (not error.fields or bool(error.fields & _FIELDS_OF_CHOICE))


def _deletes(action: BoundAction, server_id: int) -> bool:
    """Whether this action deletes the server and has not failed."""
    resources = [(resource["type"], resource["id"]) for resource in action.resources or ()]
    return action.command == "delete_server" and action.status != "error" and ("server", server_id) in resources
