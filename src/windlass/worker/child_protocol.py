"""The words between a worker and its child: a length, a kind, a body. One socket, both directions."""

import struct
from typing import BinaryIO

HEADER = struct.Struct(">IB")
# A payload at its largest configured limit fits many times; more is a broken peer.
MAX_FRAME_BYTES = 256 * 1024 * 1024

READY = 1  # child: the handler is loaded
NOT_READY = 2  # child: it cannot be; the body says why, for a user
RUN = 3  # parent: JSON with the task
PROGRESS = 4  # child: JSON [claim token, fraction, note]
RESULT = 5  # child: the result as JSON text
FAILED = 6  # child: JSON {code, error, retry}


def pack(kind: int, body: bytes = b"") -> bytes:
    return HEADER.pack(len(body), kind) + body


def receive(stream: BinaryIO) -> tuple[int, bytes] | None:
    """The next frame, blocking. None when the other side is gone."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    length, kind = HEADER.unpack(header)
    body = stream.read(length)
    return (kind, body) if len(body) == length else None
