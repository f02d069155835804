"""The threat model in docs/security.md names tests, and each of them exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ATTACKERS = ("Stolen worker", "Malicious payload", "Leaked join token", "Compromised producer", "Curious viewer")


def test_every_line_of_the_threat_model_names_existing_tests() -> None:
    section = (ROOT / "docs" / "security.md").read_text().partition("## Threat model")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 20
    assert all(attacker in section for attacker in (*ATTACKERS, "Hostile local user"))
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^\s*(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named, row
        assert set(named) <= defined, set(named) - defined
