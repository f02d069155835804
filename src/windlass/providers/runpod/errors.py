"""Maps every failed request to one kind of error. It does not decide what to do about it.

Only responses that Runpod documents as rejections count as rejections. Everything else (5xx, timeouts, broken
connections, unreadable bodies, unknown statuses) is LOST: the request may have taken effect.
"""

import re
from enum import StrEnum

import httpx


class RunpodErrorKind(StrEnum):
    NO_CAPACITY = "no_capacity"  # this GPU type is unavailable in these data centers now
    BALANCE = "balance"  # the account has no funds
    DENIED = "denied"  # the key is wrong
    FORBIDDEN = "forbidden"  # the key is valid but lacks a permission
    NOT_FOUND = "not_found"
    BUSY = "busy"  # not possible in the pod's current state
    THROTTLED = "throttled"
    REFUSED = "refused"  # against a rule; another choice may be accepted
    INVALID = "invalid"  # against the API's contract, whatever the choice
    LOST = "lost"  # no readable response: the request may have taken effect


class RunpodError(Exception):
    """A request that failed. Its text is the vendor's message where there is one."""

    def __init__(self, kind: RunpodErrorKind, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after_s = retry_after_s

    @property
    def is_denied(self) -> bool:
        return self.kind in (RunpodErrorKind.DENIED, RunpodErrorKind.FORBIDDEN)


TOKEN_HINT = "check runpod_api_key (RUNPOD_API_KEY): it must belong to the account and allow read and write"  # noqa: S105
_BY_STATUS = {
    400: RunpodErrorKind.REFUSED,
    401: RunpodErrorKind.DENIED,
    402: RunpodErrorKind.BALANCE,
    403: RunpodErrorKind.FORBIDDEN,
    404: RunpodErrorKind.NOT_FOUND,
    405: RunpodErrorKind.INVALID,
    409: RunpodErrorKind.BUSY,
    413: RunpodErrorKind.INVALID,
    415: RunpodErrorKind.INVALID,
    422: RunpodErrorKind.INVALID,
    429: RunpodErrorKind.THROTTLED,
}
# There is no code for missing capacity, only prose. Today: "There are no longer any instances available with the
# requested specifications. Please refresh and try again." Similar wordings are taken to mean the same.
_NO_CAPACITY = re.compile(
    r"no longer any|no (?:\w+ )?(?:instances?|machines?|capacity|gpus?)\b.*\bavailable|not enough (?:free|gpus?)|"
    r"out of (?:stock|capacity)|(?:insufficient|no) capacity|currently (?:unavailable|no)|does not have the resources",
    re.IGNORECASE,
)
MAX_MESSAGE = 300


def response_error(response: httpx.Response) -> RunpodError:
    """Classify a response that is not a success."""
    try:
        # RFC 9457: the detail, and each violation if there are any.
        body = response.json()
        message = _shorten("; ".join([str(body["detail"]), *(str(each) for each in body.get("errors") or ())]))
    except (ValueError, KeyError, TypeError, AttributeError):
        message = _shorten(response.reason_phrase or "no reason given")
    kind = _BY_STATUS.get(response.status_code, RunpodErrorKind.LOST)
    if kind is RunpodErrorKind.REFUSED and _NO_CAPACITY.search(message):
        kind = RunpodErrorKind.NO_CAPACITY
    retry_after = response.headers.get("Retry-After", "")
    retry_after_s = float(retry_after) if retry_after.isdecimal() else None
    return RunpodError(kind, f"{message} ({response.status_code})", retry_after_s)


def transport_error(error: Exception) -> RunpodError:
    """Classify a request without a response, or with an unreadable one."""
    if isinstance(error, TimeoutError | httpx.TimeoutException):
        message = "request timed out"
    elif isinstance(error, httpx.TransportError):
        message = f"API unreachable ({_shorten(error) or type(error).__name__})"
    else:
        message = f"unreadable response ({type(error).__name__}: {_shorten(error)})"
    return RunpodError(RunpodErrorKind.LOST, message)


def _shorten(message: object) -> str:
    return " ".join(str(message).split())[:MAX_MESSAGE]
