"""From a pod to a worker, over a real OpenSSH server: looked over, started once, each failure with its own code."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from support.postgres_servers import wait_until
from support.prepared_pods import TIMEOUT_S, TOKEN, PodSite, has_port, ignore_host_key, open_pod_site, spawn_worker
from windlass.model.errors import ConfigError, NotPrepared
from windlass.providers.runpod.provisioning import Preparer
from windlass.providers.runpod.ssh import Endpoint, Identity, Shell, Unreachable, read_identity
from windlass_emulators.runpod.pod_host import find_sshd

# Says where it is and counts itself; then it works on.
SCRIPT = 'echo "pwd $PWD colour $COLOUR" >> /proc/self/fd/1; echo started >> runs; cp {join} joined; exec sleep 600\n'
pytestmark = pytest.mark.skipif(
    find_sshd() is None or shutil.which("ssh-keygen") is None, reason="no OpenSSH here: install openssh-server"
)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[PodSite]:
    with open_pod_site(tmp_path) as site:
        (site.volume / "start.sh").write_text(SCRIPT.format(join="$(dirname $PWD)/etc/windlass/join.json"))
        yield site


# Runpod's own images of today and of 2024, whose start scripts write the environment to a file, each in its way, and
# one without such a file.
@pytest.mark.parametrize("image", ["runpod/pytorch:1", "runpod/pytorch:2.4.0-py3.11-cuda12.4.1", "example/worker:1"])
async def test_healthy_pod_is_checked_and_its_worker_started(place: PodSite, image: str) -> None:
    place.image, place.colour = image, 'red "or" $HOME `or` it\'s'
    async with place.provider(checks=("python3 -c 'import json'",)) as provider:
        machine = await spawn_worker(provider)
        met: list[str] = []

        async def meet(host_key: str) -> None:
            assert not (place.volume / "runs").exists()
            met.append(host_key)

        prepared = await provider.prepare(machine, None, meet)
        assert prepared.host_key is not None
        assert met == [prepared.host_key]
        assert prepared.host_key.startswith("ssh-ed25519 ")
        wait_until((place.volume / "joined").exists, TIMEOUT_S, "starting")
        assert json.loads((place.volume / "joined").read_text()) == {
            "worker_id": "red-0-aa", "url": "http://127.0.0.1:1", "join_token": TOKEN,
        }  # fmt: skip
        said = (place.folder(machine.id) / "worker.log").read_text()
        assert f"colour {place.colour}\n" in said
        assert "/workspace" in said


async def test_worker_starts_once_despite_concurrent_preparations(place: PodSite) -> None:
    async with place.provider() as provider, place.provider() as other:
        machine = await spawn_worker(provider)
        first = await provider.prepare(machine, None, ignore_host_key)
        again = await asyncio.gather(
            *(
                each.prepare(machine, key, ignore_host_key)
                for each in (provider, other)
                for key in (None, first.host_key)
            )
        )
        assert {prepared.host_key for prepared in again} == {first.host_key}
        machine = await spawn_worker(provider, 1)
        await asyncio.gather(
            *(each.prepare(machine, None, ignore_host_key) for each in (provider, other) for _ in range(3))
        )
    wait_until(lambda: (place.volume / "runs").read_text() == "started\n" * 2, TIMEOUT_S, "starting")


@pytest.mark.parametrize("dies_after", range(6))
async def test_next_orchestrator_finishes_an_interrupted_preparation(place: PodSite, dies_after: int) -> None:
    """By then the commands up to there have run, the last of them unheard."""

    class Dying:
        def __init__(self, shell: Shell) -> None:
            self._shell = shell
            self.host_key = shell.host_key
            self.left = dies_after

        async def run(self, command: str, timeout_s: float) -> Any:
            said = await self._shell.run(command, timeout_s)
            self.left -= 1
            if self.left < 0:
                raise asyncio.CancelledError
            return said

    @asynccontextmanager
    async def open_shell(endpoint: Endpoint, host_key: str | None) -> AsyncIterator[Any]:
        async with place.identity.open_shell(endpoint, host_key) as shell:
            yield Dying(shell)

    async with place.provider(Preparer(place.settings(), open_shell, retry_s=0.1)) as provider:
        machine = await spawn_worker(provider)
        with suppress(asyncio.CancelledError):
            await provider.prepare(machine, None, ignore_host_key)
    async with place.provider() as provider:
        await provider.prepare(machine, None, ignore_host_key)
    wait_until((place.volume / "joined").exists, TIMEOUT_S, "starting")
    assert (place.volume / "runs").read_text() == "started\n"


@pytest.mark.parametrize(
    ("faults", "ssh", "code", "message"),
    [
        ({"has_no_mount": True}, {}, "STORAGE_NOT_MOUNTED", "/workspace is mounted and writable: .*not a mountpoint"),
        ({"has_no_gpu": True}, {}, "GPU_NOT_DETECTED", "the GPU responds: No devices were found"),
        ({"disk_free_gb": 1.5}, {}, "DISK_FULL", "2 GB of disk are free: only 1.5 GB"),
        (
            {"ssh_failures": {"import torch": "No module named 'torch'"}},
            {"checks": ("python3 -c 'import torch'",)},
            "DEPENDENCY_MISSING",
            "`python3 -c 'import torch'` succeeds: No module named 'torch'",
        ),
        ({}, {"checks": ("sleep 99",), "command_timeout_s": 10.0}, "DEPENDENCY_MISSING", "no response within 10 s"),
        (
            {},
            {"start_command": "bash /workspace/none.sh"},
            "START_SCRIPT_FAILED",
            "the worker did not start: .*none.sh: No such file or directory .exit status 127: .* is missing on the pod",
        ),
        ({"ssh_failures": {"start.sh": "line 3: oops"}}, {}, "START_SCRIPT_FAILED", "line 3: oops"),
        ({"has_no_ssh": True}, {"timeout_s": 1.0}, "SSH_UNREACHABLE", "not done within 1 s .*refused"),
    ],
)  # fmt: skip
async def test_each_failed_check_has_its_own_code_and_output(
    place: PodSite, faults: dict[str, Any], ssh: dict[str, Any], code: str, message: str
) -> None:
    place.emulator.faults.next_pod(**faults)
    async with place.provider(**ssh) as provider:
        machine = await spawn_worker(provider)
        await has_port(provider, machine)
        with pytest.raises(NotPrepared, match=f"preparing pod {machine.id} of red-0-aa: .*{message}") as caught:
            await provider.prepare(machine, None, ignore_host_key)
    assert caught.value.code == code
    assert (caught.value.host_key is None) is (code == "SSH_UNREACHABLE")
    assert not (place.volume / "runs").exists()


async def test_join_file_that_lost_its_quotes_has_its_own_code(place: PodSite) -> None:
    async with place.provider() as provider:
        machine = await spawn_worker(provider)
        place.folder(machine.id).mkdir(parents=True)
        # An image of one's own wrote it, with a shell that read the quotes.
        (place.folder(machine.id) / "join.json").write_text(f"{{worker_id: red-0-aa, join_token: {TOKEN}}}")
        with pytest.raises(NotPrepared, match="the join file is JSON: .* is not JSON with a worker_id") as caught:
            await provider.prepare(machine, None, ignore_host_key)
    assert caught.value.code == "JOIN_DATA_INVALID"
    assert TOKEN not in f"{caught.value}{caught.value.output}"
    assert not (place.volume / "runs").exists()


async def test_failed_start_script_is_quoted_without_secrets(place: PodSite) -> None:
    (place.volume / "start.sh").write_text(f"for n in $(seq 40); do echo line $n; done; echo have {TOKEN}; exit 3\n")
    async with place.provider() as provider:
        machine = await spawn_worker(provider)
        with pytest.raises(NotPrepared) as caught:
            await provider.prepare(machine, None, ignore_host_key)
        lines = caught.value.output.splitlines()
        assert lines[-2:] == ["have wlj_********", "exit status 3"]
        assert len(lines) == 20
        # A later preparation finds the same, and starts nothing.
        with pytest.raises(NotPrepared, match="exit status 3"):
            await provider.prepare(machine, caught.value.host_key, ignore_host_key)


async def test_late_sshd_is_waited_for(place: PodSite) -> None:
    place.emulator.faults.next_pod(ssh_after_s=1.5)
    async with place.provider() as provider:
        await provider.prepare(await spawn_worker(provider), None, ignore_host_key)
    wait_until((place.volume / "runs").exists, TIMEOUT_S, "starting")


async def test_changed_host_key_is_rejected(place: PodSite) -> None:
    async with place.provider() as provider:
        machine = await spawn_worker(provider)
        known = await provider.prepare(machine, None, ignore_host_key)
        assert (await provider.prepare(machine, known.host_key, ignore_host_key)).host_key == known.host_key
        # A restarted pod has another port and another host key: it is not the host we know.
        pod = place.emulator.account.pods[machine.id]
        place.emulator.account.restart(pod)
        place.emulator.settle()
        with pytest.raises(NotPrepared, match="presents another host key than before") as caught:
            await provider.prepare(machine, known.host_key, ignore_host_key)
        assert caught.value.code == "SSH_HOST_KEY_CHANGED"


async def test_broken_connection_is_retried(place: PodSite) -> None:
    breaks = iter([True, False, True, False])

    class Breaking:
        def __init__(self, shell: Shell) -> None:
            self._shell = shell
            self.host_key = shell.host_key

        async def run(self, command: str, timeout_s: float) -> Any:
            said = await self._shell.run(command, timeout_s)
            if next(breaks, False):
                raise Unreachable("the connection broke")
            return said

    @asynccontextmanager
    async def open_shell(endpoint: Endpoint, host_key: str | None) -> AsyncIterator[Any]:
        async with place.identity.open_shell(endpoint, host_key) as shell:
            yield Breaking(shell)

    async with place.provider(Preparer(place.settings(), open_shell, retry_s=0.1)) as provider:
        await provider.prepare(await spawn_worker(provider), None, ignore_host_key)
    wait_until((place.volume / "runs").exists, TIMEOUT_S, "starting")


async def test_pod_with_another_key_is_unreachable(place: PodSite, tmp_path: Path) -> None:
    other = Identity(asyncssh.generate_private_key("ssh-ed25519"))
    async with place.provider() as provider:
        machine = await spawn_worker(provider)
        await provider.prepare(machine, None, ignore_host_key)
    # The server accepts the connection; the timeout applies to the login.
    async with place.provider(Preparer(place.settings(timeout_s=15.0), other.open_shell, retry_s=0.2)) as provider:
        with pytest.raises(NotPrepared, match="Permission denied") as caught:
            await provider.prepare(machine, None, ignore_host_key)
    assert caught.value.code == "SSH_UNREACHABLE"


def test_unusable_key_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="cannot read SSH key .*No such file or directory.: check runpod_ssh_key_file"
    ):
        read_identity(tmp_path / "none")
    (tmp_path / "bad").write_text("secret stuff")
    with pytest.raises(ConfigError, match="is not a private key without a passphrase") as caught:
        read_identity(tmp_path / "bad")
    assert "secret stuff" not in str(caught.value)
    locked = tmp_path / "locked"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", str(locked)], check=True, timeout=TIMEOUT_S
    )
    with pytest.raises(ConfigError, match="is not a private key without a passphrase"):
        read_identity(locked)
