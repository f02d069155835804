"""Alert rules: each condition and its alert, and no other alerts."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest

from windlass.model.alert import ADVICE, Alert, AlertInputs, FleetAlertInputs, RejectedRows, Severity, advice_on
from windlass.model.cycle import Fleet
from windlass.model.snapshot import Hold
from windlass.policy import stages
from windlass.policy.alerts import evaluate_alerts

NOW = datetime(2030, 1, 1, tzinfo=UTC)
GRACE_S = 60.0
FLEET = Fleet("gpus", "local", ("a",), 0, 4, False, 0, None, (), NOW, NOW, 10.0, True)


def inputs(
    fleet: Fleet = FLEET,
    *,
    leaderless_s: float | None = None,
    dead: dict[str, int] | None = None,
    already: tuple[str, ...] = (),
    of_all: tuple[str, ...] = (),
    is_settling: bool = False,
    rejected: dict[str, int] | None = None,
    **seen: Any,
) -> AlertInputs:
    """`already`: open alerts of the fleet. `of_all`: open alerts without a fleet."""
    raised = [
        Alert(whose, key, key.partition(" ")[0], Severity.WARNING, "as it was")
        for whose, keys in ((fleet.name, already), (None, of_all))
        for key in keys
    ]
    since = NOW - timedelta(seconds=5) if is_settling else None
    fleets = (FleetAlertInputs(fleet, **{"raised": {}, **seen}),)
    rows = tuple(RejectedRows(name, f"public.{name}", count) for name, count in (rejected or {}).items())
    return AlertInputs(NOW, leaderless_s, fleets, dead or {}, rows, tuple(raised), since)


LONG_AGO = NOW - timedelta(hours=1)


def codes(seen: AlertInputs, allowed: int = 0) -> list[tuple[str, str]]:
    return [(alert.key, alert.severity.value) for alert in evaluate_alerts(seen, allowed, GRACE_S)]


CASES: dict[str, tuple[AlertInputs, list[tuple[str, str]]]] = {
    "no alert": (inputs(), []),
    "a slot is failed": (inputs(raised={"SLOT_FAILED 3": "slot 3"}), [("SLOT_FAILED 3", "critical")]),
    "restarts": (inputs(raised={"SLOT_RESTARTS 3": "x"}), [("SLOT_RESTARTS 3", "warning")]),
    "all workers crashed": (inputs(raised={"ALL_CRASHED": "x"}), [("ALL_CRASHED", "critical")]),
    "near the limit": (inputs(raised={"NEAR_MAX": "41 of 50"}), [("NEAR_MAX", "warning")]),
    "a budget is spent": (inputs(raised={"BUDGET today": "x"}), [("BUDGET today", "critical")]),
    "three of a code are separate": (
        inputs(raised={f"VRAM_STALE w{number}": "x" for number in range(3)}),
        [("VRAM_STALE w0", "warning"), ("VRAM_STALE w1", "warning"), ("VRAM_STALE w2", "warning")],
    ),
    "a thousand of a code are combined": (
        inputs(raised={f"VRAM_STALE w{number}": "x" for number in range(1_000)} | {"NEAR_MAX": "x"}),
        [("NEAR_MAX", "warning"), ("VRAM_STALE", "warning")],
    ),
    "two provider errors": (inputs(provider_errors={"create": 2, "list": 2}), []),
    "three provider errors in a row": (
        inputs(provider_errors={"create": 3, "list": 0}), [("PROVIDER_ERRORS create", "critical")],
    ),
    "a worker never became ready": (inputs(provisioning_timeouts=("w1",)), [("PROVISIONING_TIMEOUT", "warning")]),
    "a hold": (inputs(replace(FLEET, hold=Hold("NO_CAPACITY", "none", NOW))), [("NO_CAPACITY", "warning")]),
    "a total hold": (
        inputs(replace(FLEET, hold=Hold("WAS_AWAY", "x", NOW, is_total=True))), [("WAS_AWAY", "critical")],
    ),
    "a hold that the plan also raised": (
        inputs(replace(FLEET, hold=Hold("BUDGET", "x", NOW)), raised={"BUDGET today": "x"}),
        [("BUDGET today", "critical")],
    ),
    "dead letters": (inputs(dead={"a": 1, "b": 0}), [("DEAD_LETTERS a", "warning")]),
    "no leader": (inputs(replace(FLEET, is_led=False), leaderless_s=GRACE_S), [("NO_LEADER", "critical")]),
    "a restart": (inputs(replace(FLEET, is_led=False), leaderless_s=GRACE_S - 1), []),
    "a leader that does not run this fleet": (
        inputs(replace(FLEET, planned_at=LONG_AGO)), [("UNATTENDED", "warning")],
    ),
    "alerts of an old plan persist": (
        inputs(replace(FLEET, planned_at=LONG_AGO, hold=Hold("NO_CAPACITY", "none", NOW)), raised={"NEAR_MAX": "x"}),
        [("NEAR_MAX", "warning"), ("NO_CAPACITY", "warning"), ("UNATTENDED", "warning")],
    ),
    "a fleet that was shut down": (
        inputs(
            replace(FLEET, planned_at=LONG_AGO, next_plan_in_s=None), raised={"NEAR_MAX": "x"}, leaderless_s=GRACE_S,
        ),
        [],
    ),
    "first evaluation of a process": (
        inputs(
            replace(FLEET, planned_at=LONG_AGO), raised={"BUDGET today": "x"}, already=("NEAR_MAX",), is_settling=True,
        ),
        [("NEAR_MAX", "warning")],
    ),
    "first evaluation of a fleet that was shut down": (
        inputs(
            replace(FLEET, planned_at=LONG_AGO, next_plan_in_s=None), already=("SLOT_FAILED 3",), is_settling=True,
        ),
        [("SLOT_FAILED 3", "warning")],
    ),
    "first evaluation after the first cycle": (
        inputs(raised={"BUDGET today": "x"}, already=("NEAR_MAX",), is_settling=True), [("BUDGET today", "critical")],
    ),
    "first evaluation without a leader": (inputs(leaderless_s=GRACE_S, is_settling=True), []),
    "first evaluation without a leader, alert open": (
        inputs(leaderless_s=GRACE_S, is_settling=True, of_all=("NO_LEADER",)), [("NO_LEADER", "critical")],
    ),
    "a fourth of a code": (
        inputs(
            raised={f"VRAM_STALE w{number}": "x" for number in range(4)}, already=("VRAM_STALE w1", "VRAM_STALE w9"),
        ),
        [("VRAM_STALE", "warning"), ("VRAM_STALE w1", "warning")],
    ),
    "two of many are left": (
        inputs(raised={"VRAM_STALE w1": "x", "VRAM_STALE w2": "x"}, already=("VRAM_STALE", "VRAM_STALE w1")),
        [("VRAM_STALE", "warning"), ("VRAM_STALE w1", "warning")],
    ),
    "combined alert of one": (inputs(raised={"NEAR_MAX": "x"}, already=("NEAR_MAX",)), [("NEAR_MAX", "warning")]),
    "dead letters of many queues": (
        inputs(dead={f"q{number}": 1 for number in range(1_000)}, of_all=("DEAD_LETTERS q7",)),
        [("DEAD_LETTERS", "warning"), ("DEAD_LETTERS q7", "warning")],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("seen", "expected"), CASES.values(), ids=CASES.keys())
def test_alert_rules(seen: AlertInputs, expected: list[tuple[str, str]]) -> None:
    assert codes(seen) == expected


def test_combined_alert_names_first_subjects_and_count() -> None:
    raised = {f"SLOT_FAILED {number}": f"slot {number} is failed" for number in range(12)}
    (alert,) = evaluate_alerts(inputs(raised=raised), 0, GRACE_S)
    assert alert.reason == "12 at once (0, 1, 2, ...): slot 0 is failed"


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        ({"SLOT_FAILED 10": "x", "SLOT_FAILED 2": "y"}, "2 at once (2, 10): y"),
        ({"SLOT_FAILED 2": "y"}, "1 left (2): y"),
        ({"SLOT_FAILED": "y"}, "y"),
    ],
)
def test_combined_alert_names_what_is_left(raised: dict[str, str], reason: str) -> None:
    (alert,) = evaluate_alerts(inputs(raised=raised, already=("SLOT_FAILED",)), 0, GRACE_S)
    assert (alert.key, alert.reason) == ("SLOT_FAILED", reason)


def test_alert_of_rejected_rows_names_count_and_table() -> None:
    (alert,) = evaluate_alerts(inputs(rejected={"jobs": 3}), 0, GRACE_S)
    assert (alert.fleet, alert.key, alert.severity.value) == (None, "ROW_REJECTED jobs", "warning")
    assert alert.reason == "3 rows of the adopted table public.jobs cannot be brought in line with the tasks"


def test_allowed_failed_tasks_raise_no_alert() -> None:
    assert codes(inputs(dead={"a": 5}), allowed=5) == []
    assert codes(inputs(dead={"a": 6}), allowed=5) == [("DEAD_LETTERS a", "warning")]


def test_every_alert_code_of_a_plan_has_advice() -> None:
    raised = {
        code for module in iter_modules(stages.__path__, f"{stages.__name__}.") for code in _codes_of(module.name)
    }
    assert len(raised) > 15
    assert raised - ADVICE.keys() == set()


def _codes_of(name: str) -> Iterator[str]:
    """Codes of all alerts and holds in a module, given as literals or module constants."""
    module = import_module(name)
    for call in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in ("alert", "hold"):
            match call.args[0]:
                case ast.Constant(value=str(code)):
                    yield code
                case ast.Name(id=constant) if constant.isupper():
                    yield getattr(module, constant)


def test_advice_has_the_name_of_the_fleet_in_its_commands() -> None:
    advice = advice_on("FAILURE_RATE", "gpus")
    assert advice == "find the cause with `windlass explain gpus`, fix it, then run `windlass restart gpus`"
    assert advice_on("FAILURE_RATE", None) == ADVICE["FAILURE_RATE"]
    assert advice_on("UNKNOWN", "gpus") is None


def test_every_advice_code_is_in_runbooks() -> None:
    text = (Path(__file__).parents[2] / "docs" / "runbooks.md").read_text()
    assert [code for code in ADVICE if f"`{code}`" not in text] == []
