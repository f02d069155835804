"""Every command of docs/quickstart.md and README.md runs as it stands, on an empty home directory."""

from collections.abc import Iterator

import pytest

from support.page_reader import PageReader, blocks_of, page_reader

# An installation by pip, and some tasks.
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


@pytest.fixture
def reader() -> Iterator[PageReader]:
    with page_reader() as reader:
        yield reader


def test_quickstart_runs_word_by_word(reader: PageReader) -> None:
    """It prints what the page says."""
    output, compared = "", 0
    for language, text in blocks_of("docs/quickstart.md"):
        if language == "python":
            (reader.home / text.splitlines()[0].removeprefix("# ")).write_text(text)
        elif language == "text":
            # Everything that the page shows, in its order; the program may print more.
            lines = iter(output.splitlines())
            assert all(any(line == printed for printed in lines) for line in text.splitlines()), (text, output)
            compared += 1
        elif text.startswith("windlass up "):
            reader.start_up(text)
        else:
            output = reader.run(text)
    assert compared == 5
    assert reader.stop_up() in (0, 130)


def test_readme_runs_word_by_word(reader: PageReader) -> None:
    """All but `make`, which has tests of its own. The placeholders for a path and a database are filled in."""
    project, outputs = reader.home / "my-project", []
    psql = '"$(windlass db programs)/psql" "$(windlass db url)" -At'
    for language, text in blocks_of("README.md"):
        if text.startswith("make "):
            continue
        if text.startswith("windlass up "):
            reader.start_up(text)
        elif language == "python" and text.startswith("# app.py"):
            (project / "app.py").write_text(text)
        elif language == "python":
            (project / "produce.py").write_text(text)
            outputs.append(reader.run("python produce.py"))
        elif language == "sql":
            (project / "enqueue.sql").write_text(text)
            outputs.append(reader.run(f"{psql} -f enqueue.sql"))
        else:
            command = text.replace("/path/to/windlass", str(reader.repository))
            if "user:password@host" in command:
                # A database of one's own, on the server that runs.
                reader.run(f"{psql} -c 'create database mine'")
                url = reader.run("windlass db url").strip().replace("/windlass?", "/mine?")
                command = command.replace("postgresql://user:password@host:5432/database", f"'{url}'")
            # Ctrl-C, after it has shown something.
            watch = "windlass status --watch"
            command = command.replace(watch, f"timeout --signal INT 5 {watch} || [ $? = 124 ]")
            outputs.append(reader.run(command, keeps=("export ", "mkdir ", ". ")))
    _, first, second, third, migrated = outputs
    assert "Task 1 " in first
    assert '{"url": "https://example.com/lighthouse.mp4"}' in first
    assert second == "{'url': 'https://example.com/lighthouse.mp4'}\n"
    assert third == "3\n"
    assert "applied" in migrated
    assert reader.stop_up() in (0, 130)
