"""Maps what a call of Hetzner's SDK raises to a VendorError."""

from enum import StrEnum
from typing import Any

import requests
from hcloud import APIException
from urllib3.exceptions import NewConnectionError

from windlass.providers.vendor_error import ErrorKind, VendorError, shorten

TOKEN_HINT = "check hetzner_api_token (HETZNER_API_TOKEN): it must belong to the project and allow read and write"  # noqa: S105
_CODES = {
    # Maintenance is of one location, for hours at most: another one may work.
    ErrorKind.NO_CAPACITY: ("resource_unavailable", "placement_error", "maintenance"),
    ErrorKind.LIMIT: ("resource_limit_exceeded",),
    ErrorKind.DENIED: ("unauthorized", "token_readonly", "forbidden"),
    ErrorKind.NAME_IN_USE: ("uniqueness_error",),
    ErrorKind.NOT_FOUND: ("not_found",),
    ErrorKind.BUSY: ("locked", "conflict"),
    ErrorKind.PROTECTED: ("protected",),
    ErrorKind.THROTTLED: ("rate_limit_exceeded",),
    ErrorKind.REFUSED: (
        *("json_error", "invalid_input", "method_not_allowed", "deprecated_api_endpoint", "unsupported_error"),
        *("must_be_unassigned", "primary_ip_version_mismatch", "primary_ip_assigned", "primary_ip_datacenter_mismatch"),
        *("no_subnet_available", "ip_not_available", "networks_overlap"),
    ),
}
_BY_CODE = {code: kind for kind, codes in _CODES.items() for code in codes}
# For responses without a code, which come from a proxy in front of the API.
_BY_STATUS = {
    401: ErrorKind.DENIED,
    403: ErrorKind.DENIED,
    404: ErrorKind.NOT_FOUND,
    423: ErrorKind.BUSY,
    429: ErrorKind.THROTTLED,
}


def to_vendor_error(error: Exception) -> VendorError:
    if isinstance(error, APIException):
        message = f"{shorten(error.message)} ({error.code})"
        if isinstance(error.code, str):
            details = error.details if isinstance(error.details, dict) else {}
            kind = _BY_CODE.get(error.code, ErrorKind.LOST)
            fields, limits = (_names(details.get(name)) for name in ("fields", "limits"))
            return VendorError(kind, message, fields=fields, limits=limits)
        is_client_error = 400 <= error.code < 500 and error.code != 408
        default = ErrorKind.REFUSED if is_client_error else ErrorKind.LOST
        return VendorError(_BY_STATUS.get(error.code, default), message)
    if isinstance(error, TimeoutError):
        return VendorError(ErrorKind.LOST, str(error) or "request timed out")
    if isinstance(error, requests.exceptions.Timeout):
        return VendorError(ErrorKind.LOST, "request timed out")
    if isinstance(error, requests.exceptions.RequestException):
        # A connection that was refused, or a host that does not resolve, cannot have carried the request.
        inner = error.args[0] if error.args else None
        is_unsent = isinstance(getattr(inner, "reason", None), NewConnectionError)
        kind = ErrorKind.UNSENT if is_unsent else ErrorKind.LOST
        return VendorError(kind, f"API unreachable ({_innermost_message(error)})")
    return VendorError(ErrorKind.LOST, f"unreadable response ({type(error).__name__}: {shorten(error)})")


class LimitKind(StrEnum):
    """What a project may have no more of. The vendor's limits are per kind."""

    SERVERS = "servers"
    PRIMARY_IPS = "primary_ips"
    DEDICATED_CORES = "dedicated_cores"
    # Any other, such as cores or memory in total: another server type may fit.
    OTHER = "other"


def limit_kind(error: VendorError) -> LimitKind:
    """By the names in the details; the vendor sometimes gives only prose, such as "dedicated core limit exceeded"."""
    text = " ".join([*sorted(error.limits), str(error)]).lower().replace("_", " ")
    if "dedicated" in text:
        return LimitKind.DEDICATED_CORES
    if "primary ip" in text:
        return LimitKind.PRIMARY_IPS
    return LimitKind.SERVERS if "server limit" in text else LimitKind.OTHER


def _names(entries: Any) -> frozenset[str]:
    named = entries if isinstance(entries, list) else []
    return frozenset(str(entry["name"]) for entry in named if isinstance(entry, dict) and "name" in entry)


def _innermost_message(error: BaseException) -> str:
    """The message of the system's error, which urllib3 and requests have wrapped."""
    for _ in range(10):
        inner = error.args[0] if error.args else None
        inner = getattr(inner, "reason", None) or inner
        if not isinstance(inner, BaseException):
            break
        error = inner
    return shorten(error) or type(error).__name__
