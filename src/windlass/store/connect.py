"""One way to a PostgreSQL server, for all that speak to one, and one sentence for each way it can fail.

Every connection has time limits and says who it is (`application_name`), unless the address says otherwise. No message
holds the password.
"""

import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import urlsplit

import asyncpg

from windlass.model.errors import DatabaseUnavailable, SchemaMismatch, WindlassError

CONNECT_TIMEOUT_S = 10.0
# Far above any of our statements; a connection that is silent for this long is broken.
COMMAND_TIMEOUT_S = 30.0
# As `pg_stat_activity` shows it.
APPLICATION_NAME = "windlass"

# No answer came: who knows what the connection is doing.
CUT_OFF = (OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.InternalClientError)
# The database is there but full, met a deadlock or a lock, or has become a standby (a failover is under way): nothing
# was done, and asking again is safe.
_FOR_NOW = (
    asyncpg.InsufficientResourcesError,
    asyncpg.TransactionRollbackError,
    asyncpg.LockNotAvailableError,
    asyncpg.ReadOnlySQLTransactionError,
)
# Tables or functions are not as this program knows them.
_OTHER_SCHEMA = (
    asyncpg.UndefinedFunctionError,
    asyncpg.UndefinedTableError,
    asyncpg.UndefinedColumnError,
    asyncpg.InvalidSchemaNameError,
)
CONNECTION_ERRORS = (
    *CUT_OFF,
    asyncpg.PostgresConnectionError,
    # The server is starting, stopping or full.
    asyncpg.OperatorInterventionError,
    *_FOR_NOW,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.InsufficientPrivilegeError,
)


async def connect(
    dsn: str,
    *,
    timeout_s: float = CONNECT_TIMEOUT_S,
    command_timeout_s: float = COMMAND_TIMEOUT_S,
    is_caching: bool = False,
) -> Any:
    """An asyncpg connection. `is_caching`: statements are prepared on the server, which no pooler may stand before."""
    return await asyncpg.connect(
        dsn,
        timeout=timeout_s,
        command_timeout=command_timeout_s,
        statement_cache_size=100 if is_caching else 0,
        server_settings={} if "application_name=" in dsn else {"application_name": APPLICATION_NAME},
    )


@asynccontextmanager
async def connected(dsn: str, doing: str, *, command_timeout_s: float = COMMAND_TIMEOUT_S) -> AsyncIterator[Any]:
    """A connection for one piece of work. Whatever the database has against it is raised as a WindlassError."""
    with explained(doing, dsn):
        connection = await connect(dsn, command_timeout_s=command_timeout_s)
        try:
            yield connection
        finally:
            await connection.close(timeout=CONNECT_TIMEOUT_S)


@contextmanager
def explained(doing: str, dsn: str) -> Iterator[None]:
    try:
        yield
    except CONNECTION_ERRORS as error:
        raise unavailable(doing, dsn, error) from None
    except asyncpg.PostgresError as error:
        raise refused(doing, dsn, error) from None


def unavailable(doing: str, dsn: str, error: BaseException) -> DatabaseUnavailable:
    """One sentence for a connection that failed."""
    where = _where(dsn)
    if isinstance(error, asyncpg.InvalidAuthorizationSpecificationError) and "no encryption" in str(error):
        return DatabaseUnavailable(
            f"{doing}: the database at {where} takes only encrypted connections: add sslmode=require to DATABASE_URL."
        )
    if isinstance(error, asyncpg.InvalidPasswordError | asyncpg.InvalidAuthorizationSpecificationError):
        return DatabaseUnavailable(
            f"{doing}: the database at {where} refused the user or password: check DATABASE_URL."
        )
    if isinstance(error, asyncpg.InvalidCatalogNameError):
        return DatabaseUnavailable(f"{doing}: {words(error)} at {where}: create it, or name another in DATABASE_URL.")
    if isinstance(error, TimeoutError):
        return DatabaseUnavailable(
            f"{doing}: the database at {where} did not answer in time: is it reachable from here?"
        )
    if isinstance(error, socket.gaierror):
        return DatabaseUnavailable(
            f"{doing}: the name of the database's host, {where}, is not known here: check DATABASE_URL."
        )
    what = words(error)
    if isinstance(error, ssl.SSLError) or "SSL" in what:
        return DatabaseUnavailable(
            f"{doing}: the database at {where} and this program do not agree on TLS ({what}): "
            "check sslmode (and sslrootcert) in DATABASE_URL."
        )
    if isinstance(error, asyncpg.InsufficientPrivilegeError):
        return DatabaseUnavailable(
            f"{doing}: the database at {where} does not allow it ({what}): "
            "grant it to this user, or name another in DATABASE_URL."
        )
    if isinstance(error, _FOR_NOW):
        return DatabaseUnavailable(f"{doing}: the database at {where} could not do it now ({what}): try again.")
    return DatabaseUnavailable(f"{doing}: the database at {where} cannot be reached ({what}): is it running?")


def refused(doing: str, dsn: str, error: BaseException) -> WindlassError:
    """One sentence for a database that answered, but not with what was asked for."""
    where, what = _where(dsn), words(error)
    if isinstance(error, _OTHER_SCHEMA):
        return SchemaMismatch(
            f"{doing}: the schema at {where} is not as this program knows it ({what}): see `windlass db status`."
        )
    return DatabaseUnavailable(
        f"{doing}: the database at {where} refused ({what}): `windlass doctor` looks for the cause."
    )


def words(error: BaseException) -> str:
    """The sentence of an error, without the details and hints that PostgreSQL adds on further lines."""
    return str(getattr(error, "message", None) or error) or type(error).__name__


def _where(dsn: str) -> str:
    try:
        parts = urlsplit(dsn)
        host, port = parts.hostname, parts.port
    except ValueError:
        return "the address in DATABASE_URL"
    return f"{host}:{port or 5432}" if host else "its local socket"
