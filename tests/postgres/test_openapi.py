"""Generated requests, valid and invalid: no request may cause a server error, and every response matches the schema."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import CheckFunction, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from support.api_fixture import ApiFixture, open_api
from windlass.model.auth import Role
from windlass.model.task import new_task
from windlass.model.worker import Registration
from windlass.server.server import listen, serving

REQUESTS_PER_OPERATION = 6
REQUESTS_PER_ROLE = 2
CHECKS: list[CheckFunction] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


class ServerThread:
    """The application on a port, in a thread with its own event loop. Requests come from the test's thread."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))
        self.url = ""
        # By role. None: without a token.
        self.headers: dict[Role | None, dict[str, str]] = {None: {}}
        self.description: dict[str, Any] = {}

    def __enter__(self) -> "ServerThread":
        self._thread.start()
        assert self._started.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        self._loop.close()

    async def _serve(self) -> None:
        listener = listen("127.0.0.1", 0)
        async with open_api(self._dsn, rate_limit=1e6) as api, serving(api.app, listener):
            await self._fill(api)
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            for role in Role:
                self.headers[role] = await api.auth_headers(role)
            self.description = api.app.api.openapi()
            self._started.set()
            await self._stop.wait()
            await api.feed.close()

    async def _fill(self, api: ApiFixture) -> None:
        """Some rows of everything, so that responses are not empty."""
        for number in range(5):
            await api.store.enqueue(new_task("a", {"n": number}, unique_key=f"k{number}"))
        await api.run_cycle()
        await api.store.register(Registration("manual", ("a",)))
        first, second = await api.store.claim("manual", ["a"], 2)
        await api.store.fail("manual", first.task_id, first.token, "ValueError: no", retry=False)
        await api.store.fail("manual", second.task_id, second.token, "ValueError: not yet")
        await api.store.take_samples(await api.store.overview())


@pytest.fixture(scope="module")
def server(embedded_server: Any) -> Iterator[ServerThread]:
    with pytest.MonkeyPatch.context() as patch:
        # The tests send more refused requests per second than one address may.
        patch.setattr("windlass.server.middleware.MAX_REFUSALS_PER_S", 1e6)
        with embedded_server.migrated_database() as dsn, ServerThread(dsn) as server:
            yield server


@pytest.mark.parametrize("mode", list(GenerationMode), ids=["valid requests", "invalid requests"])
def test_no_request_causes_a_server_error(server: ServerThread, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_dict(server.description)
    schema.config.update(base_url=server.url)
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 45
    for operation in operations:
        # The stream never ends; test_http_event_stream.py covers it.
        if not operation.path.endswith("/stream"):
            send_requests(server, operation, mode)


ANY_CALLER = (None, Role.VIEWER, Role.PRODUCER, Role.OPERATOR, Role.ADMIN)


def allowed_roles(method: str, path: str) -> tuple[Role | None, ...]:
    """Empty for the routes of machines, whose tokens no role of users replaces."""
    if path in ("/healthz", "/readyz"):
        return ANY_CALLER
    if path.startswith("/internal/") and path != "/internal/cycle":
        return ()
    if path.startswith(("/api/v1/tokens", "/api/v1/sessions")):
        return (Role.ADMIN,)
    if method.upper() == "GET" and path != "/api/v1/audit":
        readers = (Role.VIEWER, Role.OPERATOR, Role.ADMIN)
        return (*readers, Role.PRODUCER) if path == "/api/v1/tasks/{task_id}" else readers
    if (method.upper(), path) == ("POST", "/api/v1/tasks"):
        return Role.PRODUCER, Role.OPERATOR, Role.ADMIN
    return Role.OPERATOR, Role.ADMIN


@pytest.mark.parametrize("role", [None, Role.VIEWER, Role.PRODUCER, Role.OPERATOR])
def test_each_route_needs_its_role(server: ServerThread, role: Role | None) -> None:
    schema = schemathesis.openapi.from_dict(server.description)
    schema.config.update(base_url=server.url)
    # Otherwise schemathesis would send made-up tokens.
    schema.config.generation.update(with_security_parameters=False)
    refused = 0
    for operation in (result.ok() for result in schema.get_all_operations()):
        is_allowed = role in allowed_roles(operation.method, operation.path)
        if operation.path.endswith("/stream") and is_allowed:
            continue
        for status in send_requests(server, operation, GenerationMode.POSITIVE, role, REQUESTS_PER_ROLE):
            if is_allowed:
                assert status not in (401, 403), operation.label
            else:
                # An address with many refused requests is refused with 429.
                assert status in ((401, 429) if role is None else (403,)), operation.label
            refused += not is_allowed
    assert refused > (5 if role is Role.OPERATOR else 15)


def send_requests(
    server: ServerThread,
    operation: Any,
    mode: GenerationMode,
    role: Role | None = Role.ADMIN,
    count: int = REQUESTS_PER_OPERATION,
) -> list[int]:
    """Send generated requests and return the statuses of the responses."""
    statuses = []

    @settings(
        max_examples=count,
        phases=[Phase.generate],
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(mode))
    def call(case: Any) -> None:
        response = case.call_and_validate(headers=server.headers[role], checks=CHECKS, timeout=30)
        statuses.append(response.status_code)

    # There are no invalid requests to an operation without input.
    with contextlib.suppress(Unsatisfiable):
        call()
    return statuses
