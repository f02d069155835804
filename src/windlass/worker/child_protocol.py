"""The frames between a worker and its child process: length, kind, body; over one socket, in both directions."""

import struct
from typing import BinaryIO

HEADER = struct.Struct(">IB")
# Many times the largest configurable payload. A longer frame is not ours.
MAX_FRAME_BYTES = 256 * 1024 * 1024

READY = 1  # child: the handler is loaded
NOT_READY = 2  # child: the handler cannot be loaded; the body is the error message
RUN = 3  # parent: JSON with the task
PROGRESS = 4  # child: JSON [claim token, fraction, note]
RESULT = 5  # child: the result as JSON text
FAILED = 6  # child: JSON {code, error, retry}


def pack(kind: int, body: bytes = b"") -> bytes:
    return HEADER.pack(len(body), kind) + body


def receive(stream: BinaryIO) -> tuple[int, bytes] | None:
    """Read the next frame, blocking. None if the other side closed the socket."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    length, kind = HEADER.unpack(header)
    body = stream.read(length)
    return (kind, body) if len(body) == length else None
