"""A vendor's published OpenAPI document as the reference for an emulator.

- `Contract.find()` returns the document, or skips the test and reports where it searched. `find_or_none()` never skips.
- `CheckedEmulator(emulator, contract)` wraps an emulator and checks every request and response that passes through.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
from openapi_schema_validator import OAS30Validator, OAS31Validator

from windlass_emulators.http import Emulator, Response

REPOSITORY = Path(__file__).resolve().parents[2]
_FOLDERS = [
    *(Path(folder) for folder in (os.environ.get("WINDLASS_SPECS"),) if folder),
    REPOSITORY.parent / "shared" / "specs",
]


class Contract:
    """The published rules for requests and responses."""

    # The file name of the document, and the prefix of its paths in requests.
    spec: ClassVar[str]
    base: ClassVar[str] = ""
    served: ClassVar[str]
    _found: ClassVar[dict[str, "Contract"]] = {}
    # Parameters that the vendor's own clients send although they are not published: (method, path, parameter).
    unpublished: ClassVar[frozenset[tuple[str, str, str]]] = frozenset()
    validator: ClassVar[type[OAS30Validator] | type[OAS31Validator]] = OAS30Validator

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        paths = document["paths"]
        self._operations = {
            (method.upper(), path): operation
            for path, methods in paths.items()
            for method, operation in methods.items()
            if method in ("get", "post", "put", "patch", "delete")
        }
        # Paths without placeholders first: /servers/actions is not a server.
        ordered = sorted(paths, key=lambda path: path.count("{"))
        self._patterns = [(path, re.compile(re.sub(r"\{[^}]+\}", "[^/]+", path))) for path in ordered]
        self._validators: dict[int, Any] = {}

    @classmethod
    def find(cls) -> Self:
        contract = cls.find_or_none()
        if contract is None:
            pytest.skip(f"no {cls.spec} in {_FOLDERS[-1]}, nor in WINDLASS_SPECS: cannot check the emulator")
        return contract

    @classmethod
    def find_or_none(cls) -> Self | None:
        """Shared by all tests, because compiling the validators is slow."""
        document = _document(cls.spec)
        if document is None:
            return None
        if cls.spec not in cls._found:
            cls._found[cls.spec] = cls(document)
        found = cls._found[cls.spec]
        assert isinstance(found, cls)
        return found

    def check_request(self, method: str, path: str, query: Sequence[tuple[str, str]], body: bytes) -> None:
        operation = self._operation(method, path)
        asked = [(name, value) for name, value in query if (method, path, name) not in self.unpublished]
        self._check_query(operation, asked, f"request {method} {path}")
        content = self._resolved(operation.get("requestBody", {})).get("content", {})
        if "application/json" in content and body:
            document = self.as_documented(method, path, json.loads(body))
            self._check(content["application/json"]["schema"], document, f"request {method} {path}")

    def _check_query(self, operation: dict[str, Any], query: Sequence[tuple[str, str]], what: str) -> None:
        described = [self._resolved(parameter) for parameter in operation.get("parameters", ())]
        published = {each["name"]: each for each in described if each["in"] == "query"}
        for name in dict(query):
            assert name in published, f"{what} has the parameter {name}, which is not published"
            schema, values = self._resolved(published[name]["schema"]), [value for key, value in query if key == name]
            if schema.get("type") != "array":
                assert len(values) == 1, f"{what} has the parameter {name} {len(values)} times"
                self._check(schema, _as_typed(schema, values[0]), f"{name} of {what}")
                continue
            if published[name].get("explode") is False:
                values = [part for value in values for part in value.split(",")]
            items = self._resolved(schema["items"])
            self._check(schema, [_as_typed(items, value) for value in values], f"{name} of {what}")
        missing = {each["name"] for each in described if each["in"] == "query" and each.get("required")} - {
            *dict(query)
        }
        assert not missing, f"{what} lacks {sorted(missing)}"

    def check_response(self, method: str, path: str, response: Response) -> None:
        responses = self._operation(method, path)["responses"]
        status = str(response.status)
        described = responses.get(status) or responses.get(f"{status[0]}xx") or responses.get("default")
        assert described is not None, f"{method} {path} may not answer {status}"
        described = self._resolved(described)
        content = described.get("content", {})
        if not content:
            assert not response.body, f"{method} {path} answers {status} with a body"
            return
        (kind,) = content
        assert response.headers.get("Content-Type") == kind, f"{status} of {method} {path} is not {kind}"
        value = json.loads(response.body) if kind.endswith("json") else response.body.decode()
        self._check(content[kind]["schema"], value, f"{status} of {method} {path}")
        self.check_headers(response, described, f"{status} of {method} {path}")

    def as_documented(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The request body in the form that the document requires, where it is stricter than the API."""
        return body

    def check_headers(self, response: Response, described: dict[str, Any], what: str) -> None:
        """Vendors with published response headers override this."""

    def _operation(self, method: str, path: str) -> dict[str, Any]:
        place = path.removeprefix(self.base)
        for template, pattern in self._patterns:
            if pattern.fullmatch(place) and (method, template) in self._operations:
                operation: dict[str, Any] = self._operations[method, template]
                return operation
        raise AssertionError(f"{method} {path} is not in the contract")

    def _check(self, schema: dict[str, Any], value: object, what: str) -> None:
        if id(schema) not in self._validators:
            # Resolve references in the whole document.
            whole = {**schema, "components": self._document.get("components", {})}
            self._validators[id(schema)] = self.validator(whole, format_checker=self.validator.FORMAT_CHECKER)
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


def _as_typed(schema: dict[str, Any], value: str) -> object:
    """The typed value of a query parameter. A value of the wrong type stays a string and fails the check."""
    match schema.get("type"):
        case "integer" if re.fullmatch(r"-?\d+", value):
            return int(value)
        case "boolean" if value in ("true", "false"):
            return value == "true"
        case _:
            return value


@lru_cache(maxsize=4)
def _document(spec: str) -> dict[str, Any] | None:
    for folder in _FOLDERS:
        if (folder / spec).exists():
            document: dict[str, Any] = json.loads((folder / spec).read_text())
            return document
    return None


class CheckedEmulator:
    """Fails the test when a request or a response is not as published. Refused requests are not checked."""

    def __init__(self, emulator: Emulator, contract: Contract) -> None:
        self.emulator = emulator
        self._contract = contract
        self.checked = 0

    def handle(
        self, method: str, path: str, query: Sequence[tuple[str, str]], headers: Mapping[str, str], body: bytes
    ) -> Response:
        response = self.emulator.handle(method, path, query, headers, body)
        if path.startswith(self._contract.served):
            if response.status < 400:
                self._contract.check_request(method, path, query, body)
            self._contract.check_response(method, path, response)
            self.checked += 1
        return response

    def settle(self) -> None:
        self.emulator.settle()

    def next_due(self) -> datetime | None:
        return self.emulator.next_due()


class RecordingEmulator(CheckedEmulator):
    """Keeps the violations, because the HTTP server would turn the failed assertion into a response."""

    def __init__(self, emulator: Emulator, contract: Contract) -> None:
        super().__init__(emulator, contract)
        self.violations: list[str] = []

    def handle(
        self, method: str, path: str, query: Sequence[tuple[str, str]], headers: Mapping[str, str], body: bytes
    ) -> Response:
        try:
            return super().handle(method, path, query, headers, body)
        except AssertionError as error:
            self.violations.append(str(error))
            raise
