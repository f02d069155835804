"""Whether a machine of a public vendor can reach the control plane at a URL. Pure: no name is resolved.

Only certain cases are problems: an address of this host, an address of a private network that the machines are not in,
or an address family that they do not have. A host name is never a problem here, so it is the way to name a control
plane behind a VPN that the machines join by themselves.
"""

import socket
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

_LOCAL_NAMES = ("localhost", "localhost.localdomain", "localhost6", "localhost6.localdomain6")


@dataclass(frozen=True, slots=True)
class MachineNetwork:
    """How the machines of a fleet reach other hosts."""

    has_ipv4: bool = True
    has_ipv6: bool = True
    # Range of their private network, as 10.0.0.0/16. None: they have none, or the range is unknown (see below).
    private_range: str | None = None
    # They have a private network that a person made. It may have a gateway, and its range may be unknown.
    has_own_network: bool = False


def problem_of_reach(url: str, network: MachineNetwork) -> str | None:
    """Why machines cannot reach this URL, as the end of a sentence. None if they may."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    if host in _LOCAL_NAMES or host.endswith(".localhost"):
        return "only this host can reach"
    address = address_of(host)
    if address is None:
        return None
    # The rest of 0.0.0.0/8 is this host for some programs, and nothing for others.
    if address.is_loopback or address.is_unspecified or (address.version == 4 and address.packed[0] == 0):
        return "only this host can reach"
    if address.is_multicast:
        return "is a multicast address, which no server has"
    if address.is_link_local:
        return "is an address of one network segment"
    if network.private_range is not None and _is_within(address, network.private_range):
        return None
    # Shared addresses (100.64.0.0/10), which Tailscale and carriers use, and reserved ones are not global either.
    if not address.is_global:
        if network.private_range is not None:
            return f"is not in the machines' private network {network.private_range}"
        return None if network.has_own_network else "is an address of a private network that the machines are not in"
    has_family = network.has_ipv4 if isinstance(address, IPv4Address) else network.has_ipv6
    if has_family or network.has_own_network:
        return None
    return f"needs a public IPv{address.version} address, which the machines do not have"


def is_loopback_url(url: str) -> bool:
    """Whether the URL is of a server on this host, such as an emulator."""
    host = urlsplit(url).hostname or ""
    address = address_of(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def address_of(host: str) -> IPv4Address | IPv6Address | None:
    """The address that a host is, also in the short forms of IPv4 that programs accept, such as 127.1; None for a name.

    An IPv6 address that contains one of IPv4 is that one."""
    try:
        address = ip_address(host)
    except ValueError:
        try:
            return IPv4Address(socket.inet_aton(host)) if host[:1].isdigit() else None
        except OSError:
            return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _is_within(address: IPv4Address | IPv6Address, text: str) -> bool:
    network: IPv4Network | IPv6Network = ip_network(text, strict=False)
    return address.version == network.version and address in network
