"""Checks URLs of databases, control planes, web hooks and mail servers.

Each check returns what is wrong with a URL, as the end of a sentence, or None. No message contains a password.
"""

import ipaddress
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

# Hosts that only this machine can connect to.
LOOPBACK = ("127.0.0.1", "::1", "localhost")
_DATABASE = ("postgresql", "postgres")
_MAIL = ("smtp", "smtps")
_UNENCODED = "has a / ? # or @ in its user or password: write %2F, %3F, %23 or %40 for it"
_BAD_PORT = "has a port that is not a number from 1 to 65535, or a special character in its password"
_DATABASE_EXAMPLE = "write postgresql://user:password@host:5432/database"


def is_database_url(url: str) -> bool:
    return url.partition("://")[0] in _DATABASE


def problem_of_database_url(url: str) -> str | None:
    scheme, separator, _ = url.partition("://")
    if not separator:
        return f"is not a URL: {_DATABASE_EXAMPLE}"
    if scheme.startswith("postgresql+"):
        return "names a driver of another program: begin it with postgresql:// alone"
    if scheme not in _DATABASE:
        return f"is not the URL of a PostgreSQL server: {_DATABASE_EXAMPLE}"
    try:
        parts = urlsplit(url)
    except ValueError:
        return f"has invalid brackets or characters: {_DATABASE_EXAMPLE}"
    # In these cases a part of the password was read as the host, the port or the database.
    if parts.fragment or "@" in parts.path or ("@" in parts.query and "@" not in parts.netloc):
        return _UNENCODED
    # There may be several hosts, separated by commas.
    for host in parts.netloc.rpartition("@")[2].split(","):
        port = host.rpartition("]")[2].partition(":")[2]
        if port and not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65_535):
            return f"{_BAD_PORT}: {_DATABASE_EXAMPLE}"
    return None


def problem_of_control_plane_url(url: str) -> str | None:
    """For the URL that machines call."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return "has an invalid host or port: write https://host:port"
    if parts.scheme not in ("https", "http") or not host:
        return "is not a URL: write https://host:port"
    if parts.query or parts.fragment or parts.username is not None or parts.password is not None:
        return "has more than a host, a port and a path: remove user, ? and #"
    if parts.scheme == "http" and not is_private_host(host):
        return f"uses http to {host}, which sends tokens unencrypted: use https, or an address of a private network"
    return None


def is_private_host(host: str) -> bool:
    """Whether the host is this machine or in a private network. Host names, except localhost, are not."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_private and not address.is_unspecified


def problem_of_web_address(url: str) -> str | None:
    return _problem_of_server(url, ("https", "http"))


def problem_of_mail_server(url: str) -> str | None:
    """For smtp://user:password@host:587."""
    scheme, _, rest = url.partition("://")
    # Nothing follows the port, so what seems to follow it is a part of the password.
    if scheme in _MAIL and set("/?#") & set(rest.removesuffix("/")):
        return _UNENCODED if "@" in rest else "has more than a host and a port"
    if not unquote(rest.rpartition("@")[0]).isascii():
        return "has characters other than ASCII in its user or password, which SMTP cannot send"
    return _problem_of_server(url, _MAIL)


def _problem_of_server(url: str, schemes: tuple[str, str]) -> str | None:
    if url.partition("://")[0] not in schemes:
        return "is not a URL that begins with {}:// or {}://".format(*schemes)
    if not url.isprintable() or " " in url:
        return "contains a space or a line break: write %20 for a space"
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return "has invalid brackets or characters"
    if not host:
        return "has no host: write {}://host".format(*schemes)
    try:
        return _BAD_PORT if parts.port == 0 else None
    except ValueError:
        return _BAD_PORT


def single_host_urls(url: str) -> list[str]:
    """The same database URL for each of its hosts, in order. Hosts are in the address or in the parameter `host`."""
    parts = urlsplit(url)
    user, at, hosts = parts.netloc.rpartition("@")
    if "," in hosts:
        return [urlunsplit(parts._replace(netloc=f"{user}{at}{host}")) for host in hosts.split(",")]
    parameters = parse_qsl(parts.query, keep_blank_values=True)
    named = dict(parameters)
    if hosts or "," not in named.get("host", ""):
        return [url]
    names, ports = named["host"].split(","), named.get("port", "").split(",")
    if len(ports) == 1:
        ports *= len(names)
    if len(ports) != len(names):
        # The driver reports it.
        return [url]
    others = [(key, value) for key, value in parameters if key not in ("host", "port")]
    return [
        urlunsplit(parts._replace(query=urlencode([*others, ("host", name), *([("port", port)] if port else [])])))
        for name, port in zip(names, ports, strict=True)
    ]
