"""`windlass simulate` and `windlass tune` on a fleet's own history in the database."""

from pathlib import Path
from typing import Any

import asyncpg
import pytest

from support.command_line import CommandLine

CONFIG = """
[fleets.gpus]
provider = "hetzner"
queues = ["renders"]
max_workers = 4
concurrency = 2
policy = "buffered"
[fleets.gpus.hetzner]
image = "ubuntu-24.04"
[fleets.mail]
queues = ["mail"]
handler = "app:send"
"""
# 400 tasks of 60 s over the last five days, half of them purged; five machines with boots of 80 to 120 s.
PAST = """
insert into windlass.tasks (queue, status, created_at, started_at, finished_at)
select 'renders', 'complete', b.at, b.at + interval '5 s', b.at + interval '65 s'
from (
  select windlass.now() - interval '5 days' + make_interval(secs => 1000 * n + 50 * (n % 7)) as at
  from generate_series(1, 400) as n
) as b;
delete from windlass.tasks where id % 2 = 0;
insert into windlass.fleets (name) values ('gpus');
insert into windlass.slots (fleet, slot) select 'gpus', n from generate_series(0, 4) as n;
insert into windlass.workers (id, fleet, slot, status, created_at, activated_at, terminated_at, price_micros_per_hour,
  currency, billing_unit_s)
select 'gpus-' || n, 'gpus', n, 'terminated', b.at, b.at + make_interval(secs => 80 + 10 * n), b.at + interval '1 hour',
  8000, 'EUR', 3600
from generate_series(0, 4) as n
cross join lateral (select windlass.now() - make_interval(hours => 1 + n) as at) as b;
"""

MAIL = """
insert into windlass.tasks (queue, status, created_at, started_at, finished_at)
select 'mail', 'complete', b.at, b.at + interval '1 s', b.at + interval '31 s'
from (select windlass.now() - make_interval(secs => 600 * n) as at from generate_series(1, 100) as n) as b
"""


@pytest.fixture
async def windlass(tmp_path: Path, dsn: str) -> CommandLine:
    (tmp_path / "windlass.toml").write_text(CONFIG)
    connection = await asyncpg.connect(dsn)
    await connection.execute(PAST)
    await connection.close()
    return CommandLine(tmp_path, {"DATABASE_URL": dsn, "HCLOUD_TOKEN": "t"})


def runs_of(command: CommandLine, *options: object) -> list[dict[str, Any]]:
    found = command("simulate", *options, "--json").json
    runs: list[dict[str, Any]] = found.get("runs", [found])
    return runs


def test_simulation_reads_the_history_of_a_fleet(windlass: CommandLine) -> None:
    (run,) = runs_of(windlass, "--fleet", "gpus")
    assert run["tasks"] == 400
    assert run["policy"] == "buffered"
    assert run["currency"] == "EUR"
    assert run["cost_micros"] == pytest.approx(run["machine_seconds_billed"] / 3600 * 8000, abs=1)
    # Billed by the hour, as its machines were.
    assert run["machine_seconds_billed"] % 3600 == 0
    (short,) = runs_of(windlass, "--fleet", "gpus", "--since", "1d")
    assert short["tasks"] == 55
    # Options replace what was measured.
    (second,) = runs_of(windlass, "--fleet", "gpus", "--billing", "second", "--boot", "1")
    assert second["machine_seconds_billed"] < run["machine_seconds_billed"]
    assert second["wait_p95_s"] < run["wait_p95_s"]


def test_shadow_compares_running_settings_with_two_others(windlass: CommandLine) -> None:
    found = runs_of(windlass, "--fleet", "gpus", "--shadow", "--report", "what-if.html")
    assert [run["policy"] for run in found] == ["running: buffered", "adaptive", "hetzner-recycler"]
    assert {run["tasks"] for run in found} == {400}
    report = (windlass.folder / "what-if.html").read_text()
    assert report.count("<svg") == 5
    assert "measured on 5 machines" in report
    shown = windlass("simulate", "--fleet", "gpus", "--shadow")
    assert shown.code == 0, shown
    assert "EUR" in shown.out
    assert "400 tasks over" in shown.out


