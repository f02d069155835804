"""The simulated world with Runpod in it: the real control loop over the real provider, httpx and emulated API.

The emulator's pods are the machines in the cloud's books, with the simulated workers in them. The books check the
pods: never too many, no worker terminated without cause, nothing left over, no doubles.
Faults of each request
are drawn from the scenario's rates. Each start of an orchestrator has an account and a provider of its own, as a
process would. In every second history workers are started by a preparation that takes its time, and fails where the
pod is a bad one. Workers need GPUs, and some pods have none, or stay RUNNING without a runtime.
"""

import asyncio
import json
import re
from dataclasses import replace
from random import Random
from typing import Any

import httpx

from support.runpod_contract import InProcessTransport
from support.runpod_fixture import ENDPOINT, IMAGE, TIMEOUT_S, URL, Network
from support.simulator.cloud import MachineRecord, SimulatedCloud
from support.simulator.loop import to_datetime, virtual_now
from support.simulator.orchestrators import ProcessProvider, SimulatedOrchestrator
from support.simulator.scenario import FleetScenario, Scenario, draw_scenario
from support.simulator.simulation import Simulation
from support.simulator.workers import SimulatedWorker
from windlass.model.errors import NotPrepared
from windlass.model.machine import MachineRequest, Preparation
from windlass.model.runpod import RunpodSettings
from windlass.ports.provider import OnHostKey
from windlass.providers.runpod.account import RunpodAccount
from windlass.providers.runpod.provider import RunpodProvider
from windlass_emulators.runpod import RunpodEmulator, RunpodEmulatorSettings
from windlass_emulators.runpod.errors import NO_CAPACITY
from windlass_emulators.runpod.faults import PodFaults

# What the provider's traits allow for: how old a list may be, how late a pod may come, for how long a new one hides.
MAX_LIST_AGE_S = 30.0
MAX_LATE_S = 90.0
MAX_HIDDEN_S = 20.0
_ONE_POD = re.compile(r"/v2/pods/(\w+)")
PODS = "/v2/pods"
CODES = ("SSH_UNREACHABLE", "STORAGE_NOT_MOUNTED", "GPU_NOT_DETECTED", "DISK_FULL", "START_SCRIPT_FAILED")

# Share of pods, in two of three histories, without a GPU, and share that never has a runtime.
NO_GPU_SHARE, NO_RUNTIME_SHARE = 0.12, 0.08
REFUSALS = ("no capacity", "401", "402", "403", "422", "400", "429")
NO_ANSWERS = ("5xx", "silence")
NOT_DELETED = ("nothing", "404", "409", "401", "403", "429", *NO_ANSWERS)


def runpod_scenario(seed: int) -> Scenario:
    """The faults of any scenario, with the timeouts that this vendor's lists require."""
    scenario = draw_scenario(seed)
    return replace(
        scenario, fleets={name: _surroundings(fleet_scenario) for name, fleet_scenario in scenario.fleets.items()}
    )


def _surroundings(fleet_scenario: FleetScenario) -> FleetScenario:
    settings = {
        "provider": "runpod",
        "policy": "buffered",
        "runpod": RunpodSettings(image=IMAGE),
        "spawn_timeout_s": 90.0,
        "poll_interval_s": max(5.0, fleet_scenario.config.poll_interval_s),
        "has_gpu": True,
        "gpu_not_detected_timeout_s": 45.0,
        "concurrency": 1,
    }
    # The simulation waits for deletions by the cloud's traits, so they must equal the provider's.
    return replace(
        fleet_scenario,
        config=fleet_scenario.config.model_copy(update=settings),
        max_list_age_s=60.0,
        max_creation_delay_s=MAX_LATE_S + 60.0,
    )


class RunpodCloud(SimulatedCloud):
    """The bill of one fleet in an emulated account."""

    pods: "Pods"

    def remove_machine(self, machine_id: str) -> None:
        self.pods.vanish(machine_id)
        super().remove_machine(machine_id)

    def mark_exited(self, machine_id: str) -> None:
        self.pods.stop(machine_id)
        super().mark_exited(machine_id)


