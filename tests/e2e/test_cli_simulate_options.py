"""`windlass simulate` and `windlass tune` on a generated load: options, output files and bad input."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from support.command_line import CommandLine

CONFIG = """
[fleets.default]
handler = "app:run"
[fleets.gpus]
provider = "hetzner"
queues = ["renders"]
policy = "buffered"
min_workers = 1
max_workers = 3
concurrency = 2
poll_interval_s = 20
stuck_timeout_s = 300
[fleets.gpus.hetzner]
image = "ubuntu-24.04"
"""
LOAD = ("--generate", "poisson", "--tasks", "40", "--days", "0.05")


@pytest.fixture
def windlass(tmp_path: Path) -> CommandLine:
    lines = [f"{40 * number},30" for number in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["arrival_s,duration_s", *lines, ""]))
    (tmp_path / "windlass.toml").write_text(CONFIG)
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
        pytest.param(("--boot", "inf"), "'--boot'", id="an endless boot"),
        pytest.param(("--days", "1e20"), "spans more than ten years", id="a trace of centuries"),
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


def test_spawn_timeout_that_a_boot_exceeds_takes_the_full_path(windlass: CommandLine) -> None:
    load = (*LOAD, "--boot", "120", "--boot-sigma", "0.5", "--json")
    plain, timed, full = (
        windlass("simulate", *load, *options).json
        for options in ((), ("--set", "spawn_timeout_s=70"), ("--set", "spawn_timeout_s=70", "--full"))
    )
    assert timed == full
    assert timed["machines_started"] > plain["machines_started"]


@pytest.mark.parametrize("policy", ["adaptive", "buffered", "threshold", "clear-time"])
def test_simulation_in_which_no_worker_gets_ready_ends_and_names_the_setting(
    windlass: CommandLine, policy: str
) -> None:
    found = windlass("simulate", *LOAD, "--policy", policy, "--set", "spawn_timeout_s=30")
    assert (found.code, found.out) == (2, ""), found
    assert f"cannot simulate {policy}: 40 queued tasks had no worker for" in found.err
    assert "a boot takes 120 s, and a machine that is not ready after 60 s" in found.err
    assert "Raise spawn_timeout_s (30)." in found.err
    assert len(found.err.strip().splitlines()) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "Ctrl-C"])
@pytest.mark.parametrize(
    "command",
    [("simulate", "--policy", "buffered"), ("tune", "--price-of-waiting", "1")],
    ids=["simulate", "tune"],
)
def test_signal_ends_a_simulation_at_once(
    windlass: CommandLine, command: tuple[str, ...], number: signal.Signals, code: int
) -> None:
    """The trace is a pipe: when all of it has been read, the simulation begins. It would take many minutes."""
    os.mkfifo(windlass.folder / "pipe.csv")
    process = windlass.start(*command, "--trace", "pipe.csv", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        rows = (f"{30 * task},60" for task in range(300_000))
        (windlass.folder / "pipe.csv").write_text("\n".join(["arrival_s,duration_s", *rows, ""]))
        process.send_signal(number)
        # Far less than the simulation takes.
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (code, "", "")


def test_options_replace_settings_of_the_fleet_and_others_stay(windlass: CommandLine) -> None:
    """Bursts of tasks for more than three machines of two slots, billed by the hour."""
    rows = [f"{7200 * burst},600,renders" for burst in range(3) for _ in range(12)]
    (windlass.folder / "bursts.csv").write_text("\n".join(["arrival_s,duration_s,queue", *rows, ""]))
    trace = ("simulate", "--trace", "bursts.csv", "--fleet", "gpus")
    report = windlass.folder / "x.html"

    def run(*options: str) -> tuple[dict[str, object], str]:
        return windlass(*trace, *options, "--report", report.name, "--json").json, report.read_text()

    own, text = run()
    assert (own["policy"], own["machines_peak"]) == ("buffered", 3)
    assert isinstance(own["machine_seconds_billed"], float | int)
    assert own["machine_seconds_billed"] % 3600 == 0
    assert "2 slots per machine, boot 60 s, billed by the hour, cycles of 20 s" in text
    fewer, _ = run("--max", "1")
    assert fewer["machines_peak"] == 1
    seconds, text = run(
        "--billing", "second", "--slots", "4", "--interval", "5", "--boot", "90", "--policy", "adaptive"
    )
    assert seconds["policy"] == "adaptive"
    assert "4 slots per machine, boot 90 s, billed by the second, cycles of 5 s" in text


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


def test_tune_fails_if_the_unseen_part_misses_the_goal(windlass: CommandLine) -> None:
    """Single tasks while settings are chosen, then more than five machines complete."""
    arrivals = [*range(0, 28_000, 400), *range(28_000, 28_800, 2), 40_000]
    rows = [f"{at},30" for at in arrivals]
    (windlass.folder / "rush.csv").write_text("\n".join(["arrival_s,duration_s", *rows, ""]))
    options = ("tune", "--trace", "rush.csv", "--slo", "p95_wait=130s", "--max", "5")
    shown, plain = windlass(*options), windlass(*options, "--json")
    assert (shown.code, plain.code) == (1, 1)
    found = json.loads(plain.out)
    assert (found["is_goal_held"], found["is_goal_held_searched"], found["is_goal_held_checked"]) == (
        False,
        True,
        False,
    )
    assert found["searched"]["wait_p95_s"] <= 130 < found["checked"]["wait_p95_s"]
    assert found["problem"].startswith(
        "these settings miss the goal on the part that the search has not seen: p95 wait "
    )
    assert found["problem"] in shown.out
    goals = [line.split()[2] for line in shown.out.splitlines() if line.startswith(("chosen on", "checked on"))]
    assert goals == ["held", "missed"]


def test_tune_searches_with_random_boots(windlass: CommandLine) -> None:
    options = ("tune", "--trace", "t.csv", "--slo", "p95_wait=500s", "--boot", "50", "--json")
    fixed, varied = (windlass(*options, "--boot-sigma", sigma).json for sigma in (0, 1))
    assert fixed == windlass(*options).json
    assert varied["checked"]["wait_p95_s"] != fixed["checked"]["wait_p95_s"]
