"""Hetzner's published contract as a judge, and the emulator behind the vendor's own client without a network.

- `Contract.find()`: the vendor's OpenAPI document, or a skip that says where it is looked for. `find_or_none()`.
- `Judged(emulator, contract)`: an emulator like the one it wraps; every request and answer that passes is checked.
- `client_of(emulator)`: the `hcloud` SDK in this process, in virtual time; what nobody answers is a ReadTimeout.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import hcloud
import pytest
import requests
from openapi_schema_validator import OAS30Validator
from requests.adapters import BaseAdapter

from windlass.emulate.exchange import Emulator, NoAnswer, Response

REPOSITORY = Path(__file__).resolve().parents[1]
SPEC = "hetzner-cloud.openapi.json"
BASE = "/v1"
_FOLDERS = [
    *(Path(folder) for folder in (os.environ.get("WINDLASS_SPECS"),) if folder),
    REPOSITORY.parent / "shared" / "specs",
]


class Contract:
    """What the vendor says about requests and answers."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        paths = document["paths"]
        self._operations = {
            (method.upper(), path): operation
            for path, methods in paths.items()
            for method, operation in methods.items()
            if method in ("get", "post", "put", "delete")
        }
        # Fixed words before placeholders: /servers/actions is no server.
        ordered = sorted(paths, key=lambda path: path.count("{"))
        self._patterns = [(path, re.compile(re.sub(r"\{[^}]+\}", "[^/]+", path))) for path in ordered]
        self._validators: dict[int, OAS30Validator] = {}

    @classmethod
    def find(cls) -> "Contract":
        contract = _contract()
        if contract is None:
            pytest.skip(f"no {SPEC} in {_FOLDERS[-1]}, nor in WINDLASS_SPECS: nothing to judge the emulator by")
        return contract

    @classmethod
    def find_or_none(cls) -> "Contract | None":
        return _contract()

    def check_request(self, method: str, path: str, body: bytes) -> None:
        operation = self._operation(method, path)
        content = self._resolved(operation.get("requestBody", {})).get("content", {})
        if "application/json" in content and body:
            document = _as_documented(method, path, json.loads(body))
            self._check(content["application/json"]["schema"], document, f"request {method} {path}")

    def check_response(self, method: str, path: str, response: Response) -> None:
        responses = self._operation(method, path)["responses"]
        status = str(response.status)
        described = responses.get(status) or responses.get(f"{status[0]}xx")
        assert described is not None, f"{method} {path} may not answer {status}"
        content = self._resolved(described).get("content", {})
        if "application/json" not in content:
            assert not response.body, f"{method} {path} answers {status} with a body"
            return
        assert response.headers.get("Content-Type") == "application/json"
        self._check(content["application/json"]["schema"], json.loads(response.body), f"{status} of {method} {path}")

    def _operation(self, method: str, path: str) -> dict[str, Any]:
        place = path.removeprefix(BASE)
        for template, pattern in self._patterns:
            if pattern.fullmatch(place) and (method, template) in self._operations:
                operation: dict[str, Any] = self._operations[method, template]
                return operation
        raise AssertionError(f"{method} {path} is not in the contract")

    def _check(self, schema: dict[str, Any], value: object, what: str) -> None:
        if id(schema) not in self._validators:
            # References are looked up in the whole document.
            whole = {**schema, "components": self._document.get("components", {})}
            self._validators[id(schema)] = OAS30Validator(whole, format_checker=OAS30Validator.FORMAT_CHECKER)
        errors = [
            f"{error.json_path}: {error.message[:200]}" for error in self._validators[id(schema)].iter_errors(value)
        ]
        assert not errors, f"{what} is not as published: {errors[:5]}"

    def _resolved(self, node: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in node:
            found: Any = self._document
            for word in node["$ref"].removeprefix("#/").split("/"):
                found = found[word.replace("~1", "/").replace("~0", "~")]
            node = found
        return node


def _as_documented(method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Where the document is stricter than the API: Hetzner's own clients name things by number where it wants a string,
    and leave out the assignee's type where there is no assignee."""
    if (method, path) == ("POST", "/v1/primary_ips"):
        return {"assignee_type": "server", **body}
    if (method, path) == ("POST", "/v1/servers"):
        named = {name: str(body[name]) for name in ("image", "server_type", "location", "datacenter") if name in body}
        return {**body, **named, "ssh_keys": [str(key) for key in body.get("ssh_keys") or []]}
    if path.endswith("/actions/rebuild"):
        return {**body, "image": str(body.get("image"))}
    return body


@lru_cache(maxsize=1)
def _contract() -> Contract | None:
    for folder in _FOLDERS:
        if (folder / SPEC).exists():
            return Contract(json.loads((folder / SPEC).read_text()))
    return None


class Judged:
    """Fails the test when a request or an answer is not as published. Refused requests need not be."""

    def __init__(self, emulator: Emulator, contract: Contract) -> None:
        self.emulator = emulator
        self._contract = contract
        self.judged = 0

    def handle(
        self, method: str, path: str, query: Sequence[tuple[str, str]], headers: Mapping[str, str], body: bytes
    ) -> Response:
        response = self.emulator.handle(method, path, query, headers, body)
        if path.startswith(BASE):
            if response.status < 400:
                self._contract.check_request(method, path, body)
            self._contract.check_response(method, path, response)
            self.judged += 1
        return response

    def settle(self) -> None:
        self.emulator.settle()

    def next_due(self) -> datetime | None:
        return self.emulator.next_due()


class InProcess(BaseAdapter):
    """Requests go to the emulator itself: no socket, no thread, no time."""

    def __init__(self, emulator: Emulator) -> None:
        super().__init__()
        self._emulator = emulator

    def send(self, request: requests.PreparedRequest, **_: Any) -> requests.Response:
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
    client = hcloud.Client("any", api_endpoint=f"http://hetzner.test{BASE}", poll_interval=0, timeout=5)
    client._client._session.mount("http://", InProcess(emulator))
    return client
