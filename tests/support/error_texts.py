"""Errors as handlers, commands and other languages produce them, with the headline of each."""

import traceback
from concurrent.futures.process import _RemoteTraceback


def _traceback_of(error: BaseException, cause: BaseException | None = None) -> str:
    try:
        _raise(error, cause)
    except BaseException as raised:
        return "".join(traceback.format_exception(raised))
    return ""


def _raise(error: BaseException, cause: BaseException | None) -> None:
    if cause is None:
        raise error
    try:
        raise cause  # noqa: TRY301 - it needs a traceback of its own
    except Exception as first:
        raise error from first


_CHILD = _traceback_of(KeyError("in the child"))
HEADLINES: dict[str, tuple[str, str]] = {
    "empty": ("", ""),
    "blank": (" \n\t\n", ""),
    "one line": ("never", "never"),
    "several lines without a traceback": ("what: a\nwhere: b\n-- end --", "what: a"),
    "line ends of another system": ("what\r\nwhere\r\n", "what"),
    "message of several lines": (
        _traceback_of(ValueError("could not render: missing 'x'\nsee https://wiki\n-- end of message --")),
        "ValueError: could not render: missing 'x'",
    ),
    "message that begins on the next line": (_traceback_of(ValueError("\n  indented")), "ValueError:"),
    "caused by another exception": (
        _traceback_of(RuntimeError("render failed"), KeyError("x")),
        "RuntimeError: render failed",
    ),
    "quotes the traceback of a child": (
        _traceback_of(RuntimeError(f"the child failed:\n{_CHILD}")),
        "RuntimeError: the child failed:",
    ),
    "raised in a pool of processes": (
        _traceback_of(ValueError("bad frame"), _RemoteTraceback(f'\n"""\n{_CHILD}"""')),
        "ValueError: bad frame",
    ),
    "syntax error": (_traceback_of(SyntaxError("bad", ("a.py", 1, 2, "f(", 1, 3))), "SyntaxError: bad"),
    "group": (_traceback_of(ExceptionGroup("both", [ValueError("a")])), "ExceptionGroup: both (1 sub-exception)"),
    "without frames": ("Traceback (most recent call last):\nSystemError: x", "SystemError: x"),
    "cut before the exception": ("Traceback (most recent call last):\n  File", "Traceback (most recent call last):"),
    "crash": (
        f"killed by SIGSEGV in video.py:22 render; last output:\n{_CHILD}",
        "killed by SIGSEGV in video.py:22 render",
    ),
    "long": ("x" * 1_000, "x" * 199 + "…"),
}
