"""The program as a wheel: installable, reproducible, complete."""

import base64
import hashlib
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import windlass
from windlass.server.wheel import Wheel, build_wheel


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
    code = "import windlass, windlass.store.migrate as m; print(windlass.__file__, len(m.SCHEMA.sql))"
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
