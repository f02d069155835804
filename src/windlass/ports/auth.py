"""Callers of the HTTP server: tokens and sessions.

The contract:
- Only hashes of tokens are stored. The raw token is known to its holder and, briefly, to the process that makes or
  checks it.
- A join token belongs to one worker, is exchanged once, and expires with the worker's time to start. Repeating the
  exchange with the same two tokens is accepted while the worker lives, so a machine that missed the answer can ask
  again. With another worker token it is refused.
- A self-registering worker uses an API token of role worker and a worker token of its own making. It ends when that API
  token is revoked or expires.
- A worker token is valid until the worker fails or is terminated. An API token is valid until it is revoked or expires.
- Creating and revoking a token, logging in, and ending a session of another person are events with their actor.
- A link opens one browser session, once, before it expires. The session has the link's role and lasts until it expires
  or is ended.
- A server is notified at once when a token is revoked, a worker terminates or a session ends.
- Every method raises DatabaseUnavailable when no answer came.
"""

from collections.abc import Callable, Mapping
from typing import Protocol
from uuid import UUID

from windlass.model.auth import (
    DEFAULT_TOKEN_TTL_S,
    EVERYTHING,
    Activation,
    ApiToken,
    Caller,
    Role,
    Session,
    TokenCaller,
    TokenScope,
)
from windlass.model.worker import Registration, WorkerStatus


class AuthStore(Protocol):
    async def authenticate(self, token_hash: bytes) -> Caller | None:
        """The holder of this token; None if it is unknown, revoked or expired. Records the last use of an API token."""

    async def watch_revocations(
        self, set_listening: Callable[[bool], None], revoke: Callable[[bytes | None], None]
    ) -> None:
        """Report tokens and sessions that are no longer valid, or whose holder has changed, until cancelled.

        `set_listening` is called with True when reports arrive from now on, and with False as soon as some may be lost.
        `revoke` gets the hash of the token or session; None stands for all of them.
        """

    async def share_rates(
        self, server_id: UUID, rates: Mapping[tuple[str, str], float]
    ) -> Mapping[tuple[str, str], float]:
        """Record the events per second of this server's heavy callers, by kind and caller.

        Returns the rates of the same callers over all servers that recorded them within RATE_TTL_S.
        """

    async def activate(self, worker_id: str, join_token_hash: bytes, token_hash: bytes) -> Activation:
        """Exchange a worker's join token for a worker token that its machine made."""

    async def report_boot_step(self, worker_id: str, step: str, output: str = "") -> None:
        """Record the step that a machine's boot has reached, and the last lines that it printed.

        Changes nothing once its worker sent a heartbeat. Empty output keeps the lines of the last report.
        """

    async def cannot_start(self, worker_id: str, code: str, reason: str) -> None:
        """Record why a spawned worker will never send a heartbeat; the control loop fails it with this code.

        Changes nothing for any other worker, or when repeated.
        """

    async def self_register(
        self, api_token_hash: bytes, token_hash: bytes, registration: Registration
    ) -> WorkerStatus | None:
        """Register a worker that no fleet spawned, under this worker token. Repeating it is accepted.

        None if the API token is not valid or has another role. BadInput if the worker id belongs to another worker.
        """

    async def create_token(
        self,
        name: str,
        role: Role,
        token_hash: bytes,
        *,
        scope: TokenScope = EVERYTHING,
        ttl_s: float | None = DEFAULT_TOKEN_TTL_S,
    ) -> ApiToken:
        """BadInput if a valid token has this name. `ttl_s` None: it never expires."""

    async def tokens(self) -> list[ApiToken]:
        """The newest MAX_TOKENS_LISTED, newest first, including revoked and expired ones."""

    async def revoke_token(self, name: str) -> bool:
        """False if no valid token has this name."""

    async def had_tokens(self) -> bool:
        """Whether an API token was ever created, also if it was revoked since."""

    async def create_link(self, link_hash: bytes, role: Role, ttl_s: float, name: str = "dashboard") -> None:
        """A link that can be exchanged for a session of this role, for `ttl_s`. `name`: the person it is for."""

    async def open_session(self, link_hash: bytes, session_hash: bytes, ttl_s: float) -> bool:
        """Exchange a link for a session. False if the link is unknown, used or expired."""

    async def create_session(self, session_hash: bytes, role: Role, ttl_s: float, name: str) -> None:
        """A session without a link, for a person that the identity provider authenticated."""

    async def session(self, session_hash: bytes) -> TokenCaller | None:
        """The holder of a session, of kind `session`; None if it is unknown or has ended."""

    async def sessions(self) -> list[Session]:
        """Newest first, including unused links."""

    async def end_session(self, session_hash: bytes) -> None: ...

    async def revoke_session(self, session_id: str) -> bool:
        """End a session or a link by its id. False if there is none."""
