"""Every code that a person may meet has a runbook, and every runbook has a code."""

import re
from pathlib import Path

from windlass.model.alert import ADVICE

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "windlass"
DOCS = [ROOT / "docs" / "runbooks.md"]
# Packages whose constants are codes of tasks, workers, machines and events.
CODE_PACKAGES = ("policy", "control", "worker", "ray", "providers", "store/schema", "server/routes", "model/errors.py")
LITERAL = re.compile(r"""["']([A-Z]{4,}(?:_[A-Z]+)*)["']""")
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


def documented() -> set[str]:
    return {code for file in DOCS for code in re.findall(r"^\| `([A-Z_]+)`", file.read_text(), re.MULTILINE)}


def test_every_alert_and_hold_has_a_runbook() -> None:
    assert ADVICE.keys() - documented() == set()


def test_every_error_code_has_a_runbook() -> None:
    assert codes_in_source() - documented() == set()


def test_every_runbook_is_about_a_code_that_exists() -> None:
    source = "\n".join(file.read_text() for suffix in ("py", "sql") for file in SOURCE.rglob(f"*.{suffix}"))
    assert [code for code in sorted(documented()) if code not in source] == []
