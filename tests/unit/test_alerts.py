"""What is the matter, given what is seen: each cause, and that nothing else is told."""

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

from windlass.model.alert import ADVICE, Alert, AlertInputs, FleetAlertInputs, Severity
from windlass.model.cycle import Fleet
from windlass.model.snapshot import Hold
from windlass.policy import stages
from windlass.policy.alerts import evaluate_alerts

NOW = datetime(2030, 1, 1, tzinfo=UTC)
GRACE_S = 60.0
FLEET = Fleet("gpus", "local", ("a",), 0, 4, False, 0, None, (), NOW, NOW, 10.0, True)


def watched(
    fleet: Fleet = FLEET,
    *,
    leaderless_s: float | None = None,
    dead: dict[str, int] | None = None,
    already: tuple[str, ...] = (),
    of_all: tuple[str, ...] = (),
    is_settling: bool = False,
    **seen: Any,
) -> AlertInputs:
    """`already`: what was told of the fleet; `of_all`: of all of them."""
    told = [
        Alert(whose, key, key.partition(" ")[0], Severity.WARNING, "as it was")
        for whose, keys in ((fleet.name, already), (None, of_all))
        for key in keys
    ]
    since = NOW - timedelta(seconds=5) if is_settling else None
    fleets = (FleetAlertInputs(fleet, **{"raised": {}, **seen}),)
    return AlertInputs(NOW, leaderless_s, fleets, dead or {}, tuple(told), since)


LONG_AGO = NOW - timedelta(hours=1)


def codes(seen: AlertInputs, allowed: int = 0) -> list[tuple[str, str]]:
    return [(problem.key, problem.severity.value) for problem in evaluate_alerts(seen, allowed, GRACE_S)]


