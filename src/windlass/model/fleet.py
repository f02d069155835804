"""How a fleet is run: its limits, its patience, its policy. One table per fleet in windlass.toml.

Defaults depend on the provider, because a process starts in a second and a GPU pod in minutes. The names in
`json_schema_extra` are the environment variables that set the value for the fleet called `default`.
"""

import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from windlass.model.bootstrap import BootstrapSettings
from windlass.model.errors import BadInput
from windlass.model.hetzner import HetznerSettings
from windlass.model.money import to_micros
from windlass.model.ray import RaySettings
from windlass.model.runpod import RunpodSettings
from windlass.model.task import check_queue_name
from windlass.model.worker import MAX_CONCURRENCY, MAX_COUNT

_HANDLER = re.compile(r"[\w.]+:[\w.]+")
# What is done again and again, be it a cycle or a heartbeat, leaves the database this long for others.
MIN_INTERVAL_S = 0.05
# So many restarts of a slot are remembered: a limit beyond that would never be reached.
MAX_RESTARTS = 100
# Ten years: whoever means for ever means less, and moments stay within what clocks can say.
MAX_SECONDS = 315_360_000.0
# What differs between providers; everything else has one default for all.
PROVIDER_DEFAULTS: dict[str, dict[str, Any]] = {
    "local": {
        "min_workers": 0,
        "max_workers": 4,
        "poll_interval_s": 10.0,
        "heartbeat_interval_s": 5.0,
        "heartbeat_timeout_s": 30.0,
        "spawn_timeout_s": 30.0,
        "stop_timeout_s": 30.0,
        # A process starts in a second and costs nothing: nobody need wait, or be kept, for another's sake.
        "min_scaling_interval_s": 0.0,
        "spawn_grace_s": 0.0,
        "scale_down_grace_s": 0.0,
    },
    "hetzner": {
        "policy": "clear-time",
        "concurrency": 2,
        "min_workers": 0,
        "max_workers": 50,
        "poll_interval_s": 10.0,
        "heartbeat_interval_s": 10.0,
        "heartbeat_timeout_s": 120.0,
        "spawn_timeout_s": 120.0,
        # Paid hours keep idle servers anyway; what the queue needs is hired at once.
        "min_scaling_interval_s": 0.0,
        "spawn_grace_s": 0.0,
        "scale_down_grace_s": 0.0,
    },
    # Raylets of this host: processes as of local, but they start Ray, which takes some seconds.
    "ray-local": {
        "engine": "ray",
        "min_workers": 0,
        "max_workers": 4,
        "poll_interval_s": 10.0,
        "heartbeat_interval_s": 5.0,
        "heartbeat_timeout_s": 30.0,
        "spawn_timeout_s": 60.0,
        "stop_timeout_s": 30.0,
        "min_scaling_interval_s": 0.0,
        "spawn_grace_s": 0.0,
        "scale_down_grace_s": 0.0,
    },
    # The nodes of a cluster that others run: nobody is hired, so nothing of the rest matters.
    "ray": {"engine": "ray", "heartbeat_interval_s": 5.0, "heartbeat_timeout_s": 30.0, "stop_timeout_s": 30.0},
    # A pod takes minutes to start and costs from its first second: patience, and no haste either way.
    "runpod": {
        "policy": "buffered",
        "concurrency": 1,
        "has_gpu": True,
        "min_workers": 2,
        "max_workers": 10,
        "poll_interval_s": 30.0,
        "heartbeat_interval_s": 20.0,
        "heartbeat_timeout_s": 600.0,
        "spawn_timeout_s": 600.0,
        # A GPU that hangs is common and dear. Elsewhere tasks take the time they take, unless somebody sets a limit.
        "stuck_timeout_s": 1200.0,
        "stop_timeout_s": 600.0,
    },
}


def _setting(default: Any, description: str, *, env: str | None = None, **constraints: Any) -> Any:
    return Field(
        default=default,
        description=description,
        json_schema_extra={"env": env} if env else None,
        **constraints,
    )


def within_ten_years(value: Any, info: ValidationInfo) -> Any:
    """For every field of a model: one that is a duration must be within reason."""
    is_duration = info.field_name is not None and info.field_name.endswith("_s")
    if is_duration and value is not None and value > MAX_SECONDS:
        raise ValueError(f"at most {MAX_SECONDS:.0f} seconds, which is ten years")
    return value


class FleetConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    provider: Literal["local", "hetzner", "runpod", "ray-local", "ray"] = _setting(
        "local", "Who rents the machines. `ray`: nobody, tasks run on a Ray cluster that is there already."
    )
    engine: Literal["ray"] | None = _setting(
        None, "`ray`: tasks are placed by Ray on the fleet's machines. Without it: workers claim for themselves."
    )
    queues: tuple[str, ...] = _setting(("default",), "The queues its workers serve.", min_length=1)
    policy: Literal["threshold", "buffered", "clear-time"] = _setting("buffered", "How many workers are wanted.")

    # --- what a worker runs
    handler: str | None = _setting(None, "Python function that takes the task, as package.module:function.")
    exec: str | None = _setting(None, "Command to run per task instead: JSON on stdin, JSON on stdout.")
    is_inline: bool = _setting(False, "Run an async handler in the worker's own loop: fast, but unprotected.")
    concurrency: int = _setting(1, "Tasks a worker runs at the same time. A GPU runs one.", ge=1, le=MAX_CONCURRENCY)
    chdir: Path | None = _setting(None, "The folder its workers work in.")
    env: dict[str, str] = _setting({}, "Added to the environment of its workers.")

    # --- how many
    min_workers: int = _setting(0, "Never fewer than this.", env="MIN_ACTIVE_GPUS", ge=0, le=MAX_COUNT)
    max_workers: int = _setting(
        10, "Never more than this, whatever happens.", env="RGRID_MAX_WORKERS MAX_ACTIVE_GPUS", ge=1, le=MAX_COUNT
    )
    max_changes_per_cycle: int = _setting(10, "Hired, or let go, at once at the most.", ge=1, le=MAX_COUNT)
    tasks_per_worker: float = _setting(
        3.0,
        "threshold: hire when more tasks than this wait for each worker.",
        env="TASKS_PER_GPU_THRESHOLD",
        ge=0.001,
        le=1_000_000,
    )
    idle_buffer: int = _setting(
        0,
        "buffered: idle workers kept ready beyond what the queue needs.",
        env="MACHINES_TO_KEEP_IDLE",
        ge=0,
        le=MAX_COUNT,
    )
    scale_up_multiplier: float = _setting(
        1.0,
        "buffered: workers for each that the tasks at hand and waiting need.",
        env="SCALE_UP_MULTIPLIER",
        gt=0,
        le=1_000,
    )
    scale_down_multiplier: float = _setting(
        0.9,
        "buffered: let go only when those needed are at most this share of those there.",
        env="SCALE_DOWN_MULTIPLIER",
        gt=0,
        le=1,
    )
    clear_time_s: float = _setting(300.0, "clear-time: a queue that clears within this time needs nobody new.", gt=0)

    # --- at what price, in the currency in which its machines are paid
    budget_per_hour: Decimal | None = _setting(None, "At most this much for each hour of the clock (UTC).", gt=0)
    budget_per_day: Decimal | None = _setting(None, "At most this much for each day (UTC).", gt=0)
    budget_per_month: Decimal | None = _setting(None, "At most this much for each month (UTC).", gt=0)
    budget_action: Literal["warn", "stop-spawning", "drain"] = _setting(
        "stop-spawning", "When a budget is spent: say so; also hire nobody; also let everybody go."
    )

    # --- when
    poll_interval_s: float = _setting(
        30.0, "From one cycle to the next; 0.05 at the least.", env="ORCHESTRATOR_POLL_SEC", ge=MIN_INTERVAL_S
    )
    min_scaling_interval_s: float = _setting(
        45.0, "At least this long between two hirings.", env="MIN_SCALING_INTERVAL_SEC", ge=0
    )
    spawn_grace_s: float = _setting(
        180.0,
        "Nobody is let go while a worker is starting, nor for this long after one was hired; "
        "but at the end of a paid hour, whoever is spare.",
        env="SPAWNING_GRACE_PERIOD_SEC",
        ge=0,
    )
    scale_down_grace_s: float = _setting(
        60.0, "Too many workers for this long before one is let go.", env="SCALE_DOWN_GRACE_PERIOD_SEC", ge=0
    )
    idle_timeout_s: float = _setting(
        30.0, "Idle for this long before a worker above need is let go.", env="GPU_OVERCAPACITY_IDLE_TIMEOUT_SEC", ge=0
    )

    # --- patience
    heartbeat_interval_s: float = _setting(
        20.0, "How often a worker says that it lives; 0.05 at the least.", ge=MIN_INTERVAL_S
    )
    heartbeat_timeout_s: float = _setting(
        600.0, "Silent for longer than this, a worker is broken.", env="GPU_IDLE_TIMEOUT_SEC", gt=0
    )
    promotion_threshold_s: float | None = _setting(
        None,
        "A heartbeat younger than this makes a spawning worker active. Without it: three cycles, at least 60 s.",
        env="HEARTBEAT_PROMOTION_THRESHOLD_SEC",
        gt=0,
    )
    spawn_timeout_s: float = _setting(600.0, "From hiring to the first heartbeat.", env="SPAWNING_TIMEOUT_SEC", gt=0)
    startup_grace_s: float = _setting(
        600.0,
        "From start to the first word about its GPU, while tasks wait; twice as long while none do.",
        env="STARTUP_GRACE_PERIOD_SEC",
        gt=0,
    )
    not_claiming_timeout_s: float = _setting(
        180.0, "Ready, tasks waiting, and never claimed one for this long.", env="READY_NOT_CLAIMING_TIMEOUT_SEC", gt=0
    )
    gpu_not_detected_timeout_s: float = _setting(
        300.0,
        "A GPU of zero memory for this long, without a break, is broken.",
        env="GPU_NOT_DETECTED_TIMEOUT_SEC",
        gt=0,
    )
    vram_stale_s: float = _setting(
        120.0, "Word about the GPU's memory older than this is a warning.", env="GPU_HEALTH_CHECK_TIMEOUT_SEC", gt=0
    )
    stuck_timeout_s: float | None = _setting(
        None,
        "A task without a limit of its own that runs for longer is stuck, and its worker broken. Without it: no limit.",
        env="TASK_STUCK_TIMEOUT_SEC",
        gt=0,
    )
    stop_timeout_s: float = _setting(
        600.0, "A worker that is let go may finish for this long.", env="GRACEFUL_SHUTDOWN_TIMEOUT_SEC", ge=0
    )
    has_gpu: bool = _setting(False, "Its workers must report a GPU with memory.")

    # --- when things break
    max_failure_rate: float = _setting(
        0.8,
        "More hirings than this share failed in the window: hire nobody.",
        env="MAX_WORKER_FAILURE_RATE",
        gt=0,
        le=1,
    )
    failure_window_s: float = _setting(300.0, "The window of the failure rate.", env="FAILURE_WINDOW_MINUTES", gt=0)
    min_spawns_for_rate: int = _setting(
        5,
        "Fewer hirings than this in the window say nothing about the failure rate.",
        env="MIN_WORKERS_FOR_RATE_CHECK",
        ge=1,
        le=MAX_COUNT,
    )
    max_restarts: int = _setting(
        5, "Restarts of a slot in the restart window; one more and it is failed. At most 100.", ge=1, le=MAX_RESTARTS
    )
    restart_window_s: float = _setting(300.0, "The window of the restart limit.", gt=0)

    quarantine_min_failures: int = _setting(
        3,
        "Different tasks that fail on a worker, and none completed between, before it is suspected.",
        ge=2,
        le=MAX_COUNT,
    )
    quarantine_max_chance: float = _setting(
        0.001,
        "A worker is replaced when such a row of failures would happen to the others with at most this probability.",
        gt=0,
        lt=1,
    )

    # --- storage that its workers share, and how their program is started: for providers that have such things
    auto_start_worker: bool = _setting(
        False,
        "Runpod: look pods over by SSH and start their workers. Without it: the image does. No effect elsewhere.",
        env="AUTO_START_WORKER_PROCESS",
    )
    storage_check_interval_cycles: int = _setting(
        10,
        "Runpod: cycles from one look at the network volume to the next. No effect elsewhere.",
        env="STORAGE_CHECK_INTERVAL_CYCLES",
        ge=1,
    )
    storage_min_free_gb: int = _setting(
        50,
        "Runpod: a network volume with less free than this grows. No effect elsewhere.",
        env="STORAGE_MIN_FREE_GB",
        ge=0,
    )
    storage_max_percent_used: int = _setting(
        85,
        "Runpod: a network volume of which more than this is used grows. No effect elsewhere.",
        env="STORAGE_MAX_PERCENT_USED",
        gt=0,
        le=100,
    )
    storage_expansion_increment_gb: int = _setting(
        50,
        "Runpod: by how much a network volume grows. No effect elsewhere.",
        env="STORAGE_EXPANSION_INCREMENT_GB",
        gt=0,
    )

    bootstrap: BootstrapSettings = BootstrapSettings()

    # --- providers' own
    hetzner: HetznerSettings = HetznerSettings()
    runpod: RunpodSettings = RunpodSettings()
    ray: RaySettings = RaySettings()

    @model_validator(mode="before")
    @classmethod
    def _take_defaults_of_provider(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return PROVIDER_DEFAULTS.get(str(given.get("provider", "local")), {}) | given

    _durations = field_validator("*")(within_ten_years)

    @field_validator("queues", mode="before")
    @classmethod
    def _from_one_line(cls, queues: Any) -> Any:
        """The environment has only text: names, separated by commas."""
        return [name.strip() for name in queues.split(",")] if isinstance(queues, str) else queues

    @field_validator("handler")
    @classmethod
    def _names_a_function(cls, handler: str | None) -> str | None:
        if handler is not None and not _HANDLER.fullmatch(handler):
            raise ValueError("this does not name a function: write package.module:function")
        return handler

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
                f"{self.heartbeat_interval_s:g}: at least three beats must fit, or one lost packet costs a worker"
            )
        if self.promotion_threshold_s is not None and self.promotion_threshold_s < 2 * self.heartbeat_interval_s:
            raise ValueError(
                f"promotion_threshold_s is {self.promotion_threshold_s:g} and heartbeat_interval_s is "
                f"{self.heartbeat_interval_s:g}: below two beats a healthy worker may never be promoted"
            )
        if self.provider != "hetzner" and self.hetzner != HetznerSettings():
            raise ValueError(f'hetzner is set and provider is {self.provider!r}: set provider = "hetzner"')
        if self.provider != "runpod" and self.runpod != RunpodSettings():
            raise ValueError(f'runpod is set and provider is {self.provider!r}: set provider = "runpod"')
        if self.provider == "runpod" and self.runpod.image is None and self.runpod.template_id is None:
            raise ValueError(
                "provider is 'runpod' and neither runpod.image nor runpod.template_id is set: name an image"
            )
        self._check_engine()
        if self.handler is not None and self.exec is not None:
            raise ValueError("both handler and exec are set: a worker runs one of them")
        if self.is_inline and self.exec is not None:
            raise ValueError("is_inline goes with handler: a command cannot run inside the worker")
        if self.is_inline is False and self.has_gpu and self.concurrency > 1:
            raise ValueError(
                f"concurrency is {self.concurrency} and has_gpu is set: a GPU runs exactly one task at a time"
            )
        return self

    @property
    def node_offer(self) -> RaySettings | None:
        """What each of its Ray nodes is started with. None: they are others'."""
        if self.provider == "ray":
            return None
        if self.provider != "ray-local":
            return self.ray
        # Many nodes share this host: each offers what its tasks need, not all there is.
        return self.ray.offered(self.queues, self.concurrency)

    def _check_engine(self) -> None:
        if self.engine is None:
            if self.provider in ("ray-local", "ray"):
                raise ValueError(f'provider is {self.provider!r}, which needs engine = "ray"')
            if self.ray != RaySettings():
                raise ValueError('ray is set and engine is not: set engine = "ray"')
            return
        if self.provider in ("local", "runpod"):
            other = ' (provider = "ray-local" starts Ray\'s nodes on this host)' if self.provider == "local" else ""
            raise ValueError(f"engine is 'ray', which provider {self.provider!r} cannot do{other}")
        if self.is_inline:
            raise ValueError("is_inline goes without an engine: Ray runs handlers in its own processes")
        for name in self.ray.queues:
            if name not in self.queues:
                raise ValueError(f"ray.queues names {name}, which is not among the fleet's queues")
        problem = self.node_offer.problem_of_nodes(self.queues) if self.node_offer is not None else None
        if problem is not None:
            raise ValueError(problem)

    @property
    def is_of_this_host(self) -> bool:
        """Whether its machines are processes here."""
        return self.provider in ("local", "ray-local")

    @property
    def promotion_age_s(self) -> float:
        if self.promotion_threshold_s is not None:
            return self.promotion_threshold_s
        return max(60.0, 3 * self.poll_interval_s)


def with_changes(settings: FleetConfig, changes: Sequence[str]) -> FleetConfig:
    """The same with other values, each as name=value. BadInput for what is no setting of a fleet."""
    if not changes:
        return settings
    given: dict[str, Any] = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals or name not in FleetConfig.model_fields:
            raise BadInput(f"{change[:100]!r} is no setting of a fleet: write name=value, such as max_workers=3.")
        given[name] = value
    try:
        return FleetConfig.model_validate(settings.model_dump() | given)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "the settings"
        raise BadInput(f"{where}: {problem['msg'].removeprefix('Value error, ').rstrip('.')}.") from None