async def test_several_fleets_are_simulated_in_their_own_worlds_and_added_up(windlass: CommandLine, dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    await connection.execute(MAIL)
    await connection.close()
    both = ("--fleet", "gpus", "--fleet", "mail", "--policy", "adaptive", "--policy", "keda")
    found = windlass("simulate", *both, "--report", "both.html", "--json").json
    assert list(found["fleets"]) == ["gpus", "mail"]
    alone = {name: runs_of(windlass, "--fleet", name, *both[4:]) for name in found["fleets"]}
    assert {name: fleet["runs"] for name, fleet in found["fleets"].items()} == alone
    assert [total["policy"] for total in found["total"]] == ["adaptive", "keda"]
    for total, *parts in zip(found["total"], alone["gpus"], alone["mail"], strict=True):
        for name in ("machine_seconds_billed", "wait_total_s", "machines_started", "tasks", "optimal_seconds"):
            assert total[name] == pytest.approx(sum(part[name] for part in parts), abs=0.01), name
        # The total is that of 500 tasks.
        assert min(part["wait_p95_s"] for part in parts) <= total["wait_p95_s"]
        assert total["wait_p95_s"] <= max(part["wait_p95_s"] for part in parts)
    # One fleet rents in EUR, the other costs nothing.
    assert "currency" not in found["total"][0]
    report = (windlass.folder / "both.html").read_text()
    assert "gpus: adaptive" in report
    assert "total: keda" in report
    shown = windlass("simulate", *both).out
    assert "mail: 100 tasks over" in shown
    assert "total: adaptive" in shown


def test_fleets_with_a_common_queue_are_not_added_up(windlass: CommandLine) -> None:
    config = windlass.folder / "windlass.toml"
    config.write_text(CONFIG.replace('queues = ["mail"]', 'queues = ["mail", "renders"]'))
    found = windlass("simulate", "--fleet", "gpus", "--fleet", "mail")
    assert found.code == 2
    assert "fleets gpus and mail both serve queue renders" in found.err


def test_trace_is_divided_among_fleets_by_its_queues(windlass: CommandLine) -> None:
    rows = [f"{60 * number},30,{'renders' if number % 4 else 'mail'}" for number in range(40)]
    (windlass.folder / "t.csv").write_text("\n".join(["arrival_s,duration_s,queue", *rows, ""]))
    found = windlass("simulate", "--fleet", "gpus", "--fleet", "mail", "--trace", "t.csv", "--json").json
    assert {name: fleet["runs"][0]["tasks"] for name, fleet in found["fleets"].items()} == {"gpus": 30, "mail": 10}
    assert found["total"][0]["tasks"] == 40
    # Each fleet with its own policy, as it is configured.
    assert {name: fleet["runs"][0]["policy"] for name, fleet in found["fleets"].items()} == {
        "gpus": "running: buffered",
        "mail": "running: adaptive",
    }
    (windlass.folder / "t.csv").write_text("arrival_s,duration_s\n0,1\n")
    refused = windlass("simulate", "--fleet", "gpus", "--fleet", "mail", "--trace", "t.csv")
    assert "the trace has no column queue" in refused.err


def test_tune_searches_on_the_history_of_a_fleet(windlass: CommandLine) -> None:
    found = windlass("tune", "--fleet", "gpus", "--slo", "p95_wait=200s", "--write", "fleet.toml", "--json").json
    assert found["is_goal_held"]
    assert found["searched"]["tasks"] + found["checked"]["tasks"] == 400
    assert (windlass.folder / "fleet.toml").read_text().startswith('[fleets.gpus]\npolicy = "adaptive"\n')


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "pass --fleet NAME"),
        (("--fleet", "nope"), "fleet 'nope' not found"),
        (("--fleet", "mail"), "fleet mail has no finished task since"),
        (("--fleet", "gpus", "--fleet", "mail", "--generate", "poisson"), "a generated trace has no queues"),
        (("--fleet", "gpus", "--since", "soon"), "--since 'soon' is not a time"),
        (("--shadow", "--generate", "poisson"), "--shadow compares on a fleet's own history"),
        (("--generate", "poisson", "--trace", "t.csv"), "not both"),
    ],
)
def test_bad_input_is_one_sentence(windlass: CommandLine, options: tuple[str, ...], message: str) -> None:
    found = windlass("simulate", *options)
    assert found.code == 2
    assert message in found.err
    assert len(found.err.strip().splitlines()) == 1
