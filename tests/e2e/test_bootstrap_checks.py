"""Checks the document with cloud-init, systemd and the shell. A check is skipped if its program is missing."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.file_checkers import cloud_init_schema, ran
from windlass.model.bootstrap import BootstrapSettings
from windlass.model.machine import MachineRequest
from windlass.worker.bootstrap import render_user_data

SYSTEM_UNITS = Path("/usr/lib/systemd/system"), Path("/lib/systemd/system")

FLEETS = [
    pytest.param(BootstrapSettings(), id="defaults"),
    pytest.param(BootstrapSettings(has_docker=True, images=("python:3.11-slim",)), id="Docker"),
    pytest.param(BootstrapSettings(user="root"), id="as root"),
    pytest.param(
        BootstrapSettings(
            packages=("git",),
            requirements=("ray[default]==2.49.0",),
            setup=("echo '{{ \"two\" }}'\n\techo lines", "true"),
            ray_address="10.0.0.2:6379",
            ray_num_cpus=2,
        ),
        id="Ray and setup commands",
    ),
]


def rendered(settings: BootstrapSettings) -> str:
    return render_user_data(settings, MachineRequest("renders-0-00c0ffee00", "renders", 0, "token"), "https://c:8443")


@pytest.mark.parametrize("settings", FLEETS)
def test_cloud_init_accepts_document(tmp_path: Path, settings: BootstrapSettings) -> None:
    file = tmp_path / "user-data"
    file.write_text(rendered(settings))
    judged = cloud_init_schema(file)
    assert (judged.returncode, judged.stderr) == (0, "")
    assert "Valid" in judged.stdout
    assert "deprecat" not in judged.stdout.lower()


def test_cloud_init_rejects_invalid_document(tmp_path: Path) -> None:
    file = tmp_path / "user-data"
    file.write_text(rendered(BootstrapSettings()).replace("runcmd:\n", "runcmd:\n  - {sh: 1}\n"))
    judged = cloud_init_schema(file)
    assert judged.returncode == 1
    assert "runcmd" in judged.stderr + judged.stdout


# ------------------------------------------------------------------------------------------------------------- systemd


def machine_with(settings: BootstrapSettings, root: Path) -> list[str]:
    """A root with the units, the system's targets, and programs at the expected paths."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here: install the package systemd")
    ours = root / "etc" / "systemd" / "system"
    theirs = root / "usr" / "lib" / "systemd" / "system"
    programs = root / "opt" / "windlass" / "bin"
    for folder in (ours, theirs, programs):
        folder.mkdir(parents=True)
    source = next(folder for folder in SYSTEM_UNITS if folder.is_dir())
    for kind in ("target", "slice", "mount", "socket"):
        for file in source.glob(f"*.{kind}"):
            if file.is_file():
                shutil.copy(file, theirs)
    for program in ("windlass", "ray"):
        (programs / program).write_text("#!/bin/sh\n")
        (programs / program).chmod(0o755)
    units = []
    for file_written in yaml.safe_load(rendered(settings))["write_files"]:
        if file_written["path"].endswith(".service"):
            unit = root / file_written["path"].lstrip("/")
            unit.write_text(file_written["content"])
            units.append(unit.name)
    return units


def verified(root: Path, *units: str) -> "subprocess.CompletedProcess[str]":
    # Without --recursive-errors an unknown key is only printed.
    return ran("systemd-analyze", "verify", "--man=no", "--recursive-errors=no", f"--root={root}", *units)


@pytest.mark.parametrize("settings", FLEETS)
def test_systemd_accepts_units(tmp_path: Path, settings: BootstrapSettings) -> None:
    units = machine_with(settings, tmp_path)
    judged = verified(tmp_path, *units)
    assert (judged.returncode, judged.stdout, judged.stderr) == (0, "", "")


def test_systemd_rejects_unknown_key(tmp_path: Path) -> None:
    (name,) = machine_with(BootstrapSettings(), tmp_path)
    unit = tmp_path / "etc" / "systemd" / "system" / name
    # A key that the original Hetzner autoscaler used.
    unit.write_text(unit.read_text().replace("WorkingDirectory=", "WorkingDir="))
    judged = verified(tmp_path, name)
    assert judged.returncode != 0
    assert "WorkingDir" in judged.stderr


@pytest.mark.parametrize("settings", [fleet for fleet in FLEETS if fleet.id != "as root"])
def test_systemd_rates_exposure_of_units_ok(tmp_path: Path, settings: BootstrapSettings) -> None:
    for name in machine_with(settings, tmp_path):
        # 50 means 5.0 of 10, below which systemd reports OK. A unit without protection has 9.6.
        judged = ran(
            "systemd-analyze", "security", "--offline=yes", "--threshold=50", "--no-pager", f"--root={tmp_path}", name
        )
        assert judged.returncode == 0, judged.stdout + judged.stderr


# --------------------------------------------------------------------------------------------------------------- shell


def scripts(tmp_path: Path, settings: BootstrapSettings) -> list[Path]:
    files: list[dict[str, Any]] = yaml.safe_load(rendered(settings))["write_files"]
    found = []
    for file in files:
        if file["path"].endswith(".sh"):
            found.append(tmp_path / Path(file["path"]).name)
            found[-1].write_text(file["content"])
    return found


@pytest.mark.parametrize("settings", FLEETS)
def test_shell_parses_scripts(tmp_path: Path, settings: BootstrapSettings) -> None:
    for file in scripts(tmp_path, settings):
        judged = ran("sh", "-n", file)
        assert (judged.returncode, judged.stderr) == (0, ""), file


def test_shellcheck_accepts_boot_script(tmp_path: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("no shellcheck here: install the package shellcheck")
    (boot,) = scripts(tmp_path, BootstrapSettings())
    judged = ran("shellcheck", "--shell=sh", boot)
    assert (judged.returncode, judged.stdout) == (0, "")
