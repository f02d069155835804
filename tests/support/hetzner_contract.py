"""Hetzner's published contract, and the emulator behind the vendor's own client without a network.

- `Contract`, `CheckedEmulator`: see vendor_contract.
- `client_of(emulator)`: the `hcloud` SDK in this process, in virtual time. NoAnswer becomes a ReadTimeout.
"""

from typing import Any
from urllib.parse import parse_qsl, urlsplit

import hcloud
import requests
from requests.adapters import BaseAdapter

from support import vendor_contract
from support.vendor_contract import CheckedEmulator
from windlass_emulators.http import Emulator, NoAnswer

__all__ = ["CheckedEmulator", "Contract", "InProcessTransport", "client_of"]

BASE = "/v1"


class Contract(vendor_contract.Contract):
    spec = "hetzner-cloud.openapi.json"
    base = served = BASE
    unpublished = frozenset(
        {
            *(("GET", "/v1/actions", name) for name in ("page", "per_page", "sort", "status")),
            *(("GET", f"/v1/{kind}", "sort") for kind in ("server_types", "locations")),
        }
    )

    def __init__(self, document: dict[str, Any]) -> None:
        super().__init__(_without_datacenters(document))

    def as_documented(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Hetzner's own clients send ids as numbers where the document requires strings."""
        if (method, path) == ("POST", "/v1/servers"):
            named: dict[str, Any] = {
                name: str(body[name]) for name in ("image", "server_type", "location") if name in body
            }
            return {**body, **named, "ssh_keys": [str(key) for key in body.get("ssh_keys") or []]}
        return body


def _without_datacenters(document: dict[str, Any]) -> dict[str, Any]:
    """The document is older than July 2026, when the vendor removed `datacenter` from servers and Primary IPs."""

    def visit(node: Any) -> Any:
        if isinstance(node, list):
            return [visit(each) for each in node]
        if not isinstance(node, dict):
            return node
        seen = {name: visit(value) for name, value in node.items()}
        properties = seen.get("properties")
        if isinstance(properties, dict) and "datacenter" in properties and isinstance(seen.get("required"), list):
            seen["properties"] = {name: value for name, value in properties.items() if name != "datacenter"}
            seen["required"] = [name for name in seen["required"] if name != "datacenter"]
        return seen

    found: dict[str, Any] = visit(document)
    return found


class InProcessTransport(BaseAdapter):
    """Sends requests directly to the emulator: no socket, no thread, no waiting."""

    def __init__(self, emulator: Emulator) -> None:
        super().__init__()
        self._emulator = emulator

    def send(self, request: requests.PreparedRequest, *_: Any, **__: Any) -> requests.Response:
        parts = urlsplit(request.url or "")
        body = request.body or b""
        try:
            answer = self._emulator.handle(
                request.method or "GET",
                str(parts.path),
                parse_qsl(str(parts.query), keep_blank_values=True),
                dict(request.headers),
                body.encode() if isinstance(body, str) else body,
            )
        except NoAnswer as silence:
            raise requests.exceptions.ReadTimeout(str(silence), request=request) from silence
        response = requests.Response()
        response.status_code = answer.status
        response.headers.update(answer.headers)
        response._content = answer.body
        response.url = request.url or ""
        response.request = request
        return response

    def close(self) -> None: ...


def client_of(emulator: Emulator) -> hcloud.Client:
    client = hcloud.Client("any", api_endpoint=f"http://hetzner.test{BASE}", poll_interval=0, timeout=60)
    client._client._session.mount("http://", InProcessTransport(emulator))
    return client
