"""Identities of recent callers by the hash of their token or session, with immediate revocation.

The database notifies every server when a token is revoked, a worker terminates or a session ends, and the entry is
removed at once. Without a working listening connection nothing is cached. An entry also expires after IDENTITY_TTL_S,
which bounds the effect of a lost notification.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from windlass.model.auth import Caller

# Workers send a heartbeat every 20 s or so: with a shorter time, many of them would be looked up again.
IDENTITY_TTL_S = 300.0
# More than the workers and users of one server. Beyond it the oldest entries are removed.
MAX_CACHED_IDENTITIES = 50_000


@dataclass(frozen=True, slots=True)
class CallerIdentity:
    """The authenticated caller of a request. `caller` None: a request without a token or session."""

    caller: Caller | None
    # For the log and for limits, such as "worker gpus-3-7f2a9c". None: the address stands for it.
    name: str | None = None
    session: str | None = None
    token_hash: bytes | None = None


class IdentityCache:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Notifications arrive. Otherwise nothing is cached.
        self.is_listening = False
        self._entries: dict[bytes, tuple[CallerIdentity, float]] = {}
        self._had_tokens: bool | None = None
        # Changes with every revocation. A lookup that began before it may have read the old state.
        self.generation = 0

    def get(self, key: bytes) -> CallerIdentity | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if self._clock() >= entry[1]:
            del self._entries[key]
            return None
        return entry[0]

    def add(self, key: bytes, identity: CallerIdentity, generation: int) -> None:
        """`generation`: as it was before the lookup."""
        if self.is_listening and generation == self.generation:
            self._entries.pop(key, None)
            valid_for_s = getattr(identity.caller, "valid_for_s", None)
            ttl_s = IDENTITY_TTL_S if valid_for_s is None else min(IDENTITY_TTL_S, valid_for_s)
            self._entries[key] = identity, self._clock() + ttl_s
            while len(self._entries) > MAX_CACHED_IDENTITIES:
                del self._entries[next(iter(self._entries))]

    def remove(self, key: bytes) -> None:
        self.generation += 1
        self._entries.pop(key, None)

    @property
    def had_tokens(self) -> bool | None:
        """Whether an API token was ever created. None: not known."""
        return self._had_tokens

    def set_had_tokens(self, had_tokens: bool, generation: int) -> None:
        # Once true, it stays true.
        if had_tokens or (self.is_listening and generation == self.generation):
            self._had_tokens = had_tokens

    def set_listening(self, is_listening: bool) -> None:
        """Called when notifications start to arrive, and when they no longer do."""
        self.is_listening = is_listening
        self._clear()

    def revoke(self, token_hash: bytes | None) -> None:
        """Called for each notification. None: any identity may have changed."""
        self._forget_had_tokens()
        if token_hash is None:
            self._clear()
        else:
            self.remove(token_hash)

    def _clear(self) -> None:
        self.generation += 1
        self._entries.clear()
        self._forget_had_tokens()

    def _forget_had_tokens(self) -> None:
        if not self._had_tokens:
            self._had_tokens = None
