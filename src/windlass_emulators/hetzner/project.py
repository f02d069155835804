"""The resources of an emulated project and their changes over time.

Everything that takes time is scheduled on one timeline and happens at its own time, even if no request arrives then.
"""

import ipaddress
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from windlass_emulators.hetzner.catalog import DEFAULT_CATALOG, HetznerCatalog, Image, Location, Rate, ServerType
from windlass_emulators.hetzner.errors import HetznerApiError
from windlass_emulators.hetzner.faults import HetznerFaults
from windlass_emulators.hetzner.ledger import HetznerBill, HetznerBillLine
from windlass_emulators.hetzner.settings import HetznerEmulatorSettings
from windlass_emulators.http import Json
from windlass_emulators.machines import MachineHost
from windlass_emulators.timeline import Timeline

# The oldest actions are dropped, as Hetzner does after a while.
MAX_ACTIONS = 20_000
# Deleted resources are kept this long, for lists with an injected lag.
MAX_LAG = timedelta(hours=1)
# Ranges reserved for benchmarks and documentation: the addresses belong to no host.
_IPV4_BASE = int(ipaddress.IPv4Address("198.18.0.1"))
_IPV6_BASE = int(ipaddress.IPv6Address("2001:db8::"))


@dataclass(slots=True, eq=False)
class Action:
    id: int
    command: str
    resources: Sequence[tuple[str, int]]
    started: datetime
    finishes: datetime
    # Error code, if the action fails when it finishes.
    error: str | None = None

    def is_running(self, now: datetime) -> bool:
        return now < self.finishes

    def progress(self, now: datetime) -> int:
        if not self.is_running(now):
            return 100
        return int(100 * (now - self.started) / (self.finishes - self.started))


@dataclass(slots=True, eq=False)
class Resource:
    id: int
    name: str
    labels: dict[str, str]
    created: datetime
    gone_at: datetime | None = field(default=None, kw_only=True)

    def existed_at(self, moment: datetime) -> bool:
        return self.created <= moment and (self.gone_at is None or moment < self.gone_at)


@dataclass(slots=True)
class PrivateNet:
    network_id: int
    ip: str
    mac_address: str


@dataclass(slots=True, eq=False)
class Server(Resource):
    server_type: ServerType
    location: Location
    image: Image
    user_data: str
    statuses: list[tuple[datetime, str]]
    ipv4_id: int | None = None
    ipv6_id: int | None = None
    private_nets: list[PrivateNet] = field(default_factory=list)
    # The server is locked until then by a running action.
    busy_until: datetime | None = None
    # A scheduled power change is void if this number has changed since.
    power_changes: int = 0
    # Injected fault: the program in user_data never starts.
    is_dead: bool = False
    extra_boot_s: float = 0.0

    @property
    def status(self) -> str:
        return self.statuses[-1][1]

    def status_at(self, moment: datetime) -> str:
        known = [status for at, status in self.statuses if at <= moment]
        return known[-1] if known else self.statuses[0][1]

    def is_locked(self, now: datetime) -> bool:
        return self.busy_until is not None and now < self.busy_until


@dataclass(slots=True, eq=False)
class PrimaryIp(Resource):
    type: str
    ip: str
    location: Location
    is_auto_deleted: bool
    server_id: int | None


@dataclass(slots=True, eq=False)
class Network(Resource):
    ip_range: str
    subnets: list[Json]


@dataclass(slots=True, eq=False)
class Firewall(Resource):
    rules: list[Json]
    server_ids: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class SshKey(Resource):
    public_key: str
    fingerprint: str


