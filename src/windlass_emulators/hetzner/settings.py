"""Settings of an emulated Hetzner Cloud project."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HetznerEmulatorSettings:
    # From the request to `running`: three quarters `initializing`, the rest `starting`. A real server takes 10 to 20 s.
    boot_s: float = 8.0
    # From `running` to the start of the unit in user_data: kernel, cloud-init, packages.
    cloud_init_s: float = 0.0
    # Duration of every other action, such as power off.
    action_s: float = 1.0
    # A deleted server is `deleting` for this long before it is not found.
    delete_s: float = 1.0
    # The length of a billed hour. Demos shorten it; timestamps are not affected.
    billing_hour_s: float = 3600.0
    # Roughly the limit of a new project.
    server_limit: int = 100
    # Limits are per kind. Dedicated cores are those of the types ccx.
    dedicated_core_limit: int = 128
    primary_ip_limit: int = 250
    # Servers in one private network.
    network_limit: int = 100
    requests_per_hour: int = 3600
    # None accepts any token.
    token: str | None = None
