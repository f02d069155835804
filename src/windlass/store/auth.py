"""Who may call over HTTP, over PostgreSQL: the functions of migrations/0006_access.sql, the
sessions of 0009_faces.sql.

store/memory/auth.py keeps the same contract; tests/conformance/test_access.py runs over both.
"""

from typing import TYPE_CHECKING, Any

from windlass.model.auth import (
    SERVER_TTL_S,
    Activation,
    ApiToken,
    Caller,
    JoinCaller,
    Role,
    ServerAddress,
    Session,
    TokenCaller,
    WorkerCaller,
)
from windlass.model.errors import BadInput
from windlass.model.task import storable
from windlass.model.worker import Registration, WorkerStatus
from windlass.store.control import QUERIES, PostgresControlStore

if TYPE_CHECKING:
    from windlass.ports.auth import AuthStore


class PostgresAuthStore(PostgresControlStore):
    async def authenticate(self, token_hash: bytes) -> Caller | None:
        async with self._connection("checking a token") as connection:
            row = await connection.fetchrow("select * from windlass_internal.authenticate($1)", token_hash)
        if row is None:
            return None
        if row["kind"] == "token":
            return TokenCaller(row["name"], Role(row["role"]))
        queues = tuple(row["queues"])
        if row["kind"] == "join":
            return JoinCaller(row["name"], row["fleet"], queues, row["has_ended"], row["is_expired"])
        return WorkerCaller(row["name"], row["fleet"], queues, row["has_ended"])

    async def activate(self, worker_id: str, join_token_hash: bytes, token_hash: bytes) -> Activation:
        async with self._connection("activating a worker") as connection:
            verdict = await connection.fetchval(
                "select windlass_internal.exchange_join_token($1, $2, $3)", worker_id, join_token_hash, token_hash
            )
        return Activation(verdict)

    async def cannot_start(self, worker_id: str, code: str, reason: str) -> None:
        async with self._connection("noting why a worker cannot start") as connection:
            await connection.execute(
                "select windlass_internal.report_start_failure($1, $2, $3)", worker_id, code, storable(reason)
            )

    async def self_register(
        self, api_token_hash: bytes, token_hash: bytes, registration: Registration
    ) -> WorkerStatus | None:
        r = registration
        async with self._connection("enlisting a worker") as connection:
            status = await connection.fetchval(
                "select windlass_internal.self_register_worker($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
                api_token_hash,
                token_hash,
                r.worker_id,
                r.fleet,
                list(r.queues),
                r.concurrency,
                r.lease_s,
                r.host,
                r.pid,
                r.version,
                r.start_id,
            )
        if status == "taken":
            raise BadInput(f"there is a worker {r.worker_id} already: take another name.")
        return WorkerStatus(status) if status is not None else None

    async def create_token(self, name: str, role: Role, token_hash: bytes) -> ApiToken:
        async with self._connection("creating a token") as connection:
            row = await connection.fetchrow(QUERIES["create_token"], name, role, token_hash)
        if row is None:
            raise BadInput(f"there is a token {name} already: revoke it first, or take another name.")
        return _token(row)

    async def tokens(self) -> list[ApiToken]:
        async with self._connection("listing tokens") as connection:
            rows = await connection.fetch(QUERIES["tokens"])
        return [_token(row) for row in rows]

    async def revoke_token(self, name: str) -> bool:
        async with self._connection("revoking a token") as connection:
            return bool(await connection.fetchval(QUERIES["revoke_token"], name))

    async def has_tokens(self) -> bool:
        async with self._connection("looking for tokens") as connection:
            return bool(await connection.fetchval(QUERIES["has_tokens"]))

    async def create_link(self, link_hash: bytes, role: Role, ttl_s: float) -> None:
        async with self._connection("creating a link") as connection:
            await connection.execute(QUERIES["create_link"], link_hash, role, ttl_s)

    async def open_session(self, link_hash: bytes, session_hash: bytes, ttl_s: float) -> bool:
        async with self._connection("opening a session") as connection:
            return bool(await connection.fetchval(QUERIES["open_session"], link_hash, session_hash, ttl_s))

    async def session_role(self, session_hash: bytes) -> Role | None:
        async with self._connection("checking a session") as connection:
            role = await connection.fetchval(QUERIES["session_role"], session_hash)
        return Role(role) if role is not None else None

    async def sessions(self) -> list[Session]:
        async with self._connection("listing sessions") as connection:
            rows = await connection.fetch(QUERIES["sessions"])
        return [Session(**{**row, "role": Role(row["role"])}) for row in rows]

    async def end_session(self, session_hash: bytes) -> None:
        async with self._connection("ending a session") as connection:
            await connection.execute(QUERIES["end_session"], session_hash)

    async def revoke_session(self, session_id: str) -> bool:
        async with self._connection("revoking a session") as connection:
            return bool(await connection.fetchval(QUERIES["revoke_session"], session_id))

    async def record_server(self, face: ServerAddress) -> None:
        async with self._connection("saying where the dashboard is") as connection:
            await connection.execute(QUERIES["record_server"], face.url, face.host)

    async def servers(self) -> list[ServerAddress]:
        async with self._connection("looking where the dashboard is") as connection:
            rows = await connection.fetch(QUERIES["http_servers"], SERVER_TTL_S)
        return [ServerAddress(**row) for row in rows]

    async def remove_server(self, face: ServerAddress) -> None:
        async with self._connection("saying that the dashboard is gone") as connection:
            await connection.execute(QUERIES["remove_server"], face.url, face.host)


def _token(row: Any) -> ApiToken:
    return ApiToken(**{**row, "role": Role(row["role"])})


if TYPE_CHECKING:
    # mypy compares every signature with the contract's.
    _: type[AuthStore] = PostgresAuthStore
