#!/bin/sh
# Installs Windlass on a pod, next to what the image brings: `install.sh JOIN_FILE VERSION TIMEOUT_S`.
#
# The control plane runs it over SSH before it starts the worker. It is safe to run again and at the same time: one run
# works, the others wait for it. The environment is `env` in the folder of this script. Nothing of the image is changed.
# requirements.txt and index.txt (its options for pip) are in the same folder. The last line of the output of a failed
# run is `CODE: message`. With `has-image-packages` in the folder, the environment sees the packages of the image.
set -u

join=$1
version=$2
timeout_s=$3
lib=$(cd "$(dirname "$0")" && pwd)
venv=$lib/env
# Only the run that has the lock writes to install.log.
log=/dev/null
# Written when everything is installed: what was asked for.
complete=$lib/complete
MIN_PYTHON="3, 11"
# Time limit of pip for one connection.
CONNECT_TIMEOUT_S=30
MAX_LINES=15

fail() {
  [ ! -s "$log" ] || tail -n "$MAX_LINES" "$log"
  post "failed: $1"
  echo "$1: $2"
  exit 1
}
# Tells the control plane what this pod does: its spawn timeout then begins again. Nothing depends on the answer.
post() { [ -z "${python:-}" ] || "$python" "$lib/fetch_wheel.py" "$join" --step "$1" >/dev/null 2>&1 & }
# Runs a step with the remaining time. Its output is kept for the error message.
step() {
  post "$1"
  shift
  left=$((deadline - $(date +%s)))
  [ "$left" -gt 0 ] || { echo "no time left of $timeout_s s" >"$log"; return 1; }
  timeout "$left" "$@" >"$log" 2>&1 </dev/null
}
# What pip or Python said last, which names what is missing.
problem() {
  found=$(grep -E '^(ERROR|error|.*Error):? ' "$log" | tail -n 1)
  [ -n "$found" ] || found=$(tail -n 1 "$log")
  echo "${found:-no output within $timeout_s s}"
}
pip() { "$venv/bin/python" -m pip "$@"; }
install() {
  what=$1
  shift
  step "$what" "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-cache-dir --quiet \
    --timeout "$CONNECT_TIMEOUT_S" "$@"
}

deadline=$(($(date +%s) + timeout_s))

# An image that brings this version needs nothing, unless the handler has requirements of its own.
if [ ! -s "$lib/requirements.txt" ] && [ "$(windlass --version 2>/dev/null)" = "windlass $version" ]; then
  echo "the image has windlass $version"
  exit 0
fi

seen=""
python=""
for name in python3 python python3.14 python3.13 python3.12 python3.11 /opt/conda/bin/python3; do
  path=$(command -v "$name") || continue
  if "$path" -c "import sys; sys.exit(sys.version_info < ($MIN_PYTHON))" 2>/dev/null; then
    python=$path
    break
  fi
  seen="$seen, $name is $("$path" -c 'import platform; print(platform.python_version())' 2>&1 | tail -n 1)"
done
[ -n "$python" ] || fail PYTHON_MISSING "the image has no Python 3.11 or newer${seen}"

# The lock lives as long as any process of this run has the file open: pip keeps it if this shell is killed.
exec 9>"$lib/lock" || fail INSTALL_FAILED "cannot write to $lib"
timeout "$timeout_s" "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)' ||
  fail INSTALL_FAILED "another installation on this pod did not end within $timeout_s s"
log=$lib/install.log
# Private, as requirements.txt is: an address of a package index may contain a token.
(umask 077 && : >"$log") || fail INSTALL_FAILED "cannot write to $lib"
asked="$version $(cat "$lib/requirements.txt" 2>/dev/null)"
if [ -e "$complete" ] && [ "$(cat "$complete")" = "$asked" ]; then
  echo "windlass $version is installed"
  exit 0
fi

# --clear: what an interrupted run left may be incomplete, although pip would take it for installed.
set -- --without-pip --clear
[ ! -e "$lib/has-image-packages" ] || set -- "$@" --system-site-packages
step "creating the Python environment" "$python" -m venv "$@" "$venv" || fail VENV_FAILED "$(problem)"
# An image may have pip without ensurepip, as Debian's python3-pip.
step "preparing pip" "$venv/bin/python" -m ensurepip --default-pip || true
pip --version >/dev/null 2>&1 ||
  fail VENV_FAILED "Python of the image has no pip and no ensurepip: install python3-venv in the image"

step "fetching windlass from the control plane" "$python" "$lib/fetch_wheel.py" "$join" "$lib/wheels" ||
  fail WHEEL_UNAVAILABLE "$(problem)"
wheel=$(tail -n 1 "$log")

# The image may have the same version for another Python, which would count as installed.
install "installing $(basename "$wheel")" --no-index --no-deps --force-reinstall "$wheel" ||
  fail INSTALL_FAILED "$(problem)"
install "installing what windlass needs" -r "$lib/index.txt" "$wheel" || fail INSTALL_FAILED "$(problem)"
step "checking the installation" "$venv/bin/windlass" --version || fail INSTALL_FAILED "$(problem)"
if [ -s "$lib/requirements.txt" ]; then
  # With the wheel, so that a requirement that contradicts one of Windlass is an error.
  install "installing the requirements" "$wheel" -r "$lib/requirements.txt" || fail REQUIREMENTS_FAILED "$(problem)"
fi
(umask 077 && printf '%s\n' "$asked" >"$complete.new") || fail INSTALL_FAILED "cannot write to $lib"
mv "$complete.new" "$complete"
echo "installed windlass $version"
