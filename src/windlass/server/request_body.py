"""Reads request bodies within limits: size, time, the total of all requests, and the size after decompression.

A size that the header announces is judged before a byte is read, any other while it is read. A large body is answered
with 503 if the bodies of all requests would take more than MAX_BUFFERED_BYTES of memory, or those of its caller more
than half of it. SMALL_RESERVE_BYTES above that total are left to small bodies.
"""

import asyncio
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.types import Message, Receive

from windlass.ports import http
from windlass.server.connections import MIN_BODY_BYTES_PER_S
from windlass.server.errors import ApiError, unavailable
from windlass.server.route_table import MAX_SMALL_BODY_BYTES

# Time for a body, plus the time that the bytes received so far take at MIN_BODY_BYTES_PER_S.
BODY_TIMEOUT_S = 60.0
MAX_BUFFERED_BYTES = 256 << 20
# Small bodies may use this much more: a thousand of the largest ones fit. Otherwise large results could keep all
# workers from sending heartbeats.
SMALL_RESERVE_BYTES = 64 << 20
# Large bodies of one caller may use this share of MAX_BUFFERED_BYTES. Otherwise one token could keep all workers from
# delivering large results.
MAX_SHARE_OF_CALLER = 0.5
# Decompressed at once: the limits are judged after each piece.
_INFLATED_BYTES = 256 * 1024
_GZIP_WBITS = 31

Value = TypeVar("Value")
# One thread for all large bodies: decoding holds the interpreter lock, and several threads would starve the event loop.
_decoding = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decode")


class BufferedBytes:
    """Bytes of bodies that are held by all requests of this process."""

    def __init__(self, limit: int = MAX_BUFFERED_BYTES, small_reserve: int = SMALL_RESERVE_BYTES) -> None:
        self._limit = limit
        self._limit_with_small = limit + small_reserve
        self.used = 0
        # By caller, of the bodies above.
        self._held: Counter[str] = Counter()

    def take(self, size_bytes: int, caller: str, *, is_large: bool) -> None:
        """Raises ApiError 503 if these bytes do not fit."""
        if self.used + size_bytes > (self._limit if is_large else self._limit_with_small):
            raise unavailable(f"too many {'large ' if is_large else ''}requests at the same time: retry")
        if is_large and self._held[caller] + size_bytes > self._limit * MAX_SHARE_OF_CALLER:
            raise unavailable("too many large requests of this caller at the same time: retry")
        self.used += size_bytes
        self._held[caller] += size_bytes

    def give_back(self, size_bytes: int, caller: str) -> None:
        self.used -= size_bytes
        self._held[caller] -= size_bytes
        if not self._held[caller]:
            del self._held[caller]


