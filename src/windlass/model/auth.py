"""Who is calling, and what a token is worth.

A token is a secret of 256 random bits behind a prefix that says what it is for. Its holder has it, everybody else its
hash. Plain SHA-256 is enough for that: nobody guesses 256 bits, so nothing has to be slow.
"""

import hashlib
import random
import re
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

# Shown in what leaked, so that whoever finds one knows what to revoke.
JOIN_PREFIX = "wlj_"
WORKER_PREFIX = "wlw_"
API_PREFIX = "wlt_"
# A person's browser, and the link that lets it in.
SESSION_PREFIX = "wls_"
LINK_PREFIX = "wll_"
_TOKEN = re.compile(r"wl[jwtsl]_[0-9a-f]{64}")
# What was cut off does not make the rest of it harmless.
_ANY_TOKEN = re.compile(r"\b(wl[jwtsl]_)[0-9a-f]{8,}")


def new_token(prefix: str, rng: random.Random) -> str:
    """`rng` is the system's source of chance everywhere but in simulations."""
    return f"{prefix}{rng.getrandbits(256):064x}"


def is_token(text: str, prefix: str) -> bool:
    return text.startswith(prefix) and _TOKEN.fullmatch(text) is not None


def without_tokens(text: str) -> str:
    """The text with every token in it made useless; what kind it was can still be seen."""
    return _ANY_TOKEN.sub(r"\1********", text)


def csrf_token(session_token: str) -> str:
    """What a page of this session sends along to prove that it is one: others cannot read the cookie it is made of."""
    return hashlib.sha256(f"csrf {session_token}".encode()).hexdigest()


def hash_of(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()


class Role(StrEnum):
    """What the holder of an API token may do; each of the first three may do what those before it may."""

    VIEWER = "viewer"  # look
    PRODUCER = "producer"  # enqueue
    OPERATOR = "operator"  # everything a person does by hand
    WORKER = "worker"  # run workers that nobody hired, and nothing else


@dataclass(frozen=True, slots=True)
class ApiToken:
    """An API token as the store knows it: without the token."""

    id: int
    name: str
    role: Role
    created_at: datetime
    last_used_at: datetime | None
    revoked_at: datetime | None


# What a browser may be let in as.
SESSION_ROLES = (Role.VIEWER, Role.OPERATOR)


@dataclass(frozen=True, slots=True)
class Session:
    """A browser that was let in, or a link that will let one in. `id` is the beginning of its hash."""

    id: str
    role: Role
    is_link: bool
    created_at: datetime
    expires_at: datetime


def session_id(session_hash: bytes) -> str:
    return session_hash.hex()[:12]


# A running orchestrator says where it is again and again. One that has not for so long is not there any more.
SERVER_TTL_S = 20.0


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a running orchestrator serves people. `host`: on which host it runs, whose loopback a URL may name."""

    url: str
    host: str


@dataclass(frozen=True, slots=True)
class WorkerCaller:
    """A worker, by its own token. It acts in its own name and serves the queues it was hired or enlisted for."""

    worker_id: str
    fleet: str
    queues: tuple[str, ...]
    # Its token is worth nothing any more.
    has_ended: bool


@dataclass(frozen=True, slots=True)
class JoinCaller:
    """A machine that has not joined yet, by the token it was made with."""

    worker_id: str
    fleet: str
    queues: tuple[str, ...]
    has_ended: bool
    is_expired: bool


@dataclass(frozen=True, slots=True)
class TokenCaller:
    """Somebody with an API token."""

    name: str
    role: Role


Caller = WorkerCaller | JoinCaller | TokenCaller


class Activation(StrEnum):
    """What became of the wish to exchange a join token for a worker token."""

    ACTIVATED = "activated"  # now, or before with the same two tokens
    UNKNOWN = "unknown"  # there is no such worker, or it has another join token
    ENDED = "ended"
    USED = "used"  # for another worker token
    EXPIRED = "expired"
