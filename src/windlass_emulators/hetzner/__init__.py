"""An emulated Hetzner Cloud project."""

from windlass_emulators.hetzner.emulator import HetznerEmulator
from windlass_emulators.hetzner.settings import HetznerEmulatorSettings

__all__ = ["HetznerEmulator", "HetznerEmulatorSettings"]
