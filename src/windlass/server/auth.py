"""Authenticates requests by their headers, and decides whether the caller may use a route.

Paths under `/internal/` need a token. Other paths also accept a dashboard session. With `is_open_to_localhost`,
requests from this host may read until the first token is created. Each route declares its access by one of the
dependencies below; the decision is made before the body is read and before the route runs, and the dependencies only
return the caller.
Browsers send the session cookie with every request, also with requests that other sites caused, so a session that
changes something must also send its CSRF token.

Strings that do not look like our tokens are not looked up. Addresses that keep sending wrong tokens get 429; a valid
token never gets 401 or 429 because of others at the same address (a proxy, a network). A caller that cannot be looked
up soon gets 503.
"""

import functools
import hmac
import ipaddress
import re
import time
from collections.abc import Callable, Mapping
from http.cookies import CookieError, SimpleCookie
from typing import Any, cast

from fastapi import Request
from starlette.types import Scope

from windlass.model.auth import (
    API_PREFIX,
    EVERYTHING,
    JOIN_PREFIX,
    SESSION_PREFIX,
    WORKER_PREFIX,
    Caller,
    JoinCaller,
    Role,
    TokenCaller,
    TokenScope,
    WorkerCaller,
    csrf_token,
    hash_of,
    is_token,
    session_id,
)
from windlass.model.errors import DatabaseUnavailable
from windlass.ports import http
from windlass.ports.auth import AuthStore
from windlass.server.connections import has_left
from windlass.server.errors import ApiError, forbidden, gone, unauthorized
from windlass.server.identity_cache import CallerIdentity, IdentityCache
from windlass.server.identity_lookups import LookupQueue
from windlass.server.rate_limit import FailedLoginLimiter, RequestRateLimiter
from windlass.server.route_table import Access, RouteEntry

CSRF_HEADER = "X-CSRF-Token"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
# Headers that proxies, load balancers and tunnels add. A request that came through one of them on this host is not from
# this host.
FORWARDING_HEADERS = frozenset(
    {
        *(b"forwarded", b"via", b"cdn-loop", b"x-real-ip", b"x-client-ip", b"client-ip", b"x-cluster-client-ip"),
        *(b"cf-connecting-ip", b"cf-connecting-ipv6", b"cf-ray", b"cf-visitor", b"true-client-ip"),
        *(b"fly-client-ip", b"fastly-client-ip", b"x-azure-clientip", b"x-azure-socketip", b"x-appengine-user-ip"),
        *(b"x-envoy-external-address", b"x-envoy-original-path", b"x-amzn-trace-id", b"x-amz-cf-id", b"x-arr-log-id"),
        *(b"x-proxyuser-ip", b"wl-proxy-client-ip", b"proxy-client-ip", b"x-nginx-proxy", b"x-scheme", b"x-host"),
        *(b"x-rewrite-url", b"x-backend-server", b"tailscale-user-login", b"x-tailscale-client-ip"),
    }
)
FORWARDING_PREFIXES = (b"x-forwarded-", b"x-original-", b"x-remote-")
# RFC 3986, without user information: an IPv6 address in brackets, or a name or IPv4 address; then a port.
_HOST = re.compile(
    r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9_](?:[A-Za-z0-9._-]{0,252}[A-Za-z0-9_])?\.?))(?::([0-9]{1,5}))?"
)
# Sessions of one address that are looked up per second. A browser's session is looked up once per IDENTITY_TTL_S.
MAX_SESSION_LOOKUPS_PER_S = 50.0

LOCALHOST_CALLER = TokenCaller("localhost", Role.VIEWER)
ANONYMOUS = CallerIdentity(None)
_LOCALHOST = CallerIdentity(LOCALHOST_CALLER)
# Roles that may use the routes of each access, the least one first.
_ROLES = {
    Access.VIEWER: (Role.VIEWER, Role.OPERATOR, Role.ADMIN),
    Access.TASK_READER: (Role.VIEWER, Role.PRODUCER, Role.OPERATOR, Role.ADMIN),
    Access.PRODUCER: (Role.PRODUCER, Role.OPERATOR, Role.ADMIN),
    Access.OPERATOR: (Role.OPERATOR, Role.ADMIN),
    Access.OPERATOR_FORM: (Role.OPERATOR, Role.ADMIN),
    Access.ADMIN: (Role.ADMIN,),
    Access.ADMIN_FORM: (Role.ADMIN,),
}
Headers = Mapping[bytes, bytes]


