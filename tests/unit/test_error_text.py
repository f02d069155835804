"""The headline of an error, and the report of a crashed process."""

import sys

import pytest

from support.error_texts import HEADLINES
from windlass.model.error_text import error_headline
from windlass.worker.crash_report import MAX_OUTPUT_CHARACTERS, MAX_REPORT_CHARACTERS, read_crash

STANDARD_LIBRARY = f"{sys.base_prefix}/lib/python{sys.version_info[0]}.{sys.version_info[1]}"
WORKER = sys.modules["windlass.worker.crash_report"].__file__
# As Python prints it: all threads, the most recent call first, then the extension modules.
DUMP = f"""\
Fatal Python error: Segmentation fault

Thread 0x00007f2 (most recent call first):
  File "{STANDARD_LIBRARY}/threading.py", line 331 in wait
  File "/srv/app/feeder.py", line 9 in feed

Current thread 0x00007f1 (most recent call first):
  File "{STANDARD_LIBRARY}/ctypes/__init__.py", line 519 in string_at
  File "/srv/app/venv/lib/python3.11/site-packages/codec/native.py", line 7 in decode
  File "/srv/app/video.py", line 22 in render
  File "/srv/app/video.py", line 40 in handler
  File "{WORKER}", line 25 in run_handler
  File "<frozen runpy>", line 198 in _run_module_as_main

Extension modules: {", ".join(f"numpy.part_{number}" for number in range(400))} (total: 400)
"""


@pytest.mark.parametrize(("error", "headline"), HEADLINES.values(), ids=HEADLINES)
def test_headline_is_the_first_line_of_the_exception(error: str, headline: str) -> None:
    assert error_headline(error) == headline


def test_headline_of_no_error_is_empty() -> None:
    assert error_headline(None) == ""


def test_crash_names_innermost_frame_of_own_code() -> None:
    crash = read_crash(f"frame 1\n{DUMP}")
    assert crash.place == "video.py:22 render"
    assert crash.output == (
        "frame 1\nFatal Python error: Segmentation fault\n"
        f'  File "{STANDARD_LIBRARY}/ctypes/__init__.py", line 519 in string_at\n'
        '  File "/srv/app/venv/lib/python3.11/site-packages/codec/native.py", line 7 in decode\n'
        '  File "/srv/app/video.py", line 22 in render\n'
        '  File "/srv/app/video.py", line 40 in handler'
    )


def test_long_output_before_a_crash_does_not_displace_its_frames() -> None:
    crash = read_crash("x" * 100_000 + "\n" + DUMP)
    assert crash.place == "video.py:22 render"
    assert '"/srv/app/video.py", line 22 in render' in crash.output
    assert len(crash.output) < MAX_OUTPUT_CHARACTERS + MAX_REPORT_CHARACTERS


def test_long_stack_of_a_crash_keeps_own_frames() -> None:
    library = '  File "/srv/venv/lib/python3.11/site-packages/torch/module.py", line {} in call\n'
    own = '  File "/srv/app/video.py", line 22 in render\n'
    dump = DUMP.replace(own, "".join(map(library.format, range(200))) + own)
    crash = read_crash(dump)
    assert own.strip() in crash.output
    assert '"/srv/app/video.py", line 40 in handler' in crash.output
    # The frame of the crash is kept; then follow those of the codec and of torch.
    assert "[201 frames in codec, torch]" in crash.output


def test_crash_inside_a_library_names_that_frame() -> None:
    dump = DUMP.replace("/srv/app/video.py", f"{STANDARD_LIBRARY}/json/decoder.py")
    assert read_crash(dump).place == "__init__.py:519 string_at"


@pytest.mark.parametrize("output", ["", "frame 1", "Fatal Python error: Aborted", f"{DUMP[:100]}"])
def test_output_without_a_stack_names_no_place(output: str) -> None:
    assert read_crash(output) == (None, output.strip())
