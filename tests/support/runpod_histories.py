"""The simulated world with Runpod in it: the real control loop over the real provider, httpx and emulated API.

The emulator's pods are the machines in the cloud's books, with the simulated workers in them; what the books judge
(never too many, nobody ended without cause, nothing left over, no doubles) is judged of pods. Faults of each request
are drawn from the scenario's rates. Each start of an orchestrator has an account and a provider of its own, as a
process would. In every second history workers are started by a preparation that takes its time, and fails where the
pod is a bad one. Workers need GPUs, and some pods have none, or are RUNNING for ever with nothing in them.
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
from windlass.model.errors import NotPrepared
from windlass.model.machine import MachineRequest, Preparation
from windlass.model.runpod import RunpodSettings
from windlass.ports.provider import OnHostKey
from windlass.providers.runpod.account import RunpodAccount
from windlass.providers.runpod.provider import RunpodProvider
from windlass.simulator.cloud import Entry, SimulatedCloud
from windlass.simulator.loop import moment, virtual_now
from windlass.simulator.orchestrators import GatedProvider, SimOrchestrator
from windlass.simulator.scenario import Scenario, Surroundings, draw
from windlass.simulator.workers import SimWorker
from windlass.simulator.world import World
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

# Of all pods that are made, in two of three histories: those without a GPU, and those that never have a runtime.
NO_GPU_SHARE, NO_RUNTIME_SHARE = 0.12, 0.08
REFUSALS = ("no capacity", "401", "402", "403", "422", "400", "429")
NO_ANSWERS = ("5xx", "silence")
NOT_DELETED = ("nothing", "404", "409", "401", "403", "429", *NO_ANSWERS)


def runpod_scenario(seed: int) -> Scenario:
    """The troubles of any world, with fleets as patient as lists of this vendor ask for."""
    scenario = draw(seed)
    return replace(scenario, fleets={name: _surroundings(around) for name, around in scenario.fleets.items()})


def _surroundings(around: Surroundings) -> Surroundings:
    settings = {
        "provider": "runpod",
        "runpod": RunpodSettings(image=IMAGE),
        "spawn_timeout_s": 90.0,
        "poll_interval_s": max(5.0, around.config.poll_interval_s),
        "has_gpu": True,
        "gpu_not_detected_timeout_s": 45.0,
        "concurrency": 1,
    }
    # The world waits for machines to be gone by what the cloud says of itself: as the provider says.
    return replace(
        around, config=around.config.model_copy(update=settings), max_list_age_s=60.0, max_late_s=MAX_LATE_S + 60.0
    )


class RunpodCloud(SimulatedCloud):
    """The books of one fleet, kept of an emulated account."""

    pods: "Pods"

    def end(self, machine_id: str) -> None:
        self.pods.vanish(machine_id)
        super().end(machine_id)

    def exited(self, machine_id: str) -> None:
        self.pods.stop(machine_id)
        super().exited(machine_id)


class Pods(InProcessTransport):
    """The emulated account, what goes wrong with it, and whose machine each pod is."""

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
        # Of pods, apart from that of requests.
        self.fate = fate
        self.has_bad_pods = fate.random() < 2 / 3
        # What is wrong with the pod that begins at this moment.
        self.begins_with = PodFaults()
        self.is_calm = False
        self.entries: dict[str, Entry] = {}
        self.told: set[str] = set()

    # -------------------------------------------------------------------------------------------------- requests

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        method, path = request.method, request.url.path
        cloud = self._cloud_of(request, method, path)
        faults = self.emulator.faults
        breaks = self._draw(method, path, cloud) if cloud is not None and not self.is_calm else None
        if method == "POST" and path == PODS and self.has_bad_pods and not self.is_calm:
            self._draw_pod()
        if breaks == "late":
            delay_s = self.rng.uniform(0.0, MAX_LATE_S)
            asyncio.get_running_loop().call_later(delay_s, lambda: self._arrive(request))
            raise httpx.ReadTimeout("no answer", request=request)
        try:
            response = super().handle_request(request)
        finally:
            faults.lag_s = 0.0
            faults.ineffective_deletions = 0
            self.look()
        if breaks == "answer lost":
            raise httpx.ReadError("Connection reset by peer", request=request)
        return response

    def _arrive(self, request: httpx.Request) -> None:
        super().handle_request(request)
        self.look()

    def _cloud_of(self, request: httpx.Request, method: str, path: str) -> RunpodCloud | None:
        if method == "POST" and path == PODS:
            fleet = json.loads(request.content)["env"]["WINDLASS_POD"].split("/")[1]
            self.clouds[fleet].created_calls += 1
            return self.clouds[fleet]
        if one := _ONE_POD.fullmatch(path):
            entry = self.entries.get(one[1])
            if entry is not None and method == "DELETE":
                self.clouds[entry.fleet].deleted_calls += 1
                if one[1] in self.emulator.account.pods:
                    self.clouds[entry.fleet].on_ending(entry)
            return self.clouds[entry.fleet] if entry is not None else None
        return self.rng.choice(list(self.clouds.values()))

    def _draw(self, method: str, path: str, cloud: RunpodCloud) -> str | None:
        """Script what happens to this request; or say what breaks on the way."""
        rng, rates, roll = self.rng, cloud.rates, self.rng.random()
        faults = self.emulator.faults
        faults.hidden_s = rng.uniform(0.0, MAX_HIDDEN_S) if rates.list_old > 0 else 0.0
        if method == "POST":
            if roll < rates.create_unclear:
                kind = rng.choice(
                    ["late", "answer lost", *(f"{each}{after}" for each in NO_ANSWERS for after in AFTER)]
                )
                if kind not in ("late", "answer lost"):
                    return self._script(method, path, kind, cloud)
                return self._tell(cloud, method, path, kind)
            if roll < rates.create_unclear + rates.create_refused:
                return self._script(method, path, rng.choice(REFUSALS), cloud)
        elif method == "DELETE":
            if roll < rates.delete_failed:
                kind = rng.choice(NOT_DELETED)
                after = rng.choice(AFTER) if kind in NO_ANSWERS else ""
                return self._script(method, path, kind + after, cloud)
        elif roll < rates.list_failed / (1 if path == PODS else 3):
            return self._script(method, path, rng.choice(["silence", "5xx", "429"]), cloud)
        elif path == PODS and rng.random() < rates.list_old:
            faults.lag_s = rng.uniform(0.0, MAX_LIST_AGE_S)
            self.told.add("list old")
        return None

    def _draw_pod(self) -> None:
        roll = self.fate.random()
        if roll < NO_GPU_SHARE:
            self.emulator.faults.next_pod(has_no_gpu=True)
        elif roll < NO_GPU_SHARE + NO_RUNTIME_SHARE:
            self.emulator.faults.next_pod(never_has_runtime=True)

    def _tell(self, cloud: RunpodCloud, method: str, path: str, kind: str) -> str:
        self.told.add(f"{method} {kind}")
        cloud.story.tell("runpod", f"{method} {path}: {kind}")
        return kind

    def _script(self, method: str, path: str, kind: str, cloud: RunpodCloud) -> None:
        self._tell(cloud, method, path, kind)
        word = kind.removesuffix(" after")
        faults = self.emulator.faults
        if word == "nothing":
            faults.next_delete(does_nothing=True)
            return
        detail = NO_CAPACITY if word == "no capacity" else None
        words = {"silence": None, "no capacity": 400, "5xx": self.rng.choice([500, 502, 503, 504])}
        status = words[word] if word in words else int(word)
        retry_s = self.rng.randint(1, 20) if word == "429" else None
        faults.next(
            status, method=method, path=re.escape(path), detail=detail, retry_after_s=retry_s,
            takes_effect=kind.endswith(" after"),
        )  # fmt: skip

    # ----------------------------------------------------------------------------------------------------- books

    def look(self) -> None:
        """Write down what began and what is gone, now and when something happens by itself."""
        self.emulator.settle()
        pods = self.emulator.account.pods
        for id_, pod in pods.items():
            if id_ not in self.entries:
                _, fleet, worker_id = pod.config.env["WINDLASS_POD"].split("/")
                slot = int(worker_id.split("-")[-2])
                self.begins_with = pod.faults
                self.told |= {name for name in ("has_no_gpu", "never_has_runtime") if getattr(pod.faults, name)}
                self.entries[id_] = self.clouds[fleet].begin(MachineRequest(worker_id, fleet, slot))
        for id_, entry in self.entries.items():
            if id_ not in pods:
                SimulatedCloud.end(self.clouds[entry.fleet], entry.id)
        due = self.emulator.next_due()
        if due is not None:
            asyncio.get_running_loop().call_at((due - moment(0)).total_seconds() + 1e-6, self._look_again)

    def _look_again(self) -> None:
        due = self.emulator.next_due()
        if due is not None and due <= virtual_now():
            self.look()

    def vanish(self, machine_id: str) -> None:
        """The vendor lost it, or somebody deleted it in the console."""
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


class SlowPreparer:
    """Takes its time; finds whatever is wrong with a pod."""

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
        worker = self._history.watch.by_machine.get(entry.id) if entry is not None else None
        if worker is None or pod_id not in self._history.pods.emulator.account.pods:
            raise NotPrepared("SSH_UNREACHABLE", f"preparing {pod}: nobody answers")
        if worker.conduct.luck.has_no_gpu and self._rng.random() < 0.5:
            raise NotPrepared("GPU_NOT_DETECTED", f"preparing {pod}: no GPU answers", "what it said", "its key")
        if worker.conduct.luck.never_joins:
            raise NotPrepared(self._rng.choice(CODES), f"preparing {pod}: it is a bad one", "what it said", "its key")
        if not self._history.is_calm and self._rng.random() < 0.3:
            raise RuntimeError("a fault in the adapter")
        return Preparation(host_key or "its key")


class RunpodHistory(World):
    pods: Pods

    def _build(self) -> None:
        self.wrap = self._replace_provider
        super()._build()
        clouds = {name: cloud for name, cloud in self.clouds.items() if isinstance(cloud, RunpodCloud)}
        self.pods = Pods(clouds, self._chance("runpod"), self._chance("pods"))
        for cloud in clouds.values():
            cloud.pods = self.pods

    def _cloud(self, name: str, around: Surroundings) -> SimulatedCloud:
        usual = super()._cloud(name, around)
        cloud = RunpodCloud(name, usual.rng, self.story, usual.max_list_age_s, usual.max_late_s, rates=usual.rates)
        cloud.on_begun, cloud.on_ending = usual.on_begun, usual.on_ending
        cloud.move_in = lambda entry: self._move_in(cloud, around, entry)
        return cloud

    def _move_in(self, cloud: SimulatedCloud, around: Surroundings, entry: Entry) -> SimWorker:
        """As good or bad as its pod."""
        pod = self.pods.begins_with
        if pod.has_no_gpu or pod.never_has_runtime:
            self.next_worker(has_no_gpu=pod.has_no_gpu, never_joins=pod.never_has_runtime)
        return super()._move_in(cloud, around, entry)

    def _replace_provider(self, orchestrator: SimOrchestrator, service: Any) -> Any:
        if not isinstance(service, GatedProvider):
            return service
        fleet = service._provider.fleet  # type: ignore[attr-defined] # the bare cloud
        rng = self._chance(f"{orchestrator.name} {self._now()}")
        account = RunpodAccount(
            "any", endpoint=ENDPOINT, timeout_s=TIMEOUT_S, transport=Network(self.pods, rng), rng=rng
        )  # fmt: skip
        is_prepared = self.scenario.seed % 2 == 1
        provider = RunpodProvider(
            fleet,
            RunpodSettings(image=IMAGE, choices=["NVIDIA L40S", "NVIDIA RTX A5000@COMMUNITY"], capacity_memory_s=60.0),
            account,
            identity="this",
            url=URL,
            preparer=SlowPreparer(self, rng) if is_prepared else None,  # type: ignore[arg-type]
            public_key="ssh-ed25519 AAAA" if is_prepared else None,
            now=virtual_now,
        )
        return GatedProvider(provider, service._process)

    async def _calm_down(self) -> None:
        self.pods.is_calm = True
        self.pods.emulator.faults.clear()
        await super()._calm_down()

    async def _leaked(self) -> str | None:
        self.pods.look()
        return await super()._leaked()

    async def _restless(self) -> str | None:
        """A pod whose worker is gone, late, or stands still since before the faults ended may yet be replaced."""
        for cloud in self.clouds.values():
            for entry in cloud.billed():
                worker = self.watch.by_machine[entry.id]
                is_heard = worker.conduct.first_heard_at is not None
                if worker.conduct.luck.has_no_gpu:
                    return f"{entry.id} of {entry.name} has no GPU"
                if worker._process.is_dead or worker._process.is_frozen or not is_heard:
                    return f"nobody works in {entry.id} of {entry.name}"
        return await super()._restless()

    def tell(self, why: str) -> str:
        replay = (
            f"WINDLASS_FIRST_SEED={self.scenario.seed} WINDLASS_SEEDS=1 pytest tests/simulator/test_runpod_histories.py"
        )
        return super().tell(why).replace(f"python -m windlass.simulator --seed {self.scenario.seed}", replay)
