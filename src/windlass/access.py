"""Operations on API tokens and browser sessions.

Like in operations.py, each operation is one function over the store's ports, and the API, the dashboard and the command
line format its result. A new token is in the result of `create_token` and nowhere else: the database has its hash.
"""

import secrets
from dataclasses import dataclass

from windlass.model.auth import API_PREFIX, ApiToken, NewToken, hash_of, new_token
from windlass.operations import OperationOutcome, OperationResult
from windlass.ports.auth import AuthStore


@dataclass(frozen=True, slots=True)
class NewTokenResponse:
    # Shown only here.
    token: str
    details: ApiToken


async def create_token(store: AuthStore, wanted: NewToken) -> NewTokenResponse:
    """Raises BadInput if a valid token has this name."""
    token = new_token(API_PREFIX, secrets.SystemRandom())
    details = await store.create_token(wanted.name, wanted.role, hash_of(token), scope=wanted.scope, ttl_s=wanted.ttl_s)
    return NewTokenResponse(token, details)


async def revoke_token(store: AuthStore, name: str) -> OperationResult:
    """The token stops working at once, on every server."""
    if await store.revoke_token(name):
        return OperationResult(outcome=OperationOutcome.DONE, message=f"token {name} revoked", changed=1)
    return OperationResult(outcome=OperationOutcome.NOT_FOUND, message=f"active token {name} not found")


async def revoke_session(store: AuthStore, session_id: str) -> OperationResult:
    """End a browser session, or make an unused link invalid, at once."""
    if await store.revoke_session(session_id):
        return OperationResult(outcome=OperationOutcome.DONE, message=f"session {session_id} revoked", changed=1)
    return OperationResult(outcome=OperationOutcome.NOT_FOUND, message=f"session {session_id} not found")
