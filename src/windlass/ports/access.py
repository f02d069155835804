"""Who may call the control plane over HTTP.

The contract:
- Only hashes of tokens come here. A raw token is known to its holder, and for a moment to whoever makes or checks it.
- A join token is bound to one worker, is exchanged once and expires with the time that worker has to start. Repeating
  the exchange with the same two tokens is accepted for as long as the worker lives, so a machine that did not get its
  answer may simply ask again; with another worker token it is refused.
- A worker's token is worth something until the worker is terminated, and nobody has to revoke it. An API token is worth
  something until it is revoked.
- Every method raises DatabaseUnavailable when the answer did not arrive.
"""

from typing import Protocol

from windlass.model.access import Activation, ApiToken, Caller, Role


class Access(Protocol):
    async def caller(self, token_hash: bytes) -> Caller | None:
        """Whose token this is; None if nobody's, or if it was revoked. Notes when an API token was used last."""

    async def activate(self, worker_id: str, join_token_hash: bytes, token_hash: bytes) -> Activation:
        """Exchange a worker's join token for a worker token that its machine made up."""

    async def create_token(self, name: str, role: Role, token_hash: bytes) -> ApiToken:
        """BadInput if another that is not revoked has this name."""

    async def tokens(self) -> list[ApiToken]:
        """Newest first; the revoked too."""

    async def revoke_token(self, name: str) -> bool:
        """False if no token of this name is in use."""
