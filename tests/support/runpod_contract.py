"""Runpod's published contract, and the emulator behind httpx without a network.

- `Contract`, `CheckedEmulator`: see vendor_contract.
- `client_of(emulator)`: httpx in this process, in virtual time. NoAnswer becomes a ReadTimeout.
"""

import re
from typing import Any
from urllib.parse import parse_qsl

import httpx
from openapi_schema_validator import OAS31Validator

from support import vendor_contract
from support.vendor_contract import CheckedEmulator
from windlass_emulators.http import Emulator, NoAnswer, Response

__all__ = ["CheckedEmulator", "Contract", "InProcessTransport", "client_of"]

_WINDOWS = ("minute", "hour", "day")


class Contract(vendor_contract.Contract):
    spec = "runpod-v2.openapi.json"
    served = "/v2"
    validator = OAS31Validator

    def check_headers(self, response: Response, described: dict[str, Any], what: str) -> None:
        """The rate limit as structured fields, wherever the document has it."""
        promised = described.get("headers", {})
        if "RateLimit" in promised:
            parts = [rf'"{name}";r=\d+;t=\d+' for name in _WINDOWS]
            assert re.fullmatch(", ".join(parts), response.headers.get("RateLimit", "")), what
        if "RateLimit-Policy" in promised:
            parts = [rf'"{name}";q=\d+;w=\d+' for name in _WINDOWS]
            assert re.fullmatch(", ".join(parts), response.headers.get("RateLimit-Policy", "")), what
        if "Retry-After" in promised:
            assert response.headers.get("Retry-After", "").isdecimal(), what


class InProcessTransport(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Sends requests directly to the emulator: no socket, no thread, no waiting."""

    def __init__(self, emulator: Emulator) -> None:
        self._emulator = emulator

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        query = parse_qsl(request.url.query.decode(), keep_blank_values=True)
        try:
            answer = self._emulator.handle(
                request.method, request.url.path, query, dict(request.headers), request.read()
            )
        except NoAnswer as silence:
            raise httpx.ReadTimeout(str(silence), request=request) from silence
        return httpx.Response(answer.status, headers=dict(answer.headers), content=answer.body, request=request)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        return self.handle_request(request)


def client_of(emulator: Emulator) -> httpx.Client:
    return httpx.Client(
        transport=InProcessTransport(emulator),
        base_url="http://runpod.test/v2",
        headers={"Authorization": "Bearer any"},
    )
