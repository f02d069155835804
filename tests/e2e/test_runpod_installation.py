"""Installs Windlass over a real OpenSSH server on pods whose image lacks it; each step fails with its own code."""

import asyncio
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from support.certificates import new_authority
from support.postgres_servers import wait_until
from support.prepared_pods import TIMEOUT_S, TOKEN, PodSite, has_port, ignore_host_key, open_pod_site, spawn_worker
from support.wheel_server import WheelServer, serving_wheel, tiny_wheel
from windlass.model.errors import NotPrepared
from windlass.providers.runpod.installation import ENVIRONMENT_FOLDER, INSTALL_SCRIPT, PodInstallation
from windlass.providers.runpod.ssh import Endpoint, Identity, Shell
from windlass.worker.bootstrap import FETCH_SCRIPT, script
from windlass_emulators.runpod.images import ImageContents
from windlass_emulators.runpod.pod_host import find_sshd

VERSION = "9.9.9"
WHEEL = f"windlass-{VERSION}-py3-none-any.whl"
SCRIPTS = {name: script(name) for name in (INSTALL_SCRIPT, FETCH_SCRIPT)}
# Reports what runs, and continues.
SCRIPT = "windlass > ran; command -v windlass >> ran; echo started >> runs; exec sleep 600\n"
INSTALL_S = 60.0
# Commands in an image with Python and without Windlass, and their exit status.
IMAGE_CHECKS: dict[str, int | None] = {
    "command -v windlass": 1,
    "ls /opt/windlass": 2,
    "python3 -c 'import json, venv'": 0,
    "python3 -c 'import windlass'": 1,
    "python3 -c 'import pydantic'": 1,
    "python3 -c 'import importlib.metadata; importlib.metadata.version(\"windlass\")'": 1,
}
pytestmark = pytest.mark.skipif(
    find_sshd() is None or shutil.which("ssh-keygen") is None, reason="no OpenSSH here: install openssh-server"
)


@pytest.fixture
def control_plane() -> Iterator[WheelServer]:
    with serving_wheel(tiny_wheel("windlass", VERSION), TOKEN, WHEEL) as found:
        yield found


@pytest.fixture
def place(tmp_path: Path, control_plane: WheelServer) -> Iterator[PodSite]:
    with open_pod_site(tmp_path) as site:
        (site.volume / "start.sh").write_text(SCRIPT)
        site.url = control_plane.url
        site.installation = PodInstallation(VERSION, SCRIPTS)
        yield site


def write_package(folder: Path, name: str, version: str = "1.2") -> None:
    (folder / f"{name}-{version}-py3-none-any.whl").write_bytes(tiny_wheel(name, version))


def ran(place: PodSite) -> list[str]:
    wait_until(lambda: (place.volume / "runs").exists(), TIMEOUT_S, "starting")
    return (place.volume / "ran").read_text().splitlines()


async def failure(place: PodSite, **ssh: object) -> NotPrepared:
    async with place.provider(**{"install_timeout_s": INSTALL_S, **ssh}) as provider:
        machine = await spawn_worker(provider)
        await has_port(provider, machine)
        with pytest.raises(NotPrepared) as caught:
            await provider.prepare(machine, None, ignore_host_key)
    assert not (place.volume / "runs").exists()
    assert TOKEN not in f"{caught.value}{caught.value.output}"
    return caught.value


async def test_image_without_windlass_gets_the_wheel_of_the_control_plane(
    place: PodSite, control_plane: WheelServer
) -> None:
    async with place.provider() as provider:
        machine = await spawn_worker(provider)
        await provider.prepare(machine, None, ignore_host_key)
    environment = f"{place.root(machine.id)}{ENVIRONMENT_FOLDER}"
    assert ran(place) == [f"windlass {VERSION}", f"{environment}/bin/windlass"]
    assert {token for _, token in control_plane.requests} == {f"Bearer {TOKEN}"}
    # The join token is the only secret, and it is in its own file only.
    files = [path for path in Path(environment).parent.rglob("*") if path.is_file() and "env" not in path.parts]
    assert files
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]


