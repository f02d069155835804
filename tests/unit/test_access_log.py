"""The access log: refused requests are counted, failed ones limited, long paths cut."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from windlass.server.access_log import LINES_WINDOW_S, MAX_LINES, MAX_PATH_CHARACTERS, AccessLog


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def scope(path: str = "/healthzz", method: str = "GET") -> dict[str, Any]:
    return {"method": method, "path": path, "client": ("192.0.2.7", 1)}


def test_refused_requests_are_counted_with_one_example_per_status() -> None:
    refused: list[int] = []
    clock = Clock()
    access_log = AccessLog(refused.append, clock)
    with capture_logs() as lines:
        for status in [404] * 500 + [401] * 20 + [429]:
            access_log.record(scope(), status, None, 0.001)
        clock.now += LINES_WINDOW_S
        access_log.record(scope(), 403, "token ann", 0.001)
    assert len(refused) == 522
    assert [(line["event"], line.get("status")) for line in lines] == [
        ("handle request", 404),
        ("handle request", 401),
        ("handle request", 429),
        ("count refused requests", None),
        ("handle request", 403),
    ]
    assert (lines[3]["requests"], lines[3]["by_status"]) == (521, {"401": 20, "404": 500, "429": 1})


def test_failed_requests_are_logged_up_to_a_limit() -> None:
    clock = Clock()
    access_log = AccessLog(clock=clock)
    with capture_logs() as lines:
        for _ in range(MAX_LINES + 5):
            access_log.record(scope(), 503, None, 0.001)
        clock.now += LINES_WINDOW_S
        access_log.record(scope(), 503, None, 0.001)
    assert [line["event"] for line in lines] == [
        *["handle request"] * MAX_LINES,
        "drop log lines",
        "handle request",
    ]
    assert lines[MAX_LINES]["lines"] == 5


@pytest.mark.parametrize(("path", "method"), [("/logout", "POST"), ("/login", "GET")])
def test_m2_open_requests_that_succeed_are_logged_up_to_a_limit(path: str, method: str) -> None:
    clock = Clock()
    access_log = AccessLog(clock=clock)
    with capture_logs() as lines:
        for _ in range(MAX_LINES + 400):
            access_log.record(scope(path, method), 303, None, 0.001)
        access_log.record(scope(path, method), 303, "session 1 of ann", 0.001)
        clock.now += LINES_WINDOW_S
        access_log.record(scope(path, method), 303, None, 0.001)
    events = ["handle request"] * (MAX_LINES + 1)
    assert [line["event"] for line in lines] == [*events, "drop log lines", "handle request"]
    assert lines[len(events)]["lines"] == 400


def test_long_paths_and_methods_are_cut() -> None:
    with capture_logs() as lines:
        AccessLog().record(scope("/" + "a" * 30_000, "B" * 1_000), 404, None, 0.0)
    assert len(lines[0]["path"]) == MAX_PATH_CHARACTERS + len("...")
    assert len(lines[0]["method"]) == MAX_PATH_CHARACTERS


def test_reads_and_worker_calls_that_succeed_are_not_logged() -> None:
    with capture_logs() as lines:
        AccessLog().record(scope("/healthz"), 200, None, 0.0)
        AccessLog().record(scope("/internal/worker/claim", "POST"), 200, "worker w1", 0.0)
        AccessLog().record(scope("/api/v1/tasks", "POST"), 201, "token ann", 0.0)
    assert [line["path"] for line in lines] == ["/api/v1/tasks"]
