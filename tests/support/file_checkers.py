"""Programs that judge a file which others read: cloud-init, systemd, the shell."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 60.0
# Where tools/system-packages.sh unpacks it, without installing it.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
CLOUD_INIT = CACHE / "windlass-tests" / "cloud-init" / "usr" / "lib" / "python3" / "dist-packages"


def ran(*command: object, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
        timeout=TIMEOUT_S,
        check=False,
    )


def cloud_init_schema(file: Path) -> "subprocess.CompletedProcess[str]":
    if shutil.which("cloud-init"):
        return ran("cloud-init", "schema", "--config-file", file)
    if not CLOUD_INIT.is_dir():
        pytest.skip("no cloud-init here: `sh tools/system-packages.sh` unpacks one on Debian, as root")
    env = {"PYTHONPATH": str(CLOUD_INIT), "PYTHONWARNINGS": "ignore"}
    if ran(sys.executable, "-c", "import cloudinit.cmd.main", env=env).returncode != 0:
        pytest.skip(f"the cloud-init in {CLOUD_INIT} does not run under Python {sys.version.split()[0]}")
    return ran(sys.executable, "-m", "cloudinit.cmd.main", "schema", "--config-file", file, env=env)
