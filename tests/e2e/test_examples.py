"""The examples that bring a configuration of their own: each runs with `windlass up`, as its README says."""

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.command_line import CommandLine

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 90.0


@contextmanager
def running(example: str, folder: Path, dsn: str) -> Iterator[CommandLine]:
    copy = folder / example
    shutil.copytree(EXAMPLES / example, copy)
    windlass = CommandLine(copy, {"DATABASE_URL": dsn})
    with (folder / "up.log").open("w") as log:
        up = windlass.start("up", stdout=log, stderr=log)
        try:
            yield windlass
        finally:
            up.send_signal(signal.SIGTERM)
            up.wait(LIMIT_S)


def results(dsn: str, count: int, log: Path) -> list[Any]:
    """The results of all tasks, once all of them are finished."""
    deadline = time.monotonic() + LIMIT_S
    with psycopg.connect(dsn, autocommit=True) as sql:
        while True:
            rows = sql.execute("select status, result, error from windlass.tasks order by id").fetchall()
            if len(rows) == count and all(status in ("complete", "failed") for status, *_ in rows):
                assert all(status == "complete" for status, *_ in rows), rows
                return [result for _, result, _ in rows]
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)


def test_warm_model_is_loaded_once_per_worker(tmp_path: Path, dsn: str) -> None:
    with running("warm-model", tmp_path, dsn) as windlass:
        for number in range(6):
            assert windlass("enqueue", "images", json.dumps({"prompt": f"harbour {number}"})).code == 0
        found = results(dsn, 6, tmp_path / "up.log")
        assert len({result["loaded_by"] for result in found}) <= 2, "max_workers, not tasks"
        pictures = {(windlass.folder / result["file"]).read_bytes() for result in found}
    assert len(pictures) == 6
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)


def test_ffmpeg_transcodes_a_batch(tmp_path: Path, dsn: str) -> None:
    if shutil.which("ffmpeg") is None:
        pytest.skip("ffmpeg is not installed")
    with running("ffmpeg", tmp_path, dsn) as windlass:
        for name in ("one", "two"):
            source = ["ffmpeg", "-nostdin", "-loglevel", "error", "-f", "lavfi", "-i", "testsrc=d=1:s=64x64:r=5"]
            subprocess.run([*source, f"{name}.avi"], check=True, cwd=windlass.folder, timeout=LIMIT_S)
            payload = {"input": f"{name}.avi", "output": f"{name}.mp4"}
            assert windlass("enqueue", "videos", json.dumps(payload)).code == 0
        found = results(dsn, 2, tmp_path / "up.log")
        assert [result["output"] for result in found] == ["one.mp4", "two.mp4"]
        assert all(b"ftyp" in (windlass.folder / result["output"]).read_bytes()[:32] for result in found)
