"""Workers on servers of Hetzner Cloud.

What it promises:
- A server is ours if its labels name our database, our fleet and a worker. Any other is neither listed nor touched.
- `create` sends one request per choice of type and place. One that is refused for lack of capacity moves on to the
  next, and is remembered by all fleets with the token; so does one that is against a rule, which may be this fleet's
  own fault: only it remembers, and a person is told. Where all are wrong, so is the request. A name that is taken is
  the server of an earlier request whose answer was lost: it is taken over if its labels are ours. Whatever is not a
  clear no is Ambiguous.
- `list_machines` is whole or raises. Lists that follow each other within seconds are answered from the last one, with
  what we did since: lists of a moving fleet must not use up the requests that its hirings need.
- `delete` returns when a server that was asked to go is not found by its id: that a deletion was accepted is not
  enough, nor that the deletion itself says it was not found.
- A Primary IP is made and deleted by the vendor together with its server. We label it, so that one that is left behind
  is found by its labels, and deleted, by whoever lists next.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial

import structlog
from hcloud.actions.client import ActionsPageResult, BoundAction
from hcloud.firewalls.domain import Firewall
from hcloud.images.domain import Image
from hcloud.locations.domain import Location
from hcloud.networks.domain import Network
from hcloud.server_types.domain import ServerType
from hcloud.servers.client import BoundServer, ServersPageResult
from hcloud.servers.domain import CreateServerResponse, Server, ServerCreatePublicNetwork
from hcloud.ssh_keys.domain import SSHKey

from windlass.model.cost import PricePart
from windlass.model.errors import (
    Ambiguous,
    Denied,
    InvalidRequest,
    LimitReached,
    NoCapacity,
    ProviderError,
    Refused,
    Throttled,
    Unavailable,
)
from windlass.model.hetzner import HOUR_S, Choice, HetznerSettings
from windlass.model.machine import Machine, MachineRequest, MachineState, Preparation, ProviderTraits
from windlass.ports.provider import OnHostKey
from windlass.providers.hetzner import naming
from windlass.providers.hetzner.account import BUSY_PAUSE_S, MAX_PAGES, MAX_WAIT_S, PAGE_SIZE, HetznerAccount
from windlass.providers.hetzner.addresses import PrimaryIpReaper
from windlass.providers.hetzner.catalog import PriceList, in_order, named
from windlass.providers.hetzner.errors import HOW_TO_BE_LET_IN, HetznerError, HetznerErrorInfo, HetznerErrorKind
from windlass.providers.hetzner.limiter import RATE_PER_S

# Each shorter than the control loop's own limit, so that it is we who say what is known.
CREATE_TIMEOUT_S = 55.0
LIST_TIMEOUT_S = 50.0
DELETE_TIMEOUT_S = 55.0
# Before the next server is asked for, where nobody could be asked.
UNREACHABLE_PAUSE_S = 10.0
# A creation that collides with something else is sent again this often.
BUSY_TRIES = 3
# The last 250 actions of a project, in which a deletion is looked for whose answer was lost: those of a busy hour.
MAX_ACTION_PAGES = 5
# From one look at a server that is being deleted to the next; a deletion usually takes a second.
DELETE_LOOKS_S = (1.5, 2.0, 4.0, 8.0, 12.0, 12.0)
# A list is given again for this long for each of its pages: lists take at most a fifth of a request a second.
LIST_REUSE_S = 5.0
LIST_REUSE_MAX_S = 20.0
# A choice that was refused is told of for this long, unless it is had before.
REFUSED_TOLD_S = 3600.0
# A new server may be off for a moment between being made and being started.
OFF_WHILE_BOOTING_S = 60.0

# For how long a list may be old: read replicas and caches of the vendor's, which promises nothing, and the list given
# again. What is really gone costs nothing while we wait, and silence would take twice as long to be noticed.
_ABSENCE_GRACE_S = 60.0
# A gateway gives up on what is behind it after a minute; what is behind it may still make a server then. And the list
# that should show it may be old.
_CREATION_LATENESS_S = 60.0 + _ABSENCE_GRACE_S
# A server deleted a moment ago may still be listed, and one made by a newer leader may be listed before its row is
# seen. Either is settled when the list is no longer old.
_STRAY_GRACE_S = _ABSENCE_GRACE_S
# Of the allowance, what deletions get at the least: where many fleets share it, they do not list that often.
_LEAST_FOR_DELETIONS_PER_S = RATE_PER_S / 4
# A deletion, and a look whether it is gone.
_REQUESTS_TO_DELETE = 2
_FIELDS_OF_A_CHOICE = frozenset({"server_type", "location"})

_STATES = {
    "initializing": MachineState.BOOTING,
    "starting": MachineState.BOOTING,
    "running": MachineState.RUNNING,
    # The vendor is at it, and it will come back by itself.
    "migrating": MachineState.BOOTING,
    "rebuilding": MachineState.BOOTING,
    # Not known is not gone.
    "unknown": MachineState.BOOTING,
    # It is paid for and will not come back by itself.
    "off": MachineState.EXITED,
    "stopping": MachineState.EXITED,
    "deleting": MachineState.EXITED,
}
log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Listing:
    machines: dict[str, Machine]
    fresh_until: float


class HetznerProvider:
    """The servers of one fleet. `identity` tells our database from all others; all fleets with one token share an
    `account`. `render_user_data` gives what a new server is told at its first boot."""

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
        delete_looks_s: Sequence[float] = DELETE_LOOKS_S,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._account = account
        self._installation = naming.installation_of(identity)
        self._labels = naming.fleet_labels(self._installation, fleet)
        self._render_user_data = render_user_data
        self._network_id = settings.network_id or network_id
        self._list_reuse_s = list_reuse_s
        self._delete_looks_s = delete_looks_s
        self._now = now
        self._listing: _Listing | None = None
        # Machine id to when we made it, or (None) knew that it was gone: what the last list may not have.
        self._changes: dict[str, tuple[float, Machine | None]] = {}
        # What was refused of a choice, and when, while others could be had.
        self._refused: dict[Choice, tuple[datetime, HetznerErrorInfo]] = {}
        # Servers that were seen running: one that is off then has stopped.
        self._have_run: set[str] = set()
        self._addresses = PrimaryIpReaper(account, self._labels)
        account.join(fleet)

    @property
    def traits(self) -> ProviderTraits:
        return ProviderTraits(
            absence_grace_s=_ABSENCE_GRACE_S,
            creation_lateness_s=_CREATION_LATENESS_S,
            orphan_grace_s=_STRAY_GRACE_S,
            billing_unit_s=self._settings.billing_hour_s,
            deletions_per_s=_deletions_per_s(self._account.limiter.fleets),
            is_remote=True,
            key_hash=self._account.key_hash,
            refused_choices=tuple(
                (str(choice), problem.words) for choice, problem in self._refused_within(REFUSED_TOLD_S).items()
            ),
        )

    def _refused_within(self, seconds: float) -> dict[Choice, HetznerErrorInfo]:
        since = self._now() - timedelta(seconds=seconds)
        return {choice: problem for choice, (at, problem) in self._refused.items() if at > since}

    async def prepare(self, machine: Machine, host_key: str | None, on_host_key: OnHostKey) -> Preparation:  # noqa: ARG002
        """Nothing to do: servers start their workers by themselves."""
        return Preparation()

    async def close(self) -> None:
        """Servers go on without us. The account is shared: it ends with the last who uses it."""
        try:
            await self._addresses.close(is_deserted=self._listing is not None and not self._merged(self._listing))
        finally:
            self._account.leave(self._fleet)

    # ------------------------------------------------------------------------------------------------------ create

    async def create(self, request: MachineRequest) -> Machine:
        doing = f"creating server {request.name}"
        name = naming.server_name(request.name, self._installation)
        labels = naming.labels_of(self._labels, request, self._settings.labels)
        user_data = naming.check_user_data(request.name, self._user_data(request, doing))
        try:
            async with asyncio.timeout(CREATE_TIMEOUT_S):
                prices = await self._account.prices(self._settings.prices, MAX_WAIT_S)
                server = await self._create(name, labels, user_data, doing)
        except TimeoutError:
            raise Ambiguous(f"{doing}: no answer within {CREATE_TIMEOUT_S:g} s") from None
        machine = self._machine(server, prices)
        self._note(machine.id, machine)
        return machine

    def _user_data(self, request: MachineRequest, doing: str) -> str:
        try:
            return self._render_user_data(request)
        except ProviderError:
            raise
        except Exception as error:
            # A template is the user's own; whatever is wrong with it, no server was asked for.
            raise InvalidRequest(
                f"{doing}: its user_data cannot be rendered ({error}): check the fleet's bootstrap."
            ) from error

    async def _create(self, name: str, labels: dict[str, str], user_data: str, doing: str) -> BoundServer:
        wrong: list[tuple[Choice, HetznerErrorInfo]] = []
        for choice in await self._choices(doing):
            try:
                made = await self._account.ask(partial(self._post, name, labels, user_data, choice), tries=BUSY_TRIES)
            except HetznerError as trouble:
                if trouble.problem.kind is HetznerErrorKind.TAKEN:
                    return await self._take_over(name, labels, trouble.problem, doing)
                if _is_about_choice(trouble.problem):
                    wrong.append((choice, trouble.problem))
                    continue
                if trouble.problem.kind is not HetznerErrorKind.NO_CAPACITY:
                    raise self._refusal(trouble.problem, doing) from trouble
                log.info("no capacity", fleet=self._fleet, choice=str(choice), said=trouble.problem.words)
                self._account.note_no_capacity(choice, self._settings.capacity_memory_s)
            else:
                self._refused.pop(choice, None)
                self._set_aside(wrong)
                self._addresses.made_with(made.server)
                return made.server
        self._set_aside(wrong)
        refused = {*self._refused_within(self._settings.capacity_memory_s), *(choice for choice, _ in wrong)}
        if wrong and len(refused) == len(self._settings.ordered):
            # There is nothing else to be had: whoever asks again asks for all of them.
            self._refused.clear()
            raise self._refusal(wrong[0][1], doing)
        raise self._no_capacity(doing)

    def _set_aside(self, wrong: Sequence[tuple[Choice, HetznerErrorInfo]]) -> None:
        """Where others do, those that are refused are not asked for every time; a person should know."""
        for choice, problem in wrong:
            log.warning("choice refused", fleet=self._fleet, choice=str(choice), said=problem.words)
            self._refused[choice] = (self._now(), problem)

    async def _choices(self, doing: str) -> list[Choice]:
        choices = self._settings.ordered
        closed = self._account.exhausted() | self._refused_within(self._settings.capacity_memory_s).keys()
        if all(choice in closed for choice in choices):
            raise self._no_capacity(doing)
        # A hint is not worth waiting for.
        unavailable = await self._account.unavailable({choice.server_type for choice in choices}, max_wait_s=0.0)
        return in_order(choices, closed, unavailable)

    def _no_capacity(self, doing: str) -> NoCapacity:
        refused = self._refused_within(self._settings.capacity_memory_s)
        lacking = [choice for choice in self._settings.ordered if choice not in refused]
        what = f"Hetzner has none of {named(lacking)} now: wait, or add to hetzner.choices of fleet {self._fleet}"
        wrong = [f"{choice} is refused ({problem.words})" for choice, problem in refused.items()]
        return NoCapacity("; ".join([f"{doing}: {what}", *wrong]) + ".")

    def _post(self, name: str, labels: dict[str, str], user_data: str, choice: Choice) -> CreateServerResponse:
        settings = self._settings
        return self._account.api.servers.create(
            name=name,
            server_type=ServerType(name=choice.server_type),
            # Published as "id or name", and as text.
            image=Image(name=settings.image),
            location=Location(name=choice.location),
            labels=labels,
            user_data=user_data,
            ssh_keys=[SSHKey(name=key) for key in settings.ssh_keys] or None,
            firewalls=[Firewall(id=number) for number in settings.firewall_ids] or None,
            networks=[Network(id=self._network_id)] if self._network_id is not None else None,
            public_net=ServerCreatePublicNetwork(enable_ipv4=settings.is_ipv4_on, enable_ipv6=settings.is_ipv6_on),
        )

    async def _take_over(
        self, name: str, labels: Mapping[str, str], problem: HetznerErrorInfo, doing: str
    ) -> BoundServer:
        """The name is in use: by the server of an earlier request of ours, or by somebody else's."""
        try:
            page = await self._account.ask(lambda: self._account.api.servers.get_list(name=name))
        except (HetznerError, Throttled) as trouble:
            raise Ambiguous(f"{doing}: {problem.words}, and whose it is cannot be read ({trouble})") from trouble
        for server in page.servers:
            if server.labels and server.labels.get(naming.WORKER) == labels[naming.WORKER] and self._is_ours(server):
                return server
        if page.servers:
            raise Refused(f"{doing}: there is a server {name} already that is not ours: rename or delete it.")
        raise Ambiguous(f"{doing}: {problem.words}, but it is not listed")

    def _refusal(self, problem: HetznerErrorInfo, doing: str) -> ProviderError:
        said = f"{doing}: {problem.words}"
        match problem.kind:
            case HetznerErrorKind.LIMIT:
                return LimitReached(
                    f"{said}: ask for a higher limit in Hetzner's console, or lower max_workers of fleet {self._fleet}."
                )
            case HetznerErrorKind.DENIED:
                return Denied(f"{said}: {HOW_TO_BE_LET_IN}.")
            case HetznerErrorKind.THROTTLED | HetznerErrorKind.BUSY:
                return Throttled(said, retry_after_s=max(self._account.limiter.pause_s, 2 * BUSY_PAUSE_S))
            case HetznerErrorKind.UNSENT:
                return Throttled(said, retry_after_s=UNREACHABLE_PAUSE_S)
            case HetznerErrorKind.LOST:
                return Ambiguous(said)
            case HetznerErrorKind.REFUSED | HetznerErrorKind.NOT_FOUND:
                return InvalidRequest(f"{said}: check the hetzner settings of fleet {self._fleet}.")
            case _:
                return Refused(f"{said}: check the hetzner settings of fleet {self._fleet}.")

    # -------------------------------------------------------------------------------------------------------- list

    async def list_machines(self) -> tuple[Machine, ...]:
        loop = asyncio.get_running_loop()
        if self._listing is not None and loop.time() < self._listing.fresh_until:
            return self._merged(self._listing)
        doing = f"listing the servers of fleet {self._fleet}"
        began = loop.time()
        try:
            async with asyncio.timeout(LIST_TIMEOUT_S):
                servers = await self._list_servers(doing)
                prices = await self._account.prices(self._settings.prices, MAX_WAIT_S)
        except TimeoutError:
            raise Unavailable(f"{doing}: no whole list within {LIST_TIMEOUT_S:g} s") from None
        except HetznerError as trouble:
            hint = f": {HOW_TO_BE_LET_IN}." if trouble.problem.kind is HetznerErrorKind.DENIED else ""
            raise Unavailable(f"{doing}: {trouble.problem.words}{hint}") from trouble
        except Throttled as throttled:
            raise Unavailable(f"{doing}: {throttled}") from throttled
        machines = [self._machine(server, prices) for server in servers]
        pages = max(1, math.ceil(len(machines) / PAGE_SIZE))
        reuse_s = min(self._list_reuse_s * pages, LIST_REUSE_MAX_S)
        self._listing = _Listing({machine.id: machine for machine in machines}, began + reuse_s)
        self._changes = {id_: change for id_, change in self._changes.items() if change[0] >= began}
        self._have_run &= {machine.id for machine in machines}
        self._addresses.tend(servers)
        return self._merged(self._listing)

    async def _list_servers(self, doing: str) -> list[BoundServer]:
        """All pages. One that changes while it is read is read again: what moved to a page we had is in none we got."""
        for _ in range(2):
            servers: list[BoundServer] = []
            totals: set[int | None] = set()
            page: int | None = 1
            while page is not None and page <= MAX_PAGES:
                found = await self._account.ask(partial(self._list_page, page), is_urgent=True)
                servers += found.servers
                pagination = found.meta.pagination if found.meta is not None else None
                totals.add(pagination.total_entries if pagination is not None else len(servers))
                page = pagination.next_page if pagination is not None else None
            is_whole = len(totals) == 1 and totals <= {None, len({server.id for server in servers})}
            if is_whole and page is None:
                # The vendor chose them by these labels; whoever deletes by this list must not have to trust that.
                return [server for server in servers if self._is_ours(server)]
        raise Unavailable(f"{doing}: it changed while it was read")

    def _list_page(self, page: int) -> ServersPageResult:
        return self._account.api.servers.get_list(
            label_selector=naming.selector(self._labels), page=page, per_page=PAGE_SIZE
        )

    def _merged(self, listing: _Listing) -> tuple[Machine, ...]:
        """The list, and what we did since it was asked for."""
        machines = dict(listing.machines)
        for id_, (_, machine) in self._changes.items():
            if machine is None:
                machines.pop(id_, None)
            else:
                machines.setdefault(id_, machine)
        return tuple(machines.values())

    def _note(self, machine_id: str, machine: Machine | None) -> None:
        self._changes[machine_id] = (asyncio.get_running_loop().time(), machine)

    def _is_ours(self, server: BoundServer) -> bool:
        labels = server.labels or {}
        return naming.WORKER in labels and all(labels.get(key) == value for key, value in self._labels.items())

    def _machine(self, server: BoundServer, prices: PriceList | None) -> Machine:
        type_ = str(server.server_type.name) if server.server_type is not None else ""
        place = str(server.location.name) if server.location is not None else ""
        has_ipv4 = server.public_net is not None and server.public_net.ipv4 is not None
        published = prices.of(Choice(type_, place), has_ipv4=has_ipv4) if prices is not None else ()
        # The emulator asks the price of an hour for whatever it calls one.
        hours = HOUR_S // self._settings.billing_hour_s
        parts = tuple(PricePart(part.price_micros_per_hour * hours, part.price_micros_per_month) for part in published)
        state = self._state(server)
        return Machine(
            id=str(server.id),
            name=(server.labels or {})[naming.WORKER],
            state=state,
            created_at=server.created,
            address=_address(server),
            instance_type=type_,
            place=place,
            price_micros_per_hour=sum(part.price_micros_per_hour for part in parts) if parts else None,
            price_parts=parts,
            currency=prices.currency if prices is not None and parts else None,
            note=f"its server is {server.status}" if state is MachineState.EXITED else None,
        )

    def _state(self, server: BoundServer) -> MachineState:
        state = _STATES.get(str(server.status), MachineState.BOOTING)
        if state is MachineState.RUNNING:
            self._have_run.add(str(server.id))
        is_new = server.created is not None and self._now() - server.created < timedelta(seconds=OFF_WHILE_BOOTING_S)
        if server.status == "off" and is_new and str(server.id) not in self._have_run:
            return MachineState.BOOTING
        return state

    # ------------------------------------------------------------------------------------------------------ delete

    async def delete(self, machine: Machine) -> datetime | None:
        doing = f"deleting server {machine.id} of {machine.name}"
        if not machine.id.isdigit():
            # Whoever has such a one, it is not known here that it is gone.
            raise Refused(f"{doing}: not a Hetzner server id. Delete the machine at the fleet's former provider.")
        try:
            async with asyncio.timeout(DELETE_TIMEOUT_S):
                return await self._delete(int(machine.id), machine.name, doing)
        except TimeoutError:
            raise Unavailable(f"{doing}: it was not gone within {DELETE_TIMEOUT_S:g} s") from None

    async def _delete(self, server_id: int, worker_id: str, doing: str) -> datetime | None:
        """When the vendor began to delete it, which is when it stops to cost. None if nobody says."""
        machine_id = str(server_id)
        status: str | None = None
        accepted: list[datetime] = []
        if not self._is_known(machine_id):
            server = await self._look_up(server_id, doing)
            if server is None:
                return await self._deleted_at(server_id)
            if not self._is_ours(server):
                # Not ours to touch, and not gone: whoever took our labels off must say what becomes of it.
                raise Refused(
                    f"{doing}: server {server.name}, created for {worker_id}, does not carry our labels any more: "
                    "delete it in Hetzner's console, or restore them; until then it is paid for."
                )
            # It may be gone before it is ever listed here: what it leaves behind must be found all the same.
            self._addresses.tend([server])
        for look_s in self._delete_looks_s:
            if status != "deleting":
                accepted += await self._send_deletion(server_id, doing)
            await asyncio.sleep(look_s)
            server = await self._look_up(server_id, doing)
            if server is None:
                self._note(machine_id, None)
                if len(accepted) == 1:
                    return accepted[0]
                # Of several, one or the other may have failed after it was accepted.
                return await self._deleted_at(server_id) or next(iter(accepted), None)
            status = server.status
        raise Unavailable(f"{doing}: it is still {status}")

    def _is_known(self, machine_id: str) -> bool:
        """Whether it was in a list of ours, or made by us: ids are never used again."""
        listed = self._listing.machines if self._listing is not None else {}
        return machine_id in listed or machine_id in self._changes

    async def _look_up(self, server_id: int, doing: str) -> BoundServer | None:
        """None if the vendor says that there is none."""
        try:
            return await self._account.ask(lambda: self._account.api.servers.get_by_id(server_id), is_urgent=True)
        except HetznerError as trouble:
            if trouble.problem.kind is HetznerErrorKind.NOT_FOUND:
                return None
            raise self._not_deleted(trouble.problem, doing) from trouble

    async def _send_deletion(self, server_id: int, doing: str) -> list[datetime]:
        """When it began, if it did."""
        try:
            action = await self._account.ask(
                lambda: self._account.api.servers.delete(Server(id=server_id)), is_urgent=True
            )
        except HetznerError as trouble:
            # Locked while it is being made: it can be deleted soon. Not found: we look for ourselves.
            if trouble.problem.kind not in (HetznerErrorKind.NOT_FOUND, HetznerErrorKind.BUSY):
                raise self._not_deleted(trouble.problem, doing) from trouble
            return []
        return [] if action.started is None else [action.started]

    async def _deleted_at(self, server_id: int) -> datetime | None:
        """Of a server whose deletion was not answered, or was somebody else's: as the vendor remembers it. It is gone
        either way, so this is asked once, and trouble with it is no trouble."""
        page: int | None = 1
        try:
            while page is not None and page <= MAX_ACTION_PAGES:
                found = await self._account.ask(partial(self._actions_page, page), is_urgent=True)
                began = [action.started for action in found.actions if action.started and _deletes(action, server_id)]
                if began:
                    return min(began)
                page = found.meta.pagination.next_page if found.meta and found.meta.pagination else None
        except (HetznerError, Throttled):
            pass
        return None

    def _actions_page(self, page: int) -> ActionsPageResult:
        return self._account.api.servers.actions.get_list(sort=["started:desc"], page=page, per_page=PAGE_SIZE)

    def _not_deleted(self, problem: HetznerErrorInfo, doing: str) -> ProviderError:
        said = f"{doing}: {problem.words}"
        match problem.kind:
            case HetznerErrorKind.PROTECTED:
                return Refused(f"{said}: take the protection off in Hetzner's console; until then it is paid for.")
            case HetznerErrorKind.DENIED:
                return Denied(f"{said}: {HOW_TO_BE_LET_IN}; until then it is paid for.")
            case HetznerErrorKind.THROTTLED:
                return Throttled(said, retry_after_s=max(self._account.limiter.pause_s, 2 * BUSY_PAUSE_S))
            case _:
                return Unavailable(said)


