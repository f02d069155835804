"""Encryption by producers and handlers: sealing, contexts, and errors without plain text."""

import asyncio
import base64
import json
from typing import Any

import pytest

from windlass.model.codec import CodecError, is_sealed, open_sealed, payload_context, result_context, seal
from windlass.worker.attempt import run_handler
from windlass.worker.executor import AttemptFailure, AttemptSuccess, Outcome
from windlass.worker.handler import DoNotRetry, RunningTask
from windlass.worker.sealed_handler import sealed

SECRET = "a very private prompt"


class XorCodec:
    """Reversible and authenticated enough for a test. Not encryption."""

    def __init__(self, key: int) -> None:
        self._key = key

    def encode(self, data: bytes, context: bytes) -> bytes:
        return bytes(byte ^ self._key for byte in context + b"\0" + data)

    def decode(self, data: bytes, context: bytes) -> bytes:
        given, _, content = bytes(byte ^ self._key for byte in data).partition(b"\0")
        if given != context:
            raise ValueError(f"wrong context for {content!r}")
        return content


CODEC = XorCodec(0x5A)


def task_with(payload: Any, queue: str = "q") -> RunningTask:
    return RunningTask(7, queue, payload, 1, 3, "token", lambda *_: None)


def run(handler: Any, payload: Any, queue: str = "q") -> Outcome:
    return run_handler(handler, task_with(payload, queue), 10_000, asyncio.run)


def test_sealed_value_contains_no_plain_text_and_opens_again() -> None:
    value = {"prompt": SECRET, "items": [1, None, "é"]}
    sealed_value = seal(value, CODEC, payload_context("q"))
    assert is_sealed(sealed_value)
    text = json.dumps(sealed_value)
    assert SECRET not in text
    assert base64.b64encode(SECRET.encode()).decode()[:16] not in text
    assert open_sealed(sealed_value, CODEC, payload_context("q"), "it") == value


@pytest.mark.parametrize(
    ("value", "codec", "sentence"),
    [
        pytest.param({"prompt": SECRET}, CODEC, "it is not encrypted", id="plain"),
        pytest.param({"windlass_sealed": "%%%"}, CODEC, "it is damaged", id="damaged"),
        pytest.param(seal(SECRET, CODEC, b"other"), CODEC, r"cannot be decrypted \(ValueError\)", id="moved"),
        pytest.param(seal(SECRET, XorCodec(3), b"q"), CODEC, "it is damaged|cannot be decrypted", id="other key"),
    ],
)
def test_unusable_sealed_value_is_refused_without_its_content(value: Any, codec: XorCodec, sentence: str) -> None:
    with pytest.raises(CodecError, match=sentence) as refused:
        open_sealed(value, codec, b"q", "it")
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("is_async", [False, True])
def test_handler_reads_plain_text_and_returns_it_sealed(is_async: bool) -> None:
    def reverse(task: RunningTask) -> str:
        return task.payload[::-1]

    async def reverse_async(task: RunningTask) -> str:
        return task.payload[::-1]

    handler = sealed(CODEC)(reverse_async if is_async else reverse)
    outcome = run(handler, seal(SECRET, CODEC, payload_context("q")))
    assert isinstance(outcome, AttemptSuccess)
    assert outcome.result is not None
    assert SECRET[::-1] not in outcome.result
    assert open_sealed(json.loads(outcome.result), CODEC, result_context(7), "it") == SECRET[::-1]


@pytest.mark.parametrize("error", [ValueError, DoNotRetry])
def test_error_of_sealed_handler_has_its_type_only(error: type[Exception]) -> None:
    @sealed(CODEC)
    def fail(task: RunningTask) -> None:
        raise error(f"cannot render {task.payload}")

    outcome = run(fail, seal(SECRET, CODEC, payload_context("q")))
    assert isinstance(outcome, AttemptFailure)
    assert outcome.retry is (error is ValueError)
    assert error.__name__ in outcome.error
    assert SECRET not in outcome.error


def test_sealed_handler_refuses_payloads_it_cannot_open() -> None:
    handler = sealed(CODEC)(lambda task: task.payload)
    for payload in (SECRET, seal(SECRET, CODEC, payload_context("another queue"))):
        outcome = run(handler, payload)
        assert isinstance(outcome, AttemptFailure)
        assert (outcome.code, outcome.retry) == ("DO_NOT_RETRY", False)
        assert SECRET not in outcome.error
