"""Requests and responses of an emulator, independent of any server."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from starlette.datastructures import Headers, QueryParams

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    # A stream: after the body, the connection stays open until the client closes it.
    is_held_open: bool = False


def json_response(status: int, body: Json, headers: Mapping[str, str] | None = None) -> Response:
    return Response(status, {"Content-Type": "application/json", **(headers or {})}, json.dumps(body).encode())


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One request to an endpoint, with its body already parsed."""

    path: str
    query: QueryParams
    headers: Headers
    body: Json
    # Parameters in the route's path, such as the id.
    params: Mapping[str, Any]


class VendorApiError(Exception):
    """A request that the vendor refuses. Subclasses render it in the vendor's format."""

    def response(self) -> Response:
        raise NotImplementedError


class NoAnswer(Exception):
    """An injected time-out: the request arrived and gets no response. It may or may not have taken effect.

    Over HTTP the connection stays silent for `held_s`, or until the client disconnects, and is then closed. In virtual
    time the caller's transport turns this exception into its own time-out.
    """

    def __init__(self, held_s: float) -> None:
        super().__init__(f"no answer for {held_s:g} s")
        self.held_s = held_s


class Emulator(Protocol):
    def handle(
        self, method: str, path: str, query: Sequence[tuple[str, str]], headers: Mapping[str, str], body: bytes
    ) -> Response:
        """Answer one request. `path` starts with a slash and has no query string. Raises NoAnswer."""

    def settle(self) -> None:
        """Execute everything that is due. `handle` does it first; the server does it so that machines boot on time."""

    def next_due(self) -> datetime | None:
        """Time of the next scheduled change, or None."""
