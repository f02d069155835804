"""Who may call over HTTP, in memory: the contract of PostgresAccessStore without PostgreSQL.

migrations/0006_access.sql says what is right; tests/conformance/test_access.py runs over both.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from random import Random
from typing import TYPE_CHECKING

from windlass.model.access import (
    FACE_TTL_S,
    Activation,
    ApiToken,
    Caller,
    FaceAddress,
    JoinCaller,
    Role,
    Session,
    TokenCaller,
    WorkerCaller,
    session_id,
)
from windlass.model.config import Retention
from windlass.model.errors import BadInput
from windlass.model.task import check_queue_name, storable
from windlass.model.worker import LIVE, Registration, WorkerStatus
from windlass.ports.control import Intent
from windlass.store.memory import _interval
from windlass.store.memory_control import MemoryControlStore, _FleetRow

if TYPE_CHECKING:
    from windlass.ports.access import Access

# An API token's last use is noted to the minute.
USE_NOTED_EVERY = timedelta(minutes=1)


@dataclass(slots=True)
class _Credentials:
    # None of one that enlisted.
    join_token_hash: bytes | None = None
    join_expires_at: datetime = datetime.min
    token_hash: bytes | None = None
    # Who let it in that enlisted.
    api_token_hash: bytes | None = None


class MemoryAccessStore(MemoryControlStore):
    def __init__(
        self, clock: Callable[[], datetime], retention: Retention | None = None, chance: Random | None = None
    ) -> None:
        super().__init__(clock, retention, chance)
        self._credentials: dict[str, _Credentials] = {}
        self._api_tokens: dict[bytes, ApiToken] = {}
        # By hash; links too.
        self._sessions: dict[bytes, Session] = {}
        self._faces: dict[FaceAddress, datetime] = {}

    async def caller(self, token_hash: bytes) -> Caller | None:
        for worker_id, credentials in self._credentials.items():
            worker = self._workers[worker_id]
            if credentials.token_hash == token_hash:
                sponsor = self._api_tokens.get(credentials.api_token_hash) if credentials.api_token_hash else None
                is_revoked = sponsor is not None and sponsor.revoked_at is not None
                has_ended = worker.status is WorkerStatus.TERMINATED or is_revoked
                return WorkerCaller(worker_id, worker.fleet, worker.queues, has_ended)
            if credentials.join_token_hash == token_hash:
                is_expired = credentials.join_expires_at <= self._clock()
                return JoinCaller(worker_id, worker.fleet, worker.queues, worker.status not in LIVE, is_expired)
        token = self._api_tokens.get(token_hash)
        if token is None or token.revoked_at is not None:
            return None
        now = self._clock()
        if token.last_used_at is None or token.last_used_at < now - USE_NOTED_EVERY:
            self._api_tokens[token_hash] = replace(token, last_used_at=now)
        return TokenCaller(token.name, token.role)

    async def activate(self, worker_id: str, join_token_hash: bytes, token_hash: bytes) -> Activation:
        credentials = self._credentials.get(worker_id)
        if credentials is None or credentials.join_token_hash != join_token_hash:
            return Activation.UNKNOWN
        worker = self._workers[worker_id]
        if worker.status not in LIVE:
            return Activation.ENDED
        if credentials.token_hash is not None:
            return Activation.ACTIVATED if credentials.token_hash == token_hash else Activation.USED
        if credentials.join_expires_at <= self._clock():
            return Activation.EXPIRED
        credentials.token_hash = token_hash
        self._note("WORKER_JOINED", "its machine exchanged its join token", fleet=worker.fleet, worker_id=worker_id)
        return Activation.ACTIVATED

    async def cannot_start(self, worker_id: str, code: str, reason: str) -> None:
        worker, hired = self._workers.get(worker_id), self._hired[worker_id]
        if (
            worker is None
            or worker.status is not WorkerStatus.SPAWNING
            or worker.slot is None
            or hired.prepare_code is not None
            or worker.last_heartbeat is not None
        ):
            return
        hired.prepare_code, hired.prepare_reason = code, storable(reason)
        self._note(
            "WORKER_NOT_STARTED", storable(reason), fleet=worker.fleet, worker_id=worker_id, detail={"code": code}
        )

    async def enlist(self, api_token_hash: bytes, token_hash: bytes, registration: Registration) -> WorkerStatus | None:
        sponsor = self._api_tokens.get(api_token_hash)
        if sponsor is None or sponsor.revoked_at is not None or sponsor.role is not Role.WORKER:
            return None
        known = self._credentials.get(registration.worker_id)
        if registration.worker_id in self._workers and (known is None or known.token_hash != token_hash):
            raise BadInput(f"there is a worker {registration.worker_id} already: take another name.")
        status = await self.register(registration)
        self._credentials[registration.worker_id] = _Credentials(token_hash=token_hash, api_token_hash=api_token_hash)
        return status

    async def create_token(self, name: str, role: Role, token_hash: bytes) -> ApiToken:
        check_queue_name(name)
        if any(token.name == name and token.revoked_at is None for token in self._api_tokens.values()):
            raise BadInput(f"there is a token {name} already: revoke it first, or take another name.")
        token = ApiToken(len(self._api_tokens) + 1, name, role, self._clock(), None, None)
        self._api_tokens[token_hash] = token
        return token

    async def tokens(self) -> list[ApiToken]:
        return list(reversed(self._api_tokens.values()))

    async def revoke_token(self, name: str) -> bool:
        for token_hash, token in self._api_tokens.items():
            if token.name == name and token.revoked_at is None:
                self._api_tokens[token_hash] = replace(token, revoked_at=self._clock())
                return True
        return False

    async def has_tokens(self) -> bool:
        return any(token.revoked_at is None for token in self._api_tokens.values())

    async def create_link(self, link_hash: bytes, role: Role, ttl_s: float) -> None:
        self._add_session(link_hash, role, ttl_s, is_link=True)

    async def open_session(self, link_hash: bytes, session_hash: bytes, ttl_s: float) -> bool:
        link = self._sessions.get(link_hash)
        if link is None or not link.is_link or link.expires_at <= self._clock():
            return False
        del self._sessions[link_hash]
        self._add_session(session_hash, link.role, ttl_s, is_link=False)
        return True

    def _add_session(self, hash_: bytes, role: Role, ttl_s: float, *, is_link: bool) -> None:
        now = self._clock()
        self._sessions[hash_] = Session(session_id(hash_), role, is_link, now, now + _interval(ttl_s))

    async def session_role(self, session_hash: bytes) -> Role | None:
        session = self._sessions.get(session_hash)
        if session is None or session.is_link or session.expires_at <= self._clock():
            return None
        return session.role

    async def sessions(self) -> list[Session]:
        now = self._clock()
        lasting = [(hash_, session) for hash_, session in self._sessions.items() if session.expires_at > now]
        lasting.sort(key=lambda found: (-found[1].created_at.timestamp(), found[0]))
        return [session for _, session in lasting]

    async def end_session(self, session_hash: bytes) -> None:
        session = self._sessions.get(session_hash)
        if session is not None and not session.is_link:
            del self._sessions[session_hash]

    async def revoke_session(self, session_id: str) -> bool:
        now = self._clock()
        found = [hash_ for hash_, s in self._sessions.items() if s.id == session_id and s.expires_at > now]
        for hash_ in found:
            del self._sessions[hash_]
        return bool(found)

    async def note_face(self, face: FaceAddress) -> None:
        self._faces.pop(face, None)  # the newest stands last
        self._faces[face] = self._clock()

    async def faces(self) -> list[FaceAddress]:
        since = self._clock() - _interval(FACE_TTL_S)
        return [face for face, seen_at in reversed(self._faces.items()) if seen_at > since]

    async def forget_face(self, face: FaceAddress) -> None:
        self._faces.pop(face, None)

    async def sweep(self) -> int:
        deleted = await super().sweep()
        for worker_id in self._credentials.keys() - self._workers.keys():
            del self._credentials[worker_id]
        return deleted

    def _hire(self, fleet: _FleetRow, intent: Intent) -> None:
        super()._hire(fleet, intent)
        if intent.join_token_hash is not None and intent.join_ttl_s is not None:
            expires_at = self._clock() + _interval(intent.join_ttl_s)
            self._credentials[intent.worker_id] = _Credentials(intent.join_token_hash, expires_at)


if TYPE_CHECKING:
    # mypy compares every signature with the contract's.
    _: type[Access] = MemoryAccessStore
