"""What can go wrong, one type per meaning.

Every message is one sentence (or two) for the person who reads it: what was being done, what is wrong, what to
do next. The command line prints it as it is and exits with code 2; no traceback reaches a user.
"""


class WindlassError(Exception):
    """Base of all errors a user may see. Its text is the whole message."""


class ConfigError(WindlassError):
    """A setting is missing, unreadable or contradicts another."""


class BadInput(WindlassError):
    """Something the caller handed in cannot be accepted; nothing was changed."""


class DatabaseUnavailable(WindlassError):
    """The database cannot be reached, refused us, or the connection broke. What was asked may have happened."""


class SchemaMismatch(WindlassError):
    """The schema in the database is missing, older or newer than this program."""


class UnknownWorker(WindlassError):
    """A worker acted without being registered."""


class HandlerNotFound(WindlassError):
    """The handler a worker was given cannot be imported, called or executed."""
