"""Authenticates each request, before its body is read, and checks what its caller may do.

Paths under `/internal/` need a token. Other paths also accept a dashboard session, and requests from this host may read
as long as no token exists (`is_open_to_localhost`). Each route names the role it needs by one of the dependencies
below. Browsers send the session cookie with every request, also with requests that other sites caused, so a session
that changes something must also send its CSRF token.

Identities are cached for a few seconds, because workers call many times a second. The store still checks every call of
a worker, so a terminated worker gains nothing. People are cached for reads only: every write is looked up. Strings that
do not look like our tokens are not looked up. Addresses that keep sending wrong tokens get 429; a valid token is never
refused because of others at the same address (a proxy, a network).
"""

import asyncio
import functools
import hmac
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any, TypeVar

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from windlass.model.auth import (
    API_PREFIX,
    JOIN_PREFIX,
    SESSION_PREFIX,
    WORKER_PREFIX,
    Caller,
    JoinCaller,
    Role,
    TokenCaller,
    WorkerCaller,
    csrf_token,
    hash_of,
    is_token,
    session_id,
)
from windlass.model.errors import DatabaseUnavailable
from windlass.ports import http
from windlass.ports.auth import AuthStore
from windlass.server.errors import ApiError, forbidden, gone, unauthorized
from windlass.server.rate_limit import FailedLoginLimiter, RequestRateLimiter

