"""Serves an ASGI application on a loopback port inside the event loop of the test.

It starts in a millisecond, unlike the product's server, and understands only what the worker's client sends: requests
with Content-Length, one after another. The connection limits of the product's server have tests of their own.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any


@asynccontextmanager
async def serve_asgi(app: Any) -> AsyncIterator[str]:
    """Yield the URL of the application."""
    connections: set[asyncio.Task[Any]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                while True:
                    await _answer_one(app, reader, writer)
        finally:
            connections.discard(task)
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield "http://{}:{}".format(*server.sockets[0].getsockname())
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


async def _answer_one(app: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    request_line, *lines = head.strip().split("\r\n")
    method, target, _ = request_line.split(" ")
    headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    body = await reader.readexactly(int(dict(headers).get("content-length", "0")))
    path, _, query = target.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers],
        "client": ("127.0.0.1", 4711),
        "server": ("127.0.0.1", 80),
    }
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    start: dict[str, Any] = {}
    content = bytearray()

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        return await asyncio.Future()

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
        else:
            content.extend(message.get("body", b""))

    await app(scope, receive, send)
    writer.write(b"HTTP/1.1 %d .\r\n" % start["status"])
    for name, value in start["headers"]:
        if name.lower() != b"content-length":
            writer.write(b"%b: %b\r\n" % (name, value))
    writer.write(b"content-length: %d\r\n\r\n%b" % (len(content), content))
    await writer.drain()
