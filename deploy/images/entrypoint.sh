#!/bin/sh
# Starts the worker of a rented machine or of a host of your own.
#
# A pod of Runpod has WINDLASS_JOIN in its environment: the worker's id, the control plane's URL and a join token for
# one use. It is written to a private file and removed from the environment, so that no handler sees it.
# Without it, the arguments are those of `windlass worker`, for example: --queue renders --handler app:generate
set -eu

# The CUDA image caches weights in the container. A volume keeps them for later containers, where this user may write to
# it. A folder that a person chose stays.
cache=${WORKER_VOLUME:-/workspace}/huggingface
if [ "${HF_HOME:-}" = /home/windlass/huggingface ] && [ -d "${cache%/*}" ] &&
  mkdir -p "$cache" 2>/dev/null && [ -w "$cache" ]; then
  export HF_HOME="$cache"
fi

state=${WORKER_STATE:-/var/lib/windlass}
join=$state/join.json
if [ -n "${WINDLASS_JOIN:-}" ] || [ -s "$join" ]; then
  umask 077
  mkdir -p "$state"
  # A container that restarts has joined already, and has its worker token next to the file.
  [ -s "$join" ] || printf %s "$WINDLASS_JOIN" >"$join"
  unset WINDLASS_JOIN
  set -- --join "$join" "$@"
elif [ $# -eq 0 ]; then
  echo "windlass: WINDLASS_JOIN is not set. Start this image by a fleet, or pass arguments of \`windlass worker\`." >&2
  exit 2
fi
exec windlass worker "$@"
