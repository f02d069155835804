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


def policy_by_settings(provider: str, given: Collection[str]) -> str:
    """The default policy of a fleet with these settings: that which reads them, so that none is without effect."""
    policies = {policy for setting, policy in POLICY_SETTINGS.items() if setting in given}
    for policy in ("buffered", "threshold", "clear-time", "adaptive"):
        if policy in policies:
            return policy
    if any(setting in given for setting in IGNORED_BY_ADAPTIVE):
        return "clear-time" if provider == "hetzner" else "buffered"
    return "adaptive"
