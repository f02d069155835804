"""Addresses, of a database, a control plane, and who is told of alerts: whether they are one, how they may be shown.

No message here repeats a password.
"""

import ipaddress
import re
from urllib.parse import SplitResult, unquote, urlsplit

# Where only this host can call.
LOOPBACK = ("127.0.0.1", "::1", "localhost")
HIDDEN = "********"
_SCHEMES = ("postgresql", "postgres")
_WEB = ("https", "http")
_MAIL = ("smtp", "smtps")
_UNENCODED = "has a / ? # or @ in its user or password: write %2F, %3F, %23 or %40 for it"
_NO_PORT = "has a port that is not a number from 1 to 65535, or a special character in its password"
_SHAPE = "write postgresql://user:password@host:5432/database"
_WORD = re.compile(r"\S+")
_USER = re.compile(r"(?<![\w+.-])[\w+.-]+://[^:/?#@]*:")
_PASSWORD_IN_QUERY = re.compile(r"([?&]\w*password)=[^&\s]*", re.IGNORECASE)


def masked(text: str) -> str:
    """The text without the passwords of the addresses in it."""
    return _PASSWORD_IN_QUERY.sub(rf"\1={HIDDEN}", _replace_passwords(text, f":{HIDDEN}"))


def without_password(url: str) -> str:
    """The address for a program that asks for the password itself, or finds it in PGPASSWORD or ~/.pgpass."""
    url = _PASSWORD_IN_QUERY.sub("", _replace_passwords(url, ""))
    # If that was the first of several parts of the query, the next one is the first now.
    return re.sub(r"^([^?&]*)&", r"\1?", url)


def _replace_passwords(text: str, shown: str) -> str:
    return _WORD.sub(lambda word: _replace_password(word[0], shown), text) if "://" in text else text


def _replace_password(word: str, shown: str) -> str:
    """All between the user and the last @ of the word: a password that should have been encoded may itself contain : /
    or @. (No pattern: texts may be long, and made to be slow.)"""
    user, end = _USER.search(word), word.rfind("@")
    if user is None or end < user.end():
        return word
    return word[: user.end() - 1] + shown + word[end:]


def is_database_url(url: str) -> bool:
    return url.partition("://")[0] in _SCHEMES


def problem_of_database_url(url: str) -> str | None:
    """What is wrong with this address, as the end of a sentence; None if nothing is."""
    scheme, separator, _ = url.partition("://")
    if not separator:
        return f"is not an address: {_SHAPE}"
    if scheme.startswith("postgresql+"):
        return "names a driver of another program: begin it with postgresql:// alone"
    if scheme not in _SCHEMES:
        return f"is not the address of a PostgreSQL server: {_SHAPE}"
    try:
        parts = urlsplit(url)
    except ValueError:
        return f"has brackets or characters that no address has: {_SHAPE}"
    # In these cases a piece of the password was taken for the host, the port or the database.
    if parts.fragment or "@" in parts.path or ("@" in parts.query and "@" not in parts.netloc):
        return _UNENCODED
    if not all(map(_is_port, _ports(parts))):
        return f"{_NO_PORT}: {_SHAPE}"
    return None


def _ports(parts: SplitResult) -> list[str]:
    """Of each host; several may stand there, separated by commas."""
    hosts = parts.netloc.rpartition("@")[2].split(",")
    return [port for host in hosts if (port := host.rpartition("]")[2].partition(":")[2])]


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and 1 <= int(text) <= 65_535


# -------------------------------------------------------------------------------------------------- the control plane


def problem_of_control_plane_url(url: str) -> str | None:
    """What is wrong with the address that machines are to call, as the end of a sentence; None if nothing is."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return "has a host or port that no address has: write https://host:port"
    if parts.scheme not in ("https", "http") or not host:
        return "is not an address: write https://host:port"
    if parts.query or parts.fragment or parts.username is not None or parts.password is not None:
        return "has more than a host, a port and a path: leave out user, ? and #"
    if parts.scheme == "http" and not is_private_host(host):
        return (
            f"is http to {host}, where anybody on the way can read the tokens: use https, or an address of a private "
            "network"
        )
    return None


def is_private_host(host: str) -> bool:
    """Whether what is sent there stays on this machine or in a private network. A name could be anybody's."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_private and not address.is_unspecified


# ------------------------------------------------------------------------------------------------------ who is told


def problem_of_web_address(url: str) -> str | None:
    """What is wrong with an address to which something is sent, as the end of a sentence; None if nothing is."""
    return _problem_of_server(url, _WEB)


def problem_of_mail_server(url: str) -> str | None:
    """What is wrong with smtp://user:password@host:587, as the end of a sentence; None if nothing is."""
    scheme, _, rest = url.partition("://")
    # Nothing follows the port: what seems to, follows a piece of the password.
    if scheme in _MAIL and set("/?#") & set(rest.removesuffix("/")):
        return _UNENCODED if "@" in rest else "has more than a host and a port"
    if not unquote(rest.rpartition("@")[0]).isascii():
        return "has letters that a mail server cannot be told in its user or password: only ASCII can be"
    return _problem_of_server(url, _MAIL)


def _problem_of_server(url: str, schemes: tuple[str, str]) -> str | None:
    if url.partition("://")[0] not in schemes:
        return "is not an address that begins with {}:// or {}://".format(*schemes)
    if not url.isprintable() or " " in url:
        return "has a space or a line's end in it: write %20 for a space"
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return "has brackets or characters that no address has"
    if not host:
        return "names no host: write {}://host".format(*schemes)
    try:
        is_sound = parts.port != 0
    except ValueError:
        is_sound = False
    return None if is_sound else _NO_PORT
