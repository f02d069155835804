"""Checks the shape of the tree: unique class names, bounded files, short test names, no module named by a metaphor.

The event of a log call is a constant "verb object" in lower case, so that a reader can search for it. A predicate
changes nothing. Modules do not import each other in circles.

A reader who searches for a class finds one definition, and a file fits into one sitting. Vendored files do not count.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

MAX_SOURCE_LINES = 450
MAX_TEST_LINES = 700
# Libraries of others, unchanged.
VENDORED = {"idiomorph.js", "uplot.js"}
MAX_TEST_NAME = 75
# Bare verb forms, adverbs and metaphors that were once module names.
BANNED_MODULES = re.compile(
    r"^(?:acts|doing|looking|thinking|kept|measuring|documented|compatible|face|faces|gate|guard|live|shapes|beside|aside|"
    r"plain|draft|evidence|refusal|alarm|asking|sole|greet|line|seats?|room|roster|placing|folder|enlist|frames|remark|"
    r"allowance|examine|preparing|reading|script|bell|journal|hiring|words|attention|link|watch|story|house|crew|bed|"
    r"planes|worlds|utils?|helpers|misc|common)$"
)
# Verbs that are no nouns. `plan`, `probe`, `process` and `retry` are nouns of the field too. A command of `windlass` is
# named by its verb, and so is its module in cli/.
BARE_VERBS = re.compile(
    r"^(?:apply|check|close|connect|create|delete|derive|describe|evaluate|execute|explain|fetch|find|format|get|join|keep|"
    r"launch|make|migrate|observe|open|parse|prepare|read|reconcile|remove|render|resolve|run|send|serve|settle|shut|"
    r"spawn|start|stop|submit|validate|verify|write)(?:_|$)"
)
# A program of its own on new machines, which is named by what it does there.
NAMED_BY_A_VERB = {"fetch_wheel"}
# The first words of log events, in the infinitive or, of what has just succeeded, in the past tense.
LOG_VERB = re.compile(
    r"(?:acquire|announce|answer|apply|call|change|check|close|compare|count|create|delete|deliver|drain|drop|evaluate|"
    r"execute|fail|find|finish|fire|grow|handle|ignore|join|keep|kill|label|list|load|lose|mark|observe|prepare|price|"
    r"reach|read|reconcile|record|recover|refuse|register|reject|release|reload|remove|renew|replace|report|restart|run|"
    r"send|settle|shut|skip|start|stop|submit|take|update|wait|wake|write)(?:d|ed|ped)?|found|lost"
)
LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}
# Methods of containers, and of our own objects, that change them.
MUTATING_METHODS = {
    *("add", "append", "appendleft", "clear", "difference_update", "discard", "extend", "insert", "pop", "popitem"),
    *("popleft", "put", "put_nowait", "record", "remove", "reverse", "setdefault", "settle", "sort", "subtract"),
    "update",
}
# "%s": the logger of a library has no fields.
LOG_EVENT = re.compile(r"[a-z]+( [a-z0-9]+)+(: %s)?")


def log_event_findings(tree: ast.AST, path: Path) -> list[str]:
    """Log calls and retry loops (`retrying`) whose event is not a constant `verb object`."""
    found = []
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        # `run(log.info, "event")` logs too.
        for function, arguments in [
            (call.func, call.args),
            *((each, call.args[n:]) for n, each in enumerate(call.args, 1)),
        ]:
            receiver, _, method = ast.unparse(function).rpartition(".")
            is_log = method in LOG_METHODS and re.search(r"(^|[._])(log|get_logger\(.*\))$", receiver)
            position = 0 if is_log else 1 if method == "retrying" else len(arguments)
            for event in arguments[position : position + 1]:
                text = event.value if isinstance(event, ast.Constant) else None
                is_event = text and LOG_EVENT.fullmatch(text) and LOG_VERB.fullmatch(text.partition(" ")[0])
                # `retrying` itself logs the event of its caller.
                is_argument = isinstance(event, ast.Name) and event.id == "event"
                if not is_event and not is_argument:
                    found.append(
                        f"{path}:{call.lineno}: log event {ast.unparse(event)}: write a constant 'verb object'"
                    )
    return found


def predicate_findings(tree: ast.AST, path: Path) -> list[str]:
    """Functions named `is_` or `has_` that change something other than their own variables."""
    found = []
    for function in ast.walk(tree):
        is_function = isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        if not is_function or not function.name.lstrip("_").startswith(("is_", "has_")):
            continue
        nodes = list(ast.walk(function))
        own = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        for node in nodes:
            changed: ast.expr | None = None
            if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
                changed = node
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                changed = node.func.value if node.func.attr in MUTATING_METHODS else None
            if changed is not None and not (isinstance(root := _root(changed), ast.Name) and root.id in own):
                found.append(f"{path}:{node.lineno}: predicate {function.name} changes {ast.unparse(changed)}")
            if isinstance(node, ast.Global | ast.Nonlocal):
                found.append(f"{path}:{node.lineno}: predicate {function.name} changes {', '.join(node.names)}")
    return found


def _root(expression: ast.expr) -> ast.expr:
    """`a` of `a.b[c].d`."""
    while isinstance(expression, ast.Attribute | ast.Subscript):
        expression = expression.value
    return expression


def import_cycle(modules: Mapping[str, ast.AST]) -> list[str]:
    """The names of modules that import each other in a circle, the first again at the end; empty if there is none.

    Imports within functions, and those for types only, count too.
    """

    def imported(tree: ast.AST) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                names = (f"{node.module}.{alias.name}" for alias in node.names)
                yield from (name if name in modules else node.module for name in names)

    graph = {
        name: {each for each in imported(tree) if each in modules and each != name} for name, tree in modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def source_findings() -> list[str]:
    found = []
    modules: dict[str, ast.AST] = {}
    classes: dict[str, list[str]] = defaultdict(list)
    for path in sorted(Path("src").rglob("*.py")):
        text = path.read_text()
        if BANNED_MODULES.match(path.stem):
            found.append(f"{path}: rename the module after what it contains")
        if BARE_VERBS.match(path.stem) and path.stem not in NAMED_BY_A_VERB and path.parent.name != "cli":
            found.append(f"{path}: name the module by a noun, not by a verb")
        tree = ast.parse(text)
        found += log_event_findings(tree, path) + predicate_findings(tree, path)
        modules[".".join(path.relative_to("src").with_suffix("").parts).removesuffix(".__init__")] = tree
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(str(path))
    if cycle := import_cycle(modules):
        found.append(f"modules import each other: {' -> '.join(cycle)}")
    suffixes = ("py", "sql", "js", "css", "html", "j2", "sh")
    for path in sorted(each for suffix in suffixes for each in Path("src").rglob(f"*.{suffix}")):
        if path.name not in VENDORED and (count := path.read_text().count("\n")) > MAX_SOURCE_LINES:
            found.append(f"{path}: {count} lines, at most {MAX_SOURCE_LINES}")
    found += [f"class {name} is defined in {', '.join(paths)}" for name, paths in classes.items() if len(paths) > 1]
    return found


def test_findings() -> list[str]:
    found = []
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
    problems = source_findings() + test_findings()
    print("\n".join(problems) or "structure: no findings")
    sys.exit(1 if problems else 0)
