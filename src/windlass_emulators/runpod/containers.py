"""The contract of hosts for emulated pods, and a host that runs nothing.

`pod_host.RealPodHost` runs pods as local processes. `VirtualPodHost` only records them, for tests in virtual time.
"""

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
    # None: a persistent disk of the pod.
    volume_id: str | None


@dataclass(frozen=True, slots=True)
class Container:
    """One start of a pod: its program, its hardware and its injected faults."""

    pod_id: str
    name: str
    image: str
    args: str
    env: Mapping[str, str]
    # HTTP ports are not included: Runpod reaches them through a proxy, which is not emulated.
    tcp_ports: Sequence[int]
    mounts: Sequence[Mount]
    disk_gb: int
    gpu_name: str
    # The GPUs that the container has, which may be fewer than ordered.
    gpu_count: int
    vram_mb: int
    cuda_version: str
    data_center: str
    faults: PodFaults


class PodHost(Protocol):
    """Runs pods. Calls start or stop a pod and do not wait for it."""

    # The address of the public ports, and the SSH user.
    address: str
    user: str

    def start(self, container: Container) -> Mapping[int, int]:
        """Run the pod with an empty disk and its mounts. Returns the public port of each TCP port."""

    def refit(self, container: Container) -> None:
        """Apply changed hardware to a running pod."""

    def stop(self, pod_id: str, *, is_sudden: bool = False) -> None:
        """Stop the pod: SIGTERM, then SIGKILL; or SIGKILL at once if sudden. Persistent disks are kept."""

    def erase(self, pod_id: str) -> None:
        """Stop the pod and delete its disks."""

    def erase_volume(self, volume_id: str) -> None: ...

    def log_lines(self, pod_id: str) -> list[str]:
        """The last lines that the pod's program printed."""

    def is_running(self, pod_id: str) -> bool:
        """Whether a program runs in the pod. A pod whose program has ended still exists and is still billed."""


class VirtualPodHost:
    """Records the running pods. Simulations use `on_start` and `on_stop` to run their own workers."""

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
        # No process listens on these ports.
        self._ports = itertools.cycle(range(20_000, 60_000))

    def start(self, container: Container) -> Mapping[int, int]:
        self.stop(container.pod_id)
        self.running[container.pod_id] = container
        self._on_start(container)
        return {port: next(self._ports) for port in container.tcp_ports}

    def refit(self, container: Container) -> None:
        if container.pod_id in self.running:
            self.running[container.pod_id] = container

    def stop(self, pod_id: str, *, is_sudden: bool = False) -> None:  # noqa: ARG002
        if self.running.pop(pod_id, None) is not None:
            self._on_stop(pod_id)

    def erase(self, pod_id: str) -> None:
        self.stop(pod_id)

    def erase_volume(self, volume_id: str) -> None: ...

    def log_lines(self, pod_id: str) -> list[str]:  # noqa: ARG002
        return []

    def is_running(self, pod_id: str) -> bool:
        return pod_id in self.running
