"""The hardware of an emulated pod, as its programs see it: every file here runs inside a pod and knows nothing of the
emulator but the one file of readings that `EMULATED_HARDWARE` names (see readings.py).

This folder is the first in a pod's PYTHONPATH. So `import pynvml` finds the GPUs of the emulated machine, and
`os.statvfs` its disks: nothing in a worker knows that it is rehearsed, and there is no back door in it.

They are started often and must be quick, so they import little: no pathlib, nothing of Windlass.
"""
