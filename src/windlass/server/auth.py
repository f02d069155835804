"""Who is calling. It is found out before the request's body is read.

Nobody gets to `/internal/` without a token. Elsewhere a browser's session does as well, and on a host of which no token
was ever made, whoever is on it may look. What a caller may do is said at each route, by one of the functions below.
A session is a cookie, which browsers send along whoever asks them to: so whatever changes something must bring the
session's CSRF token too.

Who was checked is believed for a few seconds. Workers call many times a second, and it takes nothing from revocation:
what an ended worker may still do is for the store to say, call by call. People are believed as long for looking;
whatever changes something is checked each time. What is no token of ours by its looks is not looked up. Whoever keeps
coming with wrong ones is told to wait; a good one is never refused for what others at the same address (a proxy's, a
network's) do.
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

GUARDED = "/internal/"
# Asked for by whoever watches, at any time: nobody asks who they are.
OPEN = ("/healthz", "/readyz", "/static/")
CSRF_HEADER = "X-CSRF-Token"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
# What proxies add. Behind one on this host everybody comes from this host.
FORWARDING_HEADERS = (b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip")
# For this long it is believed that there is no token, or that there is one.
TOKENS_BELIEVED_S = 5.0
# Who was checked is believed for this long.
BELIEVED_S = 5.0
MAX_BELIEVED = 10_000
# Sessions of one address that are looked up in a second. A browser's is, once in the time for which it is believed.
MAX_SESSION_LOOKUPS_PER_S = 50.0
# Unknown tokens looked up at the same time: a flood of them leaves most of the database's connections to workers.
MAX_LOOKUPS = 2
# Wrong tokens and links from one address: this many at once, and one more in each such time.
MAX_FAILURES = 20
FAILURE_FORGOTTEN_S = 3.0
MAX_ADDRESSES = 10_000

ON_THIS_HOST = TokenCaller("somebody on this host", Role.VIEWER)

_RANKS = {Role.VIEWER: 0, Role.PRODUCER: 1, Role.OPERATOR: 2}
_Kind = TypeVar("_Kind", WorkerCaller, JoinCaller)


class AuthMiddleware:
    """Puts the caller of each request into its scope (None: nobody we know), or answers 400, 401 or 429.

    `is_open_here`: whoever is on this host may look for as long as no token was made. `people`: where their tokens and
    sessions are looked up, so that no crowd of them keeps a worker waiting; without it, where machines' are.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        access: AuthStore,
        people: AuthStore | None = None,
        is_open_here: bool = False,
        rate_limit: float = 500.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._access = access
        self._people = people or access
        self._is_open_here = is_open_here
        self._clock = clock
        self._believed = _IdentityCache(clock)
        # Apart: no flood of made-up sessions makes us forget workers.
        self._believed_people = _IdentityCache(clock)
        self._failures = FailedLoginLimiter(clock)
        self._lookups = asyncio.Semaphore(MAX_LOOKUPS)
        self._lookups_of_people = asyncio.Semaphore(MAX_LOOKUPS)
        self._rates = RequestRateLimiter(rate_limit, clock)
        self._session_lookups = RequestRateLimiter(MAX_SESSION_LOOKUPS_PER_S, clock)
        # Whether there are tokens, and until when we believe it.
        self._has_tokens = (True, float("-inf"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            _check_address(scope)
        if scope["type"] == "http" and not scope["path"].startswith(OPEN):
            is_guarded = scope["path"].startswith(GUARDED)
            state = await (self._admit(scope) if is_guarded else self._recognise(scope))
            state["may_look"] = functools.partial(self._is_still, state["caller"], scope)
            state["note_failure"] = functools.partial(self._failures.add, _address(scope))
            scope.setdefault("state", {}).update(state)
            if not isinstance(state["caller"], WorkerCaller | JoinCaller):
                self._rates.check(state["caller_name"] or _address(scope))
        await self._app(scope, receive, send)

    async def _recognise(self, scope: Scope) -> dict[str, Any]:
        """By token, by session, or as somebody on this host."""
        session = _session_of(scope)
        if _bearer(scope) is not None:
            return await self._admit(scope)
        caller = await self._session_caller(hash_of(session), scope) if session is not None else None
        if session is not None and caller is not None:
            return {"caller": caller, "caller_name": f"session {session_id(hash_of(session))}", "session": session}
        if await self._is_open_to(scope):
            return {"caller": ON_THIS_HOST, "caller_name": None, "session": None}
        return {"caller": None, "caller_name": None, "session": None}

    async def _session_caller(self, session_hash: bytes, scope: Scope) -> Caller | None:
        known = self._believed_people.about(session_hash) if _is_looking(scope) else None
        if known is not None:
            return known.caller
        self._session_lookups.check(_address(scope))
        async with self._lookups_of_people:
            role = await self._people.session_role(session_hash)
        caller = TokenCaller("the dashboard", role) if role is not None else None
        self._believe_person(session_hash, caller, scope)
        return caller

    async def _is_still(self, caller: Caller | None, scope: Scope) -> bool:
        """Whether a request that lasts would be let in again as whom it was: tokens are revoked, sessions end."""
        try:
            return bool((await self._recognise(scope))["caller"] == caller)
        except ApiError:
            return False
        except DatabaseUnavailable:
            return True  # nobody knows; whoever was let in may wait until somebody does

    async def _is_open_to(self, scope: Scope) -> bool:
        if not self._is_open_here or not _is_on_this_host(scope) or _is_passed_on(scope):
            return False
        has_tokens, believed_until = self._has_tokens
        if self._clock() >= believed_until:
            has_tokens = await self._people.has_tokens()
            self._has_tokens = (has_tokens, self._clock() + TOKENS_BELIEVED_S)
        return not has_tokens

    async def _admit(self, scope: Scope) -> dict[str, Any]:
        token = _bearer(scope)
        if token is None:
            raise unauthorized("this address needs a token: send it as `Authorization: Bearer <token>`.")
        token_hash = hash_of(token)
        caller = await self._caller(token, token_hash, scope)
        return {"token_hash": token_hash, "caller": caller, "caller_name": _name(caller), "session": None}

    async def _caller(self, token: str, token_hash: bytes, scope: Scope) -> Caller:
        known = self._believed.about(token_hash)
        if known is None and _is_looking(scope):
            known = self._believed_people.about(token_hash)
        if known is not None and known.caller is not None:
            return known.caller
        caller = await self._look_up(token, token_hash)
        match caller:
            case None:
                self._believed_people.forget(token_hash)
                self._failures.add(_address(scope))
                raise unauthorized("this token is not known, or was revoked.")
            case WorkerCaller(has_ended=False):
                self._believed.add(token_hash, caller)
            case TokenCaller():
                self._believe_person(token_hash, caller, scope)
        return caller

    def _believe_person(self, key: bytes, caller: Caller | None, scope: Scope) -> None:
        if _is_looking(scope):
            self._believed_people.add(key, caller)
        else:
            # What it changes may be this: who logs out is gone at once.
            self._believed_people.forget(key)

    async def _look_up(self, token: str, token_hash: bytes) -> Caller | None:
        if not any(is_token(token, prefix) for prefix in (WORKER_PREFIX, JOIN_PREFIX, API_PREFIX)):
            return None
        is_persons = is_token(token, API_PREFIX)
        async with self._lookups_of_people if is_persons else self._lookups:
            return await (self._people if is_persons else self._access).authenticate(token_hash)


@dataclass(frozen=True, slots=True)
class _CachedIdentity:
    # None: nobody's, as was found.
    caller: Caller | None
    until: float


class _IdentityCache:
    """By the hash of what they brought: who was there a moment ago. Of too many the first are forgotten."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: OrderedDict[bytes, _CachedIdentity] = OrderedDict()

    def about(self, key: bytes) -> _CachedIdentity | None:
        held = self._held.get(key)
        return held if held is not None and self._clock() < held.until else None

    def forget(self, key: bytes) -> None:
        self._held.pop(key, None)

    def add(self, key: bytes, caller: Caller | None) -> None:
        self._held[key] = _CachedIdentity(caller, self._clock() + BELIEVED_S)
        self._held.move_to_end(key)
        while len(self._held) > MAX_BELIEVED:
            self._held.popitem(last=False)


class FailedLoginLimiter:
    """Wrong tokens and links by address, each forgotten after its time."""

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
                "too many wrong tokens or links came from this address: wait before the next.",
                retry_after_s=int(FAILURE_FORGOTTEN_S),
            )


class RequestRateLimiter:
    """How often each caller calls: a bucket of one second's worth, filled at the limit."""

    def __init__(self, limit: float, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        # When each one's bucket will be full again; how much is in it follows from that.
        self._full_at: OrderedDict[str, float] = OrderedDict()

    def check(self, name: str) -> None:
        now = self._clock()
        full_at = max(self._full_at.get(name, now), now) + 1.0 / self._limit
        if full_at > now + max(1.0, 1.0 / self._limit):
            raise ApiError(
                429, http.TOO_MANY, f"more than {self._limit:g} requests a second: slow down.", retry_after_s=1
            )
        self._full_at[name] = full_at
        self._full_at.move_to_end(name)
        while len(self._full_at) > MAX_ADDRESSES:
            self._full_at.popitem(last=False)


def _check_address(scope: Scope) -> None:
    """Nothing is named so, PostgreSQL takes it for no text, and each route would find its own words for that."""
    if "\0" in scope["path"] or b"%00" in scope["query_string"]:
        raise ApiError(
            400, http.BAD_INPUT, "the address has a NUL (%00) in it, which no name here can have: leave it out."
        )


def _is_looking(scope: Scope) -> bool:
    return scope["method"] in SAFE_METHODS


def _address(scope: Scope) -> str:
    return scope["client"][0] if scope.get("client") else ""


def _is_on_this_host(scope: Scope) -> bool:
    """It, and the name it calls us by: a page from elsewhere may have got its own name to mean this host."""
    host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    return _is_loopback(_address(scope)) and (name == "localhost" or _is_loopback(name))


def _is_passed_on(scope: Scope) -> bool:
    """Whether somebody else had it sent: a page of elsewhere in a browser here, or whoever is behind a proxy here."""
    headers = dict(scope["headers"])
    return headers.get(b"sec-fetch-site") == b"cross-site" or any(name in headers for name in FORWARDING_HEADERS)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def session_cookie(host: str) -> str:
    """What the cookie of a session is called where we are called by this name.

    Cookies know no ports: without it, two of us on one host would log each other's people out.
    """
    port = host.rpartition("]")[2].rpartition(":")[2]
    return f"windlass_session_{port}" if port.isascii() and port.isdigit() and ":" in host else "windlass_session"


def _session_of(scope: Scope) -> str | None:
    try:
        cookies = SimpleCookie(dict(scope["headers"]).get(b"cookie", b"").decode("latin-1"))
    except CookieError:
        return None
    found = cookies.get(session_cookie(dict(scope["headers"]).get(b"host", b"").decode("latin-1")))
    return found.value if found is not None and is_token(found.value, SESSION_PREFIX) else None


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


async def enlisting_caller(request: Request) -> TokenCaller:
    caller = request.state.caller
    if not isinstance(caller, TokenCaller) or caller.role is not Role.WORKER:
        raise forbidden("this needs a token of role worker: `windlass tokens create NAME --role worker` makes one.")
    return caller


async def viewer(request: Request) -> TokenCaller:
    return _with_rank(request, Role.VIEWER)


async def producer(request: Request) -> TokenCaller:
    return _with_rank(request, Role.PRODUCER)


async def operator(request: Request) -> TokenCaller:
    return _with_rank(request, Role.OPERATOR)


def _with_rank(request: Request, needed: Role) -> TokenCaller:
    caller = check_role(request, needed)
    if request.method not in SAFE_METHODS:
        check_csrf(request, request.headers.get(CSRF_HEADER))
    return caller


def check_role(request: Request, needed: Role) -> TokenCaller:
    """Raise an error unless the caller has this role, or a higher one. Forms bring their CSRF token elsewhere."""
    caller = request.state.caller
    if caller is None:
        raise unauthorized(
            "this address needs a token (`Authorization: Bearer <token>`) or a session of the dashboard: "
            "`windlass tokens link` prints a link to one, and so does `windlass up` when it starts."
        )
    if caller is ON_THIS_HOST and needed is not Role.VIEWER:
        raise unauthorized(f"only looking is open here; for more, `windlass tokens create NAME --role {needed}`.")
    if not isinstance(caller, TokenCaller) or _RANKS.get(caller.role, -1) < _RANKS[needed]:
        raise forbidden(
            f"this needs a token of role {needed}: `windlass tokens create NAME --role {needed}` makes one."
        )
    return caller


def csrf_of(request: Request) -> str | None:
    """What a page of this session must send along with whatever changes something; None without a session."""
    return csrf_token(request.state.session) if request.state.session is not None else None


def check_csrf(request: Request, given: str | None) -> None:
    """Raise an error for a request of a session that no page of it made. Tokens prove themselves."""
    expected = csrf_of(request)
    if expected is not None and not hmac.compare_digest(expected.encode(), (given or "").encode()):
        raise forbidden(
            f"the page that sent this is not of your session: reload it ({CSRF_HEADER} is missing or wrong)."
        )


def _living(caller: _Kind) -> _Kind:
    if caller.has_ended:
        raise gone(f"worker {caller.worker_id} has ended: its token is worth nothing any more.")
    return caller
