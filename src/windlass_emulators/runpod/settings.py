"""How the emulated account behaves."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunpodEmulatorSettings:
    # From the request to `STARTING`: a machine is found.
    provisioning_s: float = 2.0
    # From there to `RUNNING`: the image is pulled. Minutes for a large one.
    starting_s: float = 6.0
    # From `RUNNING` to a `runtime` with ports.
    runtime_s: float = 1.0
    # As in the published example.
    requests_per_minute: int = 60
    requests_per_hour: int = 3_000
    requests_per_day: int = 50_000
    # None: any key will do.
    key: str | None = None
