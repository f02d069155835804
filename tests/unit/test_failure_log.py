"""Log lines of failed requests: one per failure and interval, with the number of requests."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from support.control_planes import InMemoryControlPlane, bearer, open_control_plane
from windlass.model.auth import WORKER_PREFIX, new_token
from windlass.model.errors import DatabaseUnavailable
from windlass.ports import http
from windlass.server.failure_log import FAILURE_LOG_INTERVAL_S, MAX_FAILURES_LOGGED, OTHER_FAILURES, FailureLog

REQUESTS = 300
CHANCE = random.Random(1)  # noqa: S311


class FailureClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def plane(clock: Any) -> AsyncIterator[InMemoryControlPlane]:
    async with open_control_plane(clock) as plane:
        yield plane


async def test_outage_has_one_line_per_interval_for_made_up_tokens(
    plane: InMemoryControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = FailureClock()
    monkeypatch.setattr(plane.app.admission.failures, "_clock", now)
    plane.store.error = DatabaseUnavailable("checking a token: the database cannot be reached.")

    async def send_made_up() -> int:
        headers = bearer(new_token(WORKER_PREFIX, CHANCE))
        return (await plane.client.post(http.HEARTBEAT, json={}, headers=headers)).status_code

    with capture_logs() as logs:
        assert set(await asyncio.gather(*(send_made_up() for _ in range(REQUESTS)))) == {503}
        now.now += FAILURE_LOG_INTERVAL_S
        assert await send_made_up() == 503
    lines = [(line["requests"], line["error"]) for line in logs if line["event"] == "call database failed"]
    assert lines == [(1, str(plane.store.error)), (REQUESTS, str(plane.store.error))]


async def test_traceback_of_a_defect_is_logged_once_per_place_and_interval(
    plane: InMemoryControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = FailureClock()
    monkeypatch.setattr(plane.app.admission.failures, "_clock", now)
    token = await plane.join()

    async def send(path: str) -> None:
        assert (await plane.post(path, token, {"queues": ["a"]})).status_code == 500

    async def fail_elsewhere(*_: Any) -> None:
        raise ZeroDivisionError("another bug")

    plane.store.error = ZeroDivisionError("a bug")
    monkeypatch.setattr(plane.store, "finish_and_claim", fail_elsewhere)
    with capture_logs() as logs:
        for _ in range(20):
            await send(http.CLAIM)
        await send(http.FINISH)
        now.now += FAILURE_LOG_INTERVAL_S
        await send(http.CLAIM)
    defects = [line for line in logs if line["event"] == "handle request failed"]
    assert [(line["path"], line["requests"]) for line in defects] == [
        (http.CLAIM, 1),
        (http.FINISH, 1),
        (http.CLAIM, 20),
    ]
    assert all(line["exc_info"] for line in defects)


def test_failure_that_has_ended_is_reported_with_its_requests() -> None:
    now = FailureClock()
    failures = FailureLog(now)
    with capture_logs() as logs:
        assert [failures.count("a") for _ in range(5)] == [1, 0, 0, 0, 0]
        failures.report()
        assert logs == []  # its interval has not passed
        now.now += FAILURE_LOG_INTERVAL_S
        failures.report()
        assert failures.count("a") == 0
        now.now += FAILURE_LOG_INTERVAL_S
        failures.report()
        now.now += FAILURE_LOG_INTERVAL_S
        failures.report()
    assert [(line["event"], line["failure"], line["requests"]) for line in logs] == [
        ("count failed requests", "a", 4),
        ("count failed requests", "a", 1),
    ]
    assert failures.count("a") == 1


def test_number_of_different_failures_is_bounded() -> None:
    now = FailureClock()
    failures = FailureLog(now)
    lines = sum(failures.count(f"failure {number} {'x' * 10_000}") for number in range(10_000))
    assert lines == MAX_FAILURES_LOGGED + 1
    now.now += FAILURE_LOG_INTERVAL_S
    with capture_logs() as logs:
        failures.report()
        failures.report()
    rest = 10_000 - MAX_FAILURES_LOGGED - 1
    assert [(line["failure"], line["requests"]) for line in logs] == [(OTHER_FAILURES, rest)]
