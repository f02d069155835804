"""Masking by value in every encoding, the patterns of foreign secrets, and payload privacy."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, quote_plus
from uuid import uuid4

import pytest

from windlass.model import redaction
from windlass.model.fleet import FleetConfig
from windlass.model.payload_privacy import MAX_TEXT_LINES, MAX_TEXTS, privacy_of
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
from windlass.worker.handler import ReportProgress
from windlass.worker.output_buffer import OutputBuffer
from windlass.worker.private_errors import PrivateErrors

SECRET = "pa/ss+w\"o<r>d&12'3\\4 ü-~\n5"


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
        "path": quote(SECRET),
        "path of a browser": quote(SECRET, safe="/!'()*+,;:@&=$"),
        "lower-case url": re.sub("%..", lambda found: found[0].lower(), quote(SECRET, safe="")),
        "url in a url": quote(quote(SECRET, safe=""), safe=""),
        "form": quote_plus(SECRET),
        "json": json.dumps(SECRET)[1:-1],
        "json with escaped slashes": json.dumps(SECRET)[1:-1].replace("/", "\\/"),
        "json in json": json.dumps(json.dumps(SECRET))[3:-3],
        "json without escaped letters": json.dumps(SECRET, ensure_ascii=False)[1:-1],
        "json with escaped signs": json.dumps(SECRET)[1:-1].replace("<", "\\u003C").replace("&", "\\u0026"),
        "html": html.escape(SECRET),
        "html without quotes": html.escape(SECRET, quote=False),
        "html with numbers": "".join(
            f"&#{ord(character)};" if character in "\"'<" else character for character in SECRET
        ),
        "json in html": html.escape(json.dumps(SECRET)[1:-1]),
        "url in json": json.dumps(quote(SECRET))[1:-1],
        "json in url": quote(json.dumps(SECRET)[1:-1]),
        "json in url in url": quote(quote(json.dumps(SECRET)[1:-1])),
        "repr": repr(SECRET)[1:-1],
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
        assert shown.startswith("before ")
        if "base64" in form:
            # The characters at the ends of base64 may encode neighbouring bytes too.
            assert encodings()[form][4:-4] not in shown
        else:
            # The text keeps its lines.
            assert shown.replace(f"\n{HIDDEN}", "") == f"before {HIDDEN} after"
            assert shown.count("\n") == text.count("\n")


# The same bytes in every run. Keys and certificates have lines of 64 characters.
KEY_TEXT = base64.b64encode(hashlib.sha512(b"a key").digest() * 12 + b"the end of the key").decode()
KEY_LINES = [KEY_TEXT[start : start + 64] for start in range(0, len(KEY_TEXT), 64)]
PEM = "\n".join(["-----BEGIN PRIVATE KEY-----", *KEY_LINES, "-----END PRIVATE KEY-----", ""])
TOKEN = "glpat-4fQ9zR7wYb2KxVn8LmTd"
SERVICE_ACCOUNT = json.dumps({"type": "service_account", "private_key": PEM, "client": "Ab3" * 7}, indent=2)


def printed_secrets() -> dict[str, tuple[str, str]]:
    """By way of printing: a secret, and what a program prints."""
    return {
        "key": (PEM, PEM),
        "key without its last line feed": (PEM, PEM.strip()),
        "key with the line ends of Windows": (PEM, PEM.replace("\n", "\r\n")),
        "key with the line ends of Unix": (PEM.replace("\n", "\r\n"), PEM),
        "key in an environment file": (PEM.replace("\n", "\\n"), PEM),
        "indented key": (PEM, PEM.replace("\n", "\n    ")),
        "key as JSON": (PEM, json.dumps(PEM)),
        "key with the line ends of Windows as JSON": (PEM, json.dumps(PEM.replace("\n", "\r\n"))),
        "key as base64 of MIME": (PEM, base64.encodebytes(PEM.encode()).decode()),
        "key as base64 of openssl": (PEM, _wrapped(base64.b64encode(PEM.encode()).decode(), 64)),
        "wrapped base64 as JSON": (PEM, json.dumps(base64.encodebytes(PEM.encode()).decode())),
        "wrapped base64 of user and key": (PEM, base64.encodebytes(b"user:" + PEM.encode()).decode()),
        "wrapped hexadecimal digits": (PEM, _wrapped(PEM.encode().hex(), 60)),
        "hexadecimal digits with spaces": (TOKEN, f"key: {TOKEN.encode().hex(' ')}"),
        "token that a line feed divides": (TOKEN, f"Authorization: {TOKEN[:9]}\n  {TOKEN[9:]}"),
        "key of a service account": (SERVICE_ACCOUNT, PEM),
        "service account as JSON": (SERVICE_ACCOUNT, json.dumps(json.loads(SERVICE_ACCOUNT))),
    }


def _wrapped(text: str, width: int) -> str:
    return "\n".join(text[start : start + width] for start in range(0, len(text), width))


def secret_parts(secret: str) -> set[str]:
    """Everything of eight characters in the lines of a secret, plain and encoded."""
    lines = KEY_LINES if "PRIVATE KEY" in secret else [secret]
    forms = [form for line in lines for form in (line, line.encode().hex(), base64.b64encode(line.encode()).decode())]
    return {form[start : start + 8] for form in forms for start in range(0, len(form) - 7, 4)}


def masked_output(text: str, batch_lines: int) -> str:
    """What a worker sends of this output. `batch_lines`: how many lines it takes at a time."""
    buffer, sent = OutputBuffer(), []
    lines = text.splitlines(keepends=True)
    for start in range(0, len(lines), batch_lines):
        buffer.add("".join(lines[start : start + batch_lines]).encode())
        batch = buffer.take()
        sent += [line for chunk in (batch.chunks(0.0) if batch else ()) for line in chunk.lines]
    buffer.close()
    batch = buffer.take()
    sent += [line for chunk in (batch.chunks(0.0) if batch else ()) for line in chunk.lines]
    assert len(sent) == len(lines)
    return "\n".join(sent)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("form", printed_secrets())
def test_secret_of_several_lines_is_hidden_however_it_is_printed(form: str) -> None:
    secret, text = printed_secrets()[form]
    set_known_secrets([secret])
    whole = f"before\n{text}\nafter"
    for shown in (mask_known(whole), without_known_secrets(whole), masked_output(whole, 1_000)):
        assert {part for part in secret_parts(secret) if part in shown} == set()
        assert shown.startswith("before\n") and shown.endswith("\nafter")


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    "form",
    [
        "key",
        "key with the line ends of Windows",
        "key in an environment file",
        "key as base64 of MIME",
        "key as base64 of openssl",
        "key of a service account",
    ],
)
def test_line_of_a_secret_is_hidden_without_the_others(form: str) -> None:
    secret, text = printed_secrets()[form]
    set_known_secrets([secret])
    shown = masked_output(text, 1)
    assert {part for part in secret_parts(secret) if part in shown} == set()


@pytest.mark.parametrize(
    "text", ["a key of 64 lines", "-----BEGIN PRIVATE KEY-----", "0123 4567 89ab cdef", "service_account"]
)
def test_other_text_stays_as_it_is(text: str) -> None:
    assert mask_of([PEM, TOKEN, SERVICE_ACCOUNT]).hide(text) == text


def test_private_text_is_hidden_line_by_line() -> None:
    prompt = "write a long letter to Ann\nand another one to her sister"
    hide = PRIVATE.text_filter("letters", json.dumps({"prompt": prompt}))
    assert [hide(f"> {line}") for line in prompt.splitlines()] == [f"> {HIDDEN}", f"> {HIDDEN}"]
    many = json.dumps({"prompt": "\n".join(f"line {number} of a prompt" for number in range(MAX_TEXT_LINES + 2))})
    assert PRIVATE.text_filter("letters", many)("line 1 of a prompt") == HIDDEN


def test_masking_takes_linear_time_whatever_the_text() -> None:
    mask = mask_of([r"""\\\"%25&amp;""" * 5, " " * 20, "aaaaaaaa/aaaaaaaa"])
    for part in (" a", "\\n", "\\", "%5C", "%25", "&amp;", "a", "aaaaaaaa/", " ", '\\"'):
        hostile = part * 100_000
        assert len(mask(hostile)) <= len(hostile) + 100


