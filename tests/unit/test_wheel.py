"""The program as a wheel: installable, reproducible, complete."""

import base64
import hashlib
import io
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import windlass
from windlass.server.wheel import Wheel, build_wheel, pin_requirements


def wheel() -> Wheel:
    built = build_wheel()
    assert built is not None
    return built


def test_wheel_is_reproducible() -> None:
    assert wheel() == wheel()
    assert wheel().sha256 == hashlib.sha256(wheel().content).hexdigest()


def test_wheel_has_all_source_files_and_no_caches() -> None:
    archive = zipfile.ZipFile(io.BytesIO(wheel().content))
    names = archive.namelist()
    root = Path(windlass.__file__).parent
    expected = {f"windlass/{p.relative_to(root).as_posix()}" for p in root.rglob("*.py")}
    expected |= {f"windlass/store/migrations/{p.name}" for p in root.glob("store/migrations/*.sql")}
    assert expected | {"windlass/py.typed"} <= set(names)
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
    assert len(names) == len(set(names))


def test_record_has_hash_of_every_file() -> None:
    archive = zipfile.ZipFile(io.BytesIO(wheel().content))
    record = f"windlass-{wheel().version}.dist-info/RECORD"
    lines = [line.split(",") for line in archive.read(record).decode().splitlines()]
    assert {name for name, *_ in lines} == set(archive.namelist())
    for name, digest, size in lines:
        if name == record:
            assert (digest, size) == ("", "")
            continue
        content = archive.read(name)
        expected = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        assert (digest, int(size)) == (f"sha256={expected}", len(content))


def test_wheel_installs_with_pip_and_runs(tmp_path: Path) -> None:
    built = wheel()
    file = tmp_path / built.filename
    file.write_bytes(built.content)
    target = tmp_path / "installed"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", target, file]
    subprocess.run(install, check=True, timeout=100)
    assert (target / "bin" / "windlass").exists()
    # With a PYTHONPATH that has only the installed copy.
    code = "import windlass, windlass.store.migration as m; print(windlass.__file__, len(m.SCHEMA.sql))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(target)},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.startswith(str(target))


def test_machines_install_exactly_the_versions_of_the_control_plane() -> None:
    text = "Metadata-Version: 2.4\nName: windlass\nRequires-Dist: fastapi>=0.115\n"
    text += 'Requires-Dist: ray>=2 ; extra == "ray"\n\nDescription\n'
    pinned = pin_requirements(text).partition("\n\n")
    lines = [line.removeprefix("Requires-Dist: ") for line in pinned[0].splitlines() if line.startswith("Requires")]
    assert f"fastapi=={metadata.version('fastapi')}" in lines
    # An indirect requirement.
    assert f"starlette=={metadata.version('starlette')}" in lines
    assert 'ray>=2 ; extra == "ray"' in lines
    assert all("==" in line for line in lines if "extra" not in line)
    assert len({line.partition("==")[0] for line in lines}) == len(lines)
    assert pinned[2] == "Description\n"


def test_wheel_of_this_program_names_exact_versions() -> None:
    wheel = build_wheel()
    assert wheel is not None
    with zipfile.ZipFile(io.BytesIO(wheel.content)) as archive:
        name = next(name for name in archive.namelist() if name.endswith("METADATA"))
        head = archive.read(name).decode().partition("\n\n")[0]
    core = [line for line in head.splitlines() if line.startswith("Requires-Dist: ") and "extra ==" not in line]
    assert len(core) > 20
    assert all("==" in line for line in core)
