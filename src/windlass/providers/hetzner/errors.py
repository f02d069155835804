"""Maps what a call of Hetzner's SDK raises to a VendorError."""

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
            return VendorError(kind, message, fields=_invalid_fields(details.get("fields")))
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


def _invalid_fields(fields: Any) -> frozenset[str]:
    named = fields if isinstance(fields, list) else []
    return frozenset(str(field["name"]) for field in named if isinstance(field, dict) and "name" in field)


def _innermost_message(error: BaseException) -> str:
    """The message of the system's error, which urllib3 and requests have wrapped."""
    for _ in range(10):
        inner = error.args[0] if error.args else None
        inner = getattr(inner, "reason", None) or inner
        if not isinstance(inner, BaseException):
            break
        error = inner
    return shorten(error) or type(error).__name__