def _is_about_choice(problem: HetznerErrorInfo) -> bool:
    """Another type or place may do. The vendor does not always say which field it means; then it may be this."""
    is_wrong = problem.kind in (HetznerErrorKind.REFUSED, HetznerErrorKind.NOT_FOUND)
    return is_wrong and (not problem.fields or bool(problem.fields & _FIELDS_OF_A_CHOICE))


def _deletes(action: BoundAction, server_id: int) -> bool:
    """Or is about to; one that failed does not."""
    about = [(resource["type"], resource["id"]) for resource in action.resources or ()]
    return action.command == "delete_server" and action.status != "error" and ("server", server_id) in about


def _deletions_per_s(fleets: int) -> float:
    """For one of so many fleets with one allowance, of what their lists leave. Their hours may end together."""
    left_per_s = max(RATE_PER_S - fleets / LIST_REUSE_S, _LEAST_FOR_DELETIONS_PER_S)
    return left_per_s / _REQUESTS_TO_DELETE / fleets


def _address(server: BoundServer) -> str | None:
    """The private one where there is one: that is where the control plane and its workers meet."""
    if server.private_net:
        return str(server.private_net[0].ip)
    net = server.public_net
    if net is None:
        return None
    return str(net.ipv4.ip) if net.ipv4 is not None else str(net.ipv6.ip) if net.ipv6 is not None else None
