"""An emulated Runpod account."""

from windlass_emulators.runpod.emulator import RunpodEmulator
from windlass_emulators.runpod.settings import RunpodEmulatorSettings

__all__ = ["RunpodEmulator", "RunpodEmulatorSettings"]
