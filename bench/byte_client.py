"""A worker's HTTP connection without an HTTP client: prepared bytes out, a regular expression over the reply.

It uses a small fraction of the CPU of a real client, so that a benchmark of the server measures the server.
"""

import asyncio
import re
from typing import Self

_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


class ByteClient(asyncio.Protocol):
    """One keep-alive connection with one request at a time."""

    def __init__(self, token: str) -> None:
        self._head = b""
        self.use_token(token)
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._reply: asyncio.Future[bytes] | None = None

    @classmethod
    async def connect(cls, port: int, token: str) -> Self:
        _, client = await asyncio.get_running_loop().create_connection(lambda: cls(token), "127.0.0.1", port)
        return client

    def use_token(self, token: str) -> None:
        """Send further requests as another worker."""
        self._head = b"Host: bench\r\nAuthorization: Bearer %b\r\nContent-Type: application/json\r\n" % token.encode()

    async def post(self, path: str, body: bytes) -> bytes:
        """The body of the reply. Raises RuntimeError for any status but 200."""
        assert self._transport is not None
        self._reply = asyncio.get_running_loop().create_future()
        request = b"POST %b HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b" % (path.encode(), self._head, len(body), body)
        self._transport.write(request)
        return await self._reply

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if not separator or length is None or len(body) < int(length[1]):
            return
        self._received = b""
        if self._reply is None or self._reply.done():
            return
        if head.startswith(b"HTTP/1.1 200 "):
            self._reply.set_result(body)
        else:
            self._reply.set_exception(RuntimeError((head.partition(b"\r\n")[0] + b" " + body).decode()))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(exc or ConnectionResetError("the server closed the connection"))
