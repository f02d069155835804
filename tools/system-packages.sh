#!/bin/sh
# What some tests use from the system: PostgreSQL 15, pgbouncer, OpenSSH, systemd-analyze, shellcheck, cloud-init,
# promtool, kubectl, nginx and Caddy, Chromium, ffmpeg, buildah, busybox, Hetzner's own client. Root on Debian gets them;
# elsewhere the tests that need them are skipped and say so.
set -eu
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || exit 0
missing=""
command -v pgbouncer >/dev/null || missing="$missing pgbouncer"
command -v hcloud >/dev/null || missing="$missing hcloud-cli"
command -v sshd >/dev/null || [ -x /usr/sbin/sshd ] || missing="$missing openssh-server"
command -v ssh >/dev/null || missing="$missing openssh-client"
ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || missing="$missing postgresql"
command -v ffmpeg >/dev/null || missing="$missing ffmpeg"
command -v systemd-analyze >/dev/null || missing="$missing systemd"
command -v buildah >/dev/null || missing="$missing buildah"
command -v busybox >/dev/null || missing="$missing busybox"
command -v shellcheck >/dev/null || missing="$missing shellcheck"
command -v chromium >/dev/null || command -v google-chrome >/dev/null || missing="$missing chromium"
# An installed cloud-init would set up this machine at its next boot: it is only unpacked, where the tests look for it.
cloud_init="${XDG_CACHE_HOME:-$HOME/.cache}/windlass-tests/cloud-init"
command -v cloud-init >/dev/null || [ -d "$cloud_init" ] || unpack="cloud-init python3-configobj python3-six \
  python3-jsonpatch python3-json-pointer python3-oauthlib"
# Only the programs that check configurations: installed, these packages would start servers.
programs="${XDG_CACHE_HOME:-$HOME/.cache}/windlass-tests"
checkers=""
for pair in prometheus:promtool kubernetes-client:kubectl caddy:caddy nginx:nginx; do
  command -v "${pair#*:}" >/dev/null || [ -x "$programs/${pair#*:}" ] || checkers="$checkers $pair"
done
[ -n "$missing${unpack:-}$checkers" ] || exit 0
echo "installing for the tests:$missing${unpack:+ cloud-init (unpacked only)}${checkers:+$checkers (unpacked only)}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >/dev/null 2>&1 || true
# RUNLEVEL=1 keeps Debian's packages from starting servers of their own: the tests start theirs.
[ -z "$missing" ] || RUNLEVEL=1 apt-get install -y -qq --no-install-recommends $missing >/dev/null 2>&1 ||
  echo "could not install$missing: the tests that need them will be skipped"
[ -z "${unpack:-}$checkers" ] && exit 0
download=$(mktemp -d)
trap 'rm -rf "$download"' EXIT
for pair in $checkers; do
  if (cd "$download" && apt-get download -qq "${pair%%:*}" && dpkg -x "${pair%%:*}"_*.deb one && rm ./*.deb) \
    >/dev/null 2>&1; then
    mkdir -p "$programs"
    for folder in usr/bin usr/sbin; do
      [ ! -x "$download/one/$folder/${pair#*:}" ] || mv "$download/one/$folder/${pair#*:}" "$programs/${pair#*:}"
    done
  else
    echo "could not unpack ${pair#*:}: the test that needs it will be skipped"
  fi
  rm -rf "$download/one"
done
[ -z "${unpack:-}" ] && exit 0
# Whole or not at all: a half unpacked one would be found next time and not work.
if (cd "$download" && apt-get download -qq $unpack && for file in *.deb; do dpkg -x "$file" unpacked || exit 1; done) \
  >/dev/null 2>&1; then
  mkdir -p "$(dirname "$cloud_init")"
  mv "$download/unpacked" "$cloud_init"
else
  echo "could not unpack cloud-init: the test that needs it will be skipped"
fi
