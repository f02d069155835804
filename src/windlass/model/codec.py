"""Encryption of payloads and results by their owners: producers and handlers share a codec, the server has none.

A sealed value is the JSON object {"windlass_sealed": "<base64>"}. The codec gets a context, which names the queue of a
payload or the task of a result: a codec that authenticates it (AES-GCM, for example) notices a value that was moved to
another queue or task. Queue names, unique keys, times, error codes and progress notes are not sealed.
"""

import base64
import binascii
import json
from typing import Any, Protocol

from windlass.model.errors import WindlassError

SEALED = "windlass_sealed"


class PayloadCodec(Protocol):
    """Encrypts and decrypts payloads and results in the client and the worker. The server never sees them plain."""

    def encode(self, data: bytes, context: bytes) -> bytes:
        """Encrypt."""

    def decode(self, data: bytes, context: bytes) -> bytes:
        """Decrypt. Raises any exception for data that was not encrypted with this key and context."""


class CodecError(WindlassError):
    """A sealed value cannot be opened, or a value that must be sealed is not."""


def payload_context(queue: str) -> bytes:
    return f"payload of queue {queue}".encode()


def result_context(task_id: int) -> bytes:
    return f"result of task {task_id}".encode()


def seal(value: Any, codec: PayloadCodec, context: bytes) -> dict[str, str]:
    """Raises what json.dumps raises for a value that JSON cannot hold."""
    data = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    return {SEALED: base64.b64encode(codec.encode(data, context)).decode()}


def is_sealed(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {SEALED} and isinstance(value[SEALED], str)


def open_sealed(value: Any, codec: PayloadCodec, context: bytes, what: str) -> Any:
    """Raises CodecError. A value that is not sealed is refused: anyone who can enqueue could have written it."""
    if not is_sealed(value):
        raise CodecError(f"{what} is not encrypted: enqueue it with a Client that has the codec.")
    try:
        return json.loads(codec.decode(base64.b64decode(value[SEALED], validate=True), context))
    except (binascii.Error, json.JSONDecodeError, UnicodeDecodeError):
        raise CodecError(f"{what} is damaged.") from None
    except Exception as error:
        # Not the message: it might quote the data.
        raise CodecError(f"{what} cannot be decrypted ({type(error).__name__}): check the key of the codec.") from None
