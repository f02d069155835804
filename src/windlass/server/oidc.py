"""Authenticates a person at an identity provider: OpenID Connect, authorization code flow with PKCE.

The browser keeps state, nonce and code verifier of its login in a short-lived cookie, so any server process can finish
it. The ID token must be signed by a key of the issuer with an asymmetric algorithm, be meant for this client, carry the
nonce of this login, and not have expired. Calls to the provider have a time limit and a size limit, and at most
MAX_EXCHANGES logins are finished at the same time. Its description and keys are cached, a failure to load the
description for FAILURE_TTL_S, and an unknown key is looked up at most once per MIN_KEY_INTERVAL_S.
"""

import asyncio
import base64
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx
import structlog

from windlass.model.auth import Role
from windlass.model.errors import ConfigError
from windlass.model.oidc import OidcConfig, name_of, role_of

TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 1 << 20
DESCRIPTION_TTL_S = 600.0
MIN_KEY_INTERVAL_S = 30.0
# A provider that does not answer is not asked again before.
FAILURE_TTL_S = 5.0
# Anyone can call the callback with a made-up code, and each call is a request to the provider.
MAX_EXCHANGES = 8
log = structlog.get_logger(__name__)


class LoginRefused(Exception):
    """The provider or we refused the login. The message is for the person."""


class ProviderUnavailable(Exception):
    """The identity provider did not answer as it should."""


class TooManyLogins(Exception):
    """MAX_EXCHANGES logins are being finished."""


@dataclass(frozen=True, slots=True)
class PendingLogin:
    """What a browser brings back. Random, so that no other browser can finish its login."""

    state: str
    nonce: str
    verifier: str

    def to_cookie(self) -> str:
        return base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode().rstrip("=")

    @classmethod
    def from_cookie(cls, cookie: str | None) -> "PendingLogin | None":
        try:
            text = base64.urlsafe_b64decode((cookie or "") + "=" * (-len(cookie or "") % 4))
            values = json.loads(text)
            return cls(*(str(values[name]) for name in ("state", "nonce", "verifier")))
        except (ValueError, KeyError, TypeError):
            return None


class BadIdToken(Exception):
    """An ID token that must not be accepted."""

    def __init__(self, reason: str, *, may_have_new_key: bool = False) -> None:
        super().__init__(reason)
        self.may_have_new_key = may_have_new_key


@dataclass(frozen=True, slots=True)
class ExpectedIdToken:
    issuer: str
    client_id: str
    nonce: str


