"""Pods as local processes: the program, a real OpenSSH server, emulated hardware, and complete clean-up."""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import psutil
import pytest

from support.postgres_servers import run_aside, wait_until
from support.runpod_contract import CheckedEmulator, Contract
from windlass_emulators.http import Emulator
from windlass_emulators.http_server import serving
from windlass_emulators.runpod import RunpodEmulator, RunpodEmulatorSettings
from windlass_emulators.runpod.containers import Container, Mount
from windlass_emulators.runpod.faults import PodFaults
from windlass_emulators.runpod.hardware import session
from windlass_emulators.runpod.images import contents_of
from windlass_emulators.runpod.pod_host import RealPodHost, find_sshd, join_document, program_of

TIMEOUT_S = 30.0
GPU = "NVIDIA L40S"
JOIN = {"worker_id": "gpu-1", "url": "http://127.0.0.1:1", "join_token": "wj_secret"}
WORKER = "/opt/windlass/bin/windlass worker --join /etc/windlass/join.json"
NO_TORCH = {"import torch": "No module named 'torch'"}
needs_sshd = pytest.mark.skipif(
    find_sshd() is None or shutil.which("ssh") is None, reason="no OpenSSH here: install openssh-server"
)
PLAIN = Container(
    "pod1", "worker-1", "example/worker:1", "", {}, [22], [], 50, GPU, 1, 46_068, "12.8", "EU-RO-1", PodFaults()
)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealPodHost]:
    monkeypatch.setenv("DATABASE_URL", "postgresql://control-plane-only")
    with RealPodHost(tmp_path / "pods", stop_grace_s=1.0) as host:
        yield host


@dataclass(frozen=True)
class Keys:
    private: Path
    public: str


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    path = tmp_path_factory.mktemp("keys") / "id"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True, timeout=TIMEOUT_S)
    return Keys(path, path.with_suffix(".pub").read_text())


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def said(host: RealPodHost, pod_id: str = "pod1") -> list[str]:
    log = host.folder / pod_id / "container.log"
    # Each line starts with its time.
    return [line.partition(" ")[2] for line in log.read_text().splitlines()] if log.exists() else []


def wait_said(host: RealPodHost, text: str) -> str:
    wait_until(lambda: any(text in line for line in said(host)), TIMEOUT_S, f"saying {text!r}")
    return next(line for line in said(host) if text in line)


# ----------------------------------------------------------------------------------------------------- program


@pytest.mark.parametrize(
    ("image", "args", "env", "command"),
    [
        ("example/worker:1", "", {"WINDLASS_JOIN": "{}"}, WORKER),
        ("example/worker:1", "", {}, None),
        ("runpod/pytorch:1", "", {"WINDLASS_JOIN": "{}"}, None),
        ("python:3.12-slim", "", {"WINDLASS_JOIN": "{}"}, None),
        ("runpod/pytorch:1", "bash -c 'sleep 1'", {}, "bash -c sleep 1"),
        ("example/worker:1", "it's broken", {}, "/bin/sh -c it's broken"),
    ],
)  # fmt: skip
def test_program_depends_on_image_args_and_join_data(
    image: str, args: str, env: Mapping[str, str], command: str | None
) -> None:
    words = program_of(replace(PLAIN, image=image, args=args, env=env), contents_of(image, {}))
    assert (None if words is None else " ".join(words)) == command


def test_join_file_is_built_from_one_or_three_variables() -> None:
    assert join_document({"WINDLASS_JOIN": '{"a": 1}'}) == '{"a": 1}'
    three = {"WINDLASS_URL": JOIN["url"], "WINDLASS_WORKER_ID": JOIN["worker_id"]}
    assert join_document(three) is None
    assert json.loads(join_document({**three, "WINDLASS_JOIN_TOKEN": JOIN["join_token"]}) or "") == JOIN


def test_worker_image_starts_the_worker_with_its_join_file(host: RealPodHost) -> None:
    env = {"WINDLASS_JOIN": json.dumps(JOIN)}
    host.start(replace(PLAIN, env=env))
    join = host.folder / "pod1" / "root" / "etc" / "windlass" / "join.json"
    assert json.loads(join.read_text()) == JOIN
    assert join.stat().st_mode & 0o777 == 0o600
    init = json.loads((host.folder / "pod1" / "init.json").read_text())
    assert init["command"] == [sys.executable, "-m", "windlass", "worker", "--join", str(join)]
    assert "WINDLASS_JOIN" not in init["environment"]
    wait_said(host, "the program exited with")
    wait_until(lambda: not host.is_running("pod1"), TIMEOUT_S, "ending with its program")


