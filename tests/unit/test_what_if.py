"""The sentence on the page "What if"."""

import pytest

from windlass.dashboard.what_if import run_rows, verdict
from windlass.simulator.engine import World
from windlass.simulator.measures import RunResult
from windlass.simulator.past import FleetPast
from windlass.simulator.trace import Trace


def result(policy: str, hours: float, p95_s: float) -> RunResult:
    return RunResult(policy, "t", hours * 3600, 1.0, 1.0, p95_s, 1.0, 1.0, 1, 1, 0.5, 10)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        (
            [("adaptive", 60.0, 90.0), ("keda", 80.0, 10.0)],
            "adaptive would have cost 40 % less: 60.0 instead of 100.0 machine hours, and a p95 wait of 90 s instead of"
            " 88 s.",
        ),
        # The cheapest one made tasks wait: the next is named.
        ([("adaptive", 60.0, 900.0), ("keda", 80.0, 10.0)], "keda would have cost 20 % less"),
        ([("adaptive", 150.0, 90.0), ("keda", 180.0, 10.0)], "adaptive would have cost 50 % more"),
        ([("adaptive", 101.0, 90.0), ("keda", 180.0, 10.0)], "adaptive would have cost about the same"),
    ],
)
def test_verdict_names_the_cheapest_without_longer_waits(others: list[tuple[str, float, float]], expected: str) -> None:
    found = verdict([result("running: buffered", 100.0, 88.0), *(result(*other) for other in others)])
    assert found.startswith(expected)


def test_rows_compare_with_the_running_settings() -> None:
    past = FleetPast(Trace("t", (0.0,), (1.0,)), World(), (), 500_000, "EUR")
    rows = run_rows([result("running", 100.0, 1.0), result("adaptive", 75.0, 1.0)], past)
    assert [row.saved_share for row in rows] == [None, -0.25]
    assert [row.cost_micros for row in rows] == [50_000_000, 37_500_000]
