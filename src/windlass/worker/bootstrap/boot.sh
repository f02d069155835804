#!/bin/sh
# Turns this machine into a worker: `boot.sh USER`. cloud-init runs it once, as root. It is safe to run again.
#
# The settings of the fleet are files in the same folder: images, requirements.txt, setup/*.sh. Only root may write
# there, because this script runs them as root. Tests set WINDLASS_ROOT as a prefix for every path.
set -eu

user=$1
root=${WINDLASS_ROOT:-}
etc=$root/etc/windlass
lib=$root/usr/local/lib/windlass
units=$root/etc/systemd/system
state=$root/var/lib/windlass
venv=$root/opt/windlass
# An image that takes longer is pulled by the first task that needs it. A setup command that takes longer is killed.
PULL_TIMEOUT_S=300
SETUP_TIMEOUT_S=900
PIP_TIMEOUT_S=600
MAX_ATTEMPTS=4

step=starting
say() { echo "windlass-boot $(date -u +%H:%M:%S) $*"; }
# Tells the control plane what this machine does: its spawn timeout then begins again. Nothing depends on the answer.
send() { python3 "$lib/fetch_wheel.py" "$etc/join.json" --output "$root/var/log/cloud-init-output.log" --step "$@" >/dev/null 2>&1; }
post() { send "$1" & }
begin() { step=$1; say "$1"; post "$1"; }
report() {
  code=$?
  [ "$code" = 0 ] && return
  say "FAILED while $step (exit code $code): this machine will not join"
  sleep 1
  # The control plane replaces the machine when it knows. Otherwise it waits for the spawn timeout.
  for pause in 2 10 30 0; do
    send "failed while $step" --failed && return
    sleep "$pause"
  done
}
trap report EXIT

# Waits 1, 4 and 9 seconds plus a random fraction, so that machines that boot together do not retry together.
retry() {
  attempt=1
  until "$@"; do
    [ "$attempt" -lt "$MAX_ATTEMPTS" ] || return 1
    say "attempt $attempt of $MAX_ATTEMPTS failed, retrying: $1"
    sleep "$((attempt * attempt)).$(od -An -N2 -tu2 /dev/urandom | tr -d ' ')"
    attempt=$((attempt + 1))
  done
}

# Each attempt is progress: a large image may need several.
pull_image() {
  post "pulling $1"
  timeout "$PULL_TIMEOUT_S" docker pull --quiet "$1" </dev/null
}

pull_images() {
  while IFS= read -r image || [ -n "$image" ]; do
    if retry pull_image "$image"; then
      say "pulled $image"
    else
      say "could not pull $image, continuing without it"
    fi
  done <"$lib/images"
}

begin "locking root's password"
# For a machine without an SSH key, a provider generates a root password and mails it. SSH keys still work.
passwd -l root >/dev/null

begin "creating the user $user"
id "$user" >/dev/null 2>&1 ||
  useradd --system --user-group --home-dir /var/lib/windlass --shell /usr/sbin/nologin "$user"
group=$(id -gn "$user")
mkdir -p "$state"
# -h: when this runs again, the worker may have replaced a file by a link.
chown -h "$user:$group" "$state" "$etc" "$etc/join.json"
chmod 0750 "$state"
chmod 0700 "$etc"

pulls=""
if [ -s "$lib/images" ]; then
  begin "pulling images in the background"
  pull_images &
  pulls=$!
fi

begin "creating the Python environment"
# cloud-init may have failed to install the packages. Only this one is indispensable.
python3 -c 'import ensurepip' 2>/dev/null ||
  retry apt-get -o DPkg::Lock::Timeout=120 install -y -qq --no-install-recommends python3-venv
[ -x "$venv/bin/pip" ] || python3 -m venv "$venv"

begin "fetching windlass from the control plane"
wheel=$(python3 "$lib/fetch_wheel.py" "$etc/join.json" "$lib/wheels")

begin "installing $(basename "$wheel")"
set -- "$wheel"
[ ! -s "$lib/requirements.txt" ] || set -- "$@" -r "$lib/requirements.txt"
retry timeout "$PIP_TIMEOUT_S" "$venv/bin/pip" install --quiet --disable-pip-version-check --no-input "$@"

for piece in "$lib"/setup/*.sh; do
  [ -e "$piece" ] || continue
  begin "running the setup command $(basename "$piece" .sh)"
  (cd "$state" && PATH=$venv/bin:$PATH timeout "$SETUP_TIMEOUT_S" sh -e "$piece" </dev/null)
done

if [ -n "$pulls" ]; then
  begin "waiting for the images"
  wait "$pulls" || say "pulling images failed, continuing without the rest"
fi

begin "starting the worker"
systemctl daemon-reload
if [ -e "$units/windlass-ray.service" ]; then
  systemctl enable --now windlass-ray.service
fi
systemctl enable --now windlass-worker.service
say "done: the worker joins now"
