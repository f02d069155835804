"""Tokens and sessions over PostgreSQL. Implements ports/auth.py.

tests/support/memory_store/auth.py has the same contract; tests/conformance/test_auth_store.py runs over both.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID

from windlass.model.auth import (
    DEFAULT_TOKEN_TTL_S,
    EVERYTHING,
    MAX_TOKENS_LISTED,
    RATE_TTL_S,
    Activation,
    ApiToken,
    Caller,
    JoinCaller,
    Role,
    Session,
    TokenCaller,
    TokenScope,
    WorkerCaller,
)
from windlass.model.errors import BadInput
from windlass.model.task import storable
from windlass.model.worker import Registration, WorkerStatus
from windlass.store.channel import watch_channel
from windlass.store.database import DatabaseStore
from windlass.store.queries import read_queries

QUERIES = read_queries("windlass.store", "auth.sql")
IDENTITY_CHANNEL = "windlass_identities"


class PostgresAuthStore(DatabaseStore):
    async def authenticate(self, token_hash: bytes) -> Caller | None:
        rows = await self._database.call_rows("checking a token", "windlass_internal.authenticate", token_hash)
        if not rows:
            return None
        (row,) = rows
        if row["kind"] == "token":
            scope = TokenScope(frozenset(row["queues"]), frozenset(row["fleets"]))
            token = row["name"], Role(row["role"]), scope
            return TokenCaller(*token, token_id=row["token_id"], valid_for_s=row["valid_for_s"])
        queues = tuple(row["queues"])
        if row["kind"] == "join":
            return JoinCaller(row["name"], row["fleet"], queues, row["has_terminated"], row["is_expired"])
        return WorkerCaller(row["name"], row["fleet"], queues, row["has_terminated"], row["valid_for_s"])

    async def watch_revocations(
        self, set_listening: Callable[[bool], None], revoke: Callable[[bytes | None], None]
    ) -> None:
        def on_notification(payload: str) -> None:
            token_hash = None
            with contextlib.suppress(ValueError):  # any role may notify anything: then all are forgotten
                token_hash = bytes.fromhex(payload) or None
            revoke(token_hash)

        await watch_channel(
            self._database.dsn,
            IDENTITY_CHANNEL,
            on_notification,
            set_listening,
            is_possible=not self._database.is_pooled,
        )

    async def share_rates(
        self, server_id: UUID, rates: Mapping[tuple[str, str], float]
    ) -> Mapping[tuple[str, str], float]:
        kinds, callers = [kind for kind, _ in rates], [caller for _, caller in rates]
        function = "windlass_internal.share_rates"
        rows = await self._database.call_rows(
            "sharing request rates", function, server_id, kinds, callers, list(rates.values()), RATE_TTL_S
        )
        return {(row["kind"], row["caller"]): row["rate"] for row in rows}

    async def activate(self, worker_id: str, join_token_hash: bytes, token_hash: bytes) -> Activation:
        function = "windlass_internal.exchange_join_token"
        return Activation(
            await self._database.call("activating a worker", function, worker_id, join_token_hash, token_hash)
        )

    async def report_boot_step(self, worker_id: str, step: str, output: str = "") -> None:
        function = "windlass_internal.report_boot_step"
        await self._database.call("recording a boot step", function, worker_id, step, storable(output) or None)

    async def cannot_start(self, worker_id: str, code: str, reason: str) -> None:
        function = "windlass_internal.report_start_failure"
        await self._database.call("recording a start failure", function, worker_id, code, storable(reason))

    async def self_register(
        self, api_token_hash: bytes, token_hash: bytes, registration: Registration
    ) -> WorkerStatus | None:
        r = registration
        about = (r.worker_id, r.fleet, list(r.queues), r.concurrency, r.lease_s, r.host, r.pid, r.version, r.start_id)
        function = "windlass_internal.self_register_worker"
        status = await self._database.call("self-registering a worker", function, api_token_hash, token_hash, *about)
        if status == "taken":
            raise BadInput(f"a worker {r.worker_id} exists already: choose another name.")
        return WorkerStatus(status) if status is not None else None

    async def create_token(
        self,
        name: str,
        role: Role,
        token_hash: bytes,
        *,
        scope: TokenScope = EVERYTHING,
        ttl_s: float | None = DEFAULT_TOKEN_TTL_S,
    ) -> ApiToken:
        lists = sorted(scope.queues), sorted(scope.fleets)
        row = await self._database.fetchrow(
            "creating a token", QUERIES["create_token"], name, role, token_hash, *lists, ttl_s
        )
        if row is None:
            raise BadInput(f"a token {name} exists already: revoke it first, or choose another name.")
        return _token(row)

    async def tokens(self) -> list[ApiToken]:
        rows = await self._database.fetch("listing tokens", QUERIES["tokens"], MAX_TOKENS_LISTED)
        return [_token(row) for row in rows]

    async def revoke_token(self, name: str) -> bool:
        return bool(await self._database.call("revoking a token", "windlass_internal.revoke_token", name))

    async def had_tokens(self) -> bool:
        return bool(await self._database.fetchval("checking for tokens", QUERIES["had_tokens"]))

    async def create_link(self, link_hash: bytes, role: Role, ttl_s: float, name: str = "dashboard") -> None:
        await self._database.call("creating a link", "windlass_internal.create_link", link_hash, role, ttl_s, name)

    async def open_session(self, link_hash: bytes, session_hash: bytes, ttl_s: float) -> bool:
        function = "windlass_internal.open_session"
        return bool(await self._database.call("opening a session", function, link_hash, session_hash, ttl_s))

    async def create_session(self, session_hash: bytes, role: Role, ttl_s: float, name: str) -> None:
        function = "windlass_internal.create_session"
        await self._database.call("opening a session", function, session_hash, role, ttl_s, name)

    async def session(self, session_hash: bytes) -> TokenCaller | None:
        row = await self._database.fetchrow("checking a session", QUERIES["session"], session_hash)
        if row is None:
            return None
        return TokenCaller(row["name"], Role(row["role"]), kind="session", valid_for_s=row["valid_for_s"])

    async def sessions(self) -> list[Session]:
        rows = await self._database.fetch("listing sessions", QUERIES["sessions"])
        return [Session(**{**row, "role": Role(row["role"])}) for row in rows]

    async def end_session(self, session_hash: bytes) -> None:
        await self._database.call("ending a session", "windlass_internal.end_session", session_hash)

    async def revoke_session(self, session_id: str) -> bool:
        return bool(await self._database.call("revoking a session", "windlass_internal.revoke_session", session_id))


def _token(row: Any) -> ApiToken:
    values = {name: value for name, value in row.items() if name not in ("queues", "fleets")}
    scope = TokenScope(frozenset(row["queues"]), frozenset(row["fleets"]))
    return ApiToken(**{**values, "role": Role(row["role"])}, scope=scope)
