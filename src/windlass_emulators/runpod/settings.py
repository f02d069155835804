"""Settings of an emulated Runpod account."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunpodEmulatorSettings:
    # From the request to `STARTING`: a machine is allocated.
    provisioning_s: float = 2.0
    # From `STARTING` to `RUNNING`: the image is pulled. A large image takes minutes.
    starting_s: float = 6.0
    # From `RUNNING` to a `runtime` with ports.
    runtime_s: float = 1.0
    # The limits of the published example.
    requests_per_minute: int = 60
    requests_per_hour: int = 3_000
    requests_per_day: int = 50_000
    # None accepts any API key.
    key: str | None = None
