"""Settings of a fleet: one table per fleet in windlass.toml.

Some defaults depend on the provider: a process starts in a second, a GPU pod in minutes. `env` names the environment
variables that set a value of the only fleet, or of `default`. The descriptions appear in --help and the documentation.
"""

import re
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from windlass.model.bootstrap import BootstrapSettings
from windlass.model.comma_separated import TextList
from windlass.model.errors import BadInput
from windlass.model.hetzner import HetznerSettings
from windlass.model.json_path import parse_path
from windlass.model.money import to_micros
from windlass.model.provider_defaults import (
    MIN_REMOTE_SPAWN_TIMEOUT_S,
    PROVIDER_DEFAULTS,
    SPAWN_TIMEOUTS_S,
    policy_by_settings,
)
from windlass.model.ray import RaySettings
from windlass.model.runpod import RunpodSettings
from windlass.model.task import check_queue_name
from windlass.model.worker import LEASE_LIMITS, MAX_CONCURRENCY, MAX_COUNT

_HANDLER = re.compile(r"[\w.]+:[\w.]+")
# Shortest interval of cycles and heartbeats, to limit the load on the database.
MIN_INTERVAL_S = 0.05
# Restarts that are stored per slot. A higher limit would never be reached.
MAX_RESTARTS = 100
# Ten years. Longer durations would overflow dates.
MAX_SECONDS = 315_360_000.0


def _setting(default: Any, description: str, *, env: str | None = None, **constraints: Any) -> Any:
    return Field(
        default=default,
        description=description,
        json_schema_extra={"env": env} if env else None,
        **constraints,
    )


def within_ten_years(value: Any, info: ValidationInfo) -> Any:
    """Validator for every field of a model: durations are at most ten years."""
    is_duration = info.field_name is not None and info.field_name.endswith("_s")
    if is_duration and value is not None and value > MAX_SECONDS:
        raise ValueError(f"at most {MAX_SECONDS:.0f} seconds, which is ten years")
    return value


class FleetConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    provider: Literal["local", "hetzner", "runpod", "ray-local", "ray"] = _setting(
        "local", "Provider of the machines. `ray`: none, tasks run on an existing Ray cluster."
    )
    engine: Literal["ray"] | None = _setting(
        None, "`ray`: Ray places tasks on the fleet's machines. Unset: workers claim tasks themselves."
    )
    queues: TextList = _setting(("default",), "Queues that the fleet's workers serve.", min_length=1)
    policy: Literal["adaptive", "threshold", "buffered", "clear-time"] = _setting(
        "adaptive",
        "Scaling policy: how many workers are wanted. A setting that only one policy reads selects it.",
    )

    # --- what a worker runs
    handler: str | None = _setting(None, "Python function that handles a task, as package.module:function.")
    exec: str | None = _setting(None, "Command to run per task instead of a handler: JSON on stdin, JSON on stdout.")
    is_inline: bool = _setting(
        False, "Run an async handler in the worker's own event loop: fast, but without isolation."
    )
    concurrency: int = _setting(
        1, "Tasks that a worker runs at the same time. A GPU worker runs one.", ge=1, le=MAX_CONCURRENCY
    )
    chdir: Path | None = _setting(None, "Working directory of the workers.")
    env: dict[str, str] = _setting({}, "Environment variables added for the workers.")
    redact: TextList = _setting(
        (), "Parts of payloads and results that the dashboard and viewers do not see, such as $.prompt.", max_length=50
    )
    run_as: str | None = _setting(
        None,
        "User of this host that handlers of a local fleet run as. `up` must run as root. Default: the user of `up`.",
        pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,31}$",
    )

    # --- how many
    min_workers: int = _setting(0, "Minimum number of workers.", env="MIN_ACTIVE_GPUS", ge=0, le=MAX_COUNT)
    max_workers: int = _setting(
        10, "Maximum number of workers and machines.", env="RGRID_MAX_WORKERS MAX_ACTIVE_GPUS", ge=1, le=MAX_COUNT
    )
    max_changes_per_cycle: int = _setting(
        10, "Maximum number of workers spawned, or drained, per cycle.", ge=1, le=MAX_COUNT
    )
    tasks_per_worker: float = _setting(
        3.0,
        "threshold: spawn when more tasks than this are queued per worker.",
        env="TASKS_PER_GPU_THRESHOLD",
        ge=0.001,
        le=1_000_000,
    )
    idle_buffer: int = _setting(
        0,
        "buffered: idle workers kept in addition to what the queue needs.",
        env="MACHINES_TO_KEEP_IDLE",
        ge=0,
        le=MAX_COUNT,
    )
    scale_up_multiplier: float = _setting(
        1.0,
        "buffered: factor on the number of workers that queued and running tasks need.",
        env="SCALE_UP_MULTIPLIER",
        gt=0,
        le=1_000,
    )
    scale_down_multiplier: float = _setting(
        0.9,
        "buffered: drain only if the needed workers are at most this share of the existing ones.",
        env="SCALE_DOWN_MULTIPLIER",
        gt=0,
        le=1,
    )
    clear_time_s: float = _setting(300.0, "clear-time: spawn no worker if the queue clears within this time.", gt=0)
    wait_goal_s: float | None = _setting(
        None, "adaptive: the longest wait that tasks should see. Unset: one boot time and 10 s.", gt=0
    )
    price_of_waiting: float | None = _setting(
        None,
        "adaptive: what a second of waiting is worth, in seconds of one machine. Unset: only the goal counts.",
        ge=0,
        le=1_000_000,
    )

    # --- budgets, in the currency of the machines
    budget_per_hour: Decimal | None = _setting(None, "Budget per clock hour (UTC).", gt=0)
    budget_per_day: Decimal | None = _setting(None, "Budget per day (UTC).", gt=0)
    budget_per_month: Decimal | None = _setting(None, "Budget per month (UTC).", gt=0)
    budget_action: Literal["warn", "stop-spawning", "drain"] = _setting(
        "stop-spawning",
        "When a budget is spent: `warn` only alerts, `stop-spawning` also stops spawning, `drain` also drains all.",
    )

    # --- intervals
    poll_interval_s: float = _setting(
        10.0, "Time between cycles, at least 0.05.", env="ORCHESTRATOR_POLL_SEC", ge=MIN_INTERVAL_S
    )
    min_scaling_interval_s: float = _setting(
        0.0, "Minimum time between two spawns.", env="MIN_SCALING_INTERVAL_SEC", ge=0
    )
    spawn_grace_s: float = _setting(
        180.0,
        "No idle worker drains while another starts, or for this long after a spawn, "
        "except at the end of its billing period.",
        env="SPAWNING_GRACE_PERIOD_SEC",
        ge=0,
    )
    scale_down_grace_s: float = _setting(
        60.0, "Time with too many workers before one drains.", env="SCALE_DOWN_GRACE_PERIOD_SEC", ge=0
    )
    idle_timeout_s: float = _setting(
        30.0, "Idle time before an unneeded worker drains.", env="GPU_OVERCAPACITY_IDLE_TIMEOUT_SEC", ge=0
    )

    # --- timeouts
    heartbeat_interval_s: float = _setting(
        20.0, "Time between heartbeats of a worker, at least 0.05.", ge=MIN_INTERVAL_S
    )
    heartbeat_timeout_s: float = _setting(
        600.0, "A worker without a heartbeat for this long has failed.", env="GPU_IDLE_TIMEOUT_SEC", **LEASE_LIMITS
    )
    promotion_threshold_s: float | None = _setting(
        None,
        "A spawning worker with a heartbeat younger than this becomes active. Unset: three cycles, at least 60 s.",
        env="HEARTBEAT_PROMOTION_THRESHOLD_SEC",
        gt=0,
    )
    spawn_timeout_s: float | None = _setting(
        None,
        "Time without progress after which a starting machine has failed; twice this in total. Unset: twice the 99th "
        "percentile of the fleet's own boots, at most three times the default; the default, until three are measured: "
        "30 s on this host, 600 s on Hetzner, 900 s on Runpod.",
        env="SPAWNING_TIMEOUT_SEC",
        gt=0,
    )
    startup_grace_s: float = _setting(
        600.0,
        "Maximum time from start to the first GPU report while tasks are queued. Doubled while none are.",
        env="STARTUP_GRACE_PERIOD_SEC",
        gt=0,
    )
    not_claiming_timeout_s: float = _setting(
        180.0,
        "A ready worker that claims no task for this long while tasks are queued has failed.",
        env="READY_NOT_CLAIMING_TIMEOUT_SEC",
        gt=0,
    )
    gpu_not_detected_timeout_s: float = _setting(
        300.0,
        "A GPU that reports zero memory for this long has failed.",
        env="GPU_NOT_DETECTED_TIMEOUT_SEC",
        gt=0,
    )
    vram_stale_s: float = _setting(
        120.0, "A GPU memory report older than this raises a warning.", env="GPU_HEALTH_CHECK_TIMEOUT_SEC", gt=0
    )
    stuck_timeout_s: float | None = _setting(
        None,
        "A worker whose task runs longer than this, and has no timeout of its own, has failed. Unset: no limit.",
        env="TASK_STUCK_TIMEOUT_SEC",
        gt=0,
    )
    stop_timeout_s: float = _setting(
        600.0, "Time that a draining worker has to finish its tasks.", env="GRACEFUL_SHUTDOWN_TIMEOUT_SEC", ge=0
    )
    has_gpu: bool = _setting(False, "Workers must report a GPU with memory.")

    # --- failures
    max_failure_rate: float = _setting(
        0.8,
        "Stop spawning if more than this share of the workers spawned in the window failed.",
        env="MAX_WORKER_FAILURE_RATE",
        gt=0,
        le=1,
    )
    failure_window_s: float = _setting(300.0, "Window of the failure rate.", env="FAILURE_WINDOW_MINUTES", gt=0)
    min_spawns_for_rate: int = _setting(
        5,
        "Minimum number of spawns in the window for the failure rate to count.",
        env="MIN_WORKERS_FOR_RATE_CHECK",
        ge=1,
        le=MAX_COUNT,
    )
    max_restarts: int = _setting(
        5, "Restarts of a slot in the restart window; with one more the slot fails. At most 100.", ge=1, le=MAX_RESTARTS
    )
    restart_window_s: float = _setting(300.0, "Window of the restart limit.", gt=0)

    quarantine_min_failures: int = _setting(
        3,
        "Different tasks in a row that must fail on a worker before it is compared with others.",
        ge=2,
        le=MAX_COUNT,
    )
    quarantine_max_chance: float = _setting(
        0.001,
        "A worker is replaced if its failures would happen on the others with at most this probability.",
        gt=0,
        lt=1,
    )

    # --- provisioning and shared storage, for providers that support them
    auto_start_worker: bool = _setting(
        False,
        "Runpod: check pods by SSH and start their workers. Unset: the image starts them. No effect elsewhere.",
        env="AUTO_START_WORKER_PROCESS",
    )
    storage_check_interval_cycles: int = _setting(
        10,
        "Runpod: cycles between checks of the network volume. No effect elsewhere.",
        env="STORAGE_CHECK_INTERVAL_CYCLES",
        ge=1,
    )
    storage_min_free_gb: int = _setting(
        50,
        "Runpod: the network volume grows if less than this is free. No effect elsewhere.",
        env="STORAGE_MIN_FREE_GB",
        ge=0,
    )
    storage_max_percent_used: int = _setting(
        85,
        "Runpod: the network volume grows if more than this is used. No effect elsewhere.",
        env="STORAGE_MAX_PERCENT_USED",
        gt=0,
        le=100,
    )
    storage_expansion_increment_gb: int = _setting(
        50,
        "Runpod: size of one growth step of the network volume. No effect elsewhere.",
        env="STORAGE_EXPANSION_INCREMENT_GB",
        gt=0,
    )

    bootstrap: BootstrapSettings = BootstrapSettings()

    # --- provider settings
    hetzner: HetznerSettings = HetznerSettings()
    runpod: RunpodSettings = RunpodSettings()
    ray: RaySettings = RaySettings()

    @model_validator(mode="before")
    @classmethod
    def _take_defaults_of_provider(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        provider = str(given.get("provider", "local"))
        return PROVIDER_DEFAULTS.get(provider, {}) | {"policy": policy_by_settings(provider, given)} | given

    _durations = field_validator("*")(within_ten_years)

    @field_validator("handler")
    @classmethod
    def _names_a_function(cls, handler: str | None) -> str | None:
        if handler is not None and not _HANDLER.fullmatch(handler):
            raise ValueError("not a function name: write package.module:function")
        return handler

    @field_validator("redact")
    @classmethod
    def _paths(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        for path in paths:
            parse_path(path)
        return paths

    @field_validator("queues")
    @classmethod
    def _queue_names(cls, queues: tuple[str, ...]) -> tuple[str, ...]:
        try:
            return tuple(check_queue_name(name) for name in queues)
        except BadInput as error:
            raise ValueError(str(error).rstrip(".")) from None

    @field_validator("budget_per_hour", "budget_per_day", "budget_per_month")
    @classmethod
    def _amounts(cls, amount: Decimal | None) -> Decimal | None:
        if amount is not None:
            to_micros(amount)
        return amount

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.min_workers > self.max_workers:
            raise ValueError(
                f"min_workers is {self.min_workers} and max_workers is {self.max_workers}: min must not exceed max"
            )
        if self.heartbeat_timeout_s < 3 * self.heartbeat_interval_s:
            raise ValueError(
                f"heartbeat_timeout_s is {self.heartbeat_timeout_s:g} and heartbeat_interval_s is "
                f"{self.heartbeat_interval_s:g}: set at least three intervals, or one lost packet fails a worker"
            )
        if self.promotion_threshold_s is not None and self.promotion_threshold_s < 2 * self.heartbeat_interval_s:
            raise ValueError(
                f"promotion_threshold_s is {self.promotion_threshold_s:g} and heartbeat_interval_s is "
                f"{self.heartbeat_interval_s:g}: below two intervals a healthy worker may never be promoted"
            )
        if self.provider != "hetzner" and self.hetzner != HetznerSettings():
            raise ValueError(f'hetzner is set and provider is {self.provider!r}: set provider = "hetzner"')
        if self.provider != "runpod" and self.runpod != RunpodSettings():
            raise ValueError(f'runpod is set and provider is {self.provider!r}: set provider = "runpod"')
        if self.provider == "runpod" and self.runpod.image is None and self.runpod.template_id is None:
            raise ValueError(
                "provider is 'runpod' and neither runpod.image nor runpod.template_id is set: name an image"
            )
        self._check_pod_bootstrap()
        self._check_engine()
        if self.handler is not None and self.exec is not None:
            raise ValueError("both handler and exec are set: a worker runs one of them")
        if self.is_inline and self.exec is not None:
            raise ValueError("is_inline needs handler: a command cannot run inside the worker")
        if self.run_as is not None and (self.provider != "local" or self.is_inline):
            raise ValueError(
                'run_as is set, which needs provider = "local" and a handler in a process of its own: '
                "rented machines have bootstrap.user, and an inline handler has the worker's user"
            )
        if self.is_inline is False and self.has_gpu and self.concurrency > 1:
            raise ValueError(
                f"concurrency is {self.concurrency} and has_gpu is set: a GPU runs exactly one task at a time"
            )
        return self

    @property
    def node_offer(self) -> RaySettings | None:
        """Resources of each Ray node of the fleet. None: the cluster is not ours."""
        if self.provider == "ray":
            return None
        if self.provider != "ray-local":
            return self.ray
        # Several nodes share this host: each offers what its tasks need, not all of the host.
        return self.ray.offered(self.queues, self.concurrency)

    def _check_pod_bootstrap(self) -> None:
        """Pods have no first-boot script: requirements are installed over SSH, and ca_file is in their join data."""
        if self.provider != "runpod":
            return
        unset = BootstrapSettings()
        ignored = [
            name
            for name in sorted(BootstrapSettings.model_fields)
            if name not in ("requirements", "ca_file") and getattr(self.bootstrap, name) != getattr(unset, name)
        ]
        if ignored:
            raise ValueError(
                f"bootstrap.{ignored[0]} is set and provider is 'runpod': pods have only "
                "requirements and ca_file of these, so put the rest into the image or runpod.ssh.start_command"
            )
        if self.bootstrap.requirements and not (self.auto_start_worker and self.runpod.ssh.installs_windlass):
            raise ValueError(
                "bootstrap.requirements is set and provider is 'runpod': they are installed over SSH, so set "
                "auto_start_worker = true and runpod.ssh.installs_windlass = true, or put them into the image"
            )

    def _check_engine(self) -> None:
        if self.engine is None:
            if self.provider in ("ray-local", "ray"):
                raise ValueError(f'provider is {self.provider!r}, which needs engine = "ray"')
            if self.ray != RaySettings():
                raise ValueError('ray is set and engine is not: set engine = "ray"')
            return
        if self.provider in ("local", "runpod"):
            other = ' (provider = "ray-local" starts Ray\'s nodes on this host)' if self.provider == "local" else ""
            raise ValueError(f"engine is 'ray', which provider {self.provider!r} does not support{other}")
        if self.is_inline:
            raise ValueError("is_inline cannot be used with an engine: Ray runs handlers in its own processes")
        for name in self.ray.queues:
            if name not in self.queues:
                raise ValueError(f"ray.queues names {name}, which is not among the fleet's queues")
        problem = self.node_offer.problem_of_nodes(self.queues) if self.node_offer is not None else None
        if problem is not None:
            raise ValueError(problem)

    @property
    def is_of_this_host(self) -> bool:
        """Its machines are processes of this host."""
        return self.provider in ("local", "ray-local")

    @property
    def default_spawn_timeout_s(self) -> float:
        """Time without progress after which a machine has failed, while no boots are measured."""
        return SPAWN_TIMEOUTS_S[self.provider]

    @property
    def min_spawn_timeout_s(self) -> float:
        """Measured boots set no shorter timeout. Processes of this host are slow when the host is busy."""
        return min(MIN_REMOTE_SPAWN_TIMEOUT_S, self.default_spawn_timeout_s)

    @property
    def promotion_age_s(self) -> float:
        if self.promotion_threshold_s is not None:
            return self.promotion_threshold_s
        return max(60.0, 3 * self.poll_interval_s)
