"""Fault injection for the emulated Runpod account and its pods.

`faults.next_create(500, takes_effect=True)` and the other `next_*` request methods apply to the next matching request,
or to as many as `times` says. `next_pod` applies to the next pod that is created. Missing capacity, lags and an empty
balance last until withdrawn.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from typing import Any

from windlass_emulators.fault_script import DEFAULT_HELD_S, FaultScript, ScriptedFault, Shortage, check_one_outcome
from windlass_emulators.http import Json
from windlass_emulators.runpod.errors import RunpodApiError

_PODS = "/v2/pods"
_ONE_POD = r"/v2/pods/[^/]+"


@dataclass(frozen=True, slots=True)
class PodFaults:
    """The injected faults of one pod. By default it has none."""

    # Added to the time until the pod is `RUNNING`.
    extra_boot_s: float = 0.0
    # The pod stays `STARTING`: its image cannot be pulled.
    stays_starting: bool = False
    # The pod is `RUNNING`, but no program starts and it never has a `runtime`.
    never_has_runtime: bool = False
    has_no_gpu: bool = False
    # The pod exits this long after it was `RUNNING`, with the status `dies_as`.
    dies_after_s: float | None = None
    dies_as: str = "EXITED"
    # The volume or disk is not mounted.
    has_no_mount: bool = False
    # Free space on the container disk, as `df` reports it.
    disk_free_gb: float | None = None
    # The SSH port never answers, or only after this delay.
    has_no_ssh: bool = False
    ssh_after_s: float = 0.0
    # Text in a command -> message: SSH commands that contain the text print the message and fail.
    ssh_failures: Mapping[str, str] = field(default_factory=dict)
    # The image's program prints this and exits with 1.
    program_fails: str | None = None
    # The container has no NVIDIA library: neither NVML nor nvidia-smi.
    has_no_driver: bool = False
    # The pod runs in this data center, whatever was requested: Runpod calls the requested ones "preferred".
    data_center: str | None = None
    # Public address of the physical host, as the pod's ports show it.
    host: str | None = None
    # A person locked the pod: it refuses to be stopped, restarted or deleted, and is billed.
    is_locked: bool = False

    def __post_init__(self) -> None:
        if self.dies_as not in ("EXITED", "ERROR"):
            raise ValueError("dies_as is EXITED or ERROR")


@dataclass
class RunpodFaults(FaultScript):
    pod_faults: list[PodFaults] = field(default_factory=list)
    # Deletions that answer 204 and change nothing.
    ineffective_deletions: int = 0
    # New pods are not found by id for this long.
    hidden_s: float = 0.0
    has_balance: bool = True
    starts_without_gpu: int = 0
    wants_drained_window: str | None = None

    METHODS = (
        "next", "next_create", "next_delete", "next_get", "next_list", "burst", "throttle", "drain_rate_limit",
        "no_capacity", "capacity", "list_lags", "new_pods_hide", "no_balance", "balance", "next_pod",
        "next_start_without_gpu", "clear",
    )  # fmt: skip

    # -------------------------------------------------------------------------------------------- next requests

    def next(
        self,
        status: int | None = None,
        *,
        method: str | None = None,
        path: str = ".*",
        detail: str | None = None,
        errors: list[str] | None = None,
        retry_after_s: int | None = None,
        takes_effect: bool = False,
        held_s: float = DEFAULT_HELD_S,
        times: int = 1,
        skip: int = 0,
        for_s: float | None = None,
    ) -> None:
        """The next `times` requests with this method and path get this status, or no answer without a status.

        `takes_effect` executes the request first. `skip` lets that many matching requests pass. `for_s` expires it.
        """
        error = None
        if status is not None:
            if status not in {each.value for each in HTTPStatus} or status < HTTPStatus.BAD_REQUEST:
                raise ValueError(f"{status} is not an error status")
            headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
            error = RunpodApiError(status, detail, errors or (), headers)
        self._add(ScriptedFault(method, path, error, status, takes_effect, held_s, times, skip), for_s)

    def next_create(
        self,
        status: int | None = None,
        *,
        times_out_after_taking_effect: bool = False,
        times_out_before_taking_effect: bool = False,
        takes_effect: bool = False,
        **options: Any,
    ) -> None:
        """The next creation of a pod fails or times out. `options` as for `next`.

        `next_create(500, takes_effect=True)` creates the pod and reports a failure.
        """
        check_one_outcome(status, times_out_after_taking_effect, times_out_before_taking_effect)
        is_effective = takes_effect or times_out_after_taking_effect
        self.next(status, method="POST", path=_PODS, takes_effect=is_effective, **options)

    def next_delete(
        self,
        status: int | None = None,
        *,
        does_nothing: bool = False,
        times_out_after_taking_effect: bool = False,
        times_out_before_taking_effect: bool = False,
        takes_effect: bool = False,
        times: int = 1,
        **options: Any,
    ) -> None:
        """The next deletion of a pod fails or times out. `next_delete(404)` denies an existing pod;
        `next_delete(does_nothing=True)` answers 204 and keeps the pod."""
        check_one_outcome(status, does_nothing, times_out_after_taking_effect, times_out_before_taking_effect)
        if does_nothing:
            self.ineffective_deletions += times
            return
        is_effective = takes_effect or times_out_after_taking_effect
        self.next(status, method="DELETE", path=_ONE_POD, takes_effect=is_effective, times=times, **options)

    def next_get(self, status: int | None = None, **options: Any) -> None:
        """The next request for one pod fails or times out."""
        self.next(status, method="GET", path=_ONE_POD, **options)

    def next_list(self, status: int | None = None, **options: Any) -> None:
        """The next list of pods fails or times out."""
        self.next(status, method="GET", path=_PODS, **options)

    def burst(self, times: int = 5, status: int = 503, for_s: float | None = None) -> None:
        """The next `times` requests of any kind fail, by default with 503."""
        self.next(status, times=times, for_s=for_s)

    def throttle(self, times: int = 1, retry_after_s: int = 12) -> None:
        """The next `times` requests of any kind are rejected with 429."""
        self.next(429, times=times, retry_after_s=retry_after_s)

    def drain_rate_limit(self, window: str = "minute") -> None:
        """Use up all requests of this minute, hour or day."""
        if window not in ("minute", "hour", "day"):
            raise ValueError("window is minute, hour or day")
        self.wants_drained_window = window

    # -------------------------------------------------------------------------------------------- lasting faults

    def no_capacity(
        self,
        gpu: str = "*",
        cloud: str = "*",
        data_center: str = "*",
        *,
        is_announced: bool = True,
        for_s: float | None = None,
    ) -> None:
        """Creations of this GPU type in this cloud and data center fail; `*` stands for all."""
        self.shortages[gpu, cloud, data_center] = Shortage(is_announced, self._expiry(for_s))

    def capacity(self, gpu: str = "*", cloud: str = "*", data_center: str = "*") -> None:
        """Withdraw `no_capacity`."""
        self.shortages.pop((gpu, cloud, data_center), None)

    def new_pods_hide(self, for_s: float) -> None:
        """A pod is not found by its id for this long after its creation."""
        self.hidden_s = for_s

    def no_balance(self) -> None:
        """Creations and starts of pods fail with 402. Running pods continue."""
        self.has_balance = False

    def balance(self) -> None:
        self.has_balance = True

    def next_pod(self, *, times: int = 1, **faults: Any) -> None:
        """The next pods that are created have these faults (the fields of PodFaults). Without any, they are good."""
        self.pod_faults.extend([PodFaults(**faults)] * times)

    def next_start_without_gpu(self, times: int = 1) -> None:
        """The next stopped pod that is started has no GPUs."""
        self.starts_without_gpu += times

    def clear(self) -> None:
        super().clear()
        self.pod_faults.clear()
        self.ineffective_deletions = self.starts_without_gpu = 0
        self.hidden_s = 0.0
        self.has_balance = True

    # ------------------------------------------------------------------------------------------ for the emulator

    def take_pod_faults(self) -> PodFaults:
        return self.pod_faults.pop(0) if self.pod_faults else PodFaults()

    def take_ineffective_deletion(self) -> bool:
        if self.ineffective_deletions == 0:
            return False
        self.ineffective_deletions -= 1
        return True

    def take_start_without_gpu(self) -> bool:
        if self.starts_without_gpu == 0:
            return False
        self.starts_without_gpu -= 1
        return True

    def shortage(self, gpu: str, cloud: str, data_center: str) -> Shortage | None:
        places = [(g, c, d) for g in (gpu, "*") for c in (cloud, "*") for d in (data_center, "*")]
        return self._find_shortage(*places)

    def to_json(self) -> Json:
        return {
            **super().to_json(),
            "no_capacity": [{"gpu": gpu, "cloud": cloud, "data_center": place} for gpu, cloud, place in self.shortages],
            "new_pods_hide_for_s": self.hidden_s,
            "has_balance": self.has_balance,
            "deletions_that_do_nothing": self.ineffective_deletions,
            "starts_without_gpu": self.starts_without_gpu,
            "next_pods": [asdict(faults) for faults in self.pod_faults],
        }
