"""Trouble on script: what the API and its pods do wrong, when, and how often.

`faults.next_create(500, takes_effect=True)` and its kin count requests: the first matching one uses a fault up (or its
one of `times`). `next_pod` waits for the next pod that is created. Shortages, lags and an empty purse last until they
are taken back or run out. Every method can also be called over HTTP, by its name and arguments (docs/emulators.md).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from http import HTTPStatus

from windlass_emulators.fault_script import DEFAULT_HELD_S, Script, Scripted, check_one
from windlass_emulators.http import Json
from windlass_emulators.runpod.errors import RunpodApiError

_PODS = "/v2/pods"
_ONE_POD = r"/v2/pods/[^/]+"
DEFAULT_DEATH = "EXITED"


@dataclass(frozen=True, slots=True)
class PodFaults:
    """What is wrong with one pod. By default nothing is."""

    # Until it is `RUNNING`, in addition to what that takes.
    extra_boot_s: float = 0.0
    # It never gets further: an image that cannot be pulled.
    stays_starting: bool = False
    # It is `RUNNING`, nothing runs in it, and it never has a `runtime`.
    never_has_runtime: bool = False
    has_no_gpu: bool = False
    # It ends by itself so long after it was `RUNNING`.
    dies_after_s: float | None = None
    dies_as: str = DEFAULT_DEATH
    # The volume or disk is not where it should be.
    has_no_mount: bool = False
    # What `df` says is free on the container's disk.
    disk_free_gb: float | None = None
    # Nobody ever answers at its SSH port, or only so much later.
    has_no_ssh: bool = False
    ssh_after_s: float = 0.0
    # Commands over SSH in which this text occurs print that text and fail.
    ssh_failures: Mapping[str, str] = field(default_factory=dict)
    # The image's own program prints this and fails.
    program_fails: str | None = None
    # Its machine passes no NVIDIA library on to the container: neither NVML nor nvidia-smi is there.
    has_no_driver: bool = False


@dataclass(frozen=True, slots=True)
class RunpodShortage:
    # Whether the catalog's stock says so too. It is a hint, and sometimes late.
    is_announced: bool
    until: datetime | None


@dataclass
class RunpodFaults:
    now: datetime
    script: Script = field(default_factory=Script)
    shortages: dict[tuple[str, str, str], RunpodShortage] = field(default_factory=dict)
    lucks: list[PodFaults] = field(default_factory=list)
    # Deletions that change nothing.
    idle_deletions: int = 0
    lag_s: float = 0.0
    hidden_s: float = 0.0
    has_balance: bool = True
    starts_without_gpu: int = 0
    wants_drained_window: str | None = None

    # ------------------------------------------------------------------------------------------ the next requests

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
        """The next `times` requests of this method to a path that matches wholly are answered with this status, or by
        nobody if there is none; before they have an effect, or after. `for_s` lets it end by time."""
        error = None
        if status is not None:
            if status not in {each.value for each in HTTPStatus} or status < HTTPStatus.BAD_REQUEST:
                raise ValueError(f"{status} is no status of a refusal")
            headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
            error = RunpodApiError(status, detail, errors or (), headers)
        until = None if for_s is None else self.now + timedelta(seconds=for_s)
        self.script.add(Scripted(method, path, error, status, takes_effect, held_s, times, skip, until))

    def next_create(
        self,
        status: int | None = None,
        *,
        detail: str | None = None,
        times_out_after_taking_effect: bool = False,
        times_out_before_taking_effect: bool = False,
        takes_effect: bool = False,
        times: int = 1,
        skip: int = 0,
        held_s: float = DEFAULT_HELD_S,
    ) -> None:
        """The next creation of a pod is refused, or nobody answers it; `next_create(500, takes_effect=True)` makes it
        and says that it did not."""
        check_one(status, times_out_after_taking_effect, times_out_before_taking_effect)
        is_effective = takes_effect or times_out_after_taking_effect
        self.next(
            status, method="POST", path=_PODS, detail=detail, takes_effect=is_effective, times=times, skip=skip,
            held_s=held_s,
        )  # fmt: skip

    def next_delete(
        self,
        status: int | None = None,
        *,
        does_nothing: bool = False,
        times_out_after_taking_effect: bool = False,
        times_out_before_taking_effect: bool = False,
        takes_effect: bool = False,
        times: int = 1,
        skip: int = 0,
        held_s: float = DEFAULT_HELD_S,
    ) -> None:
        """The same for the deletion of a pod: `next_delete(404)` denies one that is there, and
        `next_delete(does_nothing=True)` answers 204 and leaves it as it is."""
        check_one(status, does_nothing, times_out_after_taking_effect, times_out_before_taking_effect)
        if does_nothing:
            self.idle_deletions += times
            return
        is_effective = takes_effect or times_out_after_taking_effect
        self.next(
            status, method="DELETE", path=_ONE_POD, takes_effect=is_effective, times=times, skip=skip, held_s=held_s
        )

    def next_get(self, status: int | None = None, *, times: int = 1, held_s: float = DEFAULT_HELD_S) -> None:
        """The same for one pod by its id."""
        self.next(status, method="GET", path=_ONE_POD, times=times, held_s=held_s)

    def next_list(self, status: int | None = None, *, times: int = 1, held_s: float = DEFAULT_HELD_S) -> None:
        """The same for the list of pods."""
        self.next(status, method="GET", path=_PODS, times=times, held_s=held_s)

    def burst(self, times: int = 5, status: int = 503, for_s: float | None = None) -> None:
        """Whatever is asked next fails this often, with a 5xx by default."""
        self.next(status, times=times, for_s=for_s)

    def throttle(self, times: int = 1, retry_after_s: int = 12) -> None:
        """Whatever is asked next is too much."""
        self.next(429, times=times, retry_after_s=retry_after_s)

    def drain_rate_limit(self, window: str = "minute") -> None:
        """As if all requests of this minute, hour or day had been made."""
        if window not in ("minute", "hour", "day"):
            raise ValueError("the windows are minute, hour and day")
        self.wants_drained_window = window

    # ------------------------------------------------------------------------------------------ states of the cloud

    def no_capacity(
        self,
        gpu: str = "*",
        cloud: str = "*",
        data_center: str = "*",
        *,
        is_announced: bool = True,
        for_s: float | None = None,
    ) -> None:
        """There are no more of this type in this place; `*` stands for all."""
        until = None if for_s is None else self.now + timedelta(seconds=for_s)
        self.shortages[gpu, cloud, data_center] = RunpodShortage(is_announced, until)

    def capacity(self, gpu: str = "*", cloud: str = "*", data_center: str = "*") -> None:
        """There are some again."""
        self.shortages.pop((gpu, cloud, data_center), None)

    def list_lags(self, by_s: float) -> None:
        """The list of pods shows what was true this long ago. Single ones are always up to date."""
        self.lag_s = by_s

    def new_pods_hide(self, for_s: float) -> None:
        """A pod is not found by its id for so long after its creation."""
        self.hidden_s = for_s

    def no_balance(self) -> None:
        """The purse is empty: 402 to whoever wants a pod. Those that run go on."""
        self.has_balance = False

    def balance(self) -> None:
        self.has_balance = True

    def next_pod(
        self,
        *,
        times: int = 1,
        extra_boot_s: float = 0.0,
        stays_starting: bool = False,
        never_has_runtime: bool = False,
        has_no_gpu: bool = False,
        dies_after_s: float | None = None,
        dies_as: str = DEFAULT_DEATH,
        has_no_mount: bool = False,
        disk_free_gb: float | None = None,
        has_no_ssh: bool = False,
        ssh_after_s: float = 0.0,
        ssh_failures: dict[str, str] | None = None,
        program_fails: str | None = None,
        has_no_driver: bool = False,
    ) -> None:
        """The next pod to be created is a bad one. With no argument: a good one, so that the one after it is bad."""
        if dies_as not in ("EXITED", "ERROR"):
            raise ValueError("a pod dies as EXITED or as ERROR")
        luck = PodFaults(
            extra_boot_s, stays_starting, never_has_runtime, has_no_gpu, dies_after_s, dies_as, has_no_mount,
            disk_free_gb, has_no_ssh, ssh_after_s, ssh_failures or {}, program_fails, has_no_driver,
        )  # fmt: skip
        self.lucks.extend([luck] * times)

    def next_start_without_gpu(self, times: int = 1) -> None:
        """The next stopped pod that is started finds its GPUs taken."""
        self.starts_without_gpu += times

    def clear(self) -> None:
        """All is well from now on. Pods that are bad stay bad."""
        self.script.entries.clear()
        self.shortages.clear()
        self.lucks.clear()
        self.idle_deletions = self.starts_without_gpu = 0
        self.lag_s = self.hidden_s = 0.0
        self.has_balance = True

    # ----------------------------------------------------------------------------------------- what the emulator asks

    def take(self, method: str, path: str) -> Scripted | None:
        return self.script.take(method, path, self.now)

    def take_luck(self) -> PodFaults:
        return self.lucks.pop(0) if self.lucks else PodFaults()

    def take_idle_deletion(self) -> bool:
        if self.idle_deletions == 0:
            return False
        self.idle_deletions -= 1
        return True

    def take_start_without_gpu(self) -> bool:
        if self.starts_without_gpu == 0:
            return False
        self.starts_without_gpu -= 1
        return True

    def shortage(self, gpu: str, cloud: str, data_center: str) -> RunpodShortage | None:
        places = [(g, c, d) for g in (gpu, "*") for c in (cloud, "*") for d in (data_center, "*")]
        found = [self.shortages[place] for place in places if place in self.shortages]
        return next((each for each in found if each.until is None or each.until > self.now), None)

    def to_json(self) -> Json:
        return {
            "scripted": self.script.to_json(),
            "no_capacity": [{"gpu": gpu, "cloud": cloud, "data_center": place} for gpu, cloud, place in self.shortages],
            "list_lags_by_s": self.lag_s,
            "new_pods_hide_for_s": self.hidden_s,
            "has_balance": self.has_balance,
            "deletions_that_do_nothing": self.idle_deletions,
            "starts_without_gpu": self.starts_without_gpu,
            "next_pods": [asdict(luck) for luck in self.lucks],
        }


# What can be called over HTTP.
METHODS = (
    "next", "next_create", "next_delete", "next_get", "next_list", "burst", "throttle", "drain_rate_limit",
    "no_capacity", "capacity", "list_lags", "new_pods_hide", "no_balance", "balance", "next_pod",
    "next_start_without_gpu", "clear",
)  # fmt: skip
