"""How the emulated project behaves."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HetznerEmulatorSettings:
    # From the request to `running`: three quarters `initializing`, the rest `starting`. A real one takes 10 to 20 s.
    boot_s: float = 8.0
    # From `running` to the start of what user_data asks for: the kernel, cloud-init, packages.
    cloud_init_s: float = 0.0
    # Every other action: power, networks, firewalls.
    action_s: float = 1.0
    # A deleted server is `deleting` for so long before it is not found.
    delete_s: float = 1.0
    # What is billed as an hour. Shorter for demonstrations; the clock is not touched.
    billing_hour_s: float = 3600.0
    # A young project's, roughly.
    server_limit: int = 100
    requests_per_hour: int = 3600
    # None: any token will do.
    token: str | None = None
