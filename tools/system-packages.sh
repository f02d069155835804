#!/bin/sh
# What some tests use from the system: PostgreSQL 15, pgbouncer, Hetzner's own client and OpenSSH. Root on Debian gets
# them; elsewhere the tests that need them are skipped and say so.
set -eu
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || exit 0
missing=""
command -v pgbouncer >/dev/null || missing="$missing pgbouncer"
command -v hcloud >/dev/null || missing="$missing hcloud-cli"
command -v sshd >/dev/null || [ -x /usr/sbin/sshd ] || missing="$missing openssh-server"
command -v ssh >/dev/null || missing="$missing openssh-client"
ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || missing="$missing postgresql"
[ -n "$missing" ] || exit 0
echo "installing for the tests:$missing"
export DEBIAN_FRONTEND=noninteractive
# RUNLEVEL=1 keeps Debian's packages from starting servers of their own: the tests start theirs.
{ apt-get update -qq && RUNLEVEL=1 apt-get install -y -qq --no-install-recommends $missing; } >/dev/null 2>&1 ||
  echo "could not install$missing: the tests that need them will be skipped"
