"""The files of a release: what they contain, and that the wheel works where a person installs it."""

import email
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.wheel_folder import write_wheels
from windlass import __version__

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
BASE_PYTHON = Path(sys._base_executable).resolve()  # type: ignore[attr-defined]
TIMEOUT_S = 240.0
# A build, and an installation of about fifty packages.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
FROM_OUTSIDE = {"deploy/docker": "deploy_files/docker", "deploy/kubernetes": "deploy_files/kubernetes",
                "deploy/systemd": "deploy_files/systemd"}  # fmt: skip


def run(*command: object, **options: Any) -> str:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=TIMEOUT_S, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(directory: Path, *arguments: str) -> Path:
    run(sys.executable, ROOT / "tools" / "release_files.py", "--directory", directory, *arguments)
    return directory


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("release"))


@pytest.fixture(scope="module")
def wheel(release: Path) -> Path:
    return release / f"windlass-{__version__}-py3-none-any.whl"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the wheel needs. No package index is asked."""
    return write_wheels(tmp_path_factory.mktemp("packages"))


def files_below(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_wheel_contains_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {f"windlass/{name}" for name in files_below(ROOT / "src" / "windlass")}
    expected |= {f"windlass_emulators/{name}" for name in files_below(ROOT / "src" / "windlass_emulators")}
    for source, target in FROM_OUTSIDE.items():
        expected |= {f"windlass/{target}/{name}" for name in files_below(ROOT / source)}
    assert names == expected | {"windlass/runbooks.md"}
    for suffix in (".sql", ".html", ".css", ".jinja", ".service", ".sh"):
        assert any(name.endswith(suffix) for name in names), suffix
    assert not [name for name in names if "test" in Path(name).stem.split("_")]


def test_wheel_has_the_licences_of_vendored_scripts(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        licences = {Path(name).name for name in archive.namelist() if "/licenses/" in name}
    assert licences == {"LICENSE", "idiomorph.LICENSE.txt", "uplot.LICENSE.txt"}


def test_description_on_an_index_needs_no_other_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        described = email.message_from_bytes(archive.read(name))
    assert described["Description-Content-Type"] == "text/markdown"
    text = described.get_payload()
    assert isinstance(text, str)
    for command in ("pip install windlass", "pipx install windlass", "uv tool install windlass"):
        assert f"    {command}\n" in text
    assert re.findall(r"\]\((?!https://)[^)]*\)", text) == [], "an index follows no relative link"
    extras = set(re.findall(r"`windlass\[(\w+)\]`", text))
    assert extras and extras <= set(described.get_all("Provides-Extra", []))


def test_source_archive_has_what_the_wheel_is_built_from(release: Path) -> None:
    with tarfile.open(release / f"windlass-{__version__}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "docs/runbooks.md", "PKG-INFO"} <= names
    assert not [name for name in names if name.startswith(("tests/", "bench/", "tools/"))]


def test_sums_are_those_of_the_files(release: Path) -> None:
    lines = [line.split("  ") for line in (release / "SHA256SUMS").read_text().splitlines()]
    assert {name for _, name in lines} == {file.name for file in release.iterdir()} - {"SHA256SUMS"}
    for digest, name in lines:
        assert hashlib.sha256((release / name).read_bytes()).hexdigest() == digest, name


def test_bill_of_materials_names_every_needed_package(release: Path, wheel: Path) -> None:
    bill = json.loads((release / f"windlass-{__version__}.cdx.json").read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    own = bill["metadata"]["component"]
    assert (own["name"], own["version"], own["licenses"]) == ("windlass", __version__, [{"expression": "Apache-2.0"}])
    assert own["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}]
    names = {component["name"].lower() for component in bill["components"]}
    # Direct, indirect, and none of an extra or of the tests.
    assert {"asyncpg", "fastapi", "starlette", "anyio"} <= names
    assert names.isdisjoint({"ray", "pytest", "apprise", "mkdocs", "windlass"})
    refs = {component["bom-ref"] for component in bill["components"]} | {own["bom-ref"]}
    assert {each["ref"] for each in bill["dependencies"]} == refs
    assert {ref for each in bill["dependencies"] for ref in each["dependsOn"]} == refs - {own["bom-ref"]}


def test_the_same_sources_give_the_same_bytes(release: Path, tmp_path: Path) -> None:
    assert (build(tmp_path / "again") / "SHA256SUMS").read_text() == (release / "SHA256SUMS").read_text()


def test_tag_of_another_version_is_refused(tmp_path: Path) -> None:
    command = [
        sys.executable,
        ROOT / "tools" / "release_files.py",
        "--directory",
        tmp_path / "new",
        "--tag",
        "v999.0.0",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 1
    assert f"the tag is v999.0.0 and pyproject.toml has version {__version__}" in done.stderr
    assert not (tmp_path / "new").exists()


# ------------------------------------------------------------------------------------------------------- installed


def with_pip(wheel: Path, packages: Path, home: Path) -> Path:
    """Into the environment of a project."""
    run(BASE_PYTHON, "-m", "venv", home / "venv")
    pip = [home / "venv" / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run(*pip, "--no-compile", "--no-index", "--find-links", packages, wheel, env=clean_environment())
    return home / "venv" / "bin" / "windlass"


def with_pipx(wheel: Path, packages: Path, home: Path) -> Path:
    """With uv, which pipx uses where it is installed. Otherwise it first updates its own pip from an index."""
    environment = clean_environment() | {"PIPX_HOME": str(home / "pipx"), "PIPX_BIN_DIR": str(home / "bin")}
    environment |= {"UV_CACHE_DIR": str(home / "cache"), "UV_OFFLINE": "1", "UV_NO_CONFIG": "1"}
    pipx = [BIN / "pipx", "install", "--quiet", "--backend", "uv", "--python", BASE_PYTHON]
    run(*pipx, f"--pip-args=--no-index --find-links {packages}", wheel, env=environment)
    return home / "bin" / "windlass"


def with_uv_tool(wheel: Path, packages: Path, home: Path) -> Path:
    folders = {"UV_TOOL_DIR": "tools", "UV_TOOL_BIN_DIR": "bin", "UV_CACHE_DIR": "cache"}
    environment = clean_environment() | {name: str(home / folder) for name, folder in folders.items()}
    uv = [BIN / "uv", "tool", "install", "--quiet", "--offline", "--no-config"]
    run(*uv, "--python", BASE_PYTHON, "--no-index", "--find-links", packages, wheel, env=environment)
    return home / "bin" / "windlass"


def clean_environment() -> dict[str, str]:
    kept = ("PATH", "LANG", "TMPDIR", "HOME")
    return {name: os.environ[name] for name in kept if name in os.environ}


@pytest.mark.parametrize("install", [with_pip, with_pipx, with_uv_tool])
def test_installed_wheel_runs_a_task(
    install: Callable[[Path, Path, Path], Path], wheel: Path, packages: Path, tmp_path: Path, dsn: str
) -> None:
    program = install(wheel, packages, tmp_path)
    project = tmp_path / "project"
    project.mkdir()
    environment = clean_environment() | {"DATABASE_URL": dsn}

    def windlass(*arguments: str) -> str:
        return run(program, *arguments, cwd=project, env=environment)

    assert windlass("--version") == f"windlass {__version__}\n"
    assert windlass("runbook", "WORKER_LOST").startswith("WORKER_LOST (Task errors)")
    windlass("init", "shop", "--yes", "--deploy", "systemd")
    unit = (ROOT / "deploy" / "systemd" / "windlass.service").read_text()
    written = (project / "shop" / "windlass.service").read_text()
    assert re.sub(r"TimeoutStopSec=\d+", "TimeoutStopSec=790", written) == unit, "a local fleet needs no other change"

    (project / "app.py").write_text("def generate(task):\n    return {'prompt': task.payload['prompt'].upper()}\n")
    assert windlass("enqueue", "renders", '{"prompt": "lighthouse"}').strip() == "1"
    with (tmp_path / "worker.log").open("w") as log:
        command = [program, "worker", "--queue", "renders", "--handler", "app:generate"]
        worker = subprocess.Popen(command, cwd=project, env=environment, stdout=log, stderr=log)
        try:
            assert result_of(dsn, 1, tmp_path / "worker.log") == {"prompt": "LIGHTHOUSE"}
        finally:
            worker.terminate()
            worker.wait(TIMEOUT_S)


def result_of(dsn: str, task_id: int, log: Path) -> Any:
    deadline = time.monotonic() + TIMEOUT_S
    with psycopg.connect(dsn, autocommit=True) as sql:
        while True:
            task = sql.execute("select status, result, error from windlass.tasks where id = %s", [task_id]).fetchone()
            if task is not None and task[0] in ("complete", "failed"):
                assert task[0] == "complete", task
                return task[1]
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
