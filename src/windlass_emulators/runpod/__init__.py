"""A Runpod account on loopback."""

from windlass_emulators.runpod.emulator import RunpodEmulator
from windlass_emulators.runpod.settings import RunpodEmulatorSettings

__all__ = ["RunpodEmulator", "RunpodEmulatorSettings"]
