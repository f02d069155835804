"""Who may call over HTTP, over PostgreSQL: the functions of migrations/0006_access.sql.

store/memory_access.py keeps the same contract; tests/conformance/test_access.py runs over both.
"""

from typing import TYPE_CHECKING, Any

from windlass.model.access import Activation, ApiToken, Caller, JoinCaller, Role, TokenCaller, WorkerCaller
from windlass.model.errors import BadInput
from windlass.store.control import QUERIES, PostgresControlStore

if TYPE_CHECKING:
    from windlass.ports.access import Access


class PostgresAccessStore(PostgresControlStore):
    async def caller(self, token_hash: bytes) -> Caller | None:
        async with self._connection("checking a token") as connection:
            row = await connection.fetchrow("select * from windlass.caller($1)", token_hash)
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
                "select windlass.activate_worker($1, $2, $3)", worker_id, join_token_hash, token_hash
            )
        return Activation(verdict)

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


def _token(row: Any) -> ApiToken:
    return ApiToken(**{**row, "role": Role(row["role"])})


if TYPE_CHECKING:
    # mypy compares every signature with the contract's.
    _: type[Access] = PostgresAccessStore
