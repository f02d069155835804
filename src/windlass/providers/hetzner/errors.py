"""Maps every failed request to one kind of error. It does not decide what to do about it.

Only codes that Hetzner documents as rejections count as rejections. Everything else (5xx, timeouts, broken
connections, unreadable bodies, unknown codes) is LOST: the request may have taken effect. Without any connection it is
UNSENT.
"""

from enum import StrEnum
from typing import Any

import requests
from hcloud import APIException
from urllib3.exceptions import NewConnectionError


class HetznerErrorKind(StrEnum):
    NO_CAPACITY = "no_capacity"  # this server type is unavailable in this location now
    LIMIT = "limit"  # a limit of the account is reached
    DENIED = "denied"  # the token is wrong or lacks a permission
    NAME_IN_USE = "name_in_use"
    NOT_FOUND = "not_found"
    BUSY = "busy"  # another action on the resource is running
    PROTECTED = "protected"  # deletion protection is on
    THROTTLED = "throttled"
    REFUSED = "refused"  # the request is invalid
    UNSENT = "unsent"  # no connection: the request did not take effect
    LOST = "lost"  # no readable response: the request may have taken effect


class HetznerError(Exception):
    """A request that failed. Its text is the vendor's message where there is one."""

    def __init__(self, kind: HetznerErrorKind, message: str, fields: frozenset[str] = frozenset()) -> None:
        super().__init__(message)
        self.kind = kind
        # The fields of the request that are invalid, if the vendor names them.
        self.fields = fields


TOKEN_HINT = "check hetzner_api_token (HETZNER_API_TOKEN): it must belong to the project and allow read and write"  # noqa: S105
_BY_CODE = {
    "resource_unavailable": HetznerErrorKind.NO_CAPACITY,
    "placement_error": HetznerErrorKind.NO_CAPACITY,
    # Of one location, for hours at most: another one may work.
    "maintenance": HetznerErrorKind.NO_CAPACITY,
    "resource_limit_exceeded": HetznerErrorKind.LIMIT,
    "unauthorized": HetznerErrorKind.DENIED,
    "token_readonly": HetznerErrorKind.DENIED,
    "forbidden": HetznerErrorKind.DENIED,
    "uniqueness_error": HetznerErrorKind.NAME_IN_USE,
    "not_found": HetznerErrorKind.NOT_FOUND,
    "locked": HetznerErrorKind.BUSY,
    "conflict": HetznerErrorKind.BUSY,
    "protected": HetznerErrorKind.PROTECTED,
    "rate_limit_exceeded": HetznerErrorKind.THROTTLED,
    "json_error": HetznerErrorKind.REFUSED,
    "invalid_input": HetznerErrorKind.REFUSED,
    "method_not_allowed": HetznerErrorKind.REFUSED,
    "deprecated_api_endpoint": HetznerErrorKind.REFUSED,
    "unsupported_error": HetznerErrorKind.REFUSED,
    "must_be_unassigned": HetznerErrorKind.REFUSED,
    "primary_ip_version_mismatch": HetznerErrorKind.REFUSED,
    "primary_ip_assigned": HetznerErrorKind.REFUSED,
    "primary_ip_datacenter_mismatch": HetznerErrorKind.REFUSED,
    "no_subnet_available": HetznerErrorKind.REFUSED,
    "ip_not_available": HetznerErrorKind.REFUSED,
    "networks_overlap": HetznerErrorKind.REFUSED,
}
# For responses without a code, which come from a proxy in front of the API.
_BY_STATUS = {
    401: HetznerErrorKind.DENIED,
    403: HetznerErrorKind.DENIED,
    404: HetznerErrorKind.NOT_FOUND,
    423: HetznerErrorKind.BUSY,
    429: HetznerErrorKind.THROTTLED,
}
MAX_MESSAGE = 300


def to_hetzner_error(error: Exception) -> HetznerError:
    """Classify what a call of the SDK raised."""
    if isinstance(error, APIException):
        message = f"{_shorten(error.message)} ({error.code})"
        if isinstance(error.code, str):
            kind = _BY_CODE.get(error.code, HetznerErrorKind.LOST)
            details = error.details if isinstance(error.details, dict) else {}
            return HetznerError(kind, message, _invalid_fields(details.get("fields")))
        is_client_error = 400 <= error.code < 500 and error.code != 408
        default = HetznerErrorKind.REFUSED if is_client_error else HetznerErrorKind.LOST
        return HetznerError(_BY_STATUS.get(error.code, default), message)
    if isinstance(error, TimeoutError):
        return HetznerError(HetznerErrorKind.LOST, str(error) or "request timed out")
    if isinstance(error, requests.exceptions.Timeout):
        return HetznerError(HetznerErrorKind.LOST, "request timed out")
    if isinstance(error, requests.exceptions.RequestException):
        # A connection that was refused, or a host that does not resolve, cannot have carried the request.
        inner = error.args[0] if error.args else None
        is_unsent = isinstance(getattr(inner, "reason", None), NewConnectionError)
        kind = HetznerErrorKind.UNSENT if is_unsent else HetznerErrorKind.LOST
        return HetznerError(kind, f"API unreachable ({_innermost_message(error)})")
    return HetznerError(HetznerErrorKind.LOST, f"unreadable response ({type(error).__name__}: {_shorten(error)})")


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
    return _shorten(error) or type(error).__name__


def _shorten(message: object) -> str:
    return " ".join(str(message).split())[:MAX_MESSAGE]
