"""Maps failed requests to Runpod's API to a VendorError."""

import re

import httpx

from windlass.providers.vendor_error import ErrorKind, VendorError, shorten

TOKEN_HINT = "check runpod_api_key (RUNPOD_API_KEY): it must belong to the account and allow read and write"  # noqa: S105
_BY_STATUS = {
    400: ErrorKind.REFUSED,
    401: ErrorKind.DENIED,
    402: ErrorKind.LIMIT,
    403: ErrorKind.FORBIDDEN,
    404: ErrorKind.NOT_FOUND,
    409: ErrorKind.BUSY,
    429: ErrorKind.THROTTLED,
    **dict.fromkeys((405, 413, 415, 422), ErrorKind.INVALID),
}
# There is no code for missing capacity, only prose. Today: "There are no longer any instances available with the
# requested specifications. Please refresh and try again." Similar wordings are taken to mean the same.
_NO_CAPACITY = re.compile(
    r"no longer any|no (?:\w+ )?(?:instances?|machines?|capacity|gpus?)\b.*\bavailable|not enough (?:free|gpus?)|"
    r"no available (?:instances?|machines?|gpus?)|out of (?:stock|capacity)|(?:insufficient|no) (?:\w+ )?capacity|"
    r"currently (?:unavailable|no)|is unavailable in|does not have the resources",
    re.IGNORECASE,
)
# Documented as 402, but money is also named in answers of status 400.
_NO_FUNDS = re.compile(
    r"\bbalance (?:is )?too low|\b(?:insufficient|not enough|low|negative) (?:account )?(?:funds|balance|credits?)\b|"
    r"\bspend(?:ing)? limit\b|\badd (?:more )?(?:funds|credits?)\b",
    re.IGNORECASE,
)
# A person locked the pod. It refuses to be stopped or deleted, and is billed, until a person unlocks it.
_LOCKED = re.compile(r"\bpod is locked\b|\blocked pod\b|\bunlock\b", re.IGNORECASE)

# Without a connection, or without a free one, no byte of the request was sent: no pod can exist.
_UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


def response_error(response: httpx.Response, *, is_creation: bool = False) -> VendorError:
    """Classify a response that is not a success. `is_creation`: of a pod, which cannot be locked yet."""
    try:
        # RFC 9457: the detail, and each violation if there are any.
        body = response.json()
        message = shorten("; ".join([str(body["detail"]), *(str(each) for each in body.get("errors") or ())]))
    except (ValueError, KeyError, TypeError, AttributeError):
        message = shorten(response.reason_phrase or "no reason given")
    kind = _BY_STATUS.get(response.status_code, ErrorKind.LOST)
    if kind in (ErrorKind.BUSY, ErrorKind.REFUSED) and not is_creation and _LOCKED.search(message):
        kind = ErrorKind.PROTECTED
    if kind is ErrorKind.REFUSED and _NO_FUNDS.search(message):
        kind = ErrorKind.LIMIT
    if kind is ErrorKind.REFUSED and _NO_CAPACITY.search(message):
        kind = ErrorKind.NO_CAPACITY
    retry_after = response.headers.get("Retry-After", "")
    retry_after_s = float(retry_after) if retry_after.isdecimal() else None
    return VendorError(kind, f"{message} ({response.status_code})", retry_after_s=retry_after_s)


def transport_error(error: Exception) -> VendorError:
    """Classify a request without a response, or with an unreadable one. One that got no connection was not sent."""
    if isinstance(error, _UNSENT):
        return VendorError(ErrorKind.UNSENT, f"API unreachable ({shorten(error) or type(error).__name__})")
    if isinstance(error, TimeoutError | httpx.TimeoutException):
        message = "request timed out"
    elif isinstance(error, httpx.TransportError):
        message = f"API unreachable ({shorten(error) or type(error).__name__})"
    else:
        message = f"unreadable response ({type(error).__name__}: {shorten(error)})"
    return VendorError(ErrorKind.LOST, message)
