"""What a handler's author meets: how handlers are found, and what a task lets them say."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from windlass.model.errors import HandlerNotFound
from windlass.model.task import MAX_ERROR_CHARACTERS, MAX_NOTE_CHARACTERS, truncate_error
from windlass.worker.handler import RunningTask, kept_exception, load_handler

MODULES = {
    "good.py": "def handler(task): return 1\nclass Box:\n    @staticmethod\n    def inner(task): return 2\n",
    "callable_object.py": "class C:\n    def __call__(self, task): return 3\nhandler = C()\n",
    "defaults.py": "def handler(task, more=1): return 4\n",
    "package/__init__.py": "",
    "package/good.py": "def handler(task): return 5\n",
    "package/bad.py": "from package import nothing_like_it\n",
    "package/stranger.py": "import a_module_that_nobody_has.deep\n",
    "syntax.py": "def (:\n",
    "odd.py": "value = 1\nnothing = None\ndef none(): ...\ndef two(task, other): ...\n",
    "exits.py": "import sys\nsys.exit(1)\n",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("spec", "result"),
    [
        ("good:handler", 1),
        ("good:Box.inner", 2),
        ("callable_object:handler", 3),
        ("defaults:handler", 4),
        ("package.good:handler", 5),
    ],
)
def test_a_handler_is_found_from_the_folder_we_are_in(spec: str, result: int) -> None:
    handler: Any = load_handler(spec)
    assert handler(None) == result


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("nowhere:handler", "Run it from the folder that holds nowhere.py, or set --chdir (chdir of its fleet)."),
        ("nowhere:handler", "No module named 'nowhere')."),
        ("package.nowhere:handler", "Run it from the folder that holds package/, or set --chdir (chdir of its fleet)."),
        ("package.nowhere.deep:handler", "Run it from the folder that holds package/, or set --chdir"),
        ("package.stranger:handler", "Install a_module_that_nobody_has in this environment."),
        ("package.bad:handler", "cannot import package.bad:handler: ImportError: cannot import name 'nothing_like_it'"),
        ("syntax:handler", "cannot import syntax:handler: SyntaxError: "),
        ("exits:handler", "cannot import exits:handler: SystemExit: 1. Fix the module first."),
        ("good", "'good' does not name a handler: write package.module:function."),
        ("good:", "'good:' does not name a handler"),
        (":handler", "':handler' does not name a handler"),
        ("good:nothing", "cannot find nothing in good: check the name after the colon."),
        ("good:Box.nothing", "cannot find Box.nothing in good: check the name after the colon."),
        ("odd:nothing", "cannot find nothing in odd"),
        ("odd:value", "odd:value is not callable: a handler is a function that takes the task."),
        ("odd:none", "odd:none does not take one argument: a handler is a function of the task."),
        ("odd:two", "odd:two does not take one argument: a handler is a function of the task."),
    ],
)
def test_a_handler_that_cannot_be_found_is_refused_with_what_to_do(spec: str, sentence: str) -> None:
    with pytest.raises(HandlerNotFound) as refused:
        load_handler(spec)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("fraction", "note", "told"),
    [
        (0.5, "half", [(0.5, "half")]),
        (0.5, None, [(0.5, None)]),
        (-1, None, [(0.0, None)]),
        (7, None, [(1.0, None)]),
        (float("inf"), None, [(1.0, None)]),
        (float("nan"), "a loss that exploded", []),
        (True, 42, [(1.0, "42")]),
        (0, "x" * 1000, [(0.0, "x" * MAX_NOTE_CHARACTERS)]),
    ],
)
def test_progress_is_a_number_from_0_to_1_and_a_short_text_whatever_a_handler_says(
    fraction: float, note: Any, told: list[tuple[float, str | None]]
) -> None:
    heard: list[tuple[float, str | None]] = []
    task = RunningTask(1, "q", None, 1, 3, "token", _report=lambda *report: heard.append(report))
    task.progress(fraction, note)
    assert heard == told


def test_of_a_long_error_both_ends_are_kept() -> None:
    assert truncate_error("cause") == "cause"
    kept = truncate_error("what: " + "x" * 10_000_000 + "cause")
    assert kept.startswith("what: x")
    assert " ... " in kept
    assert kept.endswith("xcause")
    assert len(kept) == MAX_ERROR_CHARACTERS


def deep_down(frames: int, message: str) -> None:
    # By two names, for Python tells of the same line only three times.
    if frames:
        deeper_down(frames - 1, message)
    raise ValueError(message)


def deeper_down(frames: int, message: str) -> None:
    deep_down(frames, message)


@pytest.mark.parametrize("frames", [0, 100], ids=["at once", "deep down"])
def test_an_exception_with_a_long_message_keeps_its_type_and_where_it_began(frames: int) -> None:
    with pytest.raises(ValueError) as raised:
        deep_down(frames, "it begins " + "x" * 3_000_000 + " it ends")
    kept = kept_exception(raised.value)
    assert len(kept) <= MAX_ERROR_CHARACTERS
    assert kept.startswith("Traceback (most recent call last):\n")
    assert "\nValueError: it begins xxx" in kept
    assert kept.endswith("xxx it ends\n")
