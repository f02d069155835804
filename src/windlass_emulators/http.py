"""One request, one answer: what every emulator speaks."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: Mapping[str, str]
    body: bytes


class NoAnswer(Exception):
    """The request arrived and nobody answers it. Whether it had an effect is for the caller to find out.

    Over HTTP the connection stays silent for `held_s`, or until the caller gives up, and is then closed. In virtual
    time it is whatever the caller's client makes of a time-out.
    """

    def __init__(self, held_s: float) -> None:
        super().__init__(f"no answer for {held_s:g} s")
        self.held_s = held_s


class Emulator(Protocol):
    def handle(
        self, method: str, path: str, query: Sequence[tuple[str, str]], headers: Mapping[str, str], body: bytes
    ) -> Response:
        """Answer one request. `path` starts with a slash and carries no query. Raises NoAnswer."""

    def settle(self) -> None:
        """Let everything happen that is due by now. `handle` does so itself; machines should not wait for a request."""

    def next_due(self) -> datetime | None:
        """When something will happen by itself, or None if nothing will."""


def json_response(status: int, body: Json | None, headers: Mapping[str, str] | None = None) -> Response:
    if body is None:
        return Response(status, dict(headers or {}), b"")
    return Response(status, {"Content-Type": "application/json", **(headers or {})}, json.dumps(body).encode())