async def test_wheel_comes_over_tls_from_a_control_plane_with_its_own_authority(place: PodSite, tmp_path: Path) -> None:
    authority = new_authority()
    authority.issue(tmp_path / "cert.pem", tmp_path / "key.pem")
    certificate = (tmp_path / "cert.pem", tmp_path / "key.pem")
    with serving_wheel(tiny_wheel("windlass", VERSION), TOKEN, WHEEL, certificate) as secured:
        place.url = secured.url
        # Without the certificate of the authority, or with another one, the token is not sent.
        place.ca_pem = new_authority().write(tmp_path / "other.pem").read_text()
        error = await failure(place)
        assert error.code == "WHEEL_UNAVAILABLE" and "certificate verify failed" in str(error)
        assert secured.requests == []
        place.ca_pem = authority.write(tmp_path / "ca.pem").read_text()
        async with place.provider() as provider:
            await provider.prepare(await spawn_worker(provider, 1), None, ignore_host_key)
        assert ran(place)[0] == f"windlass {VERSION}"
        assert {token for _, token in secured.requests} == {f"Bearer {TOKEN}"}


async def test_handler_requirements_are_installed_next_to_windlass(place: PodSite, tmp_path: Path) -> None:
    write_package(tmp_path, "app")
    lines = ("--no-index", f"--find-links {tmp_path}", "app==1.2")
    place.installation = PodInstallation(VERSION, SCRIPTS, lines)
    async with place.provider(checks=("python3 -c 'import app'", "app")) as provider:
        await provider.prepare(await spawn_worker(provider), None, ignore_host_key)
    version, program = ran(place)
    assert version == f"windlass {VERSION}"
    # An option may contain the token of a package index.
    for name in ("requirements.txt", "index.txt", "complete", "install.log"):
        assert (Path(program).parents[2] / name).stat().st_mode & 0o077 == 0, name


async def test_image_with_the_right_windlass_installs_nothing(place: PodSite, control_plane: WheelServer) -> None:
    place.image, place.url = "example/worker:1", "http://127.0.0.1:1"
    async with place.provider() as provider:
        machine = await spawn_worker(provider)
        # The image's own program is replaced by one that has this version.
        own = place.root(machine.id) / "usr" / "local" / "bin" / "windlass"
        own.write_text(f"#!/bin/sh\necho windlass {VERSION}\n")
        await provider.prepare(machine, None, ignore_host_key)
    assert ran(place) == [f"windlass {VERSION}", str(own)]
    assert control_plane.requests == []


async def test_image_with_another_windlass_gets_that_of_the_control_plane(place: PodSite) -> None:
    place.image = "example/worker:1"
    async with place.provider() as provider:
        machine = await spawn_worker(provider)
        own = place.root(machine.id) / "usr" / "local" / "bin" / "windlass"
        own.write_text("#!/bin/sh\necho windlass 0.0.1\n")
        await provider.prepare(machine, None, ignore_host_key)
    assert ran(place)[0] == f"windlass {VERSION}"
    assert own.exists()


async def test_installation_is_shared_by_concurrent_orchestrators(place: PodSite, control_plane: WheelServer) -> None:
    async with place.provider() as provider, place.provider() as other:
        machine = await spawn_worker(provider)
        await asyncio.gather(
            *(each.prepare(machine, None, ignore_host_key) for each in (provider, other) for _ in range(2))
        )
    assert ran(place)[0] == f"windlass {VERSION}"
    assert (place.volume / "runs").read_text() == "started\n"
    assert [path for path, _ in control_plane.requests].count(f"/internal/wheel/{WHEEL}") == 1


async def test_interrupted_installation_is_finished_by_the_next(place: PodSite) -> None:
    async with place.provider() as provider:
        machine = await spawn_worker(provider)
        first = asyncio.ensure_future(provider.prepare(machine, None, ignore_host_key))
        half = place.root(machine.id) / ENVIRONMENT_FOLDER[1:] / "pyvenv.cfg"
        await asyncio.to_thread(wait_until, half.exists, TIMEOUT_S, "creating the environment")
        first.cancel()
        with suppress(asyncio.CancelledError):
            await first
        await provider.prepare(machine, None, ignore_host_key)
    assert ran(place)[0] == f"windlass {VERSION}"


