"""Requests of every kind that the OpenAPI description allows, and many it does not: none may break the server, and
every answer must be as the description says."""

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

from support.api_fixture import Bed, bed_of
from windlass.model.auth import Role
from windlass.model.task import new_task
from windlass.model.worker import Registration
from windlass.server.server import listen, serving

EXAMPLES_OF_EACH = 6
EXAMPLES_OF_WHO_MAY = 2
CHECKS: list[CheckFunction] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


class Plane:
    """The application on a port, in a loop of its own: the requests come from this thread."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))
        self.url = ""
        # Of somebody with each role, and of somebody without a token.
        self.headers: dict[Role | None, dict[str, str]] = {None: {}}
        self.description: dict[str, Any] = {}

    def __enter__(self) -> "Plane":
        self._thread.start()
        assert self._started.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(60)
        self._loop.close()

    async def _serve(self) -> None:
        listener = listen("127.0.0.1", 0)
        async with bed_of(self._dsn, rate_limit=1e6) as bed, serving(bed.app, listener):
            await self._fill(bed)
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            for role in Role:
                self.headers[role] = await bed.token(role)
            self.description = bed.app.openapi()
            self._started.set()
            await self._ending.wait()
            await bed.live.close()

    async def _fill(self, bed: Bed) -> None:
        """Something of everything, so that answers have something to say."""
        for number in range(5):
            await bed.store.enqueue(new_task("a", {"n": number}, unique_key=f"k{number}"))
        await bed.run_cycle()
        await bed.store.register(Registration("hand", ("a",)))
        first, second = await bed.store.claim("hand", ["a"], 2)
        await bed.store.fail("hand", first.task_id, first.token, "ValueError: no", retry=False)
        await bed.store.fail("hand", second.task_id, second.token, "ValueError: not yet")
        await bed.store.take_samples(await bed.store.overview())


@pytest.fixture(scope="module")
def plane(embedded_server: Any) -> Iterator[Plane]:
    with embedded_server.migrated_database() as dsn, Plane(dsn) as plane:
        yield plane


@pytest.mark.parametrize("mode", list(GenerationMode), ids=["as it is described", "as it is not"])
def test_nothing_that_is_asked_breaks_it(plane: Plane, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_dict(plane.description)
    schema.config.update(base_url=plane.url)
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 45
    for operation in operations:
        # It goes on until the listener leaves; tests/postgres/test_people.py listens.
        if not operation.path.endswith("/stream"):
            ask(plane, operation, mode)


RANKS = [None, Role.VIEWER, Role.PRODUCER, Role.OPERATOR]


def needed(method: str, path: str) -> Role | None:
    """Who may ask this. Whatever machines ask needs their own tokens: no role of people is enough."""
    if path in ("/healthz", "/readyz"):
        return None
    if path.startswith("/internal/") and path != "/internal/cycle":
        return Role.WORKER
    if method.upper() == "GET":
        return Role.VIEWER
    return Role.PRODUCER if (method.upper(), path) == ("POST", "/api/v1/tasks") else Role.OPERATOR


@pytest.mark.parametrize("role", [None, Role.VIEWER, Role.PRODUCER])
def test_whoever_may_not_is_told_so_and_whoever_may_is_not(plane: Plane, role: Role | None) -> None:
    schema = schemathesis.openapi.from_dict(plane.description)
    schema.config.update(base_url=plane.url)
    # Whoever has no token sends none: what wrong ones are told is tried elsewhere.
    schema.config.generation.update(with_security_parameters=False)
    refused = 0
    for operation in (result.ok() for result in schema.get_all_operations()):
        least = needed(operation.method, operation.path)
        may = least in RANKS and RANKS.index(role) >= RANKS.index(least)
        if operation.path.endswith("/stream") and may:
            continue
        for status in ask(plane, operation, GenerationMode.POSITIVE, role, EXAMPLES_OF_WHO_MAY):
            assert (status not in (401, 403)) if may else status == (401 if role is None else 403), operation.label
            refused += not may
    assert refused > 15


def ask(
    plane: Plane,
    operation: Any,
    mode: GenerationMode,
    role: Role | None = Role.OPERATOR,
    examples: int = EXAMPLES_OF_EACH,
) -> list[int]:
    """The statuses of the answers."""
    statuses = []

    @settings(
        max_examples=examples,
        phases=[Phase.generate],
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(mode))
    def call(case: Any) -> None:
        answer = case.call_and_validate(headers=plane.headers[role], checks=CHECKS, timeout=30)
        statuses.append(answer.status_code)

    # What takes no input cannot be asked wrongly.
    with contextlib.suppress(Unsatisfiable):
        call()
    return statuses
