"""Masking by value in every encoding, the patterns of foreign secrets, and payload privacy."""

import base64
import html
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from urllib.parse import quote, quote_plus
from uuid import uuid4

import pytest

from windlass.model import redaction
from windlass.model.fleet import FleetConfig
from windlass.model.payload_privacy import privacy_of
from windlass.model.redaction import (
    HIDDEN,
    Mask,
    add_known_secrets,
    mask_known,
    mask_of,
    secrets_in,
    set_known_secrets,
    shown_settings,
    without_known_secrets,
)
from windlass.model.task import Claim
from windlass.server.errors import ApiError
from windlass.server.json_api import json_response
from windlass.worker.executor import AttemptFailure, Outcome
from windlass.worker.private_errors import PrivateErrors

SECRET = 'pa/ss+w"o<r>d&1234'


@pytest.fixture
def known() -> Iterator[None]:
    before = redaction._known
    set_known_secrets([SECRET])
    yield
    redaction._known = before


def encodings() -> dict[str, str]:
    content = SECRET.encode()
    return {
        "plain": SECRET,
        "url": quote(SECRET, safe=""),
        "form": quote_plus(SECRET),
        "json": json.dumps(SECRET)[1:-1],
        "json with escaped slashes": json.dumps(SECRET)[1:-1].replace("/", "\\/"),
        "html": html.escape(SECRET),
        "hex": content.hex(),
        "upper-case hex": content.hex().upper(),
        "base64": base64.b64encode(content).decode(),
        "url-safe base64": base64.urlsafe_b64encode(content).decode(),
        "base64 after one byte": base64.b64encode(b"u" + content).decode(),
        "base64 of user and password": base64.b64encode(b"user:" + content).decode(),
    }


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("form", encodings())
def test_known_secret_is_hidden_in_every_encoding(form: str) -> None:
    text = f"before {encodings()[form]} after"
    for shown in (mask_of([SECRET])(text), mask_known(text), without_known_secrets(text)):
        assert HIDDEN in shown
        # The characters at the ends of base64 may encode neighbouring bytes too.
        middle = encodings()[form][4:-4]
        assert middle not in shown
        assert shown.startswith("before ")


@pytest.mark.usefixtures("known")
def test_api_hides_known_secrets_in_bodies_and_errors() -> None:
    body = json_response(dict[str, str])({"reason": f"cannot log in with {SECRET}"}).body
    assert json.loads(bytes(body)) == {"reason": f"cannot log in with {HIDDEN}"}
    problem = ApiError(400, "BAD_INPUT", f"bad value {SECRET}").to_response().body
    assert SECRET not in json.loads(bytes(problem))["detail"]
    add_known_secrets(["another-secret"])
    assert without_known_secrets(f"another-secret {SECRET}") == f"{HIDDEN} {HIDDEN}"


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer eyJhbGciOiJIUzI1NiJ9.payload.SECRETVALUE",
        "host=db user=app password=SECRETVALUE dbname=x",
        "host=db password='SECRETVALUE with spaces' dbname=x",
        '{"api_key": "SECRETVALUE"}',
        "{'access-key': 'SECRETVALUE'}",
        "REDIS_AUTH=SECRETVALUE",
        "MYSQL_PASSWD=SECRETVALUE",
        "SENTRY_DSN=https://SECRETVALUE@sentry.example/1",
        "pip install --extra-index-url https://SECRETVALUE@pypi.example/simple",
        "git clone https://SECRETVALUE@forge.example/repository.git",
        "git+https://SECRETVALUE@forge.example/repository.git",
        "https://user:SECRETVALUE@pypi.example/simple",
        "postgresql://app:SECRETVALUE@db.example/app",
    ],
)
def test_foreign_secret_is_hidden_by_its_surroundings(text: str) -> None:
    assert "SECRETVALUE" not in Mask()(text)
    settings = shown_settings({"bootstrap": {"setup": [text]}})
    assert "SECRETVALUE" not in json.dumps(settings)


def test_variables_that_hold_keys_are_secrets_whatever_their_name() -> None:
    environment = {
        "HF_HUB": "hf_AbCdEfGhIjKlMnOp1234",
        "LICENCE": "0123456789abcdef0123456789abcdef",
        "DB_PASSWORD": "short1",
        "MODEL": "llama-3-8b-instruct-v2-long",
        "CACHE": "/data/models/Cache/v2/Files",
        "REGION": "eu-west-1",
    }
    assert secrets_in(environment) == {environment[name] for name in ("HF_HUB", "LICENCE", "DB_PASSWORD")}


PRIVATE = privacy_of([(("letters",), ("$.prompt", "$.items[*].text", "$.pair[1]"))])
PAYLOAD = json.dumps(
    {"prompt": "a private prompt", "size": 3, "items": [{"text": "private text", "n": 1}, 7], "pair": ["a", "b"]}
)


def test_hidden_parts_of_payload_are_replaced() -> None:
    assert json.loads(PRIVATE.redact("letters", PAYLOAD) or "") == {
        "prompt": HIDDEN,
        "size": 3,
        "items": [{"text": HIDDEN, "n": 1}, 7],
        "pair": ["a", HIDDEN],
    }
    assert PRIVATE.redact("other", PAYLOAD) == PAYLOAD
    assert PRIVATE.redact("letters", None) is None
    # What Python cannot parse is hidden as a whole.
    assert PRIVATE.redact("letters", "[" * 100_000) == json.dumps(HIDDEN)
    whole = privacy_of([(("letters",), ("$",))])
    assert whole.redact("letters", PAYLOAD) == json.dumps(HIDDEN)


def test_error_that_quotes_a_hidden_part_is_redacted() -> None:
    error = "ValueError: cannot render 'a private prompt' of size 3"
    assert PRIVATE.redact_text("letters", error, PAYLOAD) == f"ValueError: cannot render '{HIDDEN}' of size 3"
    assert PRIVATE.redact_text("other", error, PAYLOAD) == error


class QuotingExecutor:
    """Fails with an error that quotes the payload."""

    async def start(self) -> None: ...

    async def run(self, claim: Claim, _report: object) -> Outcome:
        return AttemptFailure("HANDLER_ERROR", f"ValueError: {claim.payload}")

    async def close(self) -> None: ...


async def test_worker_does_not_send_hidden_parts_in_errors() -> None:
    executor = PrivateErrors(QuotingExecutor(), ("letters",), ("$.prompt",))
    claim = Claim(1, uuid4(), "letters", PAYLOAD, 1, 3, None, 0, datetime.now(UTC))
    outcome = await executor.run(claim, lambda *_: None)
    assert isinstance(outcome, AttemptFailure)
    assert "a private prompt" not in outcome.error
    assert "private text" in outcome.error


@pytest.mark.parametrize("path", ["prompt", "$prompt", "$..prompt", "$.a b", "$.a[", "$.a[-1]", ""])
def test_invalid_path_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="is not a path"):
        FleetConfig.model_validate({"handler": "app:work", "redact": [path]})
