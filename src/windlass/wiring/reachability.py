"""Checks that machines of the clouds can reach this control plane, before any of them costs money.

A vendor's endpoint on this host is an emulator, whose machines run here too: nothing is refused then. The range of a
private network is read from the vendor; while it cannot be read, an address is not refused because of it.
"""

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from ipaddress import ip_address
from urllib.parse import urlsplit

from windlass.model.config import Config
from windlass.model.errors import ConfigError, WindlassError
from windlass.model.fleet import FleetConfig
from windlass.model.hetzner import PRIVATE_RANGE
from windlass.model.reachability import MachineNetwork, address_of, is_loopback_url, problem_of_reach
from windlass.model.urls import LOOPBACK, problem_of_control_plane_url
from windlass.providers.diagnostic import Diagnostic
from windlass.providers.vendor_error import VendorError
from windlass.wiring.providers import hetzner_account, machine_url

# Reading a network must not delay the start while the vendor does not answer.
NETWORK_TIMEOUT_S = 10.0
RESOLVE_TIMEOUT_S = 5.0
# Debian's hosts file gives this address to the host's own name.
OWN_NAME_ADDRESS = "127.0.1.1"
CLOUDS = {"hetzner": "Hetzner's servers", "runpod": "Runpod's pods"}
IPV4_ADVICE = "Set hetzner.is_ipv4_on = true, give the control plane an IPv6 address, or set network_id."
ADVICE = "Set api.url to an https URL that they can reach, see docs/providers.md."

# Returns the range of a private network at the vendor; None if it cannot be read.
ReadRange = Callable[[Config, int], Awaitable[str | None]]


async def check_control_plane_url(config: Config, read_range: ReadRange | None = None) -> None:
    """Raise ConfigError if remote machines of a fleet cannot reach this control plane."""
    for name, fleet in remote_fleets(config).items():
        url = machine_url(name, config)
        problem = problem_of_control_plane_url(url)
        if problem is not None:
            raise ConfigError(f"machines of fleet {name} call {url}, which {problem}.")
        is_only_here = config.api.host in LOOPBACK
        if config.api.url is None and config.control_plane_ip not in (None, config.api.host) and is_only_here:
            raise ConfigError(
                f"machines of fleet {name} call {url}, but api.host is {config.api.host}, which only this host can "
                f"reach. Set api.host to {config.control_plane_ip} or 0.0.0.0."
            )
        if is_loopback_url(_endpoint(fleet, config)):
            continue
        network = await _network_of(fleet, config, url, read_range or read_hetzner_range)
        problem = problem_of_reach(url, network) or await _problem_of_name(url, network)
        if problem is not None:
            advice = IPV4_ADVICE if "public IPv4" in problem else ADVICE
            raise ConfigError(f"{CLOUDS[fleet.provider]} of fleet {name} call {url}, which {problem}. {advice}")


async def _problem_of_name(url: str, network: MachineNetwork) -> str | None:
    """A name whose addresses are all of this host, or all public and of a family that the machines do not have. Private
    ones are not judged: machines may join a VPN."""
    if _is_address(url):
        return None
    addresses = await _resolve(urlsplit(url).hostname or "")
    # Only the hosts file of this host says so, and other hosts get another answer.
    if not addresses or OWN_NAME_ADDRESS in addresses:
        return None
    if all(ip_address(address).is_loopback or ip_address(address).is_unspecified for address in addresses):
        return f"resolves to {addresses[0]}, which only this host can reach"
    if not all(ip_address(address).is_global for address in addresses):
        return None
    problems = [problem_of_reach(_url_of(address), network) for address in addresses]
    return problems[0] if all(problems) else None


async def _resolve(host: str) -> list[str]:
    """The addresses of a name; none if it does not resolve here."""
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError):
        return []
    return sorted({str(entry[4][0]).partition("%")[0] for entry in found})


def remote_fleets(config: Config) -> dict[str, FleetConfig]:
    """Fleets whose machines call this control plane over a network."""
    return {name: fleet for name, fleet in config.fleets.items() if fleet.provider in CLOUDS}


def _endpoint(fleet: FleetConfig, config: Config) -> str:
    return config.hetzner_endpoint if fleet.provider == "hetzner" else config.runpod_endpoint


async def _network_of(fleet: FleetConfig, config: Config, url: str, read_range: ReadRange) -> MachineNetwork:
    if fleet.provider == "runpod":
        return MachineNetwork()
    settings = fleet.hetzner
    network_id = (settings.network_id or config.hetzner_network_id) if settings.is_network_on else None
    private_range = PRIVATE_RANGE if settings.is_network_on and network_id is None else None
    # Only an address can be within the range of a network.
    if network_id is not None and _is_address(url):
        private_range = await read_range(config, network_id)
    return MachineNetwork(
        has_ipv4=settings.is_ipv4_on,
        has_ipv6=settings.is_ipv6_on,
        private_range=private_range,
        has_own_network=network_id is not None,
    )


async def read_hetzner_range(config: Config, network_id: int) -> str | None:
    account = hetzner_account(config, NETWORK_TIMEOUT_S)
    try:
        async with asyncio.timeout(NETWORK_TIMEOUT_S):
            network = await account.request(lambda: account.api.networks.get_by_id(network_id))
    except (VendorError, WindlassError, TimeoutError):
        return None
    return str(network.ip_range) if network.ip_range else None


async def check_address(config: Config) -> AsyncGenerator[Diagnostic, None]:
    """Diagnose the control plane's address, as remote machines reach it. Only reads."""
    fleets = remote_fleets(config)
    if not fleets:
        return
    try:
        await check_control_plane_url(config)
    except ConfigError as error:
        yield Diagnostic("control plane", str(error).rstrip("."), is_error=True)
        return
    url = config.machine_url or ""
    is_rehearsal = all(is_loopback_url(_endpoint(fleet, config)) for fleet in fleets.values())
    if is_rehearsal or _is_address(url):
        yield Diagnostic("control plane", f"machines call {url}")
        return
    host = urlsplit(url).hostname or ""
    addresses = await _resolve(host)
    if not addresses:
        yield Diagnostic("control plane", f"{host} does not resolve here", "check api.url and the domain's records")
        return
    for name, fleet in fleets.items():
        network = await _network_of(fleet, config, f"https://{host}", read_hetzner_range)
        problems = {each: problem_of_reach(_url_of(each), network) for each in addresses}
        if problems and all(problems.values()):
            address, problem = next(iter(problems.items()))
            yield Diagnostic(
                "control plane",
                f"machines of fleet {name} call {host}, whose address {address} {problem}",
                "use a name that machines can reach, or let them join your VPN",
            )
            return
    yield Diagnostic("control plane", f"machines call {url} ({', '.join(addresses)})")


def _is_address(url: str) -> bool:
    return address_of(urlsplit(url).hostname or "") is not None


def _url_of(address: str) -> str:
    return f"https://[{address}]" if ":" in address else f"https://{address}"
