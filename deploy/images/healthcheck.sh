#!/bin/sh
# Healthy while the worker's process runs and, on a GPU image, while the driver answers.
#
# Runpod ignores health checks of images: there, heartbeats decide. Docker and Kubernetes use this.
set -eu
grep -qa 'windlass' /proc/1/cmdline
[ -z "${WORKER_NEEDS_GPU:-}" ] || nvidia-smi --list-gpus >/dev/null
