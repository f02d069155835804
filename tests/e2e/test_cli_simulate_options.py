"""`windlass simulate` and `windlass tune` on a generated load: options, output files and bad input."""

from pathlib import Path

import pytest

from support.command_line import CommandLine

LOAD = ("--generate", "poisson", "--tasks", "40", "--days", "0.05")


@pytest.fixture
def windlass(tmp_path: Path) -> CommandLine:
    lines = [f"{40 * number},30" for number in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["arrival_s,duration_s", *lines, ""]))
    (tmp_path / "windlass.toml").write_text('[fleets.default]\nhandler = "app:run"\n')
    return CommandLine(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            ("--report", "missing/x.html"), "cannot write missing/x.html: missing is not a folder.", id="no folder"
        ),
        pytest.param(("--report", "."), "cannot write .: it is a folder.", id="a folder as report"),
        pytest.param(("--set", "policy=buffered"), "choose the policy with --policy buffered", id="policy in --set"),
        pytest.param(
            ("--policy", "adaptive:policy=keda"), "choose the policy with --policy keda", id="policy of a run"
        ),
        pytest.param(("--min", "5", "--max", "2"), "--min is 5 and --max is 2: min must not exceed max.", id="limits"),
        pytest.param(
            ("--policy", "delayed-off:wait_goal_s=30"), "wait_goal_s has no effect on delayed-off", id="a baseline"
        ),
        pytest.param(
            ("--policy", "buffered", "--policy", "keda", "--set", "wait_goal_s=30"),
            "wait_goal_s has no effect with policy buffered",
            id="a setting that no run reads",
        ),
        pytest.param(("--set", "budget_per_hour=1"), "budget_per_hour has no effect in a simulation.", id="a budget"),
        pytest.param(("--set", "concurrency=2"), "concurrency has no effect in a simulation: use --slots.", id="slots"),
        pytest.param(("--boot", "inf"), "--boot is inf: write a finite number.", id="an endless boot"),
        pytest.param(("--days", "inf"), "--days is inf: write a finite number.", id="an endless trace"),
        pytest.param(("--policy", "adaptive:foo=1"), "'foo' is not a fleet setting.", id="an unknown setting"),
        pytest.param(("--billing", "minute"), "write second, hour, or a number of seconds.", id="a billing period"),
        pytest.param(("--billing", "0"), "write second, hour, or a number of seconds.", id="a period of nothing"),
    ],
)
def test_simulation_refuses_what_would_have_no_effect(
    windlass: CommandLine, options: tuple[str, ...], message: str
) -> None:
    found = windlass("simulate", *LOAD, *options)
    assert (found.code, found.out) == (2, ""), found
    assert message in found.err
    assert len(found.err.strip().splitlines()) == 1


def test_setting_that_one_of_several_runs_reads_is_accepted(windlass: CommandLine) -> None:
    found = windlass("simulate", *LOAD, "--policy", "adaptive", "--policy", "keda", "--set", "wait_goal_s=30", "--json")
    assert [run["policy"] for run in found.json["runs"]] == ["adaptive", "keda"]


def test_scaling_interval_applies_to_the_fast_path_too(windlass: CommandLine) -> None:
    """The fast path does not know it, so that such a run takes the full path."""
    fast, slow, full = (
        windlass("simulate", *LOAD, "--duration", "600", "--json", *options).json
        for options in ((), ("--set", "min_scaling_interval_s=900"), ("--set", "min_scaling_interval_s=900", "--full"))
    )
    assert slow == full
    assert slow["wait_mean_s"] > fast["wait_mean_s"]


def test_billing_period_of_any_length_is_charged_in_whole_periods(windlass: CommandLine) -> None:
    found = windlass("simulate", *LOAD, "--billing", "600", "--json", "--report", "x.html").json
    assert found["machine_seconds_billed"] % 600 == 0
    assert "billed by the 600 s" in (windlass.folder / "x.html").read_text()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("windlass.toml", "windlass.toml exists and is not replaced: name a new file"),
        ("missing/x.toml", "cannot write missing/x.toml: missing is not a folder."),
    ],
)
def test_tune_replaces_no_file(windlass: CommandLine, output: str, message: str) -> None:
    before = (windlass.folder / "windlass.toml").read_text()
    found = windlass("tune", "--trace", "t.csv", "--price-of-waiting", "1", "--write", output)
    # Nothing was searched.
    assert (found.code, found.out) == (2, ""), found
    assert message in found.err
    assert (windlass.folder / "windlass.toml").read_text() == before


def test_tune_searches_with_random_boots(windlass: CommandLine) -> None:
    options = ("tune", "--trace", "t.csv", "--slo", "p95_wait=500s", "--boot", "50", "--json")
    fixed, varied = (windlass(*options, "--boot-sigma", sigma).json for sigma in (0, 1))
    assert fixed == windlass(*options).json
    assert varied["checked"]["wait_p95_s"] != fixed["checked"]["wait_p95_s"]