class Pods(InProcessTransport):
    """The emulated account, its faults, and the worker of each pod."""

    def __init__(self, clouds: dict[str, RunpodCloud], rng: Random, fate: Random) -> None:
        settings = RunpodEmulatorSettings(
            provisioning_s=1.0,
            starting_s=rng.choice([0.0, 3.0, 6.0]),
            requests_per_minute=600,
            requests_per_hour=30_000,
            requests_per_day=500_000,
        )
        self.emulator = RunpodEmulator(virtual_now, settings)
        super().__init__(self.emulator)
        self.clouds = clouds
        self.rng = rng
        # Randomness of pods, separate from that of requests.
        self.fate = fate
        self.has_bad_pods = fate.random() < 2 / 3
        # The fault of the pod that starts now.
        self.begins_with = PodFaults()
        self.faults_ended = False
        self.entries: dict[str, MachineRecord] = {}
        self.faults_seen: set[str] = set()

    # -------------------------------------------------------------------------------------------------- requests

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        method, path = request.method, request.url.path
        cloud = self._cloud_of(request, method, path)
        faults = self.emulator.faults
        breaks = self._draw(method, path, cloud) if cloud is not None and not self.faults_ended else None
        if method == "POST" and path == PODS and self.has_bad_pods and not self.faults_ended:
            self._draw_pod(cloud)
        if breaks == "late":
            delay_s = self.rng.uniform(0.0, MAX_LATE_S)
            asyncio.get_running_loop().call_later(delay_s, lambda: self._arrive(request))
            raise httpx.ReadTimeout("no answer", request=request)
        try:
            response = super().handle_request(request)
        finally:
            faults.lag_s = 0.0
            faults.ineffective_deletions = 0
            self.update_records()
        if breaks == "answer lost":
            raise httpx.ReadError("Connection reset by peer", request=request)
        return response

    def _arrive(self, request: httpx.Request) -> None:
        super().handle_request(request)
        self.update_records()

    def _cloud_of(self, request: httpx.Request, method: str, path: str) -> RunpodCloud | None:
        if method == "POST" and path == PODS:
            fleet = json.loads(request.content)["env"]["WINDLASS_POD"].split("/")[1]
            self.clouds[fleet].create_calls += 1
            return self.clouds[fleet]
        if one := _ONE_POD.fullmatch(path):
            entry = self.entries.get(one[1])
            if entry is not None and method == "DELETE":
                self.clouds[entry.fleet].delete_calls += 1
                if one[1] in self.emulator.account.pods:
                    self.clouds[entry.fleet].on_delete_requested(entry)
            return self.clouds[entry.fleet] if entry is not None else None
        return self.rng.choice(list(self.clouds.values()))

    def _draw(self, method: str, path: str, cloud: RunpodCloud) -> str | None:
        """Script the response to this request, or return the network fault that it meets."""
        rng, rates, roll = self.rng, cloud.rates, self.rng.random()
        faults = self.emulator.faults
        faults.hidden_s = rng.uniform(0.0, MAX_HIDDEN_S) if rates.list_stale > 0 else 0.0
        if method == "POST":
            if roll < rates.create_ambiguous:
                kind = rng.choice(
                    ["late", "answer lost", *(f"{each}{after}" for each in NO_ANSWERS for after in AFTER)]
                )
                if not cloud.allow("create_ambiguous"):
                    return None
                if kind not in ("late", "answer lost"):
                    return self._script(method, path, kind, cloud)
                return self._tell(cloud, method, path, kind)
            if roll < rates.create_ambiguous + rates.create_refused:
                refusal = rng.choice(REFUSALS)
                return self._script(method, path, refusal, cloud) if cloud.allow(refused_as(refusal)) else None
        elif method == "DELETE":
            if roll < rates.delete_failed:
                kind = rng.choice(NOT_DELETED)
                after = rng.choice(AFTER) if kind in NO_ANSWERS else ""
                return self._script(method, path, kind + after, cloud) if cloud.allow("delete_failed") else None
        elif roll < rates.list_failed / (1 if path == PODS else 3):
            kind = rng.choice(["silence", "5xx", "429"])
            return self._script(method, path, kind, cloud) if cloud.allow("list_failed") else None
        elif path == PODS and rng.random() < rates.list_stale:
            lag_s = rng.uniform(0.0, MAX_LIST_AGE_S)
            if cloud.allow("list_stale"):
                faults.lag_s = lag_s
                self.faults_seen.add("list old")
        return None

    def _draw_pod(self, cloud: RunpodCloud | None) -> None:
        roll = self.fate.random()
        if cloud is None or (roll < NO_GPU_SHARE + NO_RUNTIME_SHARE and not cloud.allow("bad_pod")):
            return
        if roll < NO_GPU_SHARE:
            self.emulator.faults.next_pod(has_no_gpu=True)
        elif roll < NO_GPU_SHARE + NO_RUNTIME_SHARE:
            self.emulator.faults.next_pod(never_has_runtime=True)

    def _tell(self, cloud: RunpodCloud, method: str, path: str, kind: str) -> str:
        self.faults_seen.add(f"{method} {kind}")
        cloud.trace.add("runpod", f"{method} {path}: {kind}")
        return kind

    def _script(self, method: str, path: str, kind: str, cloud: RunpodCloud) -> str | None:
        """Script the answer to the next such request. Returns None: the network has no fault."""
        self._tell(cloud, method, path, kind)
        word = kind.removesuffix(" after")
        faults = self.emulator.faults
        if word == "nothing":
            faults.next_delete(does_nothing=True)
            return None
        detail = NO_CAPACITY if word == "no capacity" else None
        words = {"silence": None, "no capacity": 400, "5xx": self.rng.choice([500, 502, 503, 504])}
        status = words[word] if word in words else int(word)
        retry_s = self.rng.randint(1, 20) if word == "429" else None
        faults.next(
            status, method=method, path=re.escape(path), detail=detail, retry_after_s=retry_s,
            takes_effect=kind.endswith(" after"),
        )  # fmt: skip
        return None

    # ----------------------------------------------------------------------------------------------------- books

    def update_records(self) -> None:
        """Record pods that began or ended, now and at the next event of the emulator."""
        self.emulator.settle()
        pods = self.emulator.account.pods
        for id_, pod in pods.items():
            if id_ not in self.entries:
                _, fleet, worker_id = pod.config.env["WINDLASS_POD"].split("/")
                slot = int(worker_id.split("-")[-2])
                self.begins_with = pod.faults
                self.faults_seen |= {name for name in ("has_no_gpu", "never_has_runtime") if getattr(pod.faults, name)}
                self.entries[id_] = self.clouds[fleet].add_machine(MachineRequest(worker_id, fleet, slot))
        for id_, entry in self.entries.items():
            if id_ not in pods:
                SimulatedCloud.remove_machine(self.clouds[entry.fleet], entry.id)
        due = self.emulator.next_due()
        if due is not None:
            asyncio.get_running_loop().call_at((due - to_datetime(0)).total_seconds() + 1e-6, self._update_again)

    def _update_again(self) -> None:
        due = self.emulator.next_due()
        if due is not None and due <= virtual_now():
            self.update_records()

    def vanish(self, machine_id: str) -> None:
        """The vendor lost the pod, or a person deleted it in the console."""
        for pod in self._pods_of(machine_id):
            self.emulator.account.remove(pod)

    def stop(self, machine_id: str) -> None:
        for pod in self._pods_of(machine_id):
            self.emulator.account.stop(pod)

    def _pods_of(self, machine_id: str) -> list[Any]:
        self.emulator.settle()
        pods = self.emulator.account.pods
        return [pods[id_] for id_, entry in self.entries.items() if entry.id == machine_id and id_ in pods]


