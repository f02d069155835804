"""What is handed out for Prometheus and Grafana: checked by promtool, and about metrics that there are."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

from support.api_fixture import open_api
from support.postgres_servers import do_without
from windlass.model.alert import ADVICE

DEPLOY = Path(__file__).parents[2] / "deploy"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
# promtool reads three files.
TIMEOUT_S = 60


def promtool() -> str:
    unpacked = CACHE / "windlass-tests" / "promtool"
    found = shutil.which("promtool") or (str(unpacked) if unpacked.exists() else None)
    return found or do_without("no promtool: tools/system-packages.sh gets it for root on Debian")


def test_promtool_takes_the_alerts_and_they_fire_when_they_should() -> None:
    for words in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        ran = subprocess.run(
            [promtool(), *words],
            cwd=DEPLOY / "prometheus",
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr


async def test_every_metric_that_is_asked_for_is_there(dsn: str) -> None:
    async with open_api(dsn) as api:
        await api.run_cycle()
        text = (await api.localhost.get("/metrics")).text
    served = set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))
    asked = set()
    for file in (DEPLOY / "prometheus" / "alerts.yml", DEPLOY / "grafana" / "windlass.json"):
        asked |= set(re.findall(r"\b(windlass_\w+?)(?:_bucket)?\b", file.read_text()))
    assert len(asked) > 20
    assert asked - served == set()


def test_every_alert_names_what_to_do() -> None:
    codes = re.findall(r"code: ([A-Z_]+)", (DEPLOY / "prometheus" / "alerts.yml").read_text())
    assert len(codes) > 8
    assert set(codes) - ADVICE.keys() == set()


def test_every_code_has_a_rule_of_its_own_or_falls_under_the_general_one() -> None:
    rules = (DEPLOY / "prometheus" / "alerts.yml").read_text()
    (left_out,) = re.findall(r'windlass_alerts_firing\{code!~"([A-Z_|]+)"', rules)
    # A rule names its codes where it says what to do, or where it asks for them.
    asked = {code for codes in re.findall(r'code=~?"([A-Z_|]+)"', rules) for code in codes.split("|")}
    own = asked | set(re.findall(r"code: ([A-Z_]+)", rules))
    assert set(left_out.split("|")) - own == set()
    assert set(left_out.split("|")) - ADVICE.keys() == set()


def test_the_dashboard_is_one_that_grafana_can_import() -> None:
    board = json.loads((DEPLOY / "grafana" / "windlass.json").read_text())
    assert board["title"] == "Windlass"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids)) > 10
    for panel in board["panels"]:
        assert panel["targets"], panel["title"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
