"""What each of the vendor's answers means, and nothing about what to do then. Pure.

Only codes that are published as refusals are refusals. Whatever else comes instead of an answer (5xx, time-outs, broken
connections, bodies that are none, codes nobody knows) is LOST: what was asked may have happened. Except where there
was no connection at all: that is UNSENT.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import requests
from hcloud import APIException
from urllib3.exceptions import NewConnectionError


class HetznerErrorKind(StrEnum):
    NO_CAPACITY = "no_capacity"  # not this type in this place now
    LIMIT = "limit"  # the account may have no more
    DENIED = "denied"  # not with this token
    TAKEN = "taken"  # the name is in use
    NOT_FOUND = "not_found"
    BUSY = "busy"  # something else is going on with it; soon it will not be
    PROTECTED = "protected"  # a person forbade it
    THROTTLED = "throttled"
    REFUSED = "refused"  # a request that is wrong
    UNSENT = "unsent"  # nobody could be asked
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class HetznerErrorInfo:
    kind: HetznerErrorKind
    # In the vendor's words where there are any.
    words: str
    # Of a request that is wrong: the fields that are, as far as the vendor names any.
    fields: frozenset[str] = frozenset()


class HetznerError(Exception):
    """A request that was answered with a problem, or not at all."""

    def __init__(self, problem: HetznerErrorInfo) -> None:
        super().__init__(problem.words)
        self.problem = problem


HOW_TO_BE_LET_IN = "check hetzner_api_token (HETZNER_API_TOKEN): it must be the project's and may read and write"
_BY_CODE = {
    "resource_unavailable": HetznerErrorKind.NO_CAPACITY,
    "placement_error": HetznerErrorKind.NO_CAPACITY,
    # Of a place, for hours at the most: another one may do.
    "maintenance": HetznerErrorKind.NO_CAPACITY,
    "resource_limit_exceeded": HetznerErrorKind.LIMIT,
    "unauthorized": HetznerErrorKind.DENIED,
    "token_readonly": HetznerErrorKind.DENIED,
    "forbidden": HetznerErrorKind.DENIED,
    "uniqueness_error": HetznerErrorKind.TAKEN,
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
# Answers without a code: from something before the API.
_BY_STATUS = {
    401: HetznerErrorKind.DENIED,
    403: HetznerErrorKind.DENIED,
    404: HetznerErrorKind.NOT_FOUND,
    423: HetznerErrorKind.BUSY,
    429: HetznerErrorKind.THROTTLED,
}
MAX_WORDS = 300


def problem_of(error: Exception) -> HetznerErrorInfo:
    if isinstance(error, APIException):
        words = f"{' '.join(str(error.message).split())[:MAX_WORDS]} ({error.code})"
        if isinstance(error.code, str):
            return HetznerErrorInfo(_BY_CODE.get(error.code, HetznerErrorKind.LOST), words, _fields(error.details))
        is_wrong = 400 <= error.code < 500 and error.code != 408
        return HetznerErrorInfo(
            _BY_STATUS.get(error.code, HetznerErrorKind.REFUSED if is_wrong else HetznerErrorKind.LOST), words
        )
    if isinstance(error, TimeoutError | requests.exceptions.Timeout):
        return HetznerErrorInfo(
            HetznerErrorKind.LOST, str(error) if isinstance(error, TimeoutError) and str(error) else "no answer in time"
        )
    if isinstance(error, requests.exceptions.RequestException):
        kind = HetznerErrorKind.UNSENT if _is_unsent(error) else HetznerErrorKind.LOST
        return HetznerErrorInfo(kind, f"the API cannot be reached ({_innermost(error)})")
    return HetznerErrorInfo(
        HetznerErrorKind.LOST, f"an answer that cannot be read ({type(error).__name__}: {str(error)[:MAX_WORDS]})"
    )


def _fields(details: Any) -> frozenset[str]:
    fields = details.get("fields") if isinstance(details, dict) else None
    named = fields if isinstance(fields, list) else []
    return frozenset(str(field["name"]) for field in named if isinstance(field, dict) and "name" in field)


def _is_unsent(error: requests.exceptions.RequestException) -> bool:
    """Refused, or no such host. A connection that broke, or took too long, may have carried something."""
    inner = error.args[0] if error.args else None
    return isinstance(getattr(inner, "reason", None), NewConnectionError)


def _innermost(error: BaseException) -> str:
    """requests wraps urllib3 wraps the system's own words."""
    for _ in range(10):
        inner = error.args[0] if error.args else None
        inner = getattr(inner, "reason", None) or inner
        if not isinstance(inner, BaseException):
            break
        error = inner
    return " ".join(str(error).split())[:MAX_WORDS] or type(error).__name__
