"""A real OpenID Connect provider on loopback: discovery, authorization with PKCE, token endpoint, signed ID tokens.

It authenticates every visitor as `person`. Tests change its claims and answers to see what a client refuses.
"""

import asyncio
import base64
import hashlib
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qsl, urlencode

import httpx
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse
from joserfc import jwt
from joserfc.jwk import ECKey, KeySet

from support.asgi_server import serve_asgi

CLIENT_ID, CLIENT_SECRET = "windlass-dashboard", "a-client-secret-of-the-test"


class OidcIssuer:
    def __init__(self) -> None:
        self.url = ""
        self.key = ECKey.generate_key("P-256", {"kid": "first", "use": "sig"})
        # Claims of the person who logs in; added to, or replacing, those of the protocol.
        self.person: dict[str, Any] = {"sub": "ann-1", "email": "ann@example.com", "email_verified": True}
        self.changes: dict[str, Any] = {}
        self.issuer_in_description: str | None = None
        self.algorithm = "ES256"
        self.signing_key: Any = None
        # Authorization requests by code. Each code works once.
        self._codes: dict[str, dict[str, str]] = {}
        # The token endpoint answers while this is set.
        self.answers_token = asyncio.Event()
        self.answers_token.set()
        self.requests: list[str] = []
        self.app = FastAPI()
        self._add_routes()

    def _add_routes(self) -> None:
        @self.app.middleware("http")
        async def record(request: Request, call_next: Any) -> Any:
            self.requests.append(request.url.path)
            return await call_next(request)

        @self.app.get("/.well-known/openid-configuration")
        async def describe() -> dict[str, str]:
            return {
                "issuer": self.issuer_in_description or self.url,
                "authorization_endpoint": f"{self.url}/authorize",
                "token_endpoint": f"{self.url}/token",
                "jwks_uri": f"{self.url}/keys",
            }

        @self.app.get("/keys")
        async def keys() -> Any:
            return KeySet([self.key]).as_dict(private=False)

        @self.app.get("/authorize")
        async def authorize(request: Request) -> Response:
            asked = dict(request.query_params)
            assert (asked["response_type"], asked["client_id"]) == ("code", CLIENT_ID)
            assert asked["code_challenge_method"] == "S256"
            assert "openid" in asked["scope"].split()
            code = secrets.token_urlsafe(16)
            self._codes[code] = asked
            query = urlencode({"code": code, "state": asked["state"]})
            return RedirectResponse(f"{asked['redirect_uri']}?{query}", 302)

        @self.app.post("/token")
        async def token(request: Request) -> Response:
            await self.answers_token.wait()
            form = dict(parse_qsl((await request.body()).decode()))
            asked = self._codes.pop(form.get("code", ""), None)
            challenge = base64.urlsafe_b64encode(hashlib.sha256(form["code_verifier"].encode()).digest())
            is_valid = (
                asked is not None
                and challenge.decode().rstrip("=") == asked["code_challenge"]
                and form["redirect_uri"] == asked["redirect_uri"]
                and (form["client_id"], form.get("client_secret")) == (CLIENT_ID, CLIENT_SECRET)
            )
            if asked is None or not is_valid:
                return JSONResponse({"error": "invalid_grant"}, 400)
            now = int(time.time())
            claims = {
                "iss": self.url,
                "aud": CLIENT_ID,
                "iat": now,
                "exp": now + 300,
                "nonce": asked["nonce"],
                **self.person,
                **self.changes,
            }
            claims = {name: value for name, value in claims.items() if value is not None}
            key = self.signing_key or self.key
            header = {"alg": self.algorithm, "kid": self.key.kid}
            id_token = jwt.encode(header, claims, key, algorithms=[self.algorithm])
            return JSONResponse({"access_token": "unused", "token_type": "Bearer", "id_token": id_token})


@asynccontextmanager
async def open_issuer() -> AsyncIterator[OidcIssuer]:
    issuer = OidcIssuer()
    async with serve_asgi(issuer.app) as issuer.url:
        yield issuer


async def visit(issuer: OidcIssuer, address: str) -> str:
    """Log in at the provider, as a browser does. Returns the address that it is sent back to."""
    assert address.startswith(f"{issuer.url}/authorize?")
    async with httpx.AsyncClient(trust_env=False) as browser:
        return (await browser.get(address)).headers["location"]