@pytest.mark.usefixtures("known")
def test_api_hides_known_secrets_in_bodies_and_errors() -> None:
    body = json_response(dict[str, str])({"reason": f"cannot log in with {SECRET}"}).body
    assert json.loads(bytes(body)) == {"reason": f"cannot log in with {HIDDEN}"}
    problem = ApiError(400, "BAD_INPUT", f"bad value {SECRET}").to_response().body
    assert SECRET not in json.loads(bytes(problem))["detail"]
    add_known_secrets(["another-secret"])
    assert without_known_secrets(f"another-secret {SECRET}") == f"{HIDDEN} {HIDDEN}\n{HIDDEN}"


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
        "SIGNING": PEM,
        "CA_FILE": "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
        "MODEL": "llama-3-8b-instruct-v2-long",
        "CACHE": "/data/models/Cache/v2/Files",
        "REGION": "eu-west-1",
    }
    assert secrets_in(environment) == {environment[name] for name in ("HF_HUB", "LICENCE", "DB_PASSWORD", "SIGNING")}


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

    async def run(self, claim: Claim, report: ReportProgress) -> Outcome:
        report(0.5, f"drawing {claim.payload}")
        report(0.6, None)
        return AttemptFailure("HANDLER_ERROR", f"ValueError: {claim.payload}")

    async def close(self) -> None: ...


