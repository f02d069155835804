"""Login to the dashboard through an identity provider, against a real issuer on loopback."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from joserfc.jwk import ECKey, OctKey
from pydantic import SecretStr, ValidationError

from support.api_fixture import API, URL, ApiFixture, open_api, problem_of
from support.oidc_issuer import CLIENT_ID, CLIENT_SECRET, OidcIssuer, open_issuer, visit
from windlass.model.auth import Role, csrf_token
from windlass.model.oidc import OidcConfig, role_of
from windlass.model.task import new_task
from windlass.server import oidc
from windlass.server.auth import CSRF_HEADER, session_cookie
from windlass.server.id_token import verify_id_token
from windlass.server.oidc import OidcClient
from windlass.server.routes.login import LOGIN_OIDC, OIDC_CALLBACK

DESCRIPTION = "/.well-known/openid-configuration"
LIMIT_S = 60.0
COOKIE = session_cookie(httpx.URL(URL).netloc.decode())


@pytest.fixture
async def issuer() -> AsyncIterator[OidcIssuer]:
    async with open_issuer() as issuer:
        yield issuer


@pytest.fixture
async def site(dsn: str, issuer: OidcIssuer) -> AsyncIterator[ApiFixture]:
    config = OidcConfig(
        issuer=issuer.url,
        client_id=CLIENT_ID,
        client_secret=SecretStr(CLIENT_SECRET),
        admins=("windlass-admins",),
        operators=("windlass-operators", "oncall"),
        viewers=("staff",),
    )
    client = OidcClient(config, f"{URL}{OIDC_CALLBACK}", verify_id_token)
    async with open_api(dsn, oidc=client) as api:
        yield api


async def log_in(site: ApiFixture, issuer: OidcIssuer, browser: httpx.AsyncClient | None = None) -> httpx.Response:
    browser = browser or site.client("192.0.2.7")
    begun = await browser.get(LOGIN_OIDC)
    assert begun.status_code == 302
    return await browser.get(await visit(issuer, begun.headers["location"]))


async def state_of_login(browser: httpx.AsyncClient) -> str:
    """Begin a login. Returns the state that its callback needs."""
    begun = await browser.get(LOGIN_OIDC)
    return parse_qs(urlsplit(begun.headers["location"]).query)["state"][0]


@pytest.mark.parametrize(
    ("groups", "may_read", "may_pause", "may_list_tokens"),
    [
        (["staff"], True, False, False),
        (["staff", "oncall"], True, True, False),
        ("windlass-operators", True, True, False),
        (["windlass-admins"], True, True, True),
    ],
)
async def test_claims_decide_the_role(
    site: ApiFixture, issuer: OidcIssuer, groups: Any, may_read: bool, may_pause: bool, may_list_tokens: bool
) -> None:
    issuer.person["groups"] = groups
    browser = site.client("192.0.2.7")
    welcome = await log_in(site, issuer, browser)
    assert welcome.status_code == 200, welcome.text
    assert "samesite=strict" in welcome.headers["set-cookie"].lower()
    csrf = {CSRF_HEADER: csrf_token(browser.cookies[COOKIE])}
    assert ((await browser.get(f"{API}/overview")).status_code == 200) is may_read
    assert ((await browser.post(f"{API}/pause", headers=csrf)).status_code == 200) is may_pause
    assert ((await browser.get(f"{API}/tokens")).status_code == 200) is may_list_tokens


async def test_events_name_the_person_of_the_provider(site: ApiFixture, issuer: OidcIssuer) -> None:
    issuer.person["groups"] = ["oncall"]
    browser = site.client("192.0.2.7")
    await log_in(site, issuer, browser)
    task_id = await site.store.enqueue(new_task("a"))
    csrf = {CSRF_HEADER: csrf_token(browser.cookies[COOKIE])}
    assert (await browser.post(f"{API}/tasks/{task_id}/cancel", headers=csrf)).status_code == 200
    assert [(event.code, event.actor) for event in (await site.store.audit_page()).rows] == [
        ("TASK_CANCELLED", "session:ann@example.com"),
        ("SESSION_OPENED", "session:ann@example.com"),
    ]
    # An address that is not verified could be anyone's.
    for is_verified in (False, "false", 0):
        issuer.person["email_verified"] = is_verified
        await log_in(site, issuer)
        assert (await site.store.audit_page()).rows[0].actor == "session:ann-1"


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"iss": "http://127.0.0.1:1"}, id="another issuer"),
        pytest.param({"aud": "another-client"}, id="another audience"),
        pytest.param({"aud": [CLIENT_ID, "another-client"]}, id="shared audience without azp"),
        pytest.param({"azp": "another-client"}, id="issued to another client"),
        pytest.param({"nonce": "of another login"}, id="another nonce"),
        pytest.param({"nonce": None}, id="no nonce"),
        pytest.param({"exp": int(time.time()) - 3_600}, id="expired"),
        pytest.param({"exp": None}, id="without expiry"),
        pytest.param({"iat": int(time.time()) + 3_600}, id="issued in the future"),
        pytest.param({"sub": None}, id="no subject"),
    ],
)
async def test_invalid_id_token_is_refused(site: ApiFixture, issuer: OidcIssuer, changes: dict[str, Any]) -> None:
    issuer.person["groups"] = ["windlass-admins"]
    issuer.changes = changes
    assert problem_of(await log_in(site, issuer)) == (401, "UNAUTHORIZED")
    assert await site.store.sessions() == []


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [
        pytest.param("ES256", ECKey.generate_key("P-256", {"kid": "first"}), id="a key of another issuer"),
        pytest.param("HS256", OctKey.import_key(CLIENT_SECRET), id="the client secret as key"),
    ],
)
async def test_id_token_with_foreign_signature_is_refused(
    site: ApiFixture, issuer: OidcIssuer, algorithm: str, key: Any
) -> None:
    issuer.person["groups"] = ["windlass-admins"]
    issuer.algorithm, issuer.signing_key = algorithm, key
    assert problem_of(await log_in(site, issuer)) == (401, "UNAUTHORIZED")


async def test_renewed_keys_of_the_issuer_are_found(
    site: ApiFixture, issuer: OidcIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oidc, "MIN_KEY_INTERVAL_S", 0.0)
    issuer.person["groups"] = ["staff"]
    assert (await log_in(site, issuer)).status_code == 200
    issuer.key = ECKey.generate_key("P-256", {"kid": "second", "use": "sig"})
    assert (await log_in(site, issuer)).status_code == 200
    assert issuer.requests.count("/keys") == 2
    assert issuer.requests.count(DESCRIPTION) == 1


async def test_login_is_bound_to_the_browser_that_started_it(site: ApiFixture, issuer: OidcIssuer) -> None:
    issuer.person["groups"] = ["windlass-admins"]
    victim, attacker = site.client("192.0.2.7"), site.client("192.0.2.8")
    begun = await attacker.get(LOGIN_OIDC)
    query = parse_qs(urlsplit(begun.headers["location"]).query)
    assert len(query["state"][0]) >= 40
    assert query["code_challenge_method"] == ["S256"]
    # The attacker sends the end of its own login to the victim.
    back = await visit(issuer, begun.headers["location"])
    assert problem_of(await victim.get(back)) == (401, "UNAUTHORIZED")
    await victim.get(LOGIN_OIDC)
    assert problem_of(await victim.get(back)) == (401, "UNAUTHORIZED")
    # In its own browser it works, once.
    assert (await attacker.get(back)).status_code == 200
    assert problem_of(await attacker.get(back)) == (401, "UNAUTHORIZED")


async def test_person_without_role_gets_no_session(site: ApiFixture, issuer: OidcIssuer) -> None:
    for groups in (None, [], ["strangers"], "*", {"staff": True}):
        issuer.person["groups"] = groups
        refused = await log_in(site, issuer)
        assert problem_of(refused) == (401, "UNAUTHORIZED")
        assert "has no role here" in refused.json()["detail"]
    assert await site.store.sessions() == []


@pytest.mark.parametrize(
    ("claims", "role"),
    [
        ({"email_verified": True}, Role.ADMIN),
        ({"email_verified": False}, None),
        ({"email_verified": "false"}, None),
        ({}, None),
    ],
)
def test_role_is_not_taken_from_an_unverified_address(claims: dict[str, Any], role: Role | None) -> None:
    settings = {"issuer": "https://login.example.com", "client_id": "c", "role_claim": "email"}
    config = OidcConfig.model_validate({**settings, "admins": "ann@example.com"})
    claims = {"sub": "mallory-1", "email": "ann@example.com", **claims}
    assert role_of(config, claims) is role
    # Any user may still get the role of all users.
    open_to_all = config.model_copy(update={"viewers": ("*",)})
    assert role_of(open_to_all, claims) is (role or Role.VIEWER)


async def test_refusal_of_the_provider_is_reported_without_its_text(site: ApiFixture) -> None:
    browser = site.client("192.0.2.7")
    state = await state_of_login(browser)
    refused = await browser.get(OIDC_CALLBACK, params={"state": state, "error": "<b>access_denied</b>"})
    assert problem_of(refused) == (401, "UNAUTHORIZED")
    assert "access_denied" not in refused.text


async def test_provider_with_another_identity_is_not_used(site: ApiFixture, issuer: OidcIssuer) -> None:
    issuer.issuer_in_description = "http://127.0.0.1:2"
    assert problem_of(await site.client("192.0.2.7").get(LOGIN_OIDC)) == (502, "UNAVAILABLE")


async def test_failure_to_load_the_description_is_cached(
    site: ApiFixture, issuer: OidcIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = site.client("192.0.2.7")
    issuer.issuer_in_description = "http://127.0.0.1:2"
    for ttl_s in (0.0, 3_600.0):
        monkeypatch.setattr(oidc, "FAILURE_TTL_S", ttl_s)
        assert problem_of(await browser.get(LOGIN_OIDC)) == (502, "UNAVAILABLE")
    assert issuer.requests.count(DESCRIPTION) == 2
    assert problem_of(await browser.get(LOGIN_OIDC)) == (502, "UNAVAILABLE")
    assert issuer.requests.count(DESCRIPTION) == 2


async def test_address_with_many_failures_does_not_reach_the_provider(site: ApiFixture, issuer: OidcIssuer) -> None:
    browser = site.client("192.0.2.7")
    callback = {"state": await state_of_login(browser), "code": "made-up"}
    statuses = []
    async with asyncio.timeout(LIMIT_S):
        while statuses.count(429) < 3:
            statuses.append((await browser.get(OIDC_CALLBACK, params=callback)).status_code)
    assert set(statuses) == {401, 429}
    assert issuer.requests.count("/token") == statuses.count(401)
    issuer.person["groups"] = ["staff"]
    assert (await log_in(site, issuer, site.client("192.0.2.8"))).status_code == 200


async def test_few_logins_are_finished_at_the_same_time(site: ApiFixture, issuer: OidcIssuer) -> None:
    browser = site.client("192.0.2.7")
    callback = {"state": await state_of_login(browser), "code": "made-up"}
    issuer.answers_token.clear()
    async with asyncio.timeout(LIMIT_S):
        held = [asyncio.create_task(browser.get(OIDC_CALLBACK, params=callback)) for _ in range(oidc.MAX_EXCHANGES)]
        while issuer.requests.count("/token") < oidc.MAX_EXCHANGES:
            await asyncio.sleep(0.01)
        refused = await browser.get(OIDC_CALLBACK, params=callback)
        assert problem_of(refused) == (503, "UNAVAILABLE")
        assert refused.headers["retry-after"] == "1"
        issuer.answers_token.set()
        assert {response.status_code for response in await asyncio.gather(*held)} == {401}
    issuer.person["groups"] = ["staff"]
    assert (await log_in(site, issuer, browser)).status_code == 200


async def test_login_does_not_load_the_authorities_again(
    site: ApiFixture, issuer: OidcIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer.person["groups"] = ["staff"]
    browser = site.client("192.0.2.7")
    begun = await browser.get(LOGIN_OIDC)
    back = await visit(issuer, begun.headers["location"])
    loaded: list[str] = []
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", lambda *_args, **_kwargs: loaded.append("authorities"))
    assert (await browser.get(back)).status_code == 200
    assert loaded == []


async def test_unreachable_provider_leaves_login_links_working(dsn: str) -> None:
    config = OidcConfig(issuer="http://127.0.0.1:1", client_id=CLIENT_ID, viewers=("*",))
    client = OidcClient(config, f"{URL}{OIDC_CALLBACK}", verify_id_token)
    async with open_api(dsn, oidc=client) as api:
        assert problem_of(await api.client("192.0.2.7").get(LOGIN_OIDC)) == (502, "UNAVAILABLE")
        assert (await (await api.browser()).get(f"{API}/overview")).status_code == 200


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"issuer": "http://login.example.com", "client_id": "c", "viewers": "*"}, "must begin with https://"),
        ({"issuer": "https://login.example.com", "viewers": "*"}, "client_id is not"),
        ({"issuer": "https://login.example.com", "client_id": "c"}, "no user could log in"),
        ({"issuer": "https://login.example.com", "client_id": "c", "admins": "*"}, "for viewers only"),
    ],
)
def test_unsafe_oidc_settings_are_refused(settings: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        OidcConfig.model_validate(settings)
