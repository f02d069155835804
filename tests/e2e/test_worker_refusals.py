"""A worker that cannot start exits with code 2 and one sentence that says what to do."""

import os
import subprocess
from pathlib import Path

import pytest

from support.worker_harness import HERE, PROGRAM

NO_DATABASE = "postgresql://user@127.0.0.1:1/nothing"
SECONDS = 30

MODULES = {
    "imports_missing.py": "import a_missing_module\ndef handler(task): ...\n",
    "breaks.py": "1 / 0\n",
    "exits.py": "import sys\nsys.exit('not today')\n",
    "kills_itself.py": "import os\nprint('bye')\nos._exit(5)\n",
    "odd.py": "value = 1\ndef none(): ...\ndef two(task, other): ...\n",
}

REFUSALS = [
    (
        "the module is missing",
        ["--handler", "nowhere:handler"],
        "cannot import handler nowhere:handler: No module named 'nowhere'. "
        "Run from the folder that contains nowhere.py, or set --chdir (in a fleet: chdir).",
    ),
    (
        "the module of a package is missing",
        ["--handler", "nowhere.deep.down:handler"],
        "cannot import handler nowhere.deep.down:handler: No module named 'nowhere'. "
        "Run from the folder that contains nowhere/, or set --chdir (in a fleet: chdir).",
    ),
    (
        "a module that the handler imports is missing",
        ["--handler", "imports_missing:handler"],
        "cannot import handler imports_missing:handler: No module named 'a_missing_module'. "
        "Install a_missing_module in this environment.",
    ),
    (
        "the import raises",
        ["--handler", "breaks:handler"],
        "cannot import handler breaks:handler: ZeroDivisionError: division by zero. Fix the module first.",
    ),
    (
        "the import exits",
        ["--handler", "exits:handler"],
        "cannot import handler exits:handler: SystemExit: not today. Fix the module first.",
    ),
    (
        "the import ends the process",
        ["--handler", "kills_itself:handler"],
        "cannot import handler kills_itself:handler: the handler's process exited with code 5; last output: bye",
    ),
    (
        "the function is missing",
        ["--handler", "odd:nothing"],
        "cannot find nothing in odd. Check the name after the colon.",
    ),
    (
        "the function is a value",
        ["--handler", "odd:value"],
        "odd:value is not callable. A handler is a function that takes the task.",
    ),
    (
        "the function takes no task",
        ["--handler", "odd:none"],
        "odd:none does not take one argument. A handler takes the task.",
    ),
    (
        "no function is named",
        ["--handler", "odd"],
        "'odd' does not name a handler. Write package.module:function.",
    ),
    (
        "a sync handler is to run inline",
        ["--inline", "--chdir", str(HERE), "--handler", "handlers:echo"],
        "handlers:echo is not an async function, which --inline requires. Write `async def` or omit --inline.",
    ),
    (
        "the import exits inline",
        ["--inline", "--handler", "exits:handler"],
        "cannot import handler exits:handler: SystemExit: not today. Fix the module first.",
    ),
    (
        "a command is to run inline",
        ["--inline", "--exec", "cat"],
        "--inline needs --handler: a command cannot run inside the worker.",
    ),
    (
        "there is no such command",
        ["--exec", "no-such-command --now"],
        "cannot find the command 'no-such-command'. Check the name and the PATH.",
    ),
    (
        "the command's quotes are open",
        ["--exec", "echo 'half"],
        'cannot parse the command "echo \'half": No closing quotation. Check its quotes.',
    ),
    (
        "nothing is to run",
        [],
        "pass exactly one of --handler and --exec.",
    ),
    (
        "two things are to run",
        ["--handler", "odd:two", "--exec", "cat"],
        "pass exactly one of --handler and --exec.",
    ),
    (
        "the database is not there",
        ["--exec", "cat"],
        "connecting: the database at 127.0.0.1:1 cannot be reached",
    ),
    (
        "the queue's name is none",
        ["--exec", "cat", "--queue", "no spaces"],
        "'no spaces' cannot be a queue's name: use letters, digits and _ . : -, "
        "starting with a letter or digit, at most 63 characters.",
    ),
    (
        "the lease is shorter than three beats",
        ["--exec", "cat", "--lease", "10"],
        "lease_s is 10 and heartbeat_interval_s is 5: "
        "a lease must be at least three heartbeat intervals, or one lost packet costs a worker its tasks.",
    ),
    (
        "more at once than a heartbeat can name",
        ["--exec", "cat", "--concurrency", "10001"],
        "invalid value for '--concurrency'",
    ),
    (
        "there is no such folder",
        ["--exec", "cat", "--chdir", "/nowhere"],
        "cannot change to the folder /nowhere: No such file or directory. Check --chdir.",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS])
def test_worker_that_cannot_start_prints_reason(tmp_path: Path, arguments: list[str], message: str) -> None:
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [PROGRAM, "worker", "--queue", "work", *arguments],
        cwd=tmp_path,
        env={**os.environ, "DATABASE_URL": NO_DATABASE},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 2
    said = done.stderr.splitlines()[-1]
    assert said.startswith("windlass: ")
    assert message in said
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