# Returns the claims of an ID token that is signed by one of the issuer's keys (a JWK set). Raises BadIdToken.
VerifyIdToken = Callable[[str, Mapping[str, Any], ExpectedIdToken], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Person:
    name: str
    role: Role


class OidcClient:
    def __init__(self, config: OidcConfig, redirect_url: str, verify: VerifyIdToken) -> None:
        """`redirect_url`: where the provider sends the browser back to. `verify`: see id_token.py."""
        if config.issuer is None or config.client_id is None:
            raise ConfigError("oidc.issuer and oidc.client_id are needed for this login.")
        self._config = config
        self._issuer = config.issuer
        self._client_id = config.client_id
        self._redirect_url = redirect_url
        self._verify = verify
        # Description and time of expiry.
        self._description: tuple[Mapping[str, Any], float] | None = None
        self._failure: tuple[str, float] | None = None
        self._keys: tuple[Mapping[str, Any], float] | None = None
        self._describing, self._loading_keys = asyncio.Lock(), asyncio.Lock()
        self._exchanges = asyncio.Semaphore(MAX_EXCHANGES)
        # Loading the authorities takes tens of milliseconds of the event loop, so all calls use this context.
        self._tls = httpx.create_ssl_context(trust_env=False)

    @property
    def is_https(self) -> bool:
        return self._redirect_url.startswith("https://")

    async def begin(self) -> tuple[str, PendingLogin]:
        """The URL of the provider's login page. Raises ProviderUnavailable."""
        description = await self._describe()
        pending = PendingLogin(*(secrets.token_urlsafe(32) for _ in range(3)))
        challenge = base64.urlsafe_b64encode(hashlib.sha256(pending.verifier.encode()).digest()).decode().rstrip("=")
        query = urlencode(
            {
                "response_type": "code",
                "client_id": self._client_id,
                "redirect_uri": self._redirect_url,
                "scope": " ".join(self._config.scopes),
                "state": pending.state,
                "nonce": pending.nonce,
                "code_challenge": challenge,
                "code_challenge_method": "S256",
            }
        )
        address = str(description["authorization_endpoint"])
        return f"{address}{'&' if '?' in address else '?'}{query}", pending

    async def finish(self, pending: PendingLogin | None, state: str, code: str, error: str) -> Person:
        """Raises LoginRefused, ProviderUnavailable or TooManyLogins."""
        if pending is None or not hmac.compare_digest(pending.state.encode(), state.encode()):
            raise LoginRefused("this login was not started in this browser, or took too long: start it again")
        if error or not code:
            raise LoginRefused("the identity provider did not authenticate you")
        if self._exchanges.locked():
            raise TooManyLogins
        async with self._exchanges:
            claims = await self._claims(await self._exchange(code, pending), pending)
        role = role_of(self._config, claims)
        name = name_of(self._config, claims)
        if role is None:
            log.warning("refuse login", person=name, reason="no role")
            raise LoginRefused("your account has no role here: ask an administrator")
        return Person(name, role)

    async def _exchange(self, code: str, pending: PendingLogin) -> str:
        description = await self._describe()
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self._redirect_url,
            "client_id": self._client_id,
            "code_verifier": pending.verifier,
        }
        secret = self._config.client_secret
        if secret is not None:
            form["client_secret"] = secret.get_secret_value()
        answer = await self._call("POST", str(description["token_endpoint"]), form)
        token = answer.get("id_token")
        if not isinstance(token, str):
            raise LoginRefused("the identity provider did not accept the login: start it again")
        return token

    async def _claims(self, token: str, pending: PendingLogin) -> Mapping[str, Any]:
        expected = ExpectedIdToken(self._issuer, self._client_id, pending.nonce)
        for is_retry in (False, True):
            keys = await self._key_set(is_retry=is_retry)
            try:
                return self._verify(token, keys, expected)
            except BadIdToken as error:
                # The issuer may have new keys.
                if is_retry or not error.may_have_new_key:
                    log.warning("refuse login", reason="invalid ID token", error=str(error))
                    raise LoginRefused("the identity provider's token is not valid for this dashboard") from None
        raise AssertionError("the second attempt returns or raises")

    async def _describe(self) -> Mapping[str, Any]:
        async with self._describing:
            if self._description is None or time.monotonic() >= self._description[1]:
                # Requests that waited for the lock fail at once: each would wait for the time limit again.
                if self._failure is not None and time.monotonic() < self._failure[1]:
                    raise ProviderUnavailable(self._failure[0])
                try:
                    found = await self._load_description()
                except ProviderUnavailable as error:
                    self._failure = str(error), time.monotonic() + FAILURE_TTL_S
                    raise
                self._description = found, time.monotonic() + DESCRIPTION_TTL_S
            return self._description[0]

    async def _load_description(self) -> Mapping[str, Any]:
        found = await self._call("GET", f"{self._issuer.rstrip('/')}/.well-known/openid-configuration")
        needed = ("authorization_endpoint", "token_endpoint", "jwks_uri")
        # The issuer must say that it is the one that is configured, and use no weaker transport.
        if found.get("issuer") != self._issuer or not all(self._is_usable(found.get(name)) for name in needed):
            raise ProviderUnavailable("its description does not belong to oidc.issuer")
        return found

    def _is_usable(self, address: Any) -> bool:
        if not isinstance(address, str) or not urlsplit(address).netloc:
            return False
        return address.startswith("https://") or self._issuer.startswith("http://")

    async def _key_set(self, *, is_retry: bool) -> Mapping[str, Any]:
        description = await self._describe()
        async with self._loading_keys:
            age_s = time.monotonic() - self._keys[1] if self._keys is not None else float("inf")
            if age_s > DESCRIPTION_TTL_S or (is_retry and age_s > MIN_KEY_INTERVAL_S):
                found = await self._call("GET", str(description["jwks_uri"]))
                self._keys = found, time.monotonic()
            if self._keys is None:
                raise ProviderUnavailable("it has no keys")
            return self._keys[0]

    async def _call(self, method: str, address: str, form: Mapping[str, str] | None = None) -> Mapping[str, Any]:
        """No redirects, no proxies of the environment, bounded time and size."""
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S, verify=self._tls) as client,
                client.stream(method, address, data=form) as response,
            ):
                content = bytearray()
                async for chunk in response.aiter_bytes():
                    content += chunk
                    if len(content) > MAX_ANSWER_BYTES:
                        raise ProviderUnavailable("its answer is too large")
            answer = json.loads(content)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError) as error:
            raise ProviderUnavailable(type(error).__name__) from None
        except ValueError:
            raise ProviderUnavailable("its answer is not JSON") from None
        if not isinstance(answer, dict):
            raise ProviderUnavailable("its answer is not a JSON object")
        if response.status_code >= 500:
            raise ProviderUnavailable(f"it answered {response.status_code}")
        return answer
