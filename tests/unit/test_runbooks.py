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
from windlass.runbooks import codes_in, procedures, runbooks

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "windlass"
# An event of ordinary operation; one of a failure carries the code of the failure.
ORDINARY_EVENTS = """
    ALERT ATTEMPTS_REFUNDED FLEET_PAUSED FLEET_RESUMED LINK_CREATED MACHINE_ADOPTED MACHINE_PREPARED
    MACHINE_PREPARING MACHINE_REFUSED ORPHAN_DELETED SESSION_ENDED SESSION_OPENED SESSION_REVOKED SLOTS_RESTARTED
    TASKS_PURGED TASK_CANCELLED TASK_ERROR TASK_FAILED TASK_RELEASED TASK_REQUEUED TASK_RETRIED TOKEN_CREATED
    TOKEN_REVOKED VOLUME_GROWN WORKERS_REQUESTED WORKER_ACTIVATED WORKER_DEREGISTERED WORKER_JOINED
    WORKER_PAUSED WORKER_REGISTERED WORKER_RESUMED WORKER_SPAWNED WORKER_TERMINATED WORKER_TERMINATING
"""
# Environment variables, and settings of other products that a fleet accepts.
ENVIRONMENT = """
    AUTO_START_WORKER_PROCESS CREDENTIALS_DIRECTORY DATABASE_URL FAILURE_WINDOW_MINUTES
    GPU_HEALTH_CHECK_TIMEOUT_SEC GPU_IDLE_TIMEOUT_SEC GPU_NOT_DETECTED_TIMEOUT_SEC
    GPU_OVERCAPACITY_IDLE_TIMEOUT_SEC GRACEFUL_SHUTDOWN_TIMEOUT_SEC HCLOUD_ENDPOINT
    HEARTBEAT_PROMOTION_THRESHOLD_SEC HETZNER_API_TOKEN HETZNER_NETWORK_ID HOME LANG LC_ALL LOGNAME
    MACHINES_TO_KEEP_IDLE MAIL MAX_ACTIVE_GPUS MAX_WORKER_FAILURE_RATE MIN_ACTIVE_GPUS MIN_SCALING_INTERVAL_SEC
    MIN_WORKERS_FOR_RATE_CHECK NO_COLOR ORCHESTRATOR_POLL_SEC PATH PUBLIC_KEY PYTHONPATH PYTHONUNBUFFERED
    RAY_ADDRESS RAY_AUTH_MODE RAY_AUTH_TOKEN RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL RAY_USAGE_STATS_ENABLED
    READY_NOT_CLAIMING_TIMEOUT_SEC RGRID_CONTROL_PLANE_IP RUNPOD_API_KEY RUNPOD_ENDPOINT
    RUNPOD_SSH_PRIVATE_KEY_PATH SCALE_DOWN_GRACE_PERIOD_SEC SCALE_DOWN_MULTIPLIER SCALE_UP_MULTIPLIER
    SPAWNING_GRACE_PERIOD_SEC SPAWNING_TIMEOUT_SEC STARTUP_GRACE_PERIOD_SEC STORAGE_CHECK_INTERVAL_CYCLES
    STORAGE_EXPANSION_INCREMENT_GB STORAGE_MAX_PERCENT_USED STORAGE_MIN_FREE_GB SUPABASE_SERVICE_ROLE_KEY
    SUPABASE_URL TASKS_PER_GPU_THRESHOLD TASK_STUCK_TIMEOUT_SEC USER WINDLASS_ATTEMPT WINDLASS_CLAIM_TOKEN
    WINDLASS_DATABASE_URL WINDLASS_DEBUG WINDLASS_FLEET WINDLASS_JOIN WINDLASS_NEEDS_GPU WINDLASS_POD
    WINDLASS_QUEUE WINDLASS_TASK_ID WINDLASS_TOKEN WINDLASS_WORKER_DATABASE_URL WINDLASS_WORKER_ID
    WINDLASS_WORKER_SECRET XDG_RUNTIME_DIR
"""
# Placeholders of the command line.
METAVARIABLES = """
    ACTOR ADDRESS AMOUNT CODE COMMAND DURATION FILE FLEET FOLDER GOAL IMAGE JSON KIND NAME PORT QUEUE SECONDS
    SESSION TEXT TIME UNIT VERSION WHEN WORKER
"""
# States and words of vendors, Ray, HTTP, SQL, PostgreSQL and the system.
OTHER_PROGRAMS = """
    ALIVE CLUSTER_METADATA COMMUNITY CRASHED DECISION DELETE DENY DRAIN_NODE_REASON_PREEMPTION ERROR EXITED FAIL
    FAILED HEAD HIGH_PERFORMANCE METADATA NONE OPTIONS PATCH PG_VERSION POST RUNNING SC_CLK_TCK SECURE
    SIGKILL TERMINATED TRUNCATE UPDATE
"""
# Names in __all__.
EXPORTED = """
    CHART_RANGES FAILURE_CODES LATEST_VERSION POLICIES ROLES
"""
NO_CODES = set(f"{ORDINARY_EVENTS} {ENVIRONMENT} {METAVARIABLES} {OTHER_PROGRAMS} {EXPORTED}".split())
LITERAL = re.compile(r"""["']([A-Z]{4,}|[A-Z]+(?:_[A-Z]+)+)["']""")


