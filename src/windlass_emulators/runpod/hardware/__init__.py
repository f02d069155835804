"""The emulated hardware of a pod, as its programs see it.

The files here run inside pods. They know nothing of the emulator except the file that `EMULATED_HARDWARE` names (see
readings.py). This folder comes first in a pod's PYTHONPATH: `import pynvml` finds the GPUs of the emulated machine, and
`os.statvfs` its disks. A worker has no special code for emulated hardware.

Programs start these files often, so they import little: no pathlib, nothing of Windlass.
"""
