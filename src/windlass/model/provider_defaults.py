"""Defaults of fleet settings that differ between providers: a process starts in a second, a GPU pod in minutes."""

from collections.abc import Collection
from typing import Any

# Settings that only one policy reads.
POLICY_SETTINGS = {
    "wait_goal_s": "adaptive",
    "price_of_waiting": "adaptive",
    "tasks_per_worker": "threshold",
    "idle_buffer": "buffered",
    "scale_up_multiplier": "buffered",
    "scale_down_multiplier": "buffered",
    "clear_time_s": "clear-time",
}
# Settings that every policy but `adaptive` reads: it learns its idle timeouts.
IGNORED_BY_ADAPTIVE = ("idle_timeout_s", "spawn_grace_s", "scale_down_grace_s")
# Settings that only fleets with `has_gpu` read.
GPU_SETTINGS = ("startup_grace_s", "gpu_not_detected_timeout_s", "vram_stale_s")
# Settings that only fleets of the provider runpod with a network volume read.
VOLUME_SETTINGS = (
    "storage_check_interval_cycles",
    "storage_min_free_gb",
    "storage_max_percent_used",
    "storage_expansion_increment_gb",
)
# Settings that only the provider runpod reads.
RUNPOD_SETTINGS = ("auto_start_worker", *VOLUME_SETTINGS)
# Settings that the provider ray ignores, because it spawns no worker.
IGNORED_BY_RAY = (
    *POLICY_SETTINGS,
    *IGNORED_BY_ADAPTIVE,
    "min_workers",
    "max_workers",
    "min_scaling_interval_s",
    "spawn_timeout_s",
    "max_failure_rate",
    "failure_window_s",
    "min_spawns_for_rate",
)

PROVIDER_DEFAULTS: dict[str, dict[str, Any]] = {
    "local": {
        "min_workers": 0,
        "max_workers": 4,
        "poll_interval_s": 10.0,
        "heartbeat_interval_s": 5.0,
        "heartbeat_timeout_s": 30.0,
        "stop_timeout_s": 30.0,
        # A process starts in a second and costs nothing: no reason to wait before spawning or draining.
        "min_scaling_interval_s": 0.0,
        "spawn_grace_s": 0.0,
        "scale_down_grace_s": 0.0,
    },
    "hetzner": {
        "concurrency": 2,
        "min_workers": 0,
        "max_workers": 50,
        "poll_interval_s": 10.0,
        "heartbeat_interval_s": 10.0,
        "heartbeat_timeout_s": 120.0,
        # Billing hours keep idle servers anyway, so there is no reason to delay spawning.
        "min_scaling_interval_s": 0.0,
        "spawn_grace_s": 0.0,
        "scale_down_grace_s": 0.0,
    },
    # Processes of this host, like local, but starting Ray takes some seconds.
    "ray-local": {
        "engine": "ray",
        "min_workers": 0,
        "max_workers": 4,
        "poll_interval_s": 10.0,
        "heartbeat_interval_s": 5.0,
        "heartbeat_timeout_s": 30.0,
        "stop_timeout_s": 30.0,
        "min_scaling_interval_s": 0.0,
        "spawn_grace_s": 0.0,
        "scale_down_grace_s": 0.0,
    },
    # An existing Ray cluster: no worker is spawned, so scaling settings have no effect.
    "ray": {"engine": "ray", "heartbeat_interval_s": 5.0, "heartbeat_timeout_s": 30.0, "stop_timeout_s": 30.0},
    # A pod takes minutes to start and is billed from its first second: long timeouts.
    "runpod": {
        "concurrency": 1,
        "has_gpu": True,
        "min_workers": 0,
        "max_workers": 10,
        "poll_interval_s": 10.0,
        "heartbeat_interval_s": 20.0,
        "heartbeat_timeout_s": 600.0,
        "stop_timeout_s": 600.0,
    },
}

# Default of spawn_timeout_s. A server installs packages in a minute or two, and has taken five to be created. A pod
# pulls an image of 20 GB in 10 to 15 minutes; while Runpod reports the pull, twice this applies.
SPAWN_TIMEOUTS_S = {"local": 30.0, "ray-local": 60.0, "ray": 60.0, "hetzner": 600.0, "runpod": 900.0}
MIN_REMOTE_SPAWN_TIMEOUT_S = 300.0


def reason_without_effect(provider: str, policy: str, setting: str, *, has_gpu: bool, has_volume: bool) -> str | None:
    """Why a fleet ignores this setting, and what to do; None if it reads it."""
    if provider == "ray" and setting in IGNORED_BY_RAY:
        return "with provider ray, which spawns no workers: remove it"
    if provider != "runpod" and setting in RUNPOD_SETTINGS:
        return f"with provider {provider}: remove it"
    if not has_volume and setting in VOLUME_SETTINGS:
        return "without a network volume: remove it, or set runpod.network_volume_id"
    if not has_gpu and setting in GPU_SETTINGS:
        return "without a GPU: remove it, or set has_gpu = true"
    only_policy = POLICY_SETTINGS.get(setting, policy)
    if only_policy != policy:
        return f'with policy {policy}: remove it, or set policy = "{only_policy}"'
    if policy == "adaptive" and setting in IGNORED_BY_ADAPTIVE:
        return "with policy adaptive, which learns its idle timeouts: remove it, or set another policy"
    return None


def policy_by_settings(provider: str, given: Collection[str]) -> str:
    """The default policy of a fleet with these settings: that which reads them, so that none is without effect."""
    policies = {policy for setting, policy in POLICY_SETTINGS.items() if setting in given}
    for policy in ("buffered", "threshold", "clear-time", "adaptive"):
        if policy in policies:
            return policy
    if any(setting in given for setting in IGNORED_BY_ADAPTIVE):
        return "clear-time" if provider == "hetzner" else "buffered"
    return "adaptive"