CASES: dict[str, tuple[AlertInputs, list[tuple[str, str]]]] = {
    "all is well": (watched(), []),
    "a slot is failed": (watched(raised={"SLOT_FAILED 3": "slot 3"}), [("SLOT_FAILED 3", "critical")]),
    "restarts": (watched(raised={"SLOT_RESTARTS 3": "x"}), [("SLOT_RESTARTS 3", "warning")]),
    "all workers crashed": (watched(raised={"ALL_CRASHED": "x"}), [("ALL_CRASHED", "critical")]),
    "near the limit": (watched(raised={"NEAR_MAX": "41 of 50"}), [("NEAR_MAX", "warning")]),
    "a budget is spent": (watched(raised={"BUDGET today": "x"}), [("BUDGET today", "critical")]),
    "three of a kind are told apart": (
        watched(raised={f"VRAM_STALE w{number}": "x" for number in range(3)}),
        [("VRAM_STALE w0", "warning"), ("VRAM_STALE w1", "warning"), ("VRAM_STALE w2", "warning")],
    ),
    "a thousand of a kind are one": (
        watched(raised={f"VRAM_STALE w{number}": "x" for number in range(1_000)} | {"NEAR_MAX": "x"}),
        [("NEAR_MAX", "warning"), ("VRAM_STALE", "warning")],
    ),
    "two provider errors": (watched(provider_errors={"create": 2, "list": 2}), []),
    "three provider errors in a row": (
        watched(provider_errors={"create": 3, "list": 0}), [("PROVIDER_ERRORS create", "critical")],
    ),
    "a worker never came to work": (watched(provisioning_timeouts=("w1",)), [("PROVISIONING_TIMEOUT", "warning")]),
    "a hold": (watched(replace(FLEET, hold=Hold("NO_CAPACITY", "none", NOW))), [("NO_CAPACITY", "warning")]),
    "a total hold": (
        watched(replace(FLEET, hold=Hold("WAS_AWAY", "x", NOW, is_total=True))), [("WAS_AWAY", "critical")],
    ),
    "a hold that the plan tells anyway": (
        watched(replace(FLEET, hold=Hold("BUDGET", "x", NOW)), raised={"BUDGET today": "x"}),
        [("BUDGET today", "critical")],
    ),
    "dead letters": (watched(dead={"a": 1, "b": 0}), [("DEAD_LETTERS a", "warning")]),
    "nobody leads": (watched(replace(FLEET, is_led=False), leaderless_s=GRACE_S), [("NO_LEADER", "critical")]),
    "a restart": (watched(replace(FLEET, is_led=False), leaderless_s=GRACE_S - 1), []),
    "one leads and this fleet is not run": (
        watched(replace(FLEET, planned_at=LONG_AGO)), [("UNATTENDED", "warning")],
    ),
    "what an old plan told is the last that is known": (
        watched(replace(FLEET, planned_at=LONG_AGO, hold=Hold("NO_CAPACITY", "none", NOW)), raised={"NEAR_MAX": "x"}),
        [("NEAR_MAX", "warning"), ("NO_CAPACITY", "warning"), ("UNATTENDED", "warning")],
    ),
    "a fleet that was wound down": (
        watched(
            replace(FLEET, planned_at=LONG_AGO, next_plan_in_s=None), raised={"NEAR_MAX": "x"}, leaderless_s=GRACE_S,
        ),
        [],
    ),
    "the first look of a process": (
        watched(
            replace(FLEET, planned_at=LONG_AGO), raised={"BUDGET today": "x"}, already=("NEAR_MAX",), is_settling=True,
        ),
        [("NEAR_MAX", "warning")],
    ),
    "its first look at a fleet that was wound down before": (
        watched(
            replace(FLEET, planned_at=LONG_AGO, next_plan_in_s=None), already=("SLOT_FAILED 3",), is_settling=True,
        ),
        [("SLOT_FAILED 3", "warning")],
    ),
    "its first look after the first cycle": (
        watched(raised={"BUDGET today": "x"}, already=("NEAR_MAX",), is_settling=True), [("BUDGET today", "critical")],
    ),
    "its first look while nobody leads": (watched(leaderless_s=GRACE_S, is_settling=True), []),
    "its first look while nobody leads, as was told": (
        watched(leaderless_s=GRACE_S, is_settling=True, of_all=("NO_LEADER",)), [("NO_LEADER", "critical")],
    ),
    "a fourth of a kind": (
        watched(
            raised={f"VRAM_STALE w{number}": "x" for number in range(4)}, already=("VRAM_STALE w1", "VRAM_STALE w9"),
        ),
        [("VRAM_STALE", "warning"), ("VRAM_STALE w1", "warning")],
    ),
    "two of many are left": (
        watched(raised={"VRAM_STALE w1": "x", "VRAM_STALE w2": "x"}, already=("VRAM_STALE", "VRAM_STALE w1")),
        [("VRAM_STALE", "warning"), ("VRAM_STALE w1", "warning")],
    ),
    "one that has no others": (watched(raised={"NEAR_MAX": "x"}, already=("NEAR_MAX",)), [("NEAR_MAX", "warning")]),
    "dead letters of many queues": (
        watched(dead={f"q{number}": 1 for number in range(1_000)}, of_all=("DEAD_LETTERS q7",)),
        [("DEAD_LETTERS", "warning"), ("DEAD_LETTERS q7", "warning")],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("seen", "expected"), CASES.values(), ids=CASES.keys())
def test_what_is_the_matter(seen: AlertInputs, expected: list[tuple[str, str]]) -> None:
    assert codes(seen) == expected


def test_many_of_a_kind_are_named_by_the_first_few_and_their_number() -> None:
    told = {f"SLOT_FAILED {number}": f"slot {number} is failed" for number in range(12)}
    (problem,) = evaluate_alerts(watched(raised=told), 0, GRACE_S)
    assert problem.reason == "12 at once (0, 1, 2, ...): slot 0 is failed"


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"SLOT_FAILED 10": "x", "SLOT_FAILED 2": "y"}, "2 at once (2, 10): y"),
        ({"SLOT_FAILED 2": "y"}, "1 left (2): y"),
        ({"SLOT_FAILED": "y"}, "y"),
    ],
)
def test_those_that_are_left_of_many_are_named(told: dict[str, str], reason: str) -> None:
    (problem,) = evaluate_alerts(watched(raised=told, already=("SLOT_FAILED",)), 0, GRACE_S)
    assert (problem.key, problem.reason) == ("SLOT_FAILED", reason)


def test_as_many_dead_letters_as_are_allowed_are_no_matter() -> None:
    assert codes(watched(dead={"a": 5}), allowed=5) == []
    assert codes(watched(dead={"a": 6}), allowed=5) == [("DEAD_LETTERS a", "warning")]


def test_there_is_advice_for_everything_that_a_plan_can_tell() -> None:
    told = {code for module in iter_modules(stages.__path__, f"{stages.__name__}.") for code in _told_by(module.name)}
    assert len(told) > 15
    assert told - ADVICE.keys() == set()


def _told_by(name: str) -> Iterator[str]:
    """The code of every alert and hold of a module that names it: a literal, or a constant of the module."""
    module = import_module(name)
    for call in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in ("alert", "hold"):
            match call.args[0]:
                case ast.Constant(value=str(code)):
                    yield code
                case ast.Name(id=constant) if constant.isupper():
                    yield getattr(module, constant)


def test_every_advice_stands_in_the_runbook() -> None:
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    assert [code for code in ADVICE if f"`{code}`" not in text] == []
