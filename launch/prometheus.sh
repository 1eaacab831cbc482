#!/usr/bin/env bash
# Monitors one run with Prometheus, in the foreground, on 127.0.0.1. Start it on a machine that can reach the run's nodes.
#
#   bash launch/prometheus.sh runs/my-run
#
#   PROMETHEUS         the program                               (prometheus)
#   PROMETHEUS_PORT    port on 127.0.0.1                         (9090)
#   PROMETHEUS_DATA    its database, not on a network file system  (RUN/logs/prometheus/data)
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
if [[ $# -ne 1 || ! -d $1 ]]; then
    echo "prometheus: error: give the directory of a run; got ${*:-nothing}" >&2
    exit 2
fi
program="${PROMETHEUS:-prometheus}"
if ! command -v "$program" >/dev/null; then
    echo "prometheus: error: $program is not installed; install it (Debian: apt-get install prometheus), or set PROMETHEUS" >&2
    exit 2
fi
folder="$1/logs/prometheus"
mkdir -p -- "$folder"
cp -- "$here/monitoring/prometheus.yml" "$folder/prometheus.yml"
exec "$program" --config.file="$folder/prometheus.yml" --storage.tsdb.path="${PROMETHEUS_DATA:-$folder/data}" \
    --web.listen-address="127.0.0.1:${PROMETHEUS_PORT:-9090}"
