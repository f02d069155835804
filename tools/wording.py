"""Counts words of the old project dialect per 1,000 lines, and finds long sentences and comments without a subject.

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
MAX_SENTENCE_WORDS = 35
SUFFIXES = {".py", ".sql", ".html", ".js", ".sh", ".md", ".j2", ".toml", ".yml", ".css"}
ROOTS = ("src", "docs", "deploy", "examples", "tools", "bench", "tests", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")

BANNED = (
    # Agents without nouns.
    r"whoever|whom|whosever|nobody|somebody|anybody|everybody",
    # Passives of saying, and private words for logging.
    r"told|heard|by its own word|has no word|no word from|the say",
    # Relative clauses and idioms used as nouns.
    r"at hand|the matter|of ours|of theirs|to be had|all the same|for ever|not any more|beside",
    r"is over|are over|was over|so (?:many|much|often)(?! as)|so long(?! as)|good night|left behind|stopped to answer",
    # Words that the word list replaces.
    r"hire|hires|hired|hiring|hirings|rehired|let go|lets? (?:\w+ )?go|letting (?:\w+ )?go|stray|strays",
    r"mend|mends|mended|mending|heed|heeds|heeded|alarm|alarms|brake|brakes|weather|luck|lucks|wish|wishes",
    r"trouble|troubles|enlist|enlists|enlisted|winds? down|winding down|wound down|given up|gives? up on",
    r"put off|puts off|bears? with|sent away|acquit\w*|is paid|are paid|was paid|paid for",
    r"doorbell|storyteller|lives through|lived through",
)
# Files whose hits are right where they stand, with the reason.
ALLOWED = {
    "tools/wording.py": "the list itself",
    "tools/structure.py": "the list of former module names",
    "tests/e2e/test_run_as.py": "nobody is a user of Unix",
    "CONTRIBUTING.md": "the word list names the words that it replaces",
}
VENDORED = re.compile(r"/static/(?:uplot|idiomorph|htmx)|/vendor/")
_PATTERN = re.compile(r"(?<![A-Za-z])(?:" + "|".join(BANNED) + r")(?![A-Za-z])", re.IGNORECASE)
# A comment or docstring without a subject, such as "Of the head." or "As by SIGHUP.". A clause with "as" and a comma may
# belong to a complete sentence.
_FRAGMENT = re.compile(r'(?:^\s*#|""") ?(?:(?:Of|Also|Those) [^#]|As [^,]*$)')
_FENCED = re.compile(r"^\s*```.*?^\s*```", re.MULTILINE | re.DOTALL)


def hits_in(text: str) -> list[tuple[int, str]]:
    """Line number and word of every banned word in a text."""
    return [
        (number, match.group(0).lower())
        for number, line in enumerate(text.splitlines(), 1)
        for match in _PATTERN.finditer(line)
    ]


def fragments_in(source: str) -> list[tuple[int, str]]:
    """Line number and text of every comment of Python or shell code that begins without a subject."""
    return [(number, line) for number, line in enumerate(source.splitlines(), 1) if _FRAGMENT.search(line)]


def long_sentences_in(markdown: str) -> list[str]:
    """Sentences of prose and list items with more than MAX_SENTENCE_WORDS words. Code and tables do not count."""
    prose = _FENCED.sub("", markdown)
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=#)|\n(?=\|)", prose)
    sentences = [
        sentence
        for paragraph in paragraphs
        if not paragraph.lstrip().startswith("|")
        for sentence in re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph.split()))
    ]
    return [sentence for sentence in sentences if len(sentence.split()) > MAX_SENTENCE_WORDS]


def package_of(path: Path) -> str:
    in_package = path.parts[0] == "src" and len(path.parts) > 3
    return "/".join(path.parts[1:3]) if in_package else path.parts[min(1, len(path.parts) - 1)]


def main() -> int:
    listed = subprocess.run(["git", "ls-files", *ROOTS], capture_output=True, text=True, check=True).stdout.splitlines()
    lines: Counter[str] = Counter()
    hits: Counter[str] = Counter()
    long_sentences: list[str] = []
    fragments: list[str] = []
    for path in map(Path, listed):
        if path.suffix not in SUFFIXES or not path.is_file() or VENDORED.search(str(path)):
            continue
        text = path.read_text()
        if path.suffix == ".md":
            long_sentences += [f"{path}: {sentence}" for sentence in long_sentences_in(text)]
        if path.suffix in {".py", ".sh"}:
            fragments += [f"{path}:{number}: {line.strip()}" for number, line in fragments_in(text)]
        if str(path) in ALLOWED:
            continue
        found = hits_in(text)
        lines[package_of(path)] += text.count("\n")
        hits[package_of(path)] += len(found)
        if "--list" in sys.argv:
            for number, word in found:
                print(f"{path}:{number}: {word}")
    for package in sorted(lines):
        if hits[package] or "--all" in sys.argv:
            print(f"{package:32} {hits[package]:5} in {lines[package]:6} lines")
    for sentence in long_sentences:
        print(f"more than {MAX_SENTENCE_WORDS} words: {sentence}")
    for fragment in fragments:
        print(f"comment without a subject: {fragment}")
    rate = 1000 * hits.total() / max(lines.total(), 1)
    print(
        f"wording: {hits.total()} banned words in {lines.total()} lines, {rate:.2f} per 1,000 (limit {LIMIT_PER_1000})"
    )
    return 0 if rate <= LIMIT_PER_1000 and not long_sentences and not fragments else 1


if __name__ == "__main__":
    sys.exit(main())
