"""Who may call the control plane over HTTP.

The contract:
- Only hashes of tokens come here. A raw token is known to its holder, and for a moment to whoever makes or checks it.
- A join token is bound to one worker, is exchanged once and expires with the time that worker has to start. Repeating
  the exchange with the same two tokens is accepted for as long as the worker lives, so a machine that did not get its
  answer may simply ask again; with another worker token it is refused.
- A worker that nobody hired enlists with an API token of role worker and a worker token that it made up. It is over
  when that API token is revoked.
- A worker's token is worth something until the worker is terminated, and nobody has to revoke it. An API token is worth
  something until it is revoked.
- A link lets one browser in, once, until it expires; the session it opened has the link's role and lasts until it
  expires or is ended.
- Every method raises DatabaseUnavailable when the answer did not arrive.
"""

from typing import Protocol

from windlass.model.auth import Activation, ApiToken, Caller, Role, ServerAddress, Session
from windlass.model.worker import Registration, WorkerStatus


class AuthStore(Protocol):
    async def authenticate(self, token_hash: bytes) -> Caller | None:
        """Whose token this is; None if nobody's, or if it was revoked. Notes when an API token was used last."""

    async def activate(self, worker_id: str, join_token_hash: bytes, token_hash: bytes) -> Activation:
        """Exchange a worker's join token for a worker token that its machine made up."""

    async def cannot_start(self, worker_id: str, code: str, reason: str) -> None:
        """A hired worker that was never heard of says why it never will be: the control loop fails it with this code.
        Of any other, and when it is said again, nothing changes."""

    async def self_register(
        self, api_token_hash: bytes, token_hash: bytes, registration: Registration
    ) -> WorkerStatus | None:
        """Register a worker that nobody hired, known by this token from now on; repeating that is accepted. None if the
        API token is not in use, or of another role. BadInput if the name is another's."""

    async def create_token(self, name: str, role: Role, token_hash: bytes) -> ApiToken:
        """BadInput if another that is not revoked has this name."""

    async def tokens(self) -> list[ApiToken]:
        """Newest first; the revoked too."""

    async def revoke_token(self, name: str) -> bool:
        """False if no token of this name is in use."""

    async def has_tokens(self) -> bool:
        """Whether any API token is in use."""

    async def create_link(self, link_hash: bytes, role: Role, ttl_s: float) -> None:
        """One that may be exchanged for a session of this role for as long."""

    async def open_session(self, link_hash: bytes, session_hash: bytes, ttl_s: float) -> bool:
        """Exchange a link for a session. False if the link is nobody's, was used, or has expired."""

    async def session_role(self, session_hash: bytes) -> Role | None:
        """What the browser may do that has this session; None if it is nobody's, or over."""

    async def sessions(self) -> list[Session]:
        """Newest first; links that were not used yet too."""

    async def end_session(self, session_hash: bytes) -> None: ...

    async def revoke_session(self, session_id: str) -> bool:
        """End a session, or a link, by its id. False if there is none."""

    async def record_server(self, face: ServerAddress) -> None:
        """People are served there, now."""

    async def servers(self) -> list[ServerAddress]:
        """Those that were noted within SERVER_TTL_S, newest first."""

    async def remove_server(self, face: ServerAddress) -> None: ...