class Authenticator:
    """Finds the caller of a request.

    `user_store` looks up API tokens and sessions. It has connections of its own, so that a crowd of users never delays
    a worker. Without it `worker_store` is used for everything.
    """

    def __init__(
        self,
        *,
        worker_store: AuthStore,
        user_store: AuthStore | None = None,
        is_open_to_localhost: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker_store = worker_store
        self._user_store = user_store or worker_store
        self._is_open_to_localhost = is_open_to_localhost
        self.cache = IdentityCache(clock)
        self.failures = FailedLoginLimiter(clock)
        self._machine_lookups = LookupQueue[CallerIdentity | None]()
        self._user_lookups = LookupQueue[CallerIdentity | None]()
        self._session_lookups = RequestRateLimiter("session", MAX_SESSION_LOOKUPS_PER_S, clock)

    async def authenticate(self, scope: Scope, headers: Headers, *, needs_token: bool = False) -> CallerIdentity:
        """By token, by session, or as a request from this host. Raises ApiError for a wrong token or Host header."""
        check_host(headers)
        token = _bearer_token(headers)
        if token is not None:
            token_hash = hash_of(token)
            return self.cache.get(token_hash) or await self._look_up_token(token, token_hash, scope)
        if needs_token:
            raise unauthorized("this path needs a token: send `Authorization: Bearer <token>`")
        session = _session(headers)
        if session is not None:
            session_hash = hash_of(session)
            identity = self.cache.get(session_hash) or await self._look_up_session(session, session_hash, scope)
            if identity is not None:
                return identity
        return _LOCALHOST if await self._allow_open_reading(scope, headers) else ANONYMOUS

    async def is_still_allowed(self, identity: CallerIdentity, scope: Scope, headers: Headers) -> bool:
        """Whether a long-lived request would be authenticated again as the same caller."""
        try:
            return (await self.authenticate(scope, headers)).caller == identity.caller
        except ApiError as error:
            return error.status_code == 503  # cannot be checked now; the next check decides
        except DatabaseUnavailable:
            return True

    async def _look_up_token(self, token: str, token_hash: bytes, scope: Scope) -> CallerIdentity:
        identity: CallerIdentity | None = None
        client = address_of(scope), functools.partial(has_left, scope)
        if is_token(token, API_PREFIX):
            look_up = functools.partial(self._identify_token, self._user_store, token_hash)
            identity = await self._user_lookups.get(token_hash, look_up, *client)
        elif is_token(token, WORKER_PREFIX) or is_token(token, JOIN_PREFIX):
            look_up = functools.partial(self._identify_token, self._worker_store, token_hash)
            identity = await self._machine_lookups.get(token_hash, look_up, *client)
        if identity is None:
            self.failures.count(address_of(scope))
            raise unauthorized("unknown or revoked token")
        return identity

    async def _look_up_session(self, session: str, session_hash: bytes, scope: Scope) -> CallerIdentity | None:
        self._session_lookups.check(address_of(scope))
        look_up = functools.partial(self._identify_session, session, session_hash)
        client = address_of(scope), functools.partial(has_left, scope)
        return await self._user_lookups.get(session_hash, look_up, *client)

    # The generation is read when a lookup begins: a revocation during the wait does not concern it. Another lookup of
    # the same caller may have ended during the wait.

    async def _identify_token(self, store: AuthStore, token_hash: bytes) -> CallerIdentity | None:
        generation, cached = self.cache.generation, self.cache.get(token_hash)
        caller = await store.authenticate(token_hash) if cached is None else None
        if caller is None:
            return cached
        name = f"token {caller.name}" if isinstance(caller, TokenCaller) else f"worker {caller.worker_id}"
        identity = CallerIdentity(caller, name, token_hash=token_hash)
        # A join token expires, so it is looked up every time. It is used once.
        if isinstance(caller, TokenCaller) or (isinstance(caller, WorkerCaller) and not caller.has_terminated):
            self.cache.add(token_hash, identity, generation)
        return identity

    async def _identify_session(self, session: str, session_hash: bytes) -> CallerIdentity | None:
        generation, cached = self.cache.generation, self.cache.get(session_hash)
        caller = await self._user_store.session(session_hash) if cached is None else None
        if caller is None:
            return cached
        name = f"session {session_id(session_hash)} of {caller.name}"
        identity = CallerIdentity(caller, name, session=session, token_hash=session_hash)
        self.cache.add(session_hash, identity, generation)
        return identity

    async def _allow_open_reading(self, scope: Scope, headers: Headers) -> bool:
        if not self._is_open_to_localhost or not _is_from_localhost(scope, headers):
            return False
        if self.cache.had_tokens is not None:
            return not self.cache.had_tokens
        generation = self.cache.generation
        had_tokens = await self._user_store.had_tokens()
        self.cache.set_had_tokens(had_tokens, generation)
        return not had_tokens


def address_of(scope: Scope) -> str:
    return scope["client"][0] if scope.get("client") else ""


def _is_from_localhost(scope: Scope, headers: Headers) -> bool:
    """Both ends are this host, and no other site or proxy is behind the request.

    The Host header must name this host too: with DNS rebinding, a page of another site reaches us under its own name.
    """
    host = _HOST.fullmatch(headers.get(b"host", b"").decode("latin-1"))
    name = (host[1] or host[2]) if host is not None else ""
    if not _is_loopback(address_of(scope)) or not (name.lower() == "localhost" or _is_loopback(name)):
        return False
    return headers.get(b"sec-fetch-site") != b"cross-site" and not any(map(is_forwarding_header, headers))


def is_forwarding_header(name: bytes) -> bool:
    return name in FORWARDING_HEADERS or name.startswith(FORWARDING_PREFIXES)


def check_host(headers: Headers) -> None:
    """Raise ApiError for a Host header that is not a name or address with an optional port."""
    host = headers.get(b"host", b"").decode("latin-1")
    if host and _HOST.fullmatch(host) is None:
        raise ApiError(400, http.BAD_INPUT, "the Host header must be a name or an address, with an optional port")


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def session_cookie(host: str) -> str:
    """Name of the session cookie for this Host header.

    Cookies ignore ports. Without the port in the name, two dashboards on one host would log each other's users out.
    """
    parsed = _HOST.fullmatch(host)
    return f"windlass_session_{parsed[3]}" if parsed is not None and parsed[3] else "windlass_session"


def _session(headers: Headers) -> str | None:
    if b"cookie" not in headers:
        return None
    try:
        cookies = SimpleCookie(headers[b"cookie"].decode("latin-1"))
    except CookieError:
        return None
    found = cookies.get(session_cookie(headers.get(b"host", b"").decode("latin-1")))
    return found.value if found is not None and is_token(found.value, SESSION_PREFIX) else None


def _bearer_token(headers: Headers) -> str | None:
    scheme, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


# ------------------------------------------------------------------------------------------------------ decisions


def check_access(access: Access, identity: CallerIdentity, method: str, headers: Headers) -> None:
    """Raise ApiError unless the caller may use a route with this access. Decided from the headers alone."""
    caller = identity.caller
    match access:
        case Access.OPEN | Access.ANYONE:
            pass
        case Access.WORKER:
            check_worker(caller)
        case Access.JOINING:
            if not isinstance(caller, JoinCaller):
                raise forbidden("this path needs a join token")
            _check_not_terminated(caller)
        case Access.MACHINE:
            _check_machine(caller)
        case Access.WORKER_ROLE:
            if not isinstance(caller, TokenCaller) or caller.role is not Role.WORKER:
                raise forbidden("this path needs a token of role worker: `windlass tokens create NAME --role worker`")
        case _:
            _check_role(identity, _ROLES[access])
    if identity.session is not None and method not in SAFE_METHODS:
        if access in (Access.OPERATOR_FORM, Access.ADMIN_FORM, Access.ANYONE):
            _check_origin(headers)  # the CSRF token is in the body
        else:
            check_csrf(identity.session, headers.get(CSRF_HEADER.lower().encode(), b"").decode("latin-1"))


def check_scope(route: RouteEntry, caller: Caller | None, path: str) -> None:
    """Raise ApiError unless a caller that is limited to some queues and fleets may use this route.

    Decided by the fleet or queue in the path. A route without them either checks the scope itself, or concerns the
    whole installation and is refused.
    """
    if not isinstance(caller, TokenCaller) or caller.scope.is_all or route.is_scoped:
        return
    parameters = route.parameters(path)
    fleet, queue = parameters.get("fleet"), parameters.get("queue")
    if fleet is not None and caller.scope.allows_fleet(fleet):
        return
    if queue is not None and caller.scope.allows_queue(queue):
        return
    if route.access not in (Access.OPEN, Access.ANYONE, Access.WORKER_ROLE):
        raise forbidden(f"this token is limited to {caller.scope}; this path is outside of that")


def check_worker(caller: Caller | None) -> WorkerCaller:
    """Raise ApiError unless the caller is a worker that has not terminated."""
    if not isinstance(caller, WorkerCaller):
        raise forbidden("this path needs a worker token: join first")
    _check_not_terminated(caller)
    return caller


def _check_machine(caller: Caller | None) -> None:
    if not isinstance(caller, WorkerCaller | JoinCaller):
        raise forbidden("this path needs a join token or a worker token")
    if isinstance(caller, JoinCaller) and caller.is_expired:
        raise gone(f"the join token of worker {caller.worker_id} has expired")
    _check_not_terminated(caller)


def _check_role(identity: CallerIdentity, allowed: tuple[Role, ...]) -> None:
    caller, needed = identity.caller, allowed[0]
    if caller is None:
        raise unauthorized(
            "this path needs a token (`Authorization: Bearer <token>`) or a dashboard session: "
            "`windlass tokens link` prints a login link, and so does `windlass up` in a terminal"
        )
    if caller is LOCALHOST_CALLER and needed is not Role.VIEWER:
        raise unauthorized(f"without a token only reading is allowed: `windlass tokens create NAME --role {needed}`")
    if not isinstance(caller, TokenCaller) or caller.role not in allowed:
        raise forbidden(f"this path needs a token of role {needed}: `windlass tokens create NAME --role {needed}`")


def _check_origin(headers: Headers) -> None:
    """Refuse a form that the browser reports to come from another site."""
    site, origin = headers.get(b"sec-fetch-site", b"none"), headers.get(b"origin")
    is_other = origin is not None and origin != b"null" and origin.partition(b"://")[2] != headers.get(b"host")
    if site not in (b"none", b"same-origin") or is_other:
        raise forbidden("this form was sent by another site: open the dashboard and try again")


def check_csrf(session: str | None, given: str | None) -> None:
    """Raise ApiError if a request of a session does not bring the session's CSRF token. Bearer tokens need none."""
    if session is not None and not hmac.compare_digest(csrf_token(session).encode(), (given or "").encode()):
        raise forbidden(f"{CSRF_HEADER} is missing or wrong: reload the page")


def expected_csrf_token(request: Request) -> str | None:
    """The CSRF token that a write of this session must send. None without a session."""
    return csrf_token(request.state.session) if request.state.session is not None else None


def _check_not_terminated(caller: WorkerCaller | JoinCaller) -> None:
    if caller.has_terminated:
        raise gone(f"worker {caller.worker_id} has terminated: its token is no longer valid")


# ------------------------------------------------------------------------------------------ dependencies of the routes
# Each declares the access of its route and returns the caller, who was checked before the route was reached.
# Async although they never wait: FastAPI runs synchronous dependencies in a thread, for every request.


async def open_to_all(request: Request) -> None:
    _caller(request, Access.OPEN)


async def anyone(request: Request) -> None:
    _caller(request, Access.ANYONE)


async def worker_caller(request: Request) -> WorkerCaller:
    return cast(WorkerCaller, _caller(request, Access.WORKER))


async def joining_caller(request: Request) -> JoinCaller:
    return cast(JoinCaller, _caller(request, Access.JOINING))


async def machine_caller(request: Request) -> WorkerCaller | JoinCaller:
    """A machine of a fleet, before or after it joined."""
    return cast(WorkerCaller | JoinCaller, _caller(request, Access.MACHINE))


async def self_registering_caller(request: Request) -> TokenCaller:
    return cast(TokenCaller, _caller(request, Access.WORKER_ROLE))


async def viewer(request: Request) -> TokenCaller:
    return cast(TokenCaller, _caller(request, Access.VIEWER))


async def task_reader(request: Request) -> TokenCaller:
    return cast(TokenCaller, _caller(request, Access.TASK_READER))


async def producer(request: Request) -> TokenCaller:
    return cast(TokenCaller, _caller(request, Access.PRODUCER))


async def operator(request: Request) -> TokenCaller:
    return cast(TokenCaller, _caller(request, Access.OPERATOR))


async def form_operator(request: Request) -> TokenCaller:
    return cast(TokenCaller, _caller(request, Access.OPERATOR_FORM))


async def admin(request: Request) -> TokenCaller:
    return cast(TokenCaller, _caller(request, Access.ADMIN))


async def form_admin(request: Request) -> TokenCaller:
    return cast(TokenCaller, _caller(request, Access.ADMIN_FORM))


async def caller_scope(request: Request) -> TokenScope:
    """The queues and fleets that the caller may reach. A route that depends on it must check them."""
    caller = request.state.caller
    return caller.scope if isinstance(caller, TokenCaller) else EVERYTHING


ACCESS_OF: Mapping[Callable[..., Any], Access] = {
    open_to_all: Access.OPEN,
    anyone: Access.ANYONE,
    worker_caller: Access.WORKER,
    joining_caller: Access.JOINING,
    machine_caller: Access.MACHINE,
    self_registering_caller: Access.WORKER_ROLE,
    viewer: Access.VIEWER,
    task_reader: Access.TASK_READER,
    producer: Access.PRODUCER,
    operator: Access.OPERATOR,
    admin: Access.ADMIN,
    form_admin: Access.ADMIN_FORM,
    form_operator: Access.OPERATOR_FORM,
}


def _caller(request: Request, access: Access) -> Any:
    """The caller that the middleware has admitted. A route that the table confused with another one is refused."""
    if request.state.access is not access:
        raise forbidden("this path was not checked for its access")
    return request.state.caller
