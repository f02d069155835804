"""What runs inside an emulated pod: nothing, in virtual time; real local processes otherwise."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from windlass_emulators.runpod.faults import PodFaults

SSH_PORT = 22
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Mount:
    path: str
    size_gb: int
    used_gb: float
    # None: a disk of the pod's own, which its machine keeps.
    volume_id: str | None


@dataclass(frozen=True, slots=True)
class Container:
    """One start of a pod: what it was asked to run, on what hardware, with what luck."""

    pod_id: str
    name: str
    image: str
    args: str
    env: Mapping[str, str]
    # Those that are reached directly. HTTP goes through Runpod's proxy, of which there is none here.
    tcp_ports: Sequence[int]
    mounts: Sequence[Mount]
    disk_gb: int
    # None: a CPU pod.
    gpu_name: str | None
    # What is there, not what was asked for.
    gpu_count: int
    vram_mb: int
    cuda_version: str | None
    data_center: str | None
    luck: PodFaults

    @property
    def has_driver(self) -> bool:
        return self.gpu_name is not None and not self.luck.has_no_driver


@dataclass(frozen=True, slots=True)
class ContainerLogLine:
    # RFC 3339.
    at: str
    text: str


class PodHost(Protocol):
    """Where pods run. No call waits for a pod: a start or a stop is on its way when it returns."""

    # Where its ports are reached, and who logs in there.
    address: str
    user: str

    def start(self, container: Container) -> Mapping[int, int]:
        """Run it, with an empty disk and what its mounts hold. Gives the public port of each of its TCP ports."""

    def refit(self, container: Container) -> None:
        """Its hardware has changed under it. No effect if it does not run."""

    def stop(self, pod_id: str, *, is_sudden: bool = False) -> None:
        """End what runs: asked first and then made to, or at once when sudden. A disk that is kept stays."""

    def erase(self, pod_id: str) -> None:
        """End what runs and forget its disks."""

    def erase_volume(self, volume_id: str) -> None: ...

    def is_running(self, pod_id: str) -> bool:
        """Whether a program runs in it. A pod whose program has ended is still a pod, and is still paid for."""

    def log(self, pod_id: str) -> Sequence[ContainerLogLine]:
        """What its program said."""


class VirtualPodHost:
    """Records who runs. `on_start` and `on_stop` tell a simulation, which puts its own workers inside."""

    address = LOOPBACK
    user = "root"

    def __init__(
        self,
        on_start: Callable[[Container], None] = lambda _: None,
        on_stop: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.running: dict[str, Container] = {}
        self._on_start = on_start
        self._on_stop = on_stop
        # Nobody listens there.
        self._ports = itertools.cycle(range(20_000, 60_000))

    def start(self, container: Container) -> Mapping[int, int]:
        self.stop(container.pod_id)
        self.running[container.pod_id] = container
        self._on_start(container)
        return {port: next(self._ports) for port in container.tcp_ports}

    def refit(self, container: Container) -> None:
        if container.pod_id in self.running:
            self.running[container.pod_id] = container

    def stop(self, pod_id: str, *, is_sudden: bool = False) -> None:  # noqa: ARG002 - all are equally fast here
        if self.running.pop(pod_id, None) is not None:
            self._on_stop(pod_id)

    def erase(self, pod_id: str) -> None:
        self.stop(pod_id)

    def erase_volume(self, volume_id: str) -> None: ...

    def is_running(self, pod_id: str) -> bool:
        return pod_id in self.running

    def log(self, pod_id: str) -> Sequence[ContainerLogLine]:  # noqa: ARG002 - nothing speaks here
        return ()