def test_pod_environment_has_no_emulator_variables(host: RealPodHost) -> None:
    mount = Mount("/workspace", 100, 1.0, "vol1")
    env = {"COLOUR": "red", "DATA": "/workspace"}
    host.start(replace(PLAIN, args="sh -c 'env; sleep 600'", env=env, mounts=[mount]))
    wait_said(host, "COLOUR=red")
    wait_until(lambda: any(line.startswith("EMULATED_HARDWARE=") for line in said(host)), TIMEOUT_S, "saying it")
    shown = dict(line.partition("=")[::2] for line in said(host))
    assert shown["RUNPOD_POD_ID"] == "pod1"
    assert shown["DATA"] == str(host.folder / "pod1" / "root" / "workspace")
    assert "DATABASE_URL" not in shown
    lines = (host.folder / "pod1" / "container.log").read_text().splitlines()
    assert all(datetime.fromisoformat(line.partition(" ")[0]).tzinfo for line in lines)


def test_pod_without_a_program_logs_the_reason(host: RealPodHost) -> None:
    host.start(replace(PLAIN, tcp_ports=[]))
    assert "nothing to run" in (host.folder / "pod1" / "machine.log").read_text()
    assert not host.is_running("pod1")
    host.start(replace(PLAIN, args="/no/such/program"))
    wait_said(host, "cannot start /no/such/program")


def test_program_failure_can_be_injected(host: RealPodHost) -> None:
    host.start(replace(PLAIN, args="sleep 600", faults=PodFaults(program_fails="CUDA out of memory")))
    wait_said(host, "the program exited with 1")
    assert "CUDA out of memory" in said(host)


def test_stopping_pod_gets_sigterm_then_sigkill(host: RealPodHost) -> None:
    """Including a process that left its session and lost its parent."""
    script = "trap '' TERM; setsid sh -c 'sleep 600 & echo child=$!' ; echo up; while :; do sleep 600; done"
    host.start(replace(PLAIN, args=shlex.join(["sh", "-c", script])))
    wait_said(host, "up")
    orphan = int(wait_said(host, "child=").removeprefix("child="))
    assert _is_alive(orphan)
    began = time.monotonic()
    host.stop("pod1")
    wait_until(lambda: not host.is_running("pod1"), TIMEOUT_S, "stopping")
    assert time.monotonic() - began >= 1.0
    wait_until(lambda: not _is_alive(orphan), TIMEOUT_S, "ending its orphan")


def test_program_can_end_on_sigterm(host: RealPodHost) -> None:
    host.start(replace(PLAIN, args="sh -c \"trap 'echo bye; exit 0' TERM; echo up; sleep 600 & wait\""))
    wait_said(host, "up")
    host.stop("pod1")
    wait_until(lambda: not host.is_running("pod1"), TIMEOUT_S, "stopping")
    assert "bye" in said(host)


def test_disk_is_empty_at_every_start_but_mounts_are_kept(host: RealPodHost) -> None:
    mounts = [Mount("/workspace", 100, 1.0, "vol1"), Mount("/own", 20, 1.0, None)]
    container = replace(PLAIN, args="sleep 600", mounts=mounts)
    host.start(container)
    root = host.folder / "pod1" / "root"
    for place in ("root", "workspace", "own"):
        (root / place / "file").write_text("kept")
    host.stop("pod1")
    host.start(container)
    assert [(root / place / "file").exists() for place in ("root", "workspace", "own")] == [False, True, True]
    host.erase("pod1")
    wait_until(lambda: not root.exists(), TIMEOUT_S, "erasing")
    host.start(container)
    assert [(root / place / "file").exists() for place in ("workspace", "own")] == [True, False]
    host.erase("pod1")
    host.erase_volume("vol1")
    assert not (host.volume_folder("vol1") / "file").exists()


# ---------------------------------------------------------------------------------------------------- hardware


def _in_pod(host: RealPodHost, container: Container, code: str) -> dict[str, Any]:
    """The JSON that Python code prints in a pod."""
    environment = json.loads((host.folder / container.pod_id / "init.json").read_text())["environment"]
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


GPU_READING = (
    "import json; from windlass.worker.gpu import GpuReader; r = GpuReader(); r.start(); print(json.dumps(r.vitals()))"
)


