"""The PostgreSQL database: connection pool, schema check, time limits and error mapping. Every store works through it.

Safe behind a transaction-mode pooler: `open` detects one. Every call is then one transaction, no statement is prepared
on the server, and LISTEN is replaced by polling.

Every call has a time limit. A call whose answer did not arrive raises DatabaseUnavailable; its effect may have been
committed. The SQL functions are idempotent, so repeating a call is safe.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, Self
from weakref import WeakKeyDictionary

import asyncpg

from windlass.model.actor import current_actor
from windlass.model.config import Retention
from windlass.model.errors import BadInput, DatabaseUnavailable, TooSlow, UnknownWorker
from windlass.store.connection import (
    COMMAND_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    CONNECTION_ERRORS,
    CUT_OFF,
    connect,
    connected,
    refused,
    unavailable,
    words,
)
from windlass.store.listener import Listener
from windlass.store.migration import applied_migrations, check_contract, check_schema_version
from windlass.store.pool import ConnectionPool
from windlass.store.refused_values import explain_refused_value

# Bulk statements take time per row and get a longer limit.
BULK_TIMEOUT_S = 600.0
# Rows of each kind that one retention call deletes. Fewer rows than this in total mean that nothing is left.
SWEEP_BATCH = 1_000
# Retention runs at most this long per call: enough for hundreds of thousands of rows.
SWEEP_TIMEOUT_S = 10.0
# Settling rows of adopted tables runs triggers of other programs, which may be slow.
SETTLE_ROWS_LIMIT_S = 3.0
# Behind a pooler every call is a transaction of several statements. A client that stops between two of them holds its
# locks no longer than this.
POOLED_LIMITS = "set local lock_timeout = '20s'; set local idle_in_transaction_session_timeout = '20s'"
# asyncio's default read buffer is 256 KiB. The allocator gets it from the kernel and returns it for every answer, which
# takes longer than reading the answer.
READ_BYTES = 1 << 16
# Events and tasks take their actor from this setting.
SET_ACTOR = "select set_config('windlass.actor', $1, $2)"


class Database:
    def __init__(
        self,
        dsn: str,
        *,
        retention: Retention | None = None,
        max_connections: int = 4,
        command_timeout_s: float = COMMAND_TIMEOUT_S,
        statement_timeout_s: float | None = None,
        virtual_now: Callable[[], datetime] | None = None,
        is_contract_sufficient: bool = False,
    ) -> None:
        """`statement_timeout_s`: the server cancels longer statements, and TooSlow is raised.

        `virtual_now` replaces the database's time in every call: tests drive real PostgreSQL with it.

        `is_contract_sufficient`: for workers and clients, which need only a supported contract version. Other programs
        also use internal functions and need exactly their schema version.
        """
        self.retention = retention or Retention()
        # Whether a transaction-mode pooler sits between this program and the server.
        self.is_pooled = False
        self.pool = ConnectionPool(self._connect, limit=max_connections, timeout_s=CONNECT_TIMEOUT_S)
        self._dsn = dsn
        self._command_timeout_s = command_timeout_s
        self._statement_timeout_s = statement_timeout_s
        self._virtual_now = virtual_now
        self._is_contract_sufficient = is_contract_sufficient
        self._listener: Listener | None = None
        # The actor that was last set on a connection.
        self._actors: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()

    async def __aenter__(self) -> Self:
        async with connected(self._dsn, "connecting") as connection, connection.transaction():
            # A pooler invents its own process id for cancel requests; the server's backend has another.
            backend_pid = await connection.fetchval("select pg_backend_pid()")
            self.is_pooled = backend_pid != connection.get_server_pid()
            if self._is_contract_sufficient:
                await check_contract(connection)
            else:
                check_schema_version(max(await applied_migrations(connection), default=None))
        self._listener = Listener(self._dsn, is_possible=not self.is_pooled)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._listener is not None:
            await self._listener.close()
        await self.pool.close()

    @property
    def dsn(self) -> str:
        return self._dsn

    @property
    def listener(self) -> Listener:
        if self._listener is None:
            raise AssertionError("a Database is used inside `async with`")
        return self._listener

    @asynccontextmanager
    async def connection(self, doing: str) -> AsyncIterator[Any]:
        """A connection for one operation. `doing` opens the message of every error: "enqueueing a task: ..."."""
        assert self._listener is not None, "a Database is used inside `async with`"  # noqa: S101
        try:
            connection = await self.pool.take()
            try:
                if self._virtual_now is not None:
                    await connection.execute(
                        "select set_config('windlass.now', $1, false)", self._virtual_now().isoformat()
                    )
                if self.is_pooled:
                    async with connection.transaction():
                        await connection.execute(self._pooled_limits())
                        await self._set_actor(connection)
                        yield connection
                else:
                    await self._set_actor(connection)
                    yield connection
            except (asyncio.CancelledError, *CUT_OFF):
                self.pool.discard(connection)
                raise
            except BaseException:
                self.pool.give_back(connection)
                raise
            self.pool.give_back(connection)
        except CONNECTION_ERRORS as error:
            raise self._unavailable(doing, error) from None
        except asyncpg.NoDataFoundError as error:
            raise UnknownWorker(f"{doing}: {words(error)}.") from None
        except (
            asyncpg.DataError,
            asyncpg.IntegrityConstraintViolationError,
            asyncpg.ProgramLimitExceededError,
        ) as error:
            raise explain_refused_value(doing, error) from None
        except asyncpg.ObjectNotInPrerequisiteStateError:
            raise  # a lost lease; the calling store raises LeaseLost
        except asyncpg.PostgresError as error:
            raise refused(doing, self._dsn, error) from None
        except OverflowError:
            # COPY encodes its rows on the client, which raises Python's own errors.
            raise BadInput(f"{doing}: a number or time is out of range.") from None
        except UnicodeEncodeError:
            raise BadInput(f"{doing}: a text has half of a surrogate pair, which cannot be stored.") from None

    async def fetch(self, doing: str, query: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        async with self.connection(doing) as connection:
            rows: list[Any] = await connection.fetch(query, *arguments, timeout=timeout_s)
        return rows

    async def fetchrow(self, doing: str, query: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        async with self.connection(doing) as connection:
            return await connection.fetchrow(query, *arguments, timeout=timeout_s)

    async def fetchval(self, doing: str, query: str, *arguments: Any) -> Any:
        async with self.connection(doing) as connection:
            return await connection.fetchval(query, *arguments)

    async def call(self, doing: str, function: str, *arguments: Any) -> Any:
        """The value that an SQL function returns."""
        return await self.fetchval(doing, f"select {function}({_placeholders(arguments)})", *arguments)

    async def call_within(self, limit_s: float, doing: str, function: str, *arguments: Any) -> Any:
        """Like `call`, but the server cancels the statement after `limit_s`."""
        async with self.connection(doing) as connection, connection.transaction():
            await connection.execute(_set_statement_timeout(limit_s, "local"))
            return await connection.fetchval(f"select {function}({_placeholders(arguments)})", *arguments)

    async def call_rows(self, doing: str, function: str, *arguments: Any) -> list[Any]:
        """The rows that an SQL function returns."""
        return await self.fetch(doing, f"select * from {function}({_placeholders(arguments)})", *arguments)  # noqa: S608

    async def execute(self, doing: str, query: str, *arguments: Any) -> int:
        """Returns the number of rows that the statement affected; 0 for statements that affect none."""
        async with self.connection(doing) as connection:
            return row_count(await connection.execute(query, *arguments))

    async def sweep(self, function: str, *kept_s: float) -> int:
        """Call a retention function repeatedly until nothing is left or SWEEP_TIMEOUT_S has passed.

        The function deletes rows older than its arguments, at most SWEEP_BATCH (its last argument) of each kind, and
        returns their number. Returns the total.
        """
        deleted, give_up_at = 0, time.monotonic() + SWEEP_TIMEOUT_S
        while time.monotonic() < give_up_at:
            count: int = await self.call("applying retention", function, *kept_s, SWEEP_BATCH)
            deleted += count
            if count < SWEEP_BATCH:
                break
        return deleted

    async def _connect(self) -> Any:
        connection = await connect(self._dsn, command_timeout_s=self._command_timeout_s, is_caching=not self.is_pooled)
        transport: Any = getattr(connection, "_transport", None)
        if hasattr(transport, "max_size"):
            transport.max_size = READ_BYTES
        if self._statement_timeout_s is not None and not self.is_pooled:
            await connection.execute(_set_statement_timeout(self._statement_timeout_s, "session"))
        return connection

    async def _set_actor(self, connection: Any) -> None:
        """Connections of the control loop and of workers never have an actor, and pay nothing."""
        actor = current_actor()
        if self.is_pooled and actor is not None:
            await connection.execute(SET_ACTOR, actor, True)  # until the end of the transaction
        elif not self.is_pooled and actor != self._actors.get(connection):
            await connection.execute(SET_ACTOR, actor or "", False)
            self._actors[connection] = actor

    def _pooled_limits(self) -> str:
        if self._statement_timeout_s is None:
            return POOLED_LIMITS
        return f"{POOLED_LIMITS}; {_set_statement_timeout(self._statement_timeout_s, 'local')}"

    def _unavailable(self, doing: str, error: BaseException) -> DatabaseUnavailable:
        if isinstance(error, asyncpg.QueryCanceledError) and self._statement_timeout_s is not None:
            return TooSlow(f"{doing}: not done within {self._statement_timeout_s:g} s.")
        return unavailable(doing, self._dsn, error)


class DatabaseStore:
    """Base of the PostgreSQL stores. Each implements one port over a shared Database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def now(self) -> datetime:
        now: datetime = await self._database.fetchval("reading the time", "select windlass.now()")
        return now


def _placeholders(arguments: Sequence[Any]) -> str:
    return ", ".join(f"${position}" for position in range(1, len(arguments) + 1))


def row_count(status: str) -> int:
    """The row count in PostgreSQL's command tag, such as "UPDATE 3"."""
    last = status.rsplit(" ", 1)[-1]
    return int(last) if last.isdigit() else 0


def _set_statement_timeout(timeout_s: float, scope: str) -> str:
    return f"set {scope} statement_timeout = {round(1000 * timeout_s)}"
