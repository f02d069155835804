"""What each of the vendor's answers means, and nothing about what to do then. Pure.

Only answers that are published as refusals are refusals. Whatever else comes instead of an answer (5xx, time-outs,
broken connections, bodies that are none, statuses nobody knows) is LOST: what was asked may have happened.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

import httpx


class RunpodErrorKind(StrEnum):
    NO_CAPACITY = "no_capacity"  # not this type in this place now
    BALANCE = "balance"  # nothing more until somebody pays
    DENIED = "denied"  # the key is wrong
    FORBIDDEN = "forbidden"  # the key is right, and may not do this
    NOT_FOUND = "not_found"
    BUSY = "busy"  # not in the state it is in
    THROTTLED = "throttled"
    REFUSED = "refused"  # against a rule; another choice may not be
    INVALID = "invalid"  # against the contract, whatever the choice
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class RunpodErrorInfo:
    kind: RunpodErrorKind
    # In the vendor's words where there are any.
    words: str
    retry_after_s: float | None = None


class RunpodError(Exception):
    """A request that was answered with a problem, or not at all."""

    def __init__(self, problem: RunpodErrorInfo) -> None:
        super().__init__(problem.words)
        self.problem = problem


HOW_TO_BE_LET_IN = "check runpod_api_key (RUNPOD_API_KEY): it must be the account's and may read and write"
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
# Of a lack of machines there is no code, only prose. Said today: "There are no longer any instances available with the
# requested specifications. Please refresh and try again." Its likely kin mean the same.
_NO_CAPACITY = re.compile(
    r"no longer any|no (?:\w+ )?(?:instances?|machines?|capacity|gpus?)\b.*\bavailable|not enough (?:free|gpus?)|"
    r"out of (?:stock|capacity)|(?:insufficient|no) capacity|currently (?:unavailable|no)|does not have the resources",
    re.IGNORECASE,
)
MAX_WORDS = 300


def problem_of_answer(response: httpx.Response) -> RunpodErrorInfo:
    """Of an answer that is no success."""
    words = _words_of(response)
    kind = _BY_STATUS.get(response.status_code, RunpodErrorKind.LOST)
    if kind is RunpodErrorKind.REFUSED and _NO_CAPACITY.search(words):
        kind = RunpodErrorKind.NO_CAPACITY
    return RunpodErrorInfo(kind, f"{words} ({response.status_code})", _retry_after_s(response))


def problem_of_error(error: Exception) -> RunpodErrorInfo:
    """Of a request that got no answer, or one that cannot be read."""
    if isinstance(error, TimeoutError | httpx.TimeoutException):
        return RunpodErrorInfo(RunpodErrorKind.LOST, "no answer in time")
    if isinstance(error, httpx.TransportError):
        return RunpodErrorInfo(
            RunpodErrorKind.LOST, f"the API cannot be reached ({_in_short(str(error)) or type(error).__name__})"
        )
    return RunpodErrorInfo(
        RunpodErrorKind.LOST, f"an answer that cannot be read ({type(error).__name__}: {_in_short(str(error))})"
    )


def _words_of(response: httpx.Response) -> str:
    """RFC 9457: the detail, and each violation where there are some."""
    try:
        body = response.json()
        errors = body.get("errors") or ()
        said = "; ".join([str(body["detail"]), *(str(each) for each in errors)])
    except (ValueError, KeyError, TypeError, AttributeError):
        said = response.reason_phrase or "no reason was given"
    return _in_short(said)


def _in_short(text: str) -> str:
    return " ".join(text.split())[:MAX_WORDS]


def _retry_after_s(response: httpx.Response) -> float | None:
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isdecimal() else None
