"""Checks the shape of the tree: unique class names, bounded files, short test names, no module named by a metaphor.

A reader who searches for a class finds one definition, and a file fits into one sitting. Vendored files do not count.
"""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

MAX_SOURCE_LINES = 450
MAX_TEST_LINES = 700
MAX_TEST_NAME = 75
# Bare verb forms, adverbs and metaphors that were once module names.
BANNED_MODULES = re.compile(
    r"^(?:acts|doing|looking|thinking|kept|measuring|documented|compatible|face|faces|gate|guard|live|shapes|beside|aside|"
    r"plain|draft|evidence|refusal|alarm|asking|sole|greet|line|seats?|room|roster|placing|folder|enlist|frames|remark|"
    r"allowance|examine|preparing|reading|script|bell|journal|hiring|words|attention|link|watch|story|house|crew|bed|"
    r"planes|worlds|utils?|helpers|misc|common)$"
)


def findings() -> list[str]:
    found = []
    classes: dict[str, list[str]] = defaultdict(list)
    for path in sorted(Path("src").rglob("*.py")):
        text = path.read_text()
        if BANNED_MODULES.match(path.stem):
            found.append(f"{path}: rename the module after what it contains")
        if (count := text.count("\n")) > MAX_SOURCE_LINES:
            found.append(f"{path}: {count} lines, at most {MAX_SOURCE_LINES}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(str(path))
    found += [f"class {name} is defined in {', '.join(paths)}" for name, paths in classes.items() if len(paths) > 1]
    test_modules: dict[str, list[str]] = defaultdict(list)
    for path in sorted(Path("tests").rglob("*.py")):
        text = path.read_text()
        if path.stem.startswith("test_"):
            test_modules[path.stem].append(str(path))
        if (count := text.count("\n")) > MAX_TEST_LINES:
            found.append(f"{path}: {count} lines, at most {MAX_TEST_LINES}")
        for node in ast.walk(ast.parse(text)):
            is_test = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
            if is_test and len(node.name) > MAX_TEST_NAME:
                found.append(
                    f"{path}:{node.lineno}: {node.name} has {len(node.name)} characters, at most {MAX_TEST_NAME}"
                )
    # pytest imports test files by their name alone.
    found += [f"{' and '.join(paths)}: name them apart" for paths in test_modules.values() if len(paths) > 1]
    return found


if __name__ == "__main__":
    problems = findings()
    print("\n".join(problems) or "structure: no findings")
    sys.exit(1 if problems else 0)
