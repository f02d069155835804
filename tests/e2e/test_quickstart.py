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
    """All but `make`, which has tests of its own. Only the placeholders for a path and a database are filled in."""
    project, shown = reader.home / "my-project", dict[str, str]()
    blocks = blocks_of("README.md")
    for number, (language, text) in enumerate(blocks):
        if text.startswith("make ") or language == "sql":
            continue
        if language == "python":
            (project / text.splitlines()[0].removeprefix("# ")).write_text(text)
            continue
        # SQL is typed into the program that the block before it opens.
        following_language, following = blocks[number + 1] if number + 1 < len(blocks) else ("", "")
        for line in text.splitlines():
            command = line.partition("  #")[0].strip()
            if command.startswith("windlass up "):
                reader.start_up(line)
            elif "--watch" in command:
                reader.watch(line, until="last hour: 1 complete")
            else:
                typed = following if following_language == "sql" else ""
                shown[command] = reader.run(_filled_in(reader, line), keeps=("export ", "mkdir ", ". "), typed=typed)
    assert "Task 1 " in shown["windlass explain 1"]
    assert '{"url": "https://example.com/lighthouse.mp4"}' in shown["windlass tasks show 1"]
    assert shown["python produce.py"] == "{'url': 'https://example.com/lighthouse.mp4'}\n"
    assert "enqueue \n---------\n       3\n" in shown['"$(windlass db programs)/psql" "$(windlass db url)"']
    assert "applied" in shown["windlass db migrate"]
    assert reader.stop_up() in (0, 130)


def _filled_in(reader: PageReader, line: str) -> str:
    """The line with a clone and a database of this reader."""
    if "user:password@host" not in line:
        return line.replace("/path/to/windlass", str(reader.repository))
    reader.run('"$(windlass db programs)/createdb" --maintenance-db="$(windlass db url)" mine')
    url = reader.run("windlass db url").strip().replace("/windlass?", "/mine?")
    return line.replace("postgresql://user:password@host:5432/database", f"'{url}'")
