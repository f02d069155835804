"""Every snippet in docs/python.md runs, and prints what its comments say."""

import re
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest

from support.command_line import CommandLine
from support.postgres_servers import run_aside

TIMEOUT_S = 60.0
PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
HANDLER, *PRODUCERS = SNIPPETS


def test_first_snippet_is_the_handler() -> None:
    assert HANDLER.startswith("# app.py\n")
    assert len(PRODUCERS) == 8


def test_snippets_print_what_their_comments_say(tmp_path: Path, dsn: str) -> None:
    (tmp_path / "app.py").write_text(HANDLER)
    windlass = CommandLine(tmp_path, {"DATABASE_URL": dsn})
    worker = ("worker", "--queue", "numbers", "--handler", "app:double")
    with windlass.start(*worker, stderr=subprocess.DEVNULL) as process:
        try:
            for snippet in PRODUCERS:
                done = subprocess.run(
                    [sys.executable, "-c", snippet],
                    cwd=tmp_path,
                    env=windlass.environment(),
                    timeout=TIMEOUT_S,
                    capture_output=True,
                    text=True,
                    check=False,
                )
                assert done.returncode == 0, f"{snippet}\n{done.stderr}"
                assert_printed(snippet, done.stdout)
        finally:
            process.terminate()


@pytest.mark.parametrize("driver", ["import psycopg\n", "from sqlalchemy ", "import django\n"])
def test_task_of_a_cancelled_transaction_does_not_exist(tmp_path: Path, dsn: str, driver: str) -> None:
    """The snippets as they stand commit. asyncpg's shows a rollback itself."""
    (snippet,) = [snippet for snippet in PRODUCERS if driver in snippet]
    # The transaction is cancelled in its last line.
    cancelled, count = re.subn(r"^( +)print\(.*$", r"\g<0>\n\1raise SystemExit(3)", snippet, flags=re.MULTILINE)
    assert count == 1

    async def tasks() -> int:
        connection = await asyncpg.connect(dsn)
        found: int = await connection.fetchval("select count(*) from windlass.tasks")
        await connection.close()
        return found

    for text, code, expected in ((cancelled, 3, 0), (snippet, 0, 1)):
        done = subprocess.run(
            [sys.executable, "-c", text],
            cwd=tmp_path,
            env=CommandLine(tmp_path, {"DATABASE_URL": dsn}).environment(),
            timeout=TIMEOUT_S,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert done.stdout == "True\n", "the task was enqueued before the end of the transaction"
        assert run_aside(tasks()) == expected


def assert_printed(snippet: str, output: str) -> None:
    expected = re.findall(r"# → (.*)$", snippet, re.MULTILINE)
    # A name in braces stands for any number.
    patterns = [re.sub(r"\\\{waiting\\\}", r"\\d+", re.escape(line)) for line in expected]
    lines = output.splitlines()
    assert len(lines) == len(expected), output
    for pattern, line in zip(patterns, lines, strict=True):
        assert re.fullmatch(pattern, line), (pattern, line)


@pytest.mark.parametrize("name", ["hello.py", "hello_async.py"])
def test_linked_examples_exist(name: str) -> None:
    assert (Path(__file__).parents[2] / "examples" / name).exists()
