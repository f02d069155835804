"""A Hetzner Cloud project on loopback."""

from windlass.emulate.hetzner.emulator import HetznerEmulator
from windlass.emulate.hetzner.settings import Settings

__all__ = ["HetznerEmulator", "Settings"]
