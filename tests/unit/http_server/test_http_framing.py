"""Requests that servers and proxies read in different ways are refused before the application sees them."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from windlass.server.connections import MAX_HEADER_BYTES, MAX_PIPELINED
from windlass.server.server import listen, serving

WAIT_S = 30.0
POST = b"POST / HTTP/1.1\r\nHost: here\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"


@dataclass
class Application:
    """Answers every request with its body."""

    port: int = 0
    paths: list[str] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.paths.append(scope["path"])
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@pytest.fixture
async def app() -> AsyncIterator[Application]:
    app, listener = Application(), listen("127.0.0.1", 0)
    app.port = listener.getsockname()[1]
    async with serving(app, listener):
        yield app


async def send(app: Application, *pieces: bytes) -> bytes:
    """Everything the server answers until it closes the connection."""
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()


@pytest.mark.parametrize(
    "request_bytes",
    [
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        POST + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nabcde",
        POST + b"Content-Length: 5, 5\r\n\r\nabcde",
        POST + b"Content-Length: +5\r\n\r\nabcde",
        POST + b"Content-Length: -5\r\n\r\nabcde",
        POST + b"Content-Length:\r\n\r\nabcde",
        POST + b"Content-Length : 5\r\n\r\nabcde",
        POST + b"Content-Length: 99999999999999999999999\r\n\r\nabcde",
        POST + b"Transfer-Encoding: identity\r\n\r\n",
        POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        CHUNKED + b"5\nabcde\r\n0\r\n\r\n",
        CHUNKED + b"0x5\r\nabcde\r\n0\r\n\r\n",
        CHUNKED + b"-5\r\nabcde\r\n0\r\n\r\n",
        CHUNKED + b"5\r\nabcdeXX0\r\n\r\n",
        CHUNKED + b"0\r\nContent-Length: 5\r\n\r\n",
        b"GET / HTTP/1.1\nHost: here\n\n",
        b"GET / HTTP/1.1\r\nHost: here\nX: y\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: here\rX: y\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: here\r\nX: y\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: here\r\nX Y: z\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: here\r\nX: y\x00z\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: here\r\nHost: there\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/2.0\r\nHost: here\r\n\r\n",
        b"GET / HTTP/1.9\r\nHost: here\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT there:80 HTTP/1.1\r\nHost: here\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
    ],
    ids=repr,
)
async def test_ambiguous_request_is_refused(app: Application, request_bytes: bytes) -> None:
    answer = await send(app, request_bytes)
    assert answer.split(b" ")[1] in (b"400", b"505"), answer
    assert answer.count(b"HTTP/1.1 ") == 1
    assert app.paths == []


@pytest.mark.parametrize(
    ("request_bytes", "body"),
    [
        (POST + b"Content-Length: 5\r\nConnection: close\r\n\r\nabcde", b"abcde"),
        (
            POST + b"Transfer-Encoding: Chunked\r\nConnection: close\r\n\r\n2\r\nab\r\n3;x=y\r\ncde\r\n0\r\n\r\n",
            b"abcde",
        ),
        (b"GET / HTTP/1.0\r\n\r\n", b""),
        (b"\r\n" + GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), b""),
        # Without the upgrade.
        (GET.replace(b"\r\n\r\n", b"\r\nConnection: upgrade, close\r\nUpgrade: h2c\r\n\r\n"), b""),
    ],
    ids=["length", "chunked", "HTTP/1.0", "empty line before", "upgrade"],
)
@pytest.mark.parametrize("size", [1, 1_000], ids=["byte by byte", "at once"])
async def test_valid_request_is_answered(app: Application, request_bytes: bytes, body: bytes, size: int) -> None:
    pieces = (request_bytes[at : at + size] for at in range(0, len(request_bytes), size))
    answer = await send(app, *pieces)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\n" + body)


@pytest.mark.parametrize("size", [1_000, 10 * MAX_HEADER_BYTES], ids=["in pieces", "at once"])
@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\nX: " + b"y" * (MAX_HEADER_BYTES + 1) + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: here\r\n" + b"X: y\r\n" * (MAX_HEADER_BYTES // 6 + 1) + b"\r\n",
        b"GET /" + b"y" * (MAX_HEADER_BYTES + 1) + b" HTTP/1.1\r\nHost: here\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: here\r\n" + b"y" * (MAX_HEADER_BYTES + 1),
    ],
    ids=["long value", "many headers", "long address", "long name"],
)
async def test_large_header_is_refused(app: Application, request_bytes: bytes, size: int) -> None:
    pieces = (request_bytes[at : at + size] for at in range(0, len(request_bytes), size))
    answer = await send(app, *pieces)
    # In pieces, the client may still send when the server has closed the connection.
    assert answer.startswith(b"HTTP/1.1 431 ") or (answer == b"" and size < MAX_HEADER_BYTES)
    assert app.paths == []


async def test_request_after_connection_close_is_refused(app: Application) -> None:
    closing = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    answer = await send(app, closing + GET.replace(b" / ", b" /smuggled "))
    assert answer.count(b"HTTP/1.1 ") <= 1
    assert "/smuggled" not in app.paths


async def test_pipelined_requests_are_answered_in_order(app: Application) -> None:
    bodies = (b"one", b"two", b"three")
    requests = b"".join(POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body) for body in bodies)
    answer = await send(app, requests, GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert answer.count(b"HTTP/1.1 200 OK") == 4
    assert [answer.find(body) for body in bodies] == sorted(answer.find(body) for body in bodies)


async def test_many_pipelined_requests_close_the_connection(app: Application) -> None:
    answer = await send(app, GET * (MAX_PIPELINED + 1))
    assert answer.count(b"HTTP/1.1 200 OK") == 0
