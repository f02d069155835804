"""The resources of an emulated account and their changes over time.

Everything that takes time is scheduled on one timeline and happens at its own time, even if no request arrives then.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from fractions import Fraction

from windlass_emulators.runpod.catalog import DataCenter, GpuType, RunpodCatalog
from windlass_emulators.runpod.containers import Container, Mount, PodHost
from windlass_emulators.runpod.faults import PodFaults, RunpodFaults
from windlass_emulators.runpod.ledger import POD, VOLUME, RunpodBill, RunpodBillLine, disk_rate, volume_rate
from windlass_emulators.runpod.settings import RunpodEmulatorSettings
from windlass_emulators.timeline import Timeline

# Deleted pods are kept this long, for lists with an injected lag.
MAX_LAG = timedelta(hours=1)
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
_ID_CHARACTERS = 14

PROVISIONING, STARTING, RUNNING, EXITED, ERROR = "PROVISIONING", "STARTING", "RUNNING", "EXITED", "ERROR"


@dataclass(slots=True)
class PersistentMount:
    size_gb: int
    path: str


@dataclass(slots=True)
class NetworkMount:
    volume_id: str
    path: str


@dataclass(slots=True)
class EmulatorConfig:
    """The container settings that templates and pods share."""

    image: str
    args: str
    disk_gb: int
    env: dict[str, str]
    ports: list[str]
    registry: str | None


@dataclass(slots=True, eq=False)
class Template:
    id: str
    name: str
    config: EmulatorConfig
    persistent: PersistentMount | None
    category: str
    starts_ssh: bool
    starts_jupyter: bool
    cuda_versions: list[str]


@dataclass(slots=True, eq=False)
class EmulatedVolume:
    id: str
    name: str
    size_gb: int
    data_center: str
    type: str
    created: datetime
    # The number that `df` reports. The API does not publish it.
    used_gb: float = 1.0


@dataclass(slots=True, eq=False)
class EmulatedPod:
    id: str
    name: str
    config: EmulatorConfig
    gpu: GpuType
    gpu_count: int
    cloud: str
    data_center: DataCenter
    cuda_version: str
    mount: PersistentMount | NetworkMount | None
    micros_per_hour: int
    created: datetime
    faults: PodFaults
    # False after a restart that found the GPUs taken, or by an injected fault.
    has_gpus: bool = True
    statuses: list[tuple[datetime, str]] = field(default_factory=list)
    # Changes of `runtime`: (time, whether the pod has one from then on).
    runtimes: list[tuple[datetime, bool]] = field(default_factory=list)
    started_at: datetime | None = None
    public_ports: dict[int, int] = field(default_factory=dict)
    gone_at: datetime | None = None
    is_locked: bool = False
    # A scheduled change is void if this number has changed since.
    changes: int = 0

    @property
    def status(self) -> str:
        return self.statuses[-1][1]

    def status_at(self, moment: datetime) -> str:
        known = [status for at, status in self.statuses if at <= moment]
        return known[-1] if known else self.statuses[0][1]

    def runtime_since(self, moment: datetime) -> datetime | None:
        """When the runtime of that moment began, or None if there was none."""
        known = [(at, has_runtime) for at, has_runtime in self.runtimes if at <= moment]
        return known[-1][0] if known and known[-1][1] else None

    def existed_at(self, moment: datetime) -> bool:
        return self.created <= moment and (self.gone_at is None or moment < self.gone_at)

    def is_billed_at(self, moment: datetime) -> bool:
        return self.status_at(moment) != EXITED


class EmulatedRunpodAccount:
    def __init__(
        self,
        settings: RunpodEmulatorSettings,
        host: PodHost,
        faults: RunpodFaults,
        now: datetime,
        catalog: RunpodCatalog,
    ) -> None:
        self.settings = settings
        self.host = host
        self.faults = faults
        self.catalog = catalog
        self.now = now
        self.ledger = RunpodBill()
        self.pods: dict[str, EmulatedPod] = {}
        self.volumes: dict[str, EmulatedVolume] = {}
        self.templates: dict[str, Template] = {}
        # Names of registries, by id.
        self.registries: dict[str, str] = {}
        self._departed: list[EmulatedPod] = []
        self._numbers = itertools.count(1)
        self._timeline = Timeline(now, self._set_now)

    # ------------------------------------------------------------------------------------------------------ time

    def advance(self, now: datetime) -> None:
        self._timeline.advance(now)
        self._departed = [each for each in self._departed if each.gone_at and now - each.gone_at < MAX_LAG]

    def next_due(self) -> datetime | None:
        return self._timeline.next_due()

    def _set_now(self, now: datetime) -> None:
        self.now = self.faults.now = now

    def created_now(self) -> datetime:
        """The current time as it is published, in milliseconds. `createdAt` is also the start of billing."""
        return self.now.replace(microsecond=self.now.microsecond // 1000 * 1000)

    def new_id(self) -> str:
        """An id in Runpod's format, the same in every run."""
        number = int.from_bytes(hashlib.sha256(str(next(self._numbers)).encode()).digest()[:12])
        digits = (number // len(_ALPHABET) ** place % len(_ALPHABET) for place in range(_ID_CHARACTERS))
        return "".join(_ALPHABET[digit] for digit in digits)

    # ------------------------------------------------------------------------------------------------------ pods

    def visible_pods(self) -> list[EmulatedPod]:
        """The pods that a list shows, including an injected list lag."""
        return [each for each in (*self._departed, *self.pods.values()) if each.existed_at(self.list_moment())]

    def list_moment(self) -> datetime:
        return self.now - timedelta(seconds=min(self.faults.lag_s, MAX_LAG.total_seconds()))

    def is_hidden(self, pod: EmulatedPod) -> bool:
        return self.now < pod.created + timedelta(seconds=self.faults.hidden_s)

    def free_gpus(self, gpu: GpuType, cloud: str, data_center: str) -> int:
        place = (gpu.id, cloud, data_center)
        taken = sum(
            pod.gpu_count
            for pod in self.pods.values()
            if pod.has_gpus and pod.status != EXITED and (pod.gpu.id, pod.cloud, pod.data_center.id) == place
        )
        return max(0, self.catalog.stock.get(place, 0) - taken)

    def add_pod(self, pod: EmulatedPod) -> None:
        self.pods[pod.id] = pod
        # With --dir, a pod of an earlier emulator may have had the same id.
        self.host.erase(pod.id)
        what = f"{pod.gpu_count}x {pod.gpu.id}, {pod.cloud}, {pod.data_center.id}"
        self.ledger.open(RunpodBillLine(POD, pod.id, pod.name, what, pod.created))
        self._set_pod_rate(pod, pod.created)
        change = self._new_change(pod)
        self._set_status(pod, PROVISIONING)
        self._then(pod, change, self.settings.provisioning_s, lambda: self._boot(pod, change))

    def stop(self, pod: EmulatedPod) -> None:
        self._new_change(pod)
        self.host.stop(pod.id)
        self._exit(pod)

    def start(self, pod: EmulatedPod) -> None:
        """Restart a stopped pod on the same machine. If its GPUs are taken, it runs without GPUs."""
        has_capacity = self.free_gpus(pod.gpu, pod.cloud, pod.data_center.id) >= pod.gpu_count
        pod.has_gpus = has_capacity and not self.faults.take_start_without_gpu()
        self._set_pod_rate(pod, self.now)
        self._boot(pod, self._new_change(pod))

    def _set_pod_rate(self, pod: EmulatedPod, at: datetime) -> None:
        disks_gb = pod.config.disk_gb + (pod.mount.size_gb if isinstance(pod.mount, PersistentMount) else 0)
        disks = disk_rate(disks_gb)
        self.ledger.set_rate(pod.id, Fraction(pod.micros_per_hour + disks), at, disks=disks)

    def unlock(self, pod: EmulatedPod) -> None:
        pod.is_locked = False

    def restart(self, pod: EmulatedPod) -> None:
        self.host.stop(pod.id)
        self._boot(pod, self._new_change(pod))

    def remove(self, pod: EmulatedPod) -> None:
        self._new_change(pod)
        self.host.erase(pod.id)
        pod.gone_at = self.now
        del self.pods[pod.id]
        self._departed.append(pod)
        self.ledger.close(pod.id, self.now)

    def crash(self, pod: EmulatedPod) -> None:
        """Kill the pod's processes. The API still reports it as `RUNNING`."""
        self.host.stop(pod.id, is_sudden=True)

    def lose_gpus(self, pod: EmulatedPod) -> None:
        """Remove the GPUs of a running pod."""
        pod.has_gpus = False
        self.host.refit(self.container(pod))

    def _boot(self, pod: EmulatedPod, change: int) -> None:
        self._set_status(pod, STARTING)
        self._set_runtime(pod, False)
        if not pod.faults.stays_starting:
            takes_s = self.settings.starting_s + pod.faults.extra_boot_s
            self._then(pod, change, takes_s, lambda: self._run(pod, change))

    def _run(self, pod: EmulatedPod, change: int) -> None:
        self._set_status(pod, RUNNING)
        pod.started_at = self.created_now()
        if not pod.faults.never_has_runtime:
            pod.public_ports = dict(self.host.start(self.container(pod)))
            self._then(pod, change, self.settings.runtime_s, lambda: self._set_runtime(pod, True))
        if pod.faults.dies_after_s is not None:
            self._then(pod, change, pod.faults.dies_after_s, lambda: self._die(pod))

    def _die(self, pod: EmulatedPod) -> None:
        self._new_change(pod)
        self.host.stop(pod.id, is_sudden=True)
        if pod.faults.dies_as == ERROR:
            self._set_status(pod, ERROR)
            self._set_runtime(pod, False)
        else:
            self._exit(pod)

    def _exit(self, pod: EmulatedPod) -> None:
        self._set_status(pod, EXITED)
        self._set_runtime(pod, False)
        self.ledger.set_rate(pod.id, Fraction(), self.now)

    def _set_status(self, pod: EmulatedPod, status: str) -> None:
        pod.statuses.append((self.now, status))

    def _set_runtime(self, pod: EmulatedPod, has_runtime: bool) -> None:
        pod.runtimes.append((self.now, has_runtime))

    def _new_change(self, pod: EmulatedPod) -> int:
        pod.changes += 1
        return pod.changes

    def _then(self, pod: EmulatedPod, change: int, delay_s: float, effect: Callable[[], None]) -> None:
        """Schedule a step of a change. It is skipped if another change of the pod starts before it is due."""

        def run() -> None:
            if pod.changes == change:
                effect()

        self._timeline.later(delay_s, run)

    # ------------------------------------------------------------------------------------------------ hardware

    def container(self, pod: EmulatedPod) -> Container:
        config = pod.config
        return Container(
            pod_id=pod.id,
            name=pod.name,
            image=config.image,
            args=config.args,
            env=dict(config.env),
            tcp_ports=[int(port.partition("/")[0]) for port in config.ports if port.endswith("/tcp")],
            mounts=[] if pod.faults.has_no_mount else list(self._mounts(pod)),
            disk_gb=config.disk_gb,
            gpu_name=pod.gpu.id,
            gpu_count=pod.gpu_count if pod.has_gpus else 0,
            vram_mb=pod.gpu.vram_mb,
            cuda_version=pod.cuda_version,
            data_center=pod.data_center.id,
            faults=pod.faults,
        )

    def _mounts(self, pod: EmulatedPod) -> Iterable[Mount]:
        if isinstance(pod.mount, PersistentMount):
            yield Mount(pod.mount.path, pod.mount.size_gb, 1.0, None)
        elif pod.mount is not None:
            volume = self.volumes.get(pod.mount.volume_id)
            if volume is not None:
                yield Mount(pod.mount.path, volume.size_gb, volume.used_gb, volume.id)

    # ------------------------------------------------------------------------------------------------- volumes

    def add_volume(self, volume: EmulatedVolume) -> None:
        self.volumes[volume.id] = volume
        self.host.erase_volume(volume.id)
        what = f"{volume.type} in {volume.data_center}"
        self.ledger.open(RunpodBillLine(VOLUME, volume.id, volume.name, what, volume.created))
        self.ledger.set_rate(volume.id, volume_rate(volume.size_gb, volume.type), volume.created)

    def grow_volume(self, volume: EmulatedVolume, size_gb: int) -> None:
        volume.size_gb = size_gb
        self.ledger.set_rate(volume.id, volume_rate(size_gb, volume.type), self.now)
        self._refit_users_of(volume)

    def fill_volume(self, volume: EmulatedVolume, used_gb: float) -> None:
        volume.used_gb = used_gb
        self._refit_users_of(volume)

    def remove_volume(self, volume: EmulatedVolume) -> None:
        del self.volumes[volume.id]
        self.ledger.close(volume.id, self.now)
        self.host.erase_volume(volume.id)

    def users_of(self, volume: EmulatedVolume) -> list[EmulatedPod]:
        mounted = [(pod, pod.mount) for pod in self.pods.values()]
        return [pod for pod, mount in mounted if isinstance(mount, NetworkMount) and mount.volume_id == volume.id]

    def _refit_users_of(self, volume: EmulatedVolume) -> None:
        for pod in self.users_of(volume):
            self.host.refit(self.container(pod))
