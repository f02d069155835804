"""Connects to PostgreSQL and turns its errors into messages that say what to do.

Every connection has time limits and sets `application_name`, unless the URL sets one. No message contains the password.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit
from uuid import uuid4

import asyncpg

from windlass.model.errors import DatabaseUnavailable, SchemaMismatch, WindlassError
from windlass.model.urls import single_host_urls

CONNECT_TIMEOUT_S = 10.0
# The next host of a URL is tried when one has been silent for this long.
NEXT_HOST_S = 1.0
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
# Another host may work. A refused password or an unknown database is the same everywhere.
_OF_ONE_HOST = (*CUT_OFF, asyncpg.PostgresConnectionError, asyncpg.OperatorInterventionError, *_TEMPORARY)
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
    """An asyncpg connection. `is_caching` prepares statements on the server, which fails behind a pooler.

    Several hosts are tried in their order, the next one at once if one fails, and after NEXT_HOST_S if one is silent:
    a host without power sends no error. The driver itself gives the whole time to the first host.
    """
    options: dict[str, Any] = {
        "timeout": timeout_s,
        "command_timeout": command_timeout_s,
        "statement_cache_size": 100 if is_caching else 0,
        "server_settings": {} if "application_name=" in dsn else {"application_name": APPLICATION_NAME},
    }
    urls = single_host_urls(dsn)
    if len(urls) == 1:
        return await asyncpg.connect(dsn, **options)
    attempts: list[asyncio.Task[Any]] = []
    try:
        async with asyncio.timeout(timeout_s):
            return await _first_connection(urls, options, attempts)
    finally:
        await _close_others(attempts)


async def _first_connection(urls: list[str], options: dict[str, Any], attempts: "list[asyncio.Task[Any]]") -> Any:
    """The first connection to a suitable host. It is taken out of `attempts`, which has all that were begun."""
    failures: list[BaseException] = []
    pending: set[asyncio.Task[Any]] = set()
    while pending or len(urls) > len(attempts):
        is_last = len(attempts) >= len(urls) - 1
        if len(attempts) < len(urls):
            attempts.append(asyncio.create_task(asyncpg.connect(urls[len(attempts)], **options)))
            pending.add(attempts[-1])
        done, pending = await asyncio.wait(
            pending, timeout=None if is_last else NEXT_HOST_S, return_when=asyncio.FIRST_COMPLETED
        )
        for attempt in done:
            failure = attempt.exception()
            if failure is None:
                attempts.remove(attempt)
                return attempt.result()
            if not isinstance(failure, _OF_ONE_HOST):
                raise failure
            failures.append(failure)
    # Report a server that cannot be reached rather than one that is not suitable.
    unsuitable = asyncpg.exceptions.TargetServerAttributeNotMatched
    raise next((failure for failure in failures if not isinstance(failure, unsuitable)), failures[0])


async def _close_others(attempts: "list[asyncio.Task[Any]]") -> None:
    for attempt in attempts:
        attempt.cancel()
    for outcome in await asyncio.gather(*attempts, return_exceptions=True):
        if not isinstance(outcome, BaseException):
            outcome.terminate()


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
    except (*CUT_OFF, asyncpg.PostgresError):
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
        f"{doing}: the database at {where} refused the statement ({what}). Run `windlass doctor`.",
        is_refusal=True,
    )


def words(error: BaseException) -> str:
    """The message of an error, without PostgreSQL's further lines of detail and hints."""
    return str(getattr(error, "message", None) or error) or type(error).__name__


def _where(dsn: str) -> str:
    try:
        addresses = [_address(urlsplit(url)) for url in single_host_urls(dsn)]
    except ValueError:
        return "the address in DATABASE_URL"
    return " or ".join(dict.fromkeys(addresses))


def _address(parts: SplitResult) -> str:
    named = parse_qs(parts.query)
    host = parts.hostname or named.get("host", [""])[0]
    port = parts.port or named.get("port", ["5432"])[0]
    return f"{host}:{port}" if host and not host.startswith("/") else "its local socket"