TOKEN_PATHS = "/internal/"  # noqa: S105
# Health probes and static files need no authentication.
OPEN_PATHS = ("/healthz", "/readyz", "/static/")
CSRF_HEADER = "X-CSRF-Token"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
# Headers that proxies add. A request that came through a proxy on this host is not from this host.
FORWARDING_HEADERS = (b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip")
IDENTITY_TTL_S = 5.0
# How long the answer to "does any token exist?" is cached.
HAS_TOKENS_TTL_S = 5.0
MAX_CACHED_IDENTITIES = 10_000
# Sessions of one address that are looked up per second. A browser's session is looked up once per IDENTITY_TTL_S.
MAX_SESSION_LOOKUPS_PER_S = 50.0
# Concurrent lookups of unknown tokens. A flood of them leaves most database connections to workers.
MAX_LOOKUPS = 2

LOCALHOST_CALLER = TokenCaller("localhost", Role.VIEWER)

_RANKS = {Role.VIEWER: 0, Role.PRODUCER: 1, Role.OPERATOR: 2}
_Machine = TypeVar("_Machine", WorkerCaller, JoinCaller)


class AuthMiddleware:
    """Puts the caller of each request into `request.state` (None: unknown), or answers 400, 401 or 429.

    `user_store` looks up API tokens and sessions. It has connections of its own, so that a crowd of users never delays
    a worker. Without it `worker_store` is used for everything.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        worker_store: AuthStore,
        user_store: AuthStore | None = None,
        is_open_to_localhost: bool = False,
        rate_limit: float = 500.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._worker_store = worker_store
        self._user_store = user_store or worker_store
        self._is_open_to_localhost = is_open_to_localhost
        self._clock = clock
        self._machines = _IdentityCache(clock)
        # A cache of its own: a flood of made-up sessions must not evict workers.
        self._users = _IdentityCache(clock)
        self._failures = FailedLoginLimiter(clock)
        self._machine_lookups = asyncio.Semaphore(MAX_LOOKUPS)
        self._user_lookups = asyncio.Semaphore(MAX_LOOKUPS)
        self._requests = RequestRateLimiter(rate_limit, clock)
        self._session_lookups = RequestRateLimiter(MAX_SESSION_LOOKUPS_PER_S, clock)
        # Whether tokens exist, and until when that is cached.
        self._has_tokens = (True, float("-inf"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and ("\0" in scope["path"] or b"%00" in scope["query_string"]):
            # PostgreSQL accepts no NUL in text. Without this check every route would fail in its own way.
            raise ApiError(400, http.BAD_INPUT, "the address contains a NUL character (%00)")
        if scope["type"] == "http" and not scope["path"].startswith(OPEN_PATHS):
            needs_token = scope["path"].startswith(TOKEN_PATHS)
            state = await (self._authenticate_token(scope) if needs_token else self._authenticate(scope))
            state["is_still_allowed"] = functools.partial(self._is_still_allowed, state["caller"], scope)
            state["count_failure"] = functools.partial(self._failures.add, _address(scope))
            scope.setdefault("state", {}).update(state)
            if not isinstance(state["caller"], WorkerCaller | JoinCaller):
                self._requests.check(state["caller_name"] or _address(scope))
        await self._app(scope, receive, send)

    async def _authenticate(self, scope: Scope) -> dict[str, Any]:
        """By token, by session, or as a request from this host."""
        if _bearer_token(scope) is not None:
            return await self._authenticate_token(scope)
        session = _session(scope)
        caller = await self._session_caller(hash_of(session), scope) if session is not None else None
        if session is not None and caller is not None:
            return {"caller": caller, "caller_name": f"session {session_id(hash_of(session))}", "session": session}
        is_local = await self._is_open_to(scope)
        return {"caller": LOCALHOST_CALLER if is_local else None, "caller_name": None, "session": None}

    async def _session_caller(self, session_hash: bytes, scope: Scope) -> Caller | None:
        cached = self._users.get(session_hash) if _is_read(scope) else None
        if cached is not None:
            return cached.caller
        self._session_lookups.check(_address(scope))
        async with self._user_lookups:
            role = await self._user_store.session_role(session_hash)
        caller = TokenCaller("dashboard", role) if role is not None else None
        self._cache_user(session_hash, caller, scope)
        return caller

    async def _is_still_allowed(self, caller: Caller | None, scope: Scope) -> bool:
        """Whether a long-lived request would be authenticated again as the same caller."""
        try:
            return bool((await self._authenticate(scope))["caller"] == caller)
        except ApiError:
            return False
        except DatabaseUnavailable:
            return True  # cannot be checked now; the next check decides

    async def _is_open_to(self, scope: Scope) -> bool:
        if not self._is_open_to_localhost or not _is_from_localhost(scope):
            return False
        has_tokens, cached_until = self._has_tokens
        if self._clock() >= cached_until:
            has_tokens = await self._user_store.has_tokens()
            self._has_tokens = (has_tokens, self._clock() + HAS_TOKENS_TTL_S)
        return not has_tokens

    async def _authenticate_token(self, scope: Scope) -> dict[str, Any]:
        token = _bearer_token(scope)
        if token is None:
            raise unauthorized("this path needs a token: send `Authorization: Bearer <token>`")
        token_hash = hash_of(token)
        caller = await self._token_caller(token, token_hash, scope)
        kind = "token" if isinstance(caller, TokenCaller) else "worker"
        name = caller.name if isinstance(caller, TokenCaller) else caller.worker_id
        return {"token_hash": token_hash, "caller": caller, "caller_name": f"{kind} {name}", "session": None}

    async def _token_caller(self, token: str, token_hash: bytes, scope: Scope) -> Caller:
        cached = self._machines.get(token_hash)
        if cached is None and _is_read(scope):
            cached = self._users.get(token_hash)
        if cached is not None and cached.caller is not None:
            return cached.caller
        caller = None
        if is_token(token, API_PREFIX):
            async with self._user_lookups:
                caller = await self._user_store.authenticate(token_hash)
        elif is_token(token, WORKER_PREFIX) or is_token(token, JOIN_PREFIX):
            async with self._machine_lookups:
                caller = await self._worker_store.authenticate(token_hash)
        match caller:
            case None:
                self._users.remove(token_hash)
                self._failures.add(_address(scope))
                raise unauthorized("unknown or revoked token")
            case WorkerCaller(has_ended=False):
                self._machines.add(token_hash, caller)
            case TokenCaller():
                self._cache_user(token_hash, caller, scope)
        return caller

    def _cache_user(self, key: bytes, caller: Caller | None, scope: Scope) -> None:
        if _is_read(scope):
            self._users.add(key, caller)
        else:
            # The request may revoke this very identity, for example by logging out.
            self._users.remove(key)


@dataclass(frozen=True, slots=True)
class _CachedIdentity:
    # None: looked up, and unknown.
    caller: Caller | None
    expires_at: float


class _IdentityCache:
    """Callers by the hash of their token or session. The oldest entries are evicted above MAX_CACHED_IDENTITIES."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: OrderedDict[bytes, _CachedIdentity] = OrderedDict()

    def get(self, key: bytes) -> _CachedIdentity | None:
        entry = self._entries.get(key)
        return entry if entry is not None and self._clock() < entry.expires_at else None

    def remove(self, key: bytes) -> None:
        self._entries.pop(key, None)

    def add(self, key: bytes, caller: Caller | None) -> None:
        self._entries[key] = _CachedIdentity(caller, self._clock() + IDENTITY_TTL_S)
        self._entries.move_to_end(key)
        while len(self._entries) > MAX_CACHED_IDENTITIES:
            self._entries.popitem(last=False)


def _is_read(scope: Scope) -> bool:
    return scope["method"] in SAFE_METHODS


def _address(scope: Scope) -> str:
    return scope["client"][0] if scope.get("client") else ""


def _header(scope: Scope, name: bytes) -> str:
    value: bytes = dict(scope["headers"]).get(name, b"")
    return value.decode("latin-1")


def _is_from_localhost(scope: Scope) -> bool:
    """Both ends are this host, and no other site or proxy is behind the request.

    The Host header must name this host too: with DNS rebinding, a page of another site reaches us under its own name.
    """
    host = _header(scope, b"host")
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    if not _is_loopback(_address(scope)) or not (name == "localhost" or _is_loopback(name)):
        return False
    headers = dict(scope["headers"])
    return headers.get(b"sec-fetch-site") != b"cross-site" and not any(name in headers for name in FORWARDING_HEADERS)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def session_cookie(host: str) -> str:
    """Name of the session cookie for this Host header.

    Cookies ignore ports. Without the port in the name, two dashboards on one host would log each other's users out.
    """
    port = host.rpartition("]")[2].rpartition(":")[2]
    return f"windlass_session_{port}" if port.isascii() and port.isdigit() and ":" in host else "windlass_session"


def _session(scope: Scope) -> str | None:
    try:
        cookies = SimpleCookie(_header(scope, b"cookie"))
    except CookieError:
        return None
    found = cookies.get(session_cookie(_header(scope, b"host")))
    return found.value if found is not None and is_token(found.value, SESSION_PREFIX) else None


def _bearer_token(scope: Scope) -> str | None:
    scheme, _, token = _header(scope, b"authorization").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


# ------------------------------------------------------------------------------------------ dependencies of the routes
# Async although they never wait: FastAPI runs synchronous dependencies in a thread, for every request.


async def worker_caller(request: Request) -> WorkerCaller:
    return check_worker(request.state.caller)


def check_worker(caller: Caller | None) -> WorkerCaller:
    """Raise ApiError unless the caller is a worker that has not terminated."""
    if not isinstance(caller, WorkerCaller):
        raise forbidden("this path needs a worker token: join first")
    return _check_not_terminated(caller)


async def joining_caller(request: Request) -> JoinCaller:
    caller = request.state.caller
    if not isinstance(caller, JoinCaller):
        raise forbidden("this path needs a join token")
    return _check_not_terminated(caller)


async def machine_caller(request: Request) -> WorkerCaller | JoinCaller:
    """A machine of a fleet, before or after it joined."""
    caller = request.state.caller
    if isinstance(caller, WorkerCaller):
        return _check_not_terminated(caller)
    if isinstance(caller, JoinCaller):
        if caller.is_expired:
            raise gone(f"the join token of worker {caller.worker_id} has expired")
        return _check_not_terminated(caller)
    raise forbidden("this path needs a join token or a worker token")


async def self_registering_caller(request: Request) -> TokenCaller:
    caller = request.state.caller
    if not isinstance(caller, TokenCaller) or caller.role is not Role.WORKER:
        raise forbidden("this path needs a token of role worker: `windlass tokens create NAME --role worker`")
    return caller


async def viewer(request: Request) -> TokenCaller:
    return _check_role_and_csrf(request, Role.VIEWER)


async def producer(request: Request) -> TokenCaller:
    return _check_role_and_csrf(request, Role.PRODUCER)


async def operator(request: Request) -> TokenCaller:
    return _check_role_and_csrf(request, Role.OPERATOR)


def _check_role_and_csrf(request: Request, needed: Role) -> TokenCaller:
    caller = check_role(request, needed)
    if request.method not in SAFE_METHODS:
        check_csrf(request, request.headers.get(CSRF_HEADER))
    return caller


def check_role(request: Request, needed: Role) -> TokenCaller:
    """Raise ApiError unless the caller has this role or a higher one."""
    caller = request.state.caller
    if caller is None:
        raise unauthorized(
            "this path needs a token (`Authorization: Bearer <token>`) or a dashboard session: "
            "`windlass tokens link` prints a login link, and so does `windlass up` when it starts"
        )
    if caller is LOCALHOST_CALLER and needed is not Role.VIEWER:
        raise unauthorized(f"without a token only reading is allowed: `windlass tokens create NAME --role {needed}`")
    if not isinstance(caller, TokenCaller) or _RANKS.get(caller.role, -1) < _RANKS[needed]:
        raise forbidden(f"this path needs a token of role {needed}: `windlass tokens create NAME --role {needed}`")
    return caller


def expected_csrf_token(request: Request) -> str | None:
    """The CSRF token that a write of this session must send. None without a session."""
    return csrf_token(request.state.session) if request.state.session is not None else None


def check_csrf(request: Request, given: str | None) -> None:
    """Raise ApiError if a request of a session does not bring the session's CSRF token. Bearer tokens need none."""
    expected = expected_csrf_token(request)
    if expected is not None and not hmac.compare_digest(expected.encode(), (given or "").encode()):
        raise forbidden(f"{CSRF_HEADER} is missing or wrong: reload the page")


def _check_not_terminated(caller: _Machine) -> _Machine:
    if caller.has_ended:
        raise gone(f"worker {caller.worker_id} has terminated: its token is no longer valid")
    return caller