@pytest.mark.parametrize(
    ("changes", "vitals"),
    [
        ({}, {"vram_total_mb": 46_068, "vram_used_mb": 4}),
        ({"gpu_count": 2}, {"vram_total_mb": 92_136, "vram_used_mb": 8}),
        ({"gpu_count": 0}, {"vram_total_mb": 0, "vram_used_mb": 0}),
        ({"faults": PodFaults(has_no_driver=True)}, {}),
    ],
    ids=["one GPU", "two GPUs", "a driver and no GPU", "no driver"],
)
def test_worker_reads_the_memory_of_an_emulated_gpu(
    host: RealPodHost, changes: dict[str, Any], vitals: dict[str, int]
) -> None:
    container = replace(PLAIN, args="sleep 600", **changes)
    host.start(container)
    assert _in_pod(host, container, GPU_READING) == vitals


def test_hardware_can_change_while_a_pod_runs(host: RealPodHost) -> None:
    usage = "import json, shutil; print(json.dumps(shutil.disk_usage('/workspace')._asdict()))"
    container = replace(PLAIN, args="sleep 600", mounts=[Mount("/workspace", 100, 95.0, "vol1")])
    host.start(container)
    assert round(_in_pod(host, container, usage)["free"] / 10**9) == 5
    host.refit(replace(container, gpu_count=0, mounts=[Mount("/workspace", 200, 95.0, "vol1")]))
    assert round(_in_pod(host, container, usage)["free"] / 10**9) == 105
    assert _in_pod(host, container, GPU_READING)["vram_total_mb"] == 0


# ------------------------------------------------------------------------------------------------------------- SSH


@pytest.mark.parametrize(
    ("command", "mapped"),
    [
        ("cd /workspace && ls", "cd ROOT/workspace && ls"),
        ("cat '/workspace/a b' > /workspace/new/log", "cat 'ROOT/workspace/a b' > ROOT/workspace/new/log"),
        ("A=/workspace B=x:/workspace sh", "A=ROOT/workspace B=x:ROOT/workspace sh"),
        ("ls /workspaces /etc/os-release /etc/made", "ls /workspaces /etc/os-release ROOT/etc/made"),
        ("curl http://host/workspace ./workspace $X/workspace", "curl http://host/workspace ./workspace $X/workspace"),
        ("(test -d /workspace)", "(test -d ROOT/workspace)"),
    ],
)
def test_pod_paths_are_mapped_in_ssh_commands(tmp_path: Path, command: str, mapped: str) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "made").touch()
    assert session.map_paths(command, str(tmp_path), ["/workspace"]) == mapped.replace("ROOT", str(tmp_path))


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    errors: str


