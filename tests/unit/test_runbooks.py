"""Every code that a person may meet has a runbook, every runbook has a code, and what shows a code links to it."""

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from windlass import runbooks as runbooks_module
from windlass.dashboard.overview import overview_page
from windlass.dashboard.rendering import PageContext, explained
from windlass.dashboard.runbooks import runbook_link, runbook_url, runbooks_html
from windlass.model.alert import ADVICE, Severity
from windlass.model.overview import OpenAlert, Overview
from windlass.runbooks import codes_in, runbooks

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "windlass"
# Packages whose constants are codes of tasks, workers, machines and events.
CODE_PACKAGES = ("policy", "control", "worker", "ray", "providers", "store/schema", "server/routes", "model/errors.py")
LITERAL = re.compile(r"""["']([A-Z]{4,}|[A-Z]+(?:_[A-Z]+)+)["']""")
# Events of ordinary operation; an event of a failure carries the code of the failure.
EVENTS = re.compile(
    r"(WORKER|TASK|TASKS|MACHINE|SLOT|SLOTS|FLEET|WORKERS|SESSION|TOKEN|VOLUME|ORPHAN|LOSS|HOST|LATE|ATTEMPTS|CLOCK)_"
    r"(REGISTERED|DEREGISTERED|ACTIVATED|JOINED|SPAWNED|TERMINATED|TERMINATING|ERROR|PAUSED|RESUMED|RELEASED|REQUEUED|"
    r"FAILED|RETRIED|CANCELLED|ADOPTED|AMBIGUOUS|PREPARED|PREPARING|REFUSED|RESTARTED|REQUESTED|OPENED|REVOKED|"
    r"CREATED|GROWN|DELETED|RESULT|REFUNDED|SET_BACK|ENDED|COMPLETE|LOST)|MACHINE_NOT_DELETED|DEREGISTERED"
)
# Environment variables, names of other programs, and words of protocols.
OTHER = re.compile(
    r"(RAY|WINDLASS|PG|LC|XDG|NO_COLOR|SIG[A-Z]*|HTTP|HETZNER|RUNPOD|WIND)_?.*|CLUSTER_METADATA|DRAIN_NODE.*|SC_CLK_TCK|"
    r"CREDENTIALS_DIRECTORY|DATABASE_URL|PUBLIC_KEY|FAILURE_CODES|AUTO_START_WORKER_PROCESS|LATEST_VERSION|"
    # Verbs, states of vendors and of Ray, event codes that carry another code, Unix variables, exported lists.
    r"DELETE|INSERT|PATCH|POST|ALIVE|EXITED|FAILED|RUNNING|TERMINATED|NONE|ALERT|ERROR|"
    r"HOME|LOGNAME|MAIL|PATH|USER|PYTHONUNBUFFERED|POLICIES|HIGH_PERFORMANCE"
)


def codes_in_source() -> set[str]:
    found: set[str] = set()
    for package in CODE_PACKAGES:
        path = SOURCE / package
        files = [path] if path.is_file() else [*path.rglob("*.py"), *path.rglob("*.sql")]
        for file in files:
            for code in LITERAL.findall(file.read_text()):
                if not (EVENTS.fullmatch(code) or OTHER.fullmatch(code)):
                    found.add(code)
    return found


def has_row(code: str, section: str) -> bool:
    return any(each.section == section for each in runbooks().get(code, ()))


def test_every_alert_and_hold_has_a_runbook() -> None:
    assert {code for code in ADVICE if not has_row(code, "Alerts and holds")} == set()


def test_every_error_code_has_a_runbook() -> None:
    found = codes_in_source()
    assert found >= {"GPU_NOT_DETECTED", "NO_CAPACITY", "NO_SLOT", "OUT_OF_MEMORY"}, "short first words are codes too"
    assert found - runbooks().keys() == set()


def test_every_runbook_is_about_a_code_that_exists() -> None:
    source = "\n".join(file.read_text() for suffix in ("py", "sql") for file in SOURCE.rglob(f"*.{suffix}"))
    assert [code for code in sorted(runbooks()) if code not in source] == []


def test_every_row_says_what_it_means() -> None:
    rows = [row for found in runbooks().values() for row in found]
    assert len(rows) > 100
    assert [
        row.code for row in rows if not all(row.columns.values()) or not {"meaning", "why"} & row.columns.keys()
    ] == []
    severities = {row.columns["severity"] for row in rows if row.section == "Alerts and holds"}
    assert severities == {severity.value for severity in Severity}


def test_runbook_page_has_an_anchor_for_every_code_and_no_dead_link() -> None:
    page = runbooks_html()
    anchors = re.findall(r'id="([^"]+)"', page)
    assert len(anchors) == len(set(anchors))
    assert runbooks().keys() - set(anchors) == set()
    links = re.findall(r'href="([^"]+)"', page)
    assert "#symptoms" in links
    assert [link for link in links if link.removeprefix("#") not in anchors] == []


def test_code_of_an_explanation_is_linked_to_its_runbook() -> None:
    sentence = "Worker w failed 5 s ago (GPU_NOT_DETECTED): <no> device (see `app:x`) (MY_OWN: x)."
    assert codes_in(sentence) == ["GPU_NOT_DETECTED"]
    shown = explained(sentence)
    assert '(<a class="quiet" href="/runbooks#GPU_NOT_DETECTED">GPU_NOT_DETECTED</a>): &lt;no&gt;' in shown
    assert "(see <code>app:x</code>) (MY_OWN: x)" in shown


def test_unknown_code_is_shown_without_a_link() -> None:
    assert (runbook_link("<b>"), runbook_link(None), runbook_url("MY_OWN")) == ("<b>", "", None)


def test_attention_item_links_to_the_runbook_of_its_alert() -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)
    alert = OpenAlert(1, None, "ROW_REJECTED", Severity.WARNING, "2 rows", now, now, None)
    page = overview_page(PageContext(now=now, version="1"), Overview(now, (), {}, (alert,), None, 0), {}, ())
    assert '<a href="/runbooks#ROW_REJECTED">Runbook</a>' in page


def test_installation_without_runbooks_links_to_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runbooks_module, "_FILES", (tmp_path / "runbooks.md",))
    runbooks.cache_clear()
    try:
        assert (dict(runbooks()), runbook_link("IDLE")) == ({}, "IDLE")
    finally:
        runbooks.cache_clear()
