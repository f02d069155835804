#!/bin/sh
# What some tests use from the system: PostgreSQL 15, pgbouncer, OpenSSH, systemd-analyze, shellcheck, cloud-init,
# promtool, Chromium, Hetzner's own client. Root on Debian gets them; elsewhere the tests that need them are skipped and say so.
set -eu
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || exit 0
missing=""
command -v pgbouncer >/dev/null || missing="$missing pgbouncer"
command -v hcloud >/dev/null || missing="$missing hcloud-cli"
command -v sshd >/dev/null || [ -x /usr/sbin/sshd ] || missing="$missing openssh-server"
command -v ssh >/dev/null || missing="$missing openssh-client"
ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || missing="$missing postgresql"
command -v systemd-analyze >/dev/null || missing="$missing systemd"
command -v shellcheck >/dev/null || missing="$missing shellcheck"
command -v chromium >/dev/null || command -v google-chrome >/dev/null || missing="$missing chromium"
# An installed cloud-init would set up this machine at its next boot: it is only unpacked, where the tests look for it.
cloud_init="${XDG_CACHE_HOME:-$HOME/.cache}/windlass-tests/cloud-init"
command -v cloud-init >/dev/null || [ -d "$cloud_init" ] || unpack="cloud-init python3-configobj python3-six \
  python3-jsonpatch python3-json-pointer python3-oauthlib"
# Of Prometheus only the program that checks rules: installed, the package would start a server.
promtool="${XDG_CACHE_HOME:-$HOME/.cache}/windlass-tests/promtool"
command -v promtool >/dev/null || [ -x "$promtool" ] || rules="prometheus"
[ -n "$missing${unpack:-}${rules:-}" ] || exit 0
echo "installing for the tests:$missing${unpack:+ cloud-init (unpacked only)}${rules:+ promtool (unpacked only)}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >/dev/null 2>&1 || true
# RUNLEVEL=1 keeps Debian's packages from starting servers of their own: the tests start theirs.
[ -z "$missing" ] || RUNLEVEL=1 apt-get install -y -qq --no-install-recommends $missing >/dev/null 2>&1 ||
  echo "could not install$missing: the tests that need them will be skipped"
[ -z "${unpack:-}${rules:-}" ] && exit 0
download=$(mktemp -d)
trap 'rm -rf "$download"' EXIT
if [ -n "${rules:-}" ]; then
  if (cd "$download" && apt-get download -qq $rules && dpkg -x prometheus_*.deb rules && rm prometheus_*.deb) \
    >/dev/null 2>&1; then
    mkdir -p "$(dirname "$promtool")"
    mv "$download/rules/usr/bin/promtool" "$promtool"
  else
    echo "could not unpack promtool: the test that needs it will be skipped"
  fi
  rm -rf "$download/rules"
fi
[ -z "${unpack:-}" ] && exit 0
# Whole or not at all: a half unpacked one would be found next time and not work.
if (cd "$download" && apt-get download -qq $unpack && for file in *.deb; do dpkg -x "$file" unpacked || exit 1; done) \
  >/dev/null 2>&1; then
  mkdir -p "$(dirname "$cloud_init")"
  mv "$download/unpacked" "$cloud_init"
else
  echo "could not unpack cloud-init: the test that needs it will be skipped"
fi
