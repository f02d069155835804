"""Log entries as a person at a terminal sees them."""

from datetime import datetime
from typing import Any

import pytest
import structlog

from windlass.cli.cycle_log import next_steps
from windlass.cli.human_log import HumanRenderer
from windlass.model.config import Config

AT = datetime(2030, 1, 1, 12, 0, 7)
CYCLE = {"event": "finish cycle", "level": "info", "fleet": "gpus", "cycle": 7}


def rendered(renderer: HumanRenderer, **entry: Any) -> str | None:
    try:
        return renderer(None, "info", {"level": "info", "timestamp": "2030-01-01T11:00:07Z", **entry})
    except structlog.DropEvent:
        return None


@pytest.fixture
def renderer() -> HumanRenderer:
    return HumanRenderer(has_colors=False, clock=lambda: AT)


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        pytest.param(
            {"event": "fail worker", "worker": "gpus-0", "code": "STUCK", "reason": "Stuck task 7"},
            "12:00:07  gpus-0 failed: Stuck task 7",
            id="a failed worker",
        ),
        pytest.param(
            {"event": "change worker", "worker": "gpus-0", "change": "active", "reason": "heartbeat 1 s ago"},
            "12:00:07  gpus-0 is active",
            id="an active worker",
        ),
        pytest.param(
            {"event": "change worker", "worker": "gpus-0", "change": "draining", "reason": "idle 31 s"},
            "12:00:07  gpus-0 is draining: idle 31 s",
            id="a draining worker",
        ),
        pytest.param(
            {"event": "change alert", "kind": "fired", "code": "BUDGET", "reason": "over", "fleet": "gpus"},
            "12:00:07  alert BUDGET fired: over",
            id="an alert",
        ),
        pytest.param(
            {"event": "list machines failed", "fleet": "gpus", "error": "no route"},
            "12:00:07  list machines failed: fleet=gpus, error=no route",
            id="an event without a sentence",
        ),
        pytest.param(
            {"event": "fail worker", "worker": "gpus-0"},
            "12:00:07  fail worker: worker=gpus-0",
            id="an event with other fields",
        ),
        pytest.param(
            {"event": "fail attempt", "error": "Traceback (most recent call last):\n  File\nOSError: no disk\nx"},
            "12:00:07  fail attempt: error=OSError: no disk",
            id="a traceback in a field",
        ),
        pytest.param(
            {"event": "sweep failed", "exception": "Traceback\nOSError"},
            "12:00:07  sweep failed\n          Traceback\n          OSError",
            id="a defect",
        ),
        pytest.param(
            {"event": "fail worker", "worker": "\x1b[2J", "reason": "x"},
            "12:00:07  \\x1b[2J failed: x",
            id="control characters",
        ),
        pytest.param(
            {"event": "ignore setting", "level": "warning", "reason": "A has no effect with policy b"},
            "12:00:07  A has no effect with policy b",
            id="an ignored setting",
        ),
        pytest.param(
            {"event": "reloaded configuration", "process": "control"},
            "12:00:07  reloaded configuration: no fleet changed",
            id="a reload without changes",
        ),
        pytest.param(
            {"event": "reloaded configuration", "changed": ["gpus (max_workers)"]},
            "12:00:07  reloaded configuration: changed=gpus (max_workers)",
            id="a reload with changes",
        ),
        pytest.param(
            {"event": "wait as standby", "reason": "another orchestrator leads"},
            "12:00:07  standby: another orchestrator leads",
            id="standby without fleets",
        ),
        pytest.param({"event": "handle request", "path": "/", "status": 200}, None, id="a request"),
        pytest.param(
            {
                "event": "loaded configuration",
                "settings": {
                    "fleets.a.handler": {"value": "app:run", "source": "windlass.toml"},
                    "fleets.a.queues": {"value": "q", "source": "windlass.toml"},
                    "api.port": {"value": 8080, "source": "command line"},
                    "fleets.a.max_workers": {"value": 9, "source": "MAX_ACTIVE_GPUS"},
                    "fleets.a.policy": {"value": "threshold", "source": "MAX_ACTIVE_GPUS"},
                    "runpod_api_key": {"value": "********", "source": "RUNPOD_API_KEY in .env"},
                    "database_url": {"value": "********", "source": "DATABASE_URL"},
                    "worker.lease_s": {"value": 30, "source": "default"},
                },
            },
            "12:00:07  settings: 2 from windlass.toml; 1 from command line; 1 from RUNPOD_API_KEY in .env; "
            "MAX_ACTIVE_GPUS, DATABASE_URL from the environment (`windlass config show` lists all settings)",
            id="the settings",
        ),
        pytest.param(
            {"event": "loaded configuration", "settings": {}},
            "12:00:07  settings: all defaults (`windlass config show` lists all settings)",
            id="no settings",
        ),
    ],
)
def test_entry_is_one_short_line(renderer: HumanRenderer, entry: dict[str, Any], line: str | None) -> None:
    assert rendered(renderer, **entry) == line


def test_failed_request_is_shown(renderer: HumanRenderer) -> None:
    line = rendered(renderer, event="handle request", level="warning", path="/x", status=500)
    assert line == "12:00:07  handle request: path=/x, status=500"


def test_decision_is_shown_when_it_acts_or_changes_its_kind(renderer: HumanRenderer) -> None:
    decisions = [
        "no change: 0 queued",
        "no change: 1 queued",
        "spawn 1: 1 queued",
        "spawn 2: 3 queued",
        "no change: 3 queued",
        "hold: failure rate 5 of 5 in 10 min",
    ]
    shown = [rendered(renderer, **CYCLE, decision=decision) for decision in decisions]
    assert shown == [
        "12:00:07  gpus: no change: 0 queued",
        None,
        "12:00:07  gpus: spawn 1: 1 queued",
        "12:00:07  gpus: spawn 2: 3 queued",
        "12:00:07  gpus: no change: 3 queued",
        "12:00:07  gpus: hold: failure rate 5 of 5 in 10 min",
    ]


def test_warnings_are_colored_on_a_terminal() -> None:
    renderer = HumanRenderer(has_colors=True, clock=lambda: AT)
    assert "\x1b[33mx\x1b[0m" in (rendered(renderer, event="x", level="warning") or "")


def test_start_ends_with_what_to_do_next(renderer: HumanRenderer) -> None:
    config = Config.model_validate({"fleets": {"gpus": {"queues": ["renders"], "handler": "app:x"}}})
    steps = next_steps(config, " --data-dir state")
    assert rendered(renderer, event="announce fleets", fleets="gpus serves renders", next=steps) == (
        "12:00:07  ready: gpus serves renders\n"
        """          enqueue    windlass enqueue renders '{"prompt": "lighthouse"}' --data-dir state\n"""
        "          watch      windlass status --watch --data-dir state\n"
        "          dashboard  add --port 8080 to this command\n"
        "          stop       Ctrl-C; workers finish their tasks first"
    )
    assert next(iter(next_steps(config, "", is_standby=True))) == "standby"
    with_port = Config.model_validate({"fleets": {"gpus": {"handler": "app:x"}}, "api": {"port": 8080}})
    assert "dashboard" not in next_steps(with_port, "")
