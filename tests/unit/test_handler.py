"""The interface for handler authors: loading handlers, reporting progress, formatting errors."""

import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from windlass.model.error_text import error_headline
from windlass.model.errors import HandlerNotFound
from windlass.model.task import MAX_ERROR_CHARACTERS, MAX_NOTE_CHARACTERS, truncate_error
from windlass.worker.handler import RunningTask, format_exception, load_handler
from windlass.worker.stack_frames import shorten_frames

MODULES = {
    "good.py": "def handler(task): return 1\nclass Box:\n    @staticmethod\n    def inner(task): return 2\n",
    "callable_object.py": "class C:\n    def __call__(self, task): return 3\nhandler = C()\n",
    "defaults.py": "def handler(task, more=1): return 4\n",
    "package/__init__.py": "",
    "package/good.py": "def handler(task): return 5\n",
    "package/bad.py": "from package import nothing_like_it\n",
    "package/stranger.py": "import a_missing_module.deep\n",
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
def test_handler_is_loaded_from_current_folder(spec: str, result: int) -> None:
    handler: Any = load_handler(spec)
    assert handler(None) == result


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere:handler", "Run from the folder that contains nowhere.py, or set --chdir (in a fleet: chdir)."),
        ("nowhere:handler", "cannot import handler nowhere:handler: No module named 'nowhere'."),
        ("package.nowhere:handler", "Run from the folder that contains package/, or set --chdir (in a fleet: chdir)."),
        ("package.nowhere.deep:handler", "Run from the folder that contains package/, or set --chdir"),
        ("package.stranger:handler", "Install a_missing_module in this environment."),
        ("package.bad:handler", "package.bad:handler: ImportError: cannot import name 'nothing_like_it'"),
        ("syntax:handler", "cannot import handler syntax:handler: SyntaxError: "),
        ("exits:handler", "cannot import handler exits:handler: SystemExit: 1. Fix the module first."),
        ("good", "'good' does not name a handler. Write package.module:function."),
        ("good:", "'good:' does not name a handler"),
        (":handler", "':handler' does not name a handler"),
        ("good:nothing", "cannot find nothing in good. Check the name after the colon."),
        ("good:Box.nothing", "cannot find Box.nothing in good. Check the name after the colon."),
        ("odd:nothing", "cannot find nothing in odd"),
        ("odd:value", "odd:value is not callable. A handler is a function that takes the task."),
        ("odd:none", "odd:none does not take one argument. A handler takes the task."),
        ("odd:two", "odd:two does not take one argument. A handler takes the task."),
    ],
)
def test_handler_that_cannot_be_loaded_gives_helpful_error(spec: str, message: str) -> None:
    with pytest.raises(HandlerNotFound) as caught:
        load_handler(spec)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("fraction", "note", "expected"),
    [
        (0.5, "half", [(0.5, "half")]),
        (0.5, None, [(0.5, None)]),
        (-1, None, [(0.0, None)]),
        (7, None, [(1.0, None)]),
        (float("inf"), None, [(1.0, None)]),
        (float("nan"), "a diverged loss", []),
        (True, 42, [(1.0, "42")]),
        (0, "x" * 1000, [(0.0, "x" * MAX_NOTE_CHARACTERS)]),
    ],
)
def test_progress_is_clamped_and_note_truncated(
    fraction: float, note: Any, expected: list[tuple[float, str | None]]
) -> None:
    reports: list[tuple[float, str | None]] = []
    task = RunningTask(1, "q", None, 1, 3, "token", _report=lambda *report: reports.append(report))
    task.progress(fraction, note)
    assert reports == expected


def test_truncated_error_keeps_both_ends() -> None:
    assert truncate_error("cause") == "cause"
    text = truncate_error("what: " + "x" * 10_000_000 + "cause")
    assert text.startswith("what: x")
    assert " ... " in text
    assert text.endswith("xcause")
    assert len(text) == MAX_ERROR_CHARACTERS


def raise_deep(frames: int, message: str) -> None:
    # Two functions, because a traceback shows a repeated line only three times.
    if frames:
        call_raise_deep(frames - 1, message)
    raise ValueError(message)


def call_raise_deep(frames: int, message: str) -> None:
    raise_deep(frames, message)


@pytest.mark.parametrize("frames", [0, 100], ids=["shallow stack", "deep stack"])
def test_exception_with_long_message_keeps_type_and_start(frames: int) -> None:
    with pytest.raises(ValueError) as raised:
        raise_deep(frames, "it begins " + "x" * 3_000_000 + " it ends")
    text = format_exception(raised.value)
    assert len(text) <= MAX_ERROR_CHARACTERS
    assert text.startswith("Traceback (most recent call last):\n")
    assert "\nValueError: it begins xxx" in text
    assert text.endswith("xxx it ends\n")


def raise_through(folder: Path, frames: int) -> Callable[[], None]:
    """A handler that calls itself twice through that many frames of a library, then raises OSError."""
    names = [f"call_{number}_{'x' * 60}" for number in range(frames)]
    lines = [f"def {name}(run): {following}(run)" for name, following in pairwise(names)]
    files = {
        "venv/lib/python3/site-packages/torch/calls.py": [*lines, f"def {names[-1]}(run): run()"],
        "own.py": [
            *("def first():", f"    {names[0]}(second)", "def second():", f"    {names[0]}(third)"),
            *("def third():", "    raise OSError('no disk')"),
        ],
    }
    space: dict[str, Any] = {}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("\n".join(content))
        exec(compile("\n".join(content), str(folder / name), "exec"), space)  # noqa: S102
    first: Callable[[], None] = space["first"]
    return first


@pytest.mark.parametrize("is_group", [False, True], ids=["exception", "exception group"])
def test_library_frames_are_left_out_before_own_frames(tmp_path: Path, is_group: bool) -> None:
    with pytest.raises(Exception) as raised:
        try:
            raise_through(tmp_path, 200)()
        except OSError as error:
            if is_group:
                raise ExceptionGroup("both", [error]) from None
            raise
    text = format_exception(raised.value)
    for function in ("first", "second", "third"):
        assert f"in {function}\n" in text
    assert text.count("[200 frames in torch]\n") == 2
    assert " ... " not in text
    assert error_headline(text) == ("ExceptionGroup: both (1 sub-exception)" if is_group else "OSError: no disk")


def test_short_traceback_keeps_library_frames(tmp_path: Path) -> None:
    with pytest.raises(OSError) as raised:
        raise_through(tmp_path, 3)()
    assert "frames in" not in format_exception(raised.value)


def test_frames_of_an_installed_handler_are_kept(tmp_path: Path) -> None:
    """The project is installed with pip, as on a rented machine: its package is no library."""
    frame = '  File "/srv/venv/lib/python3.11/site-packages/{}", line 1, in f\n'
    parts = ["Traceback\n", *[frame.format("shop/app.py")] * 2, *[frame.format("torch/a.py")] * 3, "OSError: x\n"]
    assert shorten_frames(parts) == [
        "Traceback\n", *[frame.format("shop/app.py")] * 2, "  [2 frames in torch]\n", frame.format("torch/a.py"),
        "OSError: x\n",
    ]  # fmt: skip
