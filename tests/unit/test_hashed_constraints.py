"""constraints-hashed.txt has every version of constraints.txt, with hashes and without addresses."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_hashed_constraints_match_constraints() -> None:
    plain = {
        line.strip()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.strip() and not line.startswith("#")
    }
    text = (ROOT / "constraints-hashed.txt").read_text()
    blocks = re.split(r"\n(?=\S)", text.partition("\n")[2].rstrip())
    hashed = {block.split(" \\\n")[0].strip(): re.findall(r"--hash=sha256:[0-9a-f]{64}\b", block) for block in blocks}
    assert hashed.keys() == plain, "run: python tools/hashed_constraints.py"
    assert all(hashed.values())
    assert "://" not in text