class Shell:
    """Runs commands in a pod with OpenSSH's client."""

    def __init__(self, host: RealPodHost, keys: Keys, port: int) -> None:
        self._target = f"{host.user}@{host.address}"
        known = keys.private.with_name(f"known-{port}")
        options = {
            "IdentitiesOnly": "yes", "BatchMode": "yes", "StrictHostKeyChecking": "accept-new", "LogLevel": "ERROR",
            "UserKnownHostsFile": str(known), "ConnectTimeout": "10",
        }  # fmt: skip
        self.command = ["ssh", "-F", "none", "-i", str(keys.private), "-p", str(port)]
        self.command += [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        self.known = known

    def run(self, command: str, *, stdin: str = "") -> Done:
        done = subprocess.run(
            [*self.command, self._target, command],
            input=stdin, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        return Done(done.returncode, done.stdout, done.stderr)


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def log_in(host: RealPodHost, keys: Keys, container: Container) -> Shell:
    env = {**container.env, "PUBLIC_KEY": keys.public}
    port = host.start(replace(container, image="runpod/base:1", env=env))[22]
    wait_until(lambda: _answers(port), TIMEOUT_S, "answering")
    return Shell(host, keys, port)


@needs_sshd
def test_ssh_session_sees_the_emulated_hardware(host: RealPodHost, keys: Keys) -> None:
    mount = Mount("/workspace", 100, 95.0, "vol1")
    shell = log_in(host, keys, replace(PLAIN, mounts=[mount], env={"COLOUR": "red"}))
    query = "nvidia-smi --query-gpu=name,memory.total --format=csv,noheader,nounits"
    assert shell.run(query) == Done(0, "NVIDIA L40S, 46068\n", "")
    assert "46068MiB" in shell.run("nvidia-smi").out
    assert shell.run("nvidia-smi -L; nvidia-smi --query-gpu=colour").status == 2
    assert shell.run("mountpoint -q /workspace && test -w /workspace && findmnt /workspace").status == 0
    sizes = shell.run("df -P /workspace | tail -1; df -BM --output=avail /workspace | tail -1; df -h / | tail -1")
    volume, free, whole = sizes.out.splitlines()
    assert volume.split()[1:] == ["97656250", "92773438", "4882813", "95%", "/workspace"]
    assert (free, whole.split()[-1]) == ("4769", "/")
    assert (
        shell.run(
            "! command -v windlass && command -v python3 && ! mountpoint -q /elsewhere && df /no/such/place"
        ).status
        == 1
    )
    # As in a real pod, a login does not have the container's environment.
    assert shell.run("echo ${COLOUR-none}; . /etc/rp_environment; echo $COLOUR").out == "none\nred\n"
    assert shell.run("tr '\\0' '\\n' < /proc/1/environ | grep COLOUR").out == "COLOUR=red\n"
    assert shell.run("echo ${DATABASE_URL-none}; cat", stdin="hello").out == "none\nhello"
    assert shell.run("exit 7").status == 7


@pytest.mark.parametrize(
    ("image", "lines"),
    [
        ("runpod/base:1", ['COLOUR="dark "red""', f'WINDLASS_JOIN="{json.dumps(JOIN)}"', 'LINES="one"']),
        ("runpod/pytorch:2.8.0", []),
    ],
)
def test_environment_file_is_written_as_by_runpods_images(host: RealPodHost, image: str, lines: list[str]) -> None:
    """No value is escaped, and none has more than its first line. Older images write only Runpod's own variables."""
    env = {
        "COLOUR": 'dark "red"',
        "WINDLASS_JOIN": json.dumps(JOIN),
        "PUBLIC_KEY": "k",
        "LINES": "one\ntwo",
        "lower": "x",
    }
    host.start(replace(PLAIN, image=image, env=env))
    root = host.folder / "pod1" / "root"
    written = (root / "etc" / "rp_environment").read_text().splitlines()
    assert [line for line in written if line.split()[1].partition("=")[0] in env] == [
        f"export {line}" for line in lines
    ]
    assert 'export RUNPOD_POD_ID="pod1"' in written
    initial = dict(each.split("=", 1) for each in (root / "proc" / "1" / "environ").read_text().split("\0")[:-1])
    assert {name: initial[name] for name in env} == env
    assert not (root / "etc" / "windlass").exists(), "such an image starts no worker"


@needs_sshd
def test_process_started_over_ssh_ends_with_the_pod(host: RealPodHost, keys: Keys) -> None:
    shell = log_in(host, keys, replace(PLAIN, mounts=[Mount("/workspace", 100, 1.0, "vol1")]))
    script = host.volume_folder("vol1") / "start.sh"
    script.write_text('echo "$$ in $PWD" > started.part && mv started.part started && exec sleep 600\n')
    launched = shell.run("cd /workspace; nohup bash start.sh > /workspace/worker.log 2>&1 < /dev/null &")
    assert launched.status == 0
    started = host.volume_folder("vol1") / "started"
    wait_until(started.exists, TIMEOUT_S, "starting")
    pid = int(started.read_text().split()[0])
    assert _is_alive(pid)
    assert started.read_text().strip().endswith("/root/workspace")
    host.stop("pod1", is_sudden=True)
    wait_until(lambda: not _is_alive(pid), TIMEOUT_S, "ending")
    assert shell.run("true").status == 255


@needs_sshd
def test_ssh_accepts_the_given_key_only(host: RealPodHost, keys: Keys, tmp_path: Path) -> None:
    shell = log_in(host, keys, PLAIN)
    assert shell.run("true").status == 0
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True, timeout=TIMEOUT_S)
    shell.command[shell.command.index("-i") + 1] = str(other)
    refused = shell.run("true")
    assert refused.status == 255
    assert "Permission denied (publickey)" in refused.errors


@needs_sshd
def test_restarted_pod_has_a_new_host_key(host: RealPodHost, keys: Keys) -> None:
    first = log_in(host, keys, PLAIN)
    assert first.run("true").status == 0
    host.stop("pod1", is_sudden=True)
    second = log_in(host, keys, PLAIN)
    assert second.run("true").status == 0
    one, other = (shell.known.read_text().split()[-1] for shell in (first, second))
    assert one != other


@needs_sshd
@pytest.mark.parametrize(
    ("faults", "changes", "command", "status", "words"),
    [
        (PodFaults(), {"gpu_count": 0}, "nvidia-smi", 6, "No devices were found"),
        (PodFaults(has_no_driver=True), {}, "nvidia-smi", 127, "not found"),
        (PodFaults(has_no_mount=True), {"mounts": []}, "mountpoint /workspace", 32, "is not a mountpoint"),
        (PodFaults(disk_free_gb=0.5), {}, "df -BM --output=avail / | tail -1 | grep -qx 477", 0, ""),
        (PodFaults(ssh_failures=NO_TORCH), {}, "python3 -c 'import torch'", 1, "No module"),
        (PodFaults(ssh_failures={"start.sh": "line 3: oops"}), {}, "bash /workspace/start.sh", 1, "line 3: oops"),
    ],
)  # fmt: skip
def test_ssh_command_failures_can_be_injected(
    host: RealPodHost, keys: Keys, faults: PodFaults, changes: dict[str, Any], command: str, status: int, words: str
) -> None:
    done = log_in(host, keys, replace(PLAIN, faults=faults, **changes)).run(command)
    assert done.status == status
    assert words in done.out + done.errors


@needs_sshd
def test_ssh_can_answer_late_or_never(host: RealPodHost, keys: Keys) -> None:
    env = {"PUBLIC_KEY": keys.public}
    container = replace(PLAIN, env=env, args="sleep 600")
    never = host.start(replace(container, faults=PodFaults(has_no_ssh=True)))[22]
    late = host.start(replace(container, pod_id="pod2", faults=PodFaults(ssh_after_s=1.0)))[22]
    assert not _answers(late)
    began = time.monotonic()
    wait_until(lambda: _answers(late), TIMEOUT_S, "answering")
    assert time.monotonic() - began > 0.5
    assert not _answers(never)


def test_ssh_needs_a_key_and_a_port(host: RealPodHost, keys: Keys) -> None:
    without_key = host.start(replace(PLAIN, args="sleep 600"))[22]
    assert host.start(replace(PLAIN, pod_id="pod2", tcp_ports=[], env={"PUBLIC_KEY": keys.public})) == {}
    assert not _answers(without_key)


# ------------------------------------------------------------------------------------------------- over HTTP


@dataclass(frozen=True)
class Served:
    emulator: RunpodEmulator
    host: RealPodHost
    client: httpx.Client

    def runs(self, pod_id: str) -> bool:
        return self.client.get(f"/pods/{pod_id}").json()["runtime"] is not None


@pytest.fixture
def served(host: RealPodHost) -> Iterator[Served]:
    settings = RunpodEmulatorSettings(
        provisioning_s=0.05, starting_s=0.05, runtime_s=0.05, requests_per_minute=10_000, requests_per_hour=10_000
    )
    emulator = RunpodEmulator(lambda: datetime.now(UTC), settings, host)
    contract = Contract.find_or_none()
    api: Emulator = emulator if contract is None else CheckedEmulator(emulator, contract)
    headers = {"Authorization": "Bearer any"}
    with serving(api) as address, httpx.Client(base_url=f"{address}/v2", headers=headers, timeout=TIMEOUT_S) as client:
        yield Served(emulator, host, client)


@needs_sshd
def test_pod_is_created_used_over_ssh_and_deleted_over_http(served: Served, keys: Keys) -> None:
    client = served.client
    volume = client.post("/network-volumes", json={"name": "d", "size": 100, "dataCenter": "EU-RO-1"}).json()
    order = {
        "name": "gpu-1", "image": "runpod/pytorch:1", "gpu": {"id": GPU}, "ports": ["22/tcp"],
        "env": {"PUBLIC_KEY": keys.public.strip()},
        "mounts": {"network": [{"volumeId": volume["id"], "path": "/workspace"}]},
    }  # fmt: skip
    pod_id = client.post("/pods", json=order).json()["id"]
    wait_until(lambda: served.runs(pod_id), TIMEOUT_S, "running")
    direct = client.get(f"/pods/{pod_id}").json()["ssh"]["direct"]
    assert (direct["host"], direct["username"]) == ("127.0.0.1", served.host.user)
    wait_until(lambda: _answers(direct["port"]), TIMEOUT_S, "answering")
    shell = Shell(served.host, keys, direct["port"])
    assert shell.run("df -BG --output=size /workspace | tail -1").out == "94\n"
    client.patch(f"/network-volumes/{volume['id']}", json={"size": 200}).raise_for_status()
    assert shell.run("df -BG --output=size /workspace | tail -1").out == "187\n"
    served.emulator.lose_gpus(pod_id)
    assert shell.run("nvidia-smi").out == "No devices were found\n"
    assert client.delete(f"/pods/{pod_id}").status_code == 204
    wait_until(lambda: not _answers(direct["port"]), TIMEOUT_S, "going away")


def test_injected_time_out_over_http(served: Served) -> None:
    served.emulator.faults.next_create(times_out_after_taking_effect=True)
    order = {"name": "gpu-1", "image": "i", "gpu": {"id": GPU}}
    with pytest.raises(httpx.ReadTimeout):
        served.client.post("/pods", json=order, timeout=httpx.Timeout(TIMEOUT_S, read=0.3))
    wait_until(lambda: served.emulator.requests, TIMEOUT_S, "arriving")
    assert [pod["name"] for pod in served.client.get("/pods").json()["pods"]] == ["gpu-1"]


class Command:
    """`windlass emulate runpod`, as a process."""

    def __init__(self, folder: Path) -> None:
        times = ["--provisioning-s", "0", "--starting-s", "0.1", "--runtime-s", "0"]
        words = ["emulate", "runpod", "--port", "0", *times, "--requests-per-minute", "10000", "--dir", str(folder)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "windlass", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.first_line = self.process.stdout.readline()
        self.address = self.first_line.split()[2].removesuffix("/v2")
        self.client = httpx.Client(base_url=self.address, headers={"Authorization": "Bearer any"}, timeout=TIMEOUT_S)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    command = Command(tmp_path / "pods")
    try:
        yield command
    finally:
        command.client.close()
        command.process.kill()
        command.process.communicate(timeout=TIMEOUT_S)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_pods_end_with_the_emulator(command: Command, tmp_path: Path, number: int) -> None:
    """Including a process that left its session and lost its parent."""
    assert command.first_line.startswith("emulated Runpod: http://127.0.0.1:")
    script = "setsid sh -c 'sleep 600 & echo $! > orphan' ; touch up; sleep 600"
    order = {"name": "gpu-1", "image": "i", "gpu": {"id": GPU}, "args": shlex.join(["sh", "-c", script])}
    pod_id = command.client.post("/v2/pods", json=order).json()["id"]
    home = tmp_path / "pods" / pod_id / "root" / "root"
    wait_until((home / "up").exists, TIMEOUT_S, "starting")
    orphan = int((home / "orphan").read_text())
    pids = [process.pid for process in psutil.Process(command.process.pid).children(recursive=True)]
    assert orphan in pids
    assert command.client.get("/_emulator/machines").json()["machines"][0]["is_running"] is True
    os.kill(command.process.pid, number)
    wait_until(lambda: not any(_is_alive(pid) for pid in pids), TIMEOUT_S, "ending")
    _, errors = command.process.communicate(timeout=TIMEOUT_S)
    assert errors == ""


# ---------------------------------------------------------------------------------------------------- a real worker


def test_worker_in_pod_reports_emulated_gpu_memory(host: RealPodHost, dsn: str) -> None:
    args = shlex.join(["windlass", "worker", "--queue", "renders", "--exec", "cat", "--heartbeat-interval", "0.2"])
    container = replace(PLAIN, args=args, env={"DATABASE_URL": dsn})
    host.start(container)
    task_id = _query(dsn, "select windlass.enqueue('renders', '{}')")
    reported = "select vram_total_mb from windlass.workers"
    wait_until(lambda: _query(dsn, reported) == 46_068, TIMEOUT_S, "telling its memory")
    finished = "select status from windlass.tasks where id = $1"
    wait_until(lambda: _query(dsn, finished, task_id) == "complete", TIMEOUT_S, "working")
    host.refit(replace(container, gpu_count=0))
    wait_until(lambda: _query(dsn, reported) == 0, TIMEOUT_S, "missing its GPU")


def _query(dsn: str, sql: str, *arguments: Any) -> Any:
    async def ask() -> Any:
        connection = await asyncpg.connect(dsn, timeout=TIMEOUT_S)
        try:
            return await connection.fetchval(sql, *arguments)
        finally:
            await connection.close()

    return run_aside(ask())
