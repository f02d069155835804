"""Errors that a user may see, one type per meaning.

Every message is one or two sentences: what was being done, what is wrong, what to do. The command line prints it as it
is and exits with code 2, without a traceback.
"""

# Plain messages for pydantic's error types.
WORDS_OF_TYPES = {
    "int_parsing": "this is not a whole number",
    "int_type": "this is not a whole number",
    "int_from_float": "this is not a whole number",
    "float_parsing": "this is not a number",
    "float_type": "this is not a number",
    "bool_parsing": "write true or false",
    "bool_type": "write true or false",
}


class WindlassError(Exception):
    """Base of all errors a user may see. Its text is the whole message."""


class ConfigError(WindlassError):
    """A setting is missing, unreadable or contradicts another."""


class BadInput(WindlassError):
    """Something the caller handed in cannot be accepted; nothing was changed."""


class DatabaseUnavailable(WindlassError):
    """The database is unreachable, refused the call, or the connection broke. The call may have taken effect.

    `is_refusal`: it answered and refused this call for a reason that is not temporary. A retry may never succeed.
    """

    def __init__(self, message: str = "", *, is_refusal: bool = False) -> None:
        super().__init__(message)
        self.is_refusal = is_refusal


class TooSlow(DatabaseUnavailable):
    """The database cancelled a statement that exceeded its time limit. Nothing was changed."""


class ControlPlaneUnavailable(DatabaseUnavailable):
    """The control plane, or the database behind it, did not answer over HTTP."""


class SchemaMismatch(WindlassError):
    """The schema in the database is missing, older or newer than this program."""


class OutOfScope(WindlassError):
    """The caller's token is limited to other queues and fleets."""


class UnknownWorker(WindlassError):
    """The worker is not registered, or has terminated."""


class TokenRefused(UnknownWorker):
    """The control plane rejected the worker token. The worker must exit."""


class HandlerNotFound(WindlassError):
    """The handler a worker was given cannot be imported, called or executed."""


class ProviderError(WindlassError):
    """A provider call failed."""


class Unavailable(ProviderError):
    """The provider did not answer, or only in part. The state of its machines is unknown."""


class Ambiguous(ProviderError):
    """A machine may have been created, or may still be. Only a complete machine list can tell."""


class Refused(ProviderError):
    """The provider rejected the request: a limit, an invalid request, a missing right. Repeating it will not help."""

    # Recorded for a refused creation: on the worker, in its event, in the log.
    code = "REFUSED"


class LimitReached(Refused):
    """An account limit is reached. Only a higher limit helps."""

    code = "LIMIT_REACHED"


class InvalidRequest(Refused):
    """The request violates the provider's rules, for every choice of type and place."""

    code = "INVALID_REQUEST"


class Denied(Refused):
    """The provider denied access: a wrong token or a missing right. Only a person can change that."""

    code = "DENIED"


class NoCapacity(ProviderError):
    """No machine of this type is available in this place now."""

    code = "NO_CAPACITY"


class NotPrepared(ProviderError):
    """A machine cannot run its worker. `code` names the failed check; `output` is the last output."""

    def __init__(self, code: str, message: str, output: str = "", host_key: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.output = output
        self.host_key = host_key


# A back-off that a provider requests for longer than this needs a person, and the fleet spawns no workers meanwhile.
# Deletions and listings are retried after this time in any case, because existing machines are billed.
LONG_PAUSE_S = 300.0


class Throttled(ProviderError):
    """Too many requests. Nothing was done; retry after `retry_after_s`."""

    code = "THROTTLED"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ProviderUnreachable(Throttled):
    """The provider could not be reached, by name or by address. Nothing was done; retry after `retry_after_s`."""

    code = "UNREACHABLE"


class NotDelivered(WindlassError):
    """A notification was not delivered, as far as is known. The text says why, without secrets."""


class DeliveredInPart(WindlassError):
    """A notification reached only some of its recipients; sending it again would reach those twice.

    `refused` is the number of recipients that did not get it. The text names them, without secrets.
    """

    def __init__(self, message: str, refused: int) -> None:
        super().__init__(message)
        self.refused = refused
