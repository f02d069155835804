"""`windlass up` with a Runpod fleet, rehearsed: real pods of this host, both ways from pod to worker; the doctor."""

import json
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from support.certificates import new_authority
from support.command_line import CommandLine, Completed
from support.stores import PostgresStores
from support.wheel_folder import write_wheels
from support.worker_harness import until
from windlass.model.event import Event
from windlass.model.task import TaskStatus, new_task
from windlass.providers.runpod.naming import fleet_tag
from windlass_emulators.http_server import serving
from windlass_emulators.runpod import RunpodEmulator, RunpodEmulatorSettings
from windlass_emulators.runpod.pod_host import RealPodHost, find_sshd

KEY = "a-good-key"
GPU, OTHER_GPU = "NVIDIA L40S", "NVIDIA RTX A5000"
APP = "def work(task):\n    return task.payload\n"
# The first process that is given a task is the one whose GPU is dead.
APP_OF_A_DEAD_GPU = """
import os
is_dead = None
def work(task):
    global is_dead
    if is_dead is None:
        try:
            os.mkdir("dead")
            is_dead = True
        except FileExistsError:
            is_dead = False
    if is_dead:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return task.payload
"""
TOML = """
[control]
lease_s = 5

[fleets.gpu]
provider = "runpod"
policy = "buffered"
queues = ["renders"]
handler = "app:work"
chdir = {folder}
min_workers = 0
max_workers = 2
poll_interval_s = 0.5
heartbeat_interval_s = 0.3
heartbeat_timeout_s = 20
spawn_timeout_s = 120
min_scaling_interval_s = 0
stop_timeout_s = 5
gpu_not_detected_timeout_s = 2
storage_check_interval_cycles = 2
auto_start_worker = {is_ssh}

[fleets.gpu.runpod]
image = {image}
choices = ["{gpu}@SECURE/EU-RO-1", "{other}@SECURE/EU-RO-1"]
network_volume_id = {volume}

[fleets.gpu.runpod.ssh]
start_command = "bash /workspace/start.sh"
start_watch_s = 0.5

[fleets.gpu.bootstrap]
requirements = {requirements}
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


class Site:
    """One account, one control plane."""

    def __init__(self, folder: Path, dsn: str, emulator: RunpodEmulator, host: RealPodHost, address: str) -> None:
        self.folder, self.emulator, self.host = folder, emulator, host
        self.port = free_port()
        key_file = folder / "id"
        asyncssh.generate_private_key("ssh-ed25519").write_private_key(key_file)
        env = {
            "DATABASE_URL": dsn, "RUNPOD_API_KEY": KEY, "RUNPOD_ENDPOINT": f"{address}/v2",
            "RUNPOD_SSH_PRIVATE_KEY_PATH": str(key_file),
        }  # fmt: skip
        self.windlass = CommandLine(folder, env)
        self.store = PostgresStores(dsn)
        body = json.dumps({"name": "models", "size": 100, "dataCenter": "EU-RO-1"}).encode()
        made = emulator.handle("POST", "/v2/network-volumes", [], {"Authorization": f"Bearer {KEY}"}, body)
        self.volume_id = json.loads(made.body)["id"]
        (folder / "app.py").write_text(APP)
        join = "$(dirname $PWD)/etc/windlass/join.json"
        script = f"echo started >> runs\nexec windlass worker --join {join}\n"
        (host.volume_folder(self.volume_id) / "start.sh").write_text(script)

    def configure(self, *, is_ssh: bool, requirements: Sequence[str] = (), has_tls: bool = False) -> None:
        text = TOML.format(
            requirements=json.dumps(list(requirements)),
            folder=json.dumps(str(self.folder)), is_ssh=str(is_ssh).lower(), gpu=GPU, other=OTHER_GPU,
            image=json.dumps("runpod/pytorch:1" if is_ssh else "example/worker:1"), volume=json.dumps(self.volume_id),
        )  # fmt: skip
        if has_tls:
            cert, key, ca = (self.folder / name for name in ("cert.pem", "key.pem", "ca.pem"))
            authority = new_authority()
            authority.issue(cert, key)
            authority.write(ca)
            text += f'ca_file = "{ca}"\n[api]\ntls_cert = "{cert}"\ntls_key = "{key}"\n'
        (self.folder / "windlass.toml").write_text(text)

    def up(self) -> "subprocess.Popen[str]":
        with (self.folder / "up.log").open("a") as log:
            return self.windlass.start("up", "--port", self.port, stdout=log, stderr=log, start_new_session=True)

    def log(self) -> str:
        return (self.folder / "up.log").read_text()

    async def work(self, count: int) -> None:
        ids = [await self.store.enqueue(new_task("renders", {"number": n})) for n in range(count)]

        async def done() -> bool:
            tasks = [await self.store.task(id_) for id_ in ids]
            return all(task is not None and task.status is TaskStatus.COMPLETE for task in tasks)

        await until(done, "the tasks are complete")

    async def reported(self, code: str) -> list[Event]:
        return [event for event in await self.store.events(limit=1000) if event.code == code]

    async def pods_gone(self) -> bool:
        self.emulator.settle()
        return not self.emulator.account.pods


@pytest.fixture
async def site(tmp_path: Path, dsn: str) -> AsyncIterator[Site]:
    plenty = {"requests_per_minute": 10**5, "requests_per_hour": 10**6, "requests_per_day": 10**6}
    settings = RunpodEmulatorSettings(provisioning_s=0.1, starting_s=0.2, runtime_s=0.1, key=KEY, **plenty)
    with RealPodHost(tmp_path / "pods", stop_grace_s=2.0) as host:
        emulator = RunpodEmulator(lambda: datetime.now(UTC), settings, host)
        with serving(emulator) as address:
            site = Site(tmp_path, dsn, emulator, host, address)
            async with site.store:
                yield site


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wheels(tmp_path_factory.mktemp("wheels"))


@pytest.fixture
def processes() -> "Iterator[list[subprocess.Popen[str]]]":
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait(timeout=30)


async def end(site: Site, up: "subprocess.Popen[str]") -> None:
    """Shut down: all workers drain, and no pod is billed afterwards."""
    up.send_signal(signal.SIGTERM)
    assert up.wait(timeout=40) == 0, site.log()
    assert await site.pods_gone(), site.log()


async def test_image_starts_the_worker(site: Site, processes: "list[subprocess.Popen[str]]") -> None:
    site.configure(is_ssh=False)
    site.emulator.faults.no_capacity(GPU)
    site.emulator.fill_volume(site.volume_id, 90.0)
    processes.append(site.up())
    await site.work(6)

    async def is_gpu_reported() -> bool:
        # Count workers that are gone, too: a task may be done before the heartbeat that reports it.
        workers = await site.store.workers(include_terminated=True)
        return {worker.vram_total_mb for worker in workers if worker.vram_total_mb is not None} == {24_564}

    await until(is_gpu_reported, "what its GPU has")

    async def has_grown() -> bool:
        return len(await site.reported("VOLUME_GROWN")) > 0

    await until(has_grown, "its storage has grown, by the word of a worker")
    await site.work(2)
    await end(site, processes[0])
    assert [event.detail for event in await site.reported("VOLUME_GROWN")] == [
        {"volume_id": site.volume_id, "size_gb": 150}
    ]
    assert site.emulator.account.volumes[site.volume_id].size_gb == 150
    accounts = {account.worker_id: account.bill for account in await site.store.open_accounts(fleet="gpu")}
    lines = {line["name"]: line for line in site.emulator.bill()["pods"]}
    assert set(accounts) == set(lines)
    for name, bill in accounts.items():
        assert (bill.tariff.price_micros_per_hour, bill.tariff.currency, bill.tariff.unit_s) == (276_944, "USD", 1)
        assert bill.since == datetime.fromisoformat(lines[name]["created"])
        # That it was gone is known as soon as the vendor says so, and not only when it is missing in a list.
        assert bill.until is not None
        assert abs((bill.until - datetime.fromisoformat(lines[name]["deleted"])).total_seconds()) < 10
    assert KEY not in site.log()
    assert "wlj_" not in site.log()
    assert "run cycle failed" not in site.log()


async def test_pods_join_over_tls_with_the_certificate_of_an_own_authority(
    site: Site, processes: "list[subprocess.Popen[str]]"
) -> None:
    site.configure(is_ssh=False, has_tls=True)
    processes.append(site.up())
    await site.work(3)
    joins = [json.loads(pod.config.env["WINDLASS_JOIN"]) for pod in site.emulator.account.pods.values()]
    assert joins
    assert {join["ca_pem"] for join in joins} == {(site.folder / "ca.pem").read_text()}
    assert {join["url"] for join in joins} == {f"https://127.0.0.1:{site.port}"}
    await end(site, processes[0])


async def test_pods_without_a_working_gpu_consume_no_attempts(
    site: Site, processes: "list[subprocess.Popen[str]]"
) -> None:
    site.configure(is_ssh=False)
    (site.folder / "app.py").write_text(APP_OF_A_DEAD_GPU)
    site.emulator.faults.next_pod(has_no_driver=True)
    processes.append(site.up())
    await site.work(40)
    errors = {str((event.detail or {})["code"]) for event in await site.reported("WORKER_ERROR")}
    assert errors == {"GPU_NOT_DETECTED", "QUARANTINED"}
    assert len(await site.reported("ATTEMPTS_REFUNDED")) >= 3
    await end(site, processes[0])
    assert "run cycle failed" not in site.log()


@pytest.mark.skipif(find_sshd() is None, reason="no OpenSSH here: install openssh-server")
async def test_workers_start_over_ssh_and_pod_without_gpu_is_replaced(
    site: Site, processes: "list[subprocess.Popen[str]]", wheels: Path
) -> None:
    """Its image has Python and no Windlass: the pod installs the wheel of the control plane, and what it needs."""
    site.configure(is_ssh=True, requirements=["--no-index", f"--find-links {wheels}"])
    site.emulator.faults.next_pod(has_no_gpu=True)
    processes.append(site.up())
    await site.work(4)
    (failed,) = await site.reported("PREPARATION_FAILED")
    assert failed.detail == {"code": "GPU_NOT_DETECTED", "output": "No devices were found"}
    (broken,) = await site.reported("WORKER_ERROR")
    assert broken.detail == {"code": "GPU_NOT_DETECTED"}
    assert broken.worker_id == failed.worker_id

    async def is_prepared() -> bool:
        # Its start is watched for a moment before it is written down, and the tasks are short.
        return len(await site.reported("MACHINE_PREPARED")) > 0

    await until(is_prepared, "a start is written down")
    used = [path for path in site.host.folder.glob("*/root/var/lib/windlass/env/bin/windlass") if path.exists()]
    assert used, "no worker runs from an installed environment"
    story = [event.code for event in await site.store.events(limit=1000) if event.worker_id]
    assert story.index("MACHINE_PREPARING") < min(story.index("MACHINE_PREPARED"), story.index("WORKER_JOINED"))
    # The orchestrator is killed; the next one finds all workers running and starts none twice.
    prepared = len(await site.reported("MACHINE_PREPARED"))
    processes[0].kill()
    processes[0].wait(timeout=30)
    (last,) = await site.store.cycles("gpu", 1)
    processes.append(site.up())

    async def is_led() -> bool:
        # A cycle that decides the same as the last one is counted there, and keeps its term.
        (cycle,) = await site.store.cycles("gpu", 1)
        return cycle.term > last.term or (cycle.repeated_at or cycle.started_at) > (last.repeated_at or last.started_at)

    await until(is_led, "the next one leads", 90)
    await site.work(2)
    runs = site.host.volume_folder(site.volume_id) / "runs"

    async def is_each_written_down() -> bool:
        return len(runs.read_text().splitlines()) == len(await site.reported("MACHINE_PREPARED"))

    await until(is_each_written_down, "each start is written down once")
    assert len(await site.reported("MACHINE_PREPARED")) >= prepared
    await end(site, processes[1])


async def test_up_with_variables_alone_says_what_its_minimum_costs(
    site: Site, processes: "list[subprocess.Popen[str]]"
) -> None:
    """The variables of the original orchestrators, and no file: it keeps two GPUs, as they did."""
    site.windlass = site.windlass.with_env(
        MAX_ACTIVE_GPUS="3", ORCHESTRATOR_POLL_SEC="1", WINDLASS_FLEETS__DEFAULT__PROVIDER="runpod",
        WINDLASS_FLEETS__DEFAULT__RUNPOD__IMAGE="example/worker:1",
        WINDLASS_FLEETS__DEFAULT__RUNPOD__CHOICES=f"{GPU}@SECURE", WINDLASS_FLEETS__DEFAULT__HANDLER="app:work",
    )  # fmt: skip
    processes.append(site.up())

    async def has_two_pods() -> bool:
        return len(site.emulator.account.pods) == 2

    async def is_said() -> bool:
        return "keep minimum workers" in site.log()

    await until(is_said, "the cost of the minimum is said")
    await until(has_two_pods, "the minimum is created")
    (line,) = [line for line in site.log().splitlines() if "keep minimum workers" in line]
    said = json.loads(line)
    # Two pods for 24 hours, each at 0.86 USD and 50 GB of disk at 0.10 USD per GB and 30 days.
    known = {"fleet": "default", "min_workers": 2, "machine": f"{GPU} in SECURE", "cost_per_day": "USD 41.61"}
    assert said.items() >= known.items()
    await end(site, processes[0])


def findings(done: Completed) -> dict[str, tuple[str, str]]:
    return {found["check"]: (found["verdict"], found["what"]) for found in json.loads(done.out)}


async def test_doctor_checks_everything_a_runpod_fleet_needs(site: Site) -> None:
    site.configure(is_ssh=True)
    found = findings(site.windlass("doctor", "--json"))
    assert found["runpod"] == ("ok", "key valid, windlass pods: 0")
    assert found["volume"] == ("ok", "models (100 GB in EU-RO-1)")
    assert found["gpu type"] == ("ok", f"{OTHER_GPU} in SECURE/EU-RO-1, 0.27 USD per hour")
    assert found["ssh key"][0] == "ok"
    assert found["boot time"][0] == "warn", "spawn_timeout_s is 120"
    assert found["boot time"][1].startswith("a new pod of fleet gpu has 240 s to pull its image")
    assert {method for _, method, path in site.emulator.requests if path != "/v2/network-volumes"} == {"GET"}


async def test_doctor_reports_pods_of_a_removed_fleet(site: Site) -> None:
    tag = f"{fleet_tag(await site.store.instance_id(), 'pods')}pods-0-aa"
    pod = {"name": "pods-0-aa", "image": "i", "gpu": {"id": GPU}, "env": {"WINDLASS_POD": tag}}
    headers = {"Authorization": f"Bearer {KEY}"}
    assert site.emulator.handle("POST", "/v2/pods", [], headers, json.dumps(pod).encode()).status == 201
    found = findings(site.windlass("doctor", "--json"))
    assert found["runpod"] == ("warn", "pods exist of fleets that are not configured: pods")
    assert not found.keys() & {"volume", "gpu type", "ssh key"}


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RUNPOD_API_KEY": ""}, "the Runpod API key is missing. Set RUNPOD_API_KEY"),
        ({"RUNPOD_API_KEY": "wrong"}, "invalid bearer token (401)"),
        ({"RUNPOD_ENDPOINT": "http://127.0.0.1:1/v2"}, "API unreachable"),
        ({"RUNPOD_SSH_PRIVATE_KEY_PATH": "/none"}, "cannot read SSH key /none"),
    ],
)
async def test_doctor_reports_each_problem(site: Site, env: dict[str, Any], words: str) -> None:
    site.configure(is_ssh=True)
    done = site.windlass.with_env(**env)("doctor", "--json")
    assert done.code == 1
    verdict, what = findings(done)["runpod"]
    assert verdict == "fail"
    assert words in what
    assert KEY not in done.out