AFTER = ("", " after")


def refused_as(refusal: str) -> str:
    """The kind of fault of a refused creation."""
    return "create_throttled" if refusal == "429" else "create_refused"


class SlowPreparer:
    """Takes virtual time, and reports the fault of the pod."""

    def __init__(self, history: "RunpodHistory", rng: Random) -> None:
        self._history = history
        self._rng = rng

    async def prepare(
        self, pod: str, where: Any, host_key: str | None, on_host_key: OnHostKey, last_known: Any
    ) -> Preparation:
        await asyncio.sleep(self._rng.choice([0.1, 3.0, 20.0]))
        if host_key is None:
            await on_host_key("its key")
        pod_id = pod.split()[1]
        entry = self._history.pods.entries.get(pod_id)
        worker = self._history.checker.workers_by_machine.get(entry.id) if entry is not None else None
        if worker is None or pod_id not in self._history.pods.emulator.account.pods:
            raise NotPrepared("SSH_UNREACHABLE", f"preparing {pod}: no response")
        if worker.history.faults.has_no_gpu and self._rng.random() < 0.5:
            raise NotPrepared("GPU_NOT_DETECTED", f"preparing {pod}: no GPU answers", "what it said", "its key")
        if worker.history.faults.never_joins:
            raise NotPrepared(self._rng.choice(CODES), f"preparing {pod}: it is a bad one", "what it said", "its key")
        if not self._history.faults_ended and self._rng.random() < 0.3:
            raise RuntimeError("adapter bug")
        return Preparation(host_key or "its key")