class Project:
    def __init__(
        self,
        settings: HetznerEmulatorSettings,
        host: MachineHost,
        faults: HetznerFaults,
        now: datetime,
        catalog: HetznerCatalog = DEFAULT_CATALOG,
    ) -> None:
        self.settings = settings
        self.host = host
        self.faults = faults
        self.catalog = catalog
        self.now = now
        self.ledger = HetznerBill(settings.billing_hour_s)
        self.servers: dict[int, Server] = {}
        self.primary_ips: dict[int, PrimaryIp] = {}
        self.networks: dict[int, Network] = {}
        self.firewalls: dict[int, Firewall] = {}
        self.ssh_keys: dict[int, SshKey] = {}
        self.actions: OrderedDict[int, Action] = OrderedDict()
        # Rendered server types and datacenters, reused within one response.
        self.rendered: dict[tuple[str, int], Json] = {}
        self._departed: list[Server | PrimaryIp] = []
        self._ids = itertools.count(100_001)
        self._addresses = itertools.count()
        self._timeline = Timeline(now, self._set_now)

    # ------------------------------------------------------------------------------------------------------ time

    def advance(self, now: datetime) -> None:
        self._timeline.advance(now)
        self._departed = [each for each in self._departed if each.gone_at and now - each.gone_at < MAX_LAG]

    def next_due(self) -> datetime | None:
        return self._timeline.next_due()

    def _set_now(self, now: datetime) -> None:
        self.now = self.faults.now = now
        self.rendered.clear()

    # --------------------------------------------------------------------------------------------------- common

    def new_id(self) -> int:
        return next(self._ids)

    def published_now(self) -> datetime:
        """The current time in whole seconds. Published times (`created`, `started` of a deletion) are also billed."""
        return self.now.replace(microsecond=0)

    def act(self, command: str, resources: Sequence[tuple[str, int]], takes_s: float) -> Action:
        """Start an action and lock its server until it finishes. If the action has an error, the caller must not make
        the change."""
        error = self.faults.take_action_fault(command)
        action = Action(self.new_id(), command, resources, self.now, self.now + timedelta(seconds=takes_s), error)
        self.actions[action.id] = action
        while len(self.actions) > MAX_ACTIONS:
            self.actions.popitem(last=False)
        for kind, id_ in resources:
            if kind == "server" and id_ in self.servers:
                server = self.servers[id_]
                server.busy_until = max(server.busy_until or action.finishes, action.finishes)
        return action

    def visible_servers(self) -> list[Server]:
        """The servers that a list shows, including an injected list lag."""
        gone = [each for each in self._departed if isinstance(each, Server)]
        return [each for each in (*gone, *self.servers.values()) if each.existed_at(self.list_moment())]

    def visible_primary_ips(self) -> list[PrimaryIp]:
        gone = [each for each in self._departed if isinstance(each, PrimaryIp)]
        return [each for each in (*gone, *self.primary_ips.values()) if each.existed_at(self.list_moment())]

    def list_moment(self) -> datetime:
        return self.now - timedelta(seconds=min(self.faults.lag_s, MAX_LAG.total_seconds()))

    # ---------------------------------------------------------------------------------------------- primary IPs

    def add_primary_ip(
        self, type_: str, location: Location, *, is_auto_deleted: bool, server: Server | None = None, name: str = ""
    ) -> PrimaryIp:
        """`server`: the server that it is created with and assigned to."""
        id_, number = self.new_id(), next(self._addresses)
        address = str(ipaddress.IPv4Address(_IPV4_BASE + number))
        if type_ == "ipv6":
            address = f"{ipaddress.IPv6Address(_IPV6_BASE + (number << 64))}/64"
        name, created, server_id = name or f"primary_ip-{id_}", self.published_now(), server.id if server else None
        primary_ip = PrimaryIp(id_, name, {}, created, type_, address, location, is_auto_deleted, server_id)
        self.primary_ips[id_] = primary_ip
        rate: Rate = self.catalog.primary_ipv4 if type_ == "ipv4" else self.catalog.primary_ipv6
        what = f"Primary {'IPv4' if type_ == 'ipv4' else 'IPv6'} in {location.name}"
        self.ledger.open(HetznerBillLine("primary_ip", id_, name, rate, created, what, server_id))
        return primary_ip

    def remove_primary_ip(self, primary_ip: PrimaryIp) -> None:
        primary_ip.gone_at = self.now
        del self.primary_ips[primary_ip.id]
        self._departed.append(primary_ip)
        self.ledger.close("primary_ip", primary_ip.id, self.published_now())

    # -------------------------------------------------------------------------------------------------- servers

    def add_server(self, server: Server) -> None:
        self.servers[server.id] = server
        what = f"{server.server_type.name} in {server.location.name}"
        rate = server.server_type.rates[server.location.name]
        self.ledger.open(HetznerBillLine("server", server.id, server.name, rate, server.created, what))

    def set_status(self, server: Server, status: str) -> None:
        server.statuses.append((self.now, status))

    def power_on(self, server: Server, takes_s: float) -> None:
        """`starting` now, `running` after `takes_s`; the program starts `cloud_init_s` later."""
        change = self._new_power_change(server)
        self.set_status(server, "starting")
        self._then(server, change, takes_s, lambda: self._run(server, change))

    def _run(self, server: Server, change: int) -> None:
        self.set_status(server, "running")
        delay_s = self.settings.cloud_init_s + server.extra_boot_s
        server.extra_boot_s = 0.0
        if not server.is_dead:
            self._then(server, change, delay_s, lambda: self.host.start(server.id, server.name, server.user_data))

    def power_off(self, server: Server, takes_s: float, *, is_sudden: bool = False) -> None:
        change = self._new_power_change(server)
        self.host.stop(server.id, is_sudden=is_sudden)
        self.set_status(server, "stopping")
        self._then(server, change, takes_s, lambda: self.set_status(server, "off"))

    def restart(self, server: Server, takes_s: float, *, is_sudden: bool = False) -> None:
        change = self._new_power_change(server)
        self.host.stop(server.id, is_sudden=is_sudden)
        self.set_status(server, "running")
        self._then(server, change, takes_s, lambda: self._run(server, change))

    def crash(self, server: Server) -> None:
        if server.status == "running":
            # This also cancels a scheduled start of the program.
            self._new_power_change(server)
            self.host.stop(server.id, is_sudden=True)

    def begin(self, server: Server, initializing_s: float, starting_s: float, *, is_started: bool) -> None:
        """Boot a new server, or leave it off."""
        change = self._new_power_change(server)
        if is_started:
            self._then(server, change, initializing_s, lambda: self.power_on(server, starting_s))
        else:
            self._then(server, change, initializing_s, lambda: self.set_status(server, "off"))

    def begin_deletion(self, server: Server) -> None:
        """Billing of the server and of its auto-deleted Primary IPs ends now; it disappears after `delete_s`."""
        change = self._new_power_change(server)
        self.set_status(server, "deleting")
        self.host.erase(server.id)
        self.ledger.close("server", server.id, self.published_now())
        for primary_ip in self.primary_ips_of(server):
            if primary_ip.is_auto_deleted:
                self.ledger.close("primary_ip", primary_ip.id, self.published_now())
        self._then(server, change, self.settings.delete_s, lambda: self.remove_server(server))

    def remove_server(self, server: Server) -> None:
        server.gone_at = self.now
        del self.servers[server.id]
        self._departed.append(server)
        for primary_ip in self.primary_ips_of(server):
            if primary_ip.is_auto_deleted:
                self.remove_primary_ip(primary_ip)
            else:
                primary_ip.server_id = None
        for firewall in self.firewalls.values():
            firewall.server_ids = [each for each in firewall.server_ids if each != server.id]

    def primary_ips_of(self, server: Server) -> list[PrimaryIp]:
        own = (server.ipv4_id, server.ipv6_id)
        return [self.primary_ips[id_] for id_ in own if id_ is not None and id_ in self.primary_ips]

    def _new_power_change(self, server: Server) -> int:
        server.power_changes += 1
        return server.power_changes

    def _then(self, server: Server, change: int, delay_s: float, effect: Callable[[], None]) -> None:
        """Schedule a step of a power change. It is skipped if another power change starts before it is due."""

        def run() -> None:
            if server.power_changes == change:
                effect()

        self._timeline.later(delay_s, run)

    # ------------------------------------------------------------------------------------------------- networks

    def attach(self, server: Server, network: Network) -> None:
        """Give the server the first free address in a subnet of its network zone. Raises HetznerApiError."""
        taken = {net.ip for each in self.servers.values() for net in each.private_nets if net.network_id == network.id}
        zone = server.location.network_zone
        for subnet in network.subnets:
            if subnet["type"] == "vswitch" or subnet["network_zone"] != zone:
                continue
            # The first address of a subnet is its gateway's.
            for host in itertools.islice(ipaddress.ip_network(subnet["ip_range"]).hosts(), 1, None):
                if str(host) not in taken:
                    mac = f"86:00:00:{(server.id >> 16) & 255:02x}:{(server.id >> 8) & 255:02x}:{server.id & 255:02x}"
                    server.private_nets.append(PrivateNet(network.id, str(host), mac))
                    return
        raise HetznerApiError("no_subnet_available", "no subnet or IP is available for the server within the network")

    def detach(self, server: Server, network_id: int) -> None:
        server.private_nets = [net for net in server.private_nets if net.network_id != network_id]
