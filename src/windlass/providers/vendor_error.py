"""The error of a failed request to a vendor's API, classified by what it means for the caller.

Each vendor's `errors.py` maps its responses to kinds. Only documented rejections count as rejections. Everything else
(5xx, timeouts, broken connections, unreadable bodies, unknown codes) is LOST: the request may have taken effect.
"""

from enum import StrEnum

MAX_MESSAGE = 300


class ErrorKind(StrEnum):
    NO_CAPACITY = "no_capacity"  # this machine type is unavailable in this place now
    LIMIT = "limit"  # a limit of the account is reached, or its funds are spent
    DENIED = "denied"  # the key is wrong
    FORBIDDEN = "forbidden"  # the key is valid but lacks a permission
    NAME_IN_USE = "name_in_use"
    NOT_FOUND = "not_found"
    BUSY = "busy"  # not possible in the current state, or during another action
    PROTECTED = "protected"  # deletion protection is on
    THROTTLED = "throttled"
    REFUSED = "refused"  # against a rule; another choice may be accepted
    INVALID = "invalid"  # against the API's contract, whatever the choice
    UNSENT = "unsent"  # no connection: the request did not take effect
    LOST = "lost"  # no readable response: the request may have taken effect


class VendorError(Exception):
    """A request that failed. Its text is the vendor's message where there is one."""

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        fields: frozenset[str] = frozenset(),
        retry_after_s: float | None = None,
        limits: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(message)
        self.kind = kind
        # The fields of the request that are invalid, if the vendor names them.
        self.fields = fields
        self.retry_after_s = retry_after_s
        # The limits of the account that were reached, if the vendor names them.
        self.limits = limits

    @property
    def is_denied(self) -> bool:
        return self.kind in (ErrorKind.DENIED, ErrorKind.FORBIDDEN)


def shorten(message: object) -> str:
    """One line of at most MAX_MESSAGE characters."""
    return " ".join(str(message).split())[:MAX_MESSAGE]
