"""The line of `windlass status` about a fleet: its last decision with what was done, and a hold."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from rich.console import Console

from windlass.cli.status import StatusReport, render
from windlass.model.action import Action, Spawn
from windlass.model.cycle import Cycle, Fleet
from windlass.model.snapshot import Hold

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
LONG = "5 of 6 workers failed in 10 min: GPU_NOT_DETECTED, " + ", ".join(f"renders-{n}-a1b2c3" for n in range(20))


def line_of_fleet(
    decision: str, actions: Sequence[Action] = (), summary: dict[str, Any] | None = None, **changed: Any
) -> str:
    fleet = replace(
        Fleet("renders", "local", ("renders",), 0, 6, False, 0, None, (), NOW, NOW, 10.0, is_led=True), **changed
    )
    cycle = Cycle(7, "renders", 1, NOW, NOW, decision, tuple(actions), summary, 0, None)
    console = Console(width=400)
    with console.capture() as shown:
        console.print(render(StatusReport(NOW, [], [(fleet, cycle)], [], {}, {})))
    (line,) = [line for line in shown.get().splitlines() if line.lstrip("│ ").startswith("renders ")]
    return line


def test_long_reason_of_a_hold_is_shortened() -> None:
    line = line_of_fleet("no change", hold=Hold("FAILURE_RATE", LONG, NOW - timedelta(minutes=3), is_total=False))
    assert f"hold FAILURE_RATE: {LONG[:79]}…" in line


def test_reason_of_a_hold_is_not_repeated_beside_the_decision() -> None:
    hold = Hold("FAILURE_RATE", "failure rate 1 of 1 in 10 min", NOW, is_total=False)
    line = line_of_fleet("hold: failure rate 1 of 1 in 10 min; would spawn 1: 1 queued", hold=hold)
    assert line.count("failure rate 1 of 1") == 1
    assert "hold FAILURE_RATE " in line


def test_decision_is_shown_with_what_was_done() -> None:
    spawns = [Spawn(slot, "3 queued") for slot in range(3)]
    summary = {"workers_spawned": 1, "creations_refused": {"NO_CAPACITY": 2}}
    decision = "spawn 3: 3 queued, 0 free slots, target 3"
    assert f"{decision} [spawned 1 of 3, 2 refused: no capacity]" in line_of_fleet(decision, spawns, summary)
    # A long decision is shortened, its result is not.
    assert "… [3 spawns not confirmed]" in line_of_fleet(f"{decision}{', and so on' * 20}", spawns)
