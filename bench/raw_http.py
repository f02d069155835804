"""HTTP by bytes, for load generators: prebuilt requests, and just enough parsing of responses.

An HTTP library takes longer per call than the server, so that a benchmark with one measures the library.
"""

import asyncio
import json
import re
from collections import deque
from dataclasses import dataclass
from typing import Any

HOST = "127.0.0.1"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
# A claim in a reply of the worker protocol: its task and its token are all that finishing needs.
CLAIM = re.compile(rb'"task_id":\s*(\d+),\s*"token":\s*"([0-9a-f-]{36})"')


@dataclass(frozen=True, slots=True)
class RawReply:
    status: int
    body: bytes


def get_request(path: str, token: str | None = None) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\n{_authorization(token)}\r\n".encode()


def post_prefix(path: str, token: str | None = None) -> bytes:
    """A request up to the length of its body, which `with_body` adds."""
    head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\n{_authorization(token)}Content-Type: application/json\r\n"
    return f"{head}Content-Length: ".encode()


def with_body(prefix: bytes, body: bytes) -> bytes:
    return b"%b%d\r\n\r\n%b" % (prefix, len(body), body)


def post_request(path: str, token: str | None, value: Any) -> bytes:
    return with_body(post_prefix(path, token), json.dumps(value).encode())


def _authorization(token: str | None) -> str:
    return f"Authorization: Bearer {token}\r\n" if token is not None else ""


def split_reply(data: bytes) -> tuple[RawReply, int] | None:
    """The first complete response in `data` and its size in bytes, or None. Only responses with Content-Length."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return None
    found = _LENGTH.search(data, 0, end + 2)
    if found is None:
        raise ValueError(f"a response without Content-Length: {data[: end + 2]!r}")
    size = end + 4 + int(found[1])
    if len(data) < size:
        return None
    return RawReply(int(data[9:12]), data[end + 4 : size]), size


class RawConnection(asyncio.Protocol):
    """One keep-alive connection. `call` sends a request and waits for its response; calls do not overlap."""

    def __init__(self) -> None:
        self._data = b""
        self._waiting: deque[asyncio.Future[RawReply]] = deque()
        self._transport: asyncio.Transport | None = None
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self._data += data
        while self._waiting and (reply := split_reply(self._data)) is not None:
            self._data = self._data[reply[1] :]
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(reply[0])

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_exception(ConnectionResetError(str(exc or "closed by the server")))

    async def call(self, request: bytes) -> RawReply:
        if self._transport is None or not self.is_open:
            raise ConnectionResetError("not connected")
        future: asyncio.Future[RawReply] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._transport.write(request)
        return await future

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


async def open_raw(port: int) -> RawConnection:
    _, connection = await asyncio.get_running_loop().create_connection(RawConnection, HOST, port)
    return connection


async def call_once(port: int, request: bytes, timeout_s: float) -> RawReply:
    """One request on a connection of its own."""
    async with asyncio.timeout(timeout_s):
        connection = await open_raw(port)
        try:
            return await connection.call(request)
        finally:
            connection.close()
