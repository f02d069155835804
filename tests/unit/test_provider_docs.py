"""Examples of rented fleets in the documentation set a budget: a reader copies them before reading about cost."""

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_TOML = re.compile(r"^```toml\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _examples() -> list[tuple[str, dict[str, Any]]]:
    folders = [ROOT / name for name in ("docs", "deploy", "examples")]
    pages = [ROOT / "README.md", *(page for folder in folders for page in folder.glob("**/*.md"))]
    texts = [(str(page), block) for page in pages for block in _TOML.findall(page.read_text())]
    texts += [(str(file), file.read_text()) for folder in folders for file in folder.glob("**/*.toml")]
    return [(where, tomllib.loads(text)) for where, text in texts]


def _has_budget(fleet: dict[str, Any]) -> bool:
    return any(key.startswith("budget_per_") for key in fleet)


def test_every_example_of_a_rented_fleet_has_a_budget() -> None:
    rented = [
        (where, name, fleet)
        for where, content in _examples()
        for name, fleet in content.get("fleets", {}).items()
        if isinstance(fleet, dict) and fleet.get("provider") in ("hetzner", "runpod")
    ]
    assert len(rented) >= 3
    assert [(where, name) for where, name, fleet in rented if not _has_budget(fleet)] == []
