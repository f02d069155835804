"""Tokens, sessions and server addresses, in memory. Implements ports/auth.py."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from uuid import UUID

from support.memory_store.interval import interval
from support.memory_store.tables import Tables, TableStore
from support.memory_store.transport import MemoryTransport
from support.memory_store.workers import Credentials
from windlass.model.actor import acting_as, current_actor
from windlass.model.auth import (
    DEFAULT_TOKEN_TTL_S,
    EVERYTHING,
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
    session_id,
)
from windlass.model.errors import BadInput
from windlass.model.task import check_queue_name, storable
from windlass.model.worker import LIVE, Registration, WorkerStatus

# The last use of an API token is recorded at most once per minute.
LAST_USE_INTERVAL = timedelta(minutes=1)
MAX_BOOT_STEPS = 40


class MemoryAuthStore(TableStore):
    def __init__(self, tables: Tables) -> None:
        super().__init__(tables)
        self._transport = MemoryTransport(tables)

    async def authenticate(self, token_hash: bytes) -> Caller | None:
        for worker in self._workers.rows.values():
            credentials = worker.credentials
            if credentials is None:
                continue
            if credentials.token_hash == token_hash:
                sponsor = self._tables.api_tokens.get(credentials.api_token_hash or b"")
                has_terminated = worker.status not in LIVE or (sponsor is not None and not self._is_valid(sponsor))
                return WorkerCaller(worker.id, worker.fleet, worker.queues, has_terminated, self._valid_for_s(sponsor))
            if credentials.join_token_hash == token_hash:
                is_expired = credentials.join_expires_at <= self._clock()
                return JoinCaller(worker.id, worker.fleet, worker.queues, worker.status not in LIVE, is_expired)
        token, now = self._tables.api_tokens.get(token_hash), self._clock()
        if token is None or not self._is_valid(token):
            return None
        if token.last_used_at is None or token.last_used_at < now - LAST_USE_INTERVAL:
            self._tables.api_tokens[token_hash] = replace(token, last_used_at=now)
        valid_for_s = self._valid_for_s(token)
        return TokenCaller(token.name, token.role, token.scope, token_id=token.id, valid_for_s=valid_for_s)

    def _is_valid(self, token: ApiToken) -> bool:
        return token.status(self._clock()) == "active"

    def _valid_for_s(self, token: ApiToken | None) -> float | None:
        if token is None or token.expires_at is None:
            return None
        return (token.expires_at - self._clock()).total_seconds()

    async def watch_revocations(
        self, set_listening: Callable[[bool], None], revoke: Callable[[bytes | None], None]
    ) -> None:
        """Reports nothing, so servers must not cache callers."""
        set_listening(False)
        await asyncio.Event().wait()

    async def share_rates(
        self, server_id: UUID, rates: Mapping[tuple[str, str], float]
    ) -> Mapping[tuple[str, str], float]:
        now = self._clock()
        self._tables.caller_rates[server_id] = (now, dict(rates))
        totals = dict.fromkeys(rates, 0.0)
        for recorded_at, recorded in self._tables.caller_rates.values():
            if recorded_at > now - interval(RATE_TTL_S):
                for key in totals.keys() & recorded.keys():
                    totals[key] += recorded[key]
        return totals

    async def activate(self, worker_id: str, join_token_hash: bytes, token_hash: bytes) -> Activation:
        worker = self._workers.get(worker_id)
        credentials = worker.credentials if worker is not None else None
        if worker is None or credentials is None or credentials.join_token_hash != join_token_hash:
            return Activation.UNKNOWN
        if worker.status not in LIVE or worker.spawned.prepare_code == "MISPLACED":
            return Activation.ENDED
        if credentials.token_hash is not None:
            return Activation.ACTIVATED if credentials.token_hash == token_hash else Activation.USED
        if credentials.join_expires_at <= self._clock():
            return Activation.EXPIRED
        credentials.token_hash = token_hash
        worker.spawned.joined_at = self._clock()
        worker.spawned.reachable_at = worker.spawned.reachable_at or self._clock()
        self._add_event("WORKER_JOINED", "machine exchanged its join token", fleet=worker.fleet, worker_id=worker_id)
        return Activation.ACTIVATED

    async def report_boot_step(self, worker_id: str, step: str, output: str = "") -> None:
        worker = self._workers.among((WorkerStatus.SPAWNING,), worker_id)
        if worker is None or worker.slot is None or worker.last_heartbeat is not None:
            return
        spawned, now = worker.spawned, self._clock()
        if spawned.boot_step != step and len(spawned.boot_steps) < MAX_BOOT_STEPS:
            spawned.boot_steps.append((step, now))
        spawned.boot_step, spawned.boot_step_at = step, now
        spawned.reachable_at = spawned.reachable_at or now
        self._tables.worker_logs.set_boot(worker, output, now)

    async def cannot_start(self, worker_id: str, code: str, reason: str) -> None:
        worker = self._workers.among((WorkerStatus.SPAWNING,), worker_id)
        if worker is None or worker.slot is None or worker.last_heartbeat is not None:
            return
        if worker.spawned.prepare_code is None:
            reason = storable(reason)
            worker.spawned.prepare_code, worker.spawned.prepare_reason = code, reason
            self._add_event(
                "WORKER_NOT_STARTED", reason, fleet=worker.fleet, worker_id=worker_id, detail={"code": code}
            )

    async def self_register(
        self, api_token_hash: bytes, token_hash: bytes, registration: Registration
    ) -> WorkerStatus | None:
        sponsor = self._tables.api_tokens.get(api_token_hash)
        if sponsor is None or not self._is_valid(sponsor) or sponsor.role is not Role.WORKER:
            return None
        known = self._workers.get(registration.worker_id)
        if known is not None and (known.credentials is None or known.credentials.token_hash != token_hash):
            raise BadInput(f"a worker {registration.worker_id} exists already: choose another name.")
        status = await self._transport.register(registration)
        credentials = Credentials(token_hash=token_hash, api_token_hash=api_token_hash)
        self._workers.rows[registration.worker_id].credentials = credentials
        return status

    async def create_token(
        self,
        name: str,
        role: Role,
        token_hash: bytes,
        *,
        scope: TokenScope = EVERYTHING,
        ttl_s: float | None = DEFAULT_TOKEN_TTL_S,
    ) -> ApiToken:
        check_queue_name(name)
        now = self._clock()
        if any(token.name == name and self._is_valid(token) for token in self._tables.api_tokens.values()):
            raise BadInput(f"a token {name} exists already: revoke it first, or choose another name.")
        for hash_, token in self._tables.api_tokens.items():
            if token.name == name and token.revoked_at is None:
                self._tables.api_tokens[hash_] = replace(token, revoked_at=now)
        expires_at = now + interval(ttl_s) if ttl_s is not None else None
        number = len(self._tables.api_tokens) + 1
        token = ApiToken(number, name, role, now, None, None, expires_at, current_actor(), scope)
        self._tables.api_tokens[token_hash] = token
        self._add_event("TOKEN_CREATED", f"token {name} created with role {role}", detail={"token": name})
        return token

    async def tokens(self) -> list[ApiToken]:
        return list(reversed(self._tables.api_tokens.values()))

    async def revoke_token(self, name: str) -> bool:
        for token_hash, token in self._tables.api_tokens.items():
            if token.name == name and token.revoked_at is None:
                self._tables.api_tokens[token_hash] = replace(token, revoked_at=self._clock())
                self._add_event("TOKEN_REVOKED", f"token {name} revoked", detail={"token": name})
                return True
        return False

    async def had_tokens(self) -> bool:
        return bool(self._tables.api_tokens)

    async def create_link(self, link_hash: bytes, role: Role, ttl_s: float, name: str = "dashboard") -> None:
        self._add_session(link_hash, role, ttl_s, name, is_link=True)
        reason = f"login link for {name} created, role {role}"
        self._add_event("LINK_CREATED", reason, detail={"person": name, "role": role})

    async def open_session(self, link_hash: bytes, session_hash: bytes, ttl_s: float) -> bool:
        link = self._tables.sessions.get(link_hash)
        if link is None or not link.is_link or link.expires_at <= self._clock():
            return False
        del self._tables.sessions[link_hash]
        self._add_session(session_hash, link.role, ttl_s, link.name, is_link=False)
        with acting_as(f"session:{link.name}"):
            self._add_event("SESSION_OPENED", f"logged in by a link, role {link.role}")
        return True

    async def create_session(self, session_hash: bytes, role: Role, ttl_s: float, name: str) -> None:
        self._add_session(session_hash, role, ttl_s, name, is_link=False)
        with acting_as(f"session:{name}"):
            self._add_event("SESSION_OPENED", f"logged in through the identity provider, role {role}")

    def _add_session(self, hash_: bytes, role: Role, ttl_s: float, name: str, *, is_link: bool) -> None:
        now = self._clock()
        self._tables.sessions[hash_] = Session(session_id(hash_), role, is_link, now, now + interval(ttl_s), name)

    async def session(self, session_hash: bytes) -> TokenCaller | None:
        session = self._tables.sessions.get(session_hash)
        if session is None or session.is_link or session.expires_at <= self._clock():
            return None
        valid_for_s = (session.expires_at - self._clock()).total_seconds()
        return TokenCaller(session.name, session.role, kind="session", valid_for_s=valid_for_s)

    async def sessions(self) -> list[Session]:
        now = self._clock()
        unexpired = [(hash_, session) for hash_, session in self._tables.sessions.items() if session.expires_at > now]
        unexpired.sort(key=lambda found: (-found[1].created_at.timestamp(), found[0]))
        return [session for _, session in unexpired]

    async def end_session(self, session_hash: bytes) -> None:
        session = self._tables.sessions.get(session_hash)
        if session is not None and not session.is_link:
            del self._tables.sessions[session_hash]
            with acting_as(f"session:{session.name}"):
                self._add_event("SESSION_ENDED", "logged out")

    async def revoke_session(self, session_id: str) -> bool:
        now = self._clock()
        found = [hash_ for hash_, s in self._tables.sessions.items() if s.id == session_id and s.expires_at > now]
        for hash_ in found:
            name = self._tables.sessions.pop(hash_).name
            self._add_event("SESSION_REVOKED", f"session of {name} revoked")
        return bool(found)