class BodyReader:
    """The body of one request. `receive` is an ASGI receive function that applies the limits."""

    __slots__ = (
        *("_buffered", "_content", "_encoding", "_max_bytes", "_receive", "_received_bytes", "_started_at"),
        *("_taken_bytes", "announced_bytes", "caller", "is_complete"),
    )

    def __init__(self, receive: Receive, headers: Mapping[bytes, bytes], *, buffered: BufferedBytes) -> None:
        self._receive = receive
        length = headers.get(b"content-length", b"0")
        # None for a chunked body.
        self.announced_bytes = None if b"transfer-encoding" in headers or not length.isdigit() else int(length)
        self._encoding = headers.get(b"content-encoding", b"identity").lower()
        self._buffered = buffered
        # Its bytes are counted for this caller. Set before the body is read.
        self.caller = ""
        self._taken_bytes = 0
        self._max_bytes = MAX_SMALL_BODY_BYTES
        self._received_bytes = 0
        # On the event loop's clock. None until the body is read.
        self._started_at: float | None = None
        self.is_complete = self.announced_bytes == 0
        # What `read` has read, until it is received by the application.
        self._content: bytes | None = None

    @property
    def is_large(self) -> bool:
        return self.announced_bytes is None or self.announced_bytes > MAX_SMALL_BODY_BYTES

    @property
    def may_be_large(self) -> bool:
        """True for a compressed body too, whose size is not known before it is read."""
        return self.is_large or self._encoding != b"identity"

    @property
    def content_bytes(self) -> int:
        """Size of the body, decompressed. 0 before it is read, and after the application has received it."""
        return len(self._content or b"")

    def set_limit(self, max_bytes: int) -> None:
        """Raises ApiError if the announced size exceeds it, or if the route does not accept the body's encoding."""
        self._max_bytes = max_bytes
        self._check_size(self.announced_bytes or 0)
        if self._encoding != b"identity" and (self._encoding != b"gzip" or max_bytes <= MAX_SMALL_BODY_BYTES):
            raise ApiError(415, http.BAD_INPUT, "this path does not accept this Content-Encoding")

    async def read(self) -> None:
        """Read the whole body, which the application then receives as one message, decompressed.

        Raises ApiError. The request is refused without reading further.
        """
        message = await self._receive_limited()
        content = message.get("body", b"")
        if not self.is_complete:
            pieces = [content]
            while not self.is_complete:
                message = await self._receive_limited()
                if message["type"] != "http.request":
                    break
                pieces.append(message.get("body", b""))
            content = b"".join(pieces)
        if message["type"] != "http.request":
            raise ApiError(400, http.BAD_INPUT, "the connection was closed before the body was complete")
        if self._encoding == b"gzip":
            content = await self._inflate(content)
        self._content = content

    async def receive(self) -> Message:
        if self._content is not None:
            content, self._content = self._content, None
            return {"type": "http.request", "body": content, "more_body": False}
        return await (self._receive() if self.is_complete else self._receive_limited())

    async def discard(self, max_bytes: int, timeout_s: float) -> None:
        """Receive and drop the rest, within these limits."""
        dropped_bytes = 0
        try:
            async with asyncio.timeout(timeout_s):
                while not self.is_complete and dropped_bytes <= max_bytes:
                    message = await self._receive()
                    if message["type"] != "http.request":
                        return
                    dropped_bytes += len(message.get("body", b""))
                    self.is_complete = not message.get("more_body", False)
        except TimeoutError:
            pass

    def release(self) -> None:
        """The request has ended."""
        if self._taken_bytes:
            self._buffered.give_back(self._taken_bytes, self.caller)
            self._taken_bytes = 0

    async def _receive_limited(self) -> Message:
        if self._started_at is None:
            self._started_at = asyncio.get_running_loop().time()
        due_at = self._started_at + BODY_TIMEOUT_S + self._received_bytes / MIN_BODY_BYTES_PER_S
        try:
            async with asyncio.timeout_at(due_at):
                message = await self._receive()
        except TimeoutError:
            # A code of its own, because a worker retries a slow upload but not a bad request.
            raise ApiError(408, http.TOO_SLOW, "the request body arrived too slowly") from None
        if message["type"] == "http.request":
            size_bytes = len(message.get("body", b""))
            self._received_bytes += size_bytes
            self.is_complete = not message.get("more_body", False)
            self._check_size(self._received_bytes)
            self._take(self._received_bytes, is_large=self._received_bytes > MAX_SMALL_BODY_BYTES)
        else:
            self.is_complete = True
        return message

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self._max_bytes:
            raise ApiError(413, http.TOO_LARGE, f"the request body has more than {self._max_bytes:,} bytes")

    def _take(self, held_bytes: int, *, is_large: bool) -> None:
        if held_bytes > self._taken_bytes:
            self._buffered.take(held_bytes - self._taken_bytes, self.caller, is_large=is_large)
            self._taken_bytes = held_bytes

    async def _inflate(self, compressed: bytes) -> bytes:
        # The size is not known before, so the most that it can be is taken, and what was not used is given back.
        before = self._taken_bytes
        self._take(before + min(self._max_bytes, _max_by_ratio(compressed)), is_large=True)
        content = await asyncio.to_thread(inflate, compressed, self._max_bytes)
        self._buffered.give_back(self._taken_bytes - before - len(content), self.caller)
        self._taken_bytes = before + len(content)
        return content


async def decode_body(decode: Callable[[bytes], Value], content: bytes) -> Value:
    """Decode in a thread what would occupy the event loop for long."""
    if len(content) <= MAX_SMALL_BODY_BYTES:
        return decode(content)
    return await asyncio.get_running_loop().run_in_executor(_decoding, decode, content)


def inflate(compressed: bytes, max_bytes: int) -> bytes:
    """Raises ApiError for data that is not gzip, too large, or compressed more than MAX_GZIP_RATIO times."""
    decompressor = zlib.decompressobj(_GZIP_WBITS)
    pieces, size_bytes, rest = [], 0, compressed
    max_by_ratio = _max_by_ratio(compressed)
    piece = b"-"
    while (piece or rest) and not decompressor.eof:
        try:
            piece = decompressor.decompress(rest, _INFLATED_BYTES)
        except zlib.error:
            break
        rest = decompressor.unconsumed_tail
        size_bytes += len(piece)
        if size_bytes > max_bytes:
            raise ApiError(413, http.TOO_LARGE, f"the decompressed body has more than {max_bytes:,} bytes")
        if size_bytes > max_by_ratio:
            message = f"the body is compressed more than {http.MAX_GZIP_RATIO} times: send it uncompressed"
            raise ApiError(413, http.TOO_LARGE, message)
        pieces.append(piece)
    if not decompressor.eof or decompressor.unused_data:
        raise ApiError(400, http.BAD_INPUT, "the body is not valid gzip data, or not complete")
    return b"".join(pieces)


def _max_by_ratio(compressed: bytes) -> int:
    return max(http.GZIP_RATIO_FREE_BYTES, http.MAX_GZIP_RATIO * len(compressed))
