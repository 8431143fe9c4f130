#!/usr/bin/env bash
# promtool, which tries the alert rules of deploy/monitoring, from Debian's package: unpacked, not installed, so that no
# Prometheus is started here. Ends quietly where there is one, or no Debian.
set -euo pipefail
bin="$(cd "$(dirname "$0")/.." && pwd)/.venv/bin"
if command -v promtool >/dev/null || [ -x "$bin/promtool" ]; then
    exit 0
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
apt-get download prometheus >/dev/null 2>&1 || { apt-get update -qq && apt-get download prometheus >/dev/null 2>&1; }
dpkg-deb --extract prometheus_*.deb unpacked
mkdir -p "$bin"
cp unpacked/usr/bin/promtool "$bin/"