async def test_worker_does_not_send_hidden_parts_in_errors() -> None:
    executor = PrivateErrors(QuotingExecutor(), ("letters",), ("$.prompt",))
    claim = Claim(1, uuid4(), "letters", PAYLOAD, 1, 3, None, 0, datetime.now(UTC))
    notes: list[str | None] = []
    outcome = await executor.run(claim, lambda _, note: notes.append(note))
    assert isinstance(outcome, AttemptFailure)
    assert "a private prompt" not in outcome.error
    assert "private text" in outcome.error
    drawing, none = notes
    assert drawing is not None and "a private prompt" not in drawing and "private text" in drawing
    assert none is None


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        pytest.param({"prompt": 4711}, "no account 4711", id="a number"),
        pytest.param({"prompt": "abc"}, "KeyError: 'abc'", id="a short text"),
        pytest.param({"prompt": {"Ann": True}}, "KeyError: 'Ann'", id="the name of a member"),
        pytest.param({"prompt": ["x1", {"y": 2.5}]}, "neither x1 nor 2.5", id="parts of parts"),
        pytest.param({"prompt": "grüße/ä b"}, "GET /gr%C3%BC%C3%9Fe%2F%C3%A4%20b", id="in an address"),
    ],
)
def test_everything_at_a_hidden_path_is_removed_from_errors(payload: Any, error: str) -> None:
    redacted = PRIVATE.redact_text("letters", error, json.dumps(payload))
    assert redacted is not None and HIDDEN in redacted
    assert not any(part in redacted for part in ("4711", "abc", "Ann", "x1", "2.5", "gr%C3"))


def test_short_hidden_text_is_not_removed_from_other_words() -> None:
    assert PRIVATE.redact_text("letters", "cannot open a cat", '{"prompt": "a"}') == f"cannot open {HIDDEN} cat"


def test_message_is_hidden_as_a_whole_if_too_many_texts_are_private() -> None:
    payload = json.dumps({"prompt": [f"line {number}" for number in range(MAX_TEXTS + 1)]})
    assert PRIVATE.redact_text("letters", "attempt 1 of 3: no line", payload) == f"attempt 1 of 3: {HIDDEN}"


@pytest.mark.parametrize("path", ["prompt", "$prompt", "$..prompt", "$.a b", "$.a[", "$.a[-1]", ""])
def test_invalid_path_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="is not a path"):
        FleetConfig.model_validate({"handler": "app:work", "redact": [path]})
