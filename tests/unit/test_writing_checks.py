"""The checks of `tools/wording.py` and `tools/structure.py`: what they find, and what they leave alone."""

import ast
import importlib.util
import itertools
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("call", "is_found"),
    [
        ('log.info("registered worker", fleet=1)', False),
        ('self._log.warning("send heartbeat failed")', False),
        ('get_logger("windlass.up").warning("run handlers as root")', False),
        ('retrying(call, "register node failed")', False),
        ("log.warning(event, error=1)", False),
        ('print("Done.")', False),
        ('run(log.info, "ignored repeated signal")', False),
        ('run(log.info, "repeated signal ignored")', True),
        ('log.info("ready")', True),
        ('log.info("worker registered")', True),
        ('log.error("restart program, waiting")', True),
        ('log.error(f"start {name} failed")', True),
        ('retrying(call, "register node failed, retrying")', True),
    ],
)
def test_log_events_are_a_verb_and_its_object(call: str, is_found: bool) -> None:
    assert bool(tool("structure").log_event_findings(ast.parse(call), Path("x.py"))) is is_found


@pytest.mark.parametrize(
    ("body", "is_found"),
    [
        ("return self.a in self.b", False),
        ("seen = set(); seen.add(1); return 1 in seen", False),
        ("row = [0]; row[0] = 1; return bool(row)", False),
        ("self.a = 1; return True", True),
        ("self.counts[x] += 1; return True", True),
        ("del self.counts[x]; return True", True),
        ("x.seen_at = 1; return True", True),
        ("self.missing.pop(x, None); return True", True),
        ("return bool(x.names.setdefault(1, 2))", True),
        ("global count; count = 1; return True", True),
    ],
)
@pytest.mark.parametrize("name", ["is_late", "_has_line", "has_line"])
def test_predicates_change_nothing(name: str, body: str, is_found: bool) -> None:
    tree = ast.parse(f"class C:\n    async def {name}(self, x): {body}")
    assert bool(tool("structure").predicate_findings(tree, Path("x.py"))) is is_found
    other = ast.parse(f"def record(self, x): {body}")
    assert not tool("structure").predicate_findings(other, Path("x.py"))


@pytest.mark.parametrize(
    ("sources", "cycle"),
    [
        ({"p.a": "from p import b", "p.b": "import os", "p": ""}, []),
        ({"p.a": "from p import b", "p.b": "from p.a import f", "p": ""}, ["p.a", "p.b"]),
        ({"p.a": "import p.b", "p.b": "import p.c", "p.c": "def f():\n    from p.a import g"}, ["p.a", "p.b", "p.c"]),
    ],
)
def test_modules_that_import_each_other_are_found(sources: dict[str, str], cycle: list[str]) -> None:
    found = tool("structure").import_cycle({name: ast.parse(source) for name, source in sources.items()})
    assert sorted(set(found)) == cycle
    for first, second in itertools.pairwise(found):
        assert second.partition(".")[2] in sources[first]


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("# " + "Of the head.", True),
        ('"""' + 'As by SIGHUP."""', True),
        ("# " + "Those that are left.", True),
        ("# As in systemd, an empty value clears the others.", False),
        ("# Office hours only.", False),
        ("# Address of the head.", False),
    ],
)
def test_comments_begin_with_their_subject(line: str, is_found: bool) -> None:
    assert bool(tool("wording").fragments_in(line)) is is_found


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("It drains. Then it stops.", True),
        ("It drains. `up` stops.", True),
        ("word " * 30, True),
        ("[A link](" + "x" * 120 + ")", False),
        ("1. Drain the worker.", False),
        ("- **Drain.** The worker finishes its tasks.", False),
        ("It takes 1.5 s, e.g. on `a. B`.", False),
        ("| It drains. Then it stops. |", False),
        ("```\nIt drains. Then it stops.\n```", False),
        ("The worker drains\nand stops.", True),
        ("word " * 22 + "worker\nand\n" + "word " * 23, True),
        ("word " * 22 + "worker\nand stops.", False),
        ("The worker drains:\nit stops.", False),
        ("- The worker drains\n- and stops", False),
    ],
)
def test_documentation_has_one_sentence_per_line(line: str, is_found: bool) -> None:
    assert bool(tool("wording").layout_findings(line)) is is_found


def test_long_sentences_in_tables_are_found() -> None:
    long_sentence = "a " * 36
    assert tool("wording").long_sentences_in(f"| x | {long_sentence} |")
    assert tool("wording").long_sentences_in(f"- item\n\n  | x | {long_sentence} |")
    assert not tool("wording").long_sentences_in(f"| x | {', '.join(['`a`'] * 40)} |")


@pytest.mark.parametrize(("end", "is_found"), [(":", True), (";", True), (".", False), ("?", False)])
def test_colon_does_not_end_a_sentence(end: str, is_found: bool) -> None:
    text = "a " * 20 + f"b{end} " + "c " * 20
    assert bool(tool("wording").long_sentences_in(text)) is is_found
