"""A Runpod account on loopback."""

from windlass.emulate.runpod.emulator import RunpodEmulator
from windlass.emulate.runpod.settings import Settings

__all__ = ["RunpodEmulator", "Settings"]