def names_in_source() -> set[str]:
    """Every upper-case string literal of the package: codes, and what NO_CODES lists."""
    files = [file for suffix in ("py", "sql") for file in SOURCE.rglob(f"*.{suffix}")]
    return {name for file in files for name in LITERAL.findall(file.read_text())}


def has_row(code: str, section: str) -> bool:
    return any(each.section == section for each in runbooks().get(code, ()))


def test_every_alert_and_hold_has_a_runbook() -> None:
    assert {code for code in ADVICE if not has_row(code, "Alerts and holds")} == set()


def test_every_code_has_a_runbook() -> None:
    found = names_in_source()
    assert found >= {"GPU_NOT_DETECTED", "NO_CAPACITY", "NO_SLOT", "OUT_OF_MEMORY", "UNAUTHORIZED", "CLOCK_SET_BACK"}
    assert found - NO_CODES - runbooks().keys() == set()


def task_error_codes() -> set[str]:
    """Codes with which an attempt ends: in the worker, in Ray, in SQL, and in the table of docs/worker.md."""
    source = "\n".join(file.read_text() for suffix in ("py", "sql") for file in SOURCE.rglob(f"*.{suffix}"))
    patterns = (
        r'AttemptFailure\(\s*"([A-Z_]+)"',
        r'self\._fail\(\s*"([A-Z_]+)"',
        r"requeue_tasks_of\([^;]*?'([A-Z_]+)'",
        r"error_code = '([A-Z_]+)'",
    )
    table = (ROOT / "docs" / "worker.md").read_text().partition("| code | cause |")[2].partition("\n\n")[0]
    found = [set(re.findall(pattern, source)) for pattern in patterns]
    found.append(set(re.findall(r"^\| `([A-Z_]+)` \|", table, re.MULTILINE)))
    assert all(found)
    return set[str]().union(*found)


def test_every_task_error_has_a_runbook_of_its_own() -> None:
    codes = task_error_codes()
    assert codes >= {"HANDLER_ERROR", "WORKER_ERROR", "OUTPUT_LIMIT", "NODE_LOST", "WORKER_LOST", "CANCELLED"}
    assert {code for code in codes if not has_row(code, "Task errors")} == set()


def test_every_exemption_is_in_use_and_has_no_runbook() -> None:
    assert NO_CODES - names_in_source() == set()
    assert NO_CODES & runbooks().keys() == set()


def test_every_runbook_is_about_a_code_that_exists() -> None:
    source = "\n".join(file.read_text() for suffix in ("py", "sql") for file in SOURCE.rglob(f"*.{suffix}"))
    assert [code for code in sorted(runbooks()) if code not in source] == []


def test_every_row_has_a_cause_and_what_to_do() -> None:
    rows = [row for found in runbooks().values() for row in found]
    assert len(rows) > 100
    assert [
        row.code for row in rows if not all(row.columns.values()) or not {"meaning", "why"} & row.columns.keys()
    ] == []
    vague = re.compile(r"\bthe same[,.]|\bas above\b|\bsee above\b", re.IGNORECASE)
    assert [row.code for row in rows if any(vague.search(text) for text in row.columns.values())] == []
    assert [row.code for row in rows if "what to do" not in row.columns] == []
    severities = {row.columns["severity"] for row in rows if row.section == "Alerts and holds"}
    assert severities == {severity.value for severity in Severity}


def test_what_to_do_names_a_command_a_setting_or_a_code() -> None:
    """Unless there is nothing to do."""
    rows = [row for found in runbooks().values() for row in found]
    to_do = {(row.code, row.section): row.columns["what to do"] for row in rows}
    assert [key for key, text in to_do.items() if "`" not in text and not text.startswith("Nothing")] == []


def test_runbook_page_has_an_anchor_for_every_code_and_no_dead_link() -> None:
    page = runbooks_html()
    anchors = re.findall(r'id="([^"]+)"', page)
    assert len(anchors) == len(set(anchors))
    assert runbooks().keys() - set(anchors) == set()
    links = re.findall(r'href="([^"]+)"', page)
    assert "#symptoms" in links
    assert [link for link in links if link.removeprefix("#") not in anchors] == []


def test_procedures_that_rows_link_to_exist() -> None:
    linked = {anchor for found in runbooks().values() for row in found for anchor in row.see}
    assert {"the-token-is-refused", "the-accounts-limit-is-reached", "clocks"} <= linked
    assert linked - procedures().keys() == set()
    assert procedures()["the-token-is-refused"].startswith("Hetzner fleets: The token is refused\n")


def test_code_of_an_explanation_is_linked_to_its_runbook() -> None:
    sentence = "Worker w failed 5 s ago (GPU_NOT_DETECTED): <no> device (see `app:x`) (MY_OWN: x)."
    assert codes_in(sentence) == ["GPU_NOT_DETECTED"]
    shown = explained(sentence)
    assert '(<a href="/runbooks#GPU_NOT_DETECTED">GPU_NOT_DETECTED</a>): &lt;no&gt;' in shown
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