async def test_image_without_python_is_reported(place: PodSite) -> None:
    place.host.images["example/bare"] = ImageContents(has_python=False)
    place.image = "example/bare:1"
    failed = await failure(place)
    assert failed.code == "PYTHON_MISSING"
    assert str(failed).endswith("windlass was not installed: the image has no Python 3.11 or newer")


async def test_old_python_is_named(place: PodSite) -> None:
    place.host.images["example/bare"] = ImageContents(has_python=False)
    place.image = "example/bare:1"
    async with place.provider() as provider:
        machine = await spawn_worker(provider)
        old = place.root(machine.id) / "usr" / "local" / "bin" / "python3"
        old.write_text('#!/bin/sh\ncase "$2" in *platform*) echo 3.8.10;; esac\nexit 1\n')
        old.chmod(0o755)
        with pytest.raises(NotPrepared, match="no Python 3.11 or newer, python3 is 3.8.10") as caught:
            await provider.prepare(machine, None, ignore_host_key)
    assert caught.value.code == "PYTHON_MISSING"


async def test_python_without_venv_is_reported(place: PodSite) -> None:
    async with place.provider() as provider:
        machine = await spawn_worker(provider)
        python = place.root(machine.id) / "usr" / "local" / "bin" / "python3"
        own = python.read_text()
        python.write_text(
            own.replace("#!/bin/sh\n", '#!/bin/sh\n[ "$2" != venv ] || { echo No module named venv; exit 1; }\n')
        )
        with pytest.raises(NotPrepared, match="windlass was not installed: No module named venv") as caught:
            await provider.prepare(machine, None, ignore_host_key)
    assert caught.value.code == "VENV_FAILED"


@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        ("no wheel", "WHEEL_UNAVAILABLE", "/internal/wheel answered 404"),
        ("broken wheel", "INSTALL_FAILED", "is invalid|not a zip file|BadZipFile"),
        ("missing requirement", "REQUIREMENTS_FAILED", "No matching distribution found for absent"),
        ("conflict", "REQUIREMENTS_FAILED", "conflict"),
    ],
)
async def test_each_step_of_the_installation_has_its_own_code(
    place: PodSite, control_plane: WheelServer, tmp_path: Path, fault: str, code: str, message: str
) -> None:
    lines = ["--no-index", f"--find-links {tmp_path}"]
    write_package(tmp_path, "app", "1.2")
    if fault == "no wheel":
        control_plane.failures = [404]
    elif fault == "broken wheel":
        control_plane.replace(b"no zip file")
    elif fault == "missing requirement":
        lines.append("absent")
    else:
        lines += ["app==1.2", "app==1.3"]
    place.installation = PodInstallation(VERSION, SCRIPTS, tuple(lines))
    failed = await failure(place)
    assert failed.code == code, failed.output
    assert re.search(message, str(failed)), str(failed)


async def test_lost_control_plane_is_reported_within_the_timeout(place: PodSite) -> None:
    place.url = "http://127.0.0.1:1"
    failed = await failure(place, install_timeout_s=30)
    assert failed.code == "WHEEL_UNAVAILABLE"
    assert "did not answer" in str(failed)


async def test_emulated_image_has_only_what_the_real_one_has(place: PodSite) -> None:
    found: dict[str, int | None] = {}

    class Inspecting(Identity):
        @asynccontextmanager
        async def open_shell(self, endpoint: Endpoint, host_key: str | None) -> AsyncIterator[Shell]:
            async with super().open_shell(endpoint, host_key) as shell:
                for command in IMAGE_CHECKS:
                    found[command] = (await shell.run(command, TIMEOUT_S)).status
                yield shell

    place.identity = Inspecting(place.identity.key)
    async with place.provider() as provider:
        await provider.prepare(await spawn_worker(provider), None, ignore_host_key)
    assert found == IMAGE_CHECKS


def test_shellcheck_accepts_the_installation_script(tmp_path: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("no shellcheck here: install the package shellcheck")
    (tmp_path / INSTALL_SCRIPT).write_text(SCRIPTS[INSTALL_SCRIPT] + "\n")
    judged = subprocess.run(
        ["shellcheck", "--shell=sh", tmp_path / INSTALL_SCRIPT], capture_output=True, text=True, check=False, timeout=60
    )
    assert (judged.returncode, judged.stdout) == (0, "")
