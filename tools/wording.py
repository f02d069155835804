"""Counts words of the old project dialect per 1,000 lines, and fails above the limit.

The standard is the word list in CONTRIBUTING.md: one word per concept, plain technical English. This check finds the
words that the list replaces, in identifiers as well as in prose. It cannot judge whether a sentence is clear.

`python tools/wording.py` prints the count per package; `--list` prints every hit with file and line.
"""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

LIMIT_PER_1000 = 0.5
SUFFIXES = {".py", ".sql", ".html", ".js", ".sh", ".md", ".j2", ".toml", ".yml", ".css"}
ROOTS = ("src", "docs", "deploy", "examples", "tools", "bench", "README.md", "CONTRIBUTING.md")

BANNED = (
    # Agents without nouns.
    r"whoever|whom|whosever|nobody|somebody|anybody|everybody",
    # Passives of saying, and a private word for logging.
    r"told|heard|by its own word|has no word|no word from|the say",
    # Relative clauses and idioms used as nouns.
    r"at hand|the matter|of ours|of theirs|to be had|all the same|for ever|not any more|beside",
    r"is over|are over|was over",
    r"so (?:many|much|often)(?! as)|so long(?! as)|good night|left behind|stopped to answer",
    # Words that the word list replaces.
    r"hire|hires|hired|hiring|hirings|rehired|let go|lets? (?:\w+ )?go|letting (?:\w+ )?go",
    r"stray|strays|mend|mends|mended|mending",
    r"heed|heeds|heeded|alarm|alarms|brake|brakes|weather|luck|lucks|wish|wishes|trouble|troubles|enlist|enlists|enlisted",
    r"winds? down|winding down|wound down|given up|gives? up on|put off|puts off|bears? with|sent away|acquit\w*",
    r"is paid|are paid|was paid|paid for|what is paid|doorbell|storyteller|lives through|lived through",
)
# Hits that are right where they stand, with the reason.
ALLOWED: dict[str, str] = {
    "tools/wording.py": "the list itself",
    "src/windlass/dashboard/static/uplot.js": "vendored",
    "CONTRIBUTING.md": "the word list names the words that it replaces",
}
VENDORED = re.compile(r"/static/(?:uplot|idiomorph|htmx)|/vendor/")
_PATTERN = re.compile(r"(?<![A-Za-z])(?:" + "|".join(BANNED) + r")(?![A-Za-z])", re.IGNORECASE)


def hits_in(text: str) -> list[tuple[int, str]]:
    """Line number and word of every banned word in a text."""
    return [
        (number, match.group(0).lower())
        for number, line in enumerate(text.splitlines(), 1)
        for match in _PATTERN.finditer(line)
    ]


def package_of(path: Path) -> str:
    parts = path.parts
    if parts[0] != "src":
        return parts[0]
    return "/".join(parts[1:3]) if len(parts) > 3 else "/".join(parts[1:2])


def main() -> int:
    listed = subprocess.run(["git", "ls-files", *ROOTS], capture_output=True, text=True, check=True).stdout.splitlines()
    lines: Counter[str] = Counter()
    hits: Counter[str] = Counter()
    for path in map(Path, listed):
        if path.suffix not in SUFFIXES or not path.is_file() or VENDORED.search(str(path)) or str(path) in ALLOWED:
            continue
        text = path.read_text()
        found = hits_in(text)
        lines[package_of(path)] += text.count("\n")
        hits[package_of(path)] += len(found)
        if "--list" in sys.argv:
            for number, word in found:
                print(f"{path}:{number}: {word}")
    for package in sorted(lines):
        if hits[package] or "--all" in sys.argv:
            print(f"{package:32} {hits[package]:5} in {lines[package]:6} lines")
    rate = 1000 * hits.total() / max(lines.total(), 1)
    print(
        f"wording: {hits.total()} banned words in {lines.total()} lines, {rate:.2f} per 1,000 (limit {LIMIT_PER_1000})"
    )
    return 0 if rate <= LIMIT_PER_1000 else 1


if __name__ == "__main__":
    sys.exit(main())
