"""Callers of the HTTP server, their tokens and sessions.

A token is a prefix that names its purpose, followed by 256 random bits. Only its holder has the token; the database has
its hash. Plain SHA-256 is enough: 256 random bits cannot be guessed, so the hash need not be slow.
"""

import hashlib
import random
import re
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from windlass.model.errors import BadInput
from windlass.model.task import is_name

# Visible in a leaked token, so that the finder knows what to revoke.
JOIN_PREFIX = "wlj_"
WORKER_PREFIX = "wlw_"
# A worker that calls the functions of the database itself.
SECRET_PREFIX = "wld_"  # noqa: S105 - not a secret itself
API_PREFIX = "wlt_"
# A browser session, and the link that opens one.
SESSION_PREFIX = "wls_"
LINK_PREFIX = "wll_"
_TOKEN = re.compile(r"wl[jwdtsl]_[0-9a-f]{64}")
# A truncated token may still be most of a secret.
_ANY_TOKEN = re.compile(r"\b(wl[jwdtsl]_)[0-9a-f]{8,}")


def new_token(prefix: str, rng: random.Random) -> str:
    """`rng` is the system random source, except in simulations."""
    return f"{prefix}{rng.getrandbits(256):064x}"


def is_token(text: str, prefix: str) -> bool:
    return text.startswith(prefix) and _TOKEN.fullmatch(text) is not None


def without_tokens(text: str) -> str:
    """The text with every token masked after its prefix."""
    return _ANY_TOKEN.sub(r"\1********", text)


def csrf_token(session_token: str) -> str:
    """Sent by forms of this session. Other sites cannot compute it, because they cannot read the session cookie."""
    return hashlib.sha256(f"csrf {session_token}".encode()).hexdigest()


def hash_of(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()


class Role(StrEnum):
    """What the holder of an API token may do. server/auth.py has the table of roles and routes."""

    VIEWER = "viewer"  # read everything
    PRODUCER = "producer"  # enqueue, and read the tasks that it enqueued; nothing else
    OPERATOR = "operator"  # read, enqueue, and all operations on tasks, workers and fleets
    ADMIN = "admin"  # as an operator; also create and revoke tokens
    WORKER = "worker"  # run self-registered workers, and nothing else


# Queues and fleets that one token can be limited to.
MAX_SCOPE_NAMES = 100


@dataclass(frozen=True, slots=True)
class TokenScope:
    """The queues and fleets that a caller may reach. Without any name: everything."""

    queues: frozenset[str] = frozenset()
    fleets: frozenset[str] = frozenset()

    @property
    def is_all(self) -> bool:
        return not self.queues and not self.fleets

    def allows_queue(self, queue: str) -> bool:
        return self.is_all or queue in self.queues

    def allows_fleet(self, fleet: str) -> bool:
        return self.is_all or fleet in self.fleets

    def __str__(self) -> str:
        if self.is_all:
            return "all"
        parts = (("queue", sorted(self.queues)), ("fleet", sorted(self.fleets)))
        return ", ".join(f"{kind} {name}" for kind, names in parts for name in names)


EVERYTHING = TokenScope()
# A list of tokens shows the newest ones, including revoked ones.
MAX_TOKENS_LISTED = 1_000
# Applies to tokens that are created without a time to live of their own.
DEFAULT_TOKEN_TTL_S = 90 * 86_400.0
# About a century. Sums with much longer durations overflow the timestamps of Python and PostgreSQL.
MAX_TOKEN_DAYS = 36_500


@dataclass(frozen=True, slots=True, kw_only=True)
class NewToken:
    """What a person asked for. Raises BadInput for values that no token can have."""

    name: str
    role: Role
    scope: TokenScope = EVERYTHING
    # None: it never expires.
    ttl_s: float | None = DEFAULT_TOKEN_TTL_S

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise BadInput(f"invalid token name {self.name!r}: use at most 63 letters, digits and _ . : -.")
        for names in (self.scope.queues, self.scope.fleets):
            if len(names) > MAX_SCOPE_NAMES:
                raise BadInput(f"a token is limited to at most {MAX_SCOPE_NAMES} queues and {MAX_SCOPE_NAMES} fleets.")
            for name in sorted(names):
                if not is_name(name):
                    raise BadInput(f"{name!r} is not the name of a queue or fleet.")
        if self.ttl_s is not None and not 0 < self.ttl_s <= MAX_TOKEN_DAYS * 86_400.0:
            raise BadInput(f"a token expires after more than 0 and at most {MAX_TOKEN_DAYS:,} days, or never.")


@dataclass(frozen=True, slots=True)
class ApiToken:
    """An API token as the database stores it: without the token itself."""

    id: int
    name: str
    role: Role
    created_at: datetime
    last_used_at: datetime | None
    revoked_at: datetime | None
    # None: never.
    expires_at: datetime | None = None
    created_by: str | None = None
    scope: TokenScope = EVERYTHING

    def status(self, now: datetime) -> str:
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now else "active"


# Longest name of a session's person.
MAX_PERSON_CHARACTERS = 100


@dataclass(frozen=True, slots=True)
class Session:
    """A browser session, or an unused link. `id` is the beginning of its hash."""

    id: str
    role: Role
    is_link: bool
    created_at: datetime
    expires_at: datetime
    # The person: given with the link, or by the identity provider.
    name: str = "dashboard"


def session_id(session_hash: bytes) -> str:
    return session_hash.hex()[:12]


# Servers share the rates of heavy callers about once a second. Older rates are ignored.
RATE_TTL_S = 3.0


@dataclass(frozen=True, slots=True)
class WorkerCaller:
    """A worker, by its worker token. It acts only for itself, on the queues it was spawned or registered for."""

    worker_id: str
    fleet: str
    queues: tuple[str, ...]
    # The worker has terminated, and its token is invalid.
    has_terminated: bool
    # How long the token is valid at most. None: as long as the worker.
    valid_for_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class JoinCaller:
    """A machine that has not joined yet, by its join token."""

    worker_id: str
    fleet: str
    queues: tuple[str, ...]
    has_terminated: bool
    is_expired: bool


@dataclass(frozen=True, slots=True)
class TokenCaller:
    """The holder of an API token, or of a browser session."""

    name: str
    role: Role
    scope: TokenScope = EVERYTHING
    kind: str = "token"
    # None: a session.
    token_id: int | None = None
    # None: without end.
    valid_for_s: float | None = field(default=None, compare=False)

    @property
    def actor(self) -> str:
        """The caller's name in events and tasks. Tokens add their id: the name of a revoked one can be used again."""
        return f"{self.kind}:{self.name}" + (f"#{self.token_id}" if self.token_id is not None else "")


Caller = WorkerCaller | JoinCaller | TokenCaller


class Activation(StrEnum):
    """Result of exchanging a join token for a worker token."""

    ACTIVATED = "activated"  # now, or earlier with the same two tokens
    UNKNOWN = "unknown"  # no such worker, or it has another join token
    ENDED = "ended"
    USED = "used"  # for another worker token
    EXPIRED = "expired"
