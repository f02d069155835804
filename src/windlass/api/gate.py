"""Nobody gets to `/internal/` without a token: it is checked before the request's body is read.

Workers call many times a second, so their tokens are believed for a few seconds after a check. That takes nothing from
revocation: what an ended worker may still do is for the store to say, call by call. What is no token of ours by its
looks is not looked up. Whoever keeps coming with wrong ones is told to wait; a good one is never refused for what
others at the same address (a proxy's, a network's) do.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from windlass.api.errors import ApiError, forbidden, gone, unauthorized
from windlass.model.access import (
    API_PREFIX,
    JOIN_PREFIX,
    WORKER_PREFIX,
    Caller,
    JoinCaller,
    Role,
    TokenCaller,
    WorkerCaller,
    hash_of,
    is_token,
)
from windlass.ports import http
from windlass.ports.access import Access

GUARDED = "/internal/"
# A worker's token is believed for this long after it was checked.
BELIEVED_S = 5.0
MAX_BELIEVED = 10_000
# Unknown tokens looked up at the same time: a flood of them leaves most of the database's connections to workers.
MAX_LOOKUPS = 2
# Wrong tokens from one address: this many at once, and one more in each such time.
MAX_FAILURES = 20
FAILURE_FORGOTTEN_S = 3.0
MAX_ADDRESSES = 10_000

_RANKS = {Role.VIEWER: 0, Role.PRODUCER: 1, Role.OPERATOR: 2}
_Kind = TypeVar("_Kind", WorkerCaller, JoinCaller)


class Gate:
    """Puts the caller of each guarded request into its scope, or answers 401 or 429."""

    def __init__(self, app: ASGIApp, *, access: Access, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._access = access
        self._clock = clock
        self._believed: OrderedDict[bytes, tuple[WorkerCaller, float]] = OrderedDict()
        self._failures = _Failures(clock)
        self._lookups = asyncio.Semaphore(MAX_LOOKUPS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(GUARDED):
            token_hash, caller = await self._admit(scope)
            scope.setdefault("state", {}).update(token_hash=token_hash, caller=caller, caller_name=_name(caller))
        await self._app(scope, receive, send)

    async def _admit(self, scope: Scope) -> tuple[bytes, Caller]:
        address = scope["client"][0] if scope.get("client") else ""
        token = _bearer(scope)
        if token is None:
            raise unauthorized("this address needs a token: send it as `Authorization: Bearer <token>`.")
        token_hash = hash_of(token)
        believed = self._believed.get(token_hash)
        if believed is not None and self._clock() < believed[1]:
            return token_hash, believed[0]
        caller = await self._look_up(token, token_hash)
        if caller is None:
            self._failures.add(address)
            raise unauthorized("this token is not known, or was revoked.")
        if isinstance(caller, WorkerCaller) and not caller.has_ended:
            self._believe(token_hash, caller)
        return token_hash, caller

    async def _look_up(self, token: str, token_hash: bytes) -> Caller | None:
        if not any(is_token(token, prefix) for prefix in (WORKER_PREFIX, JOIN_PREFIX, API_PREFIX)):
            return None
        async with self._lookups:
            return await self._access.caller(token_hash)

    def _believe(self, token_hash: bytes, caller: WorkerCaller) -> None:
        self._believed[token_hash] = (caller, self._clock() + BELIEVED_S)
        self._believed.move_to_end(token_hash)
        while len(self._believed) > MAX_BELIEVED:
            self._believed.popitem(last=False)


class _Failures:
    """Wrong tokens by address, each forgotten after its time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # When all of an address's failures will be forgotten; how many there are follows from it.
        self._until: OrderedDict[str, float] = OrderedDict()

    def add(self, address: str) -> None:
        now = self._clock()
        # Never further ahead than the limit: whoever stops is forgiven in that time.
        most = now + MAX_FAILURES * FAILURE_FORGOTTEN_S
        until = max(self._until.get(address, 0.0), now) + FAILURE_FORGOTTEN_S
        self._until[address] = min(until, most)
        self._until.move_to_end(address)
        while len(self._until) > MAX_ADDRESSES:
            self._until.popitem(last=False)
        if until > most:
            raise ApiError(
                429,
                http.TOO_MANY,
                "too many wrong tokens came from this address: wait before the next.",
                retry_after_s=int(FAILURE_FORGOTTEN_S),
            )


def _bearer(scope: Scope) -> str | None:
    header: bytes = dict(scope["headers"]).get(b"authorization", b"")
    scheme, _, token = header.decode("latin-1").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def _name(caller: Caller) -> str:
    match caller:
        case WorkerCaller(worker_id) | JoinCaller(worker_id):
            return f"worker {worker_id}"
        case TokenCaller(name):
            return f"token {name}"


# ------------------------------------------------------------------------------------------------- who may, in handlers
# Async, though none of them waits: others would be run in a thread, for every request.


async def worker_caller(request: Request) -> WorkerCaller:
    caller = request.state.caller
    if not isinstance(caller, WorkerCaller):
        raise forbidden("only a worker's own token opens this: join first.")
    return _living(caller)


async def joining_caller(request: Request) -> JoinCaller:
    caller = request.state.caller
    if not isinstance(caller, JoinCaller):
        raise forbidden("only a join token opens this.")
    return _living(caller)


async def machine_caller(request: Request) -> WorkerCaller | JoinCaller:
    """A machine of ours, before or after it joined."""
    caller = request.state.caller
    if isinstance(caller, WorkerCaller):
        return _living(caller)
    if isinstance(caller, JoinCaller):
        if caller.is_expired:
            raise gone(f"the join token of worker {caller.worker_id} has expired.")
        return _living(caller)
    raise forbidden("only a machine's join token or worker token opens this.")


async def operator(request: Request) -> TokenCaller:
    return _with_rank(request, Role.OPERATOR)


def _with_rank(request: Request, needed: Role) -> TokenCaller:
    caller = request.state.caller
    if not isinstance(caller, TokenCaller) or _RANKS.get(caller.role, -1) < _RANKS[needed]:
        raise forbidden(
            f"this needs a token of role {needed}: `windlass tokens create NAME --role {needed}` makes one."
        )
    return caller


def _living(caller: _Kind) -> _Kind:
    if caller.has_ended:
        raise gone(f"worker {caller.worker_id} has ended: its token is worth nothing any more.")
    return caller
