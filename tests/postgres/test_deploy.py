"""The Prometheus rules and the Grafana dashboard in deploy/: valid, and only about metrics that exist."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from support.api_fixture import open_api
from support.postgres_servers import do_without
from windlass.model.alert import ADVICE

DEPLOY = Path(__file__).parents[2] / "deploy"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
TIMEOUT_S = 60


def promtool() -> str:
    unpacked = CACHE / "windlass-tests" / "promtool"
    found = shutil.which("promtool") or (str(unpacked) if unpacked.exists() else None)
    return found or do_without("promtool not found: on Debian, tools/system-packages.sh installs it (as root)")


def test_alert_rules_pass_their_promtool_tests() -> None:
    for arguments in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        ran = subprocess.run(
            [promtool(), *arguments],
            cwd=DEPLOY / "prometheus",
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("file", ["prometheus/alerts.yml", "grafana/windlass.json"])
def test_counters_that_every_instance_serves_are_not_added_up(file: str) -> None:
    text = (DEPLOY / file).read_text()
    counters = re.findall(r"(?:rate|increase)\(windlass_\w+_total", text)
    assert len(counters) >= 2
    assert len(re.findall(r"max without \(instance, pod\) \((?:rate|increase)\(windlass_\w+_total", text)) == len(
        counters
    )


async def test_every_metric_in_rules_and_dashboard_exists(dsn: str) -> None:
    async with open_api(dsn) as api:
        await api.run_cycle()
        text = (await api.localhost.get("/metrics")).text
    served = set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))
    used = set()
    for file in (DEPLOY / "prometheus" / "alerts.yml", DEPLOY / "grafana" / "windlass.json"):
        used |= set(re.findall(r"\b(windlass_\w+?)(?:_bucket)?\b", file.read_text()))
    assert len(used) > 20
    assert used - served == set()


def test_every_alert_has_a_code_with_advice() -> None:
    codes = re.findall(r"code: ([A-Z_]+)", (DEPLOY / "prometheus" / "alerts.yml").read_text())
    assert len(codes) > 8
    assert set(codes) - ADVICE.keys() == set()


def test_general_rule_excludes_only_codes_with_their_own_rule() -> None:
    rules = (DEPLOY / "prometheus" / "alerts.yml").read_text()
    (excluded,) = re.findall(r'windlass_alerts_firing\{code!~"([A-Z_|]+)"', rules)
    # A rule names its codes in its annotation or in its expression.
    queried = {code for codes in re.findall(r'code=~?"([A-Z_|]+)"', rules) for code in codes.split("|")}
    own = queried | set(re.findall(r"code: ([A-Z_]+)", rules))
    assert set(excluded.split("|")) - own == set()
    assert set(excluded.split("|")) - ADVICE.keys() == set()


def test_grafana_shows_percentiles_of_each_boot_phase() -> None:
    board = json.loads((DEPLOY / "grafana" / "windlass.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    histogram = re.escape('increase(windlass_boot_phase_seconds_bucket{fleet=~"$fleet"}[1d])')
    pattern = rf"histogram_quantile\((0\.\d+), sum by \(phase, le\) \({histogram}\)\)"
    found = [match[1] for query in queries if (match := re.fullmatch(pattern, query))]
    assert found == ["0.5", "0.95", "0.99"]


def test_grafana_dashboard_has_valid_panels() -> None:
    board = json.loads((DEPLOY / "grafana" / "windlass.json").read_text())
    assert board["title"] == "Windlass"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids)) > 10
    for panel in board["panels"]:
        assert panel["targets"], panel["title"]
        position = panel["gridPos"]
        assert position["x"] + position["w"] <= 24, panel["title"]
