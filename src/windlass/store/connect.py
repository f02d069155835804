"""Connects to PostgreSQL and turns its errors into messages that say what to do.

Every connection has time limits and sets `application_name`, unless the URL sets one. No message contains the password.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg

from windlass.model.errors import DatabaseUnavailable, SchemaMismatch, WindlassError

CONNECT_TIMEOUT_S = 10.0
# Far above the duration of any statement here: a connection without an answer for this long is broken.
COMMAND_TIMEOUT_S = 30.0
# Shown in pg_stat_activity.
APPLICATION_NAME = "windlass"

# No answer came; the state of the connection is unknown.
CUT_OFF = (OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.InternalClientError)
# Out of resources, a deadlock, a lock timeout, or a server that became a standby (failover). Nothing was changed, and a
# retry is safe.
_TEMPORARY = (
    asyncpg.InsufficientResourcesError,
    asyncpg.TransactionRollbackError,
    asyncpg.LockNotAvailableError,
    asyncpg.ReadOnlySQLTransactionError,
)
# Tables, columns or functions that this program expects are missing.
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
    *_TEMPORARY,
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
    """An asyncpg connection. `is_caching` prepares statements on the server, which fails behind a pooler."""
    return await asyncpg.connect(
        dsn,
        timeout=timeout_s,
        command_timeout=command_timeout_s,
        statement_cache_size=100 if is_caching else 0,
        server_settings={} if "application_name=" in dsn else {"application_name": APPLICATION_NAME},
    )


@asynccontextmanager
async def connected(dsn: str, doing: str, *, command_timeout_s: float = COMMAND_TIMEOUT_S) -> AsyncIterator[Any]:
    """A connection for one operation. Database errors are raised as WindlassError."""
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


async def receives_notifications(connection: Any, timeout_s: float) -> bool:
    """Whether a notification to ourselves arrives. A connection can be dead, or change behind a pooler, unnoticed."""
    channel = f"windlass_test_{uuid4().hex}"
    seen = asyncio.Event()

    def on_notification(*_: object) -> None:
        seen.set()

    try:
        await connection.add_listener(channel, on_notification)
        await connection.execute(f"notify {channel}")
        async with asyncio.timeout(timeout_s):
            await seen.wait()
        await connection.remove_listener(channel, on_notification)
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
        return False
    return True


def unavailable(doing: str, dsn: str, error: BaseException) -> DatabaseUnavailable:
    """The error for a failed connection or a temporary failure."""
    where = _where(dsn)
    if isinstance(error, asyncpg.InvalidAuthorizationSpecificationError) and "no encryption" in str(error):
        return DatabaseUnavailable(
            f"{doing}: the database at {where} accepts only encrypted connections. Add sslmode=require to DATABASE_URL."
        )
    if isinstance(error, asyncpg.InvalidPasswordError | asyncpg.InvalidAuthorizationSpecificationError):
        return DatabaseUnavailable(
            f"{doing}: the database at {where} refused the user or password. Check DATABASE_URL."
        )
    if isinstance(error, asyncpg.DiskFullError):
        return DatabaseUnavailable(f"{doing}: the disk of the database at {where} is full. Free space on its host.")
    if isinstance(error, asyncpg.InvalidCatalogNameError):
        return DatabaseUnavailable(
            f"{doing}: {words(error)} at {where}. Create it, or set DATABASE_URL to another one."
        )
    if isinstance(error, TimeoutError):
        return DatabaseUnavailable(
            f"{doing}: the database at {where} did not answer in time. Check that it is reachable from here."
        )
    if isinstance(error, socket.gaierror):
        return DatabaseUnavailable(
            f"{doing}: the host name of the database, {where}, cannot be resolved. Check DATABASE_URL."
        )
    what = words(error)
    if isinstance(error, ssl.SSLError) or "SSL" in what:
        return DatabaseUnavailable(
            f"{doing}: the TLS connection to the database at {where} failed ({what}). "
            "Check sslmode (and sslrootcert) in DATABASE_URL."
        )
    if isinstance(error, asyncpg.InsufficientPrivilegeError):
        return DatabaseUnavailable(
            f"{doing}: the database at {where} denied permission ({what}). "
            "Grant it to this user, or set DATABASE_URL to another user."
        )
    if isinstance(error, _TEMPORARY):
        return DatabaseUnavailable(f"{doing}: the database at {where} failed temporarily ({what}). Try again.")
    return DatabaseUnavailable(
        f"{doing}: the database at {where} cannot be reached ({what}). Check that it is running."
    )


def refused(doing: str, dsn: str, error: BaseException) -> WindlassError:
    """The error for a statement that the database refused."""
    where, what = _where(dsn), words(error)
    if isinstance(error, _OTHER_SCHEMA):
        return SchemaMismatch(
            f"{doing}: the schema at {where} does not match this program ({what}). Run `windlass db status`."
        )
    return DatabaseUnavailable(
        f"{doing}: the database at {where} refused the statement ({what}). Run `windlass doctor`."
    )


def words(error: BaseException) -> str:
    """The message of an error, without PostgreSQL's further lines of detail and hints."""
    return str(getattr(error, "message", None) or error) or type(error).__name__


def _where(dsn: str) -> str:
    try:
        parts = urlsplit(dsn)
        host, port = parts.hostname, parts.port
    except ValueError:
        return "the address in DATABASE_URL"
    return f"{host}:{port or 5432}" if host else "its local socket"
