"""What can go wrong, one type per meaning.

Every message is one sentence (or two) for the person who reads it: what was being done, what is wrong, what to
do next. The command line prints it as it is and exits with code 2; no traceback reaches a user.
"""

# What pydantic calls by the names of its own types, in ours.
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
    """The database cannot be reached, refused us, or the connection broke. What was asked may have happened."""


class TooSlow(DatabaseUnavailable):
    """The database was given a time for the answer, and broke off when it was over. Nothing was changed."""


class ControlPlaneUnavailable(DatabaseUnavailable):
    """The same over HTTP: the control plane, or the database behind it, did not answer."""


class SchemaMismatch(WindlassError):
    """The schema in the database is missing, older or newer than this program."""


class UnknownWorker(WindlassError):
    """A worker acted that was never registered, or that has ended."""


class TokenRefused(UnknownWorker):
    """The control plane does not take our token, or not any more: for us this worker is over."""


class HandlerNotFound(WindlassError):
    """The handler a worker was given cannot be imported, called or executed."""


class ProviderError(WindlassError):
    """A provider did not do what was asked."""


class Unavailable(ProviderError):
    """The provider did not answer, or not with something whole. Nothing is known."""


class Ambiguous(ProviderError):
    """A machine may have been made, or may still be. Only a complete list can settle it."""


class Refused(ProviderError):
    """The provider said no, and asking again will not help: a limit, a bad request, a missing right."""

    # As what a creation that was refused is written down: with the worker, in its event, in the log.
    code = "REFUSED"


class LimitReached(Refused):
    """The account may have no more of something. Asking again will not help until a person has had the limit raised."""

    code = "LIMIT_REACHED"


class InvalidRequest(Refused):
    """What is asked for breaks the provider's rules. It would be refused in every way it can be asked for."""

    code = "INVALID_REQUEST"


class Denied(Refused):
    """The provider does not let us: a wrong token, a missing right. Only a person can change that."""

    code = "DENIED"


class NoCapacity(ProviderError):
    """There is no machine of this type in this place now."""

    code = "NO_CAPACITY"


class NotPrepared(ProviderError):
    """A machine cannot become a worker. `code` says which of its checks failed, `output` what was said last."""

    def __init__(self, code: str, message: str, output: str = "", host_key: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.output = output
        self.host_key = host_key


# A pause that a provider asks for, and that is longer than this, is a matter for a person; nobody is hired while it
# lasts. What ends machines, or looks at them, asks again after this time whatever was said: what stays is paid for.
LONG_PAUSE_S = 300.0


class Throttled(ProviderError):
    """Too many requests. Nothing was done; ask again after `retry_after_s`."""

    code = "THROTTLED"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotDelivered(WindlassError):
    """A notification was not delivered, as far as is known. The text says why, without secrets."""


class DeliveredInPart(WindlassError):
    """A notification reached only some of its recipients; sending it again would reach those twice.

    `refused` is the number of recipients that did not get it. The text names them, without secrets.
    """

    def __init__(self, message: str, refused: int) -> None:
        super().__init__(message)
        self.refused = refused