class RunpodHistory(Simulation):
    pods: Pods

    def _build(self) -> None:
        self.wrap_service = self._replace_provider
        super()._build()
        clouds = {name: cloud for name, cloud in self.clouds.items() if isinstance(cloud, RunpodCloud)}
        self.pods = Pods(clouds, self.rng_for("runpod"), self.rng_for("pods"))
        for cloud in clouds.values():
            cloud.pods = self.pods

    def _make_cloud(self, name: str, fleet_scenario: FleetScenario) -> SimulatedCloud:
        usual = super()._make_cloud(name, fleet_scenario)
        cloud = RunpodCloud(
            name,
            usual.rng,
            self.trace,
            usual.max_list_age_s,
            usual.max_creation_delay_s,
            rates=usual.rates,
            decisions=usual.decisions,
        )
        cloud.on_created, cloud.on_delete_requested = usual.on_created, usual.on_delete_requested
        cloud.start_worker = lambda entry: self._start_worker(cloud, fleet_scenario, entry)
        return cloud

    def _start_worker(
        self, cloud: SimulatedCloud, fleet_scenario: FleetScenario, entry: MachineRecord
    ) -> SimulatedWorker:
        """A worker with the fault of its pod."""
        pod = self.pods.begins_with
        if pod.has_no_gpu or pod.never_has_runtime:
            self.next_worker(has_no_gpu=pod.has_no_gpu, never_joins=pod.never_has_runtime)
        return super()._start_worker(cloud, fleet_scenario, entry)

    def _replace_provider(self, orchestrator: SimulatedOrchestrator, service: Any) -> Any:
        if not isinstance(service, ProcessProvider):
            return service
        fleet = service.provider.fleet  # type: ignore[attr-defined] # the bare cloud
        rng = self.rng_for(f"{orchestrator.name} {self.now()}")
        account = RunpodAccount(
            "any", endpoint=ENDPOINT, timeout_s=TIMEOUT_S, transport=Network(self.pods, rng), rng=rng
        )  # fmt: skip
        is_prepared = self.scenario.seed % 2 == 1
        provider = RunpodProvider(
            fleet,
            RunpodSettings(image=IMAGE, choices=("NVIDIA L40S", "NVIDIA RTX A5000@COMMUNITY"), capacity_memory_s=60.0),
            account,
            identity="this",
            url=URL,
            preparer=SlowPreparer(self, rng) if is_prepared else None,  # type: ignore[arg-type]
            public_key="ssh-ed25519 AAAA" if is_prepared else None,
            now=virtual_now,
        )
        return ProcessProvider(provider, service.process)

    async def _end_faults(self) -> None:
        self.pods.faults_ended = True
        self.pods.emulator.faults.clear()
        await super()._end_faults()

    async def _find_leak(self) -> str | None:
        self.pods.update_records()
        return await super()._find_leak()

    async def _find_unrest(self) -> str | None:
        """A pod whose worker ended, is late, or hung before the faults ended may still be replaced."""
        for cloud in self.clouds.values():
            for entry in cloud.billed_machines():
                worker = self.checker.workers_by_machine[entry.id]
                has_heartbeats = worker.history.first_heartbeat_at is not None
                if worker.history.faults.has_no_gpu:
                    return f"{entry.id} of {entry.name} has no GPU"
                if worker.process.is_dead or worker.process.is_frozen or not has_heartbeats:
                    return f"no live worker in {entry.id} of {entry.name}"
        return await super()._find_unrest()
